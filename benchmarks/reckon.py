"""What a job of a terabyte and more takes on many workers, reckoned from measured constants: the tables of benchmarks/SCALE.md,
and that of docs/clusters.md.

    python benchmarks/reckon.py [CONSTANTS.json]     prints the tables; default: benchmarks/constants.json
    python benchmarks/reckon.py --write              puts them into these pages; --check says whether they are there

For figures of your own copy benchmarks/constants.json, put in what you have measured, and name the copy.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
CONSTANTS = HERE / "constants.json"
PAGES = (HERE / "SCALE.md", HERE.parent / "docs" / "clusters.md")
_BLOCK = re.compile(r"(<!-- reckoned: ([a-z]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
MB, MIB, GIB = 10**6, 1 << 20, 1 << 30

Model = Mapping[str, Any]


class Constants:
    """The constants by name, and the models."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.rows: Mapping[str, Mapping[str, Any]] = data["constants"]
        self.models: Mapping[str, Model] = data["models"]
        self.workers: list[int] = data["workers"]

    def __getitem__(self, name: str) -> float:
        return float(self.rows[name]["value"])


class Job(NamedTuple):
    """What one verb does with a model."""

    verb: str
    num_read_files: int
    num_records: int
    """Whose descriptions one worker reads one by one; to a part they come with the data. Safetensors have one for a file."""
    num_written_files: int
    plan_s: float
    plan_bytes: float


def jobs(model: Model, of: Constants) -> tuple[Job, Job]:
    """Return preshard and consolidate of a model."""
    chunks = model["chunks"] / 1e6
    return (
        Job("preshard", model["files"], 0, model["ranks"], model["plan_s"], model["plan_bytes"]),
        Job(
            "consolidate",
            model["ranks"],
            model["chunks"],
            ceil(model["bytes"] / of["hub_file_bytes"]),
            chunks * of["plan_back_s_per_million_chunks"],
            chunks * of["plan_back_bytes_per_million_chunks"],
        ),
    )


def reading(job: Job, model: Model, workers: int, of: Constants) -> tuple[float, float]:
    """Return the GETs of descriptions, by all workers together, and those of data."""
    headers = job.num_read_files * of["requests_per_header"] * workers
    headers += job.num_records if workers == 1 else 0
    return headers, ceil(model["bytes"] / of["request_bytes"])


def writing(job: Job, model: Model, of: Constants) -> float:
    """Return the PUTs: the parts, the beginning, the end and the note of each file, and the commit."""
    parts = max(ceil(model["bytes"] / of["part_bytes"]), job.num_written_files)
    return parts + 3 * job.num_written_files + 1


def seconds(job: Job, model: Model, workers: int, rate: float, of: Constants, *, is_store: bool) -> float:
    """Return what the slowest worker takes: it plans alone, and moves its share of the files."""
    files = max(job.num_written_files, 1)
    share = model["bytes"] * ceil(files / workers) / files  # files are not divided
    plan = job.plan_s
    if is_store:
        plan += reading(job, model, workers, of)[0] / workers / of["small_requests_per_s"]
    return plan + share / (rate * MB)


def time_table(of: Constants) -> str:
    rows = []
    for size, model in of.models.items():
        for job in jobs(model, of):
            for workers in of.workers:
                disk = of[f"{job.verb}_disk_mb_per_s"]
                ways = (
                    (disk, False),
                    (min(disk, of["store_read_mb_per_s"]), True),
                    (min(disk, of["store_write_mb_per_s"]), False),
                )
                took = [duration(seconds(job, model, workers, rate, of, is_store=far)) for rate, far in ways]
                rows.append(
                    [
                        size,
                        job.verb,
                        str(workers),
                        duration(job.plan_s),
                        f"{job.plan_bytes / GIB:.1f} GiB",
                        *took,
                    ]
                )
    header = (
        "model",
        "verb",
        "workers",
        "planning",
        "its memory",
        "disk to disk",
        "store to disk",
        "disk to store",
    )
    return table(header, rows)


