"""The second phase of starting a model: add activation checkpointing, then call `fully_shard` on units and the root.

No weights move, and the ranks do not communicate. The model may be on meta or have weights, and `parallelize_module`
may have parallelised it. Code that calls `fully_shard` itself does not need this module, as `finalize` accepts any
wrapped model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from shardkit._torch import checkpointed_module, flattened_mesh, is_checkpointed
from shardkit.core.keywords import suggests_keywords
from shardkit.core.text import count, escape
from shardkit.errors import MeshError, PolicyError, UsageError
from shardkit.keys.names import clean_name
from shardkit.layout.classes import ClassDtypes, class_dtypes, is_transformers_layer
from shardkit.layout.parallel import Meshes, add_dispatched_units, apply_plans, has_plan, is_parallel
from shardkit.layout.units import (
    PlannedUnit,
    check_ties,
    class_counts,
    import_name,
    match_auto,
    match_names,
    plan_units,
    shard_units,
    without_ties,
)
from shardkit.layout.wrap_policy import PolicyWording, list_candidates, parse_policy
from shardkit.osft.modules import osft_modules, placement_fn
from shardkit.training.model.between import record_changes
from shardkit.training.ranks.local import buffer_places, local_tensor

Policy = str | type[nn.Module] | Iterable[str | type[nn.Module]] | Callable[[str, nn.Module], bool]
"""See `shardkit.wrap`."""

_USAGE = (
    'give "auto", "none", classes, class names, import paths ("pkg.mod.Class"), module paths ("model.layers.*"), a set '
    "of these, or a function (name, module) -> bool"
)
POLICY = PolicyWording("policy", 'policy="{}"', _USAGE)
CHECKPOINTING = PolicyWording(
    "activation_checkpointing", 'activation_checkpointing="{}"', _USAGE, effect="checkpoints nothing"
)

# Names of mesh axes in torchtitan, transformers, Lightning and torch's own tutorials.
_REPLICATE_AXES = ("dp_replicate", "replicate", "ddp")
_SHARD_AXES = ("dp_shard", "fsdp", "shard", "dp", "data_parallel", "dp_shard_cp")
_TENSOR_AXES = ("tp", "tensor_parallel")
_OTHER_AXES = ("pp", "ep", "efsdp", "sp")
_CONTEXT, _WITH_CONTEXT = "cp", "dp_shard_cp"

# Parameters outside FSDP that already have a hook that averages their gradients.
_AVERAGED = WeakIdKeyDictionary()


@overload
def bf16_mixed_precision(strategy: None = None) -> MixedPrecisionPolicy: ...


@overload
def bf16_mixed_precision(strategy: object) -> MixedPrecisionPolicy | MixedPrecision: ...


def bf16_mixed_precision(strategy: object = None) -> MixedPrecisionPolicy | MixedPrecision:
    """Return the policy of bf16 training: parameters are gathered as bf16, gradients reduced in fp32.

    Stored parameters, which the optimizer steps, and buffers keep their own dtypes. For FSDP2 the result is
    the policy of a root; `wrap` uses the same for blocks, with `cast_forward_inputs=False`. FSDP1's policy casts
    only the inputs of the root.

    Args:
        strategy: the user of the policy: Lightning's FSDPStrategy or ModelParallelStrategy,
            accelerate's FSDP plugin, FullyShardedDataParallel, or an instance or name of one of these;
            None for `fully_shard` (FSDP2).

    Returns:
        A policy of the class that the strategy needs: torch's MixedPrecision for FSDP1, MixedPrecisionPolicy for FSDP2.

    Raises:
        UsageError: the strategy is none of these.
    """
    bf16, fp32 = torch.bfloat16, torch.float32
    if strategy is not None and _is_fsdp1(strategy):
        return MixedPrecision(param_dtype=bf16, reduce_dtype=fp32, cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32)


def _is_fsdp1(strategy: object) -> bool:
    """True for a strategy of FSDP1, False for one of FSDP2. Lightning and accelerate are not imported."""
    version = getattr(strategy, "fsdp_version", None)  # accelerate's plugin
    kind = strategy if isinstance(strategy, type) else type(strategy)
    names = [strategy] if isinstance(strategy, str) else [base.__name__ for base in kind.__mro__]
    for name in names:
        if version == 1 or name in ("FSDPStrategy", "FullyShardedDataParallel", "fsdp", "fsdp1"):
            return True
        if version == 2 or name in ("ModelParallelStrategy", "FSDPModule", "fsdp2"):
            return False
    raise UsageError(
        f"bf16_mixed_precision: {escape(names[0])} is not a known FSDP strategy",
        hint="give Lightning's strategy, accelerate's FSDP plugin, FullyShardedDataParallel, 'fsdp1' or 'fsdp2'",
    )


@suggests_keywords
def wrap(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    policy: Policy = "auto",
    activation_checkpointing: bool | Policy = False,
    mixed_precision: Literal["bf16"] | MixedPrecisionPolicy | None = "bf16",
    reshard_after_forward: bool | int | None = None,
    cpu_offload: bool = False,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    expert_mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Shard a model in place with `fully_shard`: each unit, inner ones first, and the root last.

    Before that, a tensor-parallel axis and an `expert_mesh` parallelise it by the plans of its class, as
    transformers does for a `DistributedConfig`.

    Args:
        model: the model of `prepare`, with parameters on meta, or a model with weights. It may have DTensors from
            `parallelize_module`.
        mesh: a mesh of one axis shards; of two axes, the first replicates (HSDP). An axis `cp` after the sharding
            axis shards too, as if the two were one; attention over `cp` is left to the caller. For a tensor-parallel
            axis (`tp`) the `tp_plan` of the model's class is applied first; the axis is ignored if the model has no
            plan or is parallelised already. With `tp` alone, `fully_shard` is not called, and everything is computed
            in the dtype of the parameters.
        policy: "auto" (the blocks that the model names itself, or else those of its lists of blocks; blocks
            that would untie a tied parameter are left to the root), "none" (one unit), a class, a class name,
            an import path ("pkg.mod.Class"), a module path ("model.layers", "model.layers.*"), a set of
            these, or a function (name, module) -> bool.
        activation_checkpointing: True checkpoints every unit; a policy checkpoints the modules
            that it matches.
        mixed_precision: "bf16" is `bf16_mixed_precision()` on the root. Blocks have the same without
            `cast_forward_inputs`, so that values that the model computes in fp32 between them stay fp32. A torch
            `MixedPrecisionPolicy` is used unchanged on the root and on all units. None computes in
            the parameters' dtype. OSFT factors are computed in the dtype of the weights around them.
        reshard_after_forward: applies to the units. None frees every unit after its forward except those of the last
            block, which backward needs immediately. With an int, parameters stay sharded over that many ranks. The
            root, which backward also needs first, is never freed.
        cpu_offload: keep parameters, gradients and optimizer state on the CPU.
        shard_placement_fn: chooses the dim of a parameter to shard. None is dim 0, and for the V of OSFT factors dim 1
            if its size can be divided.
        expert_mesh: another mesh over the same ranks, ("efsdp", "ep") or ("dp_replicate", "efsdp", "ep"): experts
            are distributed over `ep` by the `ep_plan` of the model's class, and sharded over `efsdp`.

    Returns:
        The same model.

    Raises:
        PolicyError: a policy matches nothing (the error lists what exists), or the class has no plan for an axis.
        LayoutError: names of one parameter would lie in different units.
        MeshError: there is no axis to shard over, there are more than two axes, `expert_mesh` has other ranks, or OSFT
            is used with anything but data parallelism.
        UsageError: the model is wrapped already, or a value is none of the above.
    """
    _check_arguments(model, mesh)
    _check_factors(model, mesh, expert_mesh)
    record_changes(model)
    meshes = _meshes(model, mesh, expert_mesh)
    if meshes.data is None and cpu_offload:
        raise UsageError(
            "cpu_offload needs an axis to shard over, and the mesh has tp alone",
            hint="offloading is fully_shard's: give the mesh an axis dp_shard",
        )
    paths = choose_units(model, policy)
    dispatched = apply_plans(model, meshes)
    modules = dict(model.named_modules())
    recomputed = [modules[path] for path in _checkpointed_paths(model, paths, activation_checkpointing)]
    if meshes.data is None:  # `tp` alone
        _apply_checkpointing(model, {}, recomputed)
        return model
    precision = _precision(mixed_precision)
    # `wide` says which tensors the model's classes keep in fp32 although the rest computes in bf16, as some routers.
    wide = _class_dtypes(model, precision) if mixed_precision == "bf16" else None
    plan = plan_units(model, add_dispatched_units(model, paths, dispatched), wide)
    settings = {unit.path: _unit_precision(unit, modules[unit.path], precision, wide) for unit in plan.units}
    units = _apply_checkpointing(model, {path: modules[path] for path in paths}, recomputed)
    if wide is not None:
        _cast_buffers(model, wide)
    last, num_batches = _last_block(paths), meshes.data.size()
    # Pinned memory is needed only for transfers to an accelerator.
    pinned = meshes.data.device_type != "cpu"
    offload = CPUOffloadPolicy(pin_memory=pinned) if cpu_offload else OffloadPolicy()
    place = placement_fn(model, meshes.data.size(-1), shard_placement_fn)

    def shard(unit: PlannedUnit, module: nn.Module) -> None:
        fully_shard(
            module,
            mesh=meshes.of_unit(unit.around in dispatched),
            mp_policy=settings[unit.path],
            offload_policy=offload,
            shard_placement_fn=place,
            reshard_after_forward=_is_resharded(unit, last, reshard_after_forward),
        )
        if unit.around in dispatched and isinstance(module, FSDPModule):
            _average_expert_gradients(module, num_batches, meshes)

    shard_units(plan, {**modules, **units}, shard)
    for name in plan.outside:
        _average_outside(meshes.data, modules, name)
    return model


