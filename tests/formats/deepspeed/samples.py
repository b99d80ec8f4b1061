"""DeepSpeed's layouts, written here with stock torch as DeepSpeed itself does (its structure, its classes' names)."""

from __future__ import annotations

import enum
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

Tensors = dict[str, torch.Tensor]
GROUPS = (("embed.weight", "up.weight", "conv.weight"), ("up.bias", "scale", "norm.weight"))
TIED = {"head.weight": "embed.weight"}
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
_CONFIG: Any = ModuleType("deepspeed.runtime.zero.config")
_CONFIG.ZeroStageEnum = ZeroStageEnum = enum.IntEnum(
    "ZeroStageEnum", ("disabled", "one", "two", "three"), start=0, module=_CONFIG.__name__
)


@contextmanager
def deepspeed_classes() -> Iterator[None]:
    """Make the class that DeepSpeed's pickles name importable; nothing is imported when shardkit reads them."""
    names = ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero")
    with pytest.MonkeyPatch.context() as patch:
        for module in (*map(ModuleType, names), _CONFIG):
            patch.setitem(sys.modules, module.__name__, module)
        yield


@deepspeed_classes()
def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change what a file holds."""
    state = torch.load(path, weights_only=False)
    edit(state)
    torch.save(state, path)


def parameters() -> Tensors:
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "embed.weight": (7, 5), "up.weight": (5, 3), "conv.weight": (3, 2, 3), "up.bias": (5,), "scale": (),
        "norm.weight": (3,),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def frozen() -> Tensors:
    return {"frozen.weight": torch.arange(14.0).reshape(2, 7).bfloat16(), "empty": torch.zeros(0, 3)}


def buffers() -> Tensors:
    return {"mean": torch.tensor([1.5, 2.5]), "count": torch.tensor(7)}


def truth() -> Tensors:
    weights = {**parameters(), **frozen(), **buffers()}
    return {**weights, "head.weight": weights["embed.weight"]}


def model_state(
    num_ranks: int, module: Tensors, fragments: Tensors, *, shared: bool = True
) -> dict[str, Any]:
    groups = [OrderedDict((name, parameters()[name].shape) for name in group) for group in GROUPS]
    return {
        "module": OrderedDict(module),
        "buffer_names": list(buffers()),
        "optimizer": None,
        "param_shapes": groups,
        "frozen_param_shapes": OrderedDict((name, value.shape) for name, value in frozen().items()),
        "frozen_param_fragments": OrderedDict(fragments),
        "shared_params": TIED if shared else {},
        "global_steps": 2,
        "dp_world_size": num_ranks,
        "ds_version": "0.19.8",
    }


def finish(root: Path) -> Path:
    (root / "latest").write_text("global_step2")
    return root


@deepspeed_classes()
def write_joined(root: Path, num_ranks: int, *, stage: int = 2, keep_padding: bool = False) -> Path:
    """ZeRO-1 and 2: groups are joined, padded to twice the ranks and cut; the padding at the end is not saved."""
    tag = root / "global_step2"
    tag.mkdir(parents=True)
    module = {**{name: value.bfloat16() for name, value in parameters().items()}, **frozen(), **buffers()}
    module["head.weight"] = module["embed.weight"]
    fragments = frozen() if stage == 2 else {}
    torch.save(model_state(num_ranks, module, fragments), tag / "mp_rank_00_model_states.pt")
    parts = []
    for group in GROUPS:
        flat = torch.cat([parameters()[name].flatten() for name in group])
        padding = -len(flat) % (2 * num_ranks)
        cut = list(torch.cat([flat, torch.full((padding,), 99.0)]).chunk(num_ranks))
        if not keep_padding:
            cut[-1] = cut[-1][: len(cut[-1]) - padding]
        parts.append(cut)
    for rank in range(num_ranks):
        state = {
            "single_partition_of_fp32_groups": [cut[rank] for cut in parts],
            "zero_stage": ZeroStageEnum(stage),
            "partition_count": [num_ranks] * len(parts),
            "base_optimizer_state": {"state": {0: {"exp_avg": torch.zeros(4)}}},
        }
        path = tag / OPTIM.format(rank)
        torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, path)
    return finish(root)


def part_of(tensor: torch.Tensor, num_ranks: int, rank: int) -> torch.Tensor:
    size = -(-tensor.numel() // num_ranks)
    flat = torch.cat(
        [tensor.flatten(), torch.full((size * num_ranks - tensor.numel(),), 99.0).to(tensor.dtype)]
    )
    return flat[rank * size : (rank + 1) * size].clone()


@deepspeed_classes()
def write_partitioned(root: Path, num_ranks: int) -> Path:
    """ZeRO-3: every parameter is padded to the ranks and cut by itself."""
    tag = root / "global_step2"
    tag.mkdir(parents=True)
    placeholders = {name: torch.empty(0).bfloat16() for name in truth() if name not in buffers()}
    for rank in range(num_ranks):
        fragments = {name: part_of(value, num_ranks, rank) for name, value in frozen().items()}
        state = model_state(num_ranks, {**placeholders, **buffers()}, fragments, shared=rank == 0)
        torch.save(state, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        flat = [
            torch.cat([part_of(parameters()[name], num_ranks, rank) for name in group]) for group in GROUPS
        ]
        optimizer = {"fp32_flat_groups": flat, "zero_stage": ZeroStageEnum(3), "partition_count": num_ranks}
        path = tag / OPTIM.format(rank)
        torch.save({"optimizer_state_dict": optimizer}, path)
    return finish(root)


def write_universal(root: Path, stage: int) -> Path:
    """What ds_to_universal.py makes of either; from ZeRO-3 the tensors are bare and flat."""
    if stage == 3:
        tag = write_partitioned(root, 2) / "global_step2"
    else:
        tag = write_joined(root, 2) / "global_step2"
    for path in tag.glob("*_optim_states.pt"):
        path.unlink()
    values = {
        **parameters(),
        **({} if stage == 3 else {"head.weight": torch.zeros(7, 5), "count": torch.ones(())}),
    }
    for name, value in values.items():
        (tag / "zero" / name).mkdir(parents=True)
        content = value.flatten() if stage == 3 else {"param": value, "cat_dim": 0}
        torch.save(content, tag / "zero" / name / "fp32.pt")
        torch.save(torch.zeros(3), tag / "zero" / name / "exp_avg.pt")
    torch.save({"optimizer_state_dict": {}}, tag / "zero" / "optimizer_state.pt")
    tag.rename(root / "global_step2_universal")
    (root / "latest").unlink()
    (root / "latest_universal").write_text("global_step2_universal\n")
    return root
