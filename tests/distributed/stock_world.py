"""Real gloo worlds: builds tiny models, wraps them with `fully_shard`, saves them with stock `dcp.save`.

    python stock_world.py JOBS

JOBS is JSON: {"worlds": [[2], [2, 2]], "models": {name: config}, "units": {name: class},
"directories": ..., "out": ...}. Imports
once and forks every rank, and every trace: starting 4 interpreters takes longer than all of the work.
Writes out/<world>/<model>/{.metadata,...} and out/<world>/<model>.json, the trace of the same model.
"""

import json
import sys
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardkit.layout import trace_child
from tests.distributed.models import Edges
from tests.worlds.processes import fork, wait

torch.set_num_threads(1)


def save(rank: int, shape: list[int], jobs: dict[str, Any], out: Path) -> None:
    names = ("dp_replicate", "dp_shard")[-len(shape) :]
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=prod(shape))
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
    for name, config in jobs["models"].items():
        model_class = getattr(transformers, config["architectures"][0])
        parsed = transformers.AutoConfig.for_model(**config)
        model = model_class._from_config(parsed)
        for layer in [m for m in model.modules() if type(m).__name__ == jobs["units"][name]]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        dcp.save(model.state_dict(), checkpoint_id=out / name)
    edges = Edges()
    for layer in edges.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(edges, mesh=mesh)
    dcp.save(edges.state_dict(), checkpoint_id=out / "edges")
    dist.barrier()


def trace(shape: list[int], name: str, jobs: dict[str, Any], out: Path) -> None:
    names, roles = ("dp_replicate", "dp_shard")[-len(shape) :], ("replicate", "shard")[-len(shape) :]
    request = {
        "directory": str(Path(jobs["directories"]) / name),
        "axes": list(zip(names, shape, roles, strict=True)),
        "wrap": jobs["units"][name],
        "names": None,
        "trust_remote_code": False,
    }
    (out / f"{name}.json").write_text(json.dumps(trace_child.answer_request(request)))


def main() -> None:
    jobs = json.loads(sys.argv[1])
    for config in jobs["models"].values():
        getattr(transformers, config["architectures"][0])
    for shape in jobs["worlds"]:
        out = Path(jobs["out"]) / "x".join(map(str, shape))
        out.mkdir()
        wait([fork(partial(save, rank, shape, jobs, out)) for rank in range(prod(shape))])
        for name in jobs["models"]:
            wait([fork(partial(trace, shape, name, jobs, out))])


main()
