"""What a diagnosis says of models that anybody wrapped."""

from __future__ import annotations

import copy
import json

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from shardkit.training.extras.diagnose import diagnose
from shardkit.training.wrap import layer_policy, wrap
from tests.training.models import reference
from tests.training.wrapping import loss_of, tensor_parallel, wrapped
from tests.worlds.ranks import Ranks, on_all

two = Ranks(__name__, 2)
four = Ranks(__name__, 4)
LAYERS = ["model.layers.0", "model.layers.1", "model.layers.2"]


@two.test
def test_shares_of_both_ranks_are_the_whole() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(reference("llama").config)
    found = diagnose(wrap(model, init_device_mesh("cpu", (2,)), activation_checkpointing=True))
    here, there = on_all(found.local_parameters)
    assert here + there == found.parameters == 18192
    assert found.local_bytes == found.local_parameters * 4
    assert found.expected_bytes == found.parameters * 4 / 2
    assert "lm_head.weight" in found.uneven  # 101 rows
    assert "model.norm.weight" not in found.uneven
    assert json.loads(json.dumps(found.to_json()))["kind"] == "fsdp2"


@two.test
def test_parts_that_are_empty() -> None:
    model = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 3))
    wrap(model, init_device_mesh("cpu", (2,)), policy="none", mixed_precision=None)
    assert on_all(list(diagnose(model).empty)) == [[], ["0.weight", "0.bias"]]  # of one row


@two.test
def test_the_table() -> None:
    model = wrap(reference("llama"), init_device_mesh("cpu", (2,)))
    here, _ = on_all(str(diagnose(model)))
    lines = here.splitlines()
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


@two.test_each({"flat": False, "orig": True})
def test_fsdp1(use_orig_params: bool) -> None:
    policy = ModuleWrapPolicy(layer_policy("transformers.models.llama.modeling_llama.LlamaDecoderLayer"))
    model = FullyShardedDataParallel(
        reference("llama-tied"),
        auto_wrap_policy=policy,
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    found = diagnose(model)
    assert found.kind == "fsdp1"
    assert [unit.path for unit in found.units] == ["", *LAYERS]
    assert {unit.class_name for unit in found.units[1:]} == {"LlamaDecoderLayer"}
    assert sum(on_all(found.local_parameters)) == found.parameters == 2 * 7884
    assert on_all(found.local_parameters)[0] == 7884
    assert [unit.is_root for unit in found.units] == [True, False, False, False]
    assert found.problems == ()


@two.test
def test_models_that_are_not_cut_say_so() -> None:
    plain, ddp = diagnose(reference("llama-tied")), diagnose(DistributedDataParallel(reference("llama")))
    for found, kind in ((plain, "plain"), (ddp, "ddp")):
        assert found.kind == kind
        assert found.local_parameters == found.parameters
        assert found.units == ()
        assert found.problems == ()
    assert plain.ties == (("model.embed_tokens.weight", "lm_head.weight"),)


@two.test
def test_a_policy_that_matched_nothing_is_a_problem() -> None:
    (problem,) = diagnose(fully_shard(reference("llama"))).problems
    assert problem.startswith("no units: the policy matched nothing")


@two.test
def test_what_was_not_cut_is_a_problem() -> None:
    model = reference("llama")
    for layer in model.model.layers:
        fully_shard(layer)
    found = diagnose(model)
    assert [unit.is_root for unit in found.units] == [True] * 3
    assert found.whole == ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    if dist.get_rank() == 0:  # the other's part of what does not divide is smaller
        assert found.problems == (
            "this rank holds 1.3 times its share: 3 parameters not cut "
            "(model.embed_tokens.weight, model.norm.weight, lm_head.weight)",
        )


@two.test
def test_a_broken_tie_is_a_problem() -> None:
    model = wrapped(reference("llama-tied"))
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    found = diagnose(model)
    assert found.broken_ties == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert found.ties == ()
    assert found.problems == (
        "model.embed_tokens.weight and lm_head.weight should be one parameter, and are not",
    )


@two.test
def test_what_the_first_forward_refuses_is_a_problem() -> None:
    mixed = reference("llama")
    mixed.model.layers[0].mlp.to(torch.bfloat16)
    mixed.model.scratch = torch.empty(2, device="meta")
    apart = wrap(copy.deepcopy(mixed), init_device_mesh("cpu", (2,)))
    assert diagnose(apart).problems == ("1 tensor without memory (meta): model.scratch",)
    for layer in mixed.model.layers:
        fully_shard(layer)
    assert diagnose(fully_shard(mixed)).problems == (
        "unit model.layers.0 trains parameters of bfloat16 and float32, which FSDP2 refuses at the first forward",
        "1 tensor without memory (meta): model.scratch",
    )


@two.test
def test_parameters_that_are_gathered_just_now_count_as_parts() -> None:
    model = fully_shard(reference("llama"))
    loss_of("llama", model)  # without resharding: parameters are whole just now
    assert on_all(diagnose(model).local_parameters)[0] == 9192


@four.test
def test_tensor_parallel_parts_are_no_problem() -> None:
    found = diagnose(tensor_parallel(reference("llama")))
    assert found.problems == ()
    assert found.num_parts in (2, 4)
    uneven, *_ = on_all(found.uneven)
    assert "model.layers.0.mlp.down_proj.weight" in uneven


def test_without_a_process_group() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, device="meta"))
    model.register_buffer("scale", torch.ones(2))
    seen = diagnose(model)
    assert (seen.kind, seen.rank, seen.world_size) == ("plain", 0, 1)
    assert (seen.parameters, seen.parameter_bytes) == (12, 48)
    assert seen.meta == ("1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert "not wrapped: every rank holds everything" in str(seen)
    assert str(seen).splitlines()[-1].split()[0] == "problem"
