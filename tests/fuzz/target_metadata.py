"""`.metadata` of DCP, held against Python's unpickler, and with and without the shortcut."""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from random import Random
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import (
    Metadata as TorchMetadata,
)

from shardkit.errors import ShardkitError
from shardkit.formats.dcp import metadata as dcp_metadata
from shardkit.formats.dcp.metadata import DcpMetadata, join_fields, parse_metadata
from shardkit.formats.dcp.vocabulary import Metadata, metadata_names, metadata_vocabulary
from shardkit.pickles import columns
from shardkit.pickles.policies import Strict
from tests.formats.dcp.samples import our_metadata
from tests.fuzz.mutate import pick
from tests.fuzz.mutate_pickle import change_pickle
from tests.fuzz.reference import Fields, Top, Unpickler
from tests.fuzz.target import Target, attempt


def check_metadata(data: bytes) -> bool:
    """What is accepted is what Python's unpickler makes of it, and the same with the shortcuts off."""
    found = attempt(lambda: parse_metadata(data))
    if found is None:
        return False
    assert _plain(found) == _plain(_parse_slowly(data)), "the shortcuts change the outcome"
    _compare(found, _fields(Unpickler(_without_frames(data), _names()).load()))
    return True


def _without_frames(data: bytes) -> bytes:
    """Return a pickle without what says how many bytes to fetch at a time, which may be wrong and means nothing."""
    places = [at for opcode, _, at in pickletools.genops(data) if opcode.name == "FRAME"]
    for at in reversed(places):
        data = data[:at] + data[at + 9 :]
    return data


def check_runs(data: bytes) -> bool:
    """The same where the shortcuts begin at once, which are otherwise for large files; and a refusal is the same."""
    with _eager():
        found = attempt(lambda: parse_metadata(data))
    try:
        slowly = _parse_slowly(data)
    except ShardkitError:
        slowly = None
    assert _plain(found) == _plain(slowly), "the shortcuts change the outcome"
    return found is not None


@contextmanager
def _eager() -> Iterator[None]:
    """Take records in columns from the second one on."""
    changed = (
        (columns, "_MIN_BYTES", 0),
        (dcp_metadata, "MIN_COLUMNS", 2),
        (dcp_metadata, "MIN_TOTAL", 2),
    )
    before = [getattr(module, name) for module, name, _ in changed]
    try:
        for module, name, value in changed:
            setattr(module, name, value)
        yield
    finally:
        for (module, name, _), value in zip(changed, before, strict=True):
            setattr(module, name, value)


def _parse_slowly(data: bytes) -> DcpMetadata:
    """Parse opcode by opcode, and join chunk by chunk."""
    top = Strict(data, metadata_vocabulary(len(data)), in_columns=False).run(".metadata")
    if not isinstance(top, Metadata):
        raise ShardkitError("of another class")
    return join_fields(top.fields, ".metadata")


def _plain(metadata: DcpMetadata | None) -> object:
    """Everything that a metadata says, comparable."""
    if metadata is None:
        return None
    table = metadata.chunks
    rows = [
        (table.file[i], table.start[i], table.nbytes[i], table.region(i), metadata.transforms.get(i))
        for i in range(len(table))
    ]
    return metadata.tensors, rows, metadata.files, metadata.objects, metadata.paths, metadata.orphans


@cache
def _names() -> dict[tuple[str, str], Any]:
    """Stand-ins for every name that is allowed; dtypes and sizes are torch's."""
    names: dict[tuple[str, str], Any] = {}
    for module, name in metadata_names(0):
        base = Top if name == "Metadata" else Fields
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        names[module, name] = getattr(torch, name) if is_dtype else type(name, (base,), {})
    names["torch", "Size"] = torch.Size
    names["torch.serialization", "_get_layout"] = lambda name: {"torch.strided": torch.strided}[name]
    return names


def _fields(value: Any) -> Any:
    return getattr(value, "state", {})


def _by_place(items: Any) -> dict[tuple[str, tuple[int, ...] | None], Any]:
    found = {}
    for index, value in items:
        offset = _fields(index).get("offset")
        found[_fields(index)["fqn"], None if offset is None else tuple(offset)] = value
    return found


def _compare(found: DcpMetadata, fields: dict[str, Any]) -> None:
    entries, planner = fields["state_dict_metadata"], fields.get("planner_data")
    places = _by_place(fields["storage_data"].items())
    tensors = {fqn: _fields(entry) for fqn, entry in entries.items() if "chunks" in _fields(entry)}
    assert list(found.tensors) == list(tensors)
    assert set(found.objects) == set(entries) - set(tensors)
    assert found.paths == planner
    for fqn, tensor in tensors.items():
        entry = found.tensors[fqn]
        assert (str(_fields(tensor["properties"])[0]), tuple(tensor["size"])) == (
            f"torch.{entry.dtype.name}",
            entry.shape,
        )
        _compare_chunks(found, fqn, [_fields(chunk) for chunk in tensor["chunks"]], places)
    for fqn, place in found.objects.items():
        info = places.get((fqn, None))
        assert (place is None) == (info is None)
        if place is not None:
            named = found.files[place.file], place.start, place.nbytes
            assert named == tuple(_fields(info)[name] for name in ("relative_path", "offset", "length"))


