"""A page in one file, without network requests or libraries, and safe against hostile names in a checkpoint.

Text is inserted in two ways only: through `html.escape`, or as JSON with `<`, `>` and `&` escaped. The content security
policy allows only the script and the style with the given hashes, and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape as html
from typing import Any, Literal

from shardkit._version import __version__
from shardkit.core.text import escape
from shardkit.files import storage
from shardkit.files.strict_json import open_regular
from shardkit.operations.destination import check_sidecar, write_sidecar

_MARK = b'<meta name="generator" content="shardkit'
_HEAD_BYTES = 1024

Tone = Literal["good", "bad", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A picture with its description. Text is plain; `body` is HTML."""

    title: str
    lead: str
    """What the picture shows, and the meaning of colours."""
    body: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The contents of a page."""

    kicker: str
    """The kind of subject, in a few words."""
    title: str
    """Its name."""
    verdict: str
    """The answer in one sentence."""
    tone: Tone = "plain"
    figures: Sequence[tuple[str, str]] = ()
    """The key figures: (number, what it counts)."""
    unusual: Sequence[str] = ()
    """Remarks that need attention."""
    notable: Sequence[str] = ()
    """Remarks that need no action."""
    usual: str = ""
    """Text to show if nothing is unusual."""
    sections: Sequence[Section] = ()
    facts: Sequence[tuple[str, str]] = ()
    """Further (label, text) rows."""
    left_out: Sequence[str] = ()
    """Remarks on what the page leaves out."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Data for the script."""