def _is_resharded(unit: PlannedUnit, last: str, requested: bool | int | None) -> bool | int:
    """Return `reshard_after_forward` for one unit.

    Args:
        unit: the unit.
        last: path of the last block. Backward needs it and the root immediately.
        requested: the user's value for all units but the root; None frees all units but the last block's.
    """
    if not unit.around:
        return False
    if requested is not None:
        return requested
    return unit.around != last and not unit.around.startswith(f"{last}.")


def _average_outside(mesh: DeviceMesh, modules: Mapping[str, nn.Module], name: str) -> None:
    """Register forward hooks by which the gradient of a parameter outside FSDP is averaged.

    The parameter's own module may never be called (a ParameterList), but a module around it is, so all get the hook.
    """
    path, _, attribute = name.rpartition(".")
    hook = partial(_average_gradients, mesh, modules[path], attribute)
    for around in ("", *accumulate(path.split("."), "{}.{}".format)):
        if around in modules:
            modules[around].register_forward_pre_hook(hook)


def _check_factors(model: nn.Module, mesh: DeviceMesh, experts: DeviceMesh | None) -> None:
    """Raise an error if something other than `fully_shard` would cut the factors of an OSFT layer."""
    if not osft_modules(model):
        return
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    axes = [name for name in (*_TENSOR_AXES, "pp", "ep") if sizes.get(name, 1) > 1]
    axes += ["ep"] if experts is not None and "ep" not in axes else []
    axes = axes or ["tp: the model is parallelised already"] * is_parallel(model)
    if axes:
        raise MeshError(
            f"OSFT: the factors of a layer are not cut over {' and '.join(axes)}",
            hint="take a mesh of dp_replicate and dp_shard",
        )


