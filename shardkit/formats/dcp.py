"""Open a DCP directory: `.metadata`, and `.distcp` files full of `torch.save` records.

`.metadata` is trusted over the directory listing: a reused directory can hold shards of an older, larger
world. What it says is checked against the files: every chunk's bytes are there, no two entries share
some of them (unless they share all: tied names), and each tensor is tiled exactly once.

Source: torch 2.13, torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from shardkit.core.catalog import Catalog, SourceFile, TensorEntry
from shardkit.core.regions import Region, find_tiling_error
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.formats.dcp_metadata import DcpMetadata, parse_metadata
from shardkit.formats.dcp_raw import point_at_data
from shardkit.formats.strict import read_small

METADATA = ".metadata"
_SUFFIX = ".distcp"
_MAX_METADATA = 1 << 30
_SHOWN_NAMES = 3
_SAFETENSORS = (
    "saved with serialization_format=SAFETENSORS? its places are wrong, and torch cannot load it either"
)
_ANOTHER_COPY = "the checkpoint is damaged or incomplete: use another copy"


def is_dcp(directory: str) -> bool:
    """True where the directory has the marker file of a finished DCP save."""
    return os.path.lexists(os.path.join(directory, METADATA))


def open_dcp(directory: str, *, records: bool = False) -> Catalog:
    """Open a DCP directory.

    Args:
        directory: where `.metadata` lies.
        records: also open every record and compare it with `.metadata`. The catalog's encoding is then
            "raw", and its extents are the chunks' bytes; otherwise it is "torch-record".

    Raises:
        SourceError: missing, damaged, hostile or contradictory; names the file and the tensors.
        IntegrityError: a record is not what `.metadata` says.
        ResourceError: a file may not be read.
    """
    metadata = _read_metadata(directory)
    files = _stat_files(directory, metadata)
    _check_extents(metadata, files)
    _check_tiling(metadata)
    catalog = Catalog(
        format="dcp",
        directory=directory,
        encoding="torch-record",
        files=files,
        tensors=metadata.tensors,
        chunks=metadata.chunks,
        objects=tuple(metadata.objects),
        paths=metadata.paths,
        notes=(*_orphan_notes(metadata), *_stale_notes(directory, metadata)),
    )
    if records:
        point_at_data(catalog, metadata.transforms)
    return catalog


def _read_metadata(directory: str) -> DcpMetadata:
    path = os.path.join(directory, METADATA)
    _refuse_link(path, METADATA)
    if not os.path.lexists(path):
        raise SourceError(f"{escape(directory)} has no {METADATA}: {_why_missing(directory)}")
    return parse_metadata(read_small(path, METADATA, _MAX_METADATA), where=METADATA)


def _why_missing(directory: str) -> str:
    names = _listing(directory)
    if f"{METADATA}.tmp" in names:
        return f"the save did not finish ({METADATA}.tmp is there)"
    if "__0.metadata" in names:
        return "rank-local metadata (__0.metadata) is not supported yet"
    return "not a DCP checkpoint, or its save did not finish"


def _listing(directory: str) -> set[str]:
    try:
        return set(os.listdir(directory))
    except OSError as error:
        raise SourceError(f"{escape(directory)} cannot be listed: {error.strerror}") from None


def _refuse_link(path: str, name: str) -> None:
    if os.path.islink(path):
        raise SourceError(
            f"{escape(name)} is a symbolic link: only regular files of the directory are read",
            hint="copy the checkpoint with its links resolved (cp -rL)",
        )


def _stat_files(directory: str, metadata: DcpMetadata) -> list[SourceFile]:
    """Look at every file that an entry needs; all that is wrong with them is said at once."""
    used = set(metadata.chunks.file) | {place.file for place in metadata.objects.values() if place}
    problems: list[str] = []
    files: list[SourceFile] = []
    for index, name in enumerate(metadata.files):
        path = os.path.join(directory, name) if _is_bare(name) else ""
        size = 0
        if index in used:
            size, problem = _file_size(path, name)
            if problem:
                owner = _owner_of_file(metadata, index)
                problems.append(f"{escape(name)}: {problem} ({_named(owner)} there)")
        files.append(SourceFile(name=name, path=path, size=size))
    if problems:
        raise SourceError(
            f"{METADATA} points at {len(problems)} files that cannot be read",
            problems=problems,
            hint="copy the missing files from where the checkpoint was saved; it needs all of them",
        )
    return files


def _is_bare(name: str) -> bool:
    return name.endswith(_SUFFIX) and not any(c in name for c in "/\\\0") and name != _SUFFIX


def _file_size(path: str, name: str) -> tuple[int, str | None]:
    if not path:
        return 0, f"not the name of a {_SUFFIX} file in the checkpoint's own directory"
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return 0, "no such file"
    except (OSError, ValueError) as error:
        return 0, str(getattr(error, "strerror", None) or error)
    if not stat.S_ISREG(status.st_mode):
        return 0, "not a regular file"
    return status.st_size, None


def _owner_of_file(metadata: DcpMetadata, file: int) -> list[str]:
    """Names that have bytes in a file, the first few."""
    owners: list[str] = []
    for fqn, entry in metadata.tensors.items():
        rows = entry.chunk_ids
        if file in metadata.chunks.file[rows.start : rows.stop]:
            owners.append(fqn)
            if len(owners) > _SHOWN_NAMES:
                return owners
    return owners + [fqn for fqn, place in metadata.objects.items() if place and place.file == file]


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(escape(name) for name in names[:_SHOWN_NAMES])
    return f"{shown} and others lie" if len(names) > _SHOWN_NAMES else f"{shown} would lie"


def _check_extents(metadata: DcpMetadata, files: list[SourceFile]) -> None:
    """Every extent lies in its file, and shares no byte with another unless the two are equal."""
    chunks = metadata.chunks
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

    def name(row: int) -> str:
        return escape(owner(row) if row >= 0 else objects[-1 - row][0])

    problems: list[str] = []
    previous = (-1, 0, 0, 0)
    for extent in extents:
        file, start, stop, row = extent
        if start < 0 or stop <= start or stop > files[file].size:
            problems.append(
                f"{name(row)}: bytes {start} to {stop} of {escape(files[file].name)}, which has {files[file].size}"
            )
            continue
        if file == previous[0] and start < previous[2] and (start, stop) != previous[1:3]:
            problems.append(
                f"{name(row)} and {name(previous[3])}: overlapping bytes at {start} of {escape(files[file].name)}"
            )
        if file != previous[0] or stop > previous[2]:
            previous = extent
    if problems:
        raise SourceError(
            f"{METADATA} places {len(problems)} entries where their bytes cannot be",
            problems=problems,
            hint=_SAFETENSORS if _all_at_zero(metadata) else _ANOTHER_COPY,
        )


def _all_at_zero(metadata: DcpMetadata) -> bool:
    """True for what torch's writer leaves behind with serialization_format=SAFETENSORS."""
    return len(metadata.chunks) > 1 and not any(metadata.chunks.start)


