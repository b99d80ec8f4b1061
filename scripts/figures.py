"""Make the tables of docs/performance.md, docs/loading.md and benchmarks/RESULTS.md from what `benchmarks/all` has measured; `--check` only says where they differ.

    python scripts/figures.py [--check] [--results benchmarks/results.json]

A page marks the place of a table:

    <!-- figures: load -->
    ...
    <!-- end -->

What stands between is replaced where benchmarks/results.json has figures for it. Where it has none, what stands there was measured
by hand, and says so.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results.json"
PAGES = ("docs/performance.md", "docs/loading.md", "benchmarks/RESULTS.md")
_BLOCK = re.compile(r"(<!-- figures: ([a-z-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Row = Mapping[str, Any]
Report = Mapping[str, Any]
Reports = Mapping[str, Report]


class Table(NamedTuple):
    """A table of a page: the rows of some reports, one after the other."""

    reports: tuple[str, ...]
    columns: Mapping[str, Callable[[Report, Row], str]]
    labels: Mapping[str, str] = {}
    """What a row is called here, where that is not its own name."""


def number(key: str, form: str = ".2f", per: float = 1) -> Callable[[Report, Row], str]:
    """Return what a column shows of a figure; nothing where a row does not have it."""
    return lambda _, row: f"{row[key] / per if per != 1 else row[key]:{form}}" if key in row else ""


def between(_: Report, row: Row) -> str:
    """Return the smallest and the largest ratio; seconds for what has none, as that with which the others are compared."""
    if "ratio_min" in row:
        return f"{row['ratio_min']:.2f}-{row['ratio_max']:.2f}"
    return f"{row['elapsed_min_s']:.2f}-{row['elapsed_max_s']:.2f} s" if "elapsed_min_s" in row else ""


def place(report: Report, _: Row) -> str:
    """Return the kind of file system."""
    return str(report["disk"]["file_system"])


def part(_: Report, row: Row) -> str:
    """Return which of its benchmark's tables a row is of."""
    return str(row["table"])


