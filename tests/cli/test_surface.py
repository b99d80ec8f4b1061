"""The commands and flags that people and scripts rely on. Changing this list is a decision."""

from __future__ import annotations

import click
import pytest

from shardkit.cli import main

SURFACE = {
    "cache": ["--clear", "--json"],
    "commit": ["--json", "--no-progress", "--overwrite", "--wait", "OUTPUT"],
    "completion": ["SHELL"],
    "consolidate": [
        "--adapter-config",
        "--add-prefix",
        "--allow-missing",
        "--allow-unexpected",
        "--allow-unsafe-store",
        "--ask-class",
        "--base",
        "--base-revision",
        "--branch",
        "--check",
        "--check-source",
        "--dequantize",
        "--digest",
        "--dry-run",
        "--dtype",
        "--dtype-rule",
        "--exclude",
        "--executor",
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
        "--no-resume",
        "--num-parts",
        "--overwrite",
        "--part",
        "--private",
        "--push-to-hub",
        "--rename",
        "--resume",
        "--resume-from",
        "--root",
        "--sha256",
        "--single-file",
        "--source-manifest",
        "--strict",
        "--strip-prefix",
        "--weights",
        "-n",
        "CHECKPOINT",
        "OUTPUT",
    ],
    "diff": [
        "--all",
        "--answers",
        "--atol",
        "--exclude",
        "--follow-links",
        "--html",
        "--include",
        "--json",
        "--max-memory",
        "--no-progress",
        "--overwrite",
        "--part",
        "--picture",
        "--quiet",
        "--rtol",
        "--sort",
        "--stats",
        "--strict",
        "-q",
        "A",
        "B",
    ],
    "env": ["--json"],
    "gc": ["--dry-run", "--json", "--older-than", "--uncommitted", "-n", "PATH"],
    "help": ["NAMES"],
    "inspect": [
        "--follow-links",
        "--html",
        "--json",
        "--overwrite",
        "--picture",
        "--tensors",
        "PATH",
    ],
    "keys check": ["--base", "--follow-links", "--json", "RULES", "SOURCE"],
    "keys show": ["--base", "--follow-links", "--json", "SOURCE"],
    "manifest": [
        "--answers",
        "--dry-run",
        "--follow-links",
        "--inside",
        "--jobs",
        "--json",
        "--no-progress",
        "--output",
        "--overwrite",
        "--part",
        "--sha256",
        "-n",
        "-o",
        "PATH",
    ],
    "preshard": [
        "--allow-unsafe-store",
        "--attribute",
        "--check-source",
        "--dequantize",
        "--device",
        "--digest",
        "--dry-run",
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
        "--no-resume",
        "--num-parts",
        "--osft",
        "--osft-rank",
        "--osft-svd",
        "--osft-targets",
        "--overwrite",
        "--parallel-rule",
        "--part",
        "--profile",
        "--resume",
        "--resume-from",
        "--revision",
        "--sha256",
        "--source-manifest",
        "--stages",
        "--trust-remote-code",
        "--variant",
        "--world-size",
        "--wrap",
        "-n",
        "OUTPUT",
        "SOURCE",
    ],
    "reshard": [
        "--allow-unsafe-store",
        "--check-source",
        "--digest",
        "--dry-run",
        "--dtype",
        "--executor",
        "--follow-links",
        "--jobs",
        "--json",
        "--max-memory",
        "--mesh",
        "--no-progress",
        "--no-resume",
        "--num-parts",
        "--optimizer-dtype",
        "--overwrite",
        "--part",
        "--resume",
        "--resume-from",
        "--sha256",
        "--source-manifest",
        "--strict",
        "--world-size",
        "-n",
        "CHECKPOINT",
        "OUTPUT",
    ],
    "status": ["--abort", "--json", "OUTPUT"],
    "verify": [
        "--against",
        "--answers",
        "--follow-links",
        "--full",
        "--html",
        "--hub",
        "--jobs",
        "--json",
        "--manifest",
        "--no-progress",
        "--overwrite",
        "--part",
        "--read",
        "--revision",
        "--rounded",
        "--seed",
        "--strict",
        "PATH",
    ],
}


def command(name):
    first, *rest = name.split()
    found = main.get_command(click.Context(main), first)
    return found.get_command(click.Context(found), rest[0]) if rest else found


def test_commands():
    assert main.list_commands(click.Context(main)) == sorted({name.split()[0] for name in SURFACE})


@pytest.mark.parametrize("name", SURFACE)
def test_parameters(name):
    found = []
    for parameter in command(name).params:
        is_option = isinstance(parameter, click.Option)
        found += [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.name.upper()]
    assert sorted(found) == sorted(SURFACE[name])


@pytest.mark.parametrize("name", SURFACE)
def test_help_has_two_examples_and_json(run, name):
    result = run(*name.split(), "--help")
    assert result.exit_code == 0
    has_result = name not in ("completion", "help")
    assert result.stdout.count(f"\n    shardkit {name}") == (2 if has_result else 3)
    assert ("--json" in result.stdout) is has_result


@pytest.mark.parametrize("args", [["--help"], ["-h"], ["inspect", "-h"], ["--version"]])
def test_asking_for_help_is_no_error(run, args):
    result = run(*args)
    assert (result.exit_code, result.stderr) == (0, "")