def _owners(tensors: dict[str, TensorEntry]) -> Callable[[int], str]:
    """Return a function from a chunk to its tensor's name."""
    names = list(tensors)
    firsts = [entry.first_chunk for entry in tensors.values()]
    return lambda row: names[bisect_right(firsts, row) - 1]


def _check_tiling(metadata: DcpMetadata) -> None:
    problems = []
    for fqn, entry in metadata.tensors.items():
        regions = metadata.chunks.regions(entry.chunk_ids)
        if not _is_grid(entry, regions):
            reason = find_tiling_error(entry.shape, regions)
            if reason:
                problems.append(f"{escape(fqn)}: {reason}")
    if problems:
        raise SourceError(
            f"the chunks of {len(problems)} tensors in {METADATA} do not make up the tensor",
            problems=problems,
            hint=_ANOTHER_COPY,
        )


def _is_grid(entry: TensorEntry, regions: list[Region]) -> bool:
    """True where the chunks are the cells of a grid: each dim is cut into ranges, and every combination
    is there. Such chunks tile the tensor; it is what trainers write, and quicker to see than by pairs.

    No two chunks have the same offsets (`dcp_metadata` saw to that), so counting the cells is enough.
    """
    if any(0 in region.sizes for region in regions):
        regions = [region for region in regions if 0 not in region.sizes]
    num_cells = 1
    for dim, size in enumerate(entry.shape):
        ranges = sorted((region.offsets[dim], region.sizes[dim]) for region in regions)
        reached, num_ranges, last = 0, 0, None
        for part in ranges:
            if part != last:
                if part[0] != reached:
                    return False
                reached, num_ranges, last = part[0] + part[1], num_ranges + 1, part
        if reached != size:
            return False
        num_cells *= num_ranges
    return num_cells == len(regions)


def _orphan_notes(metadata: DcpMetadata) -> Iterator[str]:
    if metadata.orphans:
        yield f"{METADATA} places bytes of {len(metadata.orphans)} names that it does not describe: " + _some(
            metadata.orphans
        )


def _stale_notes(directory: str, metadata: DcpMetadata) -> Iterator[str]:
    stale = sorted(name for name in _listing(directory) - set(metadata.files) if name.endswith(_SUFFIX))
    if stale:
        yield f"{len(stale)} {_SUFFIX} files do not belong to this checkpoint and were left alone: {_some(stale)}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(escape(name) for name in names[:_SHOWN_NAMES])
    return f"{shown}, ..." if len(names) > _SHOWN_NAMES else shown
