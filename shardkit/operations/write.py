"""Writing an output, the same way for every verb.

    check the destination -> find the source's manifests -> check for room -> write files -> describe them -> commit

A verb plans the output as a `Job`, and a `Writer` executes the plan. Nothing is written before all checks have passed.
The output appears in one step, complete. `places` has the kinds of destinations, `parts.work` the writing of files.
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
from shardkit.operations.parts.results import Warnings, converted_in
from shardkit.operations.parts.work import Describe, Work, finish, part_result, read_notes, write_files
from shardkit.operations.places import Destination, destination_at
from shardkit.transfer.checks import OFF, CheckedSource, SourceCheck
from shardkit.transfer.execute import FileDigest


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """An output to be written."""

    job: Job
    describe: Describe
    """Writes the files beside the images: config, index or `.metadata`, manifest."""
    needed_bytes: int
    """Disk space for all files of the output."""
    share_extents: bool = False
    """Clone blocks of the source instead of copying them, where the file system can."""
    on_file: Callable[[str, FileDigest], None] = lambda directory, digest: None
    """Called for each finished file; see `Work.on_file`."""


class Writer:
    """One call of a verb that writes an output. Public methods are called in the order of their definition.

    Args:
        options: of the verb.
        kind: of the output. It decides which existing outputs may be replaced, and which file is the marker in a store.
        looks_late: with `overwrite`, leave the check of an existing output to `Destination.check_beside`, which the verb
            calls once it has the list of the files that it will write.

    Raises:
        UsageError: the options contradict each other, or have impossible values.
    """

    def __init__(
        self, options: WriteOptions, *, kind: OutputKind = OutputKind.SHARDED, looks_late: bool = False
    ) -> None:
        options.check()
        self._begun, self._verb_options = time.monotonic(), options
        self._destination_at = partial(destination_at, options=options, kind=kind, looks_late=looks_late)
        self._progress = TimedProgress(progress_for(options.progress))
        self._warnings = Warnings(options.on_warning, are_errors=options.refuses_warnings)
        self.warn = self._warnings.show
        self._infinite: dict[tuple[str, DType], None] = {}
        self.options = replace(
            options.execute_options(), infinite=partial(options.note_infinite, self._infinite)
        )
        """The engine's options, such as threads and memory."""
        self._destination: Destination | None = None
        self._agreement: Agreement | None = None
        self.was_there = self.has_made = False
        """True once an existing output was left as it is; once this process has committed the output."""
        self._facts: dict[str, Any] = {"replaced": ()}

    @property
    def destination(self) -> Destination:
        """Where the output goes. Set by `check_destination`."""
        assert self._destination is not None
        return self._destination

    @property
    def path(self) -> str:
        """The absolute path of the destination; empty before `check_destination`."""
        return "" if self._destination is None else self._destination.path

    def check_destination(self, output: str, source: str | None, named_after: str | None = None) -> str:
        """Refuse a destination that may not be written; else return its absolute path.

        Arguments and errors are those of `destination.check_destination`.

        Args:
            output: the user's path.
            source: directory that is read, or None for one in the Hub's cache.
            named_after: the path after which `output` was named, or None if the user named it.
        """
        self._destination = self._destination or self._destination_at(output)
        self._destination.check(output, source, named_after)
        return self._destination.path

    @property
    def exists(self) -> bool:
        """True if the destination has an output that stays, so that nothing will be written."""
        return self._destination is not None and self._destination.exists is not None

    def find_manifests(self, catalogs: Sequence[Catalog], source: str) -> SourceManifests:
        """Return the source's manifests, whose checksums are compared with what is read; see `recorded.find_manifests`."""
        source_manifest, check_source = self._verb_options.source_manifest, self._verb_options.check_source
        manifests = find_manifests(catalogs, source, manifest_path=source_manifest, check_source=check_source)
        warnings = (*(() if check_source else (OFF,)), *manifests.warnings)
        self.warn(warnings)
        self._warnings.add(warnings)
        self._facts["source_manifests"] = tuple(manifests.paths)
        return manifests

    def agreement(self, job: Job) -> Agreement:
        """Return the `Agreement` of a job. It is made once, from the job of the first call: file names may contain its hash."""
        self._agreement = self._agreement or agreement_of(job, self._verb_options.command)
        return self._agreement

    def write(self, writing: Writing) -> bool:
        """Write the output. In a dry run check only that it could be written.

        Finished files stay after an error: the same command resumes with them, and `shardkit abort` removes them.

        Returns:
            True if this call has to do what follows the output, such as a push to the Hub: it has committed the output, or
            `exist_ok` was set and the output existed.

        Raises:
            Interrupted: after a signal.
            IntegrityError, ResourceError: as `Execution.run` and `Describe`; or there is too little room.
            UsageError: the destination holds something else by now, or another job is under way there.
            IncompleteError: another process has aborted the job.
        """
        if writing.job.plan.needs_torch:
            check_torch()
        work, exist_ok = self._work(writing), self._verb_options.exist_ok
        try:
            if self.exists and exist_ok:
                if not self._verb_options.dry_run:
                    self._warnings.add(self.destination.end_commits())
                self._leave_existing(work)
            elif self._verb_options.dry_run:
                self._check_dry(writing, work)
            else:
                self._write(writing, work)
        except (JobEnded, OutputExists) as error:
            if not (isinstance(error, JobEnded) and error.is_committed) and not self._may_leave_existing:
                raise
            self._leave_existing(work)
        finally:  # also after an error: a process that resumes does not convert finished files again
            self._progress.finish()
            self._warnings.add([*beyond_range(self._infinite)])  # with `strict` it was an error already
        is_alone = self._verb_options.share is None and not self._verb_options.dry_run
        return self.has_made or (self.was_there and exist_ok and is_alone)

    def _work(self, writing: Writing) -> Work:
        """Return the job, with everything that this process needs to execute it."""
        job, share, request = writing.job, self._verb_options.share, self._verb_options
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
        """Do what a dry run does: check the destination and the room, and store the facts for the result."""
        if self.destination.exists is not None:
            raise self.destination.exists
        self.destination.check_jobs(work.record)
        finished = self._finished(work)
        self._check_room(writing, work, finished.intersection(work.numbers(self._verb_options.share)))
        self._set_facts(work, finished)

    def _check_room(self, writing: Writing, work: Work, finished: Collection[int]) -> None:
        """Raise ResourceError if there is too little room for this process's files.

        Args:
            writing, work: the job.
            finished: numbers of this process's finished files, which need no more room.
        """
        share = self._verb_options.share
        numbers = {*work.numbers(share)}.difference(finished)
        sizes = work.sizes(numbers)
        needed = writing.needed_bytes - work.plan.written_bytes
        self.destination.check_room((0 if isinstance(share, Part) else max(needed, 0)) + sum(sizes), sizes)

    def _write(self, writing: Writing, work: Work) -> None:
        """Write or commit the output, and store the facts for the result, also after an error."""
        share = self._verb_options.share
        with self.destination.output(work.record.hash) as output:
            try:
                if isinstance(share, Committing):
                    self._commit(share, work, output)
                else:
                    self._write_files(writing, work, output, share)
            except KeyboardInterrupt as interrupt:
                if not output.is_committed:
                    raise self._interrupted_error(interrupt, work, output) from interrupt
                self._set_facts(work)  # the output is complete; only the job's directory may remain
            except (IntegrityError, OutputExists, ResourceError) as error:
                if isinstance(error, OutputExists) and self._may_leave_existing:
                    output.discard()
                kept = self._kept_files(work, output)
                self._warnings.add([f"{kept}: {self._how_to_resume(kept, error)}"] if kept else [])
                raise
            finally:  # also after an error: this call may have completed the commit of another process
                self.has_made = output.is_committed
                self._warnings.add(output.warnings)
        self._facts["replaced"] = output.replaced

    def _write_files(self, writing: Writing, work: Work, output: JobOutput, share: Part | None) -> None:
        """Write this process's files. Commit the output if all files of all processes are finished."""
        numbers = work.numbers(share)
        if share is not None and not numbers:  # there are more parts than files
            self._set_facts(work, self._finished(work), is_whole=False)
            return
        if not self.destination.jobs():  # check for room before the job's directory is made
            self._warnings.add(self.destination.end_commits())
            self._check_room(writing, work, ())
        output.begin(work.record)
        notes = read_notes(work, output, numbers)
        self._check_room(writing, work, notes.keys())
        written = write_files(work, output, numbers, notes)
        # If no job was found because it has ended meanwhile, `notes` raises JobEnded.
        finished = set(numbers) if share is None else self._finished(work) or set(output.notes(()))
        if len(finished) == len(work.record.files):
            finish(work, output, written)
            self._set_facts(work, num_resumed=len(notes))
        elif share is not None:
            self._set_facts(work, finished, num_resumed=len(notes), is_whole=False)

    def _finished(self, work: Work) -> set[int]:
        """Return the numbers of a job's finished files; empty if the job is not under way."""
        jobs = [job for job in self.destination.jobs() if job.record.hash == work.record.hash]
        return {number for job in jobs for number in job.finished}

    def _commit(self, share: Committing, work: Work, output: JobOutput) -> None:
        """Commit what other processes have written. Raises UsageError if the job planned here is not theirs."""
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
        self._set_facts(work)

    @property
    def _may_leave_existing(self) -> bool:
        """True with `exist_ok`, if an output exists by now."""
        return self._verb_options.exist_ok and self.destination.is_there

    def _leave_existing(self, work: Work) -> None:
        """Store the facts for the result of a call that leaves an existing output as it is."""
        self.was_there = True
        self._set_facts(work, is_whole=False, by_another=True)

    def _interrupted_error(self, interrupt: KeyboardInterrupt, work: Work, output: JobOutput) -> Interrupted:
        """Return the error for a signal, with the state of the output and the command that resumes."""
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
        """Return a sentence with the number of finished files of the job; empty if none are, or if it cannot be read."""
        with contextlib.suppress(OSError, ShardkitError):
            for job in [] if output.is_made() else self.destination.jobs():
                if job.finished and job.record.hash == work.record.hash:
                    return (
                        f"{len(job.finished)} of {count(len(job.record.files), 'file')} are finished and kept"
                    )
        return ""

    def _set_facts(
        self,
        work: Work,
        finished: Collection[int] | None = None,
        *,
        num_resumed: int = 0,
        is_whole: bool = True,
        by_another: bool = False,
    ) -> None:
        """Store the facts for the result.

        Args:
            work: the job.
            finished: numbers of all finished files that this process sees; None if the output exists.
            num_resumed: number of files that were finished before this call.
            is_whole: this process has compared the readings of all processes with the source's checksums.
            by_another: another process has committed the output.
        """
        share, part = self._verb_options.share, None
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
        """Return the fields of `WriteResult` that are the same for every verb.

        Args:
            warnings: of the verb; they come first.
        """
        return {
            **self._facts,
            "output": self.path,
            "dry_run": self._verb_options.dry_run,
            "was_there": self.was_there,
            "elapsed_s": round(time.monotonic() - self._begun, 3),
            "moving_s": round(self._progress.phases_s, 3),
            "warnings": (*warnings, *self._warnings.of_result),
        }
