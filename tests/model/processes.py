"""Processes that stop before each call of `shardkit.files.storage`, and stand-ins for these calls.

A command is deterministic: what it does next follows from the answers that its calls have had so far. So a process is a
place in a tree of answers (`Node`), without a thread or a stack. Where the tree ends, the command runs again from its
beginning, with the answers that it has had. Processes can be copied, killed and continued at will, and what a command does
after the same answers is computed once for all schedules.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from shardkit.errors import ShardkitError
from shardkit.files import storage
from shardkit.files.output import local
from tests.model.filesystem import NONE, Descriptor, FileSystem, Inode, Status

CHANGES = frozenset(
    {"mkdir", "create", "write", "rename", "exchange", "link", "unlink", "unlink_in", "rmdir", "rmdir_in"}
)
"""Calls that change names or contents."""
SYNCS = frozenset({"fsync", "fsync_inode"})
_PATHS_FIRST = frozenset(
    {"mkdir", "create", "read", "unlink", "rmdir", "listdir", "lstat", "fsync", "open_directory"}
)

Call = tuple[Any, ...]
"""The name of a method of FileSystem, or "sleep", and its arguments."""
Command = Callable[[], str]
"""A command line. Returns what it prints; what it raises is its error."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer of a call that fails."""

    number: int
    path: str = ""


INTERRUPT = "Ctrl-C"
"""The answer of a call during which Ctrl-C is pressed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command has ended."""

    kind: str
    """"ok", or the class of its error."""
    text: str

    @property
    def is_ok(self) -> bool:
        """True if the exit code is 0."""
        return self.kind == "ok"


class _Paused(BaseException):
    """The command has come to a call that has no answer yet."""


class Node:
    """A command after some answers: its next call, or its outcome."""

    __slots__ = ("answer", "answers", "call", "depth", "outcome", "parent")

    def __init__(self, parent: Node | None, answer: Hashable) -> None:
        self.parent, self.answer = parent, answer
        self.depth: int = parent.depth + 1 if parent else 0
        self.call: Call = ()
        self.outcome: Outcome | None = None
        self.answers = dict[Hashable, Node]()


class Program:
    """A command as a process of this name would run it.

    Args:
        command: what it runs.
        name: of the process; no two that run at once have the same.
        host: its host.
    """

    def __init__(self, command: Command, name: str, host: str) -> None:
        self.command, self.name, self.host = command, name, host
        self._root: Node | None = None

    def start(self, filesystem: FileSystem) -> Node:
        """Return where the command is before its first call."""
        if self._root is None:
            self._root = self._run(Node(None, None), filesystem)
        return self._root

    def after(self, node: Node, answer: Hashable, filesystem: FileSystem) -> Node:
        """Return where the command is after the call of `node` was answered.

        Args:
            node: where it was.
            answer: of the call.
            filesystem: as it is now. A command that runs anyway runs on, on a copy of it, for what is likely to be needed.
        """
        following = node.answers.get(answer)
        if following is None:
            following = node.answers[answer] = self._run(Node(node, answer), filesystem)
        return following

    def execute(self, node: Node, filesystem: FileSystem) -> Hashable:
        """Make the next call, and return its answer."""
        operation, *arguments = node.call
        if operation == "sleep":
            return None
        if operation in ("mkdir", "create"):
            arguments.append((self.name, node.depth))
        try:
            answer: Hashable = getattr(filesystem, operation)(*arguments)
        except OSError as error:
            return Failure(error.errno or 0, str(error.filename))
        return answer

    def _run(self, new: Node, filesystem: FileSystem) -> Node:
        """Run the command up to a new node, and beyond."""
        answered, node = list[tuple[Call, Hashable]](), new
        while node.parent is not None:
            answered.append((node.parent.call, node.answer))
            node = node.parent
        copy = filesystem.clone()
        copy.is_tracked = False
        _replay.start(self, answered[::-1], new, copy)
        try:
            outcome = Outcome("ok", self.command())
        except _Paused:
            return new
        except (ShardkitError, OSError, KeyboardInterrupt) as error:
            text = " ".join([getattr(error, "message", str(error)), *getattr(error, "problems", ())])
            outcome = Outcome(type(error).__name__, text)
        assert not _replay.is_paused
        _replay.tip.outcome = outcome
        return new


