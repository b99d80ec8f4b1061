"""Whether the commands that a text tells people to type can be typed."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterable, Iterator

import click

_COMMAND = re.compile(r"`(shardkit [^`]*)`")


def untypable(texts: Iterable[str]) -> Iterator[str]:
    """Yield each command of some texts that the command line would not take, and why."""
    for text in texts:
        if "`shardkit " in text:
            for command in _COMMAND.findall(text):
                why = why_not(command)
                if why:
                    yield f"{command}: {why}"


@functools.cache
def why_not(command: str) -> str:
    """Return what the parser of the command line says of a command; empty if nothing."""
    from shardkit.cli import main

    try:
        words = shlex.split(command)[1:]
        asked = [word for word in words if word not in ("--help", "-h")]
        asks_help = asked != words
        context, verb = click.Context(main, info_name="shardkit", **main.context_settings), main
        while isinstance(verb, click.Group) and asked:
            name, found, asked = verb.resolve_command(context, asked)
            if found is None:
                return f"no command {name}"
            verb = found  # type: ignore[assignment]
        if not asks_help:  # which would be printed
            verb.make_context("shardkit", asked, parent=context)
    except (ValueError, click.UsageError) as error:
        return str(error) or type(error).__name__
    return ""
