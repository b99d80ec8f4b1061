"""Open a DCP directory of any trainer: a `.metadata`, and `.distcp` files full of `torch.save` records.

`.metadata` is trusted over the directory listing: a reused directory can hold shards of an older, larger
world. It is compared with the files: every chunk's bytes must be there, no two entries may overlap (tied
names may share all their bytes), and the chunks of each tensor must make it up exactly once.

With very many chunks, numpy first tests whether the columns have the arrangement that trainers write. If not, the
chunks are checked one by one, so that an error can name the wrong ones.

Source: torch 2.13, torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import json
import os
import stat
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter

from shardkit.core.catalog import (
    MIN_COLUMNS,
    MIN_TOTAL,
    Catalog,
    SourceFile,
    TensorEntry,
    subset,
    subset_within,
    with_missing,
)
from shardkit.core.dtypes import OF_CODES
from shardkit.core.regions import Region, Shape, find_tiling_error
from shardkit.core.text import count, escape, listed
from shardkit.errors import SourceError
from shardkit.files import shared_reads, storage
from shardkit.files.digest import crc32
from shardkit.files.home import MAX_METADATA, home_of, path_in
from shardkit.files.links import is_below, locate
from shardkit.files.shared_reads import SIZES
from shardkit.files.strict_json import (
    FOLLOW,
    FOLLOW_OR_COPY,
    open_regular,
    refuse_pointers,
    stamp_at,
    status_of,
)
from shardkit.formats.contract import (
    Checkpoint,
    Contents,
    DamagedFiles,
    DifferentCopies,
    EntryLocation,
    Remarks,
    asset_directories,
    listing,
)
from shardkit.formats.contract.copies import CopyComparison, StoredCopy
from shardkit.formats.dcp import METADATA
from shardkit.formats.dcp.metadata import (
    Copy,
    DcpMetadata,
    RecordPlace,
    num_sufficient_ranks,
    parse_metadata,
    rank_files,
    read_rank_metadata,
)
from shardkit.formats.dcp.records import check_records, open_late, select_raw
from shardkit.formats.torchsave.archive import pread_of
from shardkit.formats.torchsave.scan import read_entries
from shardkit.keys.names import is_flat_parameter
from shardkit.transfer.sources import is_far

_SUFFIX = ".distcp"
_SHOWN_NAMES = 3
_ANOTHER_COPY = "the checkpoint is damaged or incomplete: use another copy"
_NO_SAVE = "not a DCP checkpoint, or its save did not finish"
_OTHER_RANKS = "files of a rank may be missing: copy all __R.metadata and .distcp files of the save"


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpDirectory:
    """An opened DCP directory whose records are still closed; it implements `DcpFolder`."""

    catalog: Catalog
    """Its extents are whole records ("torch-record"), or bytes ("raw") if the files hold no records."""
    transforms: Mapping[int, tuple[str, ...]]
    """By chunk, the extensions that encoded its record; most chunks have none."""
    objects: Mapping[str, EntryLocation | None]
    """Entries that are not tensors, with the place of each one's record."""
    copies: Sequence[Copy] = ()
    """With rank-local metadata, chunks that a later rank saved again; the catalog has the first rank's."""
    differing: tuple[DifferentCopies, ...] = ()
    """Those of `copies` whose bytes differ from the first rank's."""
    doubts: tuple[str, ...] = ()
    """The notes of `catalog` that something may be missing."""
    leftovers: tuple[str, ...] = ()
    """The notes of `catalog` about files of another save."""

    @property
    def copy_ends(self) -> Sequence[tuple[int, int]]:
        """(file, end) of each record that is not in the catalog because another rank saved the same chunk."""
        return [(file, start + nbytes) for _, _, (file, start, nbytes) in self.copies]

    @property
    def has_records(self) -> bool:
        """True if tensors are stored as `torch.save` records, which have a CRC-32."""
        return self.catalog.encoding != "raw"

    def select(self, names: Collection[str]) -> Catalog:
        """Return a catalog of the named tensors, in that order, whose extents are the chunks' bytes.

        Only the records of these tensors are opened, and they are compared with `.metadata`.

        Raises:
            SourceError, IntegrityError, ResourceError: names file and tensor; all problems of a kind at once.
        """
        if not self.has_records:
            return subset(self.catalog, names)
        return select_raw(self.catalog, self.transforms, names)

    def select_within(
        self, regions: Mapping[str, Sequence[Region]], opened: dict[str, int] | None = None
    ) -> Catalog:
        """Like `select`, but only with the chunks that intersect the regions; no other record is opened.

        Args:
            regions: of each tensor, in elements; a tensor may have none.
            opened: descriptors of open files by path, which are reused; files opened here are added.

        Raises:
            SourceError, IntegrityError, ResourceError: as `select`.
        """
        assert self.has_records
        chosen, table = subset_within(self.catalog, regions), self.catalog.chunks
        by_place = {
            (table.file[row], table.start[row]): transform for row, transform in self.transforms.items()
        }
        places = enumerate(zip(chosen.chunks.file, chosen.chunks.start, strict=True))
        transforms = {row: by_place[place] for row, place in places if place in by_place} if by_place else {}
        return select_raw(chosen, transforms, tuple(regions), opened=opened)

    def defer(self, names: Collection[str]) -> Catalog:
        """Like `select`, but records stay closed: decisions by names, dtypes and shapes do not need them.

        If extensions encoded records, this is `select`: packed chunks are decoded only when they are read anyway.

        Raises:
            SourceError, IntegrityError, ResourceError: as `select`.
        """
        if not self.has_records or self.transforms:
            return self.select(names)
        catalog = subset(self.catalog, names)
        if coded := [name for name, entry in catalog.tensors.items() if entry.dtype.name in OF_CODES]:
            self.select(coded)  # raises for their class, which says more than an error about the dtype
        catalog.open_records = partial(self._open_records, catalog)
        return catalog

    def _open_records(self, catalog: Catalog, names: Collection[str], /, *, as_read: bool = False) -> Catalog:
        chosen = [name for name in catalog.tensors if name in names]
        return with_missing(open_late(self.catalog, chosen) if as_read else self.select(chosen), catalog)

    def check(self, names: Collection[str]) -> Iterator[str]:
        """Read the bytes of the named tensors, and yield a line for each record with another CRC-32 than recorded.

        Raises:
            SourceError, IntegrityError, ResourceError: records that cannot be read.
        """
        return check_records(self.catalog, self.transforms, names)


