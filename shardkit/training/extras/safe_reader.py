"""A storage reader for stock `dcp.load` that executes no code from a checkpoint.

torch's own reader unpickles `.metadata`, and its planner every byte entry, without restriction, so that a checkpoint
can run code. Here `.metadata` and records are parsed by shardkit, and compared with the files and with
each other. Tensors are read directly into their memory.

Byte entries (a step, a learning rate, an RNG state) never reach the planner as they are in the file. shardkit's
interpreter checks the pickle first. It refuses all names but those of plain data and plain tensors,
and everything that would be expensive. An accepted entry is put into a new zip and loaded with torch's weights-only
loader. The resulting value is saved again, and the planner gets only that.

Source: torch 2.13, torch/distributed/checkpoint/storage.py (`StorageReader`), filesystem.py
(`FileSystemReader`), state_dict_loader.py, default_planner.py (`load_bytes`),
torch/_weights_only_unpickler.py.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shardkit.core.catalog import Catalog, TensorEntry
from shardkit.core.regions import Region, shifted
from shardkit.core.text import escape
from shardkit.errors import IntegrityError, LayoutError, SourceError
from shardkit.files import storage
from shardkit.files.strict_json import open_regular, read_exactly
from shardkit.formats.dcp.directory import DcpDirectory, open_dcp
from shardkit.formats.dcp.metadata import BY_HAND
from shardkit.formats.dcp.records import decode_object
from shardkit.formats.torchsave.archive import ZipEntry, ZipReader, read_directory
from shardkit.formats.torchsave.bin import screen_pickle
from shardkit.training.fill.reading import DAMAGED, Read, plan_reads, run_reads, torch_dtype
from shardkit.transfer.checks import SourceCheck
from shardkit.transfer.sources import SourceFiles

MAX_OBJECT_NBYTES = 1 << 30
"""Limit on the bytes of one byte entry; a step or a scheduler's state has hundreds."""

_MAX_PICKLE = 1 << 25
_MAX_ENTRIES = 1 << 16
# Names of the files that torch.save puts into its zip, other than the storages.
_NAMES = (
    "data.pkl",
    "byteorder",
    "version",
    ".data/serialization_id",
    ".format_version",
    ".storage_alignment",
)
_STORAGE = re.compile(r"data/[0-9]{1,9}")
_MAX_LIST_GAPS = 1 << 16
_MAX_UNPACKED_NBYTES = 1 << 26  # of a compressed byte entry, as a few bytes may expand to any size


