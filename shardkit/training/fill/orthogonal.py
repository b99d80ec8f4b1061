"""What all ranks together hold of factors is orthonormal: measured where it lies, with a few sums over the mesh.

All products of U's columns would cost a third of the decomposition. So U'U is applied to a few random vectors of ones
and minus ones: if any entry of U'U - I is larger than what is allowed, then with probability 1 - 2^-16 the result is
that far from a vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardkit.core.regions import full_region
from shardkit.core.text import escape
from shardkit.errors import IntegrityError
from shardkit.osft.plan import LOW, Svd, Target
from shardkit.osft.svd import PROMISED
from shardkit.training.ranks.agree import agreed, device_for, wire
from shardkit.training.ranks.local import LocalShard, window

_NUM_VECTORS = 16
_NUM_TOGETHER = 8  # targets whose products are summed in one message
_PHASE = "proving that factors are orthogonal"


def prove_orthogonal(held: Mapping[str, LocalShard], targets: Sequence[Target], svd: Svd) -> None:
    """Refuse factors whose directions are not orthonormal, or whose singular values do not descend; every rank calls it.

    Args:
        held: this rank's part of each factor, by FQN; filled.
        targets: all of them.
        svd: how they were computed, which decides what is promised.

    Raises:
        IntegrityError: on all ranks; names all such targets.
        ResourceError: a rank died, or did not come within the process group's timeout.
    """
    measured = dict[str, float]()
    for at in range(0, len(targets), _NUM_TOGETHER):
        measured |= _measure(held, targets[at : at + _NUM_TOGETHER])
    with agreed(_PHASE):
        IntegrityError.raise_for(
            [
                f"{escape(path)}: {distance:.1e}"
                for path, distance in measured.items()
                if not distance <= _allowed(held, path, svd)  # nan too
            ]
            + [f"{escape(target.path)}: singular values" for target in targets if not _descend(held, target)],
            "what the ranks hold of factors is not orthonormal",
            hint="a slice was lost on its way between ranks: look at the network, and start again",
        )


def _allowed(held: Mapping[str, LocalShard], path: str, svd: Svd) -> float:
    """Return how far directions may be from orthonormal ones: trainers of others keep factors in half precision."""
    return max(PROMISED[svd], 4 * torch.finfo(held[f"{path}.{LOW[0]}"].dtype).eps)


def _measure(held: Mapping[str, LocalShard], targets: Sequence[Target]) -> dict[str, float]:
    """Return how far the directions of each target are from orthonormal ones, by path; every rank calls it."""
    sides = [side for target in targets for side in _sides(held, target)]
    made = _sums((shard, _product(shard, vectors, is_v)) for side, is_v in sides for shard, vectors in side)
    pairs = [made[at] + made[at + 1] for at in range(0, len(made), 2)]
    again = _sums(
        (shard, _product(shard, whole, not is_v))
        for (side, is_v), whole in zip(sides, pairs, strict=True)
        for shard, _ in side
    )
    wanted = [vectors for side, _ in sides for _, vectors in side]
    apart = [(found - vectors).abs().max() for found, vectors in zip(again, wanted, strict=True)]
    # `max` of tensors keeps what is no number.
    return {
        target.path: float(torch.stack(apart[4 * at : 4 * at + 4]).max()) for at, target in enumerate(targets)
    }


def _sides(
    held: Mapping[str, LocalShard], target: Target
) -> Iterator[tuple[list[tuple[LocalShard, torch.Tensor]], bool]]:
    """Yield U, then V: the frozen and the trained part of each with random vectors for it, and whether it is V."""
    generator = torch.Generator().manual_seed(target.num_directions)
    shape = (target.num_directions, _NUM_VECTORS)
    vectors = torch.randint(0, 2, shape, generator=generator).double() * 2 - 1
    parts = (vectors[: target.rank], vectors[target.rank :])
    for letter in "UV":
        names = (f"osft_{letter}_high", f"osft_params.{letter}_low")
        shards = [held[f"{target.path}.{name}"] for name in names]
        yield list(zip(shards, parts, strict=True)), letter == "V"


def _product(shard: LocalShard, vectors: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """Return this rank's share of the product of a matrix, or its transpose, and vectors, in float64 on the CPU."""
    rows, columns = shard.shape
    found = torch.zeros((columns if is_transposed else rows, vectors.shape[1]), dtype=torch.float64)
    for part in shard.parts:
        cut = shard.cut(part, full_region(shard.shape))
        if cut is None:
            continue
        region, memory = cut
        of_rows, of_columns = window(region)
        matrix = memory.double()
        if is_transposed:
            found[of_columns] += (matrix.T @ vectors[of_rows].to(matrix.device)).cpu()
        else:
            found[of_rows] += (matrix @ vectors[of_columns].to(matrix.device)).cpu()
    return found


def _sums(shares: Iterable[tuple[LocalShard, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the sums of shares over the mesh axes that cut their matrix; every rank calls it."""
    listed = list(shares)
    groups = dict[tuple[DeviceMesh | None, tuple[int, ...]], list[int]]()
    for at, (shard, _) in enumerate(listed):
        mesh = shard.replicas.mesh
        axes = () if mesh is None else tuple(x for x in range(mesh.ndim) if x not in shard.replicas.axes)
        groups.setdefault((mesh, axes), []).append(at)
    found = [share for _, share in listed]
    for (mesh, axes), places in groups.items():
        flat = torch.cat([found[at].flatten() for at in places])
        for axis in axes:
            assert mesh is not None
            flat = _sum_over(mesh.get_group(axis), flat)
        start = 0
        for at in places:
            stop = start + found[at].numel()
            found[at] = flat[start:stop].view_as(found[at])
            start = stop
    return found


def _sum_over(group: dist.ProcessGroup, share: torch.Tensor) -> torch.Tensor:
    whole = share.to(device_for(group))
    with wire(_PHASE):
        dist.all_reduce(whole, group=group)
    return whole.cpu()


def _descend(held: Mapping[str, LocalShard], target: Target) -> bool:
    """True if what this rank has of the singular values are numbers from 0 that do not grow."""
    for name in ("osft_S_high", "osft_params.S_low"):
        values = held[f"{target.path}.{name}"].tensor
        if not bool((values >= 0).all() & (values.diff() <= 0).all() & values.isfinite().all()):
            return False
    return True
