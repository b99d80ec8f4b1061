"""Flat tensors of DeepSpeed and FSDP1: parameters are laid end to end, and the result is cut into parts for the ranks.

A piece of a parameter in one rank's part is a range of the parameter's elements in row-major order. Such a range is a
few boxes of the parameter, which become the chunks of a catalog; no parameter is ever assembled in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, TypeGuard

from shardkit.core.catalog import Catalog, TensorEntry
from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape, flat_range_boxes, full_region
from shardkit.core.text import escape
from shardkit.formats.contract.optimizer import (
    STEP,
    Group,
    OptimizerComparison,
    OptimizerState,
    StateWriter,
    path_name,
    state_path,
)
from shardkit.formats.torchsave.file import TensorRef, TorchFile
from shardkit.formats.torchsave.record import strided_file

NEVER = "it has no state: the optimizer never took a step, or keeps it elsewhere (NVMe offload)"


class FlatPiece(NamedTuple):
    """A range of a parameter's elements in one rank's part of one flat tensor."""

    rank: int
    group: int
    """Number of the flat tensor."""
    start: int
    """First element in the rank's part."""
    target: int
    """First element of the parameter, row-major."""
    length: int


Pieces = dict[str, list[FlatPiece]]
"""By parameter, in the order of its elements; at least one piece, which is empty if the parameter has no elements."""


def pieces_across_ranks(group: int, bounds: Sequence[int], start: int, stop: int) -> Iterator[FlatPiece]:
    """Yield the pieces of elements `start` to `stop` of a flat tensor, one for each part that they reach into.

    Args:
        group: number of the flat tensor.
        bounds: the parts begin and end here: [0, 4, 8] for two ranks with 4 elements each.
        start, stop: in elements of the flat tensor.
    """
    begin = start
    rank = bisect_right(bounds, start) - 1
    while begin < stop:
        length = min(bounds[rank + 1], stop) - begin
        if length:
            yield FlatPiece(rank, group, begin - bounds[rank], begin - start, length)
        begin += length
        rank += 1


class FlatRange(NamedTuple):
    """A range of a stored tensor's elements, and where it belongs in a weight."""

    file: int
    tensor: TensorRef
    start: int
    """First element of `tensor`."""
    target: int
    """First element of the weight, row-major."""
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A tensor of the checkpoint, made up of ranges of stored tensors."""

    dtype: DType
    shape: Shape
    pieces: Sequence[FlatRange]
    """In the order of its elements."""

    @classmethod
    def whole(cls, file: int, tensor: TensorRef, shape: Shape | None = None) -> Weight:
        """Make a weight from one whole stored tensor; `shape` may be another shape of the same elements."""
        shape = tensor.shape if shape is None else shape
        return cls(dtype=tensor.dtype, shape=shape, pieces=(FlatRange(file, tensor, 0, 0, prod(shape)),))


def build_catalog(path: str, files: Sequence[TorchFile], weights: Mapping[str, Weight]) -> Catalog:
    """Return the catalog of weights. Names with the same `Weight` object share their bytes."""
    catalog = Catalog(
        format="deepspeed",
        directory=path,
        files=[file.source for file in files],
        paths={name: (name,) for name in weights},
    )
    columns: dict[int, tuple[list[int], list[int], list[int], list[Region]]] = {}
    for name, weight in weights.items():
        if id(weight) not in columns:  # so that a strided weight gets only one virtual file
            columns[id(weight)] = _columns(catalog, name, weight)
        catalog.add_tensor_columns(name, weight.dtype, weight.shape, *columns[id(weight)])
    return catalog


def _columns(
    catalog: Catalog, name: str, weight: Weight
) -> tuple[list[int], list[int], list[int], list[Region]]:
    """Return the columns (file, first byte, number of bytes, region) of a weight's chunks."""
    first, itemsize = weight.pieces[0], weight.dtype.itemsize
    if not prod(weight.shape):
        return [first.file], [first.tensor.start], [0], [full_region(weight.shape)]
    if not first.tensor.is_contiguous:  # a whole tensor: flat ones are contiguous
        entry = TensorEntry(fqn=name, dtype=weight.dtype, shape=weight.shape, first_chunk=0, num_chunks=1)
        catalog.files.append(strided_file(catalog.files[first.file], entry, first.tensor))
        return [len(catalog.files) - 1], [0], [entry.nbytes], [full_region(weight.shape)]
    files: list[int] = []
    starts: list[int] = []
    nbytes: list[int] = []
    regions: list[Region] = []
    for piece in weight.pieces:
        start = piece.tensor.start + piece.start * itemsize
        for region in flat_range_boxes(weight.shape, piece.target, piece.target + piece.length):
            size = region.num_elements * itemsize
            files.append(piece.file)
            starts.append(start)
            nbytes.append(size)
            regions.append(region)
            start += size
    return files, starts, nbytes, regions


def without_tree(file: TorchFile, tensors: Iterable[object]) -> TorchFile:
    """Return a file without its tree and with only the storages of some tensors, as there may be thousands of files.

    Args:
        file: opened.
        tensors: values of its tree; those that are not tensors are ignored.
    """
    keys = (value.key for value in tensors if isinstance(value, TensorRef))
    return replace(file, tree=None, storages={key: file.storages[key] for key in keys})


