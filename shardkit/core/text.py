"""Text for people: names made safe to print, suggestions, plurals, sizes."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from contextvars import ContextVar
from fnmatch import fnmatchcase

from shardkit._folding import fold
from shardkit.errors import UsageError

_MAX_SHOWN = 200
_MAX_CANDIDATES = 20_000
_MAX_CLOSE = 10  # candidates of difflib; the best plausible one is used
_MAX_SUGGESTIONS = 20  # each searches all names
_ALIKE = 0.75  # of two parts of a name: `wieght` is `weight`, `up_proj` is not `gate_proj`
_MAX_LISTED = 3
_MAX_THERE = 5
GLOBS_HINT = "globs match whole names, and * also matches dots: '*.mlp.*'"
"""Hint for globs that match nothing."""
LISTS_WHOLE: ContextVar[bool] = ContextVar("lists_whole", default=False)
"""If True, `listed` does not truncate."""
_WILD = re.compile(r"[*?[]")


def escape(name: str) -> str:
    """Return `name` with everything escaped that a terminal might interpret.

    Control characters, line and paragraph separators, bidirectional marks, lone surrogates and other
    unprintable characters are written as Python's escapes: `\\n`, `\\xNN`, `\\uNNNN` or `\\UNNNNNNNN`. Backslashes are
    doubled, so that a name with the text of an escape differs from one with the character. Very long names are cut in the
    middle.
    """
    if len(name) > _MAX_SHOWN:
        name = f"{name[: _MAX_SHOWN // 2]}...{name[-_MAX_SHOWN // 2 :]}"
    return escape_command(name)


def escape_command(name: str) -> str:
    """Like `escape`, for commands to be typed: never truncated."""
    if name.isprintable() and "\\" not in name:
        return name
    return "".join(
        c if c.isprintable() and c != "\\" else c.encode("unicode_escape", "backslashreplace").decode("ascii")
        for c in name
    )


def in_shell(word: str) -> str:
    """Quote a path or another word for a shell, for commands that are shown.

    Characters that a terminal might interpret become escapes that bash and zsh decode.
    """
    if word.isprintable():
        return shlex.quote(word)
    raw = word.encode("utf-8", "surrogateescape")
    plain = (
        chr(byte) if 0x20 <= byte < 0x7F and chr(byte) not in "\\'" else f"\\x{byte:02x}" for byte in raw
    )
    return f"$'{''.join(plain)}'"


def in_directory(directory: str, command: str, *, here: str) -> str:
    """Return a command prefixed with a `cd` to the directory that it has to run in.

    Args:
        directory: empty if unknown; no `cd` is added then.
        here: the reader's directory, for which no `cd` is needed.
    """
    return command if directory in ("", here) else f"cd {in_shell(directory)} && {command}"


_FORMAT_NAMES = {
    "dcp": "DCP checkpoint",
    "torch.distributed.checkpoint": "DCP checkpoint",
    "hub": "Hub model",
    "full-file": "torch.save file",
    "torch.save": "torch.save file",
}


def format_name(identifier: str) -> str:
    """Return the display name of a format or a writer, given its identifier in JSON."""
    return _FORMAT_NAMES.get(identifier, escape(identifier))


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that `name` is probably a misspelling of, escaped, or None.

    A name with dots matches the same name below another prefix, or one with the same numbers and similarly spelt parts:
    never one of another layer, nor another tensor of the same layer. For a glob that matches nothing, return the glob
    with its parts corrected, such as `layers.*` for `layer.*`.
    """
    pool = [c for _, c in zip(range(_MAX_CANDIDATES), candidates, strict=False)]
    if _WILD.search(name):
        return _nearest_glob(name, pool)
    below = [c for c in pool if f".{c}".endswith(f".{name}") or f".{name}".endswith(f".{c}")]
    close = difflib.get_close_matches(name, pool, n=_MAX_CLOSE, cutoff=0.6)
    meant = [*sorted((c for c in below if "." in c), key=len), *(c for c in close if _may_be_meant(name, c))]
    return escape(meant[0]) if meant else None


def _may_be_meant(name: str, candidate: str) -> bool:
    parts, candidate_parts = name.split("."), candidate.split(".")
    if len(parts) == 1 or len(candidate_parts) == 1:
        return True
    if [part for part in parts if part.isdecimal()] != [part for part in candidate_parts if part.isdecimal()]:
        return False
    if len(parts) == len(candidate_parts) and all(map(_is_spelt_alike, parts, candidate_parts)):
        return True
    ends = [one for one, two in zip(parts[::-1], candidate_parts[::-1], strict=False) if one == two]
    return parts[-2:] == candidate_parts[-2:] and any(not part.isdecimal() for part in ends[1:])


def _nearest_glob(glob: str, pool: Sequence[str]) -> str | None:
    parts = sorted({part for name in pool for part in name.split(".")})
    spelt = ".".join(_nearest_part(part, parts) for part in glob.split("."))
    # `*` matches dots too, but `*.norm` does not match `norm`.
    for better in (spelt, spelt.removeprefix("*."), f"*.{spelt}"):
        if better != glob and any(fnmatchcase(name, better) for name in pool):
            return escape(better)
    return None


