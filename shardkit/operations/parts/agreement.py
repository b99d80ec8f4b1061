"""What all processes of a job have to agree on, and the share of the job that one process writes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any

from shardkit.core.text import count, escape, in_directory, in_shell, listed
from shardkit.errors import IncompleteError, SourceError
from shardkit.files import storage
from shardkit.files.output.contract import JobRecord
from shardkit.operations.parts.part import Part, divide

PLAN = "plan.json"
"""Name of the agreement among the files of a draft."""
_PATHS = ("source", "checkpoint", "base", "tokenizer", "keys", "source_manifest", "adapter_config")
_NEW_PATH = "manifest_file"
"""An argument with a path that does not exist yet."""
_OF_ONE_PROCESS = {
    "output",
    "part",
    "executor",
    "num_parts",
    "progress",
    "on_warning",
    "on_step",
    "dry_run",
    "exist_ok",
    "holdings",
    "scratch",
}
"""Arguments of a verb that do not affect the output."""
_SETTINGS = ("sha256", "manifest", "manifest_file", "check_source")


_BEFORE_PATHS = re.compile(r"^((?:[^'\"]|\"'\"|'[^']*')*?)( -- |$)")
"""Matches the options of a shell command: up to its end or a " -- ", not counting quoted text."""
_typed = ContextVar("_typed", default="")


@contextlib.contextmanager
def typed(command: str) -> Iterator[None]:
    """Within this context, record a shell command, without its `--part`, as the one that begins jobs."""
    token = _typed.set(command)
    try:
        yield
    finally:
        _typed.reset(token)


def as_typed() -> tuple[str, str]:
    """Return the shell command that runs now, and its working directory; both empty for a call from Python."""
    command = _typed.get()
    return command, storage.current_directory() if command else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A call of a verb, in a form that other processes can repeat."""

    verb: str
    """Name of the verb; empty if an argument is a Python object, so that no other process can repeat the call."""
    options: Mapping[str, Any]
    """The arguments that affect the output, as JSON data."""

    @classmethod
    def of(cls, verb: str, arguments: Mapping[str, Any]) -> Command:
        """Return a call that other processes, in other directories, can repeat.

        Args:
            verb: name of the verb.
            arguments: all arguments of the call.
        """
        options = {name: _plain(value) for name, value in arguments.items() if name not in _OF_ONE_PROCESS}
        for name in _PATHS:
            path = options.get(name)
            if isinstance(path, str) and storage.exists(path):
                options[name] = storage.absolute(path)
        if isinstance(options.get(_NEW_PATH), str):
            options[_NEW_PATH] = storage.absolute(options[_NEW_PATH])
        try:
            json.dumps(options)
        except TypeError:
            verb, options = "", {name: options.get(name) for name in _SETTINGS}
        return cls(verb=verb, options=options)

    def settings(self) -> dict[str, Any]:
        """Return the options that affect the output but not the plan."""
        return {name: self.options.get(name) for name in _SETTINGS}


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The call that began a job, and the ingredients of the job's hash. Stored in the draft of the job's record."""

    version: str
    """Of shardkit."""
    command: Command
    ingredients: Mapping[str, Any]
    """The state of each source file, and digests of everything else that affects the output."""

    @property
    def hash(self) -> str:
        """The job's hash: only processes with an equal one work on the same job."""
        text = json.dumps(self.ingredients, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def dump(self) -> bytes:
        """Return the content of the draft's file `PLAN`."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def of(cls, record: JobRecord, output: str) -> Agreement:
        """Parse the agreement of a job's record.

        Args:
            record: including the draft.
            output: of the job, for messages.

        Raises:
            SourceError: the record is damaged.
        """
        with contextlib.suppress(KeyError, TypeError, ValueError, RecursionError):
            content = json.loads(record.draft[PLAN])
            command = Command(verb=content["command"]["verb"], options=content["command"]["options"])
            agreement = cls(version=content["version"], command=command, ingredients=content["ingredients"])
            texts, objects = (agreement.version, command.verb), (command.options, agreement.ingredients)
            if all(isinstance(text, str) for text in texts) and all(isinstance(x, dict) for x in objects):
                return agreement
        raise SourceError(
            f"the record of the job for {escape(output)} is damaged",
            hint=f"remove the job, and begin anew: `shardkit abort {in_shell(output)}`",
        )

    def differences(self, other_agreement: Agreement) -> Iterator[str]:
        """Yield the ingredients in which another agreement differs, for messages."""
        changed = []
        for name in sorted(self.ingredients.keys() | other_agreement.ingredients.keys()):
            recorded, current = self.ingredients.get(name), other_agreement.ingredients.get(name)
            if isinstance(recorded, dict) and isinstance(current, dict):
                names = {**recorded, **current}
                files = [escape(each) for each in names if recorded.get(each) != current.get(each)]
                if files:
                    yield f"{count(len(files), 'file')} of the source: {listed(files)}"
            elif recorded != current and name != "version":
                changed.append(escape(name))
        if changed:
            yield f"what is made of it: {', '.join(changed)}"


def part_command(record: JobRecord, part: Part, output: str) -> str:
    """Return the shell command that runs a part of a job; a Python call, if one began the job."""
    is_all = part.count == 1
    if record.command:
        typed = in_directory(record.directory, record.command, here=storage.current_directory())
        return typed if is_all else _BEFORE_PATHS.sub(rf"\1 --part {part}\2", typed, count=1)
    command = Agreement.of(record, output).command if PLAN in record.draft else Command(verb="", options={})
    if not command.verb:
        return f"the call that began the job{'' if is_all else f', with part={str(part)!r}'}"
    options = {**command.options, "output": output, "part": None if is_all else str(part)}
    arguments = ", ".join(f"{name}={value!r}" for name, value in options.items() if value)
    return f"shardkit.{command.verb}({arguments})"


def missing_parts(record: JobRecord, files: Collection[int]) -> list[tuple[Part, int]]:
    """Return the parts with unfinished files, and the number of these files.

    Args:
        record: of the job.
        files: numbers of the unfinished files.
    """
    parts = divide([file.size for file in record.files], record.num_parts)
    lacking = Counter(parts[number] for number in files)
    return [(Part(number=part, count=record.num_parts), lacking[part]) for part in sorted(lacking)]


def incomplete_error(output: str, record: JobRecord, files: Collection[int]) -> IncompleteError:
    """Return the error for unfinished files, with each part that has some and the command that runs it."""
    parts = missing_parts(record, files)
    return IncompleteError(
        f"{escape(output)}: {count(len(files), 'file')} of {len(record.files)} "
        f"{'is' if len(files) == 1 else 'are'} missing, of {count(len(parts), 'part')}",
        problems=[
            f"part {part}: {count(number, 'file')}; {part_command(record, part, output)}"
            for part, number in parts
        ],
        hint=f"run these parts, or all files at once without --part; `shardkit status {in_shell(output)}` shows what is missing",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Committing:
    """The share of `shardkit commit`: it writes no files, but commits those of all parts."""

    record: JobRecord
    """Of the job, including the draft."""
    overwrite: bool = False
    """Replace an existing output, even if the parts did not have this option."""


Share = Part | Committing
