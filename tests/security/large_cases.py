"""Files as large as they may be, made of what takes most memory: accepted or refused, it has a bound."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from shardkit.pickles import policies
from tests.security.case import HARMLESS, Case
from tests.security.dcp_cases import good_pickle, saved, with_pickle
from tests.security.hub_cases import put

_FILE = "model_world_size_1_rank_0.pt"
_BYTES = policies.MAX_INERT_BYTES - 64
_HEAD, _KEY = b"\x80\x02", b"X\x01\0\0\0a"
_CLASS = b"ctorch.distributed.x\ny\nq\0"


def _dict_of(value: bytes) -> bytes:
    """{"a": value}, so that it is looked through as a state dict is."""
    return _HEAD + b"}" + _KEY + value + b"s."


def _list_of(unit: bytes, most: int, before: bytes = b"") -> bytes:
    return _dict_of(before + b"(" + unit * min(most, _BYTES // len(unit)) + b"l")


def _tensors(num: int, more: bytes = b"") -> bytes:
    """A list that has one tensor many times, and other values."""
    pickled = good_pickle([torch.zeros(6, 4)])
    assert pickled.endswith(b"a.")
    memo = struct.pack("<I", 900)  # a slot that nobody uses
    return _dict_of(b"](" + pickled[5:-2] + b"r" + memo + (b"j" + memo) * num + more + b"e")


_PICKLES: Mapping[str, Callable[[], bytes]] = {
    "one-text": lambda: _dict_of(b"X" + struct.pack("<I", _BYTES - 4) + b"a" * (_BYTES - 8) + b"\xf0\x9f\x98\x80"),
    "odd-memo": lambda: _HEAD + b"N" + b"".join(b"r" + struct.pack("<I", 2 * i + 1) for i in range(6_000_000)) + b".",
    "globals": lambda: _HEAD + b"".join(b"c%x\nb\n0" % i for i in range(2_500_000)) + b"N.",
    "objects": lambda: _list_of(b"h\0)R}K\1Nsb", _BYTES, _CLASS + b"0"),
    "tensors-and-integers": lambda: _tensors(policies.MAX_THINGS - 10, b"](" + b"M\xff\xff" * 4_000_000 + b"e"),
}  # fmt: skip


def _many_entries(d: Path) -> None:
    import zipfile

    with zipfile.ZipFile(d / _FILE, "w") as file:
        for number in range(100_000):
            file.writestr(f"archive/data/{number}", b"")


def _long_directory(d: Path) -> None:
    """One that is 4 GiB long, in a file that has them but no block of them."""
    size, data = 1 << 32, saved({})
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 1, 1, size - len(data) - 22, len(data), 0)
    with open(d / _FILE, "wb") as file:
        file.write(data)
        file.seek(size - 22)
        file.write(end)


def cases() -> Iterator[Case]:
    """Every case of this kind; all other commands open the file in the same way."""
    changes: dict[str, Callable[[Path], None]] = {
        name: lambda d, make=make: put(_FILE, with_pickle(make()))(d)  # made where it is used, and forgotten
        for name, make in _PICKLES.items()
    }
    for name, change in {**changes, "entries": _many_entries, "directory": _long_directory}.items():
        yield Case(
            id=f"large-{name}", sample="verl", change=change, mention=(), expect=HARMLESS, only=("inspect",)
        )
