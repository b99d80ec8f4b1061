"""Looking around in a checkpoint's directory: names, subdirectories, and where a model's config lies.

Nothing here raises for what a directory holds: these are questions asked before anything is known.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from shardkit.errors import ShardkitError
from shardkit.files.links import read_inside

_MAX_CONFIG = 16 << 20
_ASSETS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "preprocessor_config.json",
    "processor_config.json",
)


def listing(path: str) -> frozenset[str]:
    """Return the names in a directory; none where it cannot be listed."""
    try:
        return frozenset(os.listdir(path))
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return frozenset()


def matching(names: Iterable[str], *patterns: str) -> list[str]:
    """Return the names that match one of the patterns, sorted."""
    return sorted(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def has_any(names: Collection[str], *patterns: str) -> bool:
    """True where a name matches one of the patterns."""
    return any(
        pattern in names if not set(pattern) & set("*?[") else bool(matching(names, pattern))
        for pattern in patterns
    )


def inner(path: str, below: str) -> str | None:
    """Return a directory below `path`, or None where there is none or a link leads out of `path`.

    Args:
        below: relative, with "/" between its parts.
    """
    found = os.path.join(path, *below.split("/"))
    if not os.path.isdir(found):
        return None
    home = os.path.join(os.path.realpath(path), "")
    return found if os.path.realpath(found).startswith(home) else None


def own_name(path: str) -> str:
    """Return the name of a directory itself, however the path is spelled."""
    return os.path.basename(os.path.abspath(path))


def parent(path: str) -> str:
    """Return the directory that holds `path`."""
    return os.path.dirname(os.path.abspath(path))


def asset_directories(*candidates: str | None) -> tuple[str, ...]:
    """Return those of some directories that hold a Hub model's config, tokenizer or processor."""
    present = (path for path in candidates if path is not None)
    return tuple(dict.fromkeys(path for path in present if _has_assets(path)))


def _has_assets(path: str) -> bool:
    names = listing(path)
    return has_any(names, *_ASSETS) or ("config.json" in names and _is_model_config(path))


def _is_model_config(path: str) -> bool:
    """True for a config.json as the Hub has it; trainers keep their own settings under that name too."""
    try:
        content = json.loads(read_inside(path, "config.json", _MAX_CONFIG))
    except (ShardkitError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and ("model_type" in content or "architectures" in content)
