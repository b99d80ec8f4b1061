"""Which memo slots of a pickle may ever be fetched: the values in all others need not be kept."""

from __future__ import annotations

import re

_BLOCK = 4 << 20  # bytes of a large file scanned at once for memo fetches
_LONG_FETCH = re.compile(rb"j(?=(....))", re.DOTALL)


def fetched_slots(data: bytes) -> bytearray:
    """Return a flag for each memo slot that the pickle could fill: whether it may ever be fetched.

    Bytes that only look like a LONG_BINGET set flags too, which does no harm. BINGET reaches the first
    256 slots; they are all flagged.
    """
    # Slots are numbered from 0 by MEMOIZE, BINPUT and LONG_BINPUT, one byte at least each.
    num_slots = data.count(b"\x94") + data.count(b"q") + data.count(b"r") + 256
    keep = bytearray(num_slots)
    keep[:256] = b"\1" * 256
    if len(data) > _BLOCK:
        _flag_slots(data, keep)
        return keep
    for slot in set(_LONG_FETCH.findall(data)):
        index = int.from_bytes(slot, "little")
        if index < num_slots:
            keep[index] = 1
    return keep


def _flag_slots(data: bytes, keep: bytearray) -> None:
    """The same with numpy, whose import pays for a large file: seconds for a million chunks."""
    import numpy as np

    flags = np.frombuffer(keep, dtype=np.uint8)
    for start in range(0, len(data) - 4, _BLOCK):
        block = np.frombuffer(data, np.uint8, min(_BLOCK, len(data) - 4 - start), start)
        at = np.flatnonzero(block == 0x6A)  # LONG_BINGET
        slots = np.ndarray((len(block),), "<u4", data, start + 1, (1,))[at]
        flags[slots[slots < len(keep)]] = 1
