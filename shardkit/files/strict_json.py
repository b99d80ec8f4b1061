"""Opening and parsing files that somebody else wrote: regular files only, JSON by the letter."""

from __future__ import annotations

import errno
import gc
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from shardkit.core.catalog import FileStamp
from shardkit.core.text import escape
from shardkit.errors import ResourceError, ShardkitError, SourceError
from shardkit.files import storage

FOLLOW = "pass --follow-links if you trust whoever made the links"
FOLLOW_OR_COPY = f"{FOLLOW}, or copy the directory with its links resolved (cp -rL)"
DOWNLOAD_AGAIN = "the file is damaged or incomplete: download it again"
ZIP = b"PK\x03\x04"
"""With which a zip begins that has entries, such as a record of `torch.save`."""
_LFS_PULL = "run `git lfs pull` in the clone, or download the file"
POINTER_BYTES = 8
"""Bytes of a file's start that show whether it is a pointer of Git LFS."""
_LFS_POINTER = b"version https://git-lfs"
_MAX_POINTER_BYTES = 1024  # git-lfs, docs/spec.md: a pointer has less
_MOST_KEPT = 64  # descriptors
# Errors of opening a file that are about the machine or the moment, not about the file.
_OF_THE_MACHINE = (
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EINTR,
    errno.ESTALE,
    errno.ENODEV,
)

# 2^64 has 20 digits; Python refuses to convert thousands of them, and takes its time below that.
_MAX_DIGITS = 20
_MAX_ANY_DIGITS = 1000  # of a config or a manifest, which may hold what no tensor has

FOLLOWS_LINKS: ContextVar[bool] = ContextVar("follow_links", default=False)
"""The person who runs the operation at hand allowed links that leave the checkpoint's directory."""


def status_of(path: str) -> os.stat_result:
    """Return the status of a file, of a link itself unless links are followed.

    Raises:
        OSError: there is none, or it may not be asked.
    """
    return (storage.stat if FOLLOWS_LINKS.get() else storage.lstat)(path)


def is_about_links(error: ShardkitError) -> bool:
    """True if links alone keep something from being read: it may be whole."""
    return error.to_json()["hint"] == FOLLOW_OR_COPY


@contextmanager
def open_regular(
    path: str, name: str, *, follow: bool = True, opened: dict[str, int] | None = None
) -> Iterator[tuple[int, int]]:
    """Open a regular file for reading and give (descriptor, size in bytes).

    Never waits: a FIFO, a device or a directory is refused without a byte being read.

    Args:
        path: where the file is.
        name: how to call it in messages.
        follow: open a symbolic link too; one is always opened where `FOLLOWS_LINKS` is set. The link is judged as
            it is opened: it may have been something else before.
        opened: descriptors by path. One is taken from there if it is of the file that is there now, and put there in
            place of being closed.

    Raises:
        SourceError: there is no such file, or it is not a regular one.
        ResourceError: it may not be opened, or the machine cannot.
    """
    fd = -1 if opened is None else opened.pop(path, -1)
    if fd >= 0 and not _is_at(fd, path):
        storage.close_fd(fd)
        fd = -1
    if fd < 0:
        fd = _open(path, name, follow=follow)
    is_kept = False
    try:
        status = storage.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
            raise SourceError(
                f"{escape(name)}: expected a regular file, found {kind}",
                hint="put the real file in its place",
            )
        yield fd, status.st_size
        is_kept = opened is not None and len(opened) < _MOST_KEPT
    finally:
        if is_kept:
            assert opened is not None
            opened[path] = fd
        else:
            with suppress(OSError):  # it says nothing of the bytes that were read
                storage.close_fd(fd)


def _is_at(fd: int, path: str) -> bool:
    """True if an open file is what lies at a path."""
    try:
        return os.path.samestat(storage.fstat(fd), status_of(path))
    except OSError:
        return False


