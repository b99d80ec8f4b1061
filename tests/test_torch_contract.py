"""The names of torch that are not public are still there, and still do what shardkit needs."""

import subprocess
import sys

# In a process of its own: a fake process group and a real one cannot live side by side.
FAKE_WORLD = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from shardkit._torch import init_fake_world

init_fake_world(6)
assert dist.get_world_size() == 6 and dist.get_rank() == 0
mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
assert mesh["b"].size() == 3
"""


def test_fake_world_has_ranks_that_do_not_exist() -> None:
    subprocess.run([sys.executable, "-c", FAKE_WORLD], check=True, timeout=120)
