"""Filling the holes that cannot be streamed: tensors cut along a later dim than the first.

The source is read once, in contiguous blocks; of every block each hole takes its part. What a hole takes
from one block is contiguous in the hole wherever the source chunk spans the hole's trailing dims, so
it is one write; otherwise it is one write for each run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from shardkit.core.catalog import Catalog, TensorEntry
from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, blocks, flat_offset, intersect, relative_to, runs
from shardkit.files.digest import crc32
from shardkit.transfer.chains import Run
from shardkit.transfer.convert import Converter
from shardkit.transfer.images import Hole
from shardkit.transfer.sources import Reader, SourceFiles
from shardkit.transfer.stream import write_all

OpenTarget = Callable[[int], AbstractContextManager[tuple[int, str]]]
"""Opens an image, by its index, for writing; gives (descriptor, name) until the end of the `with`."""


class Scatter:
    """Walks one tensor at a time.

    Args:
        catalog: where the tensors lie.
        sources: how to read them.
        open_target: opens an image for writing.
        band_bytes: most bytes of source that are held at a time.
        check: called between blocks; raises to stop.
        advance: told the bytes written.
    """

    def __init__(
        self,
        catalog: Catalog,
        sources: SourceFiles,
        open_target: OpenTarget,
        *,
        band_bytes: int,
        check: Callable[[], None],
        advance: Callable[[int], None],
    ) -> None:
        self._catalog, self._sources, self._open = catalog, sources, open_target
        self._band_bytes, self._check, self._advance = band_bytes, check, advance

    def run(
        self, fqn: str, target: DType, holes: Sequence[tuple[int, Hole]], *, with_digest: bool
    ) -> tuple[int, list[Run]]:
        """Fill the given holes of a tensor; return the CRC-32 of the whole tensor as `target`, and what was read to be compared.

        The digest is that of the logical bytes where the source holds the tensor as one chunk, and 0
        without `with_digest`. With no hole left to fill (a resumed run) the tensor is only read, for the digest and
        to compare it with what its source records.
        """
        if not (holes or with_digest or self._sources.check):
            return 0, []
        with self._sources.reader() as reader:
            return self._run(reader, fqn, target, holes, with_digest=with_digest), reader.take_runs()

    def _run(
        self,
        reader: Reader,
        fqn: str,
        target: DType,
        holes: Sequence[tuple[int, Hole]],
        *,
        with_digest: bool,
    ) -> int:
        entry = self._catalog.tensors[fqn]
        converter = Converter(entry.dtype, target) if target is not entry.dtype else None
        crc = 0
        for chunk in entry.chunk_ids:
            region = self._catalog.chunks.region(chunk)
            for block in blocks(region.sizes, max(self._band_bytes // entry.dtype.itemsize, 1)):
                self._check()
                band = self._read(reader, entry, chunk, region, block)
                if converter is not None:
                    converted = bytearray(block.num_elements * target.itemsize)
                    converter(memoryview(band), memoryview(converted))
                    band = converted
                crc = crc32(band, crc) if with_digest else 0
                corner = tuple(a + b for a, b in zip(region.offsets, block.offsets, strict=True))
                self._deal_out(band, Region(corner, block.sizes), holes)
        return crc

    def _read(
        self, reader: Reader, entry: TensorEntry, chunk: int, region: Region, block: Region
    ) -> bytearray:
        itemsize, table = entry.dtype.itemsize, self._catalog.chunks
        band = bytearray(block.num_elements * itemsize)
        start = table.start[chunk] + flat_offset(block.offsets, region.sizes) * itemsize
        reader.read_into(table.file[chunk], memoryview(band), start, entry.fqn)
        return band

    def _deal_out(self, band: bytearray, block: Region, holes: Sequence[tuple[int, Hole]]) -> None:
        import numpy  # a tenth of a second that most runs do not need

        for image, hole in holes:
            part = intersect(hole.region, block)
            if part is None:
                continue
            elements = numpy.frombuffer(band, dtype=f"V{hole.dtype.itemsize}").reshape(block.sizes)
            inside = relative_to(part, block.offsets)
            window = elements[tuple(slice(o, o + s) for o, s in zip(*inside, strict=True))]
            data = numpy.ascontiguousarray(window).view(numpy.uint8).reshape(-1).data
            self._write(image, hole, relative_to(part, hole.region.offsets), data)
            self._advance(len(data))

    def _write(self, image: int, hole: Hole, target: Region, data: memoryview) -> None:
        itemsize, done = hole.dtype.itemsize, 0
        with self._open(image) as (fd, name):
            for run in runs(target, hole.region.sizes):
                length = run.length * itemsize
                write_all(fd, data[done : done + length], hole.start + run.source * itemsize, name, hole.fqn)
                done += length
