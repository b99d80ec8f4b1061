"""`shardkit completion` and `shardkit help`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from shardkit.core.text import escape, suggestion

_PROGRAM, _VARIABLE = "shardkit", "_SHARDKIT_COMPLETE"


@click.command(
    name="completion",
    epilog="""\b
Examples:
  shardkit completion bash > ~/.local/share/bash-completion/completions/shardkit
  shardkit completion zsh > "${fpath[1]}/_shardkit"
  shardkit completion fish > ~/.config/fish/completions/shardkit.fish

They count in the next shell that is opened; eval "$(shardkit completion bash)" is for this one. bash has to be 4.4 or
newer.""",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print a script that has a shell complete commands, options and paths."""
    found = get_completion_class(shell)
    assert found is not None  # click brings these three
    script = found(ctx.find_root().command, {}, _PROGRAM, _VARIABLE)
    # Not `source()`: it looks for the version of a bash, which may be that of another machine.
    click.echo(script.source_template % script.source_vars())


@click.command(
    name="help",
    epilog="""\b
Examples:
  shardkit help
  shardkit help consolidate
  shardkit help keys check""",
)
@click.argument("names", nargs=-1, metavar="[COMMAND]...")
@click.pass_context
def help_command(ctx: click.Context, names: tuple[str, ...]) -> None:
    """Show what a command does and its options: as COMMAND --help."""
    at = ctx.find_root()
    for name in names:
        group = at.command
        known = group.list_commands(at) if isinstance(group, click.Group) else []
        found = group.get_command(at, name) if isinstance(group, click.Group) and name in known else None
        if found is None:
            at.fail(f"No such command {escape(name)!r}.{suggestion(name, known)}")
        at = click.Context(found, info_name=name, parent=at)
    click.echo(at.get_help())