def _meshes(model: nn.Module, mesh: DeviceMesh, experts: DeviceMesh | None) -> Meshes:
    """Return the meshes over which the parts of a model are sharded."""
    names = mesh.mesh_dim_names or ()
    tensor = next((name for name in names if name in _TENSOR_AXES), None)
    if experts is not None:
        _check_experts(mesh, experts)
        if is_parallel(model):
            raise UsageError(
                "the model is parallelised already, and expert_mesh would do it again",
                hint="leave expert_mesh out",
            )
    if is_parallel(model) or not (has_plan(model) or experts):
        tensor = None
    if tensor is not None and mesh.ndim == 1:
        return Meshes.of(mesh, (), tensor, experts)
    data = _data_mesh(mesh)
    return replace(Meshes.of(mesh, (), tensor, experts), data=data) if names else Meshes(data=data)


def _check_experts(mesh: DeviceMesh, experts: DeviceMesh) -> None:
    names = experts.mesh_dim_names or ()
    if experts.ndim not in (2, 3) or names[-1:] != ("ep",) or mesh.mesh_dim_names is None:
        raise MeshError(
            f"expert_mesh has the axes {', '.join(names) or 'without names'}, and the last one has to be ep",
            hint='init_device_mesh(..., mesh_dim_names=("efsdp", "ep")), beside a mesh whose axes have names',
        )
    if sorted(experts.mesh.flatten().tolist()) != sorted(mesh.mesh.flatten().tolist()):
        raise MeshError(
            f"expert_mesh has {experts.size()} ranks, and not those of the mesh, which has {mesh.size()}",
            hint="efsdp x ep is dp_shard x tp",
        )