class SafeReader(StorageReader):
    """Reads a DCP checkpoint for `dcp.load` without executing anything that it contains.

        dcp.load(state, storage_reader=shardkit.SafeReader("run/last"))

    It replaces torch's `FileSystemReader`, with any planner; nothing else needs to change. Everything is checked:
    that records lie within their files, that chunks tile every tensor exactly once, and every record's dtype and shape.
    A byte entry with more than plain data and plain tensors causes an error that names its classes, unless they were
    passed to `torch.serialization.add_safe_globals`. If there is no `.metadata`, the rank-local metadata of all
    ranks is read together, but never instead of a damaged `.metadata`. Data that torch's ZStandard extension
    compressed is decompressed.

    Args:
        path: the directory with `.metadata`.
        check_crc: first compare every record with the CRC-32 in it, which requires reading it twice.
        check_source: compare data with the CRC-32 while it is read, if this rank reads a whole record.

    Raises:
        SourceError, IntegrityError, ResourceError: from `read_metadata` and `read_data`; they name file and
            tensor. `dcp.load` puts them into its own `CheckpointException`.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, check_crc: bool = False, check_source: bool = True
    ) -> None:
        self.path, self.check_source = os.fspath(path), check_source
        self.check_crc = check_crc
        self._opened: DcpDirectory | None = None

    @property
    def checkpoint_id(self) -> str:
        """The directory."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True for a directory."""
        return storage.isdir(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the opened checkpoint, and use another directory if one is given."""
        self._opened = None
        if checkpoint_id:
            self.path = os.fspath(checkpoint_id)

    # There are no **kwargs, because with them torch calls this again for rank-local metadata if `.metadata` cannot
    # be read.
    def read_metadata(self) -> Metadata:
        """Parse and check `.metadata`; return it in torch's form for planners, without the places of records.

        Raises:
            SourceError: `.metadata` is missing, damaged, hostile or contradictory.
            ResourceError: a file cannot be read.
        """
        opened = open_dcp(self.path)
        catalog = opened.catalog
        _check_backed(opened)
        _check_lists(catalog)
        described: dict[str, Any] = {
            fqn: _torch_tensor(catalog, entry) for fqn, entry in catalog.tensors.items()
        }
        described |= {fqn: BytesStorageMetadata() for fqn in opened.objects}
        self._opened = opened
        return Metadata(described, planner_data=catalog.paths, storage_meta=StorageMeta())

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing, because the places of records are not read from `metadata`."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan into the planner's tensors.

        Raises:
            SourceError, IntegrityError: records are damaged, or do not fit `.metadata`; the error lists all problems of
                one kind.
            LayoutError: the planner passed a tensor of another shape than it planned.
            ResourceError: a file cannot be read.
        """
        if self._opened is None:
            self.read_metadata()
        assert self._opened is not None
        objects = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type is not LoadItemType.BYTE_IO]
        _read_objects(self._opened, objects, planner)
        self._read_tensors(self._opened, tensors, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_tensors(self, opened: DcpDirectory, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        """Open only the records that the items need, then fill the targets file by file."""
        rows = [(item, _row(opened.catalog, item.storage_index)) for item in items]
        needed: dict[str, dict[int, None]] = defaultdict(dict)  # by name, rows in the order of need
        for item, row in rows:
            needed[item.storage_index.fqn][row] = None
        part, new_rows = _part(opened, needed)
        if self.check_crc and part.has_records:
            problems = list(part.check(needed))
            IntegrityError.raise_for(
                problems,
                f"{len(problems)} records do not have the CRC-32 that was recorded",
                hint="the checkpoint is damaged: use another copy",
            )
        raw = part.select(needed)
        by_file: dict[int, list[tuple[ReadItem, int]]] = defaultdict(list)
        for item, row in rows:
            by_file[raw.chunks.file[new_rows[row]]].append((item, new_rows[row]))
        check = SourceCheck(raw) if self.check_source else None
        with SourceFiles(raw.files, check=check) as sources:
            for group in by_file.values():
                targets = [(item, row, planner.resolve_tensor(item).detach()) for item, row in group]
                run_reads(_reads(raw, targets), sources)
                for item, _, target in targets:
                    planner.commit_tensor(item, target)
            sources.finish(hint=DAMAGED)


def _torch_tensor(catalog: Catalog, entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.sizes))
        for region in catalog.chunks.regions(entry.chunk_ids)
    ]
    return TensorStorageMetadata(TensorProperties(torch_dtype(entry.dtype)), torch.Size(entry.shape), chunks)


def _check_backed(opened: DcpDirectory) -> None:
    """Raise an error for a tensor whose records are shorter than its data, as planners would allocate its full size."""
    catalog, problems = opened.catalog, []
    lengths = catalog.chunks.nbytes
    for fqn, entry in catalog.tensors.items():
        rows = entry.chunk_ids
        if any(row in opened.transforms for row in rows):
            continue  # compressed, so the length is not known
        stored = sum(lengths[rows.start : rows.stop])
        if stored < entry.nbytes:
            problems.append(f"{escape(fqn)}: {entry.nbytes} bytes of data in records of {stored} bytes")
    SourceError.raise_for(
        problems, f"{len(problems)} tensors are larger than what is stored of them", hint=BY_HAND
    )


