"""`shardkit help` says what --help says."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("names", [[], ["preshard"], ["keys"], ["keys", "check"], ["help"]])
def test_as_the_option(run, names: list[str]) -> None:
    assert run("help", *names).stdout == run(*names, "--help").stdout


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["presard"], "'presard'.  (closest name: preshard)"),
        (["keys", "chek"], "'chek'.  (closest name: check)"),
        (["preshard", "model"], "'model'"),
    ],
)
def test_what_is_no_command_is_refused(run, names: list[str], said: str) -> None:
    result = run("help", *names)
    assert result.exit_code == 2
    assert f"No such command {said}" in result.stderr
