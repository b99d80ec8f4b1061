"""`make dist`: a wheel and an sdist in dist/, of the files that git tracks.

An index shows README without the files beside it. There its links lead to the public source, `SOURCE` in
shardkit/_version.py; while that is empty, they are plain text. With it, dist/ also has the extension of `hf`.
"""

from __future__ import annotations

import argparse
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE: str = runpy.run_path(str(ROOT / "shardkit" / "_version.py"))["SOURCE"]
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
    if SOURCE:
        extension(output / "hf-shardkit", SOURCE)
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


def with_whole_links(text: str, source: str = SOURCE) -> str:
    """Return Markdown whose relative links are those of a repository, pictures as files; plain text without one."""

    def whole(found: re.Match[str]) -> str:
        kind = "raw" if found[1] else "blob"
        return f"{found[1]}{found[2]}({source}/{kind}/main/{found[3]})" if source else found[2][1:-1]

    return _LINK.sub(whole, text)


def extension(place: Path, source: str) -> None:
    """Write the repository that `hf extensions install` reads, for a public address of the source."""
    shutil.copytree(ROOT / "packaging" / "hf-shardkit", place)
    project = place / "pyproject.toml"
    project.write_text(project.read_text().replace("https://SOURCE", source))


if __name__ == "__main__":
    sys.exit(main())
