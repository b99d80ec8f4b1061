"""Which bytes are the weights of a DeepSpeed checkpoint: fp32 masters, frozen parameters, buffers, ties.

How DeepSpeed's ZeRO lays parameters out in the flat partitions of its ranks. Pure arithmetic.

ZeRO-1 and 2 put the parameters of a group one after another into one flat tensor, which is then cut into one
partition for each rank. ZeRO-3 cuts every parameter by itself, and a rank puts its parts one after another.

Source: DeepSpeed 0.19, runtime/zero/stage_1_and_2.py, runtime/zero/partition_parameters.py and
utils/zero_to_fp32.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from math import prod
from typing import NamedTuple

from shardkit.core.regions import Shape
from shardkit.core.text import escape
from shardkit.errors import IntegrityError
from shardkit.formats.deepspeed.files import ModelStates, OptimizerStates
from shardkit.formats.rankfiles.flat import Piece, Weight
from shardkit.formats.torchsave.file import TensorRef, TorchFile, UnreadableTensor

_MAX_HOPS = 8  # DeepSpeed names the stored one directly
_HINT = (
    "the files are of different saves, or the optimizer was kept elsewhere (NVMe offload): use another copy, "
    "or the 16-bit model that DeepSpeed's save_16bit_model writes"
)


@dataclass(slots=True, kw_only=True)
class Weights:
    """The weights, under the module's names and in its order."""

    files: Sequence[TorchFile]
    by_name: dict[str, Weight] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    """Entries of the module that are not tensors."""
    lost: list[str] = field(default_factory=list)
    """Parameters whose values are in none of the files."""


def assemble(
    files: Sequence[TorchFile], states: Sequence[ModelStates], masters: Mapping[str, Weight]
) -> Weights:
    """Return the weights of a checkpoint.

    Args:
        files: that weights point into.
        states: the module's of each rank (ZeRO-3), or the only one.
        masters: the trained parameters, in the optimizer's precision.
    """
    main = states[0]
    weights = Weights(files=files)
    numbers = {id(file): number for number, file in enumerate(files)}
    known: dict[str, Weight | None] = {}

    def own(name: str) -> Weight | None:
        """What is stored under a name as a parameter; made once, so that ties are one object."""
        if name not in known:
            known[name] = masters.get(name) or _untrained(name, states, numbers)
        return known[name]

    for name in dict.fromkeys(chain(main.module, masters, main.frozen, main.shared)):
        weight = own(name) or own(_target(name, main.shared)) or _as_stored(name, main, numbers)
        if weight is not None:
            weights.by_name[name] = weight
        elif isinstance(main.module.get(name), (TensorRef, UnreadableTensor, type(None))):
            weights.lost.append(name)
        else:
            weights.objects.append(name)
    return weights


def _target(name: str, shared: Mapping[str, str]) -> str:
    """Return the name under which a shared parameter is stored."""
    for _ in range(_MAX_HOPS):
        if name not in shared:
            break
        name = shared[name]
    return name


