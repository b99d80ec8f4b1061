"""Numbered parameters: named where there is one way only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.formats.rankfiles.optimizer import Parameter, name_numbers, without_copies

MODEL = [
    Parameter("embed.weight", (7, 4)),
    *(
        Parameter(f"layers.{layer}.{name}", shape)
        for layer in range(3)
        for name, shape in (("up.weight", (8, 4)), ("up.bias", (8,)), ("down.weight", (4, 8)))
    ),
    Parameter("norm.weight", (4,)),
    Parameter("head.weight", (7, 4)),
]
NAMES = [parameter.name for parameter in MODEL]


def shapes_of(names: list[str]) -> dict[int, tuple[int, ...]]:
    shapes = {parameter.name: parameter.shape for parameter in MODEL}
    return {number: shapes[name] for number, name in enumerate(names)}


def test_all_parameters_in_one_group_are_the_model_s() -> None:
    assert name_numbers([range(len(MODEL))], shapes_of(NAMES), MODEL) == dict(enumerate(NAMES))
    some = {number: shape for number, shape in shapes_of(NAMES).items() if number % 2}
    assert name_numbers([range(len(MODEL))], some, MODEL) == dict(enumerate(NAMES))  # without a state yet


def test_another_order_is_refused() -> None:
    assert isinstance(name_numbers([range(len(MODEL))], shapes_of(NAMES[::-1]), MODEL), str)


def test_groups_of_those_with_and_without_decay() -> None:
    matrices = [parameter.name for parameter in MODEL if len(parameter.shape) > 1]
    others = [parameter.name for parameter in MODEL if len(parameter.shape) == 1]
    shapes = shapes_of([*matrices, *others])
    groups = [range(len(matrices)), range(len(matrices), len(MODEL))]
    assert name_numbers(groups, shapes, MODEL) == dict(enumerate([*matrices, *others]))


@pytest.mark.parametrize("names", [["layers.0.up.weight"], ["embed.weight"], NAMES[1:7]])
def test_several_choices_are_refused(names: list[str]) -> None:
    found = name_numbers([range(len(names))], shapes_of(names), MODEL)
    assert isinstance(found, str)
    assert "several choices" in found


def test_a_group_that_fits_another_s_parameters_is_refused() -> None:
    matrices = [parameter.name for parameter in MODEL if len(parameter.shape) > 1]
    groups = [range(len(matrices)), range(len(matrices), 2 * len(matrices))]
    found = name_numbers(groups, shapes_of([*matrices, *matrices]), MODEL)
    assert isinstance(found, str)
    assert "twice" in found


def test_adapters_of_a_frozen_model() -> None:
    """Their shapes may be those of frozen parameters too; PEFT's names say which ones are trained."""
    model = [
        parameter
        for layer in range(2)
        for parameter in (
            Parameter(f"layers.{layer}.q.base_layer.weight", (4, 4)),
            Parameter(f"layers.{layer}.q.lora_A.default.weight", (4, 4)),
            Parameter(f"layers.{layer}.q.lora_B.default.weight", (4, 4)),
        )
    ]
    names = [parameter.name for parameter in model if "lora_" in parameter.name]
    shapes = dict.fromkeys(range(4), (4, 4))
    assert name_numbers([range(4)], shapes, model) == dict(enumerate(names))
    assert isinstance(name_numbers([range(3)], dict.fromkeys(range(3), (4, 4)), model), str)


@given(st.lists(st.sampled_from(NAMES), unique=True))
def test_a_name_is_given_only_where_the_shape_is_its_own(names: list[str]) -> None:
    shapes = shapes_of(names)
    found = name_numbers([range(len(names))], shapes, MODEL)
    if not isinstance(found, str):
        known = {parameter.name: parameter.shape for parameter in MODEL}
        assert {number: known[name] for number, name in found.items()} == shapes


def test_copies_of_matrices_are_left_out() -> None:
    model = [
        Parameter("a", (2, 3), "x"), Parameter("b", (2, 3), "x"), Parameter("c", (3, 2), "x"), Parameter("d", (6,), "x"),
        Parameter("e", (6,), "x"), Parameter("f", (2, 3)), Parameter("g", (2, 3)), Parameter("h", (2, 3), "y"),
    ]  # fmt: skip
    assert [parameter.name for parameter in without_copies(model)] == ["a", "c", "d", "e", "f", "g", "h"]
