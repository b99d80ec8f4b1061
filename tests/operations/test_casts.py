"""Dtypes may be written as torch has them, wherever one is asked for; and what a cast cannot keep is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import shardkit
from shardkit.cli import main
from shardkit.errors import Interrupted, UsageError
from shardkit.training.model.build import parse_dtype
from tests.contents import contents
from tests.operations.stops import InterruptAfter

MakeHub = Callable[..., Path]
WEIGHTS = {"layers.0.w": torch.ones(8, 4), "layers.0.b": torch.ones(8)}


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
        assert contents(tmp_path / "short" / kind) == contents(tmp_path / "long" / kind)


def test_of_options_and_arguments(source: Path, tmp_path: Path) -> None:
    arguments = ["preshard", str(source), str(tmp_path / "out"), "--world-size", "2", "--dtype"]
    taken = CliRunner().invoke(main, [*arguments, "torch.float16"])
    assert taken.exit_code == 0, taken.output
    refused = CliRunner().invoke(main, [*arguments, "float64"])
    assert refused.exit_code == 2
    assert "bf16" in refused.output
    shardkit.preshard(source, tmp_path / "torch", world_size=2, dtype=torch.float16)  # type: ignore[arg-type]
    assert contents(tmp_path / "torch") == contents(tmp_path / "out")
    with pytest.raises(UsageError, match="fp64"):
        shardkit.preshard(source, tmp_path / "none", world_size=2, dtype="float64")
    assert parse_dtype("torch.bfloat16") is torch.bfloat16


LARGE = {
    "layers.0.w": torch.tensor([1.0, 70000.0, -1e9, 2.0]),
    "layers.1.w": torch.tensor([-1e6, 1.0]).bfloat16(),
    "layers.2.w": torch.tensor([float("inf"), 1.0, float("nan"), 3.0]),
}
BEYOND = "2 tensors have values beyond the range of fp16, which became infinite: layers.0.w, layers.1.w"


def test_values_beyond_the_range_of_a_dtype_are_told(make_hub: MakeHub, tmp_path: Path) -> None:
    """Once for all tensors, whoever writes: no other number of it would show that weights are lost."""
    source = make_hub(LARGE)
    told: list[str] = []
    wide = shardkit.preshard(source, tmp_path / "wide", world_size=2, dtype="bf16", on_warning=told.append)
    assert told == []
    sharded = shardkit.preshard(source, tmp_path / "p", world_size=2, dtype="fp16", on_warning=told.append)
    assert told == [BEYOND]
    assert told[0] in sharded.warnings
    for number, write in enumerate(
        (
            lambda out: shardkit.consolidate(wide.output, out, dtype="fp16"),
            lambda out: shardkit.reshard(wide.output, out, world_size=3, dtype="fp16"),
            lambda out: shardkit.preshard(source, out, world_size=2, dtype="fp16", part="1/1"),
        )
    ):
        assert BEYOND in write(tmp_path / str(number)).warnings


def test_an_interrupted_run_tells_it_too(make_hub: MakeHub, tmp_path: Path) -> None:
    """The next run converts nothing of the files that are finished."""
    told: list[str] = []
    with pytest.raises(Interrupted):
        shardkit.preshard(
            make_hub(LARGE),
            tmp_path / "out",
            world_size=1,
            dtype="fp16",
            on_warning=told.append,
            progress=InterruptAfter(1),
            jobs=1,
        )
    assert [each.partition(": ")[0] for each in told] == [
        BEYOND.partition(": ")[0].replace("2 tensors have", "1 tensor has")
    ]
