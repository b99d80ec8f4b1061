"""Lightning's sharded checkpoints: roots from its strategies, and what meta.pt says without being run."""

from __future__ import annotations

import os
import pathlib

import pytest
import torch

from shardkit.formats.trainers.lightning import is_lightning, open_lightning

TRAINER = {
    "epoch": 0,
    "global_step": 2,
    "pytorch-lightning_version": "2.6.6",
    "callbacks": {
        "ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.5), "dirpath": "/x"}
    },
    "hyper_parameters": {"lr": 0.1, "ema_decay": 0.99},
}


@pytest.fixture
def saved(save_dcp, weights, adam, tmp_path):
    """Return a function that writes a checkpoint under some root, with a meta.pt."""

    def save(root, meta, *optimizers):
        module = {f"net.{name}": tensor for name, tensor in weights.items()}
        state = {root: module, **dict.fromkeys(optimizers, adam)}
        directory = save_dcp(state, tmp_path / "epoch=0-step=2.ckpt")
        torch.save(meta, directory / "meta.pt")
        return str(directory)

    return save


FABRIC = {"step": 2, "path": pathlib.PurePosixPath("x")}


@pytest.mark.parametrize(
    ("meta", "names", "writer", "roots"),
    [
        (TRAINER, ["model", "optimizer_0"], "FSDPStrategy", ["model", "optimizer"]),
        (TRAINER, ["state_dict", "optimizer_0"], "ModelParallelStrategy", ["model", "optimizer"]),
        (TRAINER, ["model", "optimizer_0", "optimizer_1"], "FSDPStrategy", ["model", "optimizer", "optimizer_1"]),
        (FABRIC, ["model", "optimizer"], "Fabric", ["model", "optimizer"]),
        (FABRIC, ["policy"], "Fabric", []),  # keys of one's own
    ],
)  # fmt: skip
def test_writers_and_their_roots(saved, meta, names, writer, roots):
    path = saved(names[0], meta, *names[1:])
    assert is_lightning(path)
    found = open_lightning(path)
    assert (found.format, found.writer, found.path) == ("lightning", f"Lightning {writer}", path)
    assert dict(found.contents.roots) == {root: (name,) for root, name in zip(roots, names, strict=False)}
    assert f"{names[0]}.net.lm_head.weight" in found.catalog.tensors
    assert not found.contents.refused_weights
    assert [name for name, _ in found.remarks.skipped] == ["meta.pt"]


@pytest.mark.parametrize(
    "meta",
    [
        TRAINER | {"callbacks": {"EMA": {"decay": 0.99, "weights": {"net.w": torch.ones(3)}}}},
        TRAINER | {"callbacks": {"EMACallback{'decay': 0.9}": {"state": [torch.ones(3)]}}},
        TRAINER | {"ema_state_dict": {"net.w": torch.ones(3)}},
        {"step": 1, "model_ema": {"net.w": torch.ones(3)}},
    ],
)
def test_ema_in_meta_is_refused(saved, meta):
    found = open_lightning(saved("model", meta))
    assert "rank 0" in found.contents.refused_weights["ema"]
    assert any("cannot be recovered" in note for note in found.remarks.notes)


def test_decays_and_likenesses_are_no_ema(saved):
    meta = TRAINER | {
        "callbacks": {"EMA": {"decay": 0.99, "num_updates": torch.tensor(3)}},
        "schema": {"w": torch.ones(3)},
        "demand": {"w": torch.ones(3)},
    }
    assert not open_lightning(saved("model", meta)).contents.refused_weights


def test_weight_averaging_saves_the_average(saved):
    meta = TRAINER | {
        "current_model_state": {"net.w": torch.ones(3)},
        "averaging_state": {"n_averaged": torch.tensor(2)},
    }
    found = open_lightning(saved("state_dict", meta))
    assert list(found.contents.refused_weights) == ["current"]
    assert any("running average" in note for note in found.remarks.notes)
    del meta["current_model_state"]  # a file made smaller
    found = open_lightning(saved("model", meta))
    assert not found.contents.refused_weights
    assert any("running average" in note for note in found.remarks.notes)


def test_an_average_of_somebodys_own_beside_the_current_weights(saved):
    found = open_lightning(saved("model", TRAINER | {"averaging_state": {"net.w": torch.ones(3)}}))
    assert "the EMA is averaging_state" in found.contents.refused_weights["ema"]
    assert any("averaging_state) that cannot be recovered" in note for note in found.remarks.notes)


class Evil:
    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self):
        return (os.mkdir, (self.target,))


def test_meta_is_never_executed(saved, tmp_path):
    target = str(tmp_path / "executed")
    found = open_lightning(saved("model", TRAINER | {"callbacks": {"x": Evil(target)}}))
    assert found.writer == "Lightning FSDPStrategy"
    assert not os.path.exists(target)


def test_damaged_meta_does_not_stand_in_the_way(saved):
    path = saved("model", TRAINER)
    with open(os.path.join(path, "meta.pt"), "wb") as file:
        file.write(b"garbage")
    found = open_lightning(path)
    assert found.contents.roots["model"] == ("model",)
    assert "not read" in dict(found.remarks.skipped)["meta.pt"]


def test_plain_dcp_is_not_lightning(save_dcp, weights, tmp_path):
    assert not is_lightning(str(save_dcp(weights, tmp_path / "c")))
    assert not is_lightning(str(tmp_path / "nothing"))
