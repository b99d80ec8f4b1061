"""Versions and settings, for a bug report. Packages are not imported to get their versions."""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass

from shardkit._version import __version__, torch_note
from shardkit.core.result import Result
from shardkit.files import cache, manifest, storage

_PACKAGES = (
    "torch",
    "safetensors",
    "huggingface-hub",
    "click",
    "tqdm",
    "isal",
    "numpy",
    "transformers",
    "accelerate",
)
_SHOWN_VALUES = ("HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE")
_CREDENTIALS = re.compile(r"//[^/@]*@")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment(Result):
    """The software and hardware that shardkit runs on."""

    shardkit: str
    python: str
    platform: str
    packages: dict[str, str | None]
    """Versions; None if a package is not installed."""
    num_cpus: int
    """CPUs that this process may use."""
    memory_bytes: int | None
    """Memory of the machine."""
    cache: str | None
    """shardkit's cache directory; None if SHARDKIT_CACHE is off."""
    huggingface: dict[str, str]
    """The HF_* variables that are set. Most values are hidden, because some are secrets."""
    notes: tuple[str, ...]
    """Notes, e.g. that shardkit was not tested with this version of torch."""

    def headline(self) -> str:
        """Return the most important versions as one line."""
        torch = self.packages.get("torch")
        return f"shardkit {self.shardkit}, {self.python}, {f'torch {torch}' if torch else 'no torch'}"


def environment() -> Environment:
    """Return the versions of shardkit, Python and the packages it uses, and the machine's resources."""
    return Environment(
        shardkit=__version__,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        platform=platform.platform(),
        packages={name: package_version(name) for name in _PACKAGES},
        num_cpus=_num_cpus(),
        memory_bytes=_memory_bytes(),
        cache=cache.home(),
        huggingface={name: _shown_value(name) for name in sorted(os.environ) if name.startswith("HF_")},
        notes=tuple(filter(None, [torch_note(package_version("torch"))])),
    )


def traced_with(origin: str) -> manifest.TracedWith | None:
    """Return the installed versions, with which a layout is traced; None if it is declared."""
    if origin != "traced":
        return None
    torch, transformers = package_version("torch"), package_version("transformers")
    return manifest.TracedWith(torch=str(torch), transformers=str(transformers))


def package_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    version = _version_in_name(name)
    if version is not None:
        return version
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _version_in_name(name: str) -> str | None:
    """Return the version in the name of a package's `.dist-info` directory; `importlib.metadata` would take 30 ms.

    Source: the specification of recorded installs, "The .dist-info directory".
    """
    pattern = re.compile(rf"{re.escape(name.replace('-', '_'))}-([^-]+)\.dist-info", re.IGNORECASE)
    for directory in sys.path:
        try:
            entries = storage.listdir(directory or os.curdir)
        except OSError:  # not a directory
            continue
        matches = [match for entry in entries if (match := pattern.fullmatch(entry))]
        if matches:
            return matches[0].group(1) if len(matches) == 1 else None
    return None


def _shown_value(name: str) -> str:
    if name not in _SHOWN_VALUES:
        return "(set)"
    return _CREDENTIALS.sub("//...@", os.environ[name])


def _num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
