"""Malformed and hostile checkpoints: refused by name, or read right; nothing is run, and nothing else touched."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.security import run_corpus
from tests.security.case import ACCEPTED, REFUSED, Case
from tests.worlds.processes import run_script

SCRIPT = str(Path(__file__).with_name("run_corpus.py"))
CASES = {case.id: case for case in [*run_corpus.good_cases(), *run_corpus.all_cases()]}
WRITERS = ("consolidate", "preshard", "reshard")
# Control characters, and marks that turn text around.
_UNPRINTABLE = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)
Report = Mapping[str, Any]

pytestmark = pytest.mark.prove


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Report]]:
    base = tmp_path_factory.mktemp("corpus")
    run_script(SCRIPT, str(base))
    content = json.loads((base / "report.json").read_text())
    found: dict[str, list[Report]] = defaultdict(list)
    for report in content["reports"]:
        found[report["case"]].append(report)
    return found


def problems(case: Case, report: Report) -> list[str]:
    """What a command did that it should not have."""
    if "failed" in report:
        return [report["failed"]]
    command, code, said = report["command"], report["code"], report["said"]
    expected = case.outcome(command)
    found = [f"did this: {event}" for event in report["seen"]]
    codes = {
        REFUSED: (1, 3) if command == "verify" else (3,),
        ACCEPTED: (0, 1) if command == "diff" else (0,),
    }.get(expected, (0, 1, 3))
    if code not in codes:
        found.append(f"exit code {code}, expected one of {codes}")
    if report["canary"]:
        found.append("code of the file was executed")
    if report["mib"] > run_corpus.MAX_MIB:
        found.append(f"took {report['mib']} MiB")
    if report["seconds"] > run_corpus.MAX_S:
        found.append(f"took {report['seconds']} s")
    if report["left"] != (["made"] if code == 0 and command in WRITERS else []):
        found.append(f"left {report['left']}")
    if "Traceback" in said or _UNPRINTABLE.search(said):
        found.append("shows a traceback, or characters that a terminal acts on")
    if expected == REFUSED and not any(name in said for name in case.mention):
        found.append(f"names none of {case.mention}")
    return [f"{line}: {said[-500:]}" for line in found]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_commands(case: Case, reports: dict[str, list[Report]]) -> None:
    assert [report["command"] for report in reports[case.id]] == list(case.commands)
    found = [(report["command"], line) for report in reports[case.id] for line in problems(case, report)]
    assert found == []


def test_there_are_enough() -> None:
    assert sum(case.expect == REFUSED for case in CASES.values()) >= 120


@pytest.mark.parametrize("name", [case.id for case in CASES.values() if case.expect == ACCEPTED])
def test_what_is_accepted_has_the_right_values(name: str, reports: dict[str, list[Report]]) -> None:
    """Written by ours, read by torch and safetensors; hostile in everything but its tensors."""
    good = {report["command"]: report["made"] for report in reports[f"good-{CASES[name].sample}"]}
    truth = json.loads(run_corpus.truth(CASES[name].sample))
    for report in reports[name]:
        if report["command"] in WRITERS and report["code"] == 0:
            made = report["made"]
            assert sorted(made.values()) == sorted(truth), (name, report["command"])
            assert len(made) == len(good[report["command"]])


def test_the_watch_sees_what_unpickling_does(reports: dict[str, list[Report]]) -> None:
    """The same process, watched in the same way, unpickles the payload: so what is not seen was not done."""
    (report,) = reports["control"]
    assert report["canary"]
    seen = " ".join(report["seen"])
    for event in (
        "pickle.find_class",
        "os.system",
        "subprocess.Popen",
        "socket.",
        "import antigravity",
        "exec <string>",
        "compile <string>",
        "write /",
        "read /etc/hostname",
        "os.mkdir",
        "os.listdir /etc",
        "ctypes.",
    ):
        assert event in seen, event
