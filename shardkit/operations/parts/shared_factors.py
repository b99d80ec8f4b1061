"""The factors of a divided job: each part computes those of its weights, before any file is written.

    a part:                its weights, the costliest first -> a record on this machine -> where all parts have theirs -> a note
    who sees all notes:    files, for which records are a source like any other

A record is named after its weight and its bytes, and the note says which one counts, the first that was written: machines
of another kind give other last bits, and files must not be made of both. Where the records of all parts lie is what
`Records` says, a directory (`files/shared`) or a store (`files/shared_store`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from shardkit.core.catalog import Catalog
from shardkit.core.text import count, escape
from shardkit.core.threads import Progress
from shardkit.errors import IntegrityError, ResourceError, ShardkitError
from shardkit.files import storage
from shardkit.files.digest import crc32
from shardkit.files.shared import RecordStat, SharedStaging
from shardkit.files.strict_json import parse_object
from shardkit.operations.parts.agreement import Agreement, PartsStaging, Records, read_parts
from shardkit.operations.parts.divided import Describer, Divided, PartResult, incomplete
from shardkit.operations.parts.foreign import foreign_in
from shardkit.operations.parts.notes import Note
from shardkit.operations.parts.on_disk import DividedOnDisk
from shardkit.operations.parts.part import Part, share_of
from shardkit.osft.plan import FACTORS
from shardkit.transfer.checks import SourceCheck
from shardkit.transfer.execute import ExecuteOptions, FileDigest
from shardkit.transfer.factors.catalog import FactoredWeight, plan_records
from shardkit.transfer.factors.fill import FactorRun, Filling, JobFactoring, Measured, measured_of
from shardkit.transfer.fill import image_crc
from shardkit.transfer.images import Hole
from shardkit.transfer.plan import TransferPlan, build_plan
from shardkit.transfer.stream import read_back

_CHECK_BUFFER = 1 << 20


class FactoredJob(Protocol):
    """What of a job has to be computed."""

    @property
    def factoring(self) -> JobFactoring:
        """All weights that become factors."""

    @property
    def measured(self) -> dict[str, Measured]:
        """Gets what was measured, by the target's path."""

    def fill(self, filling: Filling, /) -> Mapping[str, int]:
        """Fill the holes of all factors in this process alone; return the CRC-32 of each, by its name in the catalog."""

    @property
    def crcs(self) -> Mapping[str, int]:
        """CRC-32 of each factor, by its name in the catalog."""

    def take_over(
        self, found: Mapping[str, object], catalog: Catalog, jobs: int, /, *, is_known: bool
    ) -> list[str]:
        """Take what manifests say of factors, by root; return why these are not of the job's weights."""


def weights_of(job: FactoredJob) -> list[tuple[str, int]]:
    """Return the path of each weight, and the operations that it takes."""
    return [(weight.target.path, weight.target.num_operations) for weight in job.factoring.weights]


def without_factors(staging: PartsStaging, agreement: Agreement) -> list[int]:
    """Return the numbers of the weights of a divided job that have no factors yet, as far as this machine sees them."""
    return staging.factors.missing(len(agreement.weights)) if agreement.weights else []


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorNote:
    """A weight whose factors lie in a record."""

    target: Mapping[str, Any]
    """As `Journal.add_target` takes it."""
    source: Mapping[str, Any] | None
    """What was read of the weight, from `SourceCheck.dump`; None if nothing was compared."""
    computed_by: str
    """Stands for the kind of machine that computed them."""

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
        type(each) is float for each in numbers
    ):
        return None
    if type(target.get("weight_crc32")) is not int or not (source is None or isinstance(source, dict)):
        return None
    return FactorNote(target=target, source=source, computed_by=by)


