"""Writing a directory: the one way that every verb takes.

    check the destination -> compare the source with its manifests -> room -> stage, move, describe -> commit

A verb decides what to write, as a `Job`, and a `Writer` carries it out. Nothing is written before every check has
passed, and the output appears under its name at one moment: whole, or not at all. `places` says where that is.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import DType
from shardkit.core.text import count, escape, in_shell
from shardkit.core.threads import TimedProgress, progress_for
from shardkit.errors import (
    IntegrityError,
    Interrupted,
    ResourceError,
    ShardkitError,
    UsageError,
    check_torch,
    signal_of,
)
from shardkit.files.output.contract import JobEnded, JobFile, JobOutput, JobRecord, OutputExists
from shardkit.formats.owned import OutputKind
from shardkit.formats.recorded import SourceManifests, find_manifests
from shardkit.operations.casts import beyond_range
from shardkit.operations.options import WriteOptions
from shardkit.operations.parts.agreement import PLAN, Agreement, Committing, as_typed
from shardkit.operations.parts.ingredients import Job, agreement_of
from shardkit.operations.parts.part import Part
from shardkit.operations.parts.results import Told, converted_in
from shardkit.operations.parts.work import Describe, Work, finish, part_result, read_notes, write_files
from shardkit.operations.places import Destination, destination_at
from shardkit.transfer.checks import OFF, CheckedSource, SourceCheck
from shardkit.transfer.execute import FileDigest


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """What is to be written."""

    job: Job
    describe: Describe
    """Writes what lies beside the images."""
    needed_bytes: int
    """Room on the disk for everything that is written."""
    share_extents: bool = False
    """Clone blocks of the source instead of copying them."""
    on_file: Callable[[str, FileDigest], None] = lambda directory, digest: None
    """Called for each finished file, as `Work` has it."""


class Writer:
    """One run of a verb that writes a directory. Its methods are called in the order in which they stand here.

    Args:
        options: of the verb. Each warning is told once, as soon as it is known: a person may want to stop before anything is
            written.
        kind: of the output: what may be replaced, and which file makes it an output in a store.
        looks_late: what lies at the destination is looked into by its `check_beside`, which is given what the job puts there.

    Raises:
        UsageError: the options cannot be carried out.
    """

    def __init__(
        self, options: WriteOptions, *, kind: OutputKind = OutputKind.SHARDED, looks_late: bool = False
    ) -> None:
        options.check()
        self._begun, self._request = time.monotonic(), options
        self._destination_at = partial(destination_at, options=options, kind=kind, looks_late=looks_late)
        self._progress, self._report = TimedProgress(progress_for(options.progress)), Told(options.on_warning)
        self.warn = self._report.tell
        self._infinite: dict[tuple[str, DType], None] = {}
        self.options = replace(
            options.execute_options(), infinite=partial(options.note_infinite, self._infinite)
        )
        """How the engine moves bytes."""
        self._destination: Destination | None = None
        self._agreement: Agreement | None = None
        self.was_there = False
        """True once an output that is there already is left as it is."""
        self.has_made = False
        """True once this process has made the output."""
        self._facts: dict[str, Any] = {"replaced": ()}

    @property
    def destination(self) -> Destination:
        """Where the output goes, once it has been checked."""
        assert self._destination is not None
        return self._destination

    @property
    def path(self) -> str:
        """The destination, absolute, once it has been checked."""
        return "" if self._destination is None else self._destination.path

    def check_destination(self, output: str, source: str | None, named_after: str | None = None) -> str:
        """Return the absolute path of a destination that may be written; errors as `destination.check_destination`.

        Args:
            output: as the user gave it.
            source: directory that is read, or None for one in a cache of its own.
            named_after: as `destination.check_destination` has it.
        """
        self._destination = self._destination or self._destination_at(output)
        self._destination.check(output, source, named_after)
        return self._destination.path

    @property
    def exists(self) -> bool:
        """True if an output is at the destination, and nothing is going to be written."""
        return self._destination is not None and self._destination.exists is not None

    def find_manifests(self, catalogs: Sequence[Catalog], source: str) -> SourceManifests:
        """Return the manifests to compare the source with; arguments and errors as `recorded.find_manifests`."""
        source_manifest, check_source = self._request.source_manifest, self._request.check_source
        manifests = find_manifests(catalogs, source, manifest_path=source_manifest, check_source=check_source)
        self._report.keep((*(() if check_source else (OFF,)), *manifests.warnings))
        self._facts["source_manifests"] = tuple(manifests.paths)
        return manifests

    def agreement(self, job: Job) -> Agreement:
        """Return what all processes of a job agree on. The job that is given first counts: names of files may have its hash."""
        self._agreement = self._agreement or agreement_of(job, self._request.command)
        return self._agreement

    def write(self, writing: Writing) -> bool:
        """Write a job's output, or with a dry run check that it could be written.

        What was finished stays after an error: the same command resumes, and `abort` removes it.

        Returns:
            True if what comes after the output is this call's to do: the call has made the output, or with `exist_ok` it
            was there.

        Raises:
            Interrupted: after a signal.
            IntegrityError, ResourceError: as `Execution.run`, and whatever `describe` raises; or there is no room.
            UsageError: something else is at the destination by now, or another job is under way there.
            IncompleteError: somebody has aborted the job.
        """
        if writing.job.plan.needs_torch:
            check_torch()
        work, exist_ok = self._work(writing), self._request.exist_ok
        try:
            if self.exists and exist_ok:
                if not self._request.dry_run:
                    self._report.keep(self.destination.end_commits())
                self._find_there(work)
            elif self._request.dry_run:
                self._check_dry(writing, work)
            else:
                self._write(writing, work)
        except (JobEnded, OutputExists) as error:
            if not (isinstance(error, JobEnded) and error.is_committed) and not self._is_left_as_it_is:
                raise
            self._find_there(work)
        finally:  # of files that an interrupted process finished, the next one converts nothing
            self._progress.finish()
            self.warn(beyond_range(self._infinite))
        is_alone = self._request.share is None and not self._request.dry_run
        return self.has_made or (self.was_there and exist_ok and is_alone)

    def _work(self, writing: Writing) -> Work:
        """Return the job as this process carries it out."""
        job, share, request = writing.job, self._request.share, self._request
        options = replace(self.options, share_extents=writing.share_extents)
        plan, options = self.destination.prepared(job.plan, options)
        agreement = self.agreement(job)
        folder, (command, directory) = self.destination.folder(agreement.hash), as_typed()
        record = JobRecord(
            hash=agreement.hash,
            command=command,
            directory=directory,
            output=os.path.basename(self.path),
            files=[JobFile(name=os.path.join(folder, image.name), size=image.size) for image in plan.images],
            num_parts=share.count if isinstance(share, Part) else 1,
            draft={PLAN: agreement.dump()},
        )
        return Work(
            record=record,
            plan=plan,
            data_nbytes=job.output.data_nbytes,
            folder=folder,
            marker=self.destination.marker,
            options=options,
            progress=self._progress,
            label=f"part {share}" if isinstance(share, Part) else request.verb,
            describe=writing.describe,
            check=SourceCheck(plan.catalog) if request.check_source else None,
            takes_sha256=request.sha256,
            on_file=writing.on_file,
        )

    def _check_dry(self, writing: Writing, work: Work) -> None:
        """Check that there is room, and keep what the result says of a dry run."""
        if self.destination.exists is not None:
            raise self.destination.exists
        self.destination.check_jobs(work.record)
        finished = self._finished(work)
        self._check_room(writing, work, finished.intersection(work.numbers(self._request.share)))
        self._note(work, finished)

    def _check_room(self, writing: Writing, work: Work, finished: Collection[int]) -> None:
        """Refuse to begin what has no room.

        Args:
            writing, work: the job.
            finished: numbers of this process's files that need no room any more.
        """
        share = self._request.share
        numbers = {*work.numbers(share)}.difference(finished)
        sizes = work.sizes(numbers)
        needed = writing.needed_bytes - work.plan.written_bytes
        self.destination.check_room((0 if isinstance(share, Part) else max(needed, 0)) + sum(sizes), sizes)

    def _write(self, writing: Writing, work: Work) -> None:
        share = self._request.share
        with self.destination.output(work.record.hash) as output:
            try:
                if isinstance(share, Committing):
                    self._commit(share, work, output)
                else:
                    self._write_files(writing, work, output, share)
            except KeyboardInterrupt as interrupt:
                if not output.is_committed:
                    raise self._interrupted(interrupt, work, output) from interrupt
                self._note(work)  # only what is left of the job is not removed yet
            except (IntegrityError, OutputExists, ResourceError) as error:
                if isinstance(error, OutputExists) and self._is_left_as_it_is:
                    output.discard()
                kept = self._kept_files(work, output)
                self._report.tell([f"{kept}: {self._how_to_resume(kept, error)}"] if kept else [])
                raise
            finally:  # this call may have ended the commit of another process
                self.has_made = output.is_committed
                self._report.keep(output.warnings)
        self._facts["replaced"] = output.replaced

    def _write_files(self, writing: Writing, work: Work, output: JobOutput, share: Part | None) -> None:
        """Write this process's files, and make the output if no other process has files left."""
        numbers = work.numbers(share)
        if share is not None and not numbers:  # there are more parts than files
            self._note(work, self._finished(work), is_whole=False)
            return
        if not self.destination.jobs():  # without room nothing is written, not even the job
            self._report.keep(self.destination.end_commits())
            self._check_room(writing, work, ())
        output.begin(work.record)
        notes = read_notes(work, output, numbers)
        self._check_room(writing, work, notes.keys())
        written = write_files(work, output, numbers, notes)
        # `notes` raises if the job has ended
        finished = set(numbers) if share is None else self._finished(work) or set(output.notes(()))
        if len(finished) == len(work.record.files):
            finish(work, output, written)
            self._note(work, num_resumed=len(notes))
        elif share is not None:
            self._note(work, finished, num_resumed=len(notes), is_whole=False)

    def _finished(self, work: Work) -> set[int]:
        """Return the numbers of the files of a job that are finished; none if it is not under way."""
        jobs = [job for job in self.destination.jobs() if job.record.hash == work.record.hash]
        return {number for job in jobs for number in job.finished}

    def _commit(self, share: Committing, work: Work, output: JobOutput) -> None:
        """Make the output of what other processes have written."""
        recorded, planned = Agreement.of(share.record, output.path), self._agreement
        assert planned is not None
        if recorded.hash != planned.hash:
            raise UsageError(
                f"the plan is another one by now: {recorded.hash[:16]} was carried out, {planned.hash[:16]} is it here",
                problems=recorded.differences(planned),
                hint="commit with the same version of shardkit and an unchanged source; or begin anew after "
                f"`shardkit abort {in_shell(output.path)}`",
            )
        record = output.join()
        if record is None or record.hash != share.record.hash:
            raise JobEnded(output.path, is_committed=self.destination.is_there)
        finish(replace(work, record=record), output, {})
        self._note(work)

    @property
    def _is_left_as_it_is(self) -> bool:
        """True if an output is at the destination by now that may stay."""
        return self._request.exist_ok and self.destination.is_there

    def _find_there(self, work: Work) -> None:
        """Leave an output as it is."""
        self.was_there = True
        self._note(work, is_whole=False, by_another=True)

    def _interrupted(self, interrupt: KeyboardInterrupt, work: Work, output: JobOutput) -> Interrupted:
        """Return the error of a process that a signal has ended: what became of the output, and what to type."""
        kept, signum = self._kept_files(work, output), signal_of(interrupt)
        state = f"was not made; {kept or 'no file was finished'}"
        text = f"interrupted: {escape(self.path)} {'is there, and whole' if output.is_made() else state}"
        return Interrupted(text, signum=signum, hint=self._how_to_resume(kept, interrupt))

    def _how_to_resume(self, kept: str, error: BaseException) -> str:
        remove = f", or remove what is kept: `shardkit abort {in_shell(self.path)}`" if kept else ""
        when = "with --overwrite " if isinstance(error, OutputExists) else ""
        when = "if the source is unchanged, " if isinstance(error, IntegrityError) else when
        return f"{when}run the same command again to resume{remove}"

    def _kept_files(self, work: Work, output: JobOutput) -> str:
        """Return how many files of the job are finished and kept; empty if none are, or nobody can say."""
        with contextlib.suppress(OSError, ShardkitError):
            for job in [] if output.is_made() else self.destination.jobs():
                if job.finished and job.record.hash == work.record.hash:
                    return (
                        f"{len(job.finished)} of {count(len(job.record.files), 'file')} are finished and kept"
                    )
        return ""

    def _note(
        self,
        work: Work,
        finished: Collection[int] | None = None,
        *,
        num_resumed: int = 0,
        is_whole: bool = True,
        by_another: bool = False,
    ) -> None:
        """Keep what the result says of the writing.

        Args:
            work: the job.
            finished: numbers of all files that are finished, as far as this process sees them; None if the output is there.
            num_resumed: files that were finished before.
            is_whole: this process has compared what all have read.
            by_another: another process has made the output.
        """
        share, part = self._request.share, None
        if isinstance(share, Part):
            part = part_result(work, share, finished, num_resumed=num_resumed, by_another=by_another)
        plan = work.plan
        checked = CheckedSource() if work.check is None or not is_whole else work.check.judge().checked
        self._facts |= {
            "num_files": len(plan.images),
            "file_bytes": tuple(image.size for image in plan.images),
            "read_bytes": plan.read_bytes,
            "written_bytes": plan.written_bytes,
            "converted": tuple(converted_in(plan)),
            "checked_bytes": checked.checked_bytes,
            "unchecked": checked.unchecked,
            "peak_memory_bytes": work.options.peak_bytes(plan),
            "free_bytes": self.destination.free_bytes(),
            "resumed_files": num_resumed,
            "part": part,
        }

    def facts(self, warnings: Iterable[str]) -> dict[str, Any]:
        """Return the fields of `WriteResult` that every verb fills alike.

        Args:
            warnings: the verb's own; they come first.
        """
        return {
            **self._facts,
            "output": self.path,
            "dry_run": self._request.dry_run,
            "was_there": self.was_there,
            "elapsed_s": round(time.monotonic() - self._begun, 3),
            "moving_s": round(self._progress.phases_s, 3),
            "warnings": (*warnings, *self._report.kept, *beyond_range(self._infinite)),
        }
