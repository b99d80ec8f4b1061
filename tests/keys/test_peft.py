"""Adapters' names. What PEFT 0.21 has in memory and what its own save makes of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import UsageError
from shardkit.keys.peft import classify_peft, find_misfits
from tests.keys.key_sets import MODELS, load

Q = "model.layers.0.self_attn.q_proj"
P = "base_model.model."
LORA = [f"{P}{Q}.base_layer.weight", f"{P}{Q}.lora_A.default.weight", f"{P}{Q}.lora_B.default.weight"]


def test_no_adapter() -> None:
    found = classify_peft(MODELS["llama"])
    assert (found.kind, found.adapter_names, found.modules) == ("none", {}, ())
    assert found.base_names == {name: name for name in MODELS["llama"]}


@pytest.mark.parametrize(
    "name", ["sam.prompt_encoder.no_mask_embed.weight", "road_map.weight", "model.lora.weight"]
)
def test_names_that_only_look_like_an_adapters(name: str) -> None:
    assert classify_peft([name]).kind == "none"


@pytest.mark.parametrize("end", ["0.lora_A", "0.lora_B", "original"])
def test_factors_that_torch_parametrizes_are_the_models_own(end: str) -> None:
    name = f"encoder.layers.0.mixer.Wqkv.parametrizations.weight.{end}"  # jina-embeddings-v3
    assert classify_peft([name]).kind == "none"


def test_names_that_the_base_stores_are_the_models_own() -> None:
    native = [
        f"{Q}.{end}.weight" for end in ("base_layer", "lora_A.vision", "lora_B.vision", "lora_A.speech")
    ]
    assert classify_peft(native, base_names=native).kind == "none"
    found = classify_peft([*native, *LORA[1:]], base_names=native)
    assert list(found.adapter_names) == LORA[1:]


def test_a_real_one() -> None:
    found = classify_peft(load("peft_lora_fsdp2_full").names)
    assert (found.kind, found.adapter, found.methods) == ("base+adapter", "default", ("lora",))
    assert set(found.base_names.values()) == load("accelerate_fsdp2").names - {
        f"model.layers.{layer}.self_attn.{norm}.weight" for layer in range(2) for norm in ("q_norm", "k_norm")
    }
    assert len(found.adapter_names) == 12
    assert found.adapter_names[LORA[1]] == f"{P}{Q}.lora_A.weight"
    assert {module.path for module in found.modules} >= {Q, "model.layers.1.mlp.down_proj"}
    assert found.modules[0].base is not None


def test_an_adapter_alone_keeps_or_gets_its_prefix() -> None:
    saved = [f"{P}{Q}.lora_A.weight", f"{P}{Q}.lora_B.weight", f"{P}score.weight"]
    found = classify_peft(saved)
    assert (found.kind, found.adapter) == ("adapter", None)
    assert found.adapter_names == {name: name for name in saved}
    bare = classify_peft([name.removeprefix(P) for name in saved])
    assert list(bare.adapter_names.values()) == saved


@pytest.mark.parametrize(
    ("held", "saved"),
    [
        (f"{P}{Q}.lora_magnitude_vector.default.weight", f"{P}{Q}.lora_magnitude_vector"),
        (f"{P}{Q}.lora_magnitude_vector.default", f"{P}{Q}.lora_magnitude_vector"),
        (f"{P}{Q}.lora_B.default.bias", f"{P}{Q}.lora_B.bias"),
        (f"{P}e.lora_embedding_A.default", f"{P}e.lora_embedding_A"),
        (f"{P}lm_head.modules_to_save.default.weight", f"{P}lm_head.weight"),
        (f"{P}e.token_adapter.trainable_tokens_delta.default", f"{P}e.token_adapter.trainable_tokens_delta"),
        (f"{P}{Q}.ia3_l.default", f"{P}{Q}.ia3_l"),
    ],
)
def test_names_as_peft_saves_them(held: str, saved: str) -> None:
    assert classify_peft([*LORA, held]).adapter_names[held] == saved


ADAMSS: dict[str, str] = json.loads((Path(__file__).parents[1] / "data/peft/adamss.json").read_text())


def test_adamss_which_numbers_its_parameters() -> None:
    """PEFT needs scikit-learn for it, so its names are in a file."""
    found = classify_peft([*ADAMSS, f"{P}q.base_layer.weight"])
    assert (found.kind, found.adapter, found.methods) == ("base+adapter", "default", ("adamss",))
    assert found.adapter_names == ADAMSS
    assert classify_peft(ADAMSS.values()).adapter_names == {name: name for name in ADAMSS.values()}


def test_deep_peanut_in_peft_s_own_file() -> None:
    saved = [f"{P}q.peanut_A.weight", f"{P}q.peanut_encoders.0.weight", f"{P}q.peanut_encoders.1.weight"]
    assert classify_peft(saved).adapter_names == {name: name for name in saved}


def test_a_module_trained_in_full_replaces_the_original() -> None:
    original, trained = f"{P}lm_head.original_module.weight", f"{P}lm_head.modules_to_save.default.weight"
    found = classify_peft([*LORA, original, trained])
    assert found.base_names == {LORA[0]: f"{Q}.weight", trained: "lm_head.weight"}
    assert classify_peft([*LORA, original]).base_names[original] == "lm_head.weight"


def test_several_adapters() -> None:
    second = [name.replace("default", "other") for name in LORA[1:]]
    assert classify_peft([*LORA, *second]).other_adapters == ("other",)
    third = [name.replace("default", "third") for name in LORA[1:]]
    with pytest.raises(UsageError, match="none is called default"):
        classify_peft([LORA[0], *second, *third])


def test_what_cannot_be_merged_is_named() -> None:
    delta = f"{P}model.embed_tokens.trainable_tokens_delta.default"
    assert classify_peft([*LORA, delta]).unmergeable == (delta,)
    assert classify_peft([*LORA, delta]).methods == ("lora", "trainable_tokens")
    beside = f"{P}model.embed_tokens.token_adapter.trainable_tokens_delta.default"
    assert classify_peft([*LORA, beside]).unmergeable == ()
    assert classify_peft([*LORA, beside]).tokens == (("model.embed_tokens", None, beside),)


ADAPTERS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/peft/lora.json").read_text())
BASE = {name: tuple(shape) for name, shape in ADAPTERS["base"].items()}
PLAIN = {"linear", "rank_pattern", "rslora", "embedding", "conv", "experts", "saved", "tokens"}
OTHERS = {"dora", "vera", "loha", "adalora"}


def cut_modules(kind: str, shapes: dict[str, Any], base: dict[str, Any], **settings: Any) -> list[str]:
    held = {name: tuple(shape) for name, shape in shapes.items()}
    return find_misfits(classify_peft(held), held, {**ADAPTERS[kind]["settings"], **settings}, base)


@pytest.mark.parametrize("kind", sorted(PLAIN | OTHERS))
def test_what_peft_saves_has_all_of_its_rows(kind: str) -> None:
    assert PLAIN | OTHERS | {"peft", "base"} == ADAPTERS.keys()
    shapes = ADAPTERS[kind]["shapes"]
    assert cut_modules(kind, shapes, BASE) == cut_modules(kind, shapes, {}) == []
    grown = {**BASE, "head.weight": (17, 8), "embed.weight": (17, 8)}  # before the vocabulary grew
    assert cut_modules(kind, shapes, grown) == []


@pytest.mark.parametrize("kind", sorted(PLAIN))
def test_rows_of_one_rank_alone_are_seen(kind: str) -> None:
    shapes = ADAPTERS[kind]["shapes"]
    half = {name: [shape[0] // 2, *shape[1:]] for name, shape in shapes.items()}
    num_modules = len({name.partition(".lora_")[0] for name in shapes if ".lora_" in name})
    assert len(cut_modules(kind, half, BASE)) == num_modules
    # Of experts without their base nothing tells how many share the rows.
    assert len(cut_modules(kind, half, {})) == num_modules
    one = {name: half[name] if ".lora_B" in name else shape for name, shape in shapes.items()}
    assert cut_modules(kind, one, BASE) or kind == "experts"


@pytest.mark.parametrize("kind", sorted(OTHERS))
def test_kinds_of_other_shapes_are_not_checked(kind: str) -> None:
    half = {name: [shape[0] // 2, *shape[1:]] for name, shape in ADAPTERS[kind]["shapes"].items()}
    assert cut_modules(kind, half, BASE) == []


@pytest.mark.parametrize(
    "settings", [{"use_qalora": True}, {"r": "4"}, {"rank_pattern": {"(a+)+": 2}}, {"r": 0}]
)
def test_settings_that_may_mean_other_shapes_are_not_checked(settings: dict[str, Any]) -> None:
    half = {name: [shape[0] // 2, *shape[1:]] for name, shape in ADAPTERS["linear"]["shapes"].items()}
    assert cut_modules("linear", half, BASE, **settings) == []


def test_both_shapes_are_named() -> None:
    shapes = {**ADAPTERS["linear"]["shapes"], "base_model.model.layers.1.q.lora_A.weight": [2, 8]}
    assert cut_modules("linear", shapes, BASE) == [
        "layers.1.q: lora_A [2, 8], lora_B [16, 4]; r=4 and the base's [16, 8] need [4, 8], [16, 4]"
    ]
