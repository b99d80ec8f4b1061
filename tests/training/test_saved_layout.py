"""What inspect knows of a saved training state is how it lay on the ranks that saved it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import shardkit
from shardkit.files import manifest
from tests.worlds.ranks import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.prove]
four = Ranks(__name__, 4)


class Blocks(nn.Module):
    """Two blocks around which there are units, and a parameter that fewer ranks hold than there are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 10), nn.BatchNorm1d(10)])
        self.few = nn.Parameter(torch.ones(2, 3))


def hsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "fsdp"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def with_tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    linear = model.blocks[0]
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh["tp"], [Shard(0)]))
    return fully_shard(model, mesh=mesh["dp_shard"])


def with_experts(model: nn.Module) -> nn.Module:
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    linear = model.blocks[0]
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), experts, [Shard(1), Shard(0)]))
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    return fully_shard(model, mesh=mesh, ignored_params={linear.weight})


def stages(model: nn.Module) -> nn.Module:
    """A mesh of two ranks, as each of two stages has one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    return fully_shard(model, mesh=mesh["dp_shard"])


WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], str | None, bool]] = {
    "hsdp": (hsdp, "copies=2,fsdp=2", True),
    "tp": (with_tensor_parallel, "dp_shard=2,tp=2", True),
    "experts": (with_experts, "dp_shard=4,ep=2", True),
    "ddp": (DistributedDataParallel, None, False),
    "stages": (stages, "dp_shard=2", False),
}


@four.test_each(WAYS.keys())
def test_save(way: str, out: Path) -> None:
    torch.manual_seed(0)
    model = WAYS[way][0](Blocks())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    shardkit.save(model, out / way, optimizer=optimizer, extra={"step": torch.tensor(3)})
    states = get_optimizer_state_dict(model, optimizer)["state"].values()
    tensors = [*get_model_state_dict(model).values(), *(t for state in states for t in state.values())]
    held = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)
    (out / f"{way}-{dist.get_rank()}.json").write_text(json.dumps(held + 8))  # the step


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return four.folder(tmp_path_factory)


@pytest.mark.parametrize("way", WAYS)
def test_inspect_knows_the_mesh_and_what_each_rank_holds(way: str, out: Path) -> None:
    shown = shardkit.inspect(out / way, holdings=True)
    _, mesh, is_recorded = WAYS[way]
    assert (shown.mesh, shown.world_size, shown.layout) == (mesh, 4, "live")
    assert shown.model_class == ("DistributedDataParallel" if way == "ddp" else "Blocks")
    assert shown.holdings is not None
    assert shown.holdings.has_ranks == is_recorded
    if is_recorded:
        held = [json.loads((out / f"{way}-{rank}.json").read_text()) for rank in range(4)]
        assert [holder.held_bytes for holder in shown.holdings.holders] == held


def test_units_and_placements_are_those_of_the_job(out: Path) -> None:
    shown = shardkit.inspect(out / "hsdp", tensors=True, holdings=True)
    assert [unit.path for unit in shown.units] == ["", "blocks.0", "blocks.1"]
    placements = {tensor.name: tensor.placements for tensor in shown.tensors}
    assert placements["model.blocks.0.weight"] == "R,S(0)"
    assert placements["optimizer.state.blocks.0.weight.exp_avg"] == "R,S(0)"
    assert placements["model.blocks.1.running_mean"] is None
    assert shown.holdings is not None
    by_name = {tensor.name: tensor.unit for tensor in shown.holdings.tensors}
    assert by_name["model.blocks.0.weight"] == by_name["optimizer.state.blocks.0.weight.exp_avg"] == 1
    # fully_shard gathers parameters: no state, no buffer.
    assert [unit.gathered_bytes for unit in shown.holdings.units] == [24, (60 + 10) * 4, 20 * 4]
    axes = json.loads((out / "hsdp" / "shardkit.json").read_text())["layout"]["axes"]
    assert [axis["role"] for axis in axes] == ["replicate", "shard"]


def test_a_record_of_an_earlier_version_says_what_it_has(out: Path, tmp_path: Path) -> None:
    old = tmp_path / "copy"
    old.mkdir()
    for file in (out / "hsdp").iterdir():
        (old / file.name).hardlink_to(file)
    content = json.loads((old / "shardkit.json").read_text())
    del content["layout"]
    (old / "shardkit.json").unlink()
    (old / "shardkit.json").write_bytes(manifest.sign(content))
    shown = shardkit.inspect(old, holdings=True)
    assert (shown.mesh, shown.world_size) == ("copies=2,fsdp=2", 4)
    assert len(shown.units) == 3
    assert shown.holdings is not None
    assert not shown.holdings.has_ranks


def test_a_record_that_makes_no_sense_is_refused(out: Path, tmp_path: Path) -> None:
    content = json.loads((out / "hsdp" / "shardkit.json").read_text())
    content["layout"]["axes"][0]["size"] = 3
    for file in (out / "hsdp").iterdir():
        if file.name != "shardkit.json":
            (tmp_path / file.name).hardlink_to(file)
    (tmp_path / "shardkit.json").write_bytes(manifest.sign(content))
    with pytest.raises(shardkit.LayoutError, match="not of 4 ranks"):
        shardkit.inspect(tmp_path, holdings=True)
