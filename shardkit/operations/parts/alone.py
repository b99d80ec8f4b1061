"""One process carries out all of a plan: it joins what is there, and is in nobody's way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from shardkit.core.text import escape, in_shell
from shardkit.errors import IncompleteError, Interrupted, ResourceError, ShardkitError, UsageError
from shardkit.files.place.contract import Place
from shardkit.files.staging import Owner
from shardkit.operations.parts.agreement import Agreement

_T = TypeVar("_T")


class Alone:
    """A run at its place.

    Args:
        place: those who are started alike share it.
        agreement: says the plan, and the state of its source.
    """

    def __init__(self, place: Place, agreement: Agreement) -> None:
        self._place, self._notebook, self._agreement = place, place.notebook, agreement
        self._owner: Owner | None = None

    def carry_out(self, work: Callable[[], _T], *, resume: bool) -> _T:
        """Do the work of the run. What was written is removed after an error, unless the run may go on with it.

        Args:
            work: begins, writes, and makes the output.
            resume: else what runs of this plan have written is removed before.

        Raises:
            UsageError: nothing is to be resumed, and a run of this plan is at work.
        """
        if not resume:
            self._begin_anew()
        self._place.remove_others()
        try:
            with self._present():
                return work()
        except BaseException as error:
            self._tidy_up(error)
            raise

    def _tidy_up(self, error: BaseException) -> None:
        """Remove what was written, unless somebody is at work there or the run may go on with it; after a signal, put back
        what was moved aside."""
        lasts = isinstance(error, (IncompleteError, *self._place.keeps_after))
        if lasts or not self._notebook.is_over:
            return
        with contextlib.suppress(OSError, ShardkitError):
            if not self._notebook.is_own:
                return
            if isinstance(error, Interrupted):
                self._notebook.reopen()
            else:
                self._place.give_up()

    @contextlib.contextmanager
    def _present(self) -> Iterator[None]:
        """Let others see, from the moment on at which the run begins, that it is at work, also while it writes nothing."""
        self._owner = Owner.new_run()
        try:
            yield
        finally:
            self._notebook.leave(self._owner)

    def begin(self) -> bool | None:
        """Join what runs of this plan have written, or begin, whatever runs of other plans do.

        Returns:
            False if one has made the output; None if another process has just removed all of it.

        Raises:
            UsageError: another user has begun.
            ResourceError: the system refuses.
        """
        assert self._owner is not None
        if self._notebook.is_committed:
            return False
        self._check_own()
        if not self._notebook.is_open and self._notebook.exists:  # its output is another one by now
            self._notebook.remove(only_closed=True)
        if self._notebook.create(self._agreement.dump(), self._agreement.folders, self._owner):
            return True
        try:
            return True if self._joins(self._owner) else None
        except FileNotFoundError:
            return None
        except OSError as error:  # such as a disk that is still full
            raise ResourceError(f"cannot write to {escape(self._notebook.path)}: {error.strerror}") from error

    def _joins(self, owner: Owner) -> bool:
        """Go on with what is there; False if it is gone by now, or was begun with another state of the source."""
        if not self._notebook.enter(owner) or not self._notebook.is_open:
            return False
        if self._is_stale():
            self._notebook.give_up()
            return False
        self._place.go_on()
        return True

    def _is_stale(self) -> bool:
        """True if what lies there is of another state of the source."""
        try:
            return self._agreement.is_stale(Agreement.of(self._notebook))
        except ShardkitError:
            return False

    def _begin_anew(self) -> None:
        """Remove what runs of this plan have written.

        Raises:
            UsageError: one is at work, or they are another user's; or as `Notebook.give_up`.
        """
        if self._notebook.is_attended:
            raise UsageError(
                f"a run of the same plan is at work in {escape(self._notebook.path)}",
                hint="stop it first; or leave --no-resume out, and both write what is missing",
            )
        self._check_own()
        self._notebook.give_up()

    def _check_own(self) -> None:
        """Refuse to join, or to remove, what another user has begun."""
        if not self._notebook.is_own:
            raise UsageError(
                f"{escape(self._notebook.path)} belongs to another user",
                hint="choose another destination; or have that user give it up: "
                f"`shardkit abort {in_shell(self._place.destination)}`",
            )
