"""Manifests that are changed after they were written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardkit.files import manifest


def change_manifest(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the manifest in a directory says, its own digest included."""
    content = json.loads((directory / manifest.NAME).read_text())
    change(content)
    (directory / manifest.NAME).write_bytes(manifest.sign(content))
