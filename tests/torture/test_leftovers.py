"""What a killed process leaves is described, resumed from any host, and removed when somebody asks; nothing takes it for an output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import shardkit
from shardkit.cli import main
from shardkit.errors import SourceError
from shardkit.files import storage
from tests.torture.harness import Place, Scenario, Scenarios, Server, content, restore

pytestmark = pytest.mark.prove

VERBS = ("preshard two jobs", "consolidate", "reshard two jobs")


def run(*args: str) -> Result:
    return CliRunner().invoke(main, args, prog_name="shardkit")


def killed(scenario: Scenario, server: Server, path: Path, share: float = 0.6) -> Place:
    """Kill a run after this share of its calls."""
    place = Place(scenario, path)
    fault = {"at": int(scenario.num_calls * share), "do": "kill"}
    assert scenario.run(server, place.out, fault=fault).code == -9
    assert len(place.staging()) == 1
    return place


@pytest.mark.parametrize("name", VERBS)
def test_status_says_how_far_it_came_and_what_resumes(
    name: str, found: Scenarios, server: Server, place: Path
) -> None:
    there = killed(found[name], server, place)
    told = shardkit.status(there.out)
    (job,) = told.jobs
    assert (job.output, job.num_parts, job.is_committing) == (str(there.out), 1, False)
    assert 0 < job.num_files
    assert 0 <= job.finished_files <= job.num_files
    assert not told.is_there
    shown = run("status", str(there.out))
    assert shown.exit_code == 0
    assert job.command in shown.stdout
    assert f"{job.finished_files} of {job.num_files} file" in shown.stdout
    again = server(job.command.split()[1:])
    assert again.code == 0, again.err
    there.check_is(found[name].expected)
    assert there.staging() == []
    assert shardkit.status(there.out).jobs == ()
    there.remove()


def test_it_goes_when_asked(found: Scenarios, server: Server, place: Path) -> None:
    there = killed(found["preshard"], server, place)
    shown = run("abort", str(there.out))
    assert shown.exit_code == 0, shown.stderr
    assert "removed" in shown.stdout
    assert there.staging() == []
    assert not there.out.exists()
    again = run("abort", str(there.out))
    assert (again.exit_code, "no job is under way" in again.output) == (0, True)
    there.remove()


@pytest.mark.parametrize("below", ["", "data"])
@pytest.mark.parametrize("of_parts", [False, True])
def test_nothing_takes_it_for_a_checkpoint(
    below: str, of_parts: bool, found: Scenarios, server: Server, place: Path
) -> None:
    if of_parts:
        there = Place(found["preshard"], place)
        assert found["preshard"].run(server, there.out, extra=["--part", "1/2"]).code == 0
    else:
        there = killed(found["preshard"], server, place)
    (left,) = there.staging()
    for args in (
        ("inspect", str(left / below)),
        ("verify", str(left / below)),
        ("consolidate", str(left / below), str(place / "model")),
    ):
        shown = run(*args)
        assert shown.exit_code == 3
        assert "a job of shardkit writes there that is not committed" in shown.stderr
        assert f"hint: `shardkit status {there.out}`" in shown.stderr
    with pytest.raises(SourceError, match="a job of shardkit writes there"):
        shardkit.inspect(left / below)
    there.remove()


@pytest.mark.parametrize("name", VERBS)
def test_of_another_host_it_is_resumed_all_the_same(
    name: str, found: Scenarios, server: Server, place: Path
) -> None:
    """Whatever that host has finished counts; only its unfinished files are left to it until the output is there."""
    there = killed(found[name], server, place, 0.7)
    (left,) = there.staging()
    for worker in (left / "tmp").iterdir():
        worker.rename(worker.with_name(f"elsewhere-{worker.name.rpartition('-')[2]}"))
    (left / "tmp" / "elsewhere-0123456789ab").mkdir()
    finished = len(list((left / "done").iterdir()))
    assert finished
    answer = there.scenario.run(server, there.out)
    assert (answer.code, answer.resumed_files) == (0, finished), answer.err
    there.check_is(there.scenario.expected)
    assert there.staging() == []
    there.remove()


@pytest.mark.parametrize("way", ["refused", "--overwrite", "abort"])
def test_another_job_does_not_lose_finished_files_unasked(
    way: str, found: Scenarios, server: Server, place: Path
) -> None:
    there = killed(found["preshard"], server, place, 0.7)
    (left,) = there.staging()
    before = content(left / "done") | content(left / "data")
    assert content(left / "done")
    (job,) = shardkit.status(there.out).jobs
    other = ["--digest", "none"]
    if way != "--overwrite":
        refused = there.scenario.run(server, there.out, extra=other)
        assert refused.code == 2
        assert "another job is under way" in refused.err
        assert job.command in refused.err
        assert content(left / "done") | content(left / "data") == before
    if way == "abort":
        assert run("abort", str(there.out)).exit_code == 0
    if way != "refused":
        extra = [*other, "--overwrite"] if way == "--overwrite" else other
        answer = there.scenario.run(server, there.out, extra=extra)
        assert (answer.code, answer.resumed_files) == (0, 0), answer.err
        there.check_is(found["preshard no digests"].expected)
    else:
        assert there.scenario.run(server, there.out).code == 0
        there.check_is(there.scenario.expected)
    assert there.staging() == []
    there.remove()


def test_a_job_without_a_finished_file_gives_way(found: Scenarios, server: Server, place: Path) -> None:
    there = Place(found["preshard"], place)
    fault = {"of": ["ftruncate"], "at": 1, "do": "kill"}
    assert there.scenario.run(server, there.out, fault=fault).code == -9
    assert len(there.staging()) == 1
    assert there.scenario.run(server, there.out, extra=["--digest", "none"]).code == 0
    there.check_is(found["preshard no digests"].expected)
    assert there.staging() == []
    there.remove()


@pytest.mark.parametrize("verb", ["status", "abort", "preshard"])
@pytest.mark.parametrize("gone", ["before its notes are listed", "before its record is read"])
def test_a_job_may_end_while_it_is_looked_at(
    verb: str, gone: str, found: Scenarios, server: Server, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another host: its directory becomes the output there, after it was listed here."""
    there = killed(found["preshard"], server, place)
    (left,) = there.staging()
    call = "listdir" if gone == "before its notes are listed" else "read_file"
    plain, elsewhere = getattr(storage, call), place / "elsewhere"

    def vanishing(path: str) -> object:
        if path.startswith(str(left)) and not elsewhere.exists():
            left.rename(elsewhere)
        return plain(path)

    monkeypatch.setattr(storage, call, vanishing)
    args = {"preshard": there.scenario.command(there.out)}.get(verb, [verb, str(there.out)])
    shown = run(*args)
    assert shown.exit_code == 0, shown.output
    assert elsewhere.exists()
    assert not left.exists()
    there.remove()


