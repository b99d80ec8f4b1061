"""What the benchmarks share: commands, copies, and the medians of runs that alternate with copies."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
TORCH = "import resource, torch; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"

Found = dict[str, float]
"""What one run measured: `elapsed_s`, `peak_bytes` and whatever else its table shows."""
Variant = Callable[[Path], Found]
"""Makes an output at a path that does not exist."""


class Run(NamedTuple):
    """One run of a variant."""

    found: Found
    copy_s: float
    """Of the `cp -r` beside it."""
    extra_bytes: int
    """On the file system, after it."""

    @property
    def ratio(self) -> float:
        """Its seconds to those of the copy."""
        return self.found["elapsed_s"] / self.copy_s


def common_options(description: str | None, *, gigabytes: float, runs: int) -> argparse.ArgumentParser:
    """Return a parser of what every comparison takes, with its defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gigabytes", type=float, default=gigabytes)
    parser.add_argument("--runs", type=int, default=runs)
    return parser


def work_in(directory: Path) -> Path:
    """Make an empty directory in another one."""
    work = directory / "shardkit-benchmark"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    return work


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def process(command: list[str], **variables: str) -> Found:
    """Measure a whole process, from its start to the end of a `sync`: seconds, its or a child's peak memory, CPU seconds."""
    os.sync()
    begun = time.monotonic()
    child = os.posix_spawn(
        command[0],
        command,
        {**os.environ, **variables},
        file_actions=[(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)],
    )
    _, status, used = os.wait4(child, 0)
    os.sync()
    elapsed_s = time.monotonic() - begun
    if status:
        sys.exit(f"{' '.join(command)}: {status}")
    return {
        "elapsed_s": elapsed_s,
        "peak_bytes": used.ru_maxrss * 1024,
        "cpu_s": used.ru_utime + used.ru_stime,
    }


def copy(source: Path, output: Path, *flags: str) -> float:
    os.sync()
    begun = time.monotonic()
    run(["cp", "-r", *flags, str(source), str(output)])
    os.sync()
    return time.monotonic() - begun


def used_bytes(path: Path) -> int:
    """Bytes in use once the file system has come to rest: some free a removed file's blocks later."""
    used = -1
    while True:
        os.sync()
        status = os.statvfs(path)
        before, used = used, (status.f_blocks - status.f_bfree) * status.f_frsize
        if before == used:
            return used
        time.sleep(0.3)


def can_reflink(work: Path) -> bool:
    (work / "a").write_bytes(bytes(1 << 16))
    command = ["cp", "--reflink=always", str(work / "a"), str(work / "b")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def alternate(source: Path, output: Path, variants: Mapping[str, Variant], runs: int) -> dict[str, list[Run]]:
    """Run every variant in turn, again and again, each beside a `cp -r` of `source`.

    The copy is just before the variant, and in every second round just after: memory that has been free for a
    while is slower to write to, which the first of the two has to bear.
    """
    rows: dict[str, list[Run]] = {name: [] for name in variants}
    for number in range(runs):
        for name, variant in variants.items():
            if number % 2 == 0:
                copied = copied_once(source, output)
                found, extra = made_once(variant, output)
            else:
                found, extra = made_once(variant, output)
                copied = copied_once(source, output)
            rows[name].append(Run(found, copied, extra))
    return rows


def copied_once(source: Path, output: Path) -> float:
    seconds = copy(source, output, "--reflink=never")
    shutil.rmtree(output)
    return seconds


def made_once(variant: Variant, output: Path) -> tuple[Found, int]:
    """Return what a variant measured, and the bytes that it took on the file system."""
    before = used_bytes(output.parent)
    found = variant(output)
    extra = used_bytes(output.parent) - before
    shutil.rmtree(output, ignore_errors=True)
    return found, extra


def copies(rows: Mapping[str, list[Run]]) -> str:
    """Return the seconds of all copies as the end of a table's first line."""
    seconds = [found.copy_s for row in rows.values() for found in row]
    return f"{statistics.median(seconds):8.2f} {1:6.2f} {min(seconds):5.2f}-{max(seconds):.2f} s"


def seconds_and_ratio(row: list[Run]) -> str:
    """Return the medians, and the smallest and largest ratio."""
    ratios = [found.ratio for found in row]
    spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
    return f"{median(row, 'elapsed_s'):8.2f} {statistics.median(ratios):6.2f} {spread:>12}"


def median(row: list[Run], key: str) -> float:
    return statistics.median(one.found[key] for one in row)
