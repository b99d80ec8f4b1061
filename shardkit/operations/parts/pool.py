"""All parts of a job, handed to a pool of workers that somebody else runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from shardkit.errors import UsageError
from shardkit.files import storage
from shardkit.files.shared import remove_marks
from shardkit.operations.parts.agreement import Command, Committing
from shardkit.operations.parts.divided import PartResult

_HERE = ("progress", "on_warning", "on_step")
"""Callbacks, which stay in this process."""
_OWN = ("part", "executor", "num_parts", *_HERE)


class Future(Protocol):
    """What a pool answers with."""

    def result(self) -> Any:
        """Wait for the call, and return what it returned or raise what it raised."""
        ...

    def cancel(self) -> object:
        """Do not begin the call, if it has not begun."""
        ...


class Executor(Protocol):
    """Anything like `concurrent.futures.Executor`: pools of processes here, Dask, submitit, MPIPoolExecutor."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Let a worker call a function."""
        ...


class Result(Protocol):
    """What a verb answers, as far as it matters here."""

    @property
    def output(self) -> str:
        """The directory; absolute."""

    @property
    def part(self) -> PartResult | None:
        """What became of a part."""

    @property
    def checked_bytes(self) -> int:
        """What was compared; of all parts where this one has committed."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should check."""


_R = TypeVar("_R", bound=Result)


def in_pool(verb: Callable[..., _R], arguments: Mapping[str, Any]) -> _R:
    """Carry out a verb in parts, each of them in a worker of a pool; return the result of the whole.

    Args:
        verb: it is called by its name in each worker, with `part`.
        arguments: as the verb got them; `executor` and `num_parts` among them. The workers see the same paths.

    Raises:
        UsageError: no number of parts, or no output, is named, or a part beside the pool.
        ShardkitError: whatever a part raises, and whatever the pool does if it loses a worker. What was finished is kept.
    """
    executor, num_parts = arguments["executor"], arguments["num_parts"]
    if executor is None or num_parts is None or num_parts < 1:
        raise UsageError("executor and num_parts belong together: the pool, and how many parts it is given")
    if arguments["part"] is not None:
        raise UsageError("part and executor exclude each other: a pool is given all parts")
    if arguments["output"] is None:
        raise UsageError("name the output: workers of a pool have working directories of their own")
    options = {name: value for name, value in arguments.items() if name not in _OWN}
    options |= {n: v for n, v in Command.of(verb.__name__, options).options.items() if n in options}
    options["output"] = storage.absolute(os.fspath(arguments["output"]))
    if arguments["dry_run"]:
        return verb(**options, **{name: arguments[name] for name in _HERE if name in arguments})
    result = _whole(verb, options, _run_all(verb, options, executor, num_parts))
    if arguments["on_warning"] is not None:
        for warning in result.warnings:
            arguments["on_warning"](warning)
    return result


def _run_all(verb: Callable[..., _R], options: Mapping[str, Any], executor: Executor, count: int) -> list[_R]:
    futures = [executor.submit(verb, **options, part=f"{number}/{count}") for number in range(1, count + 1)]
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def _whole(verb: Callable[..., _R], options: Mapping[str, Any], results: list[_R]) -> _R:
    """Return the result of the part that has committed; commit if none could see that all was finished."""
    committed = [each for each in results if each.part is not None and each.part.is_committed]
    if not committed:
        committed = [verb(**options, part=Committing(check=lambda _: None, on_end=lambda _: None))]
    # Those that came late have compared nothing.
    whole = max(committed, key=lambda each: each.checked_bytes)
    remove_marks(whole.output)  # nobody comes late any more
    return replace(whole, part=None)  # type: ignore[type-var]
