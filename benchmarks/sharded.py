"""Write the Hub model of `model.py` as stock torch saves it from many ranks.

    python benchmarks/sharded.py MODEL OUTPUT --ranks 32
    python benchmarks/sharded.py MODEL OUTPUT --ranks 4 --optimizer

The model lies under "model", cut along dim 0 as FSDP2 cuts it; `--ranks 16x2` cuts matrices along dim 1 too.
One process is each rank in turn, under torch's fake process group: torch's own planner plans for all of
them, and torch's own writer (with `--safetensors`: its HuggingFaceStorageWriter) writes each rank's files.
With `--optimizer` there are real gloo processes and `dcp.save`, and an AdamW state under "optim" as
`get_state_dict` gives it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

State = dict[str, torch.Tensor]


class Model:
    """The tensors of a Hub model, cut for the present rank of a mesh."""

    def __init__(self, path: Path) -> None:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        self.files: dict[str, str] = index["weight_map"]
        self._open = {name: safe_open(path / name, framework="pt") for name in sorted({*self.files.values()})}

    def parts(self, mesh: DeviceMesh, *, empty: bool = False) -> State:
        """Return this rank's part of every tensor; `empty` ones have shapes and no values."""
        return {name: self._part(name, mesh, empty) for name in self.files}

    def _part(self, name: str, mesh: DeviceMesh, empty: bool) -> torch.Tensor:
        source = self._open[self.files[name]].get_slice(name)
        shape = torch.Size(source.get_shape())
        placements = [Shard(dim) if dim < len(shape) else Replicate() for dim in range(mesh.ndim)]
        sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
        if empty:
            dtype = {"BF16": torch.bfloat16, "F32": torch.float32}[source.get_dtype()]
            local = torch.empty(sizes, dtype=dtype)
        else:
            local = source[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


@contextmanager
def being(rank: int, grid: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """Be one rank of a mesh, alone."""
    size = torch.Size(grid).numel()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", grid)
    finally:
        dist.destroy_process_group()


def planner_of(state: dict[str, object], rank: int) -> DefaultSavePlanner:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, is_coordinator=rank == 0)
    return planner


def save_in_turn(model: Model, output: Path, grid: tuple[int, ...], *, safetensors: bool) -> None:
    """Do for each rank, one after the other, what `dcp.save` does in each process."""

    def state(mesh: DeviceMesh, **options: bool) -> dict[str, object]:
        parts = model.parts(mesh, **options)
        return {**parts} if safetensors else {"model": parts}

    size = torch.Size(grid).numel()
    plans = []
    for rank in range(size):
        with being(rank, grid) as mesh:
            planner = planner_of(state(mesh, empty=True), rank)
            plans.append(planner.create_local_plan())
    with being(0, grid) as mesh:
        plans, metadata = planner_of(state(mesh, empty=True), 0).create_global_plan(plans)
    writer = hub_writer(model, output) if safetensors else FileSystemWriter(output, sync_files=False)
    output.mkdir()
    results = []
    for rank, plan in enumerate(writer.prepare_global_plan(plans)):
        with being(rank, grid) as mesh:
            planner = planner_of(state(mesh), rank)
            results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    writer.finish(metadata, results)


def hub_writer(model: Model, output: Path) -> HuggingFaceStorageWriter:
    numbers = {name: number for number, name in enumerate(sorted({*model.files.values()}), 1)}
    mapping = {tensor: numbers[file] for tensor, file in model.files.items()}
    return HuggingFaceStorageWriter(str(output), fqn_to_index_mapping=mapping, save_distributed=True)


def adamw(weights: State) -> dict[str, object]:
    """Return an optimizer's state as torch's `get_state_dict` arranges it."""
    groups = [{"params": [*weights], "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}]
    states = {
        name: {"step": torch.tensor(100.0), "exp_avg": value * 0.1, "exp_avg_sq": value * value}
        for name, value in weights.items()
    }
    return {"state": states, "param_groups": groups}


def save_together(path: Path, output: Path, size: int) -> None:
    """Save weights and optimizer with `dcp.save` from forked gloo processes."""

    def work(rank: int) -> None:
        store = f"file://{output}.store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
        weights = Model(path).parts(init_device_mesh("cpu", (size,)))
        dcp.save({"model": weights, "optim": adamw(weights)}, checkpoint_id=output)
        dist.destroy_process_group()

    children = [fork(work, rank) for rank in range(size)]
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    Path(f"{output}.store").unlink(missing_ok=True)
    if failed:
        sys.exit(f"{len(failed)} ranks failed")


def fork(work: Callable[[int], None], rank: int) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work(rank)
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--ranks", default="32", help="a number, or 16x2")
    parser.add_argument("--optimizer", action="store_true", help="AdamW's state too, from real processes")
    parser.add_argument("--safetensors", action="store_true", help="as torch's DCP-HF shards")
    args = parser.parse_args()
    torch.set_num_threads(1)
    grid = tuple(int(size) for size in args.ranks.split("x"))
    if args.optimizer:
        save_together(args.model, args.output.resolve(), grid[0])
    else:
        save_in_turn(Model(args.model), args.output, grid, safetensors=args.safetensors)


if __name__ == "__main__":
    main()
