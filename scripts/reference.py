"""docs/commands.md: every command with its options, made from click.

python scripts/reference.py            writes the page anew
python scripts/reference.py --check    fails where it is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from shardkit.cli import main as shardkit
from shardkit.cli.shell import STATUS, VARIABLES

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
_HEAD = """\
# Commands

Every command and option, made from the program itself: `shardkit COMMAND --help` and `man shardkit` say the same.
[cli.md](cli.md) explains what they do and why; the [guides](guides/index.md) show them at work.
"""


def page() -> str:
    """Return the page."""
    root = click.Context(shardkit, info_name="shardkit", **shardkit.context_settings)
    contexts = list(_contexts(shardkit, root))
    lists = [
        "| command | what it does |",
        "|---|---|",
        *(
            f"| [`{each.command_path}`](#{_anchor(each.command_path)}) | {each.command.get_short_help_str(200)} |"
            for each in contexts
        ),
    ]
    ends = [
        "## Exit codes",
        "",
        *_table(("code", "meaning"), STATUS),
        "",
        "## Environment variables",
        "",
        *_table(("variable", "effect"), VARIABLES),
    ]
    parts = [_HEAD, "\n".join(lists) + "\n", *map(_command, contexts), "\n".join(ends) + "\n"]
    return "\n".join(parts)


def _contexts(group: click.Group, around: click.Context) -> Iterator[click.Context]:
    for name in group.list_commands(around):
        command = group.get_command(around, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=around)
        if isinstance(command, click.Group):
            yield from _contexts(command, context)
        else:
            yield context


def _command(context: click.Context) -> str:
    command = context.command
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    texts = [" ".join(text.split()) for text in (command.help or "").replace("\b", "").split("\n\n")]
    options = (param for param in command.get_params(context) if isinstance(param, click.Option))
    records = (option.get_help_record(context) for option in options if "--help" not in option.opts)
    examples = (command.epilog or "").replace("\b", "").strip("\n").splitlines()
    shown = [line[2:] for line in examples if line.startswith("  ")]
    lines = [f"## {context.command_path}", "", "```text", usage, "```", ""]
    lines += [line for text in texts for line in (*_folded(text), "")]
    lines += [*_table(("option", "meaning"), (record for record in records if record)), ""]
    return "\n".join([*lines, "```bash", *shown, "```", ""])


def _folded(text: str, width: int = 118) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _table(head: tuple[str, str], rows: object) -> list[str]:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    for term, text in rows:  # type: ignore[attr-defined]
        cells = term.replace("|", "\\\\|"), " ".join(text.split()).replace("|", "\\\\|").replace("<", "&lt;")
        lines.append(f"| `{cells[0]}` | {cells[1]} |")
    return lines


def _anchor(path: str) -> str:
    return path.replace(" ", "-")


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.is_file() and PAGE.read_text() == page() else "python scripts/reference.py")
    PAGE.write_text(page())
