"""Run the tests of `tests/versions` under every supported torch, each in an environment of its own; make docs/versions.md.

    python scripts/matrix.py [ROW ...] [--environments DIR] [--keep] [--check | --install | --render]

A row is "2.6" to "2.15", "newest" for the last of these, or "transformers-oldest"; by default all are run, one after
the other: about 5 GB of disk and some minutes each. A failing test is a red cell, and the next row goes on. Rows are kept
in docs/versions.json as they are done, so that single ones can be run again. What a version writes goes into
tests/data/torch, if nothing of it is there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import tomllib

ROOT = Path(__file__).parents[1]
ROWS_FILE = ROOT / "docs" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"
DATA = ROOT / "tests" / "data" / "torch"
BEGIN, END = "<!-- begin: scripts/matrix.py -->", "<!-- end -->"

PINNED = "2.13.0"
TORCH = {f"2.{minor}": {"torch": f"2.{minor}.0"} for minor in range(6, 16)}
ROWS: dict[str, dict[str, str]] = {**TORCH, "transformers-oldest": {"torch": PINNED, "transformers": "5.0.0"}}
"""Row -> what is installed in this version, whatever constraints.txt says: it has the newest transformers."""
NEWEST = list(TORCH)[-1]
FOLLOWERS = {"transformers": ("tokenizers", "huggingface-hub", "safetensors", "regex")}
"""What a package pins itself, so that constraints.txt must not."""
TOOLS = ("pytest", "hypothesis", "transformers", "zstandard")
SHOWN = ("torch", "transformers", "numpy", "safetensors", "huggingface-hub")

TESTS = ("tests/test_torch_contract.py", "tests/versions/test_reading.py", "tests/versions/test_running.py")
COLUMNS: dict[str, tuple[str, ...]] = {
    "private names": ("test_torch_contract",),
    "preshard, stock `dcp.load`": ("[stock dcp.load]",),
    "prepare, wrap, finalize": ("[three phases]",),
    "diagnose": ("[diagnose]",),
    "save, `SafeReader`, consolidate": ("[save]",),
    "reads its own, the oldest and the newest": ("test_reading",),
    "trains on from these": ("[reshard ", "[SafeReader ", "[load_into "),
}
"""Column of the table -> its tests, by a part of their names."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; default all")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-matrix", metavar="DIR")
    parser.add_argument("--keep", action="store_true", help="use environments that are there, and leave them")
    parser.add_argument(
        "--check", action="store_true", help="only run the tests: write neither data nor docs"
    )
    parser.add_argument("--install", action="store_true", help="only make the environments")
    parser.add_argument(
        "--render", action="store_true", help="only make the table from the rows that are there"
    )
    options = parser.parse_args()
    rows = [NEWEST if row == "newest" else row for row in options.rows]
    unknown = [row for row in rows if row not in ROWS]
    if unknown:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    all_green = True
    for row in [] if options.render else rows or ROWS:
        environment = options.environments / row
        if options.install:
            if failed := install(row, environment):
                parser.exit(1, f"{failed}\n")
            continue
        try:
            result = run_row(row, environment, check=options.check)
        finally:
            if not options.keep:
                shutil.rmtree(environment, ignore_errors=True)
        print("\n".join(describe(row, result)), flush=True)
        all_green &= is_green(result)
        if not options.check:
            record(row, result)
    if not options.check and not options.install:
        render()
    return 0 if all_green else 1


def run_row(row: str, environment: Path, *, check: bool) -> dict[str, Any]:
    """Install a row's versions, let them write, and run the tests; what fails is part of the result."""
    print(f"== {row}: installing into {environment}", flush=True)
    failed = install(row, environment)
    if failed:
        return {"versions": ROWS[row], "columns": {}, "failures": [failed]}
    failures = []
    if not check and row in TORCH:
        failures += write(environment, DATA / f"{ROWS[row]['torch']}.tar.xz")
    columns, failed_tests = run_tests(environment)
    return {
        "versions": versions(environment),
        "columns": columns,
        "failures": failures + failed_tests,
    }


def install(row: str, environment: Path) -> str:
    """Make an environment, unless it is whole already; return what went wrong."""
    done = environment / ".installed"
    if done.exists():
        return ""
    environment.parent.mkdir(parents=True, exist_ok=True)
    wanted = ROWS[row]
    free = {*wanted, *(name for package in wanted for name in FOLLOWERS.get(package, ()))}
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = [line for line in lines if line and line.partition("==")[0] not in free]
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    pins += [
        line
        for line in pyproject["dependency-groups"]["dev"]
        if line.partition("==")[0] not in free and "==" in line
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join([*pins, *(f"{name}=={version}" for name, version in wanted.items())]))
        constraints.flush()
        steps = (
            [sys.executable, "-m", "venv", "--clear", str(environment)],
            [
                *(
                    str(environment / "bin" / "python"),
                    "-m",
                    "pip",
                    "install",
                    "--quiet",
                    "--disable-pip-version-check",
                ),
                *("--no-compile", "--no-cache-dir"),
                *(*project["dependencies"], *project["optional-dependencies"]["torch"], *TOOLS),
            ],
        )
        # Instead of a constraint in the machine's pip configuration, which --constraint would be added to:
        # the row says which torch it is.
        variables = {**os.environ, "PIP_CONSTRAINT": constraints.name}
        for step in steps:
            ended = subprocess.run(step, env=variables, capture_output=True, text=True, check=False)
            if ended.returncode:
                return f"{' '.join(step[:4])}: {ended.stderr[-2000:]}"
    done.touch()
    return ""


