"""`make test` and `make prove` are all tests together, and no test is in both."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.cases import COLLECTED

ROOT = Path(__file__).parents[1]


def command(target: str) -> list[str]:
    """Return how make starts pytest for a target."""
    printed = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    return shlex.split(next(line for line in printed.stdout.splitlines() if "-m pytest " in line))


def test_the_two_targets_differ_in_what_they_select_alone() -> None:
    one, other = command("test"), command("prove")
    assert one[:-1] == other[:-1]
    assert (one[-2:], other[-2:]) == (["-m", "not prove"], ["-m", "prove"])


def test_continuous_integration_runs_each_once() -> None:
    run = re.findall(r"^step make (test|prove)$", (ROOT / ".ci/run").read_text(), re.M)
    assert run == ["test", "prove"]


def test_no_test_is_lost(request: pytest.FixtureRequest) -> None:
    """This run has exactly those tests of its files that its expression is about."""
    config, expression = request.config, request.config.option.markexpr
    if expression not in ("", "prove", "not prove") or config.option.keyword:
        pytest.skip("only some of the tests were asked for")
    collected = config.stash[COLLECTED]
    wanted = {
        name
        for name, is_prove in collected.items()
        if expression in ("", "prove" if is_prove else "not prove")
    }
    assert {item.nodeid for item in request.session.items} == wanted
