"""What several processes share that write one output into a store; what `shared` is on a disk.

    OUT/.shardkit-parts-<hash>/    the same for all who carry out one plan
        plan.json                  what they agree on; whoever is first writes it
        done/                      a note for each finished file, by its number in the plan
        parts/                     who began and who ended, for people

The files themselves lie where those of one process would. No reader looks into this folder. Nothing is locked: an object
appears whole, whoever writes a file of a name writes the same bytes, and a note counts only while the store has the object
that it tells of. Without `plan.json` all is over. So that is removed first, and whoever has written a note looks once more
whether it is there: nothing is left behind.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from shardkit.core.text import escape
from shardkit.core.threads import at_once
from shardkit.errors import SourceError
from shardkit.files.digest import crc32
from shardkit.files.remote.writers import writer_of
from shardkit.files.shared import note_name

_HASH_DIGITS = 16
_PREFIX = ".shardkit-parts-"
_NAME = re.compile(re.escape(_PREFIX) + rf"[0-9a-f]{{{_HASH_DIGITS}}}", re.ASCII)


def is_shared_folder(name: str) -> bool:
    """True for the name of a folder that parts share."""
    return _NAME.fullmatch(name) is not None


class StoredStaging:
    """What the parts of one plan share in a store.

    Args:
        destination: such as `s3://BUCKET/KEY`, without a "/" at its end.
        path: where it lies, or will lie.
    """

    def __init__(self, destination: str, path: str) -> None:
        self.destination, self.path = destination, path
        self._store = writer_of(destination)
        self.record = os.path.join(path, "plan.json")
        self._done, self._parts = os.path.join(path, "done"), os.path.join(path, "parts")

    @classmethod
    def of_plan(cls, destination: str, plan_hash: str) -> StoredStaging:
        """Return the one of a plan, whether it exists or not."""
        return cls(destination, os.path.join(destination, _PREFIX + plan_hash[:_HASH_DIGITS]))

    @property
    def exists(self) -> bool:
        """True until all of it is removed."""
        return next(iter(self._store.objects(self.path)), None) is not None

    @property
    def is_open(self) -> bool:
        """True until a commit, or until it was given up."""
        return self._store.head(self.record) is not None

    def create(self, record: bytes) -> bool:
        """Write `plan.json`, unless another process has; return whether it was written here."""
        return self._store.put_if(self.record, record, int(crc32(record)), None)

    def read_record(self) -> bytes:
        """Return the content of `plan.json`.

        Raises:
            SourceError: it is missing.
        """
        found = self._store.get(self.record)
        if found is None:
            raise SourceError(f"{escape(self.record)}: no such object")
        return found[0]

    def noted(self) -> set[int]:
        """Return the numbers of the files that have a note."""
        names = (os.path.basename(path).removesuffix(".json") for path, _ in self._store.objects(self._done))
        return set(map(int, filter(str.isdecimal, names)))

    def has_note(self, number: int) -> bool:
        """Return False: unlike on network file systems, what is there is listed."""
        return False

    def notes(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return the notes of those files that have one; several are asked for at a time."""
        found = at_once(self._store.get, map(self._note, numbers))
        return {number: note[0] for number, note in zip(numbers, found, strict=True) if note is not None}

    def write_note(self, number: int, content: bytes) -> None:
        """Write the note of a file.

        Raises:
            FileNotFoundError: all is over.
        """
        self._write(self._note(number), content)

    def remove_notes(self, numbers: Sequence[int]) -> None:
        """Remove the notes of files, if they have some."""
        at_once(self._store.delete, map(self._note, numbers))

    def tell(self, name: str, content: bytes) -> None:
        """Leave something for people to see; errors as `write_note`."""
        self._write(os.path.join(self._parts, name), content)

    def told(self) -> Iterator[tuple[str, bytes]]:
        """Yield (name, content) of what parts said of themselves."""
        paths = [path for path, _ in self._store.objects(self._parts)]
        for path, found in zip(paths, at_once(self._store.get, paths), strict=True):
            if found is not None:
                yield os.path.basename(path), found[0]

    def _note(self, number: int) -> str:
        return os.path.join(self._done, note_name(number))

    def _write(self, path: str, content: bytes) -> None:
        self._store.put(path, content, int(crc32(content)))
        if not self.is_open:  # whoever removed the rest may not have seen this
            self._store.delete(path)
            raise FileNotFoundError(f"{self.record} is gone")

    def check_owner(self) -> None:
        """Do nothing: a store does not tell who wrote an object."""

    def reopen(self) -> bool:
        """Return False: a commit takes nothing away."""
        return False

    def close(self) -> None:
        """Remove `plan.json`: parts that are still at work end."""
        self._store.delete(self.record)

    def remove(self) -> None:
        """Remove all of it."""
        self.close()
        at_once(self._store.delete, [path for path, _ in self._store.objects(self.path)])

    def give_up(self) -> None:
        """Remove all of it."""
        self.remove()


def shared_in_store(destination: str) -> list[StoredStaging]:
    """Return what parts share below a destination, whatever their plans."""
    paths = (path for path, _ in writer_of(destination).objects(destination))
    names = {path.removeprefix(destination + "/").partition("/")[0] for path in paths}
    return [
        StoredStaging(destination, os.path.join(destination, name))
        for name in sorted(filter(is_shared_folder, names))
    ]
