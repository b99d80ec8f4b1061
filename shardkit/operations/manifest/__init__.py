"""A manifest for a checkpoint that somebody else made, so that it can be verified later.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from shardkit.core.catalog import Catalog
from shardkit.core.regions import is_contiguous
from shardkit.core.result import Result, wrote
from shardkit.core.text import count, escape, listed
from shardkit.core.threads import ProgressOption, choose_jobs, progress_for
from shardkit.errors import IntegrityError, ResourceError, UsageError
from shardkit.files import manifest, storage, stores
from shardkit.files.digest import FileBytes, Scan, combine, place_of
from shardkit.files.home import path_in
from shardkit.files.links import may_follow_links
from shardkit.files.listing import FolderContent, list_files
from shardkit.formats.registry import format_of
from shardkit.operations.destination import check_sidecar, write_sidecar
from shardkit.operations.resolve import described_at, stands_for
from shardkit.operations.verify.bytes import scan_whole
from shardkit.operations.verify.result import Report, in_threads
from shardkit.operations.verify.structure import Structure, check_structure

_NOT_TAKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestResult(Result):
    """What was written, or with `dry_run` would be."""

    path: str
    """The checkpoint: as it was given, or the newest one in the run's directory that was given."""
    manifest: str
    """The manifest, an absolute path."""
    dry_run: bool
    format: str
    """Such as "dcp", "lightning" or "hub"."""
    writer: str
    """Who wrote the checkpoint, for people."""
    sha256: bool
    """True if the sha256 of every file was taken too."""
    num_files: int
    """How many files the manifest lists."""
    read_bytes: int
    """The size of these files together."""
    num_tensors: int
    num_tensor_digests: int
    """Tensors whose own CRC-32 is in it; with `dry_run` 0."""
    elapsed_s: float
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    def headline(self) -> str:
        """Return what was written, or would be."""
        return wrote(self.manifest, dry_run=self.dry_run)


@may_follow_links
def write_manifest(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    inside: bool = False,
    sha256: bool = False,
    jobs: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    follow_links: bool = False,
    progress: ProgressOption = None,
) -> ManifestResult:
    """Record every file and every tensor of a checkpoint, with digests; everything is read once.

    Checksums that the checkpoint records are compared: one that is damaged already gets no manifest.

    Args:
        path: a checkpoint of any format that shardkit opens, a Hub model, or a run's directory, whose newest
            checkpoint is taken; it has to be whole.
        output: the manifest to make; by default beside the checkpoint, `<path>.shardkit.json`.
        inside: put it into the checkpoint's directory, as `shardkit.json`.
        sha256: take the sha256 of every file too.
        jobs: threads; by default the cores that this process may use, from 2 to 8.
        overwrite: replace an existing manifest.
        dry_run: check the structure, say what would be read, and write nothing.
        follow_links: links that lead out of a checkpoint's directory are read as the files that they lead to.
            Weight files of a Hub model are read in any case.
        progress: told of the bytes as they are read; by default a bar, on a terminal and in a notebook. False: none.

    Raises:
        UsageError: options that cannot be carried out, or an existing manifest.
        SourceError: nothing there, or nothing that is a checkpoint.
        IntegrityError: it is damaged; with every problem that was found.
        ResourceError: a file cannot be read, or the manifest cannot be written.
    """
    begun = time.monotonic()
    given, num_threads = stores.as_path(path), choose_jobs(jobs)
    path = stands_for(given, strict=True).path if storage.lexists(given) else given
    directory = described_at(path)
    target = _target(directory, output, inside=inside, overwrite=overwrite)
    report = Report(progress=progress_for(progress))
    structure = check_structure(path, report, is_new=True)
    _refuse_damaged(path, report)
    assert structure.is_whole  # else there is a problem
    opened = structure.checkpoint
    catalog = opened.select(tuple(opened.catalog.tensors)) if opened is not None else None
    listing = _list(structure, target)
    result = _result(path, target, structure, listing, report, sha256=sha256, dry_run=dry_run)
    if not dry_run:
        digests = Digests(catalog, sha256=sha256)
        files = _files(structure, listing)
        tasks = [partial(digests.take, name, file) for name, file in files.items()]
        in_threads(report, tasks, num_threads, label="manifest", total_bytes=result.read_bytes)
        _refuse_damaged(path, report)
        tensors = digests.tensors(opened.catalog) if opened is not None else None
        content = manifest.FileList(
            tool=manifest.TOOL,
            layout=result.format,
            writer=result.writer,
            files=tuple(digests.files[name] for name in listing.files),
            unlisted=tuple(listing.unlisted),
            tensors=tensors,
        )
        write_sidecar(target, manifest.dump(content), overwrite=overwrite)
        taken = sum(tensor.crc32 is not None for tensor in (tensors or {}).values())
        result = replace(result, num_tensor_digests=taken)
    return replace(result, elapsed_s=round(time.monotonic() - begun, 3))