def _average_expert_gradients(module: FSDPModule, num_batches: int, meshes: Meshes) -> None:
    """Make the gradients of experts means over all batches; each rank of an expert has seen several of them.

    Source: transformers 5.23, distributed/fsdp.py, apply_fully_sharded_data_parallelism. A sum is forced because gloo
    has no reduction that divides.
    """
    module.set_gradient_divide_factor(float(num_batches))
    assert meshes.expert_data is not None
    if meshes.expert_data.size(-1) > 1:
        module.set_force_sum_reduction_for_comms(True)


def _check_arguments(model: nn.Module, mesh: object) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(
            f"wrap needs a DeviceMesh, and was given {type(mesh).__name__}",
            hint='init_device_mesh("cuda", (num_ranks,), mesh_dim_names=("dp_shard",)) makes one',
        )
    for path, module in model.named_modules():
        kinds = {
            "sharded by fully_shard": FSDPModule,
            "wrapped by FSDP1": FullyShardedDataParallel,
            "wrapped by DistributedDataParallel": DistributedDataParallel,
        }
        for text, kind in kinds.items():
            if isinstance(module, kind):
                raise UsageError(
                    f"the model is wrapped already: {escape(path) or 'its root'} is {text}",
                    hint="wrap a model once; one that was wrapped by other means goes to finalize as it is",
                )


