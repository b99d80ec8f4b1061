#!/bin/bash
# Of a run that saves synchronously with torch_checkpointing, only the first checkpoint has metadata.pkl.
#
# An item with a resharder has its sharding described in metadata.pkl, which a load onto another mesh needs. The manager of
# metadata returns nothing when it is the same as that of the save before; the asynchronous saver then writes what it kept,
# the synchronous one writes no file. Nothing is said, and the checkpoints load on the mesh that they were saved on.
#
# Output seen with torch_checkpointing 0.1.1, torch 2.13.0, three saves of one DTensor by each kind of manager:
#   synchronous:  has metadata.pkl [True, False, False]
#   asynchronous: has metadata.pkl [True, True, True]
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 torch_checkpointing==0.1.1 numpy==2.4.6
cat > "$place/save.py" <<'PYTHON'
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch_checkpointing import CheckpointManager, ItemSpec, __version__
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig


def files_of(directory, how):
    manager = CheckpointManager.Config(
        items={"model": ItemSpec(resharder=DefaultResharder())},
        save=how,
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    ).build()
    weight = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
    found = []
    for step in (1, 2, 3):
        future = manager.save(f"{directory}/step-{step}", {"model": {"weight": weight}})
        if future is not None:
            future.result()
        found.append("metadata.pkl" in os.listdir(f"{directory}/step-{step}"))
    manager.close()
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
    synchronous = files_of(f"{sys.argv[1]}/a", SyncCheckpointSaverConfig())
    asynchronous = files_of(f"{sys.argv[1]}/b", AsyncCheckpointSaverConfig())
    dist.destroy_process_group()
    print("torch_checkpointing", __version__, "torch", torch.__version__)
    print("synchronous: ", "has metadata.pkl", synchronous)
    print("asynchronous:", "has metadata.pkl", asynchronous)
    sys.exit(0 if (synchronous, asynchronous) == ([True, False, False], [True, True, True]) else 1)
PYTHON
"$place/venv/bin/python" "$place/save.py" "$place" 2> "$place/log" || { tail -n 20 "$place/log"; exit 1; }
