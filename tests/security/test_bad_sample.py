"""The shared malformed, hostile and odd-but-legal checkpoints, through the command line."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.security.run_corpus import run

BAD = Path(__file__).parents[2] / ".." / "shared" / "fixtures" / "bad-sample"
_RAW = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f]")
_SELF = "dcp-hf-dir"  # a Hub directory, of which consolidate makes another


def load_cases() -> list[dict[str, Any]]:
    manifest = BAD / "manifest.json"
    if not manifest.exists():
        return []
    return [case for case in json.loads(manifest.read_text())["cases"] if case["id"] != _SELF]


CASES = load_cases()

pytestmark = [pytest.mark.shared, pytest.mark.skipif(not CASES, reason="shared fixtures are absent")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
def test_a_command(case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`preshard` where it is a Hub directory, `consolidate` where it is DCP."""
    monkeypatch.setenv("SHARDKIT_CANARY", str(tmp_path / "canary"))
    (tmp_path / "out").mkdir()
    command = {"hf": ["preshard", "--world-size", "2", "--wrap", "none"], "dcp": ["consolidate"]}[
        case["kind"]
    ]
    paths = [str((BAD / case["path"]).resolve()), str(tmp_path / "out" / "made")]
    start = time.process_time()
    code, said = run([command[0], *paths, *command[1:], "--no-progress"])
    assert time.process_time() - start < case["limits"]["seconds"]
    assert not (tmp_path / "canary").exists()
    assert not _RAW.search(said)
    assert "Traceback" not in said
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    if case["expect"] == "verify-reject":  # what only a checksum tells
        return
    may_refuse = case.get("check") == "bit-exact-or-clear-refusal"
    if case["expect"] == "reject" or (code and may_refuse):
        mention = case["must_mention_if_rejected"] if may_refuse else case["must_mention"]
        assert code == 3
        assert any(name in said for name in mention), said
        assert left == []
    else:
        assert (code, left) == (0, ["made"]), said
