"""Error messages and exit codes.

0   done                       5    disk, permission, memory or network
1   the answer is no           70   our bug
2   usage                      130  Ctrl-C, 143 SIGTERM
3   bad input                  141  the reader of our output went away
4   incomplete, run again
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import traceback
from collections.abc import Collection, Sequence
from signal import Signals
from typing import Any

import click

from shardkit.cli.output import Output, remark, shown_lines, silence
from shardkit.core.text import escape, in_shell, suggestion
from shardkit.errors import (
    Interrupted,
    ResourceError,
    ShardkitError,
    UsageError,
    missing_torch_error,
    signal_of,
)

_ENVIRONMENT, _BUG, _BROKEN_PIPE = 5, 70, 141
_UNKNOWN, _NO_CHOICE = re.compile(r"No such command '(.*)'"), re.compile(r"'(.*)' is not one of ")
"""Messages of all versions of click."""
_NO_THREAD = "can't start new thread"
"""Message of Python's RuntimeError."""


def report(error: BaseException, args: Sequence[str]) -> int:
    """Print an error and return the exit code.

    Args:
        error: raised by a command.
        args: the arguments of the program.
    """
    if isinstance(error, BrokenPipeError):
        silence(sys.stdout)
        return _BROKEN_PIPE
    out = Output(as_json="--json" in args)
    content, is_verbose = describe(error), not {"-v", "--verbose"}.isdisjoint(args)
    resume = resume_command(args) if isinstance(error, Interrupted) else None
    if resume is not None:
        content = {**content, "hint": None, "resume_command": resume}
    _print_error(out, error, content, resume, is_verbose=is_verbose)
    if out.as_json:
        try:
            out.document(content)
            sys.stdout.flush()
        except (OSError, ResourceError):  # already reported above
            silence(sys.stdout)
    return int(content["exit_code"])


_NOT_DIVIDED = (
    "commands that only read, such as verify and diff, are not divided: run them in one process. The parts of preshard, "
    "consolidate and reshard compare data with the checksums in the source"
)
_IN_A_JOB = (
    "prepare(model, model, osft=0.3) and finalize compute the factors on all ranks of a job, save writes them, and further "
    "runs start from there"
)
_ALWAYS_RESUMED = "the same command resumes what was finished, on any host; `shardkit abort OUTPUT` removes it, to start over"
REMOVED = {
    "cache": "`shardkit env` shows the directory of the cache: remove it with rm -r",
    "gc": "shardkit abort OUTPUT removes what was not committed; the store's own tool removes replaced data, whose prefix "
    "--overwrite and shardkit status print; a lifecycle rule of the bucket ends unfinished uploads",
    "help": "shardkit COMMAND --help shows all options of a command, `shardkit --help` lists the commands",
    "status --abort": "shardkit abort OUTPUT removes what was not committed",
    "verify --against": "shardkit diff A B compares the weights of two checkpoints",
    "verify --ask-class": "verify asks the class of a Hub model wherever transformers is installed",
    "verify --read": "verify --full reads all bytes",
    "verify --rounded": "shardkit diff A B --as bf16 compares B with A rounded",
    "verify --seed": "verify --full reads all bytes",
    "verify --store": "verify --full reads all bytes",
    "--allow-unsafe-store": "a store without conditional requests is refused: write into a local directory, and copy that "
    "with the store's own tool",
    "--answers": _NOT_DIVIDED,
    "--part": _NOT_DIVIDED,
    "--no-resume": _ALWAYS_RESUMED,
    "--resume": _ALWAYS_RESUMED,
    "--resume-from": _ALWAYS_RESUMED,
    "--osft": _IN_A_JOB,
    "--osft-targets": _IN_A_JOB,
    "--osft-rank": _IN_A_JOB,
    "--osft-svd": _IN_A_JOB,
    "keys": "preshard and consolidate with --keys RULES --dry-run show every name and who decided it, and rules that match "
    "nothing",
    "manifest": "preshard, reshard and `consolidate --manifest` write manifests with their output; those that this "
    "command wrote are still read",
    "--check": "data are compared while they move (--check-source); for an answer before that, run shardkit "
    "verify on the checkpoint first",
    "preshard --device": "verl starts from the Hub's files",
}
"""Feature of earlier versions -> replacement. A key is a command, its option ("verify --x"), or an option of any."""


def report_usage(error: click.ClickException, root: click.Context, args: Sequence[str]) -> int:
    """Print an error of click in the usual form; return the exit code.

    Args:
        error: an error of click.
        root: the context of `shardkit` itself.
        args: the arguments of the program.
    """
    context = getattr(error, "ctx", None) or typed_context(root, args)  # not every error of click has one
    # click's own suggestion has another form: `Did you mean`.
    plain = error.message if isinstance(error, click.NoSuchOption) or _UNKNOWN.match(error.message) else None
    text = " ".join((plain or error.format_message()).split()).rstrip(".")
    text = f"{text[:1].lower()}{text[1:]}"
    if way := _replacement(error, context):
        return report(UsageError(text, hint=way), args)
    return report(
        UsageError(
            f"{text}{_suggestion(error, context)}",
            problems=[
                f"usage: {context.command_path} {' '.join(context.command.collect_usage_pieces(context))}"
            ],
            hint=f"`{context.command_path} --help` shows its options",
        ),
        args,
    )


