"""The protocol broken in one place at a time. The search has to see each."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from shardkit.files.output import local
from tests.model.search import Bounds


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of the source of `files/output/local`."""

    name: str
    scenario: str
    """In which it is seen,"""
    bounds: Bounds
    """by this search."""
    before: str
    after: str

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Run the changed source in the place of the module's."""
        source, path = inspect.getsource(local), local.__file__
        assert source.count(self.before) == 1, f"{self.name}: {source.count(self.before)} places to change"
        try:
            exec(compile(source.replace(self.before, self.after), path, "exec"), local.__dict__)
            yield
        finally:
            exec(compile(source, path, "exec"), local.__dict__)


POWER, ONE_BY_ONE = Bounds(power_failures=16), Bounds(power_failures=8, preemptions=0)
KILL, BESIDE, TWICE = Bounds(kills=1), Bounds(preemptions=1), Bounds(preemptions=2)
EVERY_CALL = Bounds(preemptions=2, every_call=True)
MUTANTS = (
    Mutant(
        "the job is not synced",
        "parts",
        ONE_BY_ONE,
        "                storage.sync_directory(os.path.dirname(self.path))\n"
        "                self._check_replaceable()  # again",
        "                self._check_replaceable()  # again",
    ),
    Mutant(
        "a file is not synced before its note",
        "fresh",
        POWER,
        "            storage.sync_file(os.path.join(scratch, name))\n",
        "",
    ),
    Mutant(
        "the name of a file is not synced before its note",
        "damaged once",
        POWER,
        "            storage.sync_directory(os.path.join(self.data, os.path.dirname(name)))\n",
        "",
    ),
    Mutant(
        "a note is not synced",
        "parts",
        ONE_BY_ONE,
        '            storage.rename(note_in_scratch, os.path.join(self._done, f"{number}.json"))\n'
        "            storage.sync_directory(self._done)\n",
        '            storage.rename(note_in_scratch, os.path.join(self._done, f"{number}.json"))\n',
    ),
    Mutant(
        "removed notes are not synced",
        "damaged once",
        POWER,
        '                    storage.unlink(os.path.join(self._done, f"{number}.json"))\n'
        "            storage.sync_directory(self._done)\n",
        '                    storage.unlink(os.path.join(self._done, f"{number}.json"))\n',
    ),
    Mutant(
        "the files of OUT are not synced before the commit",
        "fresh",
        POWER,
        "            storage.sync_directories(self.data)\n            self._work = ",
        "            self._work = ",
    ),
    Mutant(
        "the commit is not synced before OUT changes",
        "overwrite",
        POWER,
        "            storage.sync_directory(parent)\n            self._replace(work, data, old)",
        "            self._replace(work, data, old)",
    ),
    Mutant(
        "the witness is not synced before the exchange",
        "overwrite",
        POWER,
        "    storage.sync_directory(work)\n    try:\n",
        "    try:\n",
    ),
    Mutant(
        "there is no witness",
        "overwrite",
        KILL,
        "    return not _exists(witness) or _is_same(witness, _first_file(work))",
        "    return True",
    ),
    Mutant(
        "what is removed is not synced before",
        "overwrite",
        POWER,
        "        storage.sync_directory(os.path.dirname(self.path))  # else a power loss brings it back, half empty\n",
        "",
    ),
    Mutant(
        "an incomplete job is committed",
        "the verb commit",
        BESIDE,
        "check_complete(self.path, self.record, self._finished())",
        "check_complete(self.path, self.record, {0: {}, 1: {}})",
    ),
    Mutant(
        "a job of another hash is joined",
        "another job after a kill",
        KILL,
        "                if self.record.hash == record.hash:\n",
        "                if True:\n",
    ),
    Mutant(
        "a job with finished files gives way without --overwrite",
        "another job after a kill, refused",
        KILL,
        "_discard_if_idle(with_files=self._overwrite)",
        "_discard_if_idle(with_files=True)",
    ),
    Mutant(
        "a job that others work on gives way",
        "another job, overwrite",
        BESIDE,
        "            is_idle = is_idle and (with_files",
        "            is_idle = with_files or (is_idle",
    ),
    Mutant(
        "OUT is not looked at again after the job was joined",
        "two of a job, refused",
        BESIDE,
        "                self._check_replaceable()  # again",
        "                pass  # again",
    ),
    Mutant(
        "OUT is not looked at again before it is replaced",
        "a person makes OUT",
        BESIDE,
        "            self._check_replaceable(data)\n            if not _exchange",
        "            if not _exchange",
    ),
    Mutant(
        "files that came late are removed with the old output",
        "a person puts a file into OUT",
        BESIDE,
        "if _exists(old) and self._foreign_files(old, self.path):",
        "if False:",
    ),
    Mutant(
        "what is being made is removed in place",
        "commit beside abort",
        EVERY_CALL,
        "            with _if_there():\n                self._discard(work)\n",
        "            storage.remove_tree(work)\n",
    ),
    Mutant(
        "descriptors stay open",
        "fresh",
        KILL,
        "                    storage.close_fd(fd)\n        if tmp:",
        "                    pass\n        if tmp:",
    ),
)
