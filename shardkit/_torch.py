"""All uses of torch's private names; no other module of shardkit uses one.

Every name here has a test of its own in tests/test_torch_contract.py.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
)
from torch.utils._python_dispatch import TorchDispatchMode

from shardkit._version import TESTED_TORCH, torch_note
from shardkit.errors import ResourceError

P = ParamSpec("P")
R = TypeVar("R")


def _explains_new_torch(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function: if a private name is gone in a torch newer than the tested ones, its error explains that.

    Raises:
        ResourceError: instead of AttributeError, ImportError or TypeError, if torch is newer than the tested versions.
    """

    def refused(error: Exception) -> Exception:
        note = torch_note(torch.__version__)
        if note is None:
            return error
        return ResourceError(
            f"{note}, and {function.__name__} does not work with it: {error}",
            hint=f"install torch {TESTED_TORCH[1]}, or a newer shardkit",
        )

    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generator(*args: P.args, **kwargs: P.kwargs) -> Iterator[Any]:
            try:
                yield from function(*args, **kwargs)
            except (AttributeError, ImportError, TypeError) as error:
                raise refused(error) from error

        return cast(Callable[P, R], generator)

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (AttributeError, ImportError, TypeError) as error:
            raise refused(error) from error

    return guarded


@_explains_new_torch
def init_fake_world(world_size: int) -> None:
    """Make this process rank 0 of a fake world, in which meshes work and collectives do nothing.

    Args:
        world_size: number of ranks.

    Source: torch 2.13, torch/testing/_internal/distributed/fake_pg.py; importing it registers the
    backend "fake".
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # no training job should import it

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


@_explains_new_torch
def shard_of(placement: object) -> tuple[int, int] | None:
    """Return (dim, split factor) of a placement that cuts a dim; None for any other placement.

    The split factor is 1, unless axes further right cut the same dim *before* this one: then it is the number
    of parts that they make. `fully_shard` gives a tensor-parallel parameter such a placement.

    Source: torch 2.13, torch/distributed/tensor/placement_types.py, _StridedShard.
    """
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    if isinstance(placement, _StridedShard):  # before Shard, whose subclass it is in torch 2.6
        return placement.dim, int(placement.split_factor)
    return (placement.dim, 1) if isinstance(placement, Shard) else None


@_explains_new_torch
def pickle_without_strides(metadata: Metadata) -> None:
    """Let `.metadata` be pickled without the unused `strides` of torch 2.15, as earlier versions could not read them.

    Source: torch 2.15, torch/distributed/checkpoint/metadata.py, TensorProperties.__getstate__; __setstate__
    of 2.6 to 2.14 unpacks five fields, that of 2.15 takes five or six.
    """
    for entry in metadata.state_dict_metadata.values():
        properties: Any = getattr(entry, "properties", None)
        if hasattr(properties, "strides"):
            five = properties.__getstate__()[:5]
            properties.__getstate__ = lambda five=five: five


@_explains_new_torch
def flattened_mesh(
    mesh: DeviceMesh, names: tuple[str, ...], into: str, before: tuple[str, ...] = ()
) -> DeviceMesh:
    """Return a mesh with the axes `before`, and one further axis that flattens several axes; it has the same root mesh.

    Args:
        mesh: with named axes.
        names: of the neighbouring axes to flatten.
        into: name of the flattened axis.
        before: names of axes to keep.

    Source: torch 2.13, torch/distributed/device_mesh.py, _flatten and _concatenate; up to 2.9 the parent is sliced.
    """
    one = mesh[names]._flatten(into)
    if not before:
        return one
    if hasattr(DeviceMesh, "_concatenate"):
        return DeviceMesh._concatenate([mesh[before], one])
    all_names = (*before, into)
    return mesh[all_names]


class FSDPShard(NamedTuple):
    """A parameter that `fully_shard` manages, with the properties of the memory for this rank's part."""

    param: nn.Parameter
    """The DTensor in the module."""
    gathered: nn.Parameter | None
    """The whole parameter, which replaces it in the module while the unit is gathered; None before the first time."""
    padded_sizes: tuple[int, ...]
    """Shape of the memory with padding, equal on all ranks, so that it can be all-gathered without a copy."""
    dim: int
    """The dim along which it is padded."""
    on_cpu: bool
    """True if it is offloaded to the CPU."""
    pinned: bool
    """True if it is offloaded to pinned memory."""
    keep: Callable[[torch.Tensor], None]
    """Set the padded memory that is all-gathered; the parameter must be a view of its beginning."""


