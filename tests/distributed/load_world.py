"""Real gloo worlds that load what preshard wrote with stock `dcp.load`, and compare every bit.

    python load_world.py JOBS

JOBS is JSON: {"base": directory, "models": {name: {"config", "unit"}}, "jobs": [{"name", "model", "shape",
"mesh", "layout"}]}; a model without a config is `Edges`, "layout" is "traced" or "declared", a "wrap" is
optional. Every model's random weights are saved once; every job pre-shards one of them. Each shape of
world is started once: forked ranks load one job after the other into the same model, wrapped with
`fully_shard`, and write base/<job>/rank<R>.json: what was opened and read, and which names were not bit-equal.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardkit
from shardkit.layout import traced
from tests.distributed.models import Edges, random_bits
from tests.distributed.policies import shard_columns
from tests.worlds.processes import fork, forked_trace, wait

torch.set_num_threads(1)

# torch 2.13: "Invalid scalar type" of gloo's all_gather.
NOT_GATHERED = torch.float8_e4m3fn


def make_model(config: dict[str, Any] | None) -> nn.Module:
    """Build a model where the default device says."""
    if config is None:
        return Edges()
    model_class: Any = getattr(transformers, config["architectures"][0])
    model: nn.Module = model_class._from_config(transformers.AutoConfig.for_model(**config))
    return model


def save_model(name: str, config: dict[str, Any] | None, base: Path) -> None:
    """Write base/<name>-traced, and base/<name>-declared: the same weights, with a config of ties alone."""
    traced_hub, declared_hub = base / f"{name}-traced", base / f"{name}-declared"
    model: Any = make_model(config)
    declared_hub.mkdir()
    if config is None:
        state = {key: random_bits(tensor) for key, tensor in model.state_dict().items()}
        save_file(state, declared_hub / "model.safetensors", metadata={"format": "pt"})
        return
    model.save_pretrained(traced_hub)
    os.link(traced_hub / "model.safetensors", declared_hub / "model.safetensors")
    kept = {key: config[key] for key in ("architectures", "tie_word_embeddings") if key in config}
    (declared_hub / "config.json").write_text(json.dumps(kept))


def preshard(job: dict[str, Any], base: Path) -> None:
    """Carry out a job's preshard. One with a wrap of its own is traced in a real child."""
    source, output = base / f"{job['model']}-{job['layout']}", base / job["name"] / "out"
    with mock.patch.object(traced, "_spawn", traced._spawn if "wrap" in job else forked_trace):
        result = shardkit.preshard(str(source), str(output), mesh=job["mesh"], wrap=job.get("wrap", "auto"))
    (base / job["name"] / "result.json").write_text(json.dumps(result.to_json()))


def wrap_model(job: dict[str, Any], model: dict[str, Any], mesh: DeviceMesh) -> nn.Module:
    """Return the wrapped model, with memory that holds what no source does."""
    with torch.device("meta"):
        live: Any = make_model(model["config"])
    if "wrap" in job:
        shard_columns(live, mesh)
    else:
        for layer in [m for m in live.modules() if type(m).__name__ == model["unit"]]:
            fully_shard(layer, mesh=mesh)
        fully_shard(live, mesh=mesh)
    live.to_empty(device="cpu")
    if model["config"] is not None:
        live.tie_weights()
    with torch.no_grad():
        for tensor in live.state_dict().values():
            local_part(tensor).fill_(77)
    return live


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def read_bytes() -> int:
    """Bytes that this process has asked read calls for (man 5 proc: rchar)."""
    with open("/proc/self/io", encoding="ascii") as file:
        return int(file.readline().split()[1])


def rank_main(rank: int, shape: list[int], jobs: list[dict[str, Any]], models: Any, base: Path) -> None:
    names, store = ("dp_replicate", "dp_shard")[-len(shape) :], base / f"store-{len(shape)}-{prod(shape)}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=prod(shape))
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    for job in jobs:
        state = wrap_model(job, models[job["model"]], mesh).state_dict()
        checkpoint, before = base / job["name"] / "out", read_bytes()
        opened.clear()
        dcp.load(state, checkpoint_id=checkpoint)
        report = {
            "files": sorted({Path(name).name for name in opened if name.endswith(".distcp")}),
            "read_bytes": read_bytes() - before - (checkpoint / ".metadata").stat().st_size,
            "local_bytes": sum(local_part(tensor).nbytes for tensor in state.values()),
            "different": differences(state, base / f"{job['model']}-{job['layout']}" / "model.safetensors"),
            "compared": len(state),
        }
        (base / job["name"] / f"rank{rank}.json").write_text(json.dumps(report))
    dist.barrier()


def differences(state: dict[str, Any], path: Path) -> list[str]:
    """Return the names whose gathered values are not bit-equal to the file's, and those not looked at."""
    with safe_open(path, "pt") as file:
        held = set(file.keys())
        different = [*held - state.keys()]
        for name, tensor in state.items():
            expected = file.get_tensor(name if name in held else tied_name(name, held))
            if not is_bit_equal(gathered(tensor), expected):
                different.append(name)
    return different


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, of this rank's replica."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.dtype is not NOT_GATHERED:
        return tensor.full_tensor()
    assert tensor.placements[-1].is_shard(0)  # then the parts lie one after the other
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, bits(tensor.to_local()).tolist())
    size = tensor.device_mesh.shape[-1]
    first = dist.get_rank() // size * size
    data = [torch.tensor(part, dtype=torch.uint8) for part in parts[first : first + size]]
    return torch.cat(data).view(tensor.dtype).reshape(tensor.shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def is_bit_equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    return torch.equal(bits(found), bits(expected))


def tied_name(name: str, held: set[str]) -> str:
    """The embedding of a tied head."""
    assert name == "lm_head.weight", name
    return next(n for n in held if n.endswith(("embed_tokens.weight", "wte.weight")))


def main() -> None:
    request = json.loads(sys.argv[1])
    base, models = Path(request["base"]), request["models"]
    torch.manual_seed(0)
    for name, model in models.items():
        save_model(name, model["config"], base)
    worlds: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for job in request["jobs"]:
        (base / job["name"]).mkdir()
        preshard(job, base)
        worlds.setdefault(tuple(job["shape"]), []).append(job)
    for shape, jobs in worlds.items():
        ranks = range(prod(shape))
        wait([fork(partial(rank_main, rank, list(shape), jobs, models, base)) for rank in ranks])


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
