"""What the benchmarks share: commands, copies, the medians of runs that alternate with copies, and the form of what they report.

Each benchmark takes `--json FILE` and writes one object:

    benchmark   its name
    command     what was typed, DIRECTORY in place of the directory
    date        of the measurement
    machine     processor, cores, memory, kernel, load, versions
    disk        kind and size of the file system that DIRECTORY is on
    left_out    what was not measured, and why
    rows        {"table": ..., "what": ..., "elapsed_s": ..., ...}; the ends of keys are units: `_s`, `_bytes`

`ratio` is the median of the ratios to what lay beside each run: `cp -r`, or a plain read.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed has been compiled before
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
    json_option(parser)
    return parser


def json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured there, too")


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


def wait_for(children: list[int]) -> None:
    """Wait for forked ranks; end the others where one fails: they may wait for it for ever."""
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank failed: {status}")


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
    while is slower to write to, which the first of the two has to bear. For the same reason every second pair of rounds
    has the variants in reverse.
    """
    rows: dict[str, list[Run]] = {name: [] for name in variants}
    for number in range(runs):
        for name, variant in variants.items() if number % 4 < 2 else reversed(variants.items()):
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


def spread(values: Sequence[float], name: str, unit: str = "") -> Found:
    """Return the median, the smallest and the largest of some values, under `name` and `name_min`, `name_max` with their unit."""
    return {
        f"{name}{unit}": statistics.median(values),
        f"{name}_min{unit}": min(values),
        f"{name}_max{unit}": max(values),
    }


def copies(rows: Mapping[str, list[Run]]) -> Found:
    """Return the figures of all copies."""
    seconds = [found.copy_s for row in rows.values() for found in row]
    return {"runs": len(seconds), **spread(seconds, "elapsed", "_s"), "ratio": 1}


def figures(row: list[Run]) -> Found:
    """Return the medians of everything that the runs measured, and their ratios to the copies."""
    numbers = [
        key for key, value in row[0].found.items() if type(value) in (int, float) and key != "elapsed_s"
    ]
    medians = {key: median(row, key) for key in numbers}
    return {
        "runs": len(row),
        **spread([one.found["elapsed_s"] for one in row], "elapsed", "_s"),
        **spread([one.ratio for one in row], "ratio"),
        "copy_s": statistics.median(one.copy_s for one in row),
        **medians,
        "extra_bytes": statistics.median(one.extra_bytes for one in row),
    }


def median(row: list[Run], key: str) -> float:
    return statistics.median(one.found[key] for one in row)


class Report:
    """What a benchmark has measured: each row is printed as it comes, all of them are written at the end of `with`."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Begin.

        Args:
            args: of `common_options`, or with `directory` and `json`.
        """
        self._path: Path | None = args.json
        where: Path | None = getattr(args, "directory", None)
        self.rows: list[dict[str, object]] = []
        self.left_out: list[str] = []
        self._about = {
            "benchmark": Path(sys.argv[0]).stem,
            "command": command(where),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": machine(),
            "disk": disk(where) if where else None,
        }

    def add(self, table: str, what: str, **found: object) -> None:
        """Add a row of a table, and print it."""
        self.rows.append({"table": table, "what": what, **found})
        ends = ("_min", "_max", "_min_s", "_max_s")
        shown = [text(key, value) for key, value in found.items() if not key.endswith(ends)]
        print(f"{table}: {what}: {', '.join(shown)}", flush=True)

    def leave_out(self, what: str, why: str) -> None:
        """Say that something is not measured."""
        self.left_out.append(f"{what}: {why}")
        print(f"left out: {what}: {why}", flush=True)

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._path is not None:
            about = {**self._about, "left_out": self.left_out, "rows": self.rows}
            self._path.write_text(json.dumps(about, indent=1) + "\n")


def text(key: str, value: object) -> str:
    """Return a figure with its name, in the unit that the end of the key tells."""
    if not isinstance(value, int | float):
        return f"{key} {value}"
    if key.endswith("_bytes"):
        return f"{key[:-6]} {value / 2**20:.1f} MiB"
    if key.endswith("_s") and not key.endswith("_per_s"):
        return f"{key[:-2]} {value:.3g} s"
    return f"{key} {value:.4g}"


def machine() -> dict[str, object]:
    """Describe this machine, as far as it decides how fast something is."""
    cpu = [line.partition(":")[2].strip() for line in lines("/proc/cpuinfo") if line.startswith("model name")]
    packages = {}
    for name in (
        "torch",
        "safetensors",
        "transformers",
        "numpy",
        "isal",
        "accelerate",
        "lightning",
        "obstore",
    ):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "cpu": cpu[0] if cpu else os.uname().machine,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": os.uname().release,
        "load": round(os.getloadavg()[0], 1),
        "python": sys.version.split()[0],
        "coreutils": run(["cp", "--version"]).splitlines()[0].split()[-1],
        "packages": packages,
    }


def lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def command(directory: Path | None) -> str:
    """Return what was typed, without `--json`, and with DIRECTORY for the directory."""
    words, left = [], iter(sys.argv[1:])
    for word in left:
        if word == "--json":
            next(left)
        elif not word.startswith("--json="):
            words.append("DIRECTORY" if directory is not None and word == str(directory) else word)
    return f"python benchmarks/{Path(sys.argv[0]).name} {shlex.join(words)}"


def disk(directory: Path) -> dict[str, object]:
    """Describe the file system that a directory, which need not exist, is on."""
    there = next(each for each in (directory, *directory.absolute().parents) if each.exists())
    kind = run(["stat", "-f", "-c", "%T", str(there)]).strip()
    usage = shutil.disk_usage(there)
    return {
        "file_system": {"ext2/ext3": "ext4"}.get(kind, kind),
        "size_bytes": usage.total,
        "free_bytes": usage.free,
    }
