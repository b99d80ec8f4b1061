"""Embeddings grow to the tokenizer while they have no memory; what transformers resizes, this resizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from shardkit.errors import LayoutError, UsageError
from shardkit.training.model.build import align_vocab, build_model
from tests.training import models


def built(name: str, **changes: Any) -> Any:
    config = models.config_of(name, **changes)
    return build_model(lambda: getattr(transformers, config.architectures[0])(config))


@pytest.mark.parametrize(
    ("name", "grown"),
    [
        ("llama", {"model.embed_tokens.weight", "lm_head.weight"}),
        ("llama-tied", {"model.embed_tokens.weight"}),
        ("gpt2", {"transformer.wte.weight"}),
        ("bert", {"embeddings.word_embeddings.weight"}),
        ("bert-lm", {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"}),
        ("qwen2-vl", {"model.language_model.embed_tokens.weight", "lm_head.weight"}),
    ],
)
def test_shapes_ties_and_config_are_those_of_transformers(name: str, grown: set[str]) -> None:
    model, real = built(name), models.reference(name)
    old = real.get_input_embeddings().weight.shape[0]
    found = align_vocab(model, range(old + 20))
    real.resize_token_embeddings(old + 20, pad_to_multiple_of=8)
    assert found == dict.fromkeys(grown, old)
    rows = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}
    assert rows == {name: p.shape for name, p in real.named_parameters(remove_duplicate=False)}
    assert all(parameter.is_meta for parameter in model.parameters())
    ids = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    theirs = [id(p) for _, p in real.named_parameters(remove_duplicate=False)]
    assert [ids.index(each) for each in ids] == [theirs.index(each) for each in theirs]
    for ours, other in ((model, real),):
        text, theirs_text = ours.config.get_text_config(), other.config.get_text_config()
        assert text.vocab_size == theirs_text.vocab_size
        assert ours.get_input_embeddings().num_embeddings == other.get_input_embeddings().num_embeddings
        head = other.get_output_embeddings()
        if head is not None:
            assert ours.get_output_embeddings().out_features == head.out_features


def test_it_rounds_up_and_never_shrinks() -> None:
    for tokens, multiple, rows in (
        (102, 8, 104),
        (104, 8, 104),
        (102, 64, 128),
        (102, 1, 102),
        (105, 2, 106),
    ):
        model = built("llama")
        assert align_vocab(model, tokens, multiple=multiple)["lm_head.weight"] == 101
        assert model.lm_head.weight.shape == (rows, 24)
        assert model.vocab_size == model.model.vocab_size == rows
    model = built("llama")
    for tokens in (50, 101):
        assert align_vocab(model, tokens) == {}
        assert model.lm_head.weight.shape == (101, 24)


def test_gradients_and_dtypes_stay() -> None:
    model = build_model(lambda: transformers.LlamaForCausalLM(models.config_of("llama")), dtype="bf16")
    model.lm_head.weight.requires_grad_(False)
    align_vocab(model, 200)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert not model.lm_head.weight.requires_grad
    assert model.get_input_embeddings().weight.requires_grad


def test_what_else_counts_tokens_is_not_left_short() -> None:
    class Biased(transformers.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("final_logits_bias", torch.zeros(1, config.vocab_size))

    model = build_model(lambda: Biased(models.config_of("llama")))
    with pytest.raises(LayoutError, match="element for each token") as caught:
        align_vocab(model, 200)
    assert caught.value.problems == ("final_logits_bias",)
    assert model.lm_head.weight.shape[0] == 101

    class Own(transformers.LlamaForCausalLM):
        def resize_token_embeddings(self, *args: Any, **options: Any) -> Any:
            raise NotImplementedError

    with pytest.raises(LayoutError, match="in a way of its own"):
        align_vocab(build_model(lambda: Own(models.config_of("llama"))), 200)


def test_what_has_no_vocabulary_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a model of transformers"):
        align_vocab(build_model(lambda: nn.Linear(2, 2)), 10)
    for tokens, multiple in ((0, 8), (10, 0), (True, 8)):
        with pytest.raises(UsageError, match="at least 1"):
            align_vocab(built("llama"), tokens, multiple=multiple)
