"""Very many small chunks in many files: windows of the output are filled file by file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import pytest
import torch

from shardkit.core.catalog import Catalog, Checksums, SourceFile
from shardkit.core.dtypes import BY_NAME, DType
from shardkit.core.regions import Region, Shape
from shardkit.core.threads import NoProgress
from shardkit.errors import IntegrityError
from shardkit.files import storage
from shardkit.files.digest import crc32
from shardkit.transfer import plan as plans
from shardkit.transfer.chains import Entries
from shardkit.transfer.checks import CheckedSource, Runs, SourceCheck
from shardkit.transfer.execute import ExecuteOptions, Execution
from shardkit.transfer.plan import TransferPlan
from shardkit.transfer.sources import Reader
from tests.transfer.test_execute import Tensors, cut, planned, run, stored

if TYPE_CHECKING:
    from shardkit.core.catalog import Ints

BF16, F32 = BY_NAME["bfloat16"], BY_NAME["float32"]
SOURCES: dict[str, tuple[DType, Shape]] = {
    "one": (BF16, (20, 3)),  # one chunk: streamed as it lies
    "norm": (BF16, (70,)),  # fewer rows than files; a window smaller than a gap that would be written over
    "whole": (BF16, (200, 50)),  # one chunk
    "embed": (BF16, (1000, 40)),
    "up": (BF16, (997, 33)),  # ragged: the last file has less
    "cast": (F32, (500, 16)),
    "columns": (BF16, (64, 300)),  # cut along its second dim: gathered
    "decoded": (BF16, (300, 7)),
    "down": (BF16, (640, 64)),
    "empty": (BF16, (0, 3)),
}


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_MIN_WINDOWED", 16)


def sharded(
    directory: Path, num_files: int, *, order: str = "same", overhead: int = 50
) -> tuple[Catalog, dict[str, bytes]]:
    """Cut tensors over files, as row shards with something between the chunks, and `whole` into the first."""
    generator, rng = numpy.random.default_rng(0), random.Random(1)
    catalog, data = Catalog(format="dcp", directory=str(directory)), dict[str, bytes]()
    contents = [bytearray() for _ in range(num_files)]
    places: dict[tuple[str, int], int] = {}
    parts: dict[str, list[Region]] = {}
    for name, (dtype, shape) in SOURCES.items():
        data[name] = generator.bytes(prod(shape) * dtype.itemsize)
        count, dim = 1 if name in ("one", "whole") else num_files, 1 if name == "columns" else 0
        cuts = [min(n * -(-shape[dim] // count), shape[dim]) for n in range(count + 1)]
        parts[name] = []
        for start, stop in pairwise(cuts):
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[dim], sizes[dim] = start, stop - start
            parts[name].append(Region(tuple(offsets), tuple(sizes)))
    for file in range(num_files):
        names = [name for name in SOURCES if file < len(parts[name])]
        if order != "same":
            names = names[::-1] if order == "reversed" else rng.sample(names, len(names))
        for name in names:
            contents[file] += rng.randbytes(overhead)
            places[name, file] = len(contents[file])
            dtype, shape = SOURCES[name]
            contents[file] += cut(data[name], dtype, shape, parts[name][file])
        contents[file] += rng.randbytes(overhead)
        path = directory / f"s{file}"
        path.write_bytes(contents[file])
        catalog.files.append(SourceFile(name=path.name, path=str(path), size=len(contents[file])))
    for name, (dtype, shape) in SOURCES.items():
        chunks = []
        for file, region in enumerate(parts[name]):
            nbytes, number, start = region.num_elements * dtype.itemsize, file, places[name, file]
            if name == "decoded" and file == 3:
                part = cut(data[name], dtype, shape, region)
                number, start = len(catalog.files), 0
                catalog.files.append(
                    SourceFile(name="d", path="", size=nbytes, decode=lambda _, part=part: memoryview(part))
                )
            chunks.append((number, start, nbytes, region))
        catalog.add_tensor(name, dtype, shape, iter(chunks))
    return catalog, data


def wanted(names: list[str], dtype: DType | None = None) -> Tensors:
    return {name: (dtype or SOURCES[name][0], SOURCES[name][1], 0) for name in names}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Buffers of each read of several at once."""
    counts: list[int] = []

    def spy(fd: int, buffers: list[memoryview], start: int) -> int:
        if len(buffers) > 1:
            counts.append(len(buffers))
        return original(fd, buffers, start)

    original = storage.preadv
    monkeypatch.setattr(storage, "preadv", spy)
    return counts


