"""Two gloo ranks start models whose names in memory are not the Hub's, and save them by stock torch and by shardkit.

    python names_world.py OUT

It gets each model as a Hub directory, NAME, and NAME-dcp, NAME-saved; of some, NAME-flat (no dict around the names)
and NAME-again (saved once more, from what was saved).
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardkit.training.finalize import finalize, load_into
from shardkit.training.prepare import prepare
from shardkit.training.save import save
from shardkit.training.wrap import wrap
from tests.training import models
from tests.worlds.processes import end_world, fork, wait

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SIZE = 2
TWICE = ("qwen2-vl", "llava-tied")
MODELS = ("qwen2-vl", "qwen2-vl-tied", "qwen2.5-vl", "llava", "llava-tied", "qwen3-vl", "gpt-neox")


def start(hub: Path, source: Path) -> nn.Module:
    ctx = prepare(str(hub), str(source))
    model = wrap(ctx.model, init_device_mesh("cpu", (SIZE,)), mixed_precision=None)
    return finalize(model, ctx)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    state = get_model_state_dict(model)
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}


def run(rank: int, out: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=SIZE)
    for name in MODELS:
        hub = out / name
        model = start(hub, hub)
        state = get_model_state_dict(model)
        dcp.save({"model": state}, checkpoint_id=out / f"{name}-dcp")
        save(model, out / f"{name}-saved")
        if name not in TWICE:
            continue
        dcp.save(state, checkpoint_id=out / f"{name}-flat")
        again = start(hub, out / f"{name}-saved")
        save(again, out / f"{name}-again")
        expected, found = whole(model), whole(again)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected), name
        load_into(model, out / f"{name}-dcp")
        assert all(torch.equal(expected[key], value) for key, value in whole(model).items()), name
    end_world()


if __name__ == "__main__":
    out = Path(sys.argv[1])
    for name in MODELS:
        models.save(name, out / name)
    wait([fork(partial(run, rank, out)) for rank in range(SIZE)])
