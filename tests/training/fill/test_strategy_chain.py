"""How many of the package's calls lie between `finalize` and the first byte of a weight, on real ranks."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardkit
from tests.training.wrapping import shard
from tests.worlds.ranks import Ranks

PACKAGE = os.path.dirname(shardkit.__file__)
MOST_FRAMES = 9
WAITS = "core/threads:Outcome.wait"
"""Where the main thread is while others read: nothing leads on from there."""
DOWNWARDS = ("training", "training/fill", "transfer", "files")
"""The rooms on the way, but for `core/threads`, which begins threads."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(1000, 4000, bias=False)
        self.small = nn.Linear(8, 8)


def make_source(out: Path) -> None:
    torch.manual_seed(0)
    (out / "hub").mkdir()
    save_file(Model().state_dict(), out / "hub/model.safetensors")
    (out / "hub/config.json").write_text("{}")


two = Ranks(__name__, 2, first=make_source)


def of_package(frame: FrameType | None) -> list[str]:
    """Return the package's frames, outermost first, from `finalize` on where it is among them."""
    frames = list[str]()
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            module = os.path.relpath(code.co_filename, PACKAGE).removesuffix(".py")
            frames.append(f"{module}:{code.co_qualname}")
            if frames[-1] == "training/finalize:finalize":
                break
        frame = frame.f_back
    return frames[::-1]


class Chain:
    """The frames at the first system call that fills memory with bytes of a file: of the main thread, then the reader's."""

    def __init__(self) -> None:
        self.frames = list[str]()

    def __enter__(self) -> Chain:
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _look(self, frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call" or called is not os.preadv or self.frames:
            return
        main = sys._current_frames()[threading.main_thread().ident or 0]
        in_thread = of_package(frame) if threading.current_thread() is not threading.main_thread() else []
        self.frames = [*of_package(main if in_thread else frame), *in_thread]
        if WAITS in self.frames:
            self.frames.remove(WAITS)


@two.test_each(["direct", "broadcast"])
def test_few_calls_lead_from_finalize_to_a_weights_bytes(strategy: str, out: Path) -> None:
    ctx = shardkit.prepare(Model, str(out / "hub"))
    shard(ctx.model, init_device_mesh("cpu", (2,)))
    with Chain() as chain:
        shardkit.finalize(ctx.model, ctx, strategy=strategy)
    expected = load_file(out / "hub/model.safetensors")
    for name, value in ctx.model.state_dict().items():
        assert torch.equal(value.full_tensor(), expected[name])
    reads = strategy == "direct" or dist.get_rank() == 0
    assert bool(chain.frames) == reads
    assert len(chain.frames) <= MOST_FRAMES, chain.frames
    rooms = [os.path.dirname(frame) for frame in chain.frames if not frame.startswith("core/threads:")]
    assert rooms == sorted(rooms, key=DOWNWARDS.index), chain.frames
