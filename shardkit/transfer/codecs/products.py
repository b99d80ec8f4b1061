"""Products of stored numbers and their scales, as bits of a dtype, computed in float32 and rounded once.

The product of a number of 4 or 8 bits depends on its byte and its scale alone. Where a box has far more bytes than there
are pairs of both, the products of all pairs are computed once, and each byte selects one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape, blocks, relative_to, shifted, window
from shardkit.transfer.codecs.boxes import kind_of
from shardkit.transfer.codecs.codes import NUM_CODES
from shardkit.transfer.codecs.convert import to_bits

if TYPE_CHECKING:
    import numpy

_CODE_BITS = 8
_ELEMENTS_AT_ONCE = 1 << 17
"""Of a piece: all intermediate results fit in the processor's cache."""
_NUM_TABLES = 16
"""Tables of all scales of 8 bits that are kept, of at most half a MiB each."""


class _Scratch(threading.local):
    """Memory of a thread that every call uses again: with new memory, two thirds of the time would be page faults."""

    _numbers: numpy.ndarray | None = None

    def pairs(self, region: Region) -> numpy.ndarray:
        """Return an array for numbers of pairs, of a region of at most `_ELEMENTS_AT_ONCE`; its contents are undefined."""
        import numpy

        if self._numbers is None:
            self._numbers = numpy.empty(_ELEMENTS_AT_ONCE, numpy.intp)  # as `take` needs them
        return self._numbers[: region.num_elements].reshape(region.sizes)


_scratch = _Scratch()


class BoxScales(NamedTuple):
    """The scales of a box of bytes. The bytes of a block share one."""

    values: numpy.ndarray
    """The scales in float32, one-dimensional; if they are stored in 8 bits, those of all 256 codes."""
    indices: numpy.ndarray
    """For each block that the box touches: the index of its scale, in 16 bits, or in 32 if there are more than 256 scales;
    of size 1 along a dim with one block."""
    first: Shape
    """The grid index of the first of these blocks."""
    sizes: Shape
    """Bytes of a block along each leading dim; along any further dim all bytes share a scale."""


def spread(grid: numpy.ndarray, first: Shape, sizes: Shape, region: Region) -> numpy.ndarray:
    """Return the grid's element for each element of a region, which lies in one block along all dims but the last.

    Args:
        grid: an element for each block; of size 1 along a dim with one block.
        first: the grid index of its first block.
        sizes: elements of a block along each leading dim; along any further dim all elements share a block.
        region: of the tensor that is divided into blocks. Along a dim with blocks of size 1 it may have any length.

    Returns:
        An array that can be broadcast to the region's shape.
    """
    import numpy

    last = len(sizes) - 1
    for dim, (offset, size) in enumerate(zip(first, sizes, strict=True)):
        if grid.shape[dim] > 1:
            start, stop = region.offsets[dim] // size - offset, (region.stops[dim] - 1) // size - offset + 1
            grid = grid[(slice(None),) * dim + (slice(start, stop),)]
    if sizes and sizes[last] > 1 and grid.shape[last] > 1:
        start = region.offsets[last] % sizes[last]
        repeated = numpy.repeat(grid, sizes[last], axis=last)
        grid = repeated[..., start : start + region.sizes[last]]
    return grid.reshape((*grid.shape, *(1 for _ in region.sizes[grid.ndim :])))


def multiply(
    codes: numpy.ndarray,
    region: Region,
    numbers: numpy.ndarray,
    scales: BoxScales,
    dtype: DType,
    target: numpy.ndarray,
) -> None:
    """Compute the products of a box of bytes.

    Args:
        codes: the bytes.
        region: their place in the tensor, counted in bytes.
        numbers: (256, numbers in a byte) in float32.
        scales: of the box.
        dtype: of the products.
        target: of the codes' shape; receives the products of a byte's numbers side by side in each element.
    """
    import numpy

    table = _table(numbers, scales.values, dtype, codes.size)
    for piece in pieces(region, scales.sizes):
        where = window(relative_to(piece, region.offsets)) or ...  # of a scalar too, an array and no number
        indices = spread(scales.indices, scales.first, scales.sizes, piece)
        if table is None:
            target[where] = _products(numbers[codes[where]], scales.values[indices][..., None], dtype)
        else:
            pairs = _scratch.pairs(piece)
            numpy.add(indices << _CODE_BITS, codes[where], out=pairs)
            table.take(pairs, out=target[where], mode="clip")  # clips nothing, but is faster than checking


def _table(
    numbers: numpy.ndarray, scales: numpy.ndarray, dtype: DType, num_bytes: int
) -> numpy.ndarray | None:
    """Return the products of all codes with all scales, ordered by scale and code; None if single ones cost less."""
    if len(scales) == NUM_CODES:
        return _shared_table(numbers.tobytes(), scales.tobytes(), dtype)
    if num_bytes < 2 * NUM_CODES * len(scales):
        return None
    return _products(numbers, scales[:, None, None], dtype).reshape(-1)


@lru_cache(_NUM_TABLES)
def _shared_table(numbers: bytes, scales: bytes, dtype: DType) -> numpy.ndarray:
    """Return the table of 256 scales; arguments are the bytes of those of `_table`."""
    import numpy

    by_code = numpy.frombuffer(numbers, "f4").reshape(NUM_CODES, -1)
    return _products(by_code, numpy.frombuffer(scales, "f4")[:, None, None], dtype).reshape(-1)


def _products(numbers: numpy.ndarray, scales: numpy.ndarray, dtype: DType) -> numpy.ndarray:
    """Multiply, and join the products of the last dim to one unsigned integer."""
    import numpy

    with numpy.errstate(all="ignore"):
        values = to_bits(numbers * scales, dtype)
    joined: numpy.ndarray = values.view(kind_of(values.shape[-1] * dtype.itemsize))[..., 0]
    return joined


def pieces(region: Region, sizes: Shape, limit: int = _ELEMENTS_AT_ONCE) -> Iterator[Region]:
    """Cut a region into pieces, each in one block along all dims of blocks but the last.

    Args:
        region: to cut.
        sizes: as for `spread`; dims with blocks of size 1 are cut for the limit alone.
        limit: elements of a piece; those of the default fit in the processor's cache.
    """
    cuts = list[list[tuple[int, int]]]()
    for dim, (offset, stop) in enumerate(zip(region.offsets, region.stops, strict=True)):
        size = sizes[dim] if dim < len(sizes) - 1 else 1
        starts = [offset, *range(offset // size * size + size, stop, size)] if size > 1 else [offset]
        cuts.append(list(zip(starts, [*starts[1:], stop], strict=True)))
    for spans in product(*cuts):
        offsets = tuple(start for start, _ in spans)
        for block in blocks(tuple(stop - start for start, stop in spans), limit):
            yield shifted(block, offsets)
