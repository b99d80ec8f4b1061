"""Every bf16 becomes the fp32 that torch makes of it, without torch."""

from __future__ import annotations

import subprocess
import sys

import numpy
import pytest
import torch

from shardkit.core.dtypes import BY_NAME, DType
from shardkit.transfer.convert import make_converter, needs_torch

BF16, FP16, FP32, FP64 = (BY_NAME[name] for name in ("bfloat16", "float16", "float32", "float64"))


def test_every_bf16_is_widened_as_by_torch() -> None:
    stored = numpy.arange(1 << 16, dtype=numpy.uint16)
    wanted = torch.from_numpy(stored.view(numpy.int16)).view(torch.bfloat16).float()
    converted = bytearray(b"\xff" * 4 * len(stored))
    make_converter(BF16, FP32)(memoryview(stored).cast("B"), memoryview(converted))
    assert bytes(converted) == wanted.numpy().tobytes()


def test_elements_may_lie_anywhere() -> None:
    values = torch.arange(5, dtype=torch.bfloat16)
    stored, converted = bytearray(11), bytearray(23)
    stored[1:] = values.view(torch.uint8).numpy().tobytes()
    make_converter(BF16, FP32)(memoryview(stored)[1:], memoryview(converted)[3:])
    assert converted[3:] == values.float().numpy().tobytes()


@pytest.mark.parametrize(
    ("source", "target", "is_needed"),
    [(BF16, FP32, False), (FP32, FP32, False), (FP32, BF16, True), (FP16, FP32, True), (BF16, FP16, True)],
)
def test_what_torch_is_needed_for(source: object, target: object, is_needed: bool) -> None:
    assert needs_torch(source, target) is is_needed  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "target", "last", "is_infinite"),
    [
        (FP32, FP16, 65519.0, False),
        (FP32, FP16, 65520.0, True),
        (FP32, FP16, -1e9, True),
        (BF16, FP16, 1e5, True),
        (FP64, FP32, -1e39, True),
        (FP64, BF16, 1e300, True),
        (FP32, FP16, float("inf"), False),
        (FP32, FP16, float("nan"), False),
        (FP16, FP32, 65504.0, False),
    ],
)
def test_a_finite_value_that_becomes_infinite_is_told(
    source: DType, target: DType, last: float, is_infinite: bool
) -> None:
    """Also the last of very many, and beside values that were not finite before."""
    for others in ([], [float("inf"), float("nan")], [0.5] * 200_000):
        values = torch.tensor([*others, last], dtype=getattr(torch, source.name))
        stored = bytearray(values.view(torch.uint8).numpy().tobytes())
        converted = bytearray(len(values) * target.itemsize)
        convert = make_converter(source, target)
        assert convert(memoryview(stored), memoryview(converted)) is is_infinite


def test_torch_is_not_imported() -> None:
    script = (
        "import sys\n"
        "from shardkit.core.dtypes import BY_NAME\n"
        "from shardkit.transfer.convert import make_converter\n"
        "make_converter(BY_NAME['bfloat16'], BY_NAME['float32'])(memoryview(bytearray(2)), memoryview(bytearray(4)))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
