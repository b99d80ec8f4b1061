"""The phase before a job whose weights become factors: each weight's factors are computed once, into a record.

    a process:             its weights, the costliest first -> a record on this machine -> the place of records -> a note
    who sees all notes:    an ordinary job, for which records are a source like any other

A record is named after its weight and its bytes, and the note says which one counts, the first that was written: machines
of another kind give other last bits, and files must not be made of both. Where records lie is what `Records` says, a
directory (`files/shared`) or a store (`files/place/store_notes`). What was killed goes on with the records that are whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shardkit.core.factored import FACTORS
from shardkit.core.text import count
from shardkit.core.threads import Progress
from shardkit.errors import IntegrityError, ResourceError, ShardkitError
from shardkit.files import storage
from shardkit.files.digest import crc32
from shardkit.files.place.contract import Records
from shardkit.files.strict_json import parse_object
from shardkit.osft.compute import FactorRun
from shardkit.osft.job import FactoredJob, measured_of
from shardkit.transfer.checks import SourceCheck
from shardkit.transfer.digests import parse_versions
from shardkit.transfer.fill import image_crc
from shardkit.transfer.stream import read_back

_CHECK_BUFFER = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorNote:
    """A weight whose factors lie in a record."""

    target: Mapping[str, Any]
    """The weight's path as "path", and the answer of the process that computed them."""
    source: Mapping[str, Any] | None
    """What was read of the weight, from `SourceCheck.dump`; None if nothing was compared."""
    computed_by: str
    """Stands for the kind of machine that computed them."""
    versions: Mapping[str, str] | None
    """Of packages that decided the plan, where they were computed."""

    def record(self, number: int) -> str:
        """Return the name of the record, given the number of the weight."""
        return f"{number}-{crc32(json.dumps(self.crcs).encode()):08x}"

    @property
    def crcs(self) -> list[int]:
        """CRC-32 of each factor."""
        return [self.target["whole"][name] for name in FACTORS]


