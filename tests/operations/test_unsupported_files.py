"""Whole files that torch itself writes, with more in them than shardkit takes: named, never called damaged."""

from __future__ import annotations

import datetime
import json
import sys
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

import shardkit
from shardkit.errors import ShardkitError, SourceError
from tests.bits import flip

pytestmark = pytest.mark.filterwarnings("ignore")
WEIGHT = torch.arange(64.0).reshape(8, 8)


class Settings:
    """A trainer's own."""


FOREIGN: dict[str, tuple[object, str]] = {
    "array": ({"w": WEIGHT, "o": np.arange(4.0), "lr": np.float32(1), "at": Path("/x")}, "numpy.ndarray"),
    "module": (nn.Linear(8, 8, bias=False), "torch.nn.modules.linear.Linear"),
    "module-below": ({"model": nn.Linear(8, 8)}, "torch.nn.modules.linear.Linear"),
    "own": ({"w": WEIGHT, "o": Settings()}, f"{__name__}.Settings"),
}


def saved(folder: Path, value: object, name: str = "pytorch_model.bin", **options: Any) -> Path:
    """A Hub model of one file, or a file alone."""
    folder.mkdir()
    if name.endswith("bin"):
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    torch.save(value, folder / name, **options)
    return folder if name.endswith("bin") else folder / name


def refusals(path: Path, tmp_path: Path) -> list[ShardkitError]:
    found = []
    for attempt in (
        lambda: shardkit.verify(path),
        lambda: shardkit.inspect(path),
        lambda: shardkit.consolidate(path, tmp_path / "out"),
    ):
        with pytest.raises(SourceError) as caught:
            attempt()
        assert caught.value.exit_code == 3
        assert "damaged" not in str(caught.value)
        found.append(caught.value)
    return found


@pytest.mark.parametrize("kind", FOREIGN)
def test_objects_are_refused_by_the_name_of_their_class(tmp_path: Path, kind: str) -> None:
    value, cls = FOREIGN[kind]
    path = saved(tmp_path / "model", value)
    for error in refusals(path, tmp_path):
        assert cls.rpartition(".")[0] in str(error)


@pytest.mark.parametrize("kind", ["array", "module"])
def test_the_lines_of_the_hint_make_a_file_that_is_read(tmp_path: Path, kind: str) -> None:
    path = saved(tmp_path / "model", FOREIGN[kind][0])
    hint = str(refusals(path, tmp_path)[0].hint)
    with torch.serialization.safe_globals([]):
        exec("\n".join(line.strip() for line in hint.splitlines()[1:]), {})
    (path / "pytorch_model-plain.bin").replace(path / "pytorch_model.bin")
    shardkit.consolidate(path, tmp_path / "out")
    expected = {"array": {"w", "o"}, "module": {"weight"}}[kind]
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == expected


def test_functions_have_no_lines_that_would_run_them(tmp_path: Path) -> None:
    path = saved(tmp_path / "model", {"w": WEIGHT, "o": print})
    assert "add_safe_globals" not in str(refusals(path, tmp_path)[0].hint)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "step.pt"])
def test_plain_data_beside_tensors_is_passed_over(tmp_path: Path, name: str, protocol: int) -> None:
    state = defaultdict(list, {"w": WEIGHT})
    state |= {"lr": np.float64(0.1), "when": datetime.datetime(2026, 1, 1), "at": Path("/x"), "tags": {"a"}}
    path = saved(tmp_path / "model", state, name, pickle_protocol=protocol)
    assert shardkit.verify(path).ok
    assert shardkit.consolidate(path, tmp_path / "out").num_tensors == 1
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], WEIGHT)


def test_what_is_left_out_of_a_file_is_named_by_its_class(tmp_path: Path) -> None:
    path = saved(tmp_path / "run", {"w": WEIGHT, "head": nn.Linear(2, 2), "emb": np.ones(2)}, "step.pt")
    skipped = dict(shardkit.inspect(path).skipped)
    assert skipped["head"].startswith("an object of torch.nn.modules.linear.Linear")
    assert skipped["emb"].startswith("an object of numpy.ndarray")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "step.pt"])
