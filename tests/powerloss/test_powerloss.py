"""A power loss at any moment of any operation leaves the old output, the new one, or none; and nothing is believed that is not there.

This is a sample; `make powerloss` replays all.
"""

from __future__ import annotations

import os
import random
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
from shardkit.files import storage
from tests.powerloss.disk import NOTHING, WHOLE, Disk, Part
from tests.powerloss.log import ROOT, Change, Entries, Log, Resize, Sync, Write
from tests.powerloss.mutations import MUTATIONS
from tests.powerloss.recorder import CHANGING, READING
from tests.powerloss.replay import Worker, recorded
from tests.powerloss.scenarios import SCENARIOS

pytestmark = pytest.mark.prove

NUM_ON_DISK, NUM_AGAIN = 40, 3
CAUGHT_IN = {
    "files_are_not_synced": "preshard",
    "data_is_not_synced": "preshard-cast-no-digest",
    "descriptions_are_not_synced": "consolidate-overwrite",
    "directories_are_not_synced": "reshard",
    "folders_are_not_synced": "reshard",
    "parent_is_not_synced": "preshard-resumed-late",
    "directories_are_synced_after_the_rename": "preshard",
    "manifest_comes_after_the_rename": "preshard",
    "parts_are_not_synced": "preshard-divided-overwrite",
    "exchange_of_parts_is_not_synced": "preshard-divided-overwrite",
}
AT_A_GLANCE = CAUGHT_IN.keys() - {
    "data_is_not_synced",
    "parts_are_not_synced",
}
"""Those after which the destination itself is wrong; the others let a run believe a note that it should not."""


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_a_power_loss_leaves(worker: Worker, name: str) -> None:
    pick = random.Random(name)
    with recorded([name], worker) as replays:
        ((_, replay),) = replays
        states = list(replay.states(pick, 2))
        num_on_disk = (
            len(states) if name == "preshard-resumed-no-digest" else NUM_ON_DISK
        )  # trust is all there
        found = replay.check(states, pick, num_on_disk=num_on_disk, num_again=NUM_AGAIN)
        for state in states if name == "preshard-overwrite-aside" else ():
            if any(path.endswith("/old") for path in state.tree) and found.num_again < 2 * NUM_AGAIN:
                replay.run_again(state, found)  # such a directory must not be in the way
    assert not found.wrong
    assert found.num_states >= (5 if SCENARIOS[name].verb == "page" else 15)
    assert found.num_again == NUM_AGAIN * (2 if name == "preshard-overwrite-aside" else 1)
    assert bool(found.num_resumable) == (SCENARIOS[name].verb != "page")
    assert found.num_old if SCENARIOS[name].replaces else found.num_absent


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_writer_with_a_mistake_is_caught(worker: Worker, mutation: str) -> None:
    """Which files a killed run leaves half-written depends on its threads: it has three recordings to be caught in."""
    pick = random.Random(mutation)

    def is_caught() -> bool:
        with recorded([CAUGHT_IN[mutation]], worker, mutation) as replays:
            ((_, replay),) = replays
            states, num_on_disk = list(replay.states(pick, 2)), 0 if mutation in AT_A_GLANCE else 10_000
            return bool(replay.check(states, pick, num_on_disk=num_on_disk, num_again=0).wrong)

    assert any(is_caught() for _ in range(3))


def test_everything_that_changes_a_file_is_recorded() -> None:
    """A call of the system is itself in `storage`, or a function there that says whose place it takes."""
    stands_for = re.compile(r"As `os\.\w+`")
    calls = {
        name
        for name, value in vars(storage).items()
        if callable(value) and (value in vars(os).values() or stands_for.match(value.__doc__ or ""))
    }
    assert calls | {"renameat2", "clone_range"} == {*CHANGING, *READING}


def log_of(*ops: Entries | Write | Resize | Sync) -> Log:
    """A root with a folder (1), in which a file (2) is made; the folder is on the disk."""
    return Log(is_directory=[True, True, False, False], entries={(ROOT, "d"): 1}, ops=list(ops))


CREATE = Entries((Change(1, "f", 2),))


def trees(log: Log) -> list[dict[str, bytes | None]]:
    found: list[dict[str, bytes | None]] = []
    for state in Disk(log, len(log.ops)).states(random.Random(0), 40):
        if state.tree not in found:
            found.append(state.tree)
    return found


def test_a_synced_file_may_have_no_name_and_a_name_no_bytes() -> None:
    write = Write(2, 0, b"abc")
    assert {"d": None} in trees(log_of(CREATE, write, Sync(2)))
    assert {"d": None, "d/f": b"abc"} in trees(log_of(CREATE, write, Sync(2)))
    found = trees(log_of(CREATE, write, Sync(1)))
    assert sorted(tree["d/f"] or b"" for tree in found) == [b"", b"\0\0\0", b"abc"]
    assert trees(log_of(CREATE, write, Sync(2), Sync(1))) == [{"d": None, "d/f": b"abc"}]


