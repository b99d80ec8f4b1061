"""The layout that is expected of a model's class, against what the class says."""

from pathlib import Path

import pytest

from shardkit import formats
from shardkit.core.mesh import parse_mesh
from shardkit.formats.contract import HubModel
from shardkit.layout.choice.choose import make_layout
from shardkit.layout.choice.expected import _FUSES_EXPERTS, expect_layout
from shardkit.layout.layout import Layout
from shardkit.layout.traced import SAME_IN_MEMORY
from tests.models.zoo import IN_MAKE_TEST, ZOO, is_quantised, make_hub

MESH = parse_mesh(None, 4)
# One of each type; of types of dense models, which are all alike, those that the tests of the zoo take too.
KNOWN = {
    each.model_type: name
    for name, each in reversed(ZOO.items())  # the plain ones come first
    if (each.model_type in _FUSES_EXPERTS or (each.model_type in SAME_IN_MEMORY and name in IN_MAKE_TEST))
    and not is_quantised(name)
}


def opened(name: str, place: Path) -> HubModel:
    """Make a model of the zoo, and open it."""
    make_hub(ZOO[name], place / "hub")
    found = formats.open(str(place / "hub"), format="hub").hub
    assert found is not None
    return found


def where(layout: Layout) -> object:
    """Return everything about a layout that decides where bytes go."""
    places = {fqn: (tensor.shape, tensor.placements) for fqn, tensor in layout.tensors.items()}
    return places, {fqn: layout.sources[fqn] for fqn in layout.tensors}, layout.made


@pytest.mark.parametrize("name", KNOWN.values())
def test_what_is_expected_is_what_the_class_says(name: str, tmp_path: Path, fast_trace: None) -> None:
    model = opened(name, tmp_path)
    expected = expect_layout(model, MESH)
    assert expected is not None
    assert where(expected) == where(make_layout(model, MESH, "auto", origin="traced"))


def test_of_a_type_that_nobody_listed_nothing_is_expected(tmp_path: Path) -> None:
    assert expect_layout(opened("gpt2", tmp_path), MESH) is None


def test_experts_that_are_not_whole_are_left_to_the_class(tmp_path: Path) -> None:
    model = opened("qwen3_moe", tmp_path)
    name = next(name for name in model.catalog.tensors if ".experts.0.up_proj" in name)
    del model.catalog.tensors[name]
    assert expect_layout(model, MESH) is None
