"""What all ranks together hold of factors is orthonormal: measured where it lies, with a few sums over the mesh.

All products of U's columns would cost a third of the decomposition. So U'U is applied to a few random vectors of ones
and minus ones: if any entry of U'U - I is larger than what is allowed, then with probability 1 - 2^-16 the result is
that far from a vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardkit.core.factored import LOW, Svd, Target
from shardkit.core.regions import full_region, window
from shardkit.core.text import escape
from shardkit.errors import IntegrityError
from shardkit.osft.svd import PROMISED, random_vectors
from shardkit.training.ranks.agree import agreed, device_for, wire
from shardkit.training.ranks.local import LocalShard, cut_axes

_PHASE = "proving that factors are orthogonal"


def prove_orthogonal(factors: Mapping[str, LocalShard], targets: Sequence[Target], svd: Svd) -> None:
    """Refuse factors whose directions are not orthonormal, or whose singular values do not descend; every rank calls it.

    Args:
        factors: this rank's part of each factor, by FQN; filled.
        targets: all of them.
        svd: how they were computed, which decides what is promised.

    Raises:
        IntegrityError: on all ranks; names all such targets.
        ResourceError: a rank died, or did not come within the process group's timeout.
    """
    measured = {target.path: _measure(factors, target) for target in targets}
    with agreed(_PHASE):
        IntegrityError.raise_for(
            [
                f"{escape(path)}: {distance:.1e}"
                for path, distance in measured.items()
                if not distance <= _allowed(factors, path, svd)  # nan too
            ]
            + [
                f"{escape(target.path)}: singular values"
                for target in targets
                if not _descend(factors, target)
            ],
            "what the ranks hold of factors is not orthonormal",
            hint="a slice was lost on its way between ranks: look at the network, and start again",
        )


def _allowed(factors: Mapping[str, LocalShard], path: str, svd: Svd) -> float:
    """Return how far directions may be from orthonormal ones: trainers of others keep factors in half precision."""
    return max(PROMISED[svd], 4 * torch.finfo(factors[f"{path}.{LOW[0]}"].dtype).eps)


def _measure(factors: Mapping[str, LocalShard], target: Target) -> float:
    """Return how far the directions of a target are from orthonormal ones; every rank calls it."""
    apart = list[torch.Tensor]()
    for side, is_v in _sides(factors, target):
        whole = sum(_summed(shard, _product(shard, vectors, is_v)) for shard, vectors in side)
        assert isinstance(whole, torch.Tensor)
        for shard, vectors in side:
            again = _summed(shard, _product(shard, whole, not is_v))
            apart.append((again - vectors).abs().max())
    return float(torch.stack(apart).max())  # `max` of tensors keeps what is no number


def _sides(
    factors: Mapping[str, LocalShard], target: Target
) -> Iterator[tuple[list[tuple[LocalShard, torch.Tensor]], bool]]:
    """Yield U, then V: the frozen and the trained part of each with random vectors for it, and whether it is V."""
    vectors = random_vectors(target.num_directions)
    parts = (vectors[: target.rank], vectors[target.rank :])
    for letter in "UV":
        names = (f"osft_{letter}_high", f"osft_params.{letter}_low")
        shards = [factors[f"{target.path}.{name}"] for name in names]
        yield list(zip(shards, parts, strict=True)), letter == "V"


def _product(shard: LocalShard, vectors: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """Return this rank's share of the product of a matrix, or its transpose, and vectors, in float64 on the CPU."""
    rows, columns = shard.shape
    product = torch.zeros((columns if is_transposed else rows, vectors.shape[1]), dtype=torch.float64)
    for part in shard.parts:
        cut = shard.cut(part, full_region(shard.shape))
        if cut is None:
            continue
        region, memory = cut
        of_rows, of_columns = window(region)
        matrix = memory.double()
        if is_transposed:
            product[of_columns] += (matrix.T @ vectors[of_rows].to(matrix.device)).cpu()
        else:
            product[of_rows] += (matrix @ vectors[of_columns].to(matrix.device)).cpu()
    return product


def _summed(shard: LocalShard, share: torch.Tensor) -> torch.Tensor:
    """Return the sum of shares over the mesh axes that cut a matrix; every rank calls it."""
    matrix = shard.whole
    groups = map(matrix.device_mesh.get_group, cut_axes(matrix)) if isinstance(matrix, DTensor) else ()
    for group in groups:
        whole = share.to(device_for(group))
        with wire(_PHASE):
            dist.all_reduce(whole, group=group)
        share = whole.cpu()
    return share


def _descend(factors: Mapping[str, LocalShard], target: Target) -> bool:
    """True if what this rank has of the singular values are numbers from 0 that do not grow."""
    for name in ("osft_S_high", "osft_params.S_low"):
        values = factors[f"{target.path}.{name}"].tensor
        if not bool((values >= 0).all() & (values.diff() <= 0).all() & values.isfinite().all()):
            return False
    return True
