"""Staging directories: whose they are, and that a name is never half there."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardkit.errors import ResourceError, UsageError
from shardkit.files import staging as module
from shardkit.files import storage
from shardkit.files.shared import reclaimable_bytes
from shardkit.files.staging import (
    Owner,
    Staging,
    abandoned,
    recover,
    remove_abandoned,
)

MAKE = "import sys; from shardkit.files.staging import Staging; print(Staging.create(sys.argv[1]).path)"


def dead_staging(destination: Path) -> Path:
    """Make a staging directory in a process that is gone when this returns."""
    command = [sys.executable, "-c", MAKE, str(destination)]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


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


def test_names_of_any_length_and_kind(tmp_path: Path) -> None:
    for name in ("a" * 255, "\u00fc" * 127, "b c\n"):
        staging = Staging.create(str(tmp_path / name))
        staging.commit(overwrite=False)
        assert (tmp_path / name).is_dir()


def test_commit_makes_the_directory_and_leaves_nothing_else(tmp_path: Path) -> None:
    staging = Staging.create(str(tmp_path / "out"))
    (Path(staging.data) / "file").write_text("new")
    staging.commit(overwrite=False)
    assert staging.is_committed
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "new"


@pytest.mark.parametrize("has_renameat2", [True, False])
@pytest.mark.parametrize("what", ["a file", "a link to an empty directory", "a full directory"])
def test_a_destination_that_appeared_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_renameat2: bool, what: str
) -> None:
    if not has_renameat2:
        monkeypatch.setattr(storage, "renameat2", lambda *arguments: False)
    staging, out = Staging.create(str(tmp_path / "out")), tmp_path / "out"
    if what == "a file":
        out.touch()
    elif what == "a full directory":
        (out / "empty").mkdir(parents=True)
    else:
        (tmp_path / "empty").mkdir()
        out.symlink_to("empty")
    before = out.lstat()
    with pytest.raises(UsageError, match="appeared"):
        staging.commit(overwrite=False)
    assert out.lstat().st_ino == before.st_ino


@pytest.mark.parametrize("has_renameat2", [True, False])
def test_an_empty_directory_that_appeared_is_as_good_as_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_renameat2: bool
) -> None:
    if not has_renameat2:
        monkeypatch.setattr(storage, "renameat2", lambda *arguments: False)
    staging = Staging.create(str(tmp_path / "out"))
    Path(staging.data, "file").touch()
    (tmp_path / "out").mkdir()
    staging.commit(overwrite=False)
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["file"]


@pytest.mark.parametrize("has_renameat2", [True, False])
def test_overwriting_exchanges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_renameat2: bool) -> None:
    if not has_renameat2:
        monkeypatch.setattr(storage, "renameat2", lambda *arguments: False)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    staging = Staging.create(str(tmp_path / "out"))
    (Path(staging.data) / "new").touch()
    staging.commit(overwrite=True)
    assert names(tmp_path / "out") == ["new"]
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("has_renameat2", [True, False])
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_rename_that_did_not_reach_the_disk_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_renameat2: bool, overwrite: bool
) -> None:
    if not has_renameat2:
        monkeypatch.setattr(storage, "renameat2", lambda *arguments: False)
    if overwrite:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "old").touch()
    staging = Staging.create(str(tmp_path / "out"))
    (Path(staging.data) / "new").touch()
    sync = storage.sync_directory

    def failing(path: str) -> None:
        if path == str(tmp_path) and staging.is_committed:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(path)

    monkeypatch.setattr(storage, "sync_directory", failing)
    with pytest.raises(ResourceError, match="to the disk"):
        staging.commit(overwrite=overwrite)
    assert not staging.is_committed
    assert names(Path(staging.data)) == ["new"]
    assert names(tmp_path) == sorted([os.path.basename(staging.path), *(["out"] if overwrite else [])])
    assert not overwrite or names(tmp_path / "out") == ["old"]


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
        recover(str(tmp_path / "out"))
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
        with pytest.raises(UsageError, match="something else is there") as caught:
            recover(str(tmp_path / "out"))
        remove_abandoned(str(tmp_path / "out"), lambda path: ())
        assert names(tmp_path / "out") == ["theirs"]
        (old,) = tmp_path.glob(".out.shardkit-*/data.old/old")
        assert str(old.parent.parent.parent) in caught.value.problems[0]

    def test_once_the_new_one_is_in_place_it_is_removed(self, between: Path, tmp_path: Path) -> None:
        (between / "data").rename(tmp_path / "out")
        recover(str(tmp_path / "out"))
        assert names(tmp_path / "out") == ["new"]
        remove_abandoned(str(tmp_path / "out"), lambda path: ())
        assert names(tmp_path) == ["out"]

    def test_a_run_that_can_rename_no_more_keeps_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(storage, "renameat2", lambda *arguments: False)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "old").touch()
        staging, rename = Staging.create(str(tmp_path / "out")), storage.rename

        def failing(source: str, target: str) -> None:
            if source != str(tmp_path / "out"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            rename(source, target)

        monkeypatch.setattr(storage, "rename", failing)
        with pytest.raises(ResourceError, match="cannot rename"):
            staging.commit(overwrite=True)
        staging.discard()
        monkeypatch.setattr(storage, "rename", rename)
        recover(str(tmp_path / "out"))
        assert names(tmp_path / "out") == ["old"]
