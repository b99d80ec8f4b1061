"""Runs of bytes, whoever read them and in whatever order, tell whether an entry is what was recorded."""

from __future__ import annotations

import json
import random
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.core.catalog import Catalog, Checksums, Decoded, SourceFile, subset
from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import Region
from shardkit.errors import IntegrityError
from shardkit.transfer import checks, sources
from shardkit.transfer.chains import Evidence
from shardkit.transfer.checks import (
    IN_PART,
    NOT_READ,
    NOT_RECORDED,
    OVERLAPPING,
    SHORT_RUNS,
    SourceCheck,
)
from shardkit.transfer.sources import SourceFiles

UINT8 = BY_NAME["uint8"]
HINT = "-"


@pytest.fixture(autouse=True)
def no_free_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of the size of a checkpoint's are 5 % of what is read, and not of a few hundred bytes."""
    monkeypatch.setattr(checks, "_FREE_NBYTES", 0)


def source(
    directory: Path, sizes: list[int], *, unrecorded: int = -1, damaged: tuple[int, ...] = ()
) -> tuple[Catalog, bytes]:
    """One file: entries of some sizes with 10 bytes between them, each a tensor; damage after the CRC-32 was taken."""
    content, stretches = bytearray(), []
    catalog = Catalog(format="", directory=str(directory))
    for number, size in enumerate(sizes):
        content += bytes(10)
        start = len(content)
        content += random.Random(number).randbytes(size)
        recorded = None if number == unrecorded else crc32(content[start:])
        stretches.append((start, size, recorded))
        catalog.add_tensor(f"t{number}", UINT8, (size,), iter([(0, start, size, Region((0,), (size,)))]))
    for at in damaged:
        content[at] ^= 1
    path = directory / "source.bin"
    path.write_bytes(content)
    file = SourceFile(
        name="source.bin", path=str(path), size=len(content), checksums=Checksums.of(stretches[::-1])
    )
    catalog.files.append(file)
    return catalog, bytes(content)


def places(catalog: Catalog) -> list[tuple[int, int]]:
    table = catalog.chunks
    return [(table.start[row], table.start[row] + table.nbytes[row]) for row in range(len(table))]


def read(check: SourceCheck, content: bytes, runs: list[tuple[int, int]]) -> None:
    told = check.runs()
    for start, stop in runs:
        told.add(0, start, content[start:stop], "t")
    told.take()


def finish(check: SourceCheck, catalog: Catalog) -> tuple[int, dict[str, tuple[int, int]]]:
    """Read what is missing, compare, and return the bytes that were compared and those that were not, by reason."""
    with SourceFiles(catalog.files, check=check) as files:
        files.finish(hint=HINT)
    found = check.summary(catalog.tensors)
    return found.checked_bytes, {
        part.reason: (part.num_entries, part.entry_bytes) for part in found.unchecked
    }


def cut(start: int, stop: int, pick: random.Random) -> list[tuple[int, int]]:
    marks = sorted({start, stop, *(pick.randint(start, stop) for _ in range(pick.randint(0, 6)))})
    return list(pairwise(marks))


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    seed=st.integers(0, 1 << 30),
    threads=st.integers(1, 4),
    flip=st.booleans(),
)
def test_any_runs_in_any_order_by_any_threads(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int, threads: int, flip: bool
) -> None:
    pick = random.Random(seed)
    directory = tmp_path_factory.mktemp("source")
    catalog, _ = source(directory, sizes)
    entry = pick.randrange(len(sizes))
    damaged = pick.randrange(*places(catalog)[entry])
    catalog, content = source(directory, sizes, damaged=(damaged,) if flip else ())
    runs = [run for start, stop in places(catalog) for run in cut(start, stop, pick)]
    replicas = pick.sample(runs, pick.randint(0, len(runs)))
    runs += replicas
    pick.shuffle(runs)
    check = SourceCheck(catalog)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda number: read(check, content, runs[number::threads]), range(threads)))
    unchecked: dict[str, tuple[int, int]] = {}
    try:
        checked, unchecked = finish(check, catalog)
    except IntegrityError as error:
        assert flip
        (problem,) = error.problems
    else:
        # Of runs that overlap others nothing can be said without reading more; that is counted.
        assert checked + sum(nbytes for _, nbytes in unchecked.values()) == sum(sizes)
        assert replicas or not (flip or unchecked)
        assert not flip or unchecked
        return
    start, stop = places(catalog)[entry]
    assert problem.startswith(f"t{entry}: source.bin: bytes {start} to {stop} have CRC-32 ")


