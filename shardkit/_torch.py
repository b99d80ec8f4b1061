"""The names of torch that are not public. Nothing else in shardkit uses one.

Every name here has a test of its own in tests/test_torch_contract.py.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


def init_fake_world(world_size: int) -> None:
    """Make this process rank 0 of a world that does not exist: meshes work, collectives do nothing.

    Args:
        world_size: number of ranks.

    Source: torch 2.13, torch/testing/_internal/distributed/fake_pg.py; importing it registers the
    backend "fake".
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
