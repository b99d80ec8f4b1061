"""Detect that an optimizer's moments are only one rank's part, saved as if it were all.

Some fused optimizers keep moments as plain tensors on each rank. torch's DCP considers them replicas and writes those
of one rank. The moments of the other ranks are lost, and no checksum reveals it.

Other optimizers keep moments in shapes of their own. So the moments are reported only if no other explanation is left:
nearly all of them have their parameter's shape, except that dim 0 has the rows of one of k ranks, with the same k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardkit.core.regions import Shape
from shardkit.core.text import listed
from shardkit.keys.names import natural

# torch 2.13, torch/optim: moments of Adam, Adamax, NAdam, RAdam, SGD, RMSprop and Adadelta in the parameter's shape.
_MOMENTS = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
    }
)
_BESIDE = frozenset({"step", "mu_product", "master_param"})
_PLAIN = frozenset({"float64", "float32", "float16", "bfloat16"})  # others are codes of quantised states
_MAX_ROOT = 8  # segments before a parameter's name
_NEARLY_ALL = 0.9
_MAX_CANDIDATES = 8


class NamedShape(NamedTuple):
    """A tensor without its data."""

    name: str
    dtype: str
    shape: Shape


def parts_of_ranks(tensors: Iterable[NamedShape], objects: Iterable[str] = ()) -> str | None:
    """Return a warning if the moments of an optimizer are only one rank's part of them, else None.

    Args:
        tensors: all tensors of a checkpoint, of the model and the optimizer.
        objects: names of its entries that are not tensors.
    """
    tensors = list(tensors)
    shapes = {tensor.name: tensor.shape for tensor in tensors if tensor.dtype in _PLAIN}
    moments = {name: fqn for name in shapes if (fqn := _parameter_of(name)) is not None}
    owners = {name.rpartition(".")[0] for name in moments}
    leaves = (name.rpartition(".") for name in (*(tensor.name for tensor in tensors), *objects))
    if not moments or any(leaf not in _MOMENTS | _BESIDE for owner, _, leaf in leaves if owner in owners):
        return None  # an unknown kind of optimizer
    pairs = _shape_pairs(moments, shapes)
    cuts = {k: [name for name, pair in pairs.items() if _is_part(*pair, k)] for k in _candidates(pairs)}
    num_ranks = max(cuts, key=lambda k: len(cuts[k]), default=0)
    cut = cuts.get(num_ranks, [])
    is_flat = all(len(pairs[name][0]) == 1 for name in cut)  # flattened parameters, perhaps padded
    if is_flat or len(cut) < _NEARLY_ALL * len(pairs):
        return None
    lacking = sorted((name for name in cut if pairs[name][0] != pairs[name][1]), key=natural)
    return (
        f"{len(lacking)} of {len(pairs)} moments of the optimizer have 1/{num_ranks} of their parameter's rows: they are the "
        f"part of one of {num_ranks} ranks, saved as if it were all, and the rest is not in the checkpoint: "
        f"{listed(lacking)}"
    )


def _parameter_of(name: str) -> str | None:
    """Return the name of a moment's parameter below the model's root: "a.weight" for "optim.state.a.weight.exp_avg".

    None if the name is not of a moment.
    """
    *segments, leaf = name.split(".")
    if leaf not in _MOMENTS or "state" not in segments[:_MAX_ROOT]:
        return None
    return ".".join(segments[segments.index("state") + 1 :]) or None


def _shape_pairs(moments: Mapping[str, str], shapes: Mapping[str, Shape]) -> dict[str, tuple[Shape, Shape]]:
    """Return moment -> (its shape, its parameter's shape) for moments whose parameter is present and has a dim."""
    parameters, roots = frozenset(moments.values()), Counter[str]()
    for name in shapes:
        segments = name.split(".")
        for depth in range(min(len(segments), _MAX_ROOT)):
            if ".".join(segments[depth:]) in parameters:
                roots[".".join((*segments[:depth], ""))] += 1
    (root, _), *_more = roots.most_common(1) or [("", 0)]
    whole = {name: shapes.get(root + fqn, ()) for name, fqn in moments.items()}
    return {name: (shapes[name], whole[name]) for name in moments if whole[name] and shapes[name]}


def _candidates(pairs: Mapping[str, tuple[Shape, Shape]]) -> list[int]:
    """Return numbers of ranks that would explain the shapes, the likeliest first.

    The largest is always among them, since the last rank may have fewer rows than the others, or none.
    """
    counts = Counter[int]()
    for shape, whole in pairs.values():
        if 0 < shape[0] < whole[0]:
            counts.update({whole[0] // shape[0], -(-whole[0] // shape[0])})
    largest = [max(counts)] if counts else []
    return [k for k, _ in counts.most_common(_MAX_CANDIDATES)] + largest


def _is_part(shape: Shape, whole: Shape, num_ranks: int) -> bool:
    """True if a moment has the shape of one rank's part of a parameter that is cut on dim 0 like `torch.chunk`."""
    largest = -(-whole[0] // num_ranks) or 1
    return shape[1:] == whole[1:] and shape[0] in (largest, whole[0] % largest, 0)
