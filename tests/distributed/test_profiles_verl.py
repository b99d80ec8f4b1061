"""verl starts, with its own loading code, from what preshard writes in its form; apart, as verl brings much along."""

from __future__ import annotations

from pathlib import Path

import torch

import shardkit
from tests.distributed.models import build
from tests.distributed.test_profiles import CONFIG, WORLD, check, needs, start_model
from tests.worlds.ranks import Ranks


def preshard_verl(out: Path) -> None:
    torch.manual_seed(0)
    build(CONFIG).save_pretrained(out / "hub")
    shardkit.preshard(out / "hub", out / "verl", world_size=WORLD, profile="verl", device="cpu")


two = Ranks(__name__, WORLD, first=preshard_verl)


@needs("verl")
@two.test
def test_verl_starts_from_it(out: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from verl.trainer.config import CheckpointConfig
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    from verl.utils.fsdp_utils import apply_fsdp2, get_shard_placement_fn

    model = start_model()
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=["fsdp"])
    apply_fsdp2(model, {"mesh": mesh, "shard_placement_fn": get_shard_placement_fn(WORLD)}, {})
    contents = CheckpointConfig(save_contents=["model"], load_contents=["model"])
    manager = FSDPCheckpointManager(model, checkpoint_config=contents)
    manager.load_checkpoint(str(out / "verl"))
    check(model, out)
    assert {tensor.placements[0].dim for tensor in model.state_dict().values()} == {0, 1}  # type: ignore[attr-defined]
