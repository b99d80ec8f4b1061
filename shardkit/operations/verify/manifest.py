"""Compares a directory with its manifest: names, sizes, and digests of the files that describe the others.

`list_files` says what a directory holds; a manifest of files lists all of it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import BY_NAME
from shardkit.core.text import count, escape, listed
from shardkit.errors import ResourceError, ShardkitError, SourceError
from shardkit.files import manifest, storage
from shardkit.files.digest import FileBytes, crc32, place_of
from shardkit.files.home import METADATA, path_in, root_of
from shardkit.files.links import locate
from shardkit.files.strict_json import FOLLOWS_LINKS, read_small
from shardkit.formats.dcp import chunk_list
from shardkit.formats.dcp.chunk_list import ChunkList
from shardkit.formats.recorded import unlike_stored
from shardkit.operations.companions import walk
from shardkit.operations.verify.result import SIZE, Report

_LIST = re.compile(r".*\.chunks\.json")
_UPLOADED = (".gitattributes", "README.md")
"""What the Hub itself puts beside an uploaded model."""


class Recorded(NamedTuple):
    """What a manifest says of a file that has the right size."""

    size: int
    crc32: int | None
    sha256: str | None
    extents: Mapping[tuple[int, int], int]
    """(first byte, bytes) of chunks that have no checksum in the file -> CRC-32."""


@dataclass(slots=True, kw_only=True)
class Described:
    """What a manifest says of a directory, as far as it could be read."""

    content: manifest.Manifest
    where: str
    """The manifest: its name relative to the checkpoint, or its path where it lies elsewhere."""
    folder: str
    """The directory that it describes, relative to the checkpoint."""
    directory: str
    """Path of that directory."""
    files: dict[str, Recorded] = field(default_factory=dict)
    """Those listed under "files" that have the right size. Except in the kind "files", these are shards or weights."""
    others: dict[str, Recorded] = field(default_factory=dict)
    """Those listed under "others" that have the right size."""
    lists: dict[str, ChunkList] = field(default_factory=dict)
    """Shard file -> its chunk list."""
    names: set[str] = field(default_factory=set)
    """Every file that is listed."""
    is_metadata_damaged: bool = False
    """`.metadata` is not what was written, so nothing that it says counts."""

    @property
    def is_of_dcp(self) -> bool:
        """True for the manifest of a DCP directory that shardkit wrote."""
        return isinstance(self.content, (manifest.Presharded, manifest.SavedState))

    @property
    def metadata(self) -> manifest.File | None:
        """What is recorded of `.metadata`; None if nothing is, or if the directory has none."""
        content = self.content
        return content.metadata if isinstance(content, (manifest.Presharded, manifest.SavedState)) else None

    @property
    def lists_files(self) -> bool:
        """True for a manifest that only lists files, and does not say how they were made."""
        return isinstance(self.content, manifest.FileList)

    @property
    def follow(self) -> bool:
        """Links count as files, as in the Hub's cache."""
        content = self.content
        return isinstance(content, manifest.HubModel) or (
            isinstance(content, manifest.FileList) and content.layout == "hub"
        )


def read_manifest(
    directory: str, folder: str, report: Report, *, path: str | None = None
) -> Described | None:
    """Read a manifest and compare a directory with it; None if the manifest cannot be read.

    Args:
        directory: the one that is described, or a single file.
        folder: the same, relative to the checkpoint.
        report: gets what is wrong.
        path: of a manifest that lies elsewhere; None for the one in the directory.
    """
    where = os.path.join(folder, manifest.NAME) if path is None else path
    report.manifests.append(where)
    content: manifest.Manifest | None = None

    def check_bytes(data: bytes, said: Mapping[str, Any]) -> None:
        if manifest.encode(said) != data:  # its digest leaves out blanks and how numbers are written
            report.problem("it says what was written, but its bytes are others", file=where)

    with report.failing(where):
        content = manifest.read_file(
            locate(directory, manifest.NAME) if path is None else path,
            os.path.basename(where),
            check=check_bytes,
        )
    if content is None:
        return None
    is_one_file = not storage.isdir(directory)
    home = (os.path.dirname(directory) or os.curdir) if is_one_file else directory
    described = Described(content=content, where=where, folder=folder, directory=home)
    _check_files(described, report)
    if not is_one_file:
        _check_unlisted(described, report)
    return described


def _check_files(described: Described, report: Report) -> None:
    content = described.content
    metadata = described.metadata
    if metadata is not None and _recorded(described, metadata, report) is not None:
        described.is_metadata_damaged = not _read_described(described, metadata, report)
    for file in content.files:
        recorded = _recorded(described, file, report)
        if recorded is not None:
            described.files[file.name] = recorded
        if isinstance(file, manifest.ShardFile):
            _check_list(described, file, report)
    for file in manifest.all_files(content)[len(content.files) :]:
        recorded = _recorded(described, file, report)
        if recorded is not None:
            described.others[file.name] = recorded


def _check_list(described: Described, file: manifest.ShardFile, report: Report) -> None:
    name = os.path.join(described.folder, file.chunks.name)
    if file.chunks.name != chunk_list.name_for(file.name):
        report.problem(
            f"{escape(file.name)} has another chunk list",
            file=described.where,
            expected=escape(chunk_list.name_for(file.name)),
            found=escape(file.chunks.name),
        )
        return
    if _recorded(described, file.chunks, report) is None:
        return
    is_whole = _read_described(described, file.chunks, report)
    if file.name not in described.files:  # the reason was reported
        return
    try:
        described.lists[file.name], _ = chunk_list.read_beside(described.directory, file.name, file.size)
    except ResourceError as error:
        report.unreadable(error, file=name)
    except ShardkitError as error:
        if is_whole:  # else the reason was reported
            report.error(error, file=name)


def _recorded(described: Described, file: manifest.SavedFile, report: Report) -> Recorded | None:
    """Return the record of a file; None unless the file is there and has the right size."""
    described.names.add(file.name)
    crc, sha256 = (file.crc32, file.sha256) if isinstance(file, manifest.File) else (None, None)
    extents = file.extents if isinstance(file, manifest.ListedFile) else None
    recorded = Recorded(
        file.size, crc, sha256, {(start, nbytes): crc for start, nbytes, crc in extents or ()}
    )
    where = os.path.join(described.folder, file.name)
    held = file_size(described.directory, file.name, follow=described.follow)
    if held is None:
        is_there = storage.lexists(path_in(described.directory, file.name))
        reason = "it is no regular file of the directory" if is_there else "there is no such file"
        report.problem(f"{escape(os.path.basename(described.where))} lists it, and {reason}", file=where)
    elif held != file.size:
        report.problem(SIZE, file=where, expected=str(file.size), found=str(held))
    return recorded if held == file.size else None


def _read_described(described: Described, file: manifest.File, report: Report) -> bool:
    """Compare a small file, read whole, with its digests; True if they agree."""
    where = os.path.join(described.folder, file.name)
    data: bytes | None = None
    with report.failing(where):
        data = read_small(path_in(described.directory, file.name), where, manifest.MAX_BYTES)
    if data is None:
        return False
    found = crc32(data)
    if file.crc32 not in (None, found):
        report.problem("CRC-32 of the file", file=where, expected=f"{file.crc32:08x}", found=f"{found:08x}")
        return False
    if file.sha256 is not None and (own := hashlib.sha256(data).hexdigest()) != file.sha256:
        report.problem("sha256 of the file", file=where, expected=file.sha256, found=own)
        return False
    return True


def _check_unlisted(described: Described, report: Report) -> None:
    """Look for files that are not listed.

    A manifest of files lists all. Beside a Hub model people put what they like; DCP directories get stale files.
    """
    if described.is_of_dcp:
        report.warnings += _stale(described)
        return
    if isinstance(described.content, manifest.HubModel) and described.content.others is None:
        return  # it lists weights alone
    found = list(_unlisted(described))
    if described.lists_files:
        for name in found:
            report.problem(
                f"{escape(os.path.basename(described.where))} does not list it",
                file=os.path.join(described.folder, name),
            )
    elif found:
        report.warnings.append(
            f"{count(len(found), 'file')} that the manifest does not list: {listed(found)}"
        )


def _unlisted(described: Described) -> Iterator[str]:
    """Yield the names that are not listed. Folders with a manifest of their own are left to that manifest."""
    content = described.content
    listing = list_files(described.directory, follow=described.follow)
    known = {*described.names, manifest.NAME}
    folders: tuple[str, ...] = ()
    if isinstance(content, manifest.FileList):
        known.update(content.unlisted)
        folders = tuple(f"{folder}/" for folder in content.folders or ())
    else:
        known.update(_UPLOADED)
    for name in sorted((*listing.files, *listing.unlisted)):
        if name not in known and not name.startswith(folders):
            yield name


def _stale(described: Described) -> Iterator[str]:
    """Yield a warning for each chunk list that belongs to no file of the manifest."""
    for name in sorted(storage.listdir(described.directory)):
        if _LIST.fullmatch(name) and name not in described.names:
            yield f"{escape(os.path.join(described.folder, name))}: not of this checkpoint"


def add_recorded(described: Iterable[Described], files: list[FileBytes]) -> None:
    """Add to files what manifests record of them as a whole, and add the files that hold no tensors."""
    known = {place_of(file.path): file for file in files}
    for each in described:
        for name, recorded in {**each.files, **each.others}.items():
            if recorded.crc32 is None and recorded.sha256 is None:
                continue
            path = path_in(each.directory, name)
            file = known.get(place_of(path))
            if file is None:
                file = FileBytes(
                    name=os.path.join(each.folder, name), path=path, follow=each.follow, size=recorded.size
                )
                files.append(file)
                known[place_of(path)] = file
            file.crc32 = recorded.crc32 if recorded.crc32 is not None else file.crc32
            file.sha256 = recorded.sha256 or file.sha256
            _add_crcs_of_chunks(each, recorded, file)


def _add_crcs_of_chunks(described: Described, recorded: Recorded, file: FileBytes) -> None:
    """Give a chunk without a checksum in the file the manifest's; for a whole tensor, that of the tensor."""
    for at, stretch in enumerate(file.stretches):
        if stretch.crc32 is None and stretch.tensor is not None:
            crc = recorded.extents.get((stretch.start, stretch.nbytes))
            crc = tensor_crc(described, stretch.tensor, stretch.nbytes) if crc is None else crc
            file.stretches[at] = stretch._replace(crc32=crc)


def check_tensors(described: Described, catalog: Catalog, report: Report) -> None:
    """Compare names, dtypes and shapes in the manifest with those of the stored tensors."""
    content, where = described.content, described.where
    if isinstance(content, manifest.SavedState):
        return
    tensors = manifest.all_tensors(content)
    for fqn, said, entry in unlike_stored(tensors, catalog):
        if entry is None:
            report.problem("the manifest lists it, and it is not stored", file=where, tensor=fqn)
        else:
            expected, found = f"{said.dtype} {list(said.shape)}", f"{entry.dtype.name} {list(entry.shape)}"
            report.problem("dtype and shape", file=where, tensor=fqn, expected=escape(expected), found=found)
    # Only a pre-sharded directory leaves out the other names of a tensor.
    tied = (
        {name for group in content.ties for name in group}
        if isinstance(content, manifest.Presharded)
        else set()
    )
    for fqn in catalog.tensors.keys() - tensors.keys() - tied:
        report.problem("it is stored, and the manifest does not list it", file=where, tensor=fqn)


def tensor_crc(described: Described, fqn: str, nbytes: int) -> int | None:
    """Return the recorded CRC-32 of a tensor that has `nbytes` in all; None if there is none."""
    said = manifest.all_tensors(described.content).get(fqn)
    is_whole = said is not None and prod(said.shape) * BY_NAME[said.dtype].itemsize == nbytes
    return said.crc32 if said is not None and is_whole else None


_LEFT_OUT = (".git", os.path.join(".cache", "huggingface"))
"""Directories in which git and `hf download` keep their own state."""


class FolderContent(NamedTuple):
    """What a directory holds, at any depth. Names are relative to it."""

    files: dict[str, int]
    """Name -> bytes, of regular files; in the order of the names."""
    unlisted: tuple[str, ...]
    """Links that are not followed, pipes, sockets and devices."""


def list_files(directory: str, *, follow: bool) -> FolderContent:
    """Return the files below a directory, without the state that git and `hf download` keep there.

    Args:
        directory: of a checkpoint.
        follow: a link counts as the file that it leads to, unless it leaves the directory (and, in the Hub's cache,
            the repo). Where `FOLLOWS_LINKS` says so, every one does. Links to directories are never followed.

    Raises:
        ResourceError: a directory cannot be listed.
    """
    files, unlisted = dict[str, int](), list[str]()
    for name in _names(directory):
        size = file_size(directory, name, follow=follow)
        if size is None:
            unlisted.append(name)
        else:
            files[name] = size
    return FolderContent(dict(sorted(files.items())), tuple(sorted(unlisted)))


def _names(directory: str) -> Iterator[str]:
    """Yield the names of everything but directories."""
    if root_of(directory) != directory:
        yield METADATA
    for here, folder, inner, names in walk(directory):
        links = [name for name in inner if storage.islink(os.path.join(here, name))]
        inner[:] = [name for name in inner if os.path.join(folder, name) not in _LEFT_OUT]
        yield from (os.path.join(folder, name) for name in (*links, *names))


def file_size(directory: str, name: str, *, follow: bool) -> int | None:
    """Return the size of a regular file in bytes; None for anything else, and for a link out of the directory.

    Args:
        directory: that the name is relative to.
        name: of a file at any depth.
        follow: as for `list_files`.
    """
    path = path_in(directory, name)
    try:
        status = storage.lstat(path)
        if stat.S_ISLNK(status.st_mode) and not (follow or FOLLOWS_LINKS.get()):
            return None
        if stat.S_ISLNK(status.st_mode) or os.sep in name:  # a directory on the way may be a link
            locate(directory, name)
            status = storage.stat(path)
    except (OSError, SourceError, ValueError):  # ValueError: a NUL in the name
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