def python(environment: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an environment's python on the working tree."""
    variables = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "SHARDKIT_FEW_ARCHIVES": "1"}
    command = [str(environment / "bin" / "python"), *arguments]
    return subprocess.run(
        command,
        env={**os.environ, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def write(environment: Path, archive: Path) -> list[str]:
    """Put what a version writes into an archive, unless there is one; return what went wrong."""
    if archive.exists():
        return []
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "written"
        ended = python(environment, "-m", "tests.versions.write", str(out))
        if ended.returncode:
            return [f"write: {ended.stderr[-3000:]}"]
        archive.parent.mkdir(parents=True, exist_ok=True)
        pack(out, archive)
    return []


def pack(directory: Path, archive: Path) -> None:
    """Put a directory's files into an archive that says nothing of when and by whom it was made."""
    with tarfile.open(archive, "w:xz", format=tarfile.USTAR_FORMAT) as packed:
        for path in sorted(path for path in directory.rglob("*") if path.is_file()):
            member = packed.gettarinfo(str(path), path.relative_to(directory).as_posix())
            member.mtime = member.uid = member.gid = 0
            member.uname, member.gname, member.mode = "", "", 0o644
            with path.open("rb") as file:
                packed.addfile(member, file)


def run_tests(environment: Path) -> tuple[dict[str, list[int]], list[str]]:
    """Return column -> [tests passed, tests failed], and what the failures said."""
    python(
        environment, "-c", "import torch, transformers"
    )  # what is compiled now is not within a test's time
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        # Other versions deprecate other things: here it is about what works.
        ended = python(
            environment,
            *("-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", f"--junitxml={report}", *TESTS),
        )
        if not report.exists():
            return {}, [f"pytest: {ended.stdout[-2000:]} {ended.stderr[-2000:]}"]
        cases = list(ElementTree.parse(report).iter("testcase"))
    columns = {column: [0, 0] for column in COLUMNS}
    failures = []
    for case in cases:
        name = f"{case.get('classname')}.{case.get('name')}"
        problem = next((part for part in case if part.tag in ("failure", "error")), None)
        for column, parts in COLUMNS.items():
            if any(part in name for part in parts):
                columns[column][problem is not None] += 1
        if problem is not None:
            failures.append(f"{name}: {(problem.text or '')[-1500:]}")
    return columns, failures


def versions(environment: Path) -> dict[str, str]:
    """Return what is installed, by package."""
    code = "import json, sys; from importlib.metadata import version as v; print(json.dumps([v(n) for n in sys.argv[1:]]))"
    ended = python(environment, "-c", code, *SHOWN)
    found = dict(zip(SHOWN, json.loads(ended.stdout), strict=True))
    return {"python": platform.python_version(), **found}


def is_green(result: dict[str, Any]) -> bool:
    columns = result["columns"]
    return (
        not result["failures"]
        and len(columns) == len(COLUMNS)
        and all(passed for passed, _ in columns.values())
    )


def describe(row: str, result: dict[str, Any]) -> Iterator[str]:
    """Yield lines for the terminal."""
    yield f"== {row}: {'all green' if is_green(result) else 'RED'}"
    yield from (f"   {column}: {cell(counts)}" for column, counts in result["columns"].items())
    yield from (f"   {failure}" for failure in result["failures"][:3])


def record(row: str, result: dict[str, Any]) -> None:
    """Keep a row's result among those that are there."""
    rows = json.loads(ROWS_FILE.read_text()) if ROWS_FILE.exists() else {}
    failures = [failure.partition(":")[0] for failure in result["failures"]]
    rows[row] = {**result, "failures": failures}
    ordered = {name: rows[name] for name in ROWS if name in rows}
    ROWS_FILE.write_text(json.dumps(ordered, indent=1) + "\n")


def render() -> None:
    """Put the table into docs/versions.md, between its marks."""
    rows = json.loads(ROWS_FILE.read_text())
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join([before + BEGIN, "", *table(rows), "", END]) + after)


def table(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    heads = ["torch", "transformers", *COLUMNS, "numpy", "Python"]
    yield line(heads)
    yield "|" + "---|" * len(heads)
    for result in rows.values():
        shown = result["versions"]
        cells = [cell(result["columns"].get(column, [0, 0])) for column in COLUMNS]
        yield line(
            [
                shown["torch"].partition("+")[0],
                shown.get("transformers", ""),
                *cells,
                shown.get("numpy", ""),
                shown.get("python", ""),
            ]
        )


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cell(counts: Sequence[int]) -> str:
    passed, failed = counts
    if failed or not passed:
        return f"**{failed} of {passed + failed} fail**"
    return f"ok ({passed})"


if __name__ == "__main__":
    sys.exit(main())
