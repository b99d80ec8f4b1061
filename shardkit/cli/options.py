"""The options that several commands share. Options that belong together form a group."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardkit.cli.output import Output, show_whole_lists
from shardkit.core.dtypes import short_dtype

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from shardkit.operations.parts.part import Part

    _Choice = click.Choice[str]
else:
    _Choice = click.Choice  # which click 8.1 cannot subscribe

PATH = click.Path(readable=False)
"""A path as it was typed, which shells complete. Whoever opens it says what is wrong with it."""

_R = TypeVar("_R")
Command = Callable[..., Any]
Option = Callable[[Command], Command]
Complete = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]
"""Returns what a value may be, of which a person has typed a part."""


def group(*options: Option) -> Option:
    """Return several options as one decorator. Help lists them in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def on_or_off(name: str, *, help: str) -> Option:
    """Return an option that is on by default; the command gets a bool."""
    return click.option(
        name,
        type=click.Choice(["on", "off"]),
        default="on",
        show_default=True,
        callback=lambda _context, _option, value: value == "on",
        help=help,
    )


def completing(words: Callable[[], Iterable[str]], *, and_files: str = "") -> Complete:
    """Return a completer of a value: one of some words, which are looked up when a shell asks.

    Args:
        words: returns them.
        and_files: how the names of files end that may be given too; empty for none.
    """

    def complete(_context: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
        from glob import escape, glob

        from click.shell_completion import CompletionItem

        found = [*words(), *(glob(f"{escape(typed)}*{and_files}") if and_files else ())]
        items = [CompletionItem(word) for word in found if word.startswith(typed)]
        # Where nothing fits, the shell completes folders by itself, in which such files may lie.
        return items or ([CompletionItem(typed, type="file")] if and_files else [])

    return complete


class _DType(_Choice):
    """A choice of dtypes, which may also be written as torch has them: bfloat16, torch.bfloat16."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete the short names, or where none fits, the long ones."""
        short = super().shell_complete(ctx, param, incomplete)
        return short or completing(lambda: ("bfloat16", "float16", "float32"))(ctx, param, incomplete)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(short_dtype(value), param, ctx)


def dtype(name: str, *choices: str, help: str, default: str | None = "keep") -> Option:
    """Return an option for the dtype that floating tensors are converted to; `choices` are allowed too."""
    values = _DType(["keep", *choices, "bf16", "fp16", "fp32"])
    return click.option(name, type=values, default=default, show_default=True, help=help)


dtype_rules = click.option(
    "--dtype-rule",
    "dtype_rules",
    multiple=True,
    metavar="GLOB=DTYPE",
    help="Another dtype for tensors whose name in the output matches; the last that matches wins. Repeatable.",
)
dequantize = click.option(
    "--dequantize",
    is_flag=True,
    help="Make plain bf16 weights of fp8, MXFP4 and NVFP4 ones; otherwise they are refused.",
)


def overwrite(what: str) -> Option:
    """Return `--overwrite`; `what` is what the command writes."""
    return click.option("--overwrite", is_flag=True, help=f"Replace an existing {what}.")


as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as one JSON document; sizes in bytes."
)


def answering(function: Command) -> Command:
    """Add `--json`, `--quiet` and `--verbose`. The command gets an `Output` as `out` instead."""

    @as_json
    @click.option(
        "--quiet", "-q", is_flag=True, help="Print no result and no notes; warnings and errors remain."
    )
    @click.option(
        "--verbose",
        "-v",
        is_flag=True,
        help="Print lists whole, and where in the code an error arose (as with SHARDKIT_DEBUG=1).",
    )
    @wraps(function)
    def command(
        *, as_json: bool, quiet: bool, verbose: bool, no_progress: bool = True, **options: Any
    ) -> None:
        if quiet and verbose:
            raise click.UsageError("--quiet and --verbose exclude each other")
        if quiet and as_json:
            raise click.UsageError("--quiet prints no result, and --json is one: give one of them")
        show_whole_lists(verbose)
        shows_bars = not (as_json or no_progress or quiet)
        function(out=Output(as_json=as_json, shows_bars=shows_bars, is_quiet=quiet), **options)

    return command


