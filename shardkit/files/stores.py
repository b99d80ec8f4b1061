"""Objects of stores (`s3://`, `gs://`, `az://`) and files of the Hub (`hf://`), with the interface of `storage`.

A path is `s3://BUCKET/KEY`, `hf://ORGANISATION/NAME[@REVISION]/KEY` or `hf://buckets/ORGANISATION/NAME/KEY`. Directories
are prefixes of keys up to a "/"; each is listed once per operation. An open object has a number, like a descriptor. Each
request names the version of the object, so that bytes of different versions are never mixed.

`remote` has the kinds of stores, and reading by ranges.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardkit.core.text import escape
from shardkit.errors import ResourceError
from shardkit.files.remote import hub
from shardkit.files.remote.contract import (
    Listing,
    ObjectStat,
    OtherVersion,
    attempt,
    attempt_without_object,
    gone_error,
    short_body_error,
)
from shardkit.files.remote.kinds import SCHEMES, WRITABLE, is_repo, kind_of, split, store_of
from shardkit.files.remote.ranges import Ranges

FIRST_NUMBER = 1 << 30
"""The first number of open objects, beyond all descriptors of the system."""


def is_remote(path: object) -> bool:
    """True for a path in a store."""
    return isinstance(path, str) and path.startswith(SCHEMES)


def is_whole(path: str) -> bool:
    """True for a whole bucket, container or repo."""
    return is_remote(path) and not split(path)[1]


READ_FROM = ", ".join(scheme for scheme in SCHEMES if scheme.endswith("://"))
"""The schemes of sources, for messages."""
WRITTEN_TO = ", ".join(WRITABLE)
"""The schemes of outputs, for messages."""


def is_other_address(path: str) -> bool:
    """True for an address with an unsupported scheme."""
    return "://" in path and not is_remote(path)


def as_path(path_like: str | os.PathLike[str]) -> str:
    """Return the user's path as text; for the address of a page of the Hub, the corresponding `hf://` address."""
    path = os.fspath(path_like)
    return hub.address_of(path) or path


def settled(path: str, revision: str | None) -> tuple[str, str | None]:
    """Return a path of the Hub with the current commit of a revision, and None; any other pair unchanged.

    Raises:
        UsageError: the path has another revision.
        SourceError, ResourceError: the repo or revision does not exist, or the Hub does not answer.
    """
    if not is_repo(path):
        return path, revision
    root, key = split(path)
    return plain("/".join([hub.at_revision(root, revision), key])), None


def repo_of(path: str) -> tuple[str, str | None] | None:
    """Return repo and commit of a path of the Hub; None for any other path."""
    if not is_repo(path):
        return None
    return hub.named(split(plain(path))[0])


@dataclass(slots=True, eq=False)
class _OpenObject:
    """An open object."""

    path: str
    state: ObjectStat
    ranges: Ranges


_lock = threading.Lock()
_listings: dict[str, Listing] = {}
_single: dict[str, ObjectStat | None] = {}
_pins: dict[str, str] = {}
_open: dict[int, _OpenObject] = {}
_numbers = itertools.count(FIRST_NUMBER)


def _after_fork() -> None:
    """Reset a forked child: threads of the parent may have held the lock, and its open objects are not valid here."""
    global _lock
    _lock = threading.Lock()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)


def forget() -> None:
    """Drop all listings and resolved commits, at the start of an operation."""
    with _lock:
        _listings.clear()
        _single.clear()
        _pins.clear()


def known() -> dict[str, Any]:
    """Return listings and resolved commits, as JSON, for `learn` in other processes."""
    with _lock:
        return {
            "pins": dict(_pins),
            "directories": {
                path: {
                    "objects": {name: list(each) for name, each in listing.objects.items()},
                    "folders": [*listing.folders],
                }
                for path, listing in _listings.items()
            },
        }


def learn(listings: Mapping[str, Any]) -> None:
    """Adopt listings and resolved commits of another process."""
    with _lock:
        _pins.update(listings["pins"])
        for path, listing in listings["directories"].items():
            objects = {name: ObjectStat(*each) for name, each in listing["objects"].items()}
            _listings[path] = Listing(objects, set(listing["folders"]))


def plain(path: str) -> str:
    """Return a path in normal form: no "/" at the end, no "//", and with a commit.

    Raises:
        ShardkitError: the Hub does not resolve a branch to a commit, or the path is not in a repo.
    """
    root, key = split(path)
    if root not in _pins:
        kind = kind_of(root)
        _pins[root] = kind.pin(root) if kind.names_store(root) else root
    return f"{_pins[root]}/{key}" if key else _pins[root]


def _listing(path: str) -> Listing:
    """Return the listing of a directory, empty if it does not exist."""
    path = plain(path)
    with _lock:
        listing = _listings.get(path)
    if listing is None:
        store, key = store_of(path)
        listing = attempt_without_object(store, path, lambda: store.list(key))
        with _lock:
            _listings[path] = listing
    return listing


def _find(path: str) -> ObjectStat | bool | None:
    """Return the attributes of an object; True for a directory; None if the path does not exist."""
    path = plain(path)
    above, _, name = path.rpartition("/")
    root, key = split(path)
    if not key:
        return True if kind_of(root).names_store(root) else None
    with _lock:
        listed = _listings.get(above)
    if listed is not None:
        return listed.objects.get(name) or (True if name in listed.folders else None)
    here = _listing(path)
    if here.objects or here.folders:
        return True
    with _lock:
        if path in _single:
            return _single[path]
    store, _ = store_of(root)
    try:
        entry = attempt(store, path, lambda: store.head(key))
    except FileNotFoundError:
        entry = None
    with _lock:
        _single[path] = entry
    return entry


