"""Writing a directory: the one way that every verb takes.

    check the destination -> compare the source with its manifests -> room -> stage, move, describe -> rename

A verb decides what to write, as a `Job`, and a `Writer` carries it out. Nothing is written before every check has
passed, and the output appears under its name in one rename: whole, or not at all.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import DType, short_dtype
from shardkit.core.result import Result, wrote
from shardkit.core.text import count, escape, in_shell, listed
from shardkit.core.threads import TimedProgress, progress_for
from shardkit.errors import (
    IncompleteError,
    Interrupted,
    ResourceError,
    ShardkitError,
    UsageError,
    check_torch,
)
from shardkit.files import storage
from shardkit.files.location import location_of
from shardkit.files.shared import has_commits, remove_runs
from shardkit.files.shared_store import MAX_SENT_NBYTES
from shardkit.files.staging import identity_of
from shardkit.formats.owned import Made, OutputKind, is_output, refusal
from shardkit.formats.recorded import SourceManifests, find_manifests
from shardkit.operations.destination import check_destination, check_replaceable, check_space, free_bytes
from shardkit.operations.environment import mixed_versions
from shardkit.operations.leftovers import name_unknown
from shardkit.operations.options import WriteOptions
from shardkit.operations.parts.agreement import Agreement, Command, Committing, NotThere, Share
from shardkit.operations.parts.divided import Divided, PartResult
from shardkit.operations.parts.foreign import foreign_in, name_foreign
from shardkit.operations.parts.ingredients import (
    Job,
    agreement_of,
    hash_of,
    hash_plan,
    machine_of,
    shared_ingredients,
    versions_of,
)
from shardkit.operations.parts.on_disk import DividedOnDisk, absolute
from shardkit.operations.parts.part import ALL, Part
from shardkit.operations.uploading.in_store import DividedInStore
from shardkit.operations.uploading.local_records import (
    ANOTHER_PLACE,
    ELSEWHERE,
    place_of_records,
    place_of_run,
    remove_records,
)
from shardkit.operations.uploading.place import UploadTarget, check_target
from shardkit.operations.uploading.run import Describe, StoredFiles, Upload, check_beside
from shardkit.operations.uploading.run_in_store import RunInStore
from shardkit.osft.job import FactoredJob
from shardkit.osft.phase import FactorPhase, PhaseAt
from shardkit.transfer.checks import OFF, CheckedSource, SourceCheck, Unchecked
from shardkit.transfer.execute import ExecuteOptions
from shardkit.transfer.existing import Existing, Unproven, is_remembered, remember
from shardkit.transfer.plan import TransferPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Tensors of one dtype that are written in another."""

    stored: str
    """torch's name of the dtype in the source."""
    written: str
    """The same of the dtype in the output."""
    num_tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult(Result):
    """What every verb that writes a directory answers: what it wrote, or with `dry_run` would write."""

    output: str
    """The directory; absolute."""
    dry_run: bool
    num_tensors: int
    num_files: int
    """Files with tensors in them."""
    file_bytes: tuple[int, ...]
    """Size of each of these files."""
    read_bytes: int
    """Of the source's tensors, once."""
    written_bytes: int
    """Size of all these files."""
    converted: tuple[Converted, ...]
    """What has another dtype in the output than in the source. What becomes factors is not among it."""
    checked_bytes: int
    """Bytes of the source that were compared, as they moved, with the CRC-32 recorded for them."""
    unchecked: tuple[Unchecked, ...]
    """What could not be compared, by reason."""
    source_manifests: tuple[str, ...]
    """Manifests by shardkit that the source was compared with, beside what its files record."""
    peak_memory_bytes: int
    """Bound on the buffers, beside the interpreter and the plan."""
    free_bytes: int | None
    """On the destination's file system, before writing; None for a store."""
    resumed_files: int
    """Files that an interrupted run had finished."""
    was_there: bool = False
    """The output was there already, and is what this call would write: nothing was written."""
    part: PartResult | None = None
    """What became of a part; None where one process wrote all."""
    elapsed_s: float
    moving_s: float
    """Of `elapsed_s`, how long bytes moved; 0 if this process moved none."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def unfinished(self) -> PartResult | None:
        """The part, if the output is not there yet or this is a dry run of it."""
        return self.part if self.part and (self.dry_run or not self.part.is_committed) else None

    def headline(self) -> str:
        """Return what was written, would be, or is there already."""
        if self.unfinished is not None:
            return (
                f"{'dry run: ' if self.dry_run else ''}part {self.unfinished.part} of {escape(self.output)}"
            )
        if self.was_there:
            return f"{escape(self.output)} is already there, as this command writes it"
        return wrote(self.output, dry_run=self.dry_run)


def _converted(plan: TransferPlan) -> Iterator[Converted]:
    every = (holes for holes in plan.images.tensors() if holes.source not in plan.made_of)
    counts = Counter((plan.catalog.tensors[holes.source].dtype, holes.dtype) for holes in every)
    for (stored, written), number in counts.items():
        if stored is not written:
            yield Converted(stored=stored.name, written=written.name, num_tensors=number)


class Writer:
    """One run of a verb that writes a directory. Its methods are called in the order in which they stand here.

    Args:
        options: of the verb. Each warning is told once, as soon as it is known: a person may want to stop before anything is
            written.
        kind: of the output: what may be replaced, and which file makes it an output in a store.
        looks_late: what lies at the destination is looked into by `check_beside`, which knows what the job puts there.

    Raises:
        UsageError: the options cannot be carried out.
    """

    def __init__(
        self, options: WriteOptions, *, kind: OutputKind = OutputKind.SHARDED, looks_late: bool = False
    ) -> None:
        options.check()
        self._begun = time.monotonic()
        self._verb, self._kind = options.verb, kind
        self._made: Made | None = None if looks_late else {}
        self._progress, self._told = TimedProgress(progress_for(options.progress)), set[str]()
        self._infinite: dict[tuple[str, DType], None] = {}
        self.options = replace(options.execute_options(), infinite=self._is_infinite)
        """How the engine moves bytes."""
        self.path = ""
        """The destination, absolute, once it has been checked."""
        self.was_there = False
        """True once what is at the destination is known to be what would be written."""
        self.writing = options
        self.ends = False
        """True once the output is there, and what comes after it is this process's to do."""
        self.can_read = True
        """False where the source would have to be downloaded first: no download is worth the answer that there is an output."""
        self.describes_elsewhere = False
        """Set where something that describes the output goes to another place: then it is described in any case."""
        self.record_bytes = 0
        """Of factors that lie beside the output, or on the local disk, until it is there."""
        self._parts: Divided | None = None
        self._before: tuple[int, int] | None = None
        self.open_all: Callable[[], Job] | None = None
        """Returns the job with all records open; None if they are."""
        self._exists: UsageError | None = None
        self._target: UploadTarget | None = None
        self._hash = ""
        self._warnings: tuple[str, ...] = ()
        self._facts: dict[str, Any] = {}

    def check_destination(self, output: str, source: str | None, named_after: str | None = None) -> str:
        """Return the absolute path of a destination that may be written; errors as `destination.check_destination`.

        Args:
            output: as the user gave it.
            source: directory that is read, or None for one in a cache of its own.
            named_after: as `destination.check_destination` has it.
        """
        overwrite, is_first = self.writing.overwrite, not self.path
        # All that is somebody's is named at once.
        kind = None if overwrite and self._made is None else self._kind
        if not location_of(output).renames:
            # Whether what is there was made by parts of this very plan is known once there is a plan.
            writing = self.writing
            may_be_ours = overwrite or writing.share is not None or not writing.dry_run
            target = check_target(output, source, self._kind, overwrite=may_be_ours, made=self._made)
            if target.etag is None and writing.ends:
                raise NotThere
            self._target = self._target or target
            self.path = self._target.path
            if writing.share is None and not overwrite and target.etag is not None:
                self._exists = UsageError(
                    f"{escape(output)} exists", hint="choose another name, or replace it: --overwrite"
                )
            return self.path
        try:
            self.path = check_destination(
                output, source, overwrite=overwrite, kind=kind, made=self._made, named_after=named_after
            )
        except UsageError as error:  # asked afterwards: the last part may commit at this very moment
            if overwrite or not (self._may_be_there(output) or self._may_be_of_parts(output)):
                raise
            try:
                self.path = check_destination(output, source, overwrite=True, kind=None)
            except ShardkitError:  # it is in a place that cannot be written
                raise error from None
            self._exists = error if self._may_be_there(output) else None
        if self._exists is None and self.writing.ends:
            raise NotThere
        if is_first:
            self._before = identity_of(self.path) if overwrite else None
        return self.path

    @property
    def exists(self) -> bool:
        """True if an output is at the destination that may be what is to be written; `write` tells."""
        return self._exists is not None

    def _may_be_there(self, output: str) -> bool:
        return not self.writing.dry_run and is_output(absolute(output), self._kind)

    def _may_be_of_parts(self, output: str) -> bool:
        return isinstance(self.writing.share, Part) and has_commits(absolute(output))

    @property
    def sending_bytes(self) -> int:
        """Memory that factors take on their way into a store, while others are computed."""
        return MAX_SENT_NBYTES if self._target is not None and self.writing.share is not None else 0

    def warn(self, warnings: Iterable[str]) -> None:
        """Tell the warnings that were not told before."""
        for warning in warnings:
            if self.writing.on_warning is not None and warning not in self._told:
                self.writing.on_warning(warning)
            self._told.add(warning)

    def find_manifests(self, catalogs: Sequence[Catalog], source: str) -> SourceManifests:
        """Return the manifests to compare the source with; arguments and errors as `recorded.find_manifests`."""
        given, check_source = self.writing.source_manifest, self.writing.check_source
        found = find_manifests(catalogs, source, given=given, check_source=check_source)
        self._warnings = (*(() if check_source else (OFF,)), *found.warnings)
        self.warn(self._warnings)
        self._facts["source_manifests"] = tuple(found.paths)
        return found

    def write(
        self,
        job: Job,
        describe: Describe,
        *,
        needed_bytes: int,
        share_extents: bool = False,
        factors: FactoredJob | None = None,
        after: Callable[[], object] = lambda: None,
    ) -> None:
        """Write a job's output, or with a dry run check that it could be written.

        On Ctrl-C or SIGTERM the staging directory stays for the next run, and where a process died that computed
        something; on any other error it is removed.

        Args:
            job: what is to be written.
            describe: writes what lies beside the images.
            needed_bytes: room on the disk for everything that is written.
            share_extents: clone blocks of the source instead of copying them.
            factors: computes what fills holes before the engine does the rest, if the plan has such.
            after: does what comes after the output. Where others made it, it is called only if they may have died before.

        Raises:
            Interrupted: after a signal.
            IncompleteError: a process died that computed factors.
            IntegrityError, ResourceError: as `Execution.run`, and whatever `describe` raises; or there is no room.
            UsageError: something else is at the destination by now.
        """
        try:
            self._write(job, describe, needed_bytes, share_extents, factors)
        finally:  # of files that an interrupted run finished, the next one converts nothing
            self.warn(_beyond_range(self._infinite))
        if not self.ends:
            return
        with contextlib.nullcontext() if self._parts is None else self._parts.attended():
            after()
        if self._parts is not None:
            # The output of a run is there, whatever stays beside it; the next run removes that.
            with contextlib.suppress(*[ResourceError] if self.writing.share is None else []):
                self._parts.clean_up(keeps_mark=isinstance(self.writing.share, Part))
            self._say(name_foreign(self.path))

    def _write(
        self,
        job: Job,
        describe: Describe,
        needed_bytes: int,
        share_extents: bool,
        factors: FactoredJob | None,
    ) -> None:
        writing = self.writing
        if job.plan.needs_torch or factors is not None:
            check_torch()
        if self._target is not None:
            self._into_store(job, describe, self._target, factors)
            return
        if self._exists is not None and storage.lexists(self.path):
            self._find_there(job, describe, self._exists, factors)
            return
        self.options = replace(self.options, share_extents=share_extents)
        try:
            self._write_here(job, describe, needed_bytes, factors)
        except UsageError as error:  # asked afterwards: another process may make the output at any moment
            if writing.overwrite or not self._may_be_there(self.path):
                raise
            try:
                self._find_there(job, describe, error, factors)
            except UsageError as other:
                problems = error.problems or other.problems
                raise UsageError(error.message, problems=problems, hint=error.hint) from other

    def _write_here(
        self, job: Job, describe: Describe, needed_bytes: int, factors: FactoredJob | None
    ) -> None:
        free, share = free_bytes(self.path), self.writing.share
        self.record_bytes = 0 if factors is None else factors.records.nbytes
        part, source = None, CheckedSource()
        divided = self._divided(job, describe, factors)
        if share is None:
            needed_bytes += self.record_bytes
            if self.writing.resume and not divided.staging.is_over:  # else all that is there counts as free
                needed_bytes -= job.plan.written_bytes + self.record_bytes - divided.bytes_left(ALL)
            check_space(self.path, needed_bytes)
            if self.writing.dry_run:
                self._note(job.plan, source, finished=0, free=free, part=None)
                return
        elif isinstance(share, Part):
            check_space(self.path, divided.bytes_left(share))
        else:
            check_space(self.path, max(needed_bytes - job.plan.written_bytes, 0))
        if self.writing.dry_run:
            part = divided.result(share) if isinstance(share, Part) else None
        elif share is None:
            found = self._run(divided, job)
            if found is None:
                exists = UsageError(f"{escape(self.path)} exists: another process has made it meanwhile")
                self._find_there(job, describe, exists, factors)
                return
            part, source = found
        else:
            if isinstance(share, Part) and not self.writing.overwrite:
                self._check_absent(divided)
            part, source = self._carry_out(divided, share, job, job.plan)
        finished = 0 if part is None else part.resumed_files
        self._note(job.plan, source, finished=finished, free=free, part=None if share is None else part)

    def _run(self, divided: DividedOnDisk, job: Job) -> tuple[PartResult | None, CheckedSource] | None:
        """Write all of a job, and remove what was written if it fails; return as `_carry_out`, or None if another process
        has made an output meanwhile.

        It stays after a signal, where a process died that computed something, and where something that appeared at the
        destination has to be moved away first: the same command goes on with it.
        """
        self._say(name_unknown(self.path, divided.staging.path))
        try:
            found = divided.alone.carry_out(
                lambda: self._carry_out(divided, ALL, job, job.plan),
                resume=self.writing.resume,
                on_error=divided.after,
            )
        except (Interrupted, IncompleteError):
            raise
        except BaseException:
            with contextlib.suppress(OSError, ShardkitError):
                self._say(name_foreign(self.path))
            raise
        if self._parts is not None and not self.was_there:
            return found
        if self.writing.overwrite and not self.describes_elsewhere:
            self._take(divided)  # by a run of this very plan, whatever has replaced its output since
            return found
        return None

    def _find_there(
        self, job: Job, describe: Describe, exists: UsageError, factors: FactoredJob | None
    ) -> None:
        """Take what is at the destination for the output if it is of this plan; errors as `_compare`."""
        share, part, source = self.writing.share, None, CheckedSource()
        divided = self._divided(job, describe, factors)
        is_known = divided.is_committed
        self._take(divided if share is not None or is_known else None)
        if not is_known or (self.ends and self.describes_elsewhere):
            source = self._compare(job, describe, exists, factors, is_known=is_known)
        divided.give_way()
        self._say(name_foreign(self.path))
        if share is None:
            remove_runs(self.path, foreign_in, but=divided.staging.path)
        elif isinstance(share, Committing):
            share.on_end(False)
        else:
            part = divided.all_done(share)
        self._note(job.plan, source, finished=0, free=free_bytes(self.path), part=part)

    def _take(self, divided: Divided | None) -> None:
        """Take the output for one that was there before; what comes after it is somebody's who made it and is alive."""
        self.was_there, self.ends = True, divided is None or divided.is_left or self.writing.ends
        self._parts = divided if self.ends else None

    def _compare(
        self,
        job: Job,
        describe: Describe,
        exists: UsageError,
        factors: FactoredJob | None,
        *,
        is_known: bool,
    ) -> CheckedSource:
        """Find out whether what is at the destination is what the job would write; return how much of it was compared.

        Args:
            job, describe, factors: as for `write`.
            exists: what is said if it is not.
            is_known: a run of this plan has made it; it is only described once more.

        Raises:
            UsageError: it is something else; says what differs.
        """
        plan_hash, job = hash_plan(job), self._whole(job)
        existing = Existing(
            path=self.path,
            recorded=self.writing.recorded,
            plan=job.plan,
            decided=job.decided,
            describe=describe,
            options=self.options,
            progress=self._progress,
            factors=factors,
        )
        check, problems, said = None, list[str](), "and is not what this command writes"
        is_recorded = not self.describes_elsewhere and (
            existing.is_recorded(plan_hash) or existing.is_of_commit()
        )
        try:
            if not self.can_read and not is_recorded:
                raise Unproven("its source is not on this machine, so nothing was compared")
            if not is_recorded:
                check = SourceCheck(job.plan.catalog) if self.options.check_source else None
                problems = existing.differences(check, is_known=is_known)
        except Unproven as reason:
            problems = [*existing.otherwise(), str(reason)]
            if len(problems) == 1:
                said = "and nothing proves that it is what this command writes"
        finally:
            self._progress.finish()
        UsageError.raise_for(problems, f"{exists.message}, {said}", hint=exists.hint)
        return _summary(check, job.plan, self.options)

    def _note(
        self,
        plan: TransferPlan,
        source: CheckedSource,
        *,
        finished: int,
        free: int | None,
        part: PartResult | None,
    ) -> None:
        """Keep what the result says of the writing."""
        sizes = tuple(image.size for image in plan.images)
        self._facts |= {
            "num_files": len(sizes),
            "file_bytes": sizes,
            "read_bytes": plan.read_bytes,
            "written_bytes": plan.written_bytes,
            "converted": tuple(_converted(plan)),
            "checked_bytes": source.checked_bytes,
            "unchecked": source.unchecked,
            "peak_memory_bytes": self.options.peak_bytes(plan),
            "free_bytes": free,
            "resumed_files": finished,
            "part": part,
        }

    def hash_in_store(self, job: Job) -> str:
        """Return the hash of inputs, options and version that is equal on all machines.

        It is taken once: the names of a job's files may have it in them later.
        """
        recorded = {"recorded": sorted(self.writing.recorded)} if self.writing.recorded else {}
        self._hash = self._hash or hash_of({**shared_ingredients(job), **recorded})
        return self._hash

    def check_beside(self, files: Mapping[str, Callable[[], bytes]], earlier: Made) -> None:
        """Refuse to replace what lies beside the weights and is somebody's, before anything moves.

        Args:
            files: what is going to lie beside the weights, by name.
            earlier: what earlier versions put there; a name that ends with "/" is a folder with nothing in it.

        Raises:
            UsageError: something there is neither what shardkit writes nor what it wrote; or, in a store, it has another
                content, and nothing is to be replaced.
        """
        made = {name: [files[name]] if name in files else [] for name in {*files, *earlier}}
        self._made = {name: [*contents, *earlier.get(name, ())] for name, contents in made.items()}
        target, overwrite = self._target, self.writing.overwrite
        if overwrite or (target is not None and self.writing.share is not None):
            self._check_replaceable()
        if target is not None and target.is_flat and not overwrite:
            check_beside(target.path, files)

    def _into_store(
        self, job: Job, describe: Describe, target: UploadTarget, factors: FactoredJob | None
    ) -> None:
        """Write a job's output into a store; errors as `Upload.run`."""
        plan = job.plan.in_order()
        self.options = self.options.into_store(max((image.size for image in plan.images), default=0))
        upload = Upload(
            target=target,
            plan=plan,
            plan_hash=self.hash_in_store(job),
            data_nbytes=job.output.data_nbytes,
            describe=describe,
            options=self.options,
            progress=self._progress,
            overwrites=self.writing.overwrite,
            look=self._look,
        )
        part, source, share = None, CheckedSource(), self.writing.share
        if self._exists is not None:
            if not StoredFiles(upload).are_committed:
                raise UsageError(
                    f"{self._exists.message}, and is not what this command writes", hint=self._exists.hint
                )
            self._take(None)
            remove_records(self.path)
        elif share is not None:
            part, source = self._share_in_store(job, upload, share, factors)
        else:
            if factors is not None:
                self._check_room_for_records(factors.records.nbytes)
            if not self.writing.dry_run:
                part, source = self._run_in_store(job, upload, factors)
        if self.was_there:
            self._describe_stored(job, upload)
        finished = 0 if part is None else part.resumed_files
        self._note(plan, source, finished=finished, free=None, part=None if share is None else part)

    def _run_in_store(
        self, job: Job, upload: Upload, factors: FactoredJob | None
    ) -> tuple[PartResult | None, CheckedSource]:
        """Write all of a job; errors as `Divided.run` and `Divided.commit`."""
        agreement, phase = self._agreement(job, None, factors), self._phase(job, factors)
        with place_of_run(self.path, is_needed=factors is not None) as place:
            run = RunInStore(upload, agreement, phase, place=place, resume=self.writing.resume)
            found = run.alone.carry_out(
                lambda: self._carry_out(run, ALL, job, upload.plan),
                resume=self.writing.resume,
                on_error=run.after,
            )
            if self._parts is None:  # another process has made it meanwhile
                run.clean_up(keeps_mark=False)
                self._take(None)
        return found

    def _phase(self, job: Job, factors: FactoredJob | None) -> PhaseAt | None:
        """Return what computes the factors of a job, given the place of their records; None if there are none."""
        if factors is None:
            return None
        return lambda place: FactorPhase(
            job=factors,
            place=place,
            compares=self.options.check_source,
            computed_by=machine_of(job),
            versions=versions_of(job),
            another_place="choose another destination" if self._target is None else ANOTHER_PLACE,
        )

    def _check_room_for_records(self, needed_bytes: int) -> None:
        """Refuse to compute factors that have no room on this machine while they wait, and keep what they take."""
        self.record_bytes = needed_bytes
        check_space(place_of_records(self.path), needed_bytes, hint=ELSEWHERE)

    def _share_in_store(
        self, job: Job, upload: Upload, share: Share, factors: FactoredJob | None
    ) -> tuple[PartResult | None, CheckedSource]:
        """Carry out a part, or what comes after all parts; errors as `Divided.run` and `Divided.commit`."""
        agreement = replace(self._agreement(job, share, factors), replaces=upload.target.etag)
        replaces_any = isinstance(share, Committing) and share.overwrite
        divided = DividedInStore(upload, agreement, self._phase(job, factors), replaces_any=replaces_any)
        divided.check_absent()
        if factors is not None and isinstance(share, Part) and not divided.is_committed:
            self._check_room_for_records(divided.record_bytes_left(share))
        if self.writing.dry_run:
            return divided.result(share) if isinstance(share, Part) else None, CheckedSource()
        return self._carry_out(divided, share, job, upload.plan)

    def _whole(self, job: Job) -> Job:
        """Return a job with all records open, where other parts read some of them."""
        tensors = job.plan.catalog.tensors.values()
        is_part = any(entry.nbytes and not entry.num_chunks for entry in tensors)
        return self.open_all() if is_part and self.open_all is not None else job

    def _describe_stored(self, job: Job, upload: Upload) -> None:
        """Describe what is in a store already, if that goes to another place."""
        if self.ends and self.describes_elsewhere:
            if (whole := self._whole(job)) is not job:
                upload = replace(upload, plan=whole.plan.in_order())
            upload.describe_again(SourceCheck(upload.plan.catalog) if self.options.check_source else None)

    def facts(self, warnings: Iterable[str]) -> dict[str, Any]:
        """Return the fields of `WriteResult` that every verb fills alike.

        Args:
            warnings: the verb's own; they come first.
        """
        return {
            **self._facts,
            "output": self.path,
            "dry_run": self.writing.dry_run,
            "was_there": self.was_there,
            "elapsed_s": round(time.monotonic() - self._begun, 3),
            "moving_s": round(self._progress.phases_s, 3),
            "warnings": (*warnings, *self._warnings, *_beyond_range(self._infinite)),
        }

    def _is_infinite(self, fqn: str, dtype: DType) -> None:
        self._infinite[fqn, dtype] = None  # from any thread

    def _carry_out(
        self, divided: Divided, share: Share, job: Job, plan: TransferPlan
    ) -> tuple[PartResult | None, CheckedSource]:
        """Write a part, and make the output if it was the last; return what became of it, and what was compared."""
        result: PartResult | None = None
        divided.on_joined = lambda begun: self._warn_of_versions(job, [begun])
        try:
            if isinstance(share, Committing):
                self._warn_of_versions(job, [share.versions or {}])
            if isinstance(share, Part):
                result = divided.run(share)
                if divided.was_there:
                    self._take(divided)
                if result.is_committed:
                    self._say(divided.warnings())
                # A run that lacks something could not read a note for a moment: `commit` looks once more.
                if result.is_committed or (result.missing and self.writing.share is not None):
                    return result, CheckedSource()
            has_committed = divided.commit()
        except KeyboardInterrupt as interrupt:
            # A run whose output has just appeared ends as if nothing had happened; parts are run again.
            if self.writing.share is not None or not (divided.has_made or divided.is_committed):
                raise self._interrupted(interrupt, divided) from interrupt
            has_committed = divided.has_made  # else another process has, and what comes after is that one's
        finally:
            self._progress.finish()
        if has_committed:
            self.ends, self._parts = True, divided
        elif isinstance(share, Committing):
            self._take(divided)
        if result is not None:
            result = replace(result, is_committed=True, by_another=not has_committed)
        if isinstance(share, Committing):
            share.on_end(has_committed)
        self._say(divided.warnings())
        return result, _summary(divided.check, plan, self.options)

    def _interrupted(self, interrupt: KeyboardInterrupt, divided: Divided) -> Interrupted:
        is_run, shown = self.writing.share is None, in_shell(self.path)
        became = (
            f"was not made; {divided.left}"
            if is_run
            else "is not whole; the files that were finished are kept"
        )
        give_up = (
            f", or give it up: `shardkit status {shown} --abort`"
            if is_run and self._target is not None
            else ""
        )
        return Interrupted(
            f"interrupted: {escape(self.path)} {became}",
            signum=getattr(interrupt, "signum", signal.SIGINT),
            hint=f"run the same command again to resume{give_up}",
        )

    def _warn_of_versions(self, job: Job, begun: Iterable[Mapping[str, str]]) -> None:
        """Warn, once, if what this process goes on with was begun with other versions of packages."""
        warning = mixed_versions(begun, versions_of(job))
        if warning is not None and warning not in self._warnings:
            self._say([warning])

    def _say(self, warnings: Iterable[str]) -> None:
        """Tell warnings, and keep them for the result."""
        found = tuple(warnings)
        self.warn(found)
        self._warnings += found

    def _check_absent(self, divided: DividedOnDisk) -> None:
        """Refuse if something is at the destination that parts of this very plan have not made."""
        try:
            check_destination(self.path, None, overwrite=False)
        except UsageError:  # asked afterwards, as above
            if not divided.is_committed:
                raise

    def _look(self, path: str) -> None:
        """Refuse to replace what lies at a path, under the destination's name or after it has lost it."""
        refused = refusal(path, escape(self.path), self._kind, self._made)
        if refused is not None:
            raise refused

    def _check_replaceable(self) -> None:
        """Refuse to replace what is at the destination by now."""
        shown = escape(self.path)
        if self._target is not None:
            self._look(self.path)
        elif storage.lexists(self.path):
            check_replaceable(self.path, shown, overwrite=True, kind=self._kind, made=self._made)

    def _divided(self, job: Job, describe: Describe, factors: FactoredJob | None) -> DividedOnDisk:
        """Return the job as its parts carry it out; a run of one process carries out all of it."""
        given: dict[str, Any] = {
            "describe": describe,
            "before": self._before,
            "overwrite": self.writing.overwrite,
            "check_replaceable": self._check_replaceable,
            "look": self._look,
            "remember": lambda directory: self._remember(hash_plan(job), directory),
            "is_ours": lambda: is_remembered(self.path, hash_plan(job), self.writing.recorded),
            "is_run": self.writing.share is None,
        }
        agreement, phase = self._agreement(job, self.writing.share, factors), self._phase(job, factors)
        moving = (agreement, job.plan, job.output.data_nbytes, self.options, self._progress)
        return DividedOnDisk(self.path, *moving, **given, phase=phase)

    def _agreement(self, job: Job, share: Share | None, factors: FactoredJob | None = None) -> Agreement:
        """Return what all processes agree on that share a job: the plan, and the content of the descriptions."""
        command = self.writing.command
        if share is None:  # nobody repeats the call
            settings = {
                **dict.fromkeys(self.writing.recorded, True),
                "check_source": self.options.check_source,
            }
            command = Command(verb=self._verb, options=settings)
        weights = [] if factors is None else factors.weights
        agreement = agreement_of(job, command, share, weights)
        if isinstance(share, Committing):
            share.check(agreement)
        return agreement

    def _remember(self, plan_hash: str, directory: str) -> None:
        remember(self.path, plan_hash, self.writing.recorded, directory)


def _beyond_range(tensors: Collection[tuple[str, DType]]) -> Iterator[str]:
    """Yield a warning for each dtype that could not hold all values of some tensors, given as (FQN, dtype)."""
    for dtype in sorted({dtype for _, dtype in tensors}, key=attrgetter("name")):
        names = sorted(fqn for fqn, other in tensors if other is dtype)
        yield (
            f"{count(len(names), 'tensor')} {'has' if len(names) == 1 else 'have'} values beyond the range of "
            f"{short_dtype(dtype.name)}, which became infinite: {listed(names)}"
        )


def _summary(check: SourceCheck | None, plan: TransferPlan, options: ExecuteOptions) -> CheckedSource:
    if check is None:
        return CheckedSource()
    made_of = plan.made_of
    names = dict.fromkeys(made_of.get(holes.source, holes.source) for holes in plan.images.tensors())
    return check.summary(names, looks_for_unread=options.share_extents and not options.digests)
