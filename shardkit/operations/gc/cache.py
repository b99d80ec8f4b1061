"""What is cached of earlier runs, and removing it."""

from __future__ import annotations

from dataclasses import dataclass

from shardkit.core.result import Result
from shardkit.core.text import escape
from shardkit.layout.trace_cache import trace_cache
from shardkit.transfer.existing import records


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheResult(Result):
    """What is kept of answers of transformers, and of who has made outputs, or with `clear` was."""

    directory: str | None
    """None if nothing is kept."""
    cleared: bool
    """They were removed."""
    num_entries: int
    cache_bytes: int

    def headline(self) -> str:
        """Return where it lies."""
        return (
            "nothing is cached: SHARDKIT_CACHE is off" if self.directory is None else escape(self.directory)
        )


def show_cache(*, clear: bool = False) -> CacheResult:
    """List the cache.

    Args:
        clear: remove it; the result then tells what was removed.
    """
    kept = trace_cache()
    both = [cache for cache in (kept, records()) if cache is not None]
    used = [cache.clear() if clear else cache.usage() for cache in both]
    return CacheResult(
        directory=kept.directory if kept is not None else None,
        cleared=clear,
        num_entries=sum(usage.num_entries for usage in used),
        cache_bytes=sum(usage.nbytes for usage in used),
    )
