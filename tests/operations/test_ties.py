"""Ties: real models with heads of other names through --base, and the table held against the installed transformers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

import shardkit
from shardkit.errors import LayoutError
from shardkit.keys import ties
from shardkit.keys.ties import stored_ties, tied_names, ties_embeddings
from tests.cases import but_first
from tests.contents import json_of
from tests.operations.consolidate.checkpoints import assert_bit_equal, load, save

pytestmark = pytest.mark.usefixtures("fast_trace")

_WORDS = {"vocab_size": 101, "pad_token_id": 0}
_ENCODER = {
    **_WORDS,
    **{"hidden_size": 12, "embedding_size": 12, "intermediate_size": 19, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "max_position_embeddings": 17},
}
_TWO_SIDES = {
    **_WORDS,
    **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{"d_model": 12, "encoder_ffn_dim": 19, "decoder_ffn_dim": 19},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **_TWO_SIDES,
            **{"num_mel_bins": 5, "max_source_positions": 11, "max_target_positions": 13},
            **{"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        },
    ),
    "xlm-roberta": ("XLMRobertaForMaskedLM", _ENCODER),
    "modernbert": (
        "ModernBertForMaskedLM",
        {**_ENCODER, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1},
    ),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"vocab_size": 101, "dim": 12, "hidden_dim": 19, "n_layers": 2, "n_heads": 2}
        | {"max_position_embeddings": 17},
    ),
    "albert": ("AlbertForMaskedLM", _ENCODER),
    "electra": ("ElectraForMaskedLM", _ENCODER),
    "bart": ("BartForConditionalGeneration", {**_TWO_SIDES, "max_position_embeddings": 17}),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 101, "d_model": 12, "d_kv": 4, "d_ff": 19, "num_layers": 1, "num_heads": 3},
    ),
}


def build(name: str) -> transformers.PreTrainedModel:
    class_name, settings = MODELS[name]
    model: transformers.PreTrainedModel = made(class_name, name, **settings)
    return model


def made(class_name: str, model_type: str, **settings: Any) -> Any:
    """Return a model with random weights, of norms and biases too."""
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(transformers.AutoConfig.for_model(model_type, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def copies(model: Any) -> dict[str, torch.Tensor]:
    """Return a state dict in which no two names share their memory."""
    return {fqn: value.clone() for fqn, value in model.state_dict().items()}


def head_of(live: dict[str, torch.Tensor]) -> tuple[str, str]:
    """Return the output, and the name that it is tied to."""
    found = tied_names({name: value.shape for name, value in live.items()})
    head, kept, _ = next(each for each in found if each[2])
    return head, kept[0]


@pytest.mark.parametrize("name", but_first(MODELS))
@pytest.mark.parametrize("weights", but_first(["base", "config"]))
def test_every_name_of_a_live_model_goes_through_a_base(name: str, weights: str, tmp_path: Path) -> None:
    """`dcp.save` stores a tied tensor under each name; the base has one, or no weights at all."""
    model = build(name)
    base = tmp_path / "base"
    model.save_pretrained(base)
    stored = load(base)
    if weights == "config":
        (base / "model.safetensors").unlink()
    live = copies(model)
    groups = stored_ties({fqn: value.shape for fqn, value in stored.items()}, json_of(base))
    # As a declared layout has them.
    assert live.keys() == stored.keys() | {fqn for group in groups for fqn in group}
    result = shardkit.consolidate(save({"model": live}, tmp_path / "run"), tmp_path / "out", base=base)
    assert_bit_equal(load(result.output), stored)
    assert not result.warnings
    _, info = type(model).from_pretrained(result.output, output_loading_info=True)
    assert not info["missing_keys"]
    head, _ = head_of(live)
    live[head].add_(1)  # training has untied them
    result = shardkit.consolidate(save({"model": live}, tmp_path / "run-2"), tmp_path / "out-2", base=base)
    found = type(model).from_pretrained(result.output).state_dict()
    assert_bit_equal(found, live)  # the config unties all names: encoder, decoder and biases too
    assert [head] == [other for _, other in result.untied]


def assert_loaded(model: Any, output: str) -> None:
    """`from_pretrained` finds all, and makes the same model of it."""
    found, info = type(model).from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"]
    assert_bit_equal(found.state_dict(), model.state_dict())


SEQUENCES = {
    **{f"num_{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")},
    **{f"{side}_ffn_dim": 19 for side in ("encoder", "decoder")},
    "hidden_size": 12,
}


@pytest.mark.parametrize(
    ("class_name", "model_type", "settings"),
    but_first(
        [
            (
                "LukeForMaskedLM",  # ties its entities, never its words to their output, and keeps the decoder's bias
                "luke",
                {**_ENCODER, "entity_vocab_size": 16, "entity_emb_size": 8},
            ),
            ("ProphetNetForConditionalGeneration", "prophetnet", SEQUENCES),  # one embedding for both sides
        ]
    ),
)
def test_what_a_base_stores_is_written_and_nothing_else(
    class_name: str, model_type: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model, base = made(class_name, model_type, **{**settings, "vocab_size": 64}), tmp_path / "base"
    model.save_pretrained(base)
    live = copies(model)
    assert live.keys() > load(base).keys()
    result = shardkit.consolidate(save({"model": live}, tmp_path / "run"), tmp_path / "out", base=base)
    assert_bit_equal(load(result.output), load(base))
    assert not result.warnings
    assert not result.untied
    assert all(kept in load(base) for kept, _ in result.ties)
    assert json_of(tmp_path / "out").get("tie_word_embeddings") == model.config.tie_word_embeddings
    assert_loaded(model, result.output)
    (base / "model.safetensors").unlink()  # a config alone knows less, and must say nothing wrong
    result = shardkit.consolidate(tmp_path / "run", tmp_path / "out-2", base=base)
    assert not result.untied
    assert_loaded(model, result.output)


@pytest.mark.parametrize("name", ["t5", "xlm-roberta"])
@pytest.mark.parametrize("in_base", ["two values", "two copies"])
def test_two_names_in_a_base(name: str, in_base: str, tmp_path: Path) -> None:
    """Two values are not tied, whatever the config says; two copies are, until training makes them differ."""
    model, base = build(name), tmp_path / "base"
    model.save_pretrained(base)
    stored, live = load(base), copies(model)
    head, kept = head_of(live)
    live[head] = live[head] + 1
    stored[head] = live[head] if in_base == "two values" else stored[kept].clone()
    save_file(stored, base / "model.safetensors", {"format": "pt"})
    result = shardkit.consolidate(save({"model": live}, tmp_path / "run"), tmp_path / "out", base=base)
    assert torch.equal(load(result.output)[head], live[head])
    before, after = json_of(base), json_of(tmp_path / "out")
    if in_base == "two values":
        assert not result.warnings
        assert not result.untied
        assert before.get("tie_word_embeddings") == after.get("tie_word_embeddings")
    else:
        assert any(f"{head} are tied in the base" in line for line in result.warnings)


def test_what_the_class_leaves_out_of_old_files_is_not_missed(tmp_path: Path) -> None:
    """As in t5-small on the Hub: a bias of attention across, which T5 has no place for. A block is no such thing.

    The output has it too, from the base.
    """
    model, base = build("t5"), tmp_path / "base"
    model.save_pretrained(base)
    stored = load(base)
    spare = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    whole = {**stored, spare: torch.randn(32, 3)}
    save_file(whole, base / "model.safetensors", {"format": "pt"})
    _, info = type(model).from_pretrained(base, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    run = save({"model": copies(model)}, tmp_path / "run")
    result = shardkit.consolidate(run, tmp_path / "out", base=base)
    assert_bit_equal(load(result.output), whole)
    assert not result.warnings
    assert any(spare in note for note in result.notes)
    lost = "decoder.block.1.layer.0.SelfAttention.q.weight"  # the config counts one block
    save_file({**stored, lost: torch.randn(12, 12)}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(LayoutError, match="does not fit --base") as caught:
        shardkit.consolidate(run, tmp_path / "out-2", base=base)
    assert lost in str(caught.value)


TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, None),
        ({"model_type": "llama"}, None),
        ({"model_type": "gpt2"}, True),
        ({"model_type": "gpt2", "tie_word_embeddings": False}, False),
        ({"model_type": "xlm-roberta"}, True),
        ({"model_type": "t5", "tie_word_embeddings": False}, True),
        ({"model_type": "qwen3_vl", "tie_word_embeddings": False, "text_config": TIED}, False),
        ({"model_type": "llava", "tie_word_embeddings": False, "text_config": TIED}, True),
        ({"model_type": "qwen2_5_vl", "text_config": TIED}, True),
        ({"model_type": "blip-2", "text_config": {"model_type": "opt"}}, True),
        ({"model_type": "nobodys", "text_config": TIED}, None),
    ],
)
def test_what_a_config_says(config: dict[str, Any] | None, expected: bool | None) -> None:
    assert ties_embeddings(config) is expected
    is_known = config is not None and config["model_type"] in transformers.CONFIG_MAPPING
    if is_known and config is not None:
        settings = {key: value for key, value in config.items() if key != "model_type"}
        theirs = transformers.AutoConfig.for_model(config["model_type"], **settings)
        owner = theirs.text_config if config["model_type"] == "blip-2" else theirs
        assert bool(getattr(owner, "tie_word_embeddings", False)) is bool(expected)


def shallow(class_name: str) -> Any:
    """Return a class's default config, with one layer in each part."""
    kind = getattr(transformers, class_name).config_class
    if class_name.startswith("Rag"):
        parts = transformers.DPRConfig(), transformers.BartConfig(encoder_layers=1, decoder_layers=1)
        config = kind.from_question_encoder_generator_configs(*parts)
    elif class_name.startswith("SpeechEncoder"):
        config = kind.from_encoder_decoder_configs(transformers.Wav2Vec2Config(), transformers.BertConfig())
    else:
        config = kind()
    for part in (config, *vars(config).values()):
        if isinstance(getattr(part, "num_hidden_layers", None), int) and not hasattr(part, "layer_types"):
            part.num_hidden_layers = 1
    return config


