"""`shardkit env` and `shardkit completion`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.shell_completion import get_completion_class

from shardkit.cli import options as opt
from shardkit.cli.output import Output, facts, printing
from shardkit.core.text import escape, format_size

if TYPE_CHECKING:
    from shardkit.operations.environment import Environment

_PROGRAM, _VARIABLE = "shardkit", "_SHARDKIT_COMPLETE"


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
    """Return an environment as lines of text."""
    memory = "unknown" if environment.memory_bytes is None else format_size(environment.memory_bytes)
    return facts(
        [
            ("shardkit", environment.shardkit),
            ("python", environment.python),
            ("platform", environment.platform),
            *((name, version or "not installed") for name, version in environment.packages.items()),
            ("cpus", str(environment.num_cpus)),
            ("memory", memory),
            ("cache", "off" if environment.cache is None else escape(environment.cache)),
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

Open a new shell to use it, or run eval "$(shardkit completion bash)" in this one. bash must be 4.4 or newer.""",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="SHELL")
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print a script that completes commands, options and paths in your shell."""
    completer = get_completion_class(shell)
    assert completer is not None  # click supports these three
    script = completer(ctx.find_root().command, {}, _PROGRAM, _VARIABLE)
    # Not `source()`: it checks the version of the local bash, while the script may be for another machine.
    with printing():
        click.echo(script.source_template % script.source_vars())
