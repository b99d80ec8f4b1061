"""Catalogs: the tensors of a checkpoint, their chunks, and the location of each chunk's bytes. No tensor data.

`subset` selects tensors of a catalog; `combine_catalogs` (parts of a state dict) and `join_catalogs` (folders) merge
several catalogs into one.

Chunks are stored in columns, one `array` per property, rather than as objects: a checkpoint of 1,024 ranks has
600,000 chunks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape, intersect

if TYPE_CHECKING:
    import os

    import numpy
    import torch

    Ints = numpy.ndarray[Any, numpy.dtype[numpy.int64]]

MIN_TOTAL = 16384
"""Catalogs with at least this many chunks use numpy; for fewer, importing it costs more than it saves."""
MIN_COLUMNS = 64
"""For tensors with at least this many chunks, columns are faster than processing chunks one by one."""

# `Region(offsets, sizes)` from a pair, without a call of a Python function for each of 600,000 chunks.
_new_region: Callable[[tuple[Shape, Shape]], Region] = partial(tuple.__new__, Region)


class FileStamp(NamedTuple):
    """Identity and state of a file at the time its description was read."""

    size: int
    modified_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        """Return the stamp of a file from its `os.stat` result."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


UNSEEN = -1
"""Placeholder for the CRC-32 of a record that has not been opened."""


class OpenRecords(Protocol):
    """Opens the records of some tensors of a catalog. Each process opens only the records that it reads.

    Returns a catalog of raw extents in which all other tensors have no chunks (see `with_missing`).

    Raises:
        SourceError, IntegrityError, ResourceError: naming file and tensor; all problems of a kind at once.
    """

    def __call__(self, names: Collection[str], /, *, as_read: bool = False) -> Catalog:
        """Open the records; with `as_read`, opening may be deferred to the returned catalog's `late`."""
        ...


class LateRecords(Protocol):
    """Records that are opened when they are read. In a store, header and data then arrive in the same requests.

    The methods may be called from any thread. `descriptor` returns the descriptor of a file, given its number.

    Raises:
        SourceError, IntegrityError, ResourceError: as `OpenRecords`.
    """

    def open(self, fqn: str, descriptor: Callable[[int], int], /) -> None:
        """Open the records of a tensor: its chunks become raw extents."""

    def opened(self, file: int, start: int, descriptor: Callable[[int], int], /) -> tuple[int, int]:
        """Open a record, and return (file, first byte) of the data that `start` points to.

        Args:
            file: number of the record's file.
            start: first byte of the record, plus an offset into its data.
        """
        ...


