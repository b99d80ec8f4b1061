"""The execution of a job, or of one part of it.

    write_files    write this process's files, each with a note
    finish         once all files have notes: compare the readings with the source's checksums -> describe -> commit

Until the commit the files belong to a `JobOutput` (`files/output`), on a disk or in a store.

An *image* is a file with tensors that the job writes: its literal bytes, and holes to be filled with tensor data. A file's
number is its position, both in `plan.images` and in `record.files`. The *readings* of a file are the CRC-32s of the source
bytes that were read to fill it. A process stores them in the file's note; the one that commits adds up the readings of
all files and compares them with the CRC-32s that the source records.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from shardkit.core.text import escape
from shardkit.core.threads import Progress
from shardkit.errors import IntegrityError
from shardkit.files import storage
from shardkit.files.digest import sha256_of
from shardkit.files.output.contract import JobOutput, JobRecord
from shardkit.operations.parts.agreement import Share, incomplete_error, missing_parts
from shardkit.operations.parts.notes import Note, load_note
from shardkit.operations.parts.part import Part, share_of
from shardkit.operations.parts.results import PartResult
from shardkit.transfer.checks import Readings, SourceCheck, have_read
from shardkit.transfer.execute import Describer, ExecuteOptions, Execution, FileDigest
from shardkit.transfer.fill import CrcPiece, crc_of
from shardkit.transfer.plan import TransferPlan


class Describe(Protocol):
    """Makes the `Describer` of an output, which writes the files beside the images."""

    def __call__(self, directory: str, /, *, folder: str = "") -> Describer:
        """Return the describer.

        Args:
            directory: where it writes its files.
            folder: path from the marker to the images, which `.metadata` has to contain; empty if they lie beside it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A job, with everything that this process needs to execute it."""

    record: JobRecord
    plan: TransferPlan
    data_nbytes: Sequence[int]
    """Bytes of all holes of each image."""
    folder: str
    """Folder of the images, below the output; empty for the output itself."""
    marker: str
    """Name of the file by which readers recognise the output; see `Destination.marker`."""
    options: ExecuteOptions
    progress: Progress
    label: str
    """Label of the progress bar."""
    describe: Describe
    check: SourceCheck | None
    """Compares the readings with the source's checksums; None with `--check-source off`."""
    takes_sha256: bool
    on_file: Callable[[str, FileDigest], None] = lambda directory, digest: None
    """Called with the scratch directory and the digest of each finished file, before it is added to the job; may raise."""

    def sizes(self, numbers: Iterable[int]) -> list[int]:
        """Return the bytes of files, by their numbers."""
        return [self.record.files[number].size for number in numbers]

    def numbers(self, share: Share | None) -> list[int]:
        """Return the numbers of the files that a process with a share writes; without a share, of all files."""
        if isinstance(share, Part):
            return share_of(self.sizes(self.everything), share)
        return list(self.everything) if share is None else []

    @property
    def everything(self) -> range:
        """Return the numbers of all files."""
        return range(len(self.record.files))


def part_result(
    work: Work, part: Part, finished: Collection[int] | None, *, num_resumed: int, by_another: bool
) -> PartResult:
    """Return the result of a part.

    Args:
        work: the job.
        part: of the job.
        finished: numbers of all finished files that this process sees; None if the output exists.
        num_resumed: files of the part that were finished before.
        by_another: another process has committed the output.
    """
    numbers = work.numbers(part)
    missing = [] if finished is None else [number for number in work.everything if number not in finished]
    return PartResult(
        part=str(part),
        found=part.found,
        plan=work.record.hash,
        num_files=len(numbers),
        written_bytes=sum(work.sizes(numbers)),
        resumed_files=len(numbers) if by_another else num_resumed,
        finished_files=len(work.record.files) - len(missing),
        missing=tuple(str(each) for each, _ in missing_parts(work.record, missing)),
        is_committed=finished is None,
        by_another=by_another,
    )


def read_notes(work: Work, output: JobOutput, numbers: Collection[int]) -> dict[int, Note]:
    """Return the notes of the finished files among `numbers`, by number; add their readings to `work.check`.

    Two kinds of notes are left out, so that their files are written again: damaged ones, and, if the source is checked,
    those without readings, which a process with `--check-source off` has stored.
    """
    notes = dict[int, Note]()
    images = list(work.plan.images)
    for number, content in sorted(output.notes(numbers).items()):
        note = load_note(content, images[number].name, images[number].size)
        if note is None or (work.check is not None and note.readings is None):
            continue
        if work.check is not None and note.readings is not None:
            work.check.put(note.digest.name, note.readings)  # replaces earlier ones of the same output file
        notes[number] = note
    return notes


