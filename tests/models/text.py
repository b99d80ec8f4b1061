"""Dense text models: decoders, encoders, both."""

from __future__ import annotations

from typing import Any

from tests.models.architecture import VOCABULARY, Architecture, masked, text, translation

# Names that most decoders share. Sizes are small, uneven where a model allows it, and differ from one another, so that
# no two tensors can be taken for each other by their shapes.
DECODER: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64},
    **{"tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
TIED = {**DECODER, "tie_word_embeddings": True}

ENCODER: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0},
}

GPT = {
    **{"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64},
    **{"bos_token_id": 1, "eos_token_id": 2},
}

SEQ2SEQ: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2},
    **{
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 40,
        "decoder_ffn_dim": 44,
    },
    **{"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"decoder_start_token_id": 2},
}

T5: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4},
    **{
        "relative_attention_num_buckets": 8,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    },
}


def _decoder(name: str, model_class: str, **config: Any) -> Architecture:
    return Architecture(name=name, kind="decoder", model_class=model_class, config={**DECODER, **config})


def _encoder(name: str, model_class: str, **config: Any) -> Architecture:
    return Architecture(
        name=name, kind="encoder", model_class=model_class, config={**ENCODER, **config}, inputs=masked
    )


def _own(name: str, kind: str, model_class: str, **config: Any) -> Architecture:
    inputs = {"decoder": text, "encoder": masked, "encoder-decoder": translation}[kind]
    return Architecture(name=name, kind=kind, model_class=model_class, config=config, inputs=inputs)


DECODERS = [
    _decoder("llama", "LlamaForCausalLM"),
    _decoder("llama+tied", "LlamaForCausalLM", tie_word_embeddings=True),
    _decoder("llama+base", "LlamaModel"),
    _decoder("llama+classifier", "LlamaForSequenceClassification"),
    _decoder("mistral", "MistralForCausalLM", sliding_window=4),
    _decoder("ministral", "MinistralForCausalLM"),
    _decoder("qwen2", "Qwen2ForCausalLM"),
    _decoder("qwen3", "Qwen3ForCausalLM", tie_word_embeddings=True),
    _decoder("gemma", "GemmaForCausalLM", tie_word_embeddings=True),
    _decoder("gemma2", "Gemma2ForCausalLM", tie_word_embeddings=True, sliding_window=4),
    _decoder("gemma3_text", "Gemma3ForCausalLM", tie_word_embeddings=True, sliding_window=4),
    _decoder("olmo", "OlmoForCausalLM"),
    _decoder("olmo2", "Olmo2ForCausalLM"),
    _decoder("olmo3", "Olmo3ForCausalLM", sliding_window=4),
    _decoder("phi", "PhiForCausalLM", hidden_size=32, head_dim=8),
    _decoder("phi3", "Phi3ForCausalLM"),
    _decoder("granite", "GraniteForCausalLM"),
    _decoder("cohere", "CohereForCausalLM", tie_word_embeddings=True),
    _decoder("cohere2", "Cohere2ForCausalLM", tie_word_embeddings=True, sliding_window=4),
    _decoder("stablelm", "StableLmForCausalLM"),
    _decoder("starcoder2", "Starcoder2ForCausalLM"),
    _decoder("smollm3", "SmolLM3ForCausalLM"),
    _decoder("glm4", "Glm4ForCausalLM"),
    _decoder("ernie4_5", "Ernie4_5ForCausalLM", tie_word_embeddings=True),
    _decoder("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
    _decoder("nemotron", "NemotronForCausalLM"),
    _decoder("exaone4", "Exaone4ForCausalLM", sliding_window=4),
    _decoder("seed_oss", "SeedOssForCausalLM"),
    _decoder("gpt_neox", "GPTNeoXForCausalLM"),
    _own("gpt2", "decoder", "GPT2LMHeadModel", **GPT),
    _own("gptj", "decoder", "GPTJForCausalLM", **{**GPT, "rotary_dim": 4}),
    _own(
        *("gpt_neo", "decoder", "GPTNeoForCausalLM"),
        **{"vocab_size": VOCABULARY, "hidden_size": 24, "num_layers": 2, "num_heads": 4, "window_size": 4},
        **{"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64, "bos_token_id": 1},
        **{"eos_token_id": 2},
    ),
    _own("gpt_bigcode", "decoder", "GPTBigCodeForCausalLM", **GPT),
    _own("bloom", "decoder", "BloomForCausalLM", vocab_size=VOCABULARY, hidden_size=24, n_layer=2, n_head=4),
    _own(
        *("falcon", "decoder", "FalconForCausalLM"),
        **{"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"bos_token_id": 1, "eos_token_id": 2},
    ),
    _own(
        *("mpt", "decoder", "MptForCausalLM"),
        **{"vocab_size": VOCABULARY, "d_model": 24, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
        **{"expansion_ratio": 2},
    ),
    _own(
        *("opt", "decoder", "OPTForCausalLM"),
        **{"vocab_size": VOCABULARY, "hidden_size": 24, "ffn_dim": 40, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 16},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    _decoder("modernbert-decoder", "ModernBertDecoderForCausalLM", tie_word_embeddings=True),
]

ENCODERS = [
    _encoder("bert", "BertForMaskedLM"),
    _encoder("bert+classifier", "BertForSequenceClassification"),
    _encoder("roberta", "RobertaForMaskedLM", max_position_embeddings=66),
    _encoder("xlm-roberta", "XLMRobertaForMaskedLM", max_position_embeddings=66),
    _encoder("deberta", "DebertaForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _encoder("deberta-v2", "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _encoder("albert", "AlbertForMaskedLM", embedding_size=16),
    _encoder("electra", "ElectraForMaskedLM", embedding_size=16),
    _encoder("mpnet", "MPNetForMaskedLM"),
    _encoder("esm", "EsmForMaskedLM", mask_token_id=4, position_embedding_type="rotary"),
    _encoder(
        "modernbert", "ModernBertForMaskedLM", bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
    ),
    _encoder("nomic_bert", "NomicBertModel"),
    _encoder("gte", "GteModel"),
    _own(
        *("distilbert", "encoder", "DistilBertForMaskedLM"),
        **{"vocab_size": VOCABULARY, "dim": 24, "hidden_dim": 40, "n_layers": 2, "n_heads": 4},
        **{"max_position_embeddings": 64},
    ),
]

ENCODER_DECODERS = [
    _own("t5", "encoder-decoder", "T5ForConditionalGeneration", **T5),
    _own(
        "t5+gated",
        "encoder-decoder",
        "T5ForConditionalGeneration",
        **T5,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    ),
    _own("mt5", "encoder-decoder", "MT5ForConditionalGeneration", **T5),
    _own("umt5", "encoder-decoder", "UMT5ForConditionalGeneration", **T5),
    _own("bart", "encoder-decoder", "BartForConditionalGeneration", **SEQ2SEQ),
    _own("mbart", "encoder-decoder", "MBartForConditionalGeneration", **SEQ2SEQ),
    _own("marian", "encoder-decoder", "MarianMTModel", **SEQ2SEQ),
    _own("pegasus", "encoder-decoder", "PegasusForConditionalGeneration", **SEQ2SEQ),
    _own("m2m_100", "encoder-decoder", "M2M100ForConditionalGeneration", **SEQ2SEQ),
]
