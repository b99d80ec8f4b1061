"""The command line: parsing, rendering, exit codes. It calls the library, never the reverse.

Commands are imported when they run; `shardkit --help` imports nothing large except click.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import takewhile
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from shardkit._version import __version__
from shardkit.cli.errors import report, report_usage
from shardkit.cli.output import ANSWERED, REST, printing
from shardkit.errors import ResourceError, Terminated, signal_of

if TYPE_CHECKING:
    from shardkit.pictures.page import Page

_SECTIONS = {
    "Main": {
        "preshard": "Write a Hub model as one file for each rank of a mesh.",
        "consolidate": "Write any trainer's sharded checkpoint as a Hub model.",
        "reshard": "Write a sharded checkpoint for another mesh, including its optimizer.",
        "watch": "Write each checkpoint of a run as a Hub model while the run goes on.",
    },
    "Look": {
        "inspect": "Show the contents of a model or a checkpoint.",
        "verify": "Check that a checkpoint is complete and undamaged.",
        "diff": "Compare two checkpoints of any formats, tensor by tensor.",
        "latest": "Print the path of a run's newest checkpoint that is whole.",
    },
    "Many machines": {
        "commit": "Complete an output from the parts of a job.",
        "status": "Show the progress of uncommitted jobs.",
        "abort": "Remove the uncommitted files of a job.",
    },
    "More": {
        "env": "Show versions and settings, to paste into a bug report.",
        "completion": "Print the script that completes commands in your shell.",
    },
}
"""Heading of `shardkit --help` -> command -> help line; the module `shardkit.cli.<name>` defines it as `command`."""
_COMMANDS = {name: line for section in _SECTIONS.values() for name, line in section.items()}
_SHARED = {
    "abort": "parts",
    "commit": "parts",
    "completion": "shell",
    "env": "shell",
    "status": "parts",
}
"""Command -> module, for modules with several commands, which are called `<name>_command`."""
_LINES = {
    "AbortResult": "parts.abort_lines",
    "CommitResult": "parts.commit_lines",
    "ConsolidateResult": "consolidate.render",
    "DiffResult": "diff.render",
    "Environment": "shell.env_lines",
    "InspectResult": "inspect.render",
    "LatestResult": "latest.render",
    "PreshardResult": "preshard.render",
    "ReshardResult": "reshard.render",
    "StatusResult": "parts.status_lines",
    "VerifyResult": "verify.render",
    "WatchResult": "watch.render",
}
"""Class of a result -> the function below `shardkit.cli` that renders it."""
_FLAGS = frozenset("-q --quiet -v --verbose --json --no-progress".split())
"""Options of most commands, which some users type before the command."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_NO_ARGUMENTS: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""The exception of click 8.2 and newer for a group without a command, which shows the help."""


def lines_of(result: object) -> list[str] | None:
    """Return a result as lines for `str` and notebooks; None if no command prints such results."""
    module, _, function = _LINES.get(type(result).__name__, "").partition(".")
    if not module:
        return None
    lines: list[str] = getattr(import_module(f"shardkit.cli.{module}"), function)(result)
    return [line.replace(REST, "to_json()") for line in lines]


def page_of(result: object) -> Page:
    """Return the page of a result, as `--html` writes it. The module of the result's command makes it.

    Pages of inspect, preshard and verify draw the result's `holdings`: which rank and which file holds which bytes of
    which tensor. These are computed on request only, with `holdings=True`; inspect and preshard compute missing ones
    from the files. The page of diff needs none.

    Raises:
        UsageError: holdings are missing from a result of verify, or of a preshard that wrote no output.
    """
    verb = type(result).__name__.removesuffix("Result").lower()
    page: Page = import_module(f"shardkit.cli.{verb}").page_of(result)
    return page


