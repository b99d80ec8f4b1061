"""Where an output goes: what is there and what is under way, what may be replaced, the room for it, and the place of a plan.

Another kind of destination is a row of `KINDS`, and a kind of place (`files/place`).
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from shardkit.core.text import escape
from shardkit.core.threads import at_once
from shardkit.errors import ShardkitError, UsageError
from shardkit.files import storage, stores
from shardkit.files.location import location_of
from shardkit.files.place.contract import Notebook, Place
from shardkit.files.place.disk import DiskPlace
from shardkit.files.place.run_notes import place_of_notes, place_of_run, remove_notes
from shardkit.files.place.store import PartsInStore, RunInStore, StoredOutput, check_same
from shardkit.files.place.store_notes import shared_in_store
from shardkit.files.remote.writers import writer_of
from shardkit.files.shared import (
    SharedStaging,
    has_commits,
    remove_abandoned,
    remove_marks,
    runs_of,
    shared_of,
)
from shardkit.files.staging import identity_of, nothing
from shardkit.formats.dcp import METADATA
from shardkit.formats.owned import HUB_INDEX, Made, OutputKind, is_output, refusal
from shardkit.operations.destination import (
    KEEP_OR_REPLACE,
    absolute,
    check_destination,
    check_replaceable,
    check_space,
    free_bytes,
)
from shardkit.operations.leftovers import Leftover, leftovers, name_unknown
from shardkit.operations.options import WriteOptions
from shardkit.operations.parts.agreement import Agreement, Committing
from shardkit.operations.parts.divided import Divided
from shardkit.operations.parts.foreign import foreign_in, name_foreign
from shardkit.operations.parts.ingredients import Job, hash_of, ingredients, shared_stamp
from shardkit.operations.parts.part import ALL, Part
from shardkit.operations.uploading.place import check_target
from shardkit.operations.uploading.status import MARKERS, StoredStatus, remove_uncommitted, uncommitted
from shardkit.transfer.execute import ExecuteOptions
from shardkit.transfer.plan import TransferPlan


class Destination(ABC):
    """Where an output goes."""

    path: str
    """Absolute."""

    @abstractmethod
    def stagings(self) -> Sequence[Notebook]:
        """Return what parts share there, whatever their plans."""

    @abstractmethod
    def identity(self) -> object:
        """Return the identity of the output that is there; None if there is none."""

    def has_commits(self) -> bool:
        """True if parts are known to have made what is there."""
        return False

    def clean(self) -> None:
        """Remove what commits have left."""
        return

    def uncommitted(self) -> StoredStatus | None:
        """Describe the files beside the output that are no part of it; None where they are not looked for."""
        return None

    def runs(self) -> tuple[Leftover, ...]:
        """Return the directories that runs of one process have left, or are writing."""
        return ()

    def give_up(self) -> None:
        """Remove what nobody has committed, once the parts share nothing any more."""
        return

    # For a process that writes

    exists: UsageError | None
    """Why the output that is there is not replaced; it is left as it is if processes of this plan made it, or with `exist_ok`."""
    _kind: OutputKind

    made: Made | None = None
    """As for `owned.find_foreign`, once `check_beside` was given it."""
    _looks_late: bool
    """With `overwrite` what is there is looked into by `check_beside` alone, and all that is somebody's named at once."""

    @abstractmethod
    def check(self, output: str, source: str | None, named_after: str | None) -> None:
        """Refuse a destination that may not be written; arguments and errors as `destination.check_destination`."""

    def may_be_there(self) -> bool:
        """True if an output is there by now."""
        return False

    def still_exists(self) -> UsageError | None:
        """Return `exists`, unless that output is gone by now."""
        return self.exists

    def check_beside(self, files: Made) -> None:
        """Refuse to replace what lies beside the weights and is somebody's, before anything moves.

        Args:
            files: what is going to lie beside the weights.

        Raises:
            UsageError: something there is not what shardkit writes; or, in a store, it has another content, and nothing
                is to be replaced.
        """
        self.made = files

    def _look(self, path: str) -> None:
        """Refuse to replace what lies at a path, under the destination's name or after it has lost it."""
        refused = refusal(path, escape(self.path), self._kind, self.made)
        if refused is not None:
            raise refused

    def hash(self, job: Job) -> str:
        """Return the hash that is equal on all machines; the names of a job's files may have it in them. It is taken once."""
        return hash_of(ingredients(job, shared_stamp))

    def prepared(self, plan: TransferPlan, options: ExecuteOptions) -> tuple[TransferPlan, ExecuteOptions]:
        """Return a plan, and how its bytes are moved, as they have to be for files that are written here."""
        return plan, options

    @abstractmethod
    def place(self, job: Job, agreement: Agreement) -> AbstractContextManager[Place]:
        """Give the place of a job.

        Args:
            job: what is written.
            agreement: of the processes that write it.
        """

    def replaces(self) -> str | None:
        """Return what the processes agree on to replace, as far as all of them see it alike."""
        return None

    def check_room(self, divided: Divided, needed_bytes: int) -> None:
        """Refuse to begin what has no room.

        Args:
            divided: what is written.
            needed_bytes: for everything that is written.

        Raises:
            ResourceError: there is less.
        """
        return

    def free_bytes(self) -> int | None:
        """Return what is free where the output goes; None if nobody knows."""
        return None

    def foreign(self) -> Iterable[str]:
        """Return warnings of what dead runs have left that shardkit has not put there."""
        return ()

    def unknown(self, own: str) -> Iterable[str]:
        """Return warnings of runs of other plans than `own` of which nobody knows whether they are over."""
        return ()


