"""Records of one tensor: the zip, its `data.pkl`, and the scanner that compares records; held against torch."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from shardkit.core.dtypes import BY_NAME
from shardkit.errors import ShardkitError
from shardkit.formats.torchsave.record import TensorRecord, parse_tensor
from shardkit.formats.torchsave.scan import BulkScanner, RecordScanner, Template
from tests.formats.torchsave.classes import UNREADABLE, unpacked
from tests.formats.torchsave.samples import read_record
from tests.fuzz.mutate import change_bytes, pick
from tests.fuzz.mutate_pickle import change_pickle
from tests.fuzz.mutate_zip import Member, build, change_header, change_saved, members
from tests.fuzz.reference import load_tensor
from tests.fuzz.target import MemoryFile, Target, attempt

_file = MemoryFile()
_MAX_LOADED = 1 << 16  # bytes of a storage that is made to ask torch about it


_MAX_COMPARED = 1 << 20
_OF_CLASSES = (b"_rebuild_from_type", b"_in_reduce_ex", b"_rebuild_parameter_with_state")
"""Torch would have to import the classes."""


def check_record(data: bytes) -> bool:
    """A record that is accepted, with its CRC-32 checked, gives the tensor that torch loads from it."""
    _file.put(data)
    record = attempt(lambda: read_record(_file.fd, 0, len(data), where="f", check_crc=True))
    if record is None:
        return False
    assert record.data_start <= record.start
    assert record.data_start + max(record.reach, record.data_nbytes) <= len(data)
    loaded = None if any(mark in data for mark in _OF_CLASSES) else load_tensor(data)
    if loaded is None:
        return True
    _compare(loaded, record)
    storage = data[record.data_start : record.data_start + record.data_nbytes]
    assert len(storage) == record.data_nbytes
    if loaded.numel() <= _MAX_COMPARED:  # a stride of 0 makes as many as one likes of a few bytes
        assert _values(storage, record) == raw(loaded)
    return True


def _compare(loaded: Any, record: TensorRecord) -> None:
    assert type(loaded) is torch.Tensor
    assert str(loaded.dtype) == f"torch.{record.dtype.name}"
    assert tuple(loaded.shape) == record.shape
    assert loaded.stride() == record.stride
    assert loaded.storage_offset() == record.storage_offset


def raw(tensor: torch.Tensor) -> bytes:
    """The tensor's elements row-major, as they are stored."""
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)  # a copy of a bool is 0 or 1, whatever was stored
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _values(storage: bytes, record: TensorRecord) -> bytes:
    """The elements row-major, gathered one by one."""
    positions = [record.storage_offset]
    for size, stride in zip(record.shape, record.stride, strict=True):
        positions = [at + step * stride for at in positions for step in range(size)]
    width = record.dtype.itemsize
    return b"".join(storage[at * width : (at + 1) * width] for at in positions)


@cache
def record_seeds() -> list[bytes]:
    """Tensors of every dtype and several layouts, as torch saves them."""
    base = torch.arange(24.0).reshape(4, 6)
    tensors = [
        torch.arange(6.0),
        base.t(),
        torch.tensor(2.5),
        torch.empty(0, 4),
        base.clone()[:2, 1:3],
        base[1],
    ]
    tensors.append(torch.zeros(3, dtype=torch.float32, requires_grad=True).detach())
    for dtype in BY_NAME.values():
        flat = torch.arange(4 * dtype.itemsize, dtype=torch.uint8)
        tensors.append(flat.view(getattr(torch, dtype.name)))
    seeds = []
    for number, tensor in enumerate(tensors):
        out = io.BytesIO()
        torch.save(tensor, out, pickle_protocol=2 + number % 3 if number > 5 else 2)
        seeds.append(out.getvalue())
    return seeds


@cache
def class_seeds() -> list[bytes]:
    """A record of each class whose values are read, as it wrote it."""
    with TemporaryDirectory() as folder:
        records = sorted(unpacked(Path(folder)).glob("*.pt"))
        return [path.read_bytes() for path in records if path.name not in UNREADABLE]


@cache
def pickle_seeds() -> list[bytes]:
    """The pickles of the same."""
    return [members(seed)[0].data for seed in record_seeds()]


_WORDS = (
    *("storage", "0", "1", "cpu", "meta", "cuda:0", "torch", "FloatStorage", "float32", "torch._utils"),
    *("_rebuild_tensor_v2", "_rebuild_tensor_v3", "collections", "OrderedDict", "builtins", "eval"),
)


