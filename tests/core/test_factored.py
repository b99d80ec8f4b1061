"""Names and shapes of a weight that is stored as factors."""

from __future__ import annotations

import pytest

from shardkit.core.factored import FACTORS, Target, factored_names, target_of
from shardkit.errors import LayoutError


def test_names_and_shapes() -> None:
    target = Target(path="a.b", rows=40, columns=16, rank=11)
    assert target.shapes == {
        "a.b.osft_U_high": (40, 11),
        "a.b.osft_S_high": (11,),
        "a.b.osft_V_high": (11, 16),
        "a.b.osft_params.U_low": (40, 5),
        "a.b.osft_params.S_low": (5,),
        "a.b.osft_params.V_low": (5, 16),
    }
    assert target_of("a.b", target.shapes) == target
    with pytest.raises(LayoutError, match="do not match"):
        target_of("a.b", {**target.shapes, "a.b.osft_params.V_low": (4, 16)})


def test_sextets_are_whole() -> None:
    names = [f"a.b.{name}" for name in FACTORS]
    assert factored_names([*names, "a.b.bias", "c.weight"]) == {"a.b": tuple(names)}
    with pytest.raises(LayoutError, match="are incomplete") as caught:
        factored_names([*names[1:], "a.b.weight"])
    assert list(caught.value.problems) == ["a.b: lacks osft_U_high", "a.b.weight: stored beside its factors"]