class SharedFactors:
    """Weights whose factors several processes compute.

    Args:
        place: where all of them have their records.
        job: what is to be computed.
        plan: of the files, whose holes for factors somebody else fills.
        compares: what is read is compared with what the source records.
        computed_by: stands for the kind of this machine.
    """

    def __init__(
        self,
        place: Records,
        job: FactoredJob,
        plan: TransferPlan,
        *,
        compares: bool,
        computed_by: str,
    ) -> None:
        self._place, self._job, self._compares, self._by = place, job, compares, computed_by
        self._weights = job.factoring.weights
        self._numbers = {weight.target.path: number for number, weight in enumerate(self._weights)}
        self._records = plan_records(plan.catalog, self._weights)
        # `take` gives the names. Until then the whole folder stands for the files that are read, and for their memory.
        self._records.lie_at([os.path.join(place.path, image.name) for image in self._records.images])
        self._notes = dict[int, FactorNote]()
        self.plan = build_plan(plan.images, self._records.catalog)
        """Of the files; factors are read from records, once `take` has found them."""
        self.digest: str | None = None
        """Stands for all factors, once `take` has found them."""

    @property
    def crcs(self) -> dict[str, int]:
        """CRC-32 of every factor, by its name in the catalog, once `take` has found them."""
        found = self._job.measured
        return {
            name: crc for weight in self._weights for name, crc in found[weight.target.path].whole.items()
        }

    def missing(self) -> list[int]:
        """Return the numbers of the weights without a note, as far as this machine sees them."""
        return self._place.missing(len(self._weights))

    def bytes_left(self, numbers: Sequence[int]) -> int:
        """Return the size of the records of weights that are still to be computed."""
        there = self._read(numbers)
        return sum(self._records.images[number].size for number in numbers if number not in there)

    def _read(self, numbers: Sequence[int]) -> dict[int, FactorNote]:
        """Return the notes of those weights whose record is there as it was computed, as far as its place knows."""
        notes = {
            number: note
            for number, data in self._place.notes(numbers).items()
            if (note := self._parsed(number, data)) is not None
        }
        found = self._place.found([note.record(number) for number, note in notes.items()])
        return {
            number: note
            for (number, note), there in zip(notes.items(), found, strict=True)
            if there is not None and self._is_record(number, note, there)
        }

    def _parsed(self, number: int, data: bytes) -> FactorNote | None:
        try:
            note = _parsed(parse_object(data, str(number)), self._weights[number].target.path)
        except ShardkitError:
            return None
        return None if note is None or (self._compares and note.source is None) else note

    def _is_record(self, number: int, note: FactorNote, there: RecordStat) -> bool:
        """True if a record has the size and the CRC-32 of what was computed."""
        is_whole = there.size == self._records.images[number].size
        return is_whole and (there.crc32 is None or there.crc32 == self._crc_of(number, note))

    def _crc_of(self, number: int, note: FactorNote) -> int:
        """Return the CRC-32 of a record: of its factors, and of zeros between them."""
        segments = [
            (hole.start, hole.nbytes, note.target["whole"][short]) for hole, short in self._holes(number)
        ]
        return image_crc(self._records.images[number].size, segments)

    def _holes(self, number: int) -> Iterator[tuple[Hole, str]]:
        """Yield the place of each factor in a record, with the factor's short name."""
        for name, short in self._weights[number].factors.items():
            ((_, hole),) = self._records.filled[name]
            yield hole, short

    # A part

    def compute(
        self,
        numbers: Sequence[int],
        work: str,
        check: SourceCheck | None,
        progress: Progress,
        label: str,
        another_place: str,
    ) -> int:
        """Compute the factors of weights that have none yet; return how many had some before.

        Args:
            numbers: of the weights.
            work: an empty directory on this machine, for records.
            check: compares what is read with what the source records.
            progress: told of the bytes of factors.
            label: what the progress is called.
            another_place: as `Filling` has it.

        Raises:
            IntegrityError, SourceError, IncompleteError, ResourceError: as `FactorRun.run`.
            OSError: what all parts share is gone, or cannot be written.
        """
        found = self._loaded(numbers, check)
        for number, note in found.items():
            self._measure(number, note, is_resumed=True)
        left = [number for number in numbers if number not in found]
        progress.start(sum(self._nbytes(number) for number in numbers), label)
        progress.advance(sum(map(self._nbytes, found)))
        if left:
            publishing = _SharedJournal(self, work)
            filling = Filling(
                plan=self._records,
                directory=work,
                journal=publishing,
                earlier={},
                finished={self._records.images[n].name for n in range(len(self._weights))}
                - {self._records.images[n].name for n in left},
                check=check,
                advance=progress.advance,
                elsewhere=self._elsewhere,
                another_place=another_place,
            )
            factoring = replace(self._job.factoring, weights=tuple(self._weights[number] for number in left))
            try:
                self._job.measured.update(FactorRun(factoring, filling).run())
            except IntegrityError:
                if not publishing.has_failed.is_set():
                    self._place.forget(numbers)  # they vouch for what was read
                raise
        progress.finish()
        return len(found)

    def _nbytes(self, number: int) -> int:
        return self._weights[number].target.factors_nbytes

    def _loaded(self, numbers: Sequence[int], check: SourceCheck | None) -> dict[int, FactorNote]:
        """Return the notes that there are, and take what was read for them. Those that cannot be compared are removed."""
        notes = self._read(numbers)
        useless = {
            number for number, note in notes.items() if check is not None and not check.load(note.source)
        }
        self._place.forget(useless)
        return {number: note for number, note in notes.items() if number not in useless}

    def _measure(self, number: int, note: FactorNote, *, is_resumed: bool) -> None:
        weight = self._weights[number]
        self._job.measured[weight.target.path] = measured_of(weight, note.target, is_resumed=is_resumed)

    def _elsewhere(self, weight: FactoredWeight) -> Measured | None:
        number = self._numbers[weight.target.path]
        note = self._read([number]).get(number)
        return None if note is None else measured_of(weight, note.target, is_resumed=False)

    def publish(self, work: str, target: Mapping[str, Any], source: Mapping[str, Any] | None) -> None:
        """Let everybody see the factors of a weight, unless another process was faster: its factors count then.

        Args:
            work: has the record, on the disk.
            target, source: as in a note.

        Raises:
            IntegrityError, ResourceError: the place of records, or the disk, fails.
            OSError: the system refuses, or what all parts share is gone.
        """
        number = self._numbers[target["path"]]
        path = os.path.join(work, self._records.images[number].name)
        if self._read([number]):
            storage.unlink(path)
            return
        note = FactorNote(target=target, source=source, computed_by=self._by)
        self._place.publish(path, note.record(number), self._crc_of(number, note))
        content = json.dumps(asdict(note)).encode()
        if not self._place.write_note(work, number, content) and not self._read([number]):
            self._place.forget([number])  # it is damaged, or its record is lost
            self._place.write_note(work, number, content)

    # All parts

    def take(self, check: SourceCheck | None) -> list[int]:
        """Take all factors as they are by now; return the numbers of the weights that have none.

        Args:
            check: gets what was read of all weights.
        """
        missing = self.missing()
        if missing:
            return missing
        self._notes = self._loaded(range(len(self._weights)), check)
        missing = [number for number in range(len(self._weights)) if number not in self._notes]
        if not missing:
            self._records.lie_at(self._place.paths(self._names(sorted(self._notes))))
            for number, note in self._notes.items():
                before = self._job.measured.get(self._weights[number].target.path)
                self._measure(number, note, is_resumed=before is not None and before.is_resumed)
            crcs = [self._notes[number].crcs for number in sorted(self._notes)]
            self.digest = hashlib.sha256(json.dumps(crcs).encode()).hexdigest()
        return missing

    def _names(self, numbers: Sequence[int]) -> list[str]:
        return [self._notes[number].record(number) for number in numbers]

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
        numbers = sorted(self._notes)
        damaged = [
            number
            for number, path in zip(numbers, self._place.paths(self._names(numbers)), strict=True)
            if (
                check is not None
                and (source := self._notes[number].source) is not None
                and check.has_doubts(source)
            )
            or not self._is_intact(number, path)
        ]
        self._place.forget(damaged)
        self._place.remove(self._names(damaged))

    def _is_intact(self, number: int, path: str) -> bool:
        """True if a record has the factors that its note tells of."""
        whole, buffer = self._notes[number].target["whole"], bytearray(_CHECK_BUFFER)
        try:
            fd = storage.open_fd(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            return all(
                read_back(fd, hole.start, hole.nbytes, buffer) == whole[short]
                for hole, short in self._holes(number)
            )
        except ResourceError:
            return False
        finally:
            storage.close_fd(fd)


@dataclass(frozen=True, slots=True)
class _SharedJournal:
    """The journal of a part, which shows all others what it is told."""

    factors: SharedFactors
    work: str
    has_failed: threading.Event = field(default_factory=threading.Event)
    """Set if a record is not what was computed: that says nothing of the source, nor of records that have a note."""

    def add_target(self, target: Mapping[str, Any], source: Mapping[str, Any] | None, /) -> None:
        """See `TargetJournal`."""
        try:
            self.factors.publish(self.work, target, source)
        except IntegrityError:
            self.has_failed.set()
            raise


class WithFactors(Divided):
    """A job whose parts compute factors first. Files are written by the parts that see those of all weights: at the latest
    by the last one, or by whoever commits.

    It stands before the class that says where the files go.
    """

    _factors: SharedFactors
    _resumed_weights = 0
    _another_place = "choose another destination"
    """How records come to lie on another disk."""

    @abstractmethod
    def _room_for_records(self) -> AbstractContextManager[str]:
        """Give an empty directory on this machine, where records are until all parts have them, and perhaps longer."""

    def weights_of(self, part: Part) -> list[int]:
        """Return the numbers of the weights whose factors a part computes, by what they take."""
        return share_of([operations for _, operations in self._agreement.weights], part)

    def record_bytes_left(self, part: Part) -> int:
        """Return the size of the records that a part still has to compute."""
        return self._factors.bytes_left(self.weights_of(part))

    def result(self, part: Part, *, resumed_files: int = 0, is_committed: bool = False) -> PartResult:
        """Return the outcome of a part, as far as it can be seen now."""
        result = super().result(part, resumed_files=resumed_files, is_committed=is_committed)
        missing = [] if is_committed else self._factors.missing()
        if missing:
            parts = self._agreement.missing_parts([], missing)
            result = replace(result, missing=tuple(str(each) for each, _ in parts))
        return replace(
            result,
            num_weights=len(self.weights_of(part)),
            all_weights=len(self._agreement.weights),
            resumed_weights=self._resumed_weights,
            finished_weights=len(self._agreement.weights) - len(missing),
        )

    def warnings(self) -> tuple[str, ...]:
        """Return the notes about the work of all parts, and about all factors."""
        return (*super().warnings(), *self._factors.warnings())

    @property
    def _computed(self) -> str | None:
        return self._factors.digest

    def _counts(self, note: Note) -> bool:
        # What was made of other factors is no file of this output; before all are known, none is.
        return self._computed is not None and super()._counts(note)

    def _carry_out(self, part: Part, directory: str) -> int:
        mine, label = self.files_of(part), f"part {part}"
        with self._room_for_records() as work:
            self._resumed_weights = self._factors.compute(
                self.weights_of(part),
                work,
                self.check,
                self._progress,
                f"{label}, factors",
                self._another_place,
            )
            if self._factors.take(self.check):  # others lack some
                return 0
            resumed = sum(1 for _ in self._notes(mine))
            rest = [number for number in range(len(self._images)) if number not in mine]
            if self._is_another_at_work(part):  # it writes its own
                self._move(mine, directory, label)
                self._move(rest, directory, f"{label}, of others")
            else:
                self._move(mine + rest, directory, label)
        return resumed

    def _is_another_at_work(self, part: Part) -> bool:
        """True if another part has begun and has not said that it ended; it may have died."""
        own = (part.number, part.count)
        return any(place != own and not content.get("is_done") for place, content in read_parts(self._shared))

    def _move(self, mine: Sequence[int], directory: str, label: str) -> int:
        try:
            return super()._move(mine, directory, label)
        except IntegrityError:
            self._factors.forget_damaged(self.check)
            raise

    def _write_rest(self, directory: str) -> int:
        missing = self._factors.take(self.check)
        if missing:
            raise incomplete(self._destination, self._agreement, [], missing)
        done = {number for number, _ in self._notes(range(len(self._images)))}
        rest = [number for number in range(len(self._images)) if number not in done]
        if rest:  # their parts have ended while others lacked factors
            self._move(rest, directory, "files")
        return len(rest)

    def _finish(
        self,
        directory: str,
        descriptions: Describer,
        digests: Mapping[str, FileDigest],
        scattered: Mapping[str, int | None],
    ) -> None:
        try:
            super()._finish(directory, descriptions, digests, scattered)
        except IntegrityError:
            self._factors.forget_damaged(self.check)
            self._forget(range(len(self._images)))  # factors are in all of them
            raise

    def _compared(self, scattered: dict[str, int]) -> dict[str, int]:
        if not self._options.digests:
            return scattered
        computed = self._factors.crcs
        IntegrityError.raise_for(
            [escape(name) for name, crc in computed.items() if scattered.get(name, crc) != crc],
            "parts have read other factors than were computed: a disk fails",
            hint="run all parts again: what is damaged is made anew",
        )
        return {**scattered, **computed}


class DividedWithFactors(WithFactors, DividedOnDisk):
    """Parts that compute factors, and share a file system.

    Args:
        destination, agreement, plan, data_nbytes, options, progress: as for `Divided`.
        factors: what is to be computed.
        computed_by: stands for the kind of this machine.
        more: as for `DividedOnDisk`.
    """

    def __init__(
        self,
        destination: str,
        agreement: Agreement,
        plan: TransferPlan,
        data_nbytes: Sequence[int],
        options: ExecuteOptions,
        progress: Progress,
        *,
        factors: FactoredJob,
        computed_by: str,
        **more: Any,
    ) -> None:
        place = SharedStaging.of_plan(destination, agreement.plan, foreign_in).factors
        self._factors = SharedFactors(
            place, factors, plan, compares=options.check_source, computed_by=computed_by
        )
        plan = self._factors.plan
        super().__init__(destination, agreement, plan, data_nbytes, options, progress, **more)

    def bytes_left(self, part: Part) -> int:
        """Return the size of the files that a part still has to write, and of the records of its factors."""
        self._factors.take(None)
        return super().bytes_left(part) + self.record_bytes_left(part)

    @contextlib.contextmanager
    def _room_for_records(self) -> Iterator[str]:
        directory = os.path.join(self._work, "factors")
        storage.mkdir(directory)
        yield directory
