"""Which tensors of a base have a row for each token, and whether a model has others; names and shapes of real models."""

from __future__ import annotations

from typing import Any

import pytest

from shardkit.keys.tokens import TokenRows, find_token_rows, paddings, with_num_tokens

Shapes = dict[str, tuple[int, ...]]
PLAIN = ("model.embed_tokens.weight", "lm_head.weight")


def embeddings(*names: str, rows: int = 64) -> Shapes:
    return {name: (rows, 32) for name in names}


def changed(base: Shapes, config: dict[str, Any], **rows: int) -> list[TokenRows]:
    """Compare a base with a model whose tensors have other rows; `__` stands for a dot."""
    new = {name.replace("__", "."): number for name, number in rows.items()}
    ours = {name: (new.get(name, shape[0]), *shape[1:]) for name, shape in base.items()}
    return find_token_rows(ours, base, config)


@pytest.mark.parametrize(
    ("names", "config", "places"),
    [
        (PLAIN, {"vocab_size": 64}, {("vocab_size",)}),
        (PLAIN[:1], {"vocab_size": 64}, {("vocab_size",)}),  # tied
        (
            ("model.language_model.embed_tokens.weight", "lm_head.weight"),  # a VL's text part, counted twice
            {"vocab_size": 64, "text_config": {"vocab_size": 64}, "vision_config": {"vocab_size": 64}},
            {("vocab_size",), ("text_config", "vocab_size")},
        ),
        (
            ("thinker.model.embed_tokens.weight", "thinker.lm_head.weight"),
            {
                "thinker_config": {"text_config": {"vocab_size": 64}},
                "talker_config": {"text_config": {"vocab_size": 64}},
            },
            {("thinker_config", "text_config", "vocab_size")},
        ),
        (
            ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
            {"vocab_size": 64},
            {("vocab_size",)},
        ),
        (
            ("model.decoder.embed_tokens.weight", "proj_out.weight"),
            {"vocab_size": 64},
            {("vocab_size",)},
        ),  # Whisper
        (
            ("model.shared.weight", "lm_head.weight"),  # Marian that shares one vocabulary
            {"vocab_size": 64, "decoder_vocab_size": 64},
            {("vocab_size",), ("decoder_vocab_size",)},
        ),
    ],
)
def test_rows_of_all_embeddings_are_one_vocabulary(
    names: tuple[str, ...], config: dict[str, Any], places: set[tuple[str, ...]]
) -> None:
    base = {**embeddings(*names), "model.norm.weight": (32,)}
    ours = {name: (67, *shape[1:]) if name in names else shape for name, shape in base.items()}
    (found,) = find_token_rows(ours, base, config)
    assert (found.old, found.new, set(found.places)) == (64, (67,), places)
    assert found.shapes == {name: (67, 32) for name in names}
    assert find_token_rows(base, base, config) == []
    wrapped = {f"module.{name}": shape for name, shape in ours.items()}
    assert find_token_rows(wrapped, base, config) == [found]
    text = with_num_tokens(config, found.places, 67)
    assert find_token_rows(ours, ours, text) == []


def test_a_bias_of_the_output_has_a_row_for_each_token_too() -> None:
    """BERT's and BART's, the latter with a dim of 1 before it."""
    for name, shape in {
        "cls.predictions.bias": (64,),
        "final_logits_bias": (1, 64),
        "lm_head.bias": (64,),
    }.items():
        base = {**embeddings(*PLAIN), name: shape, "model.layers.0.mlp.fc1.bias": (64,)}
        ours = {**base, **embeddings(*PLAIN, rows=67), name: (*shape[:-1], 67)}
        (found,) = find_token_rows(ours, base, {"vocab_size": 64})
        assert found.shapes[name] == (*shape[:-1], 67)
        (left,) = find_token_rows({**ours, name: shape}, base, {"vocab_size": 64})
        assert left.new == (67, 64)
        assert not left.are_alike


def test_input_and_output_have_the_same_rows() -> None:
    base = embeddings(*PLAIN)
    (found,) = changed(base, {"vocab_size": 64}, model__embed_tokens__weight=67)
    assert found.new == (67, 64)
    assert not found.shapes


def test_an_embedding_of_another_count_follows_its_own_key() -> None:
    """Gemma 3n: per-layer embeddings keep their rows when the vocabulary grows."""
    layers = "model.language_model.embed_tokens_per_layer.weight"
    base = {**embeddings("model.language_model.embed_tokens.weight"), layers: (60, 8)}
    text = {"vocab_size": 64, "vocab_size_per_layer_input": 60}
    ours = {**base, **embeddings("model.language_model.embed_tokens.weight", rows=67)}
    (found,) = find_token_rows(ours, base, {"text_config": text})
    assert found.places == (("text_config", "vocab_size"),)
    (found,) = find_token_rows({**base, layers: (70, 8)}, base, {"text_config": text})
    assert (found.places, found.new) == ((("text_config", "vocab_size_per_layer_input"),), (70,))
    assert find_token_rows({**base, layers: (70, 8)}, base, {"text_config": {"vocab_size": 64}}) == []


def test_encoder_and_decoder_may_have_a_vocabulary_each() -> None:
    """Marian and FSMT by keys of their own, EncoderDecoderModel by configs of its parts."""
    names = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    for config, place in (
        ({"vocab_size": 64, "decoder_vocab_size": 64}, ("decoder_vocab_size",)),
        ({"src_vocab_size": 64, "tgt_vocab_size": 64}, ("tgt_vocab_size",)),
        ({"encoder": {"vocab_size": 64}, "decoder": {"vocab_size": 64}}, ("decoder", "vocab_size")),
    ):
        base = embeddings(*names)
        ours = {name: (64 if "encoder" in name else 67, 32) for name in names}
        (found,) = find_token_rows(ours, base, config)
        assert (found.new, found.places, set(found.shapes)) == ((67,), (place,), set(names[1:]))


def test_a_head_of_another_kind_is_no_output_embedding() -> None:
    """A critic's head has one row, a classifier's a few; and no embedding is one because of its width."""
    base = embeddings(*PLAIN)
    assert changed(base, {"vocab_size": 64}, lm_head__weight=1) == []
    assert find_token_rows({**base, "score.weight": (1, 32)}, base, {"vocab_size": 64}) == []
    assert find_token_rows({"model.embed_tokens.weight": (67, 16)}, base, {"vocab_size": 64}) == []
    assert find_token_rows({"model.embed_positions.weight": (67, 32)}, base, {"vocab_size": 64}) == []
    assert changed(base, {"vocab_size": 63}, model__embed_tokens__weight=67, lm_head__weight=67) == []


@pytest.mark.parametrize(
    ("rows", "share"), [(50, 2), (49, None), (33, 3), (34, 3), (25, 4), (99, None), (101, None)]
)
def test_a_ranks_share_looks_like_one(rows: int, share: int | None) -> None:
    base = embeddings(*PLAIN, rows=100)
    (found,) = find_token_rows(embeddings(*PLAIN, rows=rows), base, {"vocab_size": 100})
    assert found.share == share
    assert found.is_cut == (rows < 100)


def test_paddings_are_those_of_megatron() -> None:
    """Qwen3 and Llama 3, 128 rows times the ranks of tensor parallelism."""
    assert {151936, 152064, 152576} <= paddings(151936)
    assert {-(-128256 // (128 * tp)) * 128 * tp for tp in (1, 2, 4, 8, 16, 32, 64)} <= paddings(128256)
    assert 96 in paddings(96)
    assert 160 not in paddings(96)
