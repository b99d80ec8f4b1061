"""Wrapping real models: units, settings, names, and that they train as one process does."""

from typing import Any

import pytest
from torch import nn

from shardkit.errors import PolicyError
from shardkit.training.wrap import layer_policy
from tests.training.conftest import World

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


def check_training(found: dict[str, Any], *, calls: int = 1) -> None:
    assert found["moved"]
    assert found["difference"] < 1e-6
    assert found["same_names"]
    assert found["same_config"]
    assert found["problems"] == []
    assert found["calls"] == calls


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.dist
def test_models_train_as_in_one_process(wrap_world: World, name: str) -> None:
    for each in wrap_world.found("two"):
        check_training(each[name])
        assert each[name]["units"] == UNITS[name]
        assert bool(each[name]["ties"]) == (name in TIED)


@pytest.mark.dist
def test_the_last_block_is_kept_after_forward(wrap_world: World) -> None:
    found = wrap_world.found("two")[0]
    assert found["llama"]["reshard"] == ["False", "True", "True", "False"]
    assert found["qwen3-vl"]["reshard"] == ["False", "True", "True", "True", "True", "False"]
    assert found["policies"]["given"] == ["False", "True", "True", "True"]


@pytest.mark.dist
def test_activations_are_computed_again(wrap_world: World) -> None:
    found = wrap_world.found("two")[0]
    for name in ("llama-recomputed", "wrappers"):  # transformers' own way, and torch's wrapper
        check_training(found[name], calls=2)
        assert found[name]["checkpointed"] == 3
        assert found[name]["units"] == LAYERS


@pytest.mark.dist
def test_replicated_meshes(wrap_world: World) -> None:
    for each in wrap_world.found("hsdp"):
        check_training(each["llama-tied"])
        check_training(each["resharded"])
        assert each["placements"] == ["R, S(0)"]
        assert each["resharded"]["reshard"] == ["False", "True", "True", "True"]


@pytest.mark.dist
def test_tensor_parallel_models(wrap_world: World) -> None:
    for each in wrap_world.found("tp"):
        check_training(each["llama"])
        unit = each["diagnosis"]["units"][1]
        assert unit["mesh"] == "dp_shard=2"
        assert unit["placements"] == ["S(0)", "S(0) after 2 parts, S(0)", "S(0), S(1)"]


@pytest.mark.parametrize("policy", ["class", "name", "path", "template", "container"])
@pytest.mark.dist
def test_every_way_to_name_the_layers(wrap_world: World, policy: str) -> None:
    assert wrap_world.found("two")[0]["policies"]["units"][policy] == LAYERS


@pytest.mark.dist
def test_nested_partial_and_single_units(wrap_world: World) -> None:
    units = wrap_world.found("two")[0]["policies"]["units"]
    nested = ["", *(f"model.layers.{n}{inner}" for n in range(3) for inner in ("", ".mlp"))]
    assert units["set"] == units["nested"] == nested
    assert units["predicate"] == ["", *(f"model.layers.{n}.self_attn" for n in range(3))]
    assert units["none"] == [""]


@pytest.mark.dist
def test_a_plain_model_has_blocks_and_ties_too(wrap_world: World) -> None:
    found = wrap_world.found("two")[0]["policies"]
    assert found["units"]["plain"] == ["", "blocks.0", "blocks.2"]
    assert found["shared_is_one"]
    assert found["shared_step"]


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        (
            "nothing",
            "PolicyError",
            "policy: no module matches LlamaDecodeLayer  (closest name: LlamaDecoderLayer)",
        ),
        ("no_class", "PolicyError", "policy: no module is a Conv2d"),
        ("no_predicate", "PolicyError", "policy: <lambda> chose none of 45 modules"),
        ("bad_predicate", "PolicyError", "<lambda> cannot be called with a name and a module"),
        ("function", "PolicyError", "my.module:apply shards the model itself"),
        ("unreadable", "PolicyError", "policy 'a b': cannot read 'a b'"),
        ("modulelist", "PolicyError", "1 module that it matches cannot be units: they have no forward"),
        ("number", "PolicyError", "policy: cannot be of type int"),
        ("no_blocks", "PolicyError", 'policy="auto": Sequential has no classes to wrap'),
        ("tied", "LayoutError", "tied parameters lie in different units"),
        ("tied_predicate", "LayoutError", "tied parameters lie in different units"),
        ("checkpoint_none", "PolicyError", "checkpoints the units, and there are none"),
        ("checkpoint_nothing", "PolicyError", "activation_checkpointing: no module matches Nothing"),
        ("twice", "UsageError", "the model is wrapped already: its root is sharded by fully_shard"),
        ("precision", "UsageError", "mixed_precision cannot be 'int4'"),
    ],
)
@pytest.mark.dist
def test_what_cannot_be_wrapped_says_so_on_every_rank(
    wrap_world: World, case: str, kind: str, message: str
) -> None:
    for each in wrap_world.found("two"):
        error = each["policies"][case]
        assert error["error"] == kind
        assert message in error["message"]
        assert "--wrap" not in f"{error['message']} {error['hint']}"


@pytest.mark.dist
def test_errors_list_what_exists_and_name_what_works(wrap_world: World) -> None:
    found = wrap_world.found("two")[0]["policies"]
    assert found["nothing"]["problems"][0] == "LlamaDecoderLayer  (3 modules)"
    assert found["no_class"]["problems"]
    assert found["no_predicate"]["problems"]
    assert found["tied"]["problems"] == [
        "bert.embeddings.word_embeddings.weight (unit bert.embeddings) and cls.predictions.decoder.weight (unit root)"
    ]
    assert found["tied"]["hint"].endswith('policy="BertLayer"')
    assert found["modulelist"]["hint"] == "name what is in it: model.layers.*"


@pytest.mark.dist
def test_precision_is_of_computing_not_of_storing(wrap_world: World) -> None:
    found = wrap_world.found("two")[0]["precision"]
    assert found["logits"] == "torch.bfloat16"
    assert found["grads"] == found["stored"] == ["torch.float32"]
    assert found["own"] == "compute float16"
    assert found["offload"]


@pytest.mark.dist
def test_meshes_that_do_not_say_where_data_is(wrap_world: World) -> None:
    found = wrap_world.found("hsdp")[0]["meshes"]
    assert found["unnamed"]["error"] == "MeshError"
    assert "needs their names" in found["unnamed"]["message"]
    assert "has no axis to shard over" in found["only_tp"]["message"]
    assert "has no axis to shard over" in found["only_replicas"]["message"]
    assert "has no axis to shard over" in found["reversed"]["message"]
    assert "cannot tell which axes" in found["pipeline"]["message"]
    assert found["lightning"] == ["data_parallel=2"]
    assert found["three"] == ["dp_replicate=2, dp_shard=2"]


@pytest.mark.dist
def test_a_model_on_meta_stays_there(wrap_world: World) -> None:
    found = wrap_world.found("two")[0]["meta"]
    assert found["meta"] == 32  # 30 parameters and 2 buffers
    assert found["problems"][0].startswith("32 tensors without memory (meta)")


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
