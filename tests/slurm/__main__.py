"""Parts under a real SLURM: `python -m tests.slurm`. Skipped, with the reason, where it is not installed or nobody is root."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import shardkit
from tests.contents import contents
from tests.slurm.cluster import Cluster, missing

ROOT = Path(__file__).parents[2]
WORLD_SIZE = 16

LOST = """#!/bin/bash
#SBATCH --array=3-9:2 --requeue --output={home}/array-%a.%J.txt --open-mode=append
export PYTHONPATH={root}
if [ "$SLURM_ARRAY_TASK_ID" = 5 ] && [ -z "$SLURM_RESTART_COUNT" ]; then
    # Of the first run half of the files are finished when its node is lost.
    echo "$SLURMD_NODENAME" > {home}/node
    {python} -m tests.slurm.half {command} --part env
    sleep 600
fi
[ "$SLURM_ARRAY_TASK_ID" = 5 ] && echo "$SLURMD_NODENAME $SLURM_RESTART_COUNT" > {home}/again
{python} -m shardkit {command} --part env --json > {home}/result-$SLURM_ARRAY_TASK_ID.json
"""


def make_model(path: Path) -> Path:
    torch.manual_seed(0)
    path.mkdir()
    tensors = {f"layers.{n}.weight": torch.randn(512, 300) for n in range(12)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def command(model: Path, out: Path) -> str:
    return shlex.join(
        ["preshard", str(model), str(out), "--world-size", str(WORLD_SIZE), "--layout", "declared"]
    )


def array_with_a_lost_node(cluster: Cluster, model: Path, expected: dict[str, bytes]) -> None:
    """A node is set DOWN while it works on a task; that task alone is run again, on another node."""
    out, home = cluster.home / "array", cluster.home
    script = LOST.format(home=home, root=ROOT, python=sys.executable, command=command(model, out))
    job = cluster.submit(script)
    cluster.wait((home / "half-done").exists)
    node = (home / "node").read_text().strip()
    cluster.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
    cluster.wait(lambda: "PENDING" in cluster.ask("squeue", "-h", "-j", job, "-o", "%T"))
    task = f"{job}_5"  # SLURM lets a requeued task wait for two minutes
    cluster.wait(
        lambda: (
            cluster.ask("scontrol", "update", f"JobId={task}", "StartTime=now") is not None and _began(home)
        )
    )
    cluster.wait_for(job)
    told = {n: json.loads((home / f"result-{n}.json").read_text()) for n in (3, 5, 7, 9)}
    assert [told[n]["part"]["part"] for n in (3, 5, 7, 9)] == ["1/4", "2/4", "3/4", "4/4"]
    assert told[5]["resumed_files"] == 2, told[5]
    commit = cluster.submit(
        f"#!/bin/bash\nexport PYTHONPATH={ROOT}\n{sys.executable} -m shardkit commit {out} --wait 60 > {home}/commit.txt 2>&1\n"
    )
    cluster.wait_for(commit)
    assert contents(out) == expected
    assert not list(home.glob(".array.shardkit-*"))
    cluster.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")
    again = (home / "again").read_text().split()
    print(
        f"array: the task of {node} was run again on {again[0]} (SLURM_RESTART_COUNT={again[1]}); bytes are equal"
    )


def end_the_lost_one(home: Path) -> None:
    """End the first run of the lost task: its node is DOWN, but the process lives, as it may anywhere."""
    with contextlib.suppress(OSError, ValueError):
        os.kill(int((home / "half-done").read_text()), signal.SIGKILL)


def _began(home: Path) -> bool:
    return (home / "again").exists()


def step(cluster: Cluster, typed: str, out: Path, expected: dict[str, bytes]) -> None:
    """srun starts all parts of a command at once, one on each node."""
    told = cluster.home / f"{out.name}.txt"
    script = f"#!/bin/bash\n#SBATCH -N4 -n4 --output={told}\nexport PYTHONPATH={ROOT}\n"
    cluster.wait_for(cluster.submit(f"{script}srun {sys.executable} -m shardkit {typed} --part env\n"))
    text = told.read_text()
    assert contents(out) == expected, text
    for rank in range(4):
        assert f"part: {rank + 1}/4, from SLURM_PROCID={rank}, SLURM_NTASKS=4" in text, text
    print(f"srun -N4, {typed.split()[0]}: bytes are equal")


def steps(cluster: Cluster, model: Path, sharded: Path) -> None:
    """preshard and consolidate, there and back."""
    step(cluster, command(model, cluster.home / "step"), cluster.home / "step", contents(sharded))
    whole, out = cluster.home / "whole-hf", cluster.home / "step-hf"
    options: dict[str, Any] = {"max_shard_size": "600KB", "ask_class": False}
    shardkit.consolidate(sharded, whole, **options)
    typed = ["consolidate", str(sharded), str(out), "--max-shard-size", "600KB", "--ask-class", "off"]
    step(cluster, shlex.join(typed), out, contents(whole))


def main() -> int:
    """Run all of it; return the exit code."""
    reason = missing()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        home = Path(name)
        model = make_model(home / "model")
        shardkit.preshard(model, home / "whole", world_size=WORLD_SIZE, layout="declared")
        expected = contents(home / "whole")
        with Cluster(home) as cluster:
            steps(cluster, model, home / "whole")
            try:
                array_with_a_lost_node(cluster, model, expected)
            finally:
                end_the_lost_one(home)
    print(f"SLURM: all is well, {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
