"""Which parameters the flat parameters of FSDP1 are made of, where only their sizes are known.

FSDP1 without `use_orig_params` lays the parameters of a wrapped module end to end, in the model's order, but for those of
modules that are wrapped inside it; the ranks hold equal parts, the last ones with padding. `model.parameters()` gives the root's
first, then those of the modules inside, in order. So the sizes say which modules were wrapped, unless several choices have them.

Source: torch 2.13, torch/distributed/fsdp/_flat_param.py (`_init_flat_param_and_metadata`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from shardkit.formats.rankfiles.numbered import Parameter


class _Run(NamedTuple):
    """Parameters of one module: `start .. stop` of the model's."""

    start: int
    stop: int


def split_units(
    sizes: Sequence[int], num_ranks: int, parameters: Sequence[Parameter]
) -> list[list[Parameter]] | None:
    """Return the parameters of each flat parameter; None where none or several choices fit.

    Args:
        sizes: of the flat parameters with their padding, in elements and in the optimizer's order.
        num_ranks: that each is cut for.
        parameters: the model's, in its order.
    """
    choices = [_with_root(sizes, num_ranks, parameters), _without_root(sizes, num_ranks, parameters)]
    found = [choice for choice in choices if choice is not None]
    return found[0] if found and found.count(found[0]) == len(found) else None


def _with_root(
    sizes: Sequence[int], num_ranks: int, parameters: Sequence[Parameter]
) -> list[list[Parameter]] | None:
    runs = _only_runs(sizes[1:], num_ranks, parameters)
    if runs is None or not sizes:
        return None
    inside = {place for run in runs for place in range(run.start, run.stop)}
    root = [parameter for place, parameter in enumerate(parameters) if place not in inside]
    if not _fits(sum(prod(parameter.shape) for parameter in root), sizes[0], num_ranks) or not root:
        return None
    return [root, *(list(parameters[run.start : run.stop]) for run in runs)]


def _without_root(
    sizes: Sequence[int], num_ranks: int, parameters: Sequence[Parameter]
) -> list[list[Parameter]] | None:
    """Where every parameter is in a module that was wrapped, the root has none."""
    runs = _only_runs(sizes, num_ranks, parameters)
    if runs is None or sum(run.stop - run.start for run in runs) != len(parameters):
        return None
    return [list(parameters[run.start : run.stop]) for run in runs]


def _fits(num_elements: int, size: int, num_ranks: int) -> bool:
    return size == -(-num_elements // num_ranks) * num_ranks


def _only_runs(sizes: Sequence[int], num_ranks: int, parameters: Sequence[Parameter]) -> list[_Run] | None:
    """Return one module after the other with such sizes; None where there are none or several choices."""
    candidates = _modules(parameters)
    bounds = [0, *accumulate(prod(parameter.shape) for parameter in parameters)]
    fitting = {
        size: [run for run in candidates if _fits(bounds[run.stop] - bounds[run.start], size, num_ranks)]
        for size in set(sizes)
    }
    first, at = list[_Run](), 0
    for size in sizes:
        run = min((run for run in fitting[size] if run.start >= at), key=lambda run: run.stop, default=None)
        if run is None:
            return None
        first.append(run)
        at = run.stop
    last, at = list[_Run](), len(parameters)
    for size in reversed(sizes):
        run = max((run for run in fitting[size] if run.stop <= at), key=lambda run: run.start, default=None)
        if run is None:
            return None
        last.append(run)
        at = run.start
    if first != last[::-1]:
        return None
    # Any other choice would have to hold more than these: a module around one of them, of almost its size.
    nested = any(
        other != run and other.start <= run.start and run.stop <= other.stop
        for size, run in zip(sizes, first, strict=True)
        for other in fitting[size]
    )
    return None if nested else first


def _modules(parameters: Sequence[Parameter]) -> list[_Run]:
    """Return the runs that are all parameters of some module, each once."""
    bounds: dict[str, _Run] = {}
    for place, parameter in enumerate(parameters):
        steps = parameter.name.split(".")
        for depth in range(1, len(steps)):
            path = ".".join(steps[:depth])
            bounds[path] = _Run(bounds[path].start if path in bounds else place, place + 1)
    return sorted(set(bounds.values()))