def exists(path: str) -> bool:
    """True for an object or a directory."""
    return _find(path) is not None


def isdir(path: str) -> bool:
    """True for a directory."""
    return _find(path) is True


def isfile(path: str) -> bool:
    """True for an object."""
    return isinstance(_find(path), ObjectStat)


def status(path: str) -> os.stat_result:
    """Return the status of an object or directory.

    Raises:
        FileNotFoundError: the path does not exist.
    """
    entry = _find(path)
    if entry is None:
        raise gone_error(path)
    return _status(entry if isinstance(entry, ObjectStat) else None, plain(path))


def _status(state: ObjectStat | None, path: str) -> os.stat_result:
    """Return a status whose inode number is a hash of path and version."""
    version = hashlib.sha256(f"{path}\n{state.etag if state else ''}".encode("utf-8", "surrogateescape"))
    inode = int.from_bytes(version.digest()[:7], "little")
    mode = stat.S_IFREG | 0o444 if state else stat.S_IFDIR | 0o555
    size, seconds = (state.size, state.modified_ns // 10**9) if state else (0, 0)
    times = (state.modified_ns if state else 0,) * 3
    return os.stat_result((mode, inode, 0, 1, 0, 0, size, *(seconds,) * 3, *(float(seconds),) * 3, *times))


def names(path: str) -> list[str]:
    """Return the names in a directory.

    Raises:
        FileNotFoundError, NotADirectoryError: the path is not a directory.
    """
    entry = _find(path)
    if entry is None:
        raise FileNotFoundError(errno.ENOENT, "no such directory", path)
    if entry is not True:
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)
    listing = _listing(path)
    return sorted({*listing.objects, *listing.folders})


class StoreEntry(NamedTuple):
    """An entry of `os.scandir`, with the methods that are used."""

    name: str
    path: str
    is_folder: bool

    def is_dir(self) -> bool:
        """True for a directory."""
        return self.is_folder

    def is_symlink(self) -> bool:
        """False, as stores have no links."""
        return False


def scan(path: str) -> contextlib.AbstractContextManager[Iterator[StoreEntry]]:
    """Return the entries of a directory, like `os.scandir`.

    Raises:
        FileNotFoundError, NotADirectoryError: the path is not a directory.
    """
    entry_names = names(path)
    folders = _listing(path).folders
    return contextlib.nullcontext(
        StoreEntry(name, os.path.join(path, name), name in folders) for name in entry_names
    )


def walk(path: str, topdown: bool = True) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield (directory, subdirectories, objects), like `os.walk`."""
    if not isdir(path):
        return
    listing = _listing(path)
    folders, objects = sorted(listing.folders), sorted(listing.objects)
    if topdown:
        yield path, folders, objects
    for name in folders:
        yield from walk(os.path.join(path, name), topdown)
    if not topdown:
        yield path, folders, objects


def open_number(path: str, flags: int) -> int:
    """Open an object for reading and return its number.

    Raises:
        FileNotFoundError, IsADirectoryError: the path is not an object.
        OSError: the flags are for writing.
    """
    if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
        raise OSError(errno.EROFS, "object stores are read only so far", path)
    entry = _find(path)
    if entry is None:
        raise gone_error(path)
    if not isinstance(entry, ObjectStat):
        raise IsADirectoryError(errno.EISDIR, "a directory", path)
    place = plain(path)
    opened = _OpenObject(place, entry, Ranges(entry.size, _fetch(place, entry)))
    with _lock:
        number = next(_numbers)
        _open[number] = opened
    return number


def _fetch(path: str, state: ObjectStat) -> Callable[[int, int], memoryview]:
    """Return a function that fetches bytes of one version of an object."""
    store, key = store_of(path)

    def once(start: int, nbytes: int) -> memoryview:
        data = store.fetch(key, state, start, nbytes)
        if len(data) != nbytes:
            raise short_body_error()
        return data

    def fetch(start: int, nbytes: int) -> memoryview:
        try:
            return attempt(store, path, lambda: once(start, nbytes))
        except FileNotFoundError:
            raise OtherVersion(
                f"{escape(path)}: the object was removed while it was read",
                hint="start again with a source that no longer changes",
            ) from None

    return fetch


def _opened(number: int) -> _OpenObject:
    opened = _open.get(number)
    if opened is None:
        raise ResourceError(
            "an object of a store was opened by another process",
            hint="open objects in the forked process itself",
        )
    return opened


def close_number(number: int) -> None:
    """Close an object, and drop its fetched data."""
    with _lock:
        opened = _open.pop(number, None)
    if opened is not None:
        opened.ranges.close()


def status_of_number(number: int) -> os.stat_result:
    """Return the status of the version that is being read."""
    opened = _opened(number)
    return _status(opened.state, opened.path)


def read(number: int, nbytes: int, start: int) -> bytes:
    """Return bytes of an open object; fewer at its end.

    Raises:
        IntegrityError: the object changed.
        ResourceError: the request failed.
    """
    ranges = _opened(number).ranges
    buffer = bytearray(max(min(nbytes, ranges.size - start), 0))
    ranges.read_into([memoryview(buffer)], start)
    return bytes(buffer)


def read_into(number: int, buffers: Sequence[Any], start: int) -> int:
    """Fill buffers in order, and return the number of bytes.

    Raises:
        IntegrityError, ResourceError: as for `read`.
    """
    return _opened(number).ranges.read_into([memoryview(buffer).cast("B") for buffer in buffers], start)


def plan_reads(number: int, extents: Iterable[tuple[int, int]], num_places: int, *, is_soon: bool) -> None:
    """Announce the reads of an open object; see `storage.will_read`."""
    ranges = _opened(number).ranges
    ranges.plan(extents, num_places)
    if is_soon:
        ranges.ahead()
