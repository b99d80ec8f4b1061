"""Checkpoints of PEFT models: the adapter as PEFT reads it, or merged into its base."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file

import shardkit
from shardkit.errors import LayoutError, SourceError, UsageError
from shardkit.formats.hub import base as consolidate_base
from tests.bits import flip_byte
from tests.contents import json_of
from tests.operations.consolidate.checkpoints import CONFIG, EMBED, assert_bit_equal, hub, load, save, weights

pytestmark = [
    pytest.mark.usefixtures("fast_trace"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft asks for it
]

PROJECTIONS = ("q_proj", "v_proj")
SIZES = {key: value for key, value in CONFIG.items() if key not in ("architectures", "dtype")}
SETTINGS = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": list(PROJECTIONS)}


def wrapped() -> dict[str, torch.Tensor]:
    """What `state_dict` of a PEFT model holds."""
    state = {}
    for name, value in weights().items():
        module = name.rpartition(".")[0]
        if not module.endswith(PROJECTIONS):
            state[f"base_model.model.{name}"] = value
            continue
        path = f"base_model.model.{module}"
        state[f"{path}.base_layer.weight"] = value
        state[f"{path}.lora_A.default.weight"] = torch.randn(2, value.shape[1])
        state[f"{path}.lora_B.default.weight"] = torch.randn(value.shape[0], 2)
    return state


def adapter(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace(".default", ""): value for name, value in state.items() if "lora_" in name}


def merged(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    expected = weights()
    for name, value in expected.items():
        path = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (state.get(f"{path}.lora_{part}.default.weight") for part in "AB")
        if a is not None and b is not None:
            expected[name] = value + (b @ a) * 4.0
    return expected


def saved_by_peft(tuned: Any, tmp_path: Path, changed: str | None = None) -> dict[str, str]:
    """Save an adapter as PEFT does, in `saved`, and its model's state as a trainer does.

    Parameters whose names have `changed` in them get other values first: PEFT begins with some that change nothing.

    Returns:
        What consolidate is given for it.
    """
    for name, value in tuned.named_parameters():
        if changed is not None and changed in name:
            torch.nn.init.normal_(value)
    tuned.save_pretrained(tmp_path / "saved")
    checkpoint = save({"model": tuned.state_dict()}, tmp_path / "c")
    return {"checkpoint": str(checkpoint), "adapter_config": str(tmp_path / "saved")}


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return wrapped()


def test_the_newest_adapter_of_a_run_is_taken(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    for step in (10, 20):
        checkpoint = tmp_path / "run" / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        times = {name: value * step for name, value in adapter(state).items()}
        save_file(times, checkpoint / "adapter_model.safetensors")
        (checkpoint / "adapter_config.json").write_text(json.dumps(SETTINGS))
    result = shardkit.consolidate(tmp_path / "run")
    assert (Path(result.output).name, result.warnings) == ("checkpoint-20-hf", ())
    assert_bit_equal(load(result.output), {name: value * 20 for name, value in adapter(state).items()})
    resharded = shardkit.reshard(tmp_path / "run", world_size=2, dry_run=True)
    assert Path(resharded.output).name == "checkpoint-20-dp_shard2"
    shardkit.consolidate(checkpoint, tmp_path / "run" / "checkpoint-20-hf")
    assert shardkit.resolve_checkpoint(tmp_path / "run").warnings == (), "the output is no newer checkpoint"


def test_an_adapter_without_settings_is_whole(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    save({"model": adapter(state)}, tmp_path / "run")
    result = shardkit.consolidate(tmp_path / "run", tmp_path / "out", manifest=True)
    assert "adapter_config.json" in result.warnings[0]
    assert not shardkit.verify(result.output).problems
    flip_byte(tmp_path / "out" / "adapter_model.safetensors", -1)
    assert shardkit.verify(result.output, full=True).problems


def test_an_adapter_without_settings_beside_a_model_is_left_out(
    tmp_path: Path, state: dict[str, torch.Tensor]
) -> None:
    model = hub(tmp_path / "model", None, CONFIG)
    torch.save(weights(), model / "pytorch_model.bin")
    save_file(adapter(state), model / "adapter_model.safetensors")
    result = shardkit.consolidate(model, tmp_path / "out")
    assert load(result.output).keys() == weights().keys()


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text(json.dumps(SETTINGS))
    return tmp_path / "adapter_config.json"


@pytest.mark.parametrize("with_base", [True, False])
def test_the_adapter(with_base: bool, state: dict[str, torch.Tensor], settings: Path, tmp_path: Path) -> None:
    held = state if with_base else {name: value for name, value in state.items() if "lora_" in name}
    result = shardkit.consolidate(save({"model": held}, tmp_path / "c"), adapter_config=str(settings))
    assert result.kind == "adapter"
    assert_bit_equal(load(result.output), adapter(state))
    files = {p.name for p in Path(result.output).iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    assert json_of(result.output, "adapter_config.json") == SETTINGS
    assert any("--merge-lora" in note for note in result.notes) == with_base


def test_the_adapters_tokenizer_has_its_vocabulary(
    state: dict[str, torch.Tensor], settings: Path, tmp_path: Path
) -> None:
    """Without it, transformers makes a tokenizer of special tokens alone."""
    vocab = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abc", "##b", "##c", ""])
    files = {"vocab__txt": vocab, "tokenizer_config__json": '{"tokenizer_class": "BertTokenizer"}'}
    base = hub(tmp_path / "base", weights(), **files)
    checkpoint = save({"model": state}, tmp_path / "c")
    result = shardkit.consolidate(checkpoint, base=str(base), adapter_config=str(settings))
    assert result.kind == "adapter"
    truth, found = (transformers.AutoTokenizer.from_pretrained(place) for place in (base, result.output))
    assert found("abc")["input_ids"] == truth("abc")["input_ids"] == [2, 5, 8, 9, 3]


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")  # peft says what it saves
@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
@pytest.mark.parametrize("rows", [37, 40])
def test_the_adapter_has_what_peft_saves_beside_it(bias: str, rows: int, tmp_path: Path) -> None:
    """Biases that were trained, and the rows of a vocabulary that has grown."""
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_bias=True))
    base.save_pretrained(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.resize_token_embeddings(rows, mean_resizing=False)
    settings = peft.LoraConfig(r=2, bias=bias, target_modules=list(PROJECTIONS))
    tuned = peft.get_peft_model(model, settings)
    options = saved_by_peft(tuned, tmp_path, "")
    result = shardkit.consolidate(base=str(tmp_path / "base"), **options)
    assert_bit_equal(load(result.output), load(tmp_path / "saved"))
    assert any("as PEFT saves them" in note for note in result.notes) == (bias != "none" or rows > 37)


@pytest.mark.filterwarnings("ignore:Detected that the base layer has no bias")  # BEFT
@pytest.mark.filterwarnings("ignore:Unsupported layer type")  # LN tuning
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(
            (kind, {})
            for kind in "Vera Beft Deft Delora Glora Gralora Hira HRA Lily Poly Supertuning".split()
        ),
        ("VBLoRA", {"num_vectors": 8, "vector_length": 8}),
        ("WaveFT", {"n_frequency": 5}),
        ("RandLora", {"save_projection": True}),
        ("LNTuning", {"target_modules": ["input_layernorm", "norm"]}),
        *((kind, {}) for kind in "Pvera TinyLora UniLora Frod Peanut".split()),
        ("Psoft", {"r": 4}),
        ("Shadow", {"target_modules": None}),
        ("Peanut", {"depth": 2}),
        ("Supertuning", {"r": 2}),
        ("UniLora", {"theta_d_length": 8, "save_indices": True}),
        ("Hira", {"target_modules": ["embed_tokens", "q_proj"]}),
        ("OFT", {"target_modules": ["embed_tokens", "q_proj"], "r": 2, "oft_block_size": 0}),
        ("AdaptionPrompt", {"target_modules": None, "adapter_layers": 1, "adapter_len": 2}),
    ],
)
def test_adapters_of_other_methods(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """As PEFT saves them; what modules share is there once, at its root."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    settings = getattr(peft, f"{kind}Config")
    tuned = peft.get_peft_model(model, settings(**{"target_modules": ["q_proj", "o_proj"]} | options))
    tuned.save_pretrained(tmp_path / "saved", save_embedding_layers=False)
    checkpoint = save({"model": tuned.state_dict()}, tmp_path / "c")
    result = shardkit.consolidate(checkpoint, adapter_config=str(tmp_path / "saved"))
    assert_bit_equal(load(result.output), load(tmp_path / "saved"))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # PEFT merges by sparse tensors