def write_files(
    work: Work, output: JobOutput, numbers: Sequence[int], notes: Mapping[int, Note]
) -> dict[int, Note]:
    """Write the unfinished files of this process, and return the notes of all its files.

    Args:
        work: the job.
        output: which this process has joined.
        numbers: of this process's files.
        notes: of the finished ones among them.

    Raises:
        JobEnded: another process has committed or aborted the job.
        IntegrityError, ResourceError: as `Execution.run`. After an IntegrityError all notes of this process are removed.
    """
    images = [image.name for image in work.plan.images]  # by number
    finished = {note.digest.name: note.digest for note in notes.values()}
    number_of, written = {images[number]: number for number in numbers}, dict(notes)
    scattered = _scattered_by_file(work.plan)
    work.progress.start(sum(work.data_nbytes[number] for number in numbers), work.label)
    if finished:
        work.progress.advance(sum(work.data_nbytes[number_of[name]] for name in finished))
    with output.scratch() as scratch:
        directory = os.path.join(scratch, work.folder) if work.folder else scratch

        def on_finished(digest: FileDigest, readings: Readings) -> None:
            number = number_of[digest.name]
            work.on_file(directory, digest)
            if work.takes_sha256:  # now, while the file is still in the page cache
                path = os.path.join(directory, digest.name)
                digest = replace(digest, sha256=sha256_of(path, digest.name))
            note = Note(
                digest=digest,
                readings=None if work.check is None else readings,
                scattered=[(fqn, execution.pieces[fqn]) for fqn in scattered.get(number, ())],
            )
            output.add(scratch, number, note.dump())
            written[number] = note

        execution = Execution(
            work.plan,
            directory,
            work.options,
            finished=finished,
            foreign={*images} - number_of.keys(),
            read_for={
                fqn: name
                for name in number_of.keys() - finished.keys()
                for fqn in scattered.get(number_of[name], ())
                if fqn in work.plan.gathered
            },
            on_finished=on_finished,
            progress=work.progress,
            check=work.check,
        )
        try:
            execution.run()
        except IntegrityError:
            output.forget(numbers)  # their values may come from damaged bytes
            raise
        finally:
            work.progress.finish()  # the commit that may follow moves no bytes
    return written


def _scattered_by_file(plan: TransferPlan) -> dict[int, list[str]]:
    """Return the scattered tensors whose CRC-32s the note of each file has: file number -> names in the source.

    A gathered tensor has to be read once more, as a whole, for its CRC-32. Only one of its files has it, so that only the
    process that writes this file does so.
    """
    tensors = dict[int, list[str]]()
    for position, (fqn, holes) in enumerate(plan.scattered.items()):
        files = list(dict.fromkeys(file for file, _ in holes))
        for file in [files[position % len(files)]] if fqn in plan.gathered else files:
            tensors.setdefault(file, []).append(fqn)
    return tensors


def finish(work: Work, output: JobOutput, own_notes: Mapping[int, Note]) -> None:
    """Describe the files of all processes, and commit the output.

    Args:
        work: the job.
        output: which this process has joined.
        own_notes: notes that this process has read or written already.

    Raises:
        IncompleteError: files are missing.
        IntegrityError: readings differ from the source's checksums, or between processes. The notes of the files
            concerned are removed.
        OutputExists: something at the destination may not be replaced.
        JobEnded: another process has committed or aborted the job.
    """
    everything = {*work.everything}
    notes = {**own_notes, **read_notes(work, output, everything - own_notes.keys())}
    if missing := everything - notes.keys():
        raise incomplete_error(output.path, work.record, missing)
    digests = {notes[number].digest.name: notes[number].digest for number in sorted(notes)}
    scattered = _scattered_crcs(work, output, notes.values())
    with output.scratch() as scratch:
        staging = os.path.join(scratch, ".beside")
        storage.make_folders(scratch, os.path.join(".beside", work.folder))
        directory = os.path.join(staging, work.folder) if work.folder else staging
        describer = work.describe(directory, folder=work.folder)
        execution = Execution(
            work.plan,
            scratch,
            work.options,
            finished=digests,
            scattered=scattered,
            on_finished=lambda *_: None,
            progress=work.progress,
            check=work.check,
        )
        try:
            describer.finish(*execution.run())
        except IntegrityError:
            _forget_damaged(work, output, notes)
            raise
        if work.folder:
            storage.rename(os.path.join(directory, work.marker), os.path.join(staging, work.marker))
        output.commit(staging)


def _scattered_crcs(work: Work, output: JobOutput, notes: Iterable[Note]) -> dict[str, int | None]:
    """Return the CRC-32s of scattered tensors, combined from the pieces in all notes; None for a tensor without one.

    Raises:
        IntegrityError: processes have read different values of a tensor.
    """
    crcs, pieces, different = dict[str, int | None](), dict[str, set[CrcPiece]](), list[str]()
    for fqn, of_note in (each for note in notes for each in note.scattered):
        if fqn not in work.plan.scattered:
            continue
        if of_note is None:
            crcs[fqn] = None
        else:
            pieces.setdefault(fqn, set()).update(of_note)
    for name, of_tensor in pieces.items():
        dtype = work.plan.scattered[name][0][1].dtype
        crc, differ = crc_of(of_tensor, work.plan.catalog.tensors[name].num_elements * dtype.itemsize)
        different += [name] if differ else []
        if crc is not None:  # else `Execution` reads the tensor once more, for its CRC-32
            crcs[name] = crc
    if different:
        output.forget(sorted({file for name in different for file, _ in work.plan.scattered[name]}))
    IntegrityError.raise_for(
        sorted(map(escape, different)),
        "parts read different values of the same tensors: the source changed, or a disk fails",
        hint="run all parts again: the files with these tensors are written anew",
    )
    return crcs


def _forget_damaged(work: Work, output: JobOutput, notes: Mapping[int, Note]) -> None:
    """Remove the notes of files that contain damaged bytes of the source."""
    if work.check is not None:
        damaged = {(damage.file, damage.entry) for damage in work.check.judge().damaged}
        output.forget(
            [number for number, note in notes.items() if note.readings and have_read(note.readings, damaged)]
        )
