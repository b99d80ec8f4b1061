"""Dtypes may be written as torch has them, wherever one is asked for; what is written is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import shardkit
from shardkit.cli import main
from shardkit.errors import UsageError
from shardkit.training.model.build import parse_dtype

MakeHub = Callable[..., Path]
WEIGHTS = {"layers.0.w": torch.ones(8, 4), "layers.0.b": torch.ones(8)}


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@pytest.fixture
def source(make_hub: MakeHub) -> Path:
    return make_hub(WEIGHTS)


@pytest.mark.parametrize("prefix", ["", "torch."])
def test_of_every_verb(prefix: str, source: Path, tmp_path: Path) -> None:
    long = tmp_path / "long", f"{prefix}bfloat16", f"{prefix}float32"
    for out, dtype, other in ((tmp_path / "short", "bf16", "fp32"), long):
        out.mkdir()
        rules = [f"*.b={other}"]
        shardkit.preshard(source, out / "shards", world_size=2, dtype=dtype, dtype_rules=rules)
        shardkit.reshard(out / "shards", out / "other", world_size=3, dtype=dtype, optimizer_dtype=dtype)
        shardkit.consolidate(out / "other", out / "hub", dtype=dtype)
    for kind in ("shards", "other", "hub"):
        assert files(tmp_path / "short" / kind) == files(tmp_path / "long" / kind)


def test_of_options_and_arguments(source: Path, tmp_path: Path) -> None:
    arguments = ["preshard", str(source), str(tmp_path / "out"), "--world-size", "2", "--dtype"]
    taken = CliRunner().invoke(main, [*arguments, "torch.float16"])
    assert taken.exit_code == 0, taken.output
    refused = CliRunner().invoke(main, [*arguments, "float64"])
    assert refused.exit_code == 2
    assert "bf16" in refused.output
    shardkit.preshard(source, tmp_path / "torch", world_size=2, dtype=torch.float16)  # type: ignore[arg-type]
    assert files(tmp_path / "torch") == files(tmp_path / "out")
    with pytest.raises(UsageError, match="fp64"):
        shardkit.preshard(source, tmp_path / "none", world_size=2, dtype="float64")
    assert parse_dtype("torch.bfloat16") is torch.bfloat16
