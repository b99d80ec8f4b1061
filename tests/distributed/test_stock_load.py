"""Stock `dcp.load` on real ranks gives every bit back, and each rank reads its own file only."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

import shardkit
from shardkit.layout import traced
from tests.distributed.meshes import Shape, device_mesh, mesh_text
from tests.distributed.models import EDGES, LLAMA, MODELS, SHAPES, Model, build, random_bits, shard
from tests.distributed.policies import shard_columns
from tests.worlds.processes import forked_trace
from tests.worlds.ranks import Ranks

# torch 2.13: "Invalid scalar type" of gloo's all_gather.
NOT_GATHERED = torch.float8_e4m3fn

WIDE = {
    **LLAMA,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 20011,
}
EVEN = {**LLAMA, "hidden_size": 24, "intermediate_size": 40, "vocab_size": 102}  # torch: no uneven columns
ALL_MODELS = {
    **MODELS,
    "edges": EDGES,
    "even": Model(EVEN, "LlamaDecoderLayer"),
    "wide": Model(WIDE, "LlamaDecoderLayer"),
}


class Job(NamedTuple):
    """A preshard, whose output is loaded."""

    name: str
    shape: Shape
    layout: str
    """Where it comes from: "traced", or "declared" where the source's config tells of ties alone."""
    wraps_columns: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}-{'x'.join(map(str, self.shape))}-{self.layout}"

    @property
    def model(self) -> Model:
        return ALL_MODELS[self.name]

    @property
    def source(self) -> str:
        return f"{self.name}-{self.layout}"


WIDE_4 = Job("wide", (4,), "traced")
MORE = {4: [Job("even", (2, 2), "traced", wraps_columns=True), WIDE_4]}


def jobs(size: int) -> dict[str, Job]:
    """All jobs for so many ranks, by label."""
    usual = [
        Job(name, shape, layout)
        for shape in SHAPES[size].values()
        for name in MODELS
        for layout in ("traced", "declared")
    ]
    edges = [Job("edges", shape, "declared") for shape in SHAPES[size].values()]
    return {job.label: job for job in (*usual, *edges, *MORE.get(size, []))}


def preshard_all(out: Path) -> None:
    torch.manual_seed(0)
    for name, model in ALL_MODELS.items():
        save_model(name, model.config, out)
    for job in [job for size in SHAPES for job in jobs(size).values()]:
        wrap = "tests.distributed.policies:shard_columns" if job.wraps_columns else "auto"
        # One with a wrap of its own is traced in a real child.
        spawn = traced._serve_request if job.wraps_columns else forked_trace
        with mock.patch.object(traced, "_serve_request", spawn):
            result = shardkit.preshard(
                str(out / job.source), str(out / job.label), mesh=mesh_text(job.shape), wrap=wrap
            )
        (out / f"{job.label}.json").write_text(json.dumps(result.to_json()))


def save_model(name: str, config: dict[str, Any] | None, out: Path) -> None:
    """Write <name>-traced, and <name>-declared: the same weights, with a config of ties alone."""
    traced_hub, declared_hub = out / f"{name}-traced", out / f"{name}-declared"
    model: Any = build(config)
    declared_hub.mkdir()
    if config is None:
        state = {key: random_bits(tensor) for key, tensor in model.state_dict().items()}
        save_file(state, declared_hub / "model.safetensors", metadata={"format": "pt"})
        return
    model.save_pretrained(traced_hub)
    os.link(traced_hub / "model.safetensors", declared_hub / "model.safetensors")
    kept = {key: config[key] for key in ("architectures", "tie_word_embeddings") if key in config}
    (declared_hub / "config.json").write_text(json.dumps(kept))


two = Ranks(__name__, 2, first=preshard_all)
three = Ranks(__name__, 3)
four = Ranks(__name__, 4)


class Loaded(NamedTuple):
    state: dict[str, torch.Tensor]
    files: list[str]
    """Names of the files of tensors that were opened."""
    read_bytes: int
    """But for the metadata."""


def load(job: Job, out: Path) -> Loaded:
    """Load what was pre-sharded into the same model, wrapped with `fully_shard`."""
    state = wrapped(job).state_dict()
    checkpoint, opened = out / job.label, opened_files()
    opened.clear()
    before = read_bytes()
    dcp.load(state, checkpoint_id=checkpoint)
    read = read_bytes() - before - (checkpoint / ".metadata").stat().st_size
    return Loaded(state, sorted({Path(name).name for name in opened if name.endswith(".distcp")}), read)


def wrapped(job: Job) -> nn.Module:
    """Return the wrapped model, with memory that holds what no source does."""
    with torch.device("meta"):
        model: Any = build(job.model.config)
    if job.wraps_columns:
        shard_columns(model, device_mesh(job.shape))
    else:
        shard(model, job.model.unit, job.shape)
    model.to_empty(device="cpu")
    if job.model.config is not None:
        model.tie_weights()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            local_part(tensor).fill_(77)
    return model


@functools.cache
def opened_files() -> list[str]:
    """Return the list to which this process adds each file that it opens."""
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    return opened


def read_bytes() -> int:
    """Bytes that this process has asked read calls for (man 5 proc: rchar)."""
    with open("/proc/self/io", encoding="ascii") as file:
        return int(file.readline().split()[1])


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def differences(state: dict[str, torch.Tensor], path: Path) -> list[str]:
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


def check_load(job: Job, out: Path) -> None:
    result = json.loads((out / f"{job.label}.json").read_text())
    assert result["layout"] == job.layout
    assert result["num_units"] == (5 if job.model is EDGES else 3)
    assert bool(result["ties"]) == job.model.is_tied
    loaded = load(job, out)
    assert len(loaded.state) > 10
    assert differences(loaded.state, out / job.source / "model.safetensors") == []
    own = f"__{dist.get_rank() % job.shape[-1]}_0.distcp"
    replicated = ["__0_0.distcp"] if job.model is EDGES else []  # its buffers
    assert loaded.files == sorted({own, *replicated})


@two.test_each(jobs(2))
def test_each_of_two_ranks_has_every_bit_from_its_own_file(job: Job, out: Path) -> None:
    check_load(job, out)


@three.test_each(jobs(3))
def test_each_of_three_ranks_has_every_bit_from_its_own_file(job: Job, out: Path) -> None:
    check_load(job, out)


@four.test_each(jobs(4))
def test_each_of_four_ranks_has_every_bit_from_its_own_file(job: Job, out: Path) -> None:
    check_load(job, out)


@four.test
def test_a_rank_reads_little_more_than_its_shard(out: Path) -> None:
    loaded = load(WIDE_4, out)
    local_bytes = sum(local_part(tensor).nbytes for tensor in loaded.state.values())
    assert local_bytes >= 20e6
    assert loaded.read_bytes <= 1.05 * local_bytes
