"""Versions and settings, for a bug report. Nothing is imported to learn its version."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardkit._version import __version__, torch_note
from shardkit.core.result import Result
from shardkit.core.text import escape
from shardkit.files import manifest, storage

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
_CHOOSE_CODE = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "OPENBLAS_CORETYPE")
# Lines of /proc/cpuinfo that tell one type of CPU from another.
_CPU_LINES = (
    "vendor_id",
    "cpu family",
    "model",
    "model name",
    "stepping",
    "CPU implementer",
    "CPU part",
    "flags",
)
_CREDENTIALS = re.compile(r"//[^/@]*@")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment(Result):
    """What shardkit runs on."""

    shardkit: str
    python: str
    platform: str
    packages: dict[str, str | None]
    """Versions; None if a package is not installed."""
    num_cpus: int
    """CPUs that this process may use."""
    memory_bytes: int | None
    """Memory of the machine."""
    huggingface: dict[str, str]
    """The HF_* variables that are set. Most values are hidden, because some are secrets."""
    notes: tuple[str, ...]
    """Lines for a person, such as that shardkit was not tried with this version of torch."""

    def headline(self) -> str:
        """Return the versions that matter most."""
        torch = self.packages.get("torch")
        return f"shardkit {self.shardkit}, {self.python}, {f'torch {torch}' if torch else 'no torch'}"


def environment() -> Environment:
    """Return versions of shardkit, Python and the packages it uses, and what a run depends on."""
    return Environment(
        shardkit=__version__,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        platform=platform.platform(),
        packages={name: package_version(name) for name in _PACKAGES},
        num_cpus=_num_cpus(),
        memory_bytes=_memory_bytes(),
        huggingface={name: _shown(name) for name in sorted(os.environ) if name.startswith("HF_")},
        notes=tuple(filter(None, [torch_note(package_version("torch"))])),
    )


def traced_with(origin: str) -> manifest.TracedWith | None:
    """Return the versions that a layout is traced with here; None if it is declared."""
    if origin != "traced":
        return None
    torch, transformers = package_version("torch"), package_version("transformers")
    return manifest.TracedWith(torch=str(torch), transformers=str(transformers))


def mixed_versions(begun: Iterable[Mapping[str, str]], here: Mapping[str, str] | None) -> str | None:
    """Return the warning that work was begun with other versions than it goes on with; None if it was not.

    Args:
        begun: versions by package of those who did something, as far as they noted them.
        here: those of this process; None if it traces nothing.
    """
    noted = list(begun)
    others = {
        name: sorted({note[name] for note in noted if name in note} - {version})
        for name, version in (here or {}).items()
    }
    there = [f"{name} {escape(version)}" for name, versions in others.items() for version in versions]
    if not there:
        return None
    ours = [f"{name} {escape(version)}" for name, version in (here or {}).items() if others[name]]
    return (
        f"begun with {' and '.join(there)}, and goes on with {' and '.join(ours)}: under both the model is laid out alike, "
        "and bytes that are copied are the same; what their own code computes (conversions of transformers, factors) may "
        "differ from file to file"
    )


def package_version(name: str) -> str | None:
    """Return the version of an installed package, None if it is not installed."""
    version = _version_in_name(name)
    if version is not None:
        return version
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _version_in_name(name: str) -> str | None:
    """Return the version that the name of a package's directory tells; `importlib.metadata` takes 30 ms to read it.

    Source: the specification of recorded installs, "The .dist-info directory".
    """
    pattern = re.compile(rf"{re.escape(name.replace('-', '_'))}-([^-]+)\.dist-info", re.IGNORECASE)
    for directory in sys.path:
        try:
            entries = storage.listdir(directory or os.curdir)
        except OSError:  # no directory
            continue
        matches = [match for entry in entries if (match := pattern.fullmatch(entry))]
        if matches:
            return matches[0].group(1) if len(matches) == 1 else None
    return None


def _shown(name: str) -> str:
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


def computed_by() -> dict[str, object]:
    """Return what decides the last bits of what is computed: torch, the type of the CPU, and the settings that pick its code."""
    lines: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                lines.setdefault(name.strip(), value.strip())
    except OSError:
        lines["model name"] = platform.processor() or platform.machine()
    return {
        "torch": package_version("torch"),
        "cpu": [lines.get(name) for name in _CPU_LINES],
        "environment": {name: os.environ[name] for name in _CHOOSE_CODE if name in os.environ},
    }
