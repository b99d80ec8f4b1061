"""Read tensors that modules have as extra state (`get_extra_state`), and pass them to `set_extra_state`.

Tensors of bytes are not passed, because modules with such a state unpickle it (TransformerEngine), which could run code
from the source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core.dtypes import BY_NAME
from shardkit.core.text import count, listed
from shardkit.training.fill.reading import Weights, torch_dtype
from shardkit.training.model.fit import ModelInitializationContext
from shardkit.training.ranks.agree import gather_json, log_once
from shardkit.training.ranks.local import ExpectedTensor, LocalShard, full_name

_KIND = "extra state"
# torch.nn.Module.state_dict: "Any extra state is under this suffix".
_SUFFIX = "_extra_state"


def extra_states(model: nn.Module) -> dict[str, ExpectedTensor]:
    """Return name in the state dict -> tensor, for the tensors that modules have as extra state."""
    return {
        fqn: ExpectedTensor(fqn=fqn, shape=tuple(state.shape), dtype=state.dtype, kind=_KIND, persistent=True)
        for fqn, _, state in _states(model)
    }


def _states(model: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    for path, module in model.named_modules():
        if type(module).get_extra_state is nn.Module.get_extra_state:
            continue
        try:
            state = module.get_extra_state()
        except Exception:  # the module's code may need weights
            continue
        if isinstance(state, torch.Tensor) and not isinstance(state, DTensor):
            yield full_name(path, _SUFFIX), module, state


def read_states(model: nn.Module, ctx: ModelInitializationContext) -> list[LocalShard]:
    """Return shards with memory for the extra states that a context's source has; every rank calls it."""
    shards, note = states_to_read(model, ctx.weights)
    if note is not None and note not in ctx.notes:
        ctx.notes = (*ctx.notes, note)
    return shards


def states_to_read(model: nn.Module, weights: Weights | None) -> tuple[list[LocalShard], str | None]:
    """Return shards with memory for the extra states that a source has; every rank calls it.

    Args:
        model: any model, wrapped or not.
        weights: the source, or None if this rank cannot open it.

    Returns:
        The shards to fill, whole on every rank; and a note about states that are left out, which is also logged.
    """
    expected = extra_states(model)
    described: Mapping[str, tuple[str, Sequence[int]]] | None = None
    if weights is not None:
        entries = {fqn: weights.entry(weights.names[fqn]) for fqn in expected if fqn in weights.names}
        described = {fqn: (entry.dtype.name, entry.shape) for fqn, entry in entries.items()}
    answers = gather_json(described, phase="comparing the source with the model")
    if described is None:
        described = next((answer for answer in answers if answer is not None), {})
    shards, skipped_fqns = [], []
    for fqn, (name, shape) in described.items():
        dtype = torch_dtype(BY_NAME[name])
        if fqn in expected and dtype == expected[fqn].dtype != torch.uint8:
            shards.append(LocalShard.plain((fqn,), torch.empty(tuple(shape), dtype=dtype), _KIND))
        else:
            skipped_fqns.append(fqn)
    if not skipped_fqns:
        return shards, None
    note = (
        f"{count(len(skipped_fqns), 'extra state')} of the source not given to {'its' if len(skipped_fqns) == 1 else 'their'} "
        f"set_extra_state, which may unpickle bytes: {listed(skipped_fqns)}; load it yourself if you trust the source"
    )
    log_once(f"weights: {note}")
    return shards, note


def set_extra_states(model: nn.Module, filled: Sequence[LocalShard]) -> None:
    """Call `set_extra_state` of each module whose extra state is among the filled shards."""
    states = {shard.fqn: shard.whole for shard in filled if shard.kind == _KIND}
    for path, module in model.named_modules() if states else ():
        state = states.get(full_name(path, _SUFFIX))
        if state is not None:
            module.set_extra_state(state)
