"""Parse the `.metadata` of a DCP directory: tensors with their chunks and places, objects, planner paths.

Only the file itself is checked here: every chunk must have a place, and every name must occur once.
`formats.dcp.directory` checks the places against the other files, when it opens the directory.

`dcp.save(..., use_collectives=False)` writes rank-local metadata instead of one `.metadata`: each rank writes
`__R.metadata` with the chunks that it holds, and no file records the number of ranks. All of them together
are the checkpoint: there must be no gap between ranks, and the chunks must make up each tensor. A chunk that
several ranks saved is read from the first of them.

Source: torch 2.2 to 2.13, torch/distributed/checkpoint/metadata.py, filesystem.py (`finish`),
_nested_dict.py, state_dict_saver.py.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from shardkit.core.catalog import MIN_COLUMNS, MIN_TOTAL, ChunkTable, TensorEntry
from shardkit.core.regions import Region
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.files.strict_json import read_small
from shardkit.formats.contract import EntryLocation
from shardkit.formats.dcp.vocabulary import (
    RECORDS,
    BytesEntry,
    Metadata,
    StorageTable,
    Tensor,
    metadata_vocabulary,
)
from shardkit.pickles.policies import parse_in_columns

if TYPE_CHECKING:
    from shardkit.core.catalog import Ints

    Columns = tuple[array[int], array[int], array[int], array[int]]

Path = tuple[str | int, ...]

_VERSIONS = (None, "1.0.0")  # torch 2.13: metadata.CURRENT_DCP_VERSION
_MAX_INDEX = 1 << 24  # list index in a planner path: torch extends a list up to it
_MAX_PATH = 64  # steps of a planner path
# A pickle begins with the class of its top object: ByteCheckpoint's name is within the first 128 bytes.
_BYTE_CHECKPOINT, _CLASS_WITHIN = b"bytecheckpoint.", 128
_MAX_SHARED = 4  # names that may share one description without places for all their chunks
_MAX_ELEMENTS = 1 << 62
_NO_ROWS = array("i")
BY_HAND = "the checkpoint is damaged or was put together by hand: use another copy"

_RANK = re.compile(r"__(0|[1-9]\d{0,6})\.metadata(\.tmp)?")
_MAX_LISTED = 1000  # missing ranks: a single file with a huge number must not make more
_MISSING_RANK = "a rank's files may be missing: copy all __R.metadata and .distcp files of the save"


RecordPlace = tuple[int, int, int]
"""File number, first byte and length in bytes of a record."""


class Copy(NamedTuple):
    """A rank's copy of a chunk that an earlier rank saved too."""

    fqn: str
    row: int
    """The earlier rank's chunk, which is used."""
    place: RecordPlace
    """Of the copy."""


