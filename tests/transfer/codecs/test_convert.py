"""Every conversion gives the bits that torch gives, where torch cannot be imported too."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy
import pytest
import torch

from shardkit.core.dtypes import BY_NAME, DType
from shardkit.transfer.codecs.codes import code_values
from shardkit.transfer.codecs.convert import make_converter, to_fp8

BF16, FP16, FP32, FP64 = (BY_NAME[name] for name in ("bfloat16", "float16", "float32", "float64"))
PAIRS = list(itertools.permutations((BF16, FP16, FP32, FP64), 2))


def converted(values: torch.Tensor, source: DType, target: DType) -> torch.Tensor:
    """Convert a tensor; its infinities are asked about too."""
    stored = bytearray(values.view(torch.uint8).numpy().tobytes())
    result = torch.empty(len(values), dtype=getattr(torch, target.name))
    became = make_converter(source, target)(memoryview(stored), memoryview(result.view(torch.uint8).numpy()))
    assert became is bool((result.isinf() & values.isfinite()).any())
    return result


def assert_same(result: torch.Tensor, values: torch.Tensor) -> None:
    """Compare all bits with torch's, of NaNs that they are NaN: their bits differ between processors."""
    wanted = values.to(result.dtype)
    assert torch.equal(result.isnan(), wanted.isnan())
    numbers = ~wanted.isnan()
    assert torch.equal(result[numbers].view(torch.uint8), wanted[numbers].view(torch.uint8))


def samples() -> torch.Tensor:
    """Return fp32 of every exponent and sign: random mantissas, and all that is near a tie of bf16 or fp16."""
    random = numpy.random.default_rng(0)
    near = numpy.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x7FFF, 0x8000, 0x8001, 0xFFFF], numpy.uint32)
    upper = random.integers(0, 1 << 10, (512, 50, 1), dtype=numpy.uint32) << 13
    mantissas = numpy.concatenate(
        [
            random.integers(0, 1 << 23, (512, 1000), dtype=numpy.uint32),
            (upper & 0x7F0000 | near).reshape(512, -1),
            (upper | near & 0x1FFF).reshape(512, -1),
            numpy.broadcast_to(0x7FFFFF - near, (512, len(near))),
            numpy.broadcast_to(numpy.uint32(1) << numpy.arange(23, dtype=numpy.uint32), (512, 23)),
        ],
        axis=1,
    )
    bits = (numpy.arange(512, dtype=numpy.uint32) << 23)[:, None] | mantissas
    return torch.from_numpy(bits.reshape(-1).view(numpy.float32))


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda dtype: dtype.name)
def test_bits_are_those_of_torch(source: DType, target: DType) -> None:
    if source.itemsize == 2:  # all there are
        bits = torch.from_numpy(numpy.arange(1 << 16, dtype=numpy.uint16).view(numpy.int16))
        values = bits.view(getattr(torch, source.name))
    else:
        values = samples().to(getattr(torch, source.name))
        if source is FP64:  # what rounds twice, and what is beyond fp32
            values = torch.cat([values, values * (1 + 2.0**-30), values * (1 - 2.0**-30), values * 1e300])
    assert_same(converted(values, source, target), values)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda dtype: dtype.name)
def test_elements_may_lie_anywhere(source: DType, target: DType) -> None:
    values = torch.arange(5).to(getattr(torch, source.name)) / 3
    stored, result = bytearray(1 + 5 * source.itemsize), bytearray(3 + 5 * target.itemsize)
    stored[1:] = values.view(torch.uint8).numpy().tobytes()
    make_converter(source, target)(memoryview(stored)[1:], memoryview(result)[3:])
    assert result[3:] == values.to(getattr(torch, target.name)).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("length", [0, 1, (1 << 16) - 1, 1 << 16, (1 << 16) + 1])
def test_any_length(length: int) -> None:
    values = torch.linspace(-1, 1, length)
    for target in (BF16, FP16, FP64):
        assert_same(converted(values, FP32, target), values)


def test_fp8_bits_are_those_of_torch() -> None:
    """Of every exponent, of all that is near a tie, and beyond the largest number."""
    numbers = code_values("float8_e4m3fn")[:127]  # up to 448
    ties = numpy.append((numbers[1:] + numbers[:-1]) / 2, numbers).astype("f4")
    near = numpy.concatenate([ties, numpy.nextafter(ties, numpy.float32(0)), numpy.nextafter(ties, ties * 2)])
    values = torch.cat([samples(), torch.from_numpy(near), -torch.from_numpy(near)])
    values = values[~values.isnan()]
    wanted = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert numpy.array_equal(to_fp8(values.numpy()), wanted.view(torch.uint8).numpy())


def test_a_nan_has_the_same_bits_everywhere() -> None:
    """Alone and among numbers, also one that rounding would make infinite, or carry into the sign."""
    nans = numpy.array([0x7F800001, 0xFFFFFFFF, 0x7FC12345], numpy.uint32)
    for others in (0, 1, 100):
        values = torch.from_numpy(numpy.append(nans, [0] * others).astype(numpy.uint32).view(numpy.float32))
        for target, wanted in ((BF16, [0xFFFF] * 3), (FP16, [0x7E00, 0xFFFF, 0x7E09])):
            result = converted(values, FP32, target).view(torch.int16).numpy().view(numpy.uint16)
            assert result.tolist() == wanted + [0] * others


@pytest.mark.parametrize(
    ("source", "target", "last", "is_infinite"),
    [
        (FP32, FP16, 65519.0, False),
        (FP32, FP16, 65520.0, True),
        (FP32, FP16, -1e9, True),
        (FP32, BF16, 3.39e38, False),
        (FP32, BF16, -3.4e38, True),
        (BF16, FP16, 1e5, True),
        (FP64, FP32, -1e39, True),
        (FP64, BF16, 1e300, True),
        (FP32, FP16, float("inf"), False),
        (FP32, FP16, float("nan"), False),
        (FP16, FP32, 65504.0, False),
    ],
)
def test_a_finite_value_that_becomes_infinite_is_reported(
    source: DType, target: DType, last: float, is_infinite: bool
) -> None:
    """Also the last of very many, and beside values that were not finite before."""
    for others in ([], [float("inf"), float("nan")], [0.5] * 200_000):
        values = torch.tensor([*others, last], dtype=getattr(torch, source.name))
        assert converted(values, source, target).isinf()[-1].item() is (is_infinite or last == float("inf"))
        stored = bytearray(values.view(torch.uint8).numpy().tobytes())
        result = bytearray(len(values) * target.itemsize)
        assert make_converter(source, target)(memoryview(stored), memoryview(result)) is is_infinite


def test_torch_is_not_imported() -> None:
    script = (
        "import sys\n"
        "from shardkit.core.dtypes import BY_NAME\n"
        "from shardkit.transfer.codecs.convert import make_converter\n"
        "make_converter(BY_NAME['float32'], BY_NAME['bfloat16'])(memoryview(bytearray(4)), memoryview(bytearray(2)))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