MIB = 1 << 20
SECONDS = {"seconds": number("elapsed_s")}
TO_COPY = {**SECONDS, "to cp": number("ratio", ".3g"), "(min-max)": between}
RUNS = {"runs": number("runs", "d")}
PEAK = {"peak MiB": number("peak_bytes", ".0f", MIB)}
CPU = {"CPU s": number("cpu_s", ".1f")}
COLD = {
    "of": part,
    "read": number("read"),
    "worst rank": number("most_read"),
    "requests a GiB": number("requests_per_gib", ".0f"),
    "short ones": number("short", ".0f"),
    "MiB each": number("request_bytes", ".2f", MIB),
    "near, %": number("sequential", ".1f", 0.01),
    "files": number("files", ".0f"),
    "sent": number("sent"),
}
WHOLE = {**RUNS, **SECONDS, "(min-max)": between, **CPU, **PEAK}
CONSOLIDATE = {"file system": place, "from": part, **RUNS, **TO_COPY, **PEAK, "read": number("read")}
_WAYS = {"--profile transformers, transformers' loader": "`--profile transformers`, transformers' loader"}
TABLES = {
    "preshard": Table(
        ("preshard-memory", "preshard-disk", "preshard-xfs"),
        {"file system": place, "output": part, **RUNS, **TO_COPY, **PEAK},
    ),
    "consolidate": Table(
        ("consolidate-memory", "consolidate-disk"),
        CONSOLIDATE,
    ),
    "consolidate-many": Table(
        ("consolidate-1024-8192", "consolidate-1024-4096", "consolidate-1024-2048"), CONSOLIDATE
    ),
    "consolidate-peers": Table(
        ("consolidate-peers",),
        {**RUNS, **TO_COPY, **PEAK, "read": number("read")},
        {
            "torch + huggingface_hub": "`dcp_to_torch_save`, then huggingface_hub's `save_torch_state_dict`",
            "accelerate": "accelerate's `merge_fsdp_weights`",
            "lightning": "Lightning's consolidation",
        },
    ),
    "computed": Table(("computed",), {**RUNS, **TO_COPY, **CPU, **PEAK}),
    "computed-peers": Table(("computed-peers",), {"job": part, **RUNS, **TO_COPY, **CPU, **PEAK}),
    "experts": Table(("experts", "experts-large"), {"job": part, **RUNS, **TO_COPY, **CPU, **PEAK}),
    "load": Table(
        ("load",),
        {
            **RUNS,
            **SECONDS,
            "to read": number("ratio", ".3g"),
            "(min-max)": between,
            "beyond, MiB": number("extra_bytes", ".0f", MIB),
            "rank 0": number("source_extra_bytes", ".0f", MIB),
            "read": number("read"),
            "sent": number("sent"),
        },
        {
            "direct, pre-sharded": "`finalize`, direct, pre-sharded",
            "direct, Hub directory": "`finalize`, direct, Hub directory",
            "direct, pre-sharded for 6": "`finalize`, direct, pre-sharded for 6 ranks",
            "direct, pre-sharded, to fp32": "`finalize`, direct, pre-sharded, to fp32",
            "broadcast": "`finalize`, broadcast",
            "broadcast, to fp32": "`finalize`, broadcast, to fp32",
            "dcp.load, matching shards": "`dcp.load`, matching shards",
            "dcp.load, one file": "`dcp.load`, one file",
            "broadcast_from_rank0": "`set_model_state_dict(broadcast_from_rank0=True)`",
            "broadcast_from_rank0, fp32": "`set_model_state_dict(broadcast_from_rank0=True)`, to fp32",
            "accelerate": "accelerate's `fsdp2_load_full_state_dict`",
            "transformers": "transformers' `from_pretrained(distributed_config=...)`, which builds too",
        },
    ),
    "coldload": Table(("coldload", "coldload-many", "coldload-ep", "coldload-64"), COLD, _WAYS),
    "coldload-calls": Table(
        ("coldload-calls",), {name: COLD[name] for name in ("of", "requests a GiB", "MiB each", "near, %")}
    ),
    "coldload-store": Table(
        ("coldload-store",),
        {
            "of": part,
            "read": number("read"),
            "requests": number("requests", ".0f"),
            "waiting, s": number("waiting_s", ".2f"),
            "whole start, s": number("start_s", ".1f"),
        },
    ),
    "coldload-many": Table(
        ("coldload-many",),
        {name: COLD[name] for name in ("of", "read", "worst rank", "files", "sent")},
        _WAYS,
    ),
    "coldload-slow": Table(
        ("coldload-slow",),
        {
            "of": part,
            "read": number("read"),
            "requests": number("requests", ".0f"),
            "waiting, s": number("waiting_s", ".2f"),
        },
        _WAYS,
    ),
    "gpu": Table(
        ("gpu",),
        {
            "device": lambda _, row: str(row.get("device", "")),
            "bytes, GB": number("moved_bytes", ".2f", 1e9),
            "read, s": number("read_s"),
            "copy, s (the link)": number("copy_s"),
            "`finalize`, s": number("load_s"),
            "to the link": number("to_link"),
            "overlap": number("overlap"),
        },
    ),
    "check-source": Table(
        ("check-source-disk", "check-source-memory"),
        {
            "file system": place,
            "pairs": number("runs", "d"),
            "s without": number("elapsed_off_s"),
            "s with": number("elapsed_s"),
            "ratio": number("elapsed_ratio", ".3f"),
            "from": number("elapsed_ratio_low", ".3f"),
            "to": number("elapsed_ratio_high", ".3f"),
            "CPU ratio": number("cpu_ratio", ".3f"),
        },
        {
            "keep stock": "consolidate, same dtype",
            "reshard stock": "reshard",
            "bf16 stock": "consolidate to bf16",
            "finalize stock": "`finalize`, stock checkpoint",
            "finalize listed": "`finalize`, pre-sharded",
        },
    ),
    "links": Table(
        ("links", "links-into"),
        {
            "way": lambda report, _: "into the store" if "--into-store" in report["command"] else "out of it",
            **RUNS,
            "bytes, GB": number("moved_bytes", ".2f", 1e9),
            "one worker, s": number("alone_s"),
            "four, s": number("elapsed_s"),
            "one, MB/s": number("alone_mb_per_s", ".1f"),
            "MB/s": number("mb_per_s", ".1f"),
            "speed-up": number("speed_up"),
        },
    ),
    "scale": Table(("scale", "scale-large"), {"of": part, **WHOLE}),
    "stores": Table(
        ("stores",), {**RUNS, "MB/s": number("mb_per_s", ".0f"), "to obstore's best": number("to_best")}
    ),
    "osft": Table(
        ("osft", "osft-loading"),
        {
            "of": part,
            "targets": number("targets", "d"),
            **SECONDS,
            **CPU,
            "read, s": number("read_s"),
        },
        {"ours, gram": "shardkit, by the Gram matrix, measured", "ours, float64": "shardkit, in float64"},
    ),
}


