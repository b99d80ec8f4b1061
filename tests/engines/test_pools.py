"""Pools of other libraries take the parts: each is tried where it is installed."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines.harness import Job

BODY = """
import sys
import shardkit

def whole(executor):
    options = {"world_size": 12, "layout": "declared", "jobs": 1}
    result = shardkit.preshard(sys.argv[1], sys.argv[2], executor=executor, num_parts=3, **options)
    assert (result.part, result.num_files) == (None, 12), result
"""
DASK = """
import dask
from distributed import Client, LocalCluster
if __name__ == "__main__":
    with dask.config.set({"distributed.worker.multiprocessing-method": "spawn"}):
        with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
            whole(client)
"""
SUBMITIT = """
import submitit
executor = submitit.AutoExecutor(folder=sys.argv[2] + "-logs", cluster="local")
executor.update_parameters(timeout_min=5)
whole(executor)
"""
MPI_POOL = """
from mpi4py.futures import MPIPoolExecutor
if __name__ == "__main__":
    with MPIPoolExecutor() as executor:
        whole(executor)
"""
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3")


def needs(module: str, program: str | None = None) -> pytest.MarkDecorator:
    is_there = find_spec(module) is not None and (program is None or shutil.which(program) is not None)
    return pytest.mark.skipif(
        not is_there, reason=f"{module}{f' or {program}' if program else ''} is not installed"
    )


def script_of(job: Job, body: str) -> list[str]:
    script = job.home / "script.py"
    script.write_text(BODY + body)
    return [str(script), str(job.model), str(job.out)]


@needs("distributed")
def test_dask_runs_the_part_again_whose_worker_is_killed(tmp_path: Path) -> None:
    job = Job(tmp_path)
    done = job.run_and_lose_one(*script_of(job, DASK))
    assert done.returncode == 0, done.stderr
    assert job.was_kept
    job.check()


@needs("submitit")
def test_submitit(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(*script_of(job, SUBMITIT))
    shutil.rmtree(f"{job.out}-logs")
    job.check()


@needs("mpi4py", "mpirun")
def test_a_pool_of_mpi(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run("-m", "mpi4py.futures", *script_of(job, MPI_POOL), by=MPIRUN)
    job.check()


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_mpirun_starts_the_parts(tmp_path: Path) -> None:
    job = Job(tmp_path)
    done = job.run("-m", "shardkit", *job.command, "--part", "env", by=MPIRUN)
    for rank in range(3):
        assert f"part: {rank + 1}/3, from OMPI_COMM_WORLD_RANK={rank}" in done.stderr
    job.check()
