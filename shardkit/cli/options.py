"""Options that several commands share, in groups."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from shardkit.cli.output import Output, show_details, show_whole_lists
from shardkit.core.dtypes import short_dtype

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from shardkit.operations.parts.part import Part

    _Choice = click.Choice[str]
else:
    _Choice = click.Choice  # click 8.1 does not support subscripts here

PATH = click.Path(readable=False)
"""A path as typed, which shells complete. Opening it reports errors."""

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]
Complete = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]
"""Returns the completions of a partial value."""


SECTIONS = (
    "Layout",
    "Input",
    "Names",
    "Dtypes",
    "Output",
    "Publishing",
    "Checks",
    "Many machines",
    "OSFT",
    "General",
)
"""Headings of options, in the order of help, docs/commands.md and shell completion."""

_MAX_NAME = 24
"""Width of the column of option names; the text for a longer name begins on the next line."""
_IS_SHORT = "shardkit.help.is_short"


class SectionedOption(click.Option):
    """An option below a heading.

    Args:
        section: one of SECTIONS.
        first: True for an option for new users, which the short help, `-h`, shows, too.
    """

    def __init__(self, *args: Any, section: str, first: bool = False, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.section, self.first = section, first


def option(section: str, *names: str, first: bool = False, **rest: Any) -> Decorator:
    """Return an option below a heading, as a decorator."""
    return click.option(*names, cls=SectionedOption, section=section, first=first, **rest)


def _section(param: click.Parameter) -> str:
    return getattr(param, "section", SECTIONS[-1])  # click adds --help


def sections(context: click.Context) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the headings of a command's options, each with its lines (name, text).

    Args:
        context: context of the command; for the short help, only options for new users are shown.
    """
    options = [option for option in context.command.get_params(context) if isinstance(option, click.Option)]
    if _IS_SHORT in context.meta:
        options = [option for option in options if getattr(option, "first", False)]
    for section in SECTIONS:
        records = [option.get_help_record(context) for option in options if _section(option) == section]
        if shown := [record for record in records if record is not None]:
            yield section, shown


def _place(param: click.Parameter) -> int:
    return SECTIONS.index(_section(param)) if isinstance(param, click.Option) else -1


def _show_short(context: click.Context, _option: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        context.meta[_IS_SHORT] = True
        click.echo(context.get_help())
        context.exit()


class Verb(click.Command):
    """A command with headings for options: `-h` shows those for new users, `--help` shows all."""

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        if all(getattr(param, "first", True) for param in self.params):
            return  # -h and --help are a single option of click
        text = "Show the options that you need first, and exit."
        self.params.append(
            SectionedOption(
                ["-h"],
                section=SECTIONS[-1],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_short,
                help=text,
            )
        )

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return arguments, then options by their sections."""
        return sorted(super().get_params(ctx), key=_place)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options below their headings, with all texts in one column."""
        shown = list(sections(ctx))
        names = [name for _, records in shown for name, _ in records]
        width = max(len(name) for name in names if len(name) <= _MAX_NAME)
        for section, records in shown:
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), text) for name, text in records], col_max=width)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples; the short help also refers to the full one."""
        super().format_epilog(ctx, formatter)
        if _IS_SHORT in ctx.meta:
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(f"All options: {ctx.command_path} --help")


def group(*options: Decorator) -> Decorator:
    """Combine options into one decorator. Help lists them in this order."""

    def add(command: Function) -> Function:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def on_or_off(name: str, *, help: str) -> Decorator:
    """Return an on/off option that is on by default; the command gets a bool."""
    return option(
        "Checks",
        name,
        type=click.Choice(["on", "off"]),
        default="on",
        show_default=True,
        callback=lambda _context, _option, value: value == "on",
        help=help,
    )


def completing(words: Callable[[], Iterable[str]], *, and_files: str = "") -> Complete:
    """Return a completer for a value that is one of some words, which are computed lazily.

    Args:
        words: returns the words.
        and_files: suffix of files that are accepted too; empty for none.
    """

    def complete(_context: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
        from glob import escape, glob

        from click.shell_completion import CompletionItem

        candidates = [*words(), *(glob(f"{escape(typed)}*{and_files}") if and_files else ())]
        items = [CompletionItem(word) for word in candidates if word.startswith(typed)]
        # Without a match, the shell completes folders, which may contain such files.
        return items or ([CompletionItem(typed, type="file")] if and_files else [])

    return complete


class _DTypeChoice(_Choice):
    """A choice of dtypes, which also accepts torch's names: bfloat16, torch.bfloat16."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete short names, or long ones if no short one matches."""
        short = super().shell_complete(ctx, param, incomplete)
        return short or completing(lambda: ("bfloat16", "float16", "float32"))(ctx, param, incomplete)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(short_dtype(value), param, ctx)