def _compare_chunks(
    found: DcpMetadata, fqn: str, chunks: list[dict[str, Any]], places: dict[Any, Any]
) -> None:
    table, expected = found.chunks, []
    for chunk in chunks:
        offsets, sizes = tuple(chunk["offsets"]), tuple(chunk["sizes"])
        info = _fields(places[fqn, offsets])
        transforms = tuple(info.get("transform_descriptors") or ())
        expected.append((info["relative_path"], info["offset"], info["length"], offsets, sizes, transforms))
    rows = [
        (
            *(found.files[table.file[row]], table.start[row], table.nbytes[row]),
            *(table.region(row).offsets, table.region(row).sizes, found.transforms.get(row, ())),
        )
        for row in found.tensors[fqn].chunk_ids
    ]
    # An empty chunk that is listed twice counts once.
    assert rows == list(dict.fromkeys(expected))


def _sample(number: int, *, world: int = 0) -> Any:
    """Return a `Metadata` of a few tensors, cut for a few ranks."""
    rng = Random(number)
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    paths: dict[str, Any] = {}
    is_long, world = bool(world), world or 1 + number % 3
    options = {"transform_descriptors": ["stream.zstd/1"]} if number % 9 == 3 else {}
    for i in range(1 + number % 2):
        fqn = f"model.layers.{i}.weight"
        shape = [world * (1 + rng.randrange(300)), *(1 + rng.randrange(70) for _ in range(rng.randrange(3)))]
        dtype = pick(rng, (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn))
        chunks = []
        for rank in range(world):
            offsets = torch.Size([rank * (shape[0] // world), *[0] * (len(shape) - 1)])
            chunks.append(ChunkStorageMetadata(offsets, torch.Size([shape[0] // world, *shape[1:]])))
            index = MetadataIndex(fqn, offsets, rank)
            place = {"relative_path": f"__{rank}_0.distcp", "offset": i * 70000, "length": 1000 + i}
            storage[index] = _StorageInfo(**place, **options)
        entries[fqn] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
        paths[fqn] = (fqn,) if number % 2 else ("model", "layers", i, "weight")
    for fqn in ("optimizer.step", "rng")[: number % 3]:
        entries[fqn] = BytesStorageMetadata()
        storage[MetadataIndex(fqn)] = _StorageInfo(relative_path="__0_0.distcp", offset=9, length=99)
        paths[fqn] = (fqn,)
    # Units are only taken in columns where the file goes on for a while behind them.
    path = "/a/b" * (500 if is_long else 1)
    if is_long:  # nor where any opcode could fetch what is in a unit: the first 256 slots of the memo
        paths |= {f"k{i}": (f"k{i}",) for i in range(130)}
    meta = StorageMeta(checkpoint_id=path, save_id="c") if number % 4 else None
    metadata = TorchMetadata(entries, None if number == 6 else paths, storage, meta)
    if is_long:
        metadata.__dict__ = {"planner_data": paths, **vars(metadata)}
    return metadata


@cache
def metadata_seeds() -> list[bytes]:
    """As torch pickles it, in every protocol that is read."""
    return [pickle.dumps(_sample(number), 2 + number % 4) for number in range(40)]


@cache
def runs_seeds() -> list[bytes]:
    """The same for more ranks, and what shardkit writes, where sizes are fetched."""
    torchs = [pickle.dumps(_sample(number, world=6 + number), 4) for number in range(12) if number % 4]
    return [*torchs, *(our_metadata(num_ranks, 2) for num_ranks in (6, 20, 40))]


_WORDS = (
    *("state_dict_metadata", "storage_data", "planner_data", "version", "1.0.0", "offsets", "sizes"),
    *("offset", "length", "relative_path", "transform_descriptors", "fqn", "index", "properties", "size"),
    *("chunks", "torch", "__1_0.distcp", "../x.distcp", "float16", "Size", "os", "system"),
    *("torch.distributed.checkpoint.metadata", "MetadataIndex", "ChunkStorageMetadata"),
    *("BytesStorageMetadata", "model.layers.0.weight"),
)


def mutate(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """Edit opcodes."""
    return change_pickle(rng, pick(rng, seeds), (pick(rng, seeds),), _WORDS)


TARGETS = {
    "metadata": Target(check_metadata, metadata_seeds, mutate),
    "metadata_runs": Target(check_runs, runs_seeds, mutate),
}