@_explains_new_torch
def fsdp_shards(model: nn.Module) -> Iterator[FSDPShard]:
    """Yield the parameters that `fully_shard` manages, unit by unit.

    Source: torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param.py; 2.6 has one group for each state.
    """
    states: dict[int, Any] = {}  # by id: all modules of one `fully_shard` call share a state
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            states[id(state)] = state
    for state in states.values():
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:
            for managed in group.fsdp_params if group is not None else ():

                def keep(memory: torch.Tensor, managed: Any = managed) -> None:
                    managed._sharded_param_data = memory.view(-1)

                yield FSDPShard(
                    param=managed.sharded_param,
                    gathered=getattr(managed, "_unsharded_param", None),
                    padded_sizes=tuple(managed.padded_sharded_param_size),
                    dim=managed.fsdp_placement.dim,
                    on_cpu=managed.offload_to_cpu,
                    pinned=managed.pin_memory,
                    keep=keep,
                )


def class_before_sharding(module: object) -> type[Any]:
    """Return a module's class before `fully_shard`, which replaces it by a subclass of FSDPModule and that class.

    Source: torch 2.13, distributed/fsdp/_fully_shard/_fully_shard.py, fully_shard.
    """
    return next(base for base in type(module).__mro__ if not issubclass(base, FSDPModule))


@_explains_new_torch
def non_persistent_buffers(module: nn.Module) -> frozenset[str]:
    """Return the names of a module's own buffers that its state dict leaves out."""
    return frozenset(module._non_persistent_buffers_set)