@pytest.mark.parametrize(("at_top", "in_part"), [(True, False), (False, True)])
@pytest.mark.parametrize(
    ("class_name", "part"),
    [
        ("BlipForConditionalGeneration", "text_config"),
        ("Kosmos2ForConditionalGeneration", "text_config"),
        ("Kosmos2_5ForConditionalGeneration", "text_config"),
        ("Llama4ForConditionalGeneration", "text_config"),
        ("SpeechEncoderDecoderModel", "decoder"),
        ("RagTokenForGeneration", "generator"),
        ("MllamaForConditionalGeneration", "text_config"),
        ("Qwen2AudioForConditionalGeneration", "text_config"),
        ("AudioFlamingo3ForConditionalGeneration", "text_config"),
        ("RemBertForCausalLM", ""),
        ("NemotronHForCausalLM", ""),
        ("KimiLinearForCausalLM", ""),
        ("BigBirdPegasusForCausalLM", ""),
        ("BigBirdPegasusForConditionalGeneration", ""),
        ("CpmAntForCausalLM", ""),
    ],
)
def test_a_config_says_what_its_class_ties(class_name: str, part: str, at_top: bool, in_part: bool) -> None:
    model_class = getattr(transformers, class_name)
    config = shallow(class_name)
    config.tie_word_embeddings = at_top
    if part:
        getattr(config, part).tie_word_embeddings = in_part
    with torch.device("meta"):
        model = model_class._from_config(config)
    model.tie_weights()
    live = dict(model.named_parameters(remove_duplicate=False))
    shapes = {name: parameter.shape for name, parameter in live.items()}
    is_tied = any(
        live[name] is live[each] for name, kept, is_head in tied_names(shapes) if is_head for each in kept
    )
    saved = {**model.config.to_dict(), "architectures": [class_name]}  # as save_pretrained writes it
    assert ties_embeddings(saved) is is_tied


