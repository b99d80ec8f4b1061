"""Write with the installed torch what `tests/data/torch` keeps of each version; two gloo ranks.

python -m tests.versions.write OUT
"""

from __future__ import annotations

import json
import pickle
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor, Shard

import shardkit
from tests.versions.model import start, train
from tests.versions.values import CHECKPOINTABLE, NUM_RANKS, NUM_WIDE, SHARDED, WIDE, plain, value, wide_rows
from tests.worlds.processes import fork, wait

torch.set_num_threads(1)


def transposed_parts(mesh: DeviceMesh) -> dict[str, DTensor]:
    """The tensors of SHARDED, of which each rank's rows lie column-major."""
    parts = {}
    for name, (shape, dtype) in SHARDED.items():
        whole = value(name, shape, dtype)
        chunks = whole.chunk(NUM_RANKS)
        local = chunks[mesh.get_local_rank()] if mesh.get_local_rank() < len(chunks) else whole[:0]
        local = local.t().contiguous().t()
        parts[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return parts


def checkpointable(rank: int) -> dict[str, torch.Tensor]:
    """Plain tensors that say which parts of a whole they are: one of rows with padding, one of two pieces."""
    table, pieces = (value(name, shape) for name, shape in CHECKPOINTABLE.items())
    padded = torch.full((5, 4), 99.0)
    padded[1:4] = table[3 * rank : 3 * rank + 3]
    two = torch.cat([pieces[2 * rank : 2 * rank + 2], pieces[4 + 2 * rank : 6 + 2 * rank]])
    placed = {
        "table": (padded, CHECKPOINTABLE["table"], ((3 * rank, 0),), ((1, 0),), ((3, 4),)),
        "pieces": (
            two,
            CHECKPOINTABLE["pieces"],
            ((2 * rank, 0), (4 + 2 * rank, 0)),
            ((0, 0), (2, 0)),
            ((2, 3), (2, 3)),
        ),
    }
    for local, shape, offsets, local_offsets, sizes in placed.values():
        local.global_shape, local.global_offsets = shape, offsets  # type: ignore[attr-defined]
        local.local_offsets, local.local_sizes = local_offsets, sizes  # type: ignore[attr-defined]
    return {name: local for name, (local, *_) in placed.items()}


def write(rank: int, out: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    model, optimizer = start()
    losses = train(model, optimizer, 0)
    weights, optim = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": optim, "step": len(losses), "note": {"by": ["us", 1.5, None]}}
    dcp.save(state, checkpoint_id=out / "train")
    shardkit.save(model, out / "saved", optimizer=optimizer, extra={"step": len(losses)})
    torch.save(weights, out / f"model_world_size_{NUM_RANKS}_rank_{rank}.pt")
    dcp.save({**plain(), **transposed_parts(mesh)}, checkpoint_id=out / "strides")
    dcp.async_save({"app": transposed_parts(mesh), "step": 7}, checkpoint_id=out / "async").result()
    if hasattr(dcp, "CheckpointableTensor"):
        dcp.save(checkpointable(rank), checkpoint_id=out / "checkpointable")
    flat = FullyShardedDataParallel(nn.Linear(5, 7, dtype=torch.float64), device_id=torch.device("cpu"))
    with torch.no_grad():
        for parameter in flat.parameters():
            parameter.fill_(rank + 1)
    with FullyShardedDataParallel.state_dict_type(flat, StateDictType.SHARDED_STATE_DICT):
        dcp.save(flat.state_dict(), checkpoint_id=out / "fsdp1")
    after = train(model, optimizer, len(losses))
    whole = {name: each.full_tensor() for name, each in weights.items() if isinstance(each, DTensor)}
    if rank == 0:
        torch.save({"model": {**plain()}, "shared": shared(), "step": 7}, out / "file.pt")
        about = {"torch": torch.__version__, "losses": losses, "after": after, "sums": sums(whole)}
        (out / "about.json").write_text(json.dumps(about, indent=1))
    dist.barrier()


def sums(weights: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: each.abs().sum().item() for name, each in weights.items()}


def shared() -> dict[str, torch.Tensor]:
    """Views of one storage."""
    whole = value("shared", (6, 4))
    return {"whole": whole, "rows": whole[2:4], "columns": whole.t()[1:3]}


def write_wide(out: Path) -> None:
    """Write the metadata of NUM_WIDE ranks as torch makes it: each rank's plan comes through a pickle."""
    plans, results = [], []
    for rank in range(NUM_WIDE):
        items, places = [], []
        for name, shape in WIDE.items():
            first, num = wide_rows(shape, rank)
            corner = torch.Size((first, *[0] * (len(shape) - 1)))
            local = torch.empty((num, *shape[1:]), dtype=torch.bfloat16, device="meta")
            chunk = ChunkStorageMetadata(corner, local.shape)
            properties = TensorProperties(torch.bfloat16)
            if hasattr(properties, "strides"):
                properties.strides = local.stride()
            data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(shape))
            items.append(WriteItem(MetadataIndex(name, corner), WriteItemType.SHARD, tensor_data=data))
            places.append((name, corner))
        plans.append(
            pickle.loads(pickle.dumps(SavePlan(items, planner_data={name: (name,) for name in WIDE})))
        )
        stored = [
            (MetadataIndex(name, corner), _StorageInfo(f"__{rank}_0.distcp", 1500 * number, 1500))
            for number, (name, corner) in enumerate(places)
        ]
        results.append(pickle.loads(pickle.dumps(stored)))
    _, metadata = create_default_global_save_plan(plans)
    metadata.planner_data = {name: (name,) for name in WIDE}
    metadata.storage_data = {index: place for each in results for index, place in each}
    (out / "wide.metadata").write_bytes(pickle.dumps(metadata))


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wait([fork(partial(write, rank, out)) for rank in range(NUM_RANKS)])
        write_wide(out)
    Path(f"{out}.store").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
