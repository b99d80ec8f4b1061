"""One sink for all that a command says: its result on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeVar

import click

from shardkit.core.text import count as count
from shardkit.core.text import escape, format_size

if TYPE_CHECKING:
    from shardkit.transfer.checks import Unchecked

MAX_LINES = 20
"""Most lines of one list for people; --json has all."""

_GAP = "  "


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--json`, which every command has."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print the result as one JSON document; sizes in bytes."
    )(command)


def links_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--follow-links`, for commands that read checkpoints."""
    return click.option(
        "--follow-links",
        is_flag=True,
        help="Read links that lead out of the checkpoint's directory as the files that they lead to.",
    )(command)


def on_or_off(name: str, *, help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return an option that is on unless it is said to be off; the command gets a bool."""
    return click.option(
        name,
        type=click.Choice(["on", "off"]),
        default="on",
        show_default=True,
        callback=lambda _context, _option, value: value == "on",
        help=help,
    )


def check_source_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--check-source`, which whatever moves a source's bytes has."""
    help = "Compare what is read with the checksums in the source; off lets damage through."
    return on_or_off("--check-source", help=help)(command)


def source_manifest_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--source-manifest`, which whatever moves a source's bytes has."""
    return click.option(
        "--source-manifest",
        metavar="FILE",
        help="Compare with this manifest of the source too; one in it or beside it is found.",
    )(command)


class Checked(Protocol):
    """A result that says how much of its source was compared with the checksums in it."""

    @property
    def checked_bytes(self) -> int:
        """Compared."""
        ...

    @property
    def unchecked(self) -> Sequence[Unchecked]:
        """What could not be."""
        ...

    @property
    def source_manifests(self) -> Sequence[str]:
        """Manifests that it was compared with, beside what the files record."""
        ...


def check_facts(result: Checked) -> Iterator[tuple[str, str]]:
    """Yield what was compared, and what could not be and why."""
    if result.checked_bytes:
        yield (
            "checked",
            f"{format_size(result.checked_bytes)} against the CRC-32s in the source, as they moved",
        )
    yield from limited("held against", [escape(path) for path in result.source_manifests])
    yield from limited(
        "unchecked",
        [
            f"{count(part.num_entries, 'tensor or storage', 'tensors or storages')}, "
            f"{format_size(part.entry_bytes)}: {part.reason}"
            for part in result.unchecked
        ],
    )


class Result(Protocol):
    """What an operation returns, as far as every command prints it."""

    @property
    def notes(self) -> Sequence[str]:
        """What a person should be told."""
        ...

    @property
    def warnings(self) -> Sequence[str]:
        """What a person should look at."""
        ...

    def to_json(self) -> dict[str, Any]:
        """All of it, as plain data."""
        ...


R = TypeVar("R", bound=Result)


class Output:
    """Where a command's words go.

    Args:
        as_json: the result is one JSON document, and nothing else goes to stdout.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self._warned = set[str]()

    def warn(self, text: str) -> None:
        """Print a warning, each once: what it is about may not have been done yet, and the result has it again."""
        if text not in self._warned:
            self._warned.add(text)
            self.say("warning", text)

    def result(
        self, result: R, render: Callable[[R], Iterable[str]], *, max_warnings: int | None = None
    ) -> None:
        """Print a result, as a document or as lines with its notes, then its warnings.

        Args:
            result: of an operation.
            render: makes lines of it, for people.
            max_warnings: how many of them a person is shown; None is all.
        """
        if self.as_json:
            self.document(result.to_json())
        else:
            self.lines(render(result))
            for note in result.notes:
                self.say("note", note)
        for warning in result.warnings[:max_warnings]:
            self.warn(warning)
        if max_warnings is not None and len(result.warnings) > max_warnings:
            self.say("warning", more(len(result.warnings)))

    def document(self, content: Mapping[str, Any]) -> None:
        """Print a result as JSON; ASCII only, so that no name can act on a terminal."""
        print(json.dumps(content, indent=2), file=sys.stdout)

    def lines(self, lines: Iterable[str]) -> None:
        """Print lines of a result for people."""
        for line in lines:
            print(printable(line, sys.stdout), file=sys.stdout)

    def say(self, label: str, text: str) -> None:
        """Print `label: text` on stderr, e.g. a warning, an error or a hint."""
        print(f"{painted(label, sys.stderr)}: {printable(text, sys.stderr)}", file=sys.stderr)

    def detail(self, text: str) -> None:
        """Print a line that belongs to what was said before."""
        print(f"  {printable(text, sys.stderr)}", file=sys.stderr)


_COLORS = {"error": "red", "internal error": "red", "warning": "yellow", "hint": "cyan", "note": "blue"}


def painted(label: str, stream: TextIO) -> str:
    """Return a label in its colour, where the stream is a terminal that wants colours."""
    wants = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return click.style(label, fg=_COLORS.get(label), bold=True) if wants else label


def printable(text: str, stream: TextIO) -> str:
    """Return one line of text with what a terminal might act on, or the encoding lacks, as escapes.

    Names were escaped where they entered the text; this is for messages of the system and of libraries.
    """
    encoding = stream.encoding or "ascii"
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text.encode(encoding, "backslashreplace").decode(encoding)


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: str = "  ") -> list[str]:
    """Return rows as aligned lines; columns that are empty in every row are left out.

    Args:
        rows: cells, each row as long as the first.
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


def facts(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return (label, text) pairs as aligned lines; a label that repeats is shown once."""
    rows: list[tuple[str, str]] = []
    previous = None
    for label, text in pairs:
        rows.append(("" if label == previous else label, text))
        previous = label
    return table(rows)


def limited(label: str, items: Sequence[str]) -> list[tuple[str, str]]:
    """Return one fact for each item, at most MAX_LINES of them and then how many more there are."""
    pairs = [(label, item) for item in items[:MAX_LINES]]
    return [*pairs, (label, more(len(items)))] if len(items) > MAX_LINES else pairs


def more(num_items: int) -> str:
    """Return the line that stands for all items after the first MAX_LINES."""
    return f"... {num_items - MAX_LINES} more, see --json"


def size_runs(sizes: Sequence[int]) -> list[tuple[str, str]]:
    """Return (range of indexes, size) for runs of files that have the same size as people read it.

    Args:
        sizes: bytes, by index.

    Returns:
        Such as [("0-30", "490.1 MiB each"), ("31", "12.0 KiB")].
    """
    runs: list[tuple[int, int, str]] = []
    for index, size in enumerate(map(format_size, sizes)):
        if runs and runs[-1][2] == size:
            runs[-1] = (runs[-1][0], index, size)
        else:
            runs.append((index, index, size))
    return [
        (str(first), size) if first == last else (f"{first}-{last}", f"{size} each")
        for first, last, size in runs
    ]
