"""What a `.metadata` with very many chunks says, put together and checked in columns, with numpy.

Each function knows the arrangement that trainers write, and answers that it does not know of any other: then
the caller looks chunk by chunk, and says what is wrong where something is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardkit.core.regions import Shape
from shardkit.formats.dcp.vocabulary import StorageTable, Tensor

if TYPE_CHECKING:
    import numpy as np

    Columns = tuple[array[int], array[int], array[int], array[int]]
    Ints = np.ndarray[Any, np.dtype[np.int64]]

MIN_COLUMNS = 64
"""Chunks of a tensor from which on columns are quicker than one by one,"""
MIN_TOTAL = 4096
"""and of a checkpoint from which on numpy's import pays."""


def rows_by_id(ids: array[int], num_ids: int) -> tuple[array[int], list[int]]:
    """Return the rows ordered by their id, those of one id in their own order, and how many rows each id has."""
    import numpy as np

    column = np.frombuffer(ids, dtype=np.int32)
    order = array("i", np.argsort(column, kind="stable").astype(np.int32).tobytes())
    return order, np.bincount(column, minlength=num_ids).tolist()


def match_columns(tensor: Tensor, storage: StorageTable, rows: array[int]) -> Columns | None:
    """Return the files, starts, lengths and boxes of a tensor's chunks, as `ChunkTable.extend_columns` takes them.

    None unless the chunks are listed in the order of their offsets and placed in the same order, each once.
    An empty chunk may be listed again, as the ranks do that have no part of a tensor.

    Args:
        tensor: with at least one chunk.
        storage: every entry.
        rows: those under the tensor's name.
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
    offsets, at = boxes[:, :num_dims], np.frombuffer(rows, dtype=np.int32)
    if len(at) != len(boxes) or (np.frombuffer(storage.num_dims, dtype=np.int8)[at] != num_dims).any():
        return None
    corner_at = np.frombuffer(storage.corner_at, dtype=np.int64)[at]
    placed = np.frombuffer(storage.corners, dtype=np.int64)[corner_at[:, None] + np.arange(num_dims)]
    if (placed != offsets).any() or not _are_ascending(offsets):
        return None
    return (
        array("i", np.frombuffer(storage.path_ids, dtype=np.int32)[at].tobytes()),
        array("q", np.frombuffer(storage.offsets, dtype=np.int64)[at].tobytes()),
        array("q", np.frombuffer(storage.lengths, dtype=np.int64)[at].tobytes()),
        array("q", boxes.tobytes()),
    )


def _are_ascending(offsets: Ints) -> bool:
    """True where each corner comes after the one before, row-major."""
    import numpy as np

    is_after, is_same = np.zeros(len(offsets) - 1, dtype=bool), np.ones(len(offsets) - 1, dtype=bool)
    for column in offsets.T:
        is_after |= is_same & (column[1:] > column[:-1])
        is_same &= column[1:] == column[:-1]
    return bool(is_after.all())


def are_row_shards(shape: Shape, boxes: array[int]) -> bool:
    """True where chunks, in their order, cut a tensor along its first dim; empty ones may stand anywhere in it.

    Args:
        shape: the tensor's.
        boxes: for each chunk its offsets, then its sizes.
    """
    import numpy as np

    num_dims = len(shape)
    if num_dims == 0 or 0 in shape:
        return False
    each = np.frombuffer(boxes, dtype=np.int64).reshape(-1, 2 * num_dims)
    if (each < 0).any() or (each[:, num_dims:] > np.array(shape, dtype=np.int64) - each[:, :num_dims]).any():
        return False  # an empty one may reach outside as well
    each = each[each[:, num_dims:].all(axis=1)]
    if not len(each):
        return False
    offsets, sizes = each[:, :num_dims], each[:, num_dims:]
    starts, counts = offsets[:, 0], sizes[:, 0]
    if offsets[:, 1:].any() or (sizes[:, 1:] != np.array(shape[1:], dtype=np.int64)).any():
        return False
    if starts[0] != 0:
        return False
    return (
        bool((starts[1:] - starts[:-1] == counts[:-1]).all())
        and int(starts[-1]) + int(counts[-1]) == shape[0]
    )


def are_apart(
    files: array[int],
    starts: array[int],
    nbytes: array[int],
    sizes: Sequence[int],
    more: Sequence[Sequence[int]],
) -> bool:
    """True where extents that are not empty lie in their files, and no two have a byte in common.

    Args:
        files, starts, nbytes: of each chunk, in bytes.
        sizes: of each file, in bytes.
        more: (file, first byte, bytes) of further extents.
    """
    import numpy as np

    others = np.array(more, dtype=np.int64).reshape(-1, 3)
    file = np.concatenate([np.frombuffer(files, dtype=np.int32), others[:, 0]])
    start = np.concatenate([np.frombuffer(starts, dtype=np.int64), others[:, 1]])
    length = np.concatenate([np.frombuffer(nbytes, dtype=np.int64), others[:, 2]])
    size = np.array(sizes, dtype=np.int64)[file]
    if (start < 0).any() or (length <= 0).any() or (start > size).any() or (length > size - start).any():
        return False
    order = np.lexsort((start, file))
    file, start, stop = file[order], start[order], (start + length)[order]
    return not ((file[1:] == file[:-1]) & (start[1:] < stop[:-1])).any()
