"""Two real ranks save with stock `dcp`, and load with torch's reader and with SafeReader: the results are equal.

python safe_reader_world.py DIRECTORY
"""

import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardkit
from tests.worlds.processes import fork, wait

torch.set_num_threads(1)
WORLD = 2


def trained(mesh: DeviceMesh, seed: int) -> dict[str, Any]:
    """An FSDP2 model and its AdamW after a step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (seed + 1), betas=(0.8, 0.9 + seed / 100))
    model(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    scheduler = {"last_lr": [0.1 * seed], "name": "cosine", "milestones": {3: seed}, "empty": None}
    rng = torch.get_rng_state()
    return {
        "model": model_state,
        "optim": optimizer_state,
        "scheduler": scheduler,
        "step": seed,
        "rng": rng,
        "blob": (seed, b"\0\xff", {1, seed}, torch.Size([seed, 2]), torch.bfloat16, torch.arange(seed + 3)),
    }


def placed(mesh: DeviceMesh, seed: int) -> dict[str, Any]:
    """DTensors that are cut along either dim, and what torch stores in other ways."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(9, 6, generator=generator)
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole.bfloat16(), mesh, [Shard(1)]),
        "whole": distribute_tensor(whole * 2, mesh, [Replicate()]),
        "strided": whole.t() if seed else torch.zeros(6, 9),
        "scalar": torch.tensor(seed),
        "empty": torch.zeros(0, 3),
        "bool": whole > 0,
        "nested": {"list": [whole[0] + 1, {"a": seed}], "tuple": (seed, "x")},
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, DTensor):
        return isinstance(b, DTensor) and a.placements == b.placements and same(a.to_local(), b.to_local())
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def work(rank: int, base: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{base}/store", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    report: dict[str, bool] = {}
    makers: dict[str, Callable[[DeviceMesh, int], dict[str, Any]]] = {"trained": trained, "placed": placed}
    ways = {"trained": ("async", "zstd"), "placed": ("plain", "zstd")}
    for name, make in makers.items():
        for way in ways[name]:
            path = str(base / f"{name}-{way}")
            extensions = [ZStandard()] if way == "zstd" else None
            if way == "async":
                dcp.async_save(make(mesh, 1), checkpoint_id=path).result()
            else:
                writer = dcp.FileSystemWriter(path, _extensions=extensions)
                dcp.save(make(mesh, 1), storage_writer=writer)
            dist.barrier()
            ours, stock = make(mesh, 0), make(mesh, 0)
            dcp.load(stock, storage_reader=dcp.FileSystemReader(path))
            dcp.load(ours, storage_reader=shardkit.SafeReader(path, check_crc=way != "async"))
            report[f"{name}-{way}"] = same(ours, stock) and not same(ours, make(mesh, 0))
    rank_local = str(base / "rank-local")
    dcp.save(placed(mesh, 1), checkpoint_id=rank_local, use_collectives=False)
    dist.barrier()
    ours, stock = placed(mesh, 0), placed(mesh, 0)
    dcp.load(stock, checkpoint_id=rank_local)
    dcp.load(ours, storage_reader=shardkit.SafeReader(rank_local))
    report["rank-local"] = same(ours, stock)
    (base / f"rank{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    base = Path(sys.argv[1])
    wait([fork(partial(work, rank, base)) for rank in range(WORLD)])


if __name__ == "__main__":
    main()
