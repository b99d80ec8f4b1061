"""Tests whose bodies run on real gloo ranks, all those of a module in one start of the group.

two = Ranks(__name__, 2, first=make_sources)   # called once, in one process, before there are ranks
four = Ranks(__name__, 4)

@four.test
def test_something(out: Path) -> None:     # `out` is one folder for all groups of the module; leave it out if unused
    assert dist.get_world_size() == 4      # on each rank; if it fails on any, the test fails with the traceback

@four.test_each(WAYS)
def test_each_way(way: Callable[[], None]) -> None: ...

@two.test_killing(1)                       # in a group of its own, in which rank 1 has to be killed
def test_survivors_hear_of_it() -> None: ...

Tests on more than two ranks are `prove`; so are others with that mark, if they or their module have it. A run of `-m prove`
or `-m "not prove"` has all bodies of its kind, since one may read what another has left, and none of the other kind.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest

from shardkit.errors import ShardkitError
from tests.worlds.processes import end_world, fork, run_script

Body = Callable[..., None]
_TIMEOUT = timedelta(seconds=600)  # of a rank that waits for one whose body has failed


class _Test(NamedTuple):
    body: Body
    is_apart: bool = False
    """In a group of its own."""
    victim: int | None = None
    """The rank that has to be killed."""
    function: Any = None
    """What pytest runs, with its marks."""

    @property
    def is_prove(self) -> bool:
        """True if `make prove` runs it, and not `make test`."""
        of_module = getattr(sys.modules[self.function.__module__], "pytestmark", [])
        marks = [*self.function.pytestmark, *(of_module if isinstance(of_module, list) else [of_module])]
        return any(mark.name == "prove" for mark in marks)


class Ranks:
    """A group of ranks, and the tests of one module that run on it, in their order."""

    _of_module: ClassVar[dict[str, list[Ranks]]] = {}
    _kinds: ClassVar[dict[str, set[bool]]] = {}
    """Module -> whether its tests in this run are `prove`."""

    def __init__(self, module: str, size: int, *, first: Callable[[Path], None] | None = None) -> None:
        """Make a group.

        Args:
            module: name of the module whose tests these are.
            size: number of ranks. One has no process group.
            first: makes in the module's folder what the ranks are to find there.
        """
        self._module, self.size, self._first = module, size, first
        self._tests: dict[str, _Test] = {}
        self._out: Path | None = None
        self._wrong: list[dict[str, str]] = []
        self._groups = self._of_module.setdefault(module, [])
        self._groups.append(self)

    @classmethod
    def select(cls, items: Iterable[pytest.Item]) -> None:
        """Note which tests run, before the first of them does."""
        for item in items:
            if isinstance(item, pytest.Function):
                is_prove = item.get_closest_marker("prove") is not None
                cls._kinds.setdefault(item.module.__name__, set()).add(is_prove)

    def test(self, body: Body) -> Body:
        """Make a test of what each rank does; nothing in it should wait for a rank that has failed."""
        return self._test(body, _Test(body))

    def test_apart(self, body: Body) -> Body:
        """Make a test that has a group of its own, after those that share one."""
        return self._test(body, _Test(body, is_apart=True))

    def test_killing(self, victim: int) -> Callable[[Body], Body]:
        """Make a test that has a group of its own, in which one rank is killed; the others assert."""
        return lambda body: self._test(body, _Test(body, is_apart=True, victim=victim))

    def test_each(self, cases: Mapping[str, Any] | Iterable[Any]) -> Callable[[Body], Body]:
        """Make a test for each of some cases, which the body takes first: named, or functions, classes or texts."""
        return self._test_each(_by_name(cases), lambda body, case: _Test(partial(body, case)))

    def test_each_apart(self, cases: Mapping[str, Any] | Iterable[Any]) -> Callable[[Body], Body]:
        """Make a test of each case in a group of its own."""
        return self._test_each(_by_name(cases), lambda body, case: _Test(partial(body, case), is_apart=True))

    def test_each_killing(self, cases: Mapping[str, Any] | Iterable[Any]) -> Callable[[Body], Body]:
        """Make a test of each case in a group of its own, in which its `victim` is killed."""
        return self._test_each(
            _by_name(cases),
            lambda body, case: _Test(partial(body, case), is_apart=True, victim=case.victim),
        )

    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return the folder of all groups of the module, after they have run: for tests of what they have left."""
        if self._out is None:
            out = tmp_path_factory.mktemp("ranks")
            for group in self._groups:
                group._out = out
            kinds = sorted(self._kinds[self._module])
            request = {"module": self._module, "out": str(out), "kinds": kinds}
            run_script("worlds/ranks.py", json.dumps(request))
            for at, group in enumerate(self._groups):
                group._wrong = [json.loads(_answer(out, at, rank).read_text()) for rank in range(group.size)]
        return self._out

    def _test(self, body: Body, test: _Test) -> Body:
        def run(tmp_path_factory: pytest.TempPathFactory) -> None:
            self._hold(body.__name__, tmp_path_factory)

        named = self._named(run, body)
        self._tests[body.__name__] = test._replace(function=named)
        return named

    def _test_each(
        self, cases: Mapping[str, Any], make: Callable[[Body, Any], _Test]
    ) -> Callable[[Body], Body]:
        def decorate(body: Body) -> Body:
            def run(case: str, tmp_path_factory: pytest.TempPathFactory) -> None:
                self._hold(f"{body.__name__}[{case}]", tmp_path_factory)

            named = self._named(run, body)
            for name, case in cases.items():
                self._tests[f"{body.__name__}[{name}]"] = make(body, case)._replace(function=named)
            return pytest.mark.parametrize("case", list(cases))(named)

        return decorate

    def _hold(self, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.folder(tmp_path_factory)
        if not self._wrong:
            pytest.fail("the ranks did not come to an end: see the module's first test")
        failed = {rank: each[name] for rank, each in enumerate(self._wrong) if each[name]}
        if failed:
            rank, text = next(iter(failed.items()))
            pytest.fail(f"on ranks {list(failed)}; rank {rank}:\n{text}", pytrace=False)

    def _named(self, test: Body, body: Body) -> Body:
        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        return pytest.mark.dist(pytest.mark.prove(test) if self.size > 2 else test)

    def run(self, at: int, out: Path, kinds: Collection[bool]) -> None:
        """Run the bodies of these kinds, each on as many processes as there are ranks; leave what went wrong on each."""
        if self._first is not None:
            self._first(out)
        gc.freeze()  # what is imported by now: ranks need not go through it
        chosen = {name: test for name, test in self._tests.items() if test.is_prove in kinds}
        together = {name: test for name, test in chosen.items() if not test.is_apart}
        wrong: list[dict[str, str]] = [{} for _ in range(self.size)]
        for number, tests in enumerate(
            [together, *({name: test} for name, test in chosen.items() if test.is_apart)]
        ):
            if tests:
                place = out / f".group{at}-{number}"
                place.mkdir()
                for rank, each in enumerate(self._run_group(tests, place, out)):
                    wrong[rank] |= each
        for rank, each in enumerate(wrong):
            _answer(out, at, rank).write_text(json.dumps(each))

    def _run_group(self, tests: Mapping[str, _Test], place: Path, out: Path) -> list[dict[str, str]]:
        children = [fork(partial(self._run_rank, rank, tests, place, out)) for rank in range(self.size)]
        (victim,) = {test.victim for test in tests.values()}
        found = []
        for rank, child in enumerate(children):
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status not in (0, -signal.SIGKILL if rank == victim else 0):
                sys.exit(f"a process failed: {status}")
            wrong = (
                json.loads((place / f"{rank}.json").read_text()) if status == 0 else dict.fromkeys(tests, "")
            )
            if rank == victim and status == 0:
                wrong = {name: text or "it was not killed" for name, text in wrong.items()}
            found.append(wrong)
        return found

    def _run_rank(self, rank: int, tests: Mapping[str, _Test], place: Path, out: Path) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if "transformers" in sys.modules:
            sys.modules["transformers"].logging.set_verbosity_error()
            sys.modules["transformers"].utils.logging.disable_progress_bar()
        if self.size > 1:
            _share_listener()
            os.environ["GROUP_RANK"] = str(rank // 2)  # as torchrun says it of nodes with two ranks
            store = f"file://{place}/store"
            dist.init_process_group(
                "gloo", init_method=store, rank=rank, world_size=self.size, timeout=_TIMEOUT
            )
            # One that is killed before all are connected would fail the others where no test looks.
            here = dist.FileStore(f"{place}/here", self.size)
            here.set(str(rank), "")
            here.wait([str(each) for each in range(self.size)])
        wrong = dict.fromkeys(tests, "")
        is_killed = any(test.victim is not None for test in tests.values())
        for name, test in tests.items():
            try:
                test.body(**({"out": out} if "out" in inspect.signature(test.body).parameters else {}))
            except BaseException:  # pytest's own failures are no Exceptions
                wrong[name] = traceback.format_exc()
            if self.size > 1 and not is_killed:
                dist.barrier()
        (place / f"{rank}.json").write_text(json.dumps(wrong))
        if is_killed:
            os._exit(0)  # a group with a dead rank is not left in good order
        if self.size > 1:
            end_world()


def _share_listener() -> None:
    """Have all groups of this process listen in one thread.

    gloo has one for each group, which wakes a hundred times a second: the groups of thirty meshes on eight ranks took a
    fifth of the CPU of their tests.
    """
    from torch.distributed import distributed_c10d as c10d

    device = c10d.ProcessGroupGloo.create_default_device()

    class Listening(c10d.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = c10d.ProcessGroupGloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = Listening


def on_all(value: Any) -> list[Any]:
    """Return what each rank of the group has here, in order."""
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def same_error(work: Callable[[], object]) -> dict[str, Any]:
    """Return the error of ours that `work` raises, as plain data; it is the same on every rank."""
    error = None
    try:
        work()
    except ShardkitError as raised:
        error = raised.to_json()
    every = on_all(error)
    assert error is not None, every
    assert every == [error] * len(every), every
    return error


def _answer(out: Path, at: int, rank: int) -> Path:
    return out / f".answer{at}-{rank}.json"


def _by_name(cases: Mapping[str, Any] | Iterable[Any]) -> Mapping[str, Any]:
    if isinstance(cases, Mapping):
        return cases
    return {case if isinstance(case, str) else case.__name__: case for case in cases}


def main() -> None:
    request = json.loads(sys.argv[1])
    import_module(request["module"])
    for at, ranks in enumerate(Ranks._of_module[request["module"]]):
        ranks.run(
            at, Path(request["out"]), request["kinds"]
        )  # what this process has imported, the next group need not


if __name__ == "__main__":
    from tests.worlds.ranks import main as run  # not this module's own: its class is another one

    run()