def is_dcp(directory: str) -> bool:
    """True if the directory has `.metadata`, which marks a finished DCP save, or the `__R.metadata` of a rank."""
    names = listing(directory)
    return METADATA in names or bool(rank_files(names))


def open_dcp_checkpoint(path: str) -> Checkpoint:
    """Open a DCP directory as a checkpoint; its `select` opens the records.

    Raises:
        SourceError: missing, damaged, hostile or contradictory; without tensors; or flat parameters of FSDP1.
        ResourceError: a file may not be read.
    """
    return as_checkpoint(path, open_dcp(path))


def as_checkpoint(path: str, opened: DcpDirectory) -> Checkpoint:
    """Return an opened DCP directory as a checkpoint.

    Raises:
        SourceError: it has no tensors, or flat parameters of FSDP1.
    """
    catalog = opened.catalog
    if not catalog.tensors and opened.objects:
        # Imported here, as most directories have tensors.
        from shardkit.formats.dcp.objects import refuse_objects_alone

        refuse_objects_alone(path, opened)
    if not catalog.tensors:
        raise SourceError(
            f"{escape(path)} has no tensors: nothing at all: the state dict that was saved was empty",
            hint="use an earlier checkpoint, or save the model again",
        )
    refuse_flat(path, catalog)
    return Checkpoint(
        path=path,
        format="dcp",
        writer="torch.distributed.checkpoint",
        catalog=catalog,
        select=opened.select,
        dcp=opened,
        contents=Contents(assets=asset_directories(path)),
        remarks=Remarks(notes=catalog.notes, differing=opened.differing),
    )


