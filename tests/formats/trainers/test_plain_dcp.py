"""Trainers on top of plain DCP: the directory around it, and the roots that its names begin with."""

from __future__ import annotations

import json

import pytest
import torch

from shardkit import formats
from shardkit.formats.registry import format_of

CONFIG = json.dumps({"model_type": "qwen2"})


def test_mini_trainer(save_dcp, weights, tmp_path):
    step = tmp_path / "step_2"
    save_dcp({"model": weights}, step / "distributed")
    for name in ("optimizer_rank_0.pt", "rng_state_rank_0.pt", "training_state.pt"):
        (step / name).touch()
    (step / "config.json").write_text(CONFIG)
    assert format_of(str(step)) == "mini-trainer"
    found = formats.open(str(step))
    assert (found.format, found.writer, found.path) == ("mini-trainer", "mini_trainer", str(step))
    assert dict(found.contents.roots) == {"model": ("model",)}
    assert found.contents.assets == (str(step),)
    assert found.remarks.skipped == (
        ("optimizer_rank_0.pt", "optimizer state"),
        ("rng_state_rank_0.pt", "not a part of the weights"),
        ("training_state.pt", "not a part of the weights"),
    )
    assert found.remarks.notes == ()
    (step / "training_state.pt").unlink()
    assert any("training_state.pt is missing" in note for note in formats.open(str(step)).remarks.notes)


def test_olmo_core(save_dcp, weights, adam, tmp_path):
    step = tmp_path / "step100"
    save_dcp({"model": weights, "optim": adam}, step / "model_and_optim")
    (step / "train").mkdir()
    (step / ".metadata.json").write_text("{}")
    (step / "config.json").write_text(json.dumps({"model": {"d_model": 8}}))  # the experiment's
    found = formats.open(str(step))
    assert (found.format, found.writer) == ("olmo-core", "OLMo-core")
    assert dict(found.contents.roots) == {"model": ("model",), "optimizer": ("optim",)}
    assert found.contents.assets == ()
    assert ("train", "not a part of the weights") in found.remarks.skipped


def test_nemo_automodel_dcp(save_dcp, weights, adam, tmp_path):
    step = tmp_path / "epoch_0_step_2"
    save_dcp(weights, step / "model")
    save_dcp({"optim": adam}, step / "optim")
    (step / "model" / ".hf_metadata").mkdir()
    (step / "model" / ".hf_metadata" / "config.json").write_text(CONFIG)
    found = formats.open(str(step))
    assert (found.format, found.writer) == ("nemo-automodel", "NeMo Automodel")
    assert found.contents.assets == (str(step / "model" / ".hf_metadata"),)
    assert set(found.catalog.tensors) == set(weights)
    assert ("optim", "optimizer state") in found.remarks.skipped


@pytest.mark.parametrize("below", ["policy/weights", "policy/weights/model"])
def test_nemo_rl(save_dcp, weights, tmp_path, below):
    step = tmp_path / "step_5"
    save_dcp({"model": weights}, step / below)
    (step / "policy" / "tokenizer").mkdir()
    (step / "policy" / "tokenizer" / "tokenizer.json").write_text("{}")
    (step / "config.yaml").touch()
    found = formats.open(str(step))
    assert (found.format, found.writer) == ("nemo-rl", "NeMo-RL")
    assert found.contents.assets == (str(step / "policy" / "tokenizer"),)


def test_prime_rl(save_dcp, weights, adam, tmp_path):
    step = tmp_path / "step_5"
    save_dcp({"app": {"model": weights, "optimizers": adam, "progress": {"step": 5}}}, step / "trainer")
    (step / "dataloader").mkdir()
    found = formats.open(str(step))
    assert (found.format, found.writer) == ("prime-rl", "prime-rl")
    assert dict(found.contents.roots) == {"model": ("app", "model"), "optimizer": ("app", "optimizers")}


def test_model_in_a_directory_of_its_own(save_dcp, weights, adam, tmp_path):
    save_dcp({"model": weights}, tmp_path / "c" / "model")
    save_dcp({"optim": adam}, tmp_path / "c" / "optimizer")
    found = formats.open(str(tmp_path / "c"))
    assert found.format == format_of(str(tmp_path / "c")) == "dcp"
    assert ("optimizer", "optimizer state") in found.remarks.skipped