def test_begun_as_a_part_any_host_resumes(found: Scenarios, server: Server, place: Path) -> None:
    there = Place(found["preshard"], place)
    fault = {"at": there.scenario.num_calls * 3 // 4, "do": "kill"}
    assert there.scenario.run(server, there.out, extra=["--part", "1/1"], fault=fault).code == -9
    (left,) = there.staging()
    finished = len(list((left / "done").iterdir()))
    assert finished
    assert left.name == ".out.shardkit"
    answer = there.scenario.run(server, there.out)
    assert (answer.code, answer.resumed_files) == (0, finished), answer.err
    there.check_is(there.scenario.expected)
    there.remove()


@pytest.mark.parametrize("exchange", [True, False])
def test_abort_near_the_exchange(exchange: bool, found: Scenarios, server: Server, place: Path) -> None:
    """Killed at any call of a commit: after abort the destination is the whole old output or the whole new one."""
    scenario = found["preshard"]
    there = Place(scenario, place)
    restore(there.out, scenario.old)
    calls = scenario.run(server, there.out, overwrite=True, exchange=exchange).calls
    seen = []
    for before_end in range(2, 60, 4):
        restore(there.out, scenario.old)
        fault = {"at": len(calls) - before_end, "do": "kill"}
        assert scenario.run(server, there.out, overwrite=True, exchange=exchange, fault=fault).code == -9
        shardkit.abort(there.out)
        seen.append(there.check_is(scenario.old, scenario.expected) == scenario.old)
        assert there.staging() == []
    assert {*seen} == {False, True}
    there.remove()


@pytest.mark.parametrize("way", ["abort", "the same command"])
def test_an_output_with_a_long_name(way: str, found: Scenarios, server: Server, place: Path) -> None:
    """Names of directories beside it have a part of such a name alone."""
    there = Place(found["preshard"], place)
    out = there.path / ("x" * 200)
    fault = {"of": ["rename"], "onto": r"/x{200}$", "at": 1, "do": "kill"}
    assert there.scenario.run(server, out, fault=fault).code == -9
    assert len(there.staging()) == 1
    if way == "abort":
        assert shardkit.abort(out).aborted
        assert there.staging() == []
    else:
        assert there.scenario.run(server, out).code == 0
        assert content(out) == there.scenario.expected
        assert there.staging() == [out]
    there.remove()


def test_a_claimed_commit_is_shown_and_ended_by_the_same_command(
    found: Scenarios, server: Server, place: Path
) -> None:
    there = Place(found["preshard"], place)
    fault = {"of": ["rename"], "onto": r"/out$", "at": 1, "do": "kill"}
    assert there.scenario.run(server, there.out, fault=fault).code == -9
    (job,) = shardkit.status(there.out).jobs
    assert job.is_committing
    answer = there.scenario.run(server, there.out)
    assert answer.code == 0
    assert json.loads(answer.out)["was_there"]
    there.check_is(there.scenario.expected)
    assert there.staging() == []
    there.remove()
