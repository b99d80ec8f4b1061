"""What several ranks hold: one of them reads it, and sends it to the others."""

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
from shardkit.training.fill.reading import Filled, Wanted
from shardkit.training.ranks.agree import device_for, gather_json, wire, world
from shardkit.training.ranks.local import flat_bytes

_READ_BY_EACH = 1 << 16  # bytes; below it a read costs less than being sent
_PIECE_NBYTES = 16 * MIB
_IN_FLIGHT = 3  # pieces


def regions_of(mine: Sequence[Wanted]) -> dict[str, list[Region]]:
    """Return the regions that are read of each stored tensor."""
    regions: dict[str, list[Region]] = {}
    for item in mine:
        if item.region.num_elements:
            regions.setdefault(item.entry.fqn, []).append(item.region)
    return regions


class Shared(NamedTuple):
    """A part that several ranks hold, and which of them reads it."""

    part: Wanted
    reader: int
    """Its place among the replicas."""


def divide(parts: Sequence[Wanted]) -> tuple[list[Wanted], list[Shared]]:
    """Divide what this rank holds into what it reads itself and what one replica reads for all of them.

    Every rank that holds a part below 64 KiB reads it. Each larger part goes to the replica that has the
    fewest bytes to read so far. All ranks of a replica group see the same parts in the same order, so they
    decide alike. A plain tensor counts as held by all ranks if all of them have the same plain tensors.

    Returns:
        What this rank reads, and what is read once.
    """
    _, world_size = world()
    plain_is_shared = world_size > 1 and _same_plain(parts)
    loads: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[int]] = {}
    mine: list[Wanted] = []
    shared: list[Shared] = []
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
        shared.append(Shared(item, reader))
        if reader == _index(item):
            mine.append(item)
    return mine, shared


def _same_plain(parts: Sequence[Wanted]) -> bool:
    """True if all ranks hold the same plain tensors; pipeline stages do not."""
    plain = [[item.shard.fqn, *item.shard.shape] for item in parts if item.shard.replicas.mesh is None]
    return len(set(gather_json(crc32(json.dumps(plain).encode()), phase="comparing the ranks' models"))) == 1


def _index(item: Wanted) -> int:
    replicas = item.shard.replicas
    return world()[0] if replicas.mesh is None else replicas.index


def copy_to_replicas(shared: Sequence[Shared], filled: Filled) -> None:
    """Send every shared part from the rank that read it to the others that hold it; all of these call it.

    Args:
        shared: from `divide`.
        filled: gets the counts of what came from others.

    Raises:
        ResourceError: a rank died, or did not come within the process group's timeout.
    """
    pending: list[dist.Work] = []
    with wire("copying shards to their replicas"):
        for item, reader in shared:
            for step, (group, source) in enumerate(_steps(item, reader)):
                if step:  # this group passes on what the last one brought
                    _finish(pending)
                _broadcast(item.target, group, source, pending)
            if reader != _index(item):
                filled.elements[item.shard.fqn] += item.target.numel()
        _finish(pending)


def _finish(pending: list[dist.Work]) -> None:
    for work in pending:
        work.wait()
    pending.clear()


def _steps(item: Wanted, reader: int) -> list[tuple[dist.ProcessGroup | None, int]]:
    """Return (group, global rank that has the part) of the broadcasts in which this rank takes part.

    A part travels along one axis after another: the ranks that have it pass it on along the next axis.
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
    """Begin to send a part in bounded pieces, of which only a few are on their way at any time."""
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
    """Send a part that is not contiguous, or lies where the group's backend cannot reach."""
    rows = max(_PIECE_NBYTES // max(target[:1].nbytes, 1), 1)
    for start in range(0, len(target), rows):
        part = target[start : start + rows]
        staged = part.to(device).contiguous()
        dist.broadcast(flat_bytes(staged), source, group)
        part.copy_(staged)
