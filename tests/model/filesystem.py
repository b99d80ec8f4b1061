"""A file system in memory, with what a power failure may leave of it.

Names and inodes are POSIX. A rename, an exchange and a link are one change each, as in the journals of ext4, XFS and
Btrfs. The sync of a directory makes all changes of its names durable, and those that they follow upon. A power failure
keeps any subset of the other changes that keeps the order of the changes of one name. The content of a file that was not
synced is, after a power failure, what was synced last, or nothing, or all of it.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

Inode = tuple[str, int]
"""The process that made it, and the number of the call."""
Names = dict[str, Inode]
Change = tuple[tuple[Inode, str, Inode | None], ...]
"""(directory, name, what the name stands for afterwards), of one or two names."""
Tree = dict[str, Any]
"""Name -> content of a file, or the tree of a directory."""

ROOT: Inode = ("", 0)
SHARED, PER_HOST, NONE = "shared", "per host", "none"
_MOST_ALL_SUBSETS = 9
"""So many changes may be lost in every combination; of more, only some combinations are tried."""


class Descriptor(NamedTuple):
    """An open file of a process."""

    host: str
    process: str
    number: int


class Status(NamedTuple):
    """What `lstat` returns, as far as it is used."""

    st_mode: int
    st_size: int
    st_ino: Inode
    st_dev: int = 0
    st_uid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a file system can do."""

    has_exchange: bool = True
    has_links: bool = True
    locks: str = SHARED
    """Between which processes flock works: SHARED all, PER_HOST those of one host, NONE."""
    is_stale: bool = False
    """A path below a directory that is gone fails with ESTALE, as over NFS."""


