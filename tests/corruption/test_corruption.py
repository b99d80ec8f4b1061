"""verify finds every change of a byte in what shardkit wrote, and says where. This is a sample; `make corruption` is all.

What others wrote has only the checksums that torch put into it, or none.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardkit.operations.verify import verify
from shardkit.operations.verify.bytes import FirstDifference
from tests.corruption import moving
from tests.corruption.damage import KINDS, changed_bytes, damaged
from tests.corruption.outputs import OURS, make
from tests.corruption.sweep import DATA, HEADER, METADATA, RECORD, Extent, Places, sweep

NUM_CHANGES, SHARD = 140, "__0_0.distcp"

# torch's own: a save without a process group.
pytestmark = [
    pytest.mark.prove,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, paths = tmp_path_factory.mktemp("corruption"), dict[str, Path]()

    def get(kind: str) -> Path:
        if kind not in paths:
            paths[kind] = make(kind, root)
        return paths[kind]

    return get


@pytest.mark.parametrize("kind", OURS)
def test_every_change_is_found_and_its_file_and_tensors_named(made: Callable[[str], Path], kind: str) -> None:
    tally = sweep(made(kind), NUM_CHANGES, random.Random(kind))
    assert (tally.unfound, tally.unnamed) == ([], [])
    assert tally.total == NUM_CHANGES
    assert tally.num_tensors > 5


def test_stock_dcp_has_checksums_of_all_but_its_metadata(made: Callable[[str], Path]) -> None:
    tally = sweep(made("stock"), NUM_CHANGES, random.Random(0))
    for place in (DATA, RECORD, "cut"):
        assert tally.found[place] == tally.drawn[place] > 0, tally.unfound
    assert not tally.unnamed
    assert any("no checksum" in note for note in verify(made("stock"), full=True).notes)


def test_foreign_safetensors_have_none(made: Callable[[str], Path]) -> None:
    """The structure is all that can be checked; what is not is said."""
    tally = sweep(made("safetensors"), NUM_CHANGES // 2, random.Random(0))
    assert tally.found["cut"] + tally.found["appended"] == tally.drawn["cut"] + tally.drawn["appended"]
    assert tally.found[DATA] == 0 < tally.drawn[DATA]
    assert any("safetensors files have none" in note for note in verify(made("safetensors"), full=True).notes)


@pytest.mark.parametrize("kind", ["preshard", "preshard-columns", "consolidate", "reshard-trainer", "stock"])
def test_a_flip_in_a_tensor_is_one_problem(made: Callable[[str], Path], kind: str) -> None:
    directory, pick = made(kind), random.Random(kind)
    for file, places in Places.of(directory).data.items():
        whole = (directory / file).read_bytes()
        for start, stop, names in places:
            if start == stop:
                continue
            changed = bytearray(whole)
            changed[pick.randrange(start, stop)] ^= 1 << pick.randrange(8)
            (directory / file).write_bytes(changed)
            problems = verify(directory, full=True).problems
            (directory / file).write_bytes(whole)
            assert [(p.file, p.start_byte, p.num_bytes) for p in problems] == [(file, start, stop - start)]
            assert problems[0].tensor in names
            assert problems[0].expected != problems[0].found


def object_records(directory: Path) -> list[Extent]:
    """Where the records of objects lie in the one shard file."""
    places = Places.of(directory)
    tensors = {name for place in places.data[SHARD] for name in place.names}
    return [place for place in places.records[SHARD] if not place.names & tensors]


def test_a_flip_in_the_record_of_an_object(made: Callable[[str], Path]) -> None:
    """In every part of it: its pickle, what a zip has twice, padding."""
    directory, pick = made("stock"), random.Random(0)
    whole, objects = (directory / SHARD).read_bytes(), object_records(made("stock"))
    assert {name for place in objects for name in place.names} == {"optim.param_groups.0.lr", "epoch.n"}
    for start, stop, names in objects:
        for at in pick.sample(range(start, stop), 60):
            changed = bytearray(whole)
            changed[at] ^= 1 << pick.randrange(8)
            (directory / SHARD).write_bytes(changed)
            problems = verify(directory, full=True).problems
            (directory / SHARD).write_bytes(whole)
            assert {(p.file, p.tensor) for p in problems} == {(SHARD, *names)}, at - start


@pytest.mark.parametrize("share", [0.3, 0.9, 1.0])
def test_an_object_that_became_zeros(made: Callable[[str], Path], share: float) -> None:
    directory = made("stock")
    whole, (start, stop, names) = (directory / SHARD).read_bytes(), object_records(made("stock"))[0]
    num_zeros = int((stop - start) * share)
    (directory / SHARD).write_bytes(whole[:start] + bytes(num_zeros) + whole[start + num_zeros :])
    problems = verify(directory, full=True).problems
    (directory / SHARD).write_bytes(whole)
    assert {(p.file, p.tensor) for p in problems} == {(SHARD, *names)}


def test_objects_that_are_spelled_otherwise_are_no_damage(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where most records are not as torch 2.13 writes them, another version did; and tensors may be in objects."""
    unlike = FirstDifference(0, 1, 2)
    monkeypatch.setattr("shardkit.operations.verify.dcp.spelling", lambda *_: unlike)
    monkeypatch.setattr("shardkit.operations.verify.bytes.object_spelling", lambda *_: unlike)
    assert verify(made("stock"), full=True).ok


