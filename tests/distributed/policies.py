"""A wrap function as a user would write it, for `--wrap tests.distributed.policies:shard_columns`."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard


def shard_columns(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard matrices along their last dim, as verl does where the first does not divide."""

    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(parameter.dim() - 1) if parameter.dim() > 1 else None

    for layer in [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]:
        fully_shard(layer, mesh=mesh, shard_placement_fn=place)
    fully_shard(model, mesh=mesh, shard_placement_fn=place)