def _open(path: str, name: str, *, follow: bool) -> int:
    try:
        # O_NONBLOCK: opening a FIFO for reading otherwise waits for a writer.
        no_follow = 0 if follow or FOLLOWS_LINKS.get() else os.O_NOFOLLOW
        return storage.open_fd(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | no_follow)
    except FileNotFoundError:
        raise SourceError(f"{escape(name)}: no such file", hint="download the missing file") from None
    except PermissionError as error:
        raise ResourceError(
            f"{escape(name)}: {error.strerror}", hint="the file must be readable by you"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if not follow and getattr(error, "errno", None) == errno.ELOOP:
            raise SourceError(
                f"{escape(name)} is a symbolic link: only regular files of the directory are read",
                hint=FOLLOW_OR_COPY,
            ) from None
        reason = getattr(error, "strerror", None) or str(error)
        refused = ResourceError if getattr(error, "errno", None) in _OF_THE_MACHINE else SourceError
        raise refused(f"{escape(name)}: cannot be opened: {reason}") from None


def stamp_of(fd: int) -> FileStamp:
    """Return the stamp of an open file: what is read from it later must come from the same one."""
    return FileStamp.of(storage.fstat(fd))


def stamp_at(path: str) -> FileStamp | None:
    """Return the stamp of the file that is at a path now; None if it cannot be looked at."""
    try:
        return FileStamp.of(storage.stat(path))
    except OSError:
        return None


@contextmanager
def named_failures(name: str) -> Iterator[None]:
    """Name a file in the errors of reading it.

    Raises:
        ResourceError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise ResourceError(f"{escape(name)}: cannot be read: {error.strerror}") from error


def read_exactly(fd: int, start: int, nbytes: int, name: str) -> bytes:
    """Return `nbytes` bytes from byte `start` on.

    Raises:
        SourceError: the file ends before.
        ResourceError: the device fails.
    """
    pieces: list[bytes] = []
    while nbytes:
        try:
            piece = storage.pread(fd, nbytes, start)
        except OSError as error:
            raise ResourceError(f"{escape(name)}: reading at byte {start}: {error.strerror}") from None
        if not piece:
            raise SourceError(f"{escape(name)}: ended at byte {start} while it was read", hint=DOWNLOAD_AGAIN)
        pieces.append(piece)
        start, nbytes = start + len(piece), nbytes - len(piece)
    return b"".join(pieces)


def is_pointer(start: bytes) -> bool:
    """True for the start of what `git clone` without git-lfs leaves in place of a large file."""
    return len(start) >= POINTER_BYTES and _LFS_POINTER.startswith(start[: len(_LFS_POINTER)])


def refuse_pointer(start: bytes, name: str) -> None:
    """Refuse a pointer of Git LFS.

    Args:
        start: the file's first bytes, at least POINTER_BYTES.
        name: how to call it in messages.

    Raises:
        SourceError: it is one.
    """
    if is_pointer(start):
        raise SourceError(f"{escape(name)}: a pointer of Git LFS, not the file itself", hint=_LFS_PULL)


def refuse_pointers(files: Mapping[str, str]) -> None:
    """Refuse files that are pointers of Git LFS; a path without a file is left out.

    Args:
        files: name -> path.

    Raises:
        SourceError: naming all of them.
        ResourceError: a file may not be read.
    """
    pointers = []
    for name, path in files.items():
        if storage.isfile(path) and storage.getsize(path) < _MAX_POINTER_BYTES:
            with open_regular(path, name) as (fd, size):
                if is_pointer(read_exactly(fd, 0, size, name)):
                    pointers.append(escape(name))
    SourceError.raise_for(pointers, "files are pointers of Git LFS, not the files themselves", hint=_LFS_PULL)


def read_small(path: str, name: str, limit: int, *, follow: bool = True) -> bytes:
    """Return the content of a file of at most `limit` bytes; `follow` as for `open_regular`.

    Raises:
        SourceError: missing, not a regular file, larger than `limit`, or a pointer of Git LFS.
        ResourceError: it may not be opened, or the device fails.
    """
    with open_regular(path, name, follow=follow) as (fd, size):
        if size > limit:
            raise SourceError(f"{escape(name)}: expected at most {limit} bytes, found {size}")
        data = read_exactly(fd, 0, size, name)
    refuse_pointer(data, name)
    return data


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from running while a file is parsed, here or as a decorator.

    A million objects are made and none is garbage: the collector would walk them again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def parse_integer(text: str) -> int:
    """Return an integer of JSON: `parse_int` of `json.loads`, for files that may hold more than what tensors have.

    Raises:
        ValueError: it has thousands of digits; Python refuses those too, in words of its own.
    """
    if len(text) > _MAX_ANY_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def parse_object(data: bytes, name: str) -> dict[str, object]:
    """Parse strict JSON whose top level is an object.

    Refused besides bad syntax: bytes that are not UTF-8, a key given twice at any level, NaN and
    Infinity, integers of more than 20 digits, endless nesting.

    Args:
        data: the text, without a byte-order mark.
        name: the file, for messages.

    Raises:
        SourceError: names the file and every key given twice.
    """
    twice: list[str] = []
    try:
        value = json.loads(
            data.decode("utf-8", "strict"),
            object_pairs_hook=lambda pairs: _no_duplicates(pairs, twice),
            parse_constant=_refuse_constant,
            parse_int=_parse_int,
        )
    except UnicodeDecodeError as error:
        raise _not_json(name, f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise _not_json(name, "nested too deeply") from None
    except ValueError as error:  # JSONDecodeError is one
        raise _not_json(name, str(error)) from None
    if twice:
        raise SourceError(
            f"{escape(name)}: JSON with the same key given twice",
            problems=[escape(key) for key in twice],
            hint="which value is meant cannot be told: write the file anew or download it again",
        )
    if not isinstance(value, dict):
        raise _not_json(name, f"expected an object at the top, found {type(value).__name__}")
    return value


def is_unicode(text: str) -> bool:
    """False for text with a lone surrogate, which JSON escapes can spell and UTF-8 cannot."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _not_json(name: str, reason: str) -> SourceError:
    return SourceError(f"{escape(name)}: not valid JSON: {escape(reason)}", hint=DOWNLOAD_AGAIN)


def _no_duplicates(pairs: list[tuple[str, object]], twice: list[str]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice += [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    return result


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def _parse_int(text: str) -> int | float:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text) if text != "-0" else -0.0  # "-0" is no unsigned integer to other parsers
