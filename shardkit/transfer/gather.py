"""Filling a hole from chunks that are not runs of the tensor: the columns of a weight cut by tensor parallelism.

The mirror of scattering. The hole is filled front to back in bands; of every chunk the part that lies in
the band is read, which is one run of the chunk for any grid of chunks, and put in its place in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardkit.core.catalog import Catalog
from shardkit.core.regions import Region, Shape, blocks, intersect, relative_to, runs
from shardkit.transfer.images import Hole
from shardkit.transfer.sources import Reader

if TYPE_CHECKING:
    import numpy


def bands(hole: Hole, catalog: Catalog, reader: Reader, limit: int) -> Iterator[memoryview]:
    """Yield a hole's bytes in order, in the source's dtype; each view is valid until the next.

    Args:
        hole: a run of its tensor, none of whose chunks has to be decoded.
        catalog: where the tensor lies.
        reader: reads it.
        limit: most bytes of a band. As much again holds a part on its way.
    """
    entry, table = catalog.tensors[hole.fqn], catalog.chunks
    itemsize = entry.dtype.itemsize
    chunks = list(zip(entry.chunk_ids, table.regions(entry.chunk_ids), strict=True))
    band_bytes, part_bytes = bytearray(), bytearray()
    for block in blocks(hole.region.sizes, max(limit // itemsize, 1)):
        if not band_bytes:  # the first is the largest
            band_bytes = bytearray(block.num_elements * itemsize)
            part_bytes = bytearray(len(band_bytes))
        corner = tuple(a + b for a, b in zip(hole.region.offsets, block.offsets, strict=True))
        band = Region(corner, block.sizes)
        view = memoryview(band_bytes)[: block.num_elements * itemsize]
        elements = _as_array(view, block.sizes, itemsize)
        for row, held in chunks:
            part = intersect(band, held)
            if part is None:
                continue
            read = memoryview(part_bytes)[: part.num_elements * itemsize]
            for run in runs(relative_to(part, held.offsets), held.sizes):
                start, stop = run.target * itemsize, (run.target + run.length) * itemsize
                place = table.start[row] + run.source * itemsize
                reader.read_into(table.file[row], read[start:stop], place, hole.fqn)
            inside = relative_to(part, corner)
            window = [slice(o, o + s) for o, s in zip(inside.offsets, inside.sizes, strict=True)]
            window[-1] = slice(window[-1].start * itemsize, window[-1].stop * itemsize)
            elements[tuple(window)] = _as_array(read, part.sizes, itemsize)
        yield view


def _as_array(view: memoryview, sizes: Shape, itemsize: int) -> numpy.ndarray:
    """View bytes as a box of bytes whose last dim counts bytes: numpy moves its rows whole, of any dtype."""
    import numpy  # a tenth of a second that most runs do not need

    return numpy.frombuffer(view, dtype=numpy.uint8).reshape(*sizes[:-1], sizes[-1] * itemsize)