def test_a_name_does_not_go_back_behind_what_was_synced() -> None:
    rename = Entries((Change(1, "f", None), Change(ROOT, "g", 2)))
    log = log_of(CREATE, Sync(1), rename)
    assert [set(tree) for tree in trees(log)] == [{"d", "d/f"}, {"d", "g"}]
    assert [set(tree) for tree in trees(log_of(CREATE, rename, Sync(ROOT)))] == [{"d", "g"}]


def test_changes_of_different_names_are_lost_one_without_the_other() -> None:
    found = trees(log_of(CREATE, Entries((Change(1, "h", 3),))))
    assert {frozenset(tree) for tree in found} == {
        frozenset({"d", *names}) for names in ((), ("d/f",), ("d/h",), ("d/f", "d/h"))
    }


def test_writes_are_torn_at_sectors() -> None:
    log = log_of(CREATE, Sync(1), Resize(2, 2000), Sync(2), Write(2, 100, b"x" * 1500))
    half = Disk(log, 5).state((), {4: Part(sector=512, sectors=frozenset({1}))}).tree["d/f"]
    assert half == bytes(512) + b"x" * 512 + bytes(976)
    assert Disk(log, 5).state((), {4: NOTHING}).tree["d/f"] == bytes(2000)
    assert Disk(log, 5).state((), {4: WHOLE}).tree["d/f"] == bytes(100) + b"x" * 1500 + bytes(400)


# shardkit.save: torch writes the files, not through `storage`; what it syncs is watched where it calls the system.


class SyncWatch:
    """Knows what each file and directory was like when it was synced, and looks at them when a directory is renamed.

    Args:
        monkeypatch: puts it in front of the calls.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._synced: dict[int, Any] = {}
        self.unsynced: list[str] | None = None
        """Of what was renamed last."""
        self.events: list[str] = []
        for module in (os, storage):
            monkeypatch.setattr(module, "fsync", self._then_synced(module.fsync))
        monkeypatch.setattr(storage, "renameat2", self._looked_at(storage.renameat2))
        monkeypatch.setattr(storage, "rmdir", self._noted("rmdir", storage.rmdir))

    def _then_synced(self, call: Callable[[int], None]) -> Callable[[int], None]:
        def fsync(fd: int) -> None:
            call(fd)
            path = os.readlink(f"/proc/self/fd/{fd}")
            self._synced[os.fstat(fd).st_ino] = _content(path)
            self.events.append(f"sync {path}")

        return fsync

    def _looked_at(self, call: Callable[..., bool]) -> Callable[..., bool]:
        def renameat2(source: str, target: str, flags: int) -> bool:
            paths = [source, *(os.path.join(here, n) for here, d, f in os.walk(source) for n in (*d, *f))]
            self.unsynced = [
                path for path in paths if self._synced.get(os.stat(path).st_ino) != _content(path)
            ]
            self.events.append("rename")
            return call(source, target, flags)

        return renameat2

    def _noted(self, name: str, call: Callable[..., None]) -> Callable[..., None]:
        def noted(*args: Any, **kwargs: Any) -> None:
            self.events.append(name)
            call(*args, **kwargs)

        return noted


def _content(path: str) -> Any:
    if stat.S_ISDIR(os.stat(path).st_mode):
        return sorted(os.listdir(path))
    return Path(path).read_bytes()


def saved(path: Path, num_layers: int = 1) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 2) for _ in range(num_layers)))
    shardkit.save(model, path, extra={"step": 3}, overwrite=path.exists())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")
@pytest.mark.parametrize("num_layers", [1, 200])  # `.metadata` in one piece of Python's buffer, and in some
def test_save_syncs_all_before_the_one_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_layers: int
) -> None:
    path = tmp_path / "last"
    saved(path, num_layers)
    watch = SyncWatch(monkeypatch)
    saved(path, num_layers)
    assert watch.unsynced == []
    renamed = watch.events.index("rename")
    parent, removed = (watch.events.index(e, renamed) for e in (f"sync {tmp_path}", "rmdir"))
    assert renamed < parent < removed, "what was replaced is removed before the exchange is on the disk"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")
def test_save_that_does_not_sync_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "last")
    watch = SyncWatch(monkeypatch)
    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.os.fsync", lambda _: None)
    for call in ("sync_file", "sync_directories"):
        monkeypatch.setattr(storage, call, lambda _: None)
    saved(tmp_path / "last")
    assert watch.unsynced
    names = {os.path.basename(path) for path in watch.unsynced}
    assert names == {"data", "__0_0.distcp", ".metadata"}