@contextmanager
@_explains_new_torch
def swappable_parameters(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within this context, the parameters of LSTM, GRU and RNN modules can be swapped (`torch.utils.swap_tensors`).

    These modules keep weak references to their parameters, to notice replaced ones (`torch.func.functional_call`), and
    torch refuses to swap a tensor with weak references. They are removed here, and made anew at the end.
    """
    recurrent = [module for module in modules if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = [None] * len(module._flat_weights)
    try:
        yield
    finally:
        for module in recurrent:
            weights = module._flat_weights
            module._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in weights]


@_explains_new_torch
def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors are views of the same memory; works on the meta device too, which has no memory."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


@_explains_new_torch
def checkpointed_module(module: nn.Module) -> nn.Module:
    """Return a module that recomputes `module` in backward (activation checkpointing); names in its state dict stay.

    Source: torch 2.13, torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py; torchtitan, accelerate
    and Lightning take it from there too.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapper: nn.Module = checkpoint_wrapper(module)
    return wrapper


@_explains_new_torch
def is_checkpointed(module: nn.Module) -> bool:
    """True for a module that `checkpointed_module` returned."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    return isinstance(module, CheckpointWrapper)


class Fsdp2Unit(NamedTuple):
    """The parameters that one `fully_shard` call manages on one mesh, and its settings."""

    mesh: DeviceMesh
    reshard_after_forward: bool | int
    """An int is the number of ranks over which the parameters are sharded after forward."""
    mixed_precision: MixedPrecisionPolicy
    """The policy given to `fully_shard`."""
    compute_dtypes: tuple[torch.dtype | None, ...]
    """The distinct dtypes in which its parameters compute; None is a parameter's own. There is more than one only with
    torch 2.15's `param_dtype_override_fn`."""
    cpu_offload: bool
    parameters: dict[tuple[int, str], nn.Parameter]
    """(id of a module, attribute) -> sharded parameter, even while the gathered one is registered on the module. A tied
    parameter has all its attributes."""


@_explains_new_torch
def fsdp2_units(module: FSDPModule, *, is_root: bool) -> Iterator[Fsdp2Unit]:
    """Yield the parameter groups of a module that `fully_shard` was called on.

    There is one, or several if their meshes differ; there is none if units inside the module have all parameters.

    Args:
        module: with `fully_shard` applied.
        is_root: True if no FSDP module is around it.

    Source: torch 2.6 to 2.15, torch/distributed/fsdp/_fully_shard/_fsdp_state.py, _fsdp_param_group.py,
    _fsdp_param.py.
    """
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.6 has one at most
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    # Without a setting, fully_shard sets True, and the first forward changes that to False on the root. Up to torch 2.7
    # the first forward does so whatever the setting, and this attribute does not exist.
    is_automatic = is_root and getattr(state, "_auto_reshard_after_forward", True)
    for group in groups:
        after = group.post_forward_mesh_info
        reshard: bool | int = after is not None and not is_automatic
        if reshard and after is not group.mesh_info:
            reshard = after.shard_mesh_size
        parameters = {}
        for sharded in group.fsdp_params:
            places = sharded._module_info
            parameters[id(places.module), places.param_name] = sharded.sharded_param
            for holder, name in zip(places.shared_modules, places.shared_param_names, strict=True):
                parameters[id(holder), name] = sharded.sharded_param
        offload = isinstance(group.offload_policy, CPUOffloadPolicy)
        # In torch 2.15 the group has no policy of its own, and each parameter one that is resolved for it.
        policies = [getattr(sharded, "mp_policy", state._mp_policy) for sharded in group.fsdp_params]
        yield Fsdp2Unit(
            mesh=group.mesh_info.mesh,
            reshard_after_forward=reshard,
            mixed_precision=state._mp_policy,
            compute_dtypes=tuple(dict.fromkeys(policy.param_dtype for policy in policies)),
            cpu_offload=offload,
            parameters=parameters,
        )


class Fsdp1Unit(NamedTuple):
    """The flat parameter of one FSDP1 module."""

    fqns: tuple[str, ...]
    """Names of the parameters in it, relative to the module."""
    numels: tuple[int, ...]
    """Size of each whole parameter, in elements."""
    local: torch.Tensor
    """This rank's part, with padding."""
    num_shards: int
    registered: tuple[torch.Tensor, ...]
    """The tensors that modules may have as parameters for it: itself, or views of it (use_orig_params)."""
    shared: tuple[tuple[str, str], ...]
    """(further name, first name) of the tied parameters in it, relative to the module."""
    group: dist.ProcessGroup | None
    """The ranks with the other parts; None if every rank has all of it."""
    device: torch.device
    """The device of computation; it may be stored elsewhere."""
    has_dtensors: bool
    """True if it consists of local parts of DTensors, which tensor parallelism has cut before."""


@_explains_new_torch
def fsdp1_unit(module: FullyShardedDataParallel) -> Fsdp1Unit | None:
    """Return an FSDP1 module's flat parameter; None if modules inside it have all parameters.

    Source: torch 2.13, torch/distributed/fsdp/_flat_param.py: FlatParameter, FlatParamHandle.
    """
    handle: Any = module._handle
    if handle is None:
        return None
    flat = handle.flat_param
    # After a forward without resharding, flat_param is the whole tensor, and _local_shard is still this rank's part.
    local = getattr(flat, "_local_shard", flat)
    numels = tuple(shape.numel() for shape in flat._shapes)
    views = (*(getattr(flat, "_params", None) or ()), *(getattr(flat, "_shared_params", None) or ()))
    shared = tuple(
        (
            f"{tie.module_name}.{tie.param_name}".lstrip("."),
            f"{tie.prim_module_name}.{tie.prim_param_name}".lstrip("."),
        )
        for tie in flat._shared_param_infos
    )
    return Fsdp1Unit(
        fqns=tuple(flat._fqns),
        numels=numels,
        local=local,
        num_shards=handle.world_size,
        registered=(flat, *views),
        shared=shared,
        group=handle.process_group if handle.uses_sharded_strategy else None,
        device=handle.device,
        has_dtensors=any(each is not None for each in flat._param_extensions),
    )


@_explains_new_torch
def is_fsdp1_part(tensor: torch.Tensor) -> bool:
    """True for a tensor that FSDP1 registered as a parameter, which is a flat parameter or a view of one.

    Source: torch 2.13, torch/distributed/fsdp/_common_utils.py, _is_fsdp_flattened.
    """
    return bool(getattr(tensor, "_fsdp_flattened", False))


@_explains_new_torch
def foreach_norms(tensors: list[torch.Tensor], norm_type: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the norm of each tensor, accumulated and returned in `dtype`, with a few kernels for all tensors.

    Source: torch 2.13, torch/nn/utils/clip_grad.py calls it so, in the tensors' own dtype.
    """
    norms: list[torch.Tensor] = list(torch._foreach_norm(tensors, norm_type, dtype=dtype))
    return norms


@_explains_new_torch
def foreach_scale_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors of one device in place by a 0-d tensor on the same device.

    Source: torch 2.13, torch/nn/utils/clip_grad.py.
    """
    torch._foreach_mul_(tensors, factor)


@_explains_new_torch
def times_written(tensor: torch.Tensor) -> int:
    """Return the number of times that a tensor was written in place; works on the meta device too.

    Source: torch 2.13, the version counter of autograd, `Tensor._version`.
    """
    return tensor._version


@_explains_new_torch
def wrap_policy_classes(policy: object) -> frozenset[type]:
    """Return the classes that a ModuleWrapPolicy of FSDP1 wraps; none for any other policy.

    Only messages use it, so it is no error if a version of torch has another name for the attribute.

    Source: torch 2.13, torch/distributed/fsdp/wrap.py.
    """
    return frozenset(getattr(policy, "_module_classes", ()))


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that calls `on_operation` for every operation on tensors inside it; subclasses implement `on_operation`.

    Source: torch 2.13, torch/utils/_python_dispatch.py.
    """

    def on_operation(self, name: str, inputs: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        """Receive an operation after it ran.

        Args:
            name: of the operation, such as "aten.cat.default".
            inputs: its positional arguments.
            options: its keyword arguments.
            result: its result.
        """
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and call `on_operation` with it."""
        result = func(*args, **(kwargs or {}))
        self.on_operation(str(func), args, kwargs or {}, result)
        return result


class LocalRegions(torch.Tensor):
    """A rank's memory whose regions of a tensor are not those that a DTensor could have: several, or another one.

    It is a view of that memory. `dcp.save` and `dcp.load` call its methods to get the regions to write or read, and the
    memory of each region. For all other code it is a plain tensor, except that `size()` is that of the whole tensor.

    Source: torch 2.6 to 2.15, torch/distributed/tensor/_shards_wrapper.py and checkpoint/planner_helpers.py: the protocol
    that DTensor implements too.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _whole: torch.Size
    _places: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[slice, ...]]]

    @staticmethod
    def of(
        memory: torch.Tensor,
        shape: tuple[int, ...],
        parts: list[tuple[tuple[int, ...], tuple[int, ...], tuple[slice, ...]]],
    ) -> LocalRegions:
        """Make one from this rank's memory.

        Args:
            memory: of this rank.
            shape: of the whole tensor.
            parts: (offsets in the whole tensor, sizes, place in `memory`) of each region.
        """
        regions = memory.detach().as_subclass(LocalRegions)
        regions._whole = torch.Size(shape)
        regions._places = {offsets: (sizes, place) for offsets, sizes, place in parts}
        return regions

    def size(self, dim: int | None = None) -> Any:
        return self._whole if dim is None else self._whole[dim]

    def __create_write_items__(self, fqn: str, whole: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.as_subclass(torch.Tensor))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self._whole),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for offsets, (sizes, _) in self._places.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.as_subclass(torch.Tensor)[self._places[tuple(index.offset)][1]]
