"""Find the parameters in the flat partitions of ZeRO's ranks: in the fp32 masters and in the optimizer's state.

The masters are the optimizer's own copies of the weights, in fp32. ZeRO-1 and 2 lay the parameters of a group end to end
in one flat tensor, and cut it into one partition for each rank; a group of experts is cut only for the ranks that have
these experts. ZeRO-3 cuts every parameter by itself, and each rank lays its parts end to end. The inner optimizer's
states are flat tensors that are cut like the masters.

Source: DeepSpeed 0.19, runtime/zero/stage_1_and_2.py, runtime/zero/partition_parameters.py and
utils/zero_to_fp32.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from math import prod

from shardkit.core.regions import Shape
from shardkit.core.text import escape
from shardkit.errors import IntegrityError
from shardkit.formats.contract.optimizer import PARAMS, Group, OptimizerState, UnusableOptimizer
from shardkit.formats.deepspeed.files import ModelStates, OptimizerStates
from shardkit.formats.rankfiles.flat import (
    NEVER,
    FlatPiece,
    FlatRange,
    Pieces,
    Weight,
    pieces_across_ranks,
    split_states,
)

_HINT = (
    "the files are of different saves, or the optimizer was kept elsewhere (NVMe offload): use another copy, "
    "or the 16-bit model that DeepSpeed's save_16bit_model writes"
)


def masters_of(
    model: ModelStates, optimizers: Sequence[OptimizerStates], first_file: int, directory: str
) -> dict[str, Weight]:
    """Return the trained parameters, made up of ranges of the ranks' flat fp32 tensors.

    Args:
        model: the model's file, with the shapes.
        optimizers: files of all ranks, in order.
        first_file: number of the first optimizer's file in the catalog; the others follow it.
        directory: for messages.

    Raises:
        IntegrityError: shapes and partitions do not fit each other; lists every mismatch.
    """
    shapes = _shapes(model)
    masters: dict[str, Weight] = {}
    for name, pieces in pieces_of(model, optimizers, directory).items():
        parts = [
            FlatRange(first_file + piece.rank, optimizers[piece.rank].flat[piece.group], *piece[2:])
            for piece in pieces
        ]
        masters[name] = Weight(dtype=parts[0].tensor.dtype, shape=shapes[name], pieces=parts)
    return masters


def open_zero_optimizer(
    directory: str, model: ModelStates, optimizers: Sequence[OptimizerStates]
) -> OptimizerState | UnusableOptimizer:
    """Open the optimizer's state of ZeRO-1, 2 or 3.

    Args:
        directory: of the checkpoint.
        model: the model's file, with the names and shapes.
        optimizers: files of all ranks, in order.

    Returns:
        The state, or the reason why it cannot be used.

    Raises:
        IntegrityError: the files are of different saves.
    """
    names, inner = [rank.file.name for rank in optimizers], [rank.inner for rank in optimizers]
    if not any(inner[0].states.values()):
        return UnusableOptimizer(names, NEVER)
    groups = inner[0].groups
    params = [] if groups is None else group_params(groups, [list(group) for group in model.groups or ()])
    if isinstance(params, str):
        return UnusableOptimizer(names, params)
    pieces = pieces_of(model, optimizers, directory)
    lengths = [{number: ref.shape[0] for number, ref in enumerate(rank.flat)} for rank in optimizers]
    state = split_states(directory, inner, pieces, _shapes(model), lengths, params)
    return UnusableOptimizer(names, state) if isinstance(state, str) else state


def group_params(groups: Sequence[Group], names: Sequence[Sequence[str]]) -> list[list[str]] | str:
    """Return the names of the parameters in each group of settings, or the reason why they are unknown.

    Args:
        groups: the settings, whose `params` are numbers of flat tensors.
        names: of the parameters in each flat tensor.
    """
    if len(groups) == 1:
        return [[name for flat in names for name in flat]]
    numbers = [params if isinstance(params := group.get(PARAMS), list) else [] for group in groups]
    flat = [number for params in numbers for number in params]
    if all(type(number) is int for number in flat) and sorted(flat) == list(range(len(names))):
        return [[name for number in params for name in names[number]] for params in numbers]
    return f"nothing shows which parameters its {len(groups)} groups have"


def pieces_of(model: ModelStates, optimizers: Sequence[OptimizerStates], directory: str) -> Pieces:
    """Return the pieces of the trained parameters in the ranks' flat tensors.

    Raises:
        IntegrityError: as `masters_of`.
    """
    groups = model.groups or ()
    problems = list(_mismatches(groups, optimizers))
    pieces: Pieces = {}

    def collect(lay_out: Callable[..., Pieces], *args: object) -> None:
        try:
            pieces.update(lay_out(*args))
        except ValueError as error:
            problems.append(str(error))

    lengths = [[ref.shape[0] for ref in optimizer.flat] for optimizer in optimizers]
    paddings = {number: gaps for number, gaps in enumerate(optimizers[0].paddings or ()) if any(gaps)}
    if not problems and optimizers[0].stage == 3:
        collect(zero3_pieces, _shapes(model), lengths)
    elif not problems:
        for number, group in enumerate(groups):
            for ranks, part in _sharing_ranks(model, optimizers, number, group):
                group_lengths = [lengths[rank][number] for rank in ranks]
                collect(zero2_pieces, number, part, group_lengths, paddings.get(number), ranks)
    IntegrityError.raise_for(
        problems, f"{escape(directory)}: the fp32 partitions do not hold the parameters", hint=_HINT
    )
    # A parameter without elements gets an empty piece, as its dtype, state and place are read from its first piece.
    return {name: parts or [FlatPiece(0, 0, 0, 0, 0)] for name, parts in pieces.items()}


def _shapes(model: ModelStates) -> dict[str, Shape]:
    return {name: shape for group in model.groups or () for name, shape in group.items()}


def _sharing_ranks(
    model: ModelStates, optimizers: Sequence[OptimizerStates], number: int, group: Mapping[str, Shape]
) -> Iterator[tuple[Sequence[int], dict[str, Shape]]]:
    """Yield (ranks, parameters): the ranks over which these parameters of a group are cut.

    For ordinary parameters this is one pair, of all ranks and all parameters. For experts there is one pair for each
    expert-parallel rank.
    """
    ep_size = optimizers[0].ep_size_of(number, len(optimizers))
    count, size = len(optimizers) // ep_size, len(group) // ep_size
    for ep_rank in range(ep_size):
        if model.is_data_first:
            ranks = range(ep_rank * count, (ep_rank + 1) * count)
        else:
            ranks = range(ep_rank, len(optimizers), ep_size)
        yield ranks, dict(islice(group.items(), ep_rank * size, (ep_rank + 1) * size))


def _mismatches(
    groups: Sequence[Mapping[str, Shape]], optimizers: Sequence[OptimizerStates]
) -> Iterator[str]:
    """Yield a line for each contradiction that shows that the files are from different saves."""
    first = optimizers[0]
    if first.stage != 3 and len(first.flat) != len(groups):
        yield f"{escape(first.file.name)}: {len(first.flat)} groups, the model's file has {len(groups)}"
    for optimizer in optimizers[1:]:
        same = (optimizer.stage == 3) == (first.stage == 3) and optimizer.counts == first.counts
        dtypes = [ref.dtype for ref in optimizer.flat]
        if not same or dtypes != [ref.dtype for ref in first.flat]:
            yield f"{escape(optimizer.file.name)}: saved by another number of ranks, or with other groups"
        if any(first.steps.get(number, step) != step for number, step in optimizer.steps.items()):
            yield f"{escape(optimizer.file.name)}: saved at another step than {escape(first.file.name)}"
    counts = Counter(name for group in groups for name in group)
    yield from (f"{escape(name)}: in two groups" for name, count in counts.items() if count > 1)


def zero2_pieces(
    group: int,
    shapes: Mapping[str, Shape],
    lengths: Sequence[int],
    paddings: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
) -> Pieces:
    """Return the pieces of the parameters of a ZeRO-1 or 2 group, whose flat tensor is cut into partitions.

    Args:
        group: its number.
        shapes: by name, in the order of the flat tensor.
        lengths: elements of each rank's partition; the padding at the end may be cut off.
        paddings: for each parameter, the number of elements between it and the next; None without padding.
        ranks: of the partitions; None for 0, 1, ...

    Raises:
        ValueError: the number of elements in the partitions does not fit the shapes.
    """
    if paddings is not None and len(paddings) != len(shapes):
        raise ValueError(f"group {group} has {len(shapes)} parameters, but {len(paddings)} paddings")
    bounds = [0, *accumulate(lengths)]
    pieces: Pieces = {}
    start = 0
    for (name, shape), padding in zip(shapes.items(), paddings or [0] * len(shapes), strict=True):
        stop = start + prod(shape)
        parts = pieces_across_ranks(group, bounds, start, min(stop, bounds[-1]))
        pieces[name] = [piece._replace(rank=ranks[piece.rank]) if ranks else piece for piece in parts]
        start = stop + padding
    # DeepSpeed pads to a multiple of twice the number of ranks, for NCCL, and may save all or some of this padding.
    align = 2 * len(lengths)
    if not start <= bounds[-1] <= -(-start // align) * align:
        raise ValueError(f"group {group} needs {start} elements, its partitions hold {bounds[-1]}")
    return pieces


def zero3_pieces(shapes: Mapping[str, Shape], lengths: Sequence[Sequence[int]]) -> Pieces:
    """Return the pieces of the parameters of a ZeRO-3 model, each of which is cut for all ranks by itself.

    Args:
        shapes: by name, in the order of the flat tensors, of all groups.
        lengths: for each rank, the number of elements in its flat tensor of each group.

    Raises:
        ValueError: the number of elements in a rank's flat tensors does not fit the shapes.
    """
    num_ranks = len(lengths)
    parts = {name: -(-prod(shape) // num_ranks) for name, shape in shapes.items()}
    needed = sum(parts.values())
    for rank, rank_lengths in enumerate(lengths):
        if sum(rank_lengths) != needed or list(rank_lengths) != list(lengths[0]):
            raise ValueError(
                f"rank {rank} needs {needed} elements, it holds {sum(rank_lengths)} in {len(rank_lengths)} groups"
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
            # The last ranks' parts may be short or empty; a part may cross from one group into the next.
            for piece in pieces_across_ranks(0, bounds, start, stop):
                pieces[name].append(
                    FlatPiece(rank, piece.rank, piece.start, target + piece.target, piece.length)
                )
        start += part
    return pieces
