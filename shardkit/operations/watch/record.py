"""`watch.json`: the models that a watcher has made of the checkpoints of a run, and those that it is making."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shardkit.core.text import escape
from shardkit.errors import SourceError, UsageError
from shardkit.files import storage
from shardkit.files.strict_json import parse_object, read_small

RECORD = "watch.json"
_VERSION, _MAX_RECORD = 1, 64 << 20


@dataclass(slots=True, kw_only=True)
class ConvertedModel:
    """A model that was made of a checkpoint: an entry of `watch.json`."""

    name: str
    """Its directory, and its branch."""
    step: int | None
    entries: dict[str, list[int]]
    """[bytes, time of the last change in nanoseconds] of each file, as written; [] of a directory."""
    repo: str | None = None
    """The repo that it was uploaded to."""
    commit: str | None = None
    """The commit of its branch there."""
    is_on_main: bool = False
    """It was uploaded to the default branch too."""
    is_removed: bool = False


@dataclass(slots=True)
class WatchRecord:
    """The content of `watch.json`."""

    models: list[ConvertedModel] = field(default_factory=list)
    unfinished: dict[str, str] = field(default_factory=dict)
    """Name of each model that is being made -> path of its checkpoint in the run."""

    def content(self, run: str) -> bytes:
        """Return the content of the file; `run` is the real path of the run."""
        return json.dumps({"version": _VERSION, "run": run, **asdict(self)}, indent=1).encode()


def read_record(directory: str, run: str) -> WatchRecord:
    """Return the content of `watch.json`.

    Raises:
        SourceError: it is damaged, or of another version.
        UsageError: it is of another run.
    """
    path = os.path.join(directory, RECORD)
    if not storage.lexists(path):
        return WatchRecord()
    try:
        content: Mapping[str, Any] = parse_object(read_small(path, path, _MAX_RECORD), path)
        recorded_run = str(content["run"])
        record = WatchRecord([ConvertedModel(**each) for each in content["models"]], content["unfinished"])
        names = [*record.unfinished, *(model.name for model in record.models)]
        if content["version"] != _VERSION or len({*names}) != len(names) or not all(map(is_name, names)):
            raise ValueError(path)
        if not all(map(_is_entry, record.models)) or not all(map(_is_text, record.unfinished.values())):
            raise ValueError(path)
    except (KeyError, TypeError, ValueError, AttributeError, SourceError):
        raise SourceError(
            f"{escape(path)} is damaged, or of another version of shardkit",
            hint="move it away: then the directories that it listed are left as they are",
        ) from None
    if recorded_run != run:
        raise UsageError(
            f"{escape(directory)} has the models of another run, {escape(recorded_run)}",
            hint="give another output directory",
        )
    return record


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def is_name(name: object) -> bool:
    """True for a name of a visible directory beside `watch.json`."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and os.path.basename(name) == name
        and name not in ("", RECORD)
        and not name.startswith(".")
    )


def _is_entry(model: ConvertedModel) -> bool:
    """True if an entry of `watch.json` has the types of its fields."""
    return (
        isinstance(model.entries, dict)
        and all(isinstance(each, list) for each in model.entries.values())
        and isinstance(model.step, int | None)
        and isinstance(model.repo, str | None)
        and isinstance(model.commit, str | None)
        and isinstance(model.is_on_main, bool)
        and isinstance(model.is_removed, bool)
    )


def entries_of(path: str) -> dict[str, list[int]]:
    """Return [bytes, time of the last change in nanoseconds] of each file and link below a directory, or of a file;
    [] of a directory."""
    if not storage.isdir(path):
        status = storage.stat(path)
        return {"": [status.st_size, status.st_mtime_ns]}
    entries = dict[str, list[int]]()
    for here, folders, names in storage.walk(path):
        inside = os.path.relpath(here, path)
        entries |= {os.path.normpath(os.path.join(inside, name)): [] for name in folders}
        for name in names:
            status = storage.lstat(os.path.join(here, name))
            entries[os.path.normpath(os.path.join(inside, name))] = [status.st_size, status.st_mtime_ns]
    return entries
