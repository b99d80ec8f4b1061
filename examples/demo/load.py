"""One rank of the demo: the real transformers model under FSDP2, filled by the stock `dcp.load`.

    torchrun --nproc-per-node 4 examples/demo/load.py MODEL CHECKPOINT REPORTS

Nothing here imports shardkit: a pre-sharded directory is an ordinary DCP checkpoint.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sentence import embed, write_embedding
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModel


def build(model_directory: str) -> nn.Module:
    """Return the model, sharded over all ranks, with memory for this rank's shard and nothing in it."""
    config = AutoConfig.from_pretrained(model_directory)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    for unit in (model.embeddings, *model.encoder.layer):  # what `--wrap auto` found
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    fill_buffers(model, model_directory)
    return model


def fill_buffers(model: nn.Module, model_directory: str) -> None:
    """Give the buffers that no checkpoint holds their values, which `to_empty` has thrown away.

    They do not depend on layers or vocabulary, so a model without either has the same ones.
    """
    config = AutoConfig.from_pretrained(model_directory, num_hidden_layers=0, vocab_size=1)
    values = dict(AutoModel.from_config(config).named_buffers())
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name not in saved:
            buffer.copy_(values[name])


def watch_opened_shards() -> list[str]:
    """Return a list that fills with the names of the shard files that this process opens."""
    opened: list[str] = []

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(".distcp"):
            opened.append(Path(str(arguments[0])).name)

    sys.addaudithook(hook)
    return opened


def count_read_bytes() -> int:
    """Return the bytes that this process has read so far, from the kernel's own account."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def peak_bytes() -> int:
    """Return the most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(model_directory: str, checkpoint: str, reports: str) -> None:
    """Load this rank's shard, embed the sentence, write a report."""
    dist.init_process_group("gloo")
    rank, imported_bytes = dist.get_rank(), peak_bytes()
    model = build(model_directory)

    opened, read_before, begun = watch_opened_shards(), count_read_bytes(), time.monotonic()
    dcp.load(model.state_dict(), checkpoint_id=checkpoint)
    load_s, read_bytes = time.monotonic() - begun, count_read_bytes() - read_before

    write_embedding(embed(model, model_directory), os.path.join(reports, f"rank{rank}.embedding"))
    report = {
        "opened": sorted(set(opened)),
        "read_bytes": read_bytes,
        "load_s": load_s,
        "imported_bytes": imported_bytes,
        "peak_bytes": peak_bytes(),
    }
    Path(reports, f"rank{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
