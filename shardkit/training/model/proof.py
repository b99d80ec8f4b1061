"""The proof at the end: what was promised of the filled model, held against the model itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit._torch import fsdp_shards
from shardkit.core.text import escape
from shardkit.training.model.buffers import meta_attributes
from shardkit.training.ranks.context import ExpectedTensor, clean_name
from shardkit.training.ranks.local import LocalShard

_SLACK_NBYTES = 4096  # an allocator's rounding


def prove_filled(shards: Sequence[LocalShard], elements: Counter[str]) -> Iterator[str]:
    """Yield a problem for every parameter and persistent buffer of which an element was not filled exactly once.

    Args:
        shards: everything that this rank holds.
        elements: how many of each were filled, counted where bytes were moved.
    """
    for shard in shards:
        held, filled = shard.region.num_elements, elements[shard.fqn]
        if shard.persistent and filled != held:
            yield f"{escape(shard.fqn)}: {filled} of {held} elements were filled"


def prove_model(
    model: nn.Module, shards: Sequence[LocalShard], expected: Mapping[str, ExpectedTensor] | None
) -> Iterator[str]:
    """Yield what is wrong with a filled model on this rank; nothing where all is well.

    Args:
        model: filled.
        shards: everything that this rank holds of it.
        expected: of the plain model, by FQN; None where nobody has looked at that.
    """
    yield from _on_meta(model)
    if expected is not None:
        yield from _as_expected(shards, expected)
        yield from _too_large(model, shards)


def _on_meta(model: nn.Module) -> Iterator[str]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            yield f"{escape(clean_name(name))}: parameter or buffer still on meta"
    for attribute in meta_attributes(model):
        yield f"{escape(attribute.fqn)}: tensor attribute still on meta"


def _as_expected(shards: Sequence[LocalShard], expected: Mapping[str, ExpectedTensor]) -> Iterator[str]:
    held = {name: shard for shard in shards for name in shard.names}
    for fqn, plan in expected.items():
        shard = held.get(fqn)
        if shard is None:
            yield f"{escape(fqn)}: was prepared and is not in the wrapped model"
            continue
        # `wrap` gives a buffer that is in no checkpoint the dtype that is computed in.
        if shard.dtype != plan.dtype and (plan.persistent or plan.kind == "parameter"):
            yield f"{escape(fqn)}: is {shard.dtype}, planned was {plan.dtype}"
        if shard.shape != plan.shape:
            yield f"{escape(fqn)}: has {list(shard.shape)}, planned was {list(plan.shape)}"
        if shard.persistent != plan.persistent:
            yield f"{escape(fqn)}: is {_in_state(shard.persistent)}, planned was {_in_state(plan.persistent)}"
    for shard in shards:
        if not any(name in expected for name in shard.names):
            yield f"{escape(shard.fqn)}: is in the wrapped model and was not prepared"


def _in_state(persistent: bool) -> str:
    return "in the state dict" if persistent else "not in the state dict"


def _too_large(model: nn.Module, shards: Sequence[LocalShard]) -> Iterator[str]:
    """Memory that holds more than this rank's part: a view of a whole tensor keeps all of it."""
    padded = {
        id(shard.param): torch.Size(shard.padded_sizes).numel() * shard.param.itemsize
        for shard in fsdp_shards(model)
    }
    for shard in shards:
        local = shard.tensor
        if not isinstance(shard.whole, DTensor) or local.is_meta or type(local) is not torch.Tensor:
            continue
        allowed = padded.get(id(shard.whole), local.nbytes) + _SLACK_NBYTES
        if local.untyped_storage().nbytes() > allowed:
            yield (
                f"{escape(shard.fqn)}: {local.untyped_storage().nbytes()} bytes are kept for a part of {local.nbytes}"
            )
