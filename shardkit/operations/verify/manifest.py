"""Compare a directory with its manifest: names, sizes, and the digests of small files that are read as a whole.

A manifest is shardkit's record of what it wrote, in `shardkit.json`. For a DCP directory it lists shard files, with the
*chunk list* (`*.chunks.json`) beside each, and `.metadata`; for a Hub model, its files. Here, `described` is a manifest
with the directory that it describes.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import BY_NAME
from shardkit.core.text import count, escape, listed
from shardkit.errors import ResourceError, ShardkitError
from shardkit.files import manifest, storage
from shardkit.files.digest import FileBytes, crc32, place_of
from shardkit.files.home import path_in
from shardkit.files.links import locate
from shardkit.files.listing import differing_sizes, unlisted_names
from shardkit.files.strict_json import read_small
from shardkit.formats.dcp import chunk_list
from shardkit.formats.dcp.chunk_list import ChunkList
from shardkit.formats.recorded import mismatched_tensors
from shardkit.operations.verify.result import SIZE, Report

_LIST = re.compile(r".*\.chunks\.json")


@dataclass(slots=True, kw_only=True)
class CheckedManifest:
    """A manifest, and which of its files agree with it."""

    content: manifest.Manifest
    where: str
    """Name of the manifest relative to the checkpoint, or its path if it is outside."""
    folder: str
    """The directory that it describes, relative to the checkpoint."""
    directory: str
    """Path of that directory."""
    files: dict[str, manifest.SavedFile] = field(default_factory=dict)
    """Listed files that exist with the right size, without chunk lists and `.metadata`."""
    lists: dict[str, ChunkList] = field(default_factory=dict)
    """Shard file -> its chunk list."""
    is_metadata_damaged: bool = False
    """`.metadata` is missing or differs from its recorded size or digest, so its content cannot be trusted."""

    def has_reported(self, name: str) -> bool:
        """True if the manifest lists a file and the difference was already reported."""
        return name not in self.files and any(file.name == name for file in manifest.all_files(self.content))

    @property
    def is_for_dcp(self) -> bool:
        """True for the manifest of a DCP directory that shardkit wrote."""
        return isinstance(self.content, (manifest.Presharded, manifest.SavedState))

    @property
    def metadata(self) -> manifest.File | None:
        """The manifest's entry for `.metadata`, or None."""
        content = self.content
        return content.metadata if isinstance(content, (manifest.Presharded, manifest.SavedState)) else None

    @property
    def lists_files(self) -> bool:
        """True for a manifest that only lists files, without describing how they were made."""
        return isinstance(self.content, manifest.FileList)


def read_manifest(
    directory: str, folder: str, report: Report, *, path: str | None = None
) -> CheckedManifest | None:
    """Read a manifest and compare a directory with it; return None if the manifest cannot be read.

    Args:
        directory: the described directory, or a single file.
        folder: the same, relative to the checkpoint.
        report: gets the problems.
        path: path of a manifest outside of the directory; None for the one inside.
    """
    where = os.path.join(folder, manifest.NAME) if path is None else path
    report.manifests.append(where)
    content: manifest.Manifest | None = None

    def check_bytes(data: bytes, values: Mapping[str, Any]) -> None:
        if manifest.encode(values) != data:  # its digest covers neither blanks nor how numbers are written
            report.problem("its content is right, but its bytes were changed", file=where)

    with report.collect_errors(where):
        content = manifest.read_file(
            locate(directory, manifest.NAME) if path is None else path,
            os.path.basename(where),
            check=check_bytes,
        )
    if content is None:
        return None
    is_one_file = not storage.isdir(directory)
    home = (os.path.dirname(directory) or os.curdir) if is_one_file else directory
    described = CheckedManifest(content=content, where=where, folder=folder, directory=home)
    _check_files(described, report)
    if not is_one_file:
        _check_unlisted(described, report)
    return described


