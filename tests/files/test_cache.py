import json
import os
import stat
from pathlib import Path

import pytest

from shardkit.files import cache
from shardkit.files.cache import Cache, home
from tests.worlds.processes import fork, wait

ONE, TWO, THREE = "1" * 64, "2" * 64, "3" * 64


@pytest.fixture
def kept(tmp_path: Path) -> Cache:
    made = Cache(str(tmp_path / "home" / "traces"))
    made.keep(ONE, b"content\n\0")
    return made


def file_of(kept: Cache, key: str = ONE) -> Path:
    return Path(kept.directory, key)


def test_what_is_kept_is_found_and_nobody_else_may_read_it(kept: Cache) -> None:
    assert kept.find(ONE) == b"content\n\0"
    assert kept.find(TWO) is None
    assert stat.S_IMODE(os.stat(kept.directory).st_mode) == 0o700
    assert stat.S_IMODE(file_of(kept).stat().st_mode) == 0o600
    assert os.listdir(kept.directory) == [ONE]


@pytest.mark.parametrize(
    ("named", "xdg", "expected"),
    [
        ("off", "/x", None),
        ("/mine", "/x", "/mine"),
        ("", "/x", "/x/shardkit"),
        ("", "", "/somebody/.cache/shardkit"),
        ("", "relative", "/somebody/.cache/shardkit"),
    ],
)
def test_variables_say_where_it_is(
    named: str, xdg: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SHARDKIT_CACHE", named), ("XDG_CACHE_HOME", xdg), ("HOME", "/somebody")):
        monkeypatch.setenv(name, value)
    assert home() == expected


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data.replace(b"content", b"cantent"),
        lambda data: data.replace(b'"format": 1', b'"format": 2'),
        lambda data: data.replace(ONE.encode(), TWO.encode()),
        lambda data: b"\xff" * len(data),
    ],
)
def test_a_damaged_entry_is_not_there_and_is_made_anew(damage, kept: Cache) -> None:  # type: ignore[no-untyped-def]
    path = file_of(kept)
    path.write_bytes(damage(path.read_bytes()))
    assert kept.find(ONE) is None
    kept.keep(ONE, b"again")
    assert kept.find(ONE) == b"again"


def test_an_entry_under_another_key_is_not_taken(kept: Cache) -> None:
    os.rename(file_of(kept), file_of(kept, TWO))
    assert kept.find(TWO) is None


def test_only_regular_files_of_this_user_are_read(kept: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    os.rename(file_of(kept), file_of(kept, TWO))
    file_of(kept).symlink_to(TWO)
    os.mkfifo(file_of(kept, THREE))
    assert kept.find(ONE) is None
    assert kept.find(THREE) is None
    kept.keep(ONE, b"mine")
    assert kept.find(ONE) == b"mine"
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert kept.find(ONE) is None
    kept.keep(ONE, b"into the directory of another user")
    monkeypatch.undo()
    assert kept.find(ONE) == b"mine"


def test_an_entry_of_another_user_in_a_shared_directory_is_not_taken(
    kept: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cache, "_is_own", lambda self: True)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert kept.find(ONE) is None


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    nowhere = Cache(str(tmp_path / "file" / "shardkit" / "traces"))
    nowhere.keep(ONE, b"content")
    assert nowhere.find(ONE) is None


def test_a_disk_that_is_full_leaves_nothing(kept: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.storage, "write", full)
    kept.keep(TWO, b"content")
    assert os.listdir(kept.directory) == [ONE]


def test_the_oldest_go_and_what_is_too_large_is_not_kept(
    kept: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MAX_ENTRIES", 2)
    for at, key in enumerate((ONE, TWO)):
        kept.keep(key, b"content")
        os.utime(file_of(kept, key), ns=(at, at))
    kept.keep(THREE, b"content")
    assert sorted(os.listdir(kept.directory)) == [TWO, THREE]
    monkeypatch.setattr(cache, "MAX_BYTES", 300)
    kept.keep(ONE, b"x" * 100)
    assert os.listdir(kept.directory) == [ONE]
    monkeypatch.setattr(cache, "MAX_ENTRY_BYTES", 100)
    assert kept.find(ONE) is None
    kept.keep(TWO, b"x" * 100)
    assert os.listdir(kept.directory) == [ONE]


def test_what_killed_writers_left_goes_and_files_of_a_person_stay(
    kept: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MAX_ENTRIES", 1)
    file_of(kept, f"{TWO}.{'0' * 16}").write_bytes(b"half")
    file_of(kept, "mine.txt").write_text("of a person")
    kept.keep(THREE, b"content")
    assert sorted(os.listdir(kept.directory)) == [THREE, "mine.txt"]


def test_processes_write_one_entry_at_a_time(kept: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_ENTRIES", 1)
    contents = [json.dumps([number] * 1000).encode() for number in range(3)]

    def work(content: bytes) -> None:
        for key in (ONE, TWO) * 20:
            kept.keep(key, content)
            assert kept.find(key) in (None, *contents)

    wait([fork(lambda content=content: work(content)) for content in contents])  # type: ignore[misc]
    left = os.listdir(kept.directory)
    assert set(left) <= {ONE, TWO}
    assert all(kept.find(key) in contents for key in left)