def felt(reports: Reports) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield (what, runs, measured, range, aim) of what somebody waits for, as far as it is measured."""

    def row(report: str, table: str, what: str) -> Row | None:
        rows = reports[report]["rows"] if report in reports else ()
        return next((each for each in rows if (each["table"], each["what"]) == (table, what)), None)

    def ratio(
        what: str, found: Row | None, beside: str, aim: float
    ) -> Iterator[tuple[str, str, str, str, str]]:
        if found is not None:
            spread = f"{found['ratio_min']:.2f}-{found['ratio_max']:.2f}"
            yield what, f"{found['runs']}", f"{found['ratio']:.2f} x {beside}", spread, f"{aim:g}"

    def seconds(what: str, found: Row | None, aim: str) -> Iterator[tuple[str, str, str, str, str]]:
        if found is not None:
            spread = f"{found['elapsed_min_s']:.2f}-{found['elapsed_max_s']:.2f} s"
            yield what, f"{found['runs']}", f"{found['elapsed_s']:.2f} s", spread, aim

    kept, first, asked = (
        row("felt-memory", "preshard", each) for each in ("kept", "first time", "dry run, first time")
    )
    yield from ratio("preshard, layout kept from before", kept, "cp", 1.1)
    if kept and first and asked:
        most = kept["elapsed_s"] + asked["elapsed_s"]
        yield from seconds("preshard, the first time", first, f"{most:.2f} s: tracing, then moving")
    yield from ratio(
        "preshard, XFS, shared extents and digests", row("felt-xfs", "preshard", "kept"), "cp", 0.25
    )
    yield from ratio("consolidate, source checked", row("felt-memory", "consolidate", "whole"), "cp", 1.15)
    yield from seconds(
        "consolidate, until bytes move", row("felt-memory", "consolidate", "dry run"), "0.15 s"
    )
    yield from ratio("consolidate, many chunks of 10 KB", row("felt-memory", "chunks", "whole"), "cp", 1.5)
    opened = row("scale", "chunks", "open .metadata with all checks (inspect)")
    yield from seconds("opening a million chunks with all checks", opened, "10 s")
    hub, cast = (
        row("load", "loading", each) for each in ("direct, Hub directory", "direct, pre-sharded, to fp32")
    )
    yield from ratio("`finalize` from a Hub directory", hub, "a plain read", 1.1)
    yield from ratio("`finalize` to fp32", cast, "a plain read", 2.5)


def machines(reports: Reports) -> Iterator[str]:
    """Yield a line for each machine and day, with what was measured there."""
    found: dict[str, list[str]] = {}
    for name, report in reports.items():
        of = report["machine"]
        packages = of["packages"]
        text = (
            f"{of['cores']} cores of {of['cpu']}, {of['memory_bytes'] / 2**30:.0f} GiB, Linux {of['kernel']}, Python {of['python']}, "
            f"{', '.join(f'{each} {packages[each]}' for each in ('torch', 'transformers') if each in packages)}, "
            f"coreutils {of['coreutils']}, {report['date']}"
        )
        found.setdefault(text, []).append(name)
    for text, names in found.items():
        yield wrapped(f"- {text}: {', '.join(names)}", "  ")


def wrapped(text: str, indent: str = "") -> str:
    """Return text in lines that are short enough for the docs."""
    return textwrap.fill(
        text, width=118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of Markdown."""
    head = [*header]
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def commands(reports: Iterable[Report]) -> str:
    """Return how some reports came about, and what they had to leave out."""
    given = dict.fromkeys(report["command"] for report in reports)
    lines = [line if len(line) <= 118 else line.replace(" --", " \\\n    --") for line in given]
    missing = dict.fromkeys(each for report in reports for each in report["left_out"])
    said = "\n" + wrapped(f"Left out: {'; '.join(missing)}.") + "\n" if missing else ""
    return "\n" + "\n".join(["```bash", *lines, "```"]) + "\n" + said


