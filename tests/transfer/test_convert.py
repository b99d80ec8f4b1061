"""Every bf16 becomes the fp32 that torch makes of it, without torch."""

from __future__ import annotations

import subprocess
import sys

import numpy
import pytest
import torch

from shardkit.core.dtypes import BY_NAME
from shardkit.transfer.convert import make_converter, needs_torch

BF16, FP16, FP32 = (BY_NAME[name] for name in ("bfloat16", "float16", "float32"))


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


def test_torch_is_not_imported() -> None:
    script = (
        "import sys\n"
        "from shardkit.core.dtypes import BY_NAME\n"
        "from shardkit.transfer.convert import make_converter\n"
        "make_converter(BY_NAME['bfloat16'], BY_NAME['float32'])(memoryview(bytearray(2)), memoryview(bytearray(4)))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
