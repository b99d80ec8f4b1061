"""Match stored tensors to shards, read their parts into the shards' memory, and compare them with checksums.

If dtype and order agree, bytes are read from the file directly into the tensor's own memory. Otherwise they pass
through one small buffer for each thread, from which torch copies them: strided, converted, or to another device.

Terms: a *read* fills a box of a tensor from one chunk; *runs* are the contiguous byte ranges of a box; *neighbours* are
small reads that are close together in a file and share one system call.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, islice, product
from math import prod
from typing import Any, NamedTuple

import torch

from shardkit.core.catalog import Catalog, TensorEntry
from shardkit.core.dtypes import DType
from shardkit.core.regions import (
    Region,
    Shape,
    flat_offset,
    full_region,
    intersect,
    is_contiguous,
    relative_to,
    runs,
    window,
)
from shardkit.core.text import count, escape, format_size
from shardkit.core.threads import run_all
from shardkit.errors import LayoutError
from shardkit.files.storage import BLOCK
from shardkit.keys.expressions import Expression, leaves, pieces, read_regions
from shardkit.layout.binding import ClassNames
from shardkit.training.ranks.agree import agreed, gather_json, log_once
from shardkit.training.ranks.local import LocalShard, memory_of
from shardkit.transfer.checks import CheckedSource, SourceCheck, as_json, have_read, judge
from shardkit.transfer.codecs.bound import bind
from shardkit.transfer.codecs.convert import one_thread_each
from shardkit.transfer.codecs.converted import Convert
from shardkit.transfer.plan import FileRanges
from shardkit.transfer.sources import DROPPED_NBYTES, MOST_PARTS, READ_NBYTES, Neighbour, Reader, SourceFiles

DAMAGED = "use another copy of the checkpoint; check_source=False takes the damaged bytes as they are"
_PHASE = "comparing the source with its checksums"

KeyRules = tuple[tuple[str, str], ...]
"""(prefix of a model's names, the Hub's prefix in its place), in the form of `keys.renaming.KeyRule`."""


class HubNaming(NamedTuple):
    """The relation of a model's tensors to those in the Hub's files, as known from the model's source."""

    key_rules: KeyRules | None
    """Rules that turn the model's names into the Hub's; None if they are not known."""
    derived: Mapping[str, Any]
    """FQN -> expression of the Hub's tensors as plain data, where the Hub's files have another form."""
    tied: Sequence[str] = ()
    """Those names of tied tensors that the Hub's files have."""


OpenChunks = Callable[[Mapping[str, Sequence[Region]], dict[str, int] | None], Catalog]
"""Returns a catalog with the chunks that contain some regions (stored name -> regions). The second argument is a cache
of open files, path -> descriptor, which it uses and extends."""