def _check_files(described: CheckedManifest, report: Report) -> None:
    """Compare the listed files with those on disk: existence and size, and the content of `.metadata` and chunk lists.

    Fills in `files`, `lists` and `is_metadata_damaged`.
    """
    content, metadata = described.content, described.metadata
    follow = manifest.follows_links(content)
    unlike_files = differing_sizes(described.directory, manifest.every_file(content), follow=follow)

    def is_there(file: manifest.SavedFile) -> bool:
        """True if a file exists with the right size; otherwise report it."""
        if file.name in unlike_files:
            _report_unlike(described, file, unlike_files[file.name], report)
        return file.name not in unlike_files

    if metadata is not None and is_there(metadata):
        described.is_metadata_damaged = not _read_described(described, metadata, report)
    for file in manifest.all_files(content):
        if is_there(file):
            described.files[file.name] = file
        if isinstance(file, manifest.ShardFile) and _has_its_chunk_list(described, file, report):
            if is_there(file.chunks):
                _check_list(described, file, report)


def _report_unlike(
    described: CheckedManifest, file: manifest.SavedFile, size: int | None, report: Report
) -> None:
    """Report a listed file that is missing or not a regular file (`size` is None), or has another size."""
    where = os.path.join(described.folder, file.name)
    if size is None:
        is_there = storage.lexists(path_in(described.directory, file.name))
        reason = "it is not a regular file of the directory" if is_there else "there is no such file"
        report.problem(
            f"{escape(os.path.basename(described.where))} lists it, and {reason}",
            file=where,
            num_bytes=file.size,
            is_missing=not is_there,
        )
    else:
        report.problem(SIZE, file=where, expected=str(file.size), found=str(size))


def _has_its_chunk_list(described: CheckedManifest, file: manifest.ShardFile, report: Report) -> bool:
    """True if the manifest gives a shard file the chunk list that is named after it; otherwise report that."""
    name = chunk_list.name_for(file.name)
    if file.chunks.name != name:
        report.problem(
            f"{escape(file.name)} has another chunk list",
            file=described.where,
            expected=escape(name),
            found=escape(file.chunks.name),
            is_contradiction=True,
        )
    return file.chunks.name == name


def _check_list(described: CheckedManifest, file: manifest.ShardFile, report: Report) -> None:
    """Compare a shard file's chunk list with its digest, and parse it into `described.lists`."""
    name = os.path.join(described.folder, file.chunks.name)
    is_as_recorded = _read_described(described, file.chunks, report)
    if file.name not in described.files:  # the reason was reported
        return
    try:
        described.lists[file.name], _ = chunk_list.read_beside(described.directory, file.name, file.size)
    except ResourceError as error:
        report.unreadable(error, file=name)
    except ShardkitError as error:
        if is_as_recorded:  # otherwise the reason was reported
            report.error(error, file=name)


def _read_described(described: CheckedManifest, file: manifest.File, report: Report) -> bool:
    """Compare a small file with its digests; True if they agree."""
    where = os.path.join(described.folder, file.name)
    data: bytes | None = None
    with report.collect_errors(where):
        data = read_small(path_in(described.directory, file.name), where, manifest.MAX_BYTES)
    if data is None:
        return False
    crc = crc32(data)
    if file.crc32 not in (None, crc):
        report.problem("CRC-32 of the file", file=where, expected=f"{file.crc32:08x}", found=f"{crc:08x}")
        return False
    if file.sha256 is not None and (actual := hashlib.sha256(data).hexdigest()) != file.sha256:
        report.problem("sha256 of the file", file=where, expected=file.sha256, found=actual)
        return False
    return True


def _check_unlisted(described: CheckedManifest, report: Report) -> None:
    """Report files that the manifest does not list.

    For a manifest that lists all files, this is a problem. Users add files to a Hub model, so there it is a warning. In a
    DCP directory, only stale chunk lists are reported.
    """
    if described.is_for_dcp:
        report.warnings += _stale_warnings(described)
        return
    if isinstance(described.content, manifest.HubModel) and described.content.others is None:
        return  # it lists only weights
    names = list(unlisted_names(described.directory, described.content))
    if described.lists_files:
        for name in names:
            report.problem(
                f"{escape(os.path.basename(described.where))} does not list it",
                file=os.path.join(described.folder, name),
                is_contradiction=True,
            )
    elif names:
        report.warnings.append(
            f"{count(len(names), 'file')} that the manifest does not list: {listed(names)}"
        )


