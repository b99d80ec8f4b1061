"""Which weights become factors, of which rank: pure."""

from __future__ import annotations

import pytest

from shardkit.errors import LayoutError, UsageError
from shardkit.osft.plan import Candidate, OsftPlan, choose_targets

BLOCK = {
    "model.embed_tokens.weight": Candidate((64, 16), "Embedding"),
    "model.layers.0.self_attn.q_proj.weight": Candidate((16, 16), "Linear"),
    "model.layers.0.self_attn.q_proj.bias": Candidate((16,), "Linear"),
    "model.layers.0.mlp.up_proj.weight": Candidate((40, 16), "Linear"),
    "model.layers.0.mlp.down_proj.weight": Candidate((16, 40), "Linear"),
    "model.layers.0.norm.weight": Candidate((16,), "RMSNorm"),
    "lm_head.weight": Candidate((64, 16), "Linear", "it is tied to model.embed_tokens.weight"),
}


def chosen(plan: OsftPlan, weights: dict[str, Candidate] = BLOCK, kind: str = "llama") -> dict[str, int]:
    return {target.weight: target.rank for target in choose_targets(plan, weights, kind)[0]}


def test_auto_takes_the_layers_of_the_architecture() -> None:
    assert chosen(OsftPlan(ratio=0.3)) == {
        "model.layers.0.self_attn.q_proj.weight": 11,
        "model.layers.0.mlp.up_proj.weight": 11,
        "model.layers.0.mlp.down_proj.weight": 11,
    }


@pytest.mark.parametrize(
    ("ratio", "size", "rank"),
    [
        (0.1, 10, 9),
        (0.3, 10, 7),
        (0.7, 10, 3),
        (0.001, 10, 9),
        (0.3, 100, 70),
        (0.3, 4096, 2867),
        (0.99, 4096, 40),
    ],
)
def test_rank_is_rounded_down_as_by_others(ratio: float, size: int, rank: int) -> None:
    """Source: mini_trainer 0.9.0: floor(min(shape) * (1 - ratio)) in float64, at most one less than min(shape)."""
    weights = {"self_attn.q_proj.weight": Candidate((size, size + 3), "Linear")}
    assert chosen(OsftPlan(ratio=ratio), weights) == {"self_attn.q_proj.weight": rank}


def test_a_rank_of_none_is_refused() -> None:
    """mini_trainer makes factors of width 0 of this: 10 * (1 - 0.9) is less than 1 in float64."""
    weights = {"self_attn.q_proj.weight": Candidate((10, 10), "Linear")}
    with pytest.raises(LayoutError, match="10 directions, and none would be kept"):
        chosen(OsftPlan(ratio=0.9), weights)


@pytest.mark.parametrize(
    ("ratio", "why"),
    [
        (0.0, "nothing would be trained"),
        (1.0, "that is full fine-tuning"),
        (-0.1, "not between"),
        (2.0, "not between"),
    ],
)
def test_ratios_that_are_none(ratio: float, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        OsftPlan(ratio=ratio)
    assert why in str(caught.value)
    with pytest.raises(UsageError) as caught:
        OsftPlan(ratio=0.5, ranks={"*.q_proj": ratio})
    assert why in str(caught.value)


def test_targets_that_say_only_what_stays_dense() -> None:
    with pytest.raises(UsageError, match=r"what stays dense.*'auto,!\*\.q_proj'"):
        OsftPlan(ratio=0.5, targets="!*.q_proj")


def test_globs_name_weights_or_modules_and_leave_some_out() -> None:
    assert list(chosen(OsftPlan(ratio=0.5, targets="*.up_proj,*.q_proj.weight"))) == [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    ]
    targets, notes = choose_targets(OsftPlan(ratio=0.5, targets=["auto", "!*.mlp.*"]), BLOCK, "llama")
    assert [target.path for target in targets] == ["model.layers.0.self_attn.q_proj"]
    assert len(notes) == 1
    assert "left dense" in notes[0]
    assert "down_proj" in notes[0]


def test_ranks_by_glob_the_last_wins() -> None:
    plan = OsftPlan(ratio=0.5, ranks={"*.mlp.*": 3, "*.up_proj": 0.25})
    assert chosen(plan) == {
        "model.layers.0.self_attn.q_proj.weight": 8,
        "model.layers.0.mlp.up_proj.weight": 12,
        "model.layers.0.mlp.down_proj.weight": 3,
    }


def test_what_cannot_be_divided_is_named_and_can_be_left_out() -> None:
    weights = {
        **BLOCK,
        "model.layers.0.mlp.experts.gate_up_proj": Candidate((4, 16, 80), "Experts"),
        "conv.weight": Candidate((16, 16), "Conv1D"),
        "narrow.weight": Candidate((1, 16), "Linear"),
    }
    every = OsftPlan(ratio=0.5, targets="auto,lm_head,*.experts.*,conv,narrow,model.embed_tokens")
    with pytest.raises(LayoutError) as caught:
        choose_targets(every, weights, "llama")
    text = str(caught.value)
    for part in (
        "5 weights cannot be divided",
        "lm_head.weight: it is tied to model.embed_tokens.weight",
        "gate_up_proj: [4, 16, 80] is not a matrix: experts stay dense",
        "conv.weight: it belongs to Conv1D",
        "narrow.weight: [1, 16] has one direction",
        "embed_tokens.weight: it belongs to Embedding",
    ):
        assert part in text
    left = ["!lm_head", "!*.experts.*", "!conv", "!narrow", "!*.embed_tokens"]
    assert len(chosen(OsftPlan(ratio=0.5, targets=[*every.globs, *left]), weights)) == 3


def test_ranks_out_of_range_are_named() -> None:
    with pytest.raises(
        LayoutError, match=r"up_proj\.weight: \[40, 16\] has 16 directions, and 16 were to be"
    ):
        chosen(OsftPlan(ratio=0.5, ranks={"*.up_proj": 16}))
    with pytest.raises(LayoutError, match=r"has 16 directions, and none would be kept"):
        chosen(OsftPlan(ratio=0.99, ranks={"*.mlp.*": 4}))


def test_globs_that_match_nothing_are_named() -> None:
    with pytest.raises(UsageError, match=r"2 globs of \S+ match no weight"):
        chosen(OsftPlan(ratio=0.5, targets="auto,*.nowhere,!*.else"))
    with pytest.raises(UsageError, match=r"1 glob without a target"):
        chosen(OsftPlan(ratio=0.5, ranks={"lm_head": 3}))
    with pytest.raises(LayoutError, match="it is not known which layers of a model of type bert"):
        chosen(OsftPlan(ratio=0.5), {"encoder.query.weight": Candidate((8, 8), "Linear")}, "bert")
