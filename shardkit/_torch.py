"""The names of torch that are not public. Nothing else in shardkit uses one.

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


def _known(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function refuse a torch newer than those that were tried, if a name that it needs has changed."""

    def refused(error: Exception) -> Exception:
        note = torch_note(torch.__version__)
        if note is None:
            return error
        return ResourceError(
            f"{note}, and {function.__name__} no longer finds what it needs of it: {error}",
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


@_known
def init_fake_world(world_size: int) -> None:
    """Make this process rank 0 of a world that does not exist: meshes work, collectives do nothing.

    Args:
        world_size: number of ranks.

    Source: torch 2.13, torch/testing/_internal/distributed/fake_pg.py; importing it registers the
    backend "fake".
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # no training job should import it

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


@_known
def shard_of(placement: object) -> tuple[int, int] | None:
    """Return (dim, split factor) of a placement that cuts a dim; None for any other.

    The split factor is 1, unless axes further right cut the same dim *before* this one: then it is the number
    of parts that they make. `fully_shard` on a tensor-parallel parameter places it so.

    Source: torch 2.13, torch/distributed/tensor/placement_types.py, _StridedShard.
    """
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    if isinstance(placement, _StridedShard):  # before Shard, whose subclass it is in torch 2.6
        return placement.dim, int(placement.split_factor)
    return (placement.dim, 1) if isinstance(placement, Shard) else None


@_known
def describe_as_before(metadata: Metadata) -> None:
    """Let `.metadata` be pickled as up to torch 2.14, which can read no other: without `strides`, unused.

    Source: torch 2.15, torch/distributed/checkpoint/metadata.py, TensorProperties.__getstate__; __setstate__
    of 2.6 to 2.14 unpacks five fields, that of 2.15 takes five or six.
    """
    for entry in metadata.state_dict_metadata.values():
        properties: Any = getattr(entry, "properties", None)
        if hasattr(properties, "strides"):
            five = properties.__getstate__()[:5]
            properties.__getstate__ = lambda five=five: five


@_known
def flattened(
    mesh: DeviceMesh, names: tuple[str, ...], into: str, before: tuple[str, ...] = ()
) -> DeviceMesh:
    """Return a mesh of some axes of another, the last of which has the ranks of several; both have one parent.

    Args:
        mesh: with names.
        names: of neighbouring axes that become one.
        into: the name of that one.
        before: of axes that stay as they are.

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
    """A parameter that `fully_shard` manages, and the memory that it wants for this rank's part."""

    param: nn.Parameter
    """The DTensor that the module has."""
    gathered: nn.Parameter | None
    """What the module has in its place while the unit is gathered; None before the first time."""
    padded_sizes: tuple[int, ...]
    """Of the memory: equal on all ranks, so that it can be all-gathered as it lies."""
    dim: int
    """The one along which it is padded."""
    on_cpu: bool
    """Offloaded."""
    pinned: bool
    """Offloaded to pinned memory."""
    keep: Callable[[torch.Tensor], None]
    """Make padded memory the one that is all-gathered; the parameter must be a view of its beginning."""


@_known
def fsdp_shards(model: nn.Module) -> Iterator[FSDPShard]:
    """Yield the parameters that `fully_shard` manages, unit by unit.

    Source: torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param.py; 2.6 has one group for each state.
    """
    states: dict[int, Any] = {}  # one for all modules that were given to one call
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
    """Return a module's class as it was before `fully_shard`, which makes one of FSDPModule and it.

    Source: torch 2.13, distributed/fsdp/_fully_shard/_fully_shard.py, fully_shard.
    """
    return next(base for base in type(module).__mro__ if not issubclass(base, FSDPModule))


@_known
def non_persistent_buffers(module: nn.Module) -> frozenset[str]:
    """Return the names of a module's own buffers that are in no state dict."""
    return frozenset(module._non_persistent_buffers_set)


@contextmanager
@_known
def swappable(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let parameters of LSTM, GRU and RNN be swapped: these refer to them weakly, and torch swaps no such tensor.

    By these references they notice a parameter that was replaced (`torch.func.functional_call`): they get them back.
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


@_known
def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if one tensor is another view of the other's memory; also on meta, where there is none."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


@_known
def checkpointed(module: nn.Module) -> nn.Module:
    """Return a module that computes `module` again in backward; its state dict has the names that it had.

    Source: torch 2.13, torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py; torchtitan, accelerate
    and Lightning take it from there too.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapper: nn.Module = checkpoint_wrapper(module)
    return wrapper


@_known
def is_checkpointed(module: nn.Module) -> bool:
    """True for what `checkpointed` returns."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    return isinstance(module, CheckpointWrapper)


class Fsdp2Unit(NamedTuple):
    """What one `fully_shard` call manages."""

    mesh: DeviceMesh
    reshard_after_forward: bool | int
    """An int is the number of ranks that hold a part after forward."""
    mixed_precision: MixedPrecisionPolicy
    """What was given to `fully_shard`."""
    compute_dtypes: tuple[torch.dtype | None, ...]
    """Of its parameters, each once, in their order; None computes in its own. More than one with torch 2.15's
    `param_dtype_override_fn`."""
    cpu_offload: bool
    parameters: dict[tuple[int, str], nn.Parameter]
    """(id of a module, attribute) -> sharded parameter, whatever is registered on the module just now; every
    place of a tie is there."""


@_known
def fsdp2_units(module: FSDPModule, *, is_root: bool) -> Iterator[Fsdp2Unit]:
    """Yield the parameter groups of a module that `fully_shard` was called on.

    There is one, unless meshes differ; there is none if units inside the module have all parameters.

    Args:
        is_root: no FSDP module is around it.

    Source: torch 2.6 to 2.15, torch/distributed/fsdp/_fully_shard/_fsdp_state.py, _fsdp_param_group.py,
    _fsdp_param.py.
    """
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.6 has one at most
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    # fully_shard says True if it was told nothing; the first forward turns that to False on the root. Up
    # to torch 2.7 it does so whatever fully_shard was told, and there is no such attribute.
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
    """Of the parameters in it, relative to the module."""
    numels: tuple[int, ...]
    """Of each, whole, in elements."""
    local: torch.Tensor
    """This rank's part, padding included."""
    num_shards: int
    registered: tuple[torch.Tensor, ...]
    """What modules may have as a parameter for it: itself, or views of it (use_orig_params)."""
    shared: tuple[tuple[str, str], ...]
    """(further name, first name) of the tied parameters in it, relative to the module."""
    group: dist.ProcessGroup | None
    """The ranks that hold the other parts; None if every rank holds it whole."""
    device: torch.device
    """Where it is computed; it may be stored elsewhere."""
    has_dtensors: bool
    """Parts of DTensors were made flat: tensor parallelism has cut them before."""


@_known
def fsdp1_unit(module: FullyShardedDataParallel) -> Fsdp1Unit | None:
    """Return an FSDP1 module's flat parameter; None if modules inside it have all parameters.

    Source: torch 2.13, torch/distributed/fsdp/_flat_param.py: FlatParameter, FlatParamHandle.
    """
    handle: Any = module._handle
    if handle is None:
        return None
    flat = handle.flat_param
    # After a forward without resharding flat_param is the whole one, and _local_shard still the part.
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


@_known
def is_fsdp1_part(tensor: torch.Tensor) -> bool:
    """True for what FSDP1 registers as a parameter: a flat parameter, or a view of one.

    Source: torch 2.13, torch/distributed/fsdp/_common_utils.py, _is_fsdp_flattened.
    """
    return bool(getattr(tensor, "_fsdp_flattened", False))


@_known
def foreach_norms(tensors: list[torch.Tensor], norm_type: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the norm of each tensor, accumulated and given in `dtype`, in a few kernels for all of them.

    Source: torch 2.13, torch/nn/utils/clip_grad.py calls it so, in the tensors' own dtype.
    """
    norms: list[torch.Tensor] = list(torch._foreach_norm(tensors, norm_type, dtype=dtype))
    return norms


@_known
def foreach_scale_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors of one device in place by a tensor of no dims on the same device.

    Source: torch 2.13, torch/nn/utils/clip_grad.py.
    """
    torch._foreach_mul_(tensors, factor)


@_known
def times_written(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written in place, on meta too.

    Source: torch 2.13, the version counter of autograd, `Tensor._version`.
    """
    return tensor._version


@_known
def wrap_policy_classes(policy: object) -> frozenset[type]:
    """Return the classes that a ModuleWrapPolicy of FSDP1 wraps; none for any other policy.

    For messages alone, so a torch that has another name for them is no error.

    Source: torch 2.13, torch/distributed/fsdp/wrap.py.
    """
    return frozenset(getattr(policy, "_module_classes", ()))


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation on tensors that runs inside it; a subclass has `seen`.

    Source: torch 2.13, torch/utils/_python_dispatch.py.
    """

    def seen(self, name: str, inputs: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        """Be told of an operation.

        Args:
            name: of the operation, such as "aten.cat.default".
            inputs: positional arguments.
            options: the others.
            result: what it returned.
        """
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carry out an operation and tell `seen` of it."""
        result = func(*args, **(kwargs or {}))
        self.seen(str(func), args, kwargs or {}, result)
        return result


class LocalRegions(torch.Tensor):
    """A rank's memory that holds several regions of a tensor, or another than its DTensor says, for `dcp`.

    It is a view of that memory. `dcp.save` asks it what to write, `dcp.load` what to read, and both for the memory of a
    region; everything else sees a plain tensor, but for `size()`, which is that of the whole tensor.

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
        """Make one.

        Args:
            memory: of this rank.
            shape: of the whole tensor.
            parts: offsets in the whole tensor, sizes, and where in `memory`.
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
