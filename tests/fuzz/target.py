"""What a fuzz target is, and what all of them hold their readers to."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple, TypeVar

from shardkit.errors import ShardkitError

T = TypeVar("T")


class Target(NamedTuple):
    """A reader of something that somebody else wrote."""

    check: Callable[[bytes], bool]
    """Whether the input is accepted. Raises AssertionError where a promise is broken."""
    seeds: Callable[[], Sequence[bytes]]
    """Good inputs, the same ones every time; made by the real writers where there are any."""
    mutate: Callable[[Random, Sequence[bytes]], bytes]
    """Makes an input from the seeds."""
    clean: Callable[[], None] = lambda: None
    """Removes what `check` left behind."""


class Refusals:
    """The latest refusal, for a runner that counts them."""

    latest = ""
    """Its message."""
    problems: tuple[str, ...] = ()


def attempt(call: Callable[[], T]) -> T | None:
    """Return what a reader makes of an input, None where it refuses; every other outcome is passed on.

    A refusal must be printable on a terminal, whatever the file says. A hint may have several lines, such as those of a script.
    """
    try:
        return call()
    except ShardkitError as error:
        Refusals.latest, Refusals.problems = error.message, error.problems
        lines = [error.message, *error.problems, *(error.hint or "").split("\n")]
        if not all(map(str.isprintable, lines)):
            raise AssertionError(f"a message that a terminal would act on: {lines!r}") from error
        assert lines[0], "a refusal without a message"
        return None


def load_json(data: bytes | str) -> Any:
    """Parse JSON in which no key stands twice in one object."""

    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs), "a key is given twice"
        return dict(pairs)

    return json.loads(data, object_pairs_hook=to_dict)


class MemoryFile:
    """A regular file that is not on any disk."""

    def __init__(self) -> None:
        self._fd, self._pid = -1, 0

    def put(self, data: bytes) -> str:
        """Make these bytes the file's content; return a path to it."""
        if self._pid != os.getpid():  # a forked child must not share it
            self._fd, self._pid = os.memfd_create("fuzz"), os.getpid()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, data, 0)
        return f"/proc/self/fd/{self._fd}"

    @property
    def fd(self) -> int:
        """The open file, once something was put into it."""
        return self._fd


class Directory:
    """A directory of this process's own, in memory where there is such a place."""

    def __init__(self, fill: Callable[[str], None]) -> None:
        self._fill, self._path, self._pid = fill, "", 0

    def path(self) -> str:
        """Return the directory, filled when it is first asked for."""
        if self._pid != os.getpid():
            self._path = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
            self._pid = os.getpid()
            self._fill(self._path)
        return self._path

    def put(self, name: str, data: bytes) -> None:
        """Write a file of the directory."""
        with open(os.path.join(self.path(), name), "wb") as file:
            file.write(data)

    def remove(self) -> None:
        """Remove it, if this process made it."""
        if self._path and self._pid == os.getpid():
            shutil.rmtree(self._path, ignore_errors=True)
