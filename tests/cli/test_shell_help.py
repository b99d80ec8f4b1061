"""Help: options below headings, the first of them with -h."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import click
import pytest

from shardkit.cli import main
from shardkit.cli.options import SECTIONS, sections


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
    printed = [run(*names, flag) for flag in ("-h", "--help")]
    assert [(each.exit_code, each.stderr) for each in printed] == [(0, "")] * 2
    first, whole = (each.stdout for each in printed)
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
    for name in ("--digest", "--part", "--stages", "--follow-links", "-h,"):
        assert name not in said


def test_all_sections_in_their_order(run) -> None:
    said = run("preshard", "--help").stdout
    headings = re.findall(r"^(\w[\w ]*):$", said, re.MULTILINE)
    assert headings == [each for each in SECTIONS if each in headings]
    assert {"Layout", "Many machines", "General"} <= {*headings}
    rows = [line for line in said.splitlines() if re.match(r"  -\S* \S*  +\S", line)]
    assert len({re.match(r"  .*?  +(?=\S)", line).end() for line in rows}) == 1  # one column in all sections


def test_the_commands_are_in_sections(run) -> None:
    said = run("--help").stdout
    parts = re.findall(r"^(\w[\w ]*):\n((?:  .*\n)+)", said, re.MULTILINE)
    found = {heading: re.findall(r"^  (\w+)", rows, re.MULTILINE) for heading, rows in parts}
    assert found["Main"] == ["preshard", "consolidate", "reshard", "watch"]
    assert found["Look"] == ["inspect", "verify", "diff", "latest"]
    assert found["Many machines"] == ["commit", "status", "abort"]
    assert {"env", "completion"} <= {*found["More"]}


def test_completion_has_the_same_order() -> None:
    completed = [item.value for item in typed("preshard").command.shell_complete(typed("preshard"), "--")]
    assert completed[:3] == ["--world-size", "--mesh", "--wrap"]
    assert completed.index("--part") > completed.index("--dtype")


def typed(name: str) -> click.Context:
    return next(each for each in commands() if each.info_name == name)
