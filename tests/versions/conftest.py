"""What every torch from 2.6 on wrote, from `tests/data/torch`; made by `make matrix`, see `write`."""

from __future__ import annotations

import os
import re
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

ARCHIVES = sorted(
    Path(__file__).parents[1].joinpath("data", "torch").glob("*.tar.xz"),
    key=lambda path: tuple(map(int, re.findall(r"\d+", path.name))),
)
OWN = [path for path in ARCHIVES if path.name == f"{metadata.version('torch').partition('+')[0]}.tar.xz"]
"""What the installed torch wrote."""
FEW = list(dict.fromkeys([ARCHIVES[0], *OWN, ARCHIVES[-1]]))
"""The oldest, the installed one and the newest: what `scripts/matrix.py` reads with every version."""


@pytest.fixture(
    scope="session",
    params=FEW if "SHARDKIT_FEW_ARCHIVES" in os.environ else ARCHIVES,
    ids=lambda path: path.name.removesuffix(".tar.xz"),
)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of one version's checkpoints."""
    directory = tmp_path_factory.mktemp("written")
    unpack(request.param, directory)
    return directory


def unpack(path: Path, directory: Path) -> None:
    """Unpack a version's archive."""
    with tarfile.open(path) as archive:
        archive.extractall(directory, filter="data")
