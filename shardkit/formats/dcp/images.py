"""Plan the `.distcp` files of a layout as images with holes.

Each stored chunk is one `torch.save` record. Readers find records only through `.metadata`, so there may be
gaps between them. A large record is placed so that its data has the same offset modulo 4,096 as its source bytes:
file systems that share extents then need not copy them, and elsewhere page-aligned copies stay page-aligned.
If bytes are converted or gathered they have no such source offset, and large data starts at a multiple of 4,096.

Records are in the natural order of their names. Neither a wrap policy nor tracing the model changes it.

Trainers that save model and optimizer separately write several DCP directories, in folders of one checkpoint.
`JoinedImages` combines their images into one set, with the folder in front of each name.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardkit.core.catalog import Catalog, SourceFile, join_name
from shardkit.core.dtypes import DType
from shardkit.core.regions import Shape, flat_offsets, is_contiguous
from shardkit.formats.torchsave.writer import RecordSkeleton, bare_skeleton, record_skeleton
from shardkit.keys.names import natural
from shardkit.layout.layout import Layout
from shardkit.transfer.images import Hole, ImageList, Piece, TensorHoles

BLOCK = 4096  # the block size of the file systems that share extents, and of a page
_ALIGNED_NBYTES = 16 * BLOCK  # below this a gap costs more than it saves

Phase = Callable[[str], int | None]
"""Returns the first byte of a tensor in its source file; None if it is converted, or is stored in several chunks."""


class RecordKind(NamedTuple):
    """The shared description of all records of one tensor whose chunks have equal sizes."""

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
        """Yield (start, stop) of every record, in bytes."""
        table = self._images.catalog.chunks
        for row in self._rows:
            start = table.start[row]
            yield start, start + table.nbytes[row]

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield the records `start .. stop`."""
        kinds, kind_of, first_of = self._images.kinds, self._images.kind_of, self._images.first_of
        starts = self._images.catalog.chunks.start
        for row in self._rows[start:stop]:
            _, source, dtype, _, skeleton = kinds[kind_of[row]]
            yield Piece(starts[row], skeleton, source, first_of[row], skeleton.data_nbytes, dtype)

    def hole(self, index: int) -> Hole:
        """Return the hole of a record."""
        return self._images.hole(self._rows[index])

    def records(self) -> Iterator[tuple[int, list[int], int]]:
        """Yield (index into `DcpImages.kinds`, the region's offsets, first byte), in file order."""
        kinds, kind_of, table = self._images.kinds, self._images.kind_of, self._images.catalog.chunks
        for row in self._rows:
            kind = kind_of[row]
            yield kind, table.offsets(row, len(kinds[kind].sizes)), table.start[row]


