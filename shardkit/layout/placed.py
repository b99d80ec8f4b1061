"""Read the placements of a live tensor, and its device mesh as a view of all ranks.

Only code that has a model imports this module. It imports torch, and nothing heavier.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardkit._torch import shard_of
from shardkit.core.mesh import ROLES, Axis, Digits, Mesh
from shardkit.core.placements import REPLICATE, Placement, Placements
from shardkit.errors import LayoutError

_MAX_SHOWN = 8


class MeshPlacements(NamedTuple):
    """The placements of a tensor, one for each axis of a mesh."""

    placements: Placements
    mesh: Mesh | None
    """None for the layout's own mesh."""


def placements_of(tensor: DTensor) -> Placements:
    """Return the placements of a tensor on the axes of its own mesh.

    Raises:
        LayoutError: a placement neither replicates nor shards, such as `Partial`.
    """
    placements = []
    for axis, placement in enumerate(tensor.placements):
        cut = shard_of(placement)
        if cut is None and not placement.is_replicate():
            raise LayoutError(f"mesh axis {axis} has the placement {placement}, which no weight can have")
        placements.append(REPLICATE if cut is None else Placement(cut[0] % tensor.ndim, cut[1]))
    return tuple(placements)


def read_placements(tensor: torch.Tensor, mesh: Mesh) -> MeshPlacements:
    """Return the placements of a tensor on the axes of the main mesh where possible, else on its own mesh.

    A tensor is replicated on axes that its own mesh lacks. A plain tensor is replicated on all axes.

    Args:
        tensor: as seen by rank 0, in a world of `mesh.size` ranks.
        mesh: the main mesh.

    Raises:
        LayoutError: the tensor's mesh does not begin at rank 0 or is not regular, or it cuts the tensor over
            ranks that hold copies on the main mesh; or as `placements_of`.
    """
    if not isinstance(tensor, DTensor):
        return MeshPlacements((REPLICATE,) * len(mesh.axes), None)
    placements, view = placements_of(tensor), view_of(tensor.device_mesh)
    cutting = [axis for axis, placement in enumerate(placements) if placement.shard_dim is not None]
    highest = sum((size - 1) * stride for axis in cutting for size, stride in view.digits[axis])
    if highest >= mesh.num_shards:
        names = ", ".join(view.names[axis] for axis in cutting)
        raise LayoutError(f"it is cut on mesh axes {names} over ranks that hold copies in --mesh {mesh}")
    on_main = _on_main_mesh(placements, view, mesh)
    return MeshPlacements(placements, view) if on_main is None else MeshPlacements(on_main, None)


def _on_main_mesh(placements: Placements, view: Mesh, mesh: Mesh) -> Placements | None:
    """Return placements on the axes of the main mesh; None if the tensor is cut over other axes than these."""
    on_main, last = [REPLICATE] * len(mesh.axes), -1
    for axis, digits, placement in zip(view.axes, view.digits, placements, strict=True):
        same = [
            index
            for index, (main_axis, main_digits) in enumerate(zip(mesh.axes, mesh.digits, strict=True))
            if (
                digits == main_digits
                if axis.size > 1
                else (axis.name, axis.size) == (main_axis.name, main_axis.size)
            )
        ]
        if not same and (axis.size == 1 or placement.shard_dim is None):
            continue
        # In another order of the axes, the split factors would have another meaning.
        if not same or same[0] <= last:
            return None
        on_main[same[0]], last = placement, same[0]
    return tuple(on_main)


def view_of(mesh: DeviceMesh) -> Mesh:
    """Return a torch mesh as a view of all ranks. It may be a submesh or have flattened axes.

    Raises:
        LayoutError: the mesh does not begin at rank 0, or its ranks do not lie at regular distances.
    """
    ranks = mesh.mesh
    names = mesh.mesh_dim_names or tuple(f"axis{axis}" for axis in range(ranks.ndim))
    axes = tuple(
        Axis(name, size, ROLES.get(name, "shard")) for name, size in zip(names, ranks.shape, strict=True)
    )
    steps = tuple(
        _digits(ranks.movedim(dim, -1).reshape(-1, size)[0].tolist()) for dim, size in enumerate(ranks.shape)
    )
    view = Mesh(axes, steps)
    coords = [view.coord(rank) for rank in ranks.flatten().tolist()]
    if ranks.flatten()[0] or coords != list(product(*map(range, ranks.shape))):
        raise LayoutError(
            f"its mesh has the ranks {', '.join(map(str, ranks.flatten().tolist()[:_MAX_SHOWN]))}, which do not begin at "
            "0 or lie at irregular distances"
        )
    return view


def _digits(ranks: list[int]) -> Digits:
    """Return the (size, stride) pairs that generate the ranks along one axis, slowest first.

    For example, [0, 1, 4, 5] gives ((2, 4), (2, 1)), and [0, 2, 4] gives ((3, 2),).
    """
    digits: list[tuple[int, int]] = []
    while len(ranks) > 1:
        stride = ranks[1] - ranks[0]
        run = next((n for n, rank in enumerate(ranks) if rank != ranks[0] + n * stride), len(ranks))
        digits.insert(0, (run, stride))
        ranks = ranks[::run]
    return tuple(digits) or ((1, 1),)
