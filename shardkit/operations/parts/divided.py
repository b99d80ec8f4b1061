"""Carrying out one part of a job, and making the output of all parts.

a part:    plan -> its files, largest first -> move into a place of its own -> a name in `data` -> a note
a commit:  all notes -> compare what was read -> describe -> one rename
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from shardkit.core.text import count, escape, listed
from shardkit.core.threads import Progress
from shardkit.errors import IncompleteError, IntegrityError, ResourceError, ShardkitError, UsageError
from shardkit.files import storage
from shardkit.files.digest import sha256_of
from shardkit.files.shared import SharedStaging, remove_marks, shared_of
from shardkit.files.staging import identity_of
from shardkit.operations.parts.agreement import Agreement, read_all
from shardkit.operations.parts.notes import Note, name_of, noted_in, read_note, remove_notes
from shardkit.operations.parts.part import Part, divide
from shardkit.transfer.chains import Run
from shardkit.transfer.checks import SourceCheck
from shardkit.transfer.execute import ExecuteOptions, Execution, FileDigest
from shardkit.transfer.fill import CrcPiece, crc_of
from shardkit.transfer.plan import TransferPlan

_T = TypeVar("_T")
_MOST_TRIES = 20  # each only if another process was in the middle of a commit


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
    missing: tuple[str, ...]
    """The parts that lack something, as far as this one can see."""
    is_committed: bool
    """The output is there: this part was the last to finish, or another process has committed meanwhile."""


class Describer(Protocol):
    """Writes what lies beside the images."""

    def add_file(self, digest: FileDigest) -> None:
        """Take note of a finished image; may be called from any thread."""
        ...

    def finish(self, digests: Mapping[str, FileDigest], scattered: Mapping[str, int]) -> None:
        """Write the rest, now that every image is on disk; last of all what makes the directory complete.

        Args:
            digests: of every file, those of an interrupted run included.
            scattered: CRC-32 of every scattered tensor, by its source name.
        """
        ...


class Divided:
    """A job that several processes carry out.

    Args:
        destination: absolute.
        agreement: what they have to agree on.
        plan: what to move.
        data_nbytes: bytes of all holes of each image.
        options: how to move.
        progress: told of the bytes.
        before: identity of what was at the destination when this process began.
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
        before: tuple[int, int] | None,
    ) -> None:
        self._destination, self._agreement, self._plan = destination, agreement, plan
        self._images, self._data_nbytes = list(plan.images), data_nbytes
        self._options, self._progress = options, progress
        self.staging = SharedStaging.of_plan(destination, agreement.plan)
        self.check = SourceCheck(plan.catalog) if options.check_source else None
        """Compares what is read with what the source records."""
        self._before, self._is_lost = before, False

    # A part

    def files_of(self, part: Part) -> list[int]:
        """Return the numbers of the files that a part writes."""
        parts = divide([image.size for image in self._images], part.count)
        return [number for number, each in enumerate(parts) if each == part.number]

    def bytes_left(self, part: Part) -> int:
        """Return the size of the files that a part still has to write."""
        return sum(self._images[number].size for number in self.files_of(part) if self._note(number) is None)

    def run(self, part: Part) -> PartResult:
        """Write the files of a part that are not finished yet.

        Raises:
            UsageError: parts of another plan are under way for this destination.
            IncompleteError: somebody gave it up meanwhile.
            IntegrityError, ResourceError: as `Execution.run`.
        """
        return self._unless_taken(lambda: self._run(part))

    def _unless_taken(self, work: Callable[[], _T]) -> _T:
        """Do something, and once more where a commit had taken the data meanwhile; that one may have died."""
        for _ in range(_MOST_TRIES):
            try:
                return work()
            except (OSError, ShardkitError) as error:
                is_gone = any(isinstance(each, FileNotFoundError) for each in (error, error.__cause__))
                if not (self.staging.reopen() or (is_gone and self._is_open())):
                    raise
        return work()

    def _run(self, part: Part) -> PartResult:
        if not self._begin():
            return self.result(part, is_committed=True, resumed_files=len(self.files_of(part)))
        try:
            self._look_before()
            with self._workplace() as work:
                self._tell(work, part, is_done=False)
                resumed = self._move(part, work)
                self._tell(work, part, is_done=True)
        except (OSError, ShardkitError) as error:
            if self._is_open():
                if isinstance(error, OSError):
                    raise self._cannot_write(error) from error
                raise
            if not self._has_another_committed():
                raise IncompleteError(
                    f"{escape(self._destination)} was given up while this part was written",
                    hint="run all parts again to begin anew",
                ) from error
            return self.result(part, is_committed=True)  # by others, who had this part's files too
        return self.result(part, resumed_files=resumed)

    def _look_before(self) -> None:
        """Remember what is at the destination while nobody has committed."""
        before = identity_of(self._destination)
        if self.staging.is_open:
            self._before = before

    def _is_open(self) -> bool:
        """True while the shared directory is there in which this process began; there may be another one by now."""
        return self.staging.is_open and not self._is_lost

    def _has_another_committed(self) -> bool:
        """True if the shared directory is gone, and the destination is another one than before."""
        if self._is_open():
            return False
        return self.staging.is_committed or identity_of(self._destination) not in (None, self._before)

    def result(self, part: Part, *, resumed_files: int = 0, is_committed: bool = False) -> PartResult:
        """Return what became of a part, as far as it can be seen now."""
        mine = self.files_of(part)
        missing = [] if is_committed else self.missing()
        return PartResult(
            part=str(part),
            found=part.found,
            staging=self.staging.path,
            plan=self._agreement.plan,
            num_files=len(mine),
            written_bytes=sum(self._images[number].size for number in mine),
            resumed_files=resumed_files,
            finished_files=len(self._images) - len(missing),
            missing=tuple(str(each) for each, _ in self._agreement.missing_parts(missing)),
            is_committed=is_committed,
        )

    @property
    def is_committed(self) -> bool:
        """True if the destination is what parts of this plan have made."""
        return self.staging.is_committed

    def _begin(self) -> bool:
        """Make the shared directory unless another part has; False if all is done already.

        Raises:
            UsageError: parts of another plan are under way, or the destination is there.
        """
        closed = list[str]()
        for _ in range(_MOST_TRIES):
            self.staging.reopen()
            if self.staging.is_committed:
                return False
            remove_marks(self._destination, only_old=True)
            beside = shared_of(self._destination)
            closed = [escape(each.path) for each in beside if not each.is_open and each.exists]
            if not closed:
                break
        UsageError.raise_for(
            closed,
            f"parts have committed {escape(self._destination)}, and it is another one by now",
            hint=f"remove what they left: `shardkit status {shlex.quote(self._destination)} --abort`",
        )
        folders = {os.path.dirname(image.name) for image in self._images} - {""}
        is_ours = self.staging.create(self._agreement.dump(), folders)
        if is_ours and identity_of(self._destination) != self._before:
            # The last part has committed since this one began: what was made here would never be whole.
            self.staging.remove()
            if self.staging.is_committed:
                return False
            raise UsageError(
                f"{escape(self._destination)} exists: another process has made it while this part began"
            )
        others = read_all([each for each in shared_of(self._destination) if each.path != self.staging.path])
        if others:
            if is_ours:
                self.staging.remove()
            raise self._other_plan(others)
        return True

    def _other_plan(self, others: Sequence[tuple[SharedStaging, Agreement]]) -> UsageError:
        problems = [
            f"{other.plan[:16]}: {difference}"
            for _, other in others
            for difference in (list(other.differences(self._agreement)) or ["no difference is known"])
        ]
        are = listed([other.plan[:16] for _, other in others])
        return UsageError(
            f"parts of another plan are under way for {escape(self._destination)}: {are} there, "
            f"{self._agreement.plan[:16]} here",
            problems=problems,
            hint="give all parts the same command, source and version of shardkit; or give up what is there: "
            f"`shardkit status {shlex.quote(self._destination)} --abort`",
        )

    @contextlib.contextmanager
    def _workplace(self) -> Iterator[str]:
        try:
            with self.staging.workplace() as work:
                try:
                    for folder in sorted({os.path.dirname(image.name) for image in self._images}):
                        storage.make_directories(os.path.join(work, "data", folder))
                    yield work
                except BaseException:
                    self._is_lost = not storage.isdir(work)
                    raise
        except FileNotFoundError:
            self._is_lost = True
            raise

    def _tell(self, work: str, part: Part, *, is_done: bool) -> None:
        """Note for people who carries out a part."""
        content = {"host": socket.gethostname(), "pid": os.getpid(), "found": part.found, "is_done": is_done}
        name = f"{part.number}-of-{part.count}.json"
        self.staging.write_note(work, self.staging.parts, name, json.dumps(content).encode())

    def _note(self, number: int) -> Note | None:
        image = self._images[number]
        note = read_note(self.staging, number, image.name, image.size)
        if note is None or (self.check is not None and note.source is None):
            return None
        return note

    def _move(self, part: Part, work: str) -> int:
        """Write the files; return how many were finished before."""
        mine = self.files_of(part)
        notes = {number: note for number in mine if (note := self._note(number)) is not None}
        finished = {note.digest.name: note.digest for note in notes.values() if self._load(note)}
        names = {self._images[number].name: number for number in mine}
        self._progress.start(sum(self._data_nbytes[number] for number in mine), f"part {part}")
        self._progress.advance(sum(self._data_nbytes[names[name]] for name in finished))

        def on_finished(digest: FileDigest, runs: Sequence[Run]) -> None:
            number = names[digest.name]
            if self._note(number) is not None:  # a twin was faster: its file may be in the output already
                return
            path = os.path.join(work, "data", digest.name)
            if takes_sha256:  # now, while the file is still in memory: whoever commits would read all files
                digest = replace(digest, sha256=sha256_of(path, digest.name))
            self.staging.publish(path, digest.name)
            note = Note(
                digest=digest,
                source=None if self.check is None else self.check.dump(runs),
                scattered=[(tensor, execution.pieces[fqn]) for tensor, fqn in scattered.get(number, ())],
            )
            self.staging.write_note(work, self.staging.done, name_of(number), note.dump())

        takes_sha256 = bool(self._agreement.command.options.get("sha256"))
        scattered = self._scattered()
        execution = Execution(
            self._plan,
            os.path.join(work, "data"),
            self._options,
            finished=finished,
            left={image.name for image in self._images} - names.keys(),
            on_finished=on_finished,
            progress=self._progress,
            check=self.check,
        )
        try:
            execution.run()
        except IntegrityError:
            remove_notes(self.staging, mine)  # they vouch for what was read
            raise
        return len(finished)

    def _load(self, note: Note) -> bool:
        return self.check is None or self.check.load(note.source)

    def _scattered(self) -> dict[int, list[tuple[int, str]]]:
        """Return the scattered tensors of each file, with their numbers."""
        found: dict[int, list[tuple[int, str]]] = {}
        for tensor, (fqn, holes) in enumerate(self._plan.scattered.items()):
            for file in dict.fromkeys(file for file, _ in holes):
                found.setdefault(file, []).append((tensor, fqn))
        return found

    # All parts

    def missing(self) -> list[int]:
        """Return the numbers of the files without a note, as far as this machine sees them."""
        noted = noted_in(self.staging)
        return [number for number in range(len(self._images)) if number not in noted]

    def commit(
        self,
        describe: Callable[[str], AbstractContextManager[Describer]],
        *,
        overwrite: bool,
        check_replaceable: Callable[[], object],
    ) -> bool:
        """Make the output of what all parts wrote; False if another process has.

        Args:
            describe: writes what lies beside the images.
            overwrite: what is at the destination may be replaced.
            check_replaceable: refuses if it may not.

        Raises:
            IncompleteError: a part lacks something.
            IntegrityError: what the parts read is not what the source records, or they read different things.
            UsageError: something is at the destination.
        """
        return self._unless_taken(
            lambda: self._commit(describe, overwrite=overwrite, check_replaceable=check_replaceable)
        )

    def _commit(
        self,
        describe: Callable[[str], AbstractContextManager[Describer]],
        *,
        overwrite: bool,
        check_replaceable: Callable[[], object],
    ) -> bool:
        try:
            self._look_before()
            with self._workplace() as work:
                self._describe(describe, work)
                if overwrite and storage.lexists(self._destination) and self.staging.is_open:
                    check_replaceable()
                names = [image.name for image in self._images]
                return self.staging.commit(work, names, overwrite=overwrite)
        except (OSError, ShardkitError) as error:
            if self._has_another_committed():
                return False
            if isinstance(error, OSError):
                raise self._cannot_write(error) from error
            raise

    def clean_up(self, *, keeps_mark: bool) -> None:
        """Remove what is left after the commit, but what parts that come late look for."""
        if keeps_mark:
            self.staging.keep_mark()
            remove_marks(self._destination, only_old=True)
        else:
            self.staging.remove()
            remove_marks(self._destination)

    def _cannot_write(self, error: OSError) -> ResourceError:
        return ResourceError(f"cannot write to {escape(self.staging.path)}: {error.strerror}")

    def _describe(self, describe: Callable[[str], AbstractContextManager[Describer]], work: str) -> None:
        """Write what lies beside the images: apart from `data`, then by renames into it."""
        digests, scattered = self._finished()
        directory = os.path.join(work, "data")
        linked = self._link_images(directory)
        with describe(directory) as descriptions:
            for digest in digests.values():
                if digest.name not in linked:
                    descriptions.add_file(digest)
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
            except IntegrityError:
                self._forget_damaged()
                raise
            descriptions.finish(*found)
        self.staging.adopt(directory, linked)

    def _finished(self) -> tuple[dict[str, FileDigest], dict[str, int | None]]:
        """Return the digest of every file, and the CRC-32 of every scattered tensor."""
        digests, missing = dict[str, FileDigest](), list[int]()
        read = list[tuple[int, Sequence[CrcPiece] | None]]()
        for number in range(len(self._images)):
            note = self._note(number)
            if note is None or not self._load(note):
                missing.append(number)
                continue
            digests[note.digest.name] = note.digest
            read += note.scattered
        if missing:
            raise incomplete(self._destination, self._agreement, missing)
        return digests, self._scattered_crcs(read)

    def _scattered_crcs(self, read: Iterable[tuple[int, Sequence[CrcPiece] | None]]) -> dict[str, int | None]:
        """Return the CRC-32 of every scattered tensor from what parts have read of it; None where there is none."""
        names, found = list(self._plan.scattered), dict[str, int | None]()
        pieces, different = dict[str, set[CrcPiece]](), list[str]()
        for tensor, of_note in read:
            if not 0 <= tensor < len(names):
                continue
            if of_note is None:
                found[names[tensor]] = None
            else:
                pieces.setdefault(names[tensor], set()).update(of_note)
        for name, held in pieces.items():
            dtype = self._plan.scattered[name][0][1].dtype
            crc, differ = crc_of(held, self._plan.catalog.tensors[name].num_elements * dtype.itemsize)
            different += [name] if differ else []
            if crc is not None:  # else the tensor is read once more, for its CRC-32
                found[name] = crc
        remove_notes(
            self.staging, sorted({file for name in different for file, _ in self._plan.scattered[name]})
        )
        IntegrityError.raise_for(
            sorted(map(escape, different)),
            "parts read different values of the same tensors: the source changed, or a disk fails",
            hint="run all parts again: the files with these tensors are written anew",
        )
        return found

    def _forget_damaged(self) -> None:
        """Let the files be written again that were made of bytes that differ."""
        notes = {number: self._note(number) for number in range(len(self._images))}
        assert self.check is not None
        damaged = [
            n for n, note in notes.items() if note and note.source and self.check.has_doubts(note.source)
        ]
        remove_notes(self.staging, damaged)

    def _link_images(self, directory: str) -> Collection[str]:
        """Let the images lie beside what describes them. What is little more than a header is copied."""
        linked = set[str]()
        for image in self._images:
            source, target = os.path.join(self.staging.data, image.name), os.path.join(directory, image.name)
            if len(image):
                storage.link(source, target)
                linked.add(image.name)
            else:
                with storage.open_file(source, "rb") as file:
                    storage.write_file(target, file.read())
        return linked


def absolute(output: str) -> str:
    """Return the path of a destination, with all links above it resolved."""
    path = storage.absolute(output)
    return os.path.join(storage.realpath(os.path.dirname(path)), os.path.basename(path))


def incomplete(destination: str, agreement: Agreement, missing: Sequence[int]) -> IncompleteError:
    """Return the error that names the parts that lack files, and what to type."""
    parts = agreement.missing_parts(missing)
    return IncompleteError(
        f"{escape(destination)}: {count(len(missing), 'file')} of {len(agreement.files)} "
        f"{'is' if len(missing) == 1 else 'are'} missing, of {count(len(parts), 'part')}",
        problems=[
            f"part {part}: {count(number, 'file')}; {agreement.command_of(part)}" for part, number in parts
        ],
        hint="run these parts, then shardkit commit again; shardkit status shows who is at work",
    )
