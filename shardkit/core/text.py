"""Text that came from a file, made safe to print; the nearest known name to an unknown one; plurals."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

_MAX_SHOWN = 200
_MAX_CANDIDATES = 20_000
_MAX_LISTED = 3


def escape(name: str) -> str:
    """Return `name` with everything that a terminal might act on written as an escape.

    Control characters, line and paragraph separators, bidirectional marks, lone surrogates and other
    unprintable characters become `\\xNN` or `\\uNNNN`; very long names are cut in the middle.
    """
    if len(name) > _MAX_SHOWN:
        name = f"{name[: _MAX_SHOWN // 2]}...{name[-_MAX_SHOWN // 2 :]}"
    if name.isprintable() and "\\" not in name:
        return name
    return "".join(
        c if c.isprintable() and c != "\\" else c.encode("unicode_escape", "backslashreplace").decode("ascii")
        for c in name
    )


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most like `name`, escaped, or None when nothing is like it."""
    pool = [c for _, c in zip(range(_MAX_CANDIDATES), candidates, strict=False)]
    found = difflib.get_close_matches(name, pool, n=1, cutoff=0.6)
    return escape(found[0]) if found else None


def suggestion(name: str, candidates: Iterable[str]) -> str:
    """Return `  (closest name: X)` for a problem line, or the empty string."""
    found = nearest(name, candidates)
    return f"  (closest name: {found})" if found else ""


def listed(names: Collection[str]) -> str:
    """Return the first few of some names, escaped: "a, b, c, ..."."""
    shown = [escape(name) for _, name in zip(range(_MAX_LISTED), names, strict=False)]
    return ", ".join([*shown, "..."] if len(names) > _MAX_LISTED else shown)


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Return "1 file", "2 files"; a plural that is not made with an s is given."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
