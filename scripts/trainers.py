"""Run the tests in which trainers themselves save and load; make the table of docs/trainers.md from what passed.

    python scripts/trainers.py [--fixtures DIR] [--render] [FILE ...]

Each test is one with the trainer's own code, of the version that is installed, or one over a checkpoint that it wrote: those
lie in DIR, `sharded/<name>/{README.txt,ckpt,truth}`, and their README tells the versions. Trainers that are not among the packages of
`make` are tried where they are found, e.g. by PYTHONPATH. What was not tried stays as it was in docs/trainers.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
ROWS_FILE, PAGE = ROOT / "docs" / "trainers.json", ROOT / "docs" / "trainers.md"
BEGIN, END = "<!-- begin: scripts/trainers.py -->", "<!-- end -->"
TO_HUB, RESHARDED = "its checkpoint to the Hub", "its checkpoint, resharded"
RESUMES, STARTS = "it goes on in another world", "it starts from preshard"
COLUMNS = (TO_HUB, RESHARDED, RESUMES, STARTS)
_FIXTURES = "tests/integration/test_fixtures.py"


class Row(NamedTuple):
    """A trainer, and the tests that try it."""

    packages: tuple[str, ...]
    """On PyPI; their versions are shown."""
    tests: Mapping[str, tuple[str, ...]]
    """Column -> "file::test" with or without the parameter that has to be in its name, as [parameter]."""
    fixtures: tuple[str, ...] = ()
    """Checkpoints that it wrote, which the column TO_HUB is about too."""


_SCRIPTS, _PROFILES = "tests/guides/test_guides.py", "tests/distributed/test_profiles.py"
_GUIDES = f"{_SCRIPTS}::test_a_guide_prints_what_it_says"
_RESUME = "tests/distributed/test_trainer_resume.py"
ROWS = {
    "torch FSDP1, FSDP2, `dcp.save`": Row(
        ("torch",),
        {
            TO_HUB: (f"{_GUIDES}[fsdp2-to-hub]",),
            RESUMES: (f"{_GUIDES}[more-ranks]", "tests/distributed/test_reshard_training.py"),
            STARTS: (f"{_GUIDES}[start-fsdp2]", "tests/distributed/test_stock_load.py"),
        },
        (
            *(
                "fsdp1_llama_flat_bf16_w3",
                "fsdp1_llama_tied_w2",
                "fsdp2_llama_w3",
                "fsdp2_hsdp_2x2",
                "fsdp2_tp_2x2",
            ),
            *("pp2_fsdp2_w4", "fsdp2_app_stateful_w2", "hfwriter_sharded_w2", "writer_zstd_w2"),
        ),
    ),
    "Lightning, Fabric": Row(
        ("lightning",),
        {
            TO_HUB: (f"{_GUIDES}[lightning-to-hub]",),
            RESUMES: (f"{_RESUME}::test_lightning",),
            STARTS: (f"{_PROFILES}::test_lightning", f"{_PROFILES}::test_fabric"),
        },
        ("lightning_fsdp_w2", "lightning_mp_w2", "fabric_fsdp_w2"),
    ),
    "accelerate, transformers' Trainer": Row(
        ("accelerate", "transformers"),
        {
            TO_HUB: (f"{_GUIDES}[trainer-to-hub]",),
            RESUMES: (f"{_RESUME}::test_accelerate",),
            STARTS: (
                f"{_PROFILES}::test_accelerate",
                f"{_PROFILES}::test_a_trainer_of_transformers",
                f"{_PROFILES}::test_transformers_loads",
            ),
        },
        ("accelerate_fsdp1_nodcp_w2", "accelerate_fsdp2_w2", "trainer_fsdp2_w2"),
    ),
    "torchtitan": Row(
        ("torchtitan",),
        {
            TO_HUB: ("tests/integration/test_torchtitan.py", f"{_SCRIPTS}::test_torchtitan_starts"),
            STARTS: (f"{_PROFILES}::test_torchtitan", f"{_SCRIPTS}::test_torchtitan_starts"),
        },
        ("torchtitan_llama3_w2",),
    ),
    "verl": Row(
        ("verl",),
        {TO_HUB: (f"{_SCRIPTS}::test_what_verl_saves",)},
        ("verl_fsdp1_w3", "verl_fsdp2_w2", "verl_fsdp2_lora_w2"),
    ),
    "DeepSpeed": Row(
        ("deepspeed",),
        {TO_HUB: (f"{_SCRIPTS}::test_what_deepspeed_saves",)},
        ("deepspeed_zero3_bf16_w2",),
    ),
    "NeMo Automodel": Row(("nemo-automodel",), {}, ("nemo_automodel_safetensors_w2",)),
    "torchtune": Row(("torchtune",), {}, ("torchtune_llama3_w2",)),
    "mini_trainer": Row(
        ("rhai-innovation-mini-trainer",),
        {TO_HUB: ("tests/integration/test_mini_trainer.py::test_its_checkpoint",)},
        ("minitrainer_w2",),
    ),
    "torch_checkpointing": Row(("torch_checkpointing",), {}, ("torch_checkpointing_w2",)),
    "PEFT": Row(("peft",), {}, ("peft_lora_fsdp2_full_w2",)),
}
_TO_HUB_TESTS = (
    f"{_FIXTURES}::test_consolidated_is_the_truth",
    f"{_FIXTURES}::test_names_that_are_not_the_hubs_are_kept",
    f"{_FIXTURES}::test_adapters",
)


def tests_of(row: Row) -> Iterator[tuple[str, str]]:
    """Yield (column, test) of a row."""
    for column, tests in row.tests.items():
        yield from ((column, test) for test in tests)
    for name in row.fixtures:
        yield from ((TO_HUB, f"{test}[{name}]") for test in _TO_HUB_TESTS)
        yield RESHARDED, f"{_FIXTURES}::test_resharded_is_the_truth[{name}]"


def main() -> None:
    """Run the tests, keep what passed, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="only the tests in these, e.g. with other packages"
    )
    parser.add_argument("--fixtures", type=Path, metavar="DIR", help="checkpoints that trainers wrote")
    parser.add_argument("--render", action="store_true", help="only write the table")
    options = parser.parse_args()
    if not options.render:
        record(run(options.files, options.fixtures), options.fixtures)
    rows = json.loads(ROWS_FILE.read_text())
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text("\n".join([before + BEGIN, "", *table(rows), "", END]) + rest.partition(END)[2])