def open_dcp(directory: str) -> DcpDirectory:
    """Open a DCP directory, but not its records: `DcpDirectory.select` opens those.

    Args:
        directory: with `.metadata`, or with `__R.metadata` of each rank.

    Raises:
        SourceError: missing, damaged, hostile or contradictory; names the file and the tensors.
        ResourceError: a file may not be read.
    """
    directory = home_of(directory)
    return open_metadata(directory, _read_metadata(directory))


def described_catalog(directory: str) -> Catalog:
    """Return a catalog of what `.metadata` describes, without checking its files. It is for display, not for reading data.

    Raises:
        SourceError, ResourceError: the metadata cannot be read.
    """
    directory = home_of(directory)
    metadata = _read_metadata(directory)
    paths = [os.path.join(directory, name) if _is_shard(name) else "" for name in metadata.files]
    files = [
        SourceFile(name=name, path=path, size=_file_size(path)[0])
        for name, path in zip(metadata.files, paths, strict=True)
    ]
    return _catalog(directory, metadata, files)


def _catalog(directory: str, metadata: DcpMetadata, files: list[SourceFile]) -> Catalog:
    return Catalog(
        format="dcp",
        directory=directory,
        encoding=metadata.encoding,
        files=files,
        tensors=metadata.tensors,
        chunks=metadata.chunks,
        objects=tuple(metadata.objects),
        paths=metadata.paths,
        metadata_crc32=metadata.crc32,
    )


def open_metadata(directory: str, metadata: DcpMetadata) -> DcpDirectory:
    """Return an opened DCP directory, after checking its files against its metadata.

    Raises:
        SourceError, ResourceError: as `open_dcp`.
    """
    if metadata.where != METADATA:  # first, as ranks left by another save may name files that are gone
        check_tiling(metadata, partial(_hint_for_ranks, directory))
    described = path_in(directory, METADATA)
    files = _shared_files(directory, metadata, described)
    if files is None:
        stamp = stamp_at(described)  # None for rank-local metadata
        files = _check_files(directory, metadata)
        if stamp is not None:
            shared_reads.note(SIZES, described, json.dumps([file.size for file in files]).encode(), stamp)
    if _holds_bare_bytes(metadata):
        # Imported here, so that other DCP directories open without the modules for Hub models.
        from shardkit.formats.dcp.hugging_face import point_at_parts

        point_at_parts(metadata, files)
    check_extents(metadata, files)
    if metadata.where == METADATA:
        check_tiling(metadata)
    catalog = _catalog(directory, metadata, files)
    compared = _compare(catalog, metadata.copies)
    doubts, leftovers = tuple(_doubts(metadata)), tuple(_leftovers(directory, metadata))
    catalog.notes = (*doubts, *leftovers, *compared.notes())
    return DcpDirectory(
        catalog=catalog,
        transforms=metadata.transforms,
        objects=metadata.objects,
        copies=metadata.copies,
        differing=compared.differing(),
        doubts=doubts,
        leftovers=leftovers,
    )


def _compare(catalog: Catalog, copies: Sequence[Copy]) -> CopyComparison:
    """Compare chunks that several ranks saved, by the CRC-32s in their records. In a store nothing is compared.

    Raises:
        ResourceError: a file may not be read.
    """
    compared, table, stored = CopyComparison(), catalog.chunks, dict[RecordPlace, StoredCopy]()
    if catalog.encoding == "raw" or is_far(catalog):
        return compared
    firsts = [(table.file[copy.row], table.start[copy.row], table.nbytes[copy.row]) for copy in copies]
    places = sorted({*firsts, *(copy.place for copy in copies)})
    for number, group in groupby(places, key=itemgetter(0)):
        source = catalog.files[number]
        with suppress(SourceError), open_regular(source.path, source.name, follow=False) as (fd, _):
            for place in group:
                with suppress(SourceError):  # reading the tensor raises the same error
                    record, _entries = read_entries(pread_of(fd), *place[1:], where=escape(source.name))
                    stored[place] = StoredCopy.of(record)
    for copy, first in zip(copies, firsts, strict=True):
        if first in stored and copy.place in stored:
            first_file, copy_file = (catalog.files[place[0]].name for place in (first, copy.place))
            compared.compare(copy.fqn, stored[first], first_file, stored[copy.place], copy_file)
    return compared