def _check_lists(catalog: Catalog) -> None:
    """Raise an error for planner paths with huge indexes, because torch would create lists of that length."""
    lengths: dict[tuple[str | int, ...], int] = {}
    num_steps = 0
    for path in (catalog.paths or {}).values():
        num_steps += len(path)
        for depth, step in enumerate(path):
            if type(step) is int:
                lengths[path[:depth]] = max(lengths.get(path[:depth], 0), step + 1)
    if sum(lengths.values()) > num_steps + _MAX_LIST_GAPS:
        raise SourceError(
            f"the paths in planner_data make lists of {sum(lengths.values())} entries for "
            f"{len(catalog.paths or {})} names",
            hint=BY_HAND,
        )


def _row(catalog: Catalog, index: MetadataIndex) -> int:
    """Return the row of the chunk that an index of a plan refers to, by its offsets; torch's hint is tried first."""
    entry, table = catalog.tensors[index.fqn], catalog.chunks
    offsets, hint = list(index.offset or ()), index.index
    if hint is not None and 0 <= hint < entry.num_chunks:
        row = entry.first_chunk + hint
        if table.offsets(row, len(entry.shape)) == offsets:
            return row
    for row in entry.chunk_ids:
        if table.offsets(row, len(entry.shape)) == offsets:
            return row
    raise LayoutError(f"{escape(index.fqn)}: the load plan asks for a chunk at {offsets}, and there is none")


def _part(opened: DcpDirectory, needed: Mapping[str, Iterable[int]]) -> tuple[DcpDirectory, dict[int, int]]:
    """Return (a directory with only some chunks, old row of each chunk -> new row). Its tensors are not complete."""
    whole = opened.catalog
    table, new_rows = whole.chunks, dict[int, int]()
    part = Catalog(
        format=whole.format, directory=whole.directory, encoding=whole.encoding, files=list(whole.files)
    )
    for fqn, rows in needed.items():
        entry = whole.tensors[fqn]
        new_rows |= {row: new_row for new_row, row in enumerate(rows, len(part.chunks))}
        chosen = ((table.file[row], table.start[row], table.nbytes[row], table.region(row)) for row in rows)
        part.add_tensor(fqn, entry.dtype, entry.shape, chosen)
    transforms = {new: opened.transforms[row] for row, new in new_rows.items() if row in opened.transforms}
    return DcpDirectory(catalog=part, transforms=transforms, objects={}), new_rows


def _reads(raw: Catalog, targets: Iterable[tuple[ReadItem, int, torch.Tensor]]) -> Iterator[Read]:
    for item, row, target in targets:
        fqn, sizes = item.storage_index.fqn, tuple(item.lengths)
        if tuple(target.shape) != sizes:
            raise LayoutError(
                f"{escape(fqn)}: the planner gave a tensor of shape {list(target.shape)} for {list(sizes)}"
            )
        chunk = raw.chunks.region(row)
        region = shifted(Region(tuple(item.storage_offsets), sizes), chunk.offsets)
        only = replace(raw.tensors[fqn], first_chunk=row, num_chunks=1)
        yield from plan_reads(only, raw, region, target, fqn)


