"""The `.distcp` files of a layout, as images with holes.

Each stored chunk is one `torch.save` record. Records are found only through `.metadata`, so there may be
gaps between them: a large record is put where its data has the same offset modulo 4,096 as its source
bytes, so that file systems which share extents need not move them (and elsewhere page-aligned copies
stay page-aligned). Where the bytes are converted or gathered there is no such choice, and large data
starts at a multiple of 4,096.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardkit.core.catalog import Catalog, ChunkTable, SourceFile
from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape
from shardkit.formats.torch_record_writer import RecordSkeleton, record_skeleton
from shardkit.layout.layout import Layout
from shardkit.transfer.images import Hole, Piece

BLOCK = 4096  # the block size of the file systems that share extents, and of a page
_ALIGNED_NBYTES = 16 * BLOCK  # below this a gap costs more than it saves

Phase = Callable[[str, Region], int | None]
"""Offset modulo BLOCK of a region's bytes in the source, None where they are not copied as they lie."""


class Record(NamedTuple):
    """One chunk of a `.distcp` file; sizes in elements and bytes as in `chunk_list.ListedChunk`."""

    fqn: str
    dtype: DType
    shape: Shape
    region: Region
    record_start: int
    record_nbytes: int
    data_start: int
    data_nbytes: int


@dataclass(frozen=True, slots=True)
class DcpImage:
    """One `.distcp` file: rows of the shared chunk table, in file order."""

    name: str
    size: int
    _rows: array[int]
    _images: DcpImages

    def __len__(self) -> int:
        return len(self._rows)

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield the records `start .. stop`."""
        for row in self._rows[start:stop]:
            yield self._images.piece(row)

    def records(self) -> Iterator[Record]:
        """Yield what the chunk list says of each record, in file order."""
        for row in self._rows:
            yield self._images.record(row)

    @property
    def hole_bytes(self) -> int:
        """Bytes of data in the file."""
        return sum(record.data_nbytes for record in self.records())


class DcpImages:
    """Every record of a checkpoint to be written: where it lies and what it holds.

    `catalog` describes the finished checkpoint: one extent for each record.
    """

    def __init__(
        self, layout: Layout, dtypes: Mapping[str, DType], sources: Mapping[str, str], phase: Phase
    ) -> None:
        """Place every chunk of `layout`.

        Args:
            layout: tensors in the order in which they are to lie in each file.
            dtypes: what each tensor is to be stored as.
            sources: the source's name of each tensor.
            phase: where the source's bytes lie, for alignment.
        """
        self.catalog = Catalog(format="dcp", directory="", encoding="torch-record")
        self._tensor_of = array("i")
        self._fqns: list[str] = []
        self._sources = sources
        rows = [array("i") for _ in range(layout.mesh.num_shards)]
        ends = [0] * layout.mesh.num_shards
        for fqn in layout.tensors:
            self._place(layout, fqn, dtypes[fqn], phase, rows, ends)
        names = [f"__{shard}_0.distcp" for shard in range(layout.mesh.num_shards)]
        self.catalog.files = [SourceFile(name=n, path="", size=e) for n, e in zip(names, ends, strict=True)]
        self.images = [DcpImage(n, e, r, self) for n, e, r in zip(names, ends, rows, strict=True)]

    def _place(
        self,
        layout: Layout,
        fqn: str,
        dtype: DType,
        phase: Phase,
        rows: Sequence[array[int]],
        ends: list[int],
    ) -> None:
        skeletons: dict[object, RecordSkeleton] = {}
        tensor, number = layout.tensors[fqn], len(self._fqns)
        self._fqns.append(fqn)

        def chunks() -> Iterator[tuple[int, int, int, Region]]:
            for shard, region in layout.owners(fqn):
                skeleton = skeletons.get(region.sizes)
                if skeleton is None:
                    skeleton = skeletons[region.sizes] = record_skeleton(dtype, region.sizes)
                start = ends[shard]
                if skeleton.data_nbytes >= _ALIGNED_NBYTES:
                    start += ((phase(fqn, region) or 0) - start - len(skeleton.prefix)) % BLOCK
                ends[shard] = start + skeleton.nbytes
                rows[shard].append(len(self._tensor_of))
                self._tensor_of.append(number)
                yield shard, start, skeleton.nbytes, region

        self.catalog.add_tensor(fqn, dtype, tensor.shape, chunks())

    def piece(self, row: int) -> Piece:
        """Return the piece of a row of the chunk table."""
        fqn, region = self._fqns[self._tensor_of[row]], self.chunks.region(row)
        dtype = self.catalog.tensors[fqn].dtype
        skeleton = record_skeleton(dtype, region.sizes)
        start = self.chunks.start[row]
        hole = Hole(self._sources[fqn], region, dtype, start + len(skeleton.prefix), skeleton.data_nbytes)
        return Piece(start, skeleton.prefix, skeleton.prefix_crc, hole, skeleton.suffix_nbytes, skeleton)

    def record(self, row: int) -> Record:
        """Return what a row of the chunk table holds."""
        fqn, region = self._fqns[self._tensor_of[row]], self.chunks.region(row)
        entry = self.catalog.tensors[fqn]
        skeleton, start = record_skeleton(entry.dtype, region.sizes), self.chunks.start[row]
        data = (start + len(skeleton.prefix), skeleton.data_nbytes)
        return Record(fqn, entry.dtype, entry.shape, region, start, skeleton.nbytes, *data)

    @property
    def chunks(self) -> ChunkTable:
        """One row for each record."""
        return self.catalog.chunks
