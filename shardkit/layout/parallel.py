"""Apply tensor and expert parallelism as the model's own class plans it, with the same result as in transformers.

transformers applies a model's `tp_plan` and `ep_plan` when it loads with a `DistributedConfig`. The tracing child and
`wrap` call the same functions of transformers on a model that is not wrapped yet; `fully_shard` comes after. Dense
weights then lie on the axes (dp_shard, tp), and experts on (efsdp, ep), another view of the same ranks.

Only code that has a model imports this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardkit.core.text import escape
from shardkit.errors import PolicyError
from shardkit.layout.units import describe_error

_OLDEST = "5.20"  # of transformers: before it, plans made no DTensors that `fully_shard` takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """The meshes that the parts of a model are sharded over. All of them consist of the same ranks."""

    data: DeviceMesh | None
    """Replicate axis, shard axis or both, for `fully_shard`; None if `fully_shard` is not called."""
    tp: DeviceMesh | None = None
    """The axis of tensor parallelism."""
    ep: DeviceMesh | None = None
    """The axis of expert parallelism."""
    expert_data: DeviceMesh | None = None
    """Used in place of `data` for modules on `ep`."""

    @classmethod
    def of(
        cls, mesh: DeviceMesh, data: Sequence[str], tensor: str | None, experts: DeviceMesh | None = None
    ) -> Meshes:
        """Split a mesh into its parts.

        Args:
            mesh: a mesh whose axes have names.
            data: names of its replicate axis and shard axis; neither, one or both.
            tensor: name of its tensor-parallel axis, or None.
            experts: another mesh over the same ranks; its last axis is the one of expert parallelism.
        """
        names = mesh.mesh_dim_names
        spread = mesh if tuple(data) == names else None
        if data and spread is None:
            spread = mesh[data[0] if len(data) == 1 else tuple(data)]
        tp = None if tensor is None else mesh[tensor] if mesh.ndim > 1 else mesh
        if experts is None or experts.mesh_dim_names is None:
            return cls(data=spread, tp=tp)
        if tp is None:  # experts ask for the ranks that see the same tokens
            whole = init_device_mesh(mesh.device_type, (mesh.size(), 1), mesh_dim_names=("ranks", "tp"))
            tp = whole["tp"]
        *rest, last = experts.mesh_dim_names
        return cls(data=spread, tp=tp, ep=experts[last], expert_data=experts[tuple(rest)])

    def of_unit(self, is_dispatched: bool) -> DeviceMesh:
        """Return the mesh for a unit's `fully_shard` call; `is_dispatched` if the unit's experts lie on `ep`."""
        mesh = self.expert_data if is_dispatched else self.data
        assert mesh is not None
        return mesh


def has_plan(model: nn.Module) -> bool:
    """True for a model of transformers whose class plans tensor parallelism."""
    return bool(getattr(model, "tp_plan", None))


def is_parallel(model: nn.Module) -> bool:
    """True if tensor or expert parallelism was applied to a model, that is, if it has a DTensor."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def apply_plans(model: nn.Module, meshes: Meshes) -> list[str]:
    """Parallelise a model in place by its own plans. Tied parameters stay tied.

    Args:
        model: a model that is not wrapped yet, on meta or with weights; the same one on each rank.
        meshes: the meshes to use; axes of size 1 have no effect.

    Returns:
        Paths of the modules whose parameters lie on the mesh of expert parallelism.

    Raises:
        PolicyError: transformers is too old, the model has no plan for an axis, or transformers refuses the plan.
    """
    tp, ep = meshes.tp, meshes.ep
    tp_size, ep_size = 1 if tp is None else tp.size(), 1 if ep is None else ep.size()
    names = [name for name, size in (("tp", tp_size), ("ep", ep_size)) if size > 1]
    if not names:
        return []
    missing = [name for name in names if not getattr(model, f"{name}_plan", None)]
    if missing:
        raise PolicyError(
            f"{type(model).__name__} has no {' and no '.join(f'{name}_plan' for name in missing)}, which says how its "
            f"weights are cut over the mesh axis {missing[0]}",
            hint="parallelise it by a function of your own (--wrap module:function, or parallelize_module before wrap), "
            "or by --parallel-rule 'GLOB=colwise'",
        )
    ties = _ties(model)
    for places in ties:  # transformers finds a parameter by each of its names
        for module, name, _ in places[1:]:
            tied = module.get_parameter(name)
            module.register_parameter(name, nn.Parameter(tied.detach(), requires_grad=tied.requires_grad))
    try:
        _apply(model, meshes, tp_size=tp_size, ep_size=ep_size)
    except ImportError as error:
        import transformers

        raise PolicyError(
            f"the mesh axis {names[0]} needs transformers {_OLDEST} or later; {transformers.__version__} is installed",
            hint="install a newer transformers, or parallelise the model by a function of your own",
        ) from error
    except (ValueError, AttributeError, OSError) as error:
        raise PolicyError(
            f"transformers cannot apply the {' and '.join(f'{name}_plan' for name in names)} of "
            f"{type(model).__name__}: {describe_error(error)}"
        ) from error
    _restore_ties(model, ties)
    return [
        path
        for path, module in model.named_modules()
        if any(isinstance(p, DTensor) and p.device_mesh == ep for p in module.parameters(recurse=False))
    ]


