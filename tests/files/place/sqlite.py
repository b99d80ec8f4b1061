"""A third kind of place: an SQLite file has an output's files, the notes, and what parts of the same plan share.

Each call is one transaction, so what the contract asks for (whole, once, durable before a note says so) is SQLite's own.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardkit.errors import IncompleteError, SourceError, UsageError
from shardkit.files import storage
from shardkit.files.place.contract import Beside, Notebook, Place, given_up
from shardkit.files.staging import Owner

TABLE = "CREATE TABLE IF NOT EXISTS entry(plan, kind, key, value, PRIMARY KEY(plan, kind, key))"
ADD, ADD_ONCE = (f"INSERT OR {how} INTO entry VALUES(?,?,?,?)" for how in ("REPLACE", "IGNORE"))
Transaction = Callable[[str, Sequence[object]], list[Any]]


class Database:
    """Transactions on a file.

    Args:
        path: of the file.
        step: called before and after each transaction.
    """

    def __init__(self, path: str, step: Callable[[], object] = lambda: None) -> None:
        self.path, self._step = path, step

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Transaction]:
        self._step()
        connection = sqlite3.connect(self.path, timeout=600, isolation_level=None)
        with contextlib.closing(connection):  # rolls back what has not ended
            connection.execute(TABLE)
            connection.execute("BEGIN IMMEDIATE")
            yield lambda query, values: connection.execute(query, values).fetchall()
            connection.execute("COMMIT")
        self._step()

    def output(self) -> list[tuple[str, int]]:
        """Return the plan whose files the output has, and what tells it from others; nothing if there is none."""
        with self() as do:
            return _output(do)


def _output(do: Transaction) -> list[tuple[str, int]]:
    return do("SELECT value, rowid FROM entry WHERE kind='output'", [])


def _check_open(do: Transaction, plan: str, path: str) -> None:
    if not do("SELECT 1 FROM entry WHERE plan=? AND kind='run'", [plan]):
        raise given_up(path)


class Entries:
    """What belongs to a plan: of each kind, values by key."""

    def __init__(self, db: Database, plan: str) -> None:
        self._db, self._plan = db, plan

    def all(self, kind: str) -> dict[Any, Any]:
        with self._db() as do:
            return dict(do("SELECT key, value FROM entry WHERE plan=? AND kind=?", [self._plan, kind]))

    def put(self, kind: str, key: object, value: object, *, how: str = ADD) -> bool:
        with self._db() as do:
            return bool(do(how + " RETURNING 1", [self._plan, kind, key, value]))

    def drop(self, kind: str, keys: Iterable[object]) -> None:
        with self._db() as do:
            for key in keys:
                do("DELETE FROM entry WHERE plan=? AND kind=? AND key=?", [self._plan, kind, key])


class SqliteNotes(Entries):
    """The `Notes` of a plan's files."""

    kind = "note"
    path = property(lambda self: self._db.path)

    def missing(self, count: int) -> list[int]:
        return sorted({*range(count)} - self.all(self.kind).keys())

    def notes(self, numbers: Sequence[int]) -> dict[int, bytes]:
        return {number: note for number, note in self.all(self.kind).items() if number in numbers}

    def forget(self, numbers: Iterable[int]) -> None:
        self.drop(self.kind, numbers)


class SqliteNotebook(Entries, Notebook):
    """What the processes of a plan share."""

    def __init__(self, db: Database, plan: str) -> None:
        super().__init__(db, plan)
        self.destination = self.path = self.record = db.path

    done = property(lambda self: SqliteNotes(self._db, self._plan))
    exists = is_open = property(lambda self: bool(self.all("run")))

    def create(self, record: bytes, folders: object = (), owner: Owner | None = None) -> bool:
        return self.put("run", 0, record, how=ADD_ONCE)

    def read_record(self) -> bytes:
        if not self.is_open:
            raise SourceError("it is gone")
        return bytes(self.all("run")[0])

    def told(self) -> Iterator[tuple[str, bytes]]:
        return iter(self.all("told").items())

    def remove(self) -> None:
        with self._db() as do:
            kept = "file" if any(plan == self._plan for plan, _ in _output(do)) else ""
            do("DELETE FROM entry WHERE plan=? AND kind<>?", [self._plan, kept])
        for copy in glob.glob(f"{self.path}-{self._plan}-*"):
            os.unlink(copy)


class SqlitePlace(Place):
    """A plan's files, and the output's.

    Args:
        db: the file.
        plan: hash of the plan.
        files: name and size of each file of the plan.
        overwrite: an output that is there may be replaced.
    """

    has_made, notebook = False, None

    def __init__(self, db: Database, plan: str, files: Sequence[tuple[str, int]], *, overwrite: bool) -> None:
        self._db, self._plan, self._files, self._overwrite = db, plan, files, overwrite
        self._before, self.path, self.notebook = db.output(), db.path, SqliteNotebook(db, plan)

    is_committed = property(lambda self: any(plan == self._plan for plan, _ in self._db.output()))

    def another_has_made(self) -> bool:
        return self.is_committed and not self.has_made

    @contextlib.contextmanager
    def workplace(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory() as directory:
            for name, _ in self._files:
                storage.make_folders(directory, os.path.dirname(name))
            yield directory

    def publish(self, directory: str, number: int, note: Mapping[str, Any], **_: object) -> None:
        path = Path(directory, self._files[number][0])
        with self._db() as do:
            _check_open(do, self._plan, self.path)
            do(ADD, [self._plan, "file", self._files[number][0], path.read_bytes()])
            do(ADD, [self._plan, "note", number, json.dumps(note)])
        path.unlink()

    def notes(self, numbers: Sequence[int]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        notes, files = self.notebook.done.notes(numbers), self.notebook.all("file")
        return ((n, json.loads(notes[n])) for n in numbers if n in notes and self._files[n][0] in files)

    def say(self, name: str, content: bytes) -> None:
        self.notebook.put("told", name, content)

    @contextlib.contextmanager
    def describing(self, directory: str) -> Iterator[Beside]:
        for name, data in self.notebook.all("file").items():
            Path(directory, name).write_bytes(data)
        yield Beside(directory, None, {name for name, _ in self._files})

    def commit(self, beside: str) -> bool:
        with self._db() as do:
            _check_open(do, self._plan, self.path)
            output = _output(do)
            if any(plan == self._plan for plan, _ in output):
                return False
            if output != self._before or (output and not self._overwrite):
                raise UsageError(f"{self.path} exists")
            query = "SELECT key, length(value) FROM entry WHERE plan=? AND kind='file'"
            if missing := {*self._files} - {*do(query, [self._plan])}:
                raise IncompleteError(f"{self.path}: {missing} are not there as they were written")
            for path in filter(Path.is_file, Path(beside).rglob("*")):
                do(ADD_ONCE, [self._plan, "file", str(path.relative_to(beside)), path.read_bytes()])
            for plan, _ in output:
                do("DELETE FROM entry WHERE plan=?", [plan])
            do(ADD, ["", "output", 0, self._plan])
        self.has_made = True
        return True
