"""Factors that go into a store: the bytes are those of a local output, and a run that was killed computes none again."""

from __future__ import annotations

import errno
import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.cli import preshard as preshard_command
from shardkit.core.text import format_size
from shardkit.errors import IntegrityError, ResourceError, UsageError
from shardkit.files import storage
from shardkit.osft import compute
from shardkit.osft.plan import OsftPlan
from tests.operations.uploading.conftest import NUM_WEIGHTS, check_bytes, objects
from tests.worlds import stores as servers
from tests.worlds.factors import Counting, WorkerHere
from tests.worlds.processes import fork_server

_KILLED = """
import json, os, signal, sys
import shardkit
from shardkit.files.shared import SharedRecords
from shardkit.osft import compute
from tests.worlds.factors import WorkerHere

source, out, most = json.loads(sys.argv[1])
write, noted = SharedRecords.write_note, []

def die(self, *told):
    write(self, *told)
    noted.append(told)
    if len(noted) == most:
        os.kill(os.getpid(), signal.SIGKILL)
    return True

SharedRecords.write_note, compute.FactorWorker = die, WorkerHere
shardkit.preshard(source, out, world_size=3, osft=0.3, jobs=1)
"""

pytestmark = pytest.mark.usefixtures("counted")


def preshard(source: Path | str, out: Path | str, **options: Any) -> shardkit.PreshardResult:
    return shardkit.preshard(source, out, **{"world_size": 3, "osft": 0.3, "jobs": 1, **options})


def records(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "cache/factors").rglob("factors/*-*"))


@pytest.mark.usefixtures("served")
def test_the_bytes_are_those_of_a_local_output(source: Path, out: str, tmp_path: Path) -> None:
    plan = OsftPlan(ratio=0.3, targets="auto,!*.3.*")  # one stays dense
    told, expected = preshard(source, out, osft=plan), preshard(source, tmp_path / "local", osft=plan)
    check_bytes(out, tmp_path / "local")
    assert not records(tmp_path)
    assert shardkit.verify(out, full=True).problems == ()
    assert shardkit.diff(out, tmp_path / "local").is_equal
    assert told.osft is not None
    assert expected.osft is not None
    assert told.osft == expected.osft
    assert (told.read_bytes, told.checked_bytes) == (expected.read_bytes, expected.checked_bytes)


@pytest.mark.usefixtures("served")
def test_the_source_may_lie_in_a_store(source: Path, out: str, tmp_path: Path) -> None:
    preshard(source, f"{out}/dense", osft=None)
    shardkit.consolidate(f"{out}/dense", f"{out}/hub")
    preshard(f"{out}/hub", f"{out}/factors")
    preshard(source, tmp_path / "local")
    assert shardkit.diff(f"{out}/factors", tmp_path / "local").is_equal


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("then", ["resumed", "damaged", "anew"])
def test_what_a_killed_run_has_computed_is_taken_up(
    source: Path, out: str, tmp_path: Path, then: str
) -> None:
    request = {"code": _KILLED, "argument": json.dumps([str(source), out, 2])}
    done = fork_server().run(request)
    assert done.returncode == -signal.SIGKILL, done.stdout.decode()
    assert not objects(out)
    if then == "damaged":
        for path in records(tmp_path):
            path.write_bytes(bytes(path.stat().st_size))
    result = preshard(source, out, resume=then != "anew")
    assert result.osft is not None
    num_taken = 2 if then == "resumed" else 0
    assert (result.osft.num_resumed, len(Counting.asked)) == (num_taken, NUM_WEIGHTS - num_taken)
    preshard(source, tmp_path / "local")
    check_bytes(out, tmp_path / "local")
    assert not os.listdir(tmp_path / "cache/factors")


