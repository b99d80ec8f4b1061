"""mpirun starts the parts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.engines.harness import Job

MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3")


@pytest.mark.prove
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_mpirun_starts_the_parts(tmp_path: Path) -> None:
    job = Job(tmp_path)
    done = job.run("-m", "shardkit", *job.command, "--part", "env", by=MPIRUN)
    for rank in range(3):
        assert f"part: {rank + 1}/3, from OMPI_COMM_WORLD_RANK={rank}" in done.stderr
    job.check()
