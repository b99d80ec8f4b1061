"""What every codec does: any box has the bits of the whole, in any order, from several threads, and reads only what it names."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from shardkit import formats
from shardkit.core.catalog import BlockCodec, Catalog, Codec, Computed
from shardkit.core.dtypes import BY_NAME
from shardkit.core.factored import Target
from shardkit.core.regions import Region, full_region
from shardkit.formats.contract import PlainWeights
from shardkit.formats.hub.directory import open_model
from shardkit.keys.expressions import Opaque, Stored, cut, permute, reshape
from shardkit.transfer.codecs import boxes, dequantize, lora
from shardkit.transfer.codecs.bound import View
from shardkit.transfer.codecs.boxes import fill_box, fill_computed, kind_of
from shardkit.transfer.codecs.converted import GroupConverter, GroupMember
from shardkit.transfer.codecs.derive import derive
from shardkit.transfer.codecs.fold import Fold
from shardkit.transfer.codecs.lerp import Lerp
from shardkit.transfer.codecs.lora import Lora, LoraOfExperts, TrainedRows
from shardkit.transfer.sources import SourceFiles, bands, bytes_in_blocks
from tests.keys.test_expressions import window
from tests.models.quantised import random_nvfp4
from tests.transfer.codecs.block_fp8 import SCALES, encoders
from tests.transfer.codecs.test_dequantize import fp8

NAME = "a_proj.weight"
BFLOAT16, FLOAT32 = BY_NAME["bfloat16"], BY_NAME["float32"]

Tensors = dict[str, torch.Tensor]
Sample = tuple[Tensors, Codec | None]
"""Stored tensors, and the codec of `NAME`; None if opening the files as plain weights finds it."""


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _fp8(shape: tuple[int, ...], scales: tuple[int, ...], end: str = "_scale_inv") -> Callable[[], Sample]:
    return lambda: ({NAME: fp8(*shape), f"{NAME}{end}": _numbers(*scales).abs() * 1e-2}, None)


def _mxfp4() -> Sample:
    stored = {
        f"{NAME}_blocks": torch.randint(0, 256, (2, 21, 3, 16), dtype=torch.uint8),
        f"{NAME}_scales": torch.randint(100, 140, (2, 21, 3), dtype=torch.uint8),
    }
    return stored, None


def _nvfp4(numbers: str, scale: str, second: torch.Tensor) -> Callable[[], Sample]:
    def make() -> Sample:
        packed, scales = random_nvfp4(21, 80)
        return {f"{NAME}{numbers}": packed, f"{NAME}_scale": scales, f"{NAME}{scale}": second}, None

    return make


def _nvfp4_column() -> Sample:
    """Pairs along a dim that is not the last one, whose elements are neighbours in memory nevertheless."""
    packed, scales = random_nvfp4(1, 80)
    stored = {f"{NAME}_packed": packed.T, f"{NAME}_scale": scales.T}
    return {**stored, f"{NAME}_global_scale": torch.tensor([1234.5])}, None


def _fold() -> Sample:
    target = Target(path="a", rows=40, columns=29, rank=7)
    return {name: _numbers(*shape) for name, shape in target.shapes.items()}, Fold(target)


def _lerp(weight: float | None) -> Callable[[], Sample]:
    codec = Lerp(start="x", end="z", weight=weight, dtype=BFLOAT16, shape=(30, 7))
    return lambda: ({"x": _numbers(30, 7).bfloat16(), "z": _numbers(7, 30).T.bfloat16()}, codec)


def _lora(
    kind: Literal["linear", "transposed"], *, is_dora: bool = False, num_experts: int = 0
) -> Callable[[], Sample]:
    rows, columns, rank = 400, 21, 4

    def make() -> Sample:
        outputs, inputs = (rows, columns) if kind == "linear" else (columns, rows)
        count = num_experts or 1
        shape = (num_experts, rows, columns) if num_experts else (rows, columns)
        stored = {
            NAME: _numbers(*shape).bfloat16(),
            "lora.a": _numbers(rank * count, inputs),
            "lora.b": _numbers(outputs, rank * count),
            "lora.m": _numbers(outputs).abs(),
        }
        merge = Lora(
            base=NAME,
            dtype=BFLOAT16,
            shape=(rows, columns),
            a="lora.a",
            b="lora.b",
            magnitude="lora.m" if is_dora else None,
            scale=0.5,
            kind=kind,
        )
        return stored, LoraOfExperts(
            expert=merge, num_experts=num_experts, rank=rank
        ) if num_experts else merge

    return make


def _lora_of_bias() -> Sample:
    merge = Lora(
        base=NAME, dtype=FLOAT32, shape=(37,), a=None, b="lora.b", magnitude=None, scale=2, kind="bias"
    )
    return {NAME: _numbers(37), "lora.b": _numbers(37)}, merge


def _trained_rows() -> Sample:
    codec = TrainedRows(base=NAME, dtype=BFLOAT16, shape=(40, 9), rows="new", numbers=(3, 39, 0))
    return {NAME: _numbers(40, 9).bfloat16(), "new": _numbers(3, 9)}, codec


def _view() -> Sample:
    turned = permute(reshape(Stored("x", (24, 10)), (4, 6, 10)), (2, 0, 1))
    return {"x": _numbers(24, 10)}, View(cut(turned, Region((1, 0, 2), (8, 4, 4))), FLOAT32)


def _opaque() -> Sample:
    """A target that only code of others can compute, here the product of two stored tensors."""
    parts = tuple((name, Stored(name, shape)) for name, shape in (("x", (12, 5)), ("y", (5, 9))))
    expression = Opaque(target=NAME, group=NAME, parts=parts, shape=(12, 9))
    converter = GroupConverter(lambda _, values: {NAME: values[0] @ values[1]})
    views = tuple(View(stored, FLOAT32) for _, stored in parts)
    codec = GroupMember(converter=converter, expression=expression, parts=views, target=NAME)
    return {"x": _numbers(12, 5), "y": _numbers(5, 9)}, codec


def _encoder(name: str) -> Callable[[], Sample]:
    weight = 3 * _numbers(300, 200).bfloat16()
    return lambda: ({NAME: weight}, encoders({NAME: weight.shape})[name])


SAMPLES: dict[str, Callable[[], Sample]] = {
    "fp8 by blocks": _fp8((300, 200), (3, 2)),
    "fp8 by blocks, experts": _fp8((2, 130, 128), (2, 2, 1)),
    "fp8 by rows": _fp8((33, 20), (33, 1), "_scale"),
    "fp8, one scale": _fp8((33, 20), (1,), "_scale"),
    "mxfp4": _mxfp4,
    "nvfp4 of modelopt": _nvfp4("", "_scale_2", torch.tensor(0.00123)),
    "nvfp4 of compressed-tensors": _nvfp4("_packed", "_global_scale", torch.tensor([1234.5])),
    "nvfp4, a column": _nvfp4_column,
    "factors": _fold,
    "average": _lerp(0.25),
    "copy": _lerp(None),
    "lora": _lora("linear"),
    "lora, transposed": _lora("transposed"),
    "lora of experts": _lora("linear", num_experts=3),
    "dora": _lora("linear", is_dora=True),
    "dora, transposed": _lora("transposed", is_dora=True),
    "lora of a bias": _lora_of_bias,
    "trained rows": _trained_rows,
    "view": _view,
    "opaque": _opaque,
    "encoded numbers": _encoder(NAME),
    "encoded scales": _encoder(NAME + SCALES),
}


class Opened:
    """A computed tensor and its sources."""

    def __init__(self, catalog: Catalog, files: SourceFiles) -> None:
        self.entry, self._catalog, self._files = catalog.tensors[NAME], catalog, files
        (row,) = self.entry.chunk_ids
        computed = catalog.files[catalog.chunks.file[row]].derivation
        assert isinstance(computed, Computed)
        self.computed = computed

    def box(self, region: Region) -> bytes:
        """Return the bytes of a box; any thread may call it."""
        target = np.empty(region.sizes, kind_of(self.entry.dtype.itemsize))
        self.compute(region, target)
        return target.tobytes()

    def compute(self, region: Region, target: np.ndarray) -> None:
        """Fill an array with a box."""
        with self._files.reader() as reader:
            fill_box(self.computed, reader, region, target, NAME)

    def fill(self, start: int, part: memoryview) -> None:
        """Fill a buffer with the bytes from `start` on."""
        with self._files.reader() as reader:
            fill_computed(self.computed, reader, start, part, NAME)

    def bands(self, max_bytes: int, *, in_blocks: bool) -> list[bytes]:
        """Return its bytes, band by band."""
        region = full_region(self.entry.shape)
        max_bytes = bytes_in_blocks(self._catalog, NAME, max_bytes) if in_blocks else max_bytes
        with self._files.reader() as reader:
            return [bytes(band) for band in bands(self._catalog, NAME, region, reader, max_bytes)]

    def whole(self) -> np.ndarray:
        """Return all of it, as elements of its item size."""
        data = np.frombuffer(self.box(full_region(self.entry.shape)), f"u{self.entry.dtype.itemsize}")
        return data.reshape(self.entry.shape)

    def boxes(self, count: int) -> Iterator[Region]:
        """Yield boxes: the corners, and others at random, of one element or many."""
        shape, rng = self.entry.shape, random.Random(0)
        for corner in itertools.product(*((0, size - 1) for size in shape)):
            yield Region(corner, (1,) * len(shape))
        for _ in range(count):
            first = tuple(rng.randrange(size) for size in shape)
            yield Region(first, tuple(rng.randint(1, n - at) for n, at in zip(shape, first, strict=True)))


@pytest.fixture(params=SAMPLES)
def opened(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Opened]:
    """Open a sample, which is computed in several blocks."""
    monkeypatch.setattr(dequantize, "_MAX_NUMBERS", 500)
    monkeypatch.setattr(lora, "_BLOCK_NUMBERS", 1)
    torch.manual_seed(0)
    stored, codec = SAMPLES[request.param]()
    tensors = {name: tensor.contiguous() for name, tensor in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    if codec is None:
        catalog = formats.open(str(tmp_path), plain=PlainWeights(dtype=BFLOAT16, by_content=True)).catalog
    else:
        catalog = derive(open_model(str(tmp_path)).catalog, {NAME: codec})
    with SourceFiles(catalog.files) as files:
        yield Opened(catalog, files)


def test_shape_and_dtype_are_those_of_the_boxes(opened: Opened) -> None:
    codec = opened.computed.codec
    assert (codec.shape, codec.dtype) == (opened.entry.shape, opened.entry.dtype)
    for region in opened.boxes(3):
        assert len(opened.box(region)) == region.num_elements * codec.dtype.itemsize


def test_any_box_has_the_bits_of_the_whole(opened: Opened) -> None:
    whole = opened.whole()
    for region in opened.boxes(60):
        assert opened.box(region) == whole[window(region)].tobytes(), region
    assert opened.whole().tobytes() == whole.tobytes()


def test_a_part_of_a_larger_array_is_filled_and_nothing_beside_it(opened: Opened) -> None:
    whole = opened.whole()
    for region in opened.boxes(20):
        around = np.full(tuple(size + 3 for size in region.sizes), 0x55, whole.dtype)
        expected, inside = around.copy(), (slice(1, -2),) * len(region.sizes)
        expected[inside] = whole[window(region)]
        opened.compute(region, around[inside])
        assert around.tobytes() == expected.tobytes(), region


def test_any_range_of_bytes(opened: Opened) -> None:
    data, rng, itemsize = opened.whole().tobytes(), random.Random(1), opened.entry.dtype.itemsize
    for _ in range(40):
        start, stop = sorted(rng.choices(range(0, len(data) + 1, itemsize), k=2))
        part = bytearray(stop - start)
        opened.fill(start, memoryview(part))
        assert part == data[start:stop], (start, stop)


def test_threads_do_not_disturb_each_other(opened: Opened) -> None:
    regions = list(opened.boxes(40))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(opened.box, regions))
    whole = opened.whole()
    for region, box in zip(regions, found, strict=True):
        assert box == whole[window(region)].tobytes(), region


def test_bands_are_the_whole_and_made_of_the_blocks_that_are_computed_at_once(opened: Opened) -> None:
    codec, data = opened.computed.codec, opened.whole().tobytes()
    block = codec.block_elements if isinstance(codec, BlockCodec) else 1
    assert b"".join(opened.bands(64, in_blocks=False)) == data
    assert max(map(len, opened.bands(64, in_blocks=False))) <= 64
    made = opened.bands(64, in_blocks=True)
    assert b"".join(made) == data
    starts = itertools.accumulate((len(band) // codec.dtype.itemsize for band in made[:-1]), initial=0)
    assert all(start % prod(codec.shape[-2:]) % block == 0 for start in starts)
    assert max(map(len, made)) <= max(64, block * codec.dtype.itemsize)


def test_only_what_it_names_is_read(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, read = opened.computed.codec, set[str]()
    read_box = boxes.read_box

    def noted(catalog: Catalog, name: str, *rest: object) -> np.ndarray:
        read.add(name)
        return read_box(catalog, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(boxes, "read_box", noted)
    opened.whole()
    assert read <= set(codec.of)
    assert set(codec.of) <= set(opened.computed.catalog.tensors)
