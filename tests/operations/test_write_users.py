"""Outputs and jobs of other users: real processes that may not do all that root may."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contents import contents
from tests.operations.consolidate.checkpoints import save, weights
from tests.worlds.users import NOBODY, run_as, shared_directory

pytestmark = [
    pytest.mark.prove,  # each process imports all before it becomes another user
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user"),
]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of all users, with a trainer's checkpoint in it."""
    with shared_directory() as directory:
        save({"model": weights()}, directory / "run")
        yield directory


def consolidate(place: Path, *options: str, uid: int = NOBODY, umask: int = 0o022) -> tuple[int, str]:
    """Run it as a user; return the exit code and what stderr says."""
    args = ("consolidate", "run", "out", "--max-shard-size", "2000", "--ask-class", "off", "--no-progress")
    done = run_as(uid, *args, *options, umask=umask, cwd=place)
    return done.returncode, done.stderr.decode()


def as_nobody(place: Path, *args: str) -> tuple[int, str]:
    done = run_as(NOBODY, *args, cwd=place)
    return done.returncode, (done.stdout + done.stderr).decode()


def test_an_old_output_that_may_not_be_written_is_refused_before_a_byte_moves(place: Path) -> None:
    assert consolidate(place, uid=0)[0] == 0
    before = contents(place / "out")
    code, said = consolidate(place, "--overwrite")
    assert code == 5
    assert "out cannot be written: it is not replaced" in said
    assert "kept" not in said
    assert sorted(path.name for path in place.iterdir()) == ["out", "run"]
    assert contents(place / "out") == before


def test_an_output_in_a_place_that_may_not_be_written_stays_as_it_is(place: Path) -> None:
    assert consolidate(place, uid=0)[0] == 0
    place.chmod(0o755)
    assert consolidate(place)[0] == 2
    assert consolidate(place, "--exist-ok")[0] == 0


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_job_of_another_user_is_named(place: Path, umask: int) -> None:
    """Whether its files may be read or not."""
    assert consolidate(place, "--part", "1/2", uid=0, umask=umask)[0] == 0
    code, said = consolidate(place, "--part", "2/2")
    assert code == 2
    assert "out belongs to another user" in said
    assert "shardkit abort" in said
    code, said = as_nobody(place, "status", "out")
    if umask == 0o022:
        assert code == 0
        assert "part 2/2" in said
    else:
        assert code == 2
        assert "out belongs to another user" in said
    code, said = as_nobody(place, "abort", "out")
    assert code == 2
    assert "out belongs to another user" in said
    assert (place / ".out.shardkit/job.json").exists()


def test_what_cannot_be_removed_of_the_old_output_is_named_until_it_is_gone(place: Path) -> None:
    assert consolidate(place)[0] == 0
    locked = place / "out" / "__pycache__"
    locked.mkdir()
    (locked / "code.pyc").touch()
    locked.chmod(0o555)
    os.chown(locked, 0, 0)
    code, said = consolidate(place, "--overwrite")
    assert code == 0
    (trash,) = place.glob(".out.shardkit-trash-*")
    assert f"{trash} is over and could not be removed" in said
    assert "`shardkit abort" in said
    for args in (("status", "out"), ("status",)):
        code, said = as_nobody(place, *args)
        assert code == 0
        assert f"{trash}\n" in said
    code, said = as_nobody(place, "abort", "out")
    (trash,) = place.glob(".out.shardkit-trash-*")
    assert code == 0
    assert f"{trash} is over and could not be removed" in said
    os.chown(next(trash.rglob("__pycache__")), NOBODY, NOBODY)
    next(trash.rglob("__pycache__")).chmod(0o755)
    code, said = as_nobody(place, "abort", "out")
    assert code == 0
    assert "what was left of a job" in said
    assert sorted(path.name for path in place.iterdir()) == ["out", "run"]
    assert as_nobody(place, "status", "out")[1].count(".shardkit-trash") == 0
