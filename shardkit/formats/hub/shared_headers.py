"""Headers of safetensors files that one process reads for others: a thousand ranks would open each file for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from shardkit.core.catalog import FileStamp
from shardkit.core.text import MIB
from shardkit.files import storage
from shardkit.files.stores import is_remote

State = tuple[str | int, ...]
"""Path, size, time and inode of a file: the same on all nodes that share a file system."""

_MOST_NBYTES = 64 * MIB

_known: dict[State, str] = {}
_noting: list[dict[State, str]] = []


@contextlib.contextmanager
def noted() -> Iterator[dict[State, str]]:
    """Note the texts of headers on disk that are read meanwhile, for other processes to `learn`."""
    found: dict[State, str] = {}
    _noting.append(found)
    try:
        yield found
    finally:
        _noting.remove(found)


def learn(said: Iterable[tuple[Sequence[str | int], str]]) -> None:
    """Take what another process has noted, as pairs. Each text counts once, for the very same file."""
    _known.clear()
    _known.update((tuple(state), text) for state, text in said)


def note(path: str, text: bytes, stamp: FileStamp) -> None:
    """Note the text of a header that was read, if somebody else may need it."""
    for found in _noting:
        if not is_remote(path) and sum(map(len, found.values())) + len(text) <= _MOST_NBYTES:
            found[_state(path, stamp)] = text.decode("latin-1")  # any bytes: whoever takes it checks it


def take(path: str) -> tuple[bytes, FileStamp] | None:
    """Return the text of a file's header that another process has read, and the file's stamp; None if nobody has."""
    if not _known:
        return None
    try:
        stamp = FileStamp.of(storage.stat(path))
    except OSError:
        return None
    text = _known.pop(_state(path, stamp), None)
    return None if text is None else (text.encode("latin-1"), stamp)


def _state(path: str, stamp: FileStamp) -> State:
    return storage.realpath(path), stamp.size, stamp.modified_ns, stamp.inode
