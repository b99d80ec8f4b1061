"""The tables of the docs are what the measurements and constants give, and change with them."""

from __future__ import annotations

import json
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "benchmarks")]
import charts  # noqa: E402
import figures  # noqa: E402
import reckon  # noqa: E402

RESULTS: dict[str, Any] = json.loads(figures.RESULTS.read_text())
CONSTANTS: dict[str, Any] = json.loads(reckon.CONSTANTS.read_text())


def suite() -> dict[str, Any]:
    loader = SourceFileLoader("benchmarks_all", str(ROOT / "benchmarks" / "all"))
    spec = spec_from_loader("benchmarks_all", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return dict(module.SUITE)


def report(**row: object) -> dict[str, Any]:
    machine = {**RESULTS["reports"]["load"]["machine"], "cpu": "a | b"}
    about = {
        "command": "python benchmarks/x.py DIRECTORY",
        "date": "2026-01-01",
        "disk": {"file_system": "xfs"},
    }
    return {**about, "machine": machine, "left_out": ["accelerate: not installed"], "rows": [row]}


def test_pages_show_what_was_measured() -> None:
    for name in figures.PAGES:
        text = (ROOT / name).read_text()
        assert figures.made(text, RESULTS["reports"]) == text, "python scripts/figures.py"
    assert charts.speed(RESULTS["reports"]) == (ROOT / "docs/speed.svg").read_text(), (
        "python scripts/charts.py"
    )


def test_every_benchmark_has_a_table() -> None:
    shown = {name for table in figures.TABLES.values() for name in table.reports}
    assert {name for name in suite() if not name.startswith("felt-")} == shown
    assert {*RESULTS["reports"]} <= {*suite()}


def test_every_table_has_a_place_and_a_benchmark() -> None:
    text = "".join((ROOT / name).read_text() for name in figures.PAGES)
    places = [match[2] for match in figures._BLOCK.finditer(text)]
    assert sorted(places) == sorted([*figures.TABLES, "felt", "machines"])
    for each in suite().values():
        assert (ROOT / "benchmarks" / f"{each.script}.py").exists()


def test_a_measurement_replaces_what_stood_there_and_nothing_else() -> None:
    page = "a\n<!-- figures: preshard -->\nby hand\n<!-- end -->\nb\n<!-- figures: load -->\nby hand\n<!-- end -->\n"
    row = {"table": "same|bytes", "what": "--digest none", "runs": 7, "elapsed_s": 1.25, "ratio": 0.5}
    found = report(**row, ratio_min=0.4, ratio_max=0.625, peak_bytes=3 << 20)
    made = figures.made(page, {"preshard-xfs": found})
    assert "| `--digest none` | xfs | same\\|bytes | 7 | 1.25 | 0.5 | 0.40-0.62 | 3 |" in made
    assert "```bash\npython benchmarks/x.py DIRECTORY\n```\n" in made
    assert "Left out: accelerate: not installed." in made
    twice = figures.made(page, {"preshard-xfs": found, "preshard-disk": found})
    assert twice.count("accelerate: not installed") == 1
    assert made.count("by hand") == 1
    assert figures.made(made, {"preshard-xfs": found}) == made
    assert figures.by_hand(made, {"preshard-xfs": found}) == ["load"]


def test_a_peer_that_was_not_there_has_no_bar() -> None:
    load = RESULTS["reports"]["load"]
    without = {**load, "rows": [row for row in load["rows"] if row["what"] != "accelerate"]}
    assert "fsdp2_load" not in charts.speed({**RESULTS["reports"], "load": without})


def test_what_is_felt_has_only_rows_that_were_measured() -> None:
    rows = [*figures.felt({"load": RESULTS["reports"]["load"]})]
    assert [row[0] for row in rows] == ["`finalize` from a Hub directory", "`finalize` to fp32"]
    assert [*figures.felt({})] == []


def test_the_pages_of_scale_are_what_the_constants_give() -> None:
    texts = [path.read_text() for path in reckon.PAGES]
    for text in texts:
        assert reckon.page(text, reckon.Constants(CONSTANTS)) == text, "python benchmarks/reckon.py --write"
    assert sorted(match[2] for match in reckon._BLOCK.finditer("".join(texts))) == sorted(reckon.TABLES)


@pytest.mark.parametrize("verb", [0, 1])
def test_time_and_requests_follow_from_the_constants(verb: int) -> None:
    of = reckon.Constants(CONSTANTS)
    model = of.models["1 TB"]
    job = reckon.jobs(model, of)[verb]
    one, many = (reckon.seconds(job, model, n, 500, of, is_store=False) - job.plan_s for n in (1, 100))
    assert one == pytest.approx(model["bytes"] / 500e6)
    assert one / 100 <= many <= one / 50
    headers = job.num_read_files * of["requests_per_header"]  # by each worker; records bring their own
    assert reckon.reading(job, model, 16, of)[0] == 16 * headers
    assert reckon.reading(job, model, 1, of)[0] == headers + job.num_records
    assert reckon.reading(job, model, 16, of)[1] == reckon.reading(job, model, 1, of)[1]
    assert reckon.writing(job, model, of) >= model["bytes"] / of["part_bytes"]
