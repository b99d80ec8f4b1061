"""Make state dicts that stock `dcp.save` and `dcp.load` handle correctly, for all placements of their tensors.

torch describes a rank's part of a DTensor as one region. For a packed dim (fused experts under `packed_colwise`) that
is wrong: `dcp.load` fills wrong values without an error, and `dcp.save` fails. It is also wrong for some uneven sizes
under `fully_shard` over tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardkit._torch import LocalRegions
from shardkit.core.placements import stock_region
from shardkit.core.regions import Region, window
from shardkit.layout.placed import placements_of
from shardkit.training.ranks.local import local_tensor, parts_of


def checkpointable(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict for `dcp.save` and `dcp.load` in which each tensor describes what its memory contains.

        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.load(shardkit.checkpointable(state), checkpoint_id=path)  # fills the tensors of `state`

    Args:
        state_dict: the state dict of a model or an optimizer, nested or not. It is not changed.

    Returns:
        The same names and values. A DTensor that torch would describe wrongly is replaced by a view of its memory.

    Raises:
        LayoutError: a DTensor has placements that are not supported.
    """
    return {name: _checkpointable(value) for name, value in state_dict.items()}


def _checkpointable(value: Any) -> Any:
    if isinstance(value, DTensor):
        return _describe_memory(value)
    if isinstance(value, Mapping):
        return checkpointable(value)
    if type(value) in (list, tuple):
        return type(value)(map(_checkpointable, value))
    return value


def _describe_memory(tensor: DTensor) -> torch.Tensor:
    coordinate = tensor.device_mesh.get_coordinate()
    placements, shape = placements_of(tensor), tuple(tensor.shape)
    if coordinate is None or all(placement.split_factor == 1 for placement in placements):
        return tensor
    parts, _ = parts_of(tensor)
    if [part.region for part in parts] == [
        stock_region(shape, placements, tuple(tensor.device_mesh.shape), coordinate)
    ]:
        return tensor
    rows = [(*part.region, window(Region(part.corner, part.region.sizes))) for part in parts]
    return LocalRegions.of(local_tensor(tensor), shape, rows)
