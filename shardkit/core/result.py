"""The base class of results: plain data for programs, and text, HTML and `repr` for interactive use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from html import escape as html_escape
from typing import Any

from shardkit.core.text import count, escape, format_size
from shardkit.errors import ShardkitError, UsageError

_MAX_SHOWN = 5
_REMARKS = ("notes", "warnings")

AsLines = Callable[[object], Sequence[str] | None]
"""Returns a result as lines of text; None for results without a text form."""

lines_of: AsLines | None = None
"""The command line's text for a result. `shardkit/__init__` sets it, as this module may not import `cli`."""

html_of: Callable[[object], str] | None = None
"""Returns the page that `--html` writes; set by `shardkit/__init__`."""
save_page: Callable[[object, str], None] | None = None
"""Writes that page to a path; set by `shardkit/__init__`."""


class Result:
    """The base of results, which are frozen dataclasses: `repr` is one line, `str` what the command prints."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        # A dataclass would show every field: megabytes for a large model, and each debugger and REPL prints them.
        cls.__repr__ = Result.__repr__  # type: ignore[method-assign]

    def headline(self) -> str:
        """Return a one-line summary."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data, without `holdings`; docs/schemas describes it."""
        has_holdings = hasattr(self, "holdings")
        plain: Any = replace(self, holdings=None) if has_holdings else self  # type: ignore[type-var]
        content: dict[str, Any] = asdict(plain)
        content.pop("holdings", None)
        return content

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {_line(self.headline())}>"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        """Return the text as inert HTML for a notebook, with long lines wrapped."""
        text = html_escape("\n".join(self._lines()))
        return f'<pre style="white-space: pre-wrap; overflow-wrap: anywhere">{text}</pre>'

    def _lines(self) -> list[str]:
        """Return the lines that the command prints, or all non-empty fields; then notes and warnings."""
        lines = None if lines_of is None else lines_of(self)
        remarks = [f"{kind[:-1]}: {text}" for kind in _REMARKS for text in getattr(self, kind, ())]
        return [_line(line) for line in (*(_listed(self) if lines is None else lines), *remarks)]


class DrawnResult(Result):
    """A result that can be shown as a page with pictures."""

    __slots__ = ()

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the result as a page, in one file for any browser, as `--html` does. An older page is replaced.

        Raises:
            UsageError: the path exists and is not a page; or the result has no holdings: call the verb with
                `holdings=True`.
            ResourceError: the page cannot be written.
        """
        if save_page is None:
            raise UsageError("pages are made by `shardkit`: import it first")
        save_page(self, os.fspath(path))

    def _repr_html_(self) -> str:
        """Return the text, and the page in a sandboxed frame that cannot affect the notebook."""
        text = Result._repr_html_(self)
        with suppress(ShardkitError, OSError):
            if html_of is not None:
                page = html_escape(html_of(self), quote=True)
                frame = 'sandbox="allow-scripts" style="width: 100%; height: 640px; border: 0"'
                return f'<div>{text}<iframe srcdoc="{page}" {frame}></iframe></div>'
        return text


def wrote(path: str, *, dry_run: bool = False) -> str:
    """Return the headline of a verb that writes."""
    return f"{'dry run: nothing was written to' if dry_run else 'wrote'} {escape(path)}"


def _line(text: str) -> str:
    """Escape unprintable characters of a line, whose names are already escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _listed(result: Result) -> list[str]:
    content = {name: value for name, value in result.to_json().items() if value and name not in _REMARKS}
    width = max(map(len, content), default=0)
    return [
        result.headline(),
        *(f"  {name.replace('_', ' '):<{width}}  {_cell(name, value)}" for name, value in content.items()),
    ]


def _cell(name: str, value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        shown = "; ".join(_item(name, item) for item in value[:_MAX_SHOWN])
        return f"{count(len(value), 'entry', 'entries')}: {shown}" + (
            "; ..." if len(value) > _MAX_SHOWN else ""
        )
    return _item(name, value)


def _item(name: str, value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and name.endswith("_bytes"):
        return format_size(value)
    if isinstance(value, Mapping):
        return "; ".join(f"{escape(str(key))}: {_item(key, item)}" for key, item in value.items() if item)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ": ".join(escape(str(item)) for item in value)
    return escape(str(value))
