"""Staging directories: whose they are, what is taken over, and that a name is never half there."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardkit.errors import UsageError
from shardkit.transfer import staging as module
from shardkit.transfer import storage
from shardkit.transfer.execute import FileDigest
from shardkit.transfer.journal import Journal, read_finished, read_plan_hash
from shardkit.transfer.staging import Owner, Staging, abandoned, reclaimable_bytes, remove_abandoned

MAKE = "import sys; from shardkit.transfer.staging import Staging; print(Staging.create(sys.argv[1]).path)"


def dead_staging(destination: Path) -> Path:
    """Make a staging directory in a process that is gone when this returns."""
    command = [sys.executable, "-c", MAKE, str(destination)]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def test_only_the_dead_are_abandoned(tmp_path: Path) -> None:
    destination = tmp_path / "out"
    mine, dead = Staging.create(str(destination)), dead_staging(destination)
    owner = Owner.new_run()
    for other in (
        replace(owner, host="00000000", pid=1, started=0),  # another host: it may live
        replace(owner, namespace=1, started=0),  # another container: likewise
        replace(owner, pid=os.getppid(), started=module._start_time(os.getppid()) or 0),
    ):
        (tmp_path / f".out.shardkit-{other}").mkdir()
    rebooted = tmp_path / f".out.shardkit-{replace(owner, boot='00000000')}"
    rebooted.mkdir()
    (tmp_path / ".out.shardkit-nonsense").mkdir()
    (tmp_path / ".output.shardkit-nonsense").mkdir()
    assert set(abandoned(str(destination))) == {str(dead), str(rebooted)}
    assert mine.path not in abandoned(str(destination))


def test_a_pid_that_lives_again_is_another_process() -> None:
    owner = Owner.new_run()
    assert not owner.is_provably_dead()
    assert replace(owner, started=owner.started + 1).is_provably_dead()


def test_a_run_of_this_process_is_over_when_it_is_released(tmp_path: Path) -> None:
    first, second = (Staging.create(str(tmp_path / "out")) for _ in range(2))
    assert first.path != second.path
    assert abandoned(str(tmp_path / "out")) == []
    first.release()
    assert abandoned(str(tmp_path / "out")) == [first.path]
    assert reclaimable_bytes(str(tmp_path / "out")) > 0
    remove_abandoned(str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == [os.path.basename(second.path)]


def test_names_of_any_length_and_kind(tmp_path: Path) -> None:
    for name in ("a" * 255, "\u00fc" * 127, "b c\n"):
        staging = Staging.create(str(tmp_path / name))
        staging.commit(overwrite=False)
        assert (tmp_path / name).is_dir()


def test_only_one_adopts(tmp_path: Path) -> None:
    destination, dead = tmp_path / "out", dead_staging(tmp_path / "out")
    assert Staging.adopt(str(destination), str(dead)) is not None
    assert Staging.adopt(str(destination), str(dead)) is None


def test_commit_makes_the_directory_and_leaves_nothing_else(tmp_path: Path) -> None:
    staging = Staging.create(str(tmp_path / "out"))
    (Path(staging.data) / "file").write_text("new")
    staging.commit(overwrite=False)
    assert staging.is_committed
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "new"


@pytest.mark.parametrize("has_renameat2", [True, False])
def test_a_destination_that_appeared_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_renameat2: bool
) -> None:
    if not has_renameat2:
        monkeypatch.setattr(storage, "renameat2", lambda *arguments: False)
    staging = Staging.create(str(tmp_path / "out"))
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="appeared"):
        staging.commit(overwrite=False)


@pytest.mark.parametrize("has_renameat2", [True, False])
def test_overwriting_exchanges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_renameat2: bool) -> None:
    if not has_renameat2:
        monkeypatch.setattr(storage, "renameat2", lambda *arguments: False)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    staging = Staging.create(str(tmp_path / "out"))
    (Path(staging.data) / "new").touch()
    staging.commit(overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


class TestJournal:
    """What counts as finished."""

    def written(self, tmp_path: Path) -> tuple[str, FileDigest]:
        from shardkit.transfer.digest import crc32

        (tmp_path / "a").write_bytes(b"content")
        digest = FileDigest(name="a", size=7, crc32=crc32(b"content"), data_crcs=(1, 2))
        path = str(tmp_path / "journal")
        journal = Journal(path, "plan")
        journal.add(digest)
        journal.close()
        return path, digest

    def test_intact_files_are_finished(self, tmp_path: Path) -> None:
        path, digest = self.written(tmp_path)
        assert read_plan_hash(path) == "plan"
        assert read_finished(path, str(tmp_path), {"a": 7}) == {"a": digest}

    @pytest.mark.parametrize("content", [b"c0ntent", b"conten", b""])
    def test_changed_files_are_not(self, tmp_path: Path, content: bytes) -> None:
        path, _ = self.written(tmp_path)
        (tmp_path / "a").write_bytes(content)
        assert read_finished(path, str(tmp_path), {"a": 7}) == {}

    def test_a_line_cut_by_a_kill_is_ignored_and_the_next_is_not(self, tmp_path: Path) -> None:
        path, digest = self.written(tmp_path)
        with open(path, "a", encoding="utf-8") as file:
            file.write('\n{"file": {"name": "b", "si')
        journal = Journal(path, "plan")
        (tmp_path / "c").write_bytes(b"")
        empty = FileDigest(name="c", size=0, crc32=0, data_crcs=())
        journal.add(empty)
        journal.close()
        assert read_finished(path, str(tmp_path), {"a": 7, "c": 0}) == {"a": digest, "c": empty}

    def test_another_plan_begins_anew(self, tmp_path: Path) -> None:
        path, _ = self.written(tmp_path)
        Journal(path, "other").close()
        assert read_plan_hash(path) == "other"
        assert read_finished(path, str(tmp_path), {"a": 7}) == {}