class FileSystem:
    """Directories, files, locks, and what of them is on the disk.

    The methods that are named after a system call raise its OSError. `made` is the inode of what they make.
    """

    def __init__(self, features: Features) -> None:
        self.features = features
        self.is_tracked = True
        """Whether a power failure can be simulated; otherwise what is on the disk is not recorded."""
        self.directories: dict[Inode, Names] = {ROOT: {}}  # the inner dicts are never changed, but replaced
        self.contents: dict[Inode, bytes] = {}
        self.disk_directories: dict[Inode, Names] = {ROOT: {}}
        self.disk_contents: dict[Inode, bytes] = {}
        self.pending: list[Change] = []
        self.descriptors: dict[Descriptor, Inode] = {}
        self.locks: dict[Inode, dict[Descriptor, bool]] = {}  # True: exclusive
        self.num_links: dict[Inode, int] = {}
        self.visible = 0
        """A hash of all names and contents."""

    def clone(self) -> FileSystem:
        """Return an independent copy."""
        copy = FileSystem.__new__(FileSystem)
        copy.__dict__.update(self.__dict__)
        copy.directories, copy.contents = dict(self.directories), dict(self.contents)
        copy.descriptors, copy.num_links = dict(self.descriptors), dict(self.num_links)
        copy.locks = {inode: dict(locks) for inode, locks in self.locks.items() if locks}
        if self.is_tracked:
            copy.disk_directories, copy.disk_contents = dict(self.disk_directories), dict(self.disk_contents)
            copy.pending = list(self.pending)
        return copy

    # Names

    def mkdir(self, path: str, made: Inode) -> None:
        parent, name = self._parent(path)
        if name in self.directories[parent]:
            self._fail(errno.EEXIST, path)
        self.directories[made] = {}
        self.disk_directories[made] = {}
        self._change((parent, name, made))

    def create(self, path: str, made: Inode) -> Inode:
        """Open a file to write it from its beginning."""
        parent, name = self._parent(path)
        inode = self.directories[parent].get(name)
        if inode is None:
            self.contents[made] = self.disk_contents[made] = b""
            self._change((parent, name, made))
            return made
        if inode in self.directories:
            self._fail(errno.EISDIR, path)
        self.write(inode, b"")
        return inode

    def write(self, inode: Inode, content: bytes) -> None:
        if self.num_links.get(inode):
            self.visible ^= hash((inode, self.contents[inode])) ^ hash((inode, content))
        self.contents[inode] = content

    def read(self, path: str) -> bytes:
        inode = self._resolve(path)
        if inode in self.directories:
            self._fail(errno.EISDIR, path)
        return self.contents[inode]

    def unlink(self, path: str) -> None:
        self.unlink_in(*self._parent(path))

    def rmdir(self, path: str) -> None:
        self.rmdir_in(*self._parent(path))

    def unlink_in(self, parent: Inode, name: str) -> None:
        """As `unlink` below an open directory."""
        if self._entry(parent, name) in self.directories:
            self._fail(errno.EISDIR, name)
        self._change((parent, name, None))

    def rmdir_in(self, parent: Inode, name: str) -> None:
        """As `rmdir` below an open directory."""
        inode = self._entry(parent, name)
        if inode not in self.directories:
            self._fail(errno.ENOTDIR, name)
        if self.directories[inode]:
            self._fail(errno.ENOTEMPTY, name)
        self._change((parent, name, None))

    def open_directory(self, path: str) -> Inode:
        inode = self._resolve(path)
        if inode not in self.directories:
            self._fail(errno.ENOTDIR, path)
        return inode

    def entries(self, inode: Inode) -> tuple[tuple[str, Inode, bool], ...]:
        """Return (name, inode, whether it is a directory) of all names in an open directory."""
        names = self.directories[inode]
        return tuple((name, names[name], names[name] in self.directories) for name in sorted(names))

    def listdir(self, path: str) -> tuple[str, ...]:
        return tuple(sorted(self.directories[self.open_directory(path)]))

    def lstat(self, path: str) -> Status:
        inode = self._resolve(path)
        if inode in self.directories:
            return Status(stat.S_IFDIR | 0o755, 0, inode)
        return Status(stat.S_IFREG | 0o644, len(self.contents[inode]), inode)

    def link(self, source: str, target: str) -> None:
        if not self.features.has_links:
            self._fail(errno.EPERM, source)
        inode = self._resolve(source)
        parent, name = self._parent(target)
        if name in self.directories[parent]:
            self._fail(errno.EEXIST, target)
        self._change((parent, name, inode))

    def rename(self, source: str, target: str) -> None:
        inode = self._resolve(source)
        source_parent, source_name = self._parent(source)
        parent, name = self._parent(target)
        replaced = self.directories[parent].get(name)
        if replaced == inode:
            return
        if replaced is not None and inode in self.directories:
            if replaced not in self.directories:
                self._fail(errno.ENOTDIR, target)
            if self.directories[replaced]:
                self._fail(errno.ENOTEMPTY, target)
        elif replaced in self.directories:
            self._fail(errno.EISDIR, target)
        self._change((source_parent, source_name, None), (parent, name, inode))

    def exchange(self, source: str, target: str) -> bool:
        """As `storage.renameat2` with RENAME_EXCHANGE."""
        if not self.features.has_exchange:
            return False
        one, two = self._resolve(source), self._resolve(target)
        self._change((*self._parent(source), two), (*self._parent(target), one))
        return True

    # Descriptors and locks

    def open(self, descriptor: Descriptor, path: str, is_directory: bool) -> Inode:
        inode = self._resolve(path)
        if (inode in self.directories) != is_directory:
            self._fail(errno.ENOTDIR if is_directory else errno.EISDIR, path)
        self.descriptors[descriptor] = inode
        return inode

    def close(self, descriptor: Descriptor) -> None:
        if descriptor not in self.descriptors:
            self._fail(errno.EBADF)
        inode = self.descriptors.pop(descriptor)
        self.locks.get(inode, {}).pop(descriptor, None)

    def close_all(self, process: str) -> int:
        """Close what a process that has ended had open, and return the number of these files."""
        still_open = [each for each in self.descriptors if each.process == process]
        for descriptor in still_open:
            self.close(descriptor)
        return len(still_open)

    def is_locked(self, descriptor: Descriptor, *, exclusive: bool) -> bool:
        """True if another descriptor has a lock that excludes this one."""
        is_shared = self.features.locks == SHARED
        return any(
            holder != descriptor
            and (is_shared or holder.host == descriptor.host)
            and (exclusive or is_exclusive)
            for holder, is_exclusive in self.locks.get(self.descriptors[descriptor], {}).items()
        )

    def flock(self, descriptor: Descriptor, exclusive: bool, wait: bool) -> bool:
        """As `storage.flock`. A process that waits is not called before it can have the lock."""
        if self.features.locks == NONE:
            self._fail(errno.ENOLCK)
        locks = self.locks.setdefault(self.descriptors[descriptor], {})
        locks.pop(descriptor, None)  # a conversion that fails has lost the lock
        if self.is_locked(descriptor, exclusive=exclusive):
            assert not wait
            return False
        locks[descriptor] = exclusive
        return True

    # The disk

    def fsync(self, path: str) -> None:
        self.fsync_inode(self._resolve(path))

    def fsync_inode(self, inode: Inode) -> None:
        if not self.is_tracked:
            return
        if inode in self.contents:
            self.disk_contents[inode] = self.contents[inode]
            return
        slots = set[tuple[Inode, str]]()
        for change in reversed(self.pending):
            changed = {(parent, name) for parent, name, _ in change}
            if changed & slots or any(parent == inode for parent, _ in changed):
                slots |= changed
        is_kept = [bool({(parent, name) for parent, name, _ in change} & slots) for change in self.pending]
        self._make_durable([change for change, kept in zip(self.pending, is_kept, strict=True) if kept])
        self.pending = [change for change, kept in zip(self.pending, is_kept, strict=True) if not kept]

    def settle(self) -> None:
        """Make all durable."""
        self._make_durable(self.pending)
        self.pending, self.disk_contents = [], dict(self.contents)

    def power_failures(self, most: int, rng: random.Random) -> Iterator[FileSystem]:
        """Yield what may be there after a power failure now: all that is possible, or `most` draws of it."""
        for kept in self._subsets(most, rng):
            after = self.clone()
            after._make_durable([self.pending[number] for number in sorted(kept)])
            dirty = [
                inode for inode, content in self.contents.items() if self.disk_contents[inode] != content
            ]
            for content in ("synced", "nothing", "all") if dirty else ("synced",):
                yield after._restarted(dirty, content)

    def _restarted(self, dirty: list[Inode], content: str) -> FileSystem:
        new = self.clone()
        new.directories, new.contents = dict(self.disk_directories), dict(self.disk_contents)
        for inode in dirty if content != "synced" else ():
            new.contents[inode] = self.contents[inode] if content == "all" else b""
        new.disk_contents = dict(new.contents)
        new.pending, new.descriptors, new.locks, new.num_links, new.visible = [], {}, {}, {}, 0
        for parent, names in new.directories.items():
            for name, inode in names.items():
                new._count(parent, name, inode, 1)
        return new

    def _subsets(self, most: int, rng: random.Random) -> list[frozenset[int]]:
        """Return which pending changes are kept, by number: with each all that it follows upon."""
        slots = [{(parent, name) for parent, name, _ in change} for change in self.pending]
        before = [[j for j in range(i) if slots[i] & slots[j]] for i in range(len(slots))]
        everything = frozenset(range(len(slots)))

        def closure(numbers: list[int]) -> frozenset[int]:
            todo, closed = list(numbers), set[int]()
            while todo:
                number = todo.pop()
                if number not in closed:
                    closed.add(number)
                    todo += before[number]
            return frozenset(closed)

        if len(slots) <= _MOST_ALL_SUBSETS:
            combinations = ([i for i in everything if bits >> i & 1] for bits in range(1 << len(slots)))
            found = {closure(numbers) for numbers in combinations}
        else:
            found = {frozenset[int](), everything}
            for i in everything:
                found.add(closure([i]))
                found.add(frozenset(j for j in everything if i not in closure([j])))
            for _ in range(most):
                share = rng.choice([0.2, 0.5, 0.9])
                found.add(closure([i for i in everything if rng.random() < share]))
        ordered = sorted(found, key=sorted)
        return ordered if len(ordered) <= most else rng.sample(ordered, most)

    def _make_durable(self, changes: list[Change]) -> None:
        for change in changes:
            for parent, name, inode in change:
                self.disk_directories[parent] = _with(self.disk_directories[parent], name, inode)

    # Looking at it

    def look(self, path: str) -> Any:
        """Return a file's content, or the tree of a directory; None if the path does not exist."""
        try:
            return self._tree(self._resolve(path))
        except OSError:
            return None

    def durable_key(self) -> int:
        """Return a hash of all that a power failure may leave."""
        dirty = [inode for inode, content in self.contents.items() if self.disk_contents[inode] != content]
        names = [(parent, *names.items()) for parent, names in self.disk_directories.items() if names]
        return hash((self.visible, tuple(names), tuple(self.pending), tuple(dirty)))

    def _tree(self, inode: Inode) -> Any:
        if inode in self.contents:
            return self.contents[inode]
        return {name: self._tree(entry) for name, entry in self.directories[inode].items()}

    def _resolve(self, path: str) -> Inode:
        inode = ROOT
        for depth, name in enumerate(path.rstrip("/").split("/")[1:]):
            names = self.directories.get(inode)
            if names is None:
                self._fail(errno.ENOTDIR, path)
            found = names.get(name)
            if found is None:
                is_stale = self.features.is_stale and path.count("/") > depth + 1
                self._fail(errno.ESTALE if is_stale else errno.ENOENT, path)
            inode = found
        return inode

    def _parent(self, path: str) -> tuple[Inode, str]:
        directory, _, name = path.rstrip("/").rpartition("/")
        return self.open_directory(directory), name

    def _entry(self, parent: Inode, name: str) -> Inode:
        inode = self.directories[parent].get(name)
        if inode is None:
            self._fail(errno.ENOENT, name)
        return inode

    def _change(self, *change: tuple[Inode, str, Inode | None]) -> None:
        for parent, name, inode in change:
            replaced = self.directories[parent].get(name)
            if replaced is not None:
                self._count(parent, name, replaced, -1)
            self.directories[parent] = _with(self.directories[parent], name, inode)
            if inode is not None:
                self._count(parent, name, inode, 1)
        if self.is_tracked:
            self.pending.append(change)

    def _count(self, parent: Inode, name: str, inode: Inode, difference: int) -> None:
        """Count a name of an inode, and keep the hash up to date."""
        self.visible ^= hash((parent, name, inode))
        links = self.num_links.get(inode, 0)
        self.num_links[inode] = links + difference
        if (links == 0) != (links + difference == 0) and inode in self.contents:
            self.visible ^= hash((inode, self.contents[inode]))

    def _fail(self, number: int, path: str = "") -> NoReturn:
        raise OSError(number, os.strerror(number), path)


def _with(names: Names, name: str, inode: Inode | None) -> Names:
    """Return the names of a directory after a change."""
    changed = dict(names)
    changed.pop(name, None)
    if inode is not None:
        changed[name] = inode
    return changed