class DiskDestination(Destination):
    """A directory that all processes see."""

    def __init__(self, output: str, options: WriteOptions, kind: OutputKind, looks_late: bool) -> None:
        self.path, self._looks_late = absolute(output), looks_late
        self.exists: UsageError | None = None
        self._options, self._kind, self._is_checked = options, kind, False
        self._before: tuple[int, int] | None = None

    def stagings(self) -> Sequence[Notebook]:
        return shared_of(self.path, foreign_in)

    def identity(self) -> object:
        return identity_of(self.path)

    def has_commits(self) -> bool:
        return has_commits(self.path)

    def clean(self) -> None:
        remove_marks(self.path, foreign_in)
        if storage.lexists(self.path):
            remove_abandoned(self.path, foreign_in)  # of a process that died after it had committed

    def runs(self) -> tuple[Leftover, ...]:
        return leftovers(self.path)

    def give_up(self) -> None:
        remove_marks(self.path, foreign_in)

    def check(self, output: str, source: str | None, named_after: str | None) -> None:
        overwrite = self._options.overwrite
        kind = None if overwrite and self._looks_late and self.made is None else self._kind
        try:
            self.path = check_destination(
                output, source, overwrite=overwrite, kind=kind, made=self.made, named_after=named_after
            )
        except UsageError as error:  # asked afterwards: the last part may commit at this very moment
            if overwrite or not self._may_stay(absolute(output)):
                raise
            try:
                self.path = check_destination(output, source, overwrite=True, kind=None)
            except ShardkitError:  # it is in a place that cannot be written
                raise error from None
            self.exists = error
        if not self._is_checked:
            self._before, self._is_checked = identity_of(self.path) if overwrite else None, True

    def still_exists(self) -> UsageError | None:
        return self.exists if storage.lexists(self.path) else None

    def may_be_there(self) -> bool:
        return not self._options.dry_run and is_output(self.path, self._kind)

    def _may_stay(self, path: str) -> bool:
        """True if what is at a path may be left as it is: what processes have left beside it says whether they made it."""
        is_left = bool(has_commits(path) or runs_of(path, nothing) or shared_of(path, nothing))
        return storage.isdir(path) and (self._options.exist_ok or is_left)

    def check_beside(self, files: Made) -> None:
        super().check_beside(files)
        if self._options.overwrite:
            self._check_replaceable()

    def _check_replaceable(self) -> None:
        """Refuse to replace what is at the destination by now."""
        if storage.lexists(self.path):
            overwrite, shown = self._options.overwrite, escape(self.path)
            check_replaceable(self.path, shown, overwrite=overwrite, kind=self._kind, made=self.made)

    @contextlib.contextmanager
    def place(self, job: Job, agreement: Agreement) -> Iterator[DiskPlace]:
        options, is_run = self._options, self._options.share is None
        yield DiskPlace(
            SharedStaging.of_plan(self.path, agreement.plan, foreign_in, is_run=is_run),
            agreement.files,
            linked={image.name for image in job.output if len(image)},
            markers=(METADATA, HUB_INDEX),
            before=self._before,
            overwrite=options.overwrite,
            check_replaceable=self._check_replaceable,
            look=self._look,
        )

    def check_room(self, divided: Divided, needed_bytes: int) -> None:
        share, written = self._options.share, divided.plan.written_bytes
        if isinstance(share, Part):
            needed_bytes = divided.bytes_left(share)
        elif share is not None:
            needed_bytes = max(needed_bytes - written, 0)
        elif (
            self._options.resume and not divided.place.notebook.is_over
        ):  # else all that is there counts as free
            needed_bytes -= written - divided.bytes_left(ALL)
        check_space(self.path, needed_bytes)

    def free_bytes(self) -> int | None:
        return free_bytes(self.path)

    def foreign(self) -> Iterable[str]:
        return name_foreign(self.path)

    def unknown(self, own: str) -> Iterable[str]:
        return name_unknown(self.path, own)