@pytest.mark.parametrize("order", ["same", "reversed", "random"])
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("options", [{}, {"max_memory_bytes": 1}, {"digests": False}, {"jobs": 1}])
def test_mixed_with_all_other_ways(
    tmp_path: Path, order: str, num_shards: int, options: dict[str, int], reads: list[int]
) -> None:
    catalog, data = sharded(tmp_path, 40, order=order)
    tensors = {name: (BF16, shape, 0) for name, (_, shape) in SOURCES.items()}
    images, plan = planned(catalog, tensors, num_shards)
    assert (set(plan.gathered), set(plan.scattered)) == ({"columns"}, {"decoded"})
    found = run(plan, tmp_path, **options)
    assert reads
    for name, (dtype, shape) in SOURCES.items():
        values = data[name]
        if dtype is F32:
            whole = torch.frombuffer(bytearray(values), dtype=torch.float32).bfloat16()
            values = whole.view(torch.uint8).numpy().tobytes()
        for region, piece in stored(images, tmp_path, name):
            assert piece == cut(values, BF16, shape, region), name
    for image in images:
        content = (tmp_path / image.name).read_bytes()
        assert found[image.name].crc32 == (crc32(content) if options.get("digests", 1) else None)


def test_which_tensors_are_put_together_in_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of many small chunks, and only where there are very many."""
    catalog, _ = sharded(tmp_path, 40)
    names = ["embed", "norm", "up", "whole", "down"]
    assert planned(catalog, wanted(names), 1)[1].windowed == {"embed", "norm", "up", "down"}
    monkeypatch.setattr(plans, "_MAX_CHUNK_BYTES", 1700)
    assert planned(catalog, wanted(names), 1)[1].windowed == {"norm", "up"}
    monkeypatch.setattr(plans, "_MIN_WINDOWED", 81)
    assert planned(catalog, wanted(names), 1)[1].windowed == frozenset()


def test_one_read_for_what_lies_close_together(tmp_path: Path, reads: list[int]) -> None:
    names = ["embed", "norm", "up", "down"]
    catalog, _ = sharded(tmp_path, 300)
    _, plan = planned(catalog, wanted(names), 1)
    run(plan, tmp_path, jobs=1)
    assert len(reads) <= 2 * 300  # `cast` and others lie between `up` and `down`: within the gap that is read
    assert max(reads) == 7  # four parts and what lies between them


@pytest.mark.parametrize("max_memory", [1, 4 << 20])
def test_two_tensors_that_share_their_bytes(
    tmp_path: Path, max_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Reader, "read_into")  # for reads that fall short; none does
    catalog, data = sharded(tmp_path, 40)
    entry, table = catalog.tensors["embed"], catalog.chunks
    rows = list(entry.chunk_ids)
    catalog.add_tensor(
        "tied",
        entry.dtype,
        entry.shape,
        iter([(table.file[r], table.start[r], table.nbytes[r], table.region(r)) for r in rows]),
    )
    images, plan = planned(catalog, {name: (BF16, entry.shape, 0) for name in ("embed", "tied")}, 2)
    run(plan, tmp_path, max_memory_bytes=max_memory)
    for name in ("embed", "tied"):
        for region, piece in stored(images, tmp_path, name):
            assert piece == cut(data["embed"], BF16, entry.shape, region)


def test_more_parts_than_one_call_takes(tmp_path: Path) -> None:
    """1,500 chunks of one file, 2 bytes each."""
    shape, path = (1500, 1), tmp_path / "s"
    data = numpy.random.default_rng(2).bytes(3000)
    path.write_bytes(b"".join(b"?" + data[i : i + 2] for i in range(0, 3000, 2)))
    catalog = Catalog(format="dcp", directory=str(tmp_path))
    catalog.files.append(SourceFile(name="s", path=str(path), size=4500))
    catalog.add_tensor(
        "w", BF16, shape, iter([(0, 3 * n + 1, 2, Region((n, 0), (1, 1))) for n in range(1500)])
    )
    images, plan = planned(catalog, {"w": (BF16, shape, 0)}, 1)
    run(plan, tmp_path)
    ((_, found),) = stored(images, tmp_path, "w")
    assert found == data


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog, _ = sharded(tmp_path, 40)
    _, plan = planned(catalog, wanted(["embed", "up"]), 1)

    def shrink(fd: int, buffers: list[memoryview], start: int) -> int:
        (tmp_path / "s17").write_bytes(b"")
        return original(fd, buffers, start)

    original = storage.preadv
    monkeypatch.setattr(storage, "preadv", shrink)
    with pytest.raises(IntegrityError, match=r"s17"):
        run(plan, tmp_path)


def test_reads_that_fall_short_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a network file system may give less than was asked for."""
    catalog, data = sharded(tmp_path, 40)
    images, plan = planned(catalog, wanted(["embed", "up", "norm"]), 1)

    def short(fd: int, buffers: list[memoryview], start: int) -> int:
        return original(fd, [buffers[0][:7]], start)

    original = storage.preadv
    monkeypatch.setattr(storage, "preadv", short)
    run(plan, tmp_path)
    for name in ("embed", "up", "norm"):
        ((region, found),) = stored(images, tmp_path, name)
        assert found == cut(data[name], BF16, SOURCES[name][1], region)


