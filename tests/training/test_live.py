"""Models that are in use are filled and saved right, or refused on all ranks."""

import pytest

from tests.training.conftest import World, run_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return run_world("live_world.py", tmp_path_factory.mktemp("live"))


def test_tensors_that_two_axes_replicate(world: World) -> None:
    """Each axis passes on what the one before has brought, never what is still on its way."""
    assert [rank["wrong"] for rank in world.found("4")] == [[0] * 4] * 4


@pytest.mark.parametrize("strategy", ["direct", "broadcast"])
def test_loading_after_a_forward_without_a_backward(world: World, strategy: str) -> None:
    assert [rank[strategy] for rank in world.found("2")] == [[], []]


def test_new_optimizer_beside_an_old_one_has_made_no_step(world: World) -> None:
    for rank in world.found("2"):
        assert rank["steps"] == {
            f"{part}.{name}.step": steps
            for part, steps in (("first", 1), ("last", 0))
            for name in ("weight", "bias")
        }


def test_gradients_and_optimizers_after_a_forward_without_a_backward(world: World) -> None:
    for rank in world.found("2"):
        norm, again = rank["evaluation"]["norms"]
        assert norm == again > 0
        assert rank["evaluation"]["stepped"]


def test_buffers_start_anew_with_a_second_finalize(world: World) -> None:
    assert [rank["statistics"] for rank in world.found("2")] == [[0.0] * 8] * 2


def test_buffers_that_nobody_wrote_are_warned_of(world: World) -> None:
    first, second = world.found("2")
    assert first["meta"] == second["meta"] == second["emptied"] == []  # rank 0 says it, once
    (said,) = first["emptied"]
    assert "buffers are in no checkpoint, and not what the model's class computes: " in said
    assert "model.rotary_emb.inv_freq" in said
    assert "leave the model on meta" in said


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        ("source", "the ranks do not have the same model, seed or options"),
        ("strategy", "rank 1: direct, global"),
        ("type", "rank 1: TypeError"),
        ("head", "prepare(..., missing=...)"),
        ("apart", "lm_head.weight and model.embed_tokens.weight"),
        ("other", "first.weight: was prepared and is not in the wrapped model"),
    ],
)
def test_ranks_end_together(world: World, scenario: str, text: str) -> None:
    for rank in world.found("2"):
        assert text in rank[scenario]
