"""What is recorded: every operation that writes, on checkpoints of a few kilobytes."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One or more runs, one after the other, of which only the last may end; the power is lost at any time."""

    verb: str
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str = "hub"
    """A name of `make_sources`."""
    replaces: str | None = None
    """The source of the complete output that was there before."""
    killed: tuple[float, ...] = ()
    """When each run but the last was killed, as a share of its calls; 1.0: right after its output appeared."""
    killed_source: str | None = None
    """Of the runs that were killed, where it was another one."""
    clones: bool = False
    """Blocks are shared with the source."""
    steps: tuple[str, ...] = ()
    """Parts of a divided job and commits, one after the other."""
    can_exchange: bool = True
    """The system can exchange directories; else the old output is moved aside, and may lie there only."""


SHARDS = {"world_size": 2, "wrap": "none"}
TWO, NO_DIGEST = {"jobs": 2}, {"digest": "none"}
SMALL_FILES = {"max_shard_size": "6KB", "ask_class": False}
"""The class's answer is a warning and nothing on the disk, and asking it is six seconds of a process of its own."""

SCENARIOS = {
    "preshard": Scenario(verb="preshard", options={**SHARDS, "jobs": 1}),
    "preshard-2-jobs": Scenario(verb="preshard", options={"world_size": 3, "wrap": "none", **TWO}),
    "preshard-cast-no-digest": Scenario(
        verb="preshard", options={**SHARDS, **TWO, **NO_DIGEST, "dtype": "bf16"}
    ),
    "preshard-shared-blocks": Scenario(
        verb="preshard", options={**SHARDS, "jobs": 1}, source="large", clones=True
    ),
    "preshard-overwrite": Scenario(verb="preshard", options=SHARDS, replaces="other"),
    "preshard-overwrite-no-digest": Scenario(
        verb="preshard", options={**SHARDS, **NO_DIGEST}, replaces="other"
    ),
    "preshard-overwrite-aside": Scenario(
        verb="preshard", options=SHARDS, replaces="other", can_exchange=False
    ),
    "preshard-resumed": Scenario(verb="preshard", options=SHARDS, killed=(0.6,)),
    "preshard-resumed-no-digest": Scenario(
        verb="preshard", options={**SHARDS, "jobs": 1, **NO_DIGEST}, killed=(0.3, 0.5)
    ),
    "preshard-resumed-late": Scenario(
        verb="preshard", options={**SHARDS, **NO_DIGEST}, replaces="other", killed=(1.0,)
    ),
    "preshard-after-another-late": Scenario(
        verb="preshard", options=SHARDS, replaces="large", killed=(1.0,), killed_source="other"
    ),
    "consolidate": Scenario(verb="consolidate", options={**SMALL_FILES, "jobs": 1}, source="trained"),
    "consolidate-overwrite": Scenario(
        verb="consolidate",
        options={**SMALL_FILES, **TWO, "manifest": True},
        source="trained",
        replaces="trained2",
    ),
    "consolidate-resumed": Scenario(
        verb="consolidate", options={**SMALL_FILES, **NO_DIGEST}, source="trained", killed=(0.5,)
    ),
    "page": Scenario(verb="page", source="trained"),
    "page-overwrite": Scenario(verb="page", source="trained", replaces="trained2"),
    "reshard": Scenario(verb="reshard", options={"world_size": 2, "jobs": 1}, source="trainer"),
    "reshard-overwrite": Scenario(
        verb="reshard", options={"world_size": 2, **TWO}, source="trainer", replaces="trainer2"
    ),
    "reshard-resumed": Scenario(
        verb="reshard", options={"world_size": 2, **NO_DIGEST}, source="trainer", killed=(0.4, 0.7)
    ),
}

DIVIDED = ("1/2", "2/2", "commit")
SCENARIOS |= {
    "preshard-divided": Scenario(verb="preshard", options={**SHARDS, "jobs": 1}, steps=DIVIDED),
    "preshard-divided-overwrite": Scenario(
        verb="preshard", options={**SHARDS, **NO_DIGEST}, replaces="other", steps=DIVIDED
    ),
    "preshard-divided-overwrite-aside": Scenario(
        verb="preshard", options=SHARDS, replaces="other", steps=DIVIDED, can_exchange=False
    ),
    "consolidate-divided-overwrite": Scenario(
        verb="consolidate",
        options={**SMALL_FILES, **TWO, "manifest": True},
        source="trained",
        replaces="trained2",
        steps=DIVIDED,
    ),
    "reshard-divided": Scenario(
        verb="reshard", options={"world_size": 2, **TWO}, source="trainer", steps=DIVIDED
    ),
}


def make_sources(root: Path) -> dict[str, Path]:
    """Write every source, and return them by name; a name and the same with another ending differ in values only."""
    sources = {}
    for name, seed in (("hub", 0), ("other", 1)):
        sources[name] = root / name
        sources[name].mkdir()
        save_file(_weights(seed), sources[name] / "model.safetensors", metadata={"format": "pt"})
    sources["large"] = root / "large"
    sources["large"].mkdir()
    save_file({"w": torch.randn(512, 100), "b": torch.randn(7)}, sources["large"] / "model.safetensors")
    for name, seed in (("trained", 2), ("trained2", 3)):
        sources[name] = _trained(root / name, seed)
    for name, seed in (("trainer", 4), ("trainer2", 5)):
        sources[name] = _trainer(root / name, seed)
    for seconds, source in enumerate(sources.values()):  # a clock of jiffies gives several files one time
        for path in source.rglob("*"):
            os.utime(path, ns=(0, path.stat().st_mtime_ns + seconds * 1_000_000_000))
    return sources


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed.weight": torch.randn(33, 40, generator=generator),
        "model.layers.0.weight": torch.randn(24, 40, generator=generator),
        "model.norm.weight": torch.randn(24, generator=generator).bfloat16(),
    }


def _save(state: dict[str, Any], path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in a single process, as asked
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def _trained(path: Path, seed: int) -> Path:
    """A plain checkpoint with its config and tokenizer in a folder, as its trainer put them there."""
    _save(_weights(seed), path)
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text(json.dumps({"seed": seed}))
    return path


def _trainer(path: Path, seed: int) -> Path:
    """accelerate's: two folders, and files beside them."""
    weights = _weights(seed)
    _save({"model": weights}, path / "pytorch_model_fsdp_0")
    moments = {name: {"exp_avg": value + 1, "step": torch.tensor(3.0)} for name, value in weights.items()}
    _save({"optimizer": {"state": moments, "param_groups": [{"lr": 0.1}]}}, path / "optimizer_0")
    (path / "scheduler.pt").write_bytes(bytes(range(256)) * 20 + bytes([seed]))
    (path / "logs" / "deep").mkdir(parents=True)
    (path / "logs" / "deep" / "state.json").write_text(f'{{"step": {seed}}}')
    (path / "logs" / "none").mkdir()
    return path
