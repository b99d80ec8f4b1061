"""Stock `dcp.load` on real ranks fills layers of factors with what `factorise` computes, each rank from its own file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardkit
from shardkit.core.factored import FACTORS, Target, target_of
from shardkit.layout import traced
from shardkit.osft import compute
from shardkit.osft.modules import OsftLinear, candidates, factor_modules, osft_modules, placement_fn
from shardkit.osft.plan import OsftPlan, choose_targets
from shardkit.osft.svd import factorise
from tests.distributed.meshes import Shape, device_mesh, mesh_text
from tests.distributed.models import LLAMA, build
from tests.distributed.test_stock_load import gathered, is_bit_equal, local_part, opened_files
from tests.worlds.factors import WorkerHere
from tests.worlds.processes import forked_trace
from tests.worlds.ranks import Ranks

EVEN = {**LLAMA, "hidden_size": 24, "intermediate_size": 40, "dtype": "bfloat16"}
CONFIGS = {"llama": LLAMA, "even": EVEN}
PLAN = OsftPlan(ratio=0.3, ranks={"*.up_proj": 1, "*.down_proj": 3, "*.gate_proj": 0.1})


class Job(NamedTuple):
    """A preshard, whose output is loaded."""

    name: str
    shape: Shape

    @property
    def label(self) -> str:
        return f"{self.name}-{'x'.join(map(str, self.shape))}"


def jobs(*found: Job) -> dict[str, Job]:
    return {job.label: job for job in found}


OF_TWO = jobs(Job("even", (2,)))
OF_THREE = jobs(Job("llama", (3,)))  # hidden size 21: 3 divides it
OF_FOUR = jobs(Job("even", (4,)), Job("even", (2, 2)))


def preshard_all(out: Path) -> None:
    torch.manual_seed(0)
    for name, config in CONFIGS.items():
        model: Any = build(config)
        model.save_pretrained(out / name)
    with (
        mock.patch.object(traced, "_spawn", forked_trace),
        mock.patch.object(compute, "FactorWorker", WorkerHere),
    ):
        for job in (OF_TWO | OF_THREE | OF_FOUR).values():
            result = shardkit.preshard(out / job.name, out / job.label, mesh=mesh_text(job.shape), osft=PLAN)
            assert result.layout == "traced"


two = Ranks(__name__, 2, first=preshard_all)
three = Ranks(__name__, 3)
four = Ranks(__name__, 4)


def wrapped(job: Job) -> nn.Module:
    """Return the model with layers of factors, wrapped, and with memory that holds what no source does."""
    with torch.device("meta"):
        model: Any = build({**CONFIGS[job.name], "dtype": "float32"})
    targets, _ = choose_targets(PLAN, candidates(model), "llama")
    factor_modules(model, targets)
    mesh, place = device_mesh(job.shape), placement_fn(model, job.shape[-1])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, shard_placement_fn=place)
    fully_shard(model, mesh=mesh, shard_placement_fn=place)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            local_part(tensor).fill_(77)
    found: nn.Module = model
    return found


def expected_of(module: OsftLinear, path: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    target = Target(path=path, rows=weight.shape[0], columns=weight.shape[1], rank=module.rank)
    return factorise(weight, target).tensors


def check_load(job: Job, out: Path) -> None:
    model, opened = wrapped(job), opened_files()
    state = model.state_dict()
    opened.clear()
    dcp.load(state, checkpoint_id=out / job.label)
    own = f"__{dist.get_rank() % job.shape[-1]}_0.distcp"
    assert {Path(name).name for name in opened if name.endswith(".distcp")} == {own}
    held, whole = load_file(out / job.name / "model.safetensors"), {}
    for name, tensor in state.items():
        whole[name] = gathered(tensor)
        assert whole[name].dtype is torch.float32
        if name in held:
            assert is_bit_equal(whole[name], held[name].float()), name
    modules = osft_modules(model)
    assert len(modules) == 14
    cuts = set()
    for path, module in modules.items():
        expected = expected_of(module, path, held[f"{path}.weight"])
        assert target_of(path, {name: tuple(x.shape) for name, x in whole.items()}).rank == module.rank
        cut = state[f"{path}.osft_V_high"].placements[-1].dim
        assert cut == int(module.in_features % job.shape[-1] == 0)
        cuts.add(cut)
        for name in FACTORS:
            assert is_bit_equal(whole[f"{path}.{name}"], expected[name]), (path, name)
    assert 1 in cuts


@two.test_each(OF_TWO)
def test_two_ranks(job: Job, out: Path) -> None:
    check_load(job, out)


@three.test_each(OF_THREE)
def test_three_ranks(job: Job, out: Path) -> None:
    check_load(job, out)


@four.test_each(OF_FOUR)
def test_four_ranks(job: Job, out: Path) -> None:
    check_load(job, out)
