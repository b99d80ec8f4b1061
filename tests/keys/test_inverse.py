"""The way back, against numpy: what is made of targets again is what they were made of, all of it or none."""

from __future__ import annotations

import numpy as np

from shardkit.core.regions import Region
from shardkit.keys.expressions import (
    Stored,
    Zeros,
    concat,
    cut,
    deinterleave,
    interleave,
    leaves,
    permute,
    reshape,
)
from shardkit.keys.inverse import invert
from tests.keys.test_expressions import evaluate, experts, trees


def test_what_comes_back_is_what_was_stored() -> None:
    num_back = num_lost = 0
    for _, made, values, sources in trees():
        found = invert({"target": made})
        for name, back in found.items():
            assert np.array_equal(evaluate(back, {"target": values}), sources[name])
            num_back += 1
        num_lost += len({leaf.name for leaf in leaves(made)} - found.keys())
    assert num_back > 500
    assert num_lost > 200


def test_experts_query_key_and_value_and_rows_come_back() -> None:
    qkv = Stored("qkv", (24, 4))
    targets = {
        "gate_up_proj": experts(),
        "q": cut(qkv, Region((0, 0), (8, 4))),
        "k": interleave(cut(qkv, Region((8, 0), (8, 4))), 0, 2),
        "v": permute(cut(qkv, Region((16, 0), (8, 4))), (1, 0)),
    }
    found = invert(targets)
    assert found["qkv"].shape == (24, 4)
    assert found["experts.3.up"] == reshape(
        cut(Stored("gate_up_proj", (4, 12, 8)), Region((3, 6, 0), (1, 6, 8))), (6, 8)
    )


def test_rows_that_alternate_come_back() -> None:
    """As those of gate and up in Inkling's files: Interleave, then Chunk."""
    stored = Stored("gate_up", (8, 3))
    both = deinterleave(stored, 0, 2)
    targets = {"gate": cut(both, Region((0, 0), (4, 3))), "up": cut(both, Region((4, 0), (4, 3)))}
    found = invert(targets)
    values = np.arange(24).reshape(8, 3)
    held = {name: evaluate(made, {"gate_up": values}) for name, made in targets.items()}
    assert np.array_equal(held["gate"], values[::2])
    assert np.array_equal(evaluate(found["gate_up"], held), values)
    assert invert({"gate": targets["gate"]}) == {}


def test_a_tensor_of_which_a_part_went_nowhere_does_not_come_back() -> None:
    assert invert({"cropped": cut(Stored("embed", (10, 4)), Region((0, 0), (8, 4)))}) == {}


def test_padding_is_dropped_on_the_way_back() -> None:
    stored = Stored("embed", (6, 4))
    found = invert({"padded": concat([stored, Zeros((2, 4))], 0)})
    assert found == {"embed": cut(Stored("padded", (8, 4)), Region((0, 0), (6, 4)))}