def _nearest_part(part: str, parts: Sequence[str]) -> str:
    word = part.strip("*")
    if not word or word in parts or _WILD.search(word):
        return part
    return part.replace(word, next(iter(difflib.get_close_matches(word, parts, n=1)), word))


def unmatched(globs: Iterable[str], names: Collection[str]) -> list[str]:
    """Return lines about globs that match no name: each with a suggestion, then the most similar names, folded."""
    patterns = list(globs)
    lines = [f"{escape(glob)}{suggestion(glob, names)}" for glob in patterns]
    shown = [escape(folded.pattern) for folded in fold((name, None) for name in dict.fromkeys(names))]
    shown.sort(key=lambda pattern: -max((likeness(pattern, glob) for glob in patterns), default=0.0))
    rest = len(shown) - _MAX_THERE
    return [
        *lines,
        *(f"there is {pattern}" for pattern in shown[:_MAX_THERE]),
        *([f"... {rest} more"] if rest > 0 else []),
    ]


def match_nothing(option: str, number: int, what: str) -> str:
    """Return the message for globs that match nothing: `2 globs of --dtype-rule match no tensor`."""
    return f"{count(number, 'glob')} of {option} {'matches' if number == 1 else 'match'} {what}"


def likeness(one: str, two: str) -> float:
    """Return the similarity of two names, from 0 to 1."""
    return difflib.SequenceMatcher(None, one, two).ratio()


def suggestion(name: str, candidates: Iterable[str]) -> str:
    """Return `  (closest name: X)` for a problem line, or the empty string."""
    closest = nearest(name, candidates)
    return f"  (closest name: {closest})" if closest else ""


def _is_spelt_alike(one: str, two: str) -> bool:
    begins = one.startswith(f"{two}_") or two.startswith(f"{one}_")  # `up` for `up_proj`
    return one == two or begins or likeness(one, two) >= _ALIKE


def suggestions(names: Iterable[str], candidates: Iterable[str]) -> dict[str, str]:
    """Return `  (closest name: X)` for each name that has one; consistent across layers."""
    candidate_names = set(candidates)
    forms = dict.fromkeys(without_numbers(name, "#") for name in candidate_names)
    near = dict[str, str | None]()
    suggested = dict[str, str]()
    for name in names:
        form, numbers = without_numbers(name, "#"), iter(part for part in name.split(".") if part.isdecimal())
        if form not in near:
            near[form] = nearest(form, forms) if len(near) < _MAX_SUGGESTIONS else None
        numbered = ".".join(
            next(numbers, part) if part == "#" else part for part in (near[form] or "").split(".")
        )
        if numbered in candidate_names:
            suggested[name] = f"  (closest name: {escape(numbered)})"
    return suggested


def without_numbers(name: str, sign: str = "*") -> str:
    """Return a name with its numeric parts replaced by a sign, so that all layers share one name."""
    return ".".join(sign if part.isdecimal() else part for part in name.split("."))


def listed(names: Collection[str]) -> str:
    """Return the first few names, escaped: "a, b, c, ..."; all of them if `LISTS_WHOLE` is set."""
    most = len(names) if LISTS_WHOLE.get() else _MAX_LISTED
    shown = [escape(name) for _, name in zip(range(most), names, strict=False)]
    return ", ".join([*shown, "..."] if len(names) > most else shown)


def few(shown: Sequence[str], most: int, between: str = ", ") -> str:
    """Join at most `most` texts, and say how many more there are: "a, b and 3 more"."""
    more = len(shown) - most
    return between.join(shown[:most]) + (f" and {more} more" if more > 0 else "")


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Return "1 file" or "2 files". Pass `plural` if it is irregular."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


KIB, MIB = 1 << 10, 1 << 20

_FACTORS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15}
_FACTORS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "pib": 1 << 50}
_PATTERN = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)", re.ASCII)


def parse_size(text: str | int) -> int:
    """Return a number of bytes from text: "5GB" is 5 * 10^9, "5GiB" 5 * 2^30. Case does not matter.

    Raises:
        UsageError: the text is not a size.
    """
    if isinstance(text, int):
        return text
    match = _PATTERN.fullmatch(text.strip())
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise UsageError(
            f"not a size: {text!r}",
            hint="write a number of bytes with a unit, such as 512MiB, 5GB or 1048576",
        )
    whole, _, fraction = match.group(1).partition(".")
    # Integer arithmetic: a float would lose bytes above 2^53.
    return int(whole) * factor + (int(fraction) * factor // 10 ** len(fraction) if fraction else 0)


def format_size(num_bytes: int) -> str:
    """Return bytes as text in binary units, always with the unit: "131.4 GiB"."""
    if num_bytes < 0:
        return "-" + format_size(-num_bytes)
    if num_bytes < KIB:
        return f"{num_bytes} B"
    value = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1023.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} PiB"


def format_duration(seconds: float) -> str:
    """Return a duration for people: `70 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
