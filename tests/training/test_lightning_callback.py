"""The Lightning callback, in a real Trainer where Lightning is installed, and its error where it is not."""

import importlib.util
import json
import socket
import sys
from pathlib import Path

import pytest

from shardkit.errors import UsageError
from shardkit.training import lightning
from tests.distributed.processes import ROOT, run_script

HAS_LIGHTNING = importlib.util.find_spec("lightning") is not None
POINTS = ["start", "after backward", "before optimizer step", "end"]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.mark.dist
@pytest.mark.skipif(not HAS_LIGHTNING, reason="Lightning is not installed")
def test_a_trainer_logs_on_every_rank(tmp_path: Path) -> None:
    script = str(ROOT / "tests/training/lightning_world.py")
    run_script(script, str(tmp_path), timeout_s=240, env={"MASTER_PORT": str(free_port())})
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
        assert found["pickled"] == ["FSDPDiagnosticsCallback", 2]


@pytest.mark.skipif(HAS_LIGHTNING, reason="Lightning is installed")
def test_without_lightning_it_says_so() -> None:
    with pytest.raises(UsageError, match="needs Lightning, which is not installed") as caught:
        lightning.FSDPDiagnosticsCallback()
    assert caught.value.hint == "pip install lightning"


def test_importing_does_not_import_lightning() -> None:
    assert "lightning.pytorch" not in sys.modules
    assert "pytorch_lightning" not in sys.modules
