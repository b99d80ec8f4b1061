"""What the parts of a job agree on, in `plan.json` of their staging directory."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from shardkit.core.text import count, escape, in_directory, in_shell, listed
from shardkit.errors import ResourceError, ShardkitError, SourceError
from shardkit.files import storage
from shardkit.files.place.contract import Notebook
from shardkit.files.strict_json import parse_object, read_small
from shardkit.operations.parts.part import Part, divide, parse_part

SAVE = "save"
"""The verb of a run in which the ranks of a training job write: what its files are called is torch's to say."""
_FORMAT = 2
_MAX_BYTES = 1 << 28
_PATHS = ("source", "checkpoint", "base", "tokenizer", "keys", "source_manifest", "adapter_config")
_MADE = "manifest_file"
"""A path that does not exist yet."""
_OWN = {
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
    "resume",
}
"""Arguments of a verb that say how one process works, not what is made."""
_SETTINGS = ("sha256", "manifest", "manifest_file", "check_source")
_SPEED = {"jobs", "max_memory"}


_typed = ContextVar("_typed", default="")


@contextlib.contextmanager
def typed(command: str) -> Iterator[None]:
    """Let runs that are begun meanwhile say which command was typed, as the shell takes it."""
    token = _typed.set(command)
    try:
        yield
    finally:
        _typed.reset(token)


