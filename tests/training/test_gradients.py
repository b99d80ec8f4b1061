"""Norms of gradients in parts are those of one process."""

import pytest

from tests.training.conftest import World

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("world", ["two", "hsdp", "tp"])
def test_norms_of_all_orders_equal_one_process(wrap_world: World, world: str) -> None:
    for each in wrap_world.found(world):
        found = each["gradients"]
        assert found["ours"] == pytest.approx(found["torch"], rel=1e-5)
        assert found["kind"] == "Tensor"
        assert found["ours"] == wrap_world.found(world)[0]["gradients"]["ours"]  # bit for bit on every rank


@pytest.mark.parametrize("world", ["two", "hsdp", "tp"])
def test_clipping_equals_one_process(wrap_world: World, world: str) -> None:
    for each in wrap_world.found(world):
        found = each["gradients"]
        assert found["returned"] == found["ours"][0]
        assert found["clipped"] < 1e-7
        assert found["after"] == pytest.approx(0.01, rel=1e-4)


def test_plain_empty_half_and_missing_gradients(wrap_world: World) -> None:
    for each in wrap_world.found("two"):
        found = each["edges"]
        assert found["none"] == 0.0
        assert found["mixed"][0] == pytest.approx(found["mixed"][1], rel=1e-5)
        # In bf16 the sum of 100,000 equal squares would stop growing at a small part of this.
        assert found["half"][0] == pytest.approx(found["half"][1], rel=1e-3)
        assert found["one_sided"] > 0
        assert "is nan" in found["nonfinite"]


def test_fsdp1_is_left_to_itself(wrap_world: World) -> None:
    found = wrap_world.found("two")[0]["others"]
    assert found["clip-False"] == found["clip-True"] == pytest.approx(found["norm"], rel=1e-5)
    assert found["refused"]["error"] == "UsageError"
