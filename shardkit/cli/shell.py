"""`shardkit env`, `shardkit completion` and `shardkit help`, with the manual page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import click
from click.shell_completion import get_completion_class

from shardkit._version import __version__
from shardkit.cli import options as opt
from shardkit.cli.errors import typed_context
from shardkit.cli.output import Output, facts, printing
from shardkit.core.text import escape, format_size

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from shardkit.operations.environment import Environment

_PROGRAM, _VARIABLE = "shardkit", "_SHARDKIT_COMPLETE"

STATUS = (
    ("0", "done; of verify: nothing is wrong; of diff: equal"),
    ("1", "the answer of verify, diff or keys check is no"),
    ("2", "usage: options that cannot be carried out, an existing destination"),
    ("3", "an input that is damaged, refused or not understood"),
    ("4", "incomplete: the same command goes on"),
    ("5", "disk, permission, memory or network"),
    ("70", "a bug of shardkit"),
    ("130, 143", "interrupted by Ctrl-C or SIGTERM"),
)
VARIABLES = (
    ("SHARDKIT_JOBS", "threads, where --jobs is not given"),
    ("SHARDKIT_MAX_MEMORY", "memory for all buffers, where --max-memory is not given"),
    ("SHARDKIT_NO_PROGRESS", "1: no progress"),
    ("SHARDKIT_CACHE", "directory for what is kept between runs, or off; see shardkit cache"),
    ("SHARDKIT_DEBUG", "1: tracebacks with errors"),
    ("NO_COLOR", "no colours"),
)
"""The variables of the environment, and what they do."""


@click.command(
    cls=opt.Verb,
    name="env",
    epilog="""\b
Examples:
  shardkit env
  shardkit env --json > environment.json""",
)
@opt.answering
def env_command(*, out: Output) -> None:
    """Show versions and settings, to paste into a bug report.

    Of the HF_* variables only HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE are shown with their values.
    """
    from shardkit.operations.environment import environment

    out.answer(environment(), env_lines)


def env_lines(environment: Environment) -> list[str]:
    """Return an environment as lines for people."""
    memory = "unknown" if environment.memory_bytes is None else format_size(environment.memory_bytes)
    return facts(
        [
            ("shardkit", environment.shardkit),
            ("python", environment.python),
            ("platform", environment.platform),
            *((name, version or "not installed") for name, version in environment.packages.items()),
            ("cpus", str(environment.num_cpus)),
            ("memory", memory),
            *((escape(name), escape(value)) for name, value in environment.huggingface.items()),
            *(("note", note) for note in environment.notes),
        ]
    )


@click.command(
    cls=opt.Verb,
    name="completion",
    epilog="""\b
Examples:
  shardkit completion bash > ~/.local/share/bash-completion/completions/shardkit
  shardkit completion zsh > "${fpath[1]}/_shardkit"
  shardkit completion fish > ~/.config/fish/completions/shardkit.fish

They count in the next shell that is opened; eval "$(shardkit completion bash)" is for this one. bash has to be 4.4 or
newer.""",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="SHELL")
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print a script that completes commands, options and paths in your shell."""
    completer = get_completion_class(shell)
    assert completer is not None  # click brings these three
    script = completer(ctx.find_root().command, {}, _PROGRAM, _VARIABLE)
    # Not `source()`: it looks for the version of a bash, which may be that of another machine.
    with printing():
        click.echo(script.source_template % script.source_vars())


def _commands(context: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete the name of a command, behind those that were typed."""
    named = _typed(context.find_root(), context.params.get("names") or ())
    return named.command.shell_complete(named, typed) if isinstance(named.command, click.Group) else []


def _typed(root: click.Context, names: Sequence[str]) -> click.Context:
    """Return the context of a command that was named.

    Raises:
        click.UsageError: there is none of that name.
    """
    context = root
    for name in names:
        around, context = context, typed_context(context, (name,))
        if context is around:
            context.fail(f"No such command {name!r}")
    return context


@click.command(
    cls=opt.Verb,
    name="help",
    epilog="""\b
Examples:
  shardkit help consolidate
  shardkit help keys check
  shardkit help --man > shardkit.1""",
)
@click.argument("names", nargs=-1, metavar="[COMMAND]...", shell_complete=_commands)
@opt.option("General", "--man", first=True, is_flag=True, help="Print it as a manual page, for man.")
@click.pass_context
def help_command(ctx: click.Context, names: tuple[str, ...], man: bool) -> None:
    """Show what a command does and all of its options, like COMMAND --help."""
    root = ctx.find_root()
    if man:
        root = click.Context(root.command, info_name=_PROGRAM, **root.command.context_settings)
    context = _typed(root, names)
    with printing():
        click.echo(manual(context) if man else context.get_help())


def manual(context: click.Context) -> str:
    """Return the manual page of a command, or of a group and all commands in it, for `man`.

    Args:
        context: the command's; its parents are those of the groups around it.
    """
    command, is_all = context.command, context.parent is None
    said = (command.help or "").split("\n\n")[0].replace("\n", " ").rstrip(".")
    lines = [
        f'.TH {context.command_path.replace(" ", "-").upper()} 1 "" "shardkit {__version__}" "User Commands"',
        ".SH NAME",
        f"{_text(context.command_path.replace(' ', '-'))} \\- {_text(said[:1].lower() + said[1:])}",
    ]
    if is_all:
        lines += [".SH SYNOPSIS", ".B shardkit", _text("COMMAND [OPTIONS] [ARGUMENTS]"), ".SH COMMANDS"]
    else:
        lines += [".SH DESCRIPTION", *_command(context)]
    if isinstance(command, click.Group):
        lines += [line for below in _contexts(command, context) for line in _command(below)]
    lines += [
        ".SH EXIT STATUS",
        *_terms(STATUS),
        ".SH ENVIRONMENT",
        *_terms(VARIABLES),
    ]
    return "\n".join(lines)


def _contexts(group: click.Group, around: click.Context) -> Iterator[click.Context]:
    """Yield a context for each command, those of groups after the group."""
    for name in group.list_commands(around):
        command = group.get_command(around, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=around)
        yield context
        if isinstance(command, click.Group):
            yield from _contexts(command, context)


def _command(context: click.Context) -> Iterator[str]:
    command = context.command
    yield f".SS {_text(context.command_path)}"
    yield _text(" ".join([context.command_path, *command.collect_usage_pieces(context)]))
    for paragraph in (command.help or "").split("\n\n"):
        yield ".PP"
        yield _text(" ".join(paragraph.split()))
    for section, records in opt.sections(context):
        yield from (".PP", f".B {_text(section)}", *_terms(records))
    if command.epilog:
        yield ".PP"
        yield from (".nf", *map(_text, command.epilog.strip("\b\n").splitlines()), ".fi")


def _terms(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    for term, text in pairs:
        yield from (".TP", f"\\fB{_text(term)}\\fR", _text(text))


def _text(text: str) -> str:
    """Return text that troff prints as it is."""
    shown = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return f"\\&{shown}" if shown.startswith((".", "\\(aq")) else shown