def _read_objects(opened: DcpDirectory, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
    """Vet byte entries one by one and pass them to the planner; then raise one error for all that were refused."""
    refused: list[SourceError] = []
    for item in items:
        fqn = item.storage_index.fqn
        try:
            planner.load_bytes(item, vet_entry(_object_bytes(opened, fqn), escape(fqn)))
        except SourceError as error:
            refused.append(error)
    if len(refused) == 1:
        raise refused[0]
    if refused:
        problems = [line for error in refused for line in (error.message, *error.problems)]
        raise SourceError(f"{len(refused)} byte entries are refused", problems=problems, hint=refused[0].hint)


def _object_bytes(opened: DcpDirectory, fqn: str) -> memoryview:
    place = opened.objects[fqn]
    if place is None:
        raise SourceError(f"{escape(fqn)}: .metadata gives it no bytes", hint=BY_HAND)
    source = opened.catalog.files[place.file]
    if place.transforms:
        return decode_object(source, fqn, place, _MAX_UNPACKED_NBYTES)
    if place.nbytes > MAX_OBJECT_NBYTES:
        raise SourceError(
            f"{escape(fqn)}: a byte entry of {place.nbytes} bytes; at most {MAX_OBJECT_NBYTES} are read"
        )
    with open_regular(source.path, source.name, follow=False) as (fd, _):
        return memoryview(read_exactly(fd, place.start, place.nbytes, source.name))


def vet_entry(data: memoryview, where: str) -> io.BytesIO:
    """Vet a byte entry, load it, and return its value saved again by torch. No name is resolved before it is vetted.

    Classes that the program has passed to `torch.serialization.add_safe_globals` are accepted too.

    Args:
        data: a file of `torch.save`.
        where: the name of the entry, escaped, for messages.

    Raises:
        SourceError: the entry is damaged, hostile, or has more than plain data and plain tensors; the error names the
            classes.
        IntegrityError: the bytes do not have the recorded CRC-32.
    """
    reader = ZipReader(lambda start, nbytes: bytes(data[start : start + nbytes]), 0, len(data), where)
    entries = read_directory(reader, _is_known, max_entries=_MAX_ENTRIES)
    if "data.pkl" not in entries:
        reader.refuse("it has no entry data.pkl: not a file of torch.save")
    if "byteorder" in entries and reader.content("byteorder", entries["byteorder"]) != b"little":
        reader.refuse("its byte order is not little")
    pickle = reader.content("data.pkl", entries["data.pkl"], _MAX_PICKLE)
    storages = {name[5:]: entry for name, entry in entries.items() if name.startswith("data/")}
    trusted = _trusted_names()
    unknown = [escape(name) for name in screen_pickle(pickle, storages, where) if name not in trusted]
    SourceError.raise_for(
        unknown,
        f"{where} holds more than plain data, and is not loaded: nothing of it was executed",
        hint="leave it out of the state dict that is loaded; or, for classes of your own in a checkpoint that "
        "you trust, torch.serialization.add_safe_globals",
    )
    try:
        value = torch.load(_clean_copy(reader, entries, pickle), map_location="cpu", weights_only=True)
    except Exception as error:  # torch may raise any kind of exception
        match = re.search(r"WeightsUnpickler error: (.*)", str(error))
        reason = escape(match[1] if match else (str(error).splitlines() or [type(error).__name__])[0])
        raise SourceError(f"{where}: torch's weights-only loader refuses it: {reason}") from None
    out = io.BytesIO()
    torch.save(value, out)
    out.seek(0)
    return out


def _is_known(name: str) -> bool:
    return name in _NAMES or _STORAGE.fullmatch(name) is not None


def _trusted_names() -> frozenset[str]:
    """Return the classes that the program declared safe, without torch's own, as e.g. DTensor is not plain data."""
    items: list[Any] = torch.serialization.get_safe_globals()
    names = (i[1] if isinstance(i, tuple) else f"{i.__module__}.{i.__qualname__}" for i in items)
    return frozenset(name for name in names if not name.startswith("torch."))


def _clean_copy(reader: ZipReader, entries: dict[str, ZipEntry], pickle: bytes) -> io.BytesIO:
    """Return a new zip with only the checked content, so that torch's reader cannot find other entries."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/version", b"3\n")  # torch 2.13, caffe2/serialize/versions.h
        archive.writestr("archive/byteorder", b"little")
        for name, entry in entries.items():
            if _STORAGE.fullmatch(name):
                archive.writestr(f"archive/{name}", reader.content(name, entry, MAX_OBJECT_NBYTES))
    out.seek(0)
    return out
