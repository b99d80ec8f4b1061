"""Wrapping real models: units, settings, names, and that they train as one process does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from shardkit.errors import PolicyError, UsageError
from shardkit.keys.names import clean_name
from shardkit.training.extras.diagnose import Diagnosis, diagnose
from shardkit.training.wrap import layer_policy, wrap
from tests.training.models import inputs, reference
from tests.training.wrapping import (
    TP_WIDTHS,
    full,
    loss_of,
    tensor_parallel,
    wrapped,
    wrapped_with_replicas,
)
from tests.worlds.ranks import Ranks, on_all, same_error

two = Ranks(__name__, 2)
four = Ranks(__name__, 4)

LAYERS = ["", "model.layers.0", "model.layers.1", "model.layers.2"]
UNITS = {
    "llama": LAYERS,
    "llama-tied": LAYERS,
    "qwen3": LAYERS,
    "gpt2": ["", "transformer.h.0", "transformer.h.1", "transformer.h.2"],
    "bert": ["", "embeddings", "encoder.layer.0", "encoder.layer.1"],
    # The embeddings are tied to the head: as a unit they would be untied.
    "bert-lm": ["", "bert.encoder.layer.0", "bert.encoder.layer.1"],
    "qwen3-vl": [
        "",
        "model.visual.blocks.0",
        "model.visual.blocks.1",
        "model.language_model.layers.0",
        "model.language_model.layers.1",
        "model.language_model.layers.2",
    ],
    "qwen3-moe": ["", "model.layers.0", "model.layers.1"],
}
TIED = ("llama-tied", "qwen3", "gpt2", "bert-lm")


def trained(name: str, model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole parameters after one step of plain SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.manual_seed(0)  # of dropout
    loss_of(name, model.train()).backward()
    optimizer.step()
    return {key: full(value) for key, value in model.state_dict().items()}


def check_training(
    name: str, prepare: Callable[[nn.Module], nn.Module], *, calls: int = 1, **changes: Any
) -> Diagnosis:
    """Wrap, train a step, and hold everything against one process.

    Args:
        name: of a model in tests/training/models.
        prepare: wraps it.
        calls: how often forward of the first layer's matrices is computed.
        changes: of its config.
    """
    plain = reference(name, **changes)
    config = plain.config.to_json_string()
    model = prepare(copy.deepcopy(plain))
    names = list(model.state_dict())
    found = diagnose(model)
    called: list[str] = []
    ends = ("layers.0.mlp.gate_proj", "layers.0.mlp.gate", "h.0.mlp.c_fc", "layer.0.output.dense")
    layer = next(m for path, m in model.named_modules() if clean_name(path).endswith(ends))
    layer.register_forward_pre_hook(lambda *_: called.append("call"))
    after, expected = trained(name, model), trained(name, plain)
    before = reference(name, **changes).state_dict()
    assert any(not torch.equal(expected[key], value) for key, value in before.items())
    for key, value in expected.items():
        assert float((after[key] - value).abs().max()) < 1e-6, key
    assert names == list(expected)
    assert plain.config.to_json_string() == config == model.config.to_json_string()
    assert found.problems == ()
    assert len(called) == calls
    return found


def units_of(found: Diagnosis) -> list[str]:
    return [unit.path for unit in found.units]


def resharded(found: Diagnosis) -> list[str]:
    return [unit.reshard_after_forward for unit in found.units]


def mesh_of_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


@two.test_each(UNITS.keys())
def test_models_train_as_in_one_process(name: str) -> None:
    found = check_training(name, wrapped)
    assert units_of(found) == UNITS[name]
    assert bool(found.ties) == (name in TIED)


@two.test
def test_the_last_block_is_kept_after_forward() -> None:
    assert resharded(diagnose(wrapped(reference("llama")))) == ["False", "True", "True", "False"]
    both = diagnose(wrapped(reference("qwen3-vl")))
    assert resharded(both) == ["False", "True", "True", "True", "True", "False"]
    asked = diagnose(wrap(reference("llama"), mesh_of_two(), reshard_after_forward=True))
    assert resharded(asked) == ["False", "True", "True", "True"]


@two.test_each({"transformers' own way": True, "torch's wrapper": "LlamaMLP"})
def test_activations_are_computed_again(what: Any) -> None:
    again = partial(wrap, mesh=mesh_of_two(), mixed_precision=None, activation_checkpointing=what)
    found = check_training("llama", again, calls=2)
    assert found.checkpoint_wrappers == 3
    assert units_of(found) == LAYERS


@four.test
def test_replicated_meshes() -> None:
    found = check_training("llama-tied", wrapped_with_replicas)
    assert found.units[1].placements == ("R, S(0)",)


@four.test
def test_blocks_that_are_gathered_from_some_ranks_after_forward() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    partly = partial(wrap, mesh=mesh, mixed_precision=None, reshard_after_forward=2)
    assert resharded(check_training("llama", partly)) == ["False", "True", "True", "True"]


@four.test
def test_tensor_parallel_models() -> None:
    check_training("llama", tensor_parallel, **TP_WIDTHS)
    unit = diagnose(tensor_parallel(reference("llama"))).units[1]
    assert unit.mesh == "dp_shard=2"
    assert unit.placements == ("S(0)", "S(0) after 2 parts, S(0)", "S(0), S(1)")


def units_by(policy: Any, model: nn.Module | None = None) -> list[str]:
    return units_of(diagnose(wrap(model or reference("llama"), mesh_of_two(), policy=policy)))


@two.test_each(
    {
        "class": LlamaDecoderLayer,
        "name": "LlamaDecoderLayer",
        "path": "transformers.models.llama.modeling_llama.LlamaDecoderLayer",
        "template": "model.layers.*",
        "container": "model.layers",
    }
)
def test_every_way_to_name_the_layers(policy: Any) -> None:
    assert units_by(policy) == LAYERS


@two.test
def test_nested_partial_and_single_units() -> None:
    nested = ["", *(f"model.layers.{n}{inner}" for n in range(3) for inner in ("", ".mlp"))]
    assert units_by({LlamaDecoderLayer, "LlamaMLP"}) == nested
    assert units_by("LlamaDecoderLayer,LlamaMLP") == nested
    attention = units_by(lambda name, module: name.endswith("self_attn"))
    assert attention == ["", *(f"model.layers.{n}.self_attn" for n in range(3))]
    assert units_by("none") == [""]


class Shared(nn.Module):
    """Blocks of a plain model, two of which share a parameter with what stands around them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(6, 6)
        self.head.weight = self.blocks[1][0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@two.test
def test_a_plain_model_has_blocks_and_ties_too() -> None:
    model = Shared()
    assert units_by("auto", model) == ["", "blocks.0", "blocks.2"]
    assert model.head.weight is model.blocks[1][0].weight
    model(torch.ones(2, 6)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert model.head.weight is model.blocks[1][0].weight


def llama() -> nn.Module:
    return reference("llama")


class Refused(NamedTuple):
    error: str
    message: str
    make: Callable[[], nn.Module]
    options: dict[str, Any]


def refused(error: str, message: str, make: Callable[[], nn.Module] = llama, **options: Any) -> Refused:
    return Refused(error, message, make, options)


REFUSED = {
    "nothing": refused(
        "PolicyError",
        "policy: no module matches LlamaDecodeLayer  (closest name: LlamaDecoderLayer)",
        policy="LlamaDecodeLayer",
    ),
    "no_class": refused("PolicyError", "policy: no module is a Conv2d", policy=nn.Conv2d),
    "no_predicate": refused(
        "PolicyError", "policy: <lambda> chose none of 45 modules", policy=lambda name, module: False
    ),
    "bad_predicate": refused(
        "PolicyError", "<lambda> cannot be called with a name and a module", policy=lambda module: True
    ),
    "function": refused("PolicyError", "my.module:apply shards the model itself", policy="my.module:apply"),
    "unreadable": refused("PolicyError", "policy 'a b': cannot read 'a b'", policy="a b"),
    "modulelist": refused(
        "PolicyError",
        "1 module that it matches cannot be units: they have no forward",
        policy=nn.ModuleList,
    ),
    "number": refused("PolicyError", "policy: cannot be of type int", policy=3),
    "no_blocks": refused(
        "PolicyError",
        'policy="auto": Sequential has no classes to wrap',
        lambda: nn.Sequential(nn.Linear(2, 2)),
    ),
    "tied": refused(
        "LayoutError",
        "tied parameters lie in different units",
        lambda: reference("bert-lm"),
        policy="BertEmbeddings,BertLayer",
    ),
    "tied_predicate": refused(
        "LayoutError",
        "tied parameters lie in different units",
        Shared,
        policy=lambda name, module: name == "blocks.1",
    ),
    "checkpoint_none": refused(
        "PolicyError",
        "checkpoints the units, and there are none",
        policy="none",
        activation_checkpointing=True,
    ),
    "checkpoint_nothing": refused(
        "PolicyError",
        "activation_checkpointing: no module matches Nothing",
        activation_checkpointing="Nothing",
    ),
    "twice": refused(
        "UsageError",
        "the model is wrapped already: its root is sharded by fully_shard",
        lambda: wrap(llama(), mesh_of_two()),
    ),
    "fsdp1": refused(
        "UsageError",
        "wrapped already",
        lambda: FullyShardedDataParallel(llama(), device_id=torch.device("cpu")),
    ),
    "precision": refused("UsageError", "mixed_precision cannot be 'int4'", mixed_precision="int4"),
}


def error_of(case: str) -> dict[str, Any]:
    """What every rank is told, and in which no flag of the command line is named."""
    refused = REFUSED[case]
    model = refused.make()
    error = same_error(lambda: wrap(model, mesh_of_two(), **refused.options))
    assert error["error"] == refused.error
    assert refused.message in error["message"]
    assert "--wrap" not in f"{error['message']} {error['hint']}"
    return error


@two.test_each(REFUSED.keys())
def test_what_cannot_be_wrapped_says_so_on_every_rank(case: str) -> None:
    error_of(case)


@pytest.mark.parametrize("mesh", [None, 8, "dp_shard=8"])
def test_what_is_no_mesh_is_refused(mesh: Any) -> None:
    with pytest.raises(UsageError, match="wrap needs a DeviceMesh, and was given"):
        wrap(torch.nn.Linear(2, 2), mesh)


@two.test
def test_errors_list_what_exists_and_name_what_works() -> None:
    assert error_of("nothing")["problems"][0] == "LlamaDecoderLayer  (3 modules)"
    assert error_of("no_class")["problems"]
    assert error_of("no_predicate")["problems"]
    tied = error_of("tied")
    assert tied["problems"] == [
        "bert.embeddings.word_embeddings.weight (unit bert.embeddings) and cls.predictions.decoder.weight (unit root)"
    ]
    assert tied["hint"].endswith('policy="BertLayer"')
    assert error_of("modulelist")["hint"] == "name what is in it: model.layers.*"


@two.test
def test_precision_is_of_computing_not_of_storing() -> None:
    model = wrap(llama(), mesh_of_two())
    out = model(**inputs("llama"))
    out.logits.float().sum().backward()
    assert out.logits.dtype == torch.bfloat16
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    own = MixedPrecisionPolicy(param_dtype=torch.float16)
    found = diagnose(wrap(llama(), mesh_of_two(), mixed_precision=own))
    assert found.units[1].mixed_precision == "compute float16"
    assert diagnose(wrap(llama(), mesh_of_two(), cpu_offload=True)).units[1].cpu_offload


class Mesh(NamedTuple):
    shape: tuple[int, ...]
    names: tuple[str, ...] | None
    said: str
    """In the error, or of the axes that are taken."""

    def wrapped(self) -> nn.Module:
        mesh = init_device_mesh("cpu", self.shape, mesh_dim_names=self.names)
        return wrap(nn.Linear(2, 2), mesh, policy="none")


@four.test_each(
    {
        "unnamed": Mesh((2, 2), None, "needs their names"),
        "only_tp": Mesh((4,), ("tp",), "has no axis to shard over"),
        "only_replicas": Mesh((2, 2), ("dp_replicate", "tp"), "has no axis to shard over"),
        "reversed": Mesh((2, 2), ("dp_shard", "dp_replicate"), "has no axis to shard over"),
        "pipeline": Mesh((2, 2), ("pp", "dp_shard"), "cannot tell which axes"),
        "context_first": Mesh((2, 2), ("cp", "dp_shard"), "cannot tell which axes"),
    }
)
def test_meshes_that_do_not_say_where_data_is(mesh: Mesh) -> None:
    error = same_error(mesh.wrapped)
    assert error["error"] == "MeshError"
    assert mesh.said in error["message"]


@four.test_each(
    {
        "lightning": Mesh((2, 2), ("data_parallel", "tensor_parallel"), "data_parallel=2"),
        "three": Mesh((2, 2, 1), ("dp_replicate", "dp_shard", "tp"), "dp_replicate=2, dp_shard=2"),
        "context": Mesh((2, 2), ("dp_shard", "cp"), "dp_shard_cp=4"),
        "context_alone": Mesh((2, 2), ("dp_replicate", "cp"), "dp_replicate=2, cp=2"),
        "context_replicas": Mesh(
            (2, 1, 2), ("dp_replicate", "dp_shard", "cp"), "dp_replicate=2, dp_shard_cp=2"
        ),
    }
)
def test_meshes_with_other_axes(mesh: Mesh) -> None:
    found, *_ = on_all([unit.mesh for unit in diagnose(mesh.wrapped()).units])
    assert found == [mesh.said]


@four.test
def test_context_parallel_ranks_hold_parts_as_others_do() -> None:
    """Of a job of four ranks on one axis, and beside tensor parallelism as torch has it."""
    one = wrap(llama(), init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",)))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    for name, parameter in wrap(llama(), mesh).named_parameters():
        assert torch.equal(parameter.to_local(), one.get_parameter(name).to_local()), name
    by_three = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp_shard", "cp", "tp"))
    by_two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model, wanted = (wrap(reference("llama", **TP_WIDTHS), each) for each in (by_three, by_two))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.to_local(), wanted.get_parameter(name).to_local()), name
        assert parameter.placements == wanted.get_parameter(name).placements


@two.test
def test_a_model_on_meta_stays_there() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(reference("llama").config)
    found = diagnose(wrap(model, mesh_of_two(), activation_checkpointing=True))
    assert len(found.meta) == 32  # 30 parameters and 2 buffers
    assert found.problems[0].startswith("32 tensors without memory (meta)")


def test_layer_policy_imports_classes() -> None:
    assert layer_policy("torch.nn.Linear", "torch.nn.Conv2d") == {nn.Linear, nn.Conv2d}


def test_layer_policy_lists_all_that_is_wrong() -> None:
    with pytest.raises(PolicyError) as caught:
        layer_policy(
            "torch.nn.Linear", "torch.nn.functional.relu", "no_such.Module", "Linear", "torch.nn.Linaer"
        )
    assert caught.value.message == "layer_policy: 4 paths cannot be used"
    assert [problem.split(": ")[0] for problem in caught.value.problems] == [
        "torch.nn.functional.relu",
        "no_such.Module",
        "Linear",
        "torch.nn.Linaer",
    ]
    with pytest.raises(PolicyError):
        layer_policy()
