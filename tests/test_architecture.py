"""The package's imports are what the picture in docs/ shows; and the check finds what it is there to find."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import architecture  # noqa: E402


def test_imports_point_down_and_the_picture_shows_them() -> None:
    assert list(architecture.problems(architecture.PACKAGE)) == []
    drawn = architecture.draw(architecture.PACKAGE)
    assert architecture.PICTURE.read_text() == drawn, "python scripts/architecture.py --draw"


def package(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "shardkit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "shardkit"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"core/a.py": "from shardkit.cli.b import f", "cli/b.py": ""},
            "core/a.py (core) imports cli/b.py (cli), which is not below it",
        ),
        (
            {"keys/a.py": "def f():\n    import shardkit.pickles.b", "pickles/b.py": ""},
            "keys/a.py (keys) imports pickles/b.py (pickles), which is not below it",
        ),
        (
            {"core/a.py": "from shardkit.core import b", "core/b.py": "from shardkit.core.a import f"},
            "a circle of imports: shardkit.core.a -> shardkit.core.b -> shardkit.core.a",
        ),
        ({"drawer/a.py": ""}, "drawer/a.py: its folder is no room of scripts/architecture.py"),
        ({f"core/m{number}.py": "" for number in range(17)}, "core has 17 files, more than 16"),
    ],
    ids=["up", "across, inside a function", "circle", "no room", "too full"],
)
def test_what_is_against_the_order_is_said(tmp_path: Path, files: dict[str, str], said: str) -> None:
    found = list(architecture.problems(package(tmp_path, {"__init__.py": "", **files})))
    assert len(found) == 1
    assert found[0] in (said, "a circle of imports: shardkit.core.b -> shardkit.core.a -> shardkit.core.b")
