"""Tests whose bodies run on real gloo ranks, all those of a module in one start of the group.

four = Ranks(__name__, 4)

@four.test
def test_something() -> None:
    assert dist.get_world_size() == 4      # on each rank; if it fails on any, the test fails with the traceback

@four.test_each(WAYS)
def test_each_way(way: Callable[[], None]) -> None: ...
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.worlds.processes import end_world, fork, run_script, wait

Body = Callable[..., None]


class Ranks:
    """A group of ranks, and the tests of one module that run on it, in their order."""

    def __init__(self, module: str, size: int) -> None:
        self._module, self.size = module, size
        self._bodies: dict[str, Callable[[], None]] = {}
        self._wrong: list[dict[str, str]] | None = None

    def test(self, body: Body) -> Body:
        """Make a test of what each rank does; nothing in it may wait for a rank that has failed."""
        self._bodies[body.__name__] = body

        def test(tmp_path_factory: pytest.TempPathFactory) -> None:
            self._hold(body.__name__, tmp_path_factory)

        return _named(test, body)

    def test_each(self, cases: Iterable[Any]) -> Callable[[Body], Body]:
        """Make a test for each of some functions or classes, which the body takes."""
        by_name = {case.__name__: case for case in cases}

        def decorate(body: Body) -> Body:
            for name, case in by_name.items():
                self._bodies[f"{body.__name__}[{name}]"] = partial(body, case)

            def test(case: str, tmp_path_factory: pytest.TempPathFactory) -> None:
                self._hold(f"{body.__name__}[{case}]", tmp_path_factory)

            return pytest.mark.parametrize("case", list(by_name))(_named(test, body))

        return decorate

    def _hold(self, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        if self._wrong is None:
            out = tmp_path_factory.mktemp("ranks")
            request = {"module": self._module, "size": self.size, "out": str(out)}
            run_script("worlds/ranks.py", json.dumps(request))
            self._wrong = [json.loads((out / f"{rank}.json").read_text()) for rank in range(self.size)]
        failed = {rank: each[name] for rank, each in enumerate(self._wrong) if each[name]}
        if failed:
            rank, text = next(iter(failed.items()))
            pytest.fail(f"on ranks {list(failed)}; rank {rank}:\n{text}", pytrace=False)

    def run(self, rank: int, out: Path) -> None:
        """Run all bodies on one rank and write what went wrong, by test."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=self.size)
        wrong = dict.fromkeys(self._bodies, "")
        for name, body in self._bodies.items():
            try:
                body()
            except BaseException:  # pytest's own failures are no Exceptions
                wrong[name] = traceback.format_exc()
            dist.barrier()
        (out / f"{rank}.json").write_text(json.dumps(wrong))
        end_world()


def _named(test: Body, body: Body) -> Body:
    test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
    return pytest.mark.dist(test)


def main() -> None:
    request = json.loads(sys.argv[1])
    every = vars(import_module(request["module"])).values()
    (ranks,) = (each for each in every if isinstance(each, Ranks) and each.size == request["size"])
    wait([fork(partial(ranks.run, rank, Path(request["out"]))) for rank in range(ranks.size)])


if __name__ == "__main__":
    from tests.worlds.ranks import main as run  # not this module's own: its class is another one

    run()
