"""One small checkpoint for each reader, as its writer leaves it: what `test_formats_conformance` opens, moves and damages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.device_mesh import DeviceMesh

import shardkit
from tests.formats.dcp.samples import alter, replicate, save, save_rank_local, save_shards, shard
from tests.formats.deepspeed import samples as deepspeed
from tests.formats.rankfiles.samples import RANK_FILE, copy_ranks
from tests.formats.reading import Contents, expected
from tests.formats.trainers.test_torch_checkpointing import describe


def weights() -> dict[str, torch.Tensor]:
    """Return the tensors of most samples."""
    return {
        "embed.weight": torch.arange(28.0).reshape(7, 4),
        "layers.0.weight": torch.arange(30, dtype=torch.bfloat16).reshape(6, 5),
        "layers.0.bias": torch.arange(6.0, dtype=torch.float16),
        "layers.0.few": torch.arange(3).reshape(1, 3),
        "scale": torch.tensor(2.5),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 3),
    }


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A checkpoint on the disk, and what is in it."""

    path: Path
    """What a user names; a directory, or a file."""
    format: str
    """Its row in the registry."""
    truth: Contents
    """Dtype, shape and bytes of every tensor that the reader lists."""


def _nested(tensors: Mapping[str, torch.Tensor], root: str) -> Contents:
    return expected({f"{root}.{name}": tensor for name, tensor in tensors.items()})


def _sharded(mesh: DeviceMesh) -> dict[str, Any]:
    """Return the weights as rank `mesh` holds them: matrices and vectors cut by rows, the rest whole."""
    cut = ("embed.weight", "layers.0.weight", "layers.0.bias", "layers.0.few")
    whole = {name: replicate(tensor, mesh) for name, tensor in weights().items() if name not in cut}
    return {**{name: shard(weights()[name], mesh) for name in cut}, **whole}


def _dcp(root: Path, ranks: Path) -> Sample:
    adam = {"exp_avg": torch.ones(7, 4), "step": torch.tensor(3.0)}
    state = {"model": weights(), "optim": {"state": {"embed.weight": adam}}, "step": 3}
    save(state, root / "step-3")
    truth = _nested(weights(), "model") | _nested(adam, "optim.state.embed.weight")
    return Sample(path=root / "step-3", format="dcp", truth=truth)


def _rank_local(root: Path, ranks: Path) -> Sample:
    save_rank_local(lambda mesh: {"model": _sharded(mesh)}, 3, root / "c")
    return Sample(path=root / "c", format="dcp", truth=_nested(weights(), "model"))


def _replicated(root: Path, ranks: Path) -> Sample:
    """The second rank has nothing but copies of what the first one has."""
    save_rank_local(
        lambda mesh: {name: replicate(tensor, mesh) for name, tensor in weights().items()}, 2, root / "c"
    )
    return Sample(path=root / "c", format="dcp", truth=expected(weights()))


def _bare_bytes(root: Path, ranks: Path) -> Sample:
    """Shards without records around the tensors."""
    bare = SerializationFormat.SAFETENSORS
    save_rank_local(lambda mesh: {"model": _sharded(mesh)}, 2, root / "c", serialization_format=bare)
    return Sample(path=root / "c", format="dcp", truth=_nested(weights(), "model"))


def _presharded(root: Path, ranks: Path) -> Sample:
    model = _hub(root, ranks).path
    shardkit.preshard(model, root / "out", world_size=2, wrap="none")
    shutil.rmtree(model)
    return Sample(path=root / "out", format="dcp", truth=expected(weights()))


def _saved(root: Path, ranks: Path) -> Sample:
    model = torch.nn.Linear(3, 5)
    shardkit.save(model, root / "out", extra={"step": 3})
    return Sample(path=root / "out", format="dcp", truth=_nested(model.state_dict(), "model"))


def _safetensors_shards(root: Path, ranks: Path) -> Sample:
    save_shards(_sharded, 3, root / "c")
    return Sample(path=root / "c", format="dcp-hf", truth=expected(weights()))


def _lightning(root: Path, ranks: Path) -> Sample:
    path = root / "epoch=0-step=2.ckpt"
    save({"state_dict": weights(), "optimizer_0": {}}, path)
    torch.save({"epoch": 0, "global_step": 2, "pytorch-lightning_version": "2.6.6"}, path / "meta.pt")
    return Sample(path=path, format="lightning", truth=_nested(weights(), "state_dict"))


