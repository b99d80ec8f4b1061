"""What a rank holds of a model, however it is wrapped: models of odd shapes, on four real ranks."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardkit.core.regions import Region
from shardkit.errors import LayoutError, UsageError
from shardkit.training.ranks.local import local_shards, materialise
from tests.worlds.ranks import Ranks

four = Ranks(__name__, 4)


class Block(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)
        self.gain = nn.Parameter(torch.ones(1, hidden))  # empty on most ranks
        self.register_buffer("counter", torch.tensor(3), persistent=True)
        self.register_buffer("angles", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x))) * self.gain


class Model(nn.Module):
    """Sizes that no number of ranks divides, or such as the wrapper can compute with."""

    def __init__(self, hidden: int = 5, inner: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, hidden)
        self.blocks = nn.ModuleList([Block(hidden, inner) for _ in range(2)])
        self.head = nn.Linear(hidden, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def reference(*sizes: int) -> Model:
    """The same values on every rank."""
    model = Model(*sizes)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return model


def shard(model: nn.Module, mesh: DeviceMesh, **options: object) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def parallelise(model: nn.Module, mesh: DeviceMesh) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def one_axis(model: nn.Module) -> None:
    shard(model, init_device_mesh("cpu", (4,)))


def replicas(model: nn.Module) -> None:
    shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))


def tensor_parallel(model: nn.Module) -> None:
    parallelise(model, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))


def both(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelise(model, mesh["tp"])
    shard(model, mesh["dp"])


def three_axes(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    parallelise(model, mesh["tp"])
    shard(model, mesh["dp_replicate", "dp_shard"])


def columns(model: nn.Module) -> None:
    """Cut along dim 1 where it divides."""

    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else None

    shard(model, init_device_mesh("cpu", (4,)), shard_placement_fn=place)


def replicated(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for block in model.blocks:
        for module, name, places in (
            (block.up, "weight", (Replicate(), Shard(1))),
            (block.up, "bias", (Replicate(), Replicate())),
            (block.down, "weight", (Shard(0), Shard(0))),
        ):
            value = getattr(module, name)
            setattr(module, name, nn.Parameter(distribute_tensor(value, mesh, places)))


def ignored(model: nn.Module) -> None:
    model.scale = nn.Parameter(torch.tensor(2.0, device=model.embed.weight.device))
    model.forward = lambda tokens: Model.forward(model, tokens) * model.scale
    mesh = init_device_mesh("cpu", (4,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.scale})


def plain(model: nn.Module) -> None:
    """Nobody wrapped it."""


def mixed(model: nn.Module) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=False)
    shard(model, init_device_mesh("cpu", (4,)), mp_policy=policy, offload_policy=offload)


WAYS = (one_axis, replicas, tensor_parallel, both, three_axes, columns, replicated, ignored, plain, mixed)


def part(whole: torch.Tensor, region: Region) -> torch.Tensor:
    return whole[tuple(slice(o, o + s) for o, s in zip(*region, strict=True))]


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter whole, by its own means."""
    with torch.no_grad():
        return {
            name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
            for name, value in model.named_parameters()
        }


@four.test_each(WAYS)
def test_a_region_is_what_the_rank_has(wrap: Callable[[nn.Module], None]) -> None:
    model = reference()
    wrap(model)
    whole = values(model)
    shards = local_shards(model)
    assert [shard.fqn for shard in shards if shard.kind == "parameter"] == list(whole)
    for each in shards:
        if each.kind == "parameter":
            assert each.shape == tuple(whole[each.fqn].shape), each.fqn
            assert torch.equal(each.tensor, part(whole[each.fqn], each.parts[0].region)), each.fqn
    tied = next(each for each in shards if each.fqn == "embed.weight")
    assert tied.names == ("embed.weight", "head.weight")
    buffers = {each.fqn: each for each in shards if each.kind == "buffer"}
    assert buffers["blocks.0.counter"].persistent
    assert not buffers["blocks.0.angles"].persistent


@four.test_each(WAYS)
def test_a_model_on_meta_is_given_memory_and_trains_as_one_with_values(
    wrap: Callable[[nn.Module], None],
) -> None:
    sizes = (5, 7) if wrap in (one_axis, replicas, mixed) else (8, 8)
    expected = reference(*sizes)
    wrap(expected)
    with torch.device("meta"):
        model = Model(*sizes)
    model.blocks[0].counter, model.blocks[1].counter = torch.tensor(3), torch.tensor(3)
    wrap(model)
    whole, before = values(expected), dict(model.named_parameters(remove_duplicate=False))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, expected)]
    model.blocks[0].gain.marked = "kept"
    materialise(model)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is before[name] for name in before), "a parameter is another object"
    assert model.embed.weight is model.head.weight
    assert model.blocks[0].gain.marked == "kept"
    for each in local_shards(model):
        if each.kind == "parameter":
            each.tensor.copy_(part(whole[each.fqn], each.parts[0].region))
    tokens = torch.arange(8).reshape(2, 4)
    for _ in range(2 if wrap is not replicated else 0):  # its inputs would have to be DTensors
        losses = []
        for each, optimizer in zip((model, expected), optimizers, strict=True):
            loss = each(tokens).float().square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(*losses), losses
    trained = values(expected)
    for name, value in values(model).items():
        assert torch.equal(value, trained[name]), name


@four.test
def test_padded_memory_is_allocated_once() -> None:
    """FSDP does not copy it at the first forward."""
    with torch.device("meta"):
        model = Model()
    one_axis(model)
    materialise(model)
    places = {each.fqn: each.tensor.data_ptr() for each in local_shards(model) if each.kind == "parameter"}
    for each in local_shards(model):
        each.tensor.zero_()
    model(torch.arange(4).reshape(1, 4))
    model.reshard()
    for each in local_shards(model):
        if each.kind == "parameter" and each.tensor.numel():
            assert each.tensor.data_ptr() == places[each.fqn], each.fqn


@four.test
def test_what_is_not_understood_is_refused() -> None:
    model = reference()
    mesh = init_device_mesh("cpu", (4,))
    wrong = DTensor.from_local(
        torch.zeros(2, 5), mesh, [Shard(0)], shape=(11, 5), stride=(5, 1), run_check=False
    )
    model.embed.weight = nn.Parameter(wrong)
    if dist.get_rank() < 3:  # rank 3 does have 2 rows of 11
        with pytest.raises(LayoutError, match=r"embed\.weight: this rank holds \[2, 5\] of \[11, 5\]"):
            local_shards(model)
    flat = FullyShardedDataParallel(reference(), device_id=torch.device("cpu"))
    with pytest.raises(UsageError, match="FSDP1"):
        local_shards(flat)
