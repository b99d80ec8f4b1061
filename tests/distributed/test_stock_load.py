"""Stock `dcp.load` in real gloo worlds gives every bit back, and each rank reads its own file only."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import run_script
from tests.distributed.test_layout_against_torch import LLAMA, MODELS, UNITS

pytestmark = pytest.mark.dist

WIDE = {
    **LLAMA,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 20011,
}
EVEN = {**LLAMA, "hidden_size": 24, "intermediate_size": 40, "vocab_size": 102}  # torch: no uneven columns
JOBS: list[dict[str, Any]] = [
    {
        "name": "llama-4",
        "config": MODELS["llama"],
        "unit": UNITS["llama"],
        "shape": [4],
        "mesh": "dp_shard=4",
    },
    {
        "name": "qwen3-2",
        "config": MODELS["qwen3"],
        "unit": UNITS["qwen3"],
        "shape": [2],
        "mesh": "dp_shard=2",
    },
    {"name": "gpt2-3", "config": MODELS["gpt2"], "unit": UNITS["gpt2"], "shape": [3], "mesh": "dp_shard=3"},
    {
        "name": "tied-2x2",
        "config": MODELS["llama-tied"],
        "unit": UNITS["llama-tied"],
        "shape": [2, 2],
        "mesh": "dp_replicate=2,dp_shard=2",
    },
    {
        "name": "columns-2x2",
        "config": EVEN,
        "unit": UNITS["llama"],
        "shape": [2, 2],
        "mesh": "dp_replicate=2,dp_shard=2",
        "wrap": "tests.distributed.policies:shard_columns",
    },
    {"name": "wide-4", "config": WIDE, "unit": UNITS["llama"], "shape": [4], "mesh": "dp_shard=4"},
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("load")
    for job in JOBS:
        (base / job["name"]).mkdir()
    run_script("load_world.py", json.dumps({"base": str(base), "jobs": JOBS}), timeout_s=400)
    return base


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["name"])
def test_every_rank_has_every_bit_from_its_own_file(loaded: Path, job: dict[str, Any]) -> None:
    directory = loaded / job["name"]
    result = json.loads((directory / "result.json").read_text())
    assert result["layout"] == "traced"
    assert result["num_units"] == 3
    for rank in range(prod(job["shape"])):
        report = json.loads((directory / f"rank{rank}.json").read_text())
        assert report["compared"] > 10
        assert report["different"] == []
        assert report["files"] == [f"__{rank % job['shape'][-1]}_0.distcp"]


def test_a_rank_reads_little_more_than_its_shard(loaded: Path) -> None:
    for rank in range(4):
        report = json.loads((loaded / "wide-4" / f"rank{rank}.json").read_text())
        assert report["local_bytes"] >= 20e6
        assert report["read_bytes"] <= 1.05 * report["local_bytes"]
