"""A short fuzz run in the normal suite; every input that once broke a promise; and the runner itself."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.formats.dcp import metadata
from shardkit.pickles.columns import RunFinder
from tests.fuzz.run import FOUND
from tests.fuzz.target import Refusals
from tests.fuzz.targets import TARGETS, load

pytestmark = pytest.mark.prove

_ROOT = Path(__file__).parents[2]
_SHORT = {"manifest": 2, "chunk_list": 4, "metadata_runs": 4, "torch_file": 10}
"""Inputs for each example, of targets that are slow; 20 of the others."""
_NO_SEEDS = {"placements"}
"""Targets whose seeds are numbers, good or not."""

_ONE_REASON = {"chunk_list", "size"}
"""Targets that say the same of nearly everything."""


@pytest.fixture(scope="module", autouse=True)
def _clean() -> object:
    yield
    for name in TARGETS:
        load(name).clean()


@pytest.mark.parametrize("name", sorted(TARGETS.keys() - _NO_SEEDS))
def test_what_the_real_writers_write_is_accepted(name: str) -> None:
    target = load(name)
    assert all(target.check(seed) for seed in target.seeds())


@pytest.mark.parametrize("path", sorted(FOUND.glob("*")), ids=lambda path: path.name)
def test_what_once_broke_a_promise(path: Path) -> None:
    load(path.name.partition("-")[0]).check(path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_edited_inputs(name: str) -> None:
    target = load(name)
    seeds = target.seeds()

    @settings(derandomize=True, database=None, deadline=None, max_examples=12)
    @given(seed=st.integers(0, 2**32))
    def run(seed: int) -> None:
        rng = Random(seed)
        for _ in range(_SHORT.get(name, 20)):
            target.check(target.mutate(rng, seeds))

    run()


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes(name: str) -> None:
    target = load(name)

    @settings(derandomize=True, database=None, max_examples=30)
    @given(data=st.binary(max_size=200))
    def run(data: bytes) -> None:
        target.check(data)

    run()


@pytest.mark.parametrize("name", TARGETS)
def test_edits_go_deep(name: str) -> None:
    """Many inputs are accepted, and the others are refused for many reasons."""
    target, rng, reasons = load(name), Random(1), Counter[str]()
    seeds, count = target.seeds(), 10 * _SHORT.get(name, 20)
    accepted = 0
    for _ in range(count):
        if target.check(target.mutate(rng, seeds)):
            accepted += 1
        else:
            reasons["".join(char for char in Refusals.latest if not char.isdigit())] += 1
    assert 0.03 < accepted / count < 0.97
    assert len(reasons) > (0 if name in _ONE_REASON else 2)


_BROKEN = """
    import os, signal, sys, time
    from pathlib import Path
    from tests.fuzz import run
    from tests.fuzz.target import Refusals, Target
    def check(data):
        Refusals.latest, begun = f"refused {{data}}", time.process_time()
        {body}
        return data > b"3"
    run.FOUND, run._HANG_SECONDS, run._MAX_SECONDS = Path({found!r}), 1.5, 0.5
    run.load = lambda name: Target(check, lambda: [b""], lambda rng, seeds: b"%d" % rng.randrange(9))
    sys.argv = ["run", "broken", "--count", "40", "--seed", "4"]
    sys.exit(run.main())
"""


def _run(body: str, found: Path) -> tuple[int, dict[str, Any]]:
    """Run a target that is a line of code, in a process of its own."""
    program = textwrap.dedent(_BROKEN.format(body=body, found=str(found)))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=_ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_metadata_runs_are_taken_in_columns() -> None:
    """The seeds of the target that is about these shortcuts do go through them."""
    taken = Counter[str]()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            taken[name] += result is not None
            return result

        return call

    target = load("metadata_runs")
    with (
        mock.patch.object(RunFinder, "take", counted("runs", RunFinder.take)),
        mock.patch.object(metadata, "match_columns", counted("tensors", metadata.match_columns)),
    ):
        assert all(map(target.check, target.seeds()))
    assert taken["runs"] >= 10
    assert taken["tensors"] >= 10


def test_the_runner_counts_and_repeats_itself(tmp_path: Path) -> None:
    (code, first), (_, second) = (_run("pass", tmp_path) for _ in range(2))
    assert (code, first["inputs"], first["failures"]) == (0, 40, {})
    assert first["accepted"] + sum(first["messages"].values()) == 40
    assert (first["accepted"], first["messages"]) == (second["accepted"], second["messages"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        ("assert data != b'7', 'no sevens'", "AssertionError"),
        ("1 / (int(data) - 7)", "ZeroDivisionError"),
        ("os.kill(os.getpid(), 11) if data == b'7' else None", "crash or hang"),
        # It waits for ever, and the clock that is set for it goes faster.
        (
            "if data == b'7': assert signal.getitimer(0)[0]; signal.setitimer(0, 1e-3); signal.pause()",
            "crash or hang",
        ),
        ("while data == b'7': pass", "crash or hang"),
        ("while data == b'7' and time.process_time() < begun + 0.6: pass", "slow"),
        ("b'x' * (300 << 20) if data == b'7' else None", "memory"),
    ],
)
def test_the_runner_finds(tmp_path: Path, body: str, failure: str) -> None:
    code, outcome = _run(body, tmp_path)
    assert any(failure in kind for kind in outcome["failures"]), outcome
    assert code == 1
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"7"]
