"""Small reads: what lies in one block is read once, what is kept is bounded, and errors name file and tensor."""

from __future__ import annotations

import os
from pathlib import Path

import numpy
import pytest

from shardkit.core.catalog import SourceFile
from shardkit.errors import IntegrityError
from shardkit.files import storage
from shardkit.files.storage import BLOCK
from shardkit.transfer.sources import SourceFiles

SIZE = 10 * BLOCK + 100


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    data = numpy.random.default_rng(0).bytes(SIZE)
    (tmp_path / "s").write_bytes(data)
    return data


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """First bytes of all blocks that are read from now on."""
    found: list[int] = []
    pread = storage.pread

    def counted(fd: int, nbytes: int, start: int) -> bytes:
        found.append(start)
        return pread(fd, nbytes, start)

    monkeypatch.setattr(storage, "pread", counted)
    return found


def opened(directory: Path, recent_bytes: int) -> SourceFiles:
    file = SourceFile(name="s", path=str(directory / "s"), size=SIZE)
    return SourceFiles([file], recent_bytes)


@pytest.mark.parametrize("recent_bytes", [0, 4 * BLOCK, 1 << 20])
def test_any_small_range_is_what_the_file_holds(tmp_path: Path, content: bytes, recent_bytes: int) -> None:
    random = numpy.random.default_rng(1)
    with opened(tmp_path, recent_bytes) as sources, sources.reader() as reader:
        for _ in range(300):
            nbytes = int(random.integers(0, BLOCK + 1))
            start = int(random.integers(0, SIZE - nbytes + 1))
            assert reader.read_small(0, start, nbytes, "w") == content[start : start + nbytes]
        assert reader.read_small(0, SIZE - BLOCK, BLOCK, "w") == content[-BLOCK:]


def test_neighbours_in_a_block_are_read_once(tmp_path: Path, content: bytes, reads: list[int]) -> None:
    with opened(tmp_path, 1 << 20) as sources:
        for thread in range(2):
            with sources.reader() as reader:
                for start in range(thread * 128, 3 * BLOCK, 256):
                    assert reader.read_small(0, start, 128, "w") == content[start : start + 128]
    assert reads == [0, BLOCK, 2 * BLOCK]


def test_what_is_kept_is_bounded_and_what_is_used_stays(
    tmp_path: Path, content: bytes, reads: list[int]
) -> None:
    with opened(tmp_path, 8 * BLOCK) as sources, sources.reader() as reader:
        for number in range(10):
            for wanted in (number, 0):
                assert reader.read_small(0, wanted * BLOCK, 9, "w") == content[wanted * BLOCK :][:9]
        assert reads == [number * BLOCK for number in range(10)]
        assert len(sources.recent) <= 8
        reader.read_small(0, BLOCK, 9, "w")
        assert reads[-1] == BLOCK  # it had been forgotten


def test_a_file_that_lost_its_end_is_named_with_the_tensor(tmp_path: Path, content: bytes) -> None:
    with opened(tmp_path, 1 << 20) as sources, sources.reader() as reader:
        assert reader.read_small(0, 10 * BLOCK, 50, "w") == content[10 * BLOCK :][:50]
        os.truncate(tmp_path / "s", 9 * BLOCK + 10)
        with pytest.raises(IntegrityError, match=r"s ends at byte 36874 while layer\.w is read from it"):
            reader.read_small(0, 9 * BLOCK, 50, "layer.w")
        with pytest.raises(IntegrityError, match="changed"):
            sources.check_unchanged()