def _hint_for_ranks(directory: str, problems: Sequence[str]) -> str:
    """Return the hint for ranks' files that do not make up the tensors: a rank is missing, or some are of an older save.

    Only overlapping chunks show an older save: with pipeline stages the first ranks have whole tensors too.
    """
    names, is_more = _listing(directory), any(problem.endswith(" overlap") for problem in problems)
    files, enough = (
        list(rank_files(names).values()),
        is_more and num_sufficient_ranks(directory, names, MAX_METADATA),
    )
    if not enough:
        return _OTHER_RANKS
    stamps = [stamp_at(os.path.join(directory, name)) for name in files]
    times = [stamp.modified_ns for stamp in stamps if stamp is not None]
    is_older = len(times) == len(files) and max(times[enough:]) < min(times[:enough])
    several = (
        f"{escape(files[enough])} to {escape(files[-1])} and the .distcp files of the same ranks"
        if enough < len(files) - 1
        else f"{escape(files[-1])} and the .distcp files of the same rank"
    )
    return (
        f"move {several} away: they are of an older save by more ranks"
        + ("" if is_older else " (or a newer one that was interrupted: their times are no older)")
        + f", and {'rank 0 has' if enough == 1 else f'the {enough} ranks before them have'} every tensor whole"
    )


def refuse_flat(path: str, catalog: Catalog) -> None:
    """Refuse flat parameters of FSDP1: each is many tensors end to end, and which ones is not recorded.

    Raises:
        SourceError: names them.
    """
    flat = [e for fqn, e in catalog.tensors.items() if is_flat_parameter(fqn) and len(e.shape) == 1]
    SourceError.raise_for(
        [f"{escape(entry.fqn)}: {entry.num_elements} elements" for entry in flat],
        f"{escape(path)} holds {len(flat)} flat parameters of FSDP1 (LOCAL_STATE_DICT): the names and shapes "
        "of the parameters in them are not recorded",
        hint="load it into the model that was wrapped the same way, and save it with SHARDED_STATE_DICT",
    )


def _read_metadata(directory: str) -> DcpMetadata:
    """Read `.metadata`, or the metadata of each rank if there is no `.metadata`; a damaged one is an error."""
    path = path_in(directory, METADATA)
    if storage.lexists(path):
        data = shared_reads.read(path, METADATA, MAX_METADATA)
        metadata = replace(parse_metadata(data, where=METADATA), crc32=int(crc32(data)))
        return (
            metadata if path == os.path.join(directory, METADATA) else _with_home_names(metadata, directory)
        )
    names = _listing(directory)
    if not rank_files(names):
        is_begun = f"{METADATA}.tmp" in names
        why = f"the save did not finish ({METADATA}.tmp is there)" if is_begun else _NO_SAVE
        raise SourceError(f"{escape(directory)} has no {METADATA}: {why}")
    return read_rank_metadata(directory, names, MAX_METADATA)


def _with_home_names(metadata: DcpMetadata, home: str) -> DcpMetadata:
    """Return metadata that is in the parent directory, with names of files relative to `home` instead."""
    folder = os.path.join(os.path.basename(home.rstrip("/")), "")
    strays = [escape(name) for name in metadata.files if not name.startswith(folder)]
    SourceError.raise_for(
        strays, f"{METADATA} names files in {escape(folder)} and files elsewhere", hint=_ANOTHER_COPY
    )
    return replace(metadata, files=tuple(name.removeprefix(folder) for name in metadata.files))


def _listing(directory: str) -> set[str]:
    try:
        return set(storage.listdir(directory))
    except OSError as error:
        raise SourceError(f"{escape(directory)} cannot be listed: {error.strerror}") from None


