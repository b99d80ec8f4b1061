"""Models of diffusers, as its own save_pretrained wrote them (tests/data/diffusers/make.py), and those of no library."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardkit.cli.consolidate import render
from shardkit.errors import LayoutError, SourceError
from shardkit.operations.consolidate import consolidate
from shardkit.operations.diff import diff
from shardkit.operations.inspect import inspect
from shardkit.operations.preshard import preshard
from shardkit.operations.reshard import reshard
from shardkit.operations.verify import verify
from tests.contents import json_of
from tests.operations.consolidate.checkpoints import CONFIG, assert_bit_equal, hub, load, save, weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")

DATA = Path(__file__).parents[2] / "data/diffusers"
WHOLE = DATA / "whole"
STEM = "diffusion_pytorch_model"
LOAD = "diffusers.UNet2DConditionModel.from_pretrained("


def trained() -> dict[str, torch.Tensor]:
    return {name: value + 1 for name, value in load_file(WHOLE / f"{STEM}.safetensors").items()}


def variant(directory: Path) -> Path:
    shutil.copytree(WHOLE, directory)
    (directory / f"{STEM}.safetensors").rename(directory / f"{STEM}.fp16.safetensors")
    return directory


def without_weights(directory: Path) -> Path:
    shutil.copytree(WHOLE, directory)
    (directory / f"{STEM}.safetensors").unlink()
    return directory


@pytest.mark.parametrize("kind", ["whole", "sharded", "sharded-fp16", "variant", "config alone"])
def test_the_output_has_the_files_of_the_base(tmp_path: Path, kind: str) -> None:
    made = {"variant": variant, "config alone": without_weights}
    base = made[kind](tmp_path / "base") if kind in made else DATA / kind
    checkpoint = save({"model": trained()}, tmp_path / "step-1")
    result = consolidate(checkpoint, tmp_path / "out", base=base, dtype="keep")
    weights = {f"{STEM}.safetensors"} if kind == "config alone" else set()
    assert {*os.listdir(result.output)} == {*os.listdir(base)} | weights
    assert json_of(tmp_path / "out") == json_of(base)
    assert_bit_equal(load(result.output), trained())
    said = "" if kind not in ("variant", "sharded-fp16") else ", variant='fp16'"
    assert f"  {LOAD}{result.output!r}{said})" in render(result)
    if kind == "whole":
        again = consolidate(checkpoint, tmp_path / "out", base=base, overwrite=True)
        assert again.file_names == result.file_names
    other = consolidate(checkpoint, tmp_path / "fp32", base=base, dtype="fp32")  # no variant is of this dtype
    assert other.file_names == (f"{STEM}.safetensors",)
    assert f"  {LOAD}{other.output!r})" in render(other)


def test_names_are_compared(tmp_path: Path) -> None:
    wrong = trained()
    wrong["conv_in.weight"] = wrong["conv_in.weight"][:1].clone()
    del wrong["conv_out.bias"]
    wrong["junk"] = torch.ones(3)
    for base in (WHOLE, variant(tmp_path / "variant")):
        with pytest.raises(LayoutError, match="3 differences"):
            consolidate(save({"model": wrong}, tmp_path / f"of {base.name}"), tmp_path / "out", base=base)
    assert inspect(WHOLE).model_class == "UNet2DConditionModel"


def test_a_profile_of_transformers(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="a class of diffusers, and the trainer loads"):
        preshard(WHOLE, tmp_path / "out", world_size=2, layout="declared", profile="transformers")


def test_there_and_back(tmp_path: Path) -> None:
    """A pre-sharded directory has the config of its source, and no other trace of the library."""
    for kind in ("whole", "sharded"):
        shards = preshard(DATA / kind, tmp_path / f"{kind}-shards", world_size=2, layout="declared")
        result = consolidate(shards.output, tmp_path / kind)
        assert {*os.listdir(result.output)} == {"config.json", f"{STEM}.safetensors"}
        assert (tmp_path / kind / "config.json").read_bytes() == (DATA / kind / "config.json").read_bytes()
        assert (tmp_path / kind / f"{STEM}.safetensors").read_bytes()
        assert f"  {LOAD}{result.output!r})" in render(result)


@pytest.mark.parametrize(
    "config",
    [
        {"hidden": 4},
        {"architecture": "net", "num_classes": 0},
        {"_class_name": "a b"},
        {"auto_map": {"AutoModel": "own.Net"}},  # AutoConfig finds no class for it
    ],
)
def test_a_config_of_no_library(tmp_path: Path, config: dict[str, object]) -> None:
    """PyTorchModelHubMixin hands each key to the class, and timm has keys of its own: nothing is added to either."""
    model = {"layers.0.weight": torch.ones(2, 2), "b": torch.zeros(3)}
    base = hub(tmp_path / "hub", model, config)
    checkpoint = save({"model": model}, tmp_path / "step-1")
    shards = preshard(base, tmp_path / "shards", world_size=2, layout="declared").output
    ways = [(checkpoint, {"base": base}), (checkpoint, {"base": base, "dtype": "bf16"})]
    for number, (source, options) in enumerate([*ways, (base, {}), (shards, {})]):
        result = consolidate(source, tmp_path / f"out{number}", **options)
        assert json_of(result.output) == config
        assert result.warnings == ()
        assert "  safetensors.torch.load_file(" in "\n".join(render(result))


def test_a_model_with_code_of_its_own(tmp_path: Path) -> None:
    """transformers has no such class; an `AutoModel...` loads it, and runs the code."""
    code = {"AutoConfig": "own.NetConfig", "AutoModelForCausalLM": "own.Net"}
    config = {"architectures": ["Net"], "auto_map": code}
    source = hub(tmp_path / "source", {"weight": torch.ones(2)}, config)
    result = consolidate(source, tmp_path / "out", ask_class=False)
    line = f"transformers.AutoModelForCausalLM.from_pretrained({result.output!r}, trust_remote_code=True)"
    assert f"  {line}" in render(result)


@pytest.mark.parametrize(
    "name",
    "open_clip_model.safetensors weights.safetensors tf_model.h5 flax_model.msgpack q4.gguf net.onnx net.keras".split(),
)
def test_weights_of_an_unknown_name(tmp_path: Path, name: str) -> None:
    """By its ending it holds weights, so that silence would say that they had been compared."""
    base, checkpoint = without_weights(tmp_path / "base"), save({"model": trained()}, tmp_path / "step-1")
    shutil.copy(WHOLE / f"{STEM}.safetensors", base / name)
    (base / "optimizer.pt").touch()
    result = consolidate(checkpoint, tmp_path / "out", base=base)
    (warning,) = result.warnings
    assert warning.startswith(f"names were not compared: {name}: ")
    with pytest.raises(SourceError, match="1 warning, and --strict makes each an error") as caught:
        consolidate(checkpoint, tmp_path / "strict", base=base, strict=True)
    assert caught.value.problems == (warning,)
    assert not (tmp_path / "strict").exists()


def test_two_sets_of_weights(tmp_path: Path) -> None:
    base, checkpoint = without_weights(tmp_path / "base"), save({"model": trained()}, tmp_path / "step-1")
    for name in (f"{STEM}.safetensors", "model.safetensors"):
        shutil.copy(WHOLE / f"{STEM}.safetensors", base / name)
    (warning,) = consolidate(checkpoint, tmp_path / "out", base=base).warnings
    assert f"{STEM}.safetensors, model.safetensors" in warning


def test_files_of_a_policy(tmp_path: Path) -> None:
    """lerobot 0.4 normalises by two files beside the policy's weights, each with its settings."""
    base, checkpoint = tmp_path / "base", save({"model": trained()}, tmp_path / "step-1")
    base.mkdir()
    (base / "config.json").write_text('{"type": "act"}')
    shutil.copy(WHOLE / f"{STEM}.safetensors", base / "model.safetensors")
    states = [
        "policy_postprocessor_step_0_unnormalizer_processor.safetensors",
        "policy_preprocessor_step_3_normalizer_processor.safetensors",
    ]
    for name in states:
        save_file({"action.mean": torch.zeros(2)}, base / name)
    settings = ["policy_postprocessor.json", "policy_preprocessor.json", "train_config.json"]
    for name in settings:
        (base / name).write_text("{}")
    result = consolidate(checkpoint, tmp_path / "out", base=base)
    assert [part.what for part in result.skipped] == states
    assert any(", ".join(settings) in note for note in result.notes)
    assert (result.file_names, result.warnings) == (("model.safetensors",), ())


