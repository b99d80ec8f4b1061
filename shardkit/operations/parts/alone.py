"""The directory in which one process carries out all of a plan: it joins what is there, and is in nobody's way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from shardkit.core.text import escape
from shardkit.errors import ResourceError, ShardkitError, UsageError
from shardkit.files import storage
from shardkit.files.shared import SharedStaging, remove_runs
from shardkit.files.staging import Owner
from shardkit.operations.parts.agreement import Agreement
from shardkit.operations.parts.foreign import set_foreign_apart

_T = TypeVar("_T")
_MOST_TRIES = 20  # each only if another process has just removed all of it


class Alone:
    """A run in its directory.

    Args:
        staging: the directory; those who are started alike share it.
        agreement: says the plan, and the state of its source.
        folders: directories in `data`.
    """

    def __init__(self, staging: SharedStaging, agreement: Agreement, folders: Collection[str] = ()) -> None:
        self._staging, self._agreement, self._folders = staging, agreement, sorted(folders)
        self._owner: Owner | None = None

    def carry_out(
        self, work: Callable[[], _T], *, resume: bool, on_error: Callable[[BaseException], object]
    ) -> _T:
        """Do the work of the run.

        Args:
            work: begins, writes, and makes the output.
            resume: else what runs of this plan have written is removed before.
            on_error: told of what the work has raised, once this process is not at work any more.

        Raises:
            UsageError: nothing is to be resumed, and a run of this plan is at work.
        """
        if not resume:
            self._begin_anew()
        remove_runs(self._staging.destination, self._staging.kept, but=self._staging.path)  # for their room
        try:
            with self._present():
                return work()
        except BaseException as error:
            on_error(error)
            raise

    @contextlib.contextmanager
    def _present(self) -> Iterator[None]:
        """Let others see, from the moment on at which the run begins, that it is at work, also while it writes nothing."""
        self._owner = Owner.new_run()
        try:
            yield
        finally:
            self._staging.leave(self._owner)

    def begin(self) -> bool | None:
        """Join what runs of this plan have written, or begin, whatever runs of other plans do.

        Returns:
            False if one has made the output; None if others begin and give up all the time.

        Raises:
            ResourceError: the system refuses.
        """
        assert self._owner is not None
        for _ in range(_MOST_TRIES):
            self._staging.reopen()
            if self._staging.is_committed:
                return False
            if not self._staging.is_open and self._staging.exists:  # its output is another one by now
                self._staging.remove()
            if self._staging.create(self._agreement.dump(), self._folders, self._owner):
                return True
            try:
                if self._joins(self._owner):
                    return True
            except FileNotFoundError:  # another process has just removed it
                continue
            except OSError as error:  # such as a disk that is still full
                raise ResourceError(
                    f"cannot write to {escape(self._staging.path)}: {error.strerror}"
                ) from error
        return None

    def _joins(self, owner: Owner) -> bool:
        """Go on with what is there; False if it is gone by now, or was begun with another state of the source."""
        if not self._staging.enter(owner) or not self._staging.is_open:
            return False
        if self._is_stale():
            self._staging.give_up()
            return False
        set_foreign_apart(self._staging.path)
        for folder in self._folders:
            storage.make_folders(self._staging.data, folder)
        return True

    def _is_stale(self) -> bool:
        """True if what lies there is of another state of the source."""
        try:
            return self._agreement.is_stale(Agreement.of(self._staging))
        except ShardkitError:
            return False

    def _begin_anew(self) -> None:
        """Remove what runs of this plan have written.

        Raises:
            UsageError: one is at work; or as `SharedStaging.give_up`.
        """
        if self._staging.is_attended:
            raise UsageError(
                f"a run of the same plan is at work in {escape(self._staging.path)}",
                hint="stop it first; or leave --no-resume out, and both write what is missing",
            )
        self._staging.give_up()