@pytest.mark.parametrize("listens", [False, True])
@pytest.mark.parametrize("sizes", [[2500], [900, 1100, 500]])
@pytest.mark.parametrize("flipped", [None, 10, 700, 1009, 1010, 2300])
def test_a_long_read_is_compared_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flipped: int | None, sizes: list[int], listens: bool
) -> None:
    """In one entry or over several, and where somebody is told of each piece."""
    monkeypatch.setattr(sources, "READ_NBYTES", 1000)
    catalog, content = source(tmp_path, sizes, damaged=() if flipped is None else (flipped,))
    begin, end = places(catalog)[0][0], places(catalog)[-1][1]
    check, heard, buffer = SourceCheck(catalog), list[int](), bytearray(end - begin)
    told = (lambda path, start, data: heard.append(len(data))) if listens else None
    with SourceFiles(catalog.files, check=check, on_read=told) as files, files.reader() as reader:
        crc = reader.read_into(0, memoryview(buffer), begin, "t")
    assert crc == (crc32(content[begin:end]) if len(sizes) == 1 and not listens else None)
    assert buffer == content[begin:end]
    assert sum(heard) == listens * len(buffer)
    if flipped is None:
        assert finish(check, catalog) == (sum(sizes), {})
    else:
        with pytest.raises(IntegrityError):
            finish(check, catalog)


@pytest.mark.parametrize(("wanted", "expected"), [(960, (1000, {})), (900, (0, {IN_PART: (1, 900)}))])
def test_a_small_rest_is_read_and_a_large_one_is_not(
    tmp_path: Path, wanted: int, expected: tuple[int, dict[str, tuple[int, int]]]
) -> None:
    catalog, content = source(tmp_path, [1000])
    ((start, stop),) = places(catalog)
    check = SourceCheck(catalog)
    read(check, content, [(start, start + 500), (stop - wanted + 500, stop)])
    assert finish(check, catalog) == expected


def test_damage_in_what_nobody_wanted_is_damage_of_the_entry(tmp_path: Path) -> None:
    catalog, content = source(tmp_path, [1000], damaged=(1005,))
    ((start, stop),) = places(catalog)
    check = SourceCheck(catalog)
    read(check, content, [(start, stop - 30)])
    with pytest.raises(IntegrityError, match="the source is damaged: 1 stretch does not have"):
        finish(check, catalog)


def test_small_rests_come_before_large_ones(tmp_path: Path) -> None:
    """5 % of all that is read: one entry's whole rest may be that, and another's not."""
    catalog, content = source(tmp_path, [1000, 100, 60])
    (a, _), (b, _), (c, c_stop) = places(catalog)
    check = SourceCheck(catalog)
    read(check, content, [(a, a + 1000), (b, b + 10), (c, c_stop - 20)])
    assert finish(check, catalog) == (1060, {IN_PART: (1, 10)})


def test_what_has_no_crc_is_counted(tmp_path: Path) -> None:
    catalog, content = source(tmp_path, [100, 200, 300], unrecorded=1)
    check = SourceCheck(catalog)
    read(check, content, places(catalog)[:2])
    assert finish(check, catalog) == (100, {NOT_RECORDED: (1, 200)})


def test_a_part_of_what_has_no_crc_is_not_completed(tmp_path: Path) -> None:
    catalog, content = source(tmp_path, [1000], unrecorded=0)
    ((start, stop),) = places(catalog)
    check = SourceCheck(catalog)
    read(check, content, [(start, stop - 1)])
    assert finish(check, catalog) == (0, {NOT_RECORDED: (1, 999)})


def test_files_without_checksums_are_counted_by_tensors(tmp_path: Path) -> None:
    catalog, content = source(tmp_path, [100, 200])
    catalog.files = [SourceFile(name="a", path=catalog.files[0].path, size=len(content))]
    check = SourceCheck(catalog)
    read(check, content, places(catalog))
    assert finish(check, catalog) == (0, {NOT_RECORDED: (2, 300)})


def test_what_was_never_read_is_told(tmp_path: Path) -> None:
    catalog, content = source(tmp_path, [100, 200])
    check = SourceCheck(catalog)
    read(check, content, places(catalog)[:1])
    (part,) = check.summary(catalog.tensors, looks_for_unread=True).unchecked
    assert (part.reason, part.num_entries, part.entry_bytes) == (NOT_READ, 1, 200)


