"""What every torch from 2.6 on wrote, from `tests/data/torch`; made by `make matrix`, see `write`."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest

ARCHIVES = sorted(
    Path(__file__).parents[1].joinpath("data", "torch").glob("*.tar.xz"),
    key=lambda path: tuple(map(int, re.findall(r"\d+", path.name))),
)


@pytest.fixture(scope="session", params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of one version's checkpoints."""
    directory = tmp_path_factory.mktemp("written")
    with tarfile.open(request.param) as archive:
        archive.extractall(directory, filter="data")
    return directory
