"""What `.metadata` says, held against the files and against itself: extents, and the tiling of each tensor."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from shardkit.core.catalog import SourceFile, TensorEntry
from shardkit.core.regions import Region, Shape, find_tiling_error
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.formats.dcp.columns import MIN_COLUMNS, MIN_TOTAL, are_apart, are_row_shards
from shardkit.formats.dcp.metadata import DcpMetadata

ANOTHER_COPY = "the checkpoint is damaged or incomplete: use another copy"


def check_extents(metadata: DcpMetadata, files: list[SourceFile]) -> None:
    """Every extent lies in its file, and shares no byte with another unless the two are equal.

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

    def name(row: int) -> str:
        return escape(owner(row) if row >= 0 else objects[-1 - row][0])

    problems: list[str] = []
    previous = (-1, 0, 0, 0)
    for extent in extents:
        file, start, stop, row = extent
        if start < 0 or stop < start or (stop == start and has_no_empty) or stop > files[file].size:
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
            f"{metadata.where} places {len(problems)} entries where their bytes cannot be",
            problems=problems,
            hint=ANOTHER_COPY,
        )


def _owners(tensors: dict[str, TensorEntry]) -> Callable[[int], str]:
    """Return a function from a chunk to its tensor's name."""
    names = list(tensors)
    firsts = [entry.first_chunk for entry in tensors.values()]
    return lambda row: names[bisect_right(firsts, row) - 1]


def check_tiling(metadata: DcpMetadata, hint: str = ANOTHER_COPY) -> None:
    """The chunks of every tensor make it up exactly once.

    Raises:
        SourceError: names every tensor, with `hint`.
    """
    problems, least = [], MIN_COLUMNS if len(metadata.chunks) >= MIN_TOTAL else len(metadata.chunks) + 1
    for fqn, entry in metadata.tensors.items():
        if entry.num_chunks >= least and are_row_shards(entry.shape, metadata.chunks.boxes(entry.chunk_ids)):
            continue
        regions = metadata.chunks.regions(entry.chunk_ids)
        reason = None if is_grid(entry.shape, regions) else find_tiling_error(entry.shape, regions)
        if reason:
            problems.append(f"{escape(fqn)}: {reason}")
    if problems:
        raise SourceError(
            f"the chunks of {len(problems)} tensors in {metadata.where} do not make up the tensor",
            problems=problems,
            hint=hint,
        )


def is_grid(shape: Shape, regions: list[Region]) -> bool:
    """True where the chunks are the cells of a grid: each dim is cut into ranges, and every combination
    is there. Such chunks tile the tensor; it is what trainers write, and quicker to see than by pairs.

    No two chunks with elements may have the same offsets (the caller sees to that), so counting the cells is
    enough.
    """
    if any(0 in region.sizes for region in regions):
        regions = [region for region in regions if 0 not in region.sizes]
    num_cells = 1
    for dim, size in enumerate(shape):
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
