"""Every code with every kind of scale, and every place of a box among the blocks: the bits that torch computes."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

from shardkit.core.dtypes import BY_NAME, DType
from shardkit.core.regions import Region, blocks, window
from shardkit.transfer.codecs.boxes import kind_of
from shardkit.transfer.codecs.codes import E2M1, NUM_CODES, code_values, powers_of_two
from shardkit.transfer.codecs.convert import as_float32
from shardkit.transfer.codecs.products import BoxScales, multiply

FP8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
RESULTS = ("bfloat16", "float16", "float32", "float64")
ALL_CODES = torch.arange(NUM_CODES, dtype=torch.uint8)


def some_scales() -> torch.Tensor:
    """Return scales of every exponent and both signs: the smallest and largest of it and two between; and no numbers."""
    mantissas = np.array([0, 0x7FFFFF, 0x2AAAAA, 0x4CCCCD], "u4")
    bits = (np.arange(512, dtype="u4")[:, None] << 23 | mantissas).reshape(-1)
    return torch.from_numpy(bits.view("f4").copy())


def numbers_of(dtype: str) -> np.ndarray:
    return code_values(dtype).astype("f4")[:, None]


def products_of(
    codes: np.ndarray, region: Region, numbers: np.ndarray, scales: BoxScales, dtype: DType
) -> np.ndarray:
    found = np.empty(codes.shape, kind_of(numbers.shape[1] * dtype.itemsize))
    multiply(codes, region, numbers, scales, dtype, found)
    return found


def assert_same_bits(found: np.ndarray, expected: torch.Tensor) -> None:
    """Compare bits; all NaNs are the same."""
    values = torch.from_numpy(found.view(f"i{found.dtype.itemsize}")).view(expected.dtype)
    assert torch.equal(values.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(values[numbers].view(torch.uint8), expected[numbers].view(torch.uint8))


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("repeated", [1, 4], ids=["single products", "from a table"])
def test_every_code_with_scales_of_every_exponent(dtype: str, result: str, repeated: int) -> None:
    scales, codes = some_scales(), ALL_CODES.repeat(repeated)
    expected = (codes.view(getattr(torch, dtype)).float() * scales[:, None]).to(getattr(torch, result))
    for first in range(0, len(scales), 64):
        some = scales[first : first + 64]
        box = BoxScales(some.numpy(), np.arange(64, dtype="u2"), (0,), (1,))
        found = products_of(
            codes.repeat(64, 1).numpy(),
            Region((0, 0), (64, len(codes))),
            numbers_of(dtype),
            box,
            BY_NAME[result],
        )
        assert_same_bits(found, expected[first : first + 64])


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("scale_dtype", ["float8_e8m0fnu", "float8_e4m3fn", "uint8"])
def test_every_pair_of_numbers_with_every_scale_of_8_bits(scale_dtype: str, result: str) -> None:
    """0xFF of e8m0 is no number; as a byte that is an exponent it is 2^128, which is infinite in float32."""
    numbers = torch.tensor(E2M1)
    pairs = torch.stack((numbers[ALL_CODES.int() & 0xF], numbers[ALL_CODES.int() >> 4]), -1)
    values = powers_of_two() if scale_dtype == "uint8" else code_values(scale_dtype)
    with np.errstate(over="ignore"):
        scales = BoxScales(values.astype("f4"), np.arange(NUM_CODES, dtype="u2"), (0,), (1,))
    if scale_dtype == "uint8":
        by_torch = torch.pow(2.0, ALL_CODES.int() - 127)
    else:
        by_torch = ALL_CODES.view(getattr(torch, scale_dtype)).float()
    expected = (pairs * by_torch[:, None, None]).to(getattr(torch, result))
    every_code = ALL_CODES.repeat(NUM_CODES, 1).numpy()
    region = Region((0, 0), (NUM_CODES, NUM_CODES))
    found = products_of(every_code, region, pairs.numpy(), scales, BY_NAME[result])
    itemsize = BY_NAME[result].itemsize
    single = np.frombuffer(bytearray(found.tobytes()), f"u{itemsize}").reshape(NUM_CODES, NUM_CODES, 2)
    assert_same_bits(single, expected)


@pytest.mark.parametrize("dtype", [*FP8, "float8_e8m0fnu", "int8"])
def test_codes_have_the_values_that_torch_gives(dtype: str) -> None:
    expected = ALL_CODES.view(getattr(torch, dtype)).double().numpy()
    np.testing.assert_array_equal(code_values(dtype), expected)
    assert (np.signbit(expected) == np.signbit(code_values(dtype)))[expected == 0].all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_scales_of_16_and_32_bits_have_the_values_that_torch_gives(dtype: str) -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    stored = bits if dtype == "float32" else bits.to(torch.int16)
    expected = stored.view(getattr(torch, dtype)).float()
    itemsize = BY_NAME[dtype].itemsize
    found = as_float32(stored.numpy().view(f"u{itemsize}"), BY_NAME[dtype])
    np.testing.assert_array_equal(found, expected.numpy())
    assert (np.signbit(found) == expected.signbit().numpy())[found == 0].all()


SHAPES = {
    "blocks": ((20, 300), (7, 64)),
    "ragged blocks": ((129, 130), (128, 128)),
    "rows": ((300, 40), (1,)),
    "rows of a grid": ((300, 40), (1, 40)),
    "groups": ((6, 96), (1, 32)),
    "groups along the first dim": ((64, 33), (16, 1)),
    "experts": ((3, 17, 70), (1, 8, 32)),
    "groups in the middle": ((3, 48, 21), (1, 16, 1)),
    "all": ((20, 300), ()),
    "a scalar": ((), ()),
}


@pytest.mark.parametrize("is_stored_in_8_bits", [True, False])
@pytest.mark.parametrize(("shape", "sizes"), SHAPES.values(), ids=SHAPES)
def test_a_box_anywhere_has_the_scales_of_its_blocks(
    shape: tuple[int, ...], sizes: tuple[int, ...], is_stored_in_8_bits: bool
) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, NUM_CODES, shape, dtype="u1")
    grid = tuple(-(-size // n) for size, n in zip(shape, sizes, strict=False))
    numbers = numbers_of("float8_e5m2")
    values = code_values("float8_e4m3fn").astype("f4") if is_stored_in_8_bits else None
    if values is None:
        values = rng.random(int(np.prod(grid)), "f4")
    indices = rng.integers(0, len(values), grid, dtype="u2")
    spread = indices
    for dim, size in enumerate(sizes):
        spread = np.repeat(spread, size, axis=dim)
    spread = spread[tuple(slice(size) for size in shape[: len(sizes)])]
    spread = spread.reshape((*spread.shape, *(1 for _ in shape[len(sizes) :])))
    with np.errstate(invalid="ignore"):
        products = numbers[codes][..., 0] * values[np.broadcast_to(spread, shape)]
    expected = torch.from_numpy(np.asarray(products)).bfloat16()
    for limit in (7, 100, 1 << 20):
        for block in itertools.islice(blocks(shape, limit), 0, None, 1 + 700 // limit):
            first = tuple(offset // n for offset, n in zip(block.offsets, sizes, strict=False))
            last = tuple((stop - 1) // n for stop, n in zip(block.stops, sizes, strict=False))
            part = indices[tuple(slice(a, b + 1) for a, b in zip(first, last, strict=True))]
            scales = BoxScales(values, np.asarray(part), first, sizes)
            box = np.asarray(codes[window(block)])
            found = products_of(box, block, numbers, scales, BY_NAME["bfloat16"])
            assert_same_bits(found, expected[window(block)].contiguous())


def test_no_torch_is_needed() -> None:
    """Neither for the products nor for the codecs over them."""
    code = (
        "import sys, numpy, shardkit.transfer.codecs.nvfp4\n"
        "from shardkit.transfer.codecs.products import BoxScales, multiply\n"
        "from shardkit.core.dtypes import BY_NAME\n"
        "from shardkit.core.regions import Region\n"
        "one = BoxScales(numpy.ones(1, 'f4'), numpy.zeros((), 'u2'), (), ())\n"
        "numbers = numpy.arange(256, dtype='f4')[:, None]\n"
        "found = numpy.empty(3, 'u2')\n"
        "codes = numpy.full(3, 2, 'u1')\n"
        "multiply(codes, Region((0,), (3,)), numbers, one, BY_NAME['bfloat16'], found)\n"
        "assert found.tolist() == [0x4000] * 3 and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
