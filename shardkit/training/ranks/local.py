"""List the tensors of a model, wrapped in any way: their names, their regions on this rank, and their memory."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from operator import add
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shardkit._torch import (
    Fsdp1Unit,
    FSDPShard,
    fsdp1_unit,
    fsdp_shards,
    non_persistent_buffers,
    swappable_parameters,
)
from shardkit.core.placements import HeldRegion, cuts, held_regions
from shardkit.core.regions import Region, full_region, intersect, relative_to, window
from shardkit.core.text import count, escape
from shardkit.errors import LayoutError, UsageError
from shardkit.keys.names import clean_name
from shardkit.layout.placed import placements_of
from shardkit.training.ranks.agree import current_device

_MIN_NBYTES = 4 << 20  # two huge pages of 2 MiB; smaller memory hardly contains a whole one


class ModuleTensor(NamedTuple):
    """A parameter or buffer and its place in the model."""

    fqn: str
    """Name in the model, without the parts that wrappers add."""
    path: str
    """Path of the module that has it, with the parts that wrappers add."""
    module: nn.Module
    name: str
    """Name in the module."""
    tensor: torch.Tensor
    kind: str
    """"parameter" or "buffer"."""
    persistent: bool
    """True if it is in the model's state dict."""


def full_name(path: str, name: str) -> str:
    """Return the FQN of the attribute `name` of the module at `path`, without the parts that wrappers add."""
    return clean_name(f"{path}.{name}" if path else name)


def tensor_places(model: nn.Module, *, once: bool = False) -> Iterator[ModuleTensor]:
    """Yield every parameter and buffer, module by module, with all names of ties.

    Args:
        model: any model, wrapped or not.
        once: yield the tensors of a module with several paths only for the first path.
    """
    return module_places(model.named_modules(remove_duplicate=once))