@dataclass(slots=True, kw_only=True)
class DcpMetadata:
    """The content of a `.metadata`, or of the metadata of all ranks."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    """By name, in the order of the file."""
    chunks: ChunkTable = field(default_factory=ChunkTable)
    """Regions and places; the file of a row is `files[chunks.file[row]]`."""
    transforms: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """By chunk, the extensions that encoded its record, e.g. ("stream.zstd/1",); absent for most."""
    files: tuple[str, ...] = ()
    """The values of relative_path, unchecked."""
    objects: dict[str, EntryLocation | None] = field(default_factory=dict)
    """Entries that are not tensors, and the place of each, or None."""
    paths: dict[str, Path] | None = None
    """planner_data: the path of each name in the saved state dict, or None."""
    orphans: tuple[str, ...] = ()
    """Names of storage entries that belong to no tensor or object."""
    where: str = ".metadata"
    """Name of the file in messages, escaped."""
    encoding: str = "torch-record"
    """See `Catalog.encoding`."""
    crc32: int | None = None
    """Of `.metadata`; None for rank-local metadata."""
    copies: list[Copy] = field(default_factory=list)
    """With rank-local metadata, chunks that a later rank saved again."""


def parse_metadata(data: bytes, *, where: str = ".metadata") -> DcpMetadata:
    """Parse a `.metadata`.

    Args:
        data: the content of the file.
        where: name of the file in messages, escaped.

    Raises:
        SourceError: damaged, hostile, from another tool, or contradicting itself; names the tensors.
    """
    if _BYTE_CHECKPOINT in data[:_CLASS_WITHIN]:
        raise SourceError(
            f"{where} is one of ByteCheckpoint, which is not read",
            hint="load it with ByteCheckpoint, and save it with torch.distributed.checkpoint",
        )
    top = parse_in_columns(data, metadata_vocabulary, where)
    if not isinstance(top, Metadata):
        raise SourceError(f"{where} holds {type(top).__name__}, not the Metadata of a checkpoint")
    return join_fields(top.fields, where)


def join_fields(fields: Mapping[str, object], where: str) -> DcpMetadata:
    """Combine the fields of a parsed `Metadata`: each chunk of `state_dict_metadata` gets its place in `storage_data`.

    Args:
        fields: by name; `state_dict_metadata` and `storage_data` at least.
        where: name of the file in messages, escaped.

    Raises:
        SourceError: fields have wrong types, or contradict each other; names the tensors.
    """
    entries, storage = _main_fields(fields, where)
    _check_number(entries, storage, where)
    join = _FieldJoiner(storage, where)
    join.add(entries)
    join.result.paths = _planner_paths(fields.get("planner_data"), where, join.problems)
    SourceError.raise_for(
        join.problems, f"{where} contradicts itself in {len(join.problems)} places", hint=BY_HAND
    )
    return join.result


def _check_number(entries: Mapping[str, object], storage: StorageTable, where: str) -> None:
    """Refuse names that share one description so often that the file cannot place all their chunks.

    Tied names may share one. Each of their chunks still has a place of its own, unless it has no elements.
    """
    tensors = [entry for entry in entries.values() if isinstance(entry, Tensor)]
    num_chunks = sum(tensor.num_chunks for tensor in tensors)
    num_described = sum({id(tensor): tensor.num_chunks for tensor in tensors}.values())
    if num_chunks > _MAX_SHARED * num_described + len(storage):
        raise SourceError(
            f"{where} lists {num_chunks} chunks of {len(tensors)} tensors and places {len(storage)}",
            hint=BY_HAND,
        )


def _main_fields(fields: Mapping[str, object], where: str) -> tuple[dict[str, object], StorageTable]:
    version, entries, storage = (
        fields.get(name) for name in ("version", "state_dict_metadata", "storage_data")
    )
    if version is not None and (type(version) is not str or version not in _VERSIONS):
        shown = escape(version) if type(version) is str else type(version).__name__
        raise SourceError(
            f"{where} has version {shown!r}, not 1.0.0", hint="a newer shardkit may be able to read it"
        )
    if type(entries) is not dict or RECORDS in entries:
        raise SourceError(f"{where}: state_dict_metadata is not a dict of names")
    if type(storage) is not dict or (storage and list(storage) != [RECORDS]):
        raise SourceError(f"{where}: storage_data is not a dict of MetadataIndex")
    table = storage.get(RECORDS, StorageTable())
    if not isinstance(table, StorageTable):
        raise SourceError(f"{where}: storage_data does not hold places")
    return entries, table


class _FieldJoiner:
    """Gives every entry its place in `storage_data`, in the order of the file."""

    def __init__(self, storage: StorageTable, where: str) -> None:
        self._storage = storage
        self.result = DcpMetadata(files=tuple(storage.paths), where=where)
        self.problems: list[str] = []

    def add(self, entries: Mapping[str, object]) -> None:
        """Add all entries; the other names of `storage_data` become orphans."""
        rows, used = self._rows_by_name(), 0
        for fqn, entry in entries.items():
            mine = rows.get(fqn, _NO_ROWS)
            if isinstance(entry, Tensor):
                used += self._add_tensor(fqn, entry, mine)
            elif isinstance(entry, BytesEntry):
                used += self._add_object(fqn, mine)
            else:
                self._problem(fqn, "neither a tensor nor an object")
        if used != len(self._storage):
            self.result.orphans = tuple(fqn for fqn in rows if not self._is_whole(fqn, len(rows[fqn])))

    def _is_whole(self, fqn: str, num_rows: int) -> bool:
        entry = self.result.tensors.get(fqn)
        return fqn in self.result.objects if entry is None else entry.num_chunks >= num_rows

    def _rows_by_name(self) -> dict[str, array[int]]:
        """Return the rows of the storage table for each name."""
        rows = [array("i") for _ in self._storage.fqns]
        appends = [column.append for column in rows]
        for row, name_id in enumerate(self._storage.name_ids):
            appends[name_id](row)
        return dict(zip(self._storage.fqns, rows, strict=True))

    def _problem(self, fqn: str, reason: str) -> None:
        self.problems.append(f"{escape(fqn)}: {reason}")

    def _add_object(self, fqn: str, rows: array[int]) -> int:
        """Place an object, and return the number of its storage entries."""
        storage, place = self._storage, None
        if any(storage.num_dims[row] >= 0 for row in rows) or len(rows) > 1:
            self._problem(fqn, "an object, but storage_data places chunks of a tensor under its name")
            return len(rows)
        for row in rows:
            place = EntryLocation(
                file=storage.path_ids[row],
                start=storage.offsets[row],
                nbytes=storage.lengths[row],
                transforms=storage.transforms.get(row, ()),
            )
        self.result.objects[fqn] = place
        return len(rows)

    def _add_tensor(self, fqn: str, tensor: Tensor, rows: array[int]) -> int:
        """Append a tensor's chunks to the table, and return the number of their storage entries."""
        storage, chunks, problem = self._storage, self.result.chunks, _shape_problem(tensor)
        if problem is not None or tensor.dtype is None:
            self._problem(fqn, str(problem))
            return len(rows)
        first, columns = len(chunks), None
        if len(storage) >= MIN_TOTAL and tensor.num_chunks >= MIN_COLUMNS:
            columns = match_columns(tensor, storage, rows)
        if columns is not None:
            chunks.extend_columns(*columns)
        else:
            places = {storage.corner(row): row for row in rows}
            if len(places) != len(rows):
                self._problem(fqn, "storage_data places one of its chunks twice")
                return len(rows)
            self._add_chunks(fqn, tensor, places)
        num_chunks = len(chunks) - first
        self.result.tensors[fqn] = TensorEntry(
            fqn=fqn, dtype=tensor.dtype, shape=tensor.shape, first_chunk=first, num_chunks=num_chunks
        )
        return num_chunks

    def _add_chunks(self, fqn: str, tensor: Tensor, places: Mapping[bytes | None, int]) -> None:
        """Append a tensor's chunks one by one, given the storage entry of each corner (the chunk's offsets)."""
        storage, append, seen = self._storage, self.result.chunks.append, set[bytes]()
        for region, corner in _regions(tensor):
            row = places.get(corner)
            if corner in seen:
                if region.num_elements:
                    self._problem(fqn, f"chunk at {list(region.offsets)} is listed twice")
            elif row is None:
                self._problem(fqn, f"chunk at {list(region.offsets)} has no place in storage_data")
            else:
                chunk = append(storage.path_ids[row], storage.offsets[row], storage.lengths[row], region)
                if row in storage.transforms:
                    self.result.transforms[chunk] = storage.transforms[row]
            seen.add(corner)


