"""What any torch from 2.6 on wrote is read by shardkit under the torch that is installed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

import shardkit
from shardkit.core.regions import Region
from shardkit.formats.dcp.metadata import parse_metadata
from shardkit.formats.dcp.vocabulary import Properties
from shardkit.pickles import columns
from tests.versions.values import CHECKPOINTABLE, NUM_WIDE, SHARDED, WIDE, plain, value, wide_rows

pytestmark = [
    pytest.mark.prove,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*TypedStorage is deprecated"),
]

DIRECTORIES = ("train", "saved", "strides", "async", "fsdp1", "checkpointable")


def sharded() -> dict[str, torch.Tensor]:
    return {name: value(name, shape, dtype) for name, (shape, dtype) in SHARDED.items()}


def flat() -> dict[str, torch.Tensor]:
    """What the two ranks of FSDP1 filled with 1 and with 2: a flat parameter of 42 elements, 21 each."""
    both = torch.ones(42, dtype=torch.float64)
    both[21:] = 2
    return {"weight": both[:35].view(7, 5), "bias": both[35:]}


EXPECTED = {
    "strides": {**plain(), **sharded()},
    "async": {f"app.{name}": each for name, each in sharded().items()},
    "fsdp1": flat(),
    "checkpointable": {name: value(name, shape) for name, shape in CHECKPOINTABLE.items()},
}


def directories(written: Path) -> Iterator[tuple[str, Path]]:
    yield from ((name, written / name) for name in DIRECTORIES if (written / name).is_dir())


def assert_equal(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert found[name].dtype == each.dtype, name
        assert found[name].shape == each.shape, name
        assert torch.equal(found[name].double(), each.double()), name


def load(path: Path, expected: dict[str, torch.Tensor], **options: Any) -> dict[str, Any]:
    """Load tensors of the expected shapes and strides with stock torch; nothing of them is there before."""
    state = {
        name: torch.full_like(each.double(), 77, memory_format=torch.preserve_format).to(each.dtype)
        for name, each in expected.items()
    }
    dcp.load(state, checkpoint_id=None if options else path, **options)
    return state


def test_every_format_is_there(written: Path) -> None:
    version = json.loads((written / "about.json").read_text())["torch"]
    names = [name for name, _ in directories(written)]
    is_new = tuple(map(int, version.split(".")[:2])) >= (2, 14)
    assert names == [name for name in DIRECTORIES if is_new or name != "checkpointable"]


def test_inspect_and_a_full_verify(written: Path) -> None:
    for name, path in directories(written):
        assert shardkit.inspect(path).num_tensors >= 2, name
        found = shardkit.verify(path, full=True)
        assert not found.problems, (name, found.problems)
        assert found.read_bytes > 0, name


def test_values_of_every_memory_layout(written: Path, tmp_path: Path) -> None:
    for name, path in directories(written):
        if name in EXPECTED:
            shardkit.consolidate(path, str(tmp_path / name), root="")
            assert_equal(load_file(tmp_path / name / "model.safetensors"), EXPECTED[name])


def test_stock_load_through_the_safe_reader(written: Path) -> None:
    for name, path in directories(written):
        if name in EXPECTED:
            found = load(path, EXPECTED[name], storage_reader=shardkit.SafeReader(path))
            assert_equal(found, EXPECTED[name])


def test_reshard_is_read_by_stock_torch(written: Path, tmp_path: Path) -> None:
    for name, path in directories(written):
        if name in EXPECTED:
            shardkit.reshard(path, str(tmp_path / name), world_size=3)
            assert_equal(load(tmp_path / name, EXPECTED[name]), EXPECTED[name])
            assert shardkit.diff(path, tmp_path / name, all_tensors=True).is_equal


def test_a_live_model_is_loaded(written: Path) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, each in EXPECTED["strides"].items():
                empty = torch.zeros_like(each, memory_format=torch.preserve_format)
                if each.dtype in (torch.bool, torch.int64):
                    self.register_buffer(name, empty)
                else:
                    self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    holder = Holder()
    shardkit.load_into(holder, written / "strides")
    assert_equal(dict(holder.state_dict()), EXPECTED["strides"])


def test_three_ways_to_save_a_model_hold_the_same(written: Path, tmp_path: Path) -> None:
    """By dcp.save, by shardkit.save, and by torch.save of DTensors, a file for each rank."""
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    for path in written.glob("model_world_size_*.pt"):
        shutil.copy(path, ranks)
    for other in (written / "saved", ranks):
        found = shardkit.diff(written / "train", other)
        assert found.is_equal, (other, found)
        assert len(found.tensors) == 10, other


def test_a_file_of_torch_save(written: Path, tmp_path: Path) -> None:
    shardkit.consolidate(written / "file.pt", str(tmp_path / "out"))
    assert_equal(load_file(tmp_path / "out" / "model.safetensors"), plain())


def test_large_metadata_in_columns(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (written / "wide.metadata").read_bytes()
    taken: list[int] = []
    take = columns.RunFinder.take

    def count(self: columns.RunFinder, pos: int, num_memoized: int) -> Any:
        run = take(self, pos, num_memoized)
        taken.append(0 if run is None else run.stop - pos)
        return run

    monkeypatch.setattr(columns.RunFinder, "take", count)
    found = parse_metadata(data)
    assert sum(taken) > 0.8 * len(data), "the shortcut was hardly taken"
    assert list(found.tensors) == list(WIDE)
    for number, (name, shape) in enumerate(WIDE.items()):
        entry = found.tensors[name]
        expected = {}
        for rank in range(NUM_WIDE):
            first, num = wide_rows(shape, rank)
            region = Region((first, *[0] * (len(shape) - 1)), (num, *shape[1:]))
            expected[region.offsets] = (
                f"__{rank}_0.distcp",
                1500 * number,
                1500,
                region,
            )  # the last empty one
        places = {
            found.chunks.region(row).offsets: (
                found.files[found.chunks.file[row]],
                found.chunks.start[row],
                found.chunks.nbytes[row],
                found.chunks.region(row),
            )
            for row in entry.chunk_ids
        }
        assert (entry.dtype.name, entry.shape) == ("bfloat16", shape)
        assert places == expected, name


def test_what_shardkit_saved_is_read_by_torch_2_6(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorProperties has five fields, whatever torch saved; torch up to 2.14 unpacks no sixth."""
    lengths: set[int] = set()
    build = Properties.build

    def count(self: Properties, state: Any) -> None:
        lengths.add(len(state))
        build(self, state)

    monkeypatch.setattr(Properties, "build", count)
    parse_metadata((written / "saved" / ".metadata").read_bytes())
    assert lengths == {5}
    bias = {"model": {"score.bias": torch.full((1,), 77.0, dtype=torch.float64)}}
    dcp.load(bias, checkpoint_id=written / "saved")
    assert bias["model"]["score.bias"].item() != 77