HEADS = {
    "composer": ("Composer", {"state": {"model": ..., "optimizers": {"AdamW": ...}}}, ["state", "model"]),
    "areal": ("AReaL", {"dcp": {"model": ..., "optimizer": ...}}, ["dcp", "model"]),
    "recipe": ("torch's AppState recipe", {"app": {"model": ..., "optim": ...}}, ["app", "model"]),
    "prime-rl": (
        "prime-rl",
        {"app": {"model": ..., "optimizers": ..., "progress": {"step": 1}}},
        ["app", "model"],
    ),
    "fms-fsdp": ("fms-fsdp", {"model_state": ..., "optimizer_state": ...}, ["model_state"]),
    "veomni": ("VeOmni", {"model": ..., "optimizer": ...}, ["model"]),
}


@pytest.mark.parametrize("case", HEADS)
def test_names_tell_the_writer(save_dcp, weights, adam, tmp_path, case):
    writer, shape, root = HEADS[case]

    def filled(key, value):
        if value is ...:
            return weights if key.startswith("model") else adam
        return {k: filled(k, v) for k, v in value.items()} if isinstance(value, dict) else value

    directory = save_dcp(filled("", shape), tmp_path / "c")
    if case == "veomni":
        (directory / "extra_state").mkdir()
    assert format_of(str(directory)) == "dcp"
    found = formats.open(str(directory))
    assert (found.format, found.writer) == ("dcp", writer)
    assert found.contents.roots["model"] == tuple(root)
    prefix = ".".join(root)
    assert {f"{prefix}.{name}" for name in weights} <= set(found.catalog.tensors)
    assert found.contents.roots["optimizer"][0] in ("state", "dcp", "app", "optimizer_state", "optimizer")


TITAN = {"tok_embeddings.weight": torch.ones(4, 3), "layers.0.attention.wo.weight": torch.ones(3, 3)}
TUNE = {"layers.0.sa_norm.scale": torch.ones(3), "layers.0.attn.q_proj.weight": torch.ones(3, 3)}
TRAINING = {"optimizer": ..., "train_state": {"step": 2}, "lr_scheduler": {"last_epoch": 1}}


@pytest.mark.parametrize(
    ("state", "writer", "roots"),
    [
        (TITAN | TRAINING, "torchtitan", {"optimizer": ("optimizer",)}),
        (TITAN, "torchtitan", {}),
        ({"model": TUNE}, "torchtune", {}),
    ],
)
def test_names_of_weights_tell_the_writer(save_dcp, adam, tmp_path, state, writer, roots):
    filled = {name: adam if value is ... else value for name, value in state.items()}
    found = formats.open(str(save_dcp(filled, tmp_path / "step-2")))
    assert (found.writer, dict(found.contents.roots)) == (writer, roots)


def test_plain_dcp_keeps_its_writer_and_finds_its_config(save_dcp, weights, tmp_path):
    directory = save_dcp({"model": weights}, tmp_path / "c")
    (directory / "config.json").write_text(CONFIG)
    found = formats.open(str(directory))
    assert (found.format, dict(found.contents.roots), found.contents.assets) == ("dcp", {}, (str(directory),))
    assert found.writer not in {rule[0] for rule in HEADS.values()}


def test_optimizer_directory_says_so(save_dcp, weights, adam, tmp_path):
    save_dcp({"model": weights}, tmp_path / "pytorch_model_fsdp_0")
    found = formats.open(str(save_dcp({"optimizer": adam}, tmp_path / "optimizer_0")))
    assert (
        found.remarks.notes[-1]
        == "this is the state of an optimizer; the model's is pytorch_model_fsdp_0, beside it"
    )


def test_presharded(make_hub, tmp_path):
    import shardkit

    model = make_hub({"a.weight": torch.ones(4, 2)})
    shardkit.preshard(str(model), str(tmp_path / "out"), world_size=2, wrap="none")
    found = formats.open(str(tmp_path / "out"))
    assert (found.format, found.writer) == ("dcp", "shardkit")


def test_link_out_of_a_structure_is_not_followed(save_dcp, weights, tmp_path):
    save_dcp({"model": weights}, tmp_path / "elsewhere")
    (tmp_path / "step_2").mkdir()
    (tmp_path / "step_2" / "distributed").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "step_2" / "training_state.pt").touch()
    assert format_of(str(tmp_path / "step_2")) is None
