"""From pieces of flat tensors in several files to a catalog, and checking their CRC-32.

Elements that lie side by side in a flat tensor are a range of a parameter's elements, and a range is a few
boxes: no parameter is ever put together.

The optimizer's state as pieces of flat tensors in several files, put into the form of the recipes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from shardkit.core.catalog import Catalog, TensorEntry
from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape, flat_range_boxes, full_region
from shardkit.core.text import escape
from shardkit.formats.dcp.decode import strided_file
from shardkit.formats.optimizer import STEP, OptimizerState, StateWriter, path_name, state_path
from shardkit.formats.torchsave.file import TensorRef, TorchFile, differing_storages

_MAX_NAMED = 3


class Piece(NamedTuple):
    """A range of a stored tensor's elements that is a range of a weight's."""

    file: int
    tensor: TensorRef
    start: int
    """First element of `tensor`."""
    target: int
    """First element of the weight, row-major."""
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A tensor of the checkpoint."""

    dtype: DType
    shape: Shape
    pieces: Sequence[Piece]
    """In the order of its elements."""

    @classmethod
    def whole(cls, file: int, tensor: TensorRef, shape: Shape | None = None) -> Weight:
        """Return the weight that one stored tensor is, in another shape if one is given."""
        shape = tensor.shape if shape is None else shape
        return cls(dtype=tensor.dtype, shape=shape, pieces=(Piece(file, tensor, 0, 0, prod(shape)),))


def build_catalog(path: str, files: Sequence[TorchFile], weights: Mapping[str, Weight]) -> Catalog:
    """Return the catalog of weights; those that are one object point at the same bytes."""
    catalog = Catalog(
        format="deepspeed",
        directory=path,
        files=[file.source for file in files],
        paths={name: (name,) for name in weights},
    )
    columns: dict[int, tuple[list[int], list[int], list[int], list[Region]]] = {}
    for name, weight in weights.items():
        if id(weight) not in columns:  # a strided one gets its file only once
            columns[id(weight)] = _columns(catalog, name, weight)
        catalog.add_tensor_columns(name, weight.dtype, weight.shape, *columns[id(weight)])
    return catalog


def _columns(
    catalog: Catalog, name: str, weight: Weight
) -> tuple[list[int], list[int], list[int], list[Region]]:
    """Return (files, first bytes, bytes, regions) of a weight's chunks."""
    first, itemsize = weight.pieces[0], weight.dtype.itemsize
    if not prod(weight.shape):
        return [first.file], [first.tensor.start], [0], [full_region(weight.shape)]
    if not first.tensor.is_contiguous:  # never a part of a flat tensor, those are contiguous
        entry = TensorEntry(fqn=name, dtype=weight.dtype, shape=weight.shape, first_chunk=0, num_chunks=1)
        catalog.files.append(strided_file(catalog.files[first.file], entry, first.tensor))
        return [len(catalog.files) - 1], [0], [entry.nbytes], [full_region(weight.shape)]
    files: list[int] = []
    starts: list[int] = []
    nbytes: list[int] = []
    regions: list[Region] = []
    for piece in weight.pieces:
        at = piece.tensor.start + piece.start * itemsize
        for region in flat_range_boxes(weight.shape, piece.target, piece.target + piece.length):
            size = region.num_elements * itemsize
            files.append(piece.file)
            starts.append(at)
            nbytes.append(size)
            regions.append(region)
            at += size
    return files, starts, nbytes, regions


def differing(
    files: Sequence[TorchFile], weights: Mapping[str, Weight], names: Collection[str]
) -> Iterator[str]:
    """Read the storages of some weights and yield a line for each whose CRC-32 is not the recorded one."""
    users: dict[int, dict[str, list[str]]] = {}
    for name in names:
        for piece in weights[name].pieces:
            found = users.setdefault(piece.file, {}).setdefault(piece.tensor.key, [])
            if not found or found[-1] != name:
                found.append(name)
    for number, by_key in sorted(users.items()):
        for key in differing_storages(files[number], iter(by_key)):
            named = ", ".join(map(escape, by_key[key][:_MAX_NAMED]))
            more = len(by_key[key]) - _MAX_NAMED
            yield (
                f"{named}{f' and {more} more' if more > 0 else ''}: {escape(files[number].name)}: "
                f"storage {escape(key)} does not have the CRC-32 recorded with it"
            )


Leaves = dict[str, dict[str, Weight | float]]
"""By parameter and leaf, a tensor or a number."""


def write_state(
    directory: str,
    files: Sequence[TorchFile],
    taken: Leaves,
    groups: Sequence[Mapping[str, Any]],
    params: Sequence[Sequence[str]],
) -> OptimizerState:
    """Return the state, given every parameter's leaves.

    Args:
        directory: of the checkpoint.
        files: that leaves point into; the first is also that of the groups.
        taken: the state.
        groups: settings of the inner optimizer; none where they were not saved.
        params: the parameters of each group.
    """
    weights, paths = dict[str, Weight](), dict[str, tuple[str | int, ...]]()
    for name, leaves in taken.items():
        for leaf, value in leaves.items():
            if isinstance(value, Weight):
                path = state_path(name, leaf)
                weights[path_name(path)], paths[path_name(path)] = value, path
    catalog = build_catalog(directory, files, weights)
    catalog.paths = paths
    writer = StateWriter(catalog, files[0].source)
    in_group = {name: group for group, names in zip(groups, params, strict=True) for name in names}
    for name, leaves in taken.items():
        for leaf, value in leaves.items():
            if isinstance(value, (int, float)):
                writer.add_count(state_path(name, leaf), value)
        count: object = in_group.get(name, {}).get(STEP)  # apex's and DeepSpeed's own Adam count by group
        if STEP not in leaves and isinstance(count, (int, float)):
            writer.add_count(state_path(name, STEP), count)
    writer.add_groups(
        [{key: value for key, value in group.items() if key != STEP} for group in groups], params
    )
    lacking = [] if groups else ["the settings of the optimizer's groups (lr, ...) are not in the checkpoint"]
    return writer.finish(lacking, has_boxes=False)


def without_tree(file: TorchFile, tensors: Iterable[TensorRef]) -> TorchFile:
    """Return a file with no more than what it takes to read some tensors: there may be thousands of them."""
    return replace(file, tree=None, storages={ref.key: file.storages[ref.key] for ref in tensors})
