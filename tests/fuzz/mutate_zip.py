"""Taking zips of `torch.save` apart, and putting them together again with right CRCs, sizes and places."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple
from zlib import crc32

from tests.fuzz.mutate import BOUNDARIES, change_bytes, pick
from tests.fuzz.mutate_pickle import change_pickle

_LOCAL, _CENTRAL = struct.Struct("<IHHHHHIIIHH"), struct.Struct("<IHHHHHHIIIHHHHHII")
_END, _END64, _LOCATOR = struct.Struct("<IHHHHIIH"), struct.Struct("<IQHHIIQQQQ"), struct.Struct("<IIQI")
_FLAGS = 0x0808


class Member(NamedTuple):
    """One entry of a zip."""

    name: bytes
    data: bytes
    extra: bytes
    """Of the header in front of the data: padding."""


@lru_cache(maxsize=512)
def members(data: bytes) -> tuple[Member, ...]:
    """Return the entries of a zip that `torch.save` wrote."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
        contents = [archive.read(info) for info in infos]
    found = []
    for info, content in zip(infos, contents, strict=True):
        fields = _LOCAL.unpack_from(data, info.header_offset)
        at = info.header_offset + _LOCAL.size + fields[9]
        found.append(Member(info.filename.encode(), content, data[at : at + fields[10]]))
    return tuple(found)


def build(parts: Sequence[Member], *, has_crcs: bool = True, is_zip64: bool = True) -> bytes:
    """Return a zip spelled as torch spells it."""
    out, directory = [], []
    at = 0
    for name, data, extra in parts:
        crc = crc32(data) if has_crcs or name.endswith(b".pkl") else 0
        head = _LOCAL.pack(0x04034B50, 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(name), len(extra))
        pieces = (head, name, extra, data, struct.pack("<4sIII", b"PK\x07\x08", crc, len(data), len(data)))
        out += pieces
        fields = (0, 0, _FLAGS, 0, 0, 0, crc, len(data), len(data), len(name), 0, 0, 0, 0, 0, at)
        directory += [_CENTRAL.pack(0x02014B50, *fields), name]
        at += sum(map(len, pieces))
    central = b"".join(directory)
    count, end = len(parts), at + len(central)
    if is_zip64:
        out += [central, _END64.pack(0x06064B50, 44, 0x031E, 45, 0, 0, count, count, len(central), at)]
        out += [_LOCATOR.pack(0x07064B50, 0, end, 1)]
    else:
        out.append(central)
    out.append(_END.pack(0x06054B50, 0, 0, count, count, len(central), at, 0))
    return b"".join(out)


def change_zip(
    rng: Random, data: bytes, others: Sequence[bytes], change: Callable[[Random, bytes], bytes]
) -> bytes:
    """Return a zip with an edit of its pickle, its entries or its headers.

    Args:
        others: zips to take entries from.
        change: edits the pickle.
    """
    kind = rng.random()
    if kind < 0.1:
        return change_bytes(rng, data)
    parts = list(members(data))
    if kind < 0.6:
        for at, part in enumerate(parts):
            if part.name.endswith(b"data.pkl"):
                parts[at] = part._replace(data=change(rng, part.data))
    elif kind < 0.85:
        _change_member(rng, parts, others)
    built = build(parts, has_crcs=rng.random() < 0.7, is_zip64=rng.random() < 0.8)
    return change_header(rng, built) if rng.random() < 0.3 else built


def _change_member(rng: Random, parts: list[Member], others: Sequence[bytes]) -> None:
    at, kind = int(rng.random() * len(parts)), int(rng.random() * 7)
    part = parts[at]
    if kind <= 1:
        parts[at] = part._replace(data=change_bytes(rng, part.data))
    elif kind == 2:
        parts[at] = part._replace(name=change_bytes(rng, part.name))
    elif kind == 3:
        del parts[at]
    elif kind == 4:
        parts.insert(at, pick(rng, members(pick(rng, others))))
    elif kind == 5:
        parts.append(parts.pop(at))
    else:
        parts[at] = part._replace(extra=rng.randbytes(int(rng.random() * 80)))


_SIGNATURES = (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b"PK\x07\x08")


def change_header(rng: Random, data: bytes) -> bytes:
    """Return a zip with one or two numbers in its headers changed."""
    out = bytearray(data)
    for _ in range(1 + int(rng.random() * 2)):
        places = []
        signature, at = pick(rng, _SIGNATURES), -1
        while (at := data.find(signature, at + 1)) >= 0:
            places.append(at)
        if not places:
            continue
        at = pick(rng, places) + 4 + int(rng.random() * 44)
        width = pick(rng, (1, 2, 4))
        old = int.from_bytes(data[at : at + width], "little")
        new = old + pick(rng, (-1, 1, 1, 4)) if rng.random() < 0.5 else pick(rng, BOUNDARIES)
        out[at : at + width] = (new % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(out)


def change_saved(rng: Random, seeds: Sequence[bytes], words: Sequence[str]) -> bytes:
    """Return a changed file of `torch.save`."""

    def change(rng: Random, data: bytes) -> bytes:
        return change_pickle(rng, data, [_pickle_of(pick(rng, seeds))], words)

    return change_zip(rng, pick(rng, seeds), seeds, change)


@lru_cache(maxsize=512)
def _pickle_of(data: bytes) -> bytes:
    return next((part.data for part in members(data) if part.name.endswith(b"data.pkl")), b"N.")
