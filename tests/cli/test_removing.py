import json
import os
import re
from pathlib import Path

import pytest

from shardkit.files.cache import Cache


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SHARDKIT_CACHE", str(tmp_path / "cache"))
    return str(tmp_path / "cache" / "traces")


def test_it_shows_where_how_many_and_how_large(directory: str, run) -> None:
    assert run("cache").stdout == f"{directory}\n  kept  0 answers, 0 B\n"
    Cache(directory).keep("1" * 64, b"x" * 2000)
    shown = run("cache")
    assert shown.exit_code == 0
    assert shown.stdout.startswith(f"{directory}\n  kept  1 answer, 2.1 KiB")


def test_clear_removes_it(directory: str, run) -> None:
    Cache(directory).keep("1" * 64, b"x" * 2000)
    cleared = json.loads(run("cache", "--clear", "--json").stdout)
    nbytes = cleared.pop("cache_bytes")
    assert cleared == {"directory": directory, "cleared": True, "num_entries": 1}
    assert nbytes > 2000
    assert run("cache").stdout == f"{directory}\n  kept  0 answers, 0 B\n"


def test_off_is_said(run) -> None:
    assert run("cache").stdout == "nothing is cached: SHARDKIT_CACHE is off\n"
    assert json.loads(run("cache", "--json").stdout)["directory"] is None


def lay_out(tmp_path):
    """Make a model with weights of an older save."""
    for mark in ("0123abcd", "4567abcd"):
        path = tmp_path / f"model-{mark}-00001-of-00001.safetensors"
        path.write_bytes(bytes(2000))
        os.utime(path, (0, 0))
    index = {"weight_map": {"a": "model-0123abcd-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_it_says_what_goes(tmp_path, run):
    lay_out(tmp_path)
    told = run("gc", str(tmp_path), "-n").stdout
    assert told.startswith(f"dry run: nothing was removed from {tmp_path}\n")
    assert "to remove, in all  1 name, 2.0 KiB" in told
    result = run("gc", str(tmp_path))
    assert result.exit_code == 0
    assert re.sub(r"[\d.]+ h old", "AGE", result.stdout) == (
        f"{tmp_path}\n"
        "  in use           model-0123abcd-00001-of-00001.safetensors (model.safetensors.index.json)\n"
        "  removed          model-4567abcd-00001-of-00001.safetensors: 1 file, 2.0 KiB, AGE\n"
        "  removed, in all  1 name, 2.0 KiB\n"
    )
    assert run("gc", str(tmp_path)).stdout.endswith("\n  removed  nothing\n")
    said = json.loads(run("gc", str(tmp_path), "--json").stdout)
    assert (said["removed"], said["removed_bytes"], said["older_than_s"]) == ([], 0, 86400)


def test_without_a_commit_it_is_refused(tmp_path, run):
    lay_out(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    refused = run("gc", str(tmp_path))
    assert refused.exit_code == 2
    assert "nothing was committed there" in refused.stderr
    assert "--uncommitted" in refused.stderr
    assert run("gc", str(tmp_path), "--uncommitted").exit_code == 0
    assert list(tmp_path.iterdir()) == []
