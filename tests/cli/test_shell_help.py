"""`shardkit help` says what --help says."""

from __future__ import annotations

import shutil
import subprocess

import click
import pytest

from shardkit.cli import main


@pytest.mark.parametrize("names", [[], ["preshard"], ["keys"], ["keys", "check"], ["help"]])
def test_as_the_option(run, names: list[str]) -> None:
    assert run("help", *names).stdout == run(*names, "--help").stdout


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["presard"], "'presard'  (closest name: preshard)"),
        (["keys", "chek"], "'chek'  (closest name: check)"),
        (["preshard", "model"], "'model'"),
    ],
)
def test_what_is_no_command_is_refused(run, names: list[str], said: str) -> None:
    result = run("help", *names)
    assert result.exit_code == 2
    assert f"no such command {said}" in result.stderr


def test_the_manual_has_every_command_and_option_and_troff_takes_it(run) -> None:
    page = run("help", "--man").stdout
    said = page.replace("\\-", "-").replace("\\(aq", "'")
    root = click.Context(main)
    for name in main.list_commands(root):
        command = main.get_command(root, name)
        assert f".SS shardkit {name}\n" in said
        part = said.partition(f".SS shardkit {name}\n")[2].partition(".SH ")[0]
        options = [text for param in command.params if isinstance(param, click.Option) for text in param.opts]
        assert not [text for text in options if text not in part]
    if shutil.which("groff") is None:
        pytest.skip("there is no groff")
    done = subprocess.run(
        ["groff", "-man", "-Tascii", "-ww", "-z"], input=page, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("names", "has", "lacks"), [(["preshard"], [], "reshard"), (["keys"], ["check", "show"], "preshard ")]
)
def test_the_manual_of_one_command(run, names: list[str], has: list[str], lacks: str) -> None:
    page = run("help", *names, "--man").stdout
    path = "-".join(["shardkit", *names])
    assert page.startswith(f'.TH {path.upper()} 1 "')
    assert f"\n{path} \\- ".replace("-", "\\-", 1) in page
    said = [line.removeprefix(".SS shardkit ") for line in page.splitlines() if line.startswith(".SS")]
    assert said == [" ".join([*names, *more]) for more in ([], *([name] for name in has))]
    assert f".SS shardkit {lacks}" not in page
    assert ".SH ENVIRONMENT" in page


def test_variables_stand_beside_their_options(run, monkeypatch) -> None:
    for variable in ("SHARDKIT_JOBS", "SHARDKIT_MAX_MEMORY", "SHARDKIT_NO_PROGRESS"):
        assert f"[env var: {variable}" in " ".join(run("preshard", "--help").stdout.split())
    monkeypatch.setenv("SHARDKIT_JOBS", "0")
    assert "--jobs must be at least 1" in run("verify", ".").stderr