def add_dispatched_units(model: nn.Module, units: Iterable[str], dispatched: Iterable[str]) -> list[str]:
    """Return the paths of units and of dispatched expert modules, in module order.

    Experts need units of their own, because they lie on another mesh than the rest.
    """
    unit_paths = {*units, *dispatched}
    return [path for path, _ in model.named_modules() if path in unit_paths]


def _apply(model: Any, meshes: Meshes, *, tp_size: int, ep_size: int) -> None:
    """Make the calls that transformers makes in `maybe_distribute_model`, except those for FSDP.

    Source: transformers 5.20 to 5.23, distributed/mixin.py, tensor_parallel.py, expert_parallel.py.
    """
    import transformers.distributed as lazy_module
    from transformers.distributed import tensor_parallel

    distributed: Any = lazy_module  # it exports its names lazily
    dp_size = 1 if meshes.data is None else meshes.data.size(-1)
    # The constructor refuses an ep_size that does not divide fsdp_size * tp_size, so it gets the real size. After that
    # the size is 1, or a class without a plan for FSDP would be refused below; `fully_shard` needs no such plan.
    config = distributed.DistributedConfig(tp_size=tp_size, ep_size=ep_size, fsdp_size=dp_size)
    config.fsdp_size = 1
    if hasattr(model, "_resolve_parallel_plans"):  # 5.23
        tp_plan, ep_plan, _ = model._resolve_parallel_plans(config)
    else:
        tp_plan, ep_plan = tensor_parallel.resolve_parallel_plans(model, config)
    if meshes.tp is not None and tp_size > 1:
        tensor_parallel.apply_tensor_parallelism(model, meshes.tp, tp_plan)
    # `Meshes.of` gives a `tp` wherever there is an `ep`. For an `ep` of size 1, `ep_plan` is empty and nothing is done.
    if meshes.tp is not None and meshes.ep is not None:
        try:
            from transformers.distributed.expert_parallel import apply_expert_parallelism
        except ImportError:  # 5.20 and 5.21
            apply_expert_parallelism = tensor_parallel.apply_expert_parallelism
        apply_expert_parallelism(model, meshes.ep, meshes.tp, ep_plan)


def _ties(model: nn.Module) -> list[list[tuple[nn.Module, str, str]]]:
    """Return the places of each tied parameter, as (module, attribute, full name)."""
    places: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, name, f"{path}.{name}" if path else name))
    return [group for group in places.values() if len(group) > 1]


def _restore_ties(model: nn.Module, ties: list[list[tuple[nn.Module, str, str]]]) -> None:
    """Put one parameter at all places of a tie again, because a plan makes a new parameter at each place.

    Raises:
        PolicyError: the plan cuts the places in different ways, so that they cannot be one parameter.
    """
    for places in ties:
        parameters = [module.get_parameter(name) for module, name, _ in places]
        sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
        if any(
            (p.device_mesh, p.placements) != (sharded[0].device_mesh, sharded[0].placements) for p in sharded
        ):
            names = " and ".join(escape(name) for _, _, name in places)
            raise PolicyError(
                f"the tp_plan of {type(model).__name__} cuts {names} in different ways, and they are one parameter"
            )
        shared = (sharded or parameters)[0]
        for module, name, _ in places:
            module.register_parameter(name, shared)
