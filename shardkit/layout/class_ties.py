"""Parameters that a model's class ties, told by the live model: transformers' classes know, whatever became of the tie.

Ties break in silence: transformers 5.0 builds on meta without them, `init_empty_weights` and `.to("meta")` make two
parameters of one, and so do `fully_shard` and `parallelize_module` where each name is wrapped by itself. Filled with
the same values, the two train apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.keys.names import clean_name
from shardkit.layout.dtypes import is_transformers

_ADAPTED = re.compile(r"\.base_layer(?=\.)")


class BrokenTie(NamedTuple):
    """Two parameters of a model that its class has as one."""

    kept: str
    """FQN of the one that the class ties the other to."""
    other: str
    """FQN of the other."""


class _Place(NamedTuple):
    """Where a parameter is."""

    fqn: str
    module: nn.Module
    name: str
    """In the module."""
    parameter: nn.Parameter


def broken_ties(model: nn.Module) -> list[BrokenTie]:
    """Return what a model's classes and configs tie and the model has as several parameters of one shape.

    Args:
        model: wrapped or not. What is no model of transformers, and holds none, ties nothing that could be known.

    Source: transformers 5.23, PreTrainedModel.tie_weights and get_expanded_tied_weights_keys.
    """
    return [BrokenTie(kept.fqn, other.fqn) for kept, other in _broken(model)]


def tie(model: nn.Module) -> list[BrokenTie]:
    """Tie what a model's classes tie, where both parameters are on meta and nothing holds them yet; return what was done.

    Args:
        model: not wrapped.
    """
    done = []
    for kept, other in _broken(model):
        if _is_free(kept.parameter) and _is_free(other.parameter) and _are_alike(kept, other):
            setattr(other.module, other.name, getattr(kept.module, kept.name))
            done.append(BrokenTie(kept.fqn, other.fqn))
    return done


def _is_free(parameter: nn.Parameter) -> bool:
    return parameter.is_meta and not isinstance(parameter, DTensor)


def _are_alike(kept: _Place, other: _Place) -> bool:
    one, two = kept.parameter, other.parameter
    return one.dtype == two.dtype and one.requires_grad == two.requires_grad


def _broken(model: nn.Module) -> Iterator[tuple[_Place, _Place]]:
    declared = dict(_declared(model))
    if not declared:
        return
    places: dict[str, _Place] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            place = _Place(clean_name(f"{path}.{name}" if path else name), module, name, parameter)
            places.setdefault(_ADAPTED.sub("", place.fqn), place)
    for other, kept in declared.items():
        if other in places and kept in places:
            one, two = places[kept], places[other]
            if one.parameter is not two.parameter and one.parameter.shape == two.parameter.shape:
                yield one, two


def _declared(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (name, the name that it is tied to), as the outermost models of transformers say it, now and when they were built.

    Now: a config may have been changed. When they were built: what `from_pretrained` found to differ in a file is
    tied no more.
    """
    outermost: list[str] = []
    for path, module in model.named_modules():
        expand = getattr(module, "get_expanded_tied_weights_keys", None)
        if (
            not is_transformers(module)
            or expand is None
            or any(f"{path}.".startswith(outer) for outer in outermost)
        ):
            continue
        outermost.append(f"{path}." if path else "")
        before = _ADAPTED.sub("", f".{clean_name(path)}.").lstrip(".")
        built = getattr(module, "all_tied_weights_keys", None)
        try:
            now = expand(all_submodels=True)
        except (
            ValueError
        ):  # patterns that find nothing, because wrappers have changed names or modules are gone
            now = built
        if isinstance(built, dict) and isinstance(now, dict):
            named = ((clean_name(other), clean_name(kept)) for other, kept in now.items())
            yield from ((before + other, before + kept) for other, kept in named if other in built)