def module_places(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[ModuleTensor]:
    """Yield the parameters and buffers of modules, each given as (path, module), as `tensor_places` does."""
    for path, module in modules:
        hidden = non_persistent_buffers(module)
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            yield ModuleTensor(full_name(path, name), path, module, name, parameter, "parameter", True)
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            yield ModuleTensor(
                full_name(path, name), path, module, name, buffer, "buffer", name not in hidden
            )


def buffer_places(model: nn.Module, *, once: bool = False) -> Iterator[ModuleTensor]:
    """Yield every buffer, as `tensor_places` does."""
    return (place for place in tensor_places(model, once=once) if place.kind == "buffer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTensor:
    """The properties that a parameter or buffer must have, from the plain model."""

    fqn: str
    """Its first name in the model, without wrappers."""
    shape: tuple[int, ...]
    """Shape of the whole tensor, in elements."""
    dtype: torch.dtype
    """Dtype of the filled tensor."""
    kind: str
    """"parameter" or "buffer"."""
    persistent: bool
    """True if it is in the model's state dict, under at least one of its names."""


def distinct_tensors(model: nn.Module) -> list[tuple[tuple[str, ...], torch.Tensor, ExpectedTensor]]:
    """Return (all names in order, tensor, description) of each parameter, then of each buffer; ties once."""
    groups: dict[int, list[ModuleTensor]] = {}
    for place in tensor_places(model):
        groups.setdefault(id(place.tensor), []).append(place)
    tensors = []
    for group in sorted(groups.values(), key=lambda group: group[0].kind != "parameter"):
        first = group[0]
        expected = ExpectedTensor(
            fqn=first.fqn,
            shape=tuple(first.tensor.shape),
            dtype=first.tensor.dtype,
            kind=first.kind,
            persistent=any(place.persistent for place in group),
        )
        tensors.append((tuple(dict.fromkeys(place.fqn for place in group)), first.tensor, expected))
    return tensors


def describe_tensors(model: nn.Module) -> tuple[dict[str, ExpectedTensor], tuple[tuple[str, ...], ...]]:
    """Return (first name -> description of the parameter or buffer, groups of names that are tied)."""
    tensors = distinct_tensors(model)
    ties = tuple(names for names, _, _ in tensors if len(names) > 1)
    return {expected.fqn: expected for _, _, expected in tensors}, ties


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The ranks that store the same region of a tensor as this one."""

    mesh: DeviceMesh | None
    """The tensor's mesh; None for a plain tensor, which every rank is assumed to store."""
    axes: tuple[int, ...] = ()
    """The axes of the mesh that replicate the tensor; all others cut it."""
    index: int = 0
    """This rank's index among these ranks, row-major over `axes`."""
    count: int = 1
    """Number of these ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """This rank's part of a parameter or buffer."""

    names: tuple[str, ...]
    """Names without the parts that wrappers add; several if it is tied, with the first one first."""
    kind: str
    """"parameter" or "buffer"."""
    persistent: bool
    """True if it is in the model's state dict."""
    parts: tuple[HeldRegion, ...]
    """This rank's regions of the whole tensor, and the place of each in `tensor`. Packed dims have several."""
    replicas: Replicas
    """The ranks that store the same regions."""
    whole: torch.Tensor
    """The module's own tensor: a DTensor or a plain tensor."""

    @classmethod
    def plain(cls, names: tuple[str, ...], whole: torch.Tensor, kind: str = "parameter") -> LocalShard:
        """Return the shard of a tensor that every rank stores as a whole and that is in the state dict."""
        parts, replicas = parts_of(whole)
        return cls(
            names=names, kind=kind, persistent=True, parts=tuple(parts), replicas=replicas, whole=whole
        )

    @property
    def fqn(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor, in elements."""
        return tuple(self.whole.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""
        return self.whole.dtype

    @property
    def tensor(self) -> torch.Tensor:
        """The memory of `parts`, without FSDP's padding; on meta before it is allocated."""
        return local_tensor(self.whole)

    @property
    def num_elements(self) -> int:
        """Number of elements on this rank."""
        return sum(part.region.num_elements for part in self.parts)

    def cut(self, part: HeldRegion, box: Region) -> tuple[Region, torch.Tensor] | None:
        """Return (overlap of a part and a box of the whole tensor, memory of the overlap); None without an overlap."""
        region = intersect(part.region, box)
        if region is None:
            return None
        inner = relative_to(region, part.region.offsets)
        offsets = tuple(map(add, part.corner, inner.offsets))
        return region, self.tensor[window(Region(offsets, region.sizes))]


def local_tensor(whole: torch.Tensor) -> torch.Tensor:
    """Return a parameter's or buffer's memory on this rank, outside of autograd."""
    with torch.no_grad():
        plain = whole.detach()
        return plain.to_local() if isinstance(plain, DTensor) else plain


def cut_axes(whole: DTensor) -> tuple[int, ...]:
    """Return the axes of a tensor's mesh over which it is cut or has partial sums, that is, is not replicated."""
    return tuple(axis for axis, placement in enumerate(whole.placements) if not placement.is_replicate())


def is_expanded(tensor: torch.Tensor) -> bool:
    """True if several elements of a tensor share a place in memory, as after `expand`."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, readable and writable."""
    view: memoryview = flat_bytes(tensor).numpy().data
    return view


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor as its bytes, in order.

    `reshape` is not used: it keeps the stride of a tensor of one element, and with a stride other than 1 there is no
    view with another element size.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def local_shards(model: nn.Module) -> list[LocalShard]:
    """Return this rank's part of every parameter and buffer of a model, each once, in the model's order.

    Args:
        model: any model, wrapped in any way (`fully_shard`, `parallelize_module`, both) or not at all; on meta or not.

    Raises:
        LayoutError: tensors have placements that are not supported; the error names all of them.
        UsageError: the model is wrapped by FSDP1.
    """
    refuse_fsdp1(model)
    shards: list[LocalShard] = []
    problems: list[str] = []
    for names, whole, expected in distinct_tensors(model):
        try:
            parts, replicas = parts_of(whole)
        except LayoutError as error:
            problems.append(f"{escape(names[0])}: {error.message}")
            continue
        shards.append(
            LocalShard(
                names=names,
                kind=expected.kind,
                persistent=expected.persistent,
                parts=tuple(parts),
                replicas=replicas,
                whole=whole,
            )
        )
    LayoutError.raise_for(problems, f"{len(problems)} tensors are placed in a way that is not understood")
    return shards


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, which modules have after a forward without a backward, so that they have shards again.

    Gathered parameters are copies. Values written to them would be lost without an error when backward frees them.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that makes the steps: accelerate's contains another one, and has no hooks of its own."""
    inside = getattr(optimizer, "optimizer", None)
    return unwrap_optimizer(inside) if isinstance(inside, torch.optim.Optimizer) else optimizer


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return an optimizer's parameters, group after group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def refuse_copies(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise an error for an optimizer that steps copies gathered by FSDP2, whose steps would be lost with the copies.

    Raises:
        UsageError: the optimizer has such copies; the hint says how to avoid them.
    """
    copies = {id(shard.gathered) for shard in fsdp_shards(model)}
    stepped = optimizer_parameters(optimizer)
    num_copies = sum(id(parameter) in copies for parameter in stepped)
    if num_copies:
        raise UsageError(
            f"{num_copies} of the {count(len(stepped), 'parameter')} that the optimizer steps are gathered copies, so the "
            "model's own would stay as they are",
            hint="after a forward without backward, call model.reshard() first, then make the optimizer",
        )


def with_root(model: nn.Module) -> nn.Module:
    """Return the FSDP1 unit that a strategy has put around a LightningModule; any other module is returned unchanged.

    Source: Lightning 2.6, Strategy.model; FSDPStrategy wraps the LightningModule itself.
    """
    if not any(base.__name__ == "LightningModule" for base in type(model).__mro__):
        return model
    try:
        root = model.trainer.strategy.model  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # it has no trainer, or that of Fabric
        return model
    is_root = isinstance(root, FullyShardedDataParallel) and any(module is model for module in root.modules())
    return root if is_root else model  # type: ignore[return-value]


def fsdp1_units(model: nn.Module) -> dict[int, Fsdp1Unit]:
    """Return id -> FSDP1 unit, for each object that a module may have as a parameter in place of the unit's own."""
    units: dict[int, Fsdp1Unit] = {}
    for module in with_root(model).modules():
        unit = fsdp1_unit(module) if isinstance(module, FullyShardedDataParallel) else None
        units |= dict.fromkeys(map(id, unit.registered), unit) if unit is not None else {}
    return units


def refuse_fsdp1(model: nn.Module) -> None:
    """Raise an error for a model whose parameters FSDP1 has flattened.

    Raises:
        UsageError: the model is wrapped by FSDP1; the hint says what to do instead.
    """
    wrapped = sum(isinstance(module, FullyShardedDataParallel) for module in with_root(model).modules())
    if wrapped:
        raise UsageError(
            f"the model is wrapped by FullyShardedDataParallel (FSDP1, {wrapped} units), whose flat parameters need "
            "whole tensors to be filled",
            hint="give FSDP1 param_init_fn=shardkit.param_init_fn(ctx) when it wraps the model, or call load_into "
            "before; or wrap with shardkit.wrap or fully_shard (FSDP2)",
        )


def refuse_lazy(model: nn.Module) -> None:
    """Raise an error for lazy modules, which create their tensors in the first forward.

    Raises:
        LayoutError: there are such tensors; the error names all of them.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    lazy = [escape(clean_name(name)) for name, tensor in tensors if is_lazy(tensor)]
    LayoutError.raise_for(
        lazy,
        f"{count(len(lazy), 'tensor')} of the model without a shape before the first forward",
        hint="build the model with modules that are not lazy, or run it once before it is wrapped",
    )


def parts_of(whole: torch.Tensor) -> tuple[list[HeldRegion], Replicas]:
    """Return (this rank's parts of a tensor, their replicas), after comparing them with its memory.

    Raises:
        LayoutError: its placements are not supported, or do not fit the shape of its memory.
    """
    if not isinstance(whole, DTensor):
        return [HeldRegion(full_region(tuple(whole.shape)), (0,) * whole.ndim)], Replicas(mesh=None)
    mesh, shape = whole.device_mesh, tuple(whole.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not part of the mesh
        nothing = (0,) * len(shape)
        return [HeldRegion(Region(nothing, nothing), nothing)], Replicas(mesh=mesh)
    placements = placements_of(whole)
    parts = held_regions(shape, cuts(placements, tuple(mesh.shape)), coordinate)
    sizes = tuple(map(max, zip(*(map(add, p.corner, p.region.sizes) for p in parts), strict=True)))
    in_memory = tuple(local_tensor(whole).shape)
    is_empty = 0 in in_memory and 0 in sizes  # FSDP2 may give an empty shard other sizes
    if in_memory != sizes and not is_empty:
        raise LayoutError(
            f"this rank holds {list(in_memory)} of {list(shape)}, but its placements {list(map(str, whole.placements))} "
            f"on a mesh of {list(mesh.shape)} give it {list(sizes)}"
        )
    axes = [axis for axis, placement in enumerate(placements) if placement.shard_dim is None]
    index = 0
    for axis in axes:
        index = index * mesh.size(axis) + coordinate[axis]
    count = prod(mesh.size(axis) for axis in axes)
    return parts, Replicas(mesh=mesh, axes=tuple(axes), index=index, count=count)


def materialise(model: nn.Module, device: torch.device | None = None) -> None:
    """Give every parameter on meta uninitialised memory for this rank's part.

    The memory's pages are not touched. A parameter stays the same object, so ties remain, and so do references from an
    optimizer. Buffers do not change.

    Args:
        model: as for `local_shards`.
        device: the device; None for the device type of each parameter's mesh, and the CPU for a plain tensor.

    Raises:
        LayoutError: a parameter cannot be given memory because of other references to it, such as autograd's.
    """
    managed = {id(shard.param): shard for shard in fsdp_shards(model)}
    with swappable_parameters(model.modules()):
        allocate(
            (names[0], whole, device or _device_of(whole), managed.get(id(whole)))
            for names, whole, _ in distinct_tensors(model)
        )


def allocate(tensors: Iterable[tuple[str, torch.Tensor, torch.device, FSDPShard | None]]) -> None:
    """Give memory to those of some tensors that are parameters on meta.

    Args:
        tensors: (name for messages, tensor, device, FSDP2's record of it or None).

    Raises:
        LayoutError: as for `materialise`; the error lists all parameters.
    """
    problems: list[str] = []
    with torch.no_grad():
        for name, whole, device, managed in tensors:
            if whole.is_meta and isinstance(whole, nn.Parameter):
                try:
                    _allocate(whole, managed, device)
                except RuntimeError as error:
                    problems.append(f"{escape(name)}: {str(error).splitlines()[0]}")
    LayoutError.raise_for(problems, f"{len(problems)} parameters cannot be given memory")


def _device_of(whole: torch.Tensor) -> torch.device:
    return current_device(whole.device_mesh.device_type if isinstance(whole, DTensor) else "cpu")


def _allocate(parameter: nn.Parameter, managed: FSDPShard | None, device: torch.device) -> None:
    old = local_tensor(parameter)
    if managed is None or type(old) is not torch.Tensor:
        memory = torch.empty_like(old, device=device)
        if type(old) is torch.Tensor:
            advise_huge_pages(memory)
        _give_memory(parameter, memory)
        return
    place = torch.device("cpu") if managed.on_cpu else device
    padded = torch.empty(managed.padded_sizes, dtype=old.dtype, device=place, pin_memory=managed.pinned)
    if not managed.pinned:
        advise_huge_pages(padded)
    length = old.shape[managed.dim] if old.numel() else 0
    padded.narrow(managed.dim, length, padded.shape[managed.dim] - length).zero_()
    _give_memory(parameter, padded.narrow(managed.dim, 0, length))
    managed.keep(padded)


def _give_memory(parameter: nn.Parameter, memory: torch.Tensor) -> None:
    """Turn a parameter on meta into one with memory. The object and its attributes stay the same."""
    value: torch.Tensor = memory
    if isinstance(parameter, DTensor):
        value = DTensor.from_local(
            memory,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    new = nn.Parameter(value, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, new)  # type: ignore[no-untyped-call]


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the C library's madvise; None if the system does not support advice about huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        call = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise: Callable[[int, int, int], int] = call
    return madvise


def advise_huge_pages(memory: torch.Tensor) -> None:
    """Request huge pages for fresh CPU memory. Filling it takes half as long, since page faults dominate.

    Without support for huge pages nothing happens. Measured on Linux 6, where `transparent_hugepage/enabled` is
    `madvise`: reading 1.08 GB from the page cache into fresh memory takes 0.08 s instead of 0.14 s.
    """
    call = _madvise()
    if call is None or memory.device.type != "cpu" or memory.nbytes < _MIN_NBYTES:
        return
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    call(start, stop - start, mmap.MADV_HUGEPAGE)  # only advice; an error does not matter
