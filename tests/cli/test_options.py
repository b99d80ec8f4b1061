"""The options of a verb are one list: the fields of a class, or what its function takes. Click, the signature and the docstring are held to it."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Literal, get_args, get_origin, get_type_hints

import click
import pytest

import shardkit
from shardkit import UsageError
from shardkit.cli import main
from shardkit.core.text import parse_size
from shardkit.operations.consolidate.options import ConsolidateOptions
from shardkit.operations.diff.options import DiffOptions
from shardkit.operations.preshard.options import PreshardOptions
from shardkit.operations.reshard.options import ReshardOptions
from shardkit.operations.verify.options import VerifyOptions
from shardkit.training.prepare import PrepareOptions
from tests.cli.test_surface import command

OPTIONS = {
    "consolidate": ConsolidateOptions,
    "diff": DiffOptions,
    "prepare": PrepareOptions,
    "preshard": PreshardOptions,
    "reshard": ReshardOptions,
    "verify": VerifyOptions,
}
FUNCTIONS = {
    **{verb: getattr(shardkit, verb) for verb in OPTIONS if verb != "prepare"},
    "abort": shardkit.abort,
    "commit": shardkit.commit,
    "inspect": shardkit.inspect,
    "latest": shardkit.latest,
    "status": shardkit.status,
}
OF_A_COMMAND = {"as_json", "quiet", "verbose", "no_progress", "html_file", "picture"}
"""What only commands have."""
OF_PYTHON = {"progress", "on_warning", "on_step", "holdings"}
"""What only callers of the library have."""
OTHERWISE = {
    # Of the page.
    "diff": {"overwrite"},
    "inspect": {"overwrite"},
    "verify": {"overwrite"},
}
commands = pytest.mark.parametrize("verb", FUNCTIONS)
with_options = pytest.mark.parametrize("verb", OPTIONS)


def arguments_of(function):
    return inspect.signature(function).parameters


def paths_of(function):
    return [each.name for each in arguments_of(function).values() if each.default is each.empty]


@commands
def test_click_has_the_arguments(verb):
    typed = {param.name for param in command(verb).params if param.expose_value}
    assert (
        typed - OF_A_COMMAND - OTHERWISE.get(verb, set()) == arguments_of(FUNCTIONS[verb]).keys() - OF_PYTHON
    )


@commands
def test_click_has_the_defaults(verb, monkeypatch):
    for name in ("SHARDKIT_JOBS", "SHARDKIT_MAX_MEMORY"):
        monkeypatch.delenv(name, raising=False)
    function = FUNCTIONS[verb]
    # A command keeps the help option that it has made for its first context: without a parent, one without `-h`.
    root = click.Context(main, info_name="shardkit", **main.context_settings)
    given = command(verb).make_context(verb, paths_of(function), parent=root).params
    for name, argument in arguments_of(function).items():
        if name in given and name not in (*paths_of(function), *OTHERWISE.get(verb, ())):
            default = argument.default
            if name == "max_memory":  # of preshard, None has a meaning of its own
                assert parse_size(given[name]) == parse_size("256MiB" if default is None else default)
            else:
                assert given[name] == default, name


@pytest.mark.parametrize("verb", [verb for verb in OPTIONS if verb in FUNCTIONS])
def test_click_has_the_choices(verb, tiny):
    """The library refuses any other value, and names the ones that click has."""
    shardkit.preshard(tiny, "sharded", world_size=1)
    paths = {"preshard": [tiny, "out"], "diff": [tiny, tiny]}.get(verb, ["sharded", "out"])
    needed = {"world_size": 1} if "world_size" in arguments_of(FUNCTIONS[verb]) else {}
    choices = {
        param.name: param.type.choices
        for param in command(verb).params
        if isinstance(param.type, click.Choice) and param.callback is None
    }
    for name in choices.keys() & arguments_of(FUNCTIONS[verb]).keys():
        with pytest.raises(UsageError, match="'bogus' is not") as caught:
            FUNCTIONS[verb](*paths, **needed, **{name: "bogus"})
        said = caught.value.message.partition(" is not ")[2].removeprefix("one of ")
        assert said == ", ".join(choices[name])


@commands
def test_type_hints_have_the_choices(verb):
    hints = get_type_hints(FUNCTIONS[verb])
    for param in command(verb).params:
        if isinstance(param.type, click.Choice) and param.callback is None and param.name in hints:
            assert set(param.type.choices) <= set(literals(hints[param.name])), param.name


def literals(hint):
    """Yield the values of all literals in a type."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        yield from (value for part in get_args(hint) for value in literals(part))


@with_options
def test_the_signature_has_the_fields(verb):
    function = getattr(shardkit, verb)
    arguments = arguments_of(function)
    assert {name: (each.annotation, each.default) for name, each in arguments.items()} == {
        each.name: (each.type, inspect.Parameter.empty if each.name in paths_of(function) else each.default)
        for each in fields(OPTIONS[verb])
    }
    assert get_type_hints(function).keys() == {*arguments, "return"}


@pytest.mark.parametrize("function", [*FUNCTIONS.values(), shardkit.prepare], ids=lambda each: each.__name__)
def test_the_docstring_has_the_arguments(function):
    text = inspect.getdoc(function).partition("\nArgs:\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"^    (\w+): ", text, re.MULTILINE)) == arguments_of(function).keys()


def test_what_is_no_option_is_refused():
    with pytest.raises(TypeError, match="bogus"):
        shardkit.consolidate("x", bogus=1)
    with pytest.raises(TypeError, match="positional"):
        shardkit.consolidate("x", "y", "z")