def request_table(of: Constants) -> str:
    rows = []
    get, put = of["dollars_per_1000_get"] / 1000, of["dollars_per_1000_put"] / 1000
    for size, model in of.models.items():
        for job in jobs(model, of):
            for workers in of.workers:
                headers, data = reading(job, model, workers, of)
                lists = workers * ceil(job.num_read_files / 1000)
                puts = writing(job, model, of)
                costs = headers * get, data * get + lists * put, puts * put + job.num_written_files * get
                rows.append(
                    [
                        size,
                        job.verb,
                        str(workers),
                        *map(count, (headers, data, puts)),
                        *(f"{each:,.2f} $" for each in costs),
                    ]
                )
    header = (
        *("model", "verb", "workers", "GET, descriptions", "GET, data", "PUT"),
        *("descriptions", "reading data, lists", "writing"),
    )
    return table(header, rows)


def place_table(of: Constants) -> str:
    """The size of requests where many files are read in turn, as shardkit/files/remote/ranges.py reckons it."""
    rows = []
    memory = of["read_memory_bytes"]
    for places in (1, 32, 256, 1024):
        size = max(min(of["request_bytes"], memory // (places + 2)), of["least_request_bytes"])
        if size >= 2 * MIB and 2 * places * size > memory:
            size = size // MIB * MIB
        gets = ceil(1e12 / size)
        needed = of["request_bytes"] * (places + 2)
        rows.append(
            [
                str(places),
                f"{size / MIB:.2f} MiB",
                count(gets),
                f"{gets / 1000 * of['dollars_per_1000_get']:.2f} $",
                f"{needed / GIB:.2f} GiB",
            ]
        )
    header = ("places read in turn", "a request", "GETs for 1 TB", "cost", "memory for requests of 8 MiB")
    return table(header, rows)


def constant_table(of: Constants) -> str:
    rows = [
        [row["means"], f"{row['value']:,} {row['unit']}".strip(), row["measured"]] for row in of.rows.values()
    ]
    return table(("constant", "value", "from"), rows)


def model_table(of: Constants) -> str:
    rows = [
        [
            name,
            f"{m['tensors']:,}",
            f"{m['files']:,}",
            f"{m['ranks']:,}",
            f"{m['chunks']:,}",
            f"{m['plan_s']:g} s, {m['plan_bytes'] / MIB:.0f} MiB",
            m["measured"],
        ]
        for name, m in of.models.items()
    ]
    return table(("model", "tensors", "files", "ranks", "chunks", "planning preshard", "measured by"), rows)


def limit_table(of: Constants) -> str:
    """What grows with the number of chunks and of files: as measured, and ten times that."""
    rows = []
    for name, (unit, factor) in {
        "metadata_bytes_per_million_chunks": ("MiB", MIB),
        "open_s_per_million_chunks": ("s", 1),
        "open_bytes_per_million_chunks": ("MiB", MIB),
        "plan_back_s_per_million_chunks": ("s", 1),
        "plan_back_bytes_per_million_chunks": ("MiB", MIB),
        "torch_unpickle_s_per_million_chunks": ("s", 1),
        "torch_unpickle_bytes_per_million_chunks": ("MiB", MIB),
    }.items():
        one = of[name] / factor
        rows.append(
            [
                of.rows[name]["means"].removesuffix(", for a million chunks"),
                f"{one:,.1f} {unit}",
                f"{10 * one:,.0f} {unit}",
            ]
        )
    return table(("what", "1 M chunks, measured", "10 M chunks, extrapolated"), rows)


def duration(value: float) -> str:
    """Return seconds in a unit that can be read."""
    if value < 100:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def count(value: float) -> str:
    return f"{value / 1e6:,.1f} M" if value >= 1e6 else f"{value:,.0f}"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = [*header]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))


TABLES = {
    "constants": constant_table,
    "models": model_table,
    "time": time_table,
    "requests": request_table,
    "places": place_table,
    "limits": limit_table,
}


def page(text: str, of: Constants) -> str:
    """Return a page with the tables of some constants."""
    return _BLOCK.sub(lambda match: f"{match[1]}{TABLES[match[2]](of)}{match[4]}", text)


def main() -> None:
    files = [word for word in sys.argv[1:] if not word.startswith("--")]
    of = Constants(json.loads(Path(files[0] if files else CONSTANTS).read_text()))
    if "--check" in sys.argv or "--write" in sys.argv:
        old = [path for path in PAGES if page(path.read_text(), of) != path.read_text()]
        if "--check" in sys.argv:
            sys.exit("run benchmarks/reckon.py --write" if old else 0)
        for path in old:
            path.write_text(page(path.read_text(), of))
        return
    for name, make in TABLES.items():
        print(f"{name}\n\n{make(of)}")


if __name__ == "__main__":
    main()