def as_typed(share: Share | None) -> tuple[str, str]:
    """Return the command that was typed for a share, as the shell takes it, and where; empty if none was, or it is gone."""
    command = _typed.get() if share is None else share.typed if isinstance(share, Part) else ""
    return command, storage.current_directory() if command else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A call of a verb."""

    verb: str
    options: Mapping[str, Any]
    """Its arguments, without those of one process alone; plain data."""

    @classmethod
    def of(cls, verb: str, arguments: Mapping[str, Any]) -> Command:
        """Return a call that another process, in another directory, can repeat.

        Args:
            verb: its name.
            arguments: all of them, as the verb got them.
        """
        options = {name: _plain(value) for name, value in arguments.items() if name not in _OWN}
        for name in _PATHS:
            given = options.get(name)
            if isinstance(given, str) and storage.exists(given):
                options[name] = storage.absolute(given)
        if isinstance(options.get(_MADE), str):
            options[_MADE] = storage.absolute(options[_MADE])
        return cls(verb=verb, options=options)

    def settings(self) -> dict[str, Any]:
        """Return the options that the parts have to agree on and that a plan does not contain."""
        return {name: self.options.get(name) for name in _SETTINGS}


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What is written, by which call, in how many parts."""

    plan: str
    """Hash of the plan."""
    version: str
    """Of shardkit."""
    ingredients: Mapping[str, Any]
    """What the hash is made of: the state of each source file, and digests of the rest."""
    command: Command
    typed: str
    """The command as it was typed, without its part; empty where there was none."""
    here: Sequence[str] = ()
    """Of a run of one process: its machine, and a hash of the plan that counts what no other machine sees of the source."""
    cwd: str = ""
    """Where it was typed; empty where nothing was typed."""
    beside: Sequence[str] = ()
    """Names of the files that lie beside those with tensors in them, without what describes these."""
    num_parts: int
    """Of the process that began."""
    files: Sequence[tuple[str, int]]
    """Name and size of every file with tensors in it, in the order of the plan."""
    replaces: str | None = None
    """In a store: ETag of the marker that is to be replaced; None if there was none."""

    @property
    def folders(self) -> set[str]:
        """Directories of an output that the files lie in."""
        return {os.path.dirname(name) for name, _ in self.files} - {""}

    def dump(self) -> bytes:
        """Return the content of `plan.json`."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode()

    @classmethod
    def read(cls, path: str) -> Agreement:
        """Return the agreement of the parts in a directory.

        Args:
            path: of `plan.json`.

        Raises:
            SourceError: the file is missing or not what shardkit writes.
            ResourceError: it cannot be read.
        """
        name = _name_of(path)
        return cls.parse(read_small(path, name, _MAX_BYTES, follow=False), name)

    @classmethod
    def of(cls, staging: Notebook) -> Agreement:
        """Return the agreement of the parts that share a place; errors as `read`."""
        data = staging.read_record()
        try:
            return cls.parse(data, _name_of(staging.record))
        except SourceError as error:
            raise SourceError(
                error.message,
                hint="give up what the parts have written, and begin anew: "
                f"`shardkit abort {in_shell(staging.destination)}`",
            ) from None

    @classmethod
    def parse(cls, data: bytes, name: str) -> Agreement:
        """Return the agreement that a `plan.json` records.

        Args:
            data: its content.
            name: how to call it in messages.

        Raises:
            SourceError: it is not what shardkit writes.
        """
        content = parse_object(data, name)
        if content.pop("format", None) != _FORMAT:
            raise SourceError(f"{escape(name)} was written by another version of shardkit")
        try:
            command = content.pop("command")
            files = content.pop("files")
            assert isinstance(command, dict)
            assert isinstance(files, list)
            found = cls(
                command=Command(**command),
                files=[(str(n), int(s)) for n, s in files],
                **{"beside": [], "here": [], **content},  # type: ignore[arg-type]
            )
            assert isinstance(found.command.options, dict)
            assert isinstance(found.num_parts, int)
            assert all(isinstance(text, str) for text in (found.plan, found.version, found.typed))
            assert found.replaces is None or isinstance(found.replaces, str)
            assert isinstance(found.ingredients, dict)
            assert isinstance(found.cwd, str)
            for names in (found.beside, found.here):
                assert isinstance(names, list)
                assert all(isinstance(name, str) for name in names)
        except (AssertionError, KeyError, TypeError, ValueError):
            raise SourceError(f"{escape(name)} is damaged") from None
        return found

    def is_stale(self, other: Agreement) -> bool:
        """True if a run of this plan has begun on this machine with another state of the source: times in ns, inodes."""
        return bool(other.here) and other.here[0] == self.here[0] and list(other.here) != list(self.here)

    def differences(self, other: Agreement) -> Iterator[str]:
        """Yield what another process decided otherwise."""
        if self.version != other.version:
            yield f"shardkit {escape(self.version)} there, {escape(other.version)} here"
        theirs, ours = self.command, other.command
        if theirs.verb != ours.verb:
            yield f"{escape(theirs.verb)} there, {escape(ours.verb)} here"
        for name in sorted(theirs.options.keys() | ours.options.keys()):
            there, here = theirs.options.get(name), ours.options.get(name)
            if there != here and name not in _SPEED and theirs.verb == ours.verb:
                yield f"{escape(name)}: {escape(repr(there))} there, {escape(repr(here))} here"
        yield from self._other_ingredients(other)

    def _other_ingredients(self, other: Agreement) -> Iterator[str]:
        changed = []
        for name in sorted(self.ingredients.keys() | other.ingredients.keys()):
            there, here = self.ingredients.get(name), other.ingredients.get(name)
            if isinstance(there, dict) and isinstance(here, dict):
                files = [each for each in {**there, **here} if there.get(each) != here.get(each)]
                if files:
                    yield f"{count(len(files), 'file')} of the source: {listed([escape(each) for each in files])}"
            elif there != here and name != "version":
                changed.append(escape(name))
        if changed:
            yield f"what is made of it: {', '.join(changed)}"

    def command_of(self, part: Part, output: str) -> str:
        """Return the command that carries out a part; in Python with its output."""
        if self.typed:
            return f"{in_directory(self.cwd, self.typed, here=storage.current_directory())} --part {part}"
        options = {**self.command.options, "output": output, "part": str(part)}
        given = ", ".join(f"{name}={value!r}" for name, value in options.items() if value)
        return f"shardkit.{self.command.verb}({given})"

    def missing_parts(self, files: Sequence[int]) -> list[tuple[Part, int]]:
        """Return the parts that lack something, with how many files each lacks.

        Args:
            files: numbers of the files that are not finished.
        """
        parts, lacking = divide([size for _, size in self.files], self.num_parts), dict[int, int]()
        for number in files:
            lacking[parts[number]] = lacking.get(parts[number], 0) + 1
        return [(Part(number=part, count=self.num_parts), lacking[part]) for part in sorted(lacking)]


def read_parts(staging: Notebook) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
    """Yield what parts said of themselves, with (number, how many there are), in the order of their numbers."""
    told = []
    for name, data in staging.told():
        number, _, of = name.removesuffix(".json").partition("-of-")
        if number.isdecimal() and of.isdecimal():
            told.append((int(of), int(number), name, data))
    for of_all, place, name, data in sorted(told):
        with contextlib.suppress(ShardkitError):
            yield (place, of_all), parse_object(data, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Committing:
    """Not a part: all parts are done, and what they wrote becomes the output."""

    check: Callable[[Agreement], object]
    """Refuses a plan that is not the parts' own."""
    on_end: Callable[[bool], object]
    """Is told whether this process made the output; otherwise another one has."""
    overwrite: bool = False
    """Replace whatever output is there by now."""


Share = Part | Committing
_S = TypeVar("_S", bound=Notebook)


def as_share(part: str | Share | None) -> Share | None:
    """Return what of a job a process carries out, however it was said; errors as `parse_part`."""
    return parse_part(part, os.environ) if isinstance(part, str) else part


def read_all(stagings: Sequence[_S]) -> list[tuple[_S, Agreement]]:
    """Return the agreement in each place; a place that goes away meanwhile is left out."""
    found = []
    for staging in stagings:
        try:
            found.append((staging, Agreement.of(staging)))
        except (SourceError, ResourceError):
            if staging.exists:
                raise
    return found


def _name_of(path: str) -> str:
    return os.path.join(os.path.basename(os.path.dirname(path)), os.path.basename(path))
