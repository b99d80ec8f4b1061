"""Carrying out one part of a job, and making the output of all parts, wherever it goes.

a part:    plan -> its files -> move into a place of its own -> where all parts put them -> a note
a commit:  all notes -> compare what was read -> describe -> the output appears

`on_disk` and `uploading/in_store` say where that is, and what makes an output of it.
"""

from __future__ import annotations

import json
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from shardkit.core.text import count, escape, in_shell, listed
from shardkit.core.threads import Progress
from shardkit.errors import IncompleteError, IntegrityError, ResourceError, ShardkitError, UsageError
from shardkit.files.digest import sha256_of
from shardkit.operations.parts.agreement import Agreement, PartsStaging, read_all, read_parts
from shardkit.operations.parts.notes import Note
from shardkit.operations.parts.part import Part, share_of
from shardkit.osft.phase import PhaseAt
from shardkit.transfer.chains import Evidence
from shardkit.transfer.checks import SourceCheck
from shardkit.transfer.execute import Describer, ExecuteOptions, Execution, FileDigest
from shardkit.transfer.fill import CrcPiece, crc_of
from shardkit.transfer.plan import TransferPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """What became of a part."""

    part: str
    """Such as "3/16"."""
    found: str
    """What told the number; empty where a person did."""
    staging: str
    """The directory that all parts share."""
    plan: str
    """Hash of what all parts agree on."""
    num_files: int
    """Files of this part."""
    written_bytes: int
    """Size of these files."""
    resumed_files: int
    """Those of them that were finished before."""
    finished_files: int
    """Of all parts, as far as this one can see."""
    num_weights: int = 0
    """Weights of this part that become factors, before files are written."""
    all_weights: int = 0
    """Those of all parts; 0 if there are none."""
    resumed_weights: int = 0
    """Those of this part whose factors had been computed before."""
    finished_weights: int = 0
    """Those of all parts that have factors, as far as this one can see."""
    missing: tuple[str, ...]
    """The parts that lack something, as far as this one can see: factors, where some are missing, or else files."""
    is_committed: bool
    """The output is there: this part was the last to finish, or another process has committed meanwhile."""
    by_another: bool = False
    """Another process has made the output, and this one knows its own share alone."""