def _replacement(error: click.ClickException, context: click.Context) -> str | None:
    """Return the replacement of a removed command or option; None for any other error."""
    if match := _UNKNOWN.match(error.message):
        return REMOVED.get(match[1])
    option = getattr(error, "option_name", "")
    return REMOVED.get(f"{context.info_name} {option}") or REMOVED.get(option)


def typed_context(root: click.Context, args: Sequence[str]) -> click.Context:
    """Return the context of the command in the arguments, without parsing its options."""
    context = root
    for name in args:
        group = context.command
        command = group.get_command(context, name) if isinstance(group, click.Group) else None
        if command is not None:
            context = click.Context(command, info_name=name, parent=context)
    return context


def _suggestion(error: click.ClickException, context: click.Context) -> str:
    """Return a suggestion for a misspelled word."""
    command = context.command
    if isinstance(error, click.NoSuchOption):
        names = [name for param in command.get_params(context) for name in param.opts + param.secondary_opts]
        return suggestion(error.option_name, (name for name in names if name.startswith("-")))
    if (match := _UNKNOWN.match(error.message)) and isinstance(command, click.Group):
        return suggestion(match[1], command.list_commands(context))
    kind = error.param.type if isinstance(error, click.BadParameter) and error.param else None
    match = _NO_CHOICE.match(error.message)
    return suggestion(match[1], map(str, kind.choices)) if match and isinstance(kind, click.Choice) else ""


def describe(error: BaseException) -> dict[str, Any]:
    """Return any error in the form of `ShardkitError.to_json()`."""
    if isinstance(error, ShardkitError):
        return error.to_json()
    if isinstance(error, KeyboardInterrupt):
        number = signal_of(error)
        return _error_json(
            "Interrupted", f"interrupted: stopped by {Signals(number).name}", None, 128 + number
        )
    if isinstance(error, MemoryError):
        hint = "lower --max-memory or --jobs, or use a machine with more memory"
        return _error_json("ResourceError", "out of memory", hint, _ENVIRONMENT)
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        hint = "`ulimit -v` limits memory, `ulimit -u` processes: raise what is reached, or lower --jobs"
        return _error_json("ResourceError", "a system limit prevents starting threads", hint, _ENVIRONMENT)
    if isinstance(error, ImportError) and (lacking := missing_torch_error(error)):
        return lacking.to_json()
    if isinstance(error, FileNotFoundError) and error.filename is None and _has_no_cwd():
        return _error_json(
            "ResourceError", "the current directory is gone", "cd to one that exists", _ENVIRONMENT
        )
    if isinstance(error, OSError):
        place = f"{escape(os.fsdecode(error.filename))}: " if isinstance(error.filename, (str, bytes)) else ""
        return _error_json("ResourceError", f"{place}{error.strerror or error}", None, _ENVIRONMENT)
    message = f"{type(error).__name__}: {escape(str(error))}"
    hint = "please report it with the output of `shardkit env`; SHARDKIT_DEBUG=1 shows where it happened"
    return _error_json("InternalError", message, hint, _BUG)


def _has_no_cwd() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _error_json(name: str, message: str, hint: str | None, code: int) -> dict[str, Any]:
    return {"error": name, "message": message, "problems": [], "hint": hint, "exit_code": code}


def _print_error(
    out: Output, error: BaseException, content: dict[str, Any], resume: str | None, *, is_verbose: bool
) -> None:
    if os.environ.get("SHARDKIT_DEBUG") not in (None, "", "0"):
        whole = traceback.TracebackException.from_exception(error)
        lines = list(whole.format())
        # The hint of the error follows below, in terms of the command line.
        way = "".join(lines[: len(lines) - len(list(whole.format_exception_only()))]).rstrip()
        if way:
            remark(way)
    if content["exit_code"] == _BUG:
        out.say("internal error", f"{content['message']}; {content['hint']}")
        return
    label, _, rest = str(content["message"]).partition(": ")
    out.say(*(("interrupted", rest) if label == "interrupted" else ("error", content["message"])))
    problems = content["problems"]
    for line in problems if is_verbose else shown_lines(problems, spreads=True):
        out.detail(line)
    if content["hint"]:
        hint, *code = str(content["hint"]).split("\n")
        out.say("hint", hint)
        for line in code:
            out.detail(line.strip(), is_code=True)
    if resume is not None:
        out.say("resume", resume)


def resume_command(args: Sequence[str]) -> str:
    """Return the command that resumes an interrupted one: the same one again, quoted for the shell."""
    return typed_command(args, (), ())


def typed_command(args: Sequence[str], without: Collection[str], flags: Collection[str]) -> str:
    """Return the current command, quoted for the shell.

    Args:
        args: the arguments of the program.
        without: options to leave out, with their values.
        flags: options without a value to leave out.
    """
    kept, rest = [*_program()], iter(args)
    for arg in rest:
        if arg in without:
            next(rest, None)
        elif arg not in flags and not arg.startswith(tuple(f"{name}=" for name in without)):
            kept.append(arg)
    return " ".join(map(in_shell, kept))


def _program() -> list[str]:
    """Return the program: a console script, or `python -m shardkit`."""
    script = sys.argv[0]
    if os.path.basename(script) == "__main__.py":
        return sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    name = os.path.basename(script)
    path = shutil.which(name)
    with contextlib.suppress(FileNotFoundError):  # the working directory may have been removed
        if path is not None and os.path.realpath(path) == os.path.realpath(script):
            return [name]
    return [script]
