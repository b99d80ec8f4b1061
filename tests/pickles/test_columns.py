"""Runs of records that are taken in columns mean what their opcodes mean, whatever stands in the file."""

from __future__ import annotations

import gc
import pickle
import random
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardkit.errors import SourceError
from shardkit.formats.dcp.metadata import DcpMetadata, join_fields, parse_metadata
from shardkit.formats.dcp.vocabulary import Metadata as Parsed
from shardkit.formats.dcp.vocabulary import metadata_vocabulary
from shardkit.pickles import columns
from shardkit.pickles.policies import Strict
from tests.formats.dcp.samples import our_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (1100, 8),
    "norm": (70,),  # fewer rows than ranks: the others list an empty chunk
    "conv": (1100, 3, 70_000),
    "wide": (2_200_000, 5),
    "five": (130, 1, 2, 1, 2),
    "scalar": (),
}


def copied(text: str) -> str:
    """An equal string that is another object, as names from another process are: pickle spells it out again."""
    return "".join(list(text))


def metadata(num_ranks: int, *, shared_names: bool = False, seed: int | None = None) -> Metadata:
    """What `num_ranks` ranks of FSDP2 save, in torch's own order: rank by rank, tensor by tensor."""
    tensors: dict[str, Any] = {"step": BytesStorageMetadata()}
    parts: list[tuple[str, int, torch.Size, int]] = []
    for name, shape in SHAPES.items():
        step = -(-shape[0] // num_ranks) if shape else 1
        chunks = []
        for rank in range(num_ranks if shape else 1):
            start = min(rank * step, shape[0]) if shape else 0
            size = min(step, shape[0] - start) if shape else 0
            corner = torch.Size((start, *[0] * (len(shape) - 1)) if shape else ())
            chunks.append(ChunkStorageMetadata(corner, torch.Size((size, *shape[1:]) if shape else ())))
            parts.append((name, rank, corner, size))
        tensors[name] = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size(shape), chunks)
    parts.sort(key=lambda part: part[1])
    if seed is not None:
        random.Random(seed).shuffle(parts)
    places: dict[MetadataIndex, _StorageInfo] = {MetadataIndex("step"): _StorageInfo("__0_0.distcp", 0, 7)}
    files = {rank: f"__{rank}_0.distcp" for rank in range(num_ranks)}
    for number, (name, rank, corner, _) in enumerate(parts):
        index = MetadataIndex(name if shared_names else copied(name), corner, rank)
        places.setdefault(index, _StorageInfo(files[rank], 1 << (number % 40), 300 + 70_000 * (number % 3)))
    return Metadata(tensors, None, places)


def described(found: DcpMetadata) -> object:
    table = found.chunks
    columns = table.file, table.start, table.nbytes, [table.region(row) for row in range(len(table))]
    return columns, found.tensors, found.files, found.orphans, found.objects, found.transforms


def step_by_step(data: bytes) -> DcpMetadata:
    top = Strict(data, metadata_vocabulary(len(data)), in_columns=False).run(".metadata")
    assert isinstance(top, Parsed)
    return join_fields(top.fields, ".metadata")