def match_columns(tensor: Tensor, storage: StorageTable, rows: array[int]) -> Columns | None:
    """Return a tensor's chunks as the arguments of `ChunkTable.extend_columns`, or None if they are not in order.

    They are in order if the tensor lists its chunks by ascending offsets, and `storage` places them in the same order,
    each once. Trainers write this arrangement; for any other the caller checks chunk by chunk and reports what is wrong.
    An empty chunk may be listed several times: ranks without a part of a tensor do that.

    Args:
        tensor: with at least one chunk.
        storage: all storage entries.
        rows: the storage entries with the tensor's name.
    """
    import numpy as np

    num_dims = len(tensor.shape)
    if num_dims == 0 or storage.transforms or not rows:
        return None
    boxes = np.frombuffer(tensor.boxes, dtype=np.int64).reshape(-1, 2 * num_dims)
    is_first = np.ones(len(boxes), dtype=bool)
    is_first[1:] = (boxes[1:, :num_dims] != boxes[:-1, :num_dims]).any(axis=1)
    if boxes[~is_first, num_dims:].all(axis=1).any():  # listed again, and has elements
        return None
    boxes = boxes[is_first]
    offsets, ids = boxes[:, :num_dims], np.frombuffer(rows, dtype=np.int32)
    if len(ids) != len(boxes) or (np.frombuffer(storage.num_dims, dtype=np.int8)[ids] != num_dims).any():
        return None
    corner_at = np.frombuffer(storage.corner_at, dtype=np.int64)[ids]
    placed = np.frombuffer(storage.corners, dtype=np.int64)[corner_at[:, None] + np.arange(num_dims)]
    if (placed != offsets).any() or not _are_ascending(offsets):
        return None
    return (
        array("i", np.frombuffer(storage.path_ids, dtype=np.int32)[ids].tobytes()),
        array("q", np.frombuffer(storage.offsets, dtype=np.int64)[ids].tobytes()),
        array("q", np.frombuffer(storage.lengths, dtype=np.int64)[ids].tobytes()),
        array("q", boxes.tobytes()),
    )


