"""Proof that sharded factors are orthonormal, with a few sums over the mesh and no gathering.

All products of U's columns would cost a third of the decomposition. Instead, U'U is applied to a few random vectors of
ones and minus ones: if an entry of U'U - I exceeds the limit, a result differs from its vector by that much with
probability 1 - 2^-16.
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
    """Raise an error unless the factors' directions are orthonormal and singular values descend; every rank calls it.

    Args:
        factors: this rank's part of each factor, by FQN; filled.
        targets: all targets.
        svd: the precision, which determines the limit.

    Raises:
        IntegrityError: on all ranks; lists the targets.
        ResourceError: a rank died, or did not come within the process group's timeout.
    """
    measured = {target.path: _measure(factors, target) for target in targets}
    with agreed(_PHASE):
        IntegrityError.raise_for(
            [
                f"{escape(path)}: {distance:.1e}"
                for path, distance in measured.items()
                if not distance <= _allowed_deviation(factors, path, svd)  # nan too
            ]
            + [f"{escape(each.path)}: singular values" for each in targets if not _descend(factors, each)],
            "the factors on the ranks are not orthonormal",
            hint="a slice was lost between ranks: check the network, and start again",
        )


def _allowed_deviation(factors: Mapping[str, LocalShard], path: str, svd: Svd) -> float:
    """Return the allowed deviation from orthonormality: other trainers store factors in half precision."""
    return max(PROMISED[svd], 4 * torch.finfo(factors[f"{path}.{LOW[0]}"].dtype).eps)


def _measure(factors: Mapping[str, LocalShard], target: Target) -> float:
    """Return the deviation of a target's directions from orthonormality; every rank calls it."""
    apart = list[torch.Tensor]()
    for side, is_v in _sides(factors, target):
        whole = sum(_sum_shares(shard, _product(shard, vectors, is_v)) for shard, vectors in side)
        assert isinstance(whole, torch.Tensor)
        for shard, vectors in side:
            again = _sum_shares(shard, _product(shard, whole, not is_v))
            apart.append((again - vectors).abs().max())
    return float(torch.stack(apart).max())  # unlike `max` of floats, this propagates NaN


def _sides(
    factors: Mapping[str, LocalShard], target: Target
) -> Iterator[tuple[list[tuple[LocalShard, torch.Tensor]], bool]]:
    """Yield for U, then V: its frozen and trained part, each with random vectors, and whether it is V."""
    vectors = random_vectors(target.num_directions)
    parts = (vectors[: target.rank], vectors[target.rank :])
    for letter in "UV":
        names = (f"osft_{letter}_high", f"osft_params.{letter}_low")
        shards = [factors[f"{target.path}.{name}"] for name in names]
        yield list(zip(shards, parts, strict=True)), letter == "V"


def _product(shard: LocalShard, vectors: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """Return this rank's share of a matrix (or its transpose) times vectors, in float64 on the CPU."""
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


def _sum_shares(shard: LocalShard, share: torch.Tensor) -> torch.Tensor:
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
    """True if this rank's singular values are finite, not negative, and in descending order."""
    for name in ("osft_S_high", "osft_params.S_low"):
        values = factors[f"{target.path}.{name}"].tensor
        if not bool((values >= 0).all() & (values.diff() <= 0).all() & values.isfinite().all()):
            return False
    return True
