"""Find tied weights by their names and the config, without a model. This is the only table of ties in shardkit.

The table lists the modules whose weights may be one parameter, the name of the output layer in each type of model, and
the types whose config ties it to the embedding. A test compares the table with the installed transformers.

For example, "model.embed_tokens.weight" and "lm_head.weight" of a Gemma 2 are one parameter, and its files have only
the first.

Source: transformers 5.23, `_tied_weights_keys` of every model, `tie_word_embeddings` of every config.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from shardkit.core.regions import Shape

_SHARED, _EMBEDDING, _HEAD = range(3)

# Last segments of the paths of modules with an embedding. `shared` (T5, BART) is also tied to the embeddings of
# encoder and decoder.
_SHARED_MODULES = frozenset({"shared"})
_EMBEDDING_MODULES = frozenset(
    "embed_tokens wte word_embeddings word_embedding embed_in embeddings tok_embeddings tokens_embed embed"
    " embedding token_embedding".split()
)
_EMBEDDING_PATHS = frozenset({"transformer.w"})  # ctrl

# Path of the output layer, where it is not `lm_head` -> types of models. Types are written with `_`.
_HEADS = {
    "cls.predictions.decoder": "bert big_bird deberta deberta_v2 ernie fnet layoutlm lxmert megatron_bert mobilebert"
    " mra nomic_bert nystromformer roc_bert roformer squeezebert tapas visual_bert yoso",
    "decoder": "modernbert modernbert_decoder",
    "decoder.output_projection": "fsmt",
    "embed_out": "gpt_neox_japanese",
    "generator_lm_head": "convbert electra",
    "head": "rwkv",
    "head.decoder": "ultrabert",
    "lm_head.decoder": "bert_generation camembert data2vec_text esm gte ibert jina_embeddings_v3 longformer luke mpnet"
    " roberta roberta_prelayernorm xlm_roberta xlm_roberta_xl xmod",
    "lm_head.out_proj": "t5gemma t5gemma2",
    "lm_loss": "xlnet",
    "mlm_score.decoder": "bridgetower vilt",
    "output": "git",
    "output_projection": "biogpt trocr",
    "pred_layer.proj": "flaubert xlm",
    "predictions.decoder": "albert",
    "proj_out": "canary cohere_asr moonshine moonshine_streaming whisper",
    "text_decoder.cls.predictions.decoder": "blip",
    "text_decoder_postnet.lm_head": "speecht5",
    "text_model.lm_head": "kosmos_2",
    "vocab_projector": "distilbert",
}
_HEAD_OF = {model_type: path for path, types in _HEADS.items() for model_type in types.split()}
_DEFAULT_HEAD = "lm_head"
# `output` is torchtitan's and torchtune's too, `output_layer` Megatron's; old GPT-NeoX has `embed_out`.
_HEAD_MODULES = frozenset(
    {_DEFAULT_HEAD, "output_layer", *(path for path in _HEADS if "." not in path)} - {"decoder", "head"}
)
# Includes the output layers in the files of Cohere's ASR.
_HEAD_PATHS = tuple(
    f".{path}" for path in (*_HEADS, "lm_head.lm_head", "log_softmax.mlp.layer0") if "." in path
)
_TOP_HEADS = frozenset({"decoder", "head"})  # common names; at the top they are the output layer
# BERT and RoBERTa have the bias of the head outside its decoder.
_BIASES = (("predictions.bias", "predictions.decoder.bias"), ("lm_head.bias", "lm_head.decoder.bias"))

# Types that are tied if their config does not mention `tie_word_embeddings`.
_TIED_BY_DEFAULT = frozenset(
    "albert aya_vision bart bert bert_generation big_bird bigbird_pegasus biogpt blenderbot blenderbot_small blip"
    " blip_text_model bloom camembert canary cohere cohere2 cohere2_moe cohere2_vision convbert cpmant ctrl"
    " data2vec_text deberta deberta_v2 distilbert electra ernie ernie4_5 ernie4_5_moe ernie4_5_vl_moe esm falcon"
    " falcon_mamba flaubert florence2 fnet funnel gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4"
    " gemma4_text got_ocr2 gpt2 gpt_bigcode gpt_neo gpt_neox_japanese granite_docling granite_speech gte ibert"
    " internvl janus jetmoe jina_embeddings_v3 kosmos_2 layoutlm led lfm2 lfm2_moe lfm2_vl longformer lxmert m2m_100"
    " mamba marian mbart megatron_bert mistral3 mobilebert modernbert modernbert_decoder moonshine mpnet mpt mra mvp"
    " nllb_moe nomic_bert nystromformer openai_gpt opt ovis2 paligemma pegasus pegasus_x plbart recurrent_gemma"
    " roberta roberta_prelayernorm roc_bert roformer seamless_m4t seamless_m4t_v2 smollm3 speech_to_text speecht5"
    " squeezebert starcoder2 switch_transformers t5gemma t5gemma2 tapas trocr vaultgemma visual_bert whisper xglm"
    " xlm xlm_roberta xlm_roberta_xl xlnet xmod yoso youtu zamba zamba2"
    # Rarer types, and parts of other models.
    " cohere_compass_text deepseek_vl deepseek_vl_hybrid ernie4_5_vl_moe_text fun_asr_nano gemma4_assistant"
    " gemma4_unified gemma4_unified_assistant gemma4_unified_text glmasr granite_docling_text granite_speech_plus"
    " granite_swa hunyuan_vl hunyuan_vl_text hyperclovax_vision_v2 kimi_k25 kosmos_2.5 kosmos_2_5_text_model"
    " kosmos_2_text_model lfm3 lfm3_vl lighton_ocr mimi minicpm3 minicpm_ocr moss_transcribe_diarize neomme"
    " paddleocr_vl paddleocr_vl_text pp_chart2table prophetnet qwen2_5_omni_text qwen3_asr qwen3_vl_moe_text"
    " t5_gemma_module t5gemma2_decoder t5gemma2_encoder t5gemma2_text voxtral_realtime zaya".split()
)
# Types that are tied regardless of their config: for T5, `tie_word_embeddings: false` changes scales instead.
_ALWAYS_TIED = frozenset("longt5 mt5 t5 udop umt5 vilt".split())
# Types whose setting ties other weights: Luke's entities, Pop2Piano's towers. Neither ties its output.
_TIE_OTHER_NAMES = frozenset({"luke", "pop2piano"})
# Types whose classes tie no output, regardless of their config.
_NEVER_TIED = frozenset(
    "audioflamingo3 bailing_hybrid blt_patcher cosmos3_edge esmc glm_image inkling2 inkling2_text inkling_mm_model"
    " inkling_text kimi_linear mllama mllama_text_model molmo2 moshi muse_spark musicflamingo nemotron3_5_transcribe"
    " nemotron_h pp_formulanet qwen2_audio rembert vibevoice_asr voxtral xlstm".split()
)
# Classes that tie no output, while other classes of their type do.
_NEVER_TIED_CLASSES = frozenset({"BigBirdPegasusForCausalLM", "CpmAntForCausalLM"})
# Types that are tied if their own config or that of their text part ties.
_TEXT_MAY_TIE = frozenset(
    "blip fast_vlm glm4v glm4v_moe glm_ocr hunyuan_vl kosmos_2 llava llava_next_video llava_onevision minimax_m3_vl"
    " paddleocr_vl perception_lm qwen2_5_vl qwen2_vl shieldgemma2 video_llama_3".split()
)
# Types whose output layer is in a part with a config of its own, which decides.
_PART_TIES = frozenset(
    "blip_2 encoder_decoder instructblip instructblipvideo kosmos_2.5 llama4 rag speech_encoder_decoder"
    " vision_encoder_decoder".split()
)
_PARTS = ("text_config", "llm_config", "language_config", "decoder", "generator")
_TIE = "tie_word_embeddings"

_LANGUAGE_MODELS = (
    *("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForPreTraining"),
    "DoubleHeadsModel",
)


def model_type_of(config: Mapping[str, object] | None) -> str:
    """Return the `model_type` of a config, with `_` for `-`; empty if there is none."""
    model_type = config.get("model_type") if config else None
    return model_type.replace("-", "_") if isinstance(model_type, str) else ""


def ties_embeddings(config: Mapping[str, object] | None) -> bool | None:
    """Return whether a model with this config ties its embeddings to its output; None if that is not known.

    Args:
        config: the content of config.json, or None.
    """
    model_type, setting, part = model_type_of(config), _tie_setting(config), text_part(config)
    if model_type in _ALWAYS_TIED:
        return True
    if model_type in _TIE_OTHER_NAMES:
        return None
    if model_type in _NEVER_TIED or not _NEVER_TIED_CLASSES.isdisjoint(_classes(config)):
        return False
    if model_type in _PART_TIES and part is not None:
        return ties_embeddings(part)
    if setting is None and model_type in _TIED_BY_DEFAULT:
        return True
    return bool(setting or ties_embeddings(part)) if model_type in _TEXT_MAY_TIE else setting


def text_part(config: Mapping[str, object] | None) -> Mapping[str, object] | None:
    """Return the config of the language model within the config of a larger model, or None."""
    return next((part for key in _PARTS if (part := _part(config, key)) is not None), None)


def may_be_untied(config: Mapping[str, object] | None) -> bool:
    """True if setting `tie_word_embeddings` to false in a config unties the embeddings, and has no other meaning."""
    return model_type_of(config) not in _ALWAYS_TIED | _TIE_OTHER_NAMES


def _classes(config: Mapping[str, object] | None) -> tuple[str, ...]:
    names = config.get("architectures") if config else None
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def _tie_setting(config: Mapping[str, object] | None) -> bool | None:
    value = config.get(_TIE) if config else None
    return value if isinstance(value, bool) else None


def _part(config: Mapping[str, object] | None, key: str) -> Mapping[str, object] | None:
    value = config.get(key) if config else None
    return value if isinstance(value, dict) else None


def tied_names(shapes: Mapping[str, Shape]) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Yield (name, names of the tensors that it may be a copy of, whether it is an output layer) for weights in ties.

    Args:
        shapes: name in the model -> shape.
    """
    roles = {name: role for name in shapes if (role := _role_of(name)) is not None}
    for name, role in roles.items():
        keepers = [
            (other_role, candidate)
            for candidate, other_role in roles.items()
            if other_role < role and shapes[candidate] == shapes[name]
        ]
        if keepers:  # an embedding is tied only to a shared one, an output layer to any embedding
            yield (
                name,
                tuple(candidate for _, candidate in sorted(keepers, key=lambda keeper: keeper[0])),
                role == _HEAD,
            )
    for copy, kept in _tied_biases(shapes):
        yield copy, (kept,), False


