"""Where an output lies that no test names."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A default output lies in the working directory."""
    monkeypatch.chdir(tmp_path)
