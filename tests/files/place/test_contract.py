"""What a place promises, over every kind of place: see `kinds`."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from shardkit.errors import IncompleteError, ShardkitError, UsageError
from shardkit.files import storage, stores
from shardkit.files.place.contract import Place
from shardkit.files.remote import contract
from tests.files.place.kinds import CONTENT, FILES, KINDS, MARKER, Kind
from tests.worlds import stores as servers

ALL = tuple(range(len(FILES)))
OTHER = "1" * 16
"""Hash of another plan."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with servers.reached("any", tmp_path_factory.mktemp("served")):
        yield f"s3://{servers.BUCKET}"


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def there(
    request: pytest.FixtureRequest, tmp_path: Path, root: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Kind]:
    monkeypatch.setenv("SHARDKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(contract, "FIRST_WAIT_S", 0.0)
    home = tmp_path / request.node.name.translate({ord("["): "-", ord("]"): None})
    home.mkdir()
    yield request.param(home, root)
    stores.forget()


def begin(place: Place, **record: object) -> bool:
    """Begin a plan, or join it."""
    place.check()
    content = {"replaces": None, **record}
    return place.notebook.create(json.dumps(content).encode())


def write(place: Place, numbers: Collection[int] = ALL) -> None:
    with place.workplace() as directory:
        for number in numbers:
            write_file(place, directory, number)


def write_file(place: Place, directory: str, number: int) -> None:
    name, size = FILES[number]
    fd = storage.open_fd(os.path.join(directory, name), os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        storage.ftruncate(fd, size)
        storage.pwrite(fd, CONTENT[name], 0)
        storage.fsync(fd)
    finally:
        storage.close_fd(fd)
    note = {"name": name, "of": [1, None]}
    place.publish(
        directory, number, note, crc32=zlib.crc32(CONTENT[name]), counts=lambda there: there == note
    )


def commit(place: Place, plan: str = "0" * 16) -> bool:
    """Make the output of what has notes, as whoever commits does."""
    with place.workplace() as directory:
        assert {number for number, _ in place.notes(ALL)} == {*ALL}
        with place.describing(directory) as beside:
            for name, data in {"d.txt": b"d", MARKER: f"data-{plan}".encode()}.items():
                storage.write_file(os.path.join(beside.path, name), data)
            return place.commit(beside.path)


WHOLE = {**CONTENT, "d.txt": b"d"}


def test_nothing_is_seen_before_the_commit_and_then_all_of_it(there: Kind) -> None:
    place = there.place()
    assert begin(place)
    write(place)
    assert there.output() is None
    assert not place.is_committed
    assert not place.has_made
    assert commit(place)
    assert place.has_made
    assert there.output() == WHOLE
    place.clean_up(keeps_mark=False)
    assert there.beside() == []


def test_a_twin_joins_and_writes_what_is_missing(there: Kind) -> None:
    first, second = there.place(), there.place()
    assert begin(first)
    assert not begin(second)
    assert second.notebook.read_record() == first.notebook.read_record()
    write(first, [0])
    assert dict(second.notes(ALL)) == {0: {"name": "a.bin", "of": [1, None]}}
    write(second, [1, 2])
    assert {number for number, _ in first.notes(ALL)} == {*ALL}
    assert first.notebook.done.missing(len(ALL)) == []
    assert commit(first)
    assert there.output() == WHOLE


def test_twins_may_write_the_same_file(there: Kind) -> None:
    first, second = there.place(), there.place()
    begin(first)
    write(first)
    write(second)
    assert {number for number, _ in second.notes(ALL)} == {*ALL}
    assert commit(second)
    assert there.output() == WHOLE


def test_whoever_is_slower_finds_that_a_twin_has_made_it(there: Kind) -> None:
    first, second = there.place(), there.place()
    begin(first)
    write(first)
    write(second)
    assert not second.another_has_made()
    assert commit(first)
    assert second.another_has_made()
    assert not second.has_made
    assert there.output() == WHOLE


def test_a_note_counts_only_until_it_is_forgotten(there: Kind) -> None:
    place = there.place()
    begin(place)
    write(place, [0, 1])
    place.forget([0, 2])
    assert [number for number, _ in place.notes(ALL)] == [1]
    write(place, [0])
    assert [number for number, _ in place.notes(ALL)] == [0, 1]


def test_what_was_given_up_is_gone_and_no_process_goes_on_with_it(there: Kind) -> None:
    place, twin = there.place(), there.place()
    begin(place)
    write(place, [0])
    place.give_up()
    assert there.output() is None
    assert not twin.notebook.is_open
    assert not list(twin.notes(ALL))
    assert begin(twin)
    write(twin)
    assert commit(twin)
    assert there.output() == WHOLE


def test_nobody_commits_what_was_given_up(there: Kind) -> None:
    place = there.place()
    begin(place)
    write(place)
    with contextlib.suppress(OSError, ShardkitError), place.workplace() as directory:
        with place.describing(directory) as beside:
            storage.write_file(os.path.join(beside.path, MARKER), b"data-" + b"0" * 16)
            there.place().give_up()
            there.place().notebook.remove()
            for name, _ in place.notes(ALL):
                raise AssertionError(f"{name} has a note")
            place.commit(beside.path)
    assert there.output() is None or there.output() == CONTENT


def test_what_others_put_there_meanwhile_stays(there: Kind) -> None:
    place = there.place()
    begin(place)
    write(place)
    there.put(b"mine")
    before = there.output()
    with pytest.raises(UsageError, match=r"appeared|exists|is not what it was"):
        commit(place)
    assert there.output() == before
    assert not place.has_made


def test_an_output_is_replaced_at_one_moment(there: Kind) -> None:
    place = there.place()
    begin(place)
    write(place)
    commit(place)
    place.clean_up(keeps_mark=False)
    other = there.place(OTHER, overwrite=True)
    assert begin(other)
    write(other)
    assert there.output() == WHOLE
    assert commit(other, OTHER)
    assert there.output() == WHOLE
    assert other.has_made


def test_parts_say_who_they_are(there: Kind) -> None:
    place = there.place()
    begin(place)
    with place.workplace():
        place.say("1-of-2.json", b"{}")
    assert list(there.place().notebook.told()) == [("1-of-2.json", b"{}")]


def test_the_bytes_are_those_that_were_written(there: Kind) -> None:
    """Files of a plan that were removed or replaced meanwhile are missed, not taken for finished."""
    place = there.place()
    begin(place)
    write(place)
    there.lose(place, "b.bin")
    stores.forget()
    assert {number for number, _ in there.place().notes(ALL)} == {0, 2}
    with pytest.raises((AssertionError, IncompleteError)):
        commit(place)
    assert there.output() is None
