"""`shardkit env`."""

from __future__ import annotations

import click

from shardkit.cli import options as opt
from shardkit.cli.output import Output, facts
from shardkit.core.text import escape, format_size
from shardkit.operations.environment import Environment, environment


@click.command(
    cls=opt.Verb,
    name="env",
    epilog="""\b
Examples:
  shardkit env
  shardkit env --json > environment.json""",
)
@opt.answering
def command(*, out: Output) -> None:
    """Show versions and settings, to paste into a bug report.

    Of the HF_* variables only HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE are shown with their values.
    """
    out.answer(environment(), render)


def render(found: Environment) -> list[str]:
    """Return an environment as lines for people."""
    memory = "unknown" if found.memory_bytes is None else format_size(found.memory_bytes)
    return facts(
        [
            ("shardkit", found.shardkit),
            ("python", found.python),
            ("platform", found.platform),
            *((name, version or "not installed") for name, version in found.packages.items()),
            ("cpus", str(found.num_cpus)),
            ("memory", memory),
            *((escape(name), escape(value)) for name, value in found.huggingface.items()),
            *(("note", note) for note in found.notes),
        ]
    )
