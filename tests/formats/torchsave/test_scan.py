"""Records that are spelled like one before are taken from it; any other byte sends them the long way."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.errors import SourceError
from shardkit.formats.torchsave import scan as torch_record_scan
from shardkit.formats.torchsave.record import TensorRecord
from shardkit.formats.torchsave.scan import RecordScanner
from tests.formats.torchsave.samples import read_record, saved


class File:
    """Records one after the other, and a scanner that has the file open."""

    def __init__(self, fd: int, records: list[bytes]) -> None:
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"".join(records), 0)
        self.fd, self.starts, self.lengths = fd, [0], [len(record) for record in records]
        for record in records:
            self.starts.append(self.starts[-1] + len(record))
        self.scanner = RecordScanner()
        self.scanner.open(fd)

    def scan(self, number: int) -> TensorRecord:
        return self.scanner.read("kind", self.starts[number], self.lengths[number], where="f")

    def read(self, number: int) -> TensorRecord:
        return read_record(self.fd, self.starts[number], self.lengths[number], where="f")


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets of the records that were read entry by entry."""
    offsets: list[int] = []
    original = torch_record_scan.read_entries

    def spy(pread: Any, offset: int, *args: Any, **kwargs: Any) -> Any:
        offsets.append(offset)
        return original(pread, offset, *args, **kwargs)

    monkeypatch.setattr(torch_record_scan, "read_entries", spy)
    return offsets


@pytest.mark.parametrize("size", [0, 3, 5000])
def test_the_second_of_a_kind_is_the_same_as_read_the_long_way(
    fd: int, size: int, long_way: list[int]
) -> None:
    file = File(fd, [saved(torch.arange(size) + n) for n in range(4)])
    for number in range(4):
        assert file.scan(number) == file.read(number)
    assert long_way == [0]


def test_what_is_spelled_otherwise_is_read_the_long_way(fd: int, long_way: list[int]) -> None:
    """A transposed tensor and another dtype have records of the same length."""
    tensors = [torch.ones(3, 3), torch.ones(3, 3).t().contiguous().t(), torch.ones(3, 3, dtype=torch.int32)]
    file = File(fd, [saved(tensor) for tensor in tensors])
    found = [file.scan(number) for number in range(3)]
    assert found == [file.read(number) for number in range(3)]
    assert long_way == file.starts[:3]


def test_no_changed_byte_gets_by(fd: int) -> None:
    """Of the bytes around the data, each that the long way refuses is refused; the rest change nothing."""
    first, second = saved(torch.arange(7.0)), saved(torch.arange(7.0) + 1)
    data = File(fd, [first, second]).read(1)
    around = [at for at in range(len(second)) if not 0 <= at + len(first) - data.start < data.nbytes]
    random.seed(0)
    for at in random.sample(around, 600):
        changed = bytearray(second)
        changed[at] ^= 1 << random.randrange(8)
        file = File(fd, [first, bytes(changed)])
        file.scan(0)
        try:
            expected = file.read(1)
        except SourceError:
            with pytest.raises(SourceError):
                file.scan(1)
            continue
        assert file.scan(1) == expected


def test_a_record_that_is_cut_short(fd: int) -> None:
    file = File(fd, [saved(torch.arange(7.0)), saved(torch.arange(7.0) + 1)])
    os.ftruncate(fd, file.starts[2] - 10)
    file.scan(0)
    with pytest.raises(SourceError, match="inside it"):
        file.scan(1)
