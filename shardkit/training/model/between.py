"""Detect the user's changes of a prepared model before `finalize`: buffers set, parameters tied, frozen or hidden."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from shardkit.core.text import count, escape, listed
from shardkit.errors import LayoutError, UsageError
from shardkit.training.model.buffers import same_bits
from shardkit.training.model.fit import ModelInitializationContext, diverged_ties
from shardkit.training.model.hidden import Hidden, find_hidden, forget_named, refuse_hidden
from shardkit.training.ranks.agree import Mask, agreed, gather_json, gather_masks, log_once, ranks_text, world
from shardkit.training.ranks.local import ModuleTensor, buffer_places

_PHASE = "comparing the ranks' parameters"

# Context -> the hidden tensors of its model: those on meta other than its parameters and buffers.
_PREPARED = WeakIdKeyDictionary()


def register_prepared(ctx: ModelInitializationContext, hidden: list[Hidden]) -> None:
    """Register a context, so that `wrap` finds the context of a model, and `finalize` the model's hidden tensors."""
    _PREPARED[ctx] = hidden


def record_changes(model: nn.Module) -> None:
    """Record the user's changes of a prepared model before it is wrapped. Other models are ignored.

    `finalize` will restore buffers to the values that they have now. Hidden references to parameters are searched
    again, before a wrapper replaces the parameters.
    """
    ctx = next((ctx for ctx in _PREPARED if ctx.model is model), None)
    if ctx is None:
        return
    for place in _changed_buffers(model, ctx):
        ctx.buffers[place.fqn] = place.tensor.detach().to("cpu", copy=True)
    hidden: list[Hidden] = _PREPARED[ctx]
    hidden_ids = {id(entry.tensor()) for entry in hidden}
    hidden += [
        entry for entry in find_hidden(model, []) if entry.fqn and id(entry.tensor()) not in hidden_ids
    ]


def warn_of_restored_buffers(model: nn.Module, ctx: ModelInitializationContext) -> None:
    """Warn of buffers that have changed since `prepare` or `wrap` recorded them, because they will be restored.

    There is no warning if the parameters have memory, because then `to_empty` has changed the buffers.
    """
    changed = list(_changed_buffers(model, ctx))
    if not changed or not any(parameter.is_meta for parameter in model.parameters()):
        return
    names, first = [place.fqn for place in changed], changed[0]
    module = f'model.get_submodule("{first.path}")' if first.path else "model"
    note = (
        f"{count(len(names), 'buffer')} had other values than after prepare and {'was' if len(names) == 1 else 'were'} put "
        f"back: {listed(names)}; set buffers before shardkit.wrap, or after finalize on each rank: "
        f"{escape(module)}.{escape(first.name)}.copy_(values)"
    )
    ctx.notes = (*ctx.notes, note)
    log_once(f"finalize: {note}", logging.WARNING)


def _changed_buffers(model: nn.Module, ctx: ModelInitializationContext) -> Iterator[ModuleTensor]:
    """Yield buffers that are not read from the source and have other values than recorded, apart from rounding."""
    for place in buffer_places(model, once=True):
        buffer, computed = place.tensor, ctx.buffers.get(place.fqn)
        if (
            computed is None
            or buffer.is_meta
            or isinstance(buffer, DTensor)
            or buffer.shape != computed.shape
        ):
            continue
        if place.persistent and place.fqn not in ctx.initialised:
            continue
        if not same_bits(buffer.detach().cpu(), computed.to(buffer.dtype)):
            yield place


def forget_hidden(model: nn.Module) -> None:
    """Forget a model's tensors that are hidden in prepared models, so that they can be given memory."""
    for hidden in _PREPARED.values():  # type: ignore[no-untyped-call]
        forget_named(hidden, model)


