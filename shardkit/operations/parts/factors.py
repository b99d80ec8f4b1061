"""The factors of a divided job: each part computes those of its weights, before any file is written.

    a part:                its weights, the costliest first -> a record in a place of its own -> a name in `factors` -> a note
    who sees all notes:    files, for which records are a source like any other

A record is named after its weight and its bytes, and the note says which one counts: machines of another kind give other
last bits, and files must not be made of both.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from shardkit.core.text import count, escape
from shardkit.core.threads import Progress
from shardkit.errors import IntegrityError, ResourceError, ShardkitError
from shardkit.files import storage
from shardkit.files.digest import crc32
from shardkit.files.shared import SharedStaging, note_name
from shardkit.files.strict_json import parse_object, read_small
from shardkit.operations.parts.agreement import Agreement, Staging, read_parts
from shardkit.operations.parts.divided import Describer, PartResult, incomplete
from shardkit.operations.parts.notes import Note
from shardkit.operations.parts.on_disk import DividedOnDisk
from shardkit.operations.parts.part import Part, share_of
from shardkit.osft.plan import FACTORS
from shardkit.transfer.checks import SourceCheck
from shardkit.transfer.execute import ExecuteOptions, FileDigest
from shardkit.transfer.factors.catalog import FactoredWeight, plan_records
from shardkit.transfer.factors.fill import Factoring, FactorRun, Filling, Measured, measured_of
from shardkit.transfer.plan import TransferPlan, build_plan
from shardkit.transfer.stream import read_back

_MAX_BYTES = 1 << 28
_CHECK_BUFFER = 1 << 20


class FactoredJob(Protocol):
    """What of a job has to be computed."""

    @property
    def factoring(self) -> Factoring:
        """All weights that become factors."""

    @property
    def measured(self) -> dict[str, Measured]:
        """Gets what was measured, by the target's path."""

    def fill(self, filling: Filling, /) -> Mapping[str, int]:
        """Fill the holes of all factors in this process alone; return the CRC-32 of each, by its name in the catalog."""


def weights_of(job: FactoredJob) -> list[tuple[str, int]]:
    """Return the path of each weight, and the operations that it takes."""
    return [(weight.target.path, weight.target.num_operations) for weight in job.factoring.weights]


def without_factors(staging: Staging, agreement: Agreement) -> list[int]:
    """Return the numbers of the weights of a divided job that have no factors yet, as far as this machine sees them."""
    if not (agreement.weights and isinstance(staging, SharedStaging)):  # they are computed on a disk alone
        return []
    return _without_note(staging, len(agreement.weights))


def _without_note(staging: SharedStaging, count: int) -> list[int]:
    try:
        names = set(storage.listdir(staging.factors))  # also lets network file systems look again
    except OSError:
        names = set()
    return [
        number
        for number in range(count)
        if note_name(number) not in names
        and not storage.lexists(os.path.join(staging.factors, note_name(number)))
    ]


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
    if not all(type(crc) is int for crc in whole.values()) or not all(
        type(each) is float for each in numbers
    ):
        return None
    if not (source is None or isinstance(source, dict)):
        return None
    return FactorNote(target=target, source=source, computed_by=by)