@pytest.mark.parametrize("is_lost", [False, True])
def test_files_that_were_sent_are_not_sent_again_if_they_have_these_factors(
    served: servers.Served,
    source: Path,
    out: str,
    tmp_path: Path,
    is_lost: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store fails once all files are there. Where the records were lost, others may be computed."""

    def fails(seen: servers.Seen) -> bool:
        return seen.method == "PUT" and "shardkit.json" in seen.path

    served.proxy.strikes, served.proxy.faults[:] = fails, ["403"] * 100
    with pytest.raises(ResourceError, match="denies access"):
        preshard(source, out)
    served.proxy.reset()
    assert ".metadata" not in objects(out)
    assert len(records(tmp_path)) == len(Counting.asked) == NUM_WEIGHTS
    Counting.asked = []
    if is_lost:
        storage.remove_tree(str(tmp_path / "cache/factors"))
        monkeypatch.setattr(WorkerHere, "ask", _others(WorkerHere.ask))
    result = preshard(source, out)
    assert (result.resumed_files, len(Counting.asked)) == ((0, NUM_WEIGHTS) if is_lost else (3, 0))
    preshard(source, tmp_path / "local")
    check_bytes(out, tmp_path / "local")
    assert not records(tmp_path)


def _others(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Return a worker's `ask` that finds factors of another kind, as another library of linear algebra does."""

    def asked(self: WorkerHere, request: dict[str, Any], stop: threading.Event) -> Any:
        return ask(self, {**request, "svd": "fp32"}, stop)

    return asked


@pytest.mark.usefixtures("served")
def test_a_record_that_is_damaged_before_it_is_sent(
    source: Path, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardkit.operations.parts.divided import Divided

    inner = Divided._move

    def damaged(self: Any, *args: Any) -> int:
        path = records(tmp_path)[0]
        path.write_bytes(bytes(path.stat().st_size))
        return inner(self, *args)

    monkeypatch.setattr(Divided, "_move", damaged)
    with pytest.raises(IntegrityError, match="other factors were read than were computed"):
        preshard(source, out)
    assert not objects(out)
    assert not records(tmp_path)


@pytest.mark.usefixtures("served")
def test_what_was_computed_is_given_up(source: Path, out: str, tmp_path: Path) -> None:
    request = {"code": _KILLED, "argument": json.dumps([str(source), out, 1])}
    assert fork_server().run(request).returncode == -signal.SIGKILL
    assert records(tmp_path)
    shardkit.status(f"{out}-of-another", abort=True)
    assert records(tmp_path)
    shardkit.status(out, abort=True)
    assert not os.listdir(tmp_path / "cache/factors")


@pytest.mark.usefixtures("served")
def test_an_interrupt_keeps_what_was_computed(
    source: Path, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Counting):
        def ask(self, request: dict[str, Any], stop: threading.Event) -> dict[str, Any]:
            if len(self.asked) == 3:
                raise KeyboardInterrupt
            return super().ask(request, stop)

    with monkeypatch.context() as patch:
        patch.setattr(compute, "FactorWorker", Interrupted)
        with pytest.raises(shardkit.Interrupted, match="what was computed is kept") as caught:
            preshard(source, out)
    assert f"shardkit status {out} --abort" in (caught.value.hint or "")
    result = preshard(source, out)
    assert result.osft is not None
    assert result.osft.num_resumed == 3


@pytest.mark.usefixtures("served")
def test_without_a_cache_nothing_is_kept(
    source: Path, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("SHARDKIT_CACHE", "off")
    preshard(source, out)
    preshard(source, tmp_path / "local")
    check_bytes(out, tmp_path / "local")
    assert not os.listdir(tmp_path / "temporary")
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("served")
def test_a_dry_run_says_what_the_local_disk_needs(
    source: Path, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = preshard(source, out, dry_run=True)
    assert result.osft is not None
    factors = sum(kind.factor_bytes for kind in result.osft.kinds)
    assert factors <= result.osft.record_bytes <= factors + NUM_WEIGHTS * 6 * storage.BLOCK
    assert any(line.split()[:2] == ["local", "disk"] for line in preshard_command.render(result))
    assert not (tmp_path / "cache/factors").exists()
    usage = storage.disk_usage(str(tmp_path))
    monkeypatch.setattr(storage, "disk_usage", lambda _: usage._replace(free=result.osft.record_bytes - 1))
    for is_dry in (True, False):
        with pytest.raises(ResourceError, match=r"No space left for .*cache") as caught:
            preshard(source, out, dry_run=is_dry)
        assert "SHARDKIT_CACHE=DIRECTORY" in (caught.value.hint or "")
    assert not Counting.asked
    assert not objects(out)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("part", [None, "1/1"])
@pytest.mark.parametrize("call", ["pwrite", "sync_file", "ftruncate"])
def test_a_disk_that_fills_up_is_named(
    source: Path, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str | None, call: str
) -> None:
    """Somebody else took the room while factors were computed; with more of it the run goes on."""
    would = preshard(source, out, part=part, dry_run=True).osft

    def fails(*given: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(storage, call, fails)
        place = rf"{tmp_path}/cache/factors/.*/work/.*/\d"
        with pytest.raises(ResourceError, match=rf"cannot write {place}.*: No space left") as caught:
            preshard(source, out, part=part)
    assert would is not None
    assert caught.value.hint == (
        f"the files there take {format_size(would.record_bytes)}: free some space or set SHARDKIT_CACHE=DIRECTORY, "
        "then run the same command again"
    )
    preshard(source, out, part=part)
    assert objects(out)[".metadata"]


@pytest.mark.usefixtures("served")
def test_a_cache_that_cannot_be_written_is_told(
    source: Path, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("SHARDKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ResourceError, match=r"cannot write .*file/factors") as caught:
        preshard(source, out)
    assert "SHARDKIT_CACHE=DIRECTORY" in (caught.value.hint or "")


@pytest.mark.usefixtures("served")
def test_an_output_that_is_there_is_not_computed_for(source: Path, out: str) -> None:
    preshard(source, out)
    before, Counting.asked = objects(out), []
    assert preshard(source, out).was_there
    with pytest.raises(UsageError, match="exists"):
        preshard(source, out, osft=0.5)
    assert not Counting.asked
    preshard(source, out, osft=0.5, overwrite=True)
    assert objects(out)[".metadata"] != before[".metadata"]