@pytest.mark.parametrize("seed", [None, 3])
def test_shira_without_the_places_that_it_changes(seed: int | None, tmp_path: Path) -> None:
    """They are in no state dict. PEFT finds them again by the seed, and takes other ones without it."""
    base = hub(tmp_path / "base", weights(), CONFIG)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    settings = peft.ShiraConfig(r=2, target_modules=list(PROJECTIONS), random_seed=seed)
    tuned = peft.get_peft_model(model, settings)
    options = saved_by_peft(tuned, tmp_path, "shira") | {"base": str(base)}
    if seed is None:
        with pytest.raises(SourceError, match="places that ShiRA changes"):
            shardkit.consolidate(**options)
        return
    result = shardkit.consolidate(**options)
    again = transformers.AutoModelForCausalLM.from_pretrained(base)
    loaded = peft.PeftModel.from_pretrained(again, result.output)
    assert_bit_equal(loaded.merge_and_unload().state_dict(), tuned.merge_and_unload().state_dict())


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    {
        **{kind: {"num_virtual_tokens": 3} for kind in "PrefixTuning PromptEncoder PromptTuning".split()},
        "Cartridge": {"num_virtual_tokens": 3},
        "CPT": {"cpt_token_ids": [0, 1, 2]},
    }.items(),
)
def test_prompts_are_refused(kind: str, options: dict[str, Any], is_alone: bool, tmp_path: Path) -> None:
    """They stand beside the base's weights, which were written without them."""
    base = hub(tmp_path / "base", weights(), CONFIG)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    settings = getattr(peft, f"{kind}Config")
    tuned = peft.get_peft_model(model, settings(task_type="CAUSAL_LM", **options))
    state = tuned.state_dict()
    if is_alone:
        state = {name: value for name, value in state.items() if name.startswith("prompt_encoder")}
    checkpoint = save({"model": state}, tmp_path / "c")
    for given in (None, base):
        with pytest.raises(SourceError, match="a prompt that PEFT trained") as caught:
            shardkit.consolidate(checkpoint, tmp_path / "out", base=given)
        assert "save_pretrained" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "ends",
    [
        ("base_layer.weight", "lora_A.vision.weight", "lora_B.vision.weight", "lora_A.speech.weight"),
        ("parametrizations.weight.original", "parametrizations.weight.0.lora_A"),
    ],
    ids=["phi4mm", "jina"],
)
def test_a_model_with_low_rank_factors_of_its_own_is_no_adapter(
    ends: tuple[str, ...], tmp_path: Path
) -> None:
    model = {EMBED: torch.randn(5, 3), "model.layers.0.mlp.up_proj.weight": torch.randn(3, 3)}
    model |= {f"model.layers.0.self_attn.qkv_proj.{end}": torch.randn(4, 3) for end in ends}
    base = hub(tmp_path / "base", model, {"model_type": "of its own", "architectures": ["Own"]})
    result = shardkit.consolidate(save({"model": model}, tmp_path / "c"), base=str(base))
    assert result.kind == "model"
    assert_bit_equal(load(result.output), model)
    sharded = shardkit.preshard(base, tmp_path / "sharded", world_size=2)
    assert_bit_equal(load(shardkit.consolidate(sharded.output, tmp_path / "back").output), model)


