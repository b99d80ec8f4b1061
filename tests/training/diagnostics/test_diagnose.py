"""What a diagnosis says of models that anybody wrapped."""

from typing import Any

import pytest
import torch
from torch import nn

from shardkit.training.diagnostics.diagnose import diagnose
from tests.training.conftest import World


def found(world: World, case: str, rank: int = 0) -> dict[str, Any]:
    value: dict[str, Any] = world.found("two")[rank]["others"][case]
    return value


@pytest.mark.dist
def test_shares_of_both_ranks_are_the_whole(wrap_world: World) -> None:
    (here, whole, num_bytes, expected), (there, *_) = [
        each["meta"]["local"] for each in wrap_world.found("two")
    ]
    assert here + there == whole == 18192
    assert num_bytes == here * 4
    assert expected == whole * 4 / 2
    uneven = wrap_world.found("two")[0]["meta"]["uneven"]
    assert "lm_head.weight" in uneven  # 101 rows
    assert "model.norm.weight" not in uneven


@pytest.mark.dist
def test_parts_that_are_empty(wrap_world: World) -> None:
    here, there = [each["edges"]["empty"] for each in wrap_world.found("two")]
    assert here == []
    assert there == ["0.weight", "0.bias"]  # of one row


@pytest.mark.dist
def test_the_table(wrap_world: World) -> None:
    lines = wrap_world.found("two")[0]["precision"]["text"].splitlines()
    assert lines[0] == "LlamaForCausalLM on rank 0 of 2: FSDP2 (fully_shard)"
    assert lines[1].split(maxsplit=1) == [
        "parameters",
        "9,192 of 18,192 here: 0.04 MiB, expected 0.03 of 0.07",
    ]
    assert lines[2].split(maxsplit=1) == [
        "units",
        "3 and the root: model.layers.0, model.layers.1, model.layers.2",
    ]
    assert (
        "    model.layers.{0,1} (2)  LlamaDecoderLayer, 4,440 parameters, mesh 0=2, placed (S(0)), reshard True,"
        " compute bfloat16, reduce float32" in lines
    )


@pytest.mark.dist
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1(wrap_world: World, use_orig_params: bool) -> None:
    model = found(wrap_world, f"fsdp1-{use_orig_params}")
    assert model["kind"] == "fsdp1"
    assert [unit["path"] for unit in model["units"]] == ["", *(f"model.layers.{n}" for n in range(3))]
    assert {unit["class_name"] for unit in model["units"][1:]} == {"LlamaDecoderLayer"}
    assert model["local_parameters"] == model["parameters"] / 2 == 7884
    assert [unit["is_root"] for unit in model["units"]] == [True, False, False, False]
    assert model["problems"] == []


@pytest.mark.dist
def test_models_that_are_not_cut_say_so(wrap_world: World) -> None:
    for kind in ("plain", "ddp"):
        model = found(wrap_world, kind)
        assert model["kind"] == kind
        assert model["local_parameters"] == model["parameters"]
        assert model["units"] == []
        assert model["problems"] == []
    assert found(wrap_world, "plain")["ties"] == [["model.embed_tokens.weight", "lm_head.weight"]]


@pytest.mark.dist
def test_a_policy_that_matched_nothing_is_a_problem(wrap_world: World) -> None:
    (problem,) = found(wrap_world, "root_only")["problems"]
    assert problem.startswith("no units: the policy matched nothing")


@pytest.mark.dist
def test_what_was_not_cut_is_a_problem(wrap_world: World) -> None:
    model = found(wrap_world, "layers_only")
    assert [unit["is_root"] for unit in model["units"]] == [True] * 3
    assert model["whole"] == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert model["problems"] == [
        "this rank holds 1.3 times its share: 3 parameters not cut "
        "(model.embed_tokens.weight, model.norm.weight, lm_head.weight)"
    ]


@pytest.mark.dist
def test_a_broken_tie_is_a_problem(wrap_world: World) -> None:
    model = found(wrap_world, "broken")
    assert model["broken_ties"] == [["model.embed_tokens.weight", "lm_head.weight"]]
    assert model["ties"] == []
    assert model["problems"] == [
        "model.embed_tokens.weight and lm_head.weight should be one parameter, and are not"
    ]


@pytest.mark.dist
def test_what_the_first_forward_refuses_is_a_problem(wrap_world: World) -> None:
    model = found(wrap_world, "mixed")
    assert model["problems"] == [
        "unit model.layers.0 trains parameters of bfloat16 and float32, which FSDP2 refuses at the first forward",
        "1 tensor without memory (meta): model.scratch",
    ]
    assert found(wrap_world, "split")["problems"] == ["1 tensor without memory (meta): model.scratch"]


@pytest.mark.dist
def test_parameters_that_are_gathered_just_now_count_as_parts(wrap_world: World) -> None:
    assert wrap_world.found("two")[0]["others"]["in_forward"] == 9192


@pytest.mark.dist
def test_tensor_parallel_parts_are_no_problem(wrap_world: World) -> None:
    ranks = [each["diagnosis"] for each in wrap_world.found("tp")]
    assert all(each["problems"] == [] for each in ranks)
    assert all(each["num_parts"] in (2, 4) for each in ranks)
    assert "model.layers.0.mlp.down_proj.weight" in ranks[0]["uneven"]


def test_without_a_process_group() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, device="meta"))
    model.register_buffer("scale", torch.ones(2))
    seen = diagnose(model)
    assert (seen.kind, seen.rank, seen.world_size) == ("plain", 0, 1)
    assert (seen.parameters, seen.parameter_bytes) == (12, 48)
    assert seen.meta == ("1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert "not wrapped: every rank holds everything" in str(seen)
    assert str(seen).splitlines()[-1].split()[0] == "problem"
