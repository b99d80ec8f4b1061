"""The two kinds of destinations, on a disk and in a store: what exists there, what may be replaced, how much room is left.

A *destination* is the place that a verb's output will have. A *foreign* file is one that shardkit did not write. The
*marker* is the file by which readers recognise an output, `.metadata` or an index.

A further kind is a subclass, a row of `KINDS`, and a `JobOutput` (`files/output`).
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from shardkit.core.text import escape
from shardkit.core.threads import at_once
from shardkit.errors import ResourceError, ShardkitError, UsageError
from shardkit.files import storage, stores
from shardkit.files.location import location_of
from shardkit.files.output import bucket, local
from shardkit.files.output.bucket import BucketOutput
from shardkit.files.output.contract import JobRecord, JobStatus, OutputExists, other_job_error
from shardkit.files.output.local import LocalOutput, is_free
from shardkit.formats.owned import OutputKind, RunFiles, find_foreign, output_in, replacement_refusal
from shardkit.operations.destination import (
    KEEP_OR_REPLACE,
    absolute,
    check_destination,
    check_replaceable,
    check_same,
    check_space,
    check_target,
    free_bytes,
)
from shardkit.operations.options import WriteOptions
from shardkit.operations.parts.agreement import Committing
from shardkit.transfer.execute import ExecuteOptions
from shardkit.transfer.plan import TransferPlan


class Destination(ABC):
    """The destination of a verb's output.

    Args:
        output: the user's path.
        options: of the verb.
        kind: of the output.
        looks_late: with `overwrite`, check the content of an existing output only in `check_beside`, which gets the list of
            new files and so can name all foreign files at once.
    """

    path: str
    """Absolute."""

    def __init__(self, output: str, options: WriteOptions, kind: OutputKind, looks_late: bool) -> None:
        self.path = output
        self.exists: UsageError | None = None
        """The error for an existing output that is not replaced. It is not raised with `exist_ok`, nor by the job that made it."""
        self.files: RunFiles | None = None
        """The argument of `check_beside`; None before."""
        self._options, self._kind, self._looks_late = options, kind, looks_late
        share = options.share
        self._overwrite = options.overwrite or (isinstance(share, Committing) and share.overwrite)

    @abstractmethod
    def check(self, output: str, source: str | None, named_after: str | None) -> None:
        """Refuse a destination that may not be written. Arguments and errors are those of `destination.check_destination`."""

    def check_beside(self, files: RunFiles) -> None:
        """Refuse to replace files that shardkit did not write, before any byte moves.

        Args:
            files: the files that will lie beside the weights.

        Raises:
            UsageError: the existing output has a foreign file; or, in a store without `overwrite`, a file of the same
                name but other content.
        """
        self.files = files

    @property
    @abstractmethod
    def is_there(self) -> bool:
        """True if the destination holds an output."""

    @abstractmethod
    def jobs(self) -> Sequence[JobStatus]:
        """Return the uncommitted jobs of the destination."""

    def check_jobs(self, record: JobRecord) -> None:
        """Raise UsageError if another job is under way. In a bucket jobs do not see each other."""
        return

    def end_commits(self) -> list[str]:
        """Complete interrupted commits, remove the rest of ended jobs, and return warnings.

        Nothing changes if the destination holds something else by now, or may not be written.
        """
        with self.output("") as output, contextlib.suppress(OutputExists, ResourceError):
            output.end_commits()
        return list(output.warnings)

    @abstractmethod
    def output(self, job_hash: str) -> LocalOutput | BucketOutput:
        """Return the output of the job with a hash."""

    def folder(self, job_hash: str) -> str:
        """Return the folder of the data files below the output; empty for the output itself."""
        return ""

    @property
    def marker(self) -> str:
        """Name of the file by which readers recognise the output: the marker of a commit in a store."""
        return self._kind.value

    def prepared(self, plan: TransferPlan, options: ExecuteOptions) -> tuple[TransferPlan, ExecuteOptions]:
        """Return plan and options as this kind of destination needs them."""
        return plan, options

    @abstractmethod
    def check_room(self, needed_bytes: int, sizes: Iterable[int]) -> None:
        """Refuse a job for which there is too little room.

        Args:
            needed_bytes: of everything that this process writes.
            sizes: bytes of each file that it writes.

        Raises:
            ResourceError: there is too little.
        """

    def free_bytes(self) -> int | None:
        """Return the free bytes at the destination, or of scratch for a store; None if unknown."""
        return None

    @abstractmethod
    def unnamed_data(self) -> tuple[str, ...]:
        """Return paths of data that belongs to no output and no job: replaced data in a store, unremoved directories on a disk."""


class DiskDestination(Destination):
    """A directory that all processes see."""

    def __init__(self, output: str, options: WriteOptions, kind: OutputKind, looks_late: bool) -> None:
        super().__init__(output, options, kind, looks_late)
        self.path = absolute(output)

    def check(self, output: str, source: str | None, named_after: str | None) -> None:
        overwrite = self._overwrite
        kind = None if overwrite and self._looks_late and self.files is None else self._kind
        try:
            check_destination(
                output, source, overwrite=overwrite, kind=kind, files=self.files, named_after=named_after
            )
            self.exists = None
        except UsageError as error:
            options, is_commit = self._options, isinstance(self._options.share, Committing)
            may_stay = options.exist_ok or not options.dry_run
            if overwrite or not may_stay or not storage.isdir(absolute(output)):
                raise
            try:
                check_destination(output, source, overwrite=True, kind=None)
            except ShardkitError as refused:
                # With `exist_ok` nothing is written, so the place need not be writable.
                if not (options.exist_ok and isinstance(refused, ResourceError)):
                    raise error from None
            # The existing output may be that of this very job, whose commit is in progress or was interrupted.
            if not (options.exist_ok or is_commit or self.jobs()):
                raise
            self.exists = error

    def check_beside(self, files: RunFiles) -> None:
        super().check_beside(files)
        if self._overwrite and storage.lexists(self.path):
            self._check_replaceable(self.path)

    @property
    def is_there(self) -> bool:
        return not is_free(self.path)

    def jobs(self) -> Sequence[JobStatus]:
        return local.status(self.path)

    def check_jobs(self, record: JobRecord) -> None:
        for job in self.jobs():
            if job.record.hash != record.hash and not self._overwrite:
                raise other_job_error(self.path, job.record, record)

    def output(self, job_hash: str) -> LocalOutput:
        return LocalOutput(
            self.path,
            may_replace=self._check_replaceable,
            foreign_files=lambda path, new: find_foreign(path, *output_in(new)),
            overwrite=self._overwrite,
        )

    def _check_replaceable(self, path: str, new: str = "") -> None:
        kind, files = output_in(new) if new else (self._kind, self.files)
        check_replaceable(path, escape(self.path), overwrite=self._overwrite, kind=kind, files=files)

    def unnamed_data(self) -> tuple[str, ...]:
        return tuple(local.unremoved(self.path))

    def check_room(self, needed_bytes: int, sizes: Iterable[int]) -> None:
        check_space(self.path, needed_bytes)

    def free_bytes(self) -> int | None:
        return free_bytes(self.path)


class StoreDestination(Destination):
    """A place in a store."""

    def __init__(self, output: str, options: WriteOptions, kind: OutputKind, looks_late: bool) -> None:
        super().__init__(output, options, kind, looks_late)
        self.path = stores.plain(output) if location_of(output).is_writable else output
        self._scratch = None if options.scratch is None else os.fspath(options.scratch)

    def check(self, output: str, source: str | None, named_after: str | None) -> None:
        looks = not (self._looks_late and self.files is None)
        self.path, is_there = check_target(
            output, source, self._kind, overwrite=self._overwrite, files=self.files, looks=looks
        )
        self.exists = None
        if is_there and not self._overwrite:
            self.exists = UsageError(f"{escape(output)} exists", hint=KEEP_OR_REPLACE)
            if self._options.dry_run and not self._options.exist_ok:
                raise self.exists
            # Otherwise `begin` finds out whether this very job has made it.

    def check_beside(self, files: RunFiles) -> None:
        super().check_beside(files)
        if self.exists is not None:
            return
        self._look(self.path)
        if not self._overwrite and self.marker != OutputKind.SHARDED.value:
            at_once(lambda name: check_same(os.path.join(self.path, name), files[name]()), files)

    def _look(self, path: str) -> None:
        """Raise an error if the output at an address may not be replaced."""
        refused = replacement_refusal(path, escape(self.path), self._kind, self.files)
        if refused is not None:
            raise refused

    @property
    def is_there(self) -> bool:
        return any(storage.exists(os.path.join(self.path, kind.value)) for kind in OutputKind)

    def jobs(self) -> Sequence[JobStatus]:
        return bucket.status(self.path)

    def folder(self, job_hash: str) -> str:
        return f"data-{job_hash[:16]}" if self._kind is OutputKind.SHARDED else ""

    def output(self, job_hash: str) -> BucketOutput:
        return BucketOutput(
            self.path,
            marker=self.marker,
            may_replace=self._look,
            overwrite=self._overwrite,
            scratch=self._scratch,
        )

    def prepared(self, plan: TransferPlan, options: ExecuteOptions) -> tuple[TransferPlan, ExecuteOptions]:
        largest_bytes = max((image.size for image in plan.images), default=0)
        return plan.in_order(), replace(options, share_extents=False).through_scratch(largest_bytes)

    def check_room(self, needed_bytes: int, sizes: Iterable[int]) -> None:
        home = bucket.scratch_home(self._scratch)
        check_space(os.path.join(home, "scratch"), bucket.scratch_nbytes(sizes), hint=bucket.NAME_SCRATCH)

    def free_bytes(self) -> int | None:
        return free_bytes(os.path.join(bucket.scratch_home(self._scratch), "scratch"))

    def unnamed_data(self) -> tuple[str, ...]:
        return tuple(bucket.unnamed_data(self.path, [kind.value for kind in OutputKind]))


KINDS: list[tuple[Callable[[str], bool], type[Destination]]] = [
    (lambda output: location_of(output).renames, DiskDestination),
    (lambda output: True, StoreDestination),
]
"""(condition for a path, kind of destination); the first match counts."""


def destination_at(
    output: str,
    options: WriteOptions | None = None,
    kind: OutputKind = OutputKind.SHARDED,
    *,
    looks_late: bool = True,
) -> Destination:
    """Return the destination of an output; arguments as for `Destination`. Verbs that do not write have no options."""
    make = next(make for claims, make in KINDS if claims(output))
    return make(output, options or WriteOptions(), kind, looks_late)
