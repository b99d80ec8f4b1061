"""Carrying out one part of a job, and making the output of all parts, at whatever place.

a part:    plan -> its files -> move into a place of its own -> where all parts put them -> a note
a commit:  all notes -> compare what was read -> describe -> the output appears

A `Place` (`files/place`) says where that is, and what makes an output of it.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from shardkit.core.text import count, escape, in_shell, listed
from shardkit.core.threads import Progress
from shardkit.errors import (
    IncompleteError,
    IntegrityError,
    Interrupted,
    ResourceError,
    ShardkitError,
    SourceError,
    UsageError,
    causes,
    signal_of,
)
from shardkit.files.digest import sha256_of
from shardkit.files.place.contract import Place, given_up
from shardkit.operations.parts.agreement import Agreement, read_all
from shardkit.operations.parts.alone import Alone
from shardkit.operations.parts.notes import Note, load_note
from shardkit.operations.parts.part import ALL, Part, share_of
from shardkit.operations.parts.results import PartResult
from shardkit.transfer.checks import CheckedSource, Readings, SourceCheck, have_read
from shardkit.transfer.digests import is_intact
from shardkit.transfer.execute import (
    Describer,
    ExecuteOptions,
    Execution,
    FileDigest,
)
from shardkit.transfer.fill import CrcPiece, crc_of
from shardkit.transfer.plan import TransferPlan

_T = TypeVar("_T")
_MOST_TRIES = 20  # each only if another process was in the middle of a commit


class Describe(Protocol):
    """Returns what writes the rest of the files into a directory."""

    def __call__(self, directory: str, /, *, shards: str | None = None) -> Describer:
        """Return it.

        Args:
            directory: where the rest goes.
            shards: where the described files lie, if not there: a directory of a store, from whose parent they are named.
        """
        ...


class Divided:
    """A job that several processes carry out.

    Args:
        place: where its files go.
        agreement: what they have to agree on.
        plan: what to move.
        data_nbytes: bytes of all holes of each image.
        describe: writes what lies beside the images.
        options: how to move.
        progress: told of the bytes.
        is_run: one process carries out all of it, or several that were started alike.
    """

    def __init__(
        self,
        place: Place,
        agreement: Agreement,
        plan: TransferPlan,
        data_nbytes: Sequence[int],
        describe: Describe,
        options: ExecuteOptions,
        progress: Progress,
        *,
        is_run: bool = False,
    ) -> None:
        self.place, self._agreement, self._plan, self._describe = place, agreement, plan, describe
        self._destination, self._shared = place.destination, place.notebook
        self._images, self._data_nbytes = list(plan.images), data_nbytes
        self._options, self._progress, self._is_run = options, progress, is_run
        self._own = dict[str, Note]()  # what a run has written itself it need not read again
        self.alone = Alone(place, agreement)
        self.check = SourceCheck(plan.catalog) if options.check_source else None
        """Compares what is read with what the source records."""
        self.was_there = False
        """True once the output is known to have been there before this process began."""

    # Beginning

    def _begin(self) -> bool:
        """Put down what all processes agree on, unless another one has; False if all is done already.

        Raises:
            UsageError: parts of another plan are under way, or the destination is there.
        """
        if self._is_run or not self._shared.is_open:
            self.place.check()  # before hours of computing
        try:
            for _ in range(_MOST_TRIES):
                self._shared.reopen()
                has_begun = self.alone.begin() if self._is_run else self._begin_part()
                if has_begun is not None:
                    return has_begun
        except ResourceError:
            if self.place.needs_notebook or not self._is_run:
                raise
            return True
        UsageError.raise_for(
            [escape(path) for path in (() if self._is_run else self.place.closed())],
            f"parts have committed {escape(self._destination)}, and it is another one by now",
            hint=f"remove what they left: `shardkit abort {in_shell(self._destination)}`",
        )
        raise ResourceError(
            f"{escape(self._destination)}: others begin and give up all the time", hint="run it again"
        )

    def _begin_part(self) -> bool | None:
        """Begin as one of several; as `Alone.begin`."""
        place = self.place
        closed = place.closed()
        # With --overwrite too: else late parts would write again what others have just committed.
        if place.is_committed:
            return False
        if closed:
            return None
        self._check_alone()
        is_ours = False
        try:
            is_ours = self._shared.create(self._agreement.dump(), self._agreement.folders)
            if is_ours:
                self._check_alone()
            # The last part may have committed meanwhile, and removed what it found.
            if place.another_has_made():
                return False
            place.check_replaced(is_ours=is_ours)
        except (IncompleteError, SourceError):
            if self._shared.is_open:
                raise
            return None  # given up, or committed, at this very moment
        except UsageError:
            if is_ours and self._shared.is_over:  # else others have joined, and go on with it
                self._shared.remove()
            if place.is_committed:
                return False
            raise
        return True

    def _check_alone(self) -> None:
        """Refuse if parts of another plan are under way."""
        others = read_all(self.place.others())
        if others:
            raise self._other_plan([agreement for _, agreement in others])

    def _begin_again(self) -> None:
        """Forget what was written here, if another process has removed it."""
        if self.place.is_lost:
            self.place.begin_again()
            self._own.clear()

    def _unless_taken(self, work: Callable[[], _T]) -> _T:
        """Do something, and once more where a commit had taken the data meanwhile; that one may have died."""
        for _ in range(_MOST_TRIES):
            try:
                return work()
            except (OSError, ShardkitError) as error:
                is_gone = any(isinstance(cause, FileNotFoundError) for cause in causes(error))
                is_back = self._shared.reopen() or (is_gone and self.place.is_open)
                # Asked last: that commit may have ended since the work looked.
                if not is_back and not (is_gone and self.place.another_has_made()):
                    raise
        return work()

    # A part

    @property
    def plan(self) -> TransferPlan:
        """What is moved."""
        return self._plan

    @property
    def options(self) -> ExecuteOptions:
        """How it is moved."""
        return self._options

    def files_of(self, part: Part) -> list[int]:
        """Return the numbers of the files that a part writes."""
        return share_of([image.size for image in self._images], part)

    def bytes_left(self, part: Part) -> int:
        """Return the size of the files that a part still has to write."""
        mine = self.files_of(part)
        done = {number for number, _ in self._notes(mine)}
        return sum(self._images[n].size for n in {*mine} - done)

    def run(self, part: Part) -> PartResult:
        """Write the files of a part that are not finished yet.

        Raises:
            UsageError: parts of another plan are under way for this destination.
            IncompleteError: somebody gave it up meanwhile.
            IntegrityError, ResourceError: as `Execution.run`.
        """
        for _ in range(_MOST_TRIES):
            try:
                return self._unless_taken(lambda: self._run(part))
            except (IncompleteError, ResourceError):
                # Parts end where somebody has given them up; if others have begun anew since, they go on with these.
                if not (self.place.is_lost and (self._is_run or self._shared.is_open)):
                    raise
            self._begin_again()
        return self._unless_taken(lambda: self._run(part))

    def _run(self, part: Part) -> PartResult:
        if not self._begin():
            self.was_there = True
            return self.all_done(part)
        try:
            with self.place.workplace() as directory:
                if not self._is_run:  # a damaged record is refused before anything is moved
                    list(read_all([self._shared]))
                self._tell(part, is_done=False)
                resumed = self._move(self.files_of(part), directory, self._label(part))
                self._tell(part, is_done=True)
            result = self.result(part, resumed_files=resumed)
            if self._is_run or self.place.is_open:
                return result
            raise FileNotFoundError(errno.ENOENT, "its directory is gone", self._shared.path)
        except (OSError, ShardkitError) as error:
            if self.place.is_open:
                if isinstance(error, OSError):
                    raise self._cannot_write(error) from error
                raise
            if not self.place.another_has_made():
                raise given_up(self._destination) from error
            return self.result(part, is_committed=True)  # by others, who had this part's files too

    def compared(self) -> CheckedSource:
        """Return how much of what was read was compared with what the source records."""
        return CheckedSource() if self.check is None else self.check.judge().checked

    def all_done(self, part: Part) -> PartResult:
        """Return the outcome of a part whose output was there before it began."""
        return self.result(part, is_committed=True, resumed_files=len(self.files_of(part)))

    def result(self, part: Part, *, resumed_files: int = 0, is_committed: bool = False) -> PartResult:
        """Return the outcome of a part, as far as it can be seen now."""
        mine = self.files_of(part)
        missing = [] if is_committed else self._missing()
        return PartResult(
            part=str(part),
            found=part.found,
            staging=self._shared.path,
            plan=self._agreement.plan,
            num_files=len(mine),
            written_bytes=sum(self._images[number].size for number in mine),
            resumed_files=resumed_files,
            finished_files=len(self._images) - len(missing),
            missing=tuple(str(each) for each, _ in self._agreement.missing_parts(missing)),
            is_committed=is_committed,
            by_another=is_committed,
        )

    def _missing(self) -> list[int]:
        """Return the numbers of the files without a note, as far as this machine sees them."""
        missing = self._shared.done.missing(len(self._images))
        return [number for number in missing if self._images[number].name not in self._own]

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
            f"`shardkit abort {in_shell(self._destination)}`",
        )

    def _tell(self, part: Part, *, is_done: bool) -> None:
        """Note for people who carries out a part."""
        content = {"host": socket.gethostname(), "pid": os.getpid(), "found": part.found, "is_done": is_done}
        self.place.say(f"{part.number}-of-{part.count}.json", json.dumps(content).encode())

    def _label(self, part: Part) -> str:
        """Return what the progress of a part is called."""
        return self._agreement.command.verb if self._is_run else f"part {part}"

    def _notes(self, numbers: Sequence[int]) -> Iterator[tuple[int, Note]]:
        """Yield number and note of those files that are finished and still there; the check gets what was read for them."""
        own = {
            number: note
            for number in numbers
            if (note := self._own.get(self._images[number].name)) is not None and self.place.has(number)
        }
        yield from own.items()
        for number, content in self.place.notes([number for number in numbers if number not in own]):
            note = self._parsed(number, content)
            if note is not None:
                if self.check is not None and note.readings is not None:
                    self.check.put(note.digest.name, note.readings)
                yield number, note

    def _parsed(self, number: int, content: Mapping[str, Any]) -> Note | None:
        """Return a note that was read; None if it is damaged, or does not say what was read of the source."""
        image = self._images[number]
        note = load_note(content, image.name, image.size)
        return None if note is None or (self.check is not None and note.readings is None) else note

    def _forget(self, numbers: Sequence[int]) -> None:
        """Remove notes: the files are written anew."""
        for number in numbers:
            self._own.pop(self._images[number].name, None)
        self.place.forget(numbers)

    def _publish(self, directory: str, number: int, note: Note) -> None:
        """Put a finished file where all parts have theirs, and note it. May be called from any thread."""
        self.place.publish(
            directory,
            number,
            note.dump(),
            crc32=note.digest.crc32,
            counts=lambda there: self._parsed(number, there) is not None,
        )
        if self._is_run:
            self._own[note.digest.name] = note

    def _is_whole(self, note: Note) -> bool:
        """True if a file that was finished before may be taken as it is: no run reads twice what it has written."""
        is_read = self._is_run and not self.place.vouches and note is not self._own.get(note.digest.name)
        return not is_read or is_intact(note.digest, self.place.data)

    def _move(self, mine: Sequence[int], directory: str, label: str) -> int:
        """Write files; return how many were finished before."""
        notes, useless = list[Note](), list[int]()
        for number, note in self._notes(mine):
            notes += [note] if (is_whole := self._is_whole(note)) else []
            useless += [] if is_whole else [number]
        self._forget(useless)  # else they would count for more than the files that are written now
        finished = {note.digest.name: note.digest for note in notes}
        names = {self._images[number].name: number for number in mine}
        self._progress.start(sum(self._data_nbytes[number] for number in mine), label)
        if finished:
            self._progress.advance(sum(self._data_nbytes[names[name]] for name in finished))

        def on_finished(digest: FileDigest, readings: Readings) -> None:
            number = names[digest.name]
            if takes_sha256:  # now, while the file is still in memory: whoever commits would read all files
                path = os.path.join(directory, digest.name)
                digest = replace(digest, sha256=sha256_of(path, digest.name))
            note = Note(
                digest=digest,
                readings=None if self.check is None else readings,
                scattered=[(fqn, execution.pieces[fqn]) for fqn in scattered.get(number, ())],
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
            raise
        finally:
            self._progress.finish()  # whoever is last goes on with the commit, which moves no bytes of the part
        return len(finished)

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
        lacks = 0
        for _ in range(_MOST_TRIES if self._is_run else 0):
            try:
                return self._unless_taken(self._commit)
            except (OSError, ShardkitError) as error:
                is_here = self.place.is_open or self.place.has_made
                lacks += is_here and isinstance(error, IncompleteError)
                if is_here and (lacks > 1 or not isinstance(error, IncompleteError)):
                    raise
            # A note could not be read, or a twin has removed it; or all of this was removed, by a twin or with its commit.
            self._begin_again()
            if self.run(ALL).is_committed:
                return False
        try:
            return self._unless_taken(self._commit)
        except IncompleteError:  # notes are missing too while another commit has the data
            self._shared.reopen()
            return self._unless_taken(self._commit)

    def _commit(self) -> bool:
        try:
            with self.place.workplace() as directory:
                return self._make(directory)
        except (OSError, ShardkitError) as error:
            if self.place.another_has_made():
                return False
            if not (self.place.is_open or self.place.has_made):
                raise given_up(self._destination) from FileNotFoundError(self._shared.path)
            if isinstance(error, OSError):
                raise self._cannot_write(error) from error
            raise

    def _cannot_write(self, error: OSError) -> ResourceError:
        return ResourceError(f"cannot write to {escape(self._shared.path)}: {error.strerror}")

    def _make(self, directory: str) -> bool:
        """Describe what all parts wrote, and let the output appear; False if another process has made it."""
        if self.place.another_has_made():
            return False
        digests, scattered = self._finished()
        with self.place.describing(directory) as beside:
            descriptions = self._describe(beside.path, shards=beside.shards)
            for digest in digests.values():
                if digest.name not in beside.linked:
                    descriptions.add_file(digest)
            self._finish(directory, descriptions, digests, scattered)
            return self.place.commit(beside.path)

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
            descriptions.finish(*execution.run())
        except IntegrityError:
            self._forget_damaged()
            raise

    def interrupted(self, interrupt: KeyboardInterrupt) -> Interrupted:
        """Return the error of a process that a signal has ended: what became of the output, and what to type."""
        shown, give_up = in_shell(self._destination), ""
        became = "is not whole; the files that were finished are kept"
        if self._is_run:
            became = f"was not made; {self.place.left}"
            if self.place.vouches:
                give_up = f", or give it up: `shardkit abort {shown}`"
        return Interrupted(
            f"interrupted: {escape(self._destination)} {became}",
            signum=signal_of(interrupt),
            hint=f"run the same command again to resume{give_up}",
        )

    def warnings(self) -> tuple[str, ...]:
        """Return the notes about the work of all parts."""
        return tuple(self.place.warnings()) if self.was_there else ()

    def _finished(self) -> tuple[dict[str, FileDigest], dict[str, int | None]]:
        """Return the digest of every file, and the CRC-32 of every scattered tensor."""
        digests, missing = dict[str, FileDigest](), {*range(len(self._images))}
        read = list[tuple[str, Sequence[CrcPiece] | None]]()
        for number, note in self._notes(range(len(self._images))):
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
        if self.check is not None:
            damaged = {(damage.file, damage.entry) for damage in self.check.judge().damaged}
            notes = self._notes(range(len(self._images)))
            self._forget([n for n, note in notes if note.readings and have_read(note.readings, damaged)])


def incomplete(destination: str, agreement: Agreement, files: Sequence[int]) -> IncompleteError:
    """Return the error that names the parts that lack files, and what to type."""
    parts = agreement.missing_parts(files)
    return IncompleteError(
        f"{escape(destination)}: {count(len(files), 'file')} of {len(agreement.files)} "
        f"{'is' if len(files) == 1 else 'are'} missing, of {count(len(parts), 'part')}",
        problems=[
            f"part {part}: {count(number, 'file')}; {agreement.command_of(part, destination)}"
            for part, number in parts
        ],
        hint="run these parts, then shardkit commit again; shardkit status shows who is at work",
    )
