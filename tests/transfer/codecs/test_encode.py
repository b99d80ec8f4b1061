"""One stored tensor becomes several, through the seam that all computed tensors take: a codec of the tests (`block_fp8`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
from shardkit.core.catalog import Catalog
from shardkit.formats.derived import derive_base
from shardkit.formats.hub.base import open_base
from shardkit.formats.registry import open_checkpoint
from shardkit.transfer.codecs.derive import derive
from tests.answers import HIGH_WATER, answer_of
from tests.operations.consolidate.checkpoints import assert_bit_equal, hub, load, save
from tests.operations.preshard.test_preshard import loaded
from tests.transfer.codecs.block_fp8 import SCALES, encoded, encoders, quantised
from tests.transfer.codecs.test_dequantize import FP8, by_formula, read

SHAPES = {  # of two of them all sides are multiples of a block
    "q_proj": (300, 200),
    "k_proj": (128, 256),
    "v_proj": (1, 129),
    "o_proj": (257, 7),
    "up_proj": (640, 384),
}
Q = "layers.0.q_proj.weight"


def weights() -> dict[str, torch.Tensor]:
    """Return matrices that are encoded, one with blocks of zeros, and tensors that stay as they are."""
    torch.manual_seed(0)
    state = {f"layers.0.{name}.weight": 3 * torch.randn(shape) for name, shape in SHAPES.items()}
    state["layers.0.up_proj.weight"][128:256] = 0.0
    state |= {"layers.0.norm.weight": torch.randn(384), "embed.weight": torch.randn(50, 16)}
    return {name: value.bfloat16() for name, value in state.items()}


def in_whole(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what becomes of a state where each weight is quantised as a whole."""
    found = dict(state)
    for name, value in state.items():
        if name.endswith("proj.weight"):
            found[name], found[name + SCALES] = quantised(value)
    return found


def encoded_catalog(folder: Path) -> Catalog:
    catalog = open_checkpoint(str(hub(folder, weights(), config=None))).catalog
    return derive(catalog, encoders({name: entry.shape for name, entry in catalog.tensors.items()}))


def test_both_stand_where_the_weight_was(tmp_path: Path) -> None:
    derived, expected = encoded_catalog(tmp_path / "hub"), in_whole(weights())
    names = list(derived.tensors)
    assert names.index(Q + SCALES) == names.index(Q) + 1
    for name, entry in derived.tensors.items():  # known before anything is read
        assert (f"torch.{entry.dtype.name}", entry.shape) == (str(expected[name].dtype), expected[name].shape)
    assert_bit_equal({name: read(derived, name) for name in names}, expected)


def test_paths_of_a_save_name_both(tmp_path: Path) -> None:
    state = {"model": {"q_proj.weight": torch.ones(4, 4)}, "step": torch.ones(1)}
    checkpoint = encoded(open_checkpoint(str(save(state, tmp_path / "saved"))))
    assert checkpoint.catalog.paths == {
        "model.q_proj.weight": ("model", "q_proj.weight"),
        "model.q_proj.weight_scale_inv": ("model", "q_proj.weight_scale_inv"),
        "step": ("step",),
    }


def test_a_base_has_both(tmp_path: Path) -> None:
    base, expected = open_base(str(hub(tmp_path / "base", weights(), config={}))), in_whole(weights())
    assert base.tensors is not None
    derived = derive_base(base, encoders({name: tensor.shape for name, tensor in base.tensors.items()}))
    assert derived.tensors is not None
    assert derived.tensors.keys() == expected.keys()
    for name, tensor in derived.tensors.items():
        assert (f"torch.{tensor.dtype.name}", tensor.shape) == (
            str(expected[name].dtype),
            expected[name].shape,
        )


@pytest.mark.parametrize("parts", [(None,), ("1/2", "2/2")], ids=["one process", "two parts"])
def test_into_hub_shards(
    parts: tuple[str | None, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is what whole weights become, and means what it says: `--dequantize` gives numbers times scales."""
    source, out, expected = save(weights(), tmp_path / "trained"), tmp_path / "out", in_whole(weights())
    with monkeypatch.context() as patch:
        patch.setattr("shardkit.formats.dequantize.plain_checkpoint", lambda opened, _: encoded(opened))
        for part in parts:
            shardkit.consolidate(source, out, root="", max_shard_size=300_000, part=part)
    assert len(list(out.glob("*.safetensors"))) > 1
    assert_bit_equal(load(out), expected)
    assert shardkit.verify(out).ok
    (out / "config.json").write_text(json.dumps(FP8))
    shardkit.consolidate(out, tmp_path / "plain", dequantize=True)
    plain = {
        name: by_formula(expected[name], expected[name + SCALES], (128, 128)).bfloat16()
        if name + SCALES in expected
        else value
        for name, value in weights().items()
    }
    assert_bit_equal(load(tmp_path / "plain"), plain)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "dp_shard=3"},
        {
            "mesh": "dp_shard=2,tp=2",
            "parallel_rules": ["*proj.weight=rowwise", "layers.0.k_proj.weight=colwise"],
        },
    ],
    ids=["rows", "columns"],
)
def test_into_distcp(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are cut within blocks: each reads the whole blocks that its part lies in."""
    source, out, expected = (
        hub(tmp_path / "hub", weights(), config=None),
        tmp_path / "out",
        in_whole(weights()),
    )
    monkeypatch.setattr("shardkit.formats.dequantize.plain_checkpoint", lambda opened, _: encoded(opened))
    shardkit.preshard(source, out, wrap="none", **options)
    assert_bit_equal(loaded(out, expected), expected)
    assert shardkit.verify(out).ok


PEAK = f"""{HIGH_WATER}
import sys
from pathlib import Path
import shardkit
import shardkit.formats.dequantize as dequantize
from tests.transfer.codecs.block_fp8 import encoded
dequantize.plain_checkpoint = lambda opened, _: encoded(opened)
def run(name):
    shardkit.preshard(sys.argv[1] + "/" + name, sys.argv[1] + "/" + name + "-out", mesh="dp_shard=2", wrap="none", jobs=2, max_memory="16MiB")
run("small")
Path("/proc/self/clear_refs").write_text("5")
before = high_water()
run("large")
print(high_water() - before)
"""


def test_memory_is_bounded_by_blocks(tmp_path: Path) -> None:
    """Scales of a whole weight are few numbers, made of 32 MiB, which are 64 in float32."""
    for name, size in (("small", 256), ("large", 4096)):
        hub(tmp_path / name, {"a_proj.weight": torch.ones(size, size, dtype=torch.bfloat16)}, config=None)
    assert answer_of(PEAK, tmp_path) < 32 << 20
