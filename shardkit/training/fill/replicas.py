"""Let one rank read the data that several ranks store, and send it to the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardkit.core.regions import Region
from shardkit.core.text import MIB
from shardkit.files.digest import crc32
from shardkit.training.fill.reading import Filled, WantedPart
from shardkit.training.ranks.agree import device_for, gather_json, wire, world
from shardkit.training.ranks.local import flat_bytes

_READ_BY_EACH = 1 << 16  # bytes; reading less is cheaper than sending it
_PIECE_NBYTES = 16 * MIB
_IN_FLIGHT = 3  # pieces that are sent at a time


def regions_of(mine: Sequence[WantedPart]) -> dict[str, list[Region]]:
    """Return stored name -> regions that are read of the tensor."""
    regions: dict[str, list[Region]] = {}
    for item in mine:
        if item.region.num_elements:
            regions.setdefault(item.entry.fqn, []).append(item.region)
    return regions


class SharedPart(NamedTuple):
    """A part that several ranks store, and the one of them that reads it."""

    part: WantedPart
    reader: int
    """Index of the reading rank among the replicas."""


def divide_reads(parts: Sequence[WantedPart]) -> tuple[list[WantedPart], list[SharedPart]]:
    """Decide which parts this rank reads itself, and which parts one replica reads for all.

    A part below 64 KiB is read by every rank that stores it. Each larger part is assigned to the replica that has the
    fewest bytes to read so far. All ranks of a replica group see the same parts in the same order, so their decisions
    are equal. Plain tensors are shared by all ranks if all of them have the same plain tensors.

    Returns:
        (parts that this rank reads, parts that are shared). A shared part that this rank reads is in both.
    """
    _, world_size = world()
    plain_is_shared = world_size > 1 and _same_plain(parts)
    loads: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[int]] = {}
    mine: list[WantedPart] = []
    shared: list[SharedPart] = []
    for item in parts:
        replicas, nbytes = item.shard.replicas, item.target.nbytes
        count = replicas.count
        if replicas.mesh is None:
            count = world_size if plain_is_shared else 1
        if nbytes == 0:
            continue
        if count == 1 or nbytes < _READ_BY_EACH:
            mine.append(item)
            continue
        load = loads.setdefault((replicas.mesh, replicas.axes), [0] * count)
        reader = load.index(min(load))
        load[reader] += nbytes
        shared.append(SharedPart(item, reader))
        if reader == _index(item):
            mine.append(item)
    return mine, shared


def _same_plain(parts: Sequence[WantedPart]) -> bool:
    """True if all ranks have the same plain tensors; pipeline stages do not."""
    plain = [[item.shard.fqn, *item.shard.shape] for item in parts if item.shard.replicas.mesh is None]
    return len(set(gather_json(crc32(json.dumps(plain).encode()), phase="comparing the ranks' models"))) == 1


def _index(item: WantedPart) -> int:
    replicas = item.shard.replicas
    return world()[0] if replicas.mesh is None else replicas.index


def copy_to_replicas(shared: Sequence[SharedPart], filled: Filled) -> None:
    """Send every shared part from the rank that read it to the others that store it; all of these call it.

    Args:
        shared: the shared parts, from `divide_reads`.
        filled: counts to which elements from other ranks are added.

    Raises:
        ResourceError: a rank died, or did not respond within the process group's timeout.
    """
    pending: list[dist.Work] = []
    with wire("copying shards to their replicas"):
        for item, reader in shared:
            for step, (group, source) in enumerate(_steps(item, reader)):
                if step:  # the broadcast in this group sends data from the previous broadcast
                    _finish(pending)
                _broadcast(item.target, group, source, pending)
            if reader != _index(item):
                filled.elements[item.shard.fqn] += item.target.numel()
        _finish(pending)


def _finish(pending: list[dist.Work]) -> None:
    for work in pending:
        work.wait()
    pending.clear()


def _steps(item: WantedPart, reader: int) -> list[tuple[dist.ProcessGroup | None, int]]:
    """Return (group, global rank that sends) of the broadcasts in which this rank participates.

    A part is sent along one axis after another: ranks that have received it along one axis send it along the next.
    """
    mesh, axes = item.shard.replicas.mesh, item.shard.replicas.axes
    if mesh is None:
        return [(None, reader)]
    here = mesh.get_coordinate()
    assert here is not None
    reader_place: dict[int, int] = {}
    for axis in reversed(axes):
        reader, reader_place[axis] = divmod(reader, mesh.size(axis))
    steps: list[tuple[dist.ProcessGroup | None, int]] = []
    for place, axis in enumerate(axes):
        if all(here[later] == reader_place[later] for later in axes[place + 1 :]) and mesh.size(axis) > 1:
            group = mesh.get_group(axis)
            steps.append((group, dist.get_global_rank(group, reader_place[axis])))
    return steps


def _broadcast(
    target: torch.Tensor, group: dist.ProcessGroup | None, source: int, pending: list[dist.Work]
) -> None:
    """Begin to send a part in pieces of bounded size, only a few at a time."""
    device = device_for(group, target.device)
    if not target.is_contiguous() or device != target.device:
        _broadcast_staged(target, group, source, device)
        return
    memory = flat_bytes(target)
    for start in range(0, len(memory), _PIECE_NBYTES):
        work = dist.broadcast(memory[start : start + _PIECE_NBYTES], source, group, async_op=True)
        assert work is not None
        pending.append(work)
        if len(pending) > _IN_FLIGHT:
            pending.pop(0).wait()


def _broadcast_staged(
    target: torch.Tensor, group: dist.ProcessGroup | None, source: int, device: torch.device
) -> None:
    """Send a part that is not contiguous, or is on a device that the group's backend does not support."""
    rows = max(_PIECE_NBYTES // max(target[:1].nbytes, 1), 1)
    for start in range(0, len(target), rows):
        part = target[start : start + rows]
        staged = part.to(device).contiguous()
        dist.broadcast(flat_bytes(staged), source, group)
        part.copy_(staged)
