"""CRC-32, the one digest: of logical, contiguous, little-endian bytes.

It is what torch's zip records hold, and the CRC-32s of neighbouring pieces combine; so a tensor has one
digest whatever its layout. `isal` computes it at several GB/s and without the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Iterable

from isal.isal_zlib import crc32, crc32_combine

__all__ = ["combine", "crc32", "crc32_combine", "zeros"]


def combine(pieces: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of a concatenation from (crc32, number of bytes) of each piece in order."""
    total = 0
    for crc, nbytes in pieces:
        total = crc32_combine(total, crc, nbytes)
    return total


def zeros(nbytes: int) -> int:
    """Return the CRC-32 of `nbytes` zero bytes, in O(log n)."""
    crc, power, length = 0, crc32(b"\0"), 1
    while nbytes:
        if nbytes & 1:
            crc = crc32_combine(crc, power, length)
        power, length, nbytes = crc32_combine(power, power, length), length * 2, nbytes >> 1
    return crc
