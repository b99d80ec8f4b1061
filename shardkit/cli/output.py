"""Everything that a command prints: its result on stdout; notes, warnings, errors and bars on stderr."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeVar

import click

from shardkit._folding import FoldedNames, fold_lines
from shardkit.core.dtypes import short_dtype
from shardkit.core.text import LISTS_WHOLE, MIB, count, escape, format_size, listed
from shardkit.errors import ResourceError

if TYPE_CHECKING:
    from shardkit.cli.progress import ByteBar, ByteLines
    from shardkit.core.result import Result
    from shardkit.core.threads import Progress
    from shardkit.keys.expressions import FusedTensors, NamedTensor
    from shardkit.operations.commit import CommitResult
    from shardkit.operations.parts.results import PartResult, WriteResult
    from shardkit.pictures.glyphs import Glyphs
    from shardkit.pictures.page import Page

MAX_LINES = 20
"""Maximum lines of a list; --verbose and --json show all."""

REST = "-v or --json"
"""The options that show a complete list."""

MAX_COPIED = 8
"""Maximum names of copied files, about as many as a Hub model has besides weights."""

UNEVEN = 1.01
"""Ratio of the largest file to the mean above which an imbalance is shown."""

ANSWERED = "shardkit.answered"
"""Key in the context of click: the result has been, or is being, printed."""

_GAP = "  "
_MISSING = "missing"
_IS_ALIGNED = re.compile("^ |  ")
_STAYS = "\0"
"""Replaces a space at which lines must not be broken."""


def show_whole_lists(whole: bool) -> None:
    """Make the current command print complete lists, or not."""
    before = LISTS_WHOLE.set(whole)
    click.get_current_context().call_on_close(lambda: LISTS_WHOLE.reset(before))


class _Details(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        remark(printable(record.getMessage(), sys.stderr))


def show_details() -> None:
    """Make the current command print what the library logs."""
    logger, handler = logging.getLogger("shardkit"), _Details()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)

    def end() -> None:
        logger.removeHandler(handler)
        logger.setLevel(before)

    click.get_current_context().call_on_close(end)


def max_lines() -> int:
    """Return the maximum lines of a list in the current command."""
    return sys.maxsize if LISTS_WHOLE.get() else MAX_LINES


def source_facts(result: WriteResult | CommitResult) -> Iterator[tuple[str, str]]:
    """Yield what was compared, what was not and why, and which data of a replaced output remain.

    That safetensors have no checksums is only shown with -v.
    """
    from shardkit.transfer.checks import NO_CHECKSUMS  # imported here, as `--help` does not need it

    if result.checked_bytes:
        size = format_size(result.checked_bytes)
        yield "checked", f"{size} against the CRC-32s in the source"
    yield from list_facts("checked against", [escape(path) for path in result.source_manifests])
    for part in result.unchecked:
        if part.reason == NO_CHECKSUMS and not (result.checked_bytes or LISTS_WHOLE.get()):  # always the case
            continue
        yield (
            "unchecked",
            f"{count(part.num_entries, 'tensor')}, {format_size(part.entry_bytes)}: {part.reason}",
        )
    for prefix in result.replaced:
        yield "replaced", f"{escape(prefix)}* stays for its readers; the store's own tool removes it"


def copied_text(names: Sequence[str]) -> str:
    """Return number and names of copied files: `9 files: rng_state_{0..7}.pth, scheduler.pt`."""
    lines = [line.pattern for line in fold_items([escape(name) for name in names])]
    if len(lines) > MAX_COPIED and not LISTS_WHOLE.get():
        lines[MAX_COPIED:] = ["..."]
    return f"{count(len(names), 'file')}: {', '.join(lines)}"


def fusion_facts(tensors: Iterable[FusedTensors], label: str) -> Iterator[tuple[str, str]]:
    """Yield facts about fused or split tensors: `fused`, `72 expert tensors into 6`."""
    for kind in tensors:
        what = "expert tensors" if kind.are_experts else "tensors"
        yield label, f"{kind.num_stored:,} {what} into {kind.num_tensors:,}"


def name_facts(tensors: Sequence[NamedTensor]) -> Iterator[tuple[str, str]]:
    """Yield the names of an output, if it has key rules."""
    if {"person", "shipped rules"}.isdisjoint(tensor.by for tensor in tensors):
        return
    lines = [
        f"{escape(tensor.name)} = {', '.join(map(escape, tensor.sources))} ({tensor.by})"
        for tensor in tensors
    ]
    yield from (("name", line) for line in shown_lines(lines, 4 * max_lines(), spreads=True))


def imbalance_text(imbalance: float) -> str:
    """Return a text about the imbalance of file sizes."""
    return f"the largest file is {imbalance:.2f} times the mean"


def result_lines(
    result: WriteResult,
    pairs: Iterable[tuple[str, str]],
    next_steps: Callable[[], Iterable[str]],
    *,
    shows_rate: bool = True,
) -> list[str]:
    """Return the result of a verb that writes as lines of text.

    Args:
        result: of the verb.
        pairs: facts about the output.
        next_steps: returns lines on how to use the output.
        shows_rate: as for `final_facts`.
    """
    if result.unfinished is not None:
        return _part_lines(result, result.unfinished, shows_rate=shows_rate)
    lines = [result.headline(), *facts(pairs)]
    return lines if result.dry_run else [*lines, "", *next_steps()]


def _part_lines(result: WriteResult, part: PartResult, *, shows_rate: bool) -> list[str]:
    """Return the result of a part while the output is incomplete, or of its dry run."""
    would = "to write" if result.dry_run else "wrote"
    pairs = [(would, f"{count(part.num_files, 'file')}, {format_size(part.written_bytes)}")]
    if part.resumed_files:
        pairs.append(("resumed", f"{count(part.resumed_files, 'file')} had been finished before"))
    all_files = count(result.num_files, "file")
    pairs.append(("all parts", f"{part.finished_files} of {all_files} are finished"))
    if result.dry_run:
        pairs += final_facts(result)
    elif part.missing:
        parts = "part" if len(part.missing) == 1 else "parts"
        pairs.append(("missing", f"{parts} {listed(part.missing)}; the last to finish makes the output"))
        pairs.append(("time", _time(result, shows_rate=shows_rate)))
    return [result.headline(), *facts(pairs)]


def final_facts(
    result: WriteResult, *further: tuple[str, str], shows_rate: bool = True
) -> Iterator[tuple[str, str]]:
    """Yield the last facts of a verb that writes: requirements of a dry run, or memory, time and rate.

    Args:
        result: of the verb.
        further: facts to show before the time.
        shows_rate: show bytes per second with the time.
    """
    if result.dry_run:
        yield "memory", f"at most {format_size(result.peak_memory_bytes)} of buffers"
        if result.free_bytes is not None:
            yield "free disk", format_size(result.free_bytes)
        return
    if result.part is not None:
        yield "part", f"{result.part.part}, {count(result.part.num_files, 'file')}; all parts are finished"
    if result.resumed_files:
        yield "resumed", f"{count(result.resumed_files, 'file')} had been finished before"
    yield from source_facts(result)
    yield from further
    yield "time", _time(result, shows_rate=shows_rate)


def _time(result: WriteResult, *, shows_rate: bool) -> str:
    """Return the duration, and the rate of this process if it moved all bytes of its work, and enough of them.

    Files that an earlier run finished ("resumed") count as bytes, but took none of the time.
    """
    part, took_s = result.part, f"{result.elapsed_s:.2f} s"
    if part is None:
        moved_bytes, what, moved_all = result.written_bytes, "bytes", not result.resumed_files
    else:
        moved_bytes, what = part.written_bytes, "bytes of the part"
        moved_all = not (part.resumed_files or part.by_another)  # another process committed the output
    if not (shows_rate and moved_all and moved_bytes > MIB and result.moving_s > 0):
        return took_s
    rate = format_size(round(moved_bytes / result.moving_s))
    return f"{took_s}; {what} moved in {result.moving_s:.2f} s: {rate}/s"


def cast_facts(result: WriteResult) -> Iterator[tuple[str, str]]:
    """Yield a fact for each conversion between dtypes."""
    for pair in result.converted:
        dtypes = f"{short_dtype(pair.stored)} -> {short_dtype(pair.written)}"
        yield (
            "to convert" if result.dry_run else "converted",
            f"{dtypes}: {count(pair.num_tensors, 'tensor')}",
        )


class PrintableResult(Protocol):
    """The interface of results that commands print."""

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""

    @property
    def notes(self) -> Sequence[str]:
        """Remarks for the user."""

    @property
    def warnings(self) -> Sequence[str]:
        """Remarks that the user should check."""


A = TypeVar("A", bound="Result | PrintableResult")
R = TypeVar("R", bound=PrintableResult)


class Output:
    """The output of a command.

    Args:
        as_json: print the result as one JSON document, and nothing else to stdout.
        shows_bars: whether to show progress bars.
        is_quiet: print neither result nor notes.
    """

    def __init__(self, *, as_json: bool = False, shows_bars: bool = False, is_quiet: bool = False) -> None:
        self.as_json, self.shows_bars, self.is_quiet = as_json, shows_bars, is_quiet
        self._warned = set[str]()

    def warn(self, text: str) -> None:
        """Print a warning, unless it was already printed before the result."""
        if text not in self._warned:
            self._warned.add(text)
            self.say("warning", text)

    def result(
        self, result: R, render: Callable[[R], Iterable[str]], *, max_warnings: int | None = None
    ) -> None:
        """Print a result, as a document or as lines with its notes, then its warnings.

        Args:
            result: of an operation.
            render: returns its lines of text.
            max_warnings: maximum number of warnings; None for all.
        """
        self.answer(result, render)
        if not (self.as_json or self.is_quiet):
            for note in fold_items(result.notes):
                self.say("note", note.pattern)
        fresh = [warning for warning in result.warnings if warning not in self._warned]
        for warning in shown_lines(fresh, max_warnings or sys.maxsize):
            self.warn(warning)

    def answer(self, result: A, render: Callable[[A], Iterable[str]]) -> None:
        """Print the result as a document or as lines, ignoring signals, as there is nothing left to stop."""
        if (context := click.get_current_context(silent=True)) is not None:
            context.meta[ANSWERED] = True
        if self.as_json:
            self.document(result.to_json())
        elif not self.is_quiet:
            self.lines(render(result))

    def document(self, content: Mapping[str, Any]) -> None:
        """Print a result as JSON; ASCII only, so that names cannot affect a terminal."""
        with printing():
            print(json.dumps(content, indent=2), file=sys.stdout)

    def lines(self, lines: Iterable[str]) -> None:
        """Print lines of a result; prose is wrapped, tables and code are not."""
        if "_bar" in vars(self):
            self._bar.finish()  # the clock
        for line in lines:
            is_prose = not _IS_ALIGNED.search(line)
            for part in wrap_indented(line, sys.stdout) if is_prose else [line]:
                with printing():
                    print(printable(part, sys.stdout), file=sys.stdout)

    def say(self, label: str, text: str) -> None:
        """Print `label: text` on stderr, e.g. a warning, an error or a hint."""
        message = printable(text, sys.stderr)
        if label != "resume":  # a command to copy
            message = "\n  ".join(wrap(message, sys.stderr, used=len(label) + 2, indent=2))
        remark(f"{paint(label, sys.stderr)}: {message}")

    def progress(self) -> Progress:
        """Return a bar on a terminal, lines elsewhere, or no output if progress is disabled."""
        from shardkit.core.threads import NoProgress

        if not self.shows_bars:
            return NoProgress()
        return self._bar if sys.stderr.isatty() else self._lines

    def step(self, text: str) -> None:
        """Print a step that has no bar: immediately, above a clock, on a terminal; elsewhere only if it takes long."""
        if not self.shows_bars:
            return
        if sys.stderr.isatty():
            if not self._bar.counts_bytes:
                self._bar.finish()
            remark(printable(text, sys.stderr))
            if not self._bar.counts_bytes:
                self._bar.start(0, "")
        else:
            self._lines.start(0, text.removesuffix(" ..."))

    def watch(self) -> None:
        """Show a clock on a terminal during long steps without a bar."""
        if self.shows_bars and sys.stderr.isatty():
            self._bar.start(0, "")

    @cached_property
    def _bar(self) -> ByteBar:
        from shardkit.cli.progress import ByteBar  # here, as `--help` needs neither this nor thread pools

        bar = ByteBar()
        if (context := click.get_current_context(silent=True)) is not None:
            context.call_on_close(bar.finish)
        return bar

    @cached_property
    def _lines(self) -> ByteLines:
        from shardkit.cli.progress import ByteLines

        lines = ByteLines(lambda text: remark(printable(text, sys.stderr)))
        if (context := click.get_current_context(silent=True)) is not None:
            context.call_on_close(lines.close)
        return lines

    def detail(self, text: str, *, is_code: bool = False) -> None:
        """Print a line that continues the previous message; code is not wrapped."""
        line = printable(text, sys.stderr)
        for part in [f"  {line}"] if is_code else wrap_indented(line, sys.stderr, indent=2):
            remark(part)


@contextmanager
def printing() -> Iterator[None]:
    """Convert errors of writing to stdout, as when it is a file on a full disk.

    Raises:
        ResourceError: writing failed; further output is discarded.
        BrokenPipeError: the reader of stdout went away.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        silence(sys.stdout)
        raise ResourceError(
            f"the result cannot be printed: {error.strerror or error} (nothing else failed)"
        ) from None