# Ties that the table does not have: layers of detectors, parts of multimodal models, tokens of audio codecs. The
# checkpoint shows them where it has one record for both names.
ELSEWHERE = {
    *("blt", "csm", "d_fine", "dab_detr", "deformable_detr", "deimv2", "diffusion_gemma", "flava", "fsmt"),
    *("granite_speech5", "grounding_dino", "luke", "mm_grounding_dino", "neomme", "openai", "pe_audio_video"),
    *("pp_doclayout_v3", "prophetnet", "qwen3_omni_moe", "rt_detr_v2", "sam", "sam_hq", "t5gemma2", "udop"),
}
SOURCES = Path(transformers.__file__).parent / "models"


def declared_ties() -> Iterator[tuple[str, str, str]]:
    """(folder of the model, name, the name that it is tied to), as every class of transformers says."""
    for path in sorted(SOURCES.glob("*/modeling_*.py")):
        for found in re.finditer(r"^    _tied_weights_keys = (\{[^{}]*\})", path.read_text(), re.MULTILINE):
            for name, source in ast.literal_eval(found[1]).items():
                yield path.parent.name, name, source


def test_the_table_has_the_ties_of_every_model_but_those_named_here() -> None:
    lacking = {
        folder
        for folder, name, source in declared_ties()
        if not any(
            other == name and source.removesuffix("$") in kept
            for other, kept, _ in tied_names({name: (5, 3), source.removesuffix("$"): (5, 3)})
        )
    }
    assert lacking == ELSEWHERE


