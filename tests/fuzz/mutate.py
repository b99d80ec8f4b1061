"""Changing inputs so that many stay well-formed: bytes, text, and the tokens of JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple, TypeVar

T = TypeVar("T")

BOUNDARIES = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 65535, 65536),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64),
    *(-1, -2, -(2**31), -(2**63), -(2**64), 10**19, 10**20, 10**30),
)
"""Integers at which one representation or limit ends."""

TEXTS = (
    *("", "a", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "\0", "\x1b[31m", "\u202e", "\ufeff"),
    *("\u00e9", "\U0001f600", "\u4e2d" * 3, "a" * 300, "nan", "None", "__metadata__", "__class__", "0"),
    *("-1", "a.b.c"),
)
"""Text that is read in a special way somewhere."""


def pick(rng: Random, items: Sequence[T]) -> T:
    """Return one of some items (`Random.choice`, but faster)."""
    return items[int(rng.random() * len(items))]


def change_bytes(rng: Random, data: bytes) -> bytes:
    """Return `data` with one to four small edits, now and then cut short."""
    out = bytearray(data or b"\0")
    for _ in range(1 + int(rng.random() * rng.random() * 4)):
        at, kind = int(rng.random() * len(out)), int(rng.random() * 8)
        if kind <= 1:
            out[at] ^= 1 << int(rng.random() * 8)
        elif kind == 2:
            out[at] = int(rng.random() * 256)
        elif kind == 3:
            width = pick(rng, (1, 2, 4, 8))
            value = pick(rng, BOUNDARIES) % (1 << 8 * width)
            out[at : at + width] = value.to_bytes(width, pick(rng, ("little", "big")))
        elif kind == 4:
            del out[at : at + 1 + int(rng.random() * 8)]
        elif kind == 5:
            out[at:at] = rng.randbytes(1 + int(rng.random() * 4))
        elif kind == 6:
            start = int(rng.random() * len(out))
            out[at:at] = out[start : start + 1 + int(rng.random() * 16)]
        elif rng.random() < 0.2:
            del out[at:]
        else:
            out[at] = out[int(rng.random() * len(out))]
        if not out:
            break
    return bytes(out)


def change_text(rng: Random, text: str, words: Sequence[str]) -> str:
    """Return `text` with some edits that put in, take out and move words of a small language."""
    for _ in range(1 + int(rng.random() * 4)):
        at = int(rng.random() * (len(text) + 1))
        stop = at + int(rng.random() * 6)
        kind = int(rng.random() * 5)
        if kind <= 1:
            text = text[:at] + pick(rng, words) + text[at:]
        elif kind == 2:
            text = text[:at] + pick(rng, words) + text[stop:]
        elif kind == 3:
            text = text[:at] + text[stop:]
        else:
            text = text[:at] + text[at:stop] * 2 + text[stop:]
    return text


class _Tokens(NamedTuple):
    """A JSON text in pieces, and where in it things stand."""

    pieces: tuple[bytes, ...]
    values: tuple[tuple[int, int], ...]
    """Ranges of pieces, each a whole value."""
    pairs: tuple[tuple[int, int], ...]
    """Ranges of pieces, each a key, a colon and a value."""


_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s"{}\[\],:]+|\s+', re.DOTALL)


@lru_cache(maxsize=512)
def _tokens(text: bytes) -> _Tokens:
    pieces = tuple(piece for piece in _TOKEN.findall(text) if piece.strip())
    values: list[tuple[int, int]] = []
    pairs: list[tuple[int, int]] = []

    def value(at: int) -> int:
        start, at = at, at + 1
        if pieces[start] in (b"{", b"["):
            is_object = pieces[start] == b"{"
            while pieces[at] not in (b"}", b"]"):
                if pieces[at] == b",":
                    at += 1
                elif is_object:
                    key, at = at, value(at + 2)
                    pairs.append((key, at))
                else:
                    at = value(at)
            at += 1
        values.append((start, at))
        return at

    value(0)
    return _Tokens(pieces, tuple(values), tuple(pairs))


_WEIRD_STRINGS = (
    *(b'""', b'"\\ud800"', b'"\\ud83d\\ude00"', b'"\\u0000"', b'"\\u001b[31m"', b'"../x"'),
    *(b'"/etc/passwd"', b'"\xff"', b'"\xc3\xa9"', b'"__metadata__"', b'"a/../b"', b'"a\\\\b"'),
    *(b'"' + b"n" * 300 + b'"', b'"\t"'),
)
_WEIRD_VALUES = (
    *(b"null", b"true", b"false", b"NaN", b"-Infinity", b"1e999", b"-0", b"-0.0", b"1.0", b"1e2", b"01"),
    *(b"+1", b"[]", b"{}", b"[null]", b'{"a":1}', b"[[]]", b"0.5", b"1" * 25, b"1" * 5000),
    *(b"[" * 50 + b"]" * 50, b"[" * 900 + b"]" * 900, b"[" * 985 + b"]" * 985, b"[" * 5000 + b"]" * 5000),
    b'{"a":' * 970 + b"1" + b"}" * 970,
    *_WEIRD_STRINGS,
)
_NUMBER = re.compile(rb"-?\d+")


def change_json(rng: Random, text: bytes, strings: Sequence[bytes] = ()) -> bytes:
    """Return a JSON text with one to three edits, most of which leave it JSON.

    Args:
        strings: quoted, that mean something to the reader.
    """
    if rng.random() < 0.06:
        return change_bytes(rng, text)
    tokens = _tokens(text)
    pieces = list(tokens.pieces)
    for _ in range(1 + int(rng.random() * rng.random() * 3.5)):
        if tokens.pairs and rng.random() < 0.35:
            _change_pair(rng, pieces, tokens, strings)
        else:
            _change_value(rng, pieces, tokens, strings)
    return pick(rng, (b"", b"", b" ", b"\n")).join(pieces)


def _change_pair(rng: Random, pieces: list[bytes], tokens: _Tokens, strings: Sequence[bytes]) -> None:
    start, stop = pick(rng, tokens.pairs)
    kind = int(rng.random() * 6)
    if kind <= 1:
        pieces[start] = pick(rng, strings) if strings and rng.random() < 0.7 else pick(rng, _WEIRD_STRINGS)
    elif kind == 2:
        pieces[start] = tokens.pieces[pick(rng, tokens.pairs)[0]]
    elif kind == 3:
        first, last = pick(rng, tokens.pairs)
        pieces[start] = b"".join(tokens.pieces[first:last]) + b"," + pieces[start]
    else:
        follows = stop < len(pieces) and pieces[stop] == b","
        before = start and pieces[start - 1] == b","
        first, last = (start, stop + 1) if follows else (start - 1, stop) if before else (start, stop)
        pieces[first:last] = [b""] * (last - first)


def _change_value(rng: Random, pieces: list[bytes], tokens: _Tokens, strings: Sequence[bytes]) -> None:
    start, stop = pick(rng, tokens.values)
    kind, old = rng.random(), tokens.pieces[start]
    if kind < 0.5 and _NUMBER.fullmatch(old):
        near = int(old) + pick(rng, (-1, 1, 1, 2, 8)) if len(old) < 20 else 1
        new = b"%d" % (near if rng.random() < 0.5 else pick(rng, BOUNDARIES))
    elif kind < 0.5 and old.startswith(b'"') and strings:
        new = pick(rng, strings)
    elif kind < 0.75:
        first, last = pick(rng, tokens.values)
        new = b"".join(tokens.pieces[first:last])
    else:
        new = pick(rng, _WEIRD_VALUES)
    pieces[start:stop] = [new] + [b""] * (stop - start - 1)
