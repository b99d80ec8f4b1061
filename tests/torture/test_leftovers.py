"""What killed runs leave is found, described and removed; nothing of a living run, and nothing that is somebody else's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import shardkit
from shardkit.cli import main
from shardkit.errors import SourceError
from shardkit.files import storage
from shardkit.files.shared import SharedStaging
from shardkit.files.staging import Owner, Staging, nothing
from tests.torture.divided import committing, good, parts
from tests.torture.harness import Place, Scenario, Scenarios, Server

pytestmark = pytest.mark.prove

VERBS = ("preshard two jobs", "consolidate", "reshard two jobs")


def run(*args: str) -> Result:
    return CliRunner().invoke(main, args, prog_name="shardkit")


def killed(
    scenario: Scenario, server: Server, path: Path, share: float = 0.6, *, overwrite: bool = False
) -> Place:
    """Kill a run after this share of its calls."""
    place = Place(scenario, path)
    if overwrite:
        shardkit_old(place)
    fault = {"at": int(scenario.num_calls * share), "do": "kill"}
    assert scenario.run(server, place.out, overwrite=overwrite, fault=fault).code == -9
    assert len(place.staging()) == 1
    return place


def shardkit_old(place: Place) -> None:
    from tests.torture.harness import restore

    restore(place.out, place.scenario.old)


def of_another_host(left: Path) -> Path:
    """Let those who worked in a directory be processes of another host."""
    (left / "work" / "01234567-01234567-1-1-1-1").mkdir()  # it may have been killed when nobody was
    for worker in (left / "work").iterdir():
        worker.rename(worker.with_name(f"01234567-{worker.name.partition('-')[2]}"))
    return left


@pytest.mark.parametrize("name", VERBS)
def test_status_says_how_far_it_came_and_what_goes_on(
    name: str, found: Scenarios, server: Server, place: Path
) -> None:
    killed_place = killed(found[name], server, place)
    (left,) = killed_place.staging()
    told = shardkit.status(killed_place.out)
    (each,) = told.runs
    assert (each.staging, each.owner, each.kind, each.verb) == (str(left), "dead", "run", name.split()[0])
    assert 0 < each.num_files
    assert 0 <= each.finished_files <= each.num_files
    assert each.foreign == ()
    assert not told.is_there
    shown = run("status", str(killed_place.out))
    assert shown.exit_code == 0
    assert each.command in shown.stdout
    assert f"{each.finished_files} of {each.num_files} file" in shown.stdout
    # What it says goes on does, where that run ended.
    again = server(each.command.split()[1:])
    assert again.code == 0, again.err
    killed_place.check_is(found[name].expected)
    assert killed_place.staging() == []
    assert shardkit.status(killed_place.out).runs == ()
    killed_place.remove()


def test_it_goes_when_asked(found: Scenarios, server: Server, place: Path) -> None:
    there = killed(found["preshard"], server, place)
    (left,) = there.staging()
    shown = run("abort", str(there.out))
    assert shown.exit_code == 0, shown.stderr
    assert "removed" in shown.stdout
    assert "goes on with" not in shown.stdout
    assert str(left) in shown.stdout
    assert there.staging() == []
    assert not there.out.exists()
    there.remove()


def test_inspect_says_what_it_is_and_nothing_takes_it(found: Scenarios, server: Server, place: Path) -> None:
    there = killed(found["preshard"], server, place)
    (left,) = there.staging()
    result = shardkit.inspect(left)
    assert (result.kind, result.format, result.num_tensors) == ("unfinished", "preshard", 0)
    assert result.run is not None
    assert result.run.owner == "dead"
    shown = run("inspect", str(left))
    assert shown.exit_code == 0
    assert "no checkpoint: a run left it that did not end" in shown.stdout
    assert f"shardkit status {there.out}" in shown.stdout
    with pytest.raises(SourceError, match="it is what a run left that did not end"):
        shardkit.consolidate(left, there.path / "model")
    there.remove()


def test_what_is_somebody_elses_is_named_and_stays(found: Scenarios, server: Server, place: Path) -> None:
    there = killed(found["reshard"], server, place)
    (left,) = there.staging()
    for name in ("notes.txt", "data/mine/results.csv", "data/optimizer.bin"):
        (left / name).parent.mkdir(exist_ok=True)
        (left / name).write_bytes(b"mine")
    before = {"notes.txt", "data/mine/results.csv", "data/optimizer.bin"}
    assert {*shardkit.status(there.out).runs[0].foreign} == before
    shown = run("abort", str(there.out))
    assert shown.exit_code == 0
    assert all(name in shown.stderr for name in before)
    (left,) = there.staging()
    assert {str(file.relative_to(left)) for file in left.rglob("*") if file.is_file()} == before
    assert {*shardkit.abort(there.out).runs[0].foreign} == before
    assert (left / "data/optimizer.bin").read_bytes() == b"mine"
    there.remove()


def put_there(left: Path) -> set[str]:
    """Put a person's files into a directory of runs; return what they are."""
    for name in ("notes.txt", "data/mine/results.csv", "data/optimizer.bin"):
        (left / name).parent.mkdir(exist_ok=True)
        (left / name).write_bytes(name.encode())
    return {"notes.txt", "data/mine/results.csv", "data/optimizer.bin"}


