"""Names that real trainers wrote come out as the model's own."""

import pytest

from shardkit.errors import SourceError
from shardkit.keys.select import Naming, Skipped, select_model
from tests.keys.key_sets import DATA, load

ROOTS = {
    "accelerate_fsdp2": "model",
    "dcp_replicated": "model.module",
    "edge_dtypes": "model",
    "fabric_fsdp": "model",
    "fsdp2_app_stateful": "app.model",
    "fsdp2_compile_blocks": "model",
    "fsdp2_ema": "model",
    "fsdp2_gpt2": "model",
    "fsdp2_modelonly_flat": "",
    "fsdp2_optim_flattened": "model",
    "fsdp2_qwen2vl": "model",
    "fsdp2_qwen3moe": "model",
    "lightning_fsdp": "model.model",
    "lightning_mp": "state_dict.model",
    "megatron_torch_dist": "",
    "oldtorch_dtensor": "model",
    "peft_lora_fsdp2_full": "model",
    "torchtitan_llama3": "",
    "torchtune_llama3": "model",
}
# Without planner paths, and with nothing beside the model, nothing tells a key from a prefix of a model that was saved flat.
NEEDS_PATHS = {"accelerate_fsdp2", "dcp_replicated", "edge_dtypes"}


def test_every_key_set_is_used() -> None:
    assert {path.stem for path in DATA.glob("*.json")} == {*ROOTS, "fsdp1_local_sd"}


@pytest.mark.parametrize("knows_paths", [True, False], ids=["paths", "names only"])
@pytest.mark.parametrize("name", ROOTS)
def test_gives_the_names_in_memory(name: str, knows_paths: bool) -> None:
    if not knows_paths and name in NEEDS_PATHS:
        pytest.skip("cannot be told from names alone")
    keys = load(name)
    selection = select_model(keys.tensors, keys.objects, keys.paths if knows_paths else None)
    assert set(selection.names.values()) == keys.names
    assert selection.root == ROOTS[name]
    assert all(stored.endswith(target.rpartition(".")[2]) for stored, target in selection.names.items())


@pytest.mark.parametrize("name", sorted(set(ROOTS) - {"peft_lora_fsdp2_full"}))
def test_gives_the_same_beside_a_base(name: str) -> None:
    keys = load(name)
    assert (
        set(select_model(keys.tensors, keys.objects, None, base_names=keys.names).names.values())
        == keys.names
    )


def test_undecided_names_are_kept_and_said_to_be() -> None:
    keys = load("edge_dtypes")
    selection = select_model(keys.tensors, keys.objects, None)
    assert set(selection.names.values()) == {f"model.{name}" for name in keys.names}
    assert "--root model" in selection.notes[0]


def test_refuses_flat_parameters() -> None:
    keys = load("fsdp1_local_sd")
    with pytest.raises(SourceError, match="LOCAL_STATE_DICT") as caught:
        select_model(keys.tensors, keys.objects, keys.paths)
    assert len(caught.value.problems) == 3


def test_averaged_weights_are_skipped_by_default_and_taken_on_request() -> None:
    keys = load("fsdp2_ema")
    model = select_model(keys.tensors, keys.objects, keys.paths)
    assert "model_ema" in model.candidates
    averaged = select_model(keys.tensors, keys.objects, keys.paths, naming=Naming(weights="ema"))
    assert set(averaged.names.values()) == keys.names
    assert {stored.split(".")[0] for stored in averaged.names} == {"model_ema"}
    assert averaged.candidates == ("model",)


def test_says_what_was_stripped_and_skipped() -> None:
    keys = load("fsdp2_compile_blocks")
    selection = select_model(keys.tensors, keys.objects, keys.paths)
    assert selection.stripped == (("model.", 21), ("_orig_mod", 18))
    keys = load("fsdp2_app_stateful")
    skipped = {part.path: part for part in select_model(keys.tensors, keys.objects, keys.paths).skipped}
    assert skipped["app.optim"].kind == "optimizer"
    assert skipped["rng"] == Skipped(kind="random state", path="rng", num_tensors=1, num_objects=0)
    assert skipped["scheduler"] == Skipped(kind="scheduler", path="scheduler", num_tensors=0, num_objects=8)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("torchtitan_llama3", "torchtitan's"),
        ("torchtune_llama3", "torchtune's"),
        ("megatron_torch_dist", "Megatron's"),
        ("fsdp2_qwen3moe", "fused"),
        ("fsdp2_qwen2vl", "vision"),
    ],
)
def test_warns_of_names_that_are_not_the_hubs(name: str, word: str) -> None:
    keys = load(name)
    selection = select_model(keys.tensors, keys.objects, keys.paths)
    names = list(selection.names.values())
    (warning,) = (*selection.unloadable, *selection.warnings, *selection.in_memory_warnings(names, None))
    assert word in warning
    assert selection.in_memory_warnings(names, keys.names) == ()


def test_says_nothing_about_names_that_are() -> None:
    for name in set(ROOTS) - {"torchtitan_llama3", "torchtune_llama3", "megatron_torch_dist"}:
        if "qwen" not in name:
            keys = load(name)
            selection = select_model(keys.tensors, keys.objects, keys.paths)
            assert selection.warnings == (), name
            assert selection.in_memory_warnings(list(selection.names.values()), None) == (), name


def test_a_bases_names_of_other_spelling_do_not_mislead() -> None:
    """The Hub's Qwen2-VL has `visual.*` and `model.layers.*`; in memory both are below `model.`."""
    keys = load("fsdp2_qwen2vl")
    hub = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
        for name in keys.names
    }
    assert set(select_model(keys.tensors, base_names=hub).names.values()) == keys.names
    keys = load("fsdp2_qwen3moe")
    hub = {name for name in keys.names if "experts" not in name} | {
        f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"
        for layer in range(2)
        for expert in range(64)
    }
    assert set(select_model(keys.tensors, base_names=hub).names.values()) == keys.names
    keys = load("peft_lora_fsdp2_full")
    hub = {name.removeprefix("base_model.model.") for name in keys.names if "lora" not in name}
    assert set(select_model(keys.tensors, base_names=hub).names.values()) == keys.names
