"""Draw the chart of README from what `benchmarks/all` has measured; `--check` only says whether they are of today.

python scripts/charts.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS.parent / "benchmarks" / "results.json"
STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600 } .small { font-size: 11px; fill: #57606a }
.ours { fill: #1f883d } .other { fill: #afb8c1 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .small { fill: #9198a1 } .ours { fill: #3fb950 } .other { fill: #656c76 } }
</style>"""


class Bars(NamedTuple):
    """A group of bars: rows of one report."""

    title: str
    units: tuple[str, str]
    """What is said above the bars of time and of memory."""
    report: str
    """Of benchmarks/results.json."""
    rows: dict[str, str]
    """A row's name -> what it is called here."""
    memory: str
    """Key of the memory, in bytes."""


CHARTS = (
    Bars(
        "32 trained shards to a Hub model",
        ("time, a plain copy = 1; less is better", "peak memory, MiB"),
        "consolidate-peers",
        {
            "--digest crc32": "shardkit consolidate",
            "lightning": "Lightning's consolidation",
            "torch + huggingface_hub": "dcp_to_torch_save, then save",
            "accelerate": "accelerate's merge_fsdp_weights",
        },
        "peak_bytes",
    ),
    Bars(
        "Weights into 4 wrapped ranks",
        ("time, a plain read = 1; less is better", "memory beyond the shard, MiB"),
        "load",
        {
            "direct, pre-sharded": "shardkit finalize, pre-sharded",
            "direct, Hub directory": "shardkit finalize, Hub directory",
            "broadcast": "shardkit finalize, broadcast",
            "direct, pre-sharded, to fp32": "shardkit finalize, bf16 to fp32",
            "dcp.load, matching shards": "stock dcp.load of matching shards",
            "dcp.load, one file": "stock dcp.load of one file",
            "broadcast_from_rank0": "torch's broadcast_from_rank0",
            "accelerate": "accelerate's fsdp2_load_full_state_dict",
        },
        "extra_bytes",
    ),
)


def figures(bars: Bars, reports: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yield (name, ratio, MiB) of each bar; a peer that was not there has none."""
    rows = {row["what"]: row for row in reports[bars.report]["rows"]}
    for what, name in bars.rows.items():
        if what in rows:
            yield name, rows[what]["ratio"], rows[what][bars.memory] / 2**20


def speed(reports: Mapping[str, Any]) -> str:
    """Return the chart of time and memory beside the peers."""
    left, wide, high = 270, 190, 22
    parts, y = list[str](), 24
    for bars in CHARTS:
        rows = list(figures(bars, reports))
        parts.append(f'<text class="title" x="10" y="{y}">{escape(bars.title)}</text>')
        for x, unit in zip((left, left + wide + 80), bars.units, strict=True):
            parts.append(f'<text class="small" x="{x}" y="{y}">{unit}</text>')
        for name, ratio, memory in rows:
            y += high
            kind = "ours" if name.startswith("shardkit") else "other"
            parts.append(f'<text x="10" y="{y + 4}">{escape(name)}</text>')
            for x, value, most, shown in (
                (left, ratio, max(row[1] for row in rows), f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"),
                (left + wide + 80, memory, max(row[2] for row in rows), f"{memory:,.0f}"),
            ):
                width = max(value / most * wide, 1.5)
                parts.append(
                    f'<rect class="{kind}" x="{x}" y="{y - 8}" width="{width:.1f}" height="14" rx="2"/>'
                )
                parts.append(f'<text class="small" x="{x + width + 6:.1f}" y="{y + 3}">{shown}</text>')
        y += 44
    return _svg(left + 2 * wide + 140, y - 20, "Time and memory beside other ways", parts)


def _svg(width: int, height: int, label: str, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{label}">'
    return "\n".join([head, STYLE, *parts, "</svg>\n"])


def main() -> None:
    pictures = {
        "speed.svg": speed(json.loads(RESULTS.read_text())["reports"]),
    }
    old = [name for name, text in pictures.items() if not _is(DOCS / name, text)]
    if "--check" in sys.argv[1:]:
        sys.exit(f"run scripts/charts.py: {', '.join(old)}" if old else 0)
    for name in old:
        (DOCS / name).write_text(pictures[name])


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    main()
