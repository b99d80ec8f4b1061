"""One checkpoint of every kind that shardkit writes, and some that others wrote; some tens of kilobytes each."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import shardkit
from shardkit.core.placements import Placement
from shardkit.layout.layout import Layout, TensorLayout
from shardkit.operations.preshard import job as preshard_job
from tests.manifests import write_file_list
from tests.worlds.processes import run_script

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CONFIG = {"architectures": ["TinyForCausalLM"], "tie_word_embeddings": True}


def weights() -> dict[str, torch.Tensor]:
    """Return tensors of several dtypes: some shards of them take whole pages, some a few bytes, some none."""
    generator = torch.Generator().manual_seed(0)
    return {
        EMBED: torch.randn(37, 128, generator=generator),
        "model.layers.0.mlp.weight": torch.randn(64, 96, generator=generator).bfloat16(),
        "model.layers.0.norm.weight": torch.randn(33, generator=generator).bfloat16(),
        "model.layers.0.scale": torch.tensor(3.5),
        "model.layers.0.steps": torch.arange(7),
        "model.layers.0.mask": torch.ones(5, dtype=torch.bool),
        "model.layers.0.empty": torch.zeros(0, 4),
    }


def _quiet(save: Callable[[], object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in a single process, as asked
        save()


def _hub(path: Path, config: dict[str, Any] | None = None) -> Path:
    path.mkdir()
    save_file(weights(), path / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def _stock(path: Path) -> Path:
    """Model, optimizer and some objects, as torch's tutorial saves them."""
    model = weights()
    moments = {
        name: {"exp_avg": value.float() * 2, "step": torch.tensor(2.0)} for name, value in model.items()
    }
    state = {"model": model, "optim": {"state": moments, "param_groups": [{"lr": 0.1}]}, "epoch": {"n": 3}}
    _quiet(lambda: dcp.save(state, checkpoint_id=path, no_dist=True))
    return path


def _trainer(path: Path) -> Path:
    """accelerate's: two folders, and files beside them."""
    _quiet(lambda: dcp.save({"model": weights()}, checkpoint_id=path / "pytorch_model_fsdp_0", no_dist=True))
    state = {name: {"exp_avg": value.float()} for name, value in weights().items()}
    optimizer = {"optimizer": {"state": state, "param_groups": [{"lr": 0.1}]}}
    _quiet(lambda: dcp.save(optimizer, checkpoint_id=path / "optimizer_0", no_dist=True))
    (path / "scheduler.pt").write_bytes(bytes(range(256)) * 20)
    (path / "logs").mkdir()
    (path / "logs" / "trainer_state.json").write_text('{"step": 3}')
    return path


@contextmanager
def columns() -> Iterator[None]:
    """Let preshard cut every matrix along its last dim."""
    make_layout = preshard_job.make_layout

    def cut(tensor: TensorLayout) -> TensorLayout:
        dim = len(tensor.shape) - 1
        return replace(
            tensor, placements=tuple(p if p.shard_dim is None else Placement(dim) for p in tensor.placements)
        )

    def cut_all(*args: Any, **kwargs: Any) -> Layout:
        layout = make_layout(*args, **kwargs)
        return replace(layout, tensors={fqn: cut(tensor) for fqn, tensor in layout.tensors.items()})

    preshard_job.make_layout = cut_all
    try:
        yield
    finally:
        preshard_job.make_layout = make_layout


def _preshard(work: Path, out: Path, config: dict[str, Any] | None = None, **options: Any) -> None:
    shardkit.preshard(_hub(work / "hub", config), out, wrap="none", **{"world_size": 2, **options})


def _column_shards(work: Path, out: Path) -> None:
    with columns():
        _preshard(work, out)


def _consolidate(work: Path, out: Path, **options: Any) -> None:
    base = work / "base"
    base.mkdir()
    save_file(weights(), base / "model.safetensors", metadata={"format": "pt"})
    (base / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": False}))
    (base / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {str(n): n for n in range(200)}}}))
    (base / "tokenizer_config.json").write_text("{}")
    shardkit.consolidate(
        _stock(work / "stock"), out, base=base, root="model", **{"manifest": True, **options}
    )


def _save(work: Path, out: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(60, 90), torch.nn.Linear(90, 7))
    _quiet(
        lambda: shardkit.save(model, out, optimizer=torch.optim.AdamW(model.parameters()), extra={"step": 3})
    )


def _foreign_with_manifest(work: Path, out: Path) -> None:
    _trainer(out)
    write_file_list(out, inside=True)


OURS: dict[str, Callable[[Path, Path], object]] = {
    "preshard": _preshard,
    "preshard-hsdp": lambda work, out: _preshard(work, out, mesh="dp_replicate=2,dp_shard=2", world_size=4),
    "preshard-columns": _column_shards,
    "preshard-ties": lambda work, out: _preshard(work, out, CONFIG),
    "preshard-cast": lambda work, out: _preshard(work, out, dtype="fp16"),
    "preshard-sha256": lambda work, out: _preshard(work, out, sha256=True),
    "consolidate": lambda work, out: _consolidate(work, out, max_shard_size="15KB"),
    "consolidate-single": lambda work, out: _consolidate(work, out, single_file=True),
    "reshard": lambda work, out: shardkit.reshard(_stock(work / "stock"), out, world_size=2),
    "reshard-trainer": lambda work, out: shardkit.reshard(_trainer(work / "c"), out, world_size=2),
    "manifest": _foreign_with_manifest,
}
"""Written by shardkit, with digests of every file: every change is found, and its file named."""

FOREIGN: dict[str, Callable[[Path, Path], object]] = {
    "stock": lambda work, out: _stock(out),
    "fsdp2": lambda work, out: run_script(str(Path(__file__).with_name("fsdp_world.py")), str(out)),
    "save": _save,
    "safetensors": lambda work, out: _hub(out),
}
"""With the checksums that torch puts into its records, or none."""


def make(kind: str, root: Path) -> Path:
    """Write a checkpoint of a kind, and return its directory."""
    work, out = root / f"{kind}.work", root / kind
    work.mkdir()
    {**OURS, **FOREIGN}[kind](work, out)
    shutil.rmtree(work)
    return out
