"""Ray as a pool of workers: a task for each part, which Ray places, and begins again where its worker is lost.

Source: Ray 2.60 (`ray.init`, `ray.remote`, "Task fault tolerance").
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from shardkit.core.text import count, escape
from shardkit.errors import IncompleteError, ResourceError, ShardkitError

_CPUS = 4
"""Of a task, unless `jobs` says how many threads it has. Each imports torch: one for each core takes memory and no time off."""
_MAX_RETRIES = 3
"""Ray's own default. A part that runs again skips what is finished."""
_STORE_BYTES = 100 << 20  # no data passes through Ray, and the least that it takes is 75 MiB


class RayPool:
    """The cluster that this process is connected to.

    Args:
        ray: the module.
        jobs: threads of a part; None for a default.
        own: why it was started by this process; empty if it was running.
    """

    def __init__(self, ray: Any, jobs: int | None, *, own: str = "") -> None:
        self._ray = ray
        found = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        cpus = [number for number in found if number > 0]  # a head node may have none: it takes no tasks
        each = min(jobs or _CPUS, *cpus) if cpus else 1
        self.num_parts = max(sum(number // each for number in cpus), 1)
        """As many as run at the same time."""
        size = f"{count(len(cpus), 'node')} with {count(sum(cpus), 'CPU')}"
        self.warnings = (f"Ray works on this machine alone, {size}: {own}",) if own else ()
        self.notes = () if own else (f"the parts ran on a Ray cluster: {size}",)
        self._options = {"num_cpus": each, "max_retries": _MAX_RETRIES, "scheduling_strategy": "SPREAD"}

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> _RayTask:
        """Let Ray call a function."""
        task = self._ray.remote(function).options(name=str(kwargs.get("part", "")), **self._options)
        return _RayTask(self._ray, task.remote(*args, **kwargs), kwargs.get("part"))


class _RayTask:
    """A call that Ray carries out."""

    def __init__(self, ray: Any, reference: Any, part: Any) -> None:
        self._ray, self._reference, self._part = ray, reference, part

    def result(self) -> Any:
        """Wait for the call.

        Raises:
            ResourceError: a worker cannot import shardkit.
            IncompleteError: Ray lost the worker, as often as it tried.
            ShardkitError: whatever the function has raised.
        """
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(self._reference)
        except exceptions.RayTaskError as error:
            raise _told(error) from None
        except exceptions.RayError as error:
            raise IncompleteError(
                f"part {self._part}: Ray gave up: {_first_line(error)}",
                hint="run the same command again: it goes on with what is finished",
            ) from error

    def cancel(self) -> object:
        """Interrupt the call, or do not begin it."""
        return self._ray.cancel(self._reference)


def _told(error: Any) -> BaseException:
    """Return the error that a worker raised, without the traceback that Ray puts around it."""
    cause = error.cause
    if isinstance(cause, ShardkitError):
        return cause
    if "No module named 'shardkit" in str(error):
        return ResourceError(
            "the workers of Ray cannot import shardkit",
            hint="install the same version of it on each node, or name it in the runtime_env of your cluster",
        )
    return cause if isinstance(cause, BaseException) else error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return escape(lines[0]) if lines else type(error).__name__


def import_ray() -> Any:
    """Return the module.

    Raises:
        ResourceError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ResourceError("--executor ray needs Ray", hint="`pip install ray`") from error
    return ray


@contextlib.contextmanager
def connected(jobs: int | None) -> Iterator[RayPool]:
    """Give the cluster that is running, or one that is started on this machine and ends with the block.

    A connection of this process is used as it is. Otherwise RAY_ADDRESS says where the cluster is, or Ray finds it.

    Args:
        jobs: threads of a part; None for a default.

    Raises:
        ResourceError: Ray is not installed, or nobody answers at RAY_ADDRESS.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield RayPool(ray, jobs)
        return
    try:
        with _sigterm_kept():
            own = _connect(ray)
        yield RayPool(ray, jobs, own=own)
    finally:
        ray.shutdown()


def _connect(ray: Any) -> str:
    """Connect to a cluster; return why it had to be started, or nothing."""
    quiet = {"logging_level": "ERROR", "log_to_driver": False}  # what workers print is not our result
    address = os.environ.get("RAY_ADDRESS", "")
    if address != "local":
        try:
            ray.init(address="auto", **quiet)
        except ConnectionError as error:
            if address:
                raise ResourceError(
                    f"cannot connect to Ray at RAY_ADDRESS={escape(address)}: {_first_line(error)}",
                    hint="start it with ray start, or set RAY_ADDRESS=local to work on this machine alone",
                ) from error
        else:
            return ""
    ray.init(address="local", include_dashboard=False, object_store_memory=_STORE_BYTES, **quiet)
    return "RAY_ADDRESS is local" if address else "no cluster is running"


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Put back the handler of SIGTERM: `ray.init` sets one that ends the process on the spot."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
