"""Whether two tensors of a checkpoint hold the same bytes, read no further than their first difference."""

from __future__ import annotations

from shardkit.core.catalog import Catalog, TensorEntry
from shardkit.core.regions import Region, blocks, intersect, relative_to, runs
from shardkit.transfer.sources import Reader, SourceFiles

_BLOCK_BYTES = 1 << 20


def same_bytes(catalog: Catalog, a: str, b: str) -> bool:
    """Compare two tensors of a catalog whose extents are raw bytes.

    Tensors of different dtypes or shapes are not the same.

    Raises:
        IntegrityError, ResourceError: a file cannot be read as described.
    """
    first, second = catalog.tensors[a], catalog.tensors[b]
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    left, right = _chunks(catalog, first), _chunks(catalog, second)
    with SourceFiles(catalog.files) as files, files.reader() as reader:
        if [region for region, _ in left] == [region for region, _ in right]:  # tied tensors nearly always
            return all(
                _same_chunks(reader, catalog, one, other, first)
                for (_, one), (_, other) in zip(left, right, strict=True)
            )
        return all(
            _gather(reader, catalog, first, block) == _gather(reader, catalog, second, block)
            for block in blocks(first.shape, _BLOCK_BYTES // first.dtype.itemsize)
        )


def _chunks(catalog: Catalog, entry: TensorEntry) -> list[tuple[Region, int]]:
    """Return (region, row) of every chunk with elements, in the order of the regions."""
    regions = catalog.chunks.regions(entry.chunk_ids)
    return sorted(
        (region, row) for region, row in zip(regions, entry.chunk_ids, strict=True) if region.num_elements
    )


def _same_chunks(reader: Reader, catalog: Catalog, a: int, b: int, entry: TensorEntry) -> bool:
    table = catalog.chunks
    if (table.file[a], table.start[a]) == (table.file[b], table.start[b]):
        return True
    left, right = bytearray(_BLOCK_BYTES), bytearray(_BLOCK_BYTES)
    total = table.region(a).num_elements * entry.dtype.itemsize
    for start in range(0, total, _BLOCK_BYTES):
        size = min(_BLOCK_BYTES, total - start)
        for row, buffer in ((a, left), (b, right)):
            reader.read_into(table.file[row], memoryview(buffer)[:size], table.start[row] + start, entry.fqn)
        if left[:size] != right[:size]:
            return False
    return True


def _gather(reader: Reader, catalog: Catalog, entry: TensorEntry, block: Region) -> bytearray:
    """Return the bytes of a region, however they are chunked."""
    table, itemsize = catalog.chunks, entry.dtype.itemsize
    result = bytearray(block.num_elements * itemsize)
    for row in entry.chunk_ids:
        held = table.region(row)
        part = intersect(held, block)
        if part is None:
            continue
        data = bytearray(part.num_elements * itemsize)
        for run in runs(relative_to(part, held.offsets), held.sizes):
            view = memoryview(data)[run.target * itemsize : (run.target + run.length) * itemsize]
            reader.read_into(table.file[row], view, table.start[row] + run.source * itemsize, entry.fqn)
        for run in runs(relative_to(part, block.offsets), block.sizes):
            result[run.source * itemsize : (run.source + run.length) * itemsize] = data[
                run.target * itemsize : (run.target + run.length) * itemsize
            ]
    return result