def _untrained(name: str, states: Sequence[ModelStates], numbers: Mapping[int, int]) -> Weight | None:
    """Return a frozen parameter; with ZeRO-3 every rank has a part of it."""
    shape = states[0].frozen.get(name)
    if shape is None:
        return None
    stored = states[0].module.get(name)
    if isinstance(stored, TensorRef) and stored.shape == shape:
        return Weight.whole(numbers[id(states[0].file)], stored)
    refs = [(numbers[id(state.file)], state.fragments.get(name)) for state in states]
    size, part, pieces = prod(shape), -(-prod(shape) // len(states)), []
    for rank, (number, ref) in enumerate(refs):
        length = max(min(part, size - rank * part), 0)
        if ref is None or not ref.is_contiguous or prod(ref.shape) < length:
            return None
        if length or not size:
            pieces.append(Piece(number, ref, 0, rank * part, length))
    return Weight(dtype=pieces[0].tensor.dtype, shape=shape, pieces=pieces)


def _as_stored(name: str, state: ModelStates, numbers: Mapping[int, int]) -> Weight | None:
    """Return a buffer, or a parameter that is not partitioned; an empty tensor stands for one that is."""
    stored = state.module.get(name)
    if not isinstance(stored, TensorRef):
        return None
    if state.groups is not None and not prod(stored.shape) and name not in state.buffers:
        return None
    return Weight.whole(numbers[id(state.file)], stored)


def masters_of(
    model: ModelStates, optimizers: Sequence[OptimizerStates], first_file: int, directory: str
) -> dict[str, Weight]:
    """Return the trained parameters, as pieces of the optimizers' flat tensors.

    Args:
        model: that has the shapes.
        optimizers: of all ranks, in their order.
        first_file: number of the first optimizer's file in the catalog; the others follow it.
        directory: for messages.

    Raises:
        IntegrityError: shapes and partitions do not fit each other; lists every place.
    """
    shapes = {name: shape for group in model.groups or () for name, shape in group.items()}
    masters: dict[str, Weight] = {}
    for name, found in pieces_of(model, optimizers, directory).items():
        parts = [
            Piece(first_file + piece.rank, optimizers[piece.rank].flat[piece.group], *piece[2:])
            for piece in found
        ]
        # A parameter without elements has no pieces; it still has a dtype, and a place to point at.
        parts = parts or [Piece(first_file, optimizers[0].flat[0], 0, 0, 0)]
        masters[name] = Weight(dtype=parts[0].tensor.dtype, shape=shapes[name], pieces=parts)
    return masters


def pieces_of(model: ModelStates, optimizers: Sequence[OptimizerStates], directory: str) -> Pieces:
    """Return where the trained parameters lie in the ranks' flat tensors.

    Raises:
        IntegrityError: as `masters_of`.
    """
    groups = model.groups or ()
    problems = list(_mismatches(groups, optimizers))
    pieces: Pieces = {}
    if not problems and optimizers[0].stage == 3:
        shapes = {name: shape for group in groups for name, shape in group.items()}
        lengths = [[ref.shape[0] for ref in optimizer.flat] for optimizer in optimizers]
        _collect(pieces, problems, lambda: partitioned_pieces(shapes, lengths))
    elif not problems:
        for number, group in enumerate(groups):
            _collect(pieces, problems, _joined(number, group, optimizers))
    if problems:
        raise IntegrityError(
            f"{escape(directory)}: the fp32 partitions do not hold the parameters",
            problems=problems,
            hint=_HINT,
        )
    return pieces


def _joined(
    number: int, shapes: Mapping[str, Shape], optimizers: Sequence[OptimizerStates]
) -> Callable[[], Pieces]:
    paddings = optimizers[0].paddings
    lengths = [optimizer.flat[number].shape[0] for optimizer in optimizers]
    mine = paddings[number] if paddings is not None and number < len(paddings) else None
    return lambda: joined_pieces(number, shapes, lengths, mine)


def _collect(pieces: Pieces, problems: list[str], compute: Callable[[], Pieces]) -> None:
    try:
        pieces.update(compute())
    except ValueError as error:
        problems.append(str(error))


def _mismatches(groups: Sequence[Mapping[str, Shape]], optimizers: Sequence[OptimizerStates]) -> list[str]:
    """Return what shows that the files are not of one save."""
    problems = []
    first = optimizers[0]
    if first.stage != 3 and len(first.flat) != len(groups):
        problems.append(
            f"{escape(first.file.name)}: {len(first.flat)} groups, the model's file has {len(groups)}"
        )
    for optimizer in optimizers[1:]:
        same = (optimizer.stage == 3) == (first.stage == 3) and optimizer.num_ranks == first.num_ranks
        dtypes = [ref.dtype for ref in optimizer.flat]
        if not same or dtypes != [ref.dtype for ref in first.flat]:
            problems.append(
                f"{escape(optimizer.file.name)}: saved by another number of ranks, or with other groups"
            )
        if any(first.steps.get(number, step) != step for number, step in optimizer.steps.items()):
            problems.append(
                f"{escape(optimizer.file.name)}: saved at another step than {escape(first.file.name)}"
            )
    counts = Counter(name for group in groups for name in group)
    return problems + [f"{escape(name)}: in two groups" for name, count in counts.items() if count > 1]


class FlatPiece(NamedTuple):
    """Elements of a parameter that lie side by side in one rank's part of one group."""

    rank: int
    group: int
    start: int
    """First element in the rank's flat tensor of the group."""
    target: int
    """First element of the parameter, row-major."""
    length: int


Pieces = dict[str, list[FlatPiece]]
"""By parameter, in the order of its elements."""


def joined_pieces(
    group: int,
    shapes: Mapping[str, Shape],
    lengths: Sequence[int],
    paddings: Sequence[int] | None = None,
) -> Pieces:
    """Return where the parameters of a ZeRO-1 or 2 group lie.

    Args:
        group: its number.
        shapes: by name, in the order of the flat tensor.
        lengths: elements of each rank's partition; the padding at the end may be cut off.
        paddings: elements between a parameter and the next, one for each; None where there are none.

    Raises:
        ValueError: the partitions do not hold what the shapes need; says how much is there.
    """
    if paddings is not None and len(paddings) != len(shapes):
        raise ValueError(f"group {group} has {len(shapes)} parameters, but {len(paddings)} paddings")
    bounds = [0, *accumulate(lengths)]
    pieces: Pieces = {}
    start = 0
    for (name, shape), padding in zip(shapes.items(), paddings or [0] * len(shapes), strict=True):
        stop = start + prod(shape)
        pieces[name] = list(_across(group, bounds, start, min(stop, bounds[-1])))
        start = stop + padding
    # DeepSpeed fills up to a multiple of twice the ranks, for NCCL; how much of that is saved differs.
    align = 2 * len(lengths)
    if not start <= bounds[-1] <= -(-start // align) * align:
        raise ValueError(f"group {group} needs {start} elements, its partitions hold {bounds[-1]}")
    return pieces


def _across(group: int, bounds: Sequence[int], start: int, stop: int) -> Iterator[FlatPiece]:
    """Yield the pieces of elements `start` to `stop` of partitions laid end to end at `bounds`."""
    at = start
    rank = bisect_right(bounds, start) - 1
    while at < stop:
        length = min(bounds[rank + 1], stop) - at
        if length:
            yield FlatPiece(rank, group, at - bounds[rank], at - start, length)
        at += length
        rank += 1


def partitioned_pieces(shapes: Mapping[str, Shape], lengths: Sequence[Sequence[int]]) -> Pieces:
    """Return where the parameters of a ZeRO-3 model lie.

    Args:
        shapes: by name, in the order of the flat tensors, of all groups.
        lengths: of each rank, the elements of its flat tensor of each group.

    Raises:
        ValueError: the flat tensors do not hold what the shapes need; says which rank and how much.
    """
    num_ranks = len(lengths)
    parts = {name: -(-prod(shape) // num_ranks) for name, shape in shapes.items()}
    needed = sum(parts.values())
    for rank, held in enumerate(lengths):
        if sum(held) != needed or list(held) != list(lengths[0]):
            raise ValueError(
                f"rank {rank} needs {needed} elements, it holds {sum(held)} in {len(held)} groups"
            )
    bounds = [0, *accumulate(lengths[0])] if lengths else [0]
    pieces: Pieces = {}
    start = 0
    for name, shape in shapes.items():
        part, size = parts[name], prod(shape)
        pieces[name] = []
        for rank in range(num_ranks):
            target = rank * part
            stop = start + min(part, size - target)
            # The last ranks' parts may be short or empty; a part could cross from one group into the next.
            for found in _across(0, bounds, start, stop):
                pieces[name].append(
                    FlatPiece(rank, found.rank, found.start, target + found.target, found.length)
                )
        start += part
    return pieces
