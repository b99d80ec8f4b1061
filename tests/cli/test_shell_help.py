"""Help: options below headings, the first of them with -h; `shardkit help` says what --help says."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Iterator

import click
import pytest

from shardkit.cli import main
from shardkit.cli.options import SECTIONS, sections


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


def commands(group: click.Group = main, root: click.Context | None = None) -> Iterator[click.Context]:
    """Yield a context for each command, groups aside."""
    root = root or click.Context(main, info_name="shardkit", **main.context_settings)
    for name in group.list_commands(root):
        found = group.get_command(root, name)
        context = click.Context(found, info_name=name, parent=root)
        if isinstance(found, click.Group):
            yield from commands(found, context)
        else:
            yield context


ALL = [pytest.param(context, id=context.command_path) for context in commands()]


@pytest.mark.parametrize("context", ALL)
def test_every_option_stands_below_a_heading(context) -> None:
    options = [each for each in context.command.params if isinstance(each, click.Option)]
    assert not [each.opts for each in options if getattr(each, "section", None) not in SECTIONS]
    listed = [record for _, records in sections(context) for record in records]
    assert len(listed) == len(options) + 1  # and --help


@pytest.mark.parametrize("context", ALL)
def test_the_first_help_fits_on_a_screen(run, context) -> None:
    """45 lines of 80 columns; a line that is longer is wrapped by the terminal."""
    names = context.command_path.split()[1:]
    first, whole = run(*names, "-h").stdout, run(*names, "--help").stdout
    assert sum(max(1, math.ceil(len(line) / 80)) for line in first.splitlines()) <= 45
    if first != whole:
        assert first.splitlines()[-1] == f"  All options: {context.command_path} --help"
        assert len(first) < len(whole)
        assert first.splitlines()[:3] == whole.splitlines()[:3]


def test_the_first_help_has_what_a_first_user_needs(run) -> None:
    said = run("preshard", "-h").stdout
    assert re.findall(r"^(\w[\w ]*):$", said, re.MULTILINE) == ["Layout", "Dtypes", "Output", "General"]
    for name in ("--world-size", "--mesh", "--profile", "--dtype", "--dry-run", "--overwrite", "--json"):
        assert f" {name} " in said
    for name in ("--osft-svd", "--digest", "--part", "--stages", "--follow-links", "-h,"):
        assert name not in said


def test_all_sections_in_their_order(run) -> None:
    said = run("preshard", "--help").stdout
    headings = re.findall(r"^(\w[\w ]*):$", said, re.MULTILINE)
    assert headings == [each for each in SECTIONS if each in headings]
    assert {"Layout", "OSFT", "Many machines", "General"} <= {*headings}
    rows = [line for line in said.splitlines() if re.match(r"  -\S* \S*  +\S", line)]
    assert len({re.match(r"  .*?  +(?=\S)", line).end() for line in rows}) == 1  # one column in all sections


def test_the_commands_are_in_sections(run) -> None:
    said = run("--help").stdout
    parts = re.findall(r"^(\w[\w ]*):\n((?:  .*\n)+)", said, re.MULTILINE)
    found = {heading: re.findall(r"^  (\w+)", rows, re.MULTILINE) for heading, rows in parts}
    assert found["Main"] == ["preshard", "consolidate", "reshard"]
    assert found["Look"] == ["inspect", "verify", "diff"]
    assert found["Many machines"] == ["commit", "status", "gc"]
    assert {"manifest", "keys", "help"} <= {*found["More"]}


def test_manual_and_completion_have_the_same_order(run) -> None:
    page = run("help", "preshard", "--man").stdout.replace("\\-", "-")
    assert re.findall(r"^\.B (.*)$", page, re.MULTILINE) == [name for name, _ in sections(typed("preshard"))]
    shown = [
        record[0].split(",")[0].split()[0] for _, records in sections(typed("preshard")) for record in records
    ]
    assert [name for name in re.findall(r"\\fB(-[-\w]*)", page) if name in shown] == shown
    completed = [item.value for item in typed("preshard").command.shell_complete(typed("preshard"), "--")]
    assert completed[:3] == ["--world-size", "--mesh", "--wrap"]
    assert completed.index("--osft") > completed.index("--part")


def typed(name: str) -> click.Context:
    return next(each for each in commands() if each.info_name == name)
