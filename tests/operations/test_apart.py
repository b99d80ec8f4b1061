"""Tensors in memory as those of the Hub's files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from shardkit import formats
from shardkit.core.regions import Region
from shardkit.keys.expressions import Stored, cut
from shardkit.operations.apart import take_apart


def test_rows_that_a_model_drops_are_zeros(make_hub: Callable[..., Path]) -> None:
    """Only where nothing else is made of the tensor, and the first rows are there: else a part of it is lost."""
    tensors = {"head": torch.ones(5, 3), "other": torch.ones(1, 3), "last": torch.ones(5, 3)}
    checkpoint = formats.open(str(make_hub(tensors)), format="hub")
    made = {
        "head": cut(Stored("files.head", (7, 3)), Region((0, 0), (5, 3))),
        "last": cut(Stored("files.last", (7, 3)), Region((2, 0), (5, 3))),
    }
    sources = {name: name for name in tensors}
    apart = take_apart(checkpoint.catalog, sources, made)
    assert apart.padded == {"files.head": 2}
    assert apart.gone == {"head"}
    assert apart.catalog.tensors[apart.made["files.head"]].shape == (7, 3)
    made["other"] = cut(Stored("files.head", (7, 3)), Region((5, 0), (1, 3)))
    assert not take_apart(checkpoint.catalog, sources, made).made
