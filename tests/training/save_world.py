"""Real gloo worlds that save: whole, with a rank that fails, and with ranks that are killed half-way.

    python save_world.py OUT

Every rank writes OUT/<world>-<rank>.json, unless it is killed; the parent writes OUT/parent.json.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardkit.errors import ShardkitError
from shardkit.files import staging, storage
from shardkit.training.finalize import load_into
from shardkit.training.save import save
from shardkit.training.wrap import wrap
from tests.worlds.processes import fork

torch.set_num_threads(1)

Found = dict[str, Any]
SIZE = 2


class Model(nn.Module):
    """Odd sizes, a tie, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 23), nn.GELU(), nn.Linear(23, 10)) for _ in range(2)
        )
        self.head = nn.Linear(10, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((3,), 0.5))
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden) * self.scale.mean()


def start(value: float | None = None, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A wrapped model, all its parameters `value` if that is given."""
    torch.manual_seed(seed)
    model = Model()
    if value is not None:
        for parameter in model.parameters():
            nn.init.constant_(parameter, value)
    wrap(model, init_device_mesh("cpu", (SIZE,)), mixed_precision=None)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(12).view(2, 6)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in flat(value, f"{prefix}{key}.").items()}
    if isinstance(tree, list | tuple):
        return flat(dict(enumerate(tree)), prefix)
    if hasattr(tree, "local_shards"):  # FSDP1 without a mesh has ShardedTensors
        return flat([shard.tensor for shard in tree.local_shards()], prefix)
    return {prefix: tree.full_tensor() if isinstance(tree, DTensor) else tree}


def same(a: Any, b: Any) -> bool:
    a, b = flat(a), flat(b)
    return a.keys() == b.keys() and all(
        torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key] for key in a
    )


def told(work: Callable[[], object]) -> Found:
    try:
        work()
    except ShardkitError as error:
        return error.to_json()
    return {}


def names_in(out: Path) -> list[str]:
    dist.barrier()
    names = sorted(path.name for path in out.iterdir())
    dist.barrier()  # before any rank goes on and makes a new one
    return names


class FailsOnOne:
    """An object whose state dict cannot be had on rank 1."""

    def state_dict(self) -> Found:
        if dist.get_rank() == 1:
            raise OSError(5, "the tape is torn")
        return {"a": 1}

    def load_state_dict(self, state: Found) -> None:
        raise AssertionError


def whole(out: Path) -> Found:
    """Save, load with stock torch, refuse, fail, and save again."""
    model, optimizer = start()
    step(model, optimizer)
    place = out / "whole" / "last"  # its parent is missing
    trained = place.parent / "trained"
    result = save(
        model, trained, optimizer=optimizer, extra={"step": 5, "sampler": torch.Generator().get_state()}
    )
    weights, states = get_state_dict(model, optimizer)
    other, other_optimizer = start(seed=1)
    other_weights, other_states = get_state_dict(other, other_optimizer)
    state = {"model": other_weights, "optimizer": other_states, "extra": {"step": 0}}
    dcp.load(state, checkpoint_id=trained)
    set_state_dict(
        other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    save(model, place)
    found: Found = {
        "loaded": same(get_state_dict(other, other_optimizer), (weights, states)),
        "step": state["extra"]["step"],
        "tied": other.head.weight is other.embed.weight,
        "result": [result.path, result.num_files, result.file_bytes],
        "exists": told(lambda: save(model, place)),
        "foreign": told(lambda: save(model, out, overwrite=True)),
        "orphan": told(lambda: save(model, out / "whole.store" / "last")),
        "state_dict": told(lambda: save(model, place.parent / "new", extra={"bad": FailsOnOne()})),
    }
    if dist.get_rank() == 1:  # its files may not grow beyond a few bytes: as a full disk, on one rank
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
    found["full"] = told(lambda: save(model, place, overwrite=True))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found["names"] = names_in(place.parent)
    found["after"] = told(lambda: save(model, place, overwrite=True))
    found["files"] = names_in(place)
    return found


def unused(out: Path) -> Found:
    """An optimizer that has not stepped: saved as such, and left as it was."""
    model, optimizer = start()
    model(torch.arange(12).view(2, 6)).pow(2).mean().backward()
    gradient = model.head.weight.grad
    save(model, out / "unused", optimizer=optimizer)
    found = {"state": len(optimizer.state), "gradient": model.head.weight.grad is gradient}
    optimizer.zero_grad()
    other, other_optimizer = start(seed=1)
    step(other, other_optimizer)
    weights, states = get_state_dict(other, other_optimizer)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=out / "unused")
    set_state_dict(
        other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    step(model, optimizer)
    step(other, other_optimizer)
    return {**found, "same": same(model.state_dict(), other.state_dict())}


class Several(Model):
    """A block, a parameter and a buffer under two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.blocks[0]
        self.register_buffer("scale_again", self.scale)


class Holder(nn.Module):
    """Holds a wrapped model, as a LightningModule does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def flat_fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=False, device_id=torch.device("cpu"))


SEVERAL: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "fsdp2": lambda model: wrap(model, init_device_mesh("cpu", (SIZE,)), mixed_precision=None),
    "ddp": DistributedDataParallel,
    "held-ddp": lambda model: Holder(DistributedDataParallel(model)),
    "fsdp1": flat_fsdp1,
    "held-fsdp1": lambda model: Holder(flat_fsdp1(model)),
}


def several(out: Path) -> Found:
    """Models with several names for one tensor: saved, and loaded with stock torch into the same model."""
    found: Found = {}
    for case, prepare in SEVERAL.items():
        torch.manual_seed(0)
        plain = Several()
        model = prepare(plain)
        expected = get_model_state_dict(model)
        optimizer = torch.optim.AdamW(model.parameters())
        place = out / "several" / case / "last"
        save(model, place, optimizer=optimizer)
        torch.manual_seed(1)
        other = prepare(Several())
        state = {"model": get_model_state_dict(other)}
        dcp.load(state, checkpoint_id=place)
        torch.manual_seed(2)
        refilled = prepare(Several())
        if "fsdp1" not in case:
            load_into(refilled, place)
        found[case] = {
            "names": sorted(expected),
            "stock": same(state["model"], expected),
            "own": "fsdp1" in case or same(get_model_state_dict(refilled), expected),
        }
    return found


class Kills:
    """An object that cannot be written: whoever tries is killed."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def kill_after_rename() -> None:
    rename = storage.renameat2

    def last(source: str, target: str, flags: int) -> bool:
        if rename(source, target, flags):
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    storage.renameat2 = last


def killed(out: Path, value: float, victim: int | None, moment: str) -> Found:
    """Save a model of one value over `last`, while one rank is killed."""
    model, _ = start(value)
    is_victim = dist.get_rank() == victim
    if moment == "before" and is_victim:
        staging.Staging.commit = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    if moment == "after" and is_victim:
        kill_after_rename()
    extra = {f"bad{victim}": Kills()} if moment == "writing" and is_victim else {}
    return told(lambda: save(model, out / "kills" / "last", extra=extra, overwrite=True))


def rank(out: Path, name: str, work: Callable[[], Found], number: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{out}/{name}.store",
        rank=number,
        world_size=SIZE,
        timeout=timedelta(seconds=600),
    )
    found = work()
    (out / f"{name}-{number}.json").write_text(json.dumps(found))
    if not name.startswith("kill"):
        dist.destroy_process_group()
    os._exit(0)  # a group with a dead rank is not left in good order


def world(out: Path, name: str, work: Callable[[], Found]) -> list[int]:
    """Run a world and return how its ranks ended."""
    children = [fork(partial(rank, out, name, work, number)) for number in range(SIZE)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def value_in(place: Path) -> float:
    """The one value of all tensors of a checkpoint, read with stock torch; of a torn one this fails."""
    state = {
        "model": {
            name: torch.zeros_like(value) for name, value in Model().state_dict().items() if name != "scale"
        }
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=place, no_dist=True)
    (value,) = {float(value) for tensor in state["model"].values() for value in tensor.flatten()}
    return value


def main() -> None:
    out = Path(sys.argv[1])
    (out / "kills").mkdir()
    found: Found = {
        "whole": world(out, "whole", partial(whole, out)),
        "unused": world(out, "unused", partial(unused, out)),
        "several": world(out, "several", partial(several, out)),
        "kills": [],
    }
    moments = [
        (1.0, None, ""),
        (2.0, 1, "writing"),
        (3.0, 0, "writing"),
        (4.0, 0, "before"),
        (5.0, 0, "after"),
        (6.0, 1, "writing"),
        (7.0, None, ""),
    ]
    for value, victim, moment in moments:
        ended = world(out, f"kill{value}", partial(killed, out, value, victim, moment))
        left = sorted(path.name for path in (out / "kills").iterdir() if path.name != "last")
        found["kills"].append({"ended": ended, "holds": value_in(out / "kills" / "last"), "left": len(left)})
    (out / "parent.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