class _Replay:
    """The one command that runs. Its calls have the answers of its past; then those of a file system of its own."""

    program: Program
    tip: Node
    """Where it is, beyond its past."""

    def start(
        self, program: Program, answered: list[tuple[Call, Hashable]], tip: Node, filesystem: FileSystem
    ) -> None:
        self.program, self._answered, self.position = program, answered, 0
        self.tip, self._filesystem, self.is_paused = tip, filesystem, False
        self.open_files = dict[int, Inode]()
        self.num_ids = 0

    def call(self, *call: Any) -> Any:
        if self.is_paused:  # calls on the way out
            raise _Paused
        if self.position < len(self._answered):
            recorded, answer = self._answered[self.position]
            assert recorded == call, f"not deterministic: {recorded}, then {call}"
        else:
            answer = self._continue(call)
        self.position += 1
        if isinstance(answer, Failure):
            raise OSError(answer.number, os.strerror(answer.number), answer.path)
        if answer == INTERRUPT:
            raise KeyboardInterrupt
        return answer

    def _continue(self, call: Call) -> Hashable:
        self.tip.call = call
        if call[0] == "sleep" or waits(call, self._filesystem) or self.tip.depth > _MOST_CALLS_AHEAD:
            self.is_paused = True
            raise _Paused
        answer = self.program.execute(self.tip, self._filesystem)
        following = Node(self.tip, answer)
        self.tip.answers[answer] = following
        self.tip = following
        return answer

    def descriptor(self, number: int) -> Descriptor:
        return Descriptor(self.program.host, self.program.name, number)

    def new_id(self) -> str:
        self.num_ids += 1
        return f"{self.program.host}-{self.program.name}.{self.num_ids}"


_replay = _Replay()
_MOST_CALLS_AHEAD = 1000


def waits(call: Call, filesystem: FileSystem) -> bool:
    """True if a call is one for a lock that another process has, and waits for it."""
    return (
        call[0] == "flock"
        and call[3]
        and filesystem.features.locks != NONE
        and filesystem.is_locked(call[1], exclusive=call[2])
    )


class _Storage:
    """Stands in front of `shardkit.files.storage`."""

    RENAME_EXCHANGE, WAYS_OUT = storage.RENAME_EXCHANGE, storage.WAYS_OUT

    def mkdir(self, path: str) -> None:
        _replay.call("mkdir", path)

    def rename(self, source: str, target: str) -> None:
        _replay.call("rename", source, target)

    def hard_link(self, source: str, target: str) -> None:
        _replay.call("link", source, target)

    def renameat2(self, source: str, target: str, flags: int) -> bool:
        assert flags == storage.RENAME_EXCHANGE
        return bool(_replay.call("exchange", source, target))

    def unlink(self, path: str) -> None:
        _replay.call("unlink", path)

    def listdir(self, path: str) -> list[str]:
        return list(_replay.call("listdir", path))

    def lstat(self, path: str) -> Status:
        status: Status = _replay.call("lstat", path)
        return status

    def fstat(self, fd: int) -> Status:
        if fd not in _replay.open_files:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return Status(0, 0, _replay.open_files[fd])

    def open_fd(self, path: str, flags: int) -> int:
        number = 3 + _replay.position
        is_directory = bool(flags & os.O_DIRECTORY)
        assert not flags & os.O_CREAT or path.endswith("/lock")  # which is there in all scenarios
        _replay.open_files[number] = _replay.call("open", _replay.descriptor(number), path, is_directory)
        return number

    def close_fd(self, fd: int) -> None:
        _replay.open_files.pop(fd, None)
        _replay.call("close", _replay.descriptor(fd))

    def flock(self, fd: int, *, exclusive: bool, wait: bool) -> bool:
        return bool(_replay.call("flock", _replay.descriptor(fd), exclusive, wait))

    def read_file(self, path: str) -> bytes:
        return bytes(_replay.call("read", path))

    def write_file(self, path: str, data: bytes, *, is_synced: bool = True) -> None:
        inode = _replay.call("create", path)
        _replay.call("write", inode, data)
        if is_synced:
            _replay.call("fsync_inode", inode)

    def sync_file(self, path: str) -> None:
        _replay.call("fsync", path)

    def sync_directory(self, path: str) -> None:
        _replay.call("fsync", path)

    def sync_directories(self, path: str) -> None:
        for name, _, is_directory in _replay.call("entries", _replay.call("open_directory", path)):
            if is_directory:
                self.sync_directories(f"{path}/{name}")
        self.sync_directory(path)

    def remove_tree(self, path: str) -> bool:
        with contextlib.suppress(OSError):
            self._remove_in(_replay.call("open_directory", path))
            _replay.call("rmdir", path)
        return True

    def _remove_in(self, inode: Inode) -> None:
        """Remove what is in an open directory: a directory that is renamed meanwhile is emptied all the same."""
        for name, entry, is_directory in _replay.call("entries", inode):
            if is_directory:
                self._remove_in(entry)
            with contextlib.suppress(OSError):
                _replay.call("rmdir_in" if is_directory else "unlink_in", inode, name)


