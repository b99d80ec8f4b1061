"""Checkpoints as they lie in an object store: `.metadata`, and everything else in a folder beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from shardkit.files import manifest
from shardkit.files.digest import crc32
from tests.formats.dcp.samples import alter

FOLDER = "data-0123456789abcdef"
OLDER = "data-fedcba9876543210"


class Model(nn.Module):
    """Of two tensors that ranks cut, and one that they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 6, bias=False), nn.Linear(4, 4)


def nest(flat: Path, nested: Path, folder: str = FOLDER) -> None:
    """Lay a copy of a checkpoint out as in a store; its manifest describes the new `.metadata`."""
    shutil.copytree(flat, nested / folder)
    (nested / folder / ".metadata").rename(nested / ".metadata")
    place(nested, lambda name: f"{folder}/{name}")
    if (nested / folder / manifest.NAME).exists():
        describe(nested, nested / folder)


def place(directory: Path, change: Callable[[str], str]) -> None:
    """Change the paths in a `.metadata`."""

    def each(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = change(info.relative_path)

    alter(str(directory), each)


def describe(directory: Path, home: Path) -> None:
    """Have the manifest in a home record the `.metadata` of a directory."""
    data, content = (
        (directory / ".metadata").read_bytes(),
        json.loads((home / manifest.NAME).read_text()),
    )
    if "metadata" in content:
        content["metadata"] |= {"size": len(data), "crc32": crc32(data)}
        (home / manifest.NAME).write_bytes(manifest.sign(content))
