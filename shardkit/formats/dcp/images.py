"""The `.distcp` files of a layout, as images with holes.

Each stored chunk is one `torch.save` record. Records are found only through `.metadata`, so there may be
gaps between them: a large record is put where its data has the same offset modulo 4,096 as its source
bytes, so that file systems which share extents need not move them (and elsewhere page-aligned copies
stay page-aligned). Where the bytes are converted or gathered there is no such choice, and large data
starts at a multiple of 4,096.

The order of the records is that of the names: a wrap policy, or whether a model was traced, changes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardkit.core.catalog import Catalog, SourceFile
from shardkit.core.dtypes import DType
from shardkit.core.regions import Shape, flat_offsets, is_contiguous
from shardkit.formats.torchsave.writer import RecordSkeleton, bare_skeleton, record_skeleton
from shardkit.keys.names import natural
from shardkit.layout.layout import Layout
from shardkit.transfer.images import Hole, Piece, TensorHoles

BLOCK = 4096  # the block size of the file systems that share extents, and of a page
_ALIGNED_NBYTES = 16 * BLOCK  # below this a gap costs more than it saves

Phase = Callable[[str], int | None]
"""First byte of a tensor in its source file; None where it is not copied as it lies, or not one chunk."""


class RecordKind(NamedTuple):
    """What all records of one tensor and one size have in common."""

    fqn: str
    """The stored name."""
    source: str
    """The name in the source catalog."""
    dtype: DType
    sizes: Shape
    """Of the chunk, in elements."""
    skeleton: RecordSkeleton


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
        return self._images.pieces(self._rows[start:stop])

    def hole(self, index: int) -> Hole:
        """Return the hole of a record."""
        return self._images.hole(self._rows[index])

    def records(self) -> Iterator[tuple[int, list[int], int]]:
        """Yield (index into `DcpImages.kinds`, the region's offsets, first byte), in file order."""
        return self._images.records(self._rows)


class DcpImages:
    """Every record of a checkpoint to be written: where it lies and what it holds.

    `catalog` describes the finished checkpoint: one extent for each record. A tensor's rows of the chunk
    table are in the order of its regions; a file's rows are in the natural order of their names, objects last.
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
            layout: where each tensor's regions belong.
            dtypes: what each tensor is to be stored as.
            sources: the source's name of each tensor.
            phase: where the source's bytes lie, for alignment.
            objects: names of tensors of bytes that are stored as they are, without a record around them: the
                byte entries of a checkpoint, which are records already.
        """
        self.catalog = Catalog(format="dcp", directory="", encoding="torch-record")
        self.kinds: list[RecordKind] = []
        # Of each row of the chunk table: its kind, and the first element of its region in the whole tensor.
        self._kind_of, self._first_of = array("i"), array("q")
        self.objects = frozenset(objects)
        self._holes: dict[str, _TensorHoles] = {}
        rows = [array("i") for _ in range(layout.mesh.num_shards)]
        ends = [0] * layout.mesh.num_shards
        self.data_nbytes = [0] * layout.mesh.num_shards  # of each image, without the records around it
        for fqn in sorted(layout.tensors, key=lambda fqn: (fqn in self.objects, natural(fqn))):
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
        shape, begin = layout.tensors[fqn].shape, phase(fqn)
        owners = list(layout.owners(fqn))
        shards, regions = [shard for shard, _ in owners], [region for _, region in owners]
        firsts = flat_offsets([region.offsets for region in regions], shape)
        first_row, num_data_bytes, data_nbytes = len(self._kind_of), 0, self.data_nbytes
        known: dict[Shape, int] = {}
        starts, nbytes, kinds = list[int](), list[int](), list[int]()
        sizes: Shape | None = None
        for row, (shard, region, first) in enumerate(zip(shards, regions, firsts, strict=True), first_row):
            if region.sizes != sizes:  # nearly all are of one size, one after the other
                sizes = region.sizes
                if sizes not in known:
                    known[sizes] = self._add_kind(fqn, source, dtype, sizes)
                number = known[sizes]
                skeleton = self.kinds[number].skeleton
                lead, held, whole = len(skeleton.prefix), skeleton.data_nbytes, skeleton.nbytes
                is_in_source = begin is not None and is_contiguous(region, shape)
                base, step = (begin or 0, dtype.itemsize) if is_in_source else (0, 0)
            start = ends[shard]
            if held >= _ALIGNED_NBYTES:
                start += (base + first * step - start - lead) % BLOCK
            ends[shard] = start + whole
            num_data_bytes += held
            data_nbytes[shard] += held
            rows[shard].append(row)
            kinds.append(number)
            starts.append(start)
            nbytes.append(whole)
        self._kind_of.extend(kinds)
        self._first_of.extend(firsts)
        row_range = range(first_row, first_row + len(shards))
        self._holes[fqn] = _TensorHoles(source, row_range, tuple(known), num_data_bytes)
        self.catalog.add_tensor_columns(fqn, dtype, shape, shards, starts, nbytes, regions)

    def _add_kind(self, fqn: str, source: str, dtype: DType, sizes: Shape) -> int:
        make = bare_skeleton if fqn in self.objects else record_skeleton
        self.kinds.append(RecordKind(fqn, source, dtype, sizes, make(dtype, sizes)))
        return len(self.kinds) - 1

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
            yield self.catalog.chunks.file[row], self.hole(row)

    def data_places(self, fqn: str) -> Iterator[tuple[int, int]]:
        """Yield (first byte in the file, bytes) of every chunk's data, in the order of the regions."""
        for row in self._holes[fqn].rows:
            skeleton = self.kinds[self._kind_of[row]].skeleton
            yield self.catalog.chunks.start[row] + len(skeleton.prefix), skeleton.data_nbytes

    def records(self, rows: Iterable[int]) -> Iterator[tuple[int, list[int], int]]:
        """Yield what `DcpImage.records` does of rows of the chunk table."""
        kinds, kind_of, table = self.kinds, self._kind_of, self.catalog.chunks
        for row in rows:
            kind = kind_of[row]
            yield kind, table.offsets(row, len(kinds[kind].sizes)), table.start[row]

    def pieces(self, rows: Iterable[int]) -> Iterator[Piece]:
        """Yield the pieces of rows of the chunk table."""
        kinds, kind_of, first_of, starts = (
            self.kinds,
            self._kind_of,
            self._first_of,
            self.catalog.chunks.start,
        )
        for row in rows:
            _, source, dtype, _, skeleton = kinds[kind_of[row]]
            yield Piece(starts[row], skeleton, source, first_of[row], skeleton.data_nbytes, dtype)

    def hole(self, row: int) -> Hole:
        """Return the hole of a row of the chunk table."""
        _, source, dtype, _, skeleton = self.kinds[self._kind_of[row]]
        table = self.catalog.chunks
        start = table.start[row] + len(skeleton.prefix)
        return Hole(source, table.region(row), dtype, start, skeleton.data_nbytes)


class _TensorHoles(NamedTuple):
    source: str
    rows: range
    sizes: tuple[Shape, ...]
    nbytes: int
