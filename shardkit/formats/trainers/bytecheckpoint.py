"""ByteCheckpoint: `global_step_N/` with `model/`, `optimizer/` and more, or `model/` itself.

Its files have the names of DCP's files, but another format. `.metadata` is a pickle of its own
classes. In `__R_K.distcp` tensors are bare storages, end to end, without the records of `torch.save`.
`.metadata` says how to read a storage (dtype, shape, stride): it holds the pickle that `torch.save` would
have written for the tensor, without the data.

Source: ByteCheckpoint 0.0.2, checkpointer/meta_type.py, storage/filesystem, utilities/serialization.py.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardkit.core.catalog import Catalog
from shardkit.core.text import escape, listed
from shardkit.errors import IntegrityError, ResourceError, SourceError
from shardkit.files import shared_reads
from shardkit.files.digest import crc32
from shardkit.files.shared_reads import CONTENT
from shardkit.files.strict_json import open_regular, read_exactly
from shardkit.formats.contract import Checkpoint, Opener, asset_directories, explained, inner, listing
from shardkit.formats.dcp import METADATA
from shardkit.formats.dcp.directory import DcpDirectory, as_checkpoint, open_metadata
from shardkit.formats.dcp.metadata import join_fields
from shardkit.formats.dcp.records import difference, stamp_unread
from shardkit.formats.dcp.vocabulary import (
    MAX_BYTES,
    RECORDS,
    RUNS,
    Index,
    StorageInfo,
    StorageInfoRun,
    checked_fields,
    metadata_names,
    store_places,
)
from shardkit.formats.torchsave.record import TensorRecord, parse_tensor, strided_file
from shardkit.pickles.interpreter import Refusal
from shardkit.pickles.policies import Global, Record, Vocabulary, parse_in_columns

if TYPE_CHECKING:
    from shardkit.formats.contract.optimizer import OptimizerState, Unmapped

_META_TYPE = "bytecheckpoint.checkpointer.meta_type"
_METADATA_FIELDS = frozenset(
    {"state_dict_metadata", "planner_data", "storage_data", "all_tensor_metadata"}
    | {"bytecheckpoint_version", "user_defined_dict"}
)
_MODEL, _OPTIMIZER = "model", "optimizer"
_OTHERS = {
    _OPTIMIZER: "the optimizer's state",
    "extra_state": "state of the trainer",
    "loader_ckpt": "state of the data loader",
}
_MAX_METADATA = 1 << 30
_MARK = b"bytecheckpoint."
_MARK_WITHIN = 128  # bytes: the class of the top object is named first


def is_bytecheckpoint(path: str) -> bool:
    """True for a directory with ByteCheckpoint's `.metadata`, or whose `model/` has it."""
    return is_bytecheckpoint_metadata(path) or _state_in(path, _MODEL) is not None


def open_bytecheckpoint(path: str) -> Checkpoint:
    """Open the model of a ByteCheckpoint, or the only state that lies in `path`.

    Raises:
        SourceError: missing, damaged, hostile or contradictory; without tensors; or flat parameters of FSDP1.
        IntegrityError: the two descriptions of a chunk differ.
        ResourceError: a file may not be read.
    """
    directory = None if is_bytecheckpoint_metadata(path) else _state_in(path, _MODEL)
    optimizer = _state_in(path, _OPTIMIZER)
    return replace(
        as_checkpoint(path, open_bytecheckpoint_files(directory or path)),
        format="bytecheckpoint",
        writer="ByteCheckpoint",
        dcp=None,  # its `.metadata` is not torch's
        optimizer=partial(_open_optimizer, optimizer) if optimizer is not None else None,
        assets=asset_directories(directory, path),
        skipped=tuple(explained(listing(path), _OTHERS)),
    )


def _state_in(path: str, name: str) -> str | None:
    directory = inner(path, name)
    return directory if directory is not None and is_bytecheckpoint_metadata(directory) else None


