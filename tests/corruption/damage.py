"""What disks, cables and people do to files: each kind draws one change of a file's bytes."""

from __future__ import annotations

import random
from collections.abc import Callable

PAGE, SECTOR = 4096, 512
SIZES = "cut", "appended"
"""Kinds that change the size."""


def _bit(data: bytearray, pick: random.Random) -> None:
    data[pick.randrange(len(data))] ^= 1 << pick.randrange(8)


def _burst(data: bytearray, pick: random.Random) -> None:
    at = pick.randrange(len(data))
    stop = min(at + pick.randint(2, 64), len(data))
    data[at:stop] = pick.randbytes(stop - at)


def _zeros(data: bytearray, pick: random.Random) -> None:
    at = pick.randrange(0, len(data), PAGE)
    data[at : at + PAGE] = bytes(len(data[at : at + PAGE]))


def _swap(data: bytearray, pick: random.Random) -> None:
    block = pick.choice([size for size in (SECTOR, PAGE) if len(data) >= 2 * size] or [len(data) // 2])
    if block:
        first, second = sorted(pick.sample(range(len(data) // block), 2))
        one, other = slice(first * block, (first + 1) * block), slice(second * block, (second + 1) * block)
        data[one], data[other] = data[other], data[one]


def _cut(data: bytearray, pick: random.Random) -> None:
    del data[pick.randrange(len(data)) :]


def _appended(data: bytearray, pick: random.Random) -> None:
    data += pick.choice([bytes, pick.randbytes])(pick.randint(1, PAGE))


KINDS: dict[str, Callable[[bytearray, random.Random], None]] = {
    "bit": _bit,
    "burst": _burst,
    "zeros": _zeros,
    "swap": _swap,
    "cut": _cut,
    "appended": _appended,
}


def damaged(data: bytes, kind: str, pick: random.Random) -> bytes | None:
    """Return other bytes; None where those that were drawn are the same, such as two equal blocks swapped."""
    changed = bytearray(data)
    if changed or kind == "appended":
        KINDS[kind](changed, pick)
    return bytes(changed) if changed != data else None


def changed_bytes(old: bytes, new: bytes) -> list[int]:
    """Return where two files of one size differ."""
    return [at for at, (one, other) in enumerate(zip(old, new, strict=True)) if one != other]
