"""FSDP1 units are filled one by one as they are wrapped, by FSDP1 itself, accelerate, transformers and Lightning."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy

from shardkit.core.text import MIB
from shardkit.errors import UsageError
from shardkit.training.wrap import bf16_mixed_precision
from tests.worlds.processes import ROOT, run_script

pytestmark = pytest.mark.prove

HAS_TRAINERS = all(importlib.util.find_spec(name) for name in ("accelerate", "lightning"))
CHECKS = [
    *("tied", "tied flat", "buffers", "presharded", "from_rank", "one unit", "bf16", "new head"),
    *("ignored", "ignored root", "accelerate", "lightning", "trainer", "hybrid", "hybrid zero2"),
]
WORLDS = {"trainer": ("trainer", 2), "hybrid": ("hybrid", 4), "hybrid zero2": ("hybrid", 4)}
"""Check -> the world that it is in, and its size, if that is not the one of most."""
# name: (class, what message or problems say)
REFUSED = {
    "sync variable": ("UsageError", "FSDP_SYNC_MODULE_STATES=true"),
    "efficient variable": ("UsageError", "FSDP_CPU_RAM_EFFICIENT_LOADING=true"),
    "plugin of FSDP2": ("UsageError", "the plugin is for FSDP2"),
    "plugin of FSDP1": ("UsageError", "set both to False"),
    "arguments": ("UsageError", "sync_module_states=True"),
    "lightning": ("UsageError", "sync_module_states=True"),
    "read": ("UsageError", "not 'disk'"),
    "apart": ("LayoutError", "model.embed_tokens.weight, lm_head.weight"),
    "replaced": ("UsageError", "were never filled"),
    "ignored": ("UsageError", "call it with the model once more after wrapping"),
    "stranger": ("LayoutError", "Linear: bias"),
    "one rank fails": ("IntegrityError", "rank 1: model.norm.weight of the state dict has no memory"),
}
dist_only = pytest.mark.skipif(not HAS_TRAINERS, reason="accelerate or Lightning is not installed")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fsdp1")
    script = str(ROOT / "tests/training/fsdp1_world.py")
    run_script(script, str(out))
    return out


def told(world: Path, name: str, size: int = 2) -> list[dict[str, Any]]:
    return [json.loads((world / f"{name}-{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.dist
@dist_only
@pytest.mark.parametrize("name", CHECKS)
def test_it_equals_a_model_that_was_loaded_whole(world: Path, name: str) -> None:
    among, size = WORLDS.get(name, ("tied", 2))
    assert [each[name] for each in told(world, among, size)] == [""] * size


@pytest.mark.dist
@dist_only
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_go_wrong_is_refused_on_all_ranks(world: Path, name: str) -> None:
    kind, text = REFUSED[name]
    found = [each["refused"][name] for each in told(world, "tied")]
    assert found == [found[0]] * 2
    assert found[0]["error"] == kind
    assert text in json.dumps(found[0])


@pytest.mark.dist
@dist_only
def test_no_rank_holds_the_model(world: Path) -> None:
    """160 MiB on two ranks: whoever held all of it would have 80 MiB beyond its shard."""
    for each in told(world, "memory"):
        assert each["held"] == 80 * MIB
        assert each["extra"] < 32 * MIB


def test_mixed_precision_is_what_the_strategy_wants() -> None:
    class FSDPStrategy:
        """Lightning's, by name."""

    class ModelParallelStrategy:
        """The same."""

    class Plugin:
        """accelerate's."""

        def __init__(self, fsdp_version: int) -> None:
            self.fsdp_version = fsdp_version

    for strategy in ("fsdp", "fsdp1", FullyShardedDataParallel, FSDPStrategy, FSDPStrategy(), Plugin(1)):
        first = bf16_mixed_precision(strategy)
        assert isinstance(first, MixedPrecision)
        assert (first.param_dtype, first.reduce_dtype) == (torch.bfloat16, torch.float32)
        assert first.buffer_dtype is None
    for strategy in (None, "fsdp2", FSDPModule, ModelParallelStrategy, ModelParallelStrategy(), Plugin(2)):
        second = bf16_mixed_precision(strategy)
        assert isinstance(second, MixedPrecisionPolicy)
        assert (second.param_dtype, second.reduce_dtype) == (torch.bfloat16, torch.float32)
    with pytest.raises(UsageError, match="DDPStrategy is not a known FSDP strategy"):
        bf16_mixed_precision("DDPStrategy")
