"""The kinds of place that the contract's tests run over. Another kind is another row of `KINDS`."""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from shardkit.errors import UsageError
from shardkit.files import storage
from shardkit.files.place.contract import Place
from shardkit.files.place.disk import DiskPlace
from shardkit.files.place.store import PartsInStore, RunInStore, StoredOutput
from shardkit.files.remote.writers import writer_of
from shardkit.files.shared import SharedStaging
from shardkit.files.staging import identity_of, nothing
from tests.files.place.sqlite import Database, Entries, SqlitePlace

FILES = (("a.bin", 3), ("b.bin", 5), ("c.bin", 0))
"""Name and size of each file of a plan."""
CONTENT = {"a.bin": b"aaa", "b.bin": b"bbbbb", "c.bin": b""}
MARKER = ".metadata"
"""Makes an output of the files. In a store it names their folder."""


class Kind(ABC):
    """A destination of one kind, which no other test uses.

    Args:
        home: an empty directory.
        root: of the store.
    """

    @abstractmethod
    def __init__(self, home: Path, root: str) -> None: ...

    @abstractmethod
    def place(self, plan: str = "0" * 16, *, overwrite: bool = False) -> Place:
        """Return the place of a plan, as a process sees it that begins now. Two of one plan are twins."""

    @abstractmethod
    def output(self) -> dict[str, bytes] | None:
        """Return what readers see, without the marker; None if there is no output."""

    @abstractmethod
    def put(self, content: bytes) -> None:
        """Let somebody else put an output there, whose marker has this content."""

    @abstractmethod
    def beside(self) -> list[str]:
        """Return the names of what lies there besides an output."""

    def lose(self, place: Place, name: str) -> None:
        """Let a published file be gone."""
        storage.unlink(os.path.join(place.data, name))


class Disk(Kind):
    """A directory; parts share it."""

    is_run = False

    def __init__(self, home: Path, root: str) -> None:
        self._path = home / "out"

    def place(self, plan: str = "0" * 16, *, overwrite: bool = False) -> Place:
        path = str(self._path)

        def check() -> None:
            if not overwrite and storage.lexists(path):
                raise UsageError(f"{path} exists")

        return DiskPlace(
            SharedStaging.of_plan(path, plan, nothing, is_run=self.is_run),
            FILES,
            linked={name for name, size in FILES if size},
            markers=(MARKER,),
            before=identity_of(path),
            overwrite=overwrite,
            check_replaceable=check,
            look=lambda _: None,
        )

    def output(self) -> dict[str, bytes] | None:
        if not self._path.exists():
            return None
        return {path.name: path.read_bytes() for path in self._path.iterdir() if path.name != MARKER}

    def put(self, content: bytes) -> None:
        self._path.mkdir()
        (self._path / MARKER).write_bytes(content)

    def beside(self) -> list[str]:
        return [path.name for path in self._path.parent.iterdir() if path.name != "out"]


class DiskOfOne(Disk):
    """A directory; processes that were started alike share it."""

    is_run = True


class Store(Kind):
    """A place in a store; parts share it."""

    def __init__(self, home: Path, root: str) -> None:
        self._home, self._path = home, f"{root}/{home.name}/out"
        self._store = writer_of(self._path)

    def _output(self, plan: str, overwrite: bool) -> StoredOutput:
        there = self._store.head(f"{self._path}/{MARKER}")
        etag = None if there is None else there.etag
        return StoredOutput(path=self._path, marker=MARKER, etag=etag, plan=plan, overwrites=overwrite)

    def place(self, plan: str = "0" * 16, *, overwrite: bool = False) -> Place:
        return PartsInStore(self._output(plan, overwrite), plan, FILES, replaces_any=overwrite)

    def output(self) -> dict[str, bytes] | None:
        found = self._store.get(f"{self._path}/{MARKER}")
        if found is None:
            return None
        folder = f"{self._path}/{found[0].decode()}"
        contents = {path: self._store.get(path) for path, _ in self._store.objects(folder)}
        return {os.path.basename(path): got[0] for path, got in contents.items() if got is not None}

    def put(self, content: bytes) -> None:
        self._store.put(f"{self._path}/{MARKER}", content, zlib.crc32(content))

    def beside(self) -> list[str]:
        marker = self._store.get(f"{self._path}/{MARKER}")
        named = b"" if marker is None else marker[0]
        tops = {
            path.removeprefix(f"{self._path}/").partition("/")[0]
            for path, _ in self._store.objects(self._path)
        }
        return sorted(top for top in tops - {MARKER} if top.encode() != named)


class StoreOfOne(Store):
    """A place in a store; processes of one machine that were started alike share it."""

    def place(self, plan: str = "0" * 16, *, overwrite: bool = False) -> Place:
        notebook = SharedStaging.of_plan(str(self._home / "here"), plan, nothing, is_run=True)
        return RunInStore(self._output(plan, overwrite), notebook, FILES)

    def beside(self) -> list[str]:
        return [*super().beside(), *(path.name for path in self._home.glob(".here*"))]


class Sqlite(Kind):
    """A file of SQLite; parts share it."""

    def __init__(self, home: Path, root: str) -> None:
        self._db = Database(str(home / "out"))

    def place(self, plan: str = "0" * 16, *, overwrite: bool = False) -> Place:
        return SqlitePlace(self._db, plan, FILES, overwrite=overwrite)

    def output(self) -> dict[str, bytes] | None:
        for plan, _ in self._db.output():
            return {
                name: data for name, data in Entries(self._db, plan).all("file").items() if name != MARKER
            }
        return None

    def put(self, content: bytes) -> None:
        Entries(self._db, "mine").put("file", MARKER, content)
        Entries(self._db, "").put("output", 0, "mine")

    def beside(self) -> list[str]:
        with self._db() as do:
            return [row[0] for row in do("SELECT kind FROM entry WHERE kind NOT IN ('file', 'output')", [])]

    def lose(self, place: Place, name: str) -> None:
        Entries(self._db, "0" * 16).drop("file", [name])


KINDS: Sequence[Callable[[Path, str], Kind]] = (Disk, DiskOfOne, Store, StoreOfOne, Sqlite)
