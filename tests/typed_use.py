"""What a user's script may look like, for the type checker; `scripts/check` runs mypy over it, and nothing runs it."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import assert_type

import shardkit
from shardkit import ConsolidateResult, ModelInitializationContext, PreshardResult, ShardkitError, consolidate


def convert(source: str) -> str:
    written = shardkit.preshard(source, world_size=8)
    assert_type(written, PreshardResult)
    try:
        back = consolidate(written.output)
    except ShardkitError as error:
        assert_type(error.hint, str | None)
        raise
    assert_type(back, ConsolidateResult)
    consolidate(written.output, "out", base="model", include=["*.weight"], max_shard_size="2GB")
    consolidate(written.output, dtype=16)  # type: ignore[arg-type]
    choose(written.output)
    consolidate(written.output, bogus=True)  # type: ignore[call-arg]
    assert_type(shardkit.verify(back.output), shardkit.VerifyResult)
    assert_type(shardkit.__version__, str)
    return str(back.output)


def choose(source: str) -> None:
    """Dtypes and choices are literals, so an editor completes them and a typo is found before a run."""
    consolidate(source, dtype="bfloat16")
    consolidate(source, dtype="base", digest="none", progress=False)
    consolidate(source, dtype="fp8")  # type: ignore[arg-type]
    shardkit.reshard(source, dtype="fp32", optimizer_dtype="keep")
    shardkit.reshard(source, dtype="base")  # type: ignore[arg-type]
    shardkit.preshard(source, world_size=8, layout="declared", names="hub", profile="transformers")
    shardkit.preshard(source, layout="guessed")  # type: ignore[arg-type]
    shardkit.preshard(source, names="own")  # type: ignore[arg-type]
    shardkit.preshard(source, profile="titan")  # type: ignore[arg-type]
    shardkit.preshard(source, digest="md5")  # type: ignore[arg-type]
    shardkit.prepare(source, source, dtype=torch.bfloat16)
    shardkit.prepare(source, source, dtype="int8")  # type: ignore[arg-type]
    shardkit.diff(source, source, sort="size")  # type: ignore[arg-type]


def train(source: str, mesh: DeviceMesh) -> None:
    shardkit.prepare(source, source, osft=shardkit.OsftPlan(ratio=0.3, ranks={"*.o_proj": 64}))
    context = shardkit.prepare(source, source, dtype="fp32", osft=0.3)
    assert_type(context, ModelInitializationContext)
    shardkit.wrap(context.model, mesh, mixed_precision="fp8")  # type: ignore[arg-type]
    model = shardkit.finalize(shardkit.wrap(context.model, mesh, mixed_precision="bf16"), context)
    assert_type(model, nn.Module)
    optimizer = torch.optim.AdamW(model.parameters())
    with shardkit.PhaseMemory() as memory, memory.phase("step"):
        assert_type(shardkit.clip_grad_norm_(model, 1.0), torch.Tensor)
        optimizer.step()
    assert_type(shardkit.diagnose(model), shardkit.Diagnosis)
    assert_type(shardkit.save(model, "checkpoint", optimizer=optimizer).path, str)
    print(shardkit.bogus)  # type: ignore[attr-defined]
