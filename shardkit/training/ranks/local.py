"""The tensors of a model, whoever wrapped it: their names, the regions on this rank, and their memory."""

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

_MIN_NBYTES = 4 << 20  # two pages of 2 MiB: smaller memory hardly holds one


class ModuleTensor(NamedTuple):
    """A parameter or buffer where a module has it."""

    fqn: str
    """Without the parts that wrappers add."""
    path: str
    """Of the module, with the parts that wrappers add."""
    module: nn.Module
    name: str
    """In the module."""
    tensor: torch.Tensor
    kind: str
    """"parameter" or "buffer"."""
    persistent: bool
    """It is in the model's state dict."""


def full_name(path: str, name: str) -> str:
    """Return the FQN of what a module at `path` calls `name`, without the parts that wrappers add."""
    return clean_name(f"{path}.{name}" if path else name)


def places(model: nn.Module, *, once: bool = False) -> Iterator[ModuleTensor]:
    """Yield every parameter and buffer, module by module, ties under all of their names.

    Args:
        model: wrapped or not.
        once: list a module that lies at several paths at the first of them only.
    """
    return places_of(model.named_modules(remove_duplicate=once))


def places_of(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[ModuleTensor]:
    """Yield the parameters and buffers of some modules, given by path, as `places` does."""
    for path, module in modules:
        hidden = non_persistent_buffers(module)
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            yield ModuleTensor(full_name(path, name), path, module, name, parameter, "parameter", True)
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            yield ModuleTensor(
                full_name(path, name), path, module, name, buffer, "buffer", name not in hidden
            )


def buffer_places(model: nn.Module, *, once: bool = False) -> Iterator[ModuleTensor]:
    """Yield every buffer, as `places` does."""
    return (place for place in places(model, once=once) if place.kind == "buffer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTensor:
    """A parameter or buffer as the plain model has it."""

    fqn: str
    """Its first name in the model, without wrappers."""
    shape: tuple[int, ...]
    """Of the whole tensor, in elements."""
    dtype: torch.dtype
    """What the filled tensor must have."""
    kind: str
    """"parameter" or "buffer"."""
    persistent: bool
    """It is in the model's state dict, under at least one of its names."""


def distinct(model: nn.Module) -> list[tuple[tuple[str, ...], torch.Tensor, ExpectedTensor]]:
    """Return each parameter, then each buffer, once: its names in order, the tensor, and what it is."""
    groups: dict[int, list[ModuleTensor]] = {}
    for place in places(model):
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


def describe(model: nn.Module) -> tuple[dict[str, ExpectedTensor], tuple[tuple[str, ...], ...]]:
    """Return a model's parameters and buffers by first name, and the groups of names that share one."""
    tensors = distinct(model)
    ties = tuple(names for names, _, _ in tensors if len(names) > 1)
    return {expected.fqn: expected for _, _, expected in tensors}, ties


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The ranks that hold the same region of a tensor."""

    mesh: DeviceMesh | None
    """None for a plain tensor: every rank is assumed to hold it."""
    axes: tuple[int, ...] = ()
    """The axes of the mesh that replicate it; all others cut it."""
    index: int = 0
    """This rank's place among them, row-major over `axes`."""
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """This rank's part of a parameter or buffer."""

    names: tuple[str, ...]
    """Without the parts that wrappers add; several if it is tied, its first name first."""
    kind: str
    """"parameter" or "buffer"."""
    persistent: bool
    """It is in the model's state dict."""
    parts: tuple[HeldRegion, ...]
    """What this rank holds of the whole: one region, or several of a packed dim, and where each lies in `tensor`."""
    replicas: Replicas
    """Who else holds them."""
    whole: torch.Tensor
    """What the module has: a DTensor or a plain tensor."""

    @classmethod
    def plain(cls, names: tuple[str, ...], whole: torch.Tensor, kind: str = "parameter") -> LocalShard:
        """Return a whole tensor that every rank holds and that is in the state dict."""
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
        """Of the whole tensor, in elements."""
        return tuple(self.whole.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""
        return self.whole.dtype

    @property
    def tensor(self) -> torch.Tensor:
        """The memory of `parts`, without FSDP's padding; on meta before it is allocated."""
        return local_tensor(self.whole)

    @property
    def num_elements(self) -> int:
        """What this rank holds."""
        return sum(part.region.num_elements for part in self.parts)

    def cut(self, part: HeldRegion, box: Region) -> tuple[Region, torch.Tensor] | None:
        """Return the overlap of a part and a box of the whole tensor, and its memory; None if they do not overlap."""
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
    """Return the axes of a tensor's mesh over which it is cut, or holds partial sums; replicas are not among them."""
    return tuple(axis for axis, placement in enumerate(whole.placements) if not placement.is_replicate())


def is_expanded(tensor: torch.Tensor) -> bool:
    """True if several elements of a tensor are one place in memory, as `expand` leaves them."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, readable and writable."""
    view: memoryview = flat_bytes(tensor).numpy().data
    return view


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as its bytes, in order.

    `reshape` keeps the stride of a single element, which need not be 1. Such a tensor has no view of
    another element size.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def local_shards(model: nn.Module) -> list[LocalShard]:
    """Return this rank's part of every parameter and buffer of a model, each once, in the model's order.

    Args:
        model: wrapped by anybody (`fully_shard`, `parallelize_module`, both) or not at all; on meta or not.

    Raises:
        LayoutError: a tensor has placements that are not understood; names all such tensors.
        UsageError: the model is wrapped by FSDP1.
    """
    refuse_fsdp1(model)
    shards: list[LocalShard] = []
    problems: list[str] = []
    for names, whole, expected in distinct(model):
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
    """Let modules have this rank's parts again: after a forward without a backward some hold gathered copies.

    Whatever is written to those copies is lost without a word when backward frees them.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that takes the steps: accelerate's has one inside, and no hooks of its own."""
    inside = getattr(optimizer, "optimizer", None)
    return unwrapped(inside) if isinstance(inside, torch.optim.Optimizer) else optimizer


def stepped_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return an optimizer's parameters, group after group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def refuse_copies(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise for an optimizer that steps what FSDP2 has gathered: backward frees it, and the steps are lost.

    Raises:
        UsageError: counts them, and names the way that works.
    """
    copies = {id(shard.gathered) for shard in fsdp_shards(model)}
    stepped = stepped_by(optimizer)
    num_copies = sum(id(parameter) in copies for parameter in stepped)
    if num_copies:
        raise UsageError(
            f"{num_copies} of the {count(len(stepped), 'parameter')} that the optimizer steps are gathered copies, so the "
            "model's own would stay as they are",
            hint="after a forward without backward, call model.reshard() first, then make the optimizer",
        )


def with_root(model: nn.Module) -> nn.Module:
    """Return a LightningModule with the FSDP1 unit that its strategy has put around it; any other module as it is.

    Source: Lightning 2.6, Strategy.model; FSDPStrategy wraps the LightningModule itself.
    """
    if not any(base.__name__ == "LightningModule" for base in type(model).__mro__):
        return model
    try:
        root = model.trainer.strategy.model  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # it has no trainer, or Fabric's
        return model
    is_root = isinstance(root, FullyShardedDataParallel) and any(module is model for module in root.modules())
    return root if is_root else model  # type: ignore[return-value]


def fsdp1_units(model: nn.Module) -> dict[int, Fsdp1Unit]:
    """Return the FSDP1 units of a model by the ids of what modules may have as parameters for them."""
    units: dict[int, Fsdp1Unit] = {}
    for module in with_root(model).modules():
        unit = fsdp1_unit(module) if isinstance(module, FullyShardedDataParallel) else None
        units |= dict.fromkeys(map(id, unit.registered), unit) if unit is not None else {}
    return units


def refuse_fsdp1(model: nn.Module) -> None:
    """Raise for a model whose parameters FSDP1 has made flat.

    Raises:
        UsageError: names the way that works.
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
    """Raise for modules that make their tensors in the first forward.

    Raises:
        LayoutError: names all such tensors.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    lazy = [escape(clean_name(name)) for name, tensor in tensors if is_lazy(tensor)]
    LayoutError.raise_for(
        lazy,
        f"{count(len(lazy), 'tensor')} of the model without a shape before the first forward",
        hint="build the model with modules that are not lazy, or run it once before it is wrapped",
    )


def parts_of(whole: torch.Tensor) -> tuple[list[HeldRegion], Replicas]:
    """Return the parts of a tensor that this rank holds, and their replicas; compare them with memory.

    Raises:
        LayoutError: its placements are not understood, or are not what its memory holds.
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
    is_empty = 0 in in_memory and 0 in sizes  # FSDP2 leaves such a shard no rows either
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
    """Give every parameter on meta the memory of this rank's part, uninitialised; ties stay one object.

    The memory's pages are not touched. A parameter stays the same object, so an optimizer or a tie that
    points at it still does. Buffers are left as they are.

    Args:
        model: as for `local_shards`.
        device: where; None is the device type of each parameter's mesh, and the CPU for a plain tensor.

    Raises:
        LayoutError: a parameter cannot be given memory because something else holds on to its old self.
    """
    managed = {id(shard.param): shard for shard in fsdp_shards(model)}
    with swappable_parameters(model.modules()):
        allocate(
            (names[0], whole, device or _device_of(whole), managed.get(id(whole)))
            for names, whole, _ in distinct(model)
        )


def allocate(tensors: Iterable[tuple[str, torch.Tensor, torch.device, FSDPShard | None]]) -> None:
    """Give memory to those tensors that are parameters on meta.

    Args:
        tensors: name for messages, tensor, device, and how FSDP2 holds it.

    Raises:
        LayoutError: as for `materialise`; lists all parameters.
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
    """Turn a parameter on meta into one with memory; the object and its attributes stay the same."""
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
    """Return the C library's madvise; None if the system does not take advice about huge pages."""
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
    """Ask for huge pages in fresh CPU memory. Filling it takes half as long, since page faults dominate.

    Nothing happens where there are none. Measured on Linux 6, where `transparent_hugepage/enabled` is
    `madvise`: 1.08 GB from the page cache into fresh memory take 0.08 s instead of 0.14 s.
    """
    call = _madvise()
    if call is None or memory.device.type != "cpu" or memory.nbytes < _MIN_NBYTES:
        return
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    call(start, stop - start, mmap.MADV_HUGEPAGE)  # advice: a refusal changes nothing
