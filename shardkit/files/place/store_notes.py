"""What several processes share that write one output into a store; what `files/shared` is on a disk.

    OUT/.shardkit-parts-<hash>/    the same for all who carry out one plan
        plan.json                  what they agree on; whoever is first writes it
        done/                      a note for each finished file, by its number in the plan
        parts/                     who began and who ended, for people

No reader looks into this folder. Nothing is locked: an object appears whole, whoever writes a file of a name writes the
same bytes, and a note counts only while the store has the object that it tells of. Without `plan.json` all is over. So
that is removed first, and whoever has written a note looks once more whether it is there: nothing is left behind.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from shardkit.core.text import escape
from shardkit.core.threads import at_once
from shardkit.errors import SourceError
from shardkit.files.digest import crc32
from shardkit.files.place.contract import Notebook
from shardkit.files.remote.writers import writer_of
from shardkit.files.shared import note_name
from shardkit.files.staging import Owner

_HASH_DIGITS = 16
_PREFIX = ".shardkit-parts-"
_NAME = re.compile(re.escape(_PREFIX) + rf"[0-9a-f]{{{_HASH_DIGITS}}}", re.ASCII)


def is_shared_folder(name: str) -> bool:
    """True for the name of a folder that parts share."""
    return _NAME.fullmatch(name) is not None


class StoredStaging(Notebook):
    """What the parts of one plan share in a store.

    Args:
        destination: such as `s3://BUCKET/KEY`, without a "/" at its end.
        path: where it lies, or will lie.
    """

    def __init__(self, destination: str, path: str) -> None:
        self.destination, self.path = destination, path
        self._store = writer_of(destination)
        self.record = os.path.join(path, "plan.json")
        self.parts, self._done = os.path.join(path, "parts"), StoredNotes(os.path.join(path, "done"))

    @classmethod
    def of_plan(cls, destination: str, plan_hash: str) -> StoredStaging:
        """Return the one of a plan, whether it exists or not."""
        return cls(destination, os.path.join(destination, _PREFIX + plan_hash[:_HASH_DIGITS]))

    @property
    def done(self) -> StoredNotes:
        return self._done

    @property
    def exists(self) -> bool:
        return next(iter(self._store.objects(self.path)), None) is not None

    @property
    def is_open(self) -> bool:
        return self._store.head(self.record) is not None

    def create(self, record: bytes, folders: Collection[str] = (), owner: Owner | None = None) -> bool:
        return self._store.create(self.record, record, int(crc32(record)))

    def read_record(self) -> bytes:
        found = self._store.get(self.record)
        if found is None:
            raise SourceError(f"{escape(self.record)}: no such object")
        return found[0]

    def write_note(self, directory: str, name: str, content: bytes) -> None:
        """Write the note of a file, or something for people to see.

        Args:
            directory: `done.path` or `parts`.
            name: of the note.
            content: all of it.

        Raises:
            FileNotFoundError: all is over.
        """
        path = os.path.join(directory, name)
        self._store.put(path, content, int(crc32(content)))
        self._check_open(path)

    def told(self) -> Iterator[tuple[str, bytes]]:
        paths = [path for path, _ in self._store.objects(self.parts)]
        for path, found in zip(paths, at_once(self._store.get, paths), strict=True):
            if found is not None:
                yield os.path.basename(path), found[0]

    def _check_open(self, path: str) -> None:
        """Take back what was just written, if all is over: whoever removed the rest may not have seen it.

        Raises:
            FileNotFoundError: all is over.
        """
        if not self.is_open:
            self._store.delete(path)
            raise FileNotFoundError(f"{self.record} is gone")

    def close(self) -> None:
        """Remove `plan.json`: parts that are still at work end."""
        self._store.delete(self.record)

    def remove(self, *, only_closed: bool = False) -> None:
        if only_closed and self.is_open:
            return
        self.close()
        at_once(self._store.delete, [path for path, _ in self._store.objects(self.path)])


class StoredNotes:
    """Notes of files, as objects; what `SharedNotes` are on a disk.

    Args:
        path: of the folder.
    """

    def __init__(self, path: str) -> None:
        self.path, self._store = path, writer_of(path)

    def missing(self, count: int) -> list[int]:
        """Return the numbers without a note, of so many."""
        names = {os.path.basename(path) for path, _ in self._store.objects(self.path)}
        return [number for number in range(count) if note_name(number) not in names]

    def notes(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return the notes that there are of these numbers; several are asked for at a time."""
        found = at_once(self._store.get, map(self._note, numbers))
        return {number: note[0] for number, note in zip(numbers, found, strict=True) if note is not None}

    def forget(self, numbers: Iterable[int]) -> None:
        """Remove the notes of these numbers, if there are some."""
        at_once(self._store.delete, map(self._note, numbers))

    def _note(self, number: int) -> str:
        return os.path.join(self.path, note_name(number))


def shared_in_store(destination: str) -> list[StoredStaging]:
    """Return the directories that parts share below a destination, whatever their plans."""
    paths = (path for path, _ in writer_of(destination).objects(destination))
    names = {path.removeprefix(destination + "/").partition("/")[0] for path in paths}
    return [
        StoredStaging(destination, os.path.join(destination, name))
        for name in sorted(filter(is_shared_folder, names))
    ]