def _check_files(directory: str, metadata: DcpMetadata) -> list[SourceFile]:
    """Return all files with their sizes, after checking that each file with bytes of an entry is there.

    Raises:
        DamagedFiles: lists every file that cannot be read.
    """
    used = set(metadata.chunks.file) | {place.file for place in metadata.objects.values() if place}
    problems: dict[str, str] = {}
    files: list[SourceFile] = []
    folders = _folder_problems(directory, metadata.files)
    for index, name in enumerate(metadata.files):
        path = os.path.join(directory, name) if _is_shard(name) else ""
        size = 0
        if index in used:
            reason = folders.get(os.path.dirname(name))
            size, problem = (0, reason) if path and reason else _file_size(path)
            if problem:
                owner = _owner_of_file(metadata, index)
                problems[name] = f"{problem} ({_owners_text(owner)} there)"
        files.append(SourceFile(name=name, path=path, size=size))
    if problems:
        are_links = all(FOLLOW in problem for problem in problems.values())
        missing = "copy the missing files from where the checkpoint was saved; it needs all of them"
        raise DamagedFiles(
            f"{metadata.where} points at {count(len(problems), 'file')} that cannot be read",
            problems,
            hint=FOLLOW_OR_COPY if are_links else missing,
        )
    return files


def _shared_files(directory: str, metadata: DcpMetadata, described: str) -> list[SourceFile] | None:
    """Return the files of a `.metadata` with the sizes that another process shared after checking them, or None."""
    shared_sizes = shared_reads.take(SIZES, described)
    if shared_sizes is None:
        return None
    sizes = zip(metadata.files, json.loads(shared_sizes[0]), strict=True)
    return [
        SourceFile(name=name, path=os.path.join(directory, name) if _is_shard(name) else "", size=size)
        for name, size in sizes
    ]


def _is_shard(name: str) -> bool:
    return name.endswith(_SUFFIX) and is_below(name) and os.path.basename(name) != _SUFFIX


def _folder_problems(directory: str, names: Iterable[str]) -> dict[str, str]:
    """Return the reason for each folder of shards that must not be read, as it is a link that leaves the directory."""
    problems = dict[str, str]()
    for folder in {os.path.dirname(name) for name in names if _is_shard(name)} - {""}:
        try:
            locate(directory, folder)
        except SourceError as error:
            problems[folder] = f"{error.message}; {FOLLOW}"
        except ValueError as error:  # text that no path can have
            problems[folder] = str(error)
    return problems


def _file_size(path: str) -> tuple[int, str | None]:
    """Return (size, None) for a regular file; (0, the reason) for anything else. An empty path is a name that is refused."""
    if not path:
        return 0, f"not the name of a {_SUFFIX} file in or below the checkpoint's own directory"
    try:
        status = status_of(path)
    except FileNotFoundError:
        return 0, "no such file"
    except (OSError, ValueError) as error:
        return 0, str(getattr(error, "strerror", None) or error)
    if not stat.S_ISREG(status.st_mode):
        return 0, f"a symbolic link; {FOLLOW}" if stat.S_ISLNK(status.st_mode) else "not a regular file"
    return status.st_size, None


def _owner_of_file(metadata: DcpMetadata, file: int) -> list[str]:
    """Return the names of entries that have bytes in a file; of many, only the first few."""
    owners: list[str] = []
    for fqn, entry in metadata.tensors.items():
        rows = entry.chunk_ids
        if file in metadata.chunks.file[rows.start : rows.stop]:
            owners.append(fqn)
            if len(owners) > _SHOWN_NAMES:
                return owners
    return owners + [fqn for fqn, place in metadata.objects.items() if place and place.file == file]


def _owners_text(names: Sequence[str]) -> str:
    shown = ", ".join(escape(name) for name in names[:_SHOWN_NAMES])
    return f"{shown} and others lie" if len(names) > _SHOWN_NAMES else f"{shown} would lie"


def _doubts(metadata: DcpMetadata) -> Iterator[str]:
    """Yield a note about bytes whose tensors or objects are not described."""
    if metadata.orphans:
        yield (
            f"{metadata.where} places bytes of {count(len(metadata.orphans), 'name')} that it does not describe: "
            + listed(metadata.orphans)
        )


