"""What lies in a directory, and what its JSON says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def contents(directory: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a directory, by its path there."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def json_of(directory: Path | str, name: str = "config.json") -> Any:
    """Return what a JSON file of a directory says: its config, unless another is named."""
    return json.loads(Path(directory, name).read_text())


def edit_json(path: Path, **changes: Any) -> None:
    """Let a JSON file say something else under some of its keys."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