def _target(directory: str, output: str | os.PathLike[str] | None, *, inside: bool, overwrite: bool) -> str:
    """Return where the manifest goes; never into somebody's checkpoint without being told."""
    if inside:
        if output is not None:
            raise UsageError("give either --inside or --output")
        if not storage.isdir(directory):
            raise UsageError(f"--inside: {escape(directory)} is a file, not a directory")
        _check_inside(directory)
        return check_sidecar(os.path.join(directory, manifest.NAME), overwrite=overwrite)
    if output is None:
        if not manifest.may_lie_beside(directory):
            raise UsageError(
                f"{escape(directory)} lies in a store or in the Hub's cache: no manifest is written beside it",
                hint="say where the manifest is to be made with --output",
            )
        return check_sidecar(manifest.sidecar_of(directory), overwrite=overwrite)
    around = [directory] if storage.isdir(directory) else []
    return check_sidecar(os.fspath(output), overwrite=overwrite, outside=around)


def _check_inside(directory: str) -> None:
    """Refuse to replace a manifest that says more than which files there are."""
    old = manifest.read(directory)
    if old is not None and not isinstance(old, manifest.FileList):
        raise UsageError(
            f"{escape(directory)} has the manifest that it was written with: it is not replaced",
            hint="leave --inside out: the new one is made beside the directory",
        )


def _refuse_damaged(path: str, report: Report) -> None:
    if not report.problems:
        return
    lines = [line for problem in report.problems for line in (problem.line(), *problem.details)]
    if all(problem.is_unreadable for problem in report.problems):
        raise ResourceError(f"{escape(path)}: {count(len(lines), 'file')} cannot be read", problems=lines)
    raise IntegrityError(
        f"{escape(path)} is damaged: a manifest of it would say that it is whole",
        problems=lines,
        hint="use another copy of the checkpoint; shardkit verify shows the same problems",
    )


def _list(structure: Structure, target: str) -> FolderContent:
    """Return the files to list, without the manifest itself."""
    directory, follow = structure.directory, _follows(structure)
    if not storage.isdir(directory):
        return FolderContent({os.path.basename(directory): storage.stat(directory).st_size}, ())
    listing = list_files(directory, follow=follow)
    own = manifest.NAME if place_of(target) == place_of(os.path.join(directory, manifest.NAME)) else None
    return FolderContent(
        {name: size for name, size in listing.files.items() if name != own}, listing.unlisted
    )


def _files(structure: Structure, listing: FolderContent) -> dict[str, FileBytes]:
    """Return every listed file, with the checksums that lie in it."""
    home = structure.directory
    home = home if storage.isdir(home) else os.path.dirname(home)
    known = {place_of(file.path): file for file in structure.files}
    follow, files = _follows(structure), dict[str, FileBytes]()
    for name, size in listing.files.items():
        file = known.get(place_of(path_in(home, name)))
        if file is None:
            file = FileBytes(name=name, path=path_in(home, name), follow=follow, size=size)
        files[name] = replace(file, crc32=None, sha256=None, follow=follow, size=size)
    return files


def _follows(structure: Structure) -> bool:
    """True if links stand for files, as in the Hub's cache."""
    return structure.checkpoint is not None and structure.checkpoint.hub is not None