_APART_NBYTES = 256 << 10  # runs of a box at this distance or more are fetched one by one
_SHORT_NBYTES = 6 << 20  # a shorter read, such as the end of a large tensor, is combined with the next one
_AHEAD_NBYTES = 32 << 20  # that the system fetches ahead; they use no memory of this process
_ALIGNED_NBYTES = 16  # alignment of neighbours in a shared buffer, which torch needs to view them as a dtype
_NUM_BUFFERS = 2  # for each device: one is filled from storage while the other is copied
_NUM_THREADS = 2  # one waits or converts while the other reads; more do not help with local files


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A source of weights, opened for one model. No tensor has been read yet."""

    path: str
    """Path of the source, for messages."""
    catalog: Catalog
    """The tensors that the model needs, under their stored names, with extents of raw bytes. If `open_chunks` is set,
    the chunks are not known yet, or the catalog has records in their place."""
    names: Mapping[str, str]
    """The model's FQN -> stored name. All names of a tie may be listed, or one of them."""
    identity: str
    """Hex digest that is equal for every copy of these weights, regardless of path and times: of the
    manifest, or of sizes and headers."""
    sampled_files: int = 0
    """Limit on the files of which `take_samples` compares some bytes."""
    has_all_checksums: bool = False
    """True if the identity covers the CRC-32 of every byte, so that ranks that compare checksums need no samples."""
    source_identity: str = ""
    """Such a digest of the source alone, independent of the model, as pipeline stages need different parts of it."""
    unused: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Stored name -> shape, for weights that have no place in the model."""
    match: ClassNames = field(default_factory=ClassNames)
    """How the model matches the stored names."""
    made_of: Mapping[str, Expression] = field(default_factory=dict)
    """Name in the values of `names` -> expression of stored tensors, for names that are not stored (fused experts)."""
    convert: Convert | None = None
    """Computes the opaque expressions in `made_of` by transformers' own code."""
    quantised: str | None = None
    """The evidence that the stored values are quantised, or None."""
    notes: tuple[str, ...] = ()
    """Remarks for the user."""
    naming: HubNaming | None = None
    """The relation of the model's tensors to those in the Hub's files; None if it is not known."""
    assets: tuple[str, ...] = ()
    """Directories with the config and tokenizer of these weights."""
    open_chunks: OpenChunks | None = None
    """Opens only the files that this rank reads; None if all chunks are known."""
    opened: dict[str, int] | None = None
    """Path -> descriptor of files that stay open from `open_chunks` until they are read; None to keep none open."""

    def located(self, regions_by_name: Mapping[str, Sequence[Region]] | None = None) -> Weights:
        """Return the weights with a catalog that has the chunks of some regions.

        Args:
            regions_by_name: stored name -> regions, in elements; None for all tensors.

        Raises:
            IntegrityError, SourceError: the records of the chunks are damaged or missing.
            ResourceError: a file cannot be read.
        """
        if self.open_chunks is None:
            if not self.made_of:
                return self
            return replace(self, catalog=bind(self.catalog, self.made_of, self.convert), made_of={})
        # Every tensor gets an entry, even if this rank reads none of it, because ranks add up the data they compared.
        stored: dict[str, list[Region]] = {name: [] for name in self.catalog.tensors}
        if regions_by_name is None:
            regions_by_name = {
                name: [full_region(entry.shape)] for name, entry in self.catalog.tensors.items()
            }
        for name, regions in regions_by_name.items():
            if name not in self.made_of:
                stored.setdefault(name, []).extend(regions)
                continue
            expression = self.made_of[name]
            are_boxes = all(piece.is_box for piece in pieces(expression))
            for region in regions if are_boxes else [full_region(expression.shape)]:
                for part, below in read_regions(expression, region):
                    stored.setdefault(part, []).append(below)
        opened = replace(self, catalog=self.open_chunks(stored, self.opened), open_chunks=None)
        return opened.located()

    def stored_names(self) -> set[str]:
        """Return the stored names from which the model is filled."""
        used = set[str]()
        for name in self.names.values():
            expression = self.made_of.get(name)
            used.update([name] if expression is None else [leaf.name for leaf in leaves(expression)])
        return used

    def entry(self, name: str) -> TensorEntry:
        """Return the entry for a name in the values of `names`. That of a tensor made of others has no chunks."""
        expression = self.made_of.get(name)
        if expression is None:
            return self.catalog.tensors[name]
        dtype = self.catalog.tensors[next(leaves(expression)).name].dtype
        return TensorEntry(fqn=name, dtype=dtype, shape=expression.shape, first_chunk=0, num_chunks=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """The weights for a model's tensors, as this rank sees them."""

    weights: Weights | None
    """None if this rank cannot open the source."""
    unavailable: str | None = None
    """Why this rank cannot open the source, or None."""
    initialised: Collection[str] = ()
    """FQNs of tensors that are not read."""
    grown: Mapping[str, int] = field(default_factory=dict)
    """FQN -> number of rows in the source, for tensors with more rows in the model."""


class Read(NamedTuple):
    """A box of a stored chunk, and the memory that it fills."""

    file: int
    """Index into the catalog's files."""
    place: int
    """First byte of the chunk in the file."""
    sizes: Shape
    """Sizes of the chunk."""
    part: Region
    """The box, relative to the chunk's corner."""
    dtype: DType
    """The stored dtype."""
    target: torch.Tensor
    """Memory of the box's sizes, with any dtype, strides and device."""
    fqn: str
    """Name of the tensor, for messages and for counting filled elements."""

    @property
    def first(self) -> tuple[int, int]:
        """(file, first byte) of the box."""
        return self.file, self.place + flat_offset(self.part.offsets, self.sizes) * self.dtype.itemsize

    @property
    def is_straight(self) -> bool:
        """True if bytes can be read directly into the target, with runs large enough for a system call each."""
        if not _is_straight(self.target, self.dtype) or not self.target.is_contiguous():
            return False
        return (
            is_contiguous(self.part, self.sizes)
            or next(runs(self.part, self.sizes)).length * self.dtype.itemsize >= BLOCK
        )

    @property
    def nbytes(self) -> int:
        """Size of the box in the file."""
        return self.part.num_elements * self.dtype.itemsize


@dataclass(slots=True)
class Filled:
    """Counts of the data that was filled."""

    elements: Counter[str] = field(default_factory=Counter)
    """FQN -> number of elements that were filled."""
    read_bytes: int = 0
    """Number of bytes that were read to fill them."""
    checked: CheckedSource = field(default_factory=CheckedSource)
    """The amount of data that all ranks together compared with the checksums in the source."""

    def add(self, filled: Filled) -> None:
        """Add other counts to these."""
        self.elements.update(filled.elements)
        self.read_bytes += filled.read_bytes
        self.checked = CheckedSource.of_all([self.checked, filled.checked])

    def problems(self, shards: Iterable[LocalShard]) -> Iterator[str]:
        """Yield a problem for each parameter and persistent buffer that was not filled exactly once.

        Args:
            shards: all shards of this rank.
        """
        for shard in shards:
            num_elements, filled = shard.num_elements, self.elements[shard.fqn]
            if shard.persistent and filled != num_elements:
                yield f"{escape(shard.fqn)}: {filled} of {num_elements} elements were filled"


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's own object for a dtype."""
    torch_type = getattr(torch, dtype.name)
    assert isinstance(torch_type, torch.dtype)
    return torch_type


class WantedPart(NamedTuple):
    """A part of a stored tensor, and this rank's memory for it."""

    shard: LocalShard
    entry: TensorEntry
    """The stored tensor."""
    region: Region
    """This rank's region of it, which may be empty."""
    target: torch.Tensor
    """Memory of the region's sizes."""


def match(shards: Iterable[LocalShard], supply: Supply) -> list[WantedPart]:
    """Return the parts of the source that fill shards, after comparing names, shapes and dtypes.

    Args:
        shards: the model's shards, with memory. Buffers that are in no state dict are not matched.
        supply: a supply with weights.

    Raises:
        LayoutError: the source lacks tensors, or has them in other shapes or in dtypes that cannot be converted; the
            error lists all of them.
    """
    weights = supply.weights
    assert weights is not None
    parts: list[WantedPart] = []
    problems: list[str] = []
    for shard in shards:
        if not shard.persistent or any(name in supply.initialised for name in shard.names):
            continue
        name = next((name for name in shard.names if name in weights.names), None)
        entry = weights.entry(weights.names[name]) if name is not None else None
        if entry is None:
            problems.append(f"{escape(shard.fqn)}: not in the source")
            continue
        rows = next((supply.grown[fqn] for fqn in shard.names if fqn in supply.grown), None)
        shape = shard.shape if rows is None else (rows, *shard.shape[1:])
        if entry.shape != shape:
            problems.append(
                f"{escape(shard.fqn)}: {list(shape)} in the model, {list(entry.shape)} in the source"
            )
        elif not converts(entry.dtype, shard.dtype):
            problems.append(
                f"{escape(shard.fqn)}: {shard.dtype} in the model, {entry.dtype.name} in the source"
            )
        else:
            parts += _wanted_parts(shard, entry)
    LayoutError.raise_for(problems, f"{escape(weights.path)} does not fit the model")
    return parts


def converts(source: DType, target: torch.dtype) -> bool:
    """True if the dtypes are equal, or both are floating dtypes of two bytes or more, which can be converted."""
    return torch_dtype(source) == target or (
        source.is_convertible and target.is_floating_point and target.itemsize >= 2
    )


def _wanted_parts(shard: LocalShard, entry: TensorEntry) -> Iterator[WantedPart]:
    """Yield the parts of a shard that the stored tensor has, or one empty part."""
    overlaps = [
        overlap for part in shard.parts if (overlap := shard.cut(part, full_region(entry.shape))) is not None
    ]
    for region, target in overlaps:
        yield WantedPart(shard, entry, region, target)
    if not overlaps:  # the shard is empty or has only new rows
        nothing = (0,) * len(entry.shape)
        yield WantedPart(
            shard,
            entry,
            Region(shard.parts[0].region.offsets, nothing),
            shard.tensor[window(Region(nothing, nothing))],
        )


def plan_reads(
    entry: TensorEntry, catalog: Catalog, region: Region, target: torch.Tensor, fqn: str | None = None
) -> Iterator[Read]:
    """Yield the reads that fill `target` with a region of a stored tensor: boxes of chunks, of bounded size.

    Args:
        entry: the stored tensor.
        catalog: the catalog with its chunks.
        region: the region of the stored tensor.
        target: memory of the region's sizes, with any dtype, strides and device.
        fqn: the tensor's name in the model; None for the stored name.
    """
    name = entry.fqn if fqn is None else fqn
    table, itemsize = catalog.chunks, entry.dtype.itemsize
    for row, chunk in zip(entry.chunk_ids, table.regions(entry.chunk_ids), strict=True):
        part = intersect(region, chunk)
        if part is None:
            continue
        inner, view = relative_to(part, chunk.offsets), target[window(relative_to(part, region.offsets))]
        for box in _boxes(inner, chunk.sizes, READ_NBYTES // itemsize):
            piece = view[window(relative_to(box, inner.offsets))]
            yield Read(table.file[row], table.start[row], chunk.sizes, box, entry.dtype, piece, name)


def _is_straight(target: torch.Tensor, dtype: DType) -> bool:
    """True for memory into which bytes of a dtype can be read directly."""
    return type(target) is torch.Tensor and target.device.type == "cpu" and target.dtype == torch_dtype(dtype)


def _boxes(part: Region, sizes: Shape, limit: int) -> Iterator[Region]:
    """Cut a box of a row-major chunk into boxes, each of which spans at most `limit` elements of the chunk."""
    strides = _strides(sizes)
    dim = 0
    while dim < len(sizes) and strides[dim] * part.sizes[dim] > limit:
        dim += 1
    if dim == 0:
        yield part
        return
    cut = dim - 1
    step = max(limit // strides[cut], 1)
    tail_offsets, tail_sizes = part.offsets[dim:], part.sizes[dim:]
    outer = (range(o, o + s) for o, s in zip(part.offsets[:cut], part.sizes[:cut], strict=True))
    stop = part.offsets[cut] + part.sizes[cut]
    for index in product(*outer):
        for start in range(part.offsets[cut], stop, step):
            size = min(step, stop - start)
            yield Region((*index, start, *tail_offsets), (*(1,) * cut, size, *tail_sizes))


def _rows(part: Region, sizes: Shape) -> tuple[int, int]:
    """Return (first element, end) of the whole rows of a chunk that contain a box.

    They are rows along the first dim in which the box has several. Ranks that need other columns of these rows read the
    same bytes, so that their checksums can be compared.
    """
    dims = next((dim for dim, size in enumerate(part.sizes) if size > 1), len(sizes)) + 1
    stride = prod(sizes[dims:])
    start = flat_offset(part.offsets[:dims], sizes[:dims]) * stride
    return start, start + prod(part.sizes[:dims]) * stride


def _strides(sizes: Shape) -> Shape:
    return tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def source_files(weights: Weights, *, check_source: bool) -> SourceFiles:
    """Return the files of located weights, not opened yet. With `check_source` they record checksums of the data."""
    check = SourceCheck(weights.catalog) if check_source else None
    return SourceFiles(weights.catalog.files, check=check, opened=weights.opened)


def run_reads(reads: Iterable[Read], sources: SourceFiles, num_threads: int = _NUM_THREADS) -> Filled:
    """Execute reads in the order of the files, with a few threads.

    Args:
        reads: the reads.
        sources: the catalog's files.
        num_threads: limit on the threads; none is started without work.

    Returns:
        The counts of filled elements and read bytes.

    Raises:
        IntegrityError: a file ends early, or has been replaced since its headers were read.
        ResourceError: the system cannot read a file.
    """
    ordered = sorted(reads, key=lambda read: read.first)
    sources.expect(_ranges(ordered), 1)
    converts = any(not _is_straight(read.target, read.dtype) for read in ordered)
    groups, filled = [*neighbours(ordered)], Filled()
    shared = _SharedGroups(groups, sources)
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_thread_each(converts))
        workers = [
            ReadWorker(stack.enter_context(sources.reader())) for _ in range(min(num_threads, len(groups)))
        ]
        jobs = [partial(worker.run, shared) for worker in workers]
        run_all(jobs, num_threads, shared.stop, name="shardkit-fill")
        for worker in workers:
            worker.finish()
            filled.add(worker.filled)
    return filled


def neighbours(ordered: Iterable[Read]) -> Iterator[list[Read]]:
    """Yield reads in groups for one system call each: a single read, or small ones that are close together in a file.

    Args:
        ordered: reads in the order of the files.
    """
    group: list[Read] = []
    begin = end = most = 0
    kind: object = None
    for read in ordered:
        (file, start), stop = read.first, read.first[1] + read.nbytes
        is_run, is_straight = is_contiguous(read.part, read.sizes), read.is_straight
        its_kind = (file, is_run, is_straight, read.target.device)
        if group and not (
            is_run
            and its_kind == kind
            and 0 <= start - end <= DROPPED_NBYTES
            and end - begin < _SHORT_NBYTES
            and stop - begin <= most
            and len(group) < MOST_PARTS
        ):
            yield group
            group = []
        if not group:
            begin, kind = start, its_kind
            most = 2 * READ_NBYTES if is_straight else READ_NBYTES - MOST_PARTS * _ALIGNED_NBYTES
        group.append(read)
        end = stop
    if group:
        yield group


class _SharedGroups:
    """An iterator over groups of reads, which threads share. It lets the system fetch the next groups ahead.

    Without this, each request would wait for storage. Only the needed byte ranges are fetched, while the system's own
    read-ahead would exceed the ranges of a Hub file that a rank needs.

    Args:
        groups: groups of reads, in order.
        sources: the files.
    """

    def __init__(self, groups: Sequence[Sequence[Read]], sources: SourceFiles) -> None:
        self.stop = threading.Event()
        """Set to end the iteration."""
        self._groups, self._pages, self._sources = iter(groups), _fetched_pages(groups), sources
        self._fetched_nbytes = self._begun_nbytes = 0
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Sequence[Read]]:
        return self

    def __next__(self) -> Sequence[Read]:
        """Return the next group, and request pages until `_AHEAD_NBYTES` are being fetched beyond it."""
        with self._lock:
            if self.stop.is_set():
                raise StopIteration
            group = next(self._groups)
            self._begun_nbytes += sum(end - begin for begin, end in _fetch_ranges(group))
            while self._fetched_nbytes < self._begun_nbytes + _AHEAD_NBYTES:
                page = next(self._pages, None)
                if page is None:
                    break
                file, begin, end = page
                self._fetched_nbytes += end - begin
                self._sources.will_need(file, begin, end - begin)
            return group


def _fetched_pages(groups: Iterable[Sequence[Read]]) -> Iterator[tuple[int, int, int]]:
    """Yield (file, first byte, end) of the whole pages to fetch for groups. Each page is fetched once."""
    last: tuple[int, int, int] | None = None
    for group in groups:
        for begin, end in _fetch_ranges(group):
            begin -= begin % BLOCK
            if last is not None:
                # A page in which the next range begins is fetched with that range.
                is_followed = (last[0], last[2] - last[2] % BLOCK) == (group[0].file, begin)
                yield last[0], last[1], begin if is_followed else last[2] + -last[2] % BLOCK
            last = group[0].file, begin, end
    if last is not None:
        yield last[0], last[1], last[2] + -last[2] % BLOCK


def _fetch_ranges(group: Sequence[Read]) -> Sequence[tuple[int, int]]:
    """Return the byte ranges to fetch for a read or for neighbours; for columns these are the whole rows."""
    if len(group) > 1:
        return [(group[0].first[1], group[-1].first[1] + group[-1].nbytes)]
    return _ranges(group)[group[0].file]


def _ranges(reads: Iterable[Read]) -> FileRanges:
    """Return file -> byte ranges that reads fetch from it. Short runs are fetched with the bytes between them."""
    by_file = FileRanges()
    for read in reads:
        itemsize, ranges = read.dtype.itemsize, by_file.setdefault(read.file, [])
        box_runs = list(islice(runs(read.part, read.sizes), 2))
        if len(box_runs) > 1 and box_runs[1].source - box_runs[0].source >= _APART_NBYTES // itemsize:
            box_runs = list(runs(read.part, read.sizes))
            ranges.extend(
                (read.place + run.source * itemsize, read.place + (run.source + run.length) * itemsize)
                for run in box_runs
            )
        else:
            start, stop = _rows(read.part, read.sizes)
            ranges.append((read.place + start * itemsize, read.place + stop * itemsize))
    return by_file


class ReadWorker:
    """Executes reads, in one thread at a time.

    Args:
        reader: the reader of the catalog's files.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._buffer: torch.Tensor | None = None
        self._device: DeviceStaging | None = None
        self.filled = Filled()

    def run(self, groups: Iterable[Sequence[Read]]) -> None:
        """Fill the targets of groups from `neighbours`. Targets on a device are complete after `finish`."""
        with torch.no_grad():
            for group in groups:
                extents, staged = self._extents(group)
                if len(group) > 1:
                    self._reader.read_neighbours(group[0].file, extents)
                else:
                    for memory, start, fqn in extents:
                        self._reader.read_into(group[0].file, memory, start, fqn)
                for read, buffer, strides in staged:
                    self._copy(read, buffer, strides)
                self.filled.read_bytes += sum(len(extent.buffer) for extent in extents)
                for read in group:
                    self.filled.elements[read.fqn] += read.target.numel()

    def finish(self) -> None:
        """Wait for pending copies to a device."""
        if self._device is not None:
            self._device.finish()

    def _extents(self, group: Sequence[Read]) -> tuple[list[Neighbour], list[_Staged]]:
        """Return (extents to read, copies to make afterwards). There are no copies if bytes are read directly."""
        first = group[0]
        if first.is_straight:
            if len(group) == 1:
                return [*_runs(first, memory_of(first.target))], []
            return [Neighbour(memory_of(read.target), read.first[1], read.fqn) for read in group], []
        if len(group) == 1:
            return self._staged_extents(first)
        places = [0, *accumulate(-(-read.nbytes // _ALIGNED_NBYTES) * _ALIGNED_NBYTES for read in group)]
        room = self._room(first, places[-1])
        staged = [
            (read, room[place : place + read.nbytes], _strides(read.part.sizes))
            for read, place in zip(group, places, strict=False)
        ]
        return [Neighbour(memory_of(buffer), read.first[1], read.fqn) for read, buffer, _ in staged], staged

    def _staged_extents(self, read: Read) -> tuple[list[Neighbour], list[_Staged]]:
        itemsize, first = read.dtype.itemsize, next(runs(read.part, read.sizes))
        if first.length * itemsize >= BLOCK or is_contiguous(read.part, read.sizes):
            buffer = self._room(read, read.nbytes)
            return [*_runs(read, memory_of(buffer))], [(read, buffer, _strides(read.part.sizes))]
        # The runs are short, so the bytes between them are read too.
        start, stop = _rows(read.part, read.sizes)
        buffer = self._room(read, (stop - start) * itemsize)
        extents = [Neighbour(memory_of(buffer), read.place + start * itemsize, read.fqn)]
        return extents, [(read, buffer[(first.source - start) * itemsize :], _strides(read.sizes))]

    def _copy(self, read: Read, buffer: torch.Tensor, strides: Shape) -> None:
        if self._device is not None and read.target.device.type != "cpu":
            self._device.send(buffer, torch_dtype(read.dtype), strides, read.target)
        else:
            read.target.copy_(buffer.view(torch_dtype(read.dtype)).as_strided(read.part.sizes, strides))

    def _room(self, read: Read, nbytes: int) -> torch.Tensor:
        if read.target.device.type != "cpu":
            if self._device is None:
                self._device = DeviceStaging(read.target.device, READ_NBYTES)
            return self._device.room(nbytes)
        if self._buffer is None:
            self._buffer = torch.empty(READ_NBYTES, dtype=torch.uint8)
        return self._buffer[:nbytes]


_Staged = tuple[Read, torch.Tensor, Shape]
"""(a read, the buffer with its data from the first element on, the strides of its elements in the buffer)."""


def _runs(read: Read, memory: memoryview) -> Iterator[Neighbour]:
    """Yield each run of a read, with its part of the memory for the whole read."""
    itemsize = read.dtype.itemsize
    for source, target, length in runs(read.part, read.sizes):
        into = memory[target * itemsize : (target + length) * itemsize]
        yield Neighbour(into, read.place + source * itemsize, read.fqn)


class DeviceStaging:
    """Copies raw bytes to a device on a separate stream; dtype and strides are applied on the device.

    Args:
        device: the device of the targets.
        nbytes: size of each buffer.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._stream = self._module.Stream(device)
        self._stream.wait_stream(self._module.current_stream(device))  # where the targets were allocated
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_BUFFERS)]
        self._sent = [self._module.Event() for _ in range(_NUM_BUFFERS)]
        self._turn = 0

    def room(self, nbytes: int) -> torch.Tensor:
        """Return pinned memory, which the caller fills and passes to `send`."""
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        self._sent[self._turn].synchronize()
        return self._buffers[self._turn][:nbytes]

    def send(self, staged: torch.Tensor, dtype: torch.dtype, strides: Shape, target: torch.Tensor) -> None:
        """Copy the memory from `room`, as elements of `dtype` with `strides`, to a target."""
        with self._module.stream(self._stream):
            raw = staged.to(self._device, non_blocking=True)
            target.copy_(raw.view(dtype).as_strided(tuple(target.shape), strides))
            self._sent[self._turn].record(self._stream)

    def finish(self) -> None:
        """Wait until every target is filled."""
        self._stream.synchronize()