def run(files: list[str], fixtures: Path | None) -> list[tuple[str, bool]]:
    """Return (test as "file::name[parameter]", whether it passed) of those that were not skipped."""
    files = files or sorted({test.partition("::")[0] for row in ROWS.values() for _, test in tests_of(row)})
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        environment = {**os.environ, **({"SHARDKIT_FIXTURES": str(fixtures.resolve())} if fixtures else {})}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            *files,
        ]
        subprocess.run(command, cwd=ROOT, env=environment, check=False)
        return [
            (
                f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}",
                not any(part.tag in ("failure", "error") for part in case),
            )
            for case in ElementTree.parse(report).iter("testcase")
            if case.find("skipped") is None
        ]


def record(ran: list[tuple[str, bool]], fixtures: Path | None) -> None:
    """Keep how many tests passed and failed, of each row and column in which some ran, with the versions."""
    rows: dict[str, Any] = json.loads(ROWS_FILE.read_text()) if ROWS_FILE.exists() else {}
    for name, row in ROWS.items():
        counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        shown: dict[str, set[str]] = defaultdict(set)
        for column, test in tests_of(row):
            file, _, parameter = test.partition("[")
            for found, passed in ran:
                if found.startswith(file) and (not parameter or f"[{parameter}" in found):
                    counts[column][not passed] += 1
                    home = fixtures and fixtures / "sharded" / parameter.rstrip("]")
                    for package in row.packages:
                        shown[package] |= {_version(package, home if file.startswith(_FIXTURES) else None)}
        kept = rows.get(name, {"versions": {}, "columns": {}})
        kept["versions"] |= {package: sorted(versions) for package, versions in shown.items()}
        kept["columns"] |= dict(counts)
        rows[name] = kept
    ordered = {name: rows[name] for name in ROWS if rows.get(name, {}).get("columns")}
    ROWS_FILE.write_text(json.dumps(ordered, indent=1) + "\n")


def _version(package: str, fixture: Path | None) -> str:
    """Return the version that is installed, or with which a checkpoint was written."""
    if fixture is not None:
        installed = re.search(r"^installed: (.*)", (fixture / "README.txt").read_text(), re.M)
        assert installed is not None
        return dict(each.split(" ") for each in installed[1].split(", "))[package].partition("+")[0]
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "?"


def table(rows: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"| trainer | versions | {' | '.join(COLUMNS)} |"
    yield "|---|---|" + "---|" * len(COLUMNS)
    for name, row in rows.items():
        versions = ", ".join(
            " ".join([*([package] if len(row["versions"]) > 1 else []), " and ".join(each)])
            for package, each in row["versions"].items()
        )
        cells = [cell(row["columns"].get(column)) for column in COLUMNS]
        yield f"| {name} | {versions} | {' | '.join(cells)} |"


def cell(counts: list[int] | None) -> str:
    """Return what a cell says of [passed, failed]; nothing was tried where there are none."""
    if counts is None:
        return ""
    passed, failed = counts
    return f"**{failed} of {passed + failed} fail**" if failed else f"yes ({passed})"


if __name__ == "__main__":
    main()
