"""The commands and flags that people and scripts rely on. Changing this list is a decision."""

from __future__ import annotations

import click
import pytest

from shardkit.cli import main

SURFACE = {
    "abort": ["--json", "--quiet", "--verbose", "-q", "-v", "OUTPUT"],
    "commit": [
        "--json",
        "--no-progress",
        "--overwrite",
        "--quiet",
        "--verbose",
        "--wait",
        "-q",
        "-v",
        "OUTPUT",
    ],
    "completion": ["SHELL"],
    "consolidate": [
        "--adapter-config",
        "--add-prefix",
        "--allow-missing",
        "--allow-unexpected",
        "--ask-class",
        "--base",
        "--base-revision",
        "--branch",
        "--check-source",
        "--config",
        "--dequantize",
        "--digest",
        "--dry-run",
        "--exist-ok",
        "--dtype",
        "--dtype-rule",
        "--exclude",
        "--executor",
        "--fill-from-base",
        "--follow-links",
        "--include",
        "--jobs",
        "--json",
        "--keep-factors",
        "--keys",
        "--manifest",
        "--manifest-file",
        "--max-memory",
        "--max-shard-size",
        "--merge-lora",
        "--no-progress",
        "--num-parts",
        "--overwrite",
        "--part",
        "--private",
        "--push-to-hub",
        "--quiet",
        "--rename",
        "--root",
        "--scratch",
        "--sha256",
        "--single-file",
        "--source-manifest",
        "--strict",
        "--strip-prefix",
        "--tokenizer",
        "--verbose",
        "--weights",
        "-n",
        "-q",
        "-v",
        "CHECKPOINT",
        "OUTPUT",
    ],
    "diff": [
        "--all",
        "--as",
        "--atol",
        "--exclude",
        "--follow-links",
        "--html",
        "--include",
        "--json",
        "--max-memory",
        "--no-progress",
        "--picture",
        "--quiet",
        "--rtol",
        "--sort",
        "--stats",
        "--strict",
        "--verbose",
        "-q",
        "-v",
        "A",
        "B",
    ],
    "env": ["--json", "--quiet", "--verbose", "-q", "-v"],
    "inspect": [
        "--follow-links",
        "--html",
        "--json",
        "--no-progress",
        "--picture",
        "--quiet",
        "--tensors",
        "--verbose",
        "-q",
        "-v",
        "PATH",
    ],
    "preshard": [
        "--attribute",
        "--check-source",
        "--dequantize",
        "--digest",
        "--dry-run",
        "--exist-ok",
        "--dtype",
        "--dtype-rule",
        "--executor",
        "--follow-links",
        "--html",
        "--jobs",
        "--json",
        "--keys",
        "--layout",
        "--max-memory",
        "--mesh",
        "--names",
        "--no-progress",
        "--num-parts",
        "--overwrite",
        "--parallel-rule",
        "--part",
        "--profile",
        "--quiet",
        "--revision",
        "--scratch",
        "--sha256",
        "--source-manifest",
        "--stages",
        "--trust-remote-code",
        "--variant",
        "--verbose",
        "--world-size",
        "--wrap",
        "-n",
        "-q",
        "-v",
        "OUTPUT",
        "SOURCE",
    ],
    "reshard": [
        "--check-source",
        "--digest",
        "--dry-run",
        "--exist-ok",
        "--dtype",
        "--executor",
        "--follow-links",
        "--jobs",
        "--json",
        "--max-memory",
        "--mesh",
        "--no-optimizer",
        "--no-progress",
        "--num-parts",
        "--optimizer-dtype",
        "--overwrite",
        "--part",
        "--quiet",
        "--scratch",
        "--sha256",
        "--source-manifest",
        "--strict",
        "--verbose",
        "--world-size",
        "-n",
        "-q",
        "-v",
        "CHECKPOINT",
        "OUTPUT",
    ],
    "status": ["--json", "--no-progress", "--quiet", "--verbose", "-q", "-v", "OUTPUT"],
    "verify": [
        "--follow-links",
        "--full",
        "--html",
        "--hub",
        "--jobs",
        "--json",
        "--manifest",
        "--no-progress",
        "--quiet",
        "--revision",
        "--strict",
        "--verbose",
        "-q",
        "-v",
        "PATH",
    ],
}


def command(name):
    first, *rest = name.split()
    found = main.get_command(click.Context(main), first)
    return found.get_command(click.Context(found), rest[0]) if rest else found


def test_commands():
    assert sorted(main.list_commands(click.Context(main))) == sorted({name.split()[0] for name in SURFACE})


@pytest.mark.parametrize("name", SURFACE)
def test_parameters(name):
    found = []
    for parameter in (each for each in command(name).params if each.expose_value):  # -h is click's
        is_option = isinstance(parameter, click.Option)
        found += [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.name.upper()]
    assert sorted(found) == sorted(SURFACE[name])


@pytest.mark.parametrize("name", SURFACE)
def test_help_has_two_examples_and_json(run, name):
    result = run(*name.split(), "--help")
    assert result.exit_code == 0
    has_result = name != "completion"
    assert result.stdout.count(f"\n    shardkit {name}") == (2 if has_result else 3)
    assert ("--json" in result.stdout) is has_result


@pytest.mark.parametrize("args", [["--help"], ["-h"], ["inspect", "-h"], ["--version"]])
def test_asking_for_help_is_no_error(run, args):
    result = run(*args)
    assert (result.exit_code, result.stderr) == (0, "")
