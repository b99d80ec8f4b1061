"""How much of a load onto a device is reading while bytes are still on their way to it.

    python benchmarks/overlap.py MODEL SHARDS [--device cuda] [--runs 5]

MODEL is a Hub directory, SHARDS what `preshard --world-size 1` made of it. In turn: `read`, the shard file into pinned memory
piece by piece; `copy`, as many bytes from pinned memory to the device; `load`, `shardkit.finalize` of a model that lies on the
device. With nothing at the same time `load` takes read + copy; with all of it, the longer of the two. `overlap` is where
between these it lies: 0 to 1; `to_link` are the seconds of `load` to those of `copy`, which is what the link (PCIe) can do.
Medians, as JSON. benchmarks/load.py runs it where there is a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardkit

PIECE_BYTES = 8 << 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    device, has_pins = torch.device(args.device), torch.cuda.is_available()
    file = args.shards / "__0_0.distcp"
    pinned = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=has_pins)
    target = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device)

    def wait() -> None:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()

    def seconds(work: Callable[[], object]) -> float:
        wait()
        begun = time.monotonic()
        work()
        wait()
        return time.monotonic() - begun

    def read() -> None:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(memoryview(pinned.numpy())):
                pass

    def copy() -> None:
        for _ in range(-(-file.stat().st_size // PIECE_BYTES)):
            target.copy_(pinned, non_blocking=True)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp_shard",))
    found: dict[str, list[float]] = {"read": [], "copy": [], "load": []}
    for _ in range(args.runs):
        found["read"].append(seconds(read))
        found["copy"].append(seconds(copy))
        context = shardkit.prepare(str(args.model), str(args.shards))
        for layer in context.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(context.model, mesh=mesh)
        found["load"].append(
            seconds(lambda: shardkit.finalize(context.model, context, strategy="direct"))  # noqa: B023
        )
    middle = {name: statistics.median(times) for name, times in found.items()}
    overlap = (middle["read"] + middle["copy"] - middle["load"]) / min(middle["read"], middle["copy"])
    about = {"device": torch.cuda.get_device_name() if has_pins else args.device, "runs": args.runs}
    sizes = {"moved_bytes": file.stat().st_size, **{f"{name}_s": value for name, value in middle.items()}}
    # The link's limit is what `copy` reaches: pinned memory, one copy after the other.
    to_link = middle["load"] / middle["copy"]
    print(json.dumps({**about, **sizes, "overlap": overlap, "to_link": to_link}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
