"""`make dist`: a wheel and an sdist in dist/, of the files that git tracks.

PyPI shows README without the files beside it, so there its links lead to the repository.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#)([^)\s]+)\)")


def main() -> int:
    """Build both; return 0."""
    parser = argparse.ArgumentParser(description="build a wheel and an sdist")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "dist", help="directory, removed first; by default dist/"
    )
    output = parser.parse_args().output.absolute()
    shutil.rmtree(output, ignore_errors=True)
    with tempfile.TemporaryDirectory() as place:
        tree = export(Path(place) / "shardkit")
        subprocess.run(
            [sys.executable, "-m", "build", "--quiet", "--outdir", str(output), str(tree)], check=True
        )
    return 0


def export(tree: Path) -> Path:
    """Copy the tracked files into a new directory, README for PyPI; return it."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    readme = tree / "README.md"
    readme.write_text(with_whole_links(readme.read_text()))
    return tree


def with_whole_links(text: str) -> str:
    """Return Markdown whose relative links are those of the repository, pictures as files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    source = project["urls"]["Source"]

    def whole(found: re.Match[str]) -> str:
        kind = "raw" if found[1] else "blob"
        return f"{found[1]}{found[2]}({source}/{kind}/main/{found[3]})"

    return _LINK.sub(whole, text)


if __name__ == "__main__":
    sys.exit(main())
