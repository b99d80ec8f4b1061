"""What of a base is taken beside the checkpoint's tensors, by names and shapes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from shardkit.errors import LayoutError
from shardkit.formats.hub.base import open_base
from shardkit.keys.tokens import find_token_rows
from shardkit.layout.binding import ClassNames
from shardkit.operations.consolidate.fit import check_fit
from shardkit.operations.consolidate.options import ConsolidateOptions
from shardkit.operations.consolidate.vocabulary import RowsChange
from tests.operations.consolidate.checkpoints import hub, weights
from tests.operations.consolidate.test_vocabulary import CONFIG, OLD, resized


def test_what_the_base_alone_has_rows_of_is_not_mixed_in(tmp_path: Path) -> None:
    """A block for predictions of further tokens, which the class ignores, has an embedding of its own."""
    spare = "model.layers.2.embed_tokens.weight"
    stored = {**weights(), spare: torch.randn(OLD, 16)}
    base = open_base(str(hub(tmp_path / "base", stored, CONFIG)))
    assert base.tensors is not None
    theirs = {name: tensor.shape for name, tensor in base.tensors.items()}
    ours = {name: tuple(value.shape) for name, value in resized(42).items()}
    rows = find_token_rows(ours, theirs, CONFIG)
    larger = {
        name: base.tensors[name]._replace(shape=shape) for each in rows for name, shape in each.shapes.items()
    }
    base = replace(base, tensors={**base.tensors, **larger})
    asked = ClassNames(ignored={spare})
    vocabulary, options = RowsChange(base=base, changed=tuple(rows)), ConsolidateOptions("ck")
    fit = partial(check_fit, ours, vocabulary, (), asked, checkpoint="ck", left_out_shapes={}, why_missing="")
    with pytest.raises(LayoutError) as caught:
        fit(options)
    assert caught.value.to_json()["hint"] == "--allow-missing leaves them out"
    made = fit(replace(options, allow_missing=True))
    assert made.from_base == ()
    assert spare in "\n".join(made.notes)