def _megatron(root: Path, ranks: Path) -> Sample:
    path = root / "iter_0000002"

    def as_megatron(metadata: Any) -> None:
        metadata.planner_data, metadata.mcore_data = None, {}

    alter(save(weights(), path), as_megatron)
    content = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (path / "metadata.json").write_text(json.dumps(content))
    torch.save({"iteration": 2}, path / "common.pt")
    return Sample(path=path, format="megatron", truth=expected(weights()))


def _accelerate(root: Path, ranks: Path) -> Sample:
    path = root / "checkpoint-2"
    save({"model": weights()}, path / "pytorch_model_fsdp_0")
    save({"optimizer": {"state": {"scale": {"exp_avg": torch.ones(())}}}}, path / "optimizer_0")
    torch.save([3], path / "scheduler.bin")
    return Sample(path=path, format="accelerate", truth=_nested(weights(), "model"))


def _verl(root: Path, ranks: Path) -> Sample:
    path = root / "global_step_2" / "actor"
    truth = copy_ranks("fsdp2_tp", ranks, lambda rank: path / RANK_FILE.format(rank))
    (path / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 4}')
    return Sample(path=path, format="verl", truth=truth)


def _accelerate_bin(root: Path, ranks: Path) -> Sample:
    path = root / "checkpoint-2"
    truth = copy_ranks("fsdp1", ranks, lambda rank: path / f"pytorch_model_fsdp_0_rank{rank}.bin")
    return Sample(path=path, format="accelerate-bin", truth=truth)


def _torch_checkpointing(root: Path, ranks: Path) -> Sample:
    path = root / "step_2"
    truth = copy_ranks("hsdp", ranks, lambda rank: path / f"model_{rank}.pt")
    describe(path, {"model": None})
    return Sample(path=path, format="torch-checkpointing", truth=truth)


def _deepspeed(write: Callable[[Path, int], Path], number: int) -> Callable[[Path, Path], Sample]:
    """`number` is what it writes of: ranks, or the stage of a universal checkpoint."""
    return lambda root, ranks: Sample(
        path=write(root / "run", number), format="deepspeed", truth=expected(deepspeed.truth())
    )


def _hub(root: Path, ranks: Path) -> Sample:
    path = root / "model"
    path.mkdir()
    save_file(weights(), path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text('{"model_type": "llama"}')
    return Sample(path=path, format="hub", truth=expected(weights()))


def _hub_in_files(root: Path, ranks: Path) -> Sample:
    path, index = root / "model", dict[str, str]()
    path.mkdir()
    for number, name in enumerate(weights()):
        index[name] = f"model-{number % 2 + 1:05d}-of-00002.safetensors"
    for file in set(index.values()):
        save_file({name: weights()[name] for name in index if index[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return Sample(path=path, format="hub", truth=expected(weights()))


def _hub_bin(root: Path, ranks: Path) -> Sample:
    path = root / "model"
    path.mkdir()
    turned = {**weights(), "turned": torch.arange(6.0).reshape(2, 3).t()}
    torch.save(turned, path / "pytorch_model.bin")
    (path / "config.json").write_text('{"model_type": "llama"}')
    return Sample(path=path, format="hub", truth=expected(turned))


def _full_file(root: Path, ranks: Path) -> Sample:
    path = root / "last.ckpt"
    torch.save({"state_dict": weights(), "epoch": 3}, path)
    return Sample(path=path, format="full-file", truth=_nested(weights(), "state_dict"))


SAMPLES: dict[str, Callable[[Path, Path], Sample]] = {
    "dcp": _dcp,
    "dcp, metadata of ranks": _rank_local,
    "dcp, replicas": _replicated,
    "dcp, bare bytes": _bare_bytes,
    "preshard": _presharded,
    "save": _saved,
    "dcp-hf": _safetensors_shards,
    "lightning": _lightning,
    "megatron": _megatron,
    "accelerate": _accelerate,
    "accelerate-bin": _accelerate_bin,
    "verl": _verl,
    "torch-checkpointing": _torch_checkpointing,
    "deepspeed, ZeRO-2": _deepspeed(deepspeed.write_joined, 2),
    "deepspeed, ZeRO-3": _deepspeed(deepspeed.write_partitioned, 3),
    "deepspeed, universal": _deepspeed(deepspeed.write_universal, 2),
    "hub": _hub,
    "hub, index": _hub_in_files,
    "hub, bin": _hub_bin,
    "full-file": _full_file,
}
"""Each writes a sample below a directory; the second path is that of `rank_world`'s files."""
