"""`--executor ray`: each part is a task of a Ray cluster. Ray places it, and restarts it if its worker is lost.

Source: Ray 2.60 (`ray.init`, `ray.remote`, "Task fault tolerance").
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from shardkit.core.text import count, escape
from shardkit.errors import IncompleteError, ResourceError, ShardkitError, UsageError
from shardkit.files import storage
from shardkit.operations.parts.agreement import Command
from shardkit.operations.parts.results import WriteResult

_CALLBACKS = ("progress", "on_warning", "on_step")
"""These stay in this process."""
_NUM_CPUS = 4
"""CPUs of a task, unless `jobs` has its number of threads. Each task imports torch, so one for each core wastes memory."""
_MAX_RETRIES = 3
"""Ray's own default. A part that runs again skips finished files."""

_R = TypeVar("_R", bound=WriteResult)


def run_on_ray(verb: Callable[..., _R], arguments: Mapping[str, Any]) -> _R:
    """Call a verb once for each part, as tasks of Ray; return the result of the part that committed.

    Args:
        verb: preshard, reshard or consolidate.
        arguments: its keywords with their values.

    Raises:
        UsageError: the executor is not "ray", or `output` is missing, or `part` is not.
        ResourceError: Ray is not installed, or does not answer.
        IncompleteError: a part failed on Ray, or lost its worker too often. Finished files are kept.
        ShardkitError: any error of a part.
    """
    begun, ray = time.monotonic(), _check(arguments)
    callbacks = {name: arguments[name] for name in _CALLBACKS if name in arguments}
    options = {n: v for n, v in arguments.items() if n not in (*_CALLBACKS, "part", "executor", "num_parts")}
    absolute = Command.of(verb.__name__, options).options
    options |= {name: absolute[name] for name in options if name in absolute}
    options["output"] = storage.absolute(os.fspath(options["output"]))
    if options["dry_run"]:
        return verb(**options, **callbacks)
    with _connected(ray):
        cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        cpus = [number for number in cpus if number]  # a head node may have none, and runs no tasks
        num_cpus = min(arguments["jobs"] or _NUM_CPUS, *cpus) if cpus else 1
        num_parts = arguments["num_parts"] or max(sum(number // num_cpus for number in cpus), 1)
        results = _run_parts(ray, verb, options, num_parts, num_cpus)
    committed = [result for result in results if result.part is not None and result.part.is_committed]
    if not committed:  # a network file system showed no part the files of all others
        committed = [verb(**options)]
    whole = next((each for each in committed if each.part is None or not each.part.by_another), committed[0])
    warnings = tuple(dict.fromkeys(warning for each in (whole, *results) for warning in each.warnings))
    for warning in warnings:
        (arguments["on_warning"] or (lambda _: None))(warning)
    return replace(
        whole,
        part=None,
        moving_s=0,  # this process moved nothing
        elapsed_s=round(time.monotonic() - begun, 3),
        notes=(
            f"the parts ran on Ray: {count(len(cpus), 'node')} with {count(sum(cpus), 'CPU')}",
            *whole.notes,
        ),
        warnings=warnings,
    )


def _check(arguments: Mapping[str, Any]) -> Any:
    """Return the module `ray`; errors as `run_on_ray`."""
    executor, num_parts = arguments["executor"], arguments["num_parts"]
    if executor is None:
        raise UsageError("--num-parts goes with --executor: it is the number of Ray's tasks")
    if executor != "ray":
        name = executor if isinstance(executor, str) else type(executor).__name__
        hint = "with any other engine, start one process for each part: `--part K/N`"
        raise UsageError(f"--executor {escape(name)!r} is not ray", hint=hint)
    if num_parts is not None and num_parts < 1:
        raise UsageError(f"--num-parts must be at least 1, not {num_parts}")
    if arguments["part"] is not None:
        raise UsageError("--part and --executor exclude each other: Ray runs all parts")
    if arguments["output"] is None:
        raise UsageError("name the output: Ray's workers have other working directories")
    try:
        import ray
    except ImportError as error:
        raise ResourceError("--executor ray needs Ray", hint="`pip install ray`") from error
    return ray


def _run_parts(
    ray: Any, verb: Callable[..., _R], options: Mapping[str, Any], num_parts: int, num_cpus: int
) -> list[_R]:
    settings = {"num_cpus": num_cpus, "max_retries": _MAX_RETRIES, "scheduling_strategy": "SPREAD"}
    task = ray.remote(verb).options(**settings)
    parts = [f"{number}/{num_parts}" for number in range(1, num_parts + 1)]
    references = [task.remote(**options, part=part, progress=False) for part in parts]
    try:
        return [_result(ray, *each) for each in zip(references, parts, strict=True)]
    except BaseException:
        for reference in references:
            ray.cancel(reference)
        raise


def _result(ray: Any, reference: Any, part: str) -> Any:
    """Wait for a task; an error of shardkit comes without the traceback that Ray adds."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, ShardkitError):
            raise cause from None
        raise IncompleteError(
            f"part {part} failed on Ray: {_first_line(cause)}",
            hint="run the same command again: it continues with the finished files",
        ) from error


@contextlib.contextmanager
def _connected(ray: Any) -> Iterator[None]:
    """Connect to the cluster that Ray finds, or start one here, while the block runs; unless this process is connected."""
    if ray.is_initialized():
        yield
        return
    sigterm = signal.getsignal(signal.SIGTERM)
    try:
        try:
            ray.init(logging_level="ERROR", log_to_driver=False)  # the output of workers is not our result
        except ConnectionError as error:
            hint = "start it with `ray start`, or set RAY_ADDRESS=local to use this machine alone"
            raise ResourceError(f"cannot connect to Ray: {_first_line(error)}", hint=hint) from error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, sigterm)  # Ray's handler ends the process at once
        yield
    finally:
        ray.shutdown()


def _first_line(error: BaseException) -> str:
    return escape(str(error).strip().partition("\n")[0])