class StoreDestination(Destination):
    """A place in a store."""

    def __init__(self, output: str, options: WriteOptions, kind: OutputKind, looks_late: bool) -> None:
        self.path = stores.plain(output) if location_of(output).is_writable else output
        self._looks_late = looks_late
        self.exists: UsageError | None = None
        self._options, self._kind = options, kind
        self._target: StoredOutput | None = None
        self._hash = ""

    def stagings(self) -> Sequence[Notebook]:
        return shared_in_store(self.path)

    def identity(self) -> object:
        found = at_once(writer_of(self.path).head, [os.path.join(self.path, name) for name in MARKERS])
        return next((each.etag for each in found if each is not None), None)

    def uncommitted(self) -> StoredStatus | None:
        return uncommitted(self.path)

    def give_up(self) -> None:
        remove_uncommitted(self.path)
        remove_notes(self.path)

    @property
    def target(self) -> StoredOutput:
        """What may be written, once it was checked."""
        assert self._target is not None
        return self._target

    def check(self, output: str, source: str | None, named_after: str | None) -> None:
        # Whether what is there was made by parts of this very plan is known once there is a plan.
        options = self._options
        may_be_ours = (
            options.overwrite or options.share is not None or options.exist_ok or not options.dry_run
        )
        looks = not (may_be_ours and self._looks_late and self.made is None)
        target = check_target(output, source, self._kind, overwrite=may_be_ours, made=self.made, looks=looks)
        self._target = self._target or target
        self.path = self._target.path
        if not options.overwrite and target.etag is not None:
            self.exists = UsageError(f"{escape(output)} exists", hint=KEEP_OR_REPLACE)

    def check_beside(self, files: Made) -> None:
        super().check_beside(files)
        overwrite = self._options.overwrite
        if self.exists is not None:
            return
        if overwrite or self._options.share is not None:
            self._look(self.path)
        if self.target.is_flat and not overwrite:
            at_once(lambda name: check_same(os.path.join(self.path, name), files[name]()), files)

    def hash(self, job: Job) -> str:
        recorded = {"recorded": sorted(self._options.recorded)} if self._options.recorded else {}
        self._hash = self._hash or hash_of({**ingredients(job, shared_stamp), **recorded})
        return self._hash

    def prepared(self, plan: TransferPlan, options: ExecuteOptions) -> tuple[TransferPlan, ExecuteOptions]:
        plan = plan.in_order()
        return plan, options.into_store(max((image.size for image in plan.images), default=0))

    def replaces(self) -> str | None:
        return None if self._options.share is None else self.target.etag

    @contextlib.contextmanager
    def place(self, job: Job, agreement: Agreement) -> Iterator[Place]:
        share, plan, files = self._options.share, agreement.plan, agreement.files
        overwrites = self._options.overwrite
        output = replace(self.target, plan=self.hash(job), overwrites=overwrites, look=self._look)
        if share is not None:
            replaces_any = isinstance(share, Committing) and share.overwrite
            yield PartsInStore(output, plan, files, replaces_any=replaces_any)
            return
        beside = nullcontext(place_of_notes(self.path)) if self._options.dry_run else None
        with beside or place_of_run(self.path) as here:
            yield RunInStore(output, SharedStaging.of_plan(here, plan, nothing, is_run=True), files)


Kind = Callable[[str, WriteOptions, OutputKind, bool], Destination]
KINDS: list[tuple[Callable[[str], bool], Kind]] = [
    (lambda output: location_of(output).renames, DiskDestination),
    (lambda output: True, StoreDestination),
]
"""What claims a path, and what it is then. The first one counts."""


def destination_at(
    output: str,
    options: WriteOptions | None = None,
    kind: OutputKind = OutputKind.SHARDED,
    *,
    looks_late: bool = True,
) -> Destination:
    """Return where an output goes.

    Args:
        output: as the user gave it.
        options: of the verb that writes; None for one that does not.
        kind: of what is written.
        looks_late: with `overwrite` what is there is looked into by `check_beside` alone.

    Raises:
        UsageError: no output can be there.
    """
    make = next(make for claims, make in KINDS if claims(output))
    return make(output, options or WriteOptions(), kind, looks_late)
