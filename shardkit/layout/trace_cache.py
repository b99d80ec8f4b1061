"""What the tracing child answered before: kept for the same question, as long as nothing that it read has changed.

    key         the request, config.json, the environment: versions, installed packages, import path, variables
    evidence    every file that the child had loaded or read, as it was then

The key is made before a child is started. What the child will import is not known then, so it reports that in
its answer, and whoever finds the answer looks at those files again: code of transformers and shardkit by its
sha256, other modules, whose packages the key has, by size and time.

Nothing is kept of what somebody else's code has a say in: the model's own, a policy that is imported, an editable
transformers. Nor are errors: what they complain about is about to change.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from shardkit._version import __version__
from shardkit.files import storage
from shardkit.files.cache import Cache, home
from shardkit.files.strict_json import read_small
from shardkit.layout.wrap_policy import parse_policy, parse_stages

T = TypeVar("T")

_FOLDER = "traces"
_CONFIG = "config.json"
_MAX_FILE_BYTES = 64 << 20
_BY_DIGEST = frozenset({"transformers", "shardkit"})
_STATED = ("torch", "transformers")
"""Packages whose place is in the key."""
_INSTALLED = re.compile(r".*\.(?:dist-info|egg-info|egg-link|pth)")
_VARIABLES = re.compile(r"(?:HF_|TRANSFORMERS_|TORCH|PYTORCH_|PYTHON|ACCELERATE_|USE_|DISABLE_|LD_).*")
_SECRET = re.compile(r".*TOKEN.*")
_CODE = (".py", ".pyc", ".so")
_LATE_NS = 2_000_000_000  # as coarse as the times of some file systems are


def trace_cache() -> Cache | None:
    """Return the cache of traces, None where there shall be none."""
    directory = home()
    return None if directory is None else Cache(os.path.join(directory, _FOLDER))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one question's answer."""

    cache: Cache
    key: str
    directory: str
    """Holds config.json. Its path is no part of the key."""
    config_mark: str
    asked_ns: int
    """Time before the child was started."""

    def find(self, read: Callable[[Mapping[str, Any]], T]) -> T | None:
        """Return a kept answer as `read` makes it of JSON; None if there is none that still holds.

        Args:
            read: takes an answer of status "ok".
        """
        data = self.cache.find(self.key)
        if data is None:
            return None
        try:
            entry = json.loads(zlib.decompress(data))
            if entry["answer"]["status"] != "ok" or not self._holds(entry["evidence"]):
                return None
            return read(entry["answer"])
        except Exception:  # whoever can write the user's files can write anything: then the child is asked
            return None

    def keep(self, answer: Mapping[str, Any]) -> None:
        """Keep an answer of status "ok", if the child's evidence is whole."""
        evidence = answer.get("evidence")
        if evidence is None or evidence["beside"].get(_CONFIG) != self.config_mark:
            return
        plain = {name: value for name, value in answer.items() if name != "evidence"}
        # The names of 880,000 experts are 190 MB, and a twentieth of that packed.
        packed = zlib.compress(json.dumps({"answer": plain, "evidence": evidence}).encode(), 1)
        self.cache.keep(self.key, packed)

    def _holds(self, evidence: Mapping[str, Mapping[str, str]]) -> bool:
        beside = {os.path.join(self.directory, name): mark for name, mark in evidence["beside"].items()}
        return all(
            _mark(path, by_digest=mark.startswith("sha256:")) == mark
            for path, mark in (beside | dict(evidence["files"])).items()
        )


def slot_for(request: Mapping[str, Any], environment: Mapping[str, str]) -> Slot | None:
    """Return the place of a request's answer, None if no answer to it may be kept.

    Args:
        request: what the child is asked.
        environment: the child's.
    """
    cache = trace_cache()
    if cache is None or not _is_plain(request):
        return None
    directory = request["directory"]
    config_mark = _mark(os.path.join(directory, _CONFIG), by_digest=True)
    origins = {name: _origin(name) for name in _STATED}
    if config_mark is None or not _is_installed(origins["transformers"]):
        return None
    asked = {name: value for name, value in request.items() if name != "directory"}
    content = [asked, config_mark, origins, _surroundings(environment)]
    return Slot(
        cache=cache,
        key=hashlib.sha256(json.dumps(content).encode()).hexdigest(),
        directory=directory,
        config_mark=config_mark,
        asked_ns=time.time_ns(),
    )


def _is_plain(request: Mapping[str, Any]) -> bool:
    """True if shardkit and transformers alone decide what the answer is."""
    wrap = parse_policy(request.get("wrap", "none"))
    is_imported = wrap.kind == "function" or any("." in name for name in wrap.names)
    own_stages = parse_stages(request.get("stages", "auto")).kind != "auto"
    return not (is_imported or own_stages or request.get("trust_remote_code"))


