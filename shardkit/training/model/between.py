"""What somebody did to a prepared model between `prepare` and `finalize`: buffers he set, parameters he tied or hid."""

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
from shardkit.training.model.hidden import Hidden, find_hidden, let_go, refuse_hidden
from shardkit.training.ranks.agree import Mask, agreed, gather_json, gather_masks, numbered, say, world
from shardkit.training.ranks.local import ModuleTensor, buffer_places

_PHASE = "comparing the ranks' parameters"

# Context -> what its model holds on meta beside its parameters and buffers.
_PREPARED = WeakIdKeyDictionary()


def note_prepared(ctx: ModelInitializationContext, hidden: list[Hidden]) -> None:
    """Let `wrap` find the context of a model, and `finalize` what the model holds beside its names."""
    _PREPARED[ctx] = hidden


def keep_changes(model: nn.Module) -> None:
    """Keep what was done to a prepared model until it is wrapped, if it is one.

    Buffers that were set are what `finalize` restores. What holds a parameter beside the model is looked for again, before
    a wrapper replaces the parameter.
    """
    ctx = next((ctx for ctx in _PREPARED if ctx.model is model), None)
    if ctx is None:
        return
    for place in _changed(model, ctx):
        ctx.buffers[place.fqn] = place.tensor.detach().to("cpu", copy=True)
    hidden: list[Hidden] = _PREPARED[ctx]
    hidden_ids = {id(entry.tensor()) for entry in hidden}
    hidden += [
        entry for entry in find_hidden(model, []) if entry.fqn and id(entry.tensor()) not in hidden_ids
    ]


def say_put_back(model: nn.Module, ctx: ModelInitializationContext) -> None:
    """Note which buffers have other values than they had when `prepare` or `wrap` saw them last: they are restored.

    Nothing is said if the parameters have memory: then `to_empty` gave the buffers theirs.
    """
    changed = list(_changed(model, ctx))
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
    say(f"finalize: {note}", logging.WARNING)


def _changed(model: nn.Module, ctx: ModelInitializationContext) -> Iterator[ModuleTensor]:
    """Yield buffers that nobody reads from the source and whose values are not those that they had; rounded ones are."""
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


def release(model: nn.Module) -> None:
    """Let a model's tensors get memory, in whatever other prepared model it may be hidden."""
    for hidden in _PREPARED.values():  # type: ignore[no-untyped-call]
        let_go(hidden, model)


def refuse_other_context(model: nn.Module, ctx: ModelInitializationContext) -> None:
    """Refuse the model of another context: tensors of the same names and shapes would get the values of this one.

    A copy of the context's model is in no context, and is taken.

    Raises:
        UsageError: it has modules of another prepared model, and none of this one.
    """
    modules = {id(module) for module in model.modules()}
    shares = [not modules.isdisjoint(map(id, prepared.model.modules())) for prepared in (ctx, *_PREPARED)]
    if not shares[0] and any(shares):
        raise UsageError(
            f"this model was prepared with another context than {ctx!r}",
            hint="give finalize the context whose `model` was wrapped",
        )


def check_hidden(model: nn.Module, ctx: ModelInitializationContext) -> None:
    """Refuse a model that holds tensors on meta which nothing fills, as `refuse_hidden` does."""
    release(model)
    other_models = (
        prepared.model for prepared in _PREPARED if prepared is not ctx and prepared.model is not model
    )
    elsewhere = {id(parameter) for other_model in other_models for parameter in other_model.parameters()}
    refuse_hidden(model, _PREPARED.get(ctx, ()), elsewhere)  # type: ignore[no-untyped-call]


def compare_parameters(
    parameters: Sequence[tuple[Sequence[str], bool]], ctx: ModelInitializationContext
) -> None:
    """Refuse parameters that were several in the prepared model and are now one, unless their values are the same.

    One that the source lacks has the value of the other. What some ranks train has to be what all of them train. Every
    rank calls it.

    Args:
        parameters: the names of each parameter or buffer that the model has now, and whether it takes a gradient.
        ctx: afterwards it initialises none that is read under another name.

    Raises:
        LayoutError: on all ranks: the source has two values for one parameter, or some ranks have frozen what others
            train; names all of them.
        IntegrityError, ResourceError: as `diverged_ties`.
    """
    trains = {names[0]: takes_gradient for names, takes_gradient in parameters}
    tied = [names for names, _ in parameters if sum(name in ctx.expected for name in names) > 1]
    order = tuple(trains)
    masks = gather_masks([name for name in order if trains[name]], order, phase=_PHASE)
    answers = gather_json([ctx.weights is not None, tied], phase=_PHASE)
    with agreed(_PHASE):
        _refuse_frozen_apart(order, masks)
        # The first rank that sees the source reads, for all that have the tie.
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
    """Refuse parameters that some ranks train and others do not: those would wait for gradients that never come.

    Ranks of other stages of a pipeline have other parameters.

    Args:
        order: the names of this rank's tensors.
        masks: which of them each rank trains.
    """
    alike = {rank: mask.bits for rank, mask in enumerate(masks) if mask.order == masks[world()[0]].order}
    problems = [
        f"{escape(name)}: trained on {numbered(trains)}, frozen on {numbered(sorted(alike.keys() - trains))}"
        for index, name in enumerate(order)
        if 0 < len(trains := [rank for rank, bits in alike.items() if bits[index] == "1"]) < len(alike)
    ]
    LayoutError.raise_for(
        problems,
        f"requires_grad of {count(len(problems), 'parameter')} is not the same on all ranks",
        hint="freeze the same parameters on every rank, before finalize",
    )