def recorded(catalog: Catalog, directory: Path, *, how: str, damaged: frozenset[int] = frozenset()) -> None:
    """Record CRC-32s: of each chunk, of pairs of neighbours, or of some chunks; then damage chunks."""
    table, rng = catalog.chunks, random.Random(3)
    rows_of = dict[int, list[int]]()
    for row in range(len(table)):
        if table.nbytes[row] and not catalog.files[table.file[row]].decode:
            rows_of.setdefault(table.file[row], []).append(row)
    for file, rows in rows_of.items():
        path = directory / f"s{file}"
        content, stretches = bytearray(path.read_bytes()), list[tuple[int, int, int | None]]()
        rows.sort(key=lambda row: table.start[row])
        step = 2 if how == "pairs" else 1
        for at in range(0, len(rows), step):
            first, last = rows[at], rows[min(at + step, len(rows)) - 1]
            start, stop = table.start[first], table.start[last] + table.nbytes[last]
            is_left_out = how == "some" and rng.random() < 0.2
            stretches.append((start, stop - start, None if is_left_out else crc32(content[start:stop])))
        for row in damaged.intersection(rows):
            content[table.start[row]] ^= 1
        path.write_bytes(content)
        catalog.files[file] = replace(catalog.files[file], checksums=Checksums.of(stretches))


def compared(
    catalog: Catalog, plan: TransferPlan, directory: Path, how: str
) -> tuple[CheckedSource, list[str], list[object]]:
    """Run a plan; return how much was compared, what differs and what the journal is told of each file."""
    check, told = SourceCheck(catalog), list[object]()
    execution = Execution(
        plan,
        str(directory),
        ExecuteOptions(max_memory_bytes=4 << 20),
        finished={},
        on_finished=lambda digest, read: told.append((digest.name, check.dump(read))),
        progress=NoProgress(),
        check=check,
    )
    with suppress(IntegrityError):
        execution.run()
    again = SourceCheck(catalog)
    for _, dumped in sorted(told):
        assert again.load(json.loads(json.dumps(dumped)))
    summary, differences = check.summary(catalog.tensors), check.differences()
    if not differences and how != "pairs":  # what lies between those is read at the end
        assert again.summary(catalog.tensors) == summary
    return summary, differences, sorted(told)