def mutate_record(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """Edit the pickle, the entries or the headers of a zip."""
    return change_saved(rng, seeds, _WORDS)


def check_tensor_pickle(data: bytes) -> bool:
    """A `data.pkl` that is accepted gives the tensor that torch makes of it, where the storage is small."""
    found = attempt(lambda: parse_tensor(data, "f"))
    if found is None:
        return False
    if found.data_nbytes > _MAX_LOADED or found.reach > found.data_nbytes:
        return True
    parts = [Member(b"archive/data.pkl", data, b""), Member(b"archive/byteorder", b"little", b"")]
    parts += [
        Member(b"archive/data/0", bytes(found.data_nbytes), b""),
        Member(b"archive/version", b"3\n", b""),
    ]
    loaded = load_tensor(build(parts))
    if loaded is not None:
        _compare(loaded, found)
    return True


def mutate_tensor_pickle(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """Edit opcodes."""
    return change_pickle(rng, pick(rng, seeds), (pick(rng, seeds),), _WORDS)


_GOOD = 3  # records before the one that is edited


def check_scan(data: bytes) -> bool:
    """Records that lie one after the other are read by the scanner as they are one by one, and in bulk."""
    _file.put(data)
    good = _scan_seed(data)
    length = len(record_seeds()[good]) if good is not None else 0
    ranges = [(i * length, length) for i in range(_GOOD)] if length else []
    ranges.append((_GOOD * length, len(data) - _GOOD * length))
    scanner = RecordScanner()
    scanner.open(_file.fd)
    alone, template = [], None
    for start, nbytes in ranges:
        found = attempt(lambda s=start, n=nbytes: scanner.read("kind", s, n, where="f"))
        try:
            alone.append(read_record(_file.fd, start, nbytes, where="f"))
        except ShardkitError:
            alone.append(None)
        assert found == alone[-1], "the scanner and the reader differ"
        template = template or scanner.template_of("kind", length)
    if template is not None and ranges[-1][1] == length:
        _check_bulk(template, ranges, alone)
    return alone[-1] is not None


def _check_bulk(
    template: Template, ranges: Sequence[tuple[int, int]], alone: Sequence[TensorRecord | None]
) -> None:
    """What is alike in bulk is a record of the same kind, one by one."""
    offsets, lengths = np.array(ranges).T
    are_alike, crcs = BulkScanner().compare(_file.fd, [template] * len(ranges), offsets, lengths)
    known = template.record
    for start, is_alike, crc, record in zip(offsets, are_alike, crcs, alone, strict=True):
        if is_alike:
            digest = int(crc) if crc or not known.data_nbytes else None
            assert record == replace(known, data_start=known.data_start + int(start), crc32=digest)


@cache
def _by_start() -> dict[bytes, int]:
    return {seed: number for number, seed in enumerate(record_seeds())}


def _scan_seed(data: bytes) -> int | None:
    """Which seed an input begins with, several times."""
    for seed, number in _by_start().items():
        if data.startswith(seed * _GOOD):
            return number
    return None


def scan_seeds() -> list[bytes]:
    """The same record several times."""
    return [seed * (_GOOD + 1) for seed in record_seeds()[:8]]


def mutate_scan(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """Edit the last record, mostly without changing its length."""
    seed = pick(rng, seeds)
    length = len(seed) // (_GOOD + 1)
    last = seed[:length]
    kind = rng.random()
    if kind < 0.4:
        changed = bytearray(last)
        for _ in range(1 + int(rng.random() * 3)):
            changed[int(rng.random() * length)] = pick(rng, (0, 1, 255, int(rng.random() * 256)))
        last = bytes(changed)
    elif kind < 0.65:
        last = change_header(rng, last)
    elif kind < 0.9:
        parts = [
            part._replace(data=rng.randbytes(len(part.data)))
            if part.name.endswith((b"data/0", b"_id")) and rng.random() < 0.7
            else part
            for part in members(last)
        ]
        last = build(parts, has_crcs=rng.random() < 0.7)
        if rng.random() < 0.4:
            last = change_header(rng, last)
    else:
        last = change_bytes(rng, last)
    return seed[: _GOOD * length] + last


TARGETS = {
    "record": Target(check_record, lambda: [*record_seeds(), *class_seeds()], mutate_record),
    "tensor_pickle": Target(check_tensor_pickle, pickle_seeds, mutate_tensor_pickle),
    "record_scan": Target(check_scan, scan_seeds, mutate_scan),
}
