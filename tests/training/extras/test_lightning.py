"""The Lightning callback, in a real Trainer where Lightning is installed, and its error where it is not."""

import csv
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import UsageError
from shardkit.training.extras import lightning
from tests.worlds.processes import ROOT, run_script

HAS_LIGHTNING = importlib.util.find_spec("lightning") is not None
POINTS = ["start", "after backward", "before optimizer step", "end"]


@pytest.mark.dist
@pytest.mark.skipif(not HAS_LIGHTNING, reason="Lightning is not installed")
def test_a_trainer_logs_on_every_rank(tmp_path: Path) -> None:
    script = str(ROOT / "tests/training/lightning_world.py")
    run_script(script, str(tmp_path))
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert [unit["path"] for unit in found["diagnosis"]["units"]] == [
            "net",
            *(f"net.blocks.{n}" for n in range(3)),
        ]
        assert found["diagnosis"]["problems"] == []
        assert found["phases"] == [f"batch {batch} {point}" for batch in range(2) for point in POINTS]
        assert found["peaks"]
        assert found["lines"][0] == f"Module on rank {rank} of 2: FSDP2 (fully_shard)"
        assert any(
            line.startswith(f"rank {rank}, batch 1 after backward, MiB: CPU ") for line in found["lines"]
        )
        assert found["is_callback"]
        assert found["pickled"] == ["FSDPDiagnosticsCallback", 2, 2, False]
        modules = [line.split(":")[0] for line in found["lines"] if line.startswith("module ")]
        assert modules == ["module net.blocks (ModuleList)", "module net.blocks.0.0 (Linear)"]
        assert found["settings"]["state_dict_type"] == "sharded"
        assert found["settings"]["mixed precision in effect"] == "fully_shard's own: none"
        assert found["settings"]["mesh"].startswith("DeviceMesh((data_parallel=2")
        assert ("state_dict_type: sharded" in found["lines"]) == (rank == 0)
        check_fsdp1(found["fsdp1"], rank)
        for each in found["fsdp1"].values():
            check_module(each["seen"])
    check_logger(tmp_path)


def check_fsdp1(found: dict[str, Any], rank: int) -> None:
    """The strategy's mixed precision wins over the Trainer's, and the callback says so."""
    both, trainer = found["both"]["settings"], found["trainer"]["settings"]
    theirs = "param bfloat16, reduce bfloat16, buffer bfloat16"
    for settings in (both, trainer):
        assert settings["mixed precision of the Trainer"] == f"precision=bf16-mixed: {theirs}"
        assert settings["state_dict_type"] == "sharded"
        assert settings["sharding"] == "FULL_SHARD"
        assert settings["cpu offload"] == "none"
        assert settings["wrap policy"] == settings["activation checkpointing"] == "Sequential"
    assert both["mixed precision of the strategy"] == "param bfloat16, reduce float32"
    wins = "param bfloat16, reduce float32 (the strategy's, which wins over the Trainer's)"
    assert both["mixed precision in effect"] == wins
    assert trainer["mixed precision of the strategy"] == "not set"
    assert trainer["mixed precision in effect"] == f"{theirs} (the Trainer's)"
    assert (f"mixed precision in effect: {wins}" in found["both"]["lines"]) == (rank == 0)
    assert not any(line.startswith("module ") for line in found["both"]["lines"])  # 0 of them


def check_module(seen: dict[str, Any]) -> None:
    """What the module gives of itself is what the strategy's root around it gives."""
    assert seen["norms"][0] == seen["norms"][1] > 0
    assert seen["units"] == [4, 4]
    assert seen["clipped"] == [seen["norms"][0], pytest.approx(seen["norms"][0] / 2, rel=1e-4)]
    assert len(seen["saved"]) == 8
    assert "holds 2 parameters of it" in seen["part"]


def check_logger(out: Path) -> None:
    """Lightning's own CSVLogger got the numbers and the settings; where nobody asked it got nothing."""
    with (out / "both/0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    sent = {name: row[name] for row in rows for name in row if row[name] and name.startswith("shardkit/")}
    assert float(sent["shardkit/units"]) == 4
    assert float(sent["shardkit/local_bytes"]) == float(sent["shardkit/expected_bytes"]) == 468
    for point in POINTS:
        assert float(sent[f"shardkit/{point.replace(' ', '_')}/cpu_peak_bytes"]) > 0
    assert "shardkit/wrap policy: Sequential" in (out / "both/0/hparams.yaml").read_text()
    files = (out / "trainer/0").glob("*")
    assert not any("shardkit" in file.read_text() for file in files)


@pytest.mark.skipif(HAS_LIGHTNING, reason="Lightning is installed")
def test_without_lightning_it_says_so() -> None:
    with pytest.raises(UsageError, match="needs Lightning, which is not installed") as caught:
        lightning.FSDPDiagnosticsCallback()
    assert caught.value.hint == "`pip install lightning`"


def test_importing_does_not_import_lightning() -> None:
    assert "lightning.pytorch" not in sys.modules
    assert "pytorch_lightning" not in sys.modules
