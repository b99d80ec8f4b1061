"""Objects of a store (`s3://`, `gs://`, `az://`), behind the calls by which `storage` finds and reads files.

A path is `s3://BUCKET/KEY`. A directory is what keys have before a "/"; it is listed once in an operation. An open
object has a number like a descriptor. Each request says which version of the object it means, by its ETag: bytes of
two versions are never mixed.

What is asked for goes out in requests of at most 8 MiB, several at a time. Reading that goes on where it ended gets
8 MiB at once, the rest of which is held for the next call; gaps of up to 1 MiB are read through. What is held takes
at most 64 MiB in a process.

The network is obstore's, which takes credentials from where the store's own tools have them. What a store answers is
never shown as it is: it may hold names of keys. Source: obstore 0.12, Amazon S3 API (error codes).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, TypeVar

from shardkit.core.text import escape
from shardkit.errors import IntegrityError, ResourceError, ShardkitError

SCHEMES = ("s3://", "gs://", "az://")
FIRST_NUMBER = 1 << 30
"""Numbers of open objects begin here; the system has no such descriptors."""
MAX_REQUEST_NBYTES = 8 << 20
MAX_GAP_NBYTES = 1 << 20
MAX_HELD_NBYTES = 64 << 20
_FIRST_NBYTES = 64 << 10  # of a small read: a header, or the directory of a record
_LARGE_NBYTES = 256 << 10  # tensors are read in such pieces, headers are not
_NUM_CONNECTIONS = 4
_NUM_TRIES = 4
FIRST_WAIT_S = 0.1
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_STATUS = re.compile(r"status (?:code: )?(\d{3})|HTTP status \w+ error \((\d{3})")

_R = TypeVar("_R")


def is_remote(path: object) -> bool:
    """True for a path of an object store."""
    return isinstance(path, str) and path.startswith(SCHEMES)


class _Object(NamedTuple):
    """What a store says of an object."""

    size: int
    etag: str
    modified_ns: int


@dataclass(slots=True)
class _Listing:
    """What lies in a directory."""

    objects: dict[str, _Object] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Open:
    """An open object."""

    path: str
    said: _Object


_lock = threading.Lock()
_stores: dict[str, Any] = {}
_listings: dict[str, _Listing] = {}
_single: dict[str, _Object | None] = {}
_open: dict[int, _Open] = {}
_numbers = itertools.count(FIRST_NUMBER)
_held: OrderedDict[tuple[int, int], bytes] = OrderedDict()
_pool: list[tuple[int, ThreadPoolExecutor]] = []


def forget() -> None:
    """Forget what directories held: an operation begins."""
    with _lock:
        _listings.clear()
        _single.clear()


def _parts(path: str) -> tuple[str, str]:
    """Return (scheme and bucket, key without a "/" at its ends)."""
    scheme, _, rest = path.partition("://")
    bucket, _, key = rest.partition("/")
    return f"{scheme}://{bucket}", re.sub("/+", "/", key).strip("/")


def plain(path: str) -> str:
    """Return a path in the form that is looked up: no "/" at its end, none twice."""
    bucket, key = _parts(path)
    return f"{bucket}/{key}" if key else bucket


def _store(bucket: str) -> Any:
    with _lock:
        if bucket not in _stores:
            _stores[bucket] = _connect(bucket)
        return _stores[bucket]


def _connect(bucket: str) -> Any:
    try:
        from obstore.store import from_url
    except ImportError:
        raise ResourceError(
            f"{escape(bucket)}: paths of object stores need obstore", hint="pip install 'shardkit[stores]'"
        ) from None
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    client: dict[str, Any] = {"timeout": "120s", "connect_timeout": "10s"}
    if endpoint.startswith("http://"):
        client["allow_http"] = True
    retry: Any = {"max_retries": 3, "backoff": {"init_backoff": timedelta(milliseconds=100)}}
    try:
        connect: Any = from_url
        return connect(bucket, client_options=client, retry_config=retry)
    except Exception as error:  # its own classes, none of which may show what is in the environment
        _refuse(error, bucket)


def _retried(path: str, call: Callable[[], _R]) -> _R:
    """Return what a request gives; failures that may pass are tried again, with longer and longer waits."""
    for turn in range(_NUM_TRIES):
        try:
            return call()
        except ShardkitError:
            raise
        except Exception as error:
            if turn + 1 == _NUM_TRIES or not _may_pass(error):
                _refuse(error, path)
        time.sleep(FIRST_WAIT_S * 2**turn)
    raise AssertionError


def _may_pass(error: Exception) -> bool:
    from obstore import exceptions

    if isinstance(error, FileNotFoundError):
        return False
    lasting = (
        exceptions.PreconditionError,
        exceptions.PermissionDeniedError,
        exceptions.UnauthenticatedError,
    )
    code, status = _said(error)
    return (
        not isinstance(error, lasting) and not (status is not None and 400 <= status < 500) and code is None
    )


def _said(error: Exception) -> tuple[str | None, int | None]:
    """Return the store's error code and HTTP status, if it gave any."""
    code, status = _CODE.search(str(error)), _STATUS.search(str(error))
    found = code.group(1) if code else None
    if found in ("SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout"):
        found = None
    return found, int(status.group(1) or status.group(2)) if status else None


