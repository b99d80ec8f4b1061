"""Runs a script of torchtitan on the CPU: `python titan_on_cpu.py torchtitan_run.py [its options]`.

torchtitan asks a GPU for its name and memory, its attention has no backward pass on a CPU, and gloo sums gradients but
does not scale them. These things are replaced here. What trains, saves and loads is torchtitan's own.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.fsdp import FSDPModule


def answer_for_a_gpu() -> None:
    """Tell torchtitan that its device is the CPU; other modules of it copy both names when they are imported."""
    from torchtitan.tools import utils

    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        set_device=lambda _: None,
        device_count=lambda: 1,
        current_device=lambda: 0,
        synchronize=lambda: None,
        get_device_name=lambda _: "CPU",
        get_device_properties=lambda _: SimpleNamespace(total_memory=1),
        memory_stats=lambda _: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )


def attend_without_a_mask() -> None:
    """Take torchtitan's other attention, which is causal too."""
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    llama3.get_attention_config = lambda _: ScaledDotProductAttention.Config()


def scale_apart_from_the_sum() -> None:
    """Have FSDP2 scale gradients itself."""
    divide_by = FSDPModule.set_gradient_divide_factor

    def divide_apart(module: FSDPModule, factor: float) -> None:
        module.set_force_sum_reduction_for_comms(True)
        divide_by(module, factor)

    FSDPModule.set_gradient_divide_factor = divide_apart


if __name__ == "__main__":
    answer_for_a_gpu()
    attend_without_a_mask()
    scale_apart_from_the_sum()
    if not hasattr(torch.distributed, "set_timeout"):  # torchtitan 0.3.0 calls it, torch 2.13 lacks it
        torch.distributed.set_timeout = lambda *_: None
    script = Path(sys.argv[1])
    sys.argv[:] = sys.argv[1:]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