@pytest.mark.parametrize(
    ("made", "what"),
    [
        (lambda: torch.nested.nested_tensor([WEIGHT, WEIGHT[:2]], layout=torch.jagged), "NestedTensor"),
        (lambda: torch.zeros(8, dtype=torch.uint8).view(torch.bits8), "dtype torch.bits8"),
    ],
    ids=["jagged", "bits"],
)
def test_tensors_without_plain_values_are_refused_by_name(
    tmp_path: Path, made: Any, what: str, name: str
) -> None:
    path = saved(tmp_path / "model", {"v": WEIGHT, "w": made()}, name)
    found = shardkit.verify(path, full=True)
    assert found.ok
    assert what in found.warnings[0]
    with pytest.raises(SourceError, match=f"w: .*{what}"):
        shardkit.consolidate(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (lambda: torch.quantize_per_tensor(WEIGHT, 0.5, 0, torch.qint8), "quantised by torch"),
        (lambda: torch.quantize_per_tensor(WEIGHT, 0.5, 0, torch.qint32), "quantised by torch"),
        (
            lambda: torch.quantize_per_channel(WEIGHT, torch.ones(8), torch.zeros(8), 0, torch.quint8),
            "quantised by torch",
        ),
        (lambda: torch._neg_view(torch.ones(4, 4, dtype=torch.int32)), "negated"),
    ],
    ids=["qint8", "qint32", "channels", "negated"],
)
def test_a_dcp_directory_of_such_tensors_is_whole(tmp_path: Path, made: Any, what: str) -> None:
    source = tmp_path / "saved"
    dcp.save({"model.v": WEIGHT, "model.w": made()}, checkpoint_id=source)
    found = shardkit.verify(source, full=True)
    assert found.ok
    assert what in found.warnings[0]
    assert len(shardkit.inspect(source).tensors) == 2
    with pytest.raises(SourceError, match=what):
        shardkit.consolidate(source, tmp_path / "out")
    record = next(source.glob("*.distcp"))
    flip(record, WEIGHT, 8)
    assert not shardkit.verify(source, full=True).ok


def test_parts_of_other_trainers_classes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Core's own ShardedTensor, a dataclass that holds the local part."""
    module = types.ModuleType("megatron.core.dist_checkpointing.mapping")
    part = type("ShardedTensor", (), {"__module__": module.__name__})
    module.ShardedTensor = part  # type: ignore[attr-defined]
    for name in ("megatron", "megatron.core", "megatron.core.dist_checkpointing"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sharded = part()
    sharded.data = WEIGHT
    path = saved(tmp_path / "run", {"model": {"v": WEIGHT, "w": sharded}}, "step.pt")
    assert "mapping.ShardedTensor" in shardkit.verify(path).warnings[0]
    with pytest.raises(SourceError, match=r"model\.w: .*mapping\.ShardedTensor"):
        shardkit.consolidate(path, tmp_path / "out")


def test_a_file_from_before_the_zip_format_is_not_damaged(tmp_path: Path) -> None:
    path = saved(tmp_path / "run", {"w": WEIGHT}, "step.pt", _use_new_zipfile_serialization=False)
    for error in refusals(path, tmp_path):
        assert "before torch 1.6" in error.message


def test_keys_that_no_state_dict_has_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "model", {"w": WEIGHT, ("a", 1): WEIGHT})
    for error in refusals(path, tmp_path):
        assert "1 entry of its dicts" in error.message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "step.pt"])
@pytest.mark.parametrize("protocol", [0, 1])
def test_a_pickle_of_an_old_protocol_is_not_damaged(tmp_path: Path, name: str, protocol: int) -> None:
    path = saved(tmp_path / "model", {"w": WEIGHT}, name, pickle_protocol=protocol)
    for error in refusals(path, tmp_path):
        assert "protocol 0 or 1" in error.message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "step.pt"])
@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
def test_the_format_before_the_zip_with_another_protocol_is_not_damaged(
    tmp_path: Path, name: str, protocol: int
) -> None:
    options = {"pickle_protocol": protocol, "_use_new_zipfile_serialization": False}
    for error in refusals(saved(tmp_path / "model", {"w": WEIGHT}, name, **options), tmp_path):
        assert "before torch 1.6" in error.message
