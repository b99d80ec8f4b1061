"""Tensors of classes: the value of each that the table has, and a refusal by name of every other."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import SourceError
from shardkit.formats.torchsave.classes import UnreadableClass
from shardkit.formats.torchsave.file import TensorRef, UnreadableTensor, open_torch_file
from shardkit.formats.torchsave.record import TensorRecord
from tests.formats.torchsave.classes import UNREADABLE, respell, unpacked
from tests.formats.torchsave.samples import read_record

FLOAT8 = "torchao-0.18-float8-1.pt"


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("classes"))


def read(path: Path) -> TensorRecord:
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_record(fd, 0, path.stat().st_size, check_crc=True)
    finally:
        os.close(fd)


def in_rank_file(path: Path) -> Any:
    return open_torch_file(str(path), path.name).tree


def values(path: Path, record: TensorRecord) -> list[float]:
    data = path.read_bytes()[record.start : record.start + record.nbytes]
    if record.dtype.name == "bfloat16":  # the upper half of a float32
        data = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))
    return [each for (each,) in struct.iter_unpack("<f", data)]


def test_the_table_gives_the_value_of_what_each_class_wrote(records: Path) -> None:
    readable = sorted(path for path in records.glob("*.pt") if path.name not in UNREADABLE)
    assert len(readable) == 16
    for path in readable:
        first, record = int(path.stem.rpartition("-")[2]), read(path)
        size = 64 if "grouped" in path.stem else 32
        assert values(path, record) == list(range(first, first + size)), path.name
        assert record.shape == ((2, 4, 8) if size == 64 else (4, 8)), path.name
        found = in_rank_file(path)
        assert isinstance(found, TensorRef)
        assert (found.start, found.nbytes, found.dtype) == (record.start, record.nbytes, record.dtype)


def test_what_lies_beside_the_value_is_told_for_its_checksum(records: Path) -> None:
    assert not read(records / FLOAT8).other_storages
    assert [each.nbytes for each in read(records / "torchao-0.18-float8-scale-2.pt").other_storages] == [4]
    assert [each.nbytes for each in read(records / "torchao-0.5-float8-delayed-12.pt").other_storages] == [
        4,
        64,
        4,
    ]


@pytest.mark.parametrize("name", UNREADABLE)
def test_other_classes_are_refused_by_name(records: Path, name: str) -> None:
    with pytest.raises(UnreadableClass, match=re.escape(UNREADABLE[name])) as caught:
        read(records / name)
    assert "damaged" not in str(caught.value)
    assert caught.value.class_name == UNREADABLE[name].partition(",")[0]
    found = in_rank_file(records / name)
    assert isinstance(found, UnreadableTensor)
    assert found.name == UNREADABLE[name]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"ctorchao.", b"cmytools.", "mytools.*CastTensor, which is made of _tensor"),
        (b"Float8CastTensor", b"Float8CastTwoOne", "Float8CastTwoOne, which is made of _tensor"),
        (
            b"_precomputed_scale",
            b"_precomputed_shift",
            "CastTensor, with attributes .* not known: _precomputed_shift",
        ),
        (b"X\7\0\0\0_tensor", b"X\7\0\0\0_factor", "CastTensor, whose _tensor is no plain tensor"),
        (b"K\4K\x08\x86q\4", b"K\5K\x08\x86q\4", "CastTensor, whose _tensor has another dtype or shape"),
        (b"torch\nfloat32", b"torch\nfloat64", "CastTensor, whose _tensor has another dtype or shape"),
    ],
)
def test_nothing_is_guessed(records: Path, tmp_path: Path, old: bytes, new: bytes, reason: str) -> None:
    """A class of another package or name, another attribute, or a value of another dtype or shape."""
    path = tmp_path / FLOAT8
    path.write_bytes((records / FLOAT8).read_bytes())
    respell(path, old, new)
    with pytest.raises(UnreadableClass, match=reason):
        read(path)
    found = in_rank_file(path)
    assert isinstance(found, UnreadableTensor)
    assert re.search(reason, found.name)


def test_another_function_than_torchs_is_no_class(records: Path, tmp_path: Path) -> None:
    """What would run something as torch loads it is not called whole."""
    path = tmp_path / FLOAT8
    path.write_bytes((records / FLOAT8).read_bytes())
    respell(path, b"torch._utils\n_rebuild_wrapper_subclass", b"posix\nsystem".ljust(38, b"_"))
    with pytest.raises(SourceError, match="something other than one tensor") as caught:
        read(path)
    assert not isinstance(caught.value, UnreadableClass)
