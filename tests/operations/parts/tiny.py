"""The tiny model's output for four ranks: by parts, and all but committed."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.errors import ResourceError
from shardkit.files.output.local import LocalOutput
from tests.operations.stops import failing


def preshard(model: Path, out: Path, part: str | None = None, **options: Any) -> shardkit.PreshardResult:
    return shardkit.preshard(model, out, world_size=4, layout="declared", part=part, **options)


def all_but_commit(model: Path, out: Path, part: str | None = None, **options: Any) -> None:
    """Run a part, or all in one process, that dies before it commits, like a process that is killed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalOutput, "_adopt", failing(errno.ENOSPC))
        with pytest.raises(ResourceError, match="No space"):
            preshard(model, out, part, **options)
