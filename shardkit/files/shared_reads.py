"""Sharing reads of descriptive files between processes, so that a thousand ranks need not open each file.

These are headers of safetensors files, `.metadata`, and the sizes of the files that `.metadata` names.
"""

from __future__ import annotations

import base64
import contextlib
import zlib
from collections.abc import Iterable, Iterator, Sequence

from shardkit.core.catalog import FileStamp
from shardkit.core.text import MIB, escape
from shardkit.errors import SourceError
from shardkit.files import storage
from shardkit.files.stores import is_remote
from shardkit.files.strict_json import open_regular, read_exactly, refuse_pointer, stamp_of

_State = tuple[str | int, ...]
"""(kind, path, size, time, inode) of a file, which are equal on all nodes that share a file system."""

CONTENT, HEADER, SIZES = "content", "header", "sizes"
_MOST_NBYTES = 64 * MIB

_shared_data: dict[_State, bytes] = {}


class SharedReads:
    """Reads to be passed to `learn` in other processes."""

    def __init__(self) -> None:
        self._noted: dict[_State, bytes] = {}
        self._nbytes = 0

    def add(self, state: _State, data: bytes) -> None:
        """Add data, unless the limit would be exceeded."""
        if self._nbytes + len(data) <= _MOST_NBYTES and state not in self._noted:
            self._nbytes += len(data)
            self._noted[state] = data

    def to_plain(self) -> list[tuple[_State, str]]:
        """Return all entries as plain data."""
        return [
            (state, base64.b64encode(zlib.compress(data, 1)).decode()) for state, data in self._noted.items()
        ]


_noting: list[SharedReads] = []


@contextlib.contextmanager
def recording() -> Iterator[SharedReads]:
    """Record reads of files on disk within this context."""
    notes = SharedReads()
    _noting.append(notes)
    try:
        yield notes
    finally:
        _noting.remove(notes)


def learn(entries: Iterable[tuple[Sequence[str | int], str]]) -> None:
    """Adopt reads of another process, from `SharedReads.to_plain`. Each is used at most once, for the same file."""
    _shared_data.clear()
    _shared_data.update((tuple(state), zlib.decompress(base64.b64decode(text))) for state, text in entries)


def read(path: str, name: str, limit: int) -> bytes:
    """Return the content of a file of at most `limit` bytes, possibly read by another process; links are refused.

    Raises:
        SourceError, ResourceError: as for `read_small`.
    """
    content = take(CONTENT, path)
    if content is None:
        with open_regular(path, name, follow=False) as (fd, size):
            if size > limit:
                raise SourceError(f"{escape(name)}: expected at most {limit} bytes, found {size}")
            content = read_exactly(fd, 0, size, name), stamp_of(fd)
            refuse_pointer(content[0], name)
    note(CONTENT, path, *content)
    return content[0]


def note(what: str, path: str, data: bytes, stamp: FileStamp) -> None:
    """Record a read, if reads are being recorded. The data may be anything; other processes check them.

    Args:
        what: CONTENT, HEADER or SIZES.
        path: of the file.
        data: from the file.
        stamp: of the file when it was read.
    """
    if not is_remote(path):
        for notes in _noting:
            notes.add(_state(what, path, stamp), data)


def take(what: str, path: str) -> tuple[bytes, FileStamp] | None:
    """Return the data that another process has read from a file, and the file's stamp, or None.

    Args:
        what: CONTENT, HEADER or SIZES.
        path: of the file.
    """
    if not _shared_data:
        return None
    try:
        stamp = FileStamp.of(storage.stat(path))
    except OSError:
        return None
    state = _state(what, path, stamp)
    data = _shared_data.pop(state, None)
    return None if data is None else (data, stamp)


def _state(what: str, path: str, stamp: FileStamp) -> _State:
    return what, storage.realpath(path), stamp.size, stamp.modified_ns, stamp.inode
