"""What was done to files, as a list: by inode, so that it can be replayed whatever the names became."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import NamedTuple

ROOT = 0
"""The directory in which everything happens; it was there before."""


class Change(NamedTuple):
    """One name of one directory."""

    directory: int
    name: str
    node: int | None
    """What the name stands for from then on; None for nothing."""


class Entries(NamedTuple):
    """Names that change together: of a new file, a removal, a rename, an exchange."""

    changes: tuple[Change, ...]


class Write(NamedTuple):
    """Bytes of a file."""

    node: int
    at: int
    data: bytes


class Resize(NamedTuple):
    """The size of a file, in bytes."""

    node: int
    size: int


class Sync(NamedTuple):
    """What was done to this file, or to this directory's names, is on the disk."""

    node: int


Op = Entries | Write | Resize | Sync


@dataclass(slots=True)
class Log:
    """Files as they lay on the disk, and all that was done since. Nodes are numbered; numbers are not reused."""

    is_directory: list[bool] = field(default_factory=list)
    """Of each node."""
    contents: dict[int, bytes] = field(default_factory=dict)
    """Of files that were there before."""
    entries: dict[tuple[int, str], int] = field(default_factory=dict)
    """(directory, name) -> node, before."""
    inodes: dict[int, int] = field(default_factory=dict)
    """The file system's own number of a file -> its node."""
    ops: list[Op] = field(default_factory=list)
    times: dict[int, int] = field(default_factory=dict)
    """Node of a file that is there in the end -> when it was written, in nanoseconds."""

    @classmethod
    def of(cls, root: str) -> Log:
        """Return what lies in a directory, and is taken to be on the disk."""
        log = cls()
        log.add_node(root, is_directory=True)
        log._take(ROOT, root)
        return log

    def _take(self, node: int, path: str) -> None:
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            child = self.add_node(entry.path, is_directory=entry.is_dir(follow_symlinks=False))
            self.entries[node, entry.name] = child
            if self.is_directory[child]:
                self._take(child, entry.path)
            else:
                with open(entry.path, "rb") as file:
                    self.contents[child] = file.read()

    def add_node(self, path: str, *, is_directory: bool) -> int:
        """Number a file or directory that exists by now."""
        self.is_directory.append(is_directory)
        node = len(self.is_directory) - 1
        self.inodes[os.lstat(path).st_ino] = node
        return node

    def take_times(self, root: str) -> None:
        """Note the times of the files that are there by now."""
        for here, _, names in os.walk(root):
            for name in names:
                status = os.lstat(os.path.join(here, name))
                if status.st_ino in self.inodes:
                    self.times[self.inodes[status.st_ino]] = status.st_mtime_ns

    def names(self) -> dict[tuple[int, str], int]:
        """Return (directory, name) -> node after everything that was done."""
        found = dict(self.entries)
        for op in self.ops:
            if isinstance(op, Entries):
                apply(op, found)
        return found


def apply(op: Entries, names: dict[tuple[int, str], int]) -> None:
    """Carry out changes of names."""
    for directory, name, node in op.changes:
        if node is None:
            names.pop((directory, name), None)
        else:
            names[directory, name] = node
