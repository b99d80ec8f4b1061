"""Which module writes into a store."""

from __future__ import annotations

from shardkit.files.remote import azure, s3
from shardkit.files.remote.contract import StoreWriter

_WRITERS: dict[str, StoreWriter] = {"s3": s3, "gs": s3, "az": azure}
WRITABLE = tuple(f"{scheme}://" for scheme in _WRITERS)


def writer_of(path: str) -> StoreWriter:
    """Return the writer of the store of a path.

    Args:
        path: begins with one of `WRITABLE`.
    """
    return _WRITERS[path.partition("://")[0]]
