"""Two gloo ranks under the installed torch: what shardkit makes and stock torch reads, and the other way round.

    python running_world.py '{"out": DIRECTORY, "written": {version: directory}}'

Writes DIRECTORY/<rank>.json: by case what went wrong, "" where nothing did.
It is a script: the first failing case ends the run, because collectives of the ranks may be out of step.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardkit
from shardkit.layout import traced
from tests.training.models import inputs, qwen3
from tests.versions.model import STEPS, Model, start, train
from tests.worlds.processes import fork, forked_trace, wait

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SIZE = 2
RESHARD = False  # on CPU torch 2.6 cannot gather again in backward what it resharded


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {
            name: each.full_tensor() if isinstance(each, DTensor) else each.clone()
            for name, each in model.state_dict().items()
        }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    wrong = [name for name, each in expected.items() if not torch.equal(found[name], each)]
    assert not wrong, wrong


def classic(out: Path) -> Any:
    return transformers.Qwen3ForCausalLM.from_pretrained(out / "hub", dtype=torch.float32).eval()


def stock_load(out: Path) -> None:
    """Stock `dcp.load` reads what preshard wrote."""
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(transformers.AutoConfig.from_pretrained(out / "hub"))
    mesh = init_device_mesh("cpu", (SIZE,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.tie_weights()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=out / "presharded")
    assert_same(whole(model), whole(classic(out)))


def three_phases(out: Path) -> None:
    """prepare, wrap and finalize by both strategies; what comes out computes what the whole model does."""
    expected = classic(out)
    logits = expected(**inputs("qwen3")).logits
    for source, strategy in (("presharded", "direct"), ("hub", "broadcast")):
        context = shardkit.prepare(str(out / "hub"), out / source)
        mesh = init_device_mesh("cpu", (SIZE,))
        shardkit.wrap(context.model, mesh, mixed_precision=None, reshard_after_forward=RESHARD)
        model = shardkit.finalize(context.model, context, strategy=strategy).eval()
        assert_same(whole(model), whole(expected))
        torch.testing.assert_close(model(**inputs("qwen3")).logits, logits, rtol=1e-4, atol=1e-4)


def diagnosed(out: Path) -> None:
    """`diagnose` tells units, meshes and dtypes."""
    context = shardkit.prepare(str(out / "hub"), out / "presharded")
    shardkit.wrap(context.model, init_device_mesh("cpu", (SIZE,)))
    found = shardkit.diagnose(shardkit.finalize(context.model, context))
    assert found.kind == "fsdp2"
    assert [unit.path for unit in found.units] == ["", *(f"model.layers.{n}" for n in range(3))]
    assert {unit.mixed_precision for unit in found.units} == {"compute bfloat16, reduce float32"}, found.units
    assert not found.problems, found.problems


def saved(out: Path) -> None:
    """`save` after training; stock torch, SafeReader and consolidate read it."""
    context = shardkit.prepare(str(out / "hub"), out / "presharded")
    mesh = init_device_mesh("cpu", (SIZE,))
    shardkit.wrap(context.model, mesh, mixed_precision=None, reshard_after_forward=RESHARD)
    model = shardkit.finalize(context.model, context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(**inputs("qwen3")).logits.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    shardkit.save(model, out / "saved", optimizer=optimizer, extra={"step": 5})
    expected = whole(model)
    weights, states = get_state_dict(model, optimizer)
    moments = {key: each["exp_avg"].full_tensor() for key, each in states["state"].items()}
    for reader in (None, shardkit.SafeReader(out / "saved")):
        with torch.no_grad():
            for each in (*model.parameters(), *(part["exp_avg"] for part in optimizer.state.values())):
                each.fill_(77)
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": states, "extra": {"step": 0}}
        dcp.load(state, checkpoint_id=out / "saved", storage_reader=reader)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert_same(whole(model), expected)
        states = get_state_dict(model, optimizer)[1]["state"]
        assert_same({key: each["exp_avg"].full_tensor() for key, each in states.items()}, moments)
        assert state["extra"]["step"] == 5
    if dist.get_rank() == 0:
        shardkit.consolidate(out / "saved", str(out / "consolidated"), base=str(out / "hub"))
        found = load_file(out / "consolidated" / "model.safetensors")
        assert_same(found, {name: expected[name] for name in found})
        assert len(found) >= len(expected) - 1, "but for the tied head"


def goes_on(directory: Path, about: Path, *, safe: bool) -> None:
    """Stock `dcp.load` gives model and optimizer back, and training goes on as it did where it was saved."""
    model, optimizer = start()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(77)
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": states, "step": 0, "note": {}}
    reader = shardkit.SafeReader(directory) if safe else None
    # torch 2.6's AdamW has no `decoupled_weight_decay`, which later ones ask for. The losses tell what else is missing.
    partly = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=directory, storage_reader=reader, planner=partly)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert state["step"] == STEPS
    assert_as_told(train(model, optimizer, STEPS), whole(model), about)


def assert_as_told(losses: list[float], weights: dict[str, torch.Tensor], about: Path) -> None:
    told = json.loads(about.read_text())
    assert len(losses) == len(told["after"])
    for found, expected in zip(losses, told["after"], strict=True):
        assert math.isclose(found, expected, rel_tol=1e-9), (losses, told["after"])
    for name, expected in told["sums"].items():
        assert math.isclose(weights[name].abs().sum().item(), expected, rel_tol=1e-9), name


def fills_a_live_model(out: Path, directory: Path) -> None:
    """`load_into` and `finalize` take the checkpoint as it lies."""
    expected = load_file(out / f"{directory.parent.name}.safetensors")
    model, _ = start()
    shardkit.load_into(model, directory)
    assert_same(whole(model), expected)
    context = shardkit.prepare(Model, directory, init_buffers=lambda model: None)
    shardkit.wrap(context.model, init_device_mesh("cpu", (SIZE,)), policy="layers.*", mixed_precision=None)
    assert_same(whole(shardkit.finalize(context.model, context, strategy="broadcast")), expected)


def cases(out: Path, written: dict[str, str]) -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {
        "stock dcp.load": partial(stock_load, out),
        "three phases": partial(three_phases, out),
        "diagnose": partial(diagnosed, out),
        "save": partial(saved, out),
    }
    for version, place in written.items():
        directory, about = Path(place) / "train", Path(place) / "about.json"
        found[f"reshard {version}"] = partial(goes_on, out / f"reshard-{version}", about, safe=False)
        found[f"SafeReader {version}"] = partial(goes_on, directory, about, safe=True)
        found[f"load_into {version}"] = partial(fills_a_live_model, out, directory)
    return found


def run(rank: int, out: Path, written: dict[str, str]) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{out}/store",
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=600),
    )
    told = {}
    for name, case in cases(out, written).items():
        try:
            case()
            told[name] = ""
        except BaseException:  # torch's CheckpointException is no Exception
            told[name] = traceback.format_exc()
        failed = torch.tensor(float(told[name] != ""))
        dist.all_reduce(failed)
        if failed:
            break  # collectives may be out of step
    (out / f"{rank}.json").write_text(json.dumps(told))


def main() -> None:
    jobs = json.loads(sys.argv[1])
    out = Path(jobs["out"])
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(qwen3()).save_pretrained(out / "hub")
    with mock.patch.object(traced, "_serve_request", forked_trace):  # imports cost more than the trace
        result = shardkit.preshard(str(out / "hub"), str(out / "presharded"), world_size=SIZE)
    assert result.layout == "traced"
    for version, place in jobs["written"].items():
        shardkit.reshard(Path(place) / "train", str(out / f"reshard-{version}"), world_size=SIZE)
        shardkit.consolidate(Path(place) / "train", str(out / f"hub-{version}"))
        (out / f"hub-{version}" / "model.safetensors").rename(out / f"{Path(place).name}.safetensors")
    wait([fork(partial(run, rank, out, jobs["written"])) for rank in range(SIZE)])


if __name__ == "__main__":
    main()