def _open_optimizer(directory: str) -> OptimizerState | Unmapped:
    """Open the state by FQN that FSDP2 gives; its groups are one byte entry."""
    # Here, because this module looks at every `.metadata`, and seldom opens one.
    from shardkit.formats.contract.optimizer import GROUPS, PARAMS, STATE, StateWriter, Unmapped, read_groups
    from shardkit.formats.torchsave.file import open_torch_file

    opened = open_bytecheckpoint_files(directory)
    catalog = opened.select(tuple(opened.catalog.tensors))
    paths = catalog.paths or {}
    odd = [name for name in catalog.tensors if len(paths.get(name, ())) != 3 or paths[name][0] != STATE]
    if odd:
        return Unmapped([_OPTIMIZER], f"its entries are no states of single parameters: {listed(odd)}")
    place = opened.objects.get(GROUPS)
    groups = None
    if place is not None:
        source = opened.catalog.files[place.file]
        file = open_torch_file(source.path, f"{_OPTIMIZER}/{source.name}", (place.start, place.nbytes))
        groups = read_groups(file.name, file.tree)
    if groups is None or not all(isinstance(group.get(PARAMS), list) for group in groups):
        return Unmapped([_OPTIMIZER], f"it has no {GROUPS}, which hold its settings")
    params = [[str(name) for name in group[PARAMS]] for group in groups]
    names = {str(path[1]) for path in paths.values()}
    unknown = names.difference(*params)
    if any(name.isdecimal() for name in names) or unknown:
        return Unmapped(
            [_OPTIMIZER], "its parameters are only numbered, and nothing tells which ones they are"
        )
    writer = StateWriter(catalog, file.source)
    writer.add_groups(groups, params)
    lost = [name for name in opened.objects if name != GROUPS]
    return writer.finish([f"not taken over from the optimizer: {listed(lost)}"] if lost else [])


def is_bytecheckpoint_metadata(directory: str) -> bool:
    """True if the `.metadata` of a directory begins with a class of ByteCheckpoint's."""
    path = os.path.join(directory, METADATA)
    known = shared_reads.take(CONTENT, path, is_last=False)
    if known is not None:
        return _MARK in known[0][:_MARK_WITHIN]
    try:
        with open_regular(path, METADATA, follow=False) as (fd, size):
            return _MARK in read_exactly(fd, 0, min(size, _MARK_WITHIN), METADATA)
    except (SourceError, ResourceError):
        return False


def open_bytecheckpoint_files(directory: str) -> DcpDirectory:
    """Open a directory with ByteCheckpoint's `.metadata`; extents are the chunks' bytes.

    Raises:
        SourceError: missing, damaged, hostile or contradictory; names the file and the tensors.
        IntegrityError: the two descriptions of a chunk differ.
        ResourceError: a file may not be read.
    """
    data = shared_reads.read(os.path.join(directory, METADATA), METADATA, _MAX_METADATA)
    top = parse_in_columns(data, bytecheckpoint_vocabulary, METADATA)
    if not isinstance(top, ByteMetadata):
        raise SourceError(f"{METADATA} holds {type(top).__name__}, not the Metadata of a ByteCheckpoint")
    metadata = join_fields(top.fields, METADATA)
    metadata.encoding, metadata.crc32 = "raw", int(crc32(data))
    opened = open_metadata(directory, metadata)
    if not opened.is_looked_up:  # else each rank would look at all: a file counts as it is when it is opened
        for file in set(opened.catalog.chunks.file):
            source = opened.catalog.files[file]
            opened.catalog.files[file] = replace(source, stamp=stamp_unread(source))
    _point(opened.catalog, _pickles(top.fields.get("all_tensor_metadata")))
    return opened


def _pickles(value: object) -> PickleTable:
    """Return `all_tensor_metadata`, which the vocabulary puts under one key."""
    table: object = None
    if isinstance(value, dict) and list(value) in ([], [RECORDS]):
        table = value.get(RECORDS, PickleTable())
    if not isinstance(table, PickleTable):
        raise SourceError(f"{METADATA}: all_tensor_metadata does not hold the pickles of tensors")
    return table


