"""Flat parameters: divided among a model's units where there is one way only."""

from __future__ import annotations

from math import prod

import pytest

from shardkit.formats.rankfiles.optimizer import Parameter, split_units
from tests.formats.rankfiles.test_optimizer_numbers import MODEL, NAMES


def padded(names: list[str], num_ranks: int) -> int:
    size = sum(prod(parameter.shape) for parameter in MODEL if parameter.name in names)
    return -(-size // num_ranks) * num_ranks


def layer(number: int) -> list[str]:
    return [name for name in NAMES if name.startswith(f"layers.{number}.")]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_flat_parameters_of_blocks_and_a_root(num_ranks: int) -> None:
    units = [["embed.weight", "norm.weight", "head.weight"], *(layer(number) for number in range(3))]
    found = split_units([padded(unit, num_ranks) for unit in units], num_ranks, MODEL)
    assert found is not None
    assert [[parameter.name for parameter in unit] for unit in found] == units


def test_flat_parameters_without_a_root_and_with_nothing_else() -> None:
    units = [["embed.weight"], *(layer(number) for number in range(3)), ["norm.weight"], ["head.weight"]]
    found = split_units([padded(unit, 2) for unit in units], 2, MODEL)
    assert found is not None
    assert [[parameter.name for parameter in unit] for unit in found] == units
    assert split_units([padded(NAMES, 2)], 2, MODEL) == [MODEL]


def test_some_of_equal_blocks_are_refused() -> None:
    rest = [name for name in NAMES if not name.startswith("layers.1.")]
    assert split_units([padded(rest, 2), padded(layer(1), 2)], 2, MODEL) is None


def test_sizes_that_nothing_has_are_refused() -> None:
    units = [["embed.weight", "norm.weight", "head.weight"], *(layer(number) for number in range(3))]
    sizes = [padded(unit, 2) for unit in units]
    assert split_units([sizes[0] + 2, *sizes[1:]], 2, MODEL) is None
    assert split_units(sizes[:-1], 2, MODEL) is None
    assert split_units([], 2, MODEL) is None


def test_a_block_around_a_block_is_refused() -> None:
    """Padding hides which of the two it was."""
    model = [Parameter("a.b.weight", (5,)), Parameter("a.scale", (1,)), Parameter("c", (3,))]
    assert split_units([4, 6], 2, model) is None
