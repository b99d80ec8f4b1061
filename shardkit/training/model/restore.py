"""Buffers and ties, after wrapping: values on every rank, on the right device, one object where there was one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit._torch import fsdp_shards
from shardkit.core.text import escape, listed
from shardkit.errors import LayoutError
from shardkit.files.digest import crc32
from shardkit.training.fill.reading import flat_bytes, memory_of
from shardkit.training.ranks.agree import agreed, device_for, gather_json, lost, world
from shardkit.training.ranks.context import clean_name

_log = logging.getLogger("shardkit")


class Buffer(NamedTuple):
    """A buffer where a module has it."""

    fqn: str
    module: nn.Module
    name: str
    """In the module."""
    value: torch.Tensor


def named_buffers(model: nn.Module) -> Iterator[Buffer]:
    """Yield every buffer under its clean FQN, shared ones at every place."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in module.named_buffers(recurse=False, remove_duplicate=False):
            yield Buffer(clean_name(f"{path}.{name}" if path else name), module, name, value)


def restore_buffers(model: nn.Module, values: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Give every buffer its computed value, on a device; persistent or not stays as it is.

    A wrapper may have moved a buffer to meta, or given it memory without values, and then it looks like any other.
    Attributes that were another name of a buffer follow it.

    Args:
        model: wrapped.
        values: by clean FQN; a buffer that is not among them is only moved.
        device: for all of them.
    """
    moved: dict[int, torch.Tensor] = {}
    kept: list[torch.Tensor] = []  # so that no id is given to another tensor meanwhile
    for fqn, module, name, old in list(named_buffers(model)):
        if isinstance(old, DTensor):
            continue
        new = moved.get(id(old))
        if new is None:
            new = _value(old, values.get(fqn), device)
            moved[id(old)] = new
            kept.append(old)
        if new is not old:
            setattr(module, name, new)
            for other, held in list(vars(module).items()):
                if held is old:
                    setattr(module, other, new)


def _value(old: torch.Tensor, computed: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if computed is None:
        return old if old.is_meta else old.to(device)
    if old.is_meta or old.device.type != device.type:
        return computed.detach().clone().to(device=device, dtype=old.dtype)
    with torch.no_grad():
        old.copy_(computed)
    return old


def equalise_buffers(model: nn.Module) -> list[str]:
    """Make buffers that differ between ranks those of rank 0; return the names of what did, or still does.

    Compared by their digests; so only what differs is sent. Every rank calls it.
    """
    differing = _differing(model)
    if not differing:
        return []
    if world()[0] == 0:
        _log.warning("buffers differed between ranks and are now those of rank 0: %s", listed(differing))
    held = {fqn: value for fqn, _, _, value in named_buffers(model)}
    try:
        for fqn in differing:
            value = held[fqn]
            sent = value.detach().to(device_for(None, value.device), copy=True).contiguous()
            dist.broadcast(flat_bytes(sent), 0)
            with torch.no_grad():
                value.copy_(sent)
    except RuntimeError as error:
        raise lost("sending buffers", error) from error
    return _differing(model)


def _differing(model: nn.Module) -> list[str]:
    """Return the names of plain buffers that all ranks have, of one size, with different bytes."""
    if world()[1] == 1:
        return []
    digests: dict[str, list[int]] = {}
    with agreed("comparing buffers"):
        for fqn, _, _, value in named_buffers(model):
            if not isinstance(value, DTensor) and not value.is_meta:
                content = memory_of(value.detach().cpu().contiguous())
                digests[fqn] = [len(content), crc32(content)]
    told = gather_json(digests, phase="comparing buffers")
    return [
        fqn
        for fqn in told[0]
        if all(fqn in each and each[fqn][0] == told[0][fqn][0] for each in told)
        and any(each[fqn] != told[0][fqn] for each in told)
    ]


def retie(model: nn.Module, ties: Sequence[Sequence[str]]) -> None:
    """Make one object again of what was one parameter.

    Args:
        model: wrapped.
        ties: groups of clean FQNs, the first of which is kept.

    Raises:
        LayoutError: ties that cannot be mended, because each end is sharded by itself or in another way.
    """
    places: dict[str, tuple[nn.Module, str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(clean_name(f"{path}.{name}" if path else name), (module, name))
    managed = {id(shard.param) for shard in fsdp_shards(model)}
    problems: list[str] = []
    for first, *others in ties:
        if first not in places:
            continue
        kept = getattr(*places[first])
        for other in others:
            if other not in places or getattr(*places[other]) is kept:
                continue
            module, name = places[other]
            if id(getattr(module, name)) in managed or not _same_place(getattr(module, name), kept):
                problems.append(f"{escape(other)} and {escape(first)}")
            else:
                setattr(module, name, kept)
    if problems:
        raise LayoutError(
            "names that were one parameter are several in the wrapped model",
            problems=problems,
            hint="keep tied modules in one unit (fully_shard takes a list of modules), and parallelise them alike",
        )


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    if isinstance(a, DTensor) != isinstance(b, DTensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        return a.device_mesh == b.device_mesh and a.placements == b.placements
    return True
