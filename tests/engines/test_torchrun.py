"""torchrun starts the parts, and starts all of them again where one is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.harness import Job

pytestmark = pytest.mark.prove

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost", "--nproc-per-node")


@pytest.mark.dist
def test_one_is_killed_and_all_are_restarted(tmp_path: Path) -> None:
    job = Job(tmp_path)
    started = [
        *TORCHRUN,
        "2",
        "--max-restarts",
        "1",
        "-m",
        "shardkit",
        *job.command,
        "--part",
        "env",
        "--exist-ok",
    ]
    done = job.run_and_lose_one(*started)
    assert done.returncode == 0, done.stderr
    assert job.was_kept
    for rank in (0, 1):
        assert f"part: {rank + 1}/2, from RANK={rank}, WORLD_SIZE=2" in done.stderr
    job.check()
