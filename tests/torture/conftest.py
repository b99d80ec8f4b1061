"""One process that forks runs, for all tests here; on memory, where a run takes a tenth of a second."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.torture.harness import Scenarios, Server
from tests.torture.sources import make_sources

MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    """A directory that every user may read."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server() as process:
        yield process


@pytest.fixture(scope="session")
def found(home: Path, server: Server) -> Scenarios:
    return Scenarios(make_sources(home / "sources"), server, home / "whole")


@pytest.fixture
def place(home: Path, request: pytest.FixtureRequest) -> Path:
    """A path for one attempt after the other."""
    return home / f"attempt-{id(request)}"
