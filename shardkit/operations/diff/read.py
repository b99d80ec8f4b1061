"""Reading one tensor front to back in bands, however it is chunked; two tensors of a shape go in step."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit.core.catalog import Catalog
from shardkit.core.regions import blocks, full_region
from shardkit.transfer.plan import FlatSource, flat_source
from shardkit.transfer.sources import Reader, bands


def tensor_bands(catalog: Catalog, stored: str, reader: Reader, max_elements: int) -> Iterator[memoryview]:
    """Yield a tensor's bytes row-major; each view is valid until the next.

    The cuts depend on shape and `max_elements` alone, so that two tensors of one shape are cut alike.

    Args:
        catalog: raw extents.
        stored: the tensor's name in it.
        reader: of the catalog's files.
        max_elements: of a band; a tensor that has to be gathered takes as much memory again.

    Raises:
        IntegrityError, ResourceError: a file cannot be read as described.
    """
    entry = catalog.tensors[stored]
    if not entry.num_elements:
        return
    if not entry.shape:  # a scalar: one chunk, stored or decoded
        yield _scalar(catalog, stored, reader)
        return
    flat = flat_source(entry, catalog)
    if flat is None:
        whole = full_region(entry.shape)
        yield from bands(catalog, stored, whole, reader, max_elements * entry.dtype.itemsize)
        return
    start, buffer = 0, bytearray()
    for block in blocks(entry.shape, max_elements):
        num_elements = block.num_elements
        buffer = buffer or bytearray(num_elements * entry.dtype.itemsize)  # the first is the largest
        view = memoryview(buffer)[: num_elements * entry.dtype.itemsize]
        _fill(view, flat, start, reader, stored)
        yield view
        start += num_elements


def _scalar(catalog: Catalog, stored: str, reader: Reader) -> memoryview:
    entry, table = catalog.tensors[stored], catalog.chunks
    row = entry.first_chunk
    view = memoryview(bytearray(entry.nbytes))
    reader.read_into(table.file[row], view, table.start[row], stored)
    return view


def _fill(view: memoryview, flat: FlatSource, start: int, reader: Reader, stored: str) -> None:
    at = 0
    for move in flat.moves(start, start + len(view) // flat.dtype.itemsize):
        reader.read_into(move.file, view[at : at + move.nbytes], move.start, stored)
        at += move.nbytes
