"""Changing pickles opcode by opcode."""

from __future__ import annotations

import pickletools
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from random import Random

from tests.fuzz.mutate import BOUNDARIES, TEXTS, change_bytes, pick

_PLAIN = tuple(
    [bytes([code]) for code in b"(0125NRQ)]}abdelostu\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94"]
    + [
        b"K\0",
        b"h\0",
        b"q\0",
        b"M\0\1",
        b"C\1a",
        b"\x8c\0",
        b"G?\xf0\0\0\0\0\0\0",
        b"\x95" + bytes(8),
        b"\x80\4",
    ]
)
_INTEGERS = b"KMJ\x8a"
_TEXT = b"\x8cX"
_FETCH = b"hj"


@lru_cache(maxsize=1024)
def opcodes(data: bytes) -> tuple[bytes, ...]:
    """Return a pickle in opcodes, each with its argument; without FRAME, which only tells lengths."""
    ends = [position for _, _, position in pickletools.genops(data)]
    ends.append(len(data))
    pieces = [data[start:stop] for start, stop in pairwise(ends)]
    return tuple(piece for piece in pieces if piece[0] != 0x95)


def integer(value: int) -> bytes:
    """Return the opcode that a pickler chooses for an integer."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if 0 <= value < 65536:
        return b"M" + value.to_bytes(2, "little")
    if -(2**31) <= value < 2**31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def text(value: str) -> bytes:
    """Return the opcode of a text, as protocol 2 has it."""
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + len(data).to_bytes(4, "little") + data


@lru_cache(maxsize=1024)
def _texts(data: bytes) -> tuple[bytes, ...]:
    return tuple(piece for piece in opcodes(data) if piece[0] in _TEXT) or (text("a"),)


@lru_cache(maxsize=1024)
def _numbers(data: bytes) -> tuple[int, ...]:
    """Where the integers are: what means most is most worth changing."""
    return tuple(at for at, piece in enumerate(opcodes(data)) if piece[0] in _INTEGERS)


def change_pickle(rng: Random, data: bytes, others: Sequence[bytes], words: Sequence[str] = ()) -> bytes:
    """Return a pickle with one to four edits.

    Args:
        others: pickles to take pieces from.
        words: text that means something to the reader.
    """
    if rng.random() < 0.05:
        return change_bytes(rng, data)
    pieces = list(opcodes(data))
    numbers = _numbers(data)
    for _ in range(1 + int(rng.random() * rng.random() * 4)):
        if numbers and rng.random() < 0.25:
            at = pick(rng, numbers)
            pieces[at : at + 1] = [_other_integer(rng)]
            continue
        at = int(rng.random() * len(pieces))
        if rng.random() < 0.6:
            pieces[at] = _alike(rng, pieces[at], data, words)
        else:
            _rearrange(rng, pieces, at, others)
    return b"".join(pieces)


def _other_integer(rng: Random) -> bytes:
    return integer(pick(rng, BOUNDARIES) if rng.random() < 0.4 else int(rng.random() * 12))


def _alike(rng: Random, piece: bytes, data: bytes, words: Sequence[str]) -> bytes:
    """Return another opcode that leaves something of the same kind on the stack, if there is one."""
    code = piece[0] if piece else 0
    if code in _INTEGERS:
        return _other_integer(rng)
    if code in _TEXT:
        if rng.random() < 0.5:
            return pick(rng, _texts(data))
        return text(pick(rng, words) if words and rng.random() < 0.7 else pick(rng, TEXTS))
    if code in _FETCH:
        slot = int(rng.random() * 300) if rng.random() < 0.5 else int.from_bytes(piece[1:], "little")
        slot += pick(rng, (-2, -1, 0, 1, 2))
        return b"h" + bytes([slot % 256]) if slot < 256 else b"j" + slot.to_bytes(4, "little")
    if code in b"qr":
        slot = int.from_bytes(piece[1:], "little") + pick(rng, (-1, 1, 7, 100, 2**30))
        return b"r" + (slot % 2**32).to_bytes(4, "little")
    if code in b"\x88\x89N":
        return pick(rng, (b"\x88", b"\x89", b"N"))
    if code in b"\x85\x86\x87":  # TUPLE1 to TUPLE3: one that takes too few or too many
        return pick(rng, (b"\x85", b"\x86", b"\x87", b"t"))
    if code in b")]}":
        return pick(rng, (b")", b"]", b"}"))
    return pick(rng, _PLAIN)


def _rearrange(rng: Random, pieces: list[bytes], at: int, others: Sequence[bytes]) -> None:
    kind, stop = int(rng.random() * 7), at + 1 + int(rng.random() * rng.random() * 12)
    if kind == 0:
        del pieces[at:stop]
    elif kind == 1:
        pieces[at:at] = pieces[at:stop]
    elif kind == 2:
        pieces[at:at] = [pick(rng, _PLAIN)]
    elif kind == 3:
        other = opcodes(pick(rng, others))
        start = int(rng.random() * len(other))
        pieces[at : stop if rng.random() < 0.5 else at] = other[start : start + 1 + int(rng.random() * 12)]
    elif kind == 4:
        pieces[at] = pick(rng, _PLAIN)
    elif kind == 5 and rng.random() < 0.3:
        del pieces[at:]
        pieces.append(b".")
    else:
        start = int(rng.random() * len(pieces))
        run = pieces[at:stop]
        del pieces[at:stop]
        pieces[start:start] = run
    if not pieces:
        pieces.append(b".")
