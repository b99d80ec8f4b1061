"""`shardkit latest`: what a script gets, over runs of stock DCP, DeepSpeed and Hub models, some with a killed save."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import shardkit
from shardkit.cli import main
from shardkit.errors import SourceError, UsageError
from tests.operations.consolidate.checkpoints import hub, save

TRACKER = "latest_checkpointed_iteration.txt"


def run_of(directory: Path, *steps: int) -> Path:
    """Make a run with a checkpoint of stock DCP for each step."""
    for step in steps:
        save({"weight": torch.full((3,), float(step))}, directory / f"step-{step}")
    return directory


def kill_save(step: Path) -> None:
    """Leave what a save leaves that was killed before its last file."""
    (step / ".metadata").unlink()


def typed(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["latest", *map(str, arguments)])


def states(run: Path) -> dict[str, str | None]:
    """Return what is missing in each checkpoint, in the order of the list, by its path in the run."""
    found = shardkit.latest(run, list_all=True).checkpoints
    assert found is not None
    return {os.path.relpath(each.path, run): each.missing for each in found}


def test_a_script_gets_the_path_alone_and_a_person_the_reason(tmp_path: Path) -> None:
    run = run_of(tmp_path / "my runs", 5, 9, 10)
    done = typed(run)
    assert (done.exit_code, done.stdout) == (0, f"{run}/step-10\n")
    assert done.stderr == "note: it has the highest step\n"
    quiet = typed(run, "-q")
    assert (quiet.stdout, quiet.stderr) == (done.stdout, "")


def test_in_a_shell(tmp_path: Path) -> None:
    run, empty = run_of(tmp_path / "a run", 5, 10), tmp_path / "empty"
    empty.mkdir()
    latest = f"{shlex.quote(sys.executable)} -m shardkit latest"
    line = 'if found=$({} {} 2>/dev/null); then printf "%s" "$found"; else printf "exit %s" $?; fi'
    for place, expected in ((run, f"{run}/step-10"), (empty, "exit 1"), (tmp_path / "gone", "exit 3")):
        command = line.format(latest, shlex.quote(str(place)))
        assert subprocess.run(command, shell=True, capture_output=True, text=True).stdout == expected


def test_a_killed_save_is_passed_over_and_named(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 5, 10, 15)
    kill_save(run / "step-15")
    os.truncate(next((run / "step-10").glob("*.distcp")), 100)
    done = typed(run)
    assert (done.exit_code, done.stdout) == (0, f"{run}/step-5\n")
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("warning: skipped step-15: the save did not finish")]
    assert [line for line in lines if line.startswith("warning: skipped step-10: ")]
    assert lines[-1] == "note: it has the highest step of those that are whole"


def test_none_is_whole(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 5, 10)
    for step in (5, 10):
        kill_save(run / f"step-{step}")
    done = typed(run)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"none: {run}: no checkpoint in it opens whole\n")
    assert "  step-{5,10}: the save did not finish" in done.stderr
    printed = typed(run, "--json")
    assert printed.exit_code == 1
    assert json.loads(printed.stdout)["path"] is None


def test_a_checkpoint_that_is_given_directly_is_opened_too(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 5, 10)
    assert typed(run / "step-5").stdout == f"{run}/step-5\n"
    os.truncate(next((run / "step-10").glob("*.distcp")), 100)
    done = typed(run / "step-10")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "step-10" in done.stderr


def test_several_runs_are_listed(tmp_path: Path) -> None:
    for name in ("sft", "dpo"):
        run_of(tmp_path / name, 5, 10)
    done = typed(tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert all(f"  {name}/step-10\n" in done.stderr for name in ("sft", "dpo"))
    with pytest.raises(UsageError, match="2 checkpoints here; say which"):
        shardkit.latest(tmp_path)
    done = typed(tmp_path, "--all")
    assert done.exit_code == 1, "none of them is the newest"
    assert list(states(tmp_path)) == [f"{name}/step-{step}" for step in (10, 5) for name in ("dpo", "sft")]


def test_steps_above_a_tracker_do_not_count(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 5, 10, 15)
    (run / TRACKER).write_text("10")
    done = typed(run)
    assert (done.exit_code, done.stdout) == (0, f"{run}/step-10\n")
    assert f"skipped step-15: {TRACKER} does not name it" in done.stderr
    missing = states(run)
    assert [missing["step-10"], missing["step-5"]] == [None, None]
    assert str(missing["step-15"]).startswith(TRACKER)


def test_a_tracker_that_names_a_damaged_step(tmp_path: Path) -> None:
    """`consolidate` refuses the run; the newest before it is found, and the difference is said."""
    run = run_of(tmp_path / "run", 5, 8, 10, 15)
    (run / TRACKER).write_text("10")
    for step in (8, 10):
        kill_save(run / f"step-{step}")
    with pytest.raises(SourceError, match="names 10, which cannot be opened"):
        shardkit.resolve_checkpoint(run)
    done = typed(run)
    assert (done.exit_code, done.stdout) == (0, f"{run}/step-5\n")
    warned = " ".join(done.stderr.split())
    assert (
        f"warning: {run}: {TRACKER} names 10, which cannot be opened: consolidate refuses this run" in warned
    )
    assert all(f"skipped step-{step}" in warned for step in (8, 10, 15))
    shutil.rmtree(run / "step-10")
    assert typed(run).stdout == f"{run}/step-5\n"
    kill_save(run / "step-5")
    done = typed(run)
    assert (done.exit_code, done.stdout) == (1, "")


def test_the_list_names_every_checkpoint_newest_first(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 5, 10, 20)
    kill_save(run / "step-20")
    run_of(run / "step-15.tmp", 1)
    (run / "logs").mkdir()
    (run / "step-30").symlink_to("gone")
    missing = states(run)
    assert list(missing) == ["step-30", "step-20", "step-15.tmp", "step-10", "step-5"]
    assert missing["step-30"] == "a link to gone, which is not there"
    assert str(missing["step-20"]).startswith("the save did not finish")
    assert missing["step-15.tmp"] == "it has a temporary name: the save did not finish"
    assert [missing["step-10"], missing["step-5"]] == [None, None]
    done = typed(run, "--all")
    headline, titles, *rows = done.stdout.splitlines()
    assert headline == f"{run}/step-10: 5 checkpoints, 2 whole"
    assert titles.split() == ["step", "size", "kind", "path", "state"]
    size = sum(path.stat().st_size for path in (run / "step-5").iterdir())
    assert rows[4].split() == ["5", f"{size / 1024:.1f}", "KiB", "DCP", "checkpoint", "step-5", "whole"]
    found = shardkit.latest(run, list_all=True)
    assert found.checkpoints is not None
    assert [each.size_bytes for each in found.checkpoints if each.step == 5] == [size]
    assert json.loads(typed(run, "--all", "--json").stdout) == json.loads(json.dumps(found.to_json()))


def test_a_final_model_and_the_checkpoints_below_it(tmp_path: Path) -> None:
    run = run_of(hub(tmp_path / "runs/sft", {"weight": torch.ones(3)}, None), 5)
    assert typed(run).stdout == f"{run}/step-5\n"
    assert list(states(run)) == ["step-5", "."]
    assert list(states(tmp_path)) == ["runs/sft/step-5", "runs/sft"]


def test_what_consolidate_wrote_into_the_run_is_no_checkpoint_of_it(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 5, 10)
    shardkit.consolidate(run, run / "step-10-hf")
    assert typed(run).stdout == f"{run}/step-10\n"
    assert list(states(run)) == ["step-10", "step-5"]


def test_deepspeed(tmp_path: Path) -> None:
    """The run stands for the tag that `latest` names; the list has the tags."""
    run = tmp_path / "run"
    for step in (9, 10, 11):
        path = run / f"global_step{step}/mp_rank_00_model_states.pt"
        path.parent.mkdir(parents=True)
        torch.save({"module": {"weight": torch.zeros(3)}, "param_shapes": None}, path)
    (run / "latest").write_text("global_step10")
    assert typed(run).stdout == f"{run}\n"
    found = states(run)
    assert list(found) == ["global_step11", "global_step10", "global_step9"]
    assert [reason is None for reason in found.values()] == [False, True, True]
    os.truncate(run / "global_step10/mp_rank_00_model_states.pt", 200)
    assert typed(run).stdout == f"{run}/global_step9\n"


def test_a_path_that_a_shell_would_print_otherwise_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run\x1b[31m", 5)
    done = typed(run)
    assert (done.exit_code, done.stdout) == (3, "")
    assert "\x1b" not in done.stderr
    assert json.loads(typed(run, "--json").stdout)["path"] == f"{run}/step-5"


def test_a_long_path_with_a_backslash_is_printed(tmp_path: Path) -> None:
    run = run_of(tmp_path / ("a" * 200) / "back\\slash", 5)
    assert typed(run).stdout == f"{run}/step-5\n"


def test_too_many_directories_are_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardkit.operations.resolve, "_MAX_ENTRIES", 2)
    done = typed(run_of(tmp_path / "run", 1, 2, 3))
    assert (done.exit_code, done.stdout) == (2, "")
    assert "give the run's own directory" in done.stderr