class Divided(ABC):
    """A job that several processes carry out.

    Args:
        destination: absolute.
        staging: what all parts share.
        agreement: what they have to agree on.
        plan: what to move.
        data_nbytes: bytes of all holes of each image.
        options: how to move.
        progress: told of the bytes.
        phase: gives what computes factors, of which files are made; None if there are none. Files are written by the parts that see
            those of all weights then: at the latest by the last one, or by whoever commits.
        is_run: one process carries out all of it, or several that were started alike.
    """

    def __init__(
        self,
        destination: str,
        staging: PartsStaging,
        agreement: Agreement,
        plan: TransferPlan,
        data_nbytes: Sequence[int],
        options: ExecuteOptions,
        progress: Progress,
        phase: PhaseAt | None,
        *,
        is_run: bool = False,
    ) -> None:
        self._destination, self._agreement, self._plan = destination, agreement, plan
        self._images, self._data_nbytes = list(plan.images), data_nbytes
        self._options, self._progress = options, progress
        self._shared, self._resumed_weights = staging, 0
        self._is_run, self._own = (
            is_run,
            dict[str, Note](),
        )  # what it has written itself it need not read again
        self._phase = None if phase is None else phase(staging.factors)
        self.check = SourceCheck(plan.catalog) if options.check_source else None
        """Compares what is read with what the source records."""
        self.was_there = False
        """True once the output is known to have been there before this process began."""
        self.on_joined: Callable[[Mapping[str, str]], object] = lambda _: None
        """Is told with which versions of packages the part began that began, which may have been this one, and with which a
        file was finished that this one goes on with."""

    # Where the files go

    @abstractmethod
    def _begin(self) -> bool:
        """Put down what all parts agree on, unless another part has; False if all is done already.

        Raises:
            UsageError: parts of another plan are under way, or the destination is there.
        """

    @abstractmethod
    def _writing(self) -> AbstractContextManager[str]:
        """Give the directory in which this process writes files."""

    @abstractmethod
    def _room_for_records(self) -> AbstractContextManager[str]:
        """Give an empty directory on this machine, where records are until all parts have them, and perhaps longer."""

    @abstractmethod
    def _publish(self, directory: str, number: int, note: Note) -> None:
        """Put a finished file where all parts have theirs, and note it. May be called from any thread."""

    @abstractmethod
    def _notes(self, numbers: Sequence[int]) -> Iterator[tuple[int, Note]]:
        """Yield number and note of those files that are finished and still there."""

    @abstractmethod
    def _forget(self, numbers: Sequence[int]) -> None:
        """Remove notes: the files are written anew."""

    @abstractmethod
    def _say(self, name: str, content: bytes) -> None:
        """Leave something for people to see."""

    @abstractmethod
    def _is_open(self) -> bool:
        """True while the directory exists that this process has begun or joined."""

    @abstractmethod
    def _has_another_committed(self) -> bool:
        """True if another process has made the output."""

    @abstractmethod
    def _make(self, directory: str) -> bool:
        """Make the output of what all parts wrote; False if another process has."""

    @property
    @abstractmethod
    def is_committed(self) -> bool:
        """True if the output is known to be what processes with this plan have made."""

    @property
    @abstractmethod
    def has_made(self) -> bool:
        """True once this process has made the output."""

    @property
    @abstractmethod
    def is_left(self) -> bool:
        """True if the output is there, and what comes after it may not be done: whoever made it is not known to be alive."""

    @property
    def left(self) -> str:
        """Say what a run leaves after a signal."""
        return "what was finished is kept beside it"

    def attended(self) -> AbstractContextManager[None]:
        """Let others see, where they can, that this process does what comes after the output."""
        return nullcontext()

    @abstractmethod
    def clean_up(self, *, keeps_mark: bool) -> None:
        """Remove what is left after the commit, but what parts that come late look for."""

    # A part

    @property
    def plan(self) -> TransferPlan:
        """What is moved."""
        return self._plan

    def files_of(self, part: Part) -> list[int]:
        """Return the numbers of the files that a part writes."""
        return share_of([image.size for image in self._images], part)

    def bytes_left(self, part: Part) -> int:
        """Return the size of the files that a part still has to write."""
        mine = self.files_of(part)
        return sum(self._images[number].size for number in {*mine} - {n for n, _ in self._notes(mine)})

    def weights_of(self, part: Part) -> list[int]:
        """Return the numbers of the weights whose factors a part computes, by what they take."""
        return share_of([operations for _, operations in self._agreement.weights], part)

    def record_bytes_left(self, part: Part) -> int:
        """Return the size of the records that a part still has to compute."""
        return 0 if self._phase is None else self._phase.bytes_left(self.weights_of(part))

    def run(self, part: Part) -> PartResult:
        """Write the files of a part that are not finished yet.

        Raises:
            UsageError: parts of another plan are under way for this destination.
            IncompleteError: somebody gave it up meanwhile.
            IntegrityError, ResourceError: as `Execution.run`.
        """
        if not self._begin():
            self.was_there = True
            return self.all_done(part)
        try:
            with self._writing() as directory:
                self._tell(part, is_done=False)
                for _, agreement in read_all([self._shared]) if self._agreement.versions else ():
                    if agreement.num_parts > 1:
                        self.on_joined(agreement.versions or {})
                resumed = self._carry_out(part, directory)
                self._tell(part, is_done=True)
        except (OSError, ShardkitError) as error:
            if self._is_open():
                if isinstance(error, OSError):
                    raise self._cannot_write(error) from error
                raise
            if not self._has_another_committed():
                raise self._given_up() from error
            return self.result(part, is_committed=True)  # by others, who had this part's files too
        return self.result(part, resumed_files=resumed)

    def all_done(self, part: Part) -> PartResult:
        """Return the outcome of a part whose output was there before it began."""
        return self.result(part, is_committed=True, resumed_files=len(self.files_of(part)))

    def result(self, part: Part, *, resumed_files: int = 0, is_committed: bool = False) -> PartResult:
        """Return the outcome of a part, as far as it can be seen now."""
        mine = self.files_of(part)
        missing = [] if is_committed else self._missing()
        without = [] if is_committed or self._phase is None else self._phase.missing()
        return PartResult(
            part=str(part),
            found=part.found,
            staging=self._shared.path,
            plan=self._agreement.plan,
            num_files=len(mine),
            written_bytes=sum(self._images[number].size for number in mine),
            resumed_files=resumed_files,
            finished_files=len(self._images) - len(missing),
            num_weights=len(self.weights_of(part)),
            all_weights=len(self._agreement.weights),
            resumed_weights=self._resumed_weights,
            finished_weights=len(self._agreement.weights) - len(without),
            missing=tuple(str(each) for each, _ in self._agreement.missing_parts(missing, without)),
            is_committed=is_committed,
            by_another=is_committed,
        )

    def _missing(self) -> list[int]:
        """Return the numbers of the files without a note, as far as this machine sees them."""
        noted = self._shared.noted()
        return [number for number in range(len(self._images)) if number not in noted]

    def _other_plan(self, others: Sequence[Agreement]) -> UsageError:
        problems = [
            f"{other.plan[:16]}: {difference}"
            for other in others
            for difference in (list(other.differences(self._agreement)) or ["no difference is known"])
        ]
        are = listed([other.plan[:16] for other in others])
        return UsageError(
            f"parts of another plan are under way for {escape(self._destination)}: {are} there, "
            f"{self._agreement.plan[:16]} here",
            problems=problems,
            hint="give all parts the same command, source and version of shardkit; or give up what is there: "
            f"`shardkit status {in_shell(self._destination)} --abort`",
        )

    def _tell(self, part: Part, *, is_done: bool) -> None:
        """Note for people who carries out a part."""
        content = {"host": socket.gethostname(), "pid": os.getpid(), "found": part.found, "is_done": is_done}
        self._say(f"{part.number}-of-{part.count}.json", json.dumps(content).encode())

    @property
    def _computed(self) -> str | None:
        """Stands for what was computed for the files; None if nothing was, or not all of it is known."""
        return None if self._phase is None else self._phase.digest

    def _counts(self, note: Note) -> bool:
        """True if a file that is there may be one of the output."""
        # What was made of other factors is no file of this output; before all are known, none is.
        is_known = self._phase is None or self._computed is not None
        return is_known and (self.check is None or note.source is not None) and note.factors == self._computed

    def _carry_out(self, part: Part, directory: str) -> int:
        """Do what a part has to do; return how many of its files were finished before."""
        mine, label = self.files_of(part), self._label(part)
        if self._phase is None:
            return self._move(mine, directory, label)
        for versions in self._phase.look_through() if self._is_run else ():
            self.on_joined(versions)
        with self._room_for_records() as work:
            self._resumed_weights = self._phase.compute(
                self.weights_of(part), work, self.check, self._progress, f"{label}, factors"
            )
            if self._phase.take(self.check):  # others lack some
                return 0
            resumed = sum(1 for _ in self._notes(mine))
            rest = [number for number in range(len(self._images)) if number not in mine]
            if self._is_another_at_work(part):  # it writes its own
                self._move(mine, directory, label)
                self._move(rest, directory, f"{label}, of others")
            else:
                self._move(mine + rest, directory, label)
        return resumed

    def _label(self, part: Part) -> str:
        """Return what the progress of a part is called."""
        return self._agreement.command.verb if self._is_run else f"part {part}"

    def _is_whole(self, note: Note) -> bool:
        """True if a file that was finished before may be taken as it is."""
        return self._load(note)

    def _is_another_at_work(self, part: Part) -> bool:
        """True if another part has begun and has not said that it ended; it may have died."""
        own = (part.number, part.count)
        return any(place != own and not content.get("is_done") for place, content in read_parts(self._shared))

    def _move(self, mine: Sequence[int], directory: str, label: str) -> int:
        """Write files; return how many were finished before."""
        notes, useless = list[Note](), list[int]()
        for number, note in self._notes(mine):
            notes += [note] if (is_whole := self._is_whole(note)) else []
            useless += [] if is_whole else [number]
        self._forget(useless)  # else they would count for more than the files that are written now
        for note in notes:
            self.on_joined(note.versions or {})
        finished = {note.digest.name: note.digest for note in notes}
        names = {self._images[number].name: number for number in mine}
        self._progress.start(sum(self._data_nbytes[number] for number in mine), label)
        if finished:
            self._progress.advance(sum(self._data_nbytes[names[name]] for name in finished))

        def on_finished(digest: FileDigest, read: Evidence) -> None:
            number = names[digest.name]
            if takes_sha256:  # now, while the file is still in memory: whoever commits would read all files
                path = os.path.join(directory, digest.name)
                digest = replace(digest, sha256=sha256_of(path, digest.name))
            note = Note(
                digest=digest,
                source=None if self.check is None else self.check.dump(read),
                scattered=[(fqn, execution.pieces[fqn]) for fqn in scattered.get(number, ())],
                factors=self._computed,
                versions=self._agreement.versions,
            )
            self._publish(directory, number, note)

        takes_sha256 = bool(self._agreement.command.options.get("sha256"))
        scattered = self._scattered()
        execution = Execution(
            self._plan,
            directory,
            self._options,
            finished=finished,
            left={image.name for image in self._images} - names.keys(),
            read_for={
                fqn: name
                for name in names.keys() - finished.keys()
                for fqn in scattered.get(names[name], ())
                if fqn in self._plan.gathered
            },
            on_finished=on_finished,
            progress=self._progress,
            check=self.check,
        )
        try:
            execution.run()
        except IntegrityError:
            self._forget(mine)  # they vouch for what was read
            if self._phase is not None:
                self._phase.forget_damaged(self.check)
            raise
        finally:
            self._progress.finish()  # whoever is last goes on with the commit, which moves no bytes of the part
        return len(finished)

    def _load(self, note: Note) -> bool:
        # What this process has read itself is in `check` already.
        return self.check is None or note is self._own.get(note.digest.name) or self.check.load(note.source)

    def _scattered(self) -> dict[int, list[str]]:
        """Return the scattered tensors of each file.

        One that is gathered is read once more as a whole, for its CRC-32: by whoever writes one of its files.
        """
        found = dict[int, list[str]]()
        for tensor, (fqn, holes) in enumerate(self._plan.scattered.items()):
            files = list(dict.fromkeys(file for file, _ in holes))
            for file in [files[tensor % len(files)]] if fqn in self._plan.gathered else files:
                found.setdefault(file, []).append(fqn)
        return found

    # All parts

    def commit(self) -> bool:
        """Make the output of what all parts wrote; False if another process has.

        Raises:
            IncompleteError: a part lacks something.
            IntegrityError: what the parts read is not what the source records, or they read different things.
            UsageError: something is at the destination.
        """
        try:
            with self._writing() as directory:
                self._write_rest(directory)
                return self._make(directory)
        except (OSError, ShardkitError) as error:
            if self._has_another_committed():
                return False
            if isinstance(error, OSError):
                raise self._cannot_write(error) from error
            raise

    def _write_rest(self, directory: str) -> None:
        """Write the files whose parts have ended while others lacked factors.

        Raises:
            IncompleteError: a weight has no factors.
        """
        if self._phase is None:
            return
        without = self._phase.take(self.check)
        if without:
            raise incomplete(self._destination, self._agreement, [], without)
        done = {number for number, _ in self._notes(range(len(self._images)))}
        rest = [number for number in range(len(self._images)) if number not in done]
        if rest:
            self._move(rest, directory, "files")

    def _given_up(self) -> IncompleteError:
        return IncompleteError(
            f"{escape(self._destination)} was given up meanwhile", hint="run all parts again to begin anew"
        )

    def _cannot_write(self, error: OSError) -> ResourceError:
        return ResourceError(f"cannot write to {escape(self._shared.path)}: {error.strerror}")

    def _finish(
        self,
        directory: str,
        descriptions: Describer,
        digests: Mapping[str, FileDigest],
        scattered: Mapping[str, int | None],
    ) -> None:
        """Compare what all parts have read with what the source records, and describe the output."""
        execution = Execution(
            self._plan,
            directory,
            self._options,
            finished=digests,
            scattered=scattered,
            on_finished=lambda *_: None,
            progress=self._progress,
            check=self.check,
        )
        try:
            found = execution.run()
            descriptions.finish(found[0], self._compared(found[1]))
        except IntegrityError:
            self._forget_damaged()
            raise

    def _compared(self, scattered: dict[str, int]) -> dict[str, int]:
        """Return the CRC-32s of scattered tensors, and of factors.

        Raises:
            IntegrityError: other factors were read than were computed.
        """
        if self._phase is None or not self._options.digests:
            return scattered
        computed = self._phase.job.crcs
        IntegrityError.raise_for(
            [escape(name) for name, crc in computed.items() if scattered.get(name, crc) != crc],
            "other factors were read than were computed: a disk fails",
            hint="run it again: what is damaged is made anew",
        )
        return {**scattered, **computed}

    def warnings(self) -> tuple[str, ...]:
        """Return the notes about the work of all parts, and about all factors."""
        return () if self._phase is None else tuple(self._phase.warnings())

    def _finished(self) -> tuple[dict[str, FileDigest], dict[str, int | None]]:
        """Return the digest of every file, and the CRC-32 of every scattered tensor."""
        digests, missing = dict[str, FileDigest](), {*range(len(self._images))}
        read = list[tuple[str, Sequence[CrcPiece] | None]]()
        for number, note in self._notes(range(len(self._images))):
            if self._load(note):
                missing.remove(number)
                digests[note.digest.name] = note.digest
                read += note.scattered
        if missing:
            raise incomplete(self._destination, self._agreement, sorted(missing))
        return digests, self._scattered_crcs(read)

    def _scattered_crcs(self, read: Iterable[tuple[str, Sequence[CrcPiece] | None]]) -> dict[str, int | None]:
        """Return the CRC-32 of every scattered tensor from what parts have read of it; None where there is none."""
        found, pieces = dict[str, int | None](), dict[str, set[CrcPiece]]()
        different = list[str]()
        for fqn, of_note in read:
            if fqn not in self._plan.scattered:  # other records of the source are open here
                continue
            if of_note is None:
                found[fqn] = None
            else:
                pieces.setdefault(fqn, set()).update(of_note)
        for name, held in pieces.items():
            dtype = self._plan.scattered[name][0][1].dtype
            crc, differ = crc_of(held, self._plan.catalog.tensors[name].num_elements * dtype.itemsize)
            different += [name] if differ else []
            if crc is not None:  # else the tensor is read once more, for its CRC-32
                found[name] = crc
        self._forget(sorted({file for name in different for file, _ in self._plan.scattered[name]}))
        IntegrityError.raise_for(
            sorted(map(escape, different)),
            "parts read different values of the same tensors: the source changed, or a disk fails",
            hint="run all parts again: the files with these tensors are written anew",
        )
        return found

    def _forget_damaged(self) -> None:
        """Let the files be written again that were made of bytes that differ."""
        notes, check = self._notes(range(len(self._images))), self.check
        if self._phase is not None:
            self._phase.forget_damaged(check)
            self._forget(range(len(self._images)))  # factors are in all of them
        elif check is not None:
            self._forget([n for n, note in notes if note.source and check.has_doubts(note.source)])


def incomplete(
    destination: str, agreement: Agreement, files: Sequence[int], weights: Sequence[int] = ()
) -> IncompleteError:
    """Return the error that names the parts that lack files, or weights without factors, and what to type."""
    parts = agreement.missing_parts(files, weights)
    of, missing = (agreement.weights, weights) if weights else (agreement.files, files)
    what, unit = ("factors of ", "weight") if weights else ("", "file")
    return IncompleteError(
        f"{escape(destination)}: {what}{count(len(missing), unit)} of {len(of)} "
        f"{'is' if len(missing) == 1 and not weights else 'are'} missing, of {count(len(parts), 'part')}",
        problems=[
            f"part {part}: {count(number, unit)}; {agreement.command_of(part, destination)}"
            for part, number in parts
        ],
        hint="run these parts, then shardkit commit again; shardkit status shows who is at work",
    )
