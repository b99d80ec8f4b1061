"""The tracing child as it really is: one process, started from nothing."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from shardkit.core.mesh import parse_mesh
from shardkit.layout import traced
from shardkit.layout.traced import trace_model

WRAP = """
import os
from torch.distributed.fsdp import fully_shard

def whole(model, mesh):
    assert os.environ["HF_HUB_OFFLINE"] == "1" and os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK"} & set(os.environ)
    fully_shard(model, mesh=mesh)
"""


@pytest.mark.prove
def test_the_child_is_shielded_from_the_launcher_and_the_directory(
    model_dir: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_wrap.py").write_text(WRAP)
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the current directory was imported')")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK"):
        monkeypatch.setenv(name, "3")
    monkeypatch.chdir(tmp_path)
    mesh = parse_mesh("dp_replicate=32,dp_shard=32", None)
    found = trace_model(model_dir("llama-tied", num_hidden_layers=1), mesh, "my_wrap:whole")
    assert [unit.path for unit in found.layout.units] == [""]


@pytest.mark.prove
def test_a_child_that_cannot_start_shows_its_last_lines() -> None:
    done = traced._serve_request(b"not json", 60)
    assert isinstance(done, subprocess.CompletedProcess)
    assert done.returncode == 1
    assert b"JSONDecodeError" in done.stdout
