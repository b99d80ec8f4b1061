"""Factors of dense weights, computed by all ranks: each weight once in the world, its slices sent where they belong.

The targets go by cost, largest first, in rounds of one for each rank. In a round a rank has its weight, read by itself
or sent by its source rank, decomposes it in one thread, and sends every rank the slices that this holds. Costs within
a round are alike, so that nobody waits for long. No rank has two weights, or the factors of two.
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
from shardkit.training.fill.broadcast import Sent, WeightReader, send_parts
from shardkit.training.fill.reading import Filled, Supply, Wanted, compare_together, torch_dtype
from shardkit.training.ranks.agree import agreed, broadcast_json, device_for, gather_json, say, wire, world
from shardkit.training.ranks.local import LocalShard, flat_bytes

_PHASE = "computing factors"
_NUM_PEERS = 32  # whom a rank sends to at once

Round = tuple[Target | None, ...]
"""The target of each rank."""
HeldFactors = Mapping[str, LocalShard]
"""This rank's part of each factor, by FQN."""


def deal(targets: Sequence[Target], num_ranks: int) -> list[Round]:
    """Return which rank decomposes what, round by round: the most costly first.

    All of it takes at most the largest target's time more than an equal share of the operations.
    """
    order = sorted(targets, key=lambda target: -num_operations(target))  # stable: the model's order
    rounds = (order[first : first + num_ranks] for first in range(0, len(order), num_ranks))
    return [(*dealt, *[None] * (num_ranks - len(dealt))) for dealt in rounds]


def fill_factors(
    targets: Sequence[Target],
    svd: Svd,
    shards: Sequence[LocalShard],
    supply: Supply,
    sources: Sequence[int] | None,
    check_source: bool,
) -> Filled:
    """Fill the factors of targets, computed of a supply's dense weights; every rank calls it.

    Args:
        targets: all of them.
        svd: how they are computed.
        shards: of this rank, materialised.
        supply: a rank that cannot open the source has no weights.
        sources: the source rank of every rank; None if each reads for itself.
        check_source: compare what is read with the checksums in the source.

    Returns:
        What this rank filled, by FQN.

    Raises:
        ShardkitError: on all ranks: a weight cannot be read or decomposed, factors miss their weight, or what the
            ranks hold is not orthogonal.
        ResourceError: a rank died, or did not come within the process group's timeout.
    """
    rank, num_ranks = world()
    rounds = deal(targets, num_ranks)
    sources = range(num_ranks) if sources is None else sources
    with agreed(_PHASE):
        factor_shards = _held(shards, targets)
    exchange = _Exchange(factor_shards, targets)
    measured, read = list[tuple[str, float, float]](), Filled()
    with contextlib.ExitStack() as stack:
        with agreed(_PHASE):
            reader, entries = _reader(stack, supply, sources, rounds, check_source=check_source)
        dtypes = broadcast_json(_dtypes(supply, targets), min(sources), phase=_PHASE)
        sent = {
            target.path: _sent(target, entries.get(target.path), BY_NAME[dtypes[target.path]])
            for target in targets
        }
        for number, of_ranks in enumerate(rounds):
            _say_progress(number, rounds)
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
                reader.check_unchanged()
    filled = Filled(elements=exchange.elements, read_bytes=read.read_bytes)
    filled.checked = compare_together(None if reader is None else reader.check)
    prove_orthogonal(factor_shards, targets, svd)
    _say_how_good(measured)
    return filled


def _held(shards: Sequence[LocalShard], targets: Sequence[Target]) -> HeldFactors:
    """Return this rank's part of each factor.

    Raises:
        LayoutError: it lacks some, as a stage of a pipeline would.
    """
    by_name = {name: shard for shard in shards for name in shard.names}
    lacking = [target.path for target in targets if not by_name.keys() >= target.shapes.keys()]
    LayoutError.raise_for(
        [escape(path) for path in lacking],
        f"{count(len(lacking), 'OSFT target is', 'OSFT targets are')} not in the wrapped model",
        hint="every rank holds a part of every target: OSFT has no stages of a pipeline (pp)",
    )
    return {name: by_name[name] for target in targets for name in target.shapes}


def _dtypes(supply: Supply, targets: Sequence[Target]) -> dict[str, str]:
    """Return the stored dtype of each target's weight, for ranks that cannot open the source."""
    weights = supply.weights
    if weights is None:
        return {}
    return {target.path: weights.entry(weights.names[target.weight]).dtype.name for target in targets}


def _reader(
    stack: contextlib.ExitStack,
    supply: Supply,
    sources: Sequence[int],
    rounds: Sequence[Round],
    *,
    check_source: bool,
) -> tuple[WeightReader | None, dict[str, TensorEntry]]:
    """Return the reader of the weights for the ranks that this one serves, and these by path; None if it serves none."""
    rank, _ = world()
    if rank not in sources:
        return None, {}
    weights = supply.weights
    assert weights is not None
    names = {
        target.path: weights.names[target.weight]
        for of_ranks in rounds
        for target, source in zip(of_ranks, sources, strict=True)
        if target is not None and source == rank
    }
    regions = {name: [full_region(weights.entry(name).shape)] for name in names.values()}
    located = weights.located(regions)
    reader = WeightReader(stack, located, list(dict.fromkeys(names.values())), check_source=check_source)
    return reader, {path: located.catalog.tensors[name] for path, name in names.items()}