class RankStateDict(NamedTuple):
    """The optimizer's state dict in one rank's file."""

    file: TorchFile
    states: Mapping[str | int, Mapping[str, object]]
    """By parameter, or by number of a flat tensor, the leaves of its state: tensors and numbers."""
    groups: Sequence[Group] | None
    """The settings of its groups; None if they were not saved."""

    def without_tree(self) -> RankStateDict:
        """Return the state dict with a file that has no tree, and only the storages of its tensors."""
        dicts = (*self.states.values(), *(self.groups or ()))
        return self._replace(
            file=without_tree(self.file, (value for entries in dicts for value in entries.values()))
        )


Leaves = dict[str, dict[str, Weight | float]]
"""By parameter and leaf, the value: a tensor or a number."""


def is_number(value: object) -> TypeGuard[int | float]:
    """True for an int or a float, and not for a bool."""
    return type(value) in (int, float)


def split_states(
    directory: str,
    ranks: Sequence[RankStateDict],
    pieces: Pieces,
    shapes: Mapping[str, Shape],
    lengths: Sequence[Mapping[int, int]],
    params: Sequence[Sequence[str]],
) -> OptimizerState | str:
    """Return the optimizer's state by parameter, cut out of the states of flat tensors.

    Args:
        directory: of the checkpoint.
        ranks: the state dicts of all ranks, without their trees.
        pieces: of the parameters in the flat tensors.
        shapes: of the parameters.
        lengths: for each rank, the number of elements in its part of each flat tensor, by number.
        params: the parameters of each group of settings.

    Returns:
        The state; or, as escaped text, the reason why that of some parameter is unknown.

    Raises:
        IntegrityError: files of different saves.
    """
    state_leaves: Leaves = {}
    for name, parts in pieces.items():
        leaves = state_leaves[name] = {}
        for leaf, value in ranks[0].states[parts[0].group].items():
            content = _leaf(leaf, value, shapes[name], parts, ranks, lengths)
            if isinstance(content, str):
                return f"{escape(leaf)} of {escape(name)}: {content}"
            leaves[leaf] = content
        if not leaves:
            return f"{escape(name)}: {NEVER}"
    agreement = OptimizerComparison()
    for rank in ranks:
        states = {f"flat tensor {number}": leaves for number, leaves in rank.states.items()}
        agreement.add(rank.file.name, states, rank.groups)
    agreement.check()
    return write_state(directory, [rank.file for rank in ranks], state_leaves, ranks[0].groups or (), params)


def _leaf(
    leaf: str,
    value: object,
    shape: Shape,
    pieces: Sequence[FlatPiece],
    ranks: Sequence[RankStateDict],
    lengths: Sequence[Mapping[int, int]],
) -> Weight | float | str:
    """Return one leaf of a parameter's state, or the reason why it is unknown."""
    if is_number(value):
        return value
    if isinstance(value, TensorRef) and not value.shape:
        return Weight.whole(0, value)  # all ranks count alike
    parts = []
    for piece in pieces:
        file = escape(ranks[piece.rank].file.name)
        ref = ranks[piece.rank].states[piece.group].get(leaf)
        if not isinstance(ref, TensorRef) or len(ref.shape) != 1 or not ref.is_contiguous:
            return f"{file} has no flat tensor of it"
        if ref.shape[0] < (length := lengths[piece.rank][piece.group]):  # padding may make it longer
            return f"{file} has {ref.shape[0]} elements for {length}"
        parts.append(FlatRange(piece.rank, ref, *piece[2:]))
    return Weight(dtype=parts[0].tensor.dtype, shape=shape, pieces=parts)


def write_state(
    directory: str,
    files: Sequence[TorchFile],
    state_leaves: Leaves,
    groups: Sequence[Group],
    params: Sequence[Sequence[str]],
) -> OptimizerState:
    """Make the optimizer's state from the leaves of every parameter.

    Args:
        directory: of the checkpoint.
        files: with the tensors of the leaves; the first also has the groups.
        state_leaves: of every parameter.
        groups: settings of the inner optimizer; empty if they were not saved.
        params: the parameters of each group.
    """
    weights = {
        state_path(name, leaf): value
        for name, leaves in state_leaves.items()
        for leaf, value in leaves.items()
        if isinstance(value, Weight)
    }
    catalog = build_catalog(directory, files, {path_name(path): weight for path, weight in weights.items()})
    catalog.paths = {path_name(path): path for path in weights}
    writer = StateWriter(catalog, files[0].source)
    in_group = {name: group for group, names in zip(groups, params, strict=True) for name in names}
    for name, leaves in state_leaves.items():
        for leaf, value in leaves.items():
            if not isinstance(value, Weight):
                writer.add_count(state_path(name, leaf), value)
        count: object = in_group.get(name, {}).get(STEP)  # apex's and DeepSpeed's own Adam count by group
        if STEP not in leaves and is_number(count):
            writer.add_count(state_path(name, STEP), count)
    writer.add_groups(
        [{key: value for key, value in group.items() if key != STEP} for group in groups], params
    )
    lacking = [] if groups else ["the settings of the optimizer's groups (lr, ...) are not in the checkpoint"]
    return writer.finish(lacking, shows_cuts=False)
