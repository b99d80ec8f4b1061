"""Compute, restore and compare buffers, and mend ties that wrapping broke.

Buffers that are on meta are computed anew, with a check that each one was written. A buffer that no code computes
would have the previous content of its memory: the model would run, and its logits would be wrong. So the code that
computes buffers runs twice, over memory with two different fillings, and both results must be equal.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit._torch import fsdp_shards, shares_memory
from shardkit.core.text import escape, listed
from shardkit.errors import LayoutError
from shardkit.files.digest import crc32
from shardkit.keys.names import clean_name
from shardkit.layout.classes import is_transformers, meta_twins
from shardkit.training.ranks.agree import agreed, device_for, log_once, wire, world
from shardkit.training.ranks.local import (
    ModuleTensor,
    buffer_places,
    flat_bytes,
    full_name,
    is_expanded,
    memory_of,
    tensor_places,
)

InitBuffers = Callable[[nn.Module], object]
"""Computes a model's buffers, in place or by assigning new ones."""

FILLS = (0xFF, 0x2A)
"""Bytes for the two fillings of memory: the first one reads as NaN, -1 or True, the second one as another value."""

_GIVE_FUNCTION = (
    "give prepare a function that builds the model instead of a model on meta, or init_buffers=fn that computes them all; "
    "or give them values before load_into"
)


def filled_memory(like: torch.Tensor, byte: int) -> torch.Tensor:
    """Return memory on the CPU for a tensor on meta, with every byte set to `byte`."""
    tensor = torch.empty_like(like, device="cpu", requires_grad=False)
    # 0x2A is no valid bool.
    memory: Any = tensor.untyped_storage()
    memory.fill_(byte & 1 if like.dtype == torch.bool else byte)
    return tensor


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True for tensors with equal dtypes, shapes and bytes. NaNs are compared bit by bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return flat_bytes(tensor.detach().contiguous())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attribute:
    """A tensor on meta in a plain attribute of a module, that is, neither a parameter nor a buffer."""

    module: nn.Module
    name: str
    """Name of the attribute; empty for a tensor in a list or dict."""
    fqn: str
    tensor: torch.Tensor


def compute_buffers(
    model: nn.Module,
    init_buffers: InitBuffers | None,
    *,
    seeds: tuple[int, int] = (0, 0),
    hint: str = _GIVE_FUNCTION,
) -> None:
    """Compute every buffer that is on meta, by `init_buffers` or transformers' own `_init_weights`.

    Persistent buffers that neither computes stay on meta, because the source may have them.

    Args:
        model: a model with parameters on meta.
        init_buffers: called with the model after its buffers have got memory; None for `_init_weights`.
        seeds: seeds of random numbers for the two fillings. With different seeds, a random buffer counts as not
            computed.
        hint: hint of the error for buffers that are not computed.

    Raises:
        LayoutError: some buffers or plain tensor attributes are not computed; the error lists all of them.
    """
    on_meta = [place for place in buffer_places(model, once=True) if place.tensor.is_meta]
    attributes = list(meta_attributes(model))
    if not on_meta and not attributes:
        return
    first, second = (
        _run(model, on_meta, init_buffers, byte, seed) for byte, seed in zip(FILLS, seeds, strict=True)
    )
    lost_ones = {fqn for fqn, value in second.items() if not same_bits(first[fqn], value)}
    values = {id(place.tensor): second[place.fqn] for place in on_meta if place.fqn not in lost_ones}
    for place in on_meta:
        _put(place, values.get(id(place.tensor), place.tensor))
    _update_aliases(on_meta, attributes)
    _refuse(
        [place.fqn for place in on_meta if place.fqn in lost_ones and not place.persistent],
        list(meta_attributes(model)),
        hint,
    )


def class_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return FQN -> value on the CPU of the non-persistent buffers that a model's class computes.

    Only for transformers models, as the values of others are not known. Random buffers are left out.

    Args:
        model: any model, wrapped or not. It is not changed.
    """
    buffers: dict[str, torch.Tensor] = {}
    has_any = any(not isinstance(place.tensor, DTensor) for place in buffer_places(model, once=True))
    for prefix, twin in meta_twins(model, None) if has_any else ():
        if twin is None:
            continue
        with contextlib.suppress(Exception):  # buffers that were computed before the error are used
            compute_buffers(twin, None, seeds=(0, 1))
        buffers |= {
            clean_name(prefix + place.fqn): place.tensor
            for place in buffer_places(twin, once=True)
            if not place.persistent and not place.tensor.is_meta
        }
    return buffers


def unlike_computed(model: nn.Module, computed: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of buffers whose values are far from those that the model's class computes.

    `to_empty()` leaves such buffers, with memory that was not written. Some differences do not count: rounding, and
    changes that a forward makes (rotary tables that grow with the length).

    Args:
        model: any model, wrapped or not.
        computed: result of `class_buffers`.
    """
    buffers = {
        place.fqn: place.tensor
        for place in buffer_places(model, once=True)
        if not place.tensor.is_meta and not isinstance(place.tensor, DTensor)
    }
    unlike = [
        fqn for fqn, value in computed.items() if fqn in buffers and not _are_close(buffers[fqn], value)
    ]
    originals = {fqn: "{}{}original_{}".format(*fqn.rpartition(".")) for fqn in unlike}
    return [fqn for fqn in unlike if originals[fqn] not in buffers or originals[fqn] in unlike]


