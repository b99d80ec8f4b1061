"""Embeddings as long as the tokenizer needs them, while they have no memory yet."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch
from torch import nn

from shardkit.core.text import count, escape
from shardkit.errors import LayoutError, UsageError
from shardkit.layout.classes import is_transformers
from shardkit.training.ranks.context import clean_name

MULTIPLE = 8  # rows of embeddings; tensor cores want it, and ranks up to 8 get shards of one size


def align_vocab(model: nn.Module, tokenizer: Sized | int, *, multiple: int = MULTIPLE) -> dict[str, int]:
    """Make the embeddings of a model on meta as long as a tokenizer needs; they never get shorter.

    Input and output embeddings, tied or not, a bias of the output, and the config follow. transformers' own
    `resize_token_embeddings` would initialise and copy whole weights.

    Args:
        model: of transformers, wrapped by PEFT or not; all of its parameters are on meta.
        tokenizer: or the number of its tokens.
        multiple: the number of rows is rounded up to one of these.

    Returns:
        FQN -> rows that it had, for every parameter that was made longer, under its first name.

    Raises:
        UsageError: no number of tokens, or not a model of transformers.
        LayoutError: the model's class resizes embeddings in a way of its own.
    """
    tokens = tokenizer if isinstance(tokenizer, int) else len(tokenizer)
    if tokens < 1 or multiple < 1 or isinstance(tokenizer, bool):
        raise UsageError(
            f"{tokens} tokens in multiples of {multiple}: both are at least 1",
            hint="give a tokenizer, or the number of its tokens",
        )
    inner = _embedding_model(model)
    rows = -(-tokens // multiple) * multiple
    embedding = inner.get_input_embeddings()
    weight = getattr(embedding, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
        raise LayoutError(f"the input embedding is a {type(embedding).__name__}, which has no rows to add")
    old = weight.shape[0]
    if tokens <= old:
        return {}
    longer = [weight, *_output_parameters(inner.get_output_embeddings(), old)]
    _refuse_own_way(inner)
    _refuse_other_rows(inner, old, longer)
    grown = _lengthen(model, longer, rows)
    _record(inner, old, rows)
    return grown


def _embedding_model(model: nn.Module) -> Any:
    inner = next((module for module in model.modules() if is_transformers(module)), None)
    if inner is None:
        raise UsageError(
            f"align_vocab needs a model of transformers, not a {type(model).__name__}: it asks it for its embeddings",
            hint="build the model with as many rows as the tokenizer needs",
        )
    return inner


def _output_parameters(head: Any, old: int) -> list[nn.Parameter]:
    if not isinstance(head, nn.Module):
        return []
    return [param for param in head.parameters(recurse=False) if param.shape[:1] == (old,)]


def _refuse_own_way(inner: Any) -> None:
    from transformers import PreTrainedModel

    methods = ("resize_token_embeddings", "_resize_token_embeddings", "_get_resized_embeddings")
    own = [name for name in methods if getattr(type(inner), name) is not getattr(PreTrainedModel, name)]
    if own:
        raise LayoutError(
            f"{type(inner).__name__} resizes its embeddings in a way of its own ({own[0]})",
            hint="resize it with transformers and save it, then give that as the source",
        )


def _refuse_other_rows(inner: nn.Module, old: int, longer: list[nn.Parameter]) -> None:
    """Refuse whatever else has a row for each token: it would stay short."""
    known = {id(param) for param in longer}
    others = [
        clean_name(name)
        for name, param in inner.named_parameters()
        if id(param) not in known and param.ndim == 1 and param.shape[0] == old
    ]
    # A width that happens to be the vocabulary's would be met in many tensors, not in a bias or two.
    others += [clean_name(name) for name, buffer in inner.named_buffers() if buffer.shape[-1:] == (old,)]
    if others:
        raise LayoutError(
            f"{count(len(others), 'tensor')} beside the embeddings seem to have an element for each token",
            problems=[escape(name) for name in others],
            hint="resize the model with transformers and save it, then give that as the source",
        )


def _lengthen(model: nn.Module, longer: list[nn.Parameter], rows: int) -> dict[str, int]:
    new: dict[int, nn.Parameter] = {}
    for param in longer:
        if id(param) not in new:
            memoryless = torch.empty((rows, *param.shape[1:]), dtype=param.dtype, device="meta")
            new[id(param)] = nn.Parameter(memoryless, requires_grad=param.requires_grad)
    grown: dict[str, int] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(param) not in new:
                continue
            setattr(module, name, new[id(param)])
            if id(param) not in seen:
                grown[clean_name(f"{path}.{name}" if path else name)] = param.shape[0]
            seen.add(id(param))
            for attribute in ("num_embeddings", "out_features"):
                if getattr(module, attribute, None) == param.shape[0]:
                    setattr(module, attribute, rows)
    return grown


def _record(inner: Any, old: int, rows: int) -> None:
    """Say so in the config, and wherever models of transformers keep the number."""
    inner.config.get_text_config().vocab_size = rows
    for module in inner.modules():
        if getattr(module, "vocab_size", None) == old and is_transformers(module):
            module.vocab_size = rows