def kept_beside(there: Place) -> set[str]:
    """Return what is left beside the output, by content; nothing but a person's files is."""
    return {path.read_text() for left in there.staging() for path in left.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", VERBS)
@pytest.mark.parametrize("way", ["the same command", "other options", "--no-resume", "failed"])
def test_a_later_run_keeps_it(name: str, way: str, found: Scenarios, server: Server, place: Path) -> None:
    """Whether it goes on in that directory or removes it."""
    there = killed(found[name], server, place)
    (left,) = there.staging()
    mine = put_there(left)
    extra = {"other options": ["--digest", "none"], "--no-resume": ["--no-resume"]}.get(way, [])
    if way == "failed":
        fault = {"of": ["rename", "renameat2", "fsync"], "at": 12, "do": "errno", "errno": 5}
        there.scenario.run(server, there.out, fault=fault)
        assert kept_beside(there) >= mine
    answer = there.scenario.run(server, there.out, extra=extra)
    assert answer.code == 0, answer.err
    if way != "other options":
        there.check_is(there.scenario.expected)
    assert kept_beside(there) == mine
    (warning,) = [text for text in json.loads(answer.out)["warnings"] if "not shardkit's" in text]
    assert all(each.rpartition("/")[2] in warning for each in mine)
    there.remove()


@pytest.mark.parametrize("way", ["abort", "commit"])
def test_among_what_parts_share_too(way: str, found: Scenarios, server: Server, place: Path) -> None:
    there = Place(found["preshard"], place)
    first, last = parts(there.scenario, there.out, 2)
    good(server.together([first]))
    (shared,) = there.staging()
    (shared / "notes.txt").write_text("notes.txt")
    if way == "commit":
        good(server.together([last]))
        there.check_is(there.scenario.expected)
        good(server.together([committing(there.scenario, there.out)]))
    else:
        (shared / "done" / "mine").write_text("done")
        (shared / "data" / "mine").write_text("mine")
        shown = run("abort", str(there.out))
        assert shown.exit_code == 0
        assert f"{shared}: not shardkit's, so this stays: notes.txt, done/mine, data/mine" in shown.stderr
        assert kept_beside(there) == {"notes.txt", "done", "mine"}
    assert "notes.txt" in kept_beside(there)
    there.remove()


def test_of_another_host_it_is_named_first(found: Scenarios, server: Server, place: Path) -> None:
    there = killed(found["preshard"], server, place, 0.5)
    left = of_another_host(there.staging()[0])
    (each,) = shardkit.status(there.out).runs
    assert each.owner == "unknown"
    assert each.command in run("status", str(there.out)).stdout
    told = list[str]()

    def on_warning(text: str) -> None:
        assert there.staging() == [left], "it was removed before it was named"
        told.append(text)

    result = shardkit.abort(there.out, on_warning=on_warning)
    assert result.aborted
    assert (
        f"process {each.pid} on {os.uname().nodename}, which wrote there last at {each.last_written}"
        in told[0]
    )
    assert there.staging() == []
    there.remove()


@pytest.mark.parametrize("name", VERBS)
def test_of_another_host_it_goes_on_all_the_same(
    name: str, found: Scenarios, server: Server, place: Path
) -> None:
    """Whatever that host has finished counts. A run of another plan leaves it alone, and says so."""
    there = killed(found[name], server, place, 0.7)
    left = of_another_host(there.staging()[0])
    finished = len(list((left / "done").iterdir()))
    answer = there.scenario.run(server, there.out, extra=["--digest", "none"])
    assert answer.code == 0, answer.err
    assert there.staging() == [left]
    (warning,) = json.loads(answer.out)["warnings"]
    assert f"{left} is left alone: of process " in warning
    assert f"`shardkit abort {there.out}` removes it" in warning
    answer = there.scenario.run(server, there.out, overwrite=True)
    assert (answer.code, answer.resumed_files) == (0, finished), answer.err
    there.check_is(there.scenario.expected)
    assert there.staging() == []
    there.remove()


@pytest.mark.parametrize("verb", ["status", "abort", "preshard"])
def test_a_run_may_end_while_it_is_looked_at(
    verb: str, found: Scenarios, server: Server, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another host: its directory becomes the output there, after it was listed here."""
    there = killed(found["preshard"], server, place)
    left = of_another_host(there.staging()[0])
    walk, walked, last = storage.walk, list[str](), 1 if verb == "preshard" else 2

    def vanishing(path: str, **options: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        listed = list(walk(path, **options))
        if path == str(left):
            walked.append(path)
            if len(walked) == last:
                (left / "data").rename(place / "elsewhere")
        yield from listed

    monkeypatch.setattr(storage, "walk", vanishing)
    args = {"preshard": there.scenario.command(there.out)}.get(verb, [verb, str(there.out)])
    shown = run(*args)
    assert shown.exit_code == 0, shown.output
    assert len(walked) >= last
    there.remove()


def test_begun_as_a_part_any_host_goes_on(found: Scenarios, server: Server, place: Path) -> None:
    """What it has finished counts; nothing in its directory says which host that was."""
    there = Place(found["preshard"], place)
    fault = {"at": there.scenario.num_calls * 3 // 4, "do": "kill"}
    assert there.scenario.run(server, there.out, extra=["--part", "1/1"], fault=fault).code == -9
    (shared,) = there.staging()
    finished = len(list((shared / "done").iterdir()))
    assert finished
    assert Owner.parse(shared.name.partition(".shardkit-")[2]) is None
    answer = there.scenario.run(server, there.out, extra=["--part", "1/1"])
    assert (answer.code, answer.resumed_files) == (0, finished), answer.err
    there.check_is(there.scenario.expected)
    there.remove()


def test_a_living_run_stays(found: Scenarios, server: Server, place: Path) -> None:
    there = Place(found["preshard"], place)
    at_work = Staging.create(str(there.out))
    shown = run("abort", str(there.out))
    assert shown.exit_code == 0
    assert "is at work; stop it first" in shown.stderr
    assert there.staging() == [Path(at_work.path)]
    assert shardkit.inspect(at_work.path).run.owner == "alive"  # type: ignore[union-attr]
    at_work.discard()
    there.remove()


@pytest.mark.parametrize("exchange", [True, False])
def test_the_old_output_is_never_lost(exchange: bool, found: Scenarios, server: Server, place: Path) -> None:
    """Killed at any call near the exchange: the destination is whole afterwards, whoever removes the rest."""
    scenario = found["preshard"]
    there = Place(scenario, place)
    for before_end in range(2, 40, 3):
        shardkit_old(there)
        (there.out / "extra.txt").write_bytes(b"of the user")
        fault = {"at": scenario.num_calls + 20 - before_end, "do": "kill"}
        scenario.run(server, there.out, overwrite=True, exchange=exchange, fault=fault)
        shardkit.abort(there.out)
        old = {**scenario.old, "extra.txt": b"of the user"}
        if there.check_is(old, scenario.expected) == scenario.expected:
            kept = [file for left in there.staging() for file in left.rglob("extra.txt")]
            assert all(file.read_bytes() == b"of the user" for file in kept)
        for left in there.staging():
            for file in left.rglob("*"):
                assert file.is_dir() or file.name in ("extra.txt", "of a larger one"), file
        there.remove()
        there = Place(scenario, place)


def test_what_cannot_go_back_is_kept_and_named(found: Scenarios, server: Server, place: Path) -> None:
    there = killed(found["preshard"], server, place)
    (left,) = there.staging()
    old = left / f"new-{Owner.new_run()}" / "old"
    old.mkdir(parents=True)
    (old / "of the user").write_bytes(b"old")
    there.out.mkdir()
    (there.out / "new").write_bytes(b"new")
    shown = run("abort", str(there.out))
    assert shown.exit_code == 2
    assert f"{left}, with what was there before in {old.relative_to(left)}" in shown.stderr
    assert (old / "of the user").read_bytes() == b"old"
    there.remove()


def test_what_parts_share_is_no_checkpoint_either(found: Scenarios, server: Server, place: Path) -> None:
    there = Place(found["preshard"], place)
    assert found["preshard"].run(server, there.out, extra=["--part", "1/2"]).code == 0
    (shared,) = there.staging()
    for args in (
        ("inspect", str(shared)),
        ("verify", str(shared)),
        ("consolidate", str(shared), str(place / "model")),
    ):
        shown = run(*args)
        assert shown.exit_code == 3
        assert (
            f"the parts of a job write there, or have written\nhint: `shardkit status {there.out}`"
            in shown.stderr
        )
    there.remove()


def test_an_old_output_with_a_long_name_goes_back_to_it(tmp_path: Path) -> None:
    """Names of directories beside it have a part of such a name alone."""
    out = tmp_path / ("x" * 200)
    run = SharedStaging.of_plan(str(out), "0" * 16, nothing, is_run=True)
    assert run.create(b"{}")
    old = Path(run.path, f"new-{Owner.new_run()}", "old", ".metadata")
    old.parent.mkdir(parents=True)
    old.touch()
    assert shardkit.abort(out).aborted
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    assert (out / ".metadata").exists()