def _tied_biases(names: Collection[str]) -> Iterator[tuple[str, str]]:
    for kept_end, other_end in _BIASES:
        for name in names:
            kept = name.removesuffix(other_end) + kept_end
            if f".{name}".endswith(f".{other_end}") and kept in names:
                yield name, kept


def tie_groups(names: Collection[str]) -> list[tuple[str, ...]]:
    """Return the groups of names that may be one parameter in a model with tied embeddings.

    Args:
        names: all names of one model.
    """
    groups = [tuple(name for name in names if _role_of(name) is not None)]
    return [*groups, *((kept, copy) for copy, kept in _tied_biases(names))]


def stored_ties(
    shapes: Mapping[str, Shape], config: Mapping[str, object] | None
) -> tuple[tuple[str, ...], ...]:
    """Return the groups of names that are one parameter in the model of some files; a stored name comes first.

    The groups include names that the files lack, because a live model's state dict has them.

    Args:
        shapes: name in the files -> shape.
        config: the content of config.json; no ties are found with None.
    """
    first, kept = next(iter(_classes(config)), ""), _kept_embedding(shapes)
    if kept is None:
        return ()
    group, biases = [kept, *_tower_embeddings(kept, shapes)], list[tuple[str, ...]]()
    has_output, tied = first.endswith(_LANGUAGE_MODELS), ties_embeddings(config)
    if has_output:
        head = _HEAD_OF.get(model_type_of(config), _DEFAULT_HEAD)
        group.append(f"{head}.weight")
        biases = [(one, copy) for copy, one in _tied_biases({**dict.fromkeys(shapes), f"{head}.bias": None})]
        # If the config does not decide, the output is tied if the files lack it.
        tied = f"{head}.weight" not in shapes if tied is None else tied
    fitting = tuple(name for name in group if name not in shapes or shapes[name] == shapes[kept])
    return tuple(same for same in (fitting, *biases) if len(same) > 1) if tied else ()


