"""Sources of many chunks in many files: a grid of any kind is put together, or cut another way."""

from __future__ import annotations

import itertools
import tempfile
from math import prod
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.core.catalog import Catalog, Decoded, SourceFile
from shardkit.core.dtypes import BY_NAME, DType
from shardkit.core.regions import Region, Shape
from shardkit.files.digest import crc32
from tests.transfer.test_execute import cut, planned, run, stored

Cuts = tuple[tuple[int, ...], ...]
"""For each dim the places where the tensor is cut, from 0 to its size; equal ones leave empty chunks."""


def chunked(
    directory: Path, data: bytes, dtype: DType, shape: Shape, cuts: Cuts, *, decoded: bool = False
) -> Catalog:
    """Store a tensor as a grid of chunks, spread over three files in no particular order."""
    catalog = Catalog(format="dcp", directory=str(directory))
    boxes = [
        Region(tuple(a for a, _ in box), tuple(b - a for a, b in box))
        for box in itertools.product(*(itertools.pairwise(places) for places in cuts))
    ]
    numpy.random.default_rng(len(boxes)).shuffle(boxes)
    boxes = [Region(tuple(map(int, o)), tuple(map(int, s))) for o, s in boxes]
    contents, chunks = [bytearray(b"-" * 5) for _ in range(3)], []
    for number, box in enumerate(boxes):
        part = cut(data, dtype, shape, box)
        if decoded:
            catalog.files.append(
                SourceFile(
                    name=f"d{number}",
                    path="",
                    size=len(part),
                    derivation=Decoded(lambda _, part=part: memoryview(part)),
                )
            )
            chunks.append((number, 0, len(part), box))
            continue
        chunks.append((number % 3, len(contents[number % 3]), len(part), box))
        contents[number % 3] += part
    catalog.add_tensor("w", dtype, shape, iter(chunks))
    if not decoded:
        for number, content in enumerate(contents):
            path = directory / f"s{number}"
            path.write_bytes(content)
            catalog.files.append(SourceFile(name=path.name, path=str(path), size=len(content)))
    return catalog


@st.composite
def grids(draw: st.DrawFn) -> tuple[Shape, Cuts]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    cuts = tuple(
        (0, *sorted(draw(st.lists(st.integers(0, size), max_size=3))), size) if size else (0, 0)
        for size in shape
    )
    return shape, cuts


@settings(max_examples=120, deadline=None)
@given(grids(), st.sampled_from([None, 0, 1, 2]), st.integers(1, 4), st.booleans(), st.booleans())
def test_any_grid_becomes_any_other(
    grid: tuple[Shape, Cuts], dim: int | None, num_shards: int, decoded: bool, digests: bool
) -> None:
    (shape, cuts), dtype = grid, BY_NAME["bfloat16"]
    dim = None if dim is None or dim >= len(shape) else dim
    data = numpy.random.default_rng(7).bytes(prod(shape) * dtype.itemsize)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        catalog = chunked(directory, data, dtype, shape, cuts, decoded=decoded)
        images, plan = planned(catalog, {"w": (dtype, shape, dim)}, num_shards)
        files = run(plan, directory, digests=digests, max_memory_bytes=1)
        for region, found in stored(images, directory, "w"):
            assert found == cut(data, dtype, shape, region)
        for image in images:
            content = (directory / image.name).read_bytes()
            assert files[image.name].crc32 == (crc32(content) if digests else None)


@pytest.mark.parametrize(
    "cuts", [((0, 97, 300), (0, 500)), ((0, 300), (0, 123, 500)), ((0, 9, 300), (0, 7, 500))]
)
@pytest.mark.parametrize("target", ["float32", "bfloat16"])
def test_larger_than_every_buffer_and_converted(tmp_path: Path, cuts: Cuts, target: str) -> None:
    shape, dtype = (300, 500), BY_NAME["float32"]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    catalog = chunked(tmp_path, values.numpy().tobytes(), dtype, shape, cuts)
    images, plan = planned(catalog, {"w": (BY_NAME[target], shape, None)}, 1)
    by_columns = len(cuts[1]) > 2
    assert (bool(plan.gathered), bool(plan.streamed)) == (by_columns, not by_columns)
    run(plan, tmp_path, max_memory_bytes=1)
    ((_, found),) = stored(images, tmp_path, "w")
    expected = values.to(getattr(torch, target))
    assert found == expected.view(torch.uint8).numpy().tobytes()
