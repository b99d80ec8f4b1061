"""Moving bytes by an expected plan, while it is still being found out what the plan is.

    find the expected job -> a staging directory -> move            in the background
    decide the real job   -> is its plan the expected one? take it  meanwhile, in the main thread

Until it is taken, nothing vouches for what was moved: there is no journal, and a run that dies leaves a directory
that the next one removes. If the real plan is another one, the directory is removed and nothing was gained.
"""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from shardkit.core.threads import Outcome, Progress
from shardkit.errors import ShardkitError
from shardkit.files import storage
from shardkit.files.staging import Staging
from shardkit.operations.destination import check_space, free_bytes
from shardkit.transfer.chains import Evidence
from shardkit.transfer.checks import SourceCheck
from shardkit.transfer.execute import ExecuteOptions, Execution, FileDigest
from shardkit.transfer.plan import TransferPlan

OnFinished = Callable[[FileDigest, Evidence], None]


class Planned(Protocol):
    """A job that has a plan."""

    @property
    def plan(self) -> TransferPlan:
        """What to move."""
        ...


J = TypeVar("J", bound=Planned)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected(Generic[J]):
    """What will most likely be written."""

    job: J
    needed_bytes: int
    """Room on the disk for everything that is written."""
    options: ExecuteOptions


class Underway(NamedTuple):
    """What is being moved already."""

    staging: Staging
    check: SourceCheck | None
    free_bytes: int
    """On the destination's file system, before anything was written."""
    options: ExecuteOptions
    execution: Execution


class Ahead(Generic[J]):
    """Moves bytes in a thread of its own, from `start` to `close`.

    A signal may come at any moment, also when the main thread has just taken a lock. So the main thread touches none
    that is held across a call: no event, no future, no pool.

    Args:
        path: the destination, absolute.
        verb: what the progress is called.
        progress: told of the bytes as they move.
        expect: returns what will most likely be written, or None.
    """

    def __init__(
        self, path: str, verb: str, progress: Progress, expect: Callable[[], Expected[J] | None]
    ) -> None:
        self._path, self._verb, self._progress, self._expect = path, verb, progress, expect
        self._lock = threading.Lock()
        self._has_begun = self._is_given_up = self._is_kept = self._is_discarded = False
        self._waiting: list[tuple[FileDigest, Evidence]] = []
        self._on_finished: OnFinished | None = None
        self._found, self._begun = Outcome[Expected[J] | None](), Outcome[Underway | None]()
        self._moved = Outcome[tuple[dict[str, FileDigest], dict[str, int]]]()

    def start(self) -> None:
        """Begin. Whoever calls this closes it, also if this is interrupted."""
        # What the run allows, such as following links, it allows here too.
        _thread.start_new_thread(copy_context().run, (self._run,))

    def job(self) -> J | None:
        """Return the expected job, once it is known."""
        expected = self._found.result()
        return None if expected is None else expected.job

    def take(self, plan: TransferPlan) -> Underway | None:
        """Return what is under way if this is its plan; give it up otherwise.

        Whoever takes it waits for it by `finish`. Until then it can still be closed.
        """
        expected = self._found.result()
        underway = self._begun.result() if expected is not None and expected.job.plan is plan else None
        if underway is None:
            self.close()
        return underway

    def finish(self, on_finished: OnFinished) -> tuple[dict[str, FileDigest], dict[str, int]]:
        """Wait until all is moved; arguments, answer and errors as `Execution` and its `run`.

        The caller says what becomes of the staging directory from now on.
        """
        self._is_kept = True
        try:
            with self._lock:
                self._on_finished = on_finished
                for digest, runs in self._waiting:
                    on_finished(digest, runs)
            return self._moved.result()
        except BaseException:  # Ctrl-C too: no thread may outlive the staging directory
            self._stop()
            raise

    def close(self) -> None:
        """Give up what was not finished, and leave nothing of it."""
        underway = self._stop()
        if underway is not None and not (self._is_kept or self._is_discarded):
            self._progress.finish()
            underway.staging.discard()
            self._is_discarded = True

    def _stop(self) -> Underway | None:
        """Stop the thread and wait for it; return what was under way."""
        self._is_given_up = True
        with self._lock:
            if not self._has_begun:  # and it will not begin any more
                return None
        underway = self._begun.result()
        if underway is not None:
            underway.execution.stop()
            self._moved.wait()
        return underway

    def _run(self) -> None:
        with self._lock:
            if self._is_given_up:
                return
            self._has_begun = True
        expected = self._found.settle(self._find)
        underway = self._begun.settle(lambda: None if expected is None else self._begin(expected))
        if underway is not None:
            self._moved.settle(lambda: self._move(underway))

    def _find(self) -> Expected[J] | None:
        try:
            return self._expect()
        except ShardkitError:  # whoever decides the real job will say it
            return None

    def _begin(self, expected: Expected[J]) -> Underway | None:
        if self._is_given_up:
            return None
        plan, options = expected.job.plan, expected.options
        try:
            free = free_bytes(self._path)
            check_space(self._path, expected.needed_bytes)
            staging = Staging.create(self._path)
        except (ShardkitError, OSError):  # it will be said when the real job begins
            return None
        check = SourceCheck(plan.catalog) if options.check_source else None
        execution = Execution(
            plan,
            staging.data,
            options,
            finished={},
            on_finished=self._keep,
            progress=self._progress,
            check=check,
        )
        return Underway(staging, check, free, options, execution)

    def _move(self, underway: Underway) -> tuple[dict[str, FileDigest], dict[str, int]]:
        plan = underway.execution.plan
        for folder in {os.path.dirname(image.name) for image in plan.images} - {""}:
            storage.make_directories(os.path.join(underway.staging.data, folder))
        self._progress.start(plan.hole_bytes, self._verb)
        return underway.execution.run()

    def _keep(self, digest: FileDigest, read: Evidence) -> None:
        """Hand a finished file on, or keep it for whoever takes all this."""
        with self._lock:
            if self._on_finished is None:
                self._waiting.append((digest, read))
                return
        self._on_finished(digest, read)