def _are_close(buffer: torch.Tensor, computed: torch.Tensor) -> bool:
    """True for values that differ at most by rounding to 16 bits, and for a buffer whose shape has changed."""
    if buffer.shape != computed.shape:
        return True
    if not buffer.is_floating_point() or not computed.is_floating_point():
        return torch.equal(buffer.cpu(), computed)
    return torch.allclose(buffer.cpu().float(), computed.float(), rtol=0.02, atol=1e-6, equal_nan=True)


def _put(place: ModuleTensor, value: torch.Tensor) -> None:
    place.module.register_buffer(place.name, value, persistent=place.persistent)


def _run(
    model: nn.Module, on_meta: list[ModuleTensor], init_buffers: InitBuffers | None, byte: int, seed: int
) -> dict[str, torch.Tensor]:
    """Compute the buffers over memory that is filled with one byte; return FQN -> value."""
    memory: dict[int, torch.Tensor] = {}  # one for each buffer, even if several modules share it
    for place in on_meta:
        if id(place.tensor) not in memory:
            memory[id(place.tensor)] = filled_memory(place.tensor, byte)
        _put(place, memory[id(place.tensor)])
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # a random buffer is the same on all ranks
        if init_buffers is not None:
            init_buffers(model)
        else:
            _run_transformers(model, {path for place in on_meta for path in enclosing_paths(place.path)})
    values = {}
    for place in on_meta:
        value = getattr(place.module, place.name)
        values[place.fqn] = value.detach().cpu() if not value.is_meta else filled_memory(value, byte)
    return values


def _run_transformers(model: nn.Module, paths: set[str]) -> None:
    """For each module, inner ones first, call the `_init_weights` of the nearest transformers model around it."""
    modules = dict(model.named_modules())
    for path in sorted(paths, key=lambda path: (-path.count(".") - bool(path), path)):
        holder = next((h for h in map(modules.get, enclosing_paths(path)) if is_transformers(h)), None)
        if holder is not None:
            holder._init_weights(modules[path])


def enclosing_paths(path: str) -> Iterator[str]:
    """Yield a module's path and those of the modules around it, inner ones first: "a.b" gives "a.b", "a" and ""."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def meta_attributes(model: nn.Module) -> Iterator[_Attribute]:
    """Yield tensors on meta in attributes other than parameters and buffers, including those in a list or dict."""
    for path, module in model.named_modules():
        registered = {id(tensor) for tensor in (*module.parameters(False), *module.buffers(False))}
        for name, value in vars(module).items():
            for key, tensor in _tensors_in(value):
                # A dict or list with registered tensors (such as `_parameters`) does not count, but a plain attribute
                # that is a second name of a buffer does.
                if tensor.is_meta and not (key and id(tensor) in registered):
                    fqn = full_name(path, name) + key
                    yield _Attribute(module=module, name=name if not key else "", fqn=fqn, tensor=tensor)


def _tensors_in(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield "", value
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"[{key!r}]", item) for key, item in items if isinstance(item, torch.Tensor))


def _update_aliases(on_meta: list[ModuleTensor], attributes: list[_Attribute]) -> None:
    """Set attributes that were a second name of a buffer to the buffer's new tensor."""
    for attribute in attributes:
        for place in on_meta:
            value, old = getattr(place.module, place.name), place.tensor
            same_view = (
                old.shape == attribute.tensor.shape
                and old.stride() == attribute.tensor.stride()
                and old.storage_offset() == attribute.tensor.storage_offset()
            )
            if attribute.name and not value.is_meta and same_view and shares_memory(old, attribute.tensor):
                setattr(attribute.module, attribute.name, value)
                break


def _refuse(buffers: list[str], attributes: list[_Attribute], hint: str) -> None:
    problems = [f"{escape(fqn)}: a buffer that is in no checkpoint" for fqn in buffers]
    problems += [f"{escape(attribute.fqn)}: a tensor attribute" for attribute in attributes]
    LayoutError.raise_for(
        problems,
        f"{len(problems)} buffers or tensor attributes of the model are on meta, and nothing computes them",
        hint=hint,
    )


