"""What is cached of earlier runs, and removing it."""

from __future__ import annotations

from dataclasses import dataclass

from shardkit.core.result import Result
from shardkit.files.cache import Usage
from shardkit.layout.trace_cache import trace_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheResult(Result):
    """What is kept of answers of transformers, or with `clear` was."""

    directory: str | None
    """None if nothing is kept."""
    cleared: bool
    """They were removed."""
    num_entries: int
    cache_bytes: int


def show_cache(*, clear: bool = False) -> CacheResult:
    """Return what the cache holds.

    Args:
        clear: remove it; the result then tells what was removed.
    """
    kept = trace_cache()
    used = Usage(0, 0)
    if kept is not None:
        used = kept.clear() if clear else kept.usage()
    return CacheResult(
        directory=kept.directory if kept is not None else None,
        cleared=clear,
        num_entries=used.num_entries,
        cache_bytes=used.nbytes,
    )
