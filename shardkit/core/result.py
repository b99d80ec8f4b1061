"""What every verb's result can do: give plain data to a program, and show itself in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from html import escape as html_escape
from typing import Any

from shardkit.core.text import count, escape, format_size
from shardkit.errors import as_arguments

_MAX_SHOWN = 5

Lines = Callable[[object], Sequence[str] | None]
"""Returns a result as lines for people; None if there are none for its kind."""

lines_of: Lines | None = None
"""What the command line prints of a result. That stands above this module, so `shardkit` itself puts it here."""


class Result:
    """The base of results, which are frozen dataclasses."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data, without `holdings`; docs/schemas describes it."""
        has_holdings = hasattr(self, "holdings")
        plain: Any = replace(self, holdings=None) if has_holdings else self  # type: ignore[type-var]
        content: dict[str, Any] = asdict(plain)
        content.pop("holdings", None)
        return content

    def _repr_html_(self) -> str:
        """Return for a notebook what the command prints, or else a small table. Nothing in it can act on the page."""
        lines = None if lines_of is None else lines_of(self)
        if lines is not None:
            told = [
                f"{kind[:-1]}: {text}" for kind in ("notes", "warnings") for text in getattr(self, kind, ())
            ]
            return "<pre>{}</pre>".format("\n".join(map(_line, [*lines, *map(as_arguments, told)])))
        rows = (
            f"<tr><th style='text-align:left'>{_text(name.replace('_', ' '))}</th>"
            f"<td style='text-align:left'>{_cell(name, value)}</td></tr>"
            for name, value in self.to_json().items()
            if value
        )
        return f"<table><caption>{type(self).__name__}</caption>{''.join(rows)}</table>"


def _line(text: str) -> str:
    """Return a line whose names are escaped already."""
    return html_escape(
        "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    )


def _cell(name: str, value: object) -> str:
    if name in ("notes", "warnings") and isinstance(value, Sequence):
        value = [as_arguments(each) for each in value]  # in a notebook nobody types options
    if isinstance(value, Sequence) and not isinstance(value, str):
        shown = "".join(f"<br>{_item(name, each)}" for each in value[:_MAX_SHOWN])
        return count(len(value), "entry", "entries") + shown + ("<br>..." if len(value) > _MAX_SHOWN else "")
    return _item(name, value)


def _item(name: str, value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and name.endswith("_bytes"):
        return _text(format_size(value))
    if isinstance(value, Mapping):
        return "; ".join(f"{_text(key)}: {_item(key, each)}" for key, each in value.items() if each)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ": ".join(_text(each) for each in value)
    return _text(value)


def _text(value: object) -> str:
    return html_escape(escape(str(value)))
