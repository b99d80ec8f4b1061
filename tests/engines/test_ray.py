"""Ray places the parts, and runs one again whose worker was lost."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines.harness import Job

pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (shardkit[ray])"),
]
HERE = {"RAY_ADDRESS": "local"}
"""No cluster of somebody else's is used."""

FROM_PYTHON = """
import sys
import ray
import shardkit
from shardkit.errors import SourceError

model, out = sys.argv[1:]
options = {"world_size": 12, "layout": "declared", "executor": "ray"}
ray.init(address="local", include_dashboard=False, log_to_driver=False)
result = shardkit.preshard(model, out, **options)
assert result.part is None, result
assert "the parts ran on Ray: 1 node" in result.notes[0], result.notes
assert ray.is_initialized(), "the connection of the caller is left alone"
open(model + "/model.safetensors", "wb").close()
try:
    shardkit.preshard(model, out + "2", **options)
except SourceError as error:
    assert "Traceback" not in str(error), error
else:
    raise AssertionError("a damaged source was taken")
"""


def test_a_worker_is_killed(tmp_path: Path) -> None:
    job = Job(tmp_path)
    words = [*job.command, "--executor", "ray", "--num-parts", "3", "--json"]
    done = job.run_and_lose_one("-m", "shardkit", *words, more=HERE)
    assert done.returncode == 0, done.stderr
    assert job.was_kept
    result = json.loads(done.stdout)
    assert (result["part"], result["num_files"]) == (None, 12)
    assert result["notes"][0].startswith("the parts ran on Ray: 1 node")
    job.check()


def test_from_python_with_a_connection_of_ones_own(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run("-c", FROM_PYTHON, str(job.model), str(job.out))
    job.check()