def _origin(package: str) -> str | None:
    """Return where a package would be imported from. Nothing is imported."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec is not None else None


def _is_installed(origin: str | None) -> bool:
    """True if a package was installed file by file, not as a link to sources that somebody edits.

    The list of installed files of an editable package does not have the package's own.

    Args:
        origin: path of its `__init__.py`.
    """
    if origin is None:
        return False
    package = os.path.dirname(origin)
    site, name = os.path.split(package)
    try:
        about = [e for e in storage.listdir(site) if e.startswith(f"{name}-") and e.endswith(".dist-info")]
        lists = [read_small(os.path.join(site, e, "RECORD"), "RECORD", _MAX_FILE_BYTES) for e in about]
    except Exception:  # no such list, or not one for us: then nothing is kept
        return False
    return any(b"\n%s/__init__.py," % name.encode() in b"\n" + files for files in lists)


def _surroundings(environment: Mapping[str, str]) -> list[Any]:
    path = [os.path.abspath(entry) for entry in sys.path]
    variables = {
        name: value
        for name, value in sorted(environment.items())
        if _VARIABLES.fullmatch(name) and not _SECRET.fullmatch(name)
    }
    machine = os.uname().machine
    return [__version__, sys.version, sys.executable, machine, path, _packages(path), variables]


def _packages(path: Iterable[str]) -> list[tuple[str, int]]:
    """Return (name and version, time of installation) of all that is installed on an import path."""
    packages = []
    for directory in dict.fromkeys(path):
        try:
            with storage.scandir(directory) as entries:
                those = [entry for entry in entries if _INSTALLED.fullmatch(entry.name)]
                packages += [(entry.name, entry.stat(follow_symlinks=False).st_mtime_ns) for entry in those]
        except OSError:  # no directory: a zip file of the standard library, or nothing
            continue
    return sorted(packages)


def note_reads() -> dict[str, None]:
    """In the child: return the paths that are opened for reading, to which more come from now on. It cannot be ended."""
    paths: dict[str, None] = {}

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str | bytes):
            return
        flags = arguments[2] if isinstance(arguments[2], int) else os.O_RDONLY
        if flags & os.O_ACCMODE == os.O_RDONLY:
            paths[os.fsdecode(arguments[0])] = None

    sys.addaudithook(note)
    return paths


def evidence(directory: str, read: Iterable[str], asked_ns: int) -> dict[str, dict[str, str]] | None:
    """In the child: return the marks of all files that its answer may depend upon.

    Args:
        directory: of config.json; files below it are named from there.
        read: paths that were opened for reading.
        asked_ns: a file that is newer may have changed after it was loaded.

    Returns:
        {"files": path -> mark, "beside": path below `directory` -> mark}; None if the answer must not be kept.
    """
    if any(name.partition(".")[0] == "transformers_modules" for name in list(sys.modules)):
        return None
    marks: dict[str, dict[str, str]] = {"files": {}, "beside": {}}
    for path, by_digest in {**_modules(), **_data(read)}.items():
        is_new = storage.exists(path) and storage.stat(path).st_mtime_ns > asked_ns - _LATE_NS
        inside = os.path.relpath(path, directory)
        is_inside = not inside.startswith(os.pardir)
        mark = _mark(path, by_digest=by_digest)
        if mark is None or (is_new and inside != _CONFIG):  # the parent compares that one with what it knows
            return None
        marks["beside" if is_inside else "files"][inside if is_inside else path] = mark
    return marks


def _modules() -> dict[str, bool]:
    """Return the files of all modules that are not Python's own; True for those that are judged by their bytes."""
    standard = os.path.dirname(os.__file__)
    files = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not os.path.isabs(path):  # torch.ops has no file, and names one
            continue
        is_standard = path.startswith(standard + os.sep) and "-packages" not in path
        if not is_standard:
            files[path] = name.partition(".")[0] in _BY_DIGEST
    return files


def _data(read: Iterable[str]) -> dict[str, bool]:
    """Return the files among those that were read that are neither code nor the system's."""
    paths = dict.fromkeys(os.path.abspath(path) for path in read if not path.endswith(_CODE))
    system = ("/proc/", "/sys/")  # but /dev: models lie in /dev/shm, and devices are no files
    return {
        path: True
        for path in paths
        if not path.startswith(system) and ".dist-info/" not in path and storage.isfile(path)
    }


def _mark(path: str, *, by_digest: bool) -> str | None:
    """Return a stamp that shows whether a file has changed; None if it cannot be read."""
    try:
        if by_digest:
            return f"sha256:{hashlib.sha256(read_small(path, path, _MAX_FILE_BYTES)).hexdigest()}"
        status = storage.stat(path)
    except Exception:  # missing, a directory, not readable: whatever it is, it is no evidence
        return None
    return f"{status.st_size} {status.st_mtime_ns}"