def test_strict_before_the_output_appears(tmp_path: Path) -> None:
    """What a cast makes infinite is known only while bytes move, and what a checkpoint lacks before."""
    wide = {"layers.0.weight": torch.full((2, 2), 1e6)}
    base = hub(tmp_path / "base", wide, {})
    checkpoint = save({"model": wide}, tmp_path / "step-1")
    for call in (
        partial(consolidate, checkpoint, tmp_path / "out", base=base, dtype="fp16"),
        partial(reshard, checkpoint, tmp_path / "out", world_size=2, dtype="fp16"),
    ):
        with pytest.raises(SourceError, match="makes each an error"):
            call(strict=True)
        assert not (tmp_path / "out").exists()
        assert call(overwrite=True).warnings
        shutil.rmtree(tmp_path / "out")
    model = hub(tmp_path / "model", weights(), CONFIG)
    # Not among the model's weight files.
    shutil.copy(model / "model.safetensors", model / "consolidated.safetensors")
    assert verify(model).warnings
    with pytest.raises(SourceError, match="makes each an error"):
        verify(model, strict=True)


def test_one_shard_alone(tmp_path: Path) -> None:
    fp16 = f"{STEM}.fp16-00002-of-00002"
    for kind, name in (("sharded", f"{STEM}-00001-of-00002"), ("sharded-fp16", fp16)):
        shard = DATA / kind / f"{name}.safetensors"
        for call in (
            lambda shard=shard: preshard(shard, tmp_path / "out", world_size=2, layout="declared"),
            lambda shard=shard: consolidate(shard, tmp_path / "out"),
            lambda shard=shard: diff(WHOLE, shard),
            lambda shard=shard: diff(shard, WHOLE),
        ):
            with pytest.raises(SourceError, match=f"is part {name[-10]} of 2 of a model, not a model"):
                call()
        for notes in (inspect(shard).notes, verify(shard).notes):
            assert any(f"is part {name[-10]} of 2 of a model" in note for note in notes)
