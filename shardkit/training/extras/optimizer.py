"""Give an optimizer that was created before wrapping the parameters that the model has afterwards.

`fully_shard` replaces parameters by new ones, and an optimizer continues to step the old ones: the loss does not
change, and there is no error. accelerate finds the new ones by the address of the old ones' memory. That
address is 0 for everything on meta, so its optimizer ends up with one parameter in every place.

    names = parameter_names(model, optimizer)      # before
    wrap(model, mesh)
    rebind_optimizer(model, optimizer, names)      # after

Names that torch recorded itself (`AdamW(model.named_parameters())`) need no first line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from shardkit.core.keywords import suggests_keywords
from shardkit.core.text import count, escape, suggestions
from shardkit.errors import UsageError
from shardkit.keys.names import clean_name
from shardkit.training.ranks.local import optimizer_parameters, refuse_copies, reshard, unwrap_optimizer

Names = Sequence[Sequence[str]]
"""FQNs of an optimizer's parameters, group by group, in the order of each group's `params`."""


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> Names:
    """Return the model's names for an optimizer's parameters; call it before the model is wrapped.

    Args:
        model: a model that is not wrapped yet.
        optimizer: an optimizer of its parameters.

    Raises:
        UsageError: the optimizer steps tensors that are not parameters of the model.
    """
    names = {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}
    strangers = [
        f"group {number}: parameter {index}, shape {tuple(parameter.shape)}"
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if id(parameter) not in names
    ]
    UsageError.raise_for(
        strangers,
        f"{count(len(strangers), 'tensor')} of the optimizer are not parameters of the model",
        hint="ask before the model is wrapped, and for the model that the optimizer was made for",
    )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


@suggests_keywords
def rebind_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, names: Names | None = None) -> None:
    """Replace the parameters of an optimizer that was created before wrapping by those that the model has now.

    Groups, their order and their options do not change, and learning rate schedules continue to work. An
    optimizer whose parameters are all the model's, each once, is not changed.

    Args:
        model: the model after `wrap`, `fully_shard` or `accelerator.prepare`.
        optimizer: an optimizer that has not stepped yet, or accelerate's wrapper of one.
        names: the result of `parameter_names` before wrapping. None uses the names that torch recorded, if
            the optimizer was created from `model.named_parameters()` (torch 2.6). An optimizer with one group of all
            parameters needs neither: it gets the parameters in the model's order.

    Raises:
        UsageError: the optimizer has state or has parameters elsewhere; or names are not known, are not in
            the model, belong to another shape, or name one parameter twice.
    """
    reshard(model)  # gathered parameters are copies
    optimizer = unwrap_optimizer(optimizer)
    current = dict(model.named_parameters(remove_duplicate=False))
    by_name = {clean_name(name): parameter for name, parameter in current.items()}
    if _is_bound(optimizer, names, by_name):
        return
    if optimizer.state or (names is None and not _has_names(optimizer)):
        refuse_copies(model, optimizer)
    _check_unused(optimizer)
    names_by_group = names if names is not None else _known_names(optimizer, model)
    shape = [len(group["params"]) for group in optimizer.param_groups]
    if [len(group) for group in names_by_group] != shape:
        raise UsageError(
            f"names of {[len(group) for group in names_by_group]} parameters for an optimizer with groups of {shape}",
            hint="give what parameter_names returned for this optimizer",
        )
    problems = list(_mismatches(optimizer, names_by_group, by_name))
    UsageError.raise_for(
        problems,
        f"{count(len(problems), 'parameter')} of the optimizer cannot be found in the model",
        hint="make the optimizer again from the wrapped model's parameters",
    )
    for group, group_names in zip(optimizer.param_groups, names_by_group, strict=True):
        group["params"] = [by_name[clean_name(name)] for name in group_names]


def _has_names(optimizer: torch.optim.Optimizer) -> bool:
    """True if torch has recorded the names of all parameters."""
    return all("param_names" in group for group in optimizer.param_groups)


def _is_bound(
    optimizer: torch.optim.Optimizer, names: Names | None, by_name: Mapping[str, nn.Parameter]
) -> bool:
    """True if every parameter is the model's, occurs once, and is the one with the given name, if names are given."""
    stepped = [id(parameter) for parameter in optimizer_parameters(optimizer)]
    if len(set(stepped)) < len(stepped) or not {id(p) for p in by_name.values()}.issuperset(stepped):
        return False
    if names is None:
        return True
    named_ids = [[id(by_name.get(clean_name(name))) for name in group] for group in names]
    return named_ids == [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def _check_unused(optimizer: torch.optim.Optimizer) -> None:
    if optimizer.state:
        raise UsageError(
            f"the optimizer has state of {count(len(optimizer.state), 'parameter')}, which is not sharded",
            hint="wrap before the first step; to go on from a checkpoint, load its optimizer state after wrapping",
        )
    kept = [
        name
        for name, value in vars(optimizer).items()
        if isinstance(value, list | tuple) and any(isinstance(item, nn.Parameter) for item in value)
    ]
    if kept:
        raise UsageError(
            f"{type(optimizer).__name__} keeps parameters in {', '.join(sorted(kept))} too, which would stay the old "
            "ones",
            hint="make it again from the wrapped model's parameters",
        )


def _known_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> Names:
    """Return the names that torch recorded, or all names of the model if one group has all of its parameters."""
    if _has_names(optimizer):
        return [group["param_names"] for group in optimizer.param_groups]
    stepped, model_names = (
        optimizer_parameters(optimizer),
        [clean_name(name) for name, _ in model.named_parameters()],
    )
    present = {id(parameter) for parameter in model.parameters()}
    if (
        len(optimizer.param_groups) == 1
        and len(stepped) == len(model_names)
        and present.issuperset(map(id, stepped))  # otherwise they may be another model's
    ):
        return [model_names]
    copies = len(stepped) - len(set(map(id, stepped)))
    raise UsageError(
        "the names that the model has for the optimizer's parameters are not known"
        + (f", and {copies} of them are repeats" if copies else ""),
        hint="make the optimizer from model.named_parameters(), or names = parameter_names(model, optimizer) before "
        "wrapping (and before accelerator.prepare), and rebind_optimizer(model, optimizer, names) after it",
    )


def _mismatches(
    optimizer: torch.optim.Optimizer, names: Names, by_name: Mapping[str, nn.Parameter]
) -> Iterator[str]:
    places = Counter(map(id, optimizer_parameters(optimizer)))
    bound_names: dict[int, str] = {}
    clean_names = dict.fromkeys(clean_name(name) for group_names in names for name in group_names)
    # A tied parameter is known under one of its names.
    matched_ids = {id(by_name[name]) for name in clean_names if name in by_name}
    closest = suggestions(
        (name for name in clean_names if name not in by_name),
        [name for name, parameter in by_name.items() if id(parameter) not in matched_ids],
    )
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        for name, old in zip(group_names, group["params"], strict=True):
            new = by_name.get(clean_name(name))
            if new is None:
                near = closest.get(clean_name(name), "")
                yield f"{escape(name)}: the model has no parameter of that name{near}"
            # A parameter in several places was put there by accelerate, so its shape means nothing.
            elif new.shape != old.shape and places[id(old)] == 1:
                yield f"{escape(name)}: {tuple(old.shape)} in the optimizer, {tuple(new.shape)} in the model"
            elif id(new) in bound_names:
                yield f"{escape(name)}: the same parameter as {escape(bound_names[id(new)])}"
            else:
                bound_names[id(new)] = name
