"""Factors that an earlier version pre-sharded, and the model that they were computed of: see tests/data/osft/make.py."""

from __future__ import annotations

import tarfile
from pathlib import Path

ARCHIVE = Path(__file__).parents[1] / "data" / "osft" / "presharded.tar.xz"


def unpacked(folder: Path) -> Path:
    """Put the model into `dense`, its factors for two ranks into `factors`; return the folder."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder
