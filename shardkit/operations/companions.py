"""Survey a checkpoint's directory: find its DCP directories, and copy all other files unchanged.

Files to copy are those that no DCP directory owns: config, tokenizer, trainer state ...
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from shardkit.core.catalog import FileStamp
from shardkit.core.text import count, escape, listed
from shardkit.errors import IntegrityError, ResourceError, SourceError
from shardkit.files import manifest, storage
from shardkit.files.digest import crc32
from shardkit.files.listing import walk
from shardkit.files.strict_json import FOLLOWS_LINKS, open_regular, read_exactly, stamp_of
from shardkit.formats.dcp.directory import is_dcp

_MAX_FILES = 20_000
_SUFFIX = ".distcp"
_OWN = re.compile(r"(__\d+)?\.metadata|.*\.distcp|__\d+_\d+\.chunks\.json|" + re.escape(manifest.NAME))
_BLOCK_BYTES = 1 << 20


class FileToCopy(NamedTuple):
    """A file to copy."""

    name: str
    """Relative to the checkpoint."""
    stamp: FileStamp
    is_executable: bool = False


@dataclass(slots=True, kw_only=True)
class Survey:
    """The content of a directory, by kind. Names are relative to it."""

    folders: list[str] = field(default_factory=list)
    """DCP directories; "" for the directory itself."""
    unfinished: list[str] = field(default_factory=list)
    """Directories with an unfinished DCP save."""
    files: list[FileToCopy] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    """Empty directories."""
    links: list[str] = field(default_factory=list)
    """Symbolic links, which are not copied."""
    special: list[str] = field(default_factory=list)
    """Pipes, sockets and devices, which are not copied."""

    def notes(self) -> Iterator[str]:
        """Yield notes about links and special files, which are not copied."""
        if self.links:
            are = "1 symbolic link is" if len(self.links) == 1 else f"{len(self.links)} symbolic links are"
            yield f"{are} not copied: {listed(self.links)}"
        if self.special:
            yield f"pipes, sockets and devices are not copied: {listed(self.special)}"


def survey(path: str) -> Survey:
    """Find everything below a directory.

    Raises:
        ResourceError: a directory cannot be listed.
    """
    surveyed = Survey()
    for here, folder, directories, names in walk(path):
        if is_dcp(here):
            surveyed.folders.append(folder)
        elif ".metadata.tmp" in names or any(name.endswith(_SUFFIX) for name in names):
            surveyed.unfinished.append(folder)
        if folder and not names and not directories:
            surveyed.empty.append(folder)
        surveyed.links += [
            os.path.join(folder, name) for name in directories if storage.islink(os.path.join(here, name))
        ]
        for name in sorted(names):
            is_own = folder in surveyed.folders[-1:] and _OWN.fullmatch(name)
            is_about_the_old = os.path.join(folder, name) == manifest.NAME
            if not (is_own or is_about_the_old):
                _add(surveyed, os.path.join(here, name), os.path.join(folder, name))
    surveyed.files.sort()
    surveyed.links.sort()
    return surveyed


def drop_shard_folders(surveyed: Survey, names: Iterable[str]) -> None:
    """Remove folders that only contain shards of a DCP directory above them, which look like unfinished saves.

    Args:
        surveyed: the survey, which is changed.
        names: names of the shards that the opened checkpoints use, relative to the surveyed path.
    """
    folders = {os.path.dirname(name) for name in names}
    surveyed.unfinished = [folder for folder in surveyed.unfinished if folder not in folders]
    surveyed.files = [
        file
        for file in surveyed.files
        if os.path.dirname(file.name) not in folders or not file.name.endswith(_SUFFIX)
    ]


def check_survey(path: str, surveyed: Survey) -> None:
    """Refuse a directory that cannot be copied as a complete checkpoint.

    Raises:
        SourceError: some folders have an unfinished save, or there are too many files.
        ResourceError: some files cannot be read.
    """
    if surveyed.unfinished:
        raise SourceError(
            f"{escape(path)}: the save did not finish in {count(len(surveyed.unfinished), 'folder')}",
            problems=[
                f"{escape(folder or os.curdir)}: .distcp files without .metadata"
                for folder in surveyed.unfinished
            ],
            hint="use an older checkpoint, or move these folders away if you do not need them",
        )
    if len(surveyed.files) > _MAX_FILES:
        raise SourceError(
            f"{escape(path)} holds more than {_MAX_FILES} files beside the checkpoint",
            hint="give the checkpoint's own directory, not the run's",
        )
    closed = [
        file.name for file in surveyed.files if not storage.access(os.path.join(path, file.name), os.R_OK)
    ]
    if closed:
        raise ResourceError(
            f"{count(len(closed), 'file')} beside the checkpoint cannot be read",
            problems=map(escape, closed),
            hint="give yourself permission to read them",
        )


def _add(surveyed: Survey, path: str, name: str) -> None:
    try:
        follows = FOLLOWS_LINKS.get() and storage.exists(path)
        status = storage.stat(path) if follows else storage.lstat(path)
    except OSError as error:
        raise ResourceError(f"{escape(name)}: {error.strerror}") from None
    if stat.S_ISLNK(status.st_mode):
        surveyed.links.append(name)
    elif stat.S_ISREG(status.st_mode):
        surveyed.files.append(FileToCopy(name, FileStamp.of(status), bool(status.st_mode & stat.S_IXUSR)))
    else:
        surveyed.special.append(name)


class _Hashes:
    """Computes the digests of a file while it is copied from front to back."""

    def __init__(self, *, digest: bool, sha256: bool) -> None:
        self.crc: int | None = 0 if digest else None
        self._hash = hashlib.sha256() if sha256 else None

    def add(self, data: memoryview) -> None:
        if self.crc is not None:
            self.crc = crc32(data, self.crc)
        if self._hash is not None:
            self._hash.update(data)

    @property
    def sha256(self) -> str | None:
        return self._hash.hexdigest() if self._hash is not None else None


def copy_file(
    path: str, file: FileToCopy, directory: str, *, digest: bool = False, sha256: bool = False
) -> tuple[int | None, str | None]:
    """Copy a file into a directory. An executable stays executable.

    Args:
        path: path of the file; links are resolved.
        file: its name in `directory`, and the expected stamp.
        directory: directory to copy into.
        digest: compute the CRC-32 of the content.
        sha256: compute the sha256 of the content.

    Returns:
        CRC-32, and sha256 in hex; None for a digest that was not requested.

    Raises:
        IntegrityError: the file changed since its stamp was taken, or while it was copied.
        ResourceError: it cannot be read or written.
    """
    target, hashes = os.path.join(directory, file.name), _Hashes(digest=digest, sha256=sha256)
    try:
        storage.make_folders(directory, os.path.dirname(file.name))
        with open_regular(storage.realpath(path), file.name, follow=False) as (fd, _):
            mode = 0o777 if file.is_executable else 0o666
            out = storage.open_fd(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
            try:
                is_same = stamp_of(fd) == file.stamp
                if is_same:
                    _copy_data(fd, out, file, hashes)
                if not is_same or stamp_of(fd) != file.stamp:
                    raise _changed_error(file.name)
                storage.fsync(out)
            finally:
                storage.close_fd(out)
    except OSError as error:
        raise ResourceError(f"cannot copy {escape(file.name)}: {error.strerror}") from error
    except SourceError as error:
        raise error if isinstance(error, IntegrityError) else _changed_error(file.name) from None
    return hashes.crc, hashes.sha256


def _changed_error(name: str) -> IntegrityError:
    return IntegrityError(
        f"{escape(name)} changed while it was copied",
        hint="nothing was written to the destination; start again when nothing writes to the source",
    )


def _copy_data(fd: int, out: int, file: FileToCopy, hashes: _Hashes) -> None:
    size = file.stamp.size
    for offset in range(0, size, _BLOCK_BYTES):
        data = memoryview(read_exactly(fd, offset, min(_BLOCK_BYTES, size - offset), file.name))
        hashes.add(data)
        done = 0
        while done < len(data):
            done += storage.pwrite(out, data[done:], offset + done)