def _kept_embedding(shapes: Mapping[str, Shape]) -> str | None:
    """Return the name under which tied weights are stored: a shared embedding, else the least nested embedding."""
    for role in (_SHARED, _EMBEDDING):
        embeddings = [name for name in shapes if _role_of(name) == role]
        if embeddings:
            return min(embeddings, key=lambda name: (name.count("."), name))
    return None


def _tower_embeddings(shared: str, shapes: Mapping[str, Shape]) -> list[str]:
    if _role_of(shared) != _SHARED:
        return []
    before = shared.removesuffix("shared.weight")
    towers = (t for t in ("encoder", "decoder") if any(name.startswith(f"{before}{t}.") for name in shapes))
    return [f"{before}{tower}.embed_tokens.weight" for tower in towers]


def is_output(name: str) -> bool:
    """True for the weight of an output layer."""
    return _role_of(name) == _HEAD


def is_embedding(name: str) -> bool:
    """True for the weight of an embedding of tokens, shared or not."""
    return _role_of(name) in (_SHARED, _EMBEDDING)


def is_output_bias(name: str) -> bool:
    """True for a bias that is added to the logits, whether it belongs to the output layer or is stored outside it."""
    path, _, leaf = name.rpartition(".")
    if leaf == "final_logits_bias":  # BART's
        return True
    ends = {end for pair in _BIASES for end in pair}
    return leaf == "bias" and (
        _role_of(f"{path}.weight") == _HEAD or any(f".{name}".endswith(f".{end}") for end in ends)
    )


def _role_of(name: str) -> int | None:
    """Return the role of a weight: `_SHARED`, `_EMBEDDING` or `_HEAD`; None for any other weight."""
    path, _, leaf = name.rpartition(".")
    segments = path.split(".")
    if leaf != "weight":
        return None
    if segments[-1] in _SHARED_MODULES:
        return _SHARED
    if segments[-1] in _EMBEDDING_MODULES or path in _EMBEDDING_PATHS:
        return _EMBEDDING
    if any(segment.isdigit() for segment in segments):  # part of a numbered layer
        return None
    is_head = segments[-1] in _HEAD_MODULES or f".{path}".endswith(_HEAD_PATHS) or path in _TOP_HEADS
    return _HEAD if is_head else None