def _sent(target: Target, entry: TensorEntry | None, dtype: DType) -> Sent:
    """Return how a weight is sent: as it is stored. The entry is that of a rank which reads it."""
    if entry is None:
        shape = (target.rows, target.columns)
        entry = TensorEntry(fqn=target.weight, dtype=dtype, shape=shape, first_chunk=0, num_chunks=0)
    return Sent(entry, torch_dtype(dtype))


def _deliver(
    reader: WeightReader | None, sources: Sequence[int], sent: Sequence[Sent], filled: Filled
) -> tuple[torch.Tensor | None, BaseException | None]:
    """Return this rank's weight of a round, on the CPU in its stored dtype, or None, and what went wrong here.

    It is read here, or sent by this rank's source.
    """
    rank, _ = world()
    if rank >= len(sent):
        return None, send_parts(reader, sources, sent, {}, filled)
    entry, dtype = sent[rank]
    weight = torch.empty(entry.shape, dtype=dtype)
    mine = Wanted(LocalShard.plain((entry.fqn,), weight), entry, full_region(entry.shape), weight)
    error = send_parts(reader, sources, sent, {rank: [mine]}, filled)
    is_here = filled.elements.pop(entry.fqn, 0) == weight.numel()
    return weight if is_here and error is None else None, error


class _Exchange:
    """Sends each rank its slices of the factors of a round; every rank makes one and runs each round.

    Args:
        held: this rank's part of each factor.
        targets: all of them.
    """

    def __init__(self, factor_shards: HeldFactors, targets: Sequence[Target]) -> None:
        self.elements = Counter[str]()
        self._factor_shards = factor_shards
        first = next(iter(factor_shards.values())).tensor.device
        self._device = device_for(None, first) if world()[1] > 1 else first
        self._regions = _gather_regions(factor_shards, targets)

    def run(self, targets: Round, factors: Factors | None) -> None:
        """Send this rank's factors, and take its slices of those of the others.

        Args:
            targets: of this round.
            factors: the factors that this rank has computed.
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
            # Each rank sends to the one that is `shift` above it: every pair meets in the same step.
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
        """Carry out sends and receives, and put what arrived beside its place into it."""
        with wire(_PHASE):
            for work in dist.batch_isend_irecv(moves) if moves else ():
                work.wait()
        with torch.no_grad():
            for arrived, memory in staged:
                if arrived is not memory:
                    memory.copy_(arrived)

    def _parts(self, target: Target) -> Iterator[tuple[str, Region, torch.Tensor]]:
        """Yield what this rank holds of a target's factors: factor, region, memory."""
        for name in FACTORS:
            shard = self._factor_shards[f"{target.path}.{name}"]
            for part in shard.parts:
                cut = shard.cut(part, full_region(shard.shape))
                if cut is not None:
                    self.elements[shard.fqn] += cut[0].num_elements
                    yield name, *cut

    def _memory(self, target: Target | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield where each slice arrives, and where it belongs: the same if it can be received there."""
        for _, region, memory in self._parts(target) if target is not None else ():
            is_straight = (
                memory.is_contiguous() and memory.dtype is torch.float32 and memory.device == self._device
            )
            yield (memory if is_straight else torch.empty(region.sizes, device=self._device)), memory


Slices = Mapping[str, Sequence[tuple[str, Region]]]
"""What a rank holds of each target, by path: factors and regions of them, in the order in which they are sent."""


def _gather_regions(factor_shards: HeldFactors, targets: Sequence[Target]) -> list[Slices]:
    """Return the regions of each target that every rank holds; targets that are held alike are listed once."""
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


def _say_progress(number: int, rounds: Sequence[Round]) -> None:
    """Log whenever another tenth of the weights is done: all of them may take hours of processors."""
    if number * 10 // len(rounds) > (number - 1) * 10 // len(rounds) >= 0:
        say(f"weights: {number} of {len(rounds)} rounds of decompositions are done")


def _say_how_good(measured: Sequence[tuple[str, float, float]]) -> None:
    """Log once for all ranks how good the factors are."""
    every = [numbers for rank_numbers in gather_json(measured, phase=_PHASE) for numbers in rank_numbers]
    if not every:
        return
    names, errors, distances = zip(*every, strict=True)
    algorithms = ", ".join(f"{number} by {name}" for name, number in Counter(names).items())
    say(
        f"weights: {count(len(every), 'weight')} decomposed ({algorithms}): they fold back to {max(errors):.1e}, and are "
        f"orthogonal to {max(distances):.1e}"
    )
