"""Record meshes and placements of the tensors of a saved model, for the manifest."""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardkit.core.mesh import ROLES, Mesh
from shardkit.core.placements import Placements
from shardkit.errors import LayoutError
from shardkit.files import manifest
from shardkit.layout.placed import placements_of, view_of
from shardkit.layout.recorded import record_view


def saved_layout(tensors: Iterable[tuple[str, object]], world_size: int) -> manifest.SavedLayout | None:
    """Return the meshes and placements of saved tensors, or None if no mesh has all ranks in their order.

    Args:
        tensors: (stored name, value) from the first rank. Values other than DTensors are not recorded.
        world_size: number of ranks that save.
    """
    views = dict[DeviceMesh, Mesh]()
    names = dict[tuple[Mesh, Placements], list[str]]()
    try:
        for name, tensor in tensors:
            if isinstance(tensor, DTensor):
                mesh = tensor.device_mesh
                views.setdefault(mesh, views.get(mesh) or view_of(mesh))
                names.setdefault((views[mesh], placements_of(tensor)), []).append(name)
    except LayoutError:  # a stage of a pipeline, or placements that no file can have
        return None
    # The mesh with an axis `ep` is only for experts; the main mesh is another one.
    meshes = sorted(dict.fromkeys(mesh for mesh, _ in names), key=lambda mesh: "ep" in mesh.names)
    main = next((mesh for mesh in meshes if mesh.size == world_size and _is_plain(mesh)), None)
    if main is None:
        return None
    other_meshes = [mesh for mesh in meshes if mesh != main]
    cut = {
        (mesh, axis)
        for mesh, placements in names
        for axis, placement in zip(mesh.names, placements, strict=True)
        if placement.shard_dim is not None
    }
    axes = [
        manifest.RecordedAxis(
            name=axis.name,
            size=axis.size,
            role=ROLES.get(axis.name, "shard" if (main, axis.name) in cut else "replicate"),
        )
        for axis in main.axes
    ]
    sizes = {axis.name: axis.size for mesh in other_meshes for axis in mesh.axes}
    return manifest.SavedLayout(
        axes=tuple(axes),
        ep=sizes.get("ep"),
        meshes=tuple(map(record_view, other_meshes)) or None,
        placed=tuple(
            manifest.PlacedTensors(
                placements=tuple(map(str, placements)),
                mesh=None if mesh == main else other_meshes.index(mesh),
                names=tuple(listed),
            )
            for (mesh, placements), listed in names.items()
        ),
    )


def _is_plain(mesh: Mesh) -> bool:
    """True if the ranks are numbered row-major along the axes."""
    return mesh.digits == Mesh(mesh.axes).digits
