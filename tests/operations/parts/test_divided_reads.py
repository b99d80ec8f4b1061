"""What parts read of a tensor that is cut along a later dim: what they have holes for, once; the rule is in docs/parts.md."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import shardkit
from shardkit.core.placements import Placement
from shardkit.core.text import KIB
from shardkit.files import storage
from shardkit.layout.layout import Layout, TensorLayout
from shardkit.operations.preshard import job as preshard_job
from tests.operations.parts.test_divided import files

RANKS = 4
EXPERTS, ROW = "layers.0.experts", "layers.0.rows"
# Two of eight rows of 48 KiB belong to a rank: 96 KiB in a row. A rank's part of a row of the other tensor is 512 bytes.
TENSORS = {EXPERTS: torch.randn(5, 8, 12 * KIB), ROW: torch.randn(256, 512)}


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is cut along its second dim."""
    make_layout = preshard_job.make_layout

    def second(tensor: TensorLayout) -> TensorLayout:
        return replace(tensor, placements=tuple(Placement(1) for _ in tensor.placements))

    def made(*args: Any, **more: Any) -> Layout:
        layout = make_layout(*args, **more)
        return replace(layout, tensors={fqn: second(tensor) for fqn, tensor in layout.tensors.items()})

    monkeypatch.setattr(preshard_job, "make_layout", made)


@contextmanager
def reads(path: Path) -> Iterator[list[tuple[int, int]]]:
    """Give (start, stop) of every read of a file's data."""
    found = list[tuple[int, int]]()
    preadv = storage.preadv

    def counted(fd: int, buffers: Sequence[Any], start: int) -> int:
        nbytes = preadv(fd, buffers, start)
        if os.readlink(f"/proc/self/fd/{fd}") == str(path):
            found.append((start, start + nbytes))
        return nbytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "preadv", counted)
        yield found


def place(path: Path, fqn: str) -> tuple[int, int]:
    """Return where a tensor lies in a safetensors file."""
    with safe_open(path, "np") as opened:  # its order is that of the file
        names = sorted(opened.keys())
    size = path.stat().st_size
    at = size - sum(TENSORS[name].nbytes for name in names)
    for name in names:
        if name == fqn:
            return at, at + TENSORS[name].nbytes
        at += TENSORS[name].nbytes
    raise KeyError(fqn)


def preshard(model: Path, out: Path, part: str | None = None, **options: Any) -> shardkit.PreshardResult:
    return shardkit.preshard(model, out, world_size=RANKS, layout="declared", part=part, **options)


def bytes_of(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> list[int]:
    """Return how often each 512 bytes of a tensor were read; reads begin and end at whole ones."""
    seen = [0] * ((stop - start) // 512)
    for first, end in ranges:
        for at in range(max(first, start), min(end, stop), 512):
            seen[(at - start) // 512] += 1
    return seen


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_a_part_reads_what_it_has_holes_for_and_nothing_twice(
    make_hub: Callable[..., Path], tmp_path: Path, dtype: str
) -> None:
    model = make_hub(TENSORS)
    source = model / "model.safetensors"
    experts, rows = place(source, EXPERTS), place(source, ROW)
    with reads(source) as of_one:
        whole = preshard(model, tmp_path / "whole", dtype=dtype)
    assert bytes_of(of_one, *experts) == [1] * (TENSORS[EXPERTS].nbytes // 512)
    assert bytes_of(of_one, *rows) == [1] * (TENSORS[ROW].nbytes // 512)
    total = [0] * (TENSORS[EXPERTS].nbytes // 512)
    last = None
    for number in range(1, RANKS + 1):
        with reads(source) as of_part:
            last = preshard(model, tmp_path / "out", f"{number}/{RANKS}", dtype=dtype)
        seen = bytes_of(of_part, *experts)
        assert sum(seen) == len(seen) // RANKS, "its rows of each expert, and nothing else"
        assert set(seen) == {0, 1}, "nothing is read twice"
        # The pieces of a row are short: the tensor is read whole, once.
        assert bytes_of(of_part, *rows) == [1] * (TENSORS[ROW].nbytes // 512)
        total = [a + b for a, b in zip(total, seen, strict=True)]
    assert set(total) == {1}, "all parts together read it once, and whoever commits reads none of it"
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert last is not None
    assert last.checked_bytes == whole.checked_bytes
    assert shardkit.verify(tmp_path / "out", full=True).ok


@pytest.mark.usefixtures("cut")
def test_another_number_of_parts_goes_on(make_hub: Callable[..., Path], tmp_path: Path) -> None:
    """Two of the files were read for one part; the others are read for two."""
    model = make_hub(TENSORS)
    preshard(model, tmp_path / "whole")
    preshard(model, tmp_path / "out", "1/2")
    for number in (1, 2, 3):
        preshard(model, tmp_path / "out", f"{number}/3", max_memory="2MiB")
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.usefixtures("cut")
def test_a_source_with_checksums_is_compared_by_all_parts_together(
    make_hub: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_hub(TENSORS)
    shardkit.write_manifest(model)
    whole = preshard(model, tmp_path / "whole")
    assert whole.checked_bytes == sum(tensor.nbytes for tensor in TENSORS.values())
    source = model / "model.safetensors"
    with reads(source) as of_all:
        results = [preshard(model, tmp_path / "out", f"{n}/{RANKS}") for n in range(1, RANKS + 1)]
    assert results[-1].checked_bytes == whole.checked_bytes
    assert set(bytes_of(of_all, *place(source, EXPERTS))) == {1}
    data = bytearray(source.read_bytes())
    data[place(source, EXPERTS)[0] + 5] ^= 1
    status = source.stat()
    source.write_bytes(data)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    for number in range(1, RANKS):
        preshard(model, tmp_path / "bad", f"{number}/{RANKS}")
    with pytest.raises(shardkit.IntegrityError, match=EXPERTS):
        preshard(model, tmp_path / "bad", f"{RANKS}/{RANKS}")
    assert not (tmp_path / "bad").exists()


@pytest.mark.usefixtures("cut")
def test_a_tensor_that_has_to_be_decoded_is_read_whole(tmp_path: Path) -> None:
    """A legacy file holds it in another order."""
    model = tmp_path / "model"
    model.mkdir()
    torch.save({EXPERTS: torch.randn(8, 5, 12 * KIB).transpose(0, 1)}, model / "pytorch_model.bin")
    preshard(model, tmp_path / "whole")
    for number in (1, 2):
        preshard(model, tmp_path / "out", f"{number}/2")
    assert files(tmp_path / "out") == files(tmp_path / "whole")
