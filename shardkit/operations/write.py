"""Writing a directory: the one way that every verb takes.

    check the destination -> compare the source with its manifests -> room -> stage, move, describe -> commit

A verb decides what to write, as a `Job`, and a `Writer` carries it out. Nothing is written before every check has
passed, and the output appears under its name at one moment: whole, or not at all. `places` says where that is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import DType
from shardkit.core.text import escape
from shardkit.core.threads import TimedProgress, progress_for
from shardkit.errors import (
    IncompleteError,
    Interrupted,
    ResourceError,
    ShardkitError,
    UsageError,
    check_torch,
)
from shardkit.formats.owned import Made, OutputKind
from shardkit.formats.recorded import SourceManifests, find_manifests
from shardkit.operations.casts import beyond_range
from shardkit.operations.environment import mixed_versions
from shardkit.operations.options import WriteOptions
from shardkit.operations.parts.agreement import Committing, NotThere, Share
from shardkit.operations.parts.divided import Describe, Divided
from shardkit.operations.parts.ingredients import Job, agreement_of, hash_plan, machine_of, versions_of
from shardkit.operations.parts.part import ALL, Part
from shardkit.operations.parts.results import PartResult, Told, converted_in
from shardkit.operations.places import Destination, destination_at
from shardkit.osft.job import FactoredJob
from shardkit.osft.phase import FactorPhase, PhaseAt
from shardkit.transfer.checks import OFF, CheckedSource
from shardkit.transfer.existing import Existing

_PartOutcome = tuple[PartResult | None, CheckedSource]
"""What became of a part, and what was compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """What is to be written, and what comes after it."""

    job: Job
    describe: Describe
    """Writes what lies beside the images."""
    needed_bytes: int
    """Room on the disk for everything that is written."""
    share_extents: bool = False
    """Clone blocks of the source instead of copying them."""
    factors: FactoredJob | None = None
    """Computes what fills holes before the engine does the rest, if the plan has such."""
    after: Callable[[], object] = lambda: None
    """Does what comes after the output. Where others made it, it is called only if they may have died before."""
    can_read: bool = True
    """False where the source would have to be downloaded first: no download is worth the answer that there is an output."""
    describes_elsewhere: bool = False
    """Something that describes the output goes to another place: then it is described in any case."""
    open_all: Callable[[], Job] | None = None
    """Returns the job with all records open; None if they are."""

    def whole(self) -> Job:
        """Return the job with all records open, where other parts read some of them."""
        tensors = self.job.plan.catalog.tensors.values()
        is_part = any(entry.nbytes and not entry.num_chunks for entry in tensors)
        return self.open_all() if is_part and self.open_all is not None else self.job


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
        self._begun, self._given = time.monotonic(), options
        made: Made | None = None if looks_late else {}
        self._destination_at = partial(destination_at, options=options, kind=kind, made=made)
        self._progress, self._told = TimedProgress(progress_for(options.progress)), Told(options.on_warning)
        self.warn = self._told.tell
        self._infinite: dict[tuple[str, DType], None] = {}
        self.options = replace(options.execute_options(), infinite=self._note_infinite)
        """How the engine moves bytes."""
        self._destination: Destination | None = None
        self.was_there = False
        """True once what is at the destination is known to be what would be written."""
        self.ends = False
        """True once the output is there, and what comes after it is this process's to do."""
        self.record_bytes = 0
        """Of factors that lie beside the output, or on the local disk, until it is there."""
        self._has_made: Divided | None = None
        self._facts: dict[str, Any] = {}

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
        if self._given.ends and not self._destination.is_there:
            raise NotThere
        return self._destination.path

    @property
    def exists(self) -> bool:
        """True if an output is at the destination that may be what is to be written; `write` tells."""
        return self._destination is not None and self._destination.exists is not None

    def find_manifests(self, catalogs: Sequence[Catalog], source: str) -> SourceManifests:
        """Return the manifests to compare the source with; arguments and errors as `recorded.find_manifests`."""
        given, check_source = self._given.source_manifest, self._given.check_source
        found = find_manifests(catalogs, source, given=given, check_source=check_source)
        self._told.keep((*(() if check_source else (OFF,)), *found.warnings))
        self._facts["source_manifests"] = tuple(found.paths)
        return found

    def write(self, writing: Writing) -> None:
        """Write a job's output, or with a dry run check that it could be written.

        On Ctrl-C or SIGTERM what was finished stays for the next run, and where a process died that computed something; on
        any other error it is removed.

        Raises:
            Interrupted: after a signal.
            IncompleteError: a process died that computed factors.
            IntegrityError, ResourceError: as `Execution.run`, and whatever `describe` raises; or there is no room.
            UsageError: something else is at the destination by now.
        """
        if writing.job.plan.needs_torch or writing.factors is not None:
            check_torch()
        with contextlib.ExitStack() as stack:
            divided = self._divided(writing, stack)
            try:
                self._write(writing, divided)
            finally:  # of files that an interrupted run finished, the next one converts nothing
                self.warn(beyond_range(self._infinite))
            if not self.ends:
                return
            with contextlib.nullcontext() if self._has_made is None else divided.place.attended():
                writing.after()
                if self._has_made is not None:
                    # The output of a run is there, whatever stays beside it; the next run removes that.
                    with contextlib.suppress(*[ResourceError] if self._given.share is None else []):
                        divided.place.clean_up(keeps_mark=isinstance(self._given.share, Part))
                    self._told.keep(self.destination.foreign())

    def _write(self, writing: Writing, divided: Divided) -> None:
        if (exists := self.destination.still_exists()) is not None:
            self._find_there(writing, divided, exists)
            return
        try:
            self._write_here(writing, divided)
        except UsageError as error:  # asked afterwards: another process may make the output at any moment
            if self._given.overwrite or not self.destination.may_be_there():
                raise
            try:
                self._find_there(writing, divided, error)
            except UsageError as other:
                problems = error.problems or other.problems
                raise UsageError(error.message, problems=problems, hint=error.hint) from other

    def _write_here(self, writing: Writing, divided: Divided) -> None:
        share, free = self._given.share, self.destination.free_bytes()
        records = 0 if writing.factors is None else writing.factors.records.nbytes
        self.record_bytes = self.destination.check_room(divided, writing.needed_bytes, records)
        if share is not None:
            divided.place.check_absent(is_part=isinstance(share, Part))
        if self._given.dry_run:
            part = divided.result(share) if isinstance(share, Part) else None
            self._note(divided, (part, CheckedSource()), free=free)
            return
        carry_out = self._run if share is None else partial(self._carry_out, share=share)
        outcome = carry_out(writing, divided)
        if outcome is None:
            exists = UsageError(f"{escape(self.path)} exists: another process has made it meanwhile")
            self._find_there(writing, divided, exists)
            return
        if self.was_there and self.ends and writing.describes_elsewhere and divided.place.vouches:
            self._describe_again(writing, divided)
        self._note(divided, outcome, free=free)

    def _run(self, writing: Writing, divided: Divided) -> _PartOutcome | None:
        """Write all of a job, and remove what was written if it fails; None if another process has made an output meanwhile.

        It stays after a signal, where a process died that computed something, and where something that appeared at the
        destination has to be moved away first: the same command goes on with it.
        """
        self._told.keep(self.destination.unknown(divided.place.notebook.path))
        try:
            outcome = divided.alone.carry_out(
                lambda: self._carry_out(writing, divided, ALL), resume=self._given.resume
            )
        except (Interrupted, IncompleteError):
            raise
        except BaseException:
            with contextlib.suppress(OSError, ShardkitError):
                self._told.keep(self.destination.foreign())
            raise
        if self._has_made is not None and not self.was_there:
            return outcome
        if self._given.overwrite and not writing.describes_elsewhere:
            self._take(divided)  # by a run of this very plan, whatever has replaced its output since
            return outcome
        return None

    def _find_there(self, writing: Writing, divided: Divided, exists: UsageError) -> None:
        """Take what is at the destination for the output if it is of this plan; errors as `_compare`."""
        share, part, source, place = self._given.share, None, CheckedSource(), divided.place
        is_known = place.is_committed
        self._take(divided if share is not None or is_known else None)
        if not is_known or (self.ends and writing.describes_elsewhere):
            if not place.vouches:
                source = self._compare(writing, exists, is_known=is_known)
            elif is_known:
                self._describe_again(writing, divided)
            else:
                raise UsageError(f"{exists.message}, and is not what this command writes", hint=exists.hint)
        place.give_way()
        self._told.keep(self.destination.foreign())
        if share is None:
            place.remove_others()
        elif isinstance(share, Committing):
            share.on_end(False)
        else:
            part = divided.all_done(share)
        self._note(divided, (part, source), free=self.destination.free_bytes(), finished=0)

    def _take(self, divided: Divided | None) -> None:
        """Take the output for one that was there before; what comes after it is somebody's who made it and is alive."""
        self.was_there = True
        self.ends = divided is None or divided.place.is_left or self._given.ends
        self._has_made = divided if self.ends else None

    def _compare(self, writing: Writing, exists: UsageError, *, is_known: bool) -> CheckedSource:
        """Find out whether what is at the destination is what the job would write; arguments and errors as `Existing.compare`."""
        job = writing.whole()
        existing = Existing(
            path=self.path,
            recorded=self._given.recorded,
            plan=job.plan,
            decided=job.decided,
            describe=writing.describe,
            options=self.options,
            progress=self._progress,
            factors=writing.factors,
        )
        return existing.compare(
            exists,
            hash_plan(writing.job),
            can_read=writing.can_read,
            is_known=is_known,
            in_any_case=writing.describes_elsewhere,
        )

    def _describe_again(self, writing: Writing, divided: Divided) -> None:
        divided.describe_again(self.destination.prepared(writing.whole().plan, self.options)[0])

    def _note(
        self, divided: Divided, outcome: _PartOutcome, *, free: int | None, finished: int | None = None
    ) -> None:
        """Keep what the result says of the writing."""
        (part, source), plan = outcome, divided.plan
        resumed = 0 if part is None else part.resumed_files
        sizes = tuple(image.size for image in plan.images)
        self._facts |= {
            "num_files": len(sizes),
            "file_bytes": sizes,
            "read_bytes": plan.read_bytes,
            "written_bytes": plan.written_bytes,
            "converted": tuple(converted_in(plan)),
            "checked_bytes": source.checked_bytes,
            "unchecked": source.unchecked,
            "peak_memory_bytes": divided.options.peak_bytes(plan),
            "free_bytes": free,
            "resumed_files": resumed if finished is None else finished,
            "part": None if self._given.share is None else part,
        }

    def facts(self, warnings: Iterable[str]) -> dict[str, Any]:
        """Return the fields of `WriteResult` that every verb fills alike.

        Args:
            warnings: the verb's own; they come first.
        """
        return {
            **self._facts,
            "output": self.path,
            "dry_run": self._given.dry_run,
            "was_there": self.was_there,
            "elapsed_s": round(time.monotonic() - self._begun, 3),
            "moving_s": round(self._progress.phases_s, 3),
            "warnings": (*warnings, *self._told.kept, *beyond_range(self._infinite)),
        }

    def _note_infinite(self, fqn: str, dtype: DType) -> None:
        self._infinite[fqn, dtype] = None  # from any thread

    def _carry_out(self, writing: Writing, divided: Divided, share: Share) -> _PartOutcome:
        """Write a part, and make the output if it was the last; return what became of it, and what was compared."""
        result: PartResult | None = None
        divided.on_joined = lambda begun: self._warn_of_versions(writing.job, begun)
        try:
            if isinstance(share, Committing):
                self._warn_of_versions(writing.job, share.versions or {})
            if isinstance(share, Part):
                result = divided.run(share)
                if divided.was_there:
                    self._take(divided)
                if result.is_committed:
                    self._told.keep(divided.warnings())
                # A run that lacks something could not read a note for a moment: `commit` looks once more.
                if result.is_committed or (result.missing and self._given.share is not None):
                    return result, CheckedSource()
            has_committed = divided.commit()
        except KeyboardInterrupt as interrupt:
            # A run whose output has just appeared ends as if nothing had happened; parts are run again.
            is_run, place = self._given.share is None, divided.place
            if not (is_run and (place.has_made or place.is_committed)):
                raise divided.interrupted(interrupt) from interrupt
            has_committed = place.has_made  # else another process has, and what comes after is that one's
        finally:
            self._progress.finish()
        if has_committed:
            self.ends, self._has_made = True, divided
        elif isinstance(share, Committing):
            self._take(divided)
        if result is not None:
            result = replace(result, is_committed=True, by_another=not has_committed)
        if isinstance(share, Committing):
            share.on_end(has_committed)
        self._told.keep(divided.warnings())
        return result, divided.compared()

    def _warn_of_versions(self, job: Job, begun: Mapping[str, str]) -> None:
        """Warn if what this process goes on with was begun with other versions of packages."""
        self._told.keep(filter(None, [mixed_versions([begun], versions_of(job))]))

    def _divided(self, writing: Writing, stack: contextlib.ExitStack) -> Divided:
        """Return the job as its parts carry it out; a run of one process carries out all of it."""
        job, factors, share = writing.job, writing.factors, self._given.share
        options = replace(self.options, share_extents=writing.share_extents)
        plan, options = self.destination.prepared(job.plan, options)
        weights, replaces = [] if factors is None else factors.weights, self.destination.replaces()
        agreement = agreement_of(job, self._given.command, share, weights, replaces)
        if isinstance(share, Committing):
            share.check(agreement)
        place = self.destination.place(job, agreement, is_computed=factors is not None)
        return Divided(
            stack.enter_context(place),
            agreement,
            plan,
            job.output.data_nbytes,
            writing.describe,
            options,
            self._progress,
            self._phase(job, factors),
            is_run=share is None,
        )

    def _phase(self, job: Job, factors: FactoredJob | None) -> PhaseAt | None:
        """Return what computes the factors of a job, given the place of their records; None if there are none."""
        if factors is None:
            return None
        return lambda records: FactorPhase(
            job=factors,
            place=records,
            compares=self.options.check_source,
            computed_by=machine_of(job),
            versions=versions_of(job),
            another_place=self.destination.another_place,
        )
