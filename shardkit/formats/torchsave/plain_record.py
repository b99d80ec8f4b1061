"""Write plain data as the record that `torch.save` makes of it: what DCP calls a byte entry.

The pickle is put together here, without a memo, so that the same value always gives the same bytes; torch's
weights-only loader takes it.

Source: torch 2.13, torch/serialization.py (`_save`); pickle protocol 2.
"""

from __future__ import annotations

import struct
from typing import TypeGuard

from shardkit.formats.torchsave.writer import pickle_record

Plain = None | bool | int | float | str | list["Plain"] | tuple["Plain", ...] | dict[str, "Plain"]

_MAX_DEPTH = 8
_INT64 = 1 << 63


def is_plain(value: object, depth: int = 0) -> TypeGuard[Plain]:
    """True for None, bools, numbers of 64 bits, text, and lists, tuples and dicts of them."""
    if type(value) is int:
        return -_INT64 <= value < _INT64
    if value is None or type(value) in (bool, float, str):
        return True
    if depth == _MAX_DEPTH:
        return False
    if isinstance(value, dict):
        return all(type(key) is str and is_plain(item, depth + 1) for key, item in value.items())
    return isinstance(value, (list, tuple)) and all(is_plain(item, depth + 1) for item in value)


def plain_record(value: Plain) -> bytes:
    """Return the record that holds a plain value."""
    out = bytearray(b"\x80\x02")
    _append(out, value)
    out += b"."
    return pickle_record(bytes(out))


def _append(out: bytearray, value: Plain) -> None:
    """Append the opcodes that make a value."""
    if value is None:
        out += b"N"
    elif isinstance(value, bool):
        out += b"\x88" if value else b"\x89"
    elif isinstance(value, int):
        _append_int(out, value)
    elif isinstance(value, float):
        out += b"G" + struct.pack(">d", value)
    elif isinstance(value, str):
        text = value.encode()
        out += b"X" + struct.pack("<I", len(text)) + text
    elif isinstance(value, dict):
        out += b"}("
        for key, item in value.items():
            _append(out, key)
            _append(out, item)
        out += b"u"
    else:
        out += b"](" if isinstance(value, list) else b"("
        for item in value:
            _append(out, item)
        out += b"e" if isinstance(value, list) else b"t"


def _append_int(out: bytearray, value: int) -> None:
    if -(1 << 31) <= value < 1 << 31:
        out += b"J" + struct.pack("<i", value)
    else:
        digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        out += b"\x8a" + bytes((len(digits),)) + digits
