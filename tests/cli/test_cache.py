import json
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