def test_objects_of_any_kind_are_no_damage(tmp_path: Path) -> None:
    values = {
        "text": "x" * 300,
        "nested": {"list": [1, 2.5, None, (3,)], "set": {1}},
        "large": list(range(3000)),
        "empty": None,
        "tensors": [torch.ones(3), torch.zeros(2, 2)],
        "odd": (torch.ones(2), "a"),
    }
    dcp.save({"w": torch.ones(3), "o": values}, checkpoint_id=tmp_path / "out", no_dist=True)
    result = verify(tmp_path / "out", full=True)
    assert result.problems == ()


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_damage(kind: str) -> None:
    pick, data = random.Random(kind), random.Random(0).randbytes(20_000)
    for _ in range(50):
        changed = damaged(data, kind, pick)
        assert changed is not None
        assert changed != data
        assert (len(changed) != len(data)) == (kind in ("cut", "appended"))
    assert damaged(bytes(8192), "swap", pick) is None
    assert damaged(bytes(8192), "zeros", pick) is None
    assert damaged(b"", "bit", pick) is None
    assert changed_bytes(b"abcd", b"abxd") == [2]


def test_places_of_a_checkpoint(made: Callable[[str], Path]) -> None:
    places, file = Places.of(made("consolidate-single")), "model.safetensors"
    first = min(place.start for place in places.data[file])
    assert [places.kind(file, [at]) for at in (0, first - 1, first)] == [HEADER, HEADER, DATA]
    stock = Places.of(made("stock"))
    data = min(stock.data["__0_0.distcp"])
    (record,) = (place for place in stock.records["__0_0.distcp"] if place.names == data.names)
    assert min(stock.records["__0_0.distcp"]).names == {"optim.param_groups.0.lr"}
    assert record.start < data.start < data.stop < record.stop
    assert [stock.kind("__0_0.distcp", [at]) for at in (record.start, data.start)] == [RECORD, DATA]
    assert stock.kind(".metadata", [3]) == METADATA
    assert stock.tensors("__0_0.distcp", [data.start]) == [data.names]


def test_a_flipped_bit_is_refused_by_all_that_moves_it(tmp_path: Path) -> None:
    line, counts = moving.campaign("stock", tmp_path, 3, random.Random(0))
    assert counts == {"flips": 3, **dict.fromkeys(moving.OPERATIONS, 3)}, line
