"""All parts of a job, handed to a pool of workers that somebody else runs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

from shardkit.core.text import escape
from shardkit.errors import UsageError
from shardkit.files import storage
from shardkit.files.location import location_of
from shardkit.files.shared import remove_marks
from shardkit.operations.parts.agreement import Command, Committing, NotThere
from shardkit.operations.parts.foreign import foreign_in
from shardkit.operations.parts.ray_pool import connected, import_ray
from shardkit.operations.parts.results import PartResult

RAY = "ray"
"""The engine that has a name: no object of it is needed."""

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


class JobResult(Protocol):
    """What a verb answers, as far as it matters here."""

    @property
    def output(self) -> str:
        """The directory; absolute."""

    @property
    def part(self) -> PartResult | None:
        """What became of a part."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should check."""


_R = TypeVar("_R", bound=JobResult)


def in_pool(verb: Callable[..., _R], arguments: Mapping[str, Any]) -> _R:
    """Carry out a verb in parts, each of them in a worker of a pool; return the result of the whole.

    Args:
        verb: it is called by its name in each worker, with `part`.
        arguments: as the verb got them; `executor` and `num_parts` among them. The workers see the same paths.

    Raises:
        UsageError: no number of parts, or no output, is named, or a part beside the pool.
        ResourceError: Ray is asked for, and is not there.
        ShardkitError: whatever a part raises, and whatever the pool does if it loses a worker. What was finished is kept.
    """
    begun = time.monotonic()
    _check(arguments)
    options = {name: value for name, value in arguments.items() if name not in _OWN}
    options |= {n: v for n, v in Command.of(verb.__name__, options).options.items() if n in options}
    options["output"] = storage.absolute(os.fspath(arguments["output"]))
    here = {name: arguments[name] for name in _HERE if name in arguments}
    if arguments["dry_run"]:
        return verb(**options, **here)
    tell = arguments["on_warning"] or (lambda _: None)
    if not arguments["overwrite"]:
        # This process looks at what is there: each worker would read all of it.
        with contextlib.suppress(NotThere):
            return _ended(verb, {**options, **here})
    with _opened(arguments) as pool:
        for warning in pool.warnings:
            tell(warning)
        result = _whole(verb, options, _run_all(verb, options, pool.executor, pool.num_parts))
    for warning in result.warnings:
        tell(warning)
    return replace(  # type: ignore[type-var]
        result,
        elapsed_s=round(time.monotonic() - begun, 3),
        notes=(*pool.notes, *result.notes),
        warnings=(*pool.warnings, *result.warnings),
    )


def _check(arguments: Mapping[str, Any]) -> None:
    executor, num_parts = arguments["executor"], arguments["num_parts"]
    if executor is None:
        raise UsageError("--num-parts goes with --executor: it is how many parts a pool is given")
    if isinstance(executor, str) and executor != RAY:
        raise UsageError(
            f"--executor {escape(executor)!r} is not {RAY}",
            hint="other engines start the parts themselves (--part), or are given to the library as objects",
        )
    if executor != RAY and num_parts is None:
        raise UsageError("executor goes with num_parts: how many parts the pool is given")
    if num_parts is not None and num_parts < 1:
        raise UsageError(f"--num-parts must be at least 1, not {num_parts}")
    if arguments["part"] is not None:
        raise UsageError("--part and --executor exclude each other: a pool is given all parts")
    if arguments["output"] is None:
        raise UsageError("name the output: workers of a pool have working directories of their own")
    if executor == RAY:
        import_ray()


class _Pool(NamedTuple):
    """A pool, and what people should know of it."""

    executor: Executor
    num_parts: int
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@contextlib.contextmanager
def _opened(arguments: Mapping[str, Any]) -> Iterator[_Pool]:
    """Give the pool; Ray's is connected to for as long as the block lasts."""
    executor, num_parts = arguments["executor"], arguments["num_parts"]
    if executor != RAY:
        yield _Pool(executor, num_parts)
        return
    with connected(arguments["jobs"]) as ray:
        yield _Pool(ray, num_parts or ray.num_parts, ray.notes, ray.warnings)


def _run_all(verb: Callable[..., _R], options: Mapping[str, Any], executor: Executor, count: int) -> list[_R]:
    futures = [
        executor.submit(verb, **options, part=f"{number}/{count}", progress=False)
        for number in range(1, count + 1)
    ]
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def _ended(verb: Callable[..., _R], options: Mapping[str, Any]) -> _R:
    """Do what comes after an output that is there, and of this very plan.

    Raises:
        NotThere: nothing is there.
        UsageError: it is another one.
    """
    share = Committing(check=lambda _: None, on_end=lambda _: None, ends=True)
    return verb(**options, part=share)


def _whole(verb: Callable[..., _R], options: Mapping[str, Any], results: list[_R]) -> _R:
    """Return the result of the part that has committed; commit if none could see that all was finished."""
    committed = [each for each in results if each.part is not None and each.part.is_committed]
    if not committed:
        committed = [verb(**options, part=Committing(check=lambda _: None, on_end=lambda _: None))]
    whole = next((each for each in committed if each.part is None or not each.part.by_another), committed[0])
    if location_of(whole.output).renames:
        remove_marks(whole.output, foreign_in)  # nobody comes late any more
    warnings = dict.fromkeys(warning for each in (whole, *results) for warning in each.warnings)
    # What else is of one part alone is left out.
    return replace(whole, part=None, moving_s=0, warnings=tuple(warnings))  # type: ignore[type-var]