STORAGE = _Storage()


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Let `files/output/local` call the model in place of the system."""
    init = ShardkitError.__init__
    with contextlib.ExitStack() as stack:
        for name, stand_in in {
            "storage": STORAGE,
            "time": SimpleNamespace(sleep=lambda seconds: _replay.call("sleep")),
            "random": SimpleNamespace(uniform=lambda low, high: low),
            "_new_id": _replay.new_id,
            "_host": lambda: _replay.program.host,
        }.items():
            stack.enter_context(mock.patch.object(local, name, stand_in))
        # Tests collect every error that is made; here there are too many.
        stack.enter_context(mock.patch.object(ShardkitError, "__init__", getattr(init, "__wrapped__", init)))
        yield


@dataclass(slots=True)
class Process:
    """A process in one state of the model."""

    name: str
    program: Program
    node: Node
    number: int
    """Of its command in the scenario."""
    is_killed: bool = False
    is_faulty: bool = False
    """A call of it was made to fail, or interrupted."""
    others_moved: bool = True
    """Another process has made a call since this one began to sleep."""
    has_finished_files: bool = False
    """A note of it has a name."""
    num_leaks: int = 0
    """Files that it had open when it ended."""

    @property
    def outcome(self) -> Outcome | None:
        """How it has ended; None while it runs, and if it was killed."""
        return self.node.outcome

    @property
    def is_running(self) -> bool:
        return not self.is_killed and self.node.outcome is None

    @property
    def call(self) -> Call:
        """Its next call."""
        return self.node.call

    @property
    def is_private(self) -> bool:
        """True if the next call is in a directory that no other process looks into."""
        operation, *arguments = self.call
        if operation in ("write", "fsync_inode", "entries", "unlink_in", "rmdir_in"):
            return True
        mine = f"{self.program.host}-{self.name}."
        paths = arguments[:1] if operation in _PATHS_FIRST else arguments[:2]
        return operation in (*_PATHS_FIRST, "rename", "link") and all(
            f"/tmp/{mine}" in path or "/" in path.partition(f"-new-{mine}")[2] or f"-trash-{mine}" in path
            for path in paths
        )

    def copy(self) -> Process:
        return replace(self)


@dataclass(slots=True)
class World:
    """Processes on one file system."""

    filesystem: FileSystem
    processes: list[Process] = field(default_factory=list)
    last: int = -1
    """The process that made the last call."""
    num_preemptions: int = 0
    num_kills: int = 0
    num_faults: int = 0

    def copy(self) -> World:
        return World(
            self.filesystem.clone(),
            [process.copy() for process in self.processes],
            self.last,
            self.num_preemptions,
            self.num_kills,
            self.num_faults,
        )

    def able(self) -> list[int]:
        """Return the numbers of the processes whose next call can be made: they wait for no lock, nor sleep."""
        able, asleep = list[int](), list[int]()
        for number, process in enumerate(self.processes):
            if process.is_running:
                operation = process.call[0]
                if operation == "sleep" and not process.others_moved:
                    asleep.append(number)
                elif not waits(process.call, self.filesystem):
                    able.append(number)
        return able or asleep  # where nobody else can continue, time passes

    def step(self, number: int) -> None:
        """Make the next call of a process."""
        process = self.processes[number]
        operation, *paths = process.call
        if operation == "rename" and paths[1].endswith(".json"):
            process.has_finished_files = True
        self._answer(number, process.program.execute(process.node, self.filesystem))

    def fail(self, number: int, error_number: int) -> None:
        """Let the next call of a process fail."""
        process = self.processes[number]
        if process.call[0] == "close":
            process.program.execute(process.node, self.filesystem)
        process.is_faulty = True
        self.num_faults += 1
        self._answer(number, Failure(error_number))

    def interrupt(self, number: int, *, after: bool) -> None:
        """Press Ctrl-C before or after the next call of a process."""
        process = self.processes[number]
        if after or process.call[0] == "close":
            process.program.execute(process.node, self.filesystem)
        process.is_faulty = True
        self.num_faults += 1
        self._answer(number, INTERRUPT)

    def kill(self, number: int) -> None:
        """Kill a process."""
        process = self.processes[number]
        process.is_killed = True
        self.filesystem.close_all(process.name)
        self.num_kills += 1
        if self.last == number:
            self.last = -1

    def key(self) -> Hashable:
        """Return what the future depends on, except for what is on the disk."""
        processes = tuple(
            (process.number, process.node.outcome, process.is_killed)
            if not process.is_running
            else (id(process.node), process.others_moved or process.call[0] != "sleep", process.is_faulty)
            for process in self.processes
        )
        return (self.filesystem.visible, processes, self.num_kills, self.num_faults)

    def _answer(self, number: int, answer: Hashable) -> None:
        process = self.processes[number]
        process.node = process.program.after(process.node, answer, self.filesystem)
        process.others_moved = False
        for other in self.processes:
            if other is not process:
                other.others_moved = True
        if process.outcome is not None:
            process.num_leaks = self.filesystem.close_all(process.name)
        self.last = number
