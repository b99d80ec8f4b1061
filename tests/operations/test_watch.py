"""`shardkit watch`: checkpoints of stock DCP appear and disappear, and processes are killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import shardkit
from shardkit.cli import main
from shardkit.errors import ResourceError, UsageError
from shardkit.operations import watch as watching
from shardkit.operations.watch import WatchOptions, WatchResult, watch
from shardkit.operations.watch.record import RECORD
from tests.contents import contents
from tests.formats.hub.test_repo_push import FakeHub
from tests.hub_server import serving
from tests.operations.consolidate.checkpoints import CONFIG, hub, load, save, training_state, weights
from tests.worlds.processes import ForkServer

SCRIPT = """
import json, shutil, sys
from shardkit.operations.watch import WatchOptions, watch
from tests.torture.faults import Faults
request = json.loads(sys.argv[1])
fault, gone = request.pop("fault"), request.pop("gone", None)
class Acting(Faults):
    def _act(self, name, call, args, kwargs):
        if gone is None:
            return super()._act(name, call, args, kwargs)
        shutil.rmtree(gone)
        return call(*args, **kwargs)
faults, lines = Acting(fault, 2), []
faults.install(exchange=True)
result = watch(WatchOptions(**request), lines.append, progress=False)
faults.report_calls()
print(json.dumps({"lines": lines, **result.to_json()}))
"""


class Run:
    """A run, the directory that is watched for it, and what consolidate makes of each of its checkpoints."""

    def __init__(self, home: Path) -> None:
        self.run, self.out, self.base = home / "run", home / "out", home / "base"
        self._copies, self.expected = home / "copies", dict[str, dict[str, bytes]]()
        hub(self.base, None, CONFIG, tokenizer__json="{}")
        self.run.mkdir()

    @property
    def options(self) -> dict[str, Any]:
        """Of consolidate."""
        return {"base": str(self.base), "ask_class": False}

    def save(self, *steps: int, name: str = "step-{}") -> None:
        """Save checkpoints, and consolidate a copy of each."""
        for step in steps:
            torch.manual_seed(step)
            path = save(training_state(weights()), self.run / name.format(step))
            copy = self._copies / path.name
            shutil.copytree(path, copy)
            model = copy.with_name(f"{path.name}-model")
            shardkit.consolidate(copy, model, **self.options)
            self.expected[f"step-{step}"] = contents(model)
            shutil.rmtree(self._copies)

    def begin_save(self, step: int) -> Callable[[], None]:
        """Save a checkpoint except for its last file; return a function that writes that."""
        self.save(step)
        last = self.run / f"step-{step}/.metadata"
        data = last.read_bytes()
        last.unlink()
        return lambda: _written(last, data)

    def watch(self, **options: Any) -> tuple[WatchResult, list[str]]:
        """Watch once; return the result, and what was said."""
        lines = list[str]()
        request = {
            "run": str(self.run),
            "directory": str(self.out),
            "consolidate": self.options,
            "once": True,
        }
        return watch(WatchOptions(**{**request, **options}), lines.append, progress=False), lines

    def check(self, *steps: int) -> None:
        """Compare what is there with what consolidate makes of copies; nothing else is there."""
        names = {path.name for path in self.out.iterdir()} - {RECORD, ".watch"}
        assert os.listdir(self.out / ".watch") == ["lock"]
        assert names == {f"step-{step}" for step in steps}
        for name in names:
            assert contents(self.out / name) == self.expected[name], name


def _written(path: Path, data: bytes) -> None:
    path.write_bytes(data)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def typed(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["watch", *map(str, arguments)])


def test_each_checkpoint_becomes_what_consolidate_makes_of_it(run: Run) -> None:
    run.save(5, 10)
    result, lines = run.watch()
    assert (result.converted, result.passed_over) == (("step-5", "step-10"), ())
    run.check(5, 10)
    assert [line.partition(":")[0] for line in lines] == ["step-5", "step-10"]
    run.save(15)
    assert run.watch()[0].converted == ("step-15",)
    run.check(5, 10, 15)
    assert run.watch()[0].converted == ()
    record = json.loads((run.out / RECORD).read_text())
    assert [(model["name"], model["step"]) for model in record["models"]] == [
        (f"step-{step}", step) for step in (5, 10, 15)
    ]


def test_latest_prints_the_newest_model_that_a_watch_has_made(run: Run) -> None:
    run.save(5, 10)
    run.watch()
    shutil.copytree(run.out / "step-10", run.out / ".watch/step-15")  # as a kill leaves it
    found = shardkit.latest(run.out, list_all=True)
    assert found.path == str(run.out / "step-10")
    assert [(each.step, each.missing) for each in found.checkpoints or ()] == [(10, None), (5, None)]
    os.truncate(run.out / "step-10/model.safetensors", 100)
    assert shardkit.latest(run.out).path == str(run.out / "step-5")


def test_the_command(run: Run) -> None:
    run.save(5)
    done = typed(run.run, run.out, "--base", run.base, "--dtype", "bf16", "--ask-class", "off", "--once")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{run.out}: 1 checkpoint converted\n  converted  step-5\n"
    assert done.stderr.startswith("watch: step-5: converted in ")
    assert {tensor.dtype for tensor in load(run.out / "step-5").values()} == {torch.bfloat16}
    again = typed(run.run, run.out, "--base", run.base, "--once", "--json")
    assert json.loads(again.stdout)["converted"] == []


def test_a_save_that_goes_on_is_waited_for(run: Run) -> None:
    run.save(5)
    finish = run.begin_save(10)
    result, lines = run.watch()
    assert result.converted == ("step-5",)
    assert [line for line in lines if line.startswith("waiting for step-10: the save did not finish")]
    finish()
    assert run.watch()[0].converted == ("step-10",)
    run.check(5, 10)


def test_steps_above_a_tracker_are_waited_for(run: Run) -> None:
    run.save(5, 10)
    (run.run / "latest_checkpointed_iteration.txt").write_text("5")
    result, lines = run.watch()
    assert result.converted == ("step-5",)
    assert "waiting for step-10: latest_checkpointed_iteration.txt does not name it" in "".join(lines)


class Clock:
    """The time of a watch: it passes while the watch sleeps, and then something happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, happens: Callable[[float], object]) -> None:
        self._now, self._happens = 0.0, happens
        monkeypatch.setattr(watching, "time", self)

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        self._happens(self._now)


