"""The child process that has torch write files of DTensors, without their data.

    request (stdin)    {"directory", "shape", "names", "device", "world_size", "ranks": [[rank, coordinate, tensors]]},
                       each of the tensors a list: name, dtype, shape, local shape, and placements as dims and null, or
                       null for a plain tensor; a name alone stands for another name of the tensor before it

writes `<directory>/<rank>.pt` for every rank, sparse files with holes where the data of its tensors belong. A pickled
DTensor holds a mesh, whose form is torch's own and changes with its versions, so torch writes it.
"""

from __future__ import annotations

import json
import os
import sys
from collections import OrderedDict
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardkit._torch import init_fake_world, set_mesh_place


def main() -> None:
    """Serve the one request on stdin."""
    request = json.load(sys.stdin)
    init_fake_world(request["world_size"])
    mesh = init_device_mesh("cpu", tuple(request["shape"]), mesh_dim_names=tuple(request["names"]))
    for rank, coordinate, tensors in request["ranks"]:
        state = _state(mesh, tensors)
        set_mesh_place(mesh, rank, coordinate, request["device"], state.values())
        with torch.serialization.skip_data():
            torch.save(state, os.path.join(request["directory"], f"{rank}.pt"))
        set_mesh_place(mesh, rank, coordinate, "cpu", ())
    sys.stdout.flush()
    os._exit(0)  # an orderly end of a fake process group takes time and serves nothing


def _state(mesh: DeviceMesh, tensors: list[Any]) -> OrderedDict[str, torch.Tensor]:
    state: OrderedDict[str, torch.Tensor] = OrderedDict()
    last = torch.empty(0)
    for entry in tensors:
        if isinstance(entry, str):
            state[entry] = last
            continue
        name, dtype, shape, local_shape, dims = entry
        last = torch.empty(local_shape, dtype=getattr(torch, dtype))
        if dims is not None:
            placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
            stride = torch.empty(shape, device="meta").stride()
            last = DTensor.from_local(
                last, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
            )
        state[name] = last
    return state


if __name__ == "__main__":
    main()