def compare_together(check: SourceCheck | None) -> CheckedSource:
    """Compare the data that all ranks read with the source's checksums; every rank calls it.

    Args:
        check: the record of this rank's data; None if it read nothing.

    Returns:
        The amount of data compared by all ranks together.

    Raises:
        IntegrityError: on all ranks: data does not have its checksum; the error names the ranks that read it.
    """
    readings = [] if check is None else check.packed()
    of_all = [each for of_rank in gather_json([*map(as_json, readings)], phase=_PHASE) for each in of_rank]
    with agreed(_PHASE):
        verdict = judge(of_all)
        damaged = [
            damage
            for damage in verdict.damaged
            if any(have_read(each, {(damage.file, damage.entry)}) for each in readings)
        ]
        verdict._replace(damaged=damaged).raise_damaged(hint=DAMAGED)
    return verdict.checked


def log_checked(checked: CheckedSource, *, check_source: bool) -> None:
    """Log the amount of data that was compared, or warn that nothing was; once for all ranks."""
    if not check_source:
        log_once(
            "weights: not compared with the checksums in the source (check_source=False)", logging.WARNING
        )
        return
    if checked.checked_bytes:
        log_once(f"weights: {format_size(checked.checked_bytes)} compared with the CRC-32s in the source")
    for part in checked.unchecked:
        what = count(part.num_entries, "tensor or storage", "tensors or storages")
        log_once(f"weights: not compared: {what}, {format_size(part.entry_bytes)}: {part.reason}")
