"""Readings that tile an entry, whoever read them and in whatever order, show whether it is what was recorded."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.core.catalog import Catalog, Checksums, Decoded, OnRead, SourceFile, subset
from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import Region
from shardkit.errors import IntegrityError
from shardkit.transfer import checks, sources
from shardkit.transfer.checks import (
    IN_PART,
    NO_CHECKSUMS,
    NOT_READ,
    NOT_RECORDED,
    OVERLAPPING,
    SHORT_READINGS,
    Readings,
    SourceCheck,
    are_readings,
    as_json,
    have_read,
    judge,
    pack,
)
from shardkit.transfer.sources import SourceFiles

UINT8 = BY_NAME["uint8"]
HINT = "-"


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


def listed(catalog: Catalog, content: bytes, spans: list[tuple[int, int]], tensor: str = "t") -> Readings:
    """What a note has of one thread that read some spans of the file, after a journey as JSON."""
    readings = SourceCheck(catalog).readings()
    for start, stop in spans:
        readings.add(catalog.files[0].path, start, content[start:stop], tensor)
    return json.loads(json.dumps(as_json(pack(readings.take()))))


def finish(lists: list[Readings]) -> tuple[int, dict[str, tuple[int, int]]]:
    """Return the bytes that were compared and those that were not, by reason."""
    verdict = judge(lists)
    verdict.raise_damaged(hint=HINT)
    checked = verdict.checked
    return checked.checked_bytes, {
        part.reason: (part.num_entries, part.entry_bytes) for part in checked.unchecked
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
def test_any_readings_in_any_order_by_any_threads(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int, threads: int, flip: bool
) -> None:
    pick = random.Random(seed)
    directory = tmp_path_factory.mktemp("source")
    catalog, _ = source(directory, sizes)
    entry = pick.randrange(len(sizes))
    damaged = pick.randrange(*places(catalog)[entry])
    catalog, content = source(directory, sizes, damaged=(damaged,) if flip else ())
    spans = [span for start, stop in places(catalog) for span in cut(start, stop, pick)]
    replicas = pick.sample(spans, pick.randint(0, len(spans)))
    spans += replicas
    pick.shuffle(spans)
    with ThreadPoolExecutor(threads) as pool:
        lists = list(pool.map(lambda n: listed(catalog, content, spans[n::threads]), range(threads)))
    unchecked: dict[str, tuple[int, int]] = {}
    try:
        checked, unchecked = finish(lists)
    except IntegrityError as error:
        assert flip
        (problem,) = error.problems
    else:
        # Of readings that overlap nothing can be said without reading more; that is counted.
        assert checked + sum(nbytes for _, nbytes in unchecked.values()) == sum(sizes)
        assert replicas or not (flip or unchecked)
        assert not flip or sum(nbytes for _, nbytes in unchecked.values()) >= sizes[entry]
        return
    start, stop = places(catalog)[entry]
    assert problem.startswith(f"t: source.bin: bytes {start} to {stop} have CRC-32 ")


@pytest.mark.parametrize("sizes", [[2500], [900, 1100, 500]])
@pytest.mark.parametrize("flipped", [None, 10, 700, 1009, 1010, 2300])
def test_a_long_read_is_compared_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flipped: int | None, sizes: list[int]
) -> None:
    """In one entry or over several."""
    monkeypatch.setattr(sources, "READ_NBYTES", 1000)
    catalog, content = source(tmp_path, sizes, damaged=() if flipped is None else (flipped,))
    begin, end = places(catalog)[0][0], places(catalog)[-1][1]
    check, buffer = SourceCheck(catalog), bytearray(end - begin)
    with SourceFiles(catalog.files, check=check) as files:
        with files.reader() as reader:
            crc = reader.read_into(0, memoryview(buffer), begin, "t")
        assert crc == (crc32(content[begin:end]) if len(sizes) == 1 else None)
        assert buffer == content[begin:end]
        if flipped is None:
            files.finish(hint=HINT)
            assert finish(check.packed()) == (sum(sizes), {})
        else:
            with pytest.raises(IntegrityError):
                files.finish(hint=HINT)


def test_an_entry_that_is_not_read_whole_is_not_compared(tmp_path: Path) -> None:
    catalog, content = source(tmp_path, [1000, 100])
    (start, stop), whole = places(catalog)
    lists = [listed(catalog, content, [(start, start + 500), (start + 510, stop), whole])]
    assert finish(lists) == (100, {IN_PART: (1, 990)})


def test_what_has_no_crc_is_counted(tmp_path: Path) -> None:
    """All of it, however much was read."""
    catalog, content = source(tmp_path, [100, 200, 300], unrecorded=1)
    first, (start, stop), _ = places(catalog)
    lists = [listed(catalog, content, [first, (start, stop - 1), (start, start + 5)])]
    assert finish(lists) == (100, {NOT_RECORDED: (1, 200)})


@pytest.mark.parametrize(("name", "reason"), [("a", NOT_RECORDED), ("a.safetensors", NO_CHECKSUMS)])
def test_files_without_checksums_are_counted_by_tensors(tmp_path: Path, name: str, reason: str) -> None:
    catalog, content = source(tmp_path, [100, 200])
    catalog.files = [SourceFile(name=name, path=catalog.files[0].path, size=len(content))]
    (start, stop), second = places(catalog)
    assert finish([listed(catalog, content, [(start, stop), second])]) == (0, {reason: (2, 300)})
    assert finish([listed(catalog, content, [(start, stop - 50)])]) == (0, {reason: (1, 100)})


def test_what_was_never_read_is_counted(tmp_path: Path) -> None:
    catalog, _ = source(tmp_path, [100, 200, 300], unrecorded=2)
    check = SourceCheck(catalog)
    with SourceFiles(catalog.files, check=check) as files, files.reader() as reader:
        for number, (start, stop) in enumerate(places(catalog)):
            head = start + 30 if number else stop
            reader.read_into(0, memoryview(bytearray(head - start)), start, f"t{number}")
            reader.list_unread(0, head, stop - head, f"t{number}")
    assert finish(check.packed()) == (100, {NOT_READ: (1, 200), NOT_RECORDED: (1, 300)})


def test_a_second_reading_proves_nothing_about_the_first(tmp_path: Path) -> None:
    """A part was damaged in the first reading, and is not in the second, which is whole: of another copy, or hours later."""
    catalog, content = source(tmp_path, [1000])
    ((start, stop),) = places(catalog)
    damaged = bytearray(content)
    damaged[start + 450] ^= 1
    for first, second in (
        ([(start, stop)], [(start, stop)]),
        ([(start, start + 500)], [(start, start + 500), (start + 500, stop)]),
        ([(start + 400, start + 500)], [(start, stop)]),
        ([(start, start + 500)], [(start, start + 300), (start + 300, start + 500), (start + 500, stop)]),
    ):
        for readings in (((damaged, first), (content, second)), ((content, second), (damaged, first))):
            lists = list[Readings]()
            for seen, spans in readings:
                lists += [listed(catalog, bytes(seen), [span]) for span in spans]
            if first[0] in second:
                with pytest.raises(IntegrityError):
                    finish(lists)
            else:
                assert finish(lists) == (0, {OVERLAPPING: (1, 1000)})


def test_a_damaged_whole_is_damage_beside_any_other_reading(tmp_path: Path) -> None:
    catalog, content = source(tmp_path, [1000], damaged=(500,))
    ((start, stop),) = places(catalog)
    with pytest.raises(IntegrityError, match="recorded is"):
        finish(
            [listed(catalog, content, [(start, stop)]), listed(catalog, content, [(start + 10, start + 20)])]
        )


def test_readings_that_overlap_are_not_compared(tmp_path: Path) -> None:
    catalog, content = source(tmp_path, [1000, 10])
    (start, stop), other = places(catalog)
    views = [(start, start + 600), (start + 400, stop), other]
    assert finish([listed(catalog, content, views)]) == (10, {OVERLAPPING: (1, 1000)})
    views[1] = (start + 400, stop - 50)
    assert finish([listed(catalog, content, views)]) == (10, {IN_PART: (1, 950)})


def test_equal_readings_are_one(tmp_path: Path) -> None:
    """Of tied tensors, of ranks and in several files."""
    catalog, content = source(tmp_path, [1000, 500])
    (start, stop), whole = places(catalog)
    halves = [(start, start + 300), (start + 300, stop)]
    lists = [
        listed(catalog, content, spans, tensor)
        for spans in ([halves[0], whole], [halves[1]], [*halves[:1], whole])
        for tensor in ("a", "b")
    ]
    assert finish(lists) == (1500, {})


def test_what_is_decoded_once_serves_several_files(tmp_path: Path) -> None:
    """Neighbours of another tensor are not joined with it."""
    catalog, content = source(tmp_path, [1000])
    ((start, stop),) = places(catalog)

    def decode(on_read: OnRead) -> memoryview:
        on_read(catalog.files[0].path, start + 400, memoryview(content)[start + 400 : stop])
        return memoryview(bytes(600))

    catalog.files.append(replace(catalog.files[0], derivation=Decoded(decode, (start + 400, stop)), size=600))
    check, lists = SourceCheck(catalog), list[Readings]()
    with SourceFiles(catalog.files, check=check) as files, files.reader() as reader:
        for first, end in ((start, start + 100), (start + 100, start + 400)):
            reader.read_into(0, memoryview(bytearray(end - first)), first, "plain")
            reader.read_into(1, memoryview(bytearray(600)), 0, "turned")
            lists.append(pack(reader.take_readings()))
    assert finish(lists) == (1000, {})


@pytest.mark.parametrize("is_proved", [False, True])
def test_what_decoding_compares_counts_as_compared(tmp_path: Path, is_proved: bool) -> None:
    made = Decoded(lambda _: memoryview(b"0123456789"), is_proved=is_proved)
    catalog = Catalog(format="", directory=str(tmp_path))
    catalog.files.append(SourceFile(name="packed:t", path=str(tmp_path / "packed"), size=10, derivation=made))
    check = SourceCheck(catalog)
    with SourceFiles(catalog.files, check=check) as files:
        for _ in range(2):
            with files.reader() as reader:
                reader.read_into(0, memoryview(bytearray(10)), 0, "t")
    assert finish(check.packed()) == ((10, {}) if is_proved else (0, {NOT_RECORDED: (1, 10)}))


def test_very_many_short_readings(tmp_path: Path) -> None:
    catalog, content = source(tmp_path, [40_000, 7])
    (start, stop), last = places(catalog)
    short = [(at, at + 3) for at in range(start, stop, 5)]
    assert finish([listed(catalog, content, [*short, last])]) == (7, {IN_PART: (1, 24_000)})
    spans = [(at, at + 2) for at in range(start, stop, 2)]
    random.Random(0).shuffle(spans)
    lists = [listed(catalog, content, [*spans[::2], last]), listed(catalog, content, spans[1::2])]
    assert finish(lists) == (40_007, {})


def test_what_is_listed_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_MAX_MORE", 4)
    catalog, content = source(tmp_path, [1000, 100])
    (start, stop), whole = places(catalog)
    short = listed(catalog, content, [*((at, at + 50) for at in range(start, stop, 100)), whole])
    assert finish([short]) == (100, {SHORT_READINGS: (1, 950)})
    assert sum(len(numbers) for numbers in short["parts"]["source.bin"].values()) == 6
    halves = [(at, at + 50) for at in range(start, stop, 50)]
    assert finish([listed(catalog, content, halves)]) == (1000, {})


@pytest.mark.parametrize(
    "readings",
    [
        None,
        {},
        {"whole": {}},
        {"whole": {}, "parts": []},
        {"whole": {}, "parts": {}, "more": {}},
        {"whole": {"source.bin": [10, 110]}, "parts": {}},
        {"whole": {"source.bin": ["10", 110, 0]}, "parts": {}},
        {"whole": {"source.bin": None}, "parts": {}},
        {"whole": {}, "parts": {"source.bin": [10, 110, 0, 10, 50, 0]}},
        {"whole": {}, "parts": {"source.bin": {"t": [10, 110, 0, 10, 50]}}},
        {"whole": {}, "parts": {"source.bin": {"t": [10, 110, 0, 10, 50, True]}}},
    ],
)
def test_what_are_no_readings(readings: object) -> None:
    assert not are_readings(readings)


def test_what_was_compared_with_something_else_is_not_mixed(tmp_path: Path) -> None:
    """A manifest came between two runs: what they read of one entry is compared with what each has found recorded."""
    catalog, content = source(tmp_path, [100, 200])
    (start, stop), second = places(catalog)
    without = replace(catalog.files[0], checksums=None)
    before = replace(catalog, files=[without])
    lists = [
        listed(before, content, [(start, start + 50)]),
        listed(catalog, content, [(start + 50, stop), second]),
    ]
    assert all(map(are_readings, lists))
    assert finish(lists) == (200, {IN_PART: (1, 50), NOT_RECORDED: (1, 100)})


@pytest.mark.parametrize("damaged", [(), (30,), (150,)])
def test_processes_that_have_opened_other_records_put_together_what_they_read(
    tmp_path: Path, damaged: tuple[int, ...]
) -> None:
    """Each has its own entries. Whoever judges needs none."""
    catalog, content = source(tmp_path, [100, 200, 300], damaged=damaged, unrecorded=2)
    recorded, lists = catalog.files[0].checksums, list[Readings]()
    assert recorded is not None
    rows = list(recorded.rows())
    for mine in ((0,), (1, 2)):
        part = subset(catalog, [f"t{number}" for number in mine])
        part.files[0] = replace(part.files[0], checksums=Checksums.of(rows[number] for number in mine))
        for number in mine:
            start, stop = places(catalog)[number]
            for span in ((start, stop),) if number != 1 else ((start, start + 90), (start + 90, stop)):
                lists.append(listed(part, content, [span], f"t{number}"))
    if not damaged:
        assert finish([*lists, *lists]) == (300, {NOT_RECORDED: (1, 300)})
        return
    with pytest.raises(IntegrityError) as caught:
        finish(lists)
    (line,) = caught.value.problems
    number = 0 if damaged == (30,) else 1
    assert line.startswith(f"t{number}: source.bin: bytes {rows[number][0]} to ")
    entries = {(damage.file, damage.entry) for damage in judge(lists).damaged}
    assert [have_read(each, entries) for each in lists] == ([1, 0, 0, 0] if number == 0 else [0, 1, 1, 0])


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (one, content), (two, _) = (source(tmp_path / name, [100]) for name in ("a", "b"))
    ((start, stop),) = places(one)
    one.files += two.files
    readings = (check := SourceCheck(one)).readings()
    for file in one.files:
        readings.add(file.path, start, content[start:stop], "t")
    check.add(readings.take())
    assert finish(check.packed()) == (200, {})
