"""docs/versions.md is what `make matrix` found, and says nothing else."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from shardkit._version import TESTED_TORCH

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("matrix", ROOT / "scripts" / "matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_declared_range_is_that_of_the_rows(matrix: ModuleType) -> None:
    assert (next(iter(matrix.TORCH)), matrix.NEWEST) == TESTED_TORCH
    assert f"torch>={TESTED_TORCH[0]}" in (ROOT / "pyproject.toml").read_text()
    assert f"torch=={matrix.PINNED}" in (ROOT / "constraints.txt").read_text().split()


def test_the_table_is_that_of_the_results(matrix: ModuleType) -> None:
    rows = json.loads(matrix.ROWS_FILE.read_text())
    assert "\n".join(matrix.table(rows)) in matrix.PAGE.read_text()
    assert all(matrix.is_green(result) for result in rows.values()), "make matrix VERSIONS=..."


def test_what_each_version_wrote_is_kept(matrix: ModuleType) -> None:
    rows = json.loads(matrix.ROWS_FILE.read_text())
    kept = {path.name for path in matrix.DATA.iterdir()}
    assert kept >= {f"{matrix.ROWS[row]['torch']}.tar.xz" for row in rows if row in matrix.TORCH}
    assert all((matrix.DATA / name).stat().st_size < 60_000 for name in kept)