def dtype(name: str, *choices: str, help: str) -> Decorator:
    """Return an option for the target dtype of floating tensors; `choices` are additional values."""
    values = _DTypeChoice(["keep", *choices, "bf16", "fp16", "fp32"])
    return option("Dtypes", name, first=True, type=values, default="keep", show_default=True, help=help)


dtype_rules = option(
    "Dtypes",
    "--dtype-rule",
    "dtype_rules",
    multiple=True,
    metavar="GLOB=DTYPE",
    help="Dtype of tensors whose name in the output matches the glob; the last match wins. Repeatable.",
)
dequantize = option(
    "Dtypes",
    "--dequantize",
    is_flag=True,
    help="Convert fp8, MXFP4 and NVFP4 weights to plain bf16; otherwise they are refused.",
)


def overwrite(what: str, *, first: bool = True) -> Decorator:
    """Return `--overwrite`; `what` describes the output."""
    return option("Output", "--overwrite", first=first, is_flag=True, help=f"Replace an existing {what}.")


exist_ok = option(
    "Output",
    "--exist-ok",
    is_flag=True,
    help="If OUTPUT exists, leave it unchanged and exit with 0. For commands that a launcher restarts.",
)
as_json = option(
    "General",
    "--json",
    "as_json",
    first=True,
    is_flag=True,
    help="Print the result as one JSON document; sizes in bytes.",
)


def answering(function: Function) -> Function:
    """Add `--json`, `--quiet` and `--verbose`. The command gets an `Output` as `out` instead."""

    @as_json
    @option(
        "General",
        "--quiet",
        "-q",
        first=True,
        is_flag=True,
        help="Print only warnings and errors; with --json the result too.",
    )
    @option(
        "General",
        "--verbose",
        "-v",
        first=True,
        is_flag=True,
        help="Print each step, and complete lists.",
    )
    @wraps(function)
    def command(
        *, as_json: bool, quiet: bool, verbose: bool, no_progress: bool = True, **options: Any
    ) -> None:
        if quiet and verbose:
            raise click.UsageError("--quiet and --verbose exclude each other")
        show_whole_lists(verbose)
        if verbose:
            show_details()
        shows_bars = not (as_json or no_progress or quiet)
        out = Output(as_json=as_json, shows_bars=shows_bars, is_quiet=quiet)
        out.watch()
        function(out=out, **options)

    return command


def reporting(function: Function) -> Function:
    """Add `--no-progress`, and the options of `answering`, for long-running commands."""
    return option(
        "General",
        "--no-progress",
        is_flag=True,
        envvar="SHARDKIT_NO_PROGRESS",
        show_envvar=True,
        help="Show no progress.",
    )(answering(function))


def silence_hub() -> None:
    """Disable huggingface_hub's bars, unless the user has set its variable.

    It reads the variable when it is imported, which happens later and only in jobs that use the Hub.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


html = option(
    "Output",
    "--html",
    "html_file",
    first=True,
    type=PATH,
    metavar="FILE",
    help="Also write the result as a page: one file, for any browser.",
)
picture = option("Output", "--picture", first=True, is_flag=True, help="Also draw it in the terminal.")
follow_links = option(
    "Input",
    "--follow-links",
    is_flag=True,
    help="Follow links that leave the checkpoint's directory.",
)
strict = option(
    "Input", "--strict", is_flag=True, help="Warnings are errors (exit code 3), before an output appears."
)
dry_run = option(
    "Output",
    "--dry-run",
    "-n",
    first=True,
    is_flag=True,
    help="Check everything, print what would be done, write nothing.",
)
sha256 = option("Checks", "--sha256", is_flag=True, help="Compute every file's sha256 too, for the manifest.")
jobs = option(
    "General",
    "--jobs",
    type=int,
    metavar="N",
    envvar="SHARDKIT_JOBS",
    show_envvar=True,
    help="Threads; by default the cores that this process may use, from 2 to 8.",
)
max_memory = option(
    "General",
    "--max-memory",
    default="256MiB",
    show_default=True,
    metavar="SIZE",
    envvar="SHARDKIT_MAX_MEMORY",
    show_envvar=True,
    help="Memory for all buffers, e.g. 512MiB, 1GB.",
)
revision = option("Input", "--revision", metavar="REV", help="Branch, tag or commit of the repo.")


parts = group(
    option(
        "Many machines",
        "--part",
        metavar="K/N|env|env/N",
        help="Write this part of the files; env: as the launcher says (torchrun, MPI, SLURM, Kubernetes).",
    ),
    option(
        "Many machines",
        "--executor",
        type=click.Choice(["ray"]),
        help="Write all parts on a Ray cluster: the running one, or a local one.",
    ),
    option(
        "Many machines",
        "--num-parts",
        type=int,
        metavar="N",
        help="Number of Ray tasks; by default as many as can run at the same time.",
    ),
)


def _choose_part(out: Output, text: str | None) -> Part | None:
    """Return the requested part; print it if it comes from the launcher."""
    if text is None:
        return None
    from shardkit.operations.parts.part import parse_part

    part = parse_part(text, os.environ)
    if part.found:
        out.say("part", f"{part}, from {part.found}")
    return part


@contextmanager
def divisible(out: Output, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Give the keywords of a verb that supports parts, while stdout is reserved for the result.

    Args:
        out: output of the command, which shows the bar and the warnings.
        options: options of the command, with `part` as typed.
    """
    part = _choose_part(out, options["part"])
    from shardkit.cli.errors import typed_command
    from shardkit.operations.parts.agreement import typed

    args = click.get_current_context().find_root().obj
    again = typed(typed_command(args, {"--part"}, {"--dry-run", "-n"}))
    # Ray prints the status of its workers on stdout.
    with again, redirect_stdout(sys.stderr) if options["executor"] else nullcontext():
        yield {**options, "part": part, "progress": out.progress(), "on_warning": out.warn}


