"""What is converted: a Hub model, a trainer's checkpoint and its base, and a checkpoint in folders; each twice."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.operations.consolidate.checkpoints import CONFIG, hub, save, training_state, weights


@dataclass(frozen=True, slots=True)
class Sources:
    """Where they lie; beside each in `other/` is one of the same names and shapes with other values."""

    home: Path

    @property
    def hub(self) -> Path:
        """Six matrices of 312 KiB and a scalar."""
        return self.home / "hub"

    @property
    def trained(self) -> Path:
        """Model and optimizer in one DCP directory."""
        return self.home / "trained"

    @property
    def base(self) -> Path:
        """The model that it was trained from, with a tokenizer and a folder."""
        return self.home / "base"

    @property
    def folders(self) -> Path:
        """Model and optimizer in folders of their own, and files beside."""
        return self.home / "checkpoint-2"

    def other(self, text: str) -> str:
        """Return the path of the source with other values."""
        return text.replace(str(self.home), str(self.home / "other"))


def make_sources(home: Path) -> Sources:
    """Make all of them."""
    for number, place in enumerate((home, home / "other")):
        torch.manual_seed(number)
        _make_hub(place / "hub")
        _make_trained(place, number)
        _make_folders(place / "checkpoint-2")
    for path in home.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors' own are for their owner alone
    return Sources(home)


def _make_hub(path: Path) -> None:
    path.mkdir(parents=True)
    tensors = {f"layers.{n}.weight": torch.randn(600, 133) for n in range(6)}
    save_file({**tensors, "scalar": torch.randn(())}, path / "model.safetensors", metadata={"format": "pt"})


def _make_trained(home: Path, number: int) -> None:
    large = {f"model.layers.{n}.weight": torch.randn(300, 133) for n in range(6)}
    model = {**{name: value + number for name, value in weights().items()}, **large}
    save(training_state(model), home / "trained")
    halved = {name: value.bfloat16() for name, value in model.items()}  # tells what may be half precision
    base = hub(home / "base", halved, CONFIG, tokenizer__json="{}")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")


def _make_folders(path: Path) -> None:
    layers = {f"layers.{n}.weight": torch.randn(300, 133) for n in range(5)}
    state = {name: {"exp_avg": w + 1, "step": torch.tensor(257.0)} for name, w in layers.items()}
    optimizer = {"state": state, "param_groups": [{"lr": 1e-3}]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in a single process, as asked
        dcp.save({"model": layers}, checkpoint_id=path / "pytorch_model_fsdp_0", no_dist=True)
        dcp.save({"optimizer": optimizer}, checkpoint_id=path / "optimizer_0", no_dist=True)
    (path / "scheduler.pt").write_bytes(os.urandom(300_000))
    (path / "logs").mkdir()
    (path / "logs" / "trainer_state.json").write_text("{}")