class Checksums:
    """Stretches of a file with a recorded CRC-32, as in a zip's directory; in columns, sorted by first byte.

    Stretches do not overlap. A CRC-32 of 0 means that none is recorded; `UNSEEN` marks a record that was not opened yet.
    """

    __slots__ = ("crcs", "starts", "stops")

    def __init__(self, starts: array[int], stops: array[int], crcs: array[int]) -> None:
        self.starts, self.stops, self.crcs = starts, stops, crcs

    @classmethod
    def of(cls, stretches: Iterable[tuple[int, int, int | None]]) -> Checksums:
        """Return the checksums of stretches in any order: (first byte, bytes, CRC-32 or None).

        Duplicates and empty stretches are dropped.
        """
        rows = sorted({(start, nbytes, crc or 0) for start, nbytes, crc in stretches if nbytes})
        return cls(
            array("q", [start for start, _, _ in rows]),
            array("q", [start + nbytes for start, nbytes, _ in rows]),
            array("q", [crc for _, _, crc in rows]),
        )

    @classmethod
    def of_columns(cls, starts: Ints, nbytes: Ints, crcs: Ints) -> Checksums:
        """Return the checksums of stretches in columns; a CRC-32 of 0 stands for None."""
        kept = nbytes > 0
        starts, nbytes, crcs = starts[kept], nbytes[kept], crcs[kept]
        if (starts[1:] <= starts[:-1]).any():
            return cls.of(zip(starts.tolist(), nbytes.tolist(), crcs.tolist(), strict=True))
        columns = (starts, starts + nbytes, crcs.astype(starts.dtype))
        return cls(*(array("q", column.tobytes()) for column in columns))

    def __len__(self) -> int:
        return len(self.starts)

    def __or__(self, other: Checksums) -> Checksums:
        """Return the union of two sets of checksums of the same file."""
        if self is other:
            return self
        return Checksums.of((*self.rows(), *other.rows()))

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first byte, bytes, CRC-32) of each stretch."""
        for start, stop, crc in zip(self.starts, self.stops, self.crcs, strict=True):
            yield start, stop - start, crc


class SourceReader(Protocol):
    """Reads the files of a catalog."""

    def read_into(self, file: int, buffer: memoryview, start: int, fqn: str, /) -> int | None:
        """Fill a buffer from byte `start` of a file, for tensor `fqn`; return the CRC-32 if it was computed."""


class StoredParts(Protocol):
    """Read access to the stored tensors from which a codec computes."""

    def entry(self, name: str, /) -> TensorEntry:
        """Return dtype and shape of a tensor."""

    def of_tensor(self, fqn: str, /) -> StoredParts:
        """Return the same with another computed tensor, for which reads then count."""

    def box(self, name: str, region: Region, /) -> numpy.ndarray:
        """Return a box of a tensor, as unsigned integers of its item size (void above 8 bytes).

        The array is new, and may be changed.
        """

    def values(self, name: str, region: Region, /) -> torch.Tensor:
        """Return a box of a tensor, in its own dtype."""

    def whole(self, name: str, /) -> torch.Tensor:
        """Return all of a tensor, in its own dtype."""


class Codec(Protocol):
    """Computes a tensor from stored tensors, one box at a time.

    Peak memory is a few times the size of the box and of the stored elements that it needs, which are read through
    `StoredParts`, regardless of the tensor's size. A box may begin and end anywhere. Its bytes equal those of the whole
    tensor at this place, whatever other boxes are computed and in whatever order.
    """

    @property
    def of(self) -> tuple[str, ...]:
        """Names of the stored tensors that it needs; error messages name the first."""

    @property
    def dtype(self) -> DType:
        """Dtype of the computed tensor."""

    @property
    def shape(self) -> Shape:
        """Shape of the computed tensor."""

    @property
    def needs_torch(self) -> bool:
        """True if computing needs torch."""

    def fill(self, parts: StoredParts, region: Region, target: numpy.ndarray, /) -> None:
        """Compute a box of the tensor.

        Args:
            parts: the stored tensors.
            region: of the computed tensor.
            target: receives the values, as unsigned integers of their size (void above 8 bytes); its last dim is contiguous.
        """


@runtime_checkable
class BlockCodec(Codec, Protocol):
    """A codec that computes whole blocks of its tensor's elements, of which a box may need a part."""

    @property
    def block_elements(self) -> int:
        """Elements of a block, at least 1. Each matrix begins with one, and they follow each other; the last may be larger."""


OnRead = Callable[[str, int, memoryview], None]
"""Called with each read that decoding makes: path of the file, first byte, stored bytes."""


def ignore_read(path: str, start: int, data: memoryview) -> None:
    """An `OnRead` that does nothing."""


