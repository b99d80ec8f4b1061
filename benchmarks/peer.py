"""The peers' way to a sharded checkpoint: real processes load, wrap and save.

    torchrun --nproc-per-node 4 benchmarks/peer.py SOURCE OUTPUT

Every rank builds the model on the meta device, wraps it with `fully_shard`, reads its slices through torch's
own safetensors reader (the fastest of torch's ways to load a Hub model into DTensors) and saves with
`dcp.save`. Prints, from rank 0, the seconds after imports and process group.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

warnings.filterwarnings("ignore")


def main() -> None:
    source, output = sys.argv[1:3]
    dist.init_process_group("gloo")
    dist.barrier()
    begun = time.monotonic()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = model.to_empty(device="cpu").state_dict()
    dcp.load(state, storage_reader=HuggingFaceStorageReader(source))
    dcp.save(state, checkpoint_id=output)
    dist.barrier()
    elapsed_s = time.monotonic() - begun
    peak = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024])
    dist.all_reduce(peak)
    if dist.get_rank() == 0:
        print(json.dumps({"elapsed_s": elapsed_s, "peak_bytes": int(peak)}))
    dist.destroy_process_group()


main()
