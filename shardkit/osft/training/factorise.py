"""Factors of dense weights, computed by all ranks: each weight by one rank, which sends slices to all others.

Targets are sorted by cost, largest first, and processed in rounds of one target for each rank. In a round a rank gets
its weight (read by itself or sent by its source rank), decomposes it in one thread, and sends to every rank the slices
that it holds. Costs within a round are similar, so ranks do not wait for long. A rank never has two weights, or the
factors of two, in memory.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from shardkit.core.catalog import TensorEntry
from shardkit.core.dtypes import BY_NAME, DType
from shardkit.core.factored import FACTORS, Svd, Target
from shardkit.core.regions import Region, full_region, window
from shardkit.core.text import count, escape
from shardkit.errors import LayoutError
from shardkit.osft.svd import Factors, check_factors, factorise, num_operations
from shardkit.osft.training.orthogonal import prove_orthogonal
from shardkit.training.fill.broadcast import SentTensor, WeightReader, send_parts
from shardkit.training.fill.reading import Filled, Supply, WantedPart, compare_together, torch_dtype
from shardkit.training.fill.strategy import FillPlan
from shardkit.training.ranks.agree import (
    agreed,
    broadcast_json,
    device_for,
    gather_json,
    log_once,
    wire,
    world,
)
from shardkit.training.ranks.local import LocalShard, flat_bytes

_PHASE = "computing factors"
_NUM_PEERS = 32  # ranks that a rank sends to concurrently

Round = tuple[Target | None, ...]
"""The target of each rank."""
HeldFactors = Mapping[str, LocalShard]
"""FQN of each factor -> this rank's part of it."""


def deal_targets(targets: Sequence[Target], num_ranks: int) -> list[Round]:
    """Assign targets to ranks, round by round, most expensive first.

    The total time exceeds an equal share of the operations by at most the time of the largest target.
    """
    order = sorted(targets, key=lambda target: -num_operations(target))  # stable: the model's order
    rounds = (order[first : first + num_ranks] for first in range(0, len(order), num_ranks))
    return [(*dealt, *[None] * (num_ranks - len(dealt))) for dealt in rounds]


def fill_factors(targets: Sequence[Target], svd: Svd, shards: Sequence[LocalShard], plan: FillPlan) -> Filled:
    """Compute the factors of targets from dense weights, and fill the shards; every rank calls it.

    Args:
        targets: all targets.
        svd: the precision.
        shards: of this rank, materialised.
        plan: who reads the weights.

    Returns:
        What this rank filled, by FQN.

    Raises:
        ShardkitError: on all ranks: a weight cannot be read or decomposed, factors do not fold back to their weight,
            or the factors on the ranks are not orthogonal.
        ResourceError: a rank died, or did not respond within the process group's timeout.
    """
    rank, num_ranks = world()
    rounds = deal_targets(targets, num_ranks)
    sources = range(num_ranks) if plan.sources is None else plan.sources
    with agreed(_PHASE):
        factor_shards = _factor_shards(shards, targets)
    exchange = _Exchange(factor_shards, targets)
    measured, read = list[tuple[str, float, float]](), Filled()
    with contextlib.ExitStack() as stack:
        with agreed(_PHASE):
            reader, entries = _reader(stack, plan, sources, rounds)
        dtypes = broadcast_json(_dtypes(plan.supply, targets), min(sources), phase=_PHASE)
        sent = {
            target.path: _sent_weight(target, entries.get(target.path), BY_NAME[dtypes[target.path]])
            for target in targets
        }
        for number, of_ranks in enumerate(rounds):
            _log_progress(number, rounds)
            target, factors = of_ranks[rank], None
            weight, error = _deliver(reader, sources, [sent[one.path] for one in of_ranks if one], read)
            with agreed(_PHASE):
                if error is not None:
                    raise error
                if target is not None and weight is not None:
                    factors = check_factors(factorise(weight, target, svd), target, svd)
                    measured.append((factors.algorithm, factors.error, factors.orthogonality))
                weight = None
            exchange.run(of_ranks, factors)
        with agreed(_PHASE):
            if reader is not None:
                reader.files.check_unchanged()
    filled = Filled(elements=exchange.elements, read_bytes=read.read_bytes)
    filled.checked = compare_together(None if reader is None else reader.files.check)
    prove_orthogonal(factor_shards, targets, svd)
    _log_accuracy(measured)
    return filled


