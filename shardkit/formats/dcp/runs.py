"""A `.metadata`'s records in columns: runs of them as `pickle_batches` finds them, and the table of all places."""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import TYPE_CHECKING, TypeGuard

from shardkit.pickles.columns import Column, Corners, Fields, Numbers, Texts

if TYPE_CHECKING:
    from shardkit.formats.dcp.vocabulary import Index, StorageInfo

INDEX_FIELDS = frozenset({"fqn", "offset", "index"})
"""Of `MetadataIndex`."""
STORAGE_FIELDS = frozenset({"relative_path", "offset", "length", "transform_descriptors"})
"""Of `_StorageInfo`."""
_MIN_INT = -(1 << 63)


class ChunkRun:
    """Many `ChunkStorageMetadata` in a list."""

    __slots__ = ("boxes", "num_chunks", "num_dims")

    def __init__(self, num_chunks: int, num_dims: int, boxes: bytes) -> None:
        self.num_chunks, self.num_dims = num_chunks, num_dims
        self.boxes = boxes
        """For each chunk its offsets, then its sizes, as native 64-bit integers."""


class IndexRun:
    """Many `MetadataIndex`; the first half of a run of storage entries."""

    __slots__ = ("corners", "fqns", "num_dims")

    def __init__(self, fqns: list[str], num_dims: array[int], corners: bytes) -> None:
        self.fqns, self.num_dims = fqns, num_dims
        self.corners = corners
        """One after the other, as native 64-bit integers."""


class StorageInfoRun:
    """Many `_StorageInfo` without transforms; the second half."""

    __slots__ = ("lengths", "offsets", "paths")

    def __init__(self, paths: list[str], offsets: bytes, lengths: bytes) -> None:
        self.paths = paths
        self.offsets, self.lengths = offsets, lengths
        """As native 64-bit integers."""


class StorageTable:
    """`storage_data` in columns, one row for each entry."""

    __slots__ = (
        "corner_at",
        "corners",
        "fqns",
        "lengths",
        "name_ids",
        "num_dims",
        "offsets",
        "path_ids",
        "paths",
        "transforms",
    )

    def __init__(self) -> None:
        self.fqns: dict[str, int] = {}
        """Name -> id, in the order of first appearance."""
        self.paths: dict[str, int] = {}
        """relative_path -> id."""
        self.corners = array("q")
        """The chunks' offsets, one row's after the other's."""
        self.corner_at, self.num_dims = array("q"), array("b")
        """By row: where its offsets begin in `corners`, and how many they are; -1 for an object."""
        self.name_ids, self.path_ids = array("i"), array("i")
        self.offsets, self.lengths = array("q"), array("q")
        self.transforms: dict[int, tuple[str, ...]] = {}
        """By row, where there are any."""

    def __len__(self) -> int:
        return len(self.name_ids)

    def append(self, index: Index, info: StorageInfo) -> None:
        """Add one entry."""
        if info.transforms:
            self.transforms[len(self)] = info.transforms
        self.corner_at.append(len(self.corners))
        if index.corner is None:
            self.num_dims.append(-1)
        else:
            self.num_dims.append(len(index.corner) // 8)
            self.corners.frombytes(index.corner)
        self.name_ids.append(self.fqns.setdefault(index.fqn, len(self.fqns)))
        self.path_ids.append(self.paths.setdefault(info.path, len(self.paths)))
        self.offsets.append(info.offset)
        self.lengths.append(info.length)

    def extend(self, indexes: IndexRun, infos: StorageInfoRun) -> None:
        """Add the entries of a run."""
        at = len(self.corners)
        self.corner_at.extend(accumulate(indexes.num_dims[:-1], initial=at))
        self.num_dims.extend(indexes.num_dims)
        self.corners.frombytes(indexes.corners)
        for ids, known, names in (
            (self.name_ids, self.fqns, indexes.fqns),
            (self.path_ids, self.paths, infos.paths),
        ):
            for name in dict.fromkeys(names):
                known.setdefault(name, len(known))
            ids.extend(map(known.__getitem__, names))
        self.offsets.frombytes(infos.offsets)
        self.lengths.frombytes(infos.lengths)

    def corner(self, row: int) -> bytes | None:
        """Return a chunk's offsets as `Index.corner` has them, None for an object."""
        at, num_dims = self.corner_at[row], self.num_dims[row]
        return None if num_dims < 0 else self.corners[at : at + num_dims].tobytes()


def chunk_run(fields: Fields) -> tuple[ChunkRun] | None:
    """Take chunks, all of the same number of dims; None where they are not, or have other fields."""
    import numpy as np

    offsets, sizes = fields[0].get("offsets"), fields[0].get("sizes")
    if len(fields[0]) != 2 or type(offsets) is not Corners or type(sizes) is not Corners:
        return None
    num_dims = int(offsets.num_dims[0])
    if (offsets.num_dims != num_dims).any() or (sizes.num_dims != num_dims).any():
        return None
    boxes = np.hstack([offsets.values[:, :num_dims], sizes.values[:, :num_dims]])
    return (ChunkRun(len(boxes), num_dims, boxes.tobytes()),)


def storage_run(fields: Fields) -> tuple[IndexRun, StorageInfoRun] | None:
    """Take storage entries of chunks without transforms; None where they are not, or have other fields."""
    import numpy as np

    index, info = fields
    if not INDEX_FIELDS.issuperset(index) or not STORAGE_FIELDS.issuperset(info):
        return None
    fqns, corners, paths = index.get("fqn"), index.get("offset"), info.get("relative_path")
    offsets, lengths = info.get("offset"), info.get("length")
    if type(fqns) is not Texts or type(corners) is not Corners or type(paths) is not Texts:
        return None
    if not _are_places(offsets) or not _are_places(lengths) or info.get("transform_descriptors") is not None:
        return None
    is_value = np.arange(corners.values.shape[1]) < corners.num_dims[:, None]
    num_dims = array("b", corners.num_dims.astype(np.int8).tobytes())
    return (
        IndexRun(fqns.values, num_dims, corners.values[is_value].tobytes()),
        StorageInfoRun(paths.values, offsets.values.tobytes(), lengths.values.tobytes()),
    )


def _are_places(column: Column) -> TypeGuard[Numbers]:
    """True for integers that `_StorageInfo` may hold: what has a sign fits without it too."""
    return type(column) is Numbers and bool((column.values != _MIN_INT).all())
