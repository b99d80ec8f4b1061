"""Opening and parsing untrusted files: regular files only, strict JSON."""

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
"""First bytes of a zip with entries, such as a record of `torch.save`."""
_LFS_PULL = "run `git lfs pull` in the clone, or download the file"
POINTER_BYTES = 8
"""Number of first bytes of a file that identify a pointer of Git LFS."""
_LFS_POINTER = b"version https://git-lfs"
_MAX_POINTER_BYTES = 1024  # git-lfs, docs/spec.md: pointers are smaller
_MOST_KEPT = 64  # descriptors
# Errors of opening a file that are caused by the machine or are temporary.
_OF_THE_MACHINE = (
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EINTR,
    errno.ESTALE,
    errno.ENODEV,
)

# 2^64 has 20 digits; Python refuses to convert thousands of digits, and is slow for fewer.
_MAX_DIGITS = 20
_MAX_ANY_DIGITS = 1000  # in a config or a manifest, which may have larger numbers

FOLLOWS_LINKS: ContextVar[bool] = ContextVar("follow_links", default=False)
"""True if the user allowed links that leave the checkpoint's directory."""


def status_of(path: str) -> os.stat_result:
    """Return the status of a file; for a link, that of the link itself unless links are followed.

    Raises:
        OSError: the file does not exist, or its status cannot be read.
    """
    return (storage.stat if FOLLOWS_LINKS.get() else storage.lstat)(path)


def is_about_links(error: ShardkitError) -> bool:
    """True if reading failed only because of links, so that the files may be complete."""
    return error.to_json()["hint"] == FOLLOW_OR_COPY


@contextmanager
def open_regular(
    path: str, name: str, *, follow: bool = True, opened: dict[str, int] | None = None
) -> Iterator[tuple[int, int]]:
    """Open a regular file for reading, and yield (descriptor, size in bytes).

    Never blocks: FIFOs, devices and directories are refused without reading.

    Args:
        path: of the file.
        name: for messages.
        follow: follow symbolic links, as with `FOLLOWS_LINKS`. The check and opening are one step, without a race.
        opened: cache of descriptors by path. One is used if it is still that of the file at `path`, and the descriptor
            is stored there instead of being closed.

    Raises:
        SourceError: the file does not exist, or is not regular.
        ResourceError: the file cannot be opened.
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
            with suppress(OSError):  # not an error of the bytes that were read
                storage.close_fd(fd)


def _is_at(fd: int, path: str) -> bool:
    """True if a descriptor is that of the file at a path."""
    try:
        return os.path.samestat(storage.fstat(fd), status_of(path))
    except OSError:
        return False


def _open(path: str, name: str, *, follow: bool) -> int:
    """Open a file for reading without waiting (as for a FIFO); links only if `follow` or `FOLLOWS_LINKS` allows them."""
    try:
        # O_NONBLOCK: opening a FIFO for reading would otherwise wait for a writer.
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
    """Return the stamp of an open file, to detect changes before later reads."""
    return FileStamp.of(storage.fstat(fd))


def stamp_at(path: str) -> FileStamp | None:
    """Return the stamp of the file that is currently at a path; None if its status cannot be read."""
    try:
        return FileStamp.of(storage.stat(path))
    except OSError:
        return None


@contextmanager
def named_failures(name: str) -> Iterator[None]:
    """Convert OSErrors of reading a file to errors that name it.

    Raises:
        ResourceError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise ResourceError(f"{escape(name)}: cannot be read: {error.strerror}") from error


def read_exactly(fd: int, start: int, nbytes: int, name: str) -> bytes:
    """Return `nbytes` bytes from byte `start` on.

    Raises:
        SourceError: the file is too short.
        ResourceError: reading failed.
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
    """True for the first bytes of a Git LFS pointer, which `git clone` without git-lfs creates."""
    return len(start) >= POINTER_BYTES and _LFS_POINTER.startswith(start[: len(_LFS_POINTER)])


def refuse_pointer(start: bytes, name: str) -> None:
    """Refuse a pointer of Git LFS.

    Args:
        start: the file's first bytes, at least POINTER_BYTES.
        name: for messages.

    Raises:
        SourceError: the file is a pointer.
    """
    if is_pointer(start):
        raise SourceError(f"{escape(name)}: a pointer of Git LFS, not the file itself", hint=_LFS_PULL)


def refuse_pointers(files: Mapping[str, str]) -> None:
    """Refuse files that are pointers of Git LFS; paths without a file are skipped.

    Args:
        files: name -> path.

    Raises:
        SourceError: some files are pointers; lists all.
        ResourceError: a file cannot be read.
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
        SourceError: the file is missing, not regular, larger than `limit`, or a pointer of Git LFS.
        ResourceError: the file cannot be opened or read.
    """
    with open_regular(path, name, follow=follow) as (fd, size):
        if size > limit:
            raise SourceError(f"{escape(name)}: expected at most {limit} bytes, found {size}")
        data = read_exactly(fd, 0, size, name)
    refuse_pointer(data, name)
    return data


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector while a file is parsed; a context manager or decorator.

    Parsing creates a million objects without garbage, which the collector would traverse repeatedly.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def parse_integer(text: str) -> int:
    """Parse an integer; a `parse_int` for `json.loads`, for files with numbers beyond those of tensors.

    Raises:
        ValueError: the integer has thousands of digits, which Python refuses too, with another message.
    """
    if len(text) > _MAX_ANY_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def parse_object(data: bytes, name: str) -> dict[str, object]:
    """Parse strict JSON whose top level is an object.

    Besides syntax errors, these are refused: bytes that are not UTF-8, duplicate keys at any level, NaN and Infinity,
    integers of more than 20 digits, excessive nesting.

    Args:
        data: the text, without a byte-order mark.
        name: the file, for messages.

    Raises:
        SourceError: the text is not such JSON; names the file, and all duplicate keys.
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
        raise _not_json_error(name, f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise _not_json_error(name, "nested too deeply") from None
    except ValueError as error:  # JSONDecodeError is one
        raise _not_json_error(name, str(error)) from None
    if twice:
        raise SourceError(
            f"{escape(name)}: JSON with the same key given twice",
            problems=[escape(key) for key in twice],
            hint="it is unclear which value is meant: write the file again or download it again",
        )
    if not isinstance(value, dict):
        raise _not_json_error(name, f"expected an object at the top, found {type(value).__name__}")
    return value


def is_unicode(text: str) -> bool:
    """False for text with a lone surrogate, which JSON escapes can represent but UTF-8 cannot."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _not_json_error(name: str, reason: str) -> SourceError:
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
    return int(text) if text != "-0" else -0.0  # other parsers do not accept "-0" as an unsigned integer