class SharedFactors:
    """Weights whose factors several processes compute.

    Args:
        staging: what the processes share.
        job: what is to be computed.
        plan: of the files, whose holes for factors somebody else fills.
        compares: what is read is compared with what the source records.
        computed_by: stands for the kind of this machine.
    """

    def __init__(
        self,
        staging: SharedStaging,
        job: FactoredJob,
        plan: TransferPlan,
        *,
        compares: bool,
        computed_by: str,
    ) -> None:
        self._staging, self._job, self._compares, self._by = staging, job, compares, computed_by
        self._weights = job.factoring.weights
        self._numbers = {weight.target.path: number for number, weight in enumerate(self._weights)}
        self._records = plan_records(plan.catalog, self._weights)
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
        return _without_note(self._staging, len(self._weights))

    def bytes_left(self, numbers: Sequence[int]) -> int:
        """Return the size of the records of weights that are still to be computed."""
        return sum(self._records.images[number].size for number in numbers if self.note(number) is None)

    def note(self, number: int) -> FactorNote | None:
        """Return the note of a weight whose record is there with its size."""
        path = os.path.join(self._staging.factors, note_name(number))
        try:
            content = parse_object(
                read_small(path, note_name(number), _MAX_BYTES, follow=False), note_name(number)
            )
            note = _parsed(content, self._weights[number].target.path)
            if note is None or (self._compares and note.source is None):
                return None
            size = storage.lstat(self._path_of(number, note)).st_size
        except (OSError, ShardkitError):
            return None
        return note if size == self._records.images[number].size else None

    def _path_of(self, number: int, note: FactorNote) -> str:
        return os.path.join(self._staging.factors, note.record(number))

    # A part

    def compute(
        self, numbers: Sequence[int], work: str, check: SourceCheck | None, progress: Progress, label: str
    ) -> int:
        """Compute the factors of weights that have none yet; return how many had some before.

        Args:
            numbers: of the weights.
            work: a `workplace`.
            check: compares what is read with what the source records.
            progress: told of the bytes of factors.
            label: what the progress is called.

        Raises:
            IntegrityError, SourceError, IncompleteError, ResourceError: as `FactorRun.run`.
            OSError: the shared directory is gone, or cannot be written.
        """
        found = self._loaded(numbers, check)
        for number, note in found.items():
            self._measure(number, note, is_resumed=True)
        left = [number for number in numbers if number not in found]
        progress.start(sum(self._nbytes(number) for number in numbers), label)
        progress.advance(sum(map(self._nbytes, found)))
        if left:
            directory = os.path.join(work, "factors")
            storage.mkdir(directory)
            filling = Filling(
                plan=self._records,
                directory=directory,
                journal=_Publishing(self, work),
                earlier={},
                finished={self._records.images[n].name for n in range(len(self._weights))}
                - {self._records.images[n].name for n in left},
                check=check,
                advance=progress.advance,
                elsewhere=self._elsewhere,
            )
            factoring = replace(self._job.factoring, weights=tuple(self._weights[number] for number in left))
            try:
                self._job.measured.update(FactorRun(factoring, filling).run())
            except IntegrityError:
                self._forget(numbers)  # they vouch for what was read
                raise
        progress.finish()
        return len(found)

    def _nbytes(self, number: int) -> int:
        return self._weights[number].target.factors_nbytes

    def _loaded(self, numbers: Sequence[int], check: SourceCheck | None) -> dict[int, FactorNote]:
        """Return the notes that there are, and take what was read for them. Those that cannot be compared are removed."""
        notes = {number: note for number in numbers if (note := self.note(number)) is not None}
        useless = {
            number for number, note in notes.items() if check is not None and not check.load(note.source)
        }
        self._forget(useless)
        return {number: note for number, note in notes.items() if number not in useless}

    def _measure(self, number: int, note: FactorNote, *, is_resumed: bool) -> None:
        weight = self._weights[number]
        self._job.measured[weight.target.path] = measured_of(weight, note.target, is_resumed=is_resumed)

    def _elsewhere(self, weight: FactoredWeight) -> Measured | None:
        note = self.note(self._numbers[weight.target.path])
        return None if note is None else measured_of(weight, note.target, is_resumed=False)

    def publish(self, work: str, target: Mapping[str, Any], source: Mapping[str, Any] | None) -> None:
        """Let everybody see the factors of a weight, unless another process was faster: its factors count then.

        Args:
            work: a `workplace`, in which the record is on the disk.
            target, source: as in a note.

        Raises:
            OSError: the system refuses, or the shared directory is gone.
        """
        number = self._numbers[target["path"]]
        path = os.path.join(work, "factors", self._records.images[number].name)
        if self.note(number) is not None:
            storage.unlink(path)
            return
        note = FactorNote(target=target, source=source, computed_by=self._by)
        self._staging.publish_record(path, note.record(number))
        content = json.dumps(asdict(note)).encode()
        self._staging.write_note(work, self._staging.factors, note_name(number), content)

    # All parts

    def take(self, check: SourceCheck | None) -> list[int]:
        """Take all factors as they are by now; return the numbers of the weights that have none.

        Args:
            check: gets what was read of all weights.
        """
        self._notes = self._loaded(range(len(self._weights)), check)
        missing = [number for number in range(len(self._weights)) if number not in self._notes]
        if not missing:
            self._records.lie_at(
                [self._path_of(number, self._notes[number]) for number in sorted(self._notes)]
            )
            for number, note in self._notes.items():
                before = self._job.measured.get(self._weights[number].target.path)
                self._measure(number, note, is_resumed=before is not None and before.is_resumed)
            crcs = [self._notes[number].crcs for number in sorted(self._notes)]
            self.digest = hashlib.sha256(json.dumps(crcs).encode()).hexdigest()
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
        damaged = [
            number
            for number, note in self._notes.items()
            if (check is not None and note.source is not None and check.has_doubts(note.source))
            or not self._is_intact(number, note)
        ]
        self._forget(damaged)
        for number in damaged:
            with contextlib.suppress(OSError):
                storage.unlink(self._path_of(number, self._notes[number]))

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            with contextlib.suppress(OSError):
                storage.unlink(os.path.join(self._staging.factors, note_name(number)))

    def _is_intact(self, number: int, note: FactorNote) -> bool:
        weight, buffer = self._weights[number], bytearray(_CHECK_BUFFER)
        try:
            fd = storage.open_fd(self._path_of(number, note), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            for name, short in weight.factors.items():
                ((_, hole),) = self._records.filled[name]
                if read_back(fd, hole.start, hole.nbytes, buffer) != note.target["whole"][short]:
                    return False
            return True
        except ResourceError:
            return False
        finally:
            storage.close_fd(fd)


@dataclass(frozen=True, slots=True)
class _Publishing:
    """The journal of a part, which shows all others what it is told."""

    factors: SharedFactors
    work: str

    def add_target(self, target: Mapping[str, Any], source: Mapping[str, Any] | None, /) -> None:
        """See `TargetJournal`."""
        self.factors.publish(self.work, target, source)


class DividedWithFactors(DividedOnDisk):
    """A job whose parts compute factors first. Files are written by the parts that see those of all weights: at the latest
    by the last one, or by whoever commits.

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
        staging = SharedStaging.of_plan(destination, agreement.plan)
        self._factors = SharedFactors(
            staging, factors, plan, compares=options.check_source, computed_by=computed_by
        )
        plan = self._factors.plan
        super().__init__(destination, agreement, plan, data_nbytes, options, progress, **more)
        self._resumed_weights = 0

    def weights_of(self, part: Part) -> list[int]:
        """Return the numbers of the weights whose factors a part computes, by what they take."""
        return share_of([operations for _, operations in self._agreement.weights], part)

    def bytes_left(self, part: Part) -> int:
        """Return the size of the files that a part still has to write, and of the records of its factors."""
        self._factors.take(None)
        return super().bytes_left(part) + self._factors.bytes_left(self.weights_of(part))

    def result(self, part: Part, *, resumed_files: int = 0, is_committed: bool = False) -> PartResult:
        """Return what became of a part, as far as it can be seen now."""
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
        """Return what a person should know of all factors."""
        return tuple(self._factors.warnings())

    def _carry_out(self, part: Part, directory: str) -> int:
        mine, label = self.files_of(part), f"part {part}"
        self._resumed_weights = self._factors.compute(
            self.weights_of(part), self._work, self.check, self._progress, f"{label}, factors"
        )
        if self._factors.take(self.check):  # others lack some
            return 0
        resumed = sum(1 for _ in self._notes(mine))
        rest = [number for number in range(len(self._images)) if number not in mine]
        if self._is_another_at_work(part):  # it writes its own
            self._move(mine, directory, label)
            self._progress.finish()
            self._move(rest, directory, f"{label}, of others")
        else:
            self._move(mine + rest, directory, label)
        return resumed

    def _is_another_at_work(self, part: Part) -> bool:
        """True if another part has begun and has not said that it ended; it may have died."""
        own = (part.number, part.count)
        return any(place != own and not content.get("is_done") for place, content in read_parts(self.staging))

    def _note(self, number: int) -> Note | None:
        note = super()._note(number)
        # What was made of other factors is no file of this output; before all are known, none is.
        return note if note and note.factors == self._factors.digest is not None else None

    def _publish(self, directory: str, number: int, note: Note) -> None:
        super()._publish(directory, number, replace(note, factors=self._factors.digest))

    def _move(self, mine: Sequence[int], directory: str, label: str) -> int:
        try:
            return super()._move(mine, directory, label)
        except IntegrityError:
            self._factors.forget_damaged(self.check)
            raise

    def _make(self, directory: str) -> bool:
        missing = self._factors.take(self.check)
        if missing:
            raise incomplete(self._destination, self._agreement, [], missing)
        done = {number for number, _ in self._notes(range(len(self._images)))}
        rest = [number for number in range(len(self._images)) if number not in done]
        if rest:  # their parts have ended while others lacked factors
            apart = os.path.join(self._work, "rest")
            for folder in sorted({os.path.dirname(image.name) for image in self._images}):
                storage.make_directories(os.path.join(apart, folder))
            self._move(rest, apart, "files")
            self._progress.finish()
        return super()._make(directory)

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