def _refuse(error: Exception, path: str) -> NoReturn:
    """Raise in our words why a store did not answer; its own words may hold keys."""
    from obstore import exceptions

    where, (code, status) = escape(path), _said(error)
    said = ", ".join(filter(None, (code, f"HTTP {status}" if status else None))) or type(error).__name__
    if isinstance(error, exceptions.PreconditionError) or status == 412:
        raise IntegrityError(
            f"{where}: the object changed while it was read",
            hint="start again once the source is at rest; nothing that was made of it is kept",
        ) from None
    if code == "NoSuchBucket":
        raise ResourceError(
            f"{where}: there is no such bucket ({said})", hint="check the name of the bucket"
        ) from None
    if isinstance(error, FileNotFoundError):
        raise FileNotFoundError(errno.ENOENT, "no such object", path) from None
    if code in ("ExpiredToken", "TokenRefreshRequired", "RequestExpired"):
        raise ResourceError(
            f"{where}: the credentials have expired ({said})",
            hint="get new ones as you do for the store's own tools, such as aws sso login",
        ) from None
    denied = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
    if isinstance(error, denied) or status in (401, 403):
        raise ResourceError(
            f"{where}: the store denies access ({said})",
            hint="give credentials that may list and read it: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (profiles are "
            'not read: eval "$(aws configure export-credentials --format env)"), or what the store\'s own tools take',
        ) from None
    if "169.254.169.254" in str(error) or "credential" in str(error).lower():
        raise ResourceError(
            f"{where}: no credentials were found",
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket",
        ) from None
    raise ResourceError(
        f"{where}: the store cannot be reached or fails ({said})",
        hint="check the network, and AWS_ENDPOINT_URL if the store is not Amazon's; then start again",
    ) from None


def _describe(meta: Any) -> _Object:
    if not meta["e_tag"]:
        raise ResourceError(
            f"{escape(meta['path'])}: the store gives no ETag, so a change could not be noticed",
            hint="copy it to a local disk with the store's own tool",
        )
    return _Object(meta["size"], meta["e_tag"], int(meta["last_modified"].timestamp() * 1e9))


def _listing(path: str) -> _Listing:
    """Return what lies in a directory; nothing if there is none."""
    path = plain(path)
    with _lock:
        found = _listings.get(path)
    if found is None:
        bucket, key = _parts(path)
        store = _store(bucket)
        import obstore

        answer: Any = _retried(path, lambda: obstore.list_with_delimiter(store, key or None))
        found = _Listing(
            {meta["path"].rpartition("/")[2]: _describe(meta) for meta in answer["objects"]},
            {each.rstrip("/").rpartition("/")[2] for each in answer["common_prefixes"]},
        )
        found.objects.pop("", None)
        with _lock:
            _listings[path] = found
    return found