@cache
def _resource(name: str) -> str:
    with open(os.path.join(os.path.dirname(__file__), name), encoding="ascii") as file:
        return file.read()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def plain_json(data: Mapping[str, Any]) -> str:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def render(page: Page) -> str:
    """Return a page as HTML, ASCII only."""
    style, script = _resource("page.css"), _resource("page.js")
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    text = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
{_MARK.decode()} {html(__version__)}">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">
<title>{html(page.title)}: {html(page.verdict)}</title>
<style>{style}</style></head>
<body><a class="skip" href="#text">Skip to the text</a>
<header><p class="kicker">{html(page.kicker)}</p><h1>{html(page.title)}</h1>
<p class="verdict {page.tone}">{html(page.verdict)}</p>
{_figures(page.figures)}{_unusual(page)}</header>
<main>
{"".join(map(_section, page.sections))}
{_text(page)}
</main>
<footer>Made by shardkit {html(__version__)}. This page makes no network requests.</footer>
<script type="application/json" id="data">{plain_json(page.data)}</script>
<script>{script}</script>
</body></html>
"""
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _figures(figures: Iterable[tuple[str, str]]) -> str:
    tiles = "".join(f"<div><dd>{html(number)}</dd><dt>{html(what)}</dt></div>" for number, what in figures)
    return f'<dl class="figures">{tiles}</dl>' if tiles else ""


def _unusual(page: Page) -> str:
    blocks = (("unusual", "Look at this first", page.unusual), ("notable", "At a glance", page.notable))
    shown = "".join(
        f'<div class="{kind}"><h2>{title}</h2><ul>{"".join(f"<li>{html(item)}</li>" for item in items)}</ul></div>'
        for kind, title, items in blocks
        if items
    )
    return shown or (f'<p class="usual">{html(page.usual)}</p>' if page.usual else "")


def _section(section: Section) -> str:
    return f"<section><h2>{html(section.title)}</h2><p>{html(section.lead)}</p>{section.body}</section>\n"


def _text(page: Page) -> str:
    rows = "".join(
        f"<tr><th scope=row>{html(label)}</th><td>{html(text)}</td></tr>" for label, text in page.facts
    )
    left_out = "".join(f"<li>{html(item)}</li>" for item in page.left_out)
    more = f"<h3>Not shown</h3><ul>{left_out}</ul>" if left_out else ""
    body = f'<table class="facts"><tbody>{rows}</tbody></table>{more}'
    return f'<section id="text"><h2>In words</h2><p>What the command prints.</p>{body}</section>'


def short_names(*paths: str) -> list[str]:
    """Return escaped names for a title: of absolute paths, only the distinguishing ends."""
    parts = [path.rstrip("/").split("/") for path in paths]
    most = max(map(len, parts))
    ends = (["/".join(split[-length:]) for split in parts] for length in range(1, most + 1))
    shown = next((names for names in ends if len(set(names)) == len(set(paths))), list(paths))
    return [escape(end if os.path.isabs(path) else path) for path, end in zip(paths, shown, strict=True)]


def picture(name: str, label: str) -> str:
    """Return the HTML of a canvas for the script, with a line for details of the element under the pointer.

    Args:
        name: the picture's name in the script.
        label: description for screen readers.
    """
    return (
        f'<div class="picture" data-picture="{html(name)}"><noscript><p>The picture needs JavaScript; the tables do not.'
        f'</p></noscript><canvas tabindex="0" role="img" aria-label="{html(label)}"></canvas>'
        f'<p class="detail" role="status" aria-live="polite"></p></div>'
    )


def legend(*items: tuple[str, str]) -> str:
    """Return a legend from (class in page.css, text) pairs. Readers who cannot see colours use the tables."""
    entries = "".join(f'<li><i class="{html(kind)}"></i>{html(text)}</li>' for kind, text in items)
    return f'<ul class="legend" aria-hidden="true">{entries}</ul>'


def table(
    name: str,
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | tuple[str, float]]],
    *,
    searchable: str = "",
    row_class: str = "",
) -> str:
    """Return a table, which the script makes sortable.

    Args:
        name: its id.
        caption: of the table.
        columns: headings.
        rows: cells; (text, number) is sorted by the number, and right-aligned.
        searchable: label of the search field; "" for none.
        row_class: CSS class of all rows; "" for none.
    """
    rows = list(rows)
    numbers = {index for row in rows[:1] for index, cell in enumerate(row) if isinstance(cell, tuple)}
    head = "".join(
        f'<th scope="col"{" class=n" if index in numbers else ""}>{html(column)}</th>'
        for index, column in enumerate(columns)
    )
    kind = f' class="{html(row_class)}"' if row_class else ""
    body = [f"<tr{kind}>{''.join(map(_cell, row))}</tr>" for row in rows]
    search = (
        f'<p class="search" hidden><label>{html(searchable)} <input type="search" autocomplete="off"></label> '
        f'<span role="status"></span></p>'
        if searchable
        else ""
    )
    return (
        f'<div class="table" id="{html(name)}">{search}<div class="scroll" tabindex="0"><table><caption>{html(caption)}'
        f"</caption><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div></div>"
    )


def _cell(cell: str | tuple[str, float]) -> str:
    if isinstance(cell, tuple):
        return f'<td class="n" data-v="{cell[1]:.9g}">{html(cell[0])}</td>'
    return f"<td>{html(cell)}</td>"


def details(summary: str, body: str) -> str:
    """Return HTML that is hidden until the user opens it."""
    return f"<details><summary>{html(summary)}</summary>{body}</details>"


def check_page(path: str, *, outside: Sequence[str] = ()) -> str:
    """Return the absolute path for a page. It may replace an older page, but no other file.

    Args:
        path: as the user typed it.
        outside: directories that the page must not be in, such as the checkpoint itself.

    Raises:
        UsageError: the path exists and is not a page, or is in one of these directories.
        ResourceError: its directory is missing or cannot be written.
    """
    directories = [directory for directory in outside if storage.isdir(directory)]
    return check_sidecar(path, overwrite=True, outside=directories, is_ours=_is_page)


def _is_page(path: str) -> bool:
    with open_regular(path, path) as (fd, _):
        return _MARK in storage.pread(fd, _HEAD_BYTES, 0)


def write_page(path: str, page: Page) -> None:
    """Write a page atomically.

    Args:
        path: from `check_page`.
        page: its contents.

    Raises:
        ResourceError: the page cannot be written.
    """
    write_sidecar(path, render(page).encode("ascii"), overwrite=True, is_ours=_is_page)
