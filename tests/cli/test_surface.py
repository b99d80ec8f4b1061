"""The commands and flags that people and scripts rely on. Changing this list is a decision."""

from __future__ import annotations

import click
import pytest

from shardkit.cli import main

# What every command with a result takes.
COMMON = "--json --quiet --verbose -q -v"
SURFACE = {
    "abort": f"{COMMON} OUTPUT",
    "commit": f"{COMMON} --no-progress --overwrite --wait OUTPUT",
    "completion": "SHELL",
    "consolidate": f"""
        {COMMON} --adapter-config --add-prefix --allow-missing --allow-unexpected --ask-class --base
        --base-revision --branch --check-source --config --dequantize --digest --dry-run --dtype
        --dtype-rule --exclude --executor --exist-ok --fill-from-base --follow-links --include --jobs
        --keep-factors --keys --manifest --manifest-file --max-memory --max-shard-size --merge-lora
        --no-progress --num-parts --overwrite --part --private --push-to-hub --quantize --rename --root
        --scratch --sha256 --single-file --source-manifest --strict --strip-prefix --tokenizer --weights -n
        CHECKPOINT OUTPUT
    """,
    "diff": f"""
        {COMMON} --all --as --atol --exclude --follow-links --html --include --max-memory --no-progress
        --picture --rtol --sort --stats --strict A B
    """,
    "env": COMMON,
    "inspect": f"{COMMON} --follow-links --html --no-progress --picture --tensors PATH",
    "latest": f"{COMMON} --all RUN",
    "preshard": f"""
        {COMMON} --attribute --check-source --dequantize --digest --dry-run --dtype --dtype-rule --executor
        --exist-ok --follow-links --html --jobs --keys --layout --max-memory --mesh --names --no-progress
        --num-parts --overwrite --parallel-rule --part --profile --revision --scratch --sha256
        --source-manifest --stages --trust-remote-code --variant --world-size --wrap -n OUTPUT SOURCE
    """,
    "reshard": f"""
        {COMMON} --check-source --digest --dry-run --dtype --executor --exist-ok --follow-links --jobs
        --max-memory --mesh --no-optimizer --no-progress --num-parts --optimizer-dtype --overwrite --part
        --scratch --sha256 --source-manifest --strict --world-size -n CHECKPOINT OUTPUT
    """,
    "status": f"{COMMON} --no-progress OUTPUT",
    "watch": f"""
        {COMMON} --adapter-config --add-prefix --allow-missing --allow-unexpected --ask-class --base
        --base-revision --branch-only --config --dequantize --dtype --dtype-rule --exclude
        --fill-from-base --follow-links --include --jobs --keep --keep-factors --keys --max-memory
        --max-shard-size --merge-lora --no-progress --once --private --push-to-hub --quantize --rename
        --root --settle --single-file --strip-prefix --tokenizer --weights OUTPUT_DIRECTORY RUN
    """,
    "verify": f"""
        {COMMON} --follow-links --full --html --hub --jobs --manifest --no-progress --revision --strict PATH
    """,
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
    assert sorted(found) == sorted(SURFACE[name].split())


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
