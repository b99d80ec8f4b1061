"""Directories that are named after processes: whose they are, and what earlier versions left in some."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardkit.errors import UsageError
from shardkit.files import staging as module
from shardkit.files import storage
from shardkit.files.shared import reclaimable_bytes, recover_output, remove_abandoned
from shardkit.files.staging import Owner, Staging, owned

MAKE = "import sys; from shardkit.files.staging import Staging; print(Staging.create(sys.argv[1]).path)"


def dead_staging(destination: Path) -> Path:
    """Make a staging directory in a process that is gone when this returns."""
    command = [sys.executable, "-c", MAKE, str(destination)]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def abandoned(destination: str) -> list[str]:
    return [path for path, owner in owned(destination) if owner.is_provably_dead()]


def started(pid: int) -> int:
    status = module._status(pid)
    assert status is not None
    return status.started


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_only_the_dead_are_abandoned(tmp_path: Path) -> None:
    destination = tmp_path / "out"
    mine, dead = Staging.create(str(destination)), dead_staging(destination)
    owner = Owner.new_run()
    for other in (
        replace(owner, host="00000000", pid=1, started=0),  # another host: it may live
        replace(owner, namespace=1, started=0),  # another container: likewise
        replace(owner, pid=os.getppid(), started=started(os.getppid())),
    ):
        (tmp_path / f".out.shardkit-{other}").mkdir()
    (tmp_path / ".out.shardkit-nonsense").mkdir()
    (tmp_path / ".output.shardkit-nonsense").mkdir()
    assert abandoned(str(destination)) == [str(dead)]
    assert mine.path not in abandoned(str(destination))


def test_before_the_machine_was_started_again_nobody_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_boot", lambda: "12345678")
    owner = Owner.new_run()
    monkeypatch.setattr(module, "_boot", lambda: "87654321")
    assert owner.is_provably_dead()
    monkeypatch.setattr(module, "_boot", lambda: "00000000")  # it cannot be read
    assert not owner.is_provably_dead()


def test_a_pid_that_lives_again_is_another_process() -> None:
    owner = Owner.new_run()
    assert not owner.is_provably_dead()
    assert replace(owner, started=owner.started + 1).is_provably_dead()


def test_a_process_that_ended_and_was_not_asked_how_is_dead() -> None:
    """The first process of a container may never ask."""
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    status = module._status(child.pid)
    assert status is not None
    assert replace(Owner.new_run(), pid=child.pid, started=status.started).is_provably_dead()
    child.wait()


def test_what_cannot_be_known_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc may be shut, or show other users' processes to nobody (hidepid)."""
    owner = Owner.new_run()
    parent = replace(owner, pid=os.getppid(), started=started(os.getppid()))
    assert not replace(parent, started=0).is_provably_dead()  # it could not read its own
    monkeypatch.setattr(module, "_status", lambda pid: None)
    assert not parent.is_provably_dead()
    monkeypatch.setattr(module, "_content", lambda path: None)
    assert not parent.is_provably_dead()


def test_a_run_of_this_process_is_over_when_it_is_released(tmp_path: Path) -> None:
    first, second = (Staging.create(str(tmp_path / "out")) for _ in range(2))
    assert first.path != second.path
    assert abandoned(str(tmp_path / "out")) == []
    first.release()
    assert abandoned(str(tmp_path / "out")) == [first.path]
    assert reclaimable_bytes(str(tmp_path / "out")) > 0
    remove_abandoned(str(tmp_path / "out"), lambda path: ())
    assert [path.name for path in tmp_path.iterdir()] == [os.path.basename(second.path)]


class TestMovedAside:
    """Where directories cannot be exchanged, the old one is away for a moment, and never lost."""

    @pytest.fixture
    def between(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A replacement that was killed between its two renames; returns the staging directory."""
        dead = dead_staging(tmp_path / "out")
        (dead / "data" / "new").touch()
        (dead / "data.old").mkdir()
        (dead / "data.old" / "old").touch()
        monkeypatch.setattr(storage, "renameat2", lambda *arguments: False)
        return dead

    def test_it_is_put_back_and_the_new_one_kept(self, between: Path, tmp_path: Path) -> None:
        recover_output(str(tmp_path / "out"))
        assert names(tmp_path / "out") == ["old"]
        (left,) = abandoned(str(tmp_path / "out"))
        assert names(Path(left) / "data") == ["new"]

    def test_before_the_rest_is_removed(self, between: Path, tmp_path: Path) -> None:
        remove_abandoned(str(tmp_path / "out"), lambda path: ())
        assert names(tmp_path) == ["out"]
        assert names(tmp_path / "out") == ["old"]

    def test_what_somebody_put_there_and_the_old_one_both_stay(self, between: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").touch()
        with pytest.raises(UsageError, match="cannot go back") as caught:
            recover_output(str(tmp_path / "out"))
        remove_abandoned(str(tmp_path / "out"), lambda path: ())
        assert names(tmp_path / "out") == ["theirs"]
        (old,) = tmp_path.glob(".out.shardkit-*/data.old/old")
        assert str(old.parent.parent.parent) in caught.value.problems[0]

    def test_once_the_new_one_is_in_place_it_is_removed(self, between: Path, tmp_path: Path) -> None:
        (between / "data").rename(tmp_path / "out")
        recover_output(str(tmp_path / "out"))
        assert names(tmp_path / "out") == ["new"]
        remove_abandoned(str(tmp_path / "out"), lambda path: ())
        assert names(tmp_path) == ["out"]