def block(name: str, reports: Reports) -> str | None:
    """Return what stands in a page's block, None if nothing of it is measured."""
    if name == "machines":
        return "\n".join(machines(reports)) + "\n" if reports else None
    if name == "felt":
        rows = [*felt(reports)]
        return table(("what", "runs", "median", "(min-max)", "aim"), rows) if rows else None
    spec = TABLES[name]
    found = [reports[each] for each in spec.reports if each in reports]
    if name == "computed":  # a row for each job; the copies are in its ratio
        found = [
            {
                **each,
                "rows": [{**row, "what": row["table"]} for row in each["rows"] if row["what"] == "shardkit"],
            }
            for each in found
        ]
    if name == "gpu":  # the same script measures ranks without a GPU
        found = [{**each, "rows": [row for row in each["rows"] if "device" in row]} for each in found]
    if not found:
        return None
    whats = ["what", *spec.columns]
    lines = [
        [_label(spec, row), *(cell(report, row) for cell in spec.columns.values())]
        for report in found
        for row in report["rows"]
    ]
    filled = [at for at, _ in enumerate(whats) if any(line[at] for line in lines)]
    return table([whats[at] for at in filled], [[line[at] for at in filled] for line in lines]) + commands(
        found
    )


def _label(spec: Table, row: Row) -> str:
    what = str(row["what"])
    return spec.labels.get(what, f"`{what}`" if what.startswith("--") else what)


def made(text: str, reports: Reports) -> str:
    """Return a page with the tables of today."""

    def replace(match: re.Match[str]) -> str:
        found = block(match[2], reports)
        return match[0] if found is None else f"{match[1]}{found}{match[4]}"

    return _BLOCK.sub(replace, text)


def by_hand(text: str, reports: Reports) -> list[str]:
    """Return the blocks of a page for which nothing is in the results."""
    return [match[2] for match in _BLOCK.finditer(text) if block(match[2], reports) is None]


def main() -> None:
    words = sys.argv[1:]
    results = Path(words[words.index("--results") + 1]) if "--results" in words else RESULTS
    reports = json.loads(results.read_text())["reports"]
    pages = {name: (ROOT / name).read_text() for name in PAGES}
    old = [name for name, text in pages.items() if made(text, reports) != text]
    hand = [f"{name}: {each}" for name, text in pages.items() for each in by_hand(text, reports)]
    if hand:
        print(f"by hand, not in {results.name}: {', '.join(hand)}")
    if "--check" in words:
        sys.exit(f"run scripts/figures.py: {', '.join(old)}" if old else 0)
    for name in old:
        (ROOT / name).write_text(made(pages[name], reports))


if __name__ == "__main__":
    main()
