"""The check of the package's own source finds what it is there to find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "forbidden.py"

BAD = (
    "import pickle",
    "from pickle import loads",
    "import marshal, os",
    "import yaml",
    "import subprocess",
    "from importlib import import_module",
    "eval('1')",
    "exec(text)",
    "__import__(name)",
    "torch.load(path)",
    "torch.load(path, weights_only=False)",
    "torch.load(path, weights_only=flag)",
    "numpy.load(path)",
    "np.load(path, allow_pickle=True)",
    "load(path, weights_only=False)",
    "shutil.unpack_archive(path)",
    "from shutil import unpack_archive",
    "archive.extractall()",
    "os.system('x')",
    "run(command, shell=True)",
)


def check(directory: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(directory)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    return done.returncode, done.stdout


def test_the_package_is_clean() -> None:
    assert check(ROOT / "shardkit") == (0, "")


def test_everything_bad_is_found(tmp_path: Path) -> None:
    for number, line in enumerate(BAD):
        (tmp_path / f"bad_{number}.py").write_text(f"def f():\n    {line}\n")
    (tmp_path / "good.py").write_text(
        "import torch\nmodel.eval()\ntorch.load(p, weights_only=True)\nre.compile('x')\n"
    )
    code, said = check(tmp_path)
    assert code == 1
    assert [number for number in range(len(BAD)) if f"bad_{number}.py:2: " not in said] == []
    assert "good.py" not in said


@pytest.mark.parametrize("file", ["layout/traced.py"])
def test_an_exception_that_nothing_needs_is_found(file: str, tmp_path: Path) -> None:
    assert f"{file}: subprocess is allowed and not used" in check(tmp_path)[1]
