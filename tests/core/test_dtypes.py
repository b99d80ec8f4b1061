"""Names of dtypes."""

from __future__ import annotations

import pytest
import torch

from shardkit.core.dtypes import short_dtype


@pytest.mark.parametrize(
    ("said", "short"),
    [
        ("bf16", "bf16"),
        ("bfloat16", "bf16"),
        ("torch.bfloat16", "bf16"),
        (torch.bfloat16, "bf16"),
        ("float16", "fp16"),
        (torch.float32, "fp32"),
        ("float64", "fp64"),
        ("keep", "keep"),
        ("base", "base"),
        ("int64", "int64"),
        ("float8_e4m3fn", "float8_e4m3fn"),
    ],
)
def test_a_dtype_has_one_short_name(said: object, short: str) -> None:
    assert short_dtype(said) == short