def _stale_warnings(described: CheckedManifest) -> Iterator[str]:
    """Yield a warning for each chunk list that the manifest does not list."""
    names = {file.name for file in manifest.every_file(described.content)}
    for name in sorted(storage.listdir(described.directory)):
        if _LIST.fullmatch(name) and name not in names:
            yield f"{escape(os.path.join(described.folder, name))}: not of this checkpoint"


def add_recorded(described: Iterable[CheckedManifest], files: list[FileBytes], report: Report) -> None:
    """Add the digests that manifests record to `files`; also add listed files without tensors."""
    files_by_place = {place_of(file.path): file for file in files}
    for entry in described:
        follow = manifest.follows_links(entry.content)
        for name, recorded in entry.files.items():
            if not isinstance(recorded, manifest.File) or (recorded.crc32, recorded.sha256) == (None, None):
                continue
            path = path_in(entry.directory, name)
            file = files_by_place.get(place_of(path))
            if file is None:
                where = os.path.join(entry.folder, name)
                file = FileBytes(name=where, path=path, follow=follow, size=recorded.size)
                files.append(file)
                files_by_place[place_of(path)] = file
            file.crc32 = recorded.crc32 if recorded.crc32 is not None else file.crc32
            file.sha256 = recorded.sha256 or file.sha256
            _add_crcs_of_chunks(entry, recorded, file, report)


def _add_crcs_of_chunks(
    described: CheckedManifest, recorded: manifest.File, file: FileBytes, report: Report
) -> None:
    """Give chunks of a file the CRC-32s in the manifest, by their place in the file; a chunk of a whole tensor, by its name.

    If a chunk has another CRC-32 in the file itself, the file is from another save, which is reported.
    """
    extents = recorded.extents if isinstance(recorded, manifest.ListedFile) else None
    crcs = {(start, nbytes): crc for start, nbytes, crc in extents or ()}
    for index, stretch in enumerate(file.stretches):
        if stretch.tensor is None:
            continue
        crc = crcs.get((stretch.start, stretch.nbytes))
        crc = tensor_crc(described, stretch.tensor, stretch.nbytes) if crc is None else crc
        if stretch.crc32 is None:
            file.stretches[index] = stretch._replace(crc32=crc)
        elif crc not in (None, stretch.crc32):
            file.is_damaged = True
            report.problem(
                "CRC-32 that the file records of the data",
                file=file.name,
                stretch=stretch,
                expected=f"{crc:08x}",
                found=f"{stretch.crc32:08x}",
            )


def check_tensors(described: CheckedManifest, catalog: Catalog, report: Report) -> None:
    """Compare names, dtypes and shapes in the manifest with those of the stored tensors."""
    content = described.content
    if isinstance(content, manifest.SavedState):
        return
    contradict = partial(report.problem, file=described.where, is_contradiction=True)
    tensors = manifest.all_tensors(content)
    for fqn, record, entry in mismatched_tensors(tensors, catalog):
        if entry is None:
            contradict("the manifest lists it, and it is not stored", tensor=fqn)
        else:
            expected, stored = (
                f"{record.dtype} {list(record.shape)}",
                f"{entry.dtype.name} {list(entry.shape)}",
            )
            contradict("dtype and shape", tensor=fqn, expected=escape(expected), found=stored)
    # Only in the manifest of a pre-sharded directory, aliases of tied tensors are not among `tensors`.
    tied = (
        {name for group in content.ties for name in group}
        if isinstance(content, manifest.Presharded)
        else set()
    )
    for fqn in catalog.tensors.keys() - tensors.keys() - tied:
        contradict("it is stored, and the manifest does not list it", tensor=fqn)


def tensor_crc(described: CheckedManifest, fqn: str, nbytes: int) -> int | None:
    """Return the recorded CRC-32 of a tensor; None if nothing is recorded, or if `nbytes` is not its whole size."""
    record = manifest.all_tensors(described.content).get(fqn)
    is_whole = record is not None and prod(record.shape) * BY_NAME[record.dtype].itemsize == nbytes
    return record.crc32 if record is not None and is_whole else None
