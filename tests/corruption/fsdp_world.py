"""A real gloo world of two: wraps a model with `fully_shard`, and saves it and its optimizer with stock `dcp.save`.

python fsdp_world.py OUT
"""

import sys
import warnings
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.worlds.processes import fork, wait

torch.set_num_threads(1)
warnings.simplefilter("ignore")


def save(rank: int, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=2)
    model = torch.nn.Sequential(torch.nn.Linear(61, 90), torch.nn.Linear(90, 7))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 61)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments, "step": 3}, checkpoint_id=out)
    dist.barrier()
    dist.destroy_process_group()


wait([fork(partial(save, rank, sys.argv[1])) for rank in range(2)])