def test_an_adapter_with_the_rows_of_one_rank_is_refused(
    state: dict[str, torch.Tensor], settings: Path, tmp_path: Path
) -> None:
    half = {name: value[: len(value) // 2] for name, value in state.items() if "lora_" in name}
    checkpoint = save({"model": half}, tmp_path / "c")
    for base in (None, hub(tmp_path / "base", weights(), CONFIG)):
        with pytest.raises(SourceError, match=r"^4 modules of the adapter have other shapes") as caught:
            shardkit.consolidate(checkpoint, tmp_path / "out", base=base, adapter_config=str(settings))
    name = "model.layers.0.self_attn.v_proj"
    said = f"{name}: lora_A [1, 16], lora_B [4, 2]; r=2 and the base's [8, 16] need [2, 16], [8, 2]"
    assert said in caught.value.problems
    adapter_directory = tmp_path / "adapter"
    adapter_directory.mkdir()
    settings.rename(adapter_directory / settings.name)
    for held, num_warnings in ((half, 1), (adapter(state), 0)):
        save_file(
            {name.replace(".default", ""): value.contiguous() for name, value in held.items()},
            adapter_directory / "adapter_model.safetensors",
        )
        result = shardkit.verify(adapter_directory)
        assert result.ok
        assert len(result.doubts) == num_warnings
        assert shardkit.inspect(adapter_directory).warnings == result.doubts


def test_without_settings_it_says_what_is_lacking(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    result = shardkit.consolidate(save({"model": state}, tmp_path / "c"))
    assert_bit_equal(load(result.output), adapter(state))
    assert "--adapter-config" in result.warnings[0]


def test_settings_from_what_a_trainer_noted(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    source = save(state, tmp_path / "c")
    (source / "lora_train_meta.json").write_text('{"r": 2, "lora_alpha": 8, "task_type": "CAUSAL_LM"}')
    result = shardkit.consolidate(source)
    made = json_of(result.output, "adapter_config.json")
    assert (made["r"], made["lora_alpha"], made["target_modules"]) == (2, 8, sorted(PROJECTIONS))
    (source / "lora_train_meta.json").write_text('{"r": 4, "lora_alpha": 8}')
    with pytest.raises(SourceError, match="rank 4"):
        shardkit.consolidate(source, str(tmp_path / "other"))


def test_settings_from_which_no_config_can_be_made(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    source = save(state, tmp_path / "c")
    (source / "lora_train_meta.json").write_text('{"r": 2, "lora_alpha": null}')
    result = shardkit.consolidate(source)
    assert not (Path(result.output) / "adapter_config.json").exists()
    assert any("there is no adapter_config.json" in line for line in result.warnings)
    assert not any("was made from" in line for line in result.notes)


def test_merged_into_its_base(state: dict[str, torch.Tensor], settings: Path, tmp_path: Path) -> None:
    base = hub(tmp_path / "base", weights(), CONFIG)
    result = shardkit.consolidate(
        save({"model": state}, tmp_path / "c"), adapter_config=str(settings), base=str(base), merge_lora=True
    )
    assert (result.kind, result.warnings) == ("merged", ())
    found = load(result.output)
    torch.testing.assert_close(found, merged(state), rtol=0, atol=1e-5)
    assert sum(not torch.equal(found[name], value) for name, value in weights().items()) == 4


def test_a_merged_model_gets_the_names_of_its_base(
    state: dict[str, torch.Tensor], settings: Path, tmp_path: Path
) -> None:
    """In memory a vision model's language model stands below `model.language_model`."""
    base = hub(tmp_path / "base", weights(), CONFIG)
    path = "base_model.model.model."
    inner = {name.replace(path, f"{path}language_model."): value for name, value in state.items()}
    assert len(inner.keys() & state.keys()) == 1  # the head
    source = save({"model": inner}, tmp_path / "c")
    options = {"adapter_config": str(settings), "base": str(base), "merge_lora": True}
    result = shardkit.consolidate(source, **options)
    assert result.renamed == (("model.language_model.", "model.", len(weights()) - 1),)
    torch.testing.assert_close(load(result.output), merged(state), rtol=0, atol=1e-5)
    with pytest.raises(LayoutError, match="does not fit"):
        shardkit.consolidate(source, str(tmp_path / "no"), rename=["nothing=x"], **options)


MOE = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4},
}


@pytest.mark.parametrize("kind", MOE)
@pytest.mark.parametrize("with_weights", [True, False], ids=["base", "config alone"])
def test_merged_where_the_model_holds_experts_fused(kind: str, with_weights: bool, tmp_path: Path) -> None:
    """The Hub has them one by one, under names that a PEFT model holds below its own prefix."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = transformers.AutoConfig.for_model(kind, **sizes, **heads, num_experts_per_tok=2, **MOE[kind])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "base")
    names = load(tmp_path / "base").keys()
    if not with_weights:
        (tmp_path / "base" / "model.safetensors").unlink()
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    options = saved_by_peft(tuned, tmp_path, "lora_B") | {"base": str(tmp_path / "base")}
    result = shardkit.consolidate(output=tmp_path / "out", merge_lora=True, **options)
    assert load(result.output).keys() == names
    loaded = transformers.AutoModelForCausalLM.from_pretrained(result.output)
    assert_bit_equal(loaded.state_dict(), tuned.merge_and_unload().state_dict())


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to")
@pytest.mark.parametrize("targets", [["attn.c_proj", "lm_head"], ["c_attn", "c_proj", "lm_head"]])
def test_matrices_of_conv1d_beside_an_output_that_is_linear(targets: list[str], tmp_path: Path) -> None:
    """PEFT's settings say `fan_in_fan_out: false` then, as of the output, which it wraps last."""
    sizes = {"vocab_size": 37, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**sizes, **tokens, tie_word_embeddings=False)
    model = transformers.GPT2LMHeadModel(config)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    options = saved_by_peft(tuned, tmp_path, "lora_B")
    assert not json_of(tmp_path / "saved", "adapter_config.json")["fan_in_fan_out"]
    result = shardkit.consolidate(merge_lora=True, **options)
    torch.testing.assert_close(load(result.output), dict(tuned.merge_and_unload().state_dict()))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to")
def test_square_matrices_that_nothing_shows_the_way_of_are_refused(tmp_path: Path) -> None:
    """A ViT's `q_proj` beside GPT-2's `c_attn`, for which PEFT's settings say `fan_in_fan_out: true`."""
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
    encoder = transformers.ViTConfig(**heads, image_size=8, patch_size=4)
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    decoder = transformers.GPT2Config(vocab_size=37, n_embd=16, n_layer=1, n_head=2, n_positions=8, **tokens)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = transformers.VisionEncoderDecoderModel(config)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "c_attn"]))
    options = saved_by_peft(tuned, tmp_path)
    with pytest.raises(SourceError, match=r"q_proj: nothing shows") as caught:
        shardkit.consolidate(merge_lora=True, **options)
    assert not any("c_attn" in line for line in caught.value.problems)


