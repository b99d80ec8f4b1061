"""The options of a verb are one list: the fields of a class. What click, the signature and the docstring say is held to it."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, replace
from typing import get_type_hints

import click
import pytest

import shardkit
from shardkit import UsageError
from shardkit.core.text import parse_size
from shardkit.operations.consolidate.options import ConsolidateOptions
from shardkit.operations.diff.options import DiffOptions
from shardkit.operations.preshard.options import PreshardOptions
from shardkit.operations.reshard.options import ReshardOptions
from shardkit.operations.verify.options import VerifyOptions
from tests.cli.test_surface import command

OPTIONS = {
    "consolidate": ConsolidateOptions,
    "diff": DiffOptions,
    "preshard": PreshardOptions,
    "reshard": ReshardOptions,
    "verify": VerifyOptions,
}
OF_A_COMMAND = {"as_json", "quiet", "verbose", "no_progress", "html_file"}
"""What only commands have."""
OF_PYTHON = {"progress", "on_warning", "on_step", "holdings"}
"""What only callers of the library have."""
OTHERWISE = {
    # One plan in Python is several options of the command.
    "preshard": {"osft_targets", "osft_ranks", "osft_svd"},
    # Of the page and the picture.
    "diff": {"overwrite", "picture"},
    "verify": {"overwrite"},
}
verbs = pytest.mark.parametrize("verb", OPTIONS)


def fields_of(verb):
    return {field.name: field for field in fields(OPTIONS[verb])}


@verbs
def test_click_has_the_fields(verb):
    typed = {param.name for param in command(verb).params}
    assert typed - OF_A_COMMAND - OTHERWISE.get(verb, set()) == fields_of(verb).keys() - OF_PYTHON


def paths_of(verb):
    parameters = inspect.signature(getattr(shardkit, verb)).parameters.values()
    return [each.name for each in parameters if each.default is each.empty]


@verbs
def test_click_has_the_defaults(verb, monkeypatch):
    for name in ("SHARDKIT_JOBS", "SHARDKIT_MAX_MEMORY"):
        monkeypatch.delenv(name, raising=False)
    default = OPTIONS[verb](*paths_of(verb))
    given = command(verb).make_context(verb, paths_of(verb)).params
    chosen = replace(default, **{name: given[name] for name in given.keys() & fields_of(verb).keys()})
    for name in fields_of(verb):
        one, other = getattr(chosen, name), getattr(default, name)
        if name == "max_memory":
            one, other = parse_size(one), parse_size("256MiB" if other is None else other)
        assert one == other, name


@verbs
def test_click_has_the_choices(verb, tiny):
    """The library refuses any other value, and names the ones that click has."""
    shardkit.preshard(tiny, "sharded", world_size=1)
    paths = {"preshard": [tiny, "out"], "diff": [tiny, tiny]}.get(verb, ["sharded", "out"])
    needed = {"world_size": 1} if "world_size" in fields_of(verb) else {}
    for param in command(verb).params:
        if isinstance(param.type, click.Choice) and param.name in fields_of(verb) and param.callback is None:
            with pytest.raises(UsageError, match="'bogus' is not") as caught:
                getattr(shardkit, verb)(*paths, **needed, **{param.name: "bogus"})
            said = caught.value.message.partition(" is not ")[2].removeprefix("one of ")
            assert said == ", ".join(param.type.choices)


@verbs
def test_the_signature_has_the_fields(verb):
    parameters = inspect.signature(getattr(shardkit, verb)).parameters
    assert {name: (each.annotation, each.default) for name, each in parameters.items()} == {
        name: (field.type, inspect.Parameter.empty if name in paths_of(verb) else field.default)
        for name, field in fields_of(verb).items()
    }
    assert get_type_hints(getattr(shardkit, verb)).keys() == {*parameters, "return"}


@verbs
def test_the_docstring_has_the_fields(verb):
    text = inspect.getdoc(getattr(shardkit, verb)).partition("\nArgs:\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"^    (\w+): ", text, re.MULTILINE)) == fields_of(verb).keys()


def test_what_is_no_option_is_refused():
    with pytest.raises(TypeError, match="bogus"):
        shardkit.consolidate("x", bogus=1)
    with pytest.raises(TypeError, match="positional"):
        shardkit.consolidate("x", "y", "z")
