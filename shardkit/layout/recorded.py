"""Read the layout that a manifest records: a mesh, and the placement of every tensor.

Anyone may have written the manifest, so every number is checked before use.

Besides the main mesh there may be *views*: further meshes over the same ranks, such as that of experts. An axis of a view is
given by *steps*: a step is (size, stride), one digit of the position on the axis. In a world of 8, the axis of size 4 with
the step (4, 2) goes over the ranks 0, 2, 4, 6. An axis that was flattened from several has one step for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from shardkit.core.catalog import TensorEntry
from shardkit.core.mesh import Axis, Mesh, Role, check_size, parse_mesh
from shardkit.core.placements import Placement, Placements
from shardkit.core.regions import Shape
from shardkit.core.text import count, escape
from shardkit.errors import LayoutError, UsageError
from shardkit.files import manifest
from shardkit.layout.layout import Layout, TensorLayout, innermost_unit

_MAX_DIMS = 64  # torch's own limit


def recorded_layout(content: manifest.Presharded) -> Layout:
    """Return the layout of a pre-sharded directory, without its ties.

    Raises:
        LayoutError: the manifest contradicts itself; the error names the tensor or the axis.
    """
    try:
        mesh = _mesh(content.mesh)
    except UsageError as error:
        raise LayoutError(error.message) from error
    views = [_view(view, mesh) for view in content.meshes or ()]
    return Layout(
        origin="traced" if content.layout.origin == "traced" else "declared",
        mesh=mesh,
        units=content.units,
        tensors={fqn: _tensor_layout(fqn, tensor, mesh, views) for fqn, tensor in content.tensors.items()},
        policy=content.layout.policy,
    )


def _mesh(record: manifest.RecordedMesh) -> Mesh:
    """Return the main mesh that a manifest records. Raises UsageError if it is not one that `--mesh` takes."""
    axes = [f"{axis.name}:{axis.role}={axis.size}" for axis in record.axes]
    stages = [] if record.pp is None else [f"pp={record.pp}"]
    return parse_mesh(",".join([*stages, *axes, *([] if record.ep is None else [f"ep={record.ep}"])]), None)


def _view(view: manifest.MeshView, mesh: Mesh) -> Mesh:
    """Return a further mesh over the ranks of `mesh`, after checking that it reaches no rank beyond them.

    Of the role of an axis only "tensor" matters here: which ranks have files is decided by the main mesh. So "replicate"
    becomes "shard" like any other word in the manifest. It is not checked whether two axes reach the same ranks.
    """
    if not view.axes or any(prod(size for size, _ in axis.steps) != axis.size for axis in view.axes):
        raise LayoutError("meshes: the steps of an axis do not make up its size")
    digits = [step for axis in view.axes for step in axis.steps if step[0] != 1]
    if any(size < 1 or stride < 1 for size, stride in digits):
        raise LayoutError("meshes: an axis has no ranks")
    if sum((size - 1) * stride for size, stride in digits) >= mesh.size:
        raise LayoutError("meshes: an axis has more ranks than the world")
    axes = tuple(
        Axis(axis.name, axis.size, "tensor" if axis.role == "tensor" else "shard") for axis in view.axes
    )
    return Mesh(axes, tuple(axis.steps for axis in view.axes))


def _tensor_layout(fqn: str, tensor: manifest.ShardedTensor, mesh: Mesh, views: list[Mesh]) -> TensorLayout:
    """Return the layout of one tensor, on the main mesh or on the view with the number in the manifest."""
    if len(tensor.shape) > _MAX_DIMS:
        raise LayoutError(f"{escape(fqn)}: {len(tensor.shape)} dims, torch has at most {_MAX_DIMS}")
    if tensor.mesh is not None and tensor.mesh >= len(views):
        raise LayoutError(f"{escape(fqn)}: it lies on mesh {tensor.mesh} of {len(views)}")
    if tensor.stage is not None and not 0 <= tensor.stage < mesh.pp:
        raise LayoutError(f"{escape(fqn)}: it lies on stage {tensor.stage} of {mesh.pp}")
    view = None if tensor.mesh is None else views[tensor.mesh]
    return TensorLayout(
        fqn=fqn,
        shape=tensor.shape,
        placements=_placements(tensor.placements, tensor.shape, view or mesh, fqn),
        unit=tensor.unit,
        is_buffer=tensor.buffer,
        mesh=view,
        stage=tensor.stage,
    )


def _placements(texts: tuple[str, ...], shape: Shape, mesh: Mesh, fqn: str) -> Placements:
    if len(texts) != len(mesh.axes):
        raise LayoutError(
            f"{escape(fqn)}: not one placement for each of {count(len(mesh.axes), 'mesh axis', 'mesh axes')}"
        )
    placements = tuple(map(Placement.parse, texts))
    if any(p.shard_dim is not None and p.shard_dim >= len(shape) for p in placements):
        raise LayoutError(f"{escape(fqn)}: a placement cuts a dim that the tensor lacks")
    return placements


def saved_layout(content: manifest.SavedState, tensors: Mapping[str, TensorEntry]) -> Layout | None:
    """Return the layout of a checkpoint from `shardkit.save`, without its ties; None if its manifest records none.

    The layout has the names in the checkpoint. Optimizer states belong to the unit of their parameter.

    Args:
        content: the checkpoint's manifest.
        tensors: the tensors of the checkpoint's catalog.

    Raises:
        LayoutError: the manifest contradicts itself; the error names the tensor or the axis.
    """
    if content.layout is None:
        return None
    mesh = saved_mesh(content.layout)
    if mesh.size != content.world_size:
        raise LayoutError(f"the mesh {mesh} is not of {count(content.world_size, 'rank')}")
    views = [_view(view, mesh) for view in content.layout.meshes or ()]
    index = {unit.path: number for number, unit in enumerate(content.units)}
    placed = {name: group for group in content.layout.placed for name in group.names}
    layouts = dict[str, TensorLayout]()
    for fqn, entry in tensors.items():
        texts, view, group = tuple("R" for _ in mesh.axes), None, placed.get(fqn)
        if group is not None:
            if group.mesh is not None and group.mesh >= len(views):
                raise LayoutError(f"{escape(fqn)}: it lies on mesh {group.mesh} of {len(views)}")
            texts, view = group.placements, None if group.mesh is None else views[group.mesh]
        layouts[fqn] = TensorLayout(
            fqn=fqn,
            shape=entry.shape,
            placements=_placements(texts, entry.shape, view or mesh, fqn),
            unit=innermost_unit(fqn.removeprefix("optimizer.state.").removeprefix("model."), index),
            # Tensors that are not buffers count towards the bytes that `fully_shard` gathers for a unit
            # (`operations.holdings`). It gathers neither optimizer states nor tensors that lie on no mesh, so these are
            # marked as buffers.
            is_buffer=group is None or not fqn.startswith("model."),
            mesh=view,
        )
    return Layout(origin="traced", mesh=mesh, units=content.units, tensors=layouts, policy="")


def saved_mesh(record: manifest.SavedLayout) -> Mesh:
    """Return the mesh of the ranks that saved a training state.

    Raises:
        LayoutError: the mesh has no ranks, or too many.
    """
    roles: dict[str, Role] = {"replicate": "replicate", "tensor": "tensor"}
    mesh = Mesh(
        tuple(Axis(axis.name, axis.size, roles.get(axis.role, "shard")) for axis in record.axes),
        ep=record.ep or 1,
    )
    if mesh.size < 1:
        raise LayoutError(f"the mesh {mesh} has no ranks")
    try:
        check_size(mesh.size)
    except UsageError as error:
        raise LayoutError(error.message) from error
    return mesh


def record_view(mesh: Mesh) -> manifest.MeshView:
    """Return a further mesh in the form that manifests record."""
    axes = zip(mesh.axes, mesh.digits, strict=True)
    return manifest.MeshView(
        axes=tuple(
            manifest.ViewAxis(name=axis.name, size=axis.size, role=axis.role, steps=steps)
            for axis, steps in axes
        )
    )
