"""Open a DCP directory: `.metadata`, and `.distcp` files full of `torch.save` records.

`.metadata` is trusted over the directory listing: a reused directory can hold shards of an older, larger
world. What it says is checked against the files: every chunk's bytes are there, no two entries share
some of them (unless they share all: tied names), and each tensor is tiled exactly once.

Source: torch 2.13, torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardkit.core.catalog import Catalog, SourceFile, subset
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.files.strict_json import read_small
from shardkit.formats.checkpoint import Place
from shardkit.formats.dcp.check import ANOTHER_COPY, check_extents, check_tiling
from shardkit.formats.dcp.merge import rank_files, read_rank_metadata
from shardkit.formats.dcp.metadata import DcpMetadata, parse_metadata
from shardkit.formats.dcp.records import check_records, select_raw
from shardkit.formats.dcp.safetensors import holds_bare_bytes, point_at_parts

METADATA = ".metadata"
_SUFFIX = ".distcp"
_MAX_METADATA = 1 << 30
_SHOWN_NAMES = 3
_OTHER_RANKS = "files of a rank may be missing: copy all __R.metadata and .distcp files of the save"


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpDirectory:
    """A DCP directory, opened; no record of it yet."""

    catalog: Catalog
    """Its extents are whole records ("torch-record"), or bytes ("raw") where the files hold no records."""
    transforms: Mapping[int, tuple[str, ...]]
    """By chunk, the extensions that its record was put through."""
    objects: Mapping[str, Place | None]
    """Entries that are not tensors, and where each one's record lies."""

    @property
    def has_records(self) -> bool:
        """True where tensors are stored as `torch.save` records, which have a CRC-32."""
        return self.catalog.encoding != "raw"

    def select(self, names: Collection[str]) -> Catalog:
        """Return a catalog of some tensors, in the order given, whose extents are the chunks' bytes.

        Their records, and no others, are opened and compared with what `.metadata` says.

        Raises:
            SourceError, IntegrityError, ResourceError: naming file and tensor; all problems of a kind at once.
        """
        if not self.has_records:
            return subset(self.catalog, names)
        return select_raw(self.catalog, self.transforms, names)

    def check(self, names: Collection[str]) -> Iterator[str]:
        """Read the bytes of some tensors and yield a line for each record whose CRC-32 is not the recorded one.

        Raises:
            SourceError, IntegrityError, ResourceError: records that cannot be read.
        """
        return check_records(self.catalog, self.transforms, names)


def is_dcp(directory: str) -> bool:
    """True where the directory has the marker file of a finished DCP save, or a rank's."""
    try:
        names = os.listdir(directory)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return False
    return METADATA in names or bool(rank_files(names))


def open_dcp(directory: str, *, records: bool | Collection[str] = False) -> Catalog:
    """Open a DCP directory.

    Args:
        directory: where `.metadata` lies, or `__R.metadata` of each rank.
        records: also open every record, or those of the tensors named, and compare them with `.metadata`.
            The catalog's encoding is then "raw", its extents are the chunks' bytes, and it holds no other
            tensors; otherwise it is "torch-record".

    Raises:
        SourceError: missing, damaged, hostile or contradictory; names the file and the tensors.
        IntegrityError: a record is not what `.metadata` says.
        ResourceError: a file may not be read.
    """
    opened = open_dcp_lazily(directory)
    if records is False:
        return opened.catalog
    catalog = opened.catalog
    chosen = opened.select(tuple(catalog.tensors) if records is True else records)
    chosen.notes = (*catalog.notes, *chosen.notes)
    if records is True:
        chosen.objects, chosen.paths = catalog.objects, catalog.paths
    return chosen


def open_dcp_lazily(directory: str) -> DcpDirectory:
    """Open a DCP directory without its records; `select` opens those of the tensors that are wanted.

    Raises:
        SourceError, ResourceError: as `open_dcp`.
    """
    return open_metadata(directory, _read_metadata(directory))


def open_metadata(directory: str, metadata: DcpMetadata) -> DcpDirectory:
    """Hold what metadata says against the files of a directory.

    Raises:
        SourceError, ResourceError: as `open_dcp`.
    """
    files = _stat_files(directory, metadata)
    if metadata.encoding != "raw" and holds_bare_bytes(metadata):
        point_at_parts(metadata, files)
    check_extents(metadata, files)
    check_tiling(metadata, ANOTHER_COPY if metadata.where == METADATA else _OTHER_RANKS)
    catalog = Catalog(
        format="dcp",
        directory=directory,
        encoding=metadata.encoding,
        files=files,
        tensors=metadata.tensors,
        chunks=metadata.chunks,
        objects=tuple(metadata.objects),
        paths=metadata.paths,
        notes=(*_orphan_notes(metadata), *_stale_notes(directory, metadata)),
    )
    return DcpDirectory(catalog=catalog, transforms=metadata.transforms, objects=metadata.objects)


def _read_metadata(directory: str) -> DcpMetadata:
    """Read `.metadata`; rank-local metadata only where there is none, never instead of a damaged one."""
    path = os.path.join(directory, METADATA)
    if os.path.lexists(path):
        return parse_metadata(read_small(path, METADATA, _MAX_METADATA, follow=False), where=METADATA)
    names = _listing(directory)
    if not rank_files(names):
        raise SourceError(f"{escape(directory)} has no {METADATA}: {_why_missing(names)}")
    return read_rank_metadata(directory, names, _MAX_METADATA)


def _why_missing(names: Collection[str]) -> str:
    if f"{METADATA}.tmp" in names:
        return f"the save did not finish ({METADATA}.tmp is there)"
    return "not a DCP checkpoint, or its save did not finish"


def _listing(directory: str) -> set[str]:
    try:
        return set(os.listdir(directory))
    except OSError as error:
        raise SourceError(f"{escape(directory)} cannot be listed: {error.strerror}") from None


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
            f"{metadata.where} points at {len(problems)} files that cannot be read",
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


def _orphan_notes(metadata: DcpMetadata) -> Iterator[str]:
    if metadata.orphans:
        yield (
            f"{metadata.where} places bytes of {len(metadata.orphans)} names that it does not describe: "
            + _some(metadata.orphans)
        )


def _stale_notes(directory: str, metadata: DcpMetadata) -> Iterator[str]:
    names = _listing(directory)
    ranks = rank_files(names)
    if metadata.where == METADATA and ranks:
        yield f"{len(ranks)} rank-local metadata files of another save were left alone: {_some(list(ranks.values()))}"
    stale = sorted(name for name in names - set(metadata.files) if name.endswith(_SUFFIX))
    if stale:
        yield f"{len(stale)} {_SUFFIX} files do not belong to this checkpoint and were left alone: {_some(stale)}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(escape(name) for name in names[:_SHOWN_NAMES])
    return f"{shown}, ..." if len(names) > _SHOWN_NAMES else shown