def keys(default: str, meaning: str) -> Decorator:
    """Return `--keys`; `meaning` explains the default."""
    none = "" if default == "none" else "none, "
    words = [default] if default == "none" else [default, "none"]

    def completions() -> Iterable[str]:
        from shardkit.keys.rule_sets import shipped_sets

        return [*words, *(rules.name for rules in shipped_sets())]

    return option(
        "Names",
        "--keys",
        default=default,
        show_default=True,
        metavar="RULES",
        shell_complete=completing(completions, and_files=".toml"),
        help=f"Key rules: a TOML file, the name of a shipped set, {none}or {default}: {meaning}.",
    )


mesh = group(
    option("Layout", "--world-size", first=True, type=int, metavar="N", help="Number of ranks."),
    option(
        "Layout",
        "--mesh",
        first=True,
        metavar="AXES",
        help="Device mesh, e.g. dp_replicate=2,dp_shard=16; default dp_shard=N.",
    ),
)
globs = group(
    option(
        "Names",
        "--include",
        multiple=True,
        metavar="GLOB",
        help="Only these tensors; repeatable.",
    ),
    option("Names", "--exclude", multiple=True, metavar="GLOB", help="Not these tensors; repeatable."),
)
naming = group(
    option(
        "Input",
        "--weights",
        default="model",
        show_default=True,
        metavar="PART",
        help="model, ema, eval (of a schedule-free optimizer), or another part of the checkpoint by its name.",
    ),
    option("Names", "--root", metavar="PATH", help="Where the model begins, dotted, instead of a guess."),
    option(
        "Names", "--strip-prefix", multiple=True, metavar="PREFIX", help="Remove this from names; repeatable."
    ),
    option("Names", "--add-prefix", default="", metavar="PREFIX", help="Put this before every name."),
    option("Names", "--rename", multiple=True, metavar="REGEX=REPL", help="Rename, in order; repeatable."),
    globs,
    option(
        "Names",
        "--fill-from-base",
        multiple=True,
        metavar="GLOB",
        help="Copy missing tensors that match from the base, only whole parts; repeatable.",
    ),
    option("Names", "--allow-missing", is_flag=True, help="Allow tensors of the base to be missing."),
    option("Names", "--allow-unexpected", is_flag=True, help="Allow tensors that the base does not have."),
)
publishing = group(
    option(
        "Publishing",
        "--push-to-hub",
        first=True,
        metavar="REPO",
        help="Upload the finished directory to this repo.",
    ),
    option(
        "Publishing",
        "--private",
        first=True,
        is_flag=True,
        help="Make the repo private if it does not exist yet.",
    ),
    option(
        "Publishing", "--branch", metavar="NAME", help="Branch of that repo, created if it does not exist."
    ),
)
recording = group(
    option(
        "Output",
        "--manifest",
        is_flag=True,
        help="Add shardkit.json, with sizes and digests, to the output.",
    ),
    option(
        "Output",
        "--manifest-file",
        type=PATH,
        metavar="FILE",
        help="Write the manifest to FILE, outside the output.",
    ),
)
moving = group(
    option(
        "Checks",
        "--digest",
        type=click.Choice(["crc32", "none"]),
        default="crc32",
        show_default=True,
        help="Checksum of all written tensors and files.",
    ),
    sha256,
    on_or_off(
        "--check-source",
        help="Compare data with the checksums in the source; off copies damaged bytes.",
    ),
    option(
        "Checks",
        "--source-manifest",
        type=PATH,
        metavar="FILE",
        help="Also compare with this manifest of the source; one in or next to the source is found automatically.",
    ),
    jobs,
    max_memory,
    option(
        "General",
        "--scratch",
        type=PATH,
        metavar="DIR",
        help="Directory for files to be sent to a store; by default next to the cache.",
    ),
)
