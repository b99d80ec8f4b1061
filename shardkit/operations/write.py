"""Writing a directory: the one way that every verb takes.

    check the destination -> compare the source with its manifests -> room -> stage, move, describe -> commit

A verb decides what to write, as a `Job`, and a `Writer` carries it out. Nothing is written before every check has
passed, and the output appears under its name at one moment: whole, or not at all. `places` says where that is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
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
from shardkit.formats.owned import OutputKind
from shardkit.formats.recorded import SourceManifests, find_manifests
from shardkit.operations.casts import beyond_range
from shardkit.operations.options import WriteOptions
from shardkit.operations.parts.agreement import Committing, Share
from shardkit.operations.parts.divided import Describe, Divided
from shardkit.operations.parts.ingredients import Job, agreement_of
from shardkit.operations.parts.part import ALL, Part
from shardkit.operations.parts.results import PartResult, Told, converted_in
from shardkit.operations.places import Destination, destination_at
from shardkit.transfer.checks import OFF, CheckedSource

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
    after: Callable[[], object] = lambda: None
    """Does what comes after the output; called by the process that made it, or with `exist_ok` for one that was there."""


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
        self._destination_at = partial(destination_at, options=options, kind=kind, looks_late=looks_late)
        self._progress, self._told = TimedProgress(progress_for(options.progress)), Told(options.on_warning)
        self.warn = self._told.tell
        self._infinite: dict[tuple[str, DType], None] = {}
        self.options = replace(
            options.execute_options(), infinite=partial(options.note_infinite, self._infinite)
        )
        """How the engine moves bytes."""
        self._destination: Destination | None = None
        self.was_there = False
        """True once an output that is there already is left as it is."""
        self.has_made = False
        """True once this process has made the output."""
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
        return self._destination.path

    @property
    def exists(self) -> bool:
        """True if an output is at the destination, and nothing is going to be written."""
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

        On Ctrl-C or SIGTERM what was finished stays for the next run; on any other error it is removed.

        Raises:
            Interrupted: after a signal.
            IntegrityError, ResourceError: as `Execution.run`, and whatever `describe` raises; or there is no room.
            UsageError: something else is at the destination by now.
        """
        if writing.job.plan.needs_torch:
            check_torch()
        with contextlib.ExitStack() as stack:
            divided = self._divided(writing, stack)
            try:
                self._write(writing, divided)
            finally:  # of files that an interrupted run finished, the next one converts nothing
                self.warn(beyond_range(self._infinite))
            if self.has_made or (self.was_there and divided.place.is_left):
                # The output of a run is there, whatever stays beside it; the next run removes that.
                with contextlib.suppress(*[ResourceError] if self._given.share is None else []):
                    divided.place.clean_up(keeps_mark=isinstance(self._given.share, Part))
                self._told.keep(self.destination.foreign())
            is_again = self.was_there and self._given.exist_ok and self._given.share is None
            if self.has_made or (is_again and not self._given.dry_run):
                writing.after()

    def _write(self, writing: Writing, divided: Divided) -> None:
        if (exists := self.destination.still_exists()) is not None:
            self._find_there(divided, exists)
            return
        try:
            self._write_here(writing, divided)
        except UsageError as error:  # asked afterwards: another process may make the output at any moment
            if self._given.overwrite or not self.destination.may_be_there():
                raise
            self._find_there(divided, error)

    def _write_here(self, writing: Writing, divided: Divided) -> None:
        share, free = self._given.share, self.destination.free_bytes()
        self.destination.check_room(divided, writing.needed_bytes)
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
            self._find_there(divided, exists)
            return
        self._note(divided, outcome, free=free)

    def _run(self, writing: Writing, divided: Divided) -> _PartOutcome | None:
        """Write all of a job, and remove what was written if it fails; None if another process has made an output meanwhile.

        It stays after a signal, and where something that appeared at the destination has to be moved away first: the same
        command goes on with it.
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
        return outcome if self.has_made else None

    def _find_there(self, divided: Divided, exists: UsageError) -> None:
        """Leave an output as it is that processes of this plan have made, or any with `exist_ok`; else raise `exists`."""
        share, part, place = self._given.share, None, divided.place
        is_ours = place.is_committed
        if not (is_ours or self._given.exist_ok):
            raise exists
        self.was_there = True
        if is_ours:
            place.give_way()
            self._told.keep(self.destination.foreign())
        if share is None and not self._given.dry_run:
            place.remove_others()  # what dead runs have left
        if isinstance(share, Committing):
            share.on_end(False)
        elif share is not None:
            part = divided.all_done(share)
        self._note(divided, (part, CheckedSource()), free=self.destination.free_bytes(), finished=0)

    def _note(
        self, divided: Divided, outcome: _PartOutcome, *, free: int | None, finished: int | None = None
    ) -> None:
        """Keep what the result says of the writing."""
        (part, source), plan = outcome, divided.plan
        resumed = 0 if part is None else part.resumed_files
        self._facts |= {
            "num_files": len(plan.images),
            "file_bytes": tuple(image.size for image in plan.images),
            "read_bytes": plan.read_bytes,
            "written_bytes": plan.written_bytes,
            "converted": tuple(converted_in(plan)),
            "checked_bytes": source.checked_bytes,
            "unchecked": source.unchecked,
            "peak_memory_bytes": divided.options.peak_bytes(plan),
            "free_bytes": free,
            "resumed_files": resumed if finished is None else finished,
            "part": None if self._given.share is None else part,
            "replaced": divided.place.replaced,
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

    def _carry_out(self, writing: Writing, divided: Divided, share: Share) -> _PartOutcome:
        """Write a part, and make the output if it was the last; return what became of it, and what was compared."""
        result: PartResult | None = None
        try:
            if isinstance(share, Part):
                result = divided.run(share)
                self.was_there |= divided.was_there
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
        self.has_made = has_committed
        self.was_there |= isinstance(share, Committing) and not has_committed
        if result is not None:
            result = replace(result, is_committed=True, by_another=not has_committed)
        if isinstance(share, Committing):
            share.on_end(has_committed)
        self._told.keep(divided.warnings())
        return result, divided.compared()

    def _divided(self, writing: Writing, stack: contextlib.ExitStack) -> Divided:
        """Return the job as its parts carry it out; a run of one process carries out all of it."""
        job, share = writing.job, self._given.share
        options = replace(self.options, share_extents=writing.share_extents)
        plan, options = self.destination.prepared(job.plan, options)
        agreement = agreement_of(job, self._given.command, share, self.destination.replaces())
        if isinstance(share, Committing):
            share.check(agreement)
        return Divided(
            stack.enter_context(self.destination.place(job, agreement)),
            agreement,
            plan,
            job.output.data_nbytes,
            writing.describe,
            options,
            self._progress,
            is_run=share is None,
        )