def reporting(function: Command) -> Command:
    """Add `--no-progress` to what `answering` adds, for commands that take their time."""
    return click.option(
        "--no-progress",
        is_flag=True,
        envvar="SHARDKIT_NO_PROGRESS",
        show_envvar=True,
        help="Show no progress bars.",
    )(answering(function))


def silence_hub() -> None:
    """Switch off huggingface_hub's bars. This imports it, so it is only for commands that are going to use it."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()


html = click.option(
    "--html",
    "html_file",
    type=PATH,
    metavar="FILE",
    help="Write what there is to see as a page too: one file, for any browser.",
)
page = group(
    html, overwrite("page at FILE of --html, as is done without this; nothing else is ever replaced")
)
picture = click.option("--picture", is_flag=True, help="Draw it in the terminal too.")
follow_links = click.option(
    "--follow-links",
    is_flag=True,
    help="Read links that lead out of the checkpoint's directory as the files that they lead to.",
)
strict = click.option(
    "--strict", is_flag=True, help="Refuse a run directory whose newest checkpoint cannot be taken."
)
dry_run = click.option(
    "--dry-run", "-n", is_flag=True, help="Check everything, say what would be done, write nothing."
)
sha256 = click.option("--sha256", is_flag=True, help="Compute every file's sha256 too, for the manifest.")
jobs = click.option(
    "--jobs",
    type=int,
    metavar="N",
    envvar="SHARDKIT_JOBS",
    show_envvar=True,
    help="Threads; by default the cores that this process may use, from 2 to 8.",
)
max_memory = click.option(
    "--max-memory",
    default="256MiB",
    show_default=True,
    metavar="SIZE",
    envvar="SHARDKIT_MAX_MEMORY",
    show_envvar=True,
    help="Memory for all buffers, e.g. 512MiB, 1GB.",
)
revision = click.option("--revision", metavar="REV", help="Branch, tag or commit of the repo.")


osft = group(
    click.option(
        "--osft",
        type=float,
        metavar="RATIO",
        help="Store weights as factors of which this share of directions is trained, e.g. 0.3.",
    ),
    click.option(
        "--osft-targets",
        metavar="GLOB,...",
        help="Which weights: auto (by the architecture), or globs; !GLOB leaves weights dense. Default auto.",
    ),
    click.option(
        "--osft-rank",
        "osft_ranks",
        multiple=True,
        metavar="GLOB=K|RATIO",
        help="Another number of frozen directions, or share that is trained, for some; repeatable.",
    ),
    click.option(
        "--osft-svd",
        type=click.Choice(["exact", "fp32"]),
        help="exact computes in float64 (default); fp32 is a hundredth as exact.",
    ),
)


parts = group(
    click.option(
        "--part",
        metavar="K/N|env|env/N",
        help="Write this part of the files; env asks the launcher (torchrun, MPI, SLURM, Kubernetes).",
    ),
    click.option(
        "--executor",
        type=click.Choice(["ray"]),
        help="Have all parts written by the workers of a Ray cluster, the one that runs or one on this machine.",
    ),
    click.option(
        "--num-parts",
        type=int,
        metavar="N",
        help="Of the executor; by default as many as run at the same time.",
    ),
)


def _take_part(out: Output, text: str | None) -> Part | None:
    """Return the part that was asked for, and say what it is where the launcher told it."""
    if text is None:
        return None
    from shardkit.cli.errors import typed_command
    from shardkit.operations.parts.part import parse_part

    found = parse_part(text, os.environ)
    if found.found:
        out.say("part", f"{found}, from {found.found}")
    typed = typed_command(click.get_current_context().find_root().obj, {"--part"}, {"--dry-run", "-n"})
    return replace(found, typed=typed)


def carry_out(out: Output, verb: Callable[..., _R], *arguments: str | None, **options: Any) -> _R:
    """Call a verb that can be divided, with a bar and its warnings shown, and stdout kept for its result.

    Args:
        out: where the command prints.
        verb: of the library.
        arguments: its paths.
        options: the rest, with `part` as it was typed.
    """
    part = _take_part(out, options.pop("part"))
    from shardkit.cli.errors import resume_command
    from shardkit.operations.parts.agreement import typed

    again = typed(resume_command(click.get_current_context().find_root().obj))
    # Ray tells on stdout what becomes of its workers.
    with again, redirect_stdout(sys.stderr) if options["executor"] else nullcontext():
        return verb(*arguments, part=part, progress=out.progress(), on_warning=out.warn, **options)


def given(name: str) -> bool:
    """True if a person gave a parameter of the command that runs."""
    source = click.get_current_context().get_parameter_source(name)
    return source is not click.core.ParameterSource.DEFAULT


def rule_sets(*words: str) -> Complete:
    """Return a completer of key rules: these words, the names of shipped sets and TOML files."""

    def shipped() -> Iterable[str]:
        from shardkit.keys.rule_sets import shipped

        return [*words, *(rules.name for rules in shipped())]

    return completing(shipped, and_files=".toml")


def keys(default: str, meaning: str) -> Option:
    """Return `--keys`; `meaning` says what the default stands for."""
    none = "" if default == "none" else "none, "
    words = [default] if default == "none" else [default, "none"]
    return click.option(
        "--keys",
        default=default,
        show_default=True,
        metavar="RULES",
        shell_complete=rule_sets(*words),
        help=f"Key rules: a TOML file, the name of a shipped set, {none}or {default}: {meaning}.",
    )


mesh = group(
    click.option("--world-size", type=int, metavar="N", help="Number of ranks."),
    click.option(
        "--mesh", metavar="AXES", help="Device mesh, e.g. dp_replicate=2,dp_shard=16; default dp_shard=N."
    ),
)
globs = group(
    click.option("--include", multiple=True, metavar="GLOB", help="Only these tensors; repeatable."),
    click.option("--exclude", multiple=True, metavar="GLOB", help="Not these tensors; repeatable."),
)
naming = group(
    click.option(
        "--weights",
        default="model",
        show_default=True,
        metavar="PART",
        help="model, ema, or another part of the checkpoint by its name.",
    ),
    click.option("--root", metavar="PATH", help="Where the model begins, dotted; nothing is guessed."),
    click.option("--strip-prefix", multiple=True, metavar="PREFIX", help="Take this off names; repeatable."),
    click.option("--add-prefix", default="", metavar="PREFIX", help="Put this before every name."),
    click.option("--rename", multiple=True, metavar="REGEX=REPL", help="Rename, in order; repeatable."),
    globs,
    click.option(
        "--fill-from-base",
        multiple=True,
        metavar="GLOB",
        help="Take what the checkpoint lacks of these from the base: whole parts alone; repeatable.",
    ),
    click.option("--allow-missing", is_flag=True, help="Allow tensors of the base to be missing."),
    click.option("--allow-unexpected", is_flag=True, help="Allow tensors that the base does not have."),
)
publishing = group(
    click.option("--push-to-hub", metavar="REPO", help="Upload the finished directory to this repo."),
    click.option("--private", is_flag=True, help="Make the repo private if it does not exist yet."),
    click.option("--branch", metavar="NAME", help="Branch of that repo, created if it does not exist."),
)
recording = group(
    click.option(
        "--manifest", is_flag=True, help="Put shardkit.json, with sizes and digests, into the output."
    ),
    click.option(
        "--manifest-file", type=PATH, metavar="FILE", help="Write the manifest to FILE, outside the output."
    ),
)
writing = group(
    dry_run,
    click.option(
        "--resume/--no-resume",
        default=True,
        show_default=True,
        help="Continue an interrupted run of the same job.",
    ),
)
moving = group(
    click.option(
        "--digest",
        type=click.Choice(["crc32", "none"]),
        default="crc32",
        show_default=True,
        help="Checksum of every tensor and file that is written.",
    ),
    sha256,
    on_or_off(
        "--check-source",
        help="Compare what is read with the checksums in the source; off lets damaged bytes through.",
    ),
    click.option(
        "--source-manifest",
        type=PATH,
        metavar="FILE",
        help="Compare with this manifest of the source too; one in or beside the source is found without this.",
    ),
    jobs,
    max_memory,
)