@pytest.mark.parametrize(("base", "named"), [("org/model", "org/model"), (None, None), ("path", None)])
def test_the_settings_that_are_made_name_the_bases_repo(
    base: str | None,
    named: str | None,
    state: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A path means nothing to whoever gets the adapter."""
    source = save(state, tmp_path / "c")
    (source / "lora_train_meta.json").write_text('{"r": 2, "lora_alpha": 8}')
    place = hub(tmp_path / "base")
    monkeypatch.setattr(consolidate_base, "fetch_files", lambda *_, **__: str(place))
    monkeypatch.setattr(consolidate_base, "open_headers", lambda *_: None)
    result = shardkit.consolidate(source, base=str(place) if base == "path" else base)
    made = json_of(result.output, "adapter_config.json")
    assert made["base_model_name_or_path"] == named


def test_settings_that_are_not_there(state: dict[str, torch.Tensor], settings: Path, tmp_path: Path) -> None:
    source = save({"model": state}, tmp_path / "c")
    for given in (tmp_path / "none", source):
        with pytest.raises(SourceError, match="adapter_config") as caught:
            shardkit.consolidate(source, adapter_config=str(given))
        assert str(given) in caught.value.message
    with pytest.raises(UsageError, match="hold none"):
        shardkit.consolidate(save(weights(), tmp_path / "plain"), adapter_config=str(settings))
    assert not list(tmp_path.glob("*-hf"))


def test_nothing_to_merge(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no adapter"):
        shardkit.consolidate(save({"model": weights()}, tmp_path / "c"), merge_lora=True)


def test_an_adapter_is_merged_by_peft(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """The command names the base that was given, or else the one that the adapter names."""
    alone = {name: value for name, value in state.items() if "lora_" in name}
    place = hub(tmp_path / "lora", config=None)
    save_file(adapter(alone), place / "adapter_model.safetensors")
    settings = SETTINGS | {"base_model_name_or_path": "org/model $(touch x)"}
    (place / "adapter_config.json").write_text(json.dumps(settings))
    base = hub(tmp_path / "base", weights(), CONFIG)
    for given, model in ((None, settings["base_model_name_or_path"]), (base, str(base))):
        with pytest.raises(SourceError, match="an adapter alone") as caught:
            shardkit.consolidate(place, tmp_path / "out", base=given, merge_lora=True)
        command = str(caught.value.hint).rpartition(": `")[2].removesuffix("`")
        assert shlex.split(command)[-3:] == [model, str(place), "merged"]
    with pytest.raises(SourceError, match="an adapter alone") as caught:
        shardkit.consolidate(save({"model": alone}, tmp_path / "c"), merge_lora=True)
    assert "write the adapter without --merge-lora first" in str(caught.value.to_json()["hint"])


@pytest.mark.parametrize("named", ["org/mo\x1bdel", None])
def test_an_adapter_is_no_base(named: str | None, tmp_path: Path) -> None:
    base = hub(tmp_path / "lora", config=None, README__md="mine")
    (base / "adapter_config.json").write_text(json.dumps(SETTINGS | {"base_model_name_or_path": named}))
    with pytest.raises(SourceError, match=r"is a PEFT adapter, .* has no config\.json") as caught:
        shardkit.consolidate(save({"model": weights()}, tmp_path / "c"), base=base)
    assert ("'org/mo\\x1bdel', as its adapter_config.json says" in str(caught.value)) == (named is not None)
    assert not list(tmp_path.glob("*-hf"))


def test_merging_needs_the_scale(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="lora_alpha"):
        shardkit.consolidate(save({"model": state}, tmp_path / "c"), merge_lora=True)