def _leftovers(directory: str, metadata: DcpMetadata) -> Iterator[str]:
    """Yield notes about files of another save."""
    ranks = rank_files(_listing(directory))
    if metadata.where == METADATA and ranks:
        yield f"{len(ranks)} rank-local metadata files of another save were left alone: {listed(list(ranks.values()))}"
    stale = unused_shards(directory, metadata.files)
    if stale:
        yield f"{len(stale)} {_SUFFIX} files do not belong to this checkpoint and were left alone: {listed(stale)}"


def unused_shards(directory: str, names: Collection[str]) -> list[str]:
    """Return the shard files that a checkpoint does not use, in its directory and the folders of its files.

    Args:
        directory: the checkpoint's.
        names: of the files that it uses, relative to the directory, as are those returned.
    """
    folders = {os.path.dirname(name) for name in names if _is_shard(name)} | {""}
    present = (
        os.path.join(folder, name) for folder in folders for name in listing(os.path.join(directory, folder))
    )
    return sorted(name for name in set(present).difference(names) if name.endswith(_SUFFIX))


def check_extents(metadata: DcpMetadata, files: list[SourceFile]) -> None:
    """Check that every extent is inside its file, and that two extents either share no byte or are equal.

    Raises:
        SourceError: names every tensor and file.
    """
    chunks, places = metadata.chunks, [place for place in metadata.objects.values() if place]
    has_no_empty = metadata.encoding != "raw"  # a record has more bytes than its data
    if has_no_empty and len(chunks) >= MIN_TOTAL:
        more = [(place.file, place.start, place.nbytes) for place in places]
        if are_apart(chunks.file, chunks.start, chunks.nbytes, [file.size for file in files], more):
            return
    owner = _owners(metadata.tensors)
    extents = [
        (file, start, start + nbytes, row)
        for row, (file, start, nbytes) in enumerate(
            zip(chunks.file, chunks.start, chunks.nbytes, strict=True)
        )
    ]
    objects = list(metadata.objects.items())
    for index, (_, place) in enumerate(objects):
        if place:
            extents.append((place.file, place.start, place.start + place.nbytes, -1 - index))
    extents.sort()

    def raw_name(row: int) -> str:
        return owner(row) if row >= 0 else objects[-1 - row][0]

    def name(row: int) -> str:
        return escape(raw_name(row))

    problems: list[str] = []
    needed, lost = dict[int, int](), dict[int, list[str]]()
    previous = (-1, 0, 0, 0)
    for extent in extents:
        file, start, stop, row = extent
        if start < 0 or stop < start or (stop == start and has_no_empty) or stop > files[file].size:
            problems.append(
                f"{name(row)}: bytes {start} to {stop} of {escape(files[file].name)}, which has {files[file].size}"
            )
            if 0 <= start < stop:
                needed[file] = max(needed.get(file, 0), stop)
                lost.setdefault(file, []).append(raw_name(row))
            continue
        if file == previous[0] and start < previous[2] and (start, stop) != previous[1:3]:
            problems.append(
                f"{name(row)} and {name(previous[3])}: overlapping bytes at {start} of {escape(files[file].name)}"
            )
        if file != previous[0] or stop > previous[2]:
            previous = extent
    refuse_pointers({files[file].name: files[file].path for file in lost})
    message = (
        f"{metadata.where} places {count(len(problems), 'entry', 'entries')} where their bytes cannot be"
    )
    if problems and sum(map(len, lost.values())) == len(problems):
        short = dict[str, str]()
        for file, stop in needed.items():
            size, names = files[file].size, listed(lost[file])
            short[files[file].name] = f"it has {size} bytes, and needs at least {stop} (for {names})"
        raise DamagedFiles(message, short, problems=problems, hint=_ANOTHER_COPY)
    SourceError.raise_for(problems, message, hint=_ANOTHER_COPY)


def _owners(tensors: dict[str, TensorEntry]) -> Callable[[int], str]:
    """Return a function that maps a chunk's row to its tensor's name."""
    names = list(tensors)
    firsts = [entry.first_chunk for entry in tensors.values()]
    return lambda row: names[bisect_right(firsts, row) - 1]


