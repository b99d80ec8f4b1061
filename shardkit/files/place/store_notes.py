"""What several processes share that write one output into a store; what `files/shared` is on a disk.

    OUT/.shardkit-parts-<hash>/    the same for all who carry out one plan
        plan.json                  what they agree on; whoever is first writes it
        done/                      a note for each finished file, by its number in the plan
        factors/                   a record and a note for each weight whose factors are computed, for preshard --osft
        parts/                     who began and who ended, for people

No reader looks into this folder. Nothing is locked: an object appears whole, whoever writes a file of a name writes the
same bytes, and a note counts only while the store has the object that it tells of. Without `plan.json` all is over. So
that is removed first, and whoever has written a note looks once more whether it is there: nothing is left behind.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from shardkit.core.text import escape
from shardkit.core.threads import at_once
from shardkit.errors import IntegrityError, SourceError
from shardkit.files import storage, stores
from shardkit.files.digest import crc32
from shardkit.files.place.contract import Notebook
from shardkit.files.remote.writers import writer_of
from shardkit.files.shared import RecordStat, note_name
from shardkit.files.staging import Owner
from shardkit.files.uploads import NUM_SENDERS, PART_NBYTES, Session

_HASH_DIGITS = 16
_PREFIX = ".shardkit-parts-"
_sending = threading.Lock()
MAX_SENT_NBYTES = (NUM_SENDERS + 2) * PART_NBYTES
"""Memory that a record takes on its way: parts that are sent, the one that is filled, and what is read for it."""
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
        self._factors = StoredRecords(os.path.join(path, "factors"), self._check_open)

    @classmethod
    def of_plan(cls, destination: str, plan_hash: str) -> StoredStaging:
        """Return the one of a plan, whether it exists or not."""
        return cls(destination, os.path.join(destination, _PREFIX + plan_hash[:_HASH_DIGITS]))

    @property
    def done(self) -> StoredNotes:
        return self._done

    @property
    def factors(self) -> StoredRecords:
        return self._factors

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

    def _check_open(self, path: str | None = None) -> None:
        """Take back what was just written, if all is over: whoever removed the rest may not have seen it.

        Raises:
            FileNotFoundError: all is over.
        """
        if not self.is_open:
            if path is not None:
                self._store.delete(path)
            raise FileNotFoundError(f"{self.record} is gone")

    def close(self) -> None:
        """Remove `plan.json`: parts that are still at work end."""
        self._store.delete(self.record)

    def remove(self, *, only_closed: bool = False) -> None:
        if only_closed and self.is_open:
            return
        self.close()  # and uploads of records end
        at_once(lambda each: self._store.abort(each.path, each.upload), self._store.uploads(self.path))
        at_once(self._store.delete, [path for path, _ in self._store.objects(self.path)])


class StoredNotes:
    """Notes of files, or of weights, as objects; what `SharedNotes` are on a disk.

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


class StoredRecords(StoredNotes):
    """Records of factors, and the notes of their weights, as objects; what `SharedRecords` are on a disk.

    Args:
        path: of the folder.
        check_open: raises if all is over, and takes back the object that it is given.
    """

    def __init__(self, path: str, check_open: Callable[[str | None], object]) -> None:
        super().__init__(path)
        self._check_open = check_open
        self.here: dict[str, str] = {}
        """Local paths of records that this process has sent, by name; whoever removes such a file takes it out of here."""

    def found(self, names: Sequence[str]) -> list[RecordStat | None]:
        """Return what the store says of records; None of one that is not there."""
        there = at_once(self._store.head, [os.path.join(self.path, name) for name in names])
        return [None if each is None else RecordStat(each.size, each.crc32) for each in there]

    def paths(self, names: Sequence[str]) -> list[str]:
        """Return where records are read: on this machine those that it has, the others in the store."""
        stores.list_anew(self.path)  # one request, and not some for each record
        return [self.here.get(name, os.path.join(self.path, name)) for name in names]

    def publish(self, path: str, name: str, crc: int) -> None:
        """Send a record; an object that has the name and these bytes stays, as others may read it.

        Args:
            path: of the record on this machine, where it stays.
            name: it tells the bytes.
            crc: CRC-32 of the bytes.

        Raises:
            FileNotFoundError: all is over.
            IntegrityError: the disk of this machine gives other bytes.
            ResourceError: the store fails.
        """
        target = os.path.join(self.path, name)
        there = self._store.head(target)
        if there is None or there.size != storage.getsize(path) or there.crc32 not in (None, crc):
            self._send(path, target, crc)
        self.here[name] = path

    def _send(self, path: str, target: str, crc: int) -> None:
        with _sending:  # one at a time is what memory is reckoned with
            with Session(self.path, before_object=lambda: self._check_open(None)) as session:
                storage.send(path, target)
        if session.stored[target].crc32 != crc:
            self._store.delete(target)
            raise IntegrityError(
                f"{escape(path)}: other bytes were sent than were written: a disk fails",
                hint="run it again with another disk for shardkit's cache",
            )
        self._check_open(target)

    def write_note(self, work: str, number: int, content: bytes) -> bool:
        """Write the note of a weight, unless there is one; return whether it was written.

        Args:
            work: not needed: an object appears whole.
            number: of the weight.
            content: of the note.

        Raises:
            FileNotFoundError: all is over.
        """
        is_first = self._store.create(self._note(number), content, int(crc32(content)))
        self._check_open(self._note(number) if is_first else None)
        return is_first

    def remove(self, names: Iterable[str]) -> None:
        """Remove records from the store, and do not read them on this machine any more."""
        removed = list(names)
        for name in removed:
            self.here.pop(name, None)
        at_once(self._store.delete, [os.path.join(self.path, name) for name in removed])


def shared_in_store(destination: str) -> list[StoredStaging]:
    """Return the directories that parts share below a destination, whatever their plans."""
    paths = (path for path, _ in writer_of(destination).objects(destination))
    names = {path.removeprefix(destination + "/").partition("/")[0] for path in paths}
    return [
        StoredStaging(destination, os.path.join(destination, name))
        for name in sorted(filter(is_shared_folder, names))
    ]
