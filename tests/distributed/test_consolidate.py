"""What real ranks save comes out as torch gathers it on each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardkit
from shardkit.errors import IntegrityError
from shardkit.files import manifest
from shardkit.files.digest import crc32
from shardkit.osft.modules import candidates, factor_modules, placement_fn
from shardkit.osft.plan import OsftPlan, choose_targets
from shardkit.osft.svd import factorise
from tests.bits import raw
from tests.operations.consolidate.checkpoints import CONFIG, EMBED, HEAD, assert_bit_equal, hub, load
from tests.worlds.ranks import Ranks

three = Ranks(__name__, 3)
four = Ranks(__name__, 4)

Tensors = dict[str, torch.Tensor]


def gathered(state: Tensors) -> Tensors:
    """Whole tensors, each with memory of its own: all ranks have to call this."""
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in state.items()
    }


def build() -> nn.Module:
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.AutoConfig.for_model(**CONFIG))


def build_factored(num_shards: int) -> tuple[nn.Module, Tensors]:
    """A bf16 model whose weights are factors, sharded and in float32 as training wants it; and what it was."""
    model = build().bfloat16()
    dense = {name: value.clone() for name, value in model.state_dict().items()}
    targets, _ = choose_targets(OsftPlan(ratio=0.4), candidates(model), "llama")
    factors = {target.path: factorise(dense[target.weight], target).tensors for target in targets}
    for path, module in factor_modules(model.float(), targets).items():
        module.to_empty(device="cpu")
        module.load_state_dict(factors[path])
    for layer in model.model.layers:
        fully_shard(
            layer,
            mesh=init_device_mesh("cpu", (num_shards,)),
            shard_placement_fn=placement_fn(model, num_shards),
        )
    fully_shard(model, mesh=init_device_mesh("cpu", (num_shards,)))
    return model, dense


def hold_factored(out: Path) -> None:
    """Untrained factors fold to the model that they were made of, whichever dim of V is cut; an optimizer is beside."""
    size = dist.get_world_size()
    model, dense = build_factored(size)
    cut = {each.dim for value in model.parameters() for each in value.placements}
    assert cut == {0, 1}
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad])
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=out / f"osft-{size}")
    if dist.get_rank() != 0:
        return
    base = hub(out / f"osft-base-{size}", dense)
    result = shardkit.consolidate(out / f"osft-{size}", str(out / f"osft-hub-{size}"), base=str(base))
    assert "folded from factors of OSFT: 14 weights" in result.notes
    found = load(result.output)
    assert {name: (value.dtype, value.shape) for name, value in found.items()} == {
        name: (value.dtype, value.shape) for name, value in dense.items()
    }
    steps = torch.cat(
        [(found[n].view(torch.int16).int() - dense[n].view(torch.int16).int()).flatten() for n in dense]
    )
    assert steps.abs().max() <= 1
    assert (steps == 0).double().mean() >= 0.999
    kept = shardkit.consolidate(out / f"osft-{size}", str(out / f"osft-kept-{size}"), keep_factors=True)
    assert sum(".osft_" in name for name in load(kept.output)) == 6 * 14


@three.test
def test_factors_of_which_some_are_cut_by_rows(out: Path) -> None:
    hold_factored(out)


@four.test
def test_factors_that_are_cut_by_columns(out: Path) -> None:
    hold_factored(out)


@three.test
def test_a_trained_model(out: Path) -> None:
    """Two steps of a model with tied embeddings: uneven rows, an optimizer beside."""
    tied = {**CONFIG, "tie_word_embeddings": True}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.for_model(**tied)).bfloat16()
    mesh = init_device_mesh("cpu", (3,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        tokens = torch.arange(8).reshape(1, 8) + step
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save({**states, "step": 2}, checkpoint_id=out / "trained")
    expected = gathered(get_model_state_dict(model))
    if dist.get_rank() != 0:
        return
    base = hub(out / "trained-base", None, tied)
    result = shardkit.consolidate(
        out / "trained", str(out / "trained-hub"), base=str(base), max_shard_size=3000
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(result.output, dtype=torch.bfloat16)
    assert_bit_equal(loaded.state_dict(), expected)
    assert result.ties == ((EMBED, HEAD),)
    del expected[HEAD]
    assert_bit_equal(load(result.output), expected)
    assert {part.what for part in result.skipped} >= {"optimizer"}


WAYS = {
    "grid": (Shard(0), Shard(1)),
    "rows": (Shard(0), Shard(0)),
    "columns": (Shard(1), Replicate()),
    "replicas": (Replicate(), Replicate()),
}
"""In which two axes cut a tensor."""


def save_all_ways(directory: Path) -> Tensors:
    """Save tensors that are cut in every way; return them whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    state: Tensors = {
        f"{way}.{shape[0]}.weight": distribute_tensor(torch.randn(shape), mesh, placements)
        for way, placements in WAYS.items()
        for shape in ((16, 9), (7, 5), (1, 6))
    }
    dcp.save(state, checkpoint_id=directory)
    return gathered(state)