def outcome(read: Callable[[bytes], DcpMetadata], data: bytes) -> object:
    try:
        return described(read(data))
    except SourceError as error:
        return error.message, error.problems


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each run that was taken."""
    sizes: list[int] = []
    original = columns.RunFinder.take

    def spy(self: columns.RunFinder, pos: int, num_memoized: int) -> Any:
        found = original(self, pos, num_memoized)
        if found is not None:
            sizes.append(found.stop - pos)
        return found

    monkeypatch.setattr(columns.RunFinder, "take", spy)
    monkeypatch.setattr(columns, "_MIN_BYTES", 0)
    return sizes


@pytest.mark.parametrize("num_ranks", [1100, 90, 3])
@pytest.mark.parametrize("shared_names", [False, True])
def test_what_torch_pickles(num_ranks: int, shared_names: bool, taken: list[int]) -> None:
    source = metadata(num_ranks, shared_names=shared_names)
    data = pickle.dumps(source)
    found = parse_metadata(data)
    if num_ranks > 1000:
        assert sum(taken) > 0.7 * len(data)  # all but what is between the entries of five dims
    for name, shape in SHAPES.items():
        entry, theirs = found.tensors[name], source.state_dict_metadata[name]
        assert entry.shape == shape
        expected = {}
        for chunk in theirs.chunks:
            place = source.storage_data[MetadataIndex(name, chunk.offsets)]
            expected[tuple(chunk.offsets), tuple(chunk.sizes)] = (
                place.relative_path,
                place.offset,
                place.length,
            )
        table = found.chunks
        assert expected == {
            (table.region(row).offsets, table.region(row).sizes): (
                found.files[table.file[row]],
                table.start[row],
                table.nbytes[row],
            )
            for row in entry.chunk_ids
        }
    assert found.objects.keys() == {"step"}
    assert described(step_by_step(data)) == described(found)


def test_what_we_write(taken: list[int]) -> None:
    """Each tensor has sizes of its own, more than there may be forms; a run goes on over all ranks but the last."""
    data = our_metadata(300, 20)
    found = parse_metadata(data)
    assert sum(taken) > 0.9 * len(data)
    assert described(found) == described(step_by_step(data))


def test_data_are_free_once_they_are_read() -> None:
    data = our_metadata(30, 20)
    gc.disable()
    try:
        vm = Strict(data, metadata_vocabulary(len(data)), in_columns=True)
        vm.run(".metadata")
        alive = weakref.ref(vm)
        del vm
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("seed", range(3))
def test_entries_in_any_order(seed: int, taken: list[int]) -> None:
    data = pickle.dumps(metadata(200, seed=seed))
    assert outcome(parse_metadata, data) == outcome(step_by_step, data)
    assert taken


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_any_protocol(protocol: int, taken: list[int]) -> None:
    data = pickle.dumps(metadata(100), protocol)
    assert outcome(parse_metadata, data) == outcome(step_by_step, data)


@pytest.mark.prove
def test_no_changed_byte_is_taken_for_another(taken: list[int]) -> None:
    """Wherever bytes are changed, removed or repeated: what is read, and what is refused, stay the same."""
    sources = [
        pickle.dumps(metadata(30)),
        pickle.dumps(metadata(30, shared_names=True)),
        our_metadata(30, 20),
    ]
    rng, accepted = random.Random(3), 0
    for trial in range(360):
        changed = bytearray(rng.choice(sources))
        at = rng.randrange(len(changed) // 20, len(changed))
        match trial % 6:
            case 0:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                changed[at] = rng.choice(b"KMJ\x8a\x8chj\x94\x85\x86\x87Nu\x00\xff")
            case 2:
                del changed[at : at + rng.randrange(1, 200)]
            case 3:  # fetch what another opcode fetches, maybe before it is there
                places = [
                    slice(*found.span()) for found in re.finditer(rb"j..\x00\x00|h.", changed, re.DOTALL)
                ]
                changed[rng.choice(places)] = changed[rng.choice(places)]
            case 4:  # a tuple of fewer or more
                places = [found.start() for found in re.finditer(rb"[\x85-\x87](\x94)?\x85(\x94)?R", changed)]
                changed[rng.choice(places)] = rng.choice((0x85, 0x86, 0x87))
            case _:
                changed[at:at] = changed[at - rng.randrange(1, 200) : at]
        data = bytes(changed)
        found = outcome(parse_metadata, data)
        assert found == outcome(step_by_step, data), trial
        accepted += len(found) > 2  # type: ignore[arg-type]
    assert accepted > 3


def test_a_slot_whose_number_is_an_opcode(taken: list[int]) -> None:
    """A reference to slot 148 holds the byte of MEMOIZE; the slots behind a run are still counted right."""
    source, spelled = metadata(12), 0
    rest = {name: value for name, value in vars(source).items() if name != "planner_data"}
    for num_names in range(30, 40):
        source.__dict__ = {"planner_data": {f"k{i}": (f"k{i}",) for i in range(num_names)}, **rest}
        data = pickle.dumps(source)
        spelled += b"h\x94)\x81" in data
        num_taken = len(taken)
        Strict(data, metadata_vocabulary(len(data)), in_columns=True).run(".metadata")
        assert len(taken) > num_taken
        assert outcome(parse_metadata, data) == outcome(step_by_step, data)
    assert spelled


def test_names_with_the_byte_of_an_opcode_are_left_to_the_interpreter(taken: list[int]) -> None:
    source = metadata(300)
    places = dict(source.storage_data)
    for number, info in enumerate(places.values()):
        info.relative_path = copied(f"__{number}_\u00d4.distcp") if number % 50 == 7 else info.relative_path
    data = pickle.dumps(source)
    assert outcome(parse_metadata, data) == outcome(step_by_step, data)
    assert sum(taken) > len(data) // 3


def test_extents_that_are_fetched_again(taken: list[int]) -> None:
    """Where chunks and places share their corners, as one process saves them, both stay right."""
    source = metadata(300)
    corners = {
        tuple(c.offsets): c.offsets
        for t in source.state_dict_metadata.values()
        if hasattr(t, "chunks")
        for c in t.chunks
    }
    shared = {
        MetadataIndex(i.fqn, corners.get(tuple(i.offset or ()), i.offset), i.index): info
        for i, info in source.storage_data.items()
    }
    data = pickle.dumps(Metadata(source.state_dict_metadata, None, shared))
    assert outcome(parse_metadata, data) == outcome(step_by_step, data)
