"""A run at its place on a disk: its output is never half there, and what is in the way is never lost."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.errors import ResourceError, UsageError
from shardkit.files import storage
from shardkit.files.shared import SharedStaging, recover_output, remove_runs
from shardkit.files.staging import Owner, nothing
from tests.torture.conditions import small_disk

pytestmark = pytest.mark.usefixtures("place")
PLAN = "0123456789abcdef"


@pytest.fixture(params=[True, False], ids=["exchange", "no exchange"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where an output goes, on a file system that can exchange directories, or cannot."""
    if not request.param:
        monkeypatch.setattr(storage, "renameat2", lambda *arguments: False)
    return tmp_path / "out"


def begun(place: Path) -> SharedStaging:
    """Begin a run, and write a file."""
    run = SharedStaging.of_plan(str(place), PLAN, nothing, is_run=True)
    assert run.create(b"{}", ())
    (Path(run.data) / "new").touch()
    return run


def commit(run: SharedStaging, *, overwrite: bool = False) -> None:
    with run.workplace() as work:
        assert run.commit(work, storage.listdir(run.data), overwrite=overwrite)
    run.remove()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def ended_owner() -> str:
    """Return the name of what a process left that is over."""
    code = "from shardkit.files.staging import Owner; print(Owner.new_run())"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def make_old(place: Path) -> None:
    place.mkdir()
    (place / "old").touch()


@pytest.mark.parametrize("name", ["a" * 255, "\u00fc" * 127, "b c\n"], ids=["long", "two bytes", "odd"])
def test_names_of_any_length_and_kind(name: str, place: Path) -> None:
    commit(begun(place.with_name(name)))
    assert names(place.parent) == [name]
    assert names(place.with_name(name)) == ["new"]


@pytest.mark.parametrize("what", ["a file", "a link to an empty directory", "a full directory"])
def test_a_destination_that_appeared_is_not_replaced(what: str, place: Path) -> None:
    run = begun(place)
    if what == "a file":
        place.touch()
    elif what == "a full directory":
        (place / "empty").mkdir(parents=True)
    else:
        place.with_name("empty").mkdir()
        place.symlink_to("empty")
    before = place.lstat()
    with pytest.raises(UsageError, match="appeared"):
        commit(run)
    assert place.lstat().st_ino == before.st_ino
    assert names(Path(run.data)) == ["new"]


def test_an_empty_directory_that_appeared_is_as_good_as_nothing(place: Path) -> None:
    run = begun(place)
    place.mkdir()
    commit(run)
    assert names(place.parent) == ["out"]
    assert names(place) == ["new"]


def test_overwriting_replaces_all_of_it_and_leaves_nothing_else(place: Path) -> None:
    make_old(place)
    commit(begun(place), overwrite=True)
    assert names(place) == ["new"]
    assert names(place.parent) == ["out"]


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_rename_that_did_not_reach_the_disk_costs_neither_output(
    overwrite: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if overwrite:
        make_old(place)
    run, sync = begun(place), storage.sync_directory

    def failing(path: str) -> None:
        if path == str(place.parent) and run.is_committed:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(path)

    monkeypatch.setattr(storage, "sync_directory", failing)
    with pytest.raises(ResourceError, match=r"to the disk \(it is there, and whole\)"):
        commit(run, overwrite=overwrite)
    assert names(place) == ["new"]
    assert len([*Path(run.path).glob("*/old")]) == overwrite


def test_a_run_that_can_rename_no_more_keeps_what_was_there(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_old(place)
    run, rename = begun(place), storage.rename

    def failing(source: str, target: str) -> None:
        if str(place) in (source, target) and place.exists() is False:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(storage, "renameat2", lambda *arguments: False)
    monkeypatch.setattr(storage, "rename", failing)
    with pytest.raises(ResourceError, match="cannot rename"):
        commit(run, overwrite=True)
    monkeypatch.setattr(storage, "rename", rename)
    recover_output(str(place))
    assert names(place) == ["old"]
    assert names(Path(run.data)) == ["new"]
    remove_runs(str(place), nothing, but="")
    assert names(place.parent) == ["out"]


def test_what_could_not_get_its_name_is_kept_under_another(place: Path) -> None:
    run = begun(place)
    make_old(place)
    place.with_name("out-new").touch()
    with pytest.raises(UsageError, match="appeared"):
        commit(run)
    assert run.keep() == str(place) + "-new2"
    assert names(place.with_name("out-new2")) == ["new"]
    assert names(place.parent) == ["out", "out-new", "out-new2"]


def test_whoever_is_at_work_is_left_alone(place: Path) -> None:
    run, owner = SharedStaging.of_plan(str(place), PLAN, nothing, is_run=True), Owner.new_run()
    assert run.create(b"{}", (), owner)
    remove_runs(str(place), nothing, but="")
    assert run.is_open
    run.leave(owner)
    remove_runs(str(place), nothing, but="")
    assert names(place.parent) == []


@pytest.mark.root
def test_room_of_the_dead_comes_before_ones_own(tmp_path: Path) -> None:
    """What one that was killed has left may be all that a disk has room for."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        if disk is None:
            pytest.skip("needs root, and to mount")
        run = begun(disk / "out")
        dead = Path(run.path) / "work" / ended_owner()
        dead.mkdir()
        subprocess.run(["mount", "-o", "remount,nr_inodes=64", "tmpfs", str(disk)], check=True)
        with contextlib.suppress(OSError):
            for number in range(64):
                (dead / str(number)).touch()
        with pytest.raises(OSError, match="No space left"):
            (dead / "more").touch()
        with run.workplace() as work:
            assert names(Path(work).parent) == [os.path.basename(work)]


def test_what_was_touched_since_is_not_what_was_committed(place: Path) -> None:
    run = begun(place)
    with run.workplace() as work:
        assert run.commit(work, ["new"], overwrite=False)
    assert run.is_committed
    os.utime(place / "new", (1, 1))  # its size stays
    assert not run.is_committed


def test_what_is_not_there_is_removed_where_nothing_can_be_written(place: Path) -> None:
    place.touch()
    SharedStaging.of_plan(str(place / "out"), PLAN, nothing, is_run=True).give_up()