def _factor_shards(shards: Sequence[LocalShard], targets: Sequence[Target]) -> HeldFactors:
    """Return this rank's part of each factor.

    Raises:
        LayoutError: a factor is missing, as on a stage of a pipeline.
    """
    by_name = {name: shard for shard in shards for name in shard.names}
    lacking = [target.path for target in targets if not by_name.keys() >= target.shapes.keys()]
    LayoutError.raise_for(
        [escape(path) for path in lacking],
        f"{count(len(lacking), 'OSFT target is', 'OSFT targets are')} not in the wrapped model",
        hint="OSFT does not support pipeline stages (pp): every rank needs a part of every target",
    )
    return {name: by_name[name] for target in targets for name in target.shapes}


def _dtypes(supply: Supply, targets: Sequence[Target]) -> dict[str, str]:
    """Return the stored dtype of each target's weight, for ranks that cannot open the source."""
    weights = supply.weights
    if weights is None:
        return {}
    return {target.path: weights.entry(weights.names[target.weight]).dtype.name for target in targets}


def _reader(
    stack: contextlib.ExitStack, plan: FillPlan, sources: Sequence[int], rounds: Sequence[Round]
) -> tuple[WeightReader | None, dict[str, TensorEntry]]:
    """Return a reader for the weights of the ranks that this one serves, or None, and the entries by module path."""
    rank, _ = world()
    if rank not in sources:
        return None, {}
    weights = plan.supply.weights
    assert weights is not None
    names = {
        target.path: weights.names[target.weight]
        for of_ranks in rounds
        for target, source in zip(of_ranks, sources, strict=True)
        if target is not None and source == rank
    }
    regions = {name: [full_region(weights.entry(name).shape)] for name in names.values()}
    located = weights.located(regions)
    reader = WeightReader(stack, located, list(dict.fromkeys(names.values())), check_source=plan.check_source)
    return reader, {path: located.catalog.tensors[name] for path, name in names.items()}


def _sent_weight(target: Target, entry: TensorEntry | None, dtype: DType) -> SentTensor:
    """Return shape and dtype of a weight as it is sent, that is, as stored. Only reading ranks have an entry."""
    if entry is None:
        shape = (target.rows, target.columns)
        entry = TensorEntry(fqn=target.weight, dtype=dtype, shape=shape, first_chunk=0, num_chunks=0)
    return SentTensor(entry, torch_dtype(dtype))


def _deliver(
    reader: WeightReader | None, sources: Sequence[int], sent: Sequence[SentTensor], filled: Filled
) -> tuple[torch.Tensor | None, BaseException | None]:
    """Return this rank's weight of a round, on the CPU in its stored dtype, or None, and the error of this rank.

    The weight is read here, or received from this rank's source.
    """
    rank, _ = world()
    if rank >= len(sent):
        return None, send_parts(reader, sources, sent, {}, filled)
    entry, dtype = sent[rank]
    weight = torch.empty(entry.shape, dtype=dtype)
    mine = WantedPart(LocalShard.plain((entry.fqn,), weight), entry, full_region(entry.shape), weight)
    error = send_parts(reader, sources, sent, {rank: [mine]}, filled)
    is_here = filled.elements.pop(entry.fqn, 0) == weight.numel()
    return weight if is_here and error is None else None, error