class Decoded(NamedTuple):
    """Bytes that are only available after decoding all of them (legacy `.bin`, compressed records)."""

    decode: Callable[[OnRead], memoryview]
    span: tuple[int, int] | None = None
    """(first byte, end) of the file range that decoding reads, if it is a single range."""
    is_proved: bool = False
    """True if decoding verifies a checksum, or the source was verified when the file was opened."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Computed:
    """Bytes that a codec computes from other files of the catalog, one box at a time. Reads count for those files."""

    codec: Codec
    catalog: Catalog
    """The catalog that the codec reads; raw extents."""
    numbers: Sequence[int] | None = None
    """Maps file numbers of `catalog` to those of the reader; None if they are equal."""
    group: object = None
    """Tensors of equal group are computed together, whole; None if each box is computed independently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file that chunks point into."""

    name: str
    """Name relative to the checkpoint, for messages and manifests."""
    path: str
    """Path to open; empty if not determined yet. For derived bytes, one of the files that they are computed from."""
    size: int
    """Bytes."""
    derivation: Decoded | Computed | None = None
    """How the bytes are obtained if they are not stored as such. Such a file holds a single tensor, row-major."""
    checksums: Checksums | None = None
    """Checksums to compare the bytes at `path` with; None if nothing is recorded."""
    stamp: FileStamp | None = None
    """Stamp of the descriptor that the description was read from; None if it was not recorded."""

    @property
    def is_raw(self) -> bool:
        """True if the bytes are stored at `path` as they are."""
        return self.derivation is None

    def decoded(self) -> memoryview:
        """Decode the file, and return its bytes."""
        assert isinstance(self.derivation, Decoded)
        return self.derivation.decode(ignore_read)

    @property
    def is_proved(self) -> bool:
        """True if decoding proves that the stored bytes are those that were written."""
        return isinstance(self.derivation, Decoded) and self.derivation.is_proved


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a catalog. Its chunks are rows `first_chunk .. first_chunk + num_chunks` of the table."""

    fqn: str
    dtype: DType
    shape: Shape
    first_chunk: int
    num_chunks: int

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, counted once."""
        return self.num_elements * self.dtype.itemsize

    @property
    def chunk_ids(self) -> range:
        """Rows of the chunk table."""
        return range(self.first_chunk, self.first_chunk + self.num_chunks)


class ChunkTable:
    """Chunks in columns: file, first byte, number of bytes and region of each.

    A chunk's bytes are row-major and contiguous over its region, unless the catalog's `encoding` says that
    each extent is a record that has to be opened first.
    """

    __slots__ = ("_box_at", "_boxes", "file", "nbytes", "start")

    def __init__(self) -> None:
        self.file, self.start, self.nbytes = array("i"), array("q"), array("q")
        self._boxes, self._box_at = array("q"), array("q", [0])

    def __len__(self) -> int:
        return len(self.file)

    def append(self, file: int, start: int, nbytes: int, region: Region) -> int:
        """Add a chunk and return its row. Offsets and sizes in elements, the rest in bytes."""
        self.file.append(file)
        self.start.append(start)
        self.nbytes.append(nbytes)
        self._boxes.extend(region.offsets)
        self._boxes.extend(region.sizes)
        self._box_at.append(len(self._boxes))
        return len(self.file) - 1

    def extend_columns(
        self, files: Sequence[int], starts: Sequence[int], nbytes: Sequence[int], boxes: array[int]
    ) -> None:
        """Add chunks of one tensor, column by column; much faster than one at a time.

        Args:
            files, starts, nbytes: one value for each chunk, in arrays or lists.
            boxes: offsets and then sizes of each chunk.
        """
        num_chunks = len(files)
        width = len(boxes) // num_chunks if num_chunks else 0
        first = len(self._boxes) + width
        self.file.extend(files)
        self.start.extend(starts)
        self.nbytes.extend(nbytes)
        self._boxes.extend(boxes)
        stop = first + width * num_chunks
        self._box_at.extend(range(first, stop, width) if width else [first] * num_chunks)

    def boxes(self, chunks: range) -> array[int]:
        """Return offsets, then sizes, of each of several consecutive chunks of one tensor."""
        if not chunks:
            return array("q")
        return self._boxes[self._box_at[chunks.start] : self._box_at[chunks.stop]]

    def region(self, chunk: int) -> Region:
        """Return the region of a chunk."""
        start, stop, boxes = self._box_at[chunk], self._box_at[chunk + 1], self._boxes
        if stop - start == 4:  # most weights; three times as fast as the slices below
            return Region((boxes[start], boxes[start + 1]), (boxes[start + 2], boxes[start + 3]))
        middle = (start + stop) // 2
        return Region(tuple(boxes[start:middle]), tuple(boxes[middle:stop]))

    def offsets(self, chunk: int, num_dims: int) -> list[int]:
        """Return the offsets of a chunk's region, given the dims of its tensor."""
        start = self._box_at[chunk]
        return self._boxes[start : start + num_dims].tolist()

    def regions(self, chunks: range) -> list[Region]:
        """Return the regions of consecutive chunks of one tensor; much faster than one at a time."""
        if not chunks:
            return []
        boxes = self.boxes(chunks)
        num_dims = len(boxes) // (2 * len(chunks))
        if num_dims == 0:
            return [Region((), ())] * len(chunks)
        corners = list(zip(*[iter(boxes.tolist())] * num_dims, strict=True))
        return list(map(_new_region, zip(corners[0::2], corners[1::2], strict=True)))