def remark(text: str) -> None:
    """Print a line on stderr, ignoring errors, which should not stop a command."""
    with suppress(OSError):  # keeps the order in a common log; the last flush reports errors
        sys.stdout.flush()
    tqdm = sys.modules.get("tqdm") if sys.stderr.isatty() else None
    try:
        # An active bar is redrawn below the line.
        with tqdm.tqdm.external_write_mode(sys.stderr) if tqdm else nullcontext():
            print(text, file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def silence(stream: TextIO) -> None:
    """Discard all further output to a stream, including the interpreter's last flush."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):  # a stream without a descriptor
        pass


_COLORS = {"error": "red", "internal error": "red", "warning": "yellow", "hint": "cyan", "note": "blue"}


def paint(label: str, stream: TextIO) -> str:
    """Return a label, coloured if the stream is a terminal with colours."""
    wants = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return click.style(label, fg=_COLORS.get(label), bold=True) if wants else label


def printable(text: str, stream: TextIO) -> str:
    """Return a line of text with characters escaped that a terminal might interpret or the encoding lacks.

    Names in the text are already escaped. This is for messages of the system and of libraries.
    """
    encoding = stream.encoding or "ascii"
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text.encode(encoding, "backslashreplace").decode(encoding)


def wrap(text: str, stream: TextIO, *, used: int, indent: int) -> list[str]:
    """Wrap a text to the width of a terminal; return a single line if the stream is not a terminal.

    Commands in backticks are not broken, so that they can be copied.

    Args:
        text: one line.
        stream: where it is printed.
        used: columns already used on the first line.
        indent: columns before the other lines.
    """
    width = shutil.get_terminal_size().columns
    if not stream.isatty() or used + len(text) <= width:
        return [text]
    whole = re.sub("`[^`]*`", lambda code: code[0].replace(" ", _STAYS), text)
    first, *rest = textwrap.wrap(
        whole,
        width,
        initial_indent=" " * used,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_STAYS, " ") for line in (first[used:], *(line[indent:] for line in rest))]


def wrap_indented(text: str, stream: TextIO, *, indent: int = 0) -> list[str]:
    """Like `wrap`, with indentation; all lines but the first are indented by two more columns."""
    first, *rest = wrap(text, stream, used=indent, indent=indent + 2)
    return [" " * indent + first, *(" " * (indent + 2) + line for line in rest)]


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: str = "  ") -> list[str]:
    """Return rows as aligned lines, without columns that are empty in all rows.

    Args:
        rows: cells; the same number in each row.
        right: columns to align on the right.
        indent: put before every line.
    """
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        indent
        + _GAP.join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            if width
        ).rstrip()
        for row in rows
    ]


def first_rows(rows: Sequence[Sequence[str]], *, indent: str = "  ") -> list[str]:
    """Like `table`, limited to the lines that the current command shows, and a line about the rest."""
    lines, hidden = table(rows[: max_lines()], indent=indent), len(rows) - max_lines()
    return [*lines, f"{indent}{more_line(hidden)}"] if hidden > 0 else lines


def facts(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return (label, text) pairs as aligned lines. Repeated labels are shown once."""
    rows, labels = list[tuple[str, str]](), [*pairs]
    indent = max((len(label) for label, _ in labels), default=0) + 2 * len(_GAP)
    previous = None
    for label, text in labels:
        first, *rest = wrap(text, sys.stdout, used=indent, indent=indent)
        rows += [("" if label == previous else label, first), *(("", line) for line in rest)]
        previous = label
    return table(rows)


def list_facts(label: str, items: Sequence[str]) -> list[tuple[str, str]]:
    """Return one fact for each line of `shown_lines`."""
    return [(label, line) for line in shown_lines(items)]


def fold_items(items: Sequence[str], *, spreads: bool = False) -> list[FoldedNames[None]]:
    """Return items folded by `fold_lines`, unless the current command shows complete lists."""
    is_whole = max_lines() == sys.maxsize
    return [FoldedNames(item, 1, None) for item in items] if is_whole else fold_lines(items, spreads=spreads)


def shown_lines(items: Sequence[str], most: int | None = None, *, spreads: bool = False) -> list[str]:
    """Return items as folded lines: at most `most` or MAX_LINES, then the number of remaining items."""
    most = max_lines() if most is None else most
    lines = fold_items(items, spreads=spreads)
    hidden = sum(line.count for line in lines[most:])
    return [*(line.pattern for line in lines[:most]), *([more_line(hidden)] if hidden else [])]


def more_line(num_items: int) -> str:
    """Return the line about the items that are not shown."""
    return f"... {num_items} more, see {REST}"


def file_sizes(result: WriteResult, label: str, one: str) -> list[tuple[str, str]]:
    """Return facts about file sizes, grouped by size; `one` is the noun for a file."""
    return list_facts(label, [f"{one} {numbers}: {size}" for numbers, size in size_runs(result.file_bytes)])


def file_size(num_bytes: int | None) -> str:
    """Return the size of a file as text; None is a missing file."""
    return _MISSING if num_bytes is None else format_size(num_bytes)


def size_runs(sizes: Sequence[int | None]) -> list[tuple[str, str]]:
    """Return (range of indexes, size) for runs of files with the same displayed size.

    Args:
        sizes: as for `file_size`, by index.

    Returns:
        Such as [("0-30", "490.1 MiB each"), ("31", "12.0 KiB")].
    """
    runs: list[tuple[int, int, str]] = []
    for index, size in enumerate(map(file_size, sizes)):
        if runs and runs[-1][2] == size:
            runs[-1] = (runs[-1][0], index, size)
        else:
            runs.append((index, index, size))
    return [
        (str(first), size)
        if first == last
        else (f"{first}-{last}", size if size == _MISSING else f"{size} each")
        for first, last, size in runs
    ]


class PageFile:
    """The page for `--html`, if that option is given.

    Args:
        path: as typed; None without the option.
        about: directories that the page must not be in.

    Raises:
        UsageError: the path exists and is not a page. Checked before anything is read.
        ResourceError: its directory is missing.
    """

    def __init__(self, path: str | None, about: tuple[str, ...]) -> None:
        self._path: str | None = None
        if path is not None:
            from shardkit.pictures.page import check_page

            self._path = check_page(path, outside=about)
        self._path_as_typed = path

    def write(self, out: Output, page: Page) -> None:
        """Write the page, and print its path."""
        from shardkit.pictures.page import write_page

        assert self._path is not None  # otherwise no page is created
        write_page(self._path, page)
        if not out.is_quiet:
            out.say("page", f"{escape(self._path_as_typed or '')}: open it in a browser")


def picture_lines(lines: Callable[[int, Glyphs], Iterator[str]]) -> list[str]:
    """Return lines of a picture, in the width and the characters of the terminal."""
    from shardkit.pictures.glyphs import glyphs_for

    width = shutil.get_terminal_size().columns
    return ["", *lines(width, glyphs_for(sys.stdout.encoding))]