@pytest.mark.parametrize("how", ["each", "pairs", "some"])
@pytest.mark.parametrize("num_damaged", [0, 3])
@pytest.mark.parametrize("is_tied", [False, True])
def test_many_chunks_are_compared_as_single_ones_are(
    tmp_path: Path, how: str, num_damaged: int, is_tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that are whole entries are looked up and compared together. What comes out is the same."""
    catalog, _ = sharded(tmp_path, 40, order="random")
    names = ["one", "norm", "whole", "embed", "up", "down", "columns"]
    rows = [row for name in names[3:6] for row in catalog.tensors[name].chunk_ids]
    damaged = frozenset(random.Random(num_damaged).sample(rows, num_damaged))
    recorded(catalog, tmp_path, how=how, damaged=damaged)
    if is_tied:
        entry, table = catalog.tensors["embed"], catalog.chunks
        chunks = [(table.file[r], table.start[r], table.nbytes[r], table.region(r)) for r in entry.chunk_ids]
        catalog.add_tensor("tied", entry.dtype, entry.shape, iter(chunks))
    tensors = {name: (BF16, catalog.tensors[name].shape, 0) for name in [*names, *["tied"] * is_tied]}
    _, plan = planned(catalog, tensors, 2)
    num_together = list[int]()

    def spy(runs: Runs, entries: Ints, crcs: Ints, fqn_of: Callable[[int], str]) -> None:
        num_together.append(len(entries))
        original(runs, entries, crcs, fqn_of)

    original = Runs.add_whole
    monkeypatch.setattr(Runs, "add_whole", spy)
    together = compared(catalog, plan, tmp_path, how)
    assert sum(num_together) > 100 or how == "pairs"
    monkeypatch.setattr(Entries, "find_whole", lambda _, files, starts, nbytes: files * 0 - 1)
    num_together.clear()
    assert together == compared(catalog, plan, tmp_path, how)
    assert not num_together
    assert bool(together[1]) == bool(num_damaged)
    assert how != "each" or len(together[1]) == num_damaged
    unrecorded = sum(each.num_entries for each in together[0].unchecked)
    assert (how == "some") == (unrecorded > 1)  # one is of a chunk that is decoded


def test_an_entry_that_nothing_can_be_looked_up_by(tmp_path: Path) -> None:
    """A sparse file may be so large that a table's number and a place in it do not fit one integer."""
    catalog, _ = sharded(tmp_path, 3)
    recorded(catalog, tmp_path, how="each")
    files = numpy.array([0, 1])
    rows = [catalog.tensors["embed"].first_chunk, catalog.tensors["embed"].first_chunk + 1]
    starts = numpy.array([catalog.chunks.start[row] for row in rows])
    nbytes = numpy.array([catalog.chunks.nbytes[row] for row in rows])
    entries = Entries(catalog)
    found = entries.find_whole(files, starts, nbytes)
    assert [entries[entry].start for entry in found.tolist()] == starts.tolist()
    assert entries.find_whole(files, starts + 1, nbytes - 1).tolist() == [-1, -1]
    assert entries.find_whole(files, starts, nbytes - 1).tolist() == [-1, -1]
    last = Checksums.of([(1 << 62, 5, 7)])
    catalog.files[2] = replace(catalog.files[2], checksums=last)
    assert Entries(catalog).find_whole(files, starts, nbytes).tolist() == [-1, -1]
    none = Catalog(format="", directory="", files=[SourceFile(name="a", path="a", size=1)])
    assert Entries(none).find_whole(files[:1], starts[:1], nbytes[:1]).tolist() == [-1]