def _are_ascending(offsets: Ints) -> bool:
    """True if the offsets of each chunk (a row of `offsets`) come after those of the one before, row-major."""
    import numpy as np

    is_after, is_same = np.zeros(len(offsets) - 1, dtype=bool), np.ones(len(offsets) - 1, dtype=bool)
    for column in offsets.T:
        is_after |= is_same & (column[1:] > column[:-1])
        is_same &= column[1:] == column[:-1]
    return bool(is_after.all())


def _shape_problem(tensor: Tensor) -> str | None:
    """Return what is impossible about a tensor's description, or None."""
    if tensor.problem is not None or tensor.dtype is None:
        return tensor.problem or "a tensor without its fields"
    num_elements = 1
    for size in tensor.shape:
        num_elements *= max(size, 1)
        if num_elements * tensor.dtype.itemsize > _MAX_ELEMENTS:
            return f"impossible shape {list(tensor.shape)}"
    return None if tensor.num_chunks else "has no chunks: its values are nowhere"


def _regions(tensor: Tensor) -> Iterator[tuple[Region, bytes]]:
    """Yield each chunk's region and its *corner*: its offsets as native 64-bit integers, as in `vocabulary.Index.corner`.

    `tensor.boxes` has the offsets and sizes of each chunk in turn:

        shape (4, 2), boxes 0 0 2 2 | 2 0 2 2 -> Region((0, 0), (2, 2)), bytes of 0 0; Region((2, 0), (2, 2)), bytes of 2 0
    """
    num_dims, step, itemsize = len(tensor.shape), 2 * len(tensor.shape), tensor.boxes.itemsize
    if num_dims == 0:
        for _ in range(tensor.num_chunks):
            yield Region((), ()), b""
        return
    values, raw = tensor.boxes.tolist(), tensor.boxes.tobytes()
    for start in range(0, len(values), step):
        middle = start + num_dims
        region = Region(tuple(values[start:middle]), tuple(values[middle : start + step]))
        yield region, raw[start * itemsize : middle * itemsize]


def _planner_paths(value: object, where: str, problems: list[str]) -> dict[str, Path] | None:
    """Check planner_data: a dict from names to paths, all different."""
    if value is None:
        return None
    if type(value) is not dict or RECORDS in value:
        raise SourceError(f"{where}: planner_data is not a dict of names")
    owners: dict[Path, str] = {}
    for fqn, path in value.items():
        problem = _path_problem(path)
        if problem is None and path in owners:
            problem = f"planner_data gives it the same path as {escape(owners[path])}"
        if problem is not None:
            problems.append(f"{escape(fqn)}: {problem}")
            continue
        owners[path] = fqn
    return value


def _path_problem(path: object) -> str | None:
    if type(path) is not tuple or not path or len(path) > _MAX_PATH:
        return f"its path in planner_data is not a tuple of 1 to {_MAX_PATH} steps"
    for step in path:
        if type(step) is int:
            if not 0 <= step < _MAX_INDEX:
                return f"its path in planner_data has the list index {step}"
        elif type(step) is not str:
            return f"its path in planner_data has a step of type {type(step).__name__}"
    return None


def rank_files(names: Collection[str]) -> dict[int, str]:
    """Return rank -> name, in the order of ranks, for the names of finished rank-local metadata."""
    files = {int(match[1]): name for name in names if (match := _RANK.fullmatch(name)) and not match[2]}
    return dict(sorted(files.items()))


def read_rank_metadata(directory: str, names: Collection[str], max_bytes: int) -> DcpMetadata:
    """Read the metadata of every rank, and merge it into that of one checkpoint.

    Args:
        directory: of the files.
        names: of all files in the directory.
        max_bytes: largest size of one file.

    Raises:
        SourceError: a rank is missing or did not finish, a file is damaged, or ranks contradict each other.
        ResourceError: a file may not be read.
    """
    files = rank_files(names)
    unfinished = sorted(name for name in names if (match := _RANK.fullmatch(name)) and match[2])
    gaps = list(islice((rank for rank in range(max(files)) if rank not in files), _MAX_LISTED))
    problems = [f"__{rank}.metadata: no such file" for rank in gaps]
    problems += [f"{escape(name)}: this rank's save did not finish" for name in unfinished]
    SourceError.raise_for(
        problems,
        f"{escape(directory)} has rank-local metadata, but not of every rank",
        hint=_MISSING_RANK,
    )
    return _RankMerger(_read_parts(directory, names, max_bytes)).result()