def _find(path: str) -> _Object | bool | None:
    """Return an object; True for a directory, None for nothing."""
    path = plain(path)
    above, _, name = path.rpartition("/")
    bucket, key = _parts(path)
    if not key:
        return True
    with _lock:
        known = _listings.get(above)
    if known is not None:
        return known.objects.get(name) or (True if name in known.folders else None)
    here = _listing(path)
    if here.objects or here.folders:
        return True
    with _lock:
        if path in _single:
            return _single[path]
    import obstore

    try:
        found = _describe(_retried(path, lambda: obstore.head(_store(bucket), key)))
    except FileNotFoundError:
        found = None
    with _lock:
        _single[path] = found
    return found


def exists(path: str) -> bool:
    """True for an object or a directory."""
    return _find(path) is not None


def isdir(path: str) -> bool:
    """True for a directory."""
    return _find(path) is True


def isfile(path: str) -> bool:
    """True for an object."""
    return isinstance(_find(path), _Object)


def status(path: str) -> os.stat_result:
    """Return the status of an object or directory.

    Raises:
        FileNotFoundError: there is none.
    """
    found = _find(path)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "no such object", path)
    return _status(found if isinstance(found, _Object) else None, plain(path))


def _status(said: _Object | None, path: str) -> os.stat_result:
    """Return a status whose inode number stands for the path and the version."""
    version = hashlib.sha256(f"{path}\n{said.etag if said else ''}".encode("utf-8", "surrogateescape"))
    inode = int.from_bytes(version.digest()[:7], "little")
    mode = stat.S_IFREG | 0o444 if said else stat.S_IFDIR | 0o555
    size, seconds = (said.size, said.modified_ns // 10**9) if said else (0, 0)
    times = (said.modified_ns if said else 0,) * 3
    return os.stat_result((mode, inode, 0, 1, 0, 0, size, *(seconds,) * 3, *(float(seconds),) * 3, *times))


def names(path: str) -> list[str]:
    """Return the names in a directory.

    Raises:
        FileNotFoundError, NotADirectoryError: it is none.
    """
    found = _find(path)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "no such directory", path)
    if found is not True:
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)
    listing = _listing(path)
    return sorted({*listing.objects, *listing.folders})


class Entry(NamedTuple):
    """What `os.scandir` gives for each name: as much of it as is used."""

    name: str
    path: str
    is_folder: bool

    def is_dir(self) -> bool:
        """True for a directory."""
        return self.is_folder

    def is_symlink(self) -> bool:
        """False: a store has no links."""
        return False


def scan(path: str) -> contextlib.AbstractContextManager[Iterator[Entry]]:
    """Return what lies in a directory, as `os.scandir`.

    Raises:
        FileNotFoundError, NotADirectoryError: it is none.
    """
    there = names(path)
    folders = _listing(path).folders
    return contextlib.nullcontext(Entry(name, os.path.join(path, name), name in folders) for name in there)