def change_at(path: Path, now: float) -> None:
    os.utime(path, ns=(0, int(now * 1e9)))


@pytest.fixture
def lone_file(run: Run) -> Path:
    """A checkpoint of which no file says that its save has ended."""
    path = run.run / "step-10/model.pt"
    path.parent.mkdir()
    torch.save(weights(), path)
    return path


def test_a_checkpoint_without_a_last_file_has_to_stay_unchanged(
    run: Run, lone_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = list[float]()

    def change_twice(now: float) -> None:
        looks.append(now)
        if len(looks) < 3:
            change_at(lone_file, now)

    Clock(monkeypatch, change_twice)
    assert run.watch(settle_s=60)[0].converted == ("step-10",)
    assert looks[-1] - looks[1] >= 60


def test_once_ends_beside_files_that_keep_changing(
    run: Run, lone_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save(5)
    Clock(monkeypatch, lambda now: change_at(lone_file, now))
    result, lines = run.watch(settle_s=60)
    assert result.converted == ("step-5",)
    assert "waiting for step-10/model.pt: its files keep changing" in lines


def test_what_is_given_to_watch_must_fit(run: Run, tmp_path: Path) -> None:
    run.save(5)
    for where in (run.run, run.run / "out"):
        with pytest.raises(UsageError, match="its models would be found as checkpoints"):
            run.watch(directory=str(where))
    with pytest.raises(UsageError, match="is a checkpoint itself"):
        run.watch(run=str(run.run / "step-5"))
    with pytest.raises(UsageError, match="is in a store"):
        run.watch(directory="s3://bucket/out")
    assert typed(tmp_path / "gone/run", run.out, "--once").exit_code == 3
    result, lines = run.watch(run=str(tmp_path / "later"))
    assert (result.converted, lines) == ((), [f"waiting for {tmp_path}/later: it is not there yet"])
    shutil.copytree(run.run / "step-5", run.run / "more/step_5")
    with pytest.raises(UsageError, match="two checkpoints would be written as step-5") as caught:
        run.watch()
    assert sorted(caught.value.problems) == ["more/step_5", "step-5"]


def test_a_name_that_is_saved_again_and_again_is_refused(run: Run) -> None:
    run.save(5)
    save(training_state(weights()), run.run / "last.ckpt")
    for _ in range(2):
        lines = run.watch()[1]
        assert "last.ckpt is saved again and again under one name: not published" in lines
    run.check(5)


def test_the_final_model_at_the_top_of_a_run_is_no_checkpoint(run: Run) -> None:
    run.save(5)
    for path in hub(run.run.with_name("final"), weights(), CONFIG).iterdir():
        path.rename(run.run / path.name)
    assert run.watch()[0].converted == ("step-5",)


def test_what_somebody_else_put_there_stays(run: Run) -> None:
    run.save(5, 10)
    (run.out / "step-5").mkdir(parents=True)
    (run.out / "step-5/mine").write_text("mine")
    result, lines = run.watch(keep=1)
    assert result.converted == ("step-10",)
    assert f"{run.out}/step-5 is there, and watch.json does not list it: left as it is" in lines
    assert contents(run.out / "step-5") == {"mine": b"mine"}


def test_a_damaged_record_is_refused(run: Run) -> None:
    run.save(5)
    run.watch()
    whole = json.loads((run.out / RECORD).read_text())
    (entry,) = whole["models"]
    damaged = [
        *("", "[]", "\xff", '{"version": 2}', json.dumps({**whole, "version": 2})),
        *(json.dumps({**whole, "models": [{**entry, key: {}}]}) for key in entry if key != "entries"),
        json.dumps({**whole, "models": [entry, entry]}),
        json.dumps({key: value for key, value in whole.items() if key != "run"}),
        json.dumps({**whole, "models": [{**entry, "entries": {"a": 1}}]}),
        *(json.dumps({**whole, "unfinished": value}) for value in (None, [1], {"a": 1}, {"step-5": "x"})),
    ]
    for text in damaged:
        (run.out / RECORD).write_text(text, encoding="latin-1")
        done = typed(run.run, run.out, "--once")
        assert done.exit_code == 3, (text, done.output)
        assert RECORD in done.stderr
        assert "internal" not in done.stderr
    run.check(5)


def test_a_name_in_the_record_never_leads_out(run: Run, tmp_path: Path) -> None:
    run.save(5)
    run.watch()
    record = json.loads((run.out / RECORD).read_text())
    (tmp_path / "precious").mkdir()
    for name in ("../precious", "..", "a/b", "", "a\0b", "\ud800", ".watch", RECORD, 1, None):
        record["models"][0]["name"] = name
        (run.out / RECORD).write_text(json.dumps(record))
        assert typed(run.run, run.out, "--once", "--keep", "1").exit_code == 3
    assert (tmp_path / "precious").is_dir()


def test_a_checkpoint_that_cannot_be_converted_ends_the_watch(run: Run) -> None:
    run.save(5)
    other = hub(run.base.with_name("other"), {"unknown": torch.ones(3)}, CONFIG)
    done = typed(run.run, run.out, "--base", other, "--once")
    assert done.exit_code == 3
    assert "the checkpoint does not fit --base" in done.stderr
    assert run.watch()[0].converted == ("step-5",)
    run.check(5)


def test_the_oldest_are_removed_if_they_are_as_written(run: Run) -> None:
    run.save(5, 10, 15)
    result, _ = run.watch(keep=2)
    assert result.removed == ("step-5",)
    run.check(10, 15)
    (run.out / "step-10/config.json").write_text("{}")
    run.save(20)
    result, lines = run.watch(keep=1)
    assert result.removed == ("step-15",)
    assert f"{run.out}/step-10 was changed: it is not removed" in lines
    assert (run.out / "step-10").is_dir()
    assert run.watch(keep=1)[0].converted == (), "what was removed is not made again"


def test_a_directory_of_somebody_else_is_never_taken_for_an_output(run: Run) -> None:
    """Not even where a conversion of this name had begun, or been killed."""
    run.save(5)
    other = hub(run.base.with_name("other"), {"unknown": torch.ones(3)}, CONFIG)
    assert typed(run.run, run.out, "--base", other, "--once").exit_code == 3
    (run.out / "step-5").mkdir()
    (run.out / "step-5/mine").write_text("mine")
    run.save(10)
    run.watch(keep=1)
    assert contents(run.out / "step-5") == {"mine": b"mine"}


@pytest.mark.parametrize("added", [".git/commit", ".cache/huggingface/x", "empty/", "link"])
def test_whatever_is_added_to_an_output_keeps_it(run: Run, added: str) -> None:
    run.save(5)
    run.watch()
    path = run.out / "step-5" / added
    if added == "link":
        path.symlink_to("gone")
    elif added == "empty/":
        path.mkdir()
    else:
        path.parent.mkdir(parents=True)
        path.write_text("mine")
    run.save(10)
    result, lines = run.watch(keep=1)
    assert result.removed == ()
    assert f"{run.out}/step-5 was changed: it is not removed" in lines
    assert os.path.lexists(path)


def test_the_newest_are_kept_by_their_steps(run: Run) -> None:
    run.save(10)
    run.watch(keep=1)
    run.save(5)
    assert run.watch(keep=1)[0].removed == ("step-5",)
    run.check(10)


def test_a_name_that_no_output_can_have_is_refused(run: Run) -> None:
    run.save(5)
    save(training_state(weights()), run.run / "epoch_1\x1b")
    for _ in range(2):
        assert "epoch_1\\x1b has a name that no output can have: not published" in run.watch()[1]
    run.check(5)


def test_an_error_after_the_commit_loses_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(5)
    real = watching.consolidate

    def commit_and_fail(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        raise ResourceError("a disk failed")

    with monkeypatch.context() as patched:
        patched.setattr(watching, "consolidate", commit_and_fail)
        with pytest.raises(ResourceError, match="a disk failed"):
            run.watch()
    run.watch()
    run.check(5)


def test_a_run_is_the_same_by_any_path(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(5, 10)
    monkeypatch.chdir(run.run.parent)
    run.watch(run="run", keep=1)
    assert run.watch(keep=1)[0].converted == ()
    run.check(10)
    shutil.copytree(run.run, run.run.with_name("twin"))
    with pytest.raises(UsageError, match="has the models of another run"):
        run.watch(run="twin")


def test_what_was_removed_and_brought_back_stays(run: Run) -> None:
    run.save(5, 10)
    run.watch()
    shutil.copytree(run.out / "step-5", run.out / "saved", copy_function=shutil.copy2)
    run.watch(keep=1)
    (run.out / "saved").rename(run.out / "step-5")
    run.watch()
    run.check(5, 10)


def test_a_tracker_without_a_step_covers_only_what_it_names(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (5, 10):
        (run.run / f"step-{step}").mkdir()
        torch.save(weights(), run.run / f"step-{step}/model.pt")
    (run.run / "latest").write_text("step-5-final")
    looks = list[float]()
    Clock(monkeypatch, looks.append)
    run.watch(settle_s=60, consolidate={"ask_class": False})
    assert looks[-1] >= 60, "nothing shows that these saves have ended"


def test_names_that_are_saved_again_may_be_in_several_directories(run: Run) -> None:
    run.save(5)
    for name in ("a", "b"):
        save(training_state(weights()), run.run / name / "last.ckpt")
    assert run.watch()[0].converted == ("step-5",)


def test_a_second_watch_names_the_first(run: Run) -> None:
    command = [sys.executable, "-m", "shardkit", "watch", str(run.run), str(run.out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as first:
        lock = run.out / ".watch/lock"
        while not (lock.exists() and lock.read_text()):
            time.sleep(0.05)
        done = typed(run.run, run.out, "--once")
        assert done.exit_code == 2
        assert f"another watch works on {run.out}: process {first.pid} on " in done.stderr
        first.send_signal(signal.SIGTERM)
        assert first.wait() == 143
    assert typed(run.run, run.out, "--once").exit_code == 0


def test_a_run_that_goes_on(run: Run) -> None:
    """One process watches, while another one saves, and removes all but the last two."""
    command = [sys.executable, "-m", "shardkit", "watch", str(run.run), str(run.out), "--base", str(run.base)]
    with subprocess.Popen([*command, "--ask-class", "off"], stderr=subprocess.PIPE, text=True) as watcher:
        for step in range(1, 6):
            run.save(step)
            wanted = run.out / f"step-{step}"
            while not wanted.exists():
                assert watcher.poll() is None
                time.sleep(0.1)
            if step > 2:
                shutil.rmtree(run.run / f"step-{step - 2}")
        watcher.send_signal(signal.SIGTERM)
        assert watcher.wait() == 143
    assert run.watch()[0].converted == ()
    run.check(*range(1, 6))


# Kills, and a trainer that removes a checkpoint.


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    server = ForkServer(("shardkit.operations.watch", "tests.torture.faults"))
    yield server
    server.close()


def faulty(forks: ForkServer, run: Run, fault: dict[str, Any] | None, **more: Any) -> tuple[int, Any, str]:
    """Watch once in a process with a fault; return its exit status, what it printed, and its stderr."""
    request = {
        **{"run": str(run.run), "directory": str(run.out), "consolidate": run.options, "once": True},
        **more,
        "fault": fault,
    }
    done = forks.run({"code": SCRIPT, "argument": json.dumps(request)}, is_apart=True)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr.decode()


def num_calls(stderr: str) -> int:
    return len(json.loads(stderr.splitlines()[-1])["calls"])


def check_kill(forks: ForkServer, run: Run, at: int, keep: int | None) -> None:
    code, _, stderr = faulty(forks, run, {"at": at, "do": "kill"}, keep=keep)
    assert code == (-signal.SIGKILL if '"hit"' in stderr else 0), stderr
    for path in run.out.glob("step-*"):
        assert contents(path) == run.expected[path.name], (at, path)
    result, _ = run.watch(keep=keep)
    assert result.passed_over == ()
    run.check(*((5, 10) if keep is None else (10,)))
    record = json.loads((run.out / RECORD).read_text())
    assert [model["name"] for model in record["models"]] == ["step-5", "step-10"]
    assert record["unfinished"] == {}


def sample(forks: ForkServer, run: Run, keep: int | None, count: int) -> list[int]:
    """Return numbers of calls, all or evenly spread."""
    code, _, stderr = faulty(forks, run, None, keep=keep)
    assert code == 0, stderr
    shutil.rmtree(run.out)
    total = num_calls(stderr)
    return sorted({1 + (total - 1) * index // max(count - 1, 1) for index in range(count)})


@pytest.mark.parametrize("keep", [None, 1])
@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.prove)])
def test_a_kill_leaves_nothing_half_and_the_next_watch_goes_on(
    forks: ForkServer, run: Run, keep: int | None, count: int
) -> None:
    run.save(5, 10)
    for at in sample(forks, run, keep, count):
        check_kill(forks, run, at, keep)
        shutil.rmtree(run.out)


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.prove)])
def test_a_checkpoint_that_the_trainer_removes_is_taken_whole_or_passed_over(
    forks: ForkServer, run: Run, tmp_path: Path, count: int
) -> None:
    run.save(5, 10)
    shutil.copytree(run.run, tmp_path / "saved")
    for at in sample(forks, run, None, count):
        code, found, stderr = faulty(forks, run, {"at": at, "do": "remove"}, gone=str(run.run / "step-5"))
        assert code == 0, (at, stderr)
        was_made = "step-5" in found["converted"]
        assert was_made or found["passed_over"] in (["step-5"], []), (at, found)
        if not was_made and found["passed_over"]:
            assert any(line.startswith("passed over step-5: ") for line in found["lines"])
        run.check(*((5, 10) if was_made else (10,)))
        shutil.rmtree(run.out)
        shutil.rmtree(run.run)
        shutil.copytree(tmp_path / "saved", run.run)


def test_a_killed_watch_whose_checkpoint_is_gone(forks: ForkServer, run: Run) -> None:
    run.save(5, 10)
    for at in sample(forks, run, None, 12):
        faulty(forks, run, {"at": at, "do": "kill"})
        shutil.move(run.run / "step-5", run.run.with_name("moved"))
        was_made = any((run.out / folder / "step-5").exists() for folder in ("", ".watch"))
        result, _ = run.watch()
        assert result.passed_over in ((), ("step-5",))
        run.check(*((5, 10) if was_made else (10,)))
        shutil.rmtree(run.out)
        shutil.move(run.run.with_name("moved"), run.run / "step-5")


# The Hub.

PUSH = """
import json, sys
from shardkit.errors import ShardkitError
from shardkit.operations.watch import WatchOptions, watch
lines = []
try:
    result = watch(WatchOptions(**json.loads(sys.argv[1])), lines.append, progress=False).to_json()
except ShardkitError as error:
    result = error.to_json()
print(json.dumps({**result, "lines": lines}))
"""


def test_each_step_is_a_branch_and_the_newest_is_on_main(
    run: Run, tmp_path: Path, hub_client: Callable[..., list[Any]]
) -> None:
    run.save(5, 10)
    environment = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_TOKEN": "hf_secret"}
    with serving(FakeHub, repo={"main": {}}, blobs={}, created=[], asked=[]) as server:

        def push(**options: Any) -> Any:
            request = {
                **{"run": str(run.run), "directory": str(run.out), "consolidate": run.options},
                **{"once": True, "repo": "me/model", **options},
            }
            where = {"url": server.url, "cache": tmp_path / "cache", "directory": tmp_path}
            return hub_client(PUSH, request, environment=environment, **where)[-1]

        refused = push(repo="me/refused", keep=1)
        assert (refused["error"], refused["exit_code"]) == ("ResourceError", 5)
        run.check(5, 10)
        converted = {path: path.stat().st_mtime_ns for path in run.out.glob("step-*/*")}
        found = push(keep=1, private=True)
        assert (found["converted"], found["uploaded"], found["removed"]) == (
            [],
            ["step-5", "step-10"],
            ["step-5"],
        )
        assert {
            path: path.stat().st_mtime_ns for path in run.out.glob("step-10/*")
        }.items() <= converted.items()
        for branch, step in (("step-5", 5), ("step-10", 10), ("main", 10)):
            assert server.repo[branch] == run.expected[f"step-{step}"]
        assert any(True in said.values() or "private" in said.values() for said in server.created)
        other = push(repo="me/other", keep=1)
        assert (other["uploaded"], other["removed"]) == (["step-10"], []), "another repo has nothing yet"
        assert push()["uploaded"] == ["step-10"]
        shutil.rmtree(run.out / "step-10")
        run.save(15)
        found = push(branch_only=True)
        assert (found["converted"], found["uploaded"]) == (["step-15"], ["step-15"])
        assert server.repo["step-15"] == run.expected["step-15"]
        assert server.repo["main"] == run.expected["step-10"]
        record = json.loads((run.out / RECORD).read_text())
        assert [model["commit"] for model in record["models"]] == ["1" * 40] * 3


def test_a_private_repo_needs_a_repo(run: Run) -> None:
    assert typed(run.run, run.out, "--private", "--once").exit_code == 2


def test_a_full_disk_is_tried_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `once` it is the exit code; else the next look finds room."""
    run.save(5)
    real, tries = watching.consolidate, list[str]()

    def full(*arguments: Any, **options: Any) -> Any:
        tries.append("")
        if len(tries) < 3:
            raise ResourceError("no space left")
        return real(*arguments, **options)

    monkeypatch.setattr(watching, "consolidate", full)
    with pytest.raises(ResourceError, match="no space left"):
        run.watch()

    def interrupt_at_last(_: float) -> None:
        if len(tries) > 2:
            raise KeyboardInterrupt

    Clock(monkeypatch, interrupt_at_last)
    with pytest.raises(KeyboardInterrupt):
        run.watch(once=False)
    run.check(5)
