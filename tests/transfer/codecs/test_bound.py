"""Bound catalogs against numpy: stored tensors in files, in chunks of any grid, and trees of expressions over them."""

from __future__ import annotations

import os
import random
from math import prod
from pathlib import Path

import numpy as np
import pytest

from shardkit.core.catalog import Catalog, SourceFile
from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import Region, full_region
from shardkit.errors import LayoutError
from shardkit.files import storage
from shardkit.keys.expressions import Expression, Stored, concat, cut, leaves, permute, reshape, stack
from shardkit.transfer.codecs.bound import bind
from shardkit.transfer.sources import SourceFiles
from tests.keys.test_expressions import Sources, evaluate, trees, window
from tests.transfer.codecs.reading import read_in_ranges

DTYPES = ["int16", "int64", "uint8", "complex128"]


def stored(folder: Path, sources: Sources, dtype: str, rng: random.Random) -> tuple[Catalog, Sources]:
    """Write tensors to one file, each cut into a random grid of chunks; return their catalog and values."""
    catalog = Catalog(format="dcp", directory=str(folder))
    path = folder / f"{rng.randrange(1 << 60)}.bin"
    place, values = 0, Sources()
    with open(path, "wb") as file:
        for name, numbers in sources.items():
            values[name] = numbers.astype(dtype)
            chunks = []
            for region in a_grid(rng, numbers.shape):
                data = np.ascontiguousarray(values[name][window(region)]).tobytes()
                file.write(data)
                chunks.append((0, place, len(data), region))
                place += len(data)
            catalog.add_tensor(name, BY_NAME[dtype], numbers.shape, iter(chunks))
    catalog.files.append(SourceFile(name=path.name, path=str(path), size=place))
    return catalog, values


def a_grid(rng: random.Random, shape: tuple[int, ...]) -> list[Region]:
    cells = [full_region(shape)]
    for dim in range(len(shape)):
        if rng.random() < 0.5 and shape[dim] > 1:
            at = rng.randrange(1, shape[dim])
            cells = [
                Region(
                    (*cell.offsets[:dim], start, *cell.offsets[dim + 1 :]),
                    (*cell.sizes[:dim], stop - start, *cell.sizes[dim + 1 :]),
                )
                for cell in cells
                for start, stop in ((0, at), (at, shape[dim]))
            ]
    rng.shuffle(cells)
    return cells


def read(catalog: Catalog, name: str, rng: random.Random) -> np.ndarray:
    """Read a tensor in ranges of random lengths."""
    entry = catalog.tensors[name]
    data = read_in_ranges(catalog, name, rng, range(1, 41))
    return np.frombuffer(data, entry.dtype.name).reshape(entry.shape)


@pytest.mark.prove
def test_every_tree_over_every_grid_reads_as_numpy_makes_it(tmp_path: Path) -> None:
    num_direct = num_computed = 0
    for number, (rng, made, _, sources) in enumerate(trees()):
        if not any(leaves(made)):
            continue
        catalog, values = stored(tmp_path, sources, DTYPES[number % len(DTYPES)], rng)
        bound = bind(catalog, {"target": made})
        expected = evaluate(made, values).astype(DTYPES[number % len(DTYPES)])
        assert np.array_equal(read(bound, "target", rng), expected)
        rows = bound.tensors["target"].chunk_ids
        computed = [row for row in rows if not bound.files[bound.chunks.file[row]].is_raw]
        num_computed += bool(computed)
        num_direct += not computed
        os.unlink(catalog.files[0].path)
    assert num_direct > 200
    assert num_computed > 200


def experts(num: int, rows: int, columns: int) -> tuple[Expression, Sources]:
    sources = {
        f"experts.{e}.{part}": np.arange(rows * columns).reshape(rows, columns) + 1000 * (2 * e + at)
        for e in range(num)
        for at, part in enumerate(("gate", "up"))
    }
    parts = [
        stack([Stored(f"experts.{e}.{part}", (rows, columns)) for e in range(num)], 0)
        for part in ("gate", "up")
    ]
    return concat(parts, 1), sources


def test_stacked_experts_point_at_the_stored_bytes(tmp_path: Path) -> None:
    made, sources = experts(4, 6, 8)
    catalog, values = stored(tmp_path, sources, "int16", random.Random(1))
    bound = bind(catalog, {"gate_up_proj": made})
    assert len(bound.files) == len(catalog.files)
    assert np.array_equal(read(bound, "gate_up_proj", random.Random(2)), evaluate(made, values))


def test_a_fused_tensor_that_ranks_cut_gives_single_experts_from_the_stored_bytes(tmp_path: Path) -> None:
    values = np.arange(4 * 12 * 8).reshape(4, 12, 8)
    for dim in (0, 1):
        catalog, _ = stored(tmp_path, {}, "int16", random.Random(1))
        half = tuple(n // 2 if d == dim else n for d, n in enumerate(values.shape))
        corner = tuple(n // 2 if d == dim else 0 for d, n in enumerate(values.shape))
        path, chunks, place = tmp_path / f"{dim}.bin", [], 0
        with open(path, "wb") as file:
            for region in (Region((0, 0, 0), half), Region(corner, half)):
                data = np.ascontiguousarray(values[window(region)].astype("int16")).tobytes()
                file.write(data)
                chunks.append((1, place, len(data), region))
                place += len(data)
        catalog.files.append(SourceFile(name=path.name, path=str(path), size=place))
        catalog.add_tensor("fused", BY_NAME["int16"], values.shape, iter(chunks))
        single = reshape(cut(Stored("fused", values.shape), Region((2, 6, 0), (1, 6, 8))), (6, 8))
        bound = bind(catalog, {"experts.2.up": single})
        assert len(bound.files) == len(catalog.files)
        assert np.array_equal(read(bound, "experts.2.up", random.Random(3)), values[2, 6:])


def test_a_range_of_a_transposed_tensor_reads_no_more_than_a_few_times_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (512, 768)
    catalog, values = stored(
        tmp_path, {"w": np.arange(prod(shape)).reshape(shape)}, "int64", random.Random(0)
    )
    bound = bind(catalog, {"t": permute(Stored("w", shape), (1, 0))})
    numbers, preadv = list[int](), storage.preadv

    def counted(fd: int, views: list[memoryview], offset: int) -> int:
        numbers.append(preadv(fd, views, offset))
        return numbers[-1]

    monkeypatch.setattr(storage, "preadv", counted)
    with SourceFiles(bound.files) as files, files.reader() as reader:
        row = bound.tensors["t"].first_chunk
        buffer = memoryview(bytearray(64 * 512 * 8))
        reader.read_into(bound.chunks.file[row], buffer, 100 * 512 * 8, "t")
    assert np.array_equal(np.frombuffer(buffer, "int64").reshape(64, 512), values["w"].T[100:164])
    assert len(buffer) <= sum(numbers) <= 16 * len(buffer)


def test_what_cannot_be_made_is_listed(tmp_path: Path) -> None:
    catalog, _ = stored(tmp_path, {"a": np.zeros((2, 3), int)}, "int16", random.Random(0))
    targets = {"x": Stored("b", (2, 3)), "y": concat([Stored("a", (2, 4)), Stored("a", (2, 4))], 0)}
    with pytest.raises(LayoutError) as caught:
        bind(catalog, targets)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["x", "y", "y"]
