"""`shardkit inspect`: its words and its JSON."""

from __future__ import annotations

import json
import os

import pytest
import torch

from shardkit.cli.output import size_runs

HUB = """\
tiny: Hub model, safetensors
  tensors  4 tensors, 116 B
  dtypes   fp32: 1, 60 B
           bf16: 2, 48 B
           int64: 1, 8 B
  files    1 weight file, {size} B

tensors
  steps                     int64  []            8 B
  embed.weight              fp32   [5, 3]       60 B
  layers.{{0,1}}.up.weight  bf16   [4, 3]  x2  48 B

files
  model.safetensors  {size} B
"""


def rows(text):
    return [line.split() for line in text.splitlines()]


def test_hub(run, tiny):
    result = run("inspect", "tiny")
    size = os.path.getsize(tiny / "model.safetensors")
    assert rows(result.stdout) == rows(HUB.format(size=size))
    assert result.stderr == ""


def test_every_tensor(run, tiny):
    names = [
        row["name"] for row in json.loads(run("inspect", "tiny", "--tensors", "--json").stdout)["tensors"]
    ]
    assert sorted(names) == ["embed.weight", "layers.0.up.weight", "layers.1.up.weight", "steps"]


def test_presharded(run, sharded):
    result = run("inspect", "out")
    assert result.stderr == ""
    assert result.stdout.startswith("out: DCP checkpoint, pre-sharded by shardkit")
    found = rows(result.stdout)
    assert ["mesh", "dp_shard=2;", "world", "size", "2"] in found
    assert ["layers.{0,1}.up.weight", "bf16", "[4,", "3]", "S(0)", "x2", "48", "B"] in found


def test_dcp_without_manifest(run, sharded):
    (sharded / "shardkit.json").unlink()
    result = run("inspect", "out")
    assert result.stdout.startswith(
        "out: DCP checkpoint\n  mesh     not recorded\n  tensors  4 tensors, 116 B\n"
    )


def test_checkpoint_of_a_trainer(run, sharded):
    home = sharded.parent / "checkpoint-2"
    home.mkdir()
    sharded.rename(home / "pytorch_model_fsdp_0")
    (home / "pytorch_model_fsdp_0" / "shardkit.json").unlink()
    (home / "scheduler.bin").touch()
    result = run("inspect", "checkpoint-2")
    assert result.stderr == ""
    assert result.stdout.startswith(
        "checkpoint-2: checkpoint of accelerate (FSDP)\n  roots    model: model\n  tensors  4 tensors, 116 B\n"
    )
    assert ["skipped", "scheduler.bin:", "state", "of", "the", "trainer"] in rows(result.stdout)


@pytest.mark.parametrize("path", ["tiny", "out"])
def test_json_has_integer_sizes(run, sharded, path):
    content = json.loads(run("inspect", path, "--json").stdout)
    assert content["tensor_bytes"] == 116
    assert sum(group["count"] for group in content["tensors"]) == content["num_tensors"] == 4
    assert all(type(file["file_bytes"]) is int for file in content["files"])


def test_warnings_go_to_stderr(run, sharded):
    (sharded / "__1_0.distcp").unlink()
    result = run("inspect", "out", "--json")
    assert result.stderr == "warning: __1_0.distcp: the manifest lists it, and there is no such file\n"
    assert len(json.loads(result.stdout)["warnings"]) == 1
    assert result.exit_code == 0


def test_nothing_there(run, tiny):
    result = run("inspect", "Qwen/Qwen3-8B")
    assert result.exit_code == 3
    assert result.stderr.splitlines()[0] == "error: Qwen/Qwen3-8B: no such file or directory"
    assert "hf://Qwen/Qwen3-8B" in result.stderr.splitlines()[1]


def test_size_runs():
    sizes = [2 << 30, (2 << 30) + 5, 1 << 10]
    assert size_runs(sizes) == [("0-1", "2.0 GiB each"), ("2", "1.0 KiB")]


def test_a_format_has_one_name(run, tiny):
    state = {f"layers.{n}.up.weight": torch.full((4, 3), n, dtype=torch.bfloat16) for n in range(2)}
    torch.save({**state, "embed.weight": torch.ones(5, 3)}, tiny.parent / "whole.pt")
    assert run("inspect", "whole.pt").stdout.startswith("whole.pt: torch.save file\n")
    assert ["found", "torch.save", "file"] in rows(run("consolidate", "whole.pt", "x", "-n").stdout)
    assert "  checkpoint  torch.save file\n" in run("verify", "whole.pt").stdout
    assert "(torch.save file)\n" in run("diff", "whole.pt", "tiny").stdout
    assert json.loads(run("diff", "whole.pt", "tiny", "--json").stdout)["format_a"] == "full-file"