def test_the_table_knows_what_each_type_calls_its_output() -> None:
    heads: dict[str, set[str]] = {}
    for folder, name, _ in declared_ties():
        if ties.is_output(name):
            heads.setdefault(folder, set()).add(name.removesuffix(".weight"))
    renamed = {"data2vec": "data2vec_text", "kosmos2": "kosmos_2"}
    odd = {renamed.get(folder, folder): names for folder, names in heads.items() if names != {"lm_head"}}
    assert [kind for kind, names in odd.items() if ties._HEAD_OF.get(kind, "lm_head") not in names] == []


def test_the_table_has_the_defaults_of_every_type_that_it_lists() -> None:
    types = {name.replace("-", "_"): name for name in transformers.CONFIG_MAPPING.keys()}
    wrong = {}
    for listed in sorted(ties._TIED_BY_DEFAULT | ties._ALWAYS_TIED):
        kind = transformers.CONFIG_MAPPING[types[listed]] if listed in types else None
        if kind is not None:
            is_forced = listed in ties._ALWAYS_TIED
            wrong[listed] = (kind(tie_word_embeddings=False) if is_forced else kind).tie_word_embeddings
    assert set(wrong.values()) == {True}, wrong


def test_the_table_ties_no_output_that_the_class_does_not() -> None:
    """The other way round: what a listed type is said to tie to its embedding, a class of its folder declares."""
    declared: dict[str, set[str]] = {}
    for folder, name, _ in declared_ties():
        declared.setdefault(folder, set()).add(name)
    listed = ties._TIED_BY_DEFAULT | ties._ALWAYS_TIED

    def ties_its_output(kind: str) -> bool:
        return f"{ties._HEAD_OF.get(kind, 'lm_head')}.weight" in declared.get(kind, set())

    assert [kind for kind in listed & declared.keys() if not ties_its_output(kind)] == []
    assert [kind for kind in ties._NEVER_TIED if ties_its_output(kind)] == []
    assert declared.keys() >= ties._TIE_OTHER_NAMES
    assert [kind for kind in ties._TIE_OTHER_NAMES if ties_its_output(kind)] == []