def _parsed(content: Mapping[str, Any], path: str) -> FactorNote | None:
    """Return the note on a target; None if it is damaged."""
    target, source, by = (content.get(key) for key in ("target", "source", "computed_by"))
    if not (isinstance(target, dict) and target.get("path") == path and isinstance(by, str)):
        return None
    whole, numbers = target.get("whole"), [target.get(key) for key in ("error", "orthogonality")]
    if not (
        isinstance(whole, dict) and set(whole) == set(FACTORS) and isinstance(target.get("algorithm"), str)
    ):
        return None
    if not all(type(crc) is int and 0 <= crc < 1 << 32 for crc in whole.values()) or not all(
        type(number) is float for number in numbers
    ):
        return None
    if type(target.get("weight_crc32")) is not int or not (source is None or isinstance(source, dict)):
        return None
    versions = parse_versions(content.get("versions"))
    return FactorNote(target=target, source=source, computed_by=by, versions=versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorPhase:
    """The phase of one process, alone or beside others.

    `take` ends it: from then on the catalog of `job.records` says where the factors lie.
    """

    job: FactoredJob
    """What is to be computed; gets what was measured."""
    place: Records
    """Where all processes have their records."""
    compares: bool
    """What is read is compared with what the source records."""
    computed_by: str
    """Stands for the kind of this machine."""
    versions: Mapping[str, str] | None
    """Of packages that decided the plan here."""
    another_place: str
    """How records come to lie on another disk, if there is no room for them."""
    _notes: dict[int, FactorNote] = field(default_factory=dict, init=False)
    """Those of all weights, once `take` has found them."""

    def __post_init__(self) -> None:
        # `take` gives the names. Until then the place stands for the files that are read, and for their memory.
        self.job.records.lie_at([os.path.join(self.place.path, str(number)) for number in self._numbers])

    @property
    def digest(self) -> str | None:
        """Stands for all factors, once `take` has found them."""
        if not self._notes:
            return None
        return hashlib.sha256(
            json.dumps([self._notes[n].crcs for n in sorted(self._notes)]).encode()
        ).hexdigest()

    @property
    def _numbers(self) -> range:
        return range(len(self.job.records.weights))

    def missing(self) -> list[int]:
        """Return the numbers of the weights without a note, as far as this machine sees them."""
        return self.place.missing(len(self._numbers))

    def bytes_left(self, numbers: Sequence[int]) -> int:
        """Return the size of the records of weights that are still to be computed."""
        there = self._read(numbers)
        return sum(self.job.records.sizes[number] for number in numbers if number not in there)

    def _read(self, numbers: Sequence[int]) -> dict[int, FactorNote]:
        """Return the notes of those weights whose record is there as it was computed, as far as its place knows."""
        notes = {
            number: note
            for number, data in self.place.notes(numbers).items()
            if (note := self._parsed(number, data)) is not None
        }
        stats = self.place.found([note.record(number) for number, note in notes.items()])
        return {
            number: note
            for (number, note), there in zip(notes.items(), stats, strict=True)
            if there is not None
            and there.size == self.job.records.sizes[number]
            and (there.crc32 is None or there.crc32 == self._crc_of(number, note))
        }

    def _parsed(self, number: int, data: bytes) -> FactorNote | None:
        try:
            note = _parsed(parse_object(data, str(number)), self._path(number))
        except ShardkitError:
            return None
        return None if note is None or (self.compares and note.source is None) else note

    def _path(self, number: int) -> str:
        return self.job.records.weights[number].target.path

    def _crc_of(self, number: int, note: FactorNote) -> int:
        """Return the CRC-32 of a record: of its factors, and of zeros between them."""
        records = self.job.records
        segments = [
            (hole.start, hole.nbytes, note.target["whole"][short]) for hole, short in records.holes_of(number)
        ]
        return image_crc(records.sizes[number], segments)

    # What a process computes

    def look_through(self) -> list[Mapping[str, str]]:
        """Return the versions under which an interrupted process has computed factors; damaged records count no more."""
        self.forget_damaged(None)
        return [note.versions or {} for note in self._read(self._numbers).values()]

    def compute(
        self, numbers: Sequence[int], work: str, check: SourceCheck | None, progress: Progress, label: str
    ) -> int:
        """Compute the factors of weights that have none yet; return how many had some before.

        Args:
            numbers: of the weights.
            work: a directory on this machine, for records that are not whole yet.
            check: compares what is read with what the source records.
            progress: told of the bytes of factors.
            label: what the progress is called.

        Raises:
            IntegrityError, SourceError, IncompleteError, ResourceError: as `FactorRun.run`.
            OSError: the place of records is gone, or cannot be written.
        """
        there = self._loaded(numbers, check)
        for number, note in there.items():
            self._measure(number, note.target, is_resumed=True)
        progress.start(sum(map(self._nbytes, numbers)), label)
        progress.advance(sum(map(self._nbytes, there)))
        left = [number for number in numbers if number not in there]
        try:
            if left:
                self._compute(left, work, check, progress.advance)
        finally:
            progress.finish()
        return len(there)

    def _compute(
        self, numbers: Sequence[int], work: str, check: SourceCheck | None, advance: Callable[[int], None]
    ) -> None:
        has_failed = threading.Event()  # a record is not what was computed: that says nothing of the source

        def publish(number: int, target: Mapping[str, Any], source: Mapping[str, Any] | None) -> None:
            try:
                self._publish(work, number, target, source)
            except IntegrityError:
                has_failed.set()
                raise

        run = FactorRun(
            job=self.job,
            numbers=numbers,
            directory=work,
            publish=publish,
            check=check,
            advance=advance,
            is_elsewhere=self._is_elsewhere,
            another_place=self.another_place,
        )
        try:
            run.run()
        except IntegrityError:
            if not has_failed.is_set():
                self.place.forget(numbers)  # they vouch for what was read
            raise

    def _nbytes(self, number: int) -> int:
        return self.job.records.weights[number].target.factors_nbytes

    def _loaded(self, numbers: Sequence[int], check: SourceCheck | None) -> dict[int, FactorNote]:
        """Return the notes that there are, and take what was read for them. Those that cannot be compared are removed."""
        notes = self._read(numbers)
        useless = {
            number for number, note in notes.items() if check is not None and not check.load(note.source)
        }
        self.place.forget(useless)
        return {number: note for number, note in notes.items() if number not in useless}

    def _measure(self, number: int, target: Mapping[str, Any], *, is_resumed: bool) -> None:
        weight = self.job.records.weights[number]
        self.job.measured[weight.target.path] = measured_of(weight, target, is_resumed=is_resumed)

    def _is_elsewhere(self, number: int) -> bool:
        """True if another process has computed a weight meanwhile."""
        note = self._read([number]).get(number)
        if note is not None:
            self._measure(number, note.target, is_resumed=False)
        return note is not None

    def _publish(
        self, work: str, number: int, target: Mapping[str, Any], source: Mapping[str, Any] | None
    ) -> None:
        """Let everybody see the factors of a weight, unless another process was faster: its factors count then.

        Raises:
            IntegrityError, ResourceError: the place of records, or the disk, fails.
            OSError: the system refuses, or the place of records is gone.
        """
        self._measure(number, target, is_resumed=False)
        path = os.path.join(work, str(number))
        if self._read([number]):
            storage.unlink(path)
            return
        note = FactorNote(target=target, source=source, computed_by=self.computed_by, versions=self.versions)
        self.place.publish(path, note.record(number), self._crc_of(number, note))
        content = json.dumps(asdict(note)).encode()
        if not self.place.write_note(work, number, content) and not self._read([number]):
            self.place.forget([number])  # it is damaged, or its record is lost
            self.place.write_note(work, number, content)

    # What all have computed

    def take(self, check: SourceCheck | None) -> list[int]:
        """Take all factors as they are by now; return the numbers of the weights that have none.

        Args:
            check: gets what was read of all weights.
        """
        missing = self.missing()
        if missing:
            return missing
        self._notes.clear()
        notes = self._loaded(self._numbers, check)
        missing = [number for number in self._numbers if number not in notes]
        if not missing:
            self._notes.update(notes)
            self.job.records.lie_at(
                self.place.paths([notes[number].record(number) for number in self._numbers])
            )
            for number, note in notes.items():
                before = self.job.measured.get(self._path(number))
                self._measure(number, note.target, is_resumed=before is not None and before.is_resumed)
        return missing

    def warnings(self) -> Iterator[str]:
        """Yield what a person should know of all factors."""
        kinds = {note.computed_by for note in self._notes.values()}
        if len(kinds) > 1:
            yield (
                f"factors were computed on {count(len(kinds), 'kind')} of machine (CPU, torch, or variables that choose "
                "code for it): they are as good as any, but one machine would have given other last bits"
            )

    def forget_damaged(self, check: SourceCheck | None) -> None:
        """Let factors be computed again that were made of bytes that differ, or whose record is damaged."""
        notes = self._read(self._numbers)
        names = {number: note.record(number) for number, note in notes.items()}
        damaged = [
            number
            for (number, note), path in zip(notes.items(), self.place.paths([*names.values()]), strict=True)
            if (check is not None and note.source is not None and check.has_doubts(note.source))
            or not self._is_intact(number, note, path)
        ]
        self.place.forget(damaged)
        self.place.remove([names[number] for number in damaged])

    def _is_intact(self, number: int, note: FactorNote, path: str) -> bool:
        """True if a record has the factors that its note tells of."""
        whole, buffer = note.target["whole"], bytearray(_CHECK_BUFFER)
        try:
            fd = storage.open_fd(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            return all(
                read_back(fd, hole.start, hole.nbytes, buffer) == whole[short]
                for hole, short in self.job.records.holes_of(number)
            )
        except ResourceError:
            return False
        finally:
            storage.close_fd(fd)


PhaseAt = Callable[[Records], FactorPhase]
"""Returns the phase of a job, given where records lie."""