def restore_buffers(model: nn.Module, values: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Give every buffer its computed value, on a device. Whether it is persistent does not change.

    All of them are set, since a wrapper may have moved a buffer to meta or given it memory without values, which cannot
    be seen. An expanded buffer gets memory for all of its elements. Attributes that were a second name of a buffer are
    set too.

    Args:
        model: the wrapped model.
        values: FQN without wrappers -> value. A buffer that is not listed is only moved.
        device: the device for all buffers.
    """
    moved: dict[int, torch.Tensor] = {}
    kept: list[torch.Tensor] = []  # keeps old tensors alive, so that their ids are not reused
    for place in list(buffer_places(model)):
        old = place.tensor
        if isinstance(old, DTensor):
            continue
        new = moved.get(id(old))
        if new is None:
            new = moved[id(old)] = _restored_value(old, values.get(place.fqn), device)
            kept.append(old)
        if new is not old:
            setattr(place.module, place.name, new)
            for attribute, value in list(vars(place.module).items()):
                if value is old:
                    setattr(place.module, attribute, new)


def memory_for_buffers(model: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Return FQN without wrappers -> uninitialised memory, for buffers on meta whose values the source has."""
    return {
        place.fqn: torch.empty_like(place.tensor, device=device)
        for place in buffer_places(model)
        if place.tensor.is_meta
    }


def _restored_value(old: torch.Tensor, computed: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if is_expanded(old):  # an expanded tensor cannot be written
        old = old.detach().clone()
    if computed is None:
        return old if old.is_meta else old.to(device)
    if old.is_meta or old.device.type != device.type:
        return computed.detach().clone().to(device=device, dtype=old.dtype)
    with torch.no_grad():
        old.copy_(computed)
    return old


def equalise_buffers(model: nn.Module) -> list[str]:
    """Give buffers that differ between ranks the values of rank 0; return the names of those that still differ.

    Buffers are compared by digests, so only differing ones are sent. Every rank calls it.
    """
    differing = _differing_buffers(model)
    if not differing:
        return []
    log_once(
        f"buffers differed between ranks and are now those of rank 0: {listed(differing)}", logging.WARNING
    )
    buffers = {place.fqn: place.tensor for place in buffer_places(model)}
    with wire("sending buffers"):
        for fqn in differing:
            value = buffers[fqn]
            sent = value.detach().to(device_for(None, value.device), copy=True).contiguous()
            dist.broadcast(flat_bytes(sent), 0)
            with torch.no_grad():
                value.copy_(sent)
    return _differing_buffers(model)


def _differing_buffers(model: nn.Module) -> list[str]:
    """Return the names of plain buffers that all ranks have with equal sizes but different bytes."""
    if world()[1] == 1:
        return []
    with agreed("comparing buffers") as exchanged:
        exchanged.mine = {}
        for place in buffer_places(model):
            if not isinstance(place.tensor, DTensor) and not place.tensor.is_meta:
                content = memory_of(place.tensor.detach().cpu().contiguous())
                exchanged.mine[place.fqn] = [len(content), crc32(content)]
    first, *other_ranks = exchanged.of_all
    return [
        fqn
        for fqn in first
        if all(fqn in digests and digests[fqn][0] == first[fqn][0] for digests in other_ranks)
        and any(digests[fqn] != first[fqn] for digests in other_ranks)
    ]


def retie(model: nn.Module, ties: Sequence[Sequence[str]]) -> None:
    """Make tied names one object again.

    Args:
        model: the wrapped model.
        ties: groups of FQNs without wrappers. The parameter under the first name is kept.

    Raises:
        LayoutError: some ties cannot be mended, because their names are sharded separately or in different ways.
    """
    parameters: dict[str, ModuleTensor] = {}
    for place in tensor_places(model):
        if place.kind == "parameter":
            parameters.setdefault(place.fqn, place)
    managed = {id(shard.param) for shard in fsdp_shards(model)}
    problems: list[str] = []
    for first, *tied_names in ties:
        for tied_name in tied_names:
            if first not in parameters or tied_name not in parameters:
                continue
            kept, place = parameters[first].tensor, parameters[tied_name]
            if place.tensor is kept:
                continue
            if id(place.tensor) in managed or not _same_place(place.tensor, kept):
                problems.append(f"{escape(tied_name)} and {escape(first)}")
            else:
                setattr(place.module, place.name, kept)
    LayoutError.raise_for(
        problems,
        "names that were one parameter are several in the wrapped model",
        hint="keep tied modules in one unit (fully_shard takes a list of modules), and parallelise them alike",
    )


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    if isinstance(a, DTensor) != isinstance(b, DTensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        return a.device_mesh == b.device_mesh and a.placements == b.placements
    return True