@dataclass(slots=True, kw_only=True)
class Catalog:
    """An open checkpoint: everything but the tensors' bytes."""

    format: str
    """"safetensors", "torch-bin" or "dcp"."""
    directory: str
    """Path of the checkpoint. Names of files are relative to it."""
    encoding: str = "raw"
    """"raw": extents are the chunks' bytes. "torch-record": each extent is one `torch.save` zip."""
    files: list[SourceFile] = field(default_factory=list)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    """By name, in the order of the source."""
    chunks: ChunkTable = field(default_factory=ChunkTable)
    objects: tuple[str, ...] = ()
    """Names of entries that are not tensors. They are never decoded."""
    metadata_crc32: int | None = None
    """CRC-32 of `.metadata`, which contains an id of each save; None for other formats."""
    paths: dict[str, tuple[str | int, ...]] | None = None
    """Path of each name in the state dict that was saved, as in DCP's planner_data."""
    notes: tuple[str, ...] = ()
    """Remarks about this source for the user."""
    open_records: OpenRecords | None = field(default=None, init=False)
    """None if all records are open. Catalogs derived from this one do not inherit it."""
    late: LateRecords | None = field(default=None, init=False)
    """Opens records when they are read; None if all are open."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(entry.nbytes for entry in self.tensors.values())

    def add_tensor(
        self, fqn: str, dtype: DType, shape: Shape, chunks: Iterator[tuple[int, int, int, Region]]
    ) -> None:
        """Add a tensor with its chunks, each (file index, first byte, bytes, region)."""
        first = len(self.chunks)
        for chunk in chunks:
            self.chunks.append(*chunk)
        self.tensors[fqn] = TensorEntry(
            fqn=fqn, dtype=dtype, shape=shape, first_chunk=first, num_chunks=len(self.chunks) - first
        )

    def add_tensor_columns(
        self,
        fqn: str,
        dtype: DType,
        shape: Shape,
        files: list[int],
        starts: list[int],
        nbytes: list[int],
        regions: list[Region],
    ) -> None:
        """Add a tensor with its chunks in columns."""
        first, boxes = len(self.chunks), array("q", chain.from_iterable(chain.from_iterable(regions)))
        self.chunks.extend_columns(files, starts, nbytes, boxes)
        self.tensors[fqn] = TensorEntry(
            fqn=fqn, dtype=dtype, shape=shape, first_chunk=first, num_chunks=len(regions)
        )

    def copy_tensor(self, source: Catalog, fqn: str, name: str, files: Sequence[int] | None = None) -> None:
        """Add a tensor of another catalog.

        Args:
            source: the other catalog.
            fqn: the tensor's name there.
            name: its name here.
            files: maps the source's file numbers to those of this catalog; None if they are equal.
        """
        entry, table, first = source.tensors[fqn], source.chunks, len(self.chunks)
        rows = slice(entry.chunk_ids.start, entry.chunk_ids.stop)
        numbers = table.file[rows] if files is None else array("i", [files[n] for n in table.file[rows]])
        boxes = table.boxes(entry.chunk_ids)
        self.chunks.extend_columns(numbers, table.start[rows], table.nbytes[rows], boxes)
        self.tensors[name] = replace(entry, fqn=name, first_chunk=first)


def renumber(file: SourceFile, numbers: Sequence[int]) -> SourceFile:
    """Return a file for a catalog in which file `n` of the original one has the number `numbers[n]`."""
    derivation = file.derivation
    if not isinstance(derivation, Computed):
        return file
    mapped = numbers if derivation.numbers is None else [numbers[number] for number in derivation.numbers]
    return replace(file, derivation=replace(derivation, numbers=mapped))


def subset(catalog: Catalog, names: Collection[str]) -> Catalog:
    """Return a catalog of some of the tensors, in the order given; `catalog` itself stays as it is.

    Files keep their numbers. Notes and objects are about the whole checkpoint and are left out.
    """
    paths = catalog.paths
    chosen = Catalog(
        format=catalog.format,
        directory=catalog.directory,
        encoding=catalog.encoding,
        files=list(catalog.files),
        paths=None if paths is None else {name: paths[name] for name in names if name in paths},
    )
    for name in names:
        chosen.copy_tensor(catalog, name, name)
    return chosen


def carry(catalog: Catalog, names: Collection[str], supply: Catalog, sources: Mapping[str, str]) -> Catalog:
    """Return a catalog of some tensors of `catalog` and of `supply`; `sources` maps new names to names there."""
    carried = subset(catalog, names)
    numbers = range(len(carried.files), len(carried.files) + len(supply.files))
    carried.files += [renumber(file, numbers) for file in supply.files]
    for source, name in sources.items():
        carried.copy_tensor(supply, name, source, numbers)
    if (open_records := catalog.open_records) is not None:
        carried.open_records = lambda those, *, as_read=False: carry(
            open_records(those), names, supply, sources
        )
    return carried


def with_missing(chosen: Catalog, whole: Catalog) -> Catalog:
    """Return `chosen` with all tensors of `whole`, in its order; those that `chosen` lacks have no chunks."""
    tensors = {
        name: chosen.tensors.get(name) or replace(entry, first_chunk=0, num_chunks=0)
        for name, entry in whole.tensors.items()
    }
    catalog = replace(chosen, tensors=tensors, paths=whole.paths)
    catalog.late = chosen.late
    return catalog


def subset_within(catalog: Catalog, regions_of: Mapping[str, Sequence[Region]]) -> Catalog:
    """Return a catalog of some tensors with only the chunks that intersect given regions, and without paths.

    A tensor may be left with no chunks.

    Args:
        catalog: with all chunks of the tensors.
        regions_of: regions of each tensor, in elements; the tensors in the order that the result is to have.
    """
    chosen, table = replace(subset(catalog, ()), paths=None), catalog.chunks
    for name, regions in regions_of.items():
        entry = catalog.tensors[name]
        rows = [
            row
            for row, chunk_region in zip(entry.chunk_ids, table.regions(entry.chunk_ids), strict=True)
            if any(intersect(chunk_region, region) is not None for region in regions)
        ]
        chunks = ((table.file[row], table.start[row], table.nbytes[row], table.region(row)) for row in rows)
        chosen.add_tensor(name, entry.dtype, entry.shape, chunks)
    return chosen


def combine_catalogs(catalogs: Mapping[str, Catalog]) -> Catalog:
    """Merge catalogs of raw bytes, the parts of a nested state dict, into one, each below its own key.

    The key is prepended to the names and paths of each part. Files that several parts share are listed once.
    """
    paths: dict[str, tuple[str | int, ...]] = {}
    whole = Catalog(format="dcp", directory="", paths=paths)
    number_of: dict[object, int] = {}
    for key, catalog in catalogs.items():
        numbers = [_number(whole, number_of, file) for file in catalog.files]
        for number, file in zip(numbers, catalog.files, strict=True):
            if isinstance(file.derivation, Computed):
                whole.files[number] = renumber(file, numbers)
        for fqn in catalog.tensors:
            whole.copy_tensor(catalog, fqn, f"{key}.{fqn}", numbers)
            paths[f"{key}.{fqn}"] = (key, *(catalog.paths or {}).get(fqn, (fqn,)))
    return whole


def join_catalogs(catalogs: Mapping[str, Catalog]) -> Catalog:
    """Merge catalogs of raw extents into one; names of tensors and files are prefixed with the folder of each.

    The result has no objects, notes or paths.
    """
    joined = Catalog(format="dcp", directory="")
    for folder, catalog in catalogs.items():
        numbers = range(len(joined.files), len(joined.files) + len(catalog.files))
        joined.files += [
            replace(renumber(file, numbers), name=join_name(folder, file.name)) for file in catalog.files
        ]
        for fqn in catalog.tensors:
            joined.copy_tensor(catalog, fqn, join_name(folder, fqn), numbers)
    return joined


def join_name(folder: str, name: str) -> str:
    """Return a name prefixed with its folder; "" stands for the directory itself."""
    return f"{folder}/{name}" if folder else name


def _number(whole: Catalog, number_of: dict[object, int], file: SourceFile) -> int:
    """Return the file's number in the merged catalog, adding it if needed. Derived files are never shared."""
    key = (file.path, file.stamp) if file.is_raw else id(file)
    if key not in number_of:
        whole.files.append(file)
        number_of[key] = len(whole.files) - 1
    elif file.checksums is not None:
        listed_file = whole.files[number_of[key]]
        both = file.checksums if listed_file.checksums is None else listed_file.checksums | file.checksums
        whole.files[number_of[key]] = replace(listed_file, checksums=both)
    return number_of[key]
