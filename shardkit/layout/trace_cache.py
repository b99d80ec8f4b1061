"""Cache the answers of the tracing child, by request, config.json and versions.

An answer is not cached if it depends on other code or files: the model's own code, an imported policy or stage
function, an editable transformers, a second config that config.json names. Errors are not cached either.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from shardkit._version import __version__
from shardkit.files.cache import Cache, home
from shardkit.files.strict_json import read_small
from shardkit.layout.wrap_policy import parse_policy, parse_stages

T = TypeVar("T")

_FOLDER = "traces"
_CONFIG = "config.json"
_MAX_CONFIG = 64 << 20


def trace_cache() -> Cache | None:
    """Return the cache of traces, or None if caches are switched off."""
    directory = home()
    return None if directory is None else Cache(os.path.join(directory, _FOLDER))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one request's answer in the cache."""

    cache: Cache
    key: str

    def find(self, read: Callable[[Mapping[str, Any]], T]) -> T | None:
        """Return `read(answer)` for the cached answer; None if no usable answer is cached.

        Args:
            read: converts the JSON of an answer with status "ok".
        """
        data = self.cache.find(self.key)
        if data is None:
            return None
        try:
            answer = json.loads(zlib.decompress(data))
            return read(answer) if answer["status"] == "ok" else None
        except Exception:  # the cached file may contain anything; a child answers instead
            return None

    def keep(self, answer: Mapping[str, Any]) -> None:
        """Cache an answer with status "ok"."""
        # The names of 880,000 experts are 190 MB, and a twentieth of that when compressed.
        self.cache.keep(self.key, zlib.compress(json.dumps(answer).encode(), 1))


def slot_for(request: Mapping[str, Any]) -> Slot | None:
    """Return the place of a request's answer; None if answers to this request are not cached.

    Args:
        request: a request for the child. The key does not contain the path of its directory.
    """
    cache = trace_cache()
    if cache is None or not _is_plain(request):
        return None
    try:
        config = read_small(os.path.join(request["directory"], _CONFIG), _CONFIG, _MAX_CONFIG).decode()
        transformers = importlib.metadata.distribution("transformers")
        torch = importlib.metadata.version("torch")
    except Exception:  # no config, or a package is missing: the child reports it
        return None
    is_editable = '"editable": true' in (transformers.read_text("direct_url.json") or "")
    if is_editable or "configuration_files" in config:
        return None
    versions = [__version__, sys.version, torch, transformers.version]
    content = [{name: value for name, value in request.items() if name != "directory"}, config, versions]
    return Slot(cache=cache, key=hashlib.sha256(json.dumps(content).encode()).hexdigest())


def _is_plain(request: Mapping[str, Any]) -> bool:
    """True if the answer depends only on the code of shardkit and transformers."""
    wrap = parse_policy(request.get("wrap", "none"))
    is_imported = wrap.kind == "function" or any("." in name for name in wrap.names)
    own_stages = parse_stages(request.get("stages", "auto")).kind != "auto"
    return not (is_imported or own_stages or request.get("trust_remote_code"))