def walk(path: str, topdown: bool = True) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield (directory, directories in it, objects in it), as `os.walk` does."""
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
    """Open an object for reading and return its number; a directory has none.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such object.
        OSError: it is to be written.
    """
    if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
        raise OSError(errno.EROFS, "object stores are read only so far", path)
    found = _find(path)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "no such object", path)
    if not isinstance(found, _Object):
        raise IsADirectoryError(errno.EISDIR, "a directory", path)
    with _lock:
        number = next(_numbers)
        _open[number] = _Open(plain(path), found)
    return number


def close_number(number: int) -> None:
    """Close an object, and drop what is held of it."""
    with _lock:
        _open.pop(number, None)
        for key in [key for key in _held if key[0] == number]:
            del _held[key]


def status_of_number(number: int) -> os.stat_result:
    """Return the status of an open object, of the version that is read."""
    return _status(_open[number].said, _open[number].path)


def read(number: int, nbytes: int, start: int) -> bytes:
    """Return bytes of an open object; fewer at its end.

    Raises:
        IntegrityError: it changed.
        ResourceError: the store does not give them.
    """
    buffer = bytearray(max(min(nbytes, _open[number].said.size - start), 0))
    read_into(number, [buffer], start)
    return bytes(buffer)


def read_into(number: int, buffers: Sequence[Any], start: int) -> int:
    """Fill buffers, one after the other, and return how many bytes there were.

    Raises:
        IntegrityError, ResourceError: as `read`.
    """
    opened = _open[number]
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    ends = list(itertools.accumulate(len(view) for view in views))
    stop = min(start + (ends[-1] if ends else 0), opened.said.size)
    at = start
    while at < stop and (piece := _take(number, at, stop)):
        _put(views, ends, at - start, piece)
        at += len(piece)
    if at < stop:
        _fetch_into(number, opened, views, ends, start, at, stop)
    return max(stop - start, 0)


def _put(views: Sequence[memoryview], ends: Sequence[int], at: int, data: memoryview | bytes) -> None:
    """Put bytes where they belong in buffers, from byte `at` of all of them on."""
    rest = memoryview(data)
    for view, end in zip(views, ends, strict=True):
        begin = end - len(view)
        if rest and begin <= at < end:
            part = rest[: end - at]
            view[at - begin : at - begin + len(part)] = part
            rest, at = rest[len(part) :], at + len(part)


def _take(number: int, at: int, stop: int) -> memoryview | None:
    """Return held bytes from `at` on, at most up to `stop`."""
    with _lock:
        for key, data in _held.items():
            if key[0] == number and key[1] <= at < key[1] + len(data):
                _held.move_to_end(key)
                return memoryview(data)[at - key[1] : stop - key[1]]
    return None


def _hold(number: int, start: int, data: bytes) -> None:
    with _lock:
        if number not in _open:
            return
        _held[number, start] = data
        while sum(map(len, _held.values())) > MAX_HELD_NBYTES:
            _held.popitem(last=False)


def _goes_on(number: int, at: int) -> bool:
    """True if something was read shortly before byte `at`."""
    with _lock:
        return any(
            key[0] == number and key[1] + len(data) <= at <= key[1] + len(data) + MAX_GAP_NBYTES
            for key, data in _held.items()
        )


def _fetch_into(
    number: int,
    opened: _Open,
    views: Sequence[memoryview],
    ends: Sequence[int],
    start: int,
    at: int,
    stop: int,
) -> None:
    """Fetch bytes `at` to `stop`, and a little more where reading will go on."""
    wanted = stop - at
    if _goes_on(number, at):
        more = MAX_REQUEST_NBYTES
    else:
        more = wanted if wanted >= _LARGE_NBYTES else _FIRST_NBYTES
    end = min(at + max(wanted, more), opened.said.size)
    cuts = [*range(at, end, MAX_REQUEST_NBYTES), end]
    pairs = list(itertools.pairwise(cuts))

    def fetch(pair: tuple[int, int]) -> None:
        data = _request(opened, *pair)
        _put(views, ends, pair[0] - start, memoryview(data)[: max(stop - pair[0], 0)])
        if pair is pairs[-1]:  # what comes next begins here
            _hold(number, pair[0], data)

    if len(pairs) == 1:
        fetch(pairs[0])
    else:
        list(_executor().map(fetch, pairs))


def _executor() -> ThreadPoolExecutor:
    """Return the threads that wait for the network; a forked process has its own."""
    with _lock:
        if not _pool or _pool[0][0] != os.getpid():
            _pool[:] = [(os.getpid(), ThreadPoolExecutor(_NUM_CONNECTIONS, "shardkit-store"))]
        return _pool[0][1]


def _request(opened: _Open, start: int, stop: int) -> bytes:
    """Return one range of an object, of the version that was listed."""
    import obstore

    bucket, key = _parts(opened.path)
    options: Any = {"range": (start, stop), "if_match": opened.said.etag}

    def get() -> bytes:
        data = bytes(obstore.get(_store(bucket), key, options=options).bytes())
        if len(data) != stop - start:
            raise OSError(errno.EIO, "a short body")
        return data

    try:
        return _retried(opened.path, get)
    except FileNotFoundError:
        raise IntegrityError(
            f"{escape(opened.path)}: the object was removed while it was read",
            hint="start again with a source that is at rest",
        ) from None
