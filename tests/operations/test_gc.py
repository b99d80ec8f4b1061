"""Only what nobody names goes, and only if it is old: the rest of a directory is as before."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import shardkit
from shardkit.errors import ResourceError, SourceError, UsageError
from shardkit.operations import gc as module
from tests.contents import contents
from tests.nested import FOLDER, OLDER, nest

DAY = 86400
INDEX = "model.safetensors.index.json"
OTHERS = (
    "data-0123",
    "data-0123456789ABCDEF",
    "data-0123456789abcdeg",
    "other",
    "model-00001-of-00002.safetensors",
)
"""Names that are nearly those of what may go."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("gc")
    (found / "hub").mkdir()
    save_file({"a": torch.arange(6.0)}, found / "hub/model.safetensors")
    shardkit.preshard(found / "hub", found / "flat", world_size=2, wrap="none")
    nest(found / "flat", found / "nested")
    (found / "model").mkdir()
    for mark in ("0123abcd", "4567abcd"):
        save_file({"a": torch.arange(6.0)}, found / f"model/model-{mark}-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "model-0123abcd-00001-of-00001.safetensors"}}
    (found / "model" / INDEX).write_text(json.dumps(index))
    return found


@pytest.fixture
def out(kept: Path, tmp_path: Path) -> Path:
    """An output with the data of an older save, and other things beside it."""
    shutil.copytree(kept / "nested", tmp_path / "out")
    shutil.copytree(kept / "nested" / FOLDER, tmp_path / "out" / OLDER)
    (tmp_path / "out" / OLDER / "more").mkdir()
    (tmp_path / "out" / OLDER / "more/file").write_bytes(bytes(10))
    for name in OTHERS:
        (tmp_path / "out" / name).mkdir()
        (tmp_path / "out" / name / "file").write_bytes(b"kept")
    age(tmp_path / "out", 2 * DAY)
    return tmp_path / "out"


def age(path: Path, seconds: float) -> None:
    for each in [path, *path.rglob("*")]:
        os.utime(each, (time.time() - seconds,) * 2, follow_symlinks=False)


def test_what_metadata_does_not_name_goes(out: Path) -> None:
    before = contents(out)
    old = {name: data for name, data in before.items() if name.startswith(OLDER)}
    said = shardkit.gc(out, dry_run=True)
    assert contents(out) == before
    result = shardkit.gc(out)
    assert said.removed[0].name == result.removed[0].name == OLDER
    assert (result.marker, result.kept, result.young) == (".metadata", (FOLDER,), ())
    assert result.removed[0].num_files == len(old)
    assert result.removed_bytes == sum(map(len, old.values()))
    assert 2 * DAY <= result.removed[0].age_s < 2 * DAY + 600
    assert contents(out) == {name: data for name, data in before.items() if name not in old}
    assert shardkit.verify(out, full=True).problems == ()
    assert shardkit.gc(out).removed == ()


def test_the_newest_file_tells_how_old_a_folder_is(out: Path) -> None:
    age(out / OLDER / "more/file", 60)
    before = contents(out)
    result = shardkit.gc(out)
    assert [each.name for each in result.young] == [OLDER]
    assert (result.removed, contents(out)) == ((), before)
    assert shardkit.gc(out, older_than="30s").removed


def test_what_parts_have_shared_goes_once_it_is_old(out: Path) -> None:
    shared = ".shardkit-parts-0123456789abcdef"
    (out / shared / "done").mkdir(parents=True)
    (out / shared / "done/1.json").write_bytes(b"{}")
    assert [each.name for each in shardkit.gc(out).young] == [shared]
    age(out / shared, 2 * DAY)
    assert [each.name for each in shardkit.gc(out).removed] == [shared]
    assert not (out / shared).exists()


def test_of_a_model_weights_go_that_the_index_does_not_name(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept / "model", tmp_path / "out")
    for name in OTHERS:
        (tmp_path / "out" / name).write_bytes(b"kept")
    age(tmp_path / "out", 2 * DAY)
    before = contents(tmp_path / "out")
    result = shardkit.gc(tmp_path / "out")
    gone = "model-4567abcd-00001-of-00001.safetensors"
    assert (result.marker, [each.name for each in result.removed]) == (INDEX, [gone])
    assert contents(tmp_path / "out") == {name: data for name, data in before.items() if name != gone}


def test_without_a_commit_it_is_refused(out: Path) -> None:
    (out / ".metadata").unlink()
    before = contents(out)
    with pytest.raises(UsageError, match="nothing was committed there") as refused:
        shardkit.gc(out)
    assert (contents(out), set(refused.value.problems)) == (before, {FOLDER, OLDER})
    result = shardkit.gc(out, uncommitted=True)
    assert {each.name for each in result.removed} == {FOLDER, OLDER}
    assert {name.split("/")[0] for name in contents(out)} == set(OTHERS)


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"cos\nsystem\n(S'id'\ntR."])
def test_a_damaged_marker_is_refused(out: Path, damage: Callable[[bytes], bytes]) -> None:
    (out / ".metadata").write_bytes(damage((out / ".metadata").read_bytes()))
    before = contents(out)
    for uncommitted in (False, True):
        with pytest.raises(SourceError):
            shardkit.gc(out, uncommitted=uncommitted)
    assert contents(out) == before


def test_links_are_neither_followed_nor_removed(out: Path, tmp_path: Path) -> None:
    (out / OLDER).rename(tmp_path / "elsewhere")
    (out / OLDER).symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path / "elsewhere")
    assert shardkit.gc(out, older_than=0).removed == ()
    assert (out / OLDER).is_symlink()
    assert contents(tmp_path / "elsewhere") == before
    (out / "data-00000000000000aa").mkdir()
    (out / "data-00000000000000aa/link").symlink_to(tmp_path / "elsewhere")
    assert len(shardkit.gc(out, older_than=0).removed) == 1
    assert contents(tmp_path / "elsewhere") == before


def test_what_is_committed_meanwhile_stays(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was started again may have found its data there, and needs no time to write it."""
    look = module._look

    def commit(path: str, name: str) -> module.Unused | None:
        found = look(path, name)
        data = (out / ".metadata").read_bytes()
        (out / ".metadata").write_bytes(data.replace(FOLDER.encode(), OLDER.encode()))
        return found

    monkeypatch.setattr(module, "_look", commit)
    before = {name: data for name, data in contents(out).items() if name != ".metadata"}
    with pytest.raises(ResourceError, match="committed meanwhile, nothing was removed"):
        shardkit.gc(out)
    assert {name: data for name, data in contents(out).items() if name != ".metadata"} == before


def test_a_flat_checkpoint_has_nothing_to_remove(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept / "flat", tmp_path / "out")
    age(tmp_path / "out", 2 * DAY)
    result = shardkit.gc(tmp_path / "out")
    assert (result.removed, result.young, result.marker) == ((), (), ".metadata")
    assert shardkit.verify(tmp_path / "out").problems == ()
    assert shardkit.gc(kept / "hub").marker is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("1d", DAY), ("12h", 43200), ("30 m", 1800), ("5s", 5), (7, 7), ("0", 0)]
)
def test_ages(text: str | int, seconds: int) -> None:
    assert module.parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "-1d", "1.5h", "1w", "nan"])
def test_no_age(text: str, out: Path) -> None:
    with pytest.raises(UsageError, match="not an age"):
        shardkit.gc(out, older_than=text)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such directory"):
        shardkit.gc(tmp_path / "out")
