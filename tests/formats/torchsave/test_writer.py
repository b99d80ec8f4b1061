"""Our records of tensors are torch's, byte for byte; torch reads our records of plain data."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardkit.core.dtypes import BY_NAME, DType
from shardkit.files.digest import crc32
from shardkit.formats.torchsave.writer import is_plain, plain_record, record_skeleton

SHAPES = [(), (0,), (1,), (7,), (3, 0, 5), (255, 1), (256, 300), (2, 3, 4), (1, 2, 3, 4, 5), (70_000, 3)]
ID_DIGITS = 40


def without_id(record: bytes) -> bytes:
    """Blank the entry that hashes the contents, and the two places that hold its CRC."""
    at = record.index(b"archive/.data/serialization_id")
    start = record.index(b"1572819951185464302", at)
    crc = crc32(record[start : start + ID_DIGITS]).to_bytes(4, "little")
    blank = record[:start] + b"0" * ID_DIGITS + record[start + ID_DIGITS :]
    assert blank.count(crc) == 2
    return blank.replace(crc, b"\0\0\0\0")


def filled(dtype: DType, data: bytes, shape: tuple[int, ...]) -> bytes:
    skeleton = record_skeleton(dtype, shape)
    return skeleton.prefix + data + skeleton.suffix(crc32(data))


@pytest.mark.parametrize("name", BY_NAME)
def test_equals_torch_save(name: str) -> None:
    for shape in SHAPES:
        nbytes = BY_NAME[name].itemsize * torch.Size(shape).numel()
        data = bytes(i % 2 for i in range(nbytes))
        raw = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(0, dtype=torch.uint8)
        )
        expected = io.BytesIO()
        torch.save(raw.view(getattr(torch, name)).reshape(shape), expected)
        assert without_id(filled(BY_NAME[name], data, shape)) == without_id(expected.getvalue()), shape


def test_python_finds_the_crcs_right() -> None:
    record = filled(BY_NAME["float32"], b"\x01" * 24, (2, 3))
    with zipfile.ZipFile(io.BytesIO(record)) as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("nbytes", [2**32 - 2, 2**32 - 1, 2**32, 2**32 + 65])
def test_equals_torch_save_beyond_4_gib(nbytes: int, tmp_path: Path) -> None:
    # The file is sparse and the tensor's pages are never touched: only the ends are read.
    skeleton = record_skeleton(BY_NAME["uint8"], (nbytes,))
    path = tmp_path / "archive.pt"
    with torch.serialization.skip_data():
        torch.save(torch.empty(nbytes, dtype=torch.uint8), path)
    with path.open("rb") as file:
        prefix = file.read(len(skeleton.prefix))
        file.seek(-skeleton.suffix_nbytes, io.SEEK_END)
        suffix = file.read()
        size = file.tell()
    assert size == skeleton.nbytes
    assert prefix == skeleton.prefix
    assert without_id(suffix) == without_id(skeleton.suffix(0))


def test_torch_loads_what_we_write(tmp_path: Path) -> None:
    expected: Any = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    data = expected.view(torch.uint8).numpy().tobytes()
    loaded = torch.load(io.BytesIO(filled(BY_NAME["bfloat16"], data, (2, 3))), weights_only=True)
    assert torch.equal(loaded, expected)


_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False)
    | st.text()
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def same(found: object, expected: object) -> bool:
    """Equal, and of equal types: True is not 1, (1,) is not [1]."""
    return found == expected and repr(found) == repr(expected)


@given(_VALUES)
def test_torch_reads_it_back_as_weights(value: object) -> None:
    if not is_plain(value):  # nested too deeply
        return
    record = plain_record(value)
    assert same(torch.load(io.BytesIO(record), weights_only=True), value)
    assert record == plain_record(value)


def test_integers_of_every_length() -> None:
    """The sign needs a bit of its own."""
    values = [sign * ((1 << bits) + more) for bits in range(63) for more in (-1, 0) for sign in (1, -1)]
    values += [-(1 << 63), (1 << 63) - 1]
    assert torch.load(io.BytesIO(plain_record(list(values))), weights_only=True) == values


def test_a_record_is_torch_s_but_for_the_spelling_of_the_pickle() -> None:
    value = {"lr": 1e-3, "betas": (0.9, 0.999), "params": ["a", "b"], "foreach": None}
    theirs = io.BytesIO()
    torch.save(value, theirs)
    ours, torchs = (zipfile.ZipFile(file) for file in (io.BytesIO(plain_record(value)), theirs))
    assert ours.testzip() is None
    names = [entry.filename for entry in ours.infolist()]
    assert names == [entry.filename for entry in torchs.infolist()]
    for name in names:
        if not name.endswith(("data.pkl", "serialization_id")):
            assert ours.read(name) == torchs.read(name)


@pytest.mark.parametrize("value", [b"bytes", {1: 2}, 1 << 63, {"a": {1, 2}}, [object()], torch.ones(1), 1j])
def test_what_is_not_plain(value: object) -> None:
    assert not is_plain(value)
    nested: object = 1
    for _ in range(20):
        nested = [nested]
    assert not is_plain(nested)
