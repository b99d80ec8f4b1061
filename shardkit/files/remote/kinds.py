"""The kinds of stores, by the beginning of their addresses, and the stores that this process has used."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from typing import NamedTuple

from shardkit.files.remote import hub, hub_bucket
from shardkit.files.remote.cloud import Bucket
from shardkit.files.remote.contract import Store


class _StoreKind(NamedTuple):
    """A kind of store."""

    make: Callable[[str], Store]
    num_parts: int = 1
    """Number of path components that name the store."""
    pin: Callable[[str], str] = str
    """Returns a store's name with the current commit, for repos of the Hub."""
    names_store: Callable[[str], bool] = bool
    """False for a path that cannot be a store, such as `hf://organisation`, or a file in it."""
    is_writable: bool = True


_KINDS = {
    "s3://": _StoreKind(Bucket),
    "gs://": _StoreKind(Bucket),
    "az://": _StoreKind(Bucket),
    hub_bucket.SCHEME: _StoreKind(
        hub_bucket.BucketStore, 3, names_store=hub_bucket.names_bucket, is_writable=False
    ),
    hub.SCHEME: _StoreKind(hub.HubStore, 2, hub.pinned, hub.names_repo, is_writable=False),
}
SCHEMES = tuple(_KINDS)
WRITABLE = tuple(scheme for scheme, kind in _KINDS.items() if kind.is_writable)

_lock = threading.Lock()
_stores: dict[str, Store] = {}


def _after_fork() -> None:
    """Reset a forked child: threads of the parent may have held the lock, and connections cannot be shared."""
    global _lock
    _lock = threading.Lock()
    _stores.clear()


os.register_at_fork(after_in_child=_after_fork)


def kind_of(path: str) -> _StoreKind:
    """Return the kind of the store of a path."""
    address = _address(path)
    return next(kind for scheme, kind in _KINDS.items() if address.startswith(scheme))


def is_repo(path: str) -> bool:
    """True for a path in a repo of the Hub."""
    return path.startswith(hub.SCHEME) and kind_of(path) is _KINDS[hub.SCHEME]


def _address(path: str) -> str:
    """Return an address without needless slashes."""
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{re.sub('/+', '/', rest).strip('/')}"


def split(path: str) -> tuple[str, str]:
    """Return (name of the store, key without a "/" at its ends)."""
    scheme, _, rest = _address(path).partition("://")
    names, count = rest.split("/"), kind_of(path).num_parts
    return f"{scheme}://{'/'.join(names[:count])}", "/".join(names[count:])


def store_of(path: str) -> tuple[Store, str]:
    """Return (the store of a path, its key)."""
    root, key = split(path)
    with _lock:
        if root not in _stores:
            _stores[root] = kind_of(root).make(root)
        return _stores[root], key


def forget_stores() -> None:
    """Drop all stores, so that the next request reads the environment again."""
    with _lock:
        _stores.clear()
