"""Stock `dcp.load` in real gloo worlds gives every bit back, and each rank reads its own file only."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_layout_against_torch import LLAMA, MODELS, UNITS, WORLDS
from tests.worlds.processes import run_script

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
ALL_MODELS: dict[str, dict[str, Any]] = {
    **{name: {"config": config, "unit": UNITS[name]} for name, config in MODELS.items()},
    "edges": {"config": None, "unit": "Linear"},
    "even": {"config": EVEN, "unit": UNITS["llama"]},
    "wide": {"config": WIDE, "unit": UNITS["llama"]},
}


def make_job(model: str, world: str, layout: str, **more: str) -> dict[str, Any]:
    shape = [int(size) for size in world.split("x")]
    job = {"name": f"{model}-{world}-{layout}", "model": model, "shape": shape, "layout": layout}
    return {**job, "mesh": WORLDS[world], **more}


COLUMNS = make_job("even", "2x2", "traced", wrap="tests.distributed.policies:shard_columns")
WIDE_4 = make_job("wide", "4", "traced")
JOBS: list[dict[str, Any]] = [
    *(
        make_job(model, world, layout)
        for world in WORLDS
        for model in MODELS
        for layout in ("traced", "declared")
    ),
    *(make_job("edges", world, "declared") for world in WORLDS),
    COLUMNS,
    WIDE_4,
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("load")
    request = {"base": str(base), "models": ALL_MODELS, "jobs": JOBS}
    run_script("distributed/load_world.py", json.dumps(request))
    return base


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["name"])
def test_every_rank_has_every_bit_from_its_own_file(loaded: Path, job: dict[str, Any]) -> None:
    result = json.loads((loaded / job["name"] / "result.json").read_text())
    assert result["layout"] == job["layout"]
    assert result["num_units"] == (5 if job["model"] == "edges" else 3)
    assert bool(result["ties"]) == (job["model"] in ("llama-tied", "gpt2"))
    for rank in range(prod(job["shape"])):
        report = json.loads((loaded / job["name"] / f"rank{rank}.json").read_text())
        assert report["compared"] > 10
        assert report["different"] == []
        own = f"__{rank % job['shape'][-1]}_0.distcp"
        replicated = ["__0_0.distcp"] if job["model"] == "edges" else []  # its buffers
        assert report["files"] == sorted({own, *replicated})


def test_a_rank_reads_little_more_than_its_shard(loaded: Path) -> None:
    for rank in range(prod(WIDE_4["shape"])):
        report = json.loads((loaded / WIDE_4["name"] / f"rank{rank}.json").read_text())
        assert report["local_bytes"] >= 20e6
        assert report["read_bytes"] <= 1.05 * report["local_bytes"]
