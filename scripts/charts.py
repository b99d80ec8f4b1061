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
    report: str
    """Of benchmarks/results.json."""
    table: str | None
    """The rows of one model and mesh; None for all."""
    values: tuple[tuple[str, str, float], tuple[str, str, float]]
    """What is said above the bars, the key of their values, and what is one unit of them."""
    rows: dict[str, str]
    """A row's name -> what it is called here."""


CHARTS = (
    Bars(
        "32 trained shards to a Hub model",
        "consolidate-peers",
        None,
        (("time, a plain copy = 1; less is better", "ratio", 1), ("peak memory, MiB", "peak_bytes", 2**20)),
        {
            "--digest crc32": "shardkit consolidate",
            "lightning": "Lightning's consolidation",
            "torch + huggingface_hub": "dcp_to_torch_save, then save",
            "accelerate": "accelerate's merge_fsdp_weights",
        },
    ),
    Bars(
        "16 ranks start a small dense model, each on its own node (simulated)",
        "coldload-many",
        "dense, fsdp, 16 ranks",
        (
            ("most that a rank reads, its shard = 1; less is better", "most_read", 1),
            ("requests of at most 1 MiB for a GiB of shards", "requests_per_gib", 1),
        ),
        {
            "shardkit, pre-sharded": "shardkit, pre-sharded",
            "pre-sharded, stock dcp.load": "shardkit, pre-sharded, stock dcp.load",
            "shardkit, Hub files": "shardkit, Hub files",
            "transformers, Hub files": "transformers, Hub files",
            "torch's HF reader": "torch's HF reader, Hub files",
            "accelerate, rank 0 broadcasts": "accelerate, rank 0 broadcasts",
        },
    ),
)


def figures(bars: Bars, reports: Mapping[str, Any]) -> Iterator[tuple[str, list[float]]]:
    """Yield the name and the two values of each bar; a peer that was not there has none."""
    rows = {row["what"]: row for row in reports[bars.report]["rows"] if bars.table in (None, row["table"])}
    for what, name in bars.rows.items():
        if what in rows:
            yield name, [rows[what][key] / unit for _, key, unit in bars.values]


def speed(reports: Mapping[str, Any]) -> str:
    """Return the chart of what shardkit's ways and those of others cost."""
    left, wide, high, gap = 270, 190, 22, 130
    parts, y = list[str](), 24
    for bars in CHARTS:
        rows = list(figures(bars, reports))
        most = [max(values[column] for _, values in rows) for column in range(2)]
        parts.append(f'<text class="title" x="10" y="{y}">{escape(bars.title)}</text>')
        y += high
        for column, (said, _, _) in enumerate(bars.values):
            parts.append(f'<text class="small" x="{left + column * (wide + gap)}" y="{y - 4}">{said}</text>')
        for name, values in rows:
            y += high
            kind = "ours" if name.startswith("shardkit") else "other"
            parts.append(f'<text x="10" y="{y + 4}">{escape(name)}</text>')
            for column, value in enumerate(values):
                x, width = left + column * (wide + gap), max(value / most[column] * wide, 1.5)
                parts.append(
                    f'<rect class="{kind}" x="{x}" y="{y - 8}" width="{width:.1f}" height="14" rx="2"/>'
                )
                shown = f"{value:.1f}" if value < 10 else f"{value:,.0f}"
                parts.append(f'<text class="small" x="{x + width + 6:.1f}" y="{y + 3}">{shown}</text>')
        y += 44
    return _svg(
        left + 2 * wide + gap + 90, y - 20, "What consolidating and starting cost beside other ways", parts
    )


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