def test_a_second_reading_proves_nothing_about_the_first(tmp_path: Path) -> None:
    """A part was damaged in the first reading, and is not in the second, which is whole: of another copy, or hours later."""
    catalog, content = source(tmp_path, [1000])
    ((start, stop),) = places(catalog)
    damaged = bytearray(content)
    damaged[start + 450] ^= 1
    for first, second in (
        ([(start, stop)], [(start, stop)]),
        ([(start + 400, start + 500)], [(start, stop)]),
        ([(start, start + 500)], [(start, start + 500), (start + 500, stop)]),
        (
            [(start + 400, start + 500)],
            [(start, start + 400), (start + 400, start + 500), (start + 500, stop)],
        ),
        ([(start, start + 500)], [(start, start + 300), (start + 300, start + 500), (start + 500, stop)]),
    ):
        for readings in (((damaged, first), (content, second)), ((content, second), (damaged, first))):
            check = SourceCheck(catalog)
            for seen, runs in readings:
                for run in runs:
                    read(check, bytes(seen), [run])
            if second == [(start, stop)] and first != second:
                assert finish(check, catalog) == (900, {OVERLAPPING: (1, 100)})
            else:
                with pytest.raises(IntegrityError):
                    finish(check, catalog)


def test_overlapping_views_are_read_once_more_if_that_is_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of their storage, in parts that begin and end where they do: each of them is compared."""
    catalog, content = source(tmp_path, [1000])
    ((start, stop),) = places(catalog)
    views = [(start, start + 600), (start + 400, stop)]
    check = SourceCheck(catalog)
    read(check, content, views)
    assert finish(check, catalog) == (0, {OVERLAPPING: (1, 1000)})
    monkeypatch.setattr(checks, "_FREE_NBYTES", 1000)
    check = SourceCheck(catalog)
    read(check, content, views)
    assert finish(check, catalog) == (1000, {})
    check = SourceCheck(catalog)
    damaged = bytearray(content)
    damaged[start + 500] ^= 1
    read(check, content, views[:1])
    read(check, bytes(damaged), views[1:])
    with pytest.raises(IntegrityError, match="recorded is"):
        finish(check, catalog)


def test_what_is_decoded_once_serves_several_files(tmp_path: Path) -> None:
    """The runs of its reading stay as they are beside those of a neighbour that differs from file to file."""
    catalog, content = source(tmp_path, [1000])
    ((start, stop),) = places(catalog)
    catalog.files.append(
        replace(catalog.files[0], made=Decoded(lambda _: memoryview(b""), (start + 400, stop)))
    )
    check = SourceCheck(catalog)
    for first, end in ((start, start + 100), (start + 100, start + 400)):
        decoding = check.runs()
        decoding.add(0, start + 400, content[start + 400 : stop], "turned")
        runs = check.runs()
        runs.add(0, first, content[first:end], "plain")
        runs.take_over(decoding.collect())
        runs.take()
    assert not check.missing()
    assert finish(check, catalog) == (1000, {})


def test_very_many_short_runs(tmp_path: Path) -> None:
    catalog, content = source(tmp_path, [40_000, 7])
    (start, stop), last = places(catalog)
    check = SourceCheck(catalog)
    read(check, content, [*((at, at + 3) for at in range(start, stop, 5)), last])
    assert finish(check, catalog) == (7, {IN_PART: (1, 24_000)})
    check = SourceCheck(catalog)
    runs = [(at, at + 2) for at in range(start, stop, 2)]
    random.Random(0).shuffle(runs)
    read(check, content, [*runs[::2], last])
    read(check, content, runs[1::2])
    assert finish(check, catalog) == (40_007, {})


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_MAX_KEPT", 4)
    catalog, content = source(tmp_path, [1000])
    ((start, stop),) = places(catalog)
    check = SourceCheck(catalog)
    read(check, content, [(at, at + 50) for at in range(start, stop, 100)])
    assert finish(check, catalog) == (0, {SHORT_RUNS: (1, 500)})
    check = SourceCheck(catalog)  # what is proved makes room for others
    for half in (start, start + 500):
        read(check, content, [(half, half + 200)])
        read(check, content, [(half + 200, half + 500)])
    for at in range(start, stop, 250):
        read(check, content, [(at, at + 250)])
    assert finish(check, catalog) == (1000, {})


@pytest.mark.parametrize("damaged", [(), (30,)])
def test_an_interrupted_run_tells_the_next_one(tmp_path: Path, damaged: tuple[int, ...]) -> None:
    catalog, content = source(tmp_path, [100, 200, 300], damaged=damaged, unrecorded=2)
    first, second, third = places(catalog)
    before = SourceCheck(catalog)
    told = before.runs()
    for start, stop in (first, (second[0], second[0] + 80), third):
        told.add(0, start, content[start:stop], "t")
    noted = json.loads(json.dumps(before.dump(told.take())))
    after = SourceCheck(catalog)
    assert after.load(noted)
    read(after, content, [(second[0] + 80, second[1])])
    if damaged:
        with pytest.raises(IntegrityError) as caught:
            finish(after, catalog)
        assert caught.value.problems[0].startswith("t0: ")
    else:
        assert finish(after, catalog) == (300, {NOT_RECORDED: (1, 300)})


def test_a_run_tells_of_a_file_that_was_opened_twice(tmp_path: Path) -> None:
    """Once with what a manifest records, once without: two stretches begin at one byte."""
    catalog, content = source(tmp_path, [100, 200])
    held = catalog.files[0].checksums
    assert held is not None
    (start, stop), _ = places(catalog)
    twice = held | Checksums.of([(start, stop - start, None)])
    catalog.files[0] = replace(catalog.files[0], checksums=twice)
    before = SourceCheck(catalog)
    told = before.runs()
    told.add(0, start, content[start:stop], "t")
    noted = json.loads(json.dumps(before.dump(told.take())))
    assert noted["files"]
    assert SourceCheck(catalog).load(noted)


@pytest.mark.parametrize(
    "told",
    [
        None,
        {},
        {"files": None},
        {"files": {"source.bin": [[10, 100, 0], []]}},
        {"files": {"source.bin": [[10, 100], [], []]}},
        {"files": {"source.bin": [["10", 100, 0], [], []]}},
        {"files": {"source.bin": [[10, 101, 0], [], []]}},  # it ends behind the file
        {"files": {"source.bin": [[], [10, 100, 0, 50, 51, 0], ["t0"]]}},  # and this run behind its entry
        {"files": {"source.bin": [[], [10, 100, 0, 50, 50, 0], []]}},
        {"files": {"source.bin": [[], [10, 100, 0, 50, 50, 0], [0]]}},
        {"files": {"another.bin": [[10, 100, 0], [], []]}},
    ],
)
def test_what_a_run_without_checks_left_is_not_taken(tmp_path: Path, told: object) -> None:
    catalog, _ = source(tmp_path, [100])
    check = SourceCheck(catalog)
    if isinstance(told, dict):
        told = {"unrecorded": check.dump(Evidence.of_all([]))["unrecorded"], **told}
    assert not check.load(told)


def test_what_was_compared_with_something_else_is_not_taken(tmp_path: Path) -> None:
    """A manifest came, or another one, between two runs."""
    catalog, content = source(tmp_path, [100, 200])
    before = SourceCheck(catalog)
    told = before.runs()
    told.add(0, places(catalog)[0][0], content[slice(*places(catalog)[0])], "t")
    noted = before.dump(told.take())
    held = catalog.files[0].checksums
    assert held is not None
    others = [[1, *held.crcs[1:]], [0, *held.crcs[1:]]]
    for checksums in (held, *(Checksums(held.starts, held.stops, array("q", crcs)) for crcs in others)):
        catalog.files[0] = replace(catalog.files[0], checksums=checksums)
        assert SourceCheck(catalog).load(noted) == (checksums is held)
    catalog.files[0] = replace(catalog.files[0], checksums=None)
    nothing = SourceCheck(catalog).dump(Evidence.of_all([]))
    catalog.files[0] = replace(catalog.files[0], checksums=held)
    assert not SourceCheck(catalog).load(nothing)


@pytest.mark.parametrize("damaged", [(), (30,), (150,)])
def test_processes_that_have_opened_other_records_put_together_what_they_read(
    tmp_path: Path, damaged: tuple[int, ...]
) -> None:
    """Each has its own entries, and one not even the file's. Whoever commits has those of the first."""
    catalog, content = source(tmp_path, [100, 200, 300], damaged=damaged, unrecorded=2)
    held, found = catalog.files[0].checksums, list[Any]()
    assert held is not None
    rows = list(held.rows())

    def opened(*mine: int) -> Catalog:
        own = subset(catalog, [f"t{number}" for number in mine])
        checksums = Checksums.of(rows[number] for number in mine) if mine else None
        own.files[0] = replace(own.files[0], checksums=checksums)
        return own

    for mine in ((0,), (1, 2), ()):
        check = SourceCheck(opened(*mine))
        for number in mine:
            start, stop = places(catalog)[number]
            for begin, end in ((start, stop),) if number != 1 else ((start, start + 90), (start + 90, stop)):
                told = check.runs()
                told.add(0, begin, content[begin:end], f"t{number}")
                found.append(json.loads(json.dumps(check.dump(told.take()))))
    check = SourceCheck(own := opened(0))
    assert all(check.load(each) for each in (*found, *found))
    if not damaged:
        assert finish(check, own) == (300, {NOT_RECORDED: (1, 300)})
        return
    with pytest.raises(IntegrityError) as caught:
        finish(check, own)
    (line,) = caught.value.problems
    number = 0 if damaged == (30,) else 1
    assert line.startswith(f"t{number}: source.bin: bytes {rows[number][0]} to ")
    assert [check.has_doubts(each) for each in found] == ([1, 0, 0, 0] if number == 0 else [0, 1, 1, 0])
