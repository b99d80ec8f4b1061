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


def test_fsdp1_alone(wrap_world: World) -> None:
    for each in wrap_world.found("two"):
        found = each["others"]
        for use_orig in (False, True):
            assert found[f"norm-{use_orig}"] == pytest.approx(found["norm"], rel=1e-5)
            assert found[f"clip-{use_orig}"] == found[f"norm-{use_orig}"]


def test_roots_of_every_kind_may_be_held_at_any_depth(wrap_world: World) -> None:
    for each in wrap_world.found("two"):
        found = each["held"]
        for ours, expected in found["pairs"]:
            assert ours == pytest.approx(expected, rel=1e-5)
        assert found["pairs"] == wrap_world.found("two")[0]["held"]["pairs"]  # the same on every rank
        assert found["returned"] == found["pairs"][-4][0]
        assert found["after"] == pytest.approx(0.01, rel=1e-4)


def test_gradients_of_fsdp1_that_cannot_be_summed_are_refused(wrap_world: World) -> None:
    for each in wrap_world.found("two"):
        refused = each["held"]["refused"]
        assert {error["error"] for error in refused.values()} == {"UsageError"}
        for kind in ("fsdp1", "fsdp1-orig"):
            assert "do not say which ranks hold" in refused[f"{kind}-loose"]["message"]
            assert "are not reduced yet" in refused[f"{kind}-early"]["message"]