class Commands(click.Group):
    """A group that imports commands lazily, and maps errors to exit codes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the arguments. Errors need them, for `--json` and for the command that resumes."""
        if args == sys.argv[1:]:  # the process runs nothing but this command
            _keep_freed_memory()
        args = _move_flags(args)
        ctx.obj = tuple(args)
        try:
            with printing():  # the help and the version
                return super().parse_args(ctx, args)
        except ResourceError as error:
            ctx.exit(report(error, ctx.obj))
        except click.UsageError as error:
            if isinstance(error, _NO_ARGUMENTS):
                raise
            ctx.exit(report_usage(error, ctx, ctx.obj))

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the help text."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in _COMMANDS:
            return None
        module = import_module(f"shardkit.cli.{_SHARED.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, f"{cmd_name}_command" if cmd_name in _SHARED else "command")
        return command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, then the options."""
        self.format_commands(ctx, formatter)
        click.Command.format_options(self, ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        width = max(map(len, _COMMANDS))
        for heading, commands in _SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), line) for name, line in commands.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command, and turn all errors except those of click into an exit code."""
        _replace_closed_streams()
        try:
            with signals_raised(), _rare_garbage_collection():
                super().invoke(ctx)
                with printing():
                    sys.stdout.flush()
        except (click.exceptions.Exit, click.Abort):
            raise
        except click.ClickException as error:
            if isinstance(error, _NO_ARGUMENTS):
                raise
            ctx.exit(report_usage(error, ctx, ctx.obj))
        except KeyboardInterrupt as error:
            # After the result nothing more is printed: the work is done, and with --json stdout is one document.
            ctx.exit(128 + signal_of(error) if ANSWERED in ctx.meta else report(error, ctx.obj))
        except Exception as error:
            ctx.exit(report(error, ctx.obj))


def _move_flags(args: list[str]) -> list[str]:
    """Move options of a command that precede it after it, as in `shardkit -q preshard MODEL`."""
    flags = list(takewhile(_FLAGS.__contains__, args))
    rest = args[len(flags) :]
    return [*rest[:1], *flags, *rest[1:]]


def _replace_closed_streams() -> None:
    """Replace streams that the caller closed, which are None in Python, by ones that discard output."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))


def _keep_freed_memory() -> None:
    """Have malloc keep up to 64 MiB of freed memory in each of its arenas, including that of arrays of some MiB.

    By default it returns that to the system, and the next array of the same size costs a page fault for each 4 KiB: a
    third of the time of dequantising. One of the two settings alone makes it slower. The user's own settings count; other
    C libraries have no `mallopt`.
    """
    if any(name.startswith("MALLOC_") and name.endswith("_THRESHOLD_") for name in os.environ):
        return
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    set_option(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that glibc allows
    set_option(_M_TRIM_THRESHOLD, 64 << 20)


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Run the garbage collector after 50,000 new objects instead of 700, as there is hardly any garbage.

    With very many chunks, a tenth of the time would otherwise be spent traversing the same objects.
    """
    before = gc.get_threshold()
    gc.set_threshold(50_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def signals_raised() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGINT and `Terminated` for SIGTERM. A second signal ends the process at once.

    Ending immediately loses no finished work. A job stores a *note* for each file that it has finished, after the file
    itself is durable (`files.output`); the same command, when it runs again, skips the files with notes and writes the rest.
    """
    if threading.current_thread() is not threading.main_thread():  # signal.signal refuses
        yield
        return
    # An ignored signal stays ignored, as `nohup` and background jobs of a plain shell expect.
    chosen = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) is not signal.SIG_IGN]
    handler = _SignalHandler()
    before = {signum: signal.signal(signum, handler) for signum in chosen}
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)


class _SignalHandler:
    def __init__(self) -> None:
        self._was_called = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self._was_called:
            os._exit(128 + signum)
        self._was_called = True
        raise Terminated if signum == signal.SIGTERM else KeyboardInterrupt


@click.command(
    cls=Commands,
    name="shardkit",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Examples:
  shardkit preshard Qwen/Qwen3-8B --world-size 32 --dry-run
  shardkit consolidate last.ckpt/
  shardkit inspect Qwen3-8B-dp_shard32

COMMAND -h shows the options that you need first, COMMAND --help all of them.""",
)
@click.version_option(__version__, "-V", "--version", message="shardkit %(version)s")
def main() -> None:
    """Move model weights between layouts: Hub models, per-rank shards, any mesh."""