class _Exchange:
    """Exchanges slices of factors; every rank creates one and runs each round.

    Args:
        factor_shards: this rank's part of each factor.
        targets: all targets.
    """

    def __init__(self, factor_shards: HeldFactors, targets: Sequence[Target]) -> None:
        self.elements = Counter[str]()
        self._factor_shards = factor_shards
        first = next(iter(factor_shards.values())).tensor.device
        self._device = device_for(None, first) if world()[1] > 1 else first
        self._regions = _gather_regions(factor_shards, targets)

    def run(self, targets: Round, factors: Factors | None) -> None:
        """Send this rank's factors, and receive its slices of all others.

        Args:
            targets: of this round, by rank.
            factors: of this rank's target.
        """
        rank, num_ranks = world()
        target = targets[rank]
        cut = dict[tuple[str, Region], torch.Tensor]()
        if target is not None:
            assert factors is not None
            with torch.no_grad():
                for name, region, memory in self._parts(target):
                    memory.copy_(factors.tensors[name][window(region)])
        for first in range(1, num_ranks, _NUM_PEERS):
            moves, staged = list[dist.P2POp](), list[tuple[torch.Tensor, torch.Tensor]]()
            # Each rank sends to the rank `shift` above it, so that partners are in the same step.
            for shift in range(first, min(first + _NUM_PEERS, num_ranks)):
                above, below = (rank + shift) % num_ranks, (rank - shift) % num_ranks
                if target is not None and factors is not None:
                    for key in self._regions[above][target.path]:
                        if key not in cut:
                            part = factors.tensors[key[0]][window(key[1])]
                            cut[key] = part.to(self._device).contiguous()
                        moves.append(dist.P2POp(dist.isend, flat_bytes(cut[key]), above))
                for arriving, memory in self._memory(targets[below]):
                    moves.append(dist.P2POp(dist.irecv, flat_bytes(arriving), below))
                    staged.append((arriving, memory))
            self._move(moves, staged)

    def _move(self, moves: list[dist.P2POp], staged: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Run sends and receives, then copy staged slices to their destinations."""
        with wire(_PHASE):
            for work in dist.batch_isend_irecv(moves) if moves else ():
                work.wait()
        with torch.no_grad():
            for arrived, memory in staged:
                if arrived is not memory:
                    memory.copy_(arrived)

    def _parts(self, target: Target) -> Iterator[tuple[str, Region, torch.Tensor]]:
        """Yield this rank's parts of a target's factors: factor, region, memory."""
        for name in FACTORS:
            shard = self._factor_shards[f"{target.path}.{name}"]
            for part in shard.parts:
                cut = shard.cut(part, full_region(shard.shape))
                if cut is not None:
                    self.elements[shard.fqn] += cut[0].num_elements
                    yield name, *cut

    def _memory(self, target: Target | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield receive buffer and destination of each slice; both are the same if it can be received in place."""
        for _, region, memory in self._parts(target) if target is not None else ():
            is_straight = (
                memory.is_contiguous() and memory.dtype is torch.float32 and memory.device == self._device
            )
            yield (memory if is_straight else torch.empty(region.sizes, device=self._device)), memory


Slices = Mapping[str, Sequence[tuple[str, Region]]]
"""Path of each target -> (factor, region) pairs that a rank stores, in the order in which they are sent."""


def _gather_regions(factor_shards: HeldFactors, targets: Sequence[Target]) -> list[Slices]:
    """Gather the slices of all ranks; targets with equal regions are transferred once."""
    kinds, numbers = dict[str, int](), list[int]()
    listed = list[object]()
    for target in targets:
        mine = [
            [index, part.region.offsets, part.region.sizes]
            for index, name in enumerate(FACTORS)
            for part in factor_shards[f"{target.path}.{name}"].parts
            if part.region.num_elements
        ]
        if str(mine) not in kinds:
            listed.append(mine)
        numbers.append(kinds.setdefault(str(mine), len(kinds)))
    slices_of_ranks = list[Slices]()
    for kinds_of_rank, numbers_of_rank in gather_json([listed, numbers], phase=_PHASE):
        slices = [
            [(FACTORS[index], Region(tuple(offsets), tuple(sizes))) for index, offsets, sizes in kind]
            for kind in kinds_of_rank
        ]
        slices_of_ranks.append(
            {target.path: slices[number] for target, number in zip(targets, numbers_of_rank, strict=True)}
        )
    return slices_of_ranks


def _log_progress(number: int, rounds: Sequence[Round]) -> None:
    """Log each tenth of the weights: all of them may take hours."""
    if number * 10 // len(rounds) > (number - 1) * 10 // len(rounds) >= 0:
        log_once(f"weights: {number} of {len(rounds)} rounds of decompositions are done")


def _log_accuracy(measured: Sequence[tuple[str, float, float]]) -> None:
    """Log the accuracy of all factors, once for all ranks."""
    every = [numbers for rank_numbers in gather_json(measured, phase=_PHASE) for numbers in rank_numbers]
    if not every:
        return
    names, errors, distances = zip(*every, strict=True)
    algorithms = ", ".join(f"{number} by {name}" for name, number in Counter(names).items())
    log_once(
        f"weights: {count(len(every), 'weight')} decomposed ({algorithms}): they fold back to {max(errors):.1e}, and are "
        f"orthogonal to {max(distances):.1e}"
    )