@four.test_each(["crc32", "none"])
def test_every_way_to_cut_a_tensor(digest: str, out: Path) -> None:
    place = out / f"placed-{digest}"
    expected = save_all_ways(place / "saved")
    if dist.get_rank() != 0:
        return
    result = shardkit.consolidate(
        place / "saved",
        str(place / "out"),
        root="",
        digest=digest,
        max_shard_size=1000,
        manifest=True,
    )
    assert_bit_equal(load(result.output), expected)
    described = manifest.load(manifest.read_bytes(result.output), manifest.NAME)
    assert described is not None
    assert {name: entry.get("crc32") for name, entry in described["tensors"].items()} == {
        name: crc32(raw(value)) if digest == "crc32" else None for name, value in expected.items()
    }


@four.test
def test_a_dim_that_is_shorter_than_its_axis(out: Path) -> None:
    """The record of a rank without elements has the shape [0, 0] where .metadata says [4, 0]."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    module, whole = nn.Module(), torch.arange(7.0).view(7, 1)
    module.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(1)]))
    fully_shard(module, mesh=mesh["dp_shard"])
    dcp.save(module.state_dict(), checkpoint_id=out / "short")
    if dist.get_rank() != 0:
        return
    assert_bit_equal(
        load(shardkit.consolidate(out / "short", str(out / "short-hub")).output), {"weight": whole}
    )
    assert shardkit.verify(out / "short", full=True).ok


@four.test
def test_a_flipped_byte_is_found(out: Path) -> None:
    place, name = out / "flipped", "grid.16.weight"
    expected = save_all_ways(place / "bad")
    if dist.get_rank() != 0:
        return
    file, rows = place / "bad" / "__0_0.distcp", raw(expected[name][:8, :5])
    data = bytearray(file.read_bytes())
    assert data.count(rows) == 1
    data[data.index(rows) + 7] ^= 1
    file.write_bytes(data)
    with pytest.raises(IntegrityError, match=rf"(?s){name}.*__0_0\.distcp"):
        shardkit.consolidate(place / "bad", str(place / "out"), root="")
    assert [path.name for path in place.iterdir()] == ["bad"]
    shardkit.consolidate(place / "bad", str(place / "out"), root="", check_source=False)
    assert (load(place / "out")[name] != expected[name]).sum() == 1


@four.test
def test_a_cast_is_torchs(out: Path) -> None:
    expected = save_all_ways(out / "cast" / "saved")
    if dist.get_rank() == 0:
        result = shardkit.consolidate(
            out / "cast" / "saved", str(out / "cast" / "out"), root="", dtype="bf16"
        )
        assert_bit_equal(load(result.output), {name: value.bfloat16() for name, value in expected.items()})


def check_another_way(saved: Path, stripped: str, expected: Tensors) -> None:
    """What rank 0 consolidates is the whole model, its names without what stood before them."""
    if dist.get_rank() == 0:
        result = shardkit.consolidate(saved, f"{saved}-hub")
        assert_bit_equal(load(result.output), expected)
        assert result.stripped == ((stripped, len(expected)),)
        assert result.ties == ()


@four.test
def test_replicas_of_shards_saved_while_the_job_goes_on(out: Path) -> None:
    """HSDP: two replicas of two shards, every layer checkpointed; `async_save`, one file for each tensor."""
    model = build()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = fully_shard(checkpoint_wrapper(layer), mesh=mesh)
    fully_shard(model, mesh=mesh)
    writer = dcp.FileSystemWriter(out / "replicated", single_file_per_rank=False)
    dcp.async_save({"app": {"model": model.state_dict()}}, storage_writer=writer).result()
    check_another_way(out / "replicated", "app.model.", gathered(get_model_state_dict(model)))


@three.test
def test_pieces_of_flat_parameters(out: Path) -> None:
    """FSDP1 with SHARDED_STATE_DICT and ShardedTensor, and the optimizer's state beside."""
    model = FSDP(build(), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(8).reshape(1, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    with FSDP.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(_use_dtensor=False),
        ShardedOptimStateDictConfig(_use_dtensor=False),
    ):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        assert any(isinstance(value, ShardedTensor) for value in state["model"].values())
        dcp.save(state, checkpoint_id=out / "flattened")
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        expected = gathered(model.state_dict())
    check_another_way(out / "flattened", "model.", expected)
