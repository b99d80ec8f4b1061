"""Other ways from a sharded checkpoint to one model, each in a process of its own.

    python benchmarks/consolidate_peer.py PEER SOURCE OUTPUT

Prints the seconds (imports not counted), the peak memory (mapped pages are counted) and the bytes that were
read with `read` (mapped ones are not).
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

warnings.filterwarnings("ignore")
logging.disable()

Convert = Callable[[Path, Path], None]


def torch_and_hub() -> Convert:
    """torch's `dcp_to_torch_save`, then huggingface_hub's `save_torch_state_dict`."""
    import torch
    from huggingface_hub import save_torch_state_dict
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    def convert(source: Path, output: Path) -> None:
        output.mkdir()
        whole = output / "whole.pt"
        dcp_to_torch_save(source, whole)
        state = torch.load(whole, mmap=True, weights_only=True)
        save_torch_state_dict(state["model"], output)
        del state
        whole.unlink()

    return convert


def accelerate() -> Convert:
    """What `accelerate merge-weights` calls."""
    from accelerate.utils import merge_fsdp_weights

    return lambda source, output: merge_fsdp_weights(str(source), str(output))


def lightning() -> Convert:
    """What `lightning consolidate` (`lightning.fabric.utilities.consolidate_checkpoint`) does."""
    import torch
    from lightning.fabric.utilities.load import _load_distributed_checkpoint

    def convert(source: Path, output: Path) -> None:
        output.mkdir()
        torch.save(_load_distributed_checkpoint(source), output / "whole.ckpt")

    return convert


def torch_safetensors() -> Convert:
    """torch's `consolidate_safetensors_files`, of DCP-HF shards."""
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    def convert(source: Path, output: Path) -> None:
        output.mkdir()
        index = json.loads((source.parent / "model" / "model.safetensors.index.json").read_text())
        files = {name: number for number, name in enumerate(sorted({*index["weight_map"].values()}), 1)}
        mapping = {name: files[file] for name, file in index["weight_map"].items()}
        consolidate_safetensors_files(str(source), str(output), mapping, num_threads=2)

    return convert


PEERS: dict[str, Callable[[], Convert]] = {
    "torch + huggingface_hub": torch_and_hub,
    "accelerate": accelerate,
    "lightning": lightning,
    "torch safetensors": torch_safetensors,
}


def read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def main() -> None:
    name, source, output = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    convert = PEERS[name]()
    before, begun = read_bytes(), time.monotonic()
    convert(source, output)
    os.sync()
    elapsed_s = time.monotonic() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"elapsed_s": elapsed_s, "peak_bytes": peak, "read_bytes": read_bytes() - before}))


if __name__ == "__main__":
    main()
