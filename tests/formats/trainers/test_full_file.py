"""Whole checkpoints in one file of `torch.save`."""

from __future__ import annotations

import argparse
import os
import zipfile

import pytest
import torch

import shardkit
from shardkit import formats
from shardkit.errors import SourceError
from shardkit.formats.registry import format_of
from shardkit.formats.trainers.full_file import is_full_file, open_full_file
from tests.formats.reading import contents, expected
from tests.operations.consolidate.checkpoints import assert_bit_equal, load


def test_a_flat_state_dict(tmp_path, weights):
    path = str(tmp_path / "pytorch_model.pt")
    torch.save(weights, path)
    assert format_of(path) == "full-file"
    checkpoint = formats.open(path)
    assert contents(checkpoint) == expected(weights)
    assert checkpoint.contents.roots == {"model": ()}
    assert checkpoint.catalog.paths == {name: (name,) for name in weights}


def test_lightning(tmp_path, weights, adam):
    """What lightning 2.6 puts into a checkpoint."""
    path = str(tmp_path / "epoch=0-step=2.ckpt")
    state = {f"net.{name}": tensor for name, tensor in weights.items()}
    torch.save(
        {
            "epoch": 0,
            "global_step": 2,
            "pytorch-lightning_version": "2.6.6",
            "state_dict": state,
            "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
            "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_path": "/x", "kth": None}},
            "optimizer_states": [adam],
            "lr_schedulers": [],
            "hyper_parameters": {"config": argparse.Namespace(lr=1)},
        },
        path,
    )
    assert format_of(path) == "full-file"
    checkpoint = formats.open(path)
    assert checkpoint.writer == "Lightning (one file)"
    assert checkpoint.contents.roots == {"model": ("state_dict",), "optimizer": ("optimizer_states",)}
    found = contents(checkpoint)
    prefixed = {f"state_dict.{name}": tensor for name, tensor in state.items()}
    assert {name: found[name] for name in prefixed} == expected(prefixed)
    assert checkpoint.catalog.paths is not None
    assert checkpoint.catalog.paths["state_dict.net.lm_head.weight"] == ("state_dict", "net.lm_head.weight")
    step = "optimizer_states.0.state.lm_head.weight.exp_avg"
    assert checkpoint.catalog.paths[step] == ("optimizer_states", 0, "state", "lm_head.weight", "exp_avg")
    # One line for what holds no tensor, not one for every number in it.
    assert {"loops", "callbacks", "hyper_parameters", "epoch"} < set(checkpoint.catalog.objects)
    assert ("loops", "not a tensor") in checkpoint.remarks.skipped


def test_averaged_weights(tmp_path, weights):
    path = str(tmp_path / "last.ckpt")
    torch.save(
        {
            "pytorch-lightning_version": "2.6.6",
            "state_dict": {f"net.{name}": tensor for name, tensor in weights.items()},
            "current_model_state": {f"net.{name}": tensor + 1 for name, tensor in weights.items()},
            "averaging_state": {"n_averaged": torch.tensor(3)},
        },
        path,
    )
    checkpoint = open_full_file(path)
    assert checkpoint.contents.roots == {
        "model": ("state_dict",),
        "current": ("current_model_state",),
        "ema": ("state_dict",),
    }
    for kind in ("model", "ema"):
        shardkit.consolidate(path, tmp_path / kind, weights=kind)
    assert_bit_equal(load(tmp_path / "ema"), load(tmp_path / "model"))
    shardkit.consolidate(path, tmp_path / "current", weights="current")
    current = {name: tensor + 1 for name, tensor in load(tmp_path / "model").items()}
    assert_bit_equal(load(tmp_path / "current"), current)
    assert any("running average" in note for note in checkpoint.remarks.notes)
    content = torch.load(path, weights_only=True)
    del content["current_model_state"]
    torch.save(content, path)
    assert any("running average" in note for note in open_full_file(path).remarks.notes)


def test_a_trainers_dict(tmp_path, weights, adam):
    """Names tell where the model is."""
    path = str(tmp_path / "ckpt.pth")
    torch.save({"model": weights, "optimizer": adam, "step": 3}, path)
    checkpoint = open_full_file(path)
    assert checkpoint.contents.roots == {}
    assert checkpoint.writer == "torch.save"
    assert {name for name in checkpoint.catalog.tensors if name.startswith("model.")} == {
        f"model.{name}" for name in weights
    }
    assert checkpoint.select(["model.lm_head.weight"]).tensors.keys() == {"model.lm_head.weight"}


def test_an_optimizers_odd_tensors_do_not_stand_in_the_way(tmp_path, weights):
    path, odd = str(tmp_path / "a.pt"), torch.ones(2, 2).to_sparse()
    torch.save({"model": weights, "optimizer": {"state": {0: odd}}}, path)
    checkpoint = open_full_file(path)
    assert set(checkpoint.catalog.tensors) == {f"model.{name}" for name in weights}
    what = "a.pt: torch's sparse tensor, which is made of indices and values"
    assert checkpoint.remarks.skipped == (("optimizer.state.0", f"its bytes are not its values: {what}"),)
    torch.save({"model": {**weights, "odd": odd}}, path)
    with pytest.raises(SourceError, match="1 tensor is an object of a class") as caught:
        open_full_file(path)
    assert caught.value.problems == (f"model.odd: {what}",)


def test_two_tensors_of_one_name(tmp_path):
    path = str(tmp_path / "a.pt")
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, path)
    with pytest.raises(SourceError, match="different") as caught:
        open_full_file(path)
    assert caught.value.problems == ("a.b: a.pt: two tensors of one name",)


@pytest.mark.dist
def test_a_part_of_a_model_is_no_model(rank_files):
    with pytest.raises(SourceError, match="do not make up the tensor"):
        open_full_file(str(rank_files / "fsdp2" / "model_world_size_4_rank_0.pt"))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([torch.ones(1)], "no dict"),
        ({"a": 1}, "no tensors"),
        ({"a": torch.ones(2).to_sparse()}, "of a class whose values"),
        ({"a": torch.ones(2, device="meta")}, "are not the values"),
    ],
)
def test_what_is_no_state_dict(tmp_path, value, reason):
    path = str(tmp_path / "a.pt")
    torch.save(value, path)
    with pytest.raises(SourceError, match=reason):
        open_full_file(path)


def test_files_of_before_torch_1_6_are_told(tmp_path, weights):
    path = str(tmp_path / "old.pt")
    torch.save(weights, path, _use_new_zipfile_serialization=False)
    assert format_of(path) == "full-file"
    with pytest.raises(SourceError, match=r"before torch 1\.6") as caught:
        formats.open(path)
    assert "save it again" in str(caught.value)


def test_other_files(tmp_path):
    text, pipe, archive = tmp_path / "a.txt", tmp_path / "pipe", tmp_path / "a.zip"
    text.write_text("PK, but not really")
    os.mkfifo(pipe)
    with zipfile.ZipFile(archive, "w") as out:
        out.writestr("readme.txt", "hello")
    for path in (text, pipe, archive, tmp_path, tmp_path / "nothing"):
        assert not is_full_file(str(path))
