"""Which part of a DTensor a rank holds, from placements as torch stores them.

Source: torch 2.13, torch/distributed/tensor/_dtensor_spec.py (`_maybe_convert_StridedShard_to_shard_order`)
and torch.distributed.tensor._utils.compute_local_shape_and_global_offset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from shardkit.core.regions import Region, Shape, split_dim


class StoredPlacement(NamedTuple):
    """What one mesh axis does to a tensor."""

    dim: int | None = None
    """The dim that it cuts, None where it replicates."""
    split_factor: int = 1
    """Above 1 where later axes cut the dim before this one does: into how many parts (`_StridedShard`)."""


def local_region(
    shape: Shape,
    placements: Sequence[StoredPlacement],
    mesh_shape: Sequence[int],
    coord: Sequence[int],
    order: Mapping[int, Sequence[int]] | None = None,
) -> Region:
    """Return the region that the rank at a position of the mesh holds.

    Args:
        shape: of the whole tensor.
        placements: one for each mesh axis.
        mesh_shape: sizes of the axes.
        coord: the rank's position on each axis.
        order: by dim, the axes that cut it, first to last, where the tensor says so itself.

    Raises:
        ValueError: placements that no order of cutting gives; says which.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for dim in sorted({placement.dim for placement in placements if placement.dim is not None}):
        if not 0 <= dim < len(shape):
            raise ValueError(f"it is cut along dim {dim}, but has {len(shape)} dims")
        axes = [axis for axis, placement in enumerate(placements) if placement.dim == dim]
        axes = _decoded_order(axes, placements, mesh_shape) if order is None else list(order.get(dim, axes))
        for axis in axes:
            if not 0 <= axis < len(mesh_shape) or not 0 <= coord[axis] < mesh_shape[axis]:
                raise ValueError(f"its rank's position {list(coord)} is not in a mesh of {list(mesh_shape)}")
            offset, sizes[dim] = split_dim(sizes[dim], mesh_shape[axis], coord[axis])
            offsets[dim] = offsets[dim] + offset if sizes[dim] else shape[dim]
    return Region(tuple(offsets), tuple(sizes))


def _decoded_order(
    axes: Sequence[int], placements: Sequence[StoredPlacement], mesh_shape: Sequence[int]
) -> list[int]:
    """Return in which order axes cut a dim: before each, as many parts as its split factor says are there.

    Without strided shards that is the order of the mesh, left to right.
    """
    order: list[int] = []
    for axis in reversed(axes):
        factor = placements[axis].split_factor
        for position in range(len(order) + 1):
            if prod(mesh_shape[earlier] for earlier in order[:position]) == factor:
                order.insert(position, axis)
                break
        else:
            raise ValueError(f"its strided shard with split factor {factor} belongs to no order of mesh axes")
    return order
