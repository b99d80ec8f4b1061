"""Answers of the tracing child, kept for the same request, config.json and versions.

An answer that depends on other code is not kept: the model's own code, a policy or stages that are imported, an editable
transformers, a second config that config.json names. Nor are errors.
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
    """Return the cache of traces; None if the caches are switched off."""
    directory = home()
    return None if directory is None else Cache(os.path.join(directory, _FOLDER))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one request's answer."""

    cache: Cache
    key: str

    def find(self, read: Callable[[Mapping[str, Any]], T]) -> T | None:
        """Return a kept answer as `read` makes it of JSON; None without one.

        Args:
            read: takes an answer of status "ok".
        """
        data = self.cache.find(self.key)
        if data is None:
            return None
        try:
            answer = json.loads(zlib.decompress(data))
            return read(answer) if answer["status"] == "ok" else None
        except Exception:  # whoever can write the user's files can write anything: then the child answers
            return None

    def keep(self, answer: Mapping[str, Any]) -> None:
        """Keep an answer of status "ok"."""
        # The names of 880,000 experts are 190 MB, and a twentieth of that packed.
        self.cache.keep(self.key, zlib.compress(json.dumps(answer).encode(), 1))


def slot_for(request: Mapping[str, Any]) -> Slot | None:
    """Return the place of a request's answer; None if it is not kept.

    Args:
        request: for the child. The path of its directory is no part of the key.
    """
    cache = trace_cache()
    if cache is None or not _is_plain(request):
        return None
    try:
        config = read_small(os.path.join(request["directory"], _CONFIG), _CONFIG, _MAX_CONFIG).decode()
        transformers = importlib.metadata.distribution("transformers")
        torch = importlib.metadata.version("torch")
    except Exception:  # no config, or a package is missing: the child says so
        return None
    is_editable = '"editable": true' in (transformers.read_text("direct_url.json") or "")
    if is_editable or "configuration_files" in config:
        return None
    versions = [__version__, sys.version, torch, transformers.version]
    content = [{name: value for name, value in request.items() if name != "directory"}, config, versions]
    return Slot(cache=cache, key=hashlib.sha256(json.dumps(content).encode()).hexdigest())


def _is_plain(request: Mapping[str, Any]) -> bool:
    """True if the answer depends on no code but shardkit's and transformers'."""
    wrap = parse_policy(request.get("wrap", "none"))
    is_imported = wrap.kind == "function" or any("." in name for name in wrap.names)
    own_stages = parse_stages(request.get("stages", "auto")).kind != "auto"
    return not (is_imported or own_stages or request.get("trust_remote_code"))