class DcpImages(ImageList[DcpImage]):
    """The images of a DCP checkpoint to be written: the place and content of every record.

    `catalog` describes the finished checkpoint, with one extent for each record. In its chunk table the rows of a
    tensor are in the order of its regions. In a file, records are in the natural order of their names, objects last.
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
            layout: the regions of each tensor, by rank.
            dtypes: the dtype in which each tensor is stored.
            sources: each tensor's name in the source.
            phase: returns the place of the source's bytes, for alignment.
            objects: names of byte entries. They are records already, so no record is put around them.
        """
        self.catalog = Catalog(format="dcp", directory="", encoding="torch-record")
        self.kinds: list[RecordKind] = []
        self.kind_of = array("i")
        """By row of the chunk table, the index into `kinds`."""
        self.first_of = array("q")
        """By row, the first element of its region in the whole tensor."""
        self.objects = frozenset(objects)
        self._holes: dict[str, TensorHoles] = {}
        file_ranks = layout.mesh.file_ranks
        self._file_of = None if layout.mesh.pp == 1 else {rank: file for file, rank in enumerate(file_ranks)}
        num_files = len(file_ranks)
        rows = [array("i") for _ in range(num_files)]
        ends = [0] * num_files
        self.data_nbytes = [0] * num_files
        """Bytes of data in each image, without the records around it."""
        for fqn in sorted(layout.tensors, key=lambda fqn: (fqn in self.objects, natural(fqn))):
            self._place(layout, fqn, dtypes[fqn], sources[fqn], phase(fqn), rows, ends)
        names = [f"__{rank}_0.distcp" for rank in file_ranks]
        self.catalog.files = [SourceFile(name=n, path="", size=e) for n, e in zip(names, ends, strict=True)]
        self.images = [DcpImage(n, e, r, self) for n, e, r in zip(names, ends, rows, strict=True)]

    def _place(
        self,
        layout: Layout,
        fqn: str,
        dtype: DType,
        source: str,
        begin: int | None,
        rows: Sequence[array[int]],
        ends: list[int],
    ) -> None:
        """Append a tensor's records to their files."""
        shape = layout.tensors[fqn].shape
        owners = list(layout.owners(fqn))
        ranks, regions = [rank for rank, _ in owners], [region for _, region in owners]
        if self._file_of is not None:  # with pipeline stages, ranks without a file lie between ranks with one
            ranks = [self._file_of[rank] for rank in ranks]
        firsts = flat_offsets([region.offsets for region in regions], shape)
        first_row, num_data_bytes, data_nbytes = len(self.kind_of), 0, self.data_nbytes
        kind_numbers, make = dict[Shape, int](), bare_skeleton if fqn in self.objects else record_skeleton
        starts, nbytes, kinds = list[int](), list[int](), list[int]()
        sizes: Shape | None = None
        for row, (rank, region, first) in enumerate(zip(ranks, regions, firsts, strict=True), first_row):
            if region.sizes != sizes:  # neighbours nearly always have equal sizes
                sizes = region.sizes
                if sizes not in kind_numbers:
                    kind_numbers[sizes] = len(self.kinds)
                    self.kinds.append(RecordKind(fqn, source, dtype, sizes, make(dtype, sizes)))
                number = kind_numbers[sizes]
                skeleton = self.kinds[number].skeleton
                lead, chunk_nbytes, whole = len(skeleton.prefix), skeleton.data_nbytes, skeleton.nbytes
                is_in_source = begin is not None and is_contiguous(region, shape)
                base, step = (begin or 0, dtype.itemsize) if is_in_source else (0, 0)
            start = ends[rank]
            if chunk_nbytes >= _ALIGNED_NBYTES:
                start += (base + first * step - start - lead) % BLOCK
            ends[rank] = start + whole
            num_data_bytes += chunk_nbytes
            data_nbytes[rank] += chunk_nbytes
            rows[rank].append(row)
            kinds.append(number)
            starts.append(start)
            nbytes.append(whole)
        self.kind_of.extend(kinds)
        self.first_of.extend(firsts)
        self._holes[fqn] = TensorHoles(fqn, source, tuple(kind_numbers), dtype, num_data_bytes)
        self.catalog.add_tensor_columns(fqn, dtype, shape, ranks, starts, nbytes, regions)

    def tensors(self) -> Iterator[TensorHoles]:
        """Yield one `TensorHoles` for each tensor, which describes all of its holes."""
        yield from self._holes.values()

    def holes(self, fqn: str) -> Iterator[tuple[int, Hole]]:
        """Yield (image index, hole) of every chunk of a stored tensor, in the order of its regions."""
        for row in self.catalog.tensors[fqn].chunk_ids:
            yield self.catalog.chunks.file[row], self.hole(row)

    def data_places(self, fqn: str) -> Iterator[tuple[int, int]]:
        """Yield (first byte in the file, bytes) of every chunk's data, in the order of the regions."""
        for row in self.catalog.tensors[fqn].chunk_ids:
            skeleton = self.kinds[self.kind_of[row]].skeleton
            yield self.catalog.chunks.start[row] + len(skeleton.prefix), skeleton.data_nbytes

    def hole(self, row: int) -> Hole:
        """Return the hole of a row of the chunk table."""
        _, source, dtype, _, skeleton = self.kinds[self.kind_of[row]]
        table = self.catalog.chunks
        start = table.start[row] + len(skeleton.prefix)
        return Hole(source, table.region(row), dtype, start, skeleton.data_nbytes)


class JoinedImages(ImageList[DcpImage]):
    """The images of several folders, combined into one `shardkit.transfer.images.ImageSet`.

    Args:
        sets: images by folder, with the source names of the joined catalog.
    """

    def __init__(self, sets: Mapping[str, DcpImages]) -> None:
        self._sets = sets
        self.images = [
            replace(image, name=join_name(folder, image.name))
            for folder, images in sets.items()
            for image in images
        ]
        self.data_nbytes = [nbytes for images in sets.values() for nbytes in images.data_nbytes]
        self._first: dict[str, int] = {}
        for folder in sets:
            self._first[folder] = sum(len(sets[before]) for before in self._first)
        self._places = {
            join_name(folder, holes.fqn): (folder, holes.fqn)
            for folder, images in sets.items()
            for holes in images.tensors()
        }

    def tensors(self) -> Iterator[TensorHoles]:
        """Yield one `TensorHoles` for each tensor, which describes all of its holes."""
        for folder, images in self._sets.items():
            for holes in images.tensors():
                yield holes._replace(fqn=join_name(folder, holes.fqn))

    def holes(self, fqn: str) -> Iterator[tuple[int, Hole]]:
        """Yield (image index, hole) of every chunk of a tensor."""
        folder, name = self._places[fqn]
        for index, hole in self._sets[folder].holes(name):
            yield self._first[folder] + index, hole
