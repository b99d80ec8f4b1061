"""What is decided before a byte moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardkit.core.dtypes import BY_NAME
from shardkit.operations.preshard.job import _choose_dtypes


def chosen(held: str, dtype: str) -> tuple[str, list[str]]:
    """Return what becomes of a tensor that its model keeps in fp32, and the notes."""
    catalog = SimpleNamespace(tensors={"wo.weight": SimpleNamespace(dtype=BY_NAME[held])})
    layout: Any = SimpleNamespace(tensors={"wo.weight": None}, keep_fp32=frozenset({"wo.weight"}))
    model: Any = SimpleNamespace(catalog=catalog)
    dtypes, notes = _choose_dtypes(model, layout, {"wo.weight": "wo.weight"}, dtype)
    return dtypes["wo.weight"].name, notes


@pytest.mark.parametrize(
    ("held", "dtype", "expected"),
    [
        ("float32", "bf16", "float32"),
        ("float32", "fp16", "float32"),
        ("bfloat16", "fp16", "float32"),  # as from_pretrained has it
        ("bfloat16", "fp32", "float32"),
        ("float64", "fp32", "float32"),
        ("float32", "keep", "float32"),
    ],
)
def test_what_the_model_keeps_in_fp32_is_never_narrowed(held: str, dtype: str, expected: str) -> None:
    found, notes = chosen(held, dtype)
    assert found == expected
    assert bool(notes) == (dtype in ("bf16", "fp16"))
    assert all(expected in note for note in notes)
