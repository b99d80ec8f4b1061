"""Records that torch writes are read without loading them; everything else is refused."""

from __future__ import annotations

import io
import os
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardkit.core.dtypes import BY_NAME
from shardkit.errors import IntegrityError, SourceError
from shardkit.formats.torchsave.record import TensorRecord, gather_strided, parse_tensor
from shardkit.formats.torchsave.writer import record_skeleton
from tests.bits import raw
from tests.formats.torchsave.samples import read_record, saved

LEAD = b"something before"


class Disk:
    """One file whose content a test replaces; `read` opens it as a record after `LEAD`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, record: bytes, *, check_crc: bool = False) -> TensorRecord:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, LEAD + record + b"something after", 0)
        return read_record(self._fd, len(LEAD), len(record), where="__0_0.distcp", check_crc=check_crc)

    def bytes_of(self, record: TensorRecord) -> bytes:
        return os.pread(self._fd, record.nbytes, record.start)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield Disk(fd)
    os.close(fd)


def random_tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    nbytes = BY_NAME[dtype].itemsize * torch.Size(shape).numel()
    data = torch.tensor([i % 2 for i in range(nbytes)], dtype=torch.uint8)
    return data.view(getattr(torch, dtype)).reshape(shape)


@pytest.mark.parametrize("dtype", BY_NAME)
def test_reads_what_torch_saves(disk: Disk, dtype: str) -> None:
    for shape in ((), (0, 4), (3,), (2, 3), (1, 2, 3, 4), (700, 3)):
        tensor = random_tensor(dtype, shape)
        record = disk.read(saved(tensor), check_crc=True)
        assert (record.dtype, record.shape) == (BY_NAME[dtype], shape)
        assert record.is_contiguous
        assert record.nbytes == record.data_nbytes
        assert record.crc32 is not None
        assert disk.bytes_of(record) == raw(tensor)


def test_strides_and_offsets_are_told(disk: Disk) -> None:
    base = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    record = disk.read(saved(base.t()))
    assert (record.shape, record.stride, record.is_contiguous) == ((6, 4), (1, 6), False)
    record = disk.read(saved(base[2:]))
    assert (record.storage_offset, record.is_contiguous) == (12, True)
    assert disk.bytes_of(record) == raw(base[2:])
    assert not disk.read(saved(base[:, :2])).is_contiguous
    assert disk.read(saved(base[:, :0])).is_contiguous
    assert disk.read(saved(base[:1].t())).stride == (1, 6)


def test_crc_that_was_not_recorded(disk: Disk) -> None:
    skeleton = record_skeleton(BY_NAME["uint8"], (4,))
    record = disk.read(skeleton.prefix + b"abcd" + skeleton.suffix(0), check_crc=True)
    assert record.crc32 is None
    assert disk.bytes_of(record) == b"abcd"


def test_record_beyond_4_gib(tmp_path: Path) -> None:
    nbytes = 2**32 + 65
    skeleton = record_skeleton(BY_NAME["uint8"], (nbytes,))
    with (tmp_path / "sparse").open("wb+") as file:
        file.write(skeleton.prefix)
        file.seek(nbytes, os.SEEK_CUR)
        file.write(skeleton.suffix(0))
        file.flush()
        record = read_record(file.fileno(), 0, skeleton.nbytes)
    assert (record.shape, record.data_nbytes, record.start) == ((nbytes,), nbytes, len(skeleton.prefix))


def test_damaged_data_is_found_when_asked_for(disk: Disk) -> None:
    data = bytearray(saved(torch.arange(1000)))
    data[disk.read(bytes(data)).start - len(LEAD) + 100] ^= 1
    disk.read(bytes(data))
    with pytest.raises(IntegrityError, match=r"__0_0\.distcp, record at byte 16: entry data/0 is damaged"):
        disk.read(bytes(data), check_crc=True)


def test_damaged_small_entry_is_always_found(disk: Disk) -> None:
    data = saved(torch.arange(3))
    with pytest.raises(IntegrityError, match=r"data\.pkl"):
        disk.read(data.replace(b"LongStorage", b"LongStoragf", 1))


def test_lazy_views_have_the_signs_of_their_values(disk: Disk) -> None:
    value = torch.tensor([1 + 2j, -3 - 0j], dtype=torch.complex64).conj()
    for view in (value, value.imag, torch._neg_view(value)):
        record = disk.read(saved(view))
        assert not record.is_contiguous
        stored = os.pread(disk._fd, record.data_nbytes, record.data_start)
        assert (
            bytes(gather_strided(memoryview(stored), record))
            == view.resolve_conj().resolve_neg().numpy().tobytes()
        )
    with pytest.raises(SourceError, match="negated"):
        disk.read(saved(torch._neg_view(torch.arange(3))))


@pytest.mark.parametrize(
    "value", [{"a": 1}, [torch.ones(1)], 5, torch.nn.Parameter(torch.ones(1)), torch.ones(2, 2).to_sparse()]
)
def test_anything_but_a_plain_tensor_is_refused(disk: Disk, value: object) -> None:
    with pytest.raises(SourceError, match="__0_0"):
        disk.read(saved(value))


def test_big_endian_and_compressed_entries_are_refused(disk: Disk) -> None:
    out = io.BytesIO(saved(torch.ones(3)))
    for compression, order in ((zipfile.ZIP_STORED, b"big"), (zipfile.ZIP_DEFLATED, b"little")):
        changed = io.BytesIO()
        with zipfile.ZipFile(out) as old, zipfile.ZipFile(changed, "w", compression) as new:
            for name in old.namelist():
                new.writestr(name, order if name.endswith("byteorder") else old.read(name))
        with pytest.raises(SourceError, match=r"byte order|compressed"):
            disk.read(changed.getvalue())


@pytest.mark.parametrize(
    "extra", ["archive/data/1", "archive/data.pkl", "other/version", "archive/../x", "x"]
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_unknown_or_repeated_entries_are_refused(disk: Disk, extra: str) -> None:
    out = io.BytesIO(saved(torch.ones(3)))
    with zipfile.ZipFile(out, "a") as archive:
        archive.writestr(extra, b"x")
    with pytest.raises(SourceError, match=r"unknown or given twice|entries"):
        disk.read(out.getvalue())


@pytest.mark.prove
def test_every_truncation_is_refused(disk: Disk) -> None:
    data = saved(torch.ones(3, dtype=torch.bfloat16))
    for stop in range(0, len(data), 3):
        with pytest.raises(SourceError):
            disk.read(data[:stop])


@pytest.mark.prove
def test_mutations_are_refused_or_harmless(disk: Disk) -> None:
    data = saved(torch.arange(6, dtype=torch.int16).reshape(2, 3))
    rng = random.Random(7)
    for _ in range(3000):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            changed[rng.randrange(len(changed))] = rng.choice((0, 1, 255, rng.randrange(256)))
        try:
            record = disk.read(bytes(changed), check_crc=True)
        except SourceError:
            continue
        assert record.data_start + record.data_nbytes <= len(LEAD) + len(data)


def test_pickle_mutations_are_refused_or_plain() -> None:
    pickles = []
    for tensor in (torch.ones(2, 3), torch.ones(300, dtype=torch.uint16), torch.ones(1, 2, 3, 4)):
        with zipfile.ZipFile(io.BytesIO(saved(tensor))) as archive:
            pickles.append(archive.read("archive/data.pkl"))
    rng = random.Random(8)
    for _ in range(6000):
        changed = bytearray(rng.choice(pickles))
        for _ in range(rng.choice((1, 1, 2, 4))):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        try:
            tensor_ = parse_tensor(bytes(changed), "data.pkl")
        except SourceError:
            continue
        assert len(tensor_.shape) == len(tensor_.stride)
