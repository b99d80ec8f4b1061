"""Real gloo worlds that load what preshard wrote with stock `dcp.load`, and compare every bit.

    python load_world.py JOBS

JOBS is JSON: {"base": directory, "jobs": [{"name", "config", "unit", "shape", "mesh", "wrap"}]}. For each job: a model of
random weights is saved by transformers, pre-sharded, and loaded by forked ranks into the same model,
wrapped with `fully_shard`. Each rank writes base/<name>/rank<R>.json: what it opened and read, and the
names that were not bit-equal.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardkit
from tests.distributed.policies import shard_columns
from tests.distributed.processes import fork, wait

torch.set_num_threads(1)


def model_class(job: dict[str, Any]) -> Any:
    return getattr(transformers, job["config"]["architectures"][0])


def read_bytes() -> int:
    """Bytes that this process has asked read calls for (man 5 proc: rchar)."""
    with open("/proc/self/io", encoding="ascii") as file:
        return int(file.readline().split()[1])


def rank_main(rank: int, job: dict[str, Any], base: Path) -> None:
    shape, names = job["shape"], ("dp_replicate", "dp_shard")[-len(job["shape"]) :]
    dist.init_process_group("gloo", init_method=f"file://{base}/store", rank=rank, world_size=prod(shape))
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
    with torch.device("meta"):
        model = model_class(job)._from_config(transformers.AutoConfig.from_pretrained(base / "hub"))
    if "wrap" in job:
        shard_columns(model, mesh)
    else:
        for layer in [m for m in model.modules() if type(m).__name__ == job["unit"]]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.tie_weights()
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    state, before = model.state_dict(), read_bytes()
    dcp.load(state, checkpoint_id=base / "out")
    read = read_bytes() - before
    report = {
        "files": sorted({Path(name).name for name in opened if name.endswith(".distcp")}),
        "read_bytes": read - (base / "out" / ".metadata").stat().st_size,
        "local_bytes": sum(getattr(t, "_local_tensor", t).nbytes for t in state.values()),
        "different": differences(state, base / "hub" / "model.safetensors"),
        "compared": len(state),
    }
    (base / f"rank{rank}.json").write_text(json.dumps(report))
    dist.barrier()


def differences(state: dict[str, Any], path: Path) -> list[str]:
    """Return the names whose gathered values are not bit-equal to the file's."""
    different = []
    with safe_open(path, "pt") as file:
        held = set(file.keys())
        for name, tensor in state.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            expected = file.get_tensor(name if name in held else tied_name(name, held))
            if whole.dtype != expected.dtype or not torch.equal(
                whole.view(torch.uint8), expected.view(torch.uint8)
            ):
                different.append(name)
    return different


def tied_name(name: str, held: set[str]) -> str:
    """The embedding of a tied head."""
    assert name == "lm_head.weight", name
    return next(n for n in held if n.endswith(("embed_tokens.weight", "wte.weight")))


def main() -> None:
    jobs = json.loads(sys.argv[1])
    for job in jobs["jobs"]:
        base = Path(jobs["base"]) / job["name"]
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**job["config"])
        model_class(job)._from_config(config).save_pretrained(base / "hub")
        result = shardkit.preshard(
            str(base / "hub"), str(base / "out"), mesh=job["mesh"], wrap=job.get("wrap", "auto")
        )
        (base / "result.json").write_text(json.dumps(result.to_json()))
        wait([fork(partial(rank_main, rank, job, base)) for rank in range(prod(job["shape"]))])


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