def _result(
    path: str,
    target: str,
    structure: Structure,
    listing: FolderContent,
    report: Report,
    *,
    sha256: bool,
    dry_run: bool,
) -> ManifestResult:
    notes, opened = list(report.notes), structure.checkpoint
    if listing.unlisted:
        which = count(
            len(listing.unlisted), "link, pipe, socket or device", "links, pipes, sockets or devices"
        )
        notes.append(f"not listed: {which}: {listed(listing.unlisted)}")
    return ManifestResult(
        path=path,
        manifest=target,
        dry_run=dry_run,
        format=opened.format if opened is not None else format_of(path) or "",
        writer=opened.writer if opened is not None else "unknown",
        sha256=sha256,
        num_files=len(listing.files),
        read_bytes=sum(listing.files.values()),
        num_tensors=len(opened.catalog.tensors) if opened is not None else 0,
        num_tensor_digests=0,
        elapsed_s=0.0,
        notes=tuple(notes),
        warnings=tuple(report.warnings),
    )


class Digests:
    """Takes the digests of files, and of the chunks in them.

    Args:
        catalog: where the tensors' bytes lie; None if that is not known.
        sha256: take the sha256 of every file too.
    """

    def __init__(self, catalog: Catalog | None, *, sha256: bool) -> None:
        self._catalog = catalog = catalog if catalog is not None else Catalog(format="", directory="")
        self.sha256 = sha256
        self.files: dict[str, manifest.ListedFile] = {}
        """What the manifest says of each file."""
        self._crcs = array("q", [_NOT_TAKEN]) * len(catalog.chunks)
        self._rows: dict[str, list[int]] = {}
        places = [place_of(file.path) if file.is_raw else None for file in catalog.files]
        for row, number in enumerate(catalog.chunks.file):
            place = places[number]
            if place is not None:
                self._rows.setdefault(place, []).append(row)

    def take(self, name: str, file: FileBytes, report: Report) -> None:
        """Read a file; may be called from several threads, for different files.

        Args:
            name: what the manifest calls it.
            file: with the checksums that lie in it, which are compared.
            report: gets what is wrong.
        """
        table, rows = self._catalog.chunks, self._rows.get(place_of(file.path), [])
        marks = (mark for row in rows for mark in (table.start[row], table.start[row] + table.nbytes[row]))
        scan = scan_whole(file, marks, report, sha256=self.sha256)
        if scan is None:
            return
        for row in rows:
            self._crcs[row] = scan.crc(table.start[row], table.nbytes[row])
        self.files[name] = manifest.ListedFile(
            name=name,
            size=file.size,
            crc32=scan.crc32,
            sha256=scan.sha256,
            extents=tuple(self._extents(file, scan)) or None,
        )

    def _extents(self, file: FileBytes, scan: Scan) -> Iterator[tuple[int, int, int]]:
        """Yield (first byte, bytes, CRC-32) of each part of a tensor that has no checksum in the file."""
        for stretch in sorted(file.stretches, key=lambda stretch: stretch.start):
            entry = self._catalog.tensors.get(stretch.tensor) if stretch.tensor is not None else None
            is_whole = entry is not None and entry.nbytes == stretch.nbytes
            if stretch.crc32 is None and not is_whole:
                yield stretch.start, stretch.nbytes, scan.crc(stretch.start, stretch.nbytes)

    def tensors(self, stored: Catalog) -> dict[str, manifest.ListedTensor]:
        """Return what the manifest says of each tensor, in the order of the checkpoint.

        Args:
            stored: with the names, dtypes and shapes of all of them.
        """
        return {
            fqn: manifest.ListedTensor(
                dtype=tensor.dtype.name, shape=tensor.shape, crc32=self._tensor_crc(fqn)
            )
            for fqn, tensor in stored.tensors.items()
        }

    def _tensor_crc(self, fqn: str) -> int | None:
        """Return the CRC-32 of a tensor whose chunks are runs of it; None for any other, which would be read again."""
        entry = self._catalog.tensors[fqn]
        regions = self._catalog.chunks.regions(entry.chunk_ids)
        pieces = []
        for region, row in sorted(zip(regions, entry.chunk_ids, strict=True)):
            if self._crcs[row] == _NOT_TAKEN or not is_contiguous(region, entry.shape):
                return None
            pieces.append((self._crcs[row], region.num_elements * entry.dtype.itemsize))
        return combine(pieces)
