"""The `.distcp` files of a layout, as images with holes.

Each stored chunk is one `torch.save` record. Records are found only through `.metadata`, so there may be
gaps between them: a large record is put where its data has the same offset modulo 4,096 as its source
bytes, so that file systems which share extents need not move them (and elsewhere page-aligned copies
stay page-aligned). Where the bytes are converted or gathered there is no such choice, and large data
starts at a multiple of 4,096.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from math import prod
from typing import NamedTuple

from shardkit.core.catalog import Catalog, SourceFile
from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape, flat_offset, is_contiguous
from shardkit.formats.torch_record_writer import RecordSkeleton, bare_skeleton, record_skeleton
from shardkit.layout.layout import Layout
from shardkit.transfer.images import Hole, Piece, TensorHoles

BLOCK = 4096  # the block size of the file systems that share extents, and of a page
_ALIGNED_NBYTES = 16 * BLOCK  # below this a gap costs more than it saves

Phase = Callable[[str], int | None]
"""First byte of a tensor in its source file; None where it is not copied as it lies, or not one chunk."""


@dataclass(frozen=True, slots=True)
class DcpImage:
    """One `.distcp` file: rows of the shared chunk table, in file order."""

    name: str
    size: int
    _rows: array[int]
    _images: DcpImages

    def __len__(self) -> int:
        return len(self._rows)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield the first and the last byte (exclusive) of every record."""
        table = self._images.catalog.chunks
        for row in self._rows:
            start = table.start[row]
            yield start, start + table.nbytes[row]

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield the records `start .. stop`."""
        for row in self._rows[start:stop]:
            yield self._images.piece(row)

    def records(self) -> Iterator[tuple[str, Region, tuple[int, int, int, int]]]:
        """Yield (name, region, record start and bytes, data start and bytes), in file order."""
        for row in self._rows:
            yield self._images.record(row)


class DcpImages:
    """Every record of a checkpoint to be written: where it lies and what it holds.

    `catalog` describes the finished checkpoint: one extent for each record. A tensor's rows of the chunk
    table are in the order of its regions; a file's rows are unit by unit in the order of the layout.
    """

    def __init__(
        self,
        layout: Layout,
        dtypes: Mapping[str, DType],
        sources: Mapping[str, str],
        phase: Phase,
        *,
        objects: Collection[str] = (),
    ) -> None:
        """Place every chunk of `layout`.

        Args:
            layout: tensors in the order of their units, which is that of each file.
            dtypes: what each tensor is to be stored as.
            sources: the source's name of each tensor.
            phase: where the source's bytes lie, for alignment.
            objects: names of tensors of bytes that are stored as they are, without a record around them: the
                byte entries of a checkpoint, which are records already.
        """
        self.catalog = Catalog(format="dcp", directory="", encoding="torch-record")
        self._entries: list[tuple[str, str, DType]] = []  # name, source name and dtype of each tensor
        self._tensor_of, self._skeleton_of = array("i"), array("i")
        self._skeletons: list[RecordSkeleton] = []
        self.objects = frozenset(objects)
        self._holes: dict[str, _TensorHoles] = {}
        rows = [array("i") for _ in range(layout.mesh.num_shards)]
        ends = [0] * layout.mesh.num_shards
        self.data_nbytes = [0] * layout.mesh.num_shards  # of each image, without the records around it
        for fqn in _in_file_order(layout, dtypes):
            self._place(layout, fqn, dtypes[fqn], sources[fqn], phase, rows, ends)
        names = [f"__{shard}_0.distcp" for shard in range(layout.mesh.num_shards)]
        self.catalog.files = [SourceFile(name=n, path="", size=e) for n, e in zip(names, ends, strict=True)]
        self.images = [DcpImage(n, e, r, self) for n, e, r in zip(names, ends, rows, strict=True)]

    def _place(
        self,
        layout: Layout,
        fqn: str,
        dtype: DType,
        source: str,
        phase: Phase,
        rows: Sequence[array[int]],
        ends: list[int],
    ) -> None:
        """Append a tensor's records to their files."""
        tensor, begin, itemsize = layout.tensors[fqn], phase(fqn), dtype.itemsize
        numbers: dict[Shape, int] = {}
        in_source: dict[Shape, bool] = {}  # by size: as contiguous there as here
        first, num_data_bytes = len(self._tensor_of), 0
        shards, starts, sizes, regions = list[int](), list[int](), list[int](), list[Region]()
        for shard, region in layout.owners(fqn):
            number = numbers.get(region.sizes)
            if number is None:
                number = numbers[region.sizes] = len(self._skeletons)
                make = bare_skeleton if fqn in self.objects else record_skeleton
                self._skeletons.append(make(dtype, region.sizes))
                in_source[region.sizes] = begin is not None and is_contiguous(region, tensor.shape)
            skeleton, start = self._skeletons[number], ends[shard]
            if skeleton.data_nbytes >= _ALIGNED_NBYTES:
                lies = (
                    begin + flat_offset(region.offsets, tensor.shape) * itemsize
                    if begin is not None and in_source[region.sizes]
                    else 0
                )
                start += (lies - start - len(skeleton.prefix)) % BLOCK
            ends[shard] = start + skeleton.nbytes
            num_data_bytes += skeleton.data_nbytes
            self.data_nbytes[shard] += skeleton.data_nbytes
            rows[shard].append(first + len(shards))
            self._skeleton_of.append(number)
            shards.append(shard)
            starts.append(start)
            sizes.append(skeleton.nbytes)
            regions.append(region)
        self._tensor_of.extend([len(self._entries)] * len(shards))
        self._entries.append((fqn, source, dtype))
        self._holes[fqn] = _TensorHoles(
            source, range(first, first + len(shards)), tuple(numbers), num_data_bytes
        )
        self.catalog.add_tensor_columns(fqn, dtype, tensor.shape, shards, starts, sizes, regions)

    def __iter__(self) -> Iterator[DcpImage]:
        return iter(self.images)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> DcpImage:
        return self.images[index]

    def tensors(self) -> Iterator[TensorHoles]:
        """Yield what is known of each tensor's holes together."""
        for fqn, holes in self._holes.items():
            dtype = self.catalog.tensors[fqn].dtype
            yield TensorHoles(fqn, holes.source, holes.sizes, dtype, holes.nbytes)

    def holes(self, fqn: str) -> Iterator[tuple[int, Hole]]:
        """Yield (image index, hole) of every chunk of a stored tensor, in the order of its regions."""
        for row in self._holes[fqn].rows:
            yield self.catalog.chunks.file[row], self.piece(row).hole

    def data_places(self, fqn: str) -> Iterator[tuple[int, int]]:
        """Yield (first byte in the file, bytes) of every chunk's data, in the order of the regions."""
        for row in self._holes[fqn].rows:
            skeleton = self._skeletons[self._skeleton_of[row]]
            yield self.catalog.chunks.start[row] + len(skeleton.prefix), skeleton.data_nbytes

    def record(self, row: int) -> tuple[str, Region, tuple[int, int, int, int]]:
        """Return what `DcpImage.records` yields of a row of the chunk table."""
        skeleton, start = self._skeletons[self._skeleton_of[row]], self.catalog.chunks.start[row]
        places = (start, skeleton.nbytes, start + len(skeleton.prefix), skeleton.data_nbytes)
        return self._entries[self._tensor_of[row]][0], self.catalog.chunks.region(row), places

    def piece(self, row: int) -> Piece:
        """Return the piece of a row of the chunk table."""
        _, source, dtype = self._entries[self._tensor_of[row]]
        skeleton, start = self._skeletons[self._skeleton_of[row]], self.catalog.chunks.start[row]
        prefix = skeleton.prefix
        hole = Hole(source, self.catalog.chunks.region(row), dtype, start + len(prefix), skeleton.data_nbytes)
        return Piece(start, prefix, skeleton.prefix_crc, hole, skeleton.suffix_nbytes, skeleton)


class _TensorHoles(NamedTuple):
    source: str
    rows: range
    sizes: tuple[Shape, ...]
    nbytes: int


def _in_file_order(layout: Layout, dtypes: Mapping[str, DType]) -> Iterator[str]:
    """Yield names unit by unit, in each with the small tensors spread between the large ones.

    Aligning a large record leaves a gap before it. One small record fits in most gaps; several together
    take blocks of their own, which is what the disk holds beside the shared ones.
    """
    for _, unit in groupby(layout.tensors.items(), key=lambda item: item[1].unit):
        large, small = list[str](), list[str]()
        for fqn, tensor in unit:
            nbytes = prod(tensor.shape) * dtypes[fqn].itemsize // layout.mesh.num_shards
            (large if nbytes >= _ALIGNED_NBYTES else small).append(fqn)
        between = iter(small)
        for fqn in large:
            yield fqn
            yield from islice(between, 1)
        yield from between