def _data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the data-parallel axes of a mesh: (shard,) or (replicate, shard).

    An axis of context parallelism shards too: dp_shard and cp become one axis, as in torchtitan and accelerate.
    """
    names, sizes = mesh.mesh_dim_names, tuple(mesh.shape)
    if names is None:
        if mesh.ndim != 1:
            raise MeshError(
                f"a mesh of {mesh.ndim} axes needs their names",
                hint='init_device_mesh(..., mesh_dim_names=("dp_replicate", "dp_shard"))',
            )
        return mesh
    shown = ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
    known_axes = (*_REPLICATE_AXES, *_SHARD_AXES)
    data = [
        n
        for n, size in zip(names, sizes, strict=True)
        if n not in _TENSOR_AXES and (size > 1 or n in known_axes)
    ]
    has_both = data[1:][-1:] == [_CONTEXT] and data[-2] not in _REPLICATE_AXES
    foreign = [name for name in data if name in _OTHER_AXES] + [
        name for name in data[:-1] if name == _CONTEXT
    ]
    if foreign or len(data) - has_both > 2:
        raise MeshError(
            f"cannot tell which axes of the mesh ({shown}) data is spread over",
            hint='give the part that shards, such as mesh["dp_shard"] or mesh["dp_replicate", "dp_shard"]',
        )
    if not data and mesh.ndim == 1 and names[0] not in _TENSOR_AXES:
        data = [names[0]]  # a world of one
    if not data or data[-1] in _REPLICATE_AXES:
        raise MeshError(
            f"the mesh ({shown}) has no axis to shard over, or that axis is not the last",
            hint="name one dp_shard, after dp_replicate; without sharding, use DistributedDataParallel",
        )
    if has_both:
        return flattened_mesh(mesh, tuple(data[-2:]), _WITH_CONTEXT, tuple(data[:-2]))
    return mesh if tuple(data) == tuple(names) else mesh[data[0] if len(data) == 1 else tuple(data)]


def _precision(value: str | MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    if value is None:
        return MixedPrecisionPolicy()
    if value == "bf16":
        return bf16_mixed_precision()
    if isinstance(value, MixedPrecisionPolicy):
        return value
    raise UsageError(
        f"mixed_precision cannot be {value!r}", hint='give "bf16", None or a torch MixedPrecisionPolicy'
    )


def _class_dtypes(model: nn.Module, precision: MixedPrecisionPolicy) -> ClassDtypes:
    """Return the dtype that a model's classes give each tensor of a model that is wanted in the policy's `param_dtype`.

    Most tensors get that dtype; some classes keep tensors in fp32. To find these, a second model is built on meta in that
    dtype, unless all floating tensors of the model have the dtype already.
    """
    compute_dtype = precision.param_dtype
    assert compute_dtype is not None
    tensors = (*model.parameters(), *model.buffers())
    is_asked = any(x.is_floating_point() and x.dtype != compute_dtype for x in tensors)
    return class_dtypes(model, compute_dtype) if is_asked else ClassDtypes(default_dtype=compute_dtype)


def _unit_precision(
    unit: PlannedUnit, module: nn.Module, precision: MixedPrecisionPolicy, wide: ClassDtypes | None
) -> MixedPrecisionPolicy:
    """Return the mixed-precision policy of a unit. `wide` has the dtypes of `_class_dtypes`, or None.

    Unless the caller gave a policy, a block does not cast its inputs, because a cast would round values that the
    model passes between blocks in fp32 (rotary tables, residuals).
    """
    if unit.is_wide:
        return replace(precision, param_dtype=torch.float32, cast_forward_inputs=False)
    if unit.factors_of is not None and precision.param_dtype is None:
        precision = replace(precision, param_dtype=unit.factors_of, reduce_dtype=torch.float32)
    if unit.parameters is not None:  # the unit around it has cast the inputs
        return replace(precision, cast_forward_inputs=False, output_dtype=None)
    if wide is None or not unit.path:
        return precision
    is_block = any(part.isdecimal() for part in unit.path.split("."))
    has_masters = any(
        p.is_floating_point()
        and p.dtype != wide.default_dtype
        and wide.of(clean_name(f"{unit.path}.{name}")) is wide.default_dtype
        for name, p in module.named_parameters()
    )
    # A unit around the blocks (embeddings, a tower) often gets its inputs in the dtype of its weights. Before the unit
    # is gathered, this is the dtype of the master weights.
    return replace(precision, cast_forward_inputs=has_masters and not is_block)


def _cast_buffers(model: nn.Module, wide: ClassDtypes) -> None:
    """Cast non-persistent buffers to the dtype that they have in a model built in the compute dtype.

    Otherwise, values that are added to an fp32 buffer would become fp32.
    """
    for place in buffer_places(model, once=True):
        class_dtype = None if place.persistent else wide.buffers.get(place.fqn)
        if class_dtype is not None and place.tensor.dtype is torch.float32:
            setattr(place.module, place.name, place.tensor.to(class_dtype))


def _average_gradients(mesh: DeviceMesh, holder: nn.Module, name: str, *_: object) -> None:
    """Register a hook that averages the gradient of a parameter outside FSDP over all ranks, as FSDP does for its own.

    This happens in the forward, because `finalize` replaces the parameter. If gradients add up over several
    backwards, the part that was averaged before is equal on all ranks and does not change.
    """
    parameter = getattr(holder, name)
    if not parameter.requires_grad or parameter in _AVERAGED:
        return

    def average(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradient = local_tensor(parameter.grad)  # a DTensor under tensor parallelism
        # A sum in fp16 may overflow.
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        for axis in range(mesh.ndim):
            dist.all_reduce(total, group=mesh.get_group(axis))
        gradient.copy_(total.div_(mesh.size()))

    parameter.register_post_accumulate_grad_hook(average)
    _AVERAGED[parameter] = None


def _last_block(paths: Iterable[str]) -> str:
    """Return the last unit that lies in no other unit."""
    last = ""
    for path in paths:
        if not (last and path.startswith(f"{last}.")):
            last = path
    return last


def _checkpointed_paths(model: nn.Module, units: list[str], policy: bool | Policy) -> list[str]:
    if policy is False:
        return []
    if policy is not True:
        return match_policy(model, policy, CHECKPOINTING)
    if not units:
        raise PolicyError(
            "activation_checkpointing=True checkpoints the units, and there are none",
            hint=f"give it a policy of its own, such as {CHECKPOINTING.of('auto')}, or units: {POLICY.of('auto')}",
        )
    # An inner unit in a checkpointed one would be computed a third time.
    return [path for path in units if not any(path.startswith(f"{outer}.") for outer in units)]


def _apply_checkpointing(
    model: nn.Module, units: Mapping[str, nn.Module], chosen: Iterable[nn.Module]
) -> dict[str, nn.Module]:
    """Checkpoint the activations of modules; return the units, with wrappers in place of wrapped modules."""
    wrappers: dict[int, nn.Module] = {}
    for module in chosen:
        if is_transformers_layer(module):
            _enable_own_checkpointing(module)
        elif not is_checkpointed(module):
            wrappers[id(module)] = checkpointed_module(module)
    named = model.named_modules(remove_duplicate=False)
    wrapped = {path: wrappers[id(module)] for path, module in named if id(module) in wrappers}
    # Inner modules first, so that no path contains a wrapper yet.
    for path in sorted(wrapped, key=lambda path: -path.count(".")):
        model.set_submodule(path, wrapped[path])
    return {path: wrappers.get(id(module), module) for path, module in units.items()}


def _enable_own_checkpointing(module: Any) -> None:
    # `gradient_checkpointing_enable` does the same for all layers. Source: transformers 5.23,
    # _set_gradient_checkpointing.
    module.gradient_checkpointing = True
    module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def choose_units(model: nn.Module, policy: Policy) -> list[str]:
    """Return the paths of the modules other than the root that become units, in module order.

    Args:
        model: a model that is not wrapped yet.
        policy: see `shardkit.wrap`.

    Raises:
        PolicyError: the policy matches nothing, or is not a policy.
        LayoutError: the policy would put the names of one parameter into different units.
    """
    chosen = match_policy(model, policy, POLICY)
    if isinstance(policy, str) and policy.strip() == "auto":
        chosen = without_ties(model, chosen)
    check_ties(model, chosen, POLICY)
    return chosen


def match_policy(model: nn.Module, policy: Policy, wording: PolicyWording) -> list[str]:
    """Return the paths of the modules other than the root that a policy matches, in module order.

    Args:
        model: the model.
        policy: see `shardkit.wrap`.
        wording: the words for messages.

    Raises:
        PolicyError: this is no policy, it or a member of it matches nothing, or it matches modules without a forward.
    """
    if isinstance(policy, str):
        chosen = _match_text(model, policy, wording)
    elif isinstance(policy, type | Iterable):
        members = [policy] if isinstance(policy, type) else list(policy)
        classes = [member for member in members if isinstance(member, type)]
        names = [member for member in members if isinstance(member, str)]
        if not members or len(classes) + len(names) < len(members):
            raise PolicyError(f"{wording.name}: holds no classes or names: {members}", hint=wording.usage)
        matched = {*_match_classes(model, classes, wording), *match_names(model, sorted(names), wording)}
        chosen = [path for path, _ in model.named_modules() if path in matched]
    elif callable(policy):
        chosen = _match_predicate(model, policy, wording)
    else:
        raise PolicyError(f"{wording.name}: cannot be of type {type(policy).__name__}", hint=wording.usage)
    _check_forward(model, chosen, wording)
    return chosen


def _match_text(model: nn.Module, policy: str, wording: PolicyWording) -> list[str]:
    parsed = parse_policy(policy, wording)
    if parsed.kind == "function":
        raise PolicyError(
            f"{wording.name}: {escape(policy)} shards the model itself",
            hint="call it with the model and the mesh instead of wrap; finalize takes a model wrapped by anybody",
        )
    if parsed.kind == "auto":
        return match_auto(model, wording)
    return match_names(model, parsed.names, wording)


def _match_classes(model: nn.Module, classes: list[type], wording: PolicyWording) -> list[str]:
    modules = [(path, module) for path, module in model.named_modules() if path]
    absent = [c.__name__ for c in classes if not any(isinstance(module, c) for _, module in modules)]
    if absent:
        raise _no_match_error(model, f"no module is a {' or a '.join(sorted(absent))}", absent, wording)
    return [path for path, module in modules if isinstance(module, tuple(classes))]


def _match_predicate(
    model: nn.Module, predicate: Callable[[str, nn.Module], bool], wording: PolicyWording
) -> list[str]:
    name = getattr(predicate, "__name__", type(predicate).__name__)
    try:
        matched = [path for path, module in model.named_modules() if path and predicate(path, module)]
    except TypeError as error:
        raise PolicyError(
            f"{wording.name}: {escape(name)} cannot be called with a name and a module: {error}",
            hint="it takes (name, module) and returns whether the module is a unit",
        ) from error
    if not matched:
        raise _no_match_error(
            model,
            f"{escape(name)} chose none of {count(len(list(model.modules())) - 1, 'module')}",
            [],
            wording,
        )
    return matched


def _no_match_error(
    model: nn.Module, message: str, class_names: Iterable[str], wording: PolicyWording
) -> PolicyError:
    return PolicyError(
        f"{wording.name}: {message}",
        problems=list_candidates(class_counts(model), class_names),
        hint=f"the module classes that exist are listed above; {wording.of('none')} {wording.effect}",
    )


def _check_forward(model: nn.Module, paths: Iterable[str], wording: PolicyWording) -> None:
    """Raise an error for containers. They are never called, so their parameters would not be gathered."""
    modules = dict(model.named_modules())
    containers = [
        path
        for path in paths
        if isinstance(modules[path], nn.ModuleList | nn.ModuleDict)
        and type(modules[path]).forward is nn.Module.forward
    ]
    if containers:
        raise PolicyError(
            f"{wording.name}: {count(len(containers), 'module')} that it matches cannot be units: they have no forward",
            problems=[f"{escape(path)} ({type(modules[path]).__name__})" for path in containers],
            hint=f"name what is in it: {escape(containers[0])}.*",
        )


def layer_policy(*paths: str) -> set[type[nn.Module]]:
    """Return the classes at import paths, for `wrap` and for FSDP1's own policies.

    Args:
        paths: import paths, such as "transformers.models.llama.modeling_llama.LlamaDecoderLayer".

    Raises:
        PolicyError: some paths do not lead to a class of modules; the error lists them all.
    """
    classes: set[type[nn.Module]] = set()
    problems = []
    for path in paths:
        module_name, _, attribute = path.rpartition(".")
        try:
            if not module_name:
                raise PolicyError(f"layer_policy: {escape(path)} is not an import path (pkg.mod.Class)")
            value = import_name(module_name, attribute, PolicyWording("layer_policy", "{}", _USAGE))
            if not (isinstance(value, type) and issubclass(value, nn.Module)):
                raise PolicyError(f"layer_policy: {escape(path)} is not a class of modules")
            classes.add(value)
        except PolicyError as error:
            problems.append(f"{escape(path)}: {error.message.partition(': ')[2]}")
    if problems or not paths:
        raise PolicyError(
            "layer_policy: no classes to wrap"
            if not paths
            else f"layer_policy: {count(len(problems), 'path')} cannot be used",
            problems=problems,
            hint="give import paths of module classes, such as "
            "transformers.models.llama.modeling_llama.LlamaDecoderLayer",
        )
    return classes
