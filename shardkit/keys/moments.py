"""Moments of an optimizer beside their parameters: whether one rank's part was saved as if it were all.

Moments that are plain tensors on each rank, as some fused optimizers keep them, are replicas to torch's DCP. It writes
those of one rank. What the others had is nowhere, and every checksum is right.

Other optimizers keep moments in shapes of their own. So only shapes count that nothing else explains: of nearly all
moments, every dim is the parameter's but the first, and that has what one of k ranks holds, with the same k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardkit.core.regions import Shape
from shardkit.core.text import listed
from shardkit.keys.names import natural

# torch 2.13, torch/optim: what Adam, Adamax, NAdam, RAdam, SGD, RMSprop and Adadelta keep in the parameter's shape.
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
_PLAIN = frozenset({"float64", "float32", "float16", "bfloat16"})  # others are codes of a quantised state
_MAX_ROOT = 8  # segments before a parameter's name
_NEARLY_ALL = 0.9
_MAX_CANDIDATES = 8


class NamedShape(NamedTuple):
    """A tensor."""

    name: str
    dtype: str
    shape: Shape


def parts_of_ranks(tensors: Iterable[NamedShape], objects: Iterable[str] = ()) -> str | None:
    """Return a warning if the moments of an optimizer are one rank's part of them; None if they are not.

    Args:
        tensors: all of a checkpoint, model and optimizer.
        objects: names of its entries that are no tensors.
    """
    tensors = list(tensors)
    shapes = {tensor.name: tensor.shape for tensor in tensors if tensor.dtype in _PLAIN}
    moments = {name: fqn for name in shapes if (fqn := _parameter(name)) is not None}
    owners = {name.rpartition(".")[0] for name in moments}
    leaves = (name.rpartition(".") for name in (*(tensor.name for tensor in tensors), *objects))
    if not moments or any(leaf not in _MOMENTS | _BESIDE for owner, _, leaf in leaves if owner in owners):
        return None  # an optimizer of a kind that is not known here
    pairs = _paired(moments, shapes)
    cuts = {k: [name for name, pair in pairs.items() if _is_part(*pair, k)] for k in _candidates(pairs)}
    num_ranks = max(cuts, key=lambda k: len(cuts[k]), default=0)
    cut = cuts.get(num_ranks, [])
    is_flat = all(len(pairs[name][0]) == 1 for name in cut)  # parameters in one piece, perhaps padded
    if is_flat or len(cut) < _NEARLY_ALL * len(pairs):
        return None
    lacking = sorted((name for name in cut if pairs[name][0] != pairs[name][1]), key=natural)
    return (
        f"{len(lacking)} of {len(pairs)} moments of the optimizer have 1/{num_ranks} of their parameter's rows: they are the "
        f"part of one of {num_ranks} ranks, saved as if it were all, and the rest is not in the checkpoint: "
        f"{listed(lacking)}"
    )


def _parameter(name: str) -> str | None:
    """Return the name of the parameter that a moment belongs to, below whatever the model is saved under."""
    *segments, leaf = name.split(".")
    if leaf not in _MOMENTS or "state" not in segments[:_MAX_ROOT]:
        return None
    return ".".join(segments[segments.index("state") + 1 :]) or None


def _paired(moments: Mapping[str, str], shapes: Mapping[str, Shape]) -> dict[str, tuple[Shape, Shape]]:
    """Return (its shape, its parameter's) of each moment whose parameter is there and has a dim."""
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
    """Return the numbers of ranks that shapes hint at, the likeliest first: the last rank has fewer rows, or none."""
    counts = Counter[int]()
    for shape, whole in pairs.values():
        if 0 < shape[0] < whole[0]:
            counts.update({whole[0] // shape[0], -(-whole[0] // shape[0])})
    largest = [max(counts)] if counts else []
    return [k for k, _ in counts.most_common(_MAX_CANDIDATES)] + largest


def _is_part(shape: Shape, whole: Shape, num_ranks: int) -> bool:
    """True if a moment is what one of several ranks holds of a parameter, cut on its first dim like `torch.chunk`."""
    largest = -(-whole[0] // num_ranks) or 1
    return shape[1:] == whole[1:] and shape[0] in (largest, whole[0] % largest, 0)