def check_tiling(metadata: DcpMetadata, hint: Callable[[Sequence[str]], str] | None = None) -> None:
    """Check that the chunks of every tensor cover each of its elements exactly once.

    Args:
        metadata: with the chunks.
        hint: returns the error's hint for a list of problems; None for the hint to use another copy.

    Raises:
        SourceError: names every tensor.
    """
    problems, least = [], MIN_COLUMNS if len(metadata.chunks) >= MIN_TOTAL else len(metadata.chunks) + 1
    for fqn, entry in metadata.tensors.items():
        if entry.num_chunks >= least and are_row_shards(entry.shape, metadata.chunks.boxes(entry.chunk_ids)):
            continue
        reason = find_tiling_error(entry.shape, metadata.chunks.regions(entry.chunk_ids))
        if reason:
            problems.append(f"{escape(fqn)}: {reason}")
    SourceError.raise_for(
        problems,
        f"the chunks of {count(len(problems), 'tensor')} in {metadata.where} do not make up the tensor",
        hint=hint(problems) if hint and problems else _ANOTHER_COPY,
    )


def are_row_shards(shape: Shape, boxes: array[int]) -> bool:
    """True if chunks, in their order, cut a tensor along its first dim; empty chunks may be anywhere inside it.

    Args:
        shape: the tensor's.
        boxes: for each chunk its offsets, then its sizes.
    """
    import numpy as np

    num_dims = len(shape)
    if num_dims == 0 or 0 in shape:
        return False
    rows = np.frombuffer(boxes, dtype=np.int64).reshape(-1, 2 * num_dims)
    if (rows < 0).any() or (rows[:, num_dims:] > np.array(shape, dtype=np.int64) - rows[:, :num_dims]).any():
        return False  # a chunk, perhaps an empty one, reaches outside
    rows = rows[rows[:, num_dims:].all(axis=1)]
    if not len(rows):
        return False
    offsets, sizes = rows[:, :num_dims], rows[:, num_dims:]
    starts, counts = offsets[:, 0], sizes[:, 0]
    if offsets[:, 1:].any() or (sizes[:, 1:] != np.array(shape[1:], dtype=np.int64)).any():
        return False
    if starts[0] != 0:
        return False
    return (
        bool((starts[1:] - starts[:-1] == counts[:-1]).all())
        and int(starts[-1]) + int(counts[-1]) == shape[0]
    )


def are_apart(
    files: array[int],
    starts: array[int],
    nbytes: array[int],
    sizes: Sequence[int],
    more: Sequence[Sequence[int]],
) -> bool:
    """True if all extents are non-empty and inside their files, and no two have a byte in common.

    Args:
        files, starts, nbytes: of each chunk, in bytes.
        sizes: of each file, in bytes.
        more: (file, first byte, bytes) of further extents.
    """
    import numpy as np

    more_extents = np.array(more, dtype=np.int64).reshape(-1, 3)
    file = np.concatenate([np.frombuffer(files, dtype=np.int32), more_extents[:, 0]])
    start = np.concatenate([np.frombuffer(starts, dtype=np.int64), more_extents[:, 1]])
    length = np.concatenate([np.frombuffer(nbytes, dtype=np.int64), more_extents[:, 2]])
    size = np.array(sizes, dtype=np.int64)[file]
    if (start < 0).any() or (length <= 0).any() or (start > size).any() or (length > size - start).any():
        return False
    order = np.lexsort((start, file))
    file, start, stop = file[order], start[order], (start + length)[order]
    return not ((file[1:] == file[:-1]) & (start[1:] < stop[:-1])).any()


def _holds_bare_bytes(metadata: DcpMetadata) -> bool:
    """True if every extent has exactly as many bytes as its chunk's elements, which is too short for a record."""
    table = metadata.chunks
    return bool(metadata.tensors) and all(
        table.nbytes[row] == table.region(row).num_elements * entry.dtype.itemsize
        for entry in metadata.tensors.values()
        for row in entry.chunk_ids
    )