def refuse_other_context(model: nn.Module, ctx: ModelInitializationContext) -> None:
    """Raise an error for the model of another context, because its tensors would get the wrong values.

    A copy of the context's model belongs to no context and is accepted.

    Raises:
        UsageError: the model has modules of another prepared model, and none of this context's.
    """
    modules = {id(module) for module in model.modules()}
    shares = [not modules.isdisjoint(map(id, prepared.model.modules())) for prepared in (ctx, *_PREPARED)]
    if not shares[0] and any(shares):
        raise UsageError(
            f"this model was prepared with another context than {ctx!r}",
            hint="give finalize the context whose `model` was wrapped",
        )


def check_hidden(model: nn.Module, ctx: ModelInitializationContext) -> None:
    """Raise an error for hidden tensors on meta that nothing fills, as `refuse_hidden` does."""
    forget_hidden(model)
    other_models = (
        prepared.model for prepared in _PREPARED if prepared is not ctx and prepared.model is not model
    )
    elsewhere = {id(parameter) for other_model in other_models for parameter in other_model.parameters()}
    refuse_hidden(model, _PREPARED.get(ctx, ()), elsewhere)  # type: ignore[no-untyped-call]


def compare_parameters(
    parameters: Sequence[tuple[Sequence[str], bool]], ctx: ModelInitializationContext
) -> None:
    """Check parameters that the user has tied or frozen since `prepare`; every rank calls it.

    Parameters that were tied must have equal values in the source; if the source has only one of them, its value is
    used. All ranks must train the same parameters.

    Args:
        parameters: (all names, requires_grad) of each parameter or buffer that the model has now.
        ctx: the context. Parameters that are read under another name are removed from its `initialised`.

    Raises:
        LayoutError: on all ranks: the source has two values for one parameter, or some ranks train a parameter that
            others have frozen; the error names all of them.
        IntegrityError, ResourceError: as `diverged_ties`.
    """
    trains = {names[0]: takes_gradient for names, takes_gradient in parameters}
    tied = [names for names, _ in parameters if sum(name in ctx.expected for name in names) > 1]
    order = tuple(trains)
    masks = gather_masks([name for name in order if trains[name]], order, phase=_PHASE)
    answers = gather_json([ctx.weights is not None, tied], phase=_PHASE)
    with agreed(_PHASE):
        _refuse_frozen_apart(order, masks)
        # Of the ranks that have the tie, the first one that sees the source reads it for all.
        mine = [
            names
            for names in tied
            if world()[0]
            == next((rank for rank, (sees, ties) in enumerate(answers) if sees and list(names) in ties), None)
        ]
        diverged = [] if ctx.weights is None else diverged_ties(mine, ctx.weights)
        LayoutError.raise_for(
            [f"{escape(first)} and {escape(second)}" for first, second, _ in diverged],
            "parameters were tied after prepare, and the source has two values for them: one would be lost",
            hint="tie them in the function that builds the model, or in its config, if the source has one value; else "
            "leave them apart",
        )
    for names in tied:
        initialised = [name for name in names if name in ctx.initialised]
        is_read = any(name in ctx.expected and name not in initialised for name in names)
        ctx.initialised -= frozenset(initialised if is_read else initialised[1:])


def _refuse_frozen_apart(order: Sequence[str], masks: Sequence[Mask]) -> None:
    """Raise an error for parameters that only some ranks train, as they would wait for gradients that never come.

    Ranks of other pipeline stages have other parameters and are not compared.

    Args:
        order: the names of this rank's tensors.
        masks: for each rank, the tensors that it trains.
    """
    alike = {rank: mask.bits for rank, mask in enumerate(masks) if mask.order == masks[world()[0]].order}
    problems = [
        f"{escape(name)}: trained on {ranks_text(trains)}, frozen on {ranks_text(sorted(alike.keys() - trains))}"
        for index, name in enumerate(order)
        if 0 < len(trains := [rank for rank, bits in alike.items() if bits[index] == "1"]) < len(alike)
    ]
    LayoutError.raise_for(
        problems,
        f"requires_grad of {count(len(problems), 'parameter')} is not the same on all ranks",
        hint="freeze the same parameters on every rank, before finalize",
    )