def _read_parts(directory: str, names: Collection[str], max_bytes: int) -> list[DcpMetadata]:
    return [
        parse_metadata(read_small(os.path.join(directory, name), name, max_bytes, follow=False), where=name)
        for name in rank_files(names).values()
    ]


def num_sufficient_ranks(directory: str, names: Collection[str], max_bytes: int) -> int:
    """Return the largest number of first ranks, fewer than all, whose chunks make up every tensor exactly; 0 if none do.

    Such a number shows that a save by so many ranks went into a directory with an older save by more ranks.

    Args:
        directory, names, max_bytes: as for `read_rank_metadata`.
    """
    enough, seen, lacking = 0, set[tuple[str, Region]](), dict[str, int]()
    for number, part in enumerate(_read_parts(directory, names, max_bytes)[:-1], 1):
        for fqn, entry in part.tensors.items():
            regions = {(fqn, region) for region in part.chunks.regions(entry.chunk_ids)} - seen
            seen |= regions
            num_new = sum(region.num_elements for _, region in regions)
            lacking[fqn] = lacking.get(fqn, entry.num_elements) - num_new
        if not any(lacking.values()):
            enough = number
    return enough


class _RankMerger:
    """Merges the metadata of all ranks."""

    def __init__(self, parts: Sequence[DcpMetadata]) -> None:
        self._parts = parts
        self._files: dict[str, int] = {}
        self._problems: list[str] = []

    def result(self) -> DcpMetadata:
        parts, merged = self._parts, DcpMetadata()
        merged.where = f"__0.metadata to __{len(parts) - 1}.metadata" if len(parts) > 1 else "__0.metadata"
        file_ids = [[self._files.setdefault(name, len(self._files)) for name in part.files] for part in parts]
        for fqn in dict.fromkeys(fqn for part in parts for fqn in part.tensors):
            self._add_tensor(merged, fqn, file_ids)
        for part, ids in zip(parts, file_ids, strict=True):
            self._add_objects(merged, part, ids)
        merged.files = tuple(self._files)
        merged.paths = self._paths()
        merged.orphans = tuple(dict.fromkeys(fqn for part in parts for fqn in part.orphans))
        SourceError.raise_for(
            self._problems,
            f"the ranks' metadata contradict each other in {len(self._problems)} places",
            hint="the files are from different saves: use one copy of one save",
        )
        return merged

    def _add_tensor(self, merged: DcpMetadata, fqn: str, file_ids: Sequence[Sequence[int]]) -> None:
        """Add the chunks of all ranks; an equal region is a replica and is left out."""
        first: TensorEntry | None = None
        seen: dict[Region, int] = {}
        begin = len(merged.chunks)
        for part, ids in zip(self._parts, file_ids, strict=True):
            entry = part.tensors.get(fqn)
            if entry is None:
                continue
            first = first or entry
            if entry.dtype is not first.dtype or entry.shape != first.shape:
                self._problems.append(
                    f"{escape(fqn)}: {part.where} has {entry.dtype.name} {list(entry.shape)}, "
                    f"another rank {first.dtype.name} {list(first.shape)}"
                )
                continue
            table = part.chunks
            for row, region in zip(entry.chunk_ids, table.regions(entry.chunk_ids), strict=True):
                place = ids[table.file[row]], table.start[row], table.nbytes[row]
                if region in seen:
                    merged.copies.append(Copy(fqn, seen[region], place))
                    continue
                seen[region] = new = merged.chunks.append(*place, region)
                if row in part.transforms:
                    merged.transforms[new] = part.transforms[row]
        assert first is not None
        merged.tensors[fqn] = TensorEntry(
            fqn=fqn,
            dtype=first.dtype,
            shape=first.shape,
            first_chunk=begin,
            num_chunks=len(merged.chunks) - begin,
        )

    def _add_objects(self, merged: DcpMetadata, part: DcpMetadata, ids: Sequence[int]) -> None:
        for fqn, place in part.objects.items():
            if fqn in merged.tensors:
                self._problems.append(f"{escape(fqn)}: an object in {part.where}, a tensor elsewhere")
            elif fqn not in merged.objects:
                merged.objects[fqn] = place and replace(place, file=ids[place.file])

    def _paths(self) -> dict[str, Path] | None:
        merged: dict[str, Path] = {}
        owners: dict[Path, str] = {}
        for part in self._parts:
            for fqn, path in (part.paths or {}).items():
                if merged.setdefault(fqn, path) != path or owners.setdefault(path, fqn) != fqn:
                    self._problems.append(
                        f"{escape(fqn)}: {part.where} gives it another path in planner_data"
                    )
        return merged or None
