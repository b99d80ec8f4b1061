"""The classes that a ByteCheckpoint's `.metadata` may name, beside those of torch's.

Source: ByteCheckpoint 0.0.2, checkpointer/meta_type.py.
"""

from __future__ import annotations

from typing import Any

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
from shardkit.pickles.interpreter import Refusal
from shardkit.pickles.policies import Global, Record, Vocabulary

_META_TYPE = "bytecheckpoint.checkpointer.meta_type"
_FIELDS = frozenset(
    {"state_dict_metadata", "planner_data", "storage_data", "all_tensor_metadata"}
    | {"bytecheckpoint_version", "user_defined_dict"}
)


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
        self.fields = checked_fields(state, "Metadata", _FIELDS)


def bytecheckpoint_vocabulary(nbytes: int) -> Vocabulary:
    """Return what a ByteCheckpoint's `.metadata` of `nbytes` bytes may say; for one parse."""
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
