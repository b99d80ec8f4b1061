"""A stand-in for Ray, whose tasks run in this process; `tests/engines/test_ray.py` uses Ray itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class RayError(Exception):
    """As `ray.exceptions.RayError`."""


class RayTaskError(RayError):
    """As `ray.exceptions.RayTaskError`."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"ray::preshard()\n{cause!r}")
        self.cause = cause


class Ray(ModuleType):
    """The calls of Ray that shardkit makes.

    Args:
        cpus: of each node.
    """

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, *cpus: int) -> None:
        super().__init__("ray")
        self.cpus, self.is_running, self.num_connected, self.cancelled = cpus, False, 0, 0
        self.settings: dict[str, Any] = {}
        self.parts: list[str] = []
        self.lost: set[str] = set()
        """Parts whose worker is lost."""

    @classmethod
    def installed(cls, monkeypatch: pytest.MonkeyPatch, *cpus: int) -> Ray:
        """Return one that `import ray` finds."""
        ray = cls(*cpus)
        monkeypatch.setitem(sys.modules, "ray", ray)
        return ray

    def is_initialized(self) -> bool:
        return self.is_running

    def init(self, **options: Any) -> None:
        self.is_running, self.num_connected = True, self.num_connected + 1

    def shutdown(self) -> None:
        self.is_running = False

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": float(cpus)} if cpus else {}} for cpus in self.cpus]

    def remote(self, function: Callable[..., Any]) -> Any:
        def call(**options: Any) -> Callable[[], Any]:
            part = options["part"]
            assert options["progress"] is False
            self.parts.append(part)

            def run() -> Any:
                assert self.is_running
                if part in self.lost:
                    raise RayError("The worker died unexpectedly.\nCheck the logs.")
                try:
                    return function(**options)
                except Exception as error:
                    raise RayTaskError(error) from error

            return run

        def options(**settings: Any) -> Any:
            self.settings = settings
            return SimpleNamespace(remote=call)

        return SimpleNamespace(options=options)

    def get(self, task: Callable[[], Any]) -> Any:
        return task()

    def cancel(self, task: Callable[[], Any]) -> None:
        self.cancelled += 1