def _point(catalog: Catalog, pickles: PickleTable) -> None:
    """Replace each extent, which is a storage, by the chunk's bytes in it."""
    stored = [parse_tensor(data, f"{METADATA}, the pickle of a tensor") for data in pickles.pickles]
    table, problems = catalog.chunks, list[str]()
    for fqn, entry in catalog.tensors.items():
        for row, region in zip(entry.chunk_ids, table.regions(entry.chunk_ids), strict=True):
            number = pickles.numbers.get((fqn, _corner(region.offsets)))
            if number is None:
                problems.append(
                    f"{escape(fqn)}: chunk at {list(region.offsets)} has no entry in all_tensor_metadata"
                )
                continue
            record = stored[number].moved(table.start[row], 0)
            reason = difference(entry, region.sizes, record) or _storage_problem(record, table.nbytes[row])
            if reason:
                problems.append(f"{escape(fqn)}: chunk at {list(region.offsets)}: {reason}")
            elif record.is_contiguous:
                table.start[row], table.nbytes[row] = record.start, record.nbytes
            else:
                catalog.files.append(strided_file(catalog.files[table.file[row]], entry, record))
                table.file[row], table.start[row] = len(catalog.files) - 1, 0
                table.nbytes[row] = record.nbytes
    IntegrityError.raise_for(
        problems,
        f"{METADATA} describes {len(problems)} chunks in two ways",
        hint="the checkpoint is damaged: use another copy",
    )


def _corner(offsets: Sequence[int]) -> bytes:
    return array("q", offsets).tobytes()


def _storage_problem(record: TensorRecord, stored: int) -> str | None:
    """Return why a view does not lie in its storage, or why the storage has another size than what is stored."""
    if record.data_nbytes != stored:
        return f"a storage of {record.data_nbytes} bytes, of which {stored} are stored"
    if record.reach > stored:
        return f"it reaches to byte {record.reach} of a storage of {stored}"
    return None


OPENERS = {"bytecheckpoint": Opener(is_bytecheckpoint, open_bytecheckpoint)}


class PickleTable:
    """ByteCheckpoint's `all_tensor_metadata`: for each chunk, the pickle of its tensor without the data."""

    __slots__ = ("numbers", "pickles")

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, bytes | None], int] = {}
        """(name, corner) -> number of its pickle."""
        self.pickles: dict[bytes, int] = {}
        """The different ones, numbered; one for each dtype and shape."""

    def append(self, index: Index, pickle: bytes) -> None:
        """Add one entry."""
        self.numbers[index.fqn, index.corner] = self.pickles.setdefault(pickle, len(self.pickles))


class ByteMetadata(Record):
    """ByteCheckpoint's `Metadata`, the top of its file."""

    __slots__ = ("fields",)

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}

    def build(self, state: object) -> None:
        self.fields = checked_fields(state, "Metadata", _METADATA_FIELDS)


def bytecheckpoint_vocabulary(nbytes: int) -> Vocabulary:
    """Return the vocabulary for one parse of a ByteCheckpoint's `.metadata` of `nbytes` bytes."""
    return Vocabulary(
        names={
            **metadata_names(nbytes),
            (_META_TYPE, "Metadata"): Global("Metadata", new=ByteMetadata),
            (_META_TYPE, "_StorageInfo"): Global("_StorageInfo", new=StorageInfo),
        },
        max_bytes=MAX_BYTES,
        set_records=_store_either,
        has_bytes=True,
        runs=RUNS,
    )


def _store_either(target: dict[Any, Any], items: list[Any]) -> None:
    """Store ByteCheckpoint's dicts of records: places, or pickles (None for what is not a tensor)."""
    if len(items) < 2 or type(items[1]) in (StorageInfo, StorageInfoRun):
        store_places(target, items)
        return
    table = target.get(RECORDS)
    if table is None and not target:
        table = target[RECORDS] = PickleTable()
    if type(table) is not PickleTable:
        raise Refusal("a dict with keys or values of several kinds")
    for i in range(0, len(items), 2):
        index, value = items[i], items[i + 1]
        if type(index) is not Index or type(value) not in (bytes, type(None)):
            raise Refusal("all_tensor_metadata holds something other than MetadataIndex and bytes")
        if value is not None:
            table.append(index, value)
