"""Boxes of stored tensors reach memory bit for bit, whatever the chunks, strides and dtypes; and nothing else is read."""

import os
import struct
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import shardkit
from shardkit import formats
from shardkit.core.catalog import Catalog, SourceFile
from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import Region, full_region, window
from shardkit.errors import IntegrityError
from shardkit.files import storage
from shardkit.files.storage import BLOCK
from shardkit.training.fill.presharded import open_presharded
from shardkit.training.fill.reading import Filled, plan_reads, run_reads
from shardkit.training.ranks.local import memory_of
from shardkit.transfer.checks import SourceCheck
from shardkit.transfer.sources import READ_NBYTES, SourceFiles

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.uint8, torch.bool),
]


def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern that a dtype has: NaNs, infinities and subnormals among them."""
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and bytes(memory_of(a.contiguous())) == bytes(memory_of(b.contiguous()))


def chunked(path: Path, whole: torch.Tensor, grid: tuple[int, ...]) -> Catalog:
    """Store a tensor in a grid of chunks, with bytes between them that belong to nobody."""
    name = str(whole.dtype).removeprefix("torch.")
    cuts = [
        [(at, min(step, size - at)) for at in range(0, size, step)]
        for size, step in ((s, max(-(-s // g), 1)) for s, g in zip(whole.shape, grid, strict=True))
    ]
    content, rows = b"", []
    for places in reversed(list(product(*cuts))):
        region = Region(tuple(o for o, _ in places), tuple(s for _, s in places))
        content += b"\xee" * 7
        data = bytes(memory_of(whole[window(region)].contiguous()))
        rows.append((0, len(content), len(data), region))
        content += data
    path.write_bytes(content)
    catalog = Catalog(format="test", directory=str(path.parent))
    catalog.files.append(SourceFile(name=path.name, path=str(path), size=len(content)))
    catalog.add_tensor("w", BY_NAME[name], tuple(whole.shape), iter(rows))
    return catalog


def fill(catalog: Catalog, region: Region, target: torch.Tensor, name: str = "w", threads: int = 1) -> Filled:
    with SourceFiles(catalog.files) as sources:
        reads = plan_reads(catalog.tensors[name], catalog, region, target, name)
        return run_reads(reads, sources, threads)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Region]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=4)))
    grid = tuple(draw(st.integers(1, 3)) for _ in shape)
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True))
    return shape, grid, Region(offsets, sizes)


@settings(max_examples=60, deadline=None)
@given(boxes(), st.sampled_from(DTYPES), st.booleans())
def test_any_box_of_any_chunks(
    tmp_path_factory: pytest.TempPathFactory,
    box: tuple[tuple[int, ...], tuple[int, ...], Region],
    dtype: torch.dtype,
    transposed: bool,
) -> None:
    shape, grid, region = box
    whole = random(shape, dtype)
    catalog = chunked(tmp_path_factory.getbasetemp() / "chunks.bin", whole, grid)
    target = torch.zeros(region.sizes[::-1], dtype=dtype).permute(tuple(reversed(range(len(shape)))))
    if not transposed:
        target = target.contiguous()
    filled = fill(catalog, region, target, threads=2)
    assert same(target, whole[window(region)])
    assert filled.elements["w"] == region.num_elements


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values_are_converted_as_torch_does(tmp_path: Path, source: torch.dtype, target: torch.dtype) -> None:
    whole = random((301, 7), source)
    region = Region((13, 2), (250, 4))
    memory = torch.empty(region.sizes, dtype=target)
    fill(chunked(tmp_path / "f", whole, (2, 2)), region, memory)
    expected = whole.to(target)[window(region)]
    is_nan = expected.isnan()  # whose bits a vectorised conversion may choose otherwise than a scalar one
    assert torch.equal(memory.isnan(), is_nan)
    assert torch.equal(memory[~is_nan], expected[~is_nan])


def test_rows_cost_their_bytes_and_short_runs_no_more_than_the_rows_they_lie_in(tmp_path: Path) -> None:
    whole = random((512, 4096), torch.float32)
    catalog = chunked(tmp_path / "f", whole, (1, 1))
    rows, wide = Region((100, 0), (200, 4096)), Region((0, 1024), (512, 1024))
    narrow = Region((0, 8), (512, 16))
    for region, cost in ((rows, 1.0), (wide, 1.0), (narrow, 256.0)):
        target = torch.empty(region.sizes)
        before = read_bytes()
        filled = fill(catalog, region, target)
        by_system = read_bytes() - before
        assert same(target, whole[window(region)])
        assert target.nbytes <= filled.read_bytes <= target.nbytes * cost
        assert abs(by_system - filled.read_bytes) < 10_000  # what reading /proc costs


def test_columns_are_read_with_the_whole_rows_they_lie_in(tmp_path: Path) -> None:
    """Ranks that hold others of them read the same bytes: what all have read is compared together."""
    whole = random((6, 40, 30), torch.float32)
    catalog = chunked(tmp_path / "f", whole, (1, 1, 1))
    boxes = ((2, 0, 0), (3, 40, 7)), ((2, 0, 7), (3, 40, 23)), ((2, 5, 3), (3, 9, 4))
    for region in (Region(*box) for box in boxes):
        target = torch.empty(region.sizes)
        assert fill(catalog, region, target).read_bytes == 3 * 40 * 30 * 4
        assert same(target, whole[window(region)])


def read_bytes() -> int:
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def test_pieces_of_tensors_larger_than_every_buffer(tmp_path: Path) -> None:
    rows = 5 * READ_NBYTES // (2 * 1000 * 2)
    whole = random((rows, 1000), torch.bfloat16)
    catalog = chunked(tmp_path / "f", whole, (1, 1))
    for region in (Region((1, 0), (rows - 2, 1000)), Region((1, 3), (rows - 2, 996))):
        same_dtype, wider = torch.empty(region.sizes, dtype=whole.dtype), torch.empty(region.sizes)
        fill(catalog, region, same_dtype, threads=2)
        assert same(same_dtype, whole[window(region)])
        fill(catalog, region, wider, threads=2)
        assert torch.equal(wider.nan_to_num(), whole[window(region)].float().nan_to_num())


def test_one_row_larger_than_the_buffer(tmp_path: Path) -> None:
    whole = random((2, 2 * READ_NBYTES), torch.uint8)
    target = torch.empty((2, 2 * READ_NBYTES - 5), dtype=torch.uint8)[:, ::1]
    fill(chunked(tmp_path / "f", whole, (1, 1)), Region((0, 5), tuple(target.shape)), target)
    assert same(target, whole[:, 5:])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_bytes_that_have_to_be_decoded(tmp_path: Path) -> None:
    """A dense tensor that was saved as it lay, column by column."""
    whole = random((6, 5), torch.float32)
    dcp.save({"w": whole.t().contiguous().t()}, checkpoint_id=tmp_path)
    catalog = formats.open(str(tmp_path)).select(["w"])
    assert not catalog.files[catalog.chunks.file[0]].is_raw
    for dtype in (torch.float32, torch.float64):
        target = torch.zeros((4, 2), dtype=dtype)
        fill(catalog, Region((1, 3), (4, 2)), target)
        assert same(target, whole[1:5, 3:].to(dtype))


def test_a_file_that_ends_early_is_named_with_tensor_and_offset(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(10), "b": torch.ones(1000)}, tmp_path / "model.safetensors")
    catalog = formats.open(str(tmp_path)).catalog
    os.truncate(tmp_path / "model.safetensors", 2000)
    with pytest.raises(IntegrityError, match=r"model\.safetensors"):
        fill(catalog, Region((0,), (1000,)), torch.empty(1000), "b")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(10), "b": torch.ones(1000)}, tmp_path / "model.safetensors")
    catalog = formats.open(str(tmp_path)).catalog
    said = r"model\.safetensors ends at byte 2000 while model\.b is read"
    with SourceFiles(catalog.files) as sources:
        sources.borrow(0)  # opened while it was whole
        os.truncate(tmp_path / "model.safetensors", 2000)
        with pytest.raises(IntegrityError, match=said):
            run_reads(reads_of_all(catalog, {"b": torch.empty(1000)}), sources)


def test_a_single_element_of_any_stride() -> None:
    whole = torch.zeros(2, 2)
    memory_of(whole[1:, 1:])[:] = struct.pack("=f", 7.0)
    memory_of(torch.as_strided(whole, (1,), (2,)))[:] = struct.pack("=f", 5.0)
    assert whole.tolist() == [[5, 0], [0, 7]]


def reads_of_all(catalog: Catalog, targets: dict[str, torch.Tensor]) -> list[Any]:
    """Return what is read for whole tensors, each of which a model has below `model`."""
    found = list[Any]()
    for name, target in targets.items():
        region = full_region(tuple(target.shape))
        found += plan_reads(catalog.tensors[name], catalog, region, target, f"model.{name}")
    return found


def emptied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.empty_like(value) for name, value in state.items()}


def fill_all(catalog: Catalog, targets: dict[str, torch.Tensor], check: SourceCheck | None = None) -> Filled:
    """Fill whole tensors."""
    with SourceFiles(catalog.files, check=check) as sources:
        return run_reads(reads_of_all(catalog, targets), sources)


Calls = list[tuple[int, int]]
"""(first byte, bytes) of each `preadv` of a file, in order."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    plain, found = storage.preadv, list[tuple[int, int]]()

    def preadv(fd: int, buffers: Sequence[Any], start: int) -> int:
        nbytes = plain(fd, buffers, start)
        found.append((start, nbytes))
        return nbytes

    monkeypatch.setattr(storage, "preadv", preadv)
    return found


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """What preshard makes of large tensors and of many small ones."""
    out = tmp_path_factory.mktemp("few")
    # 18 MiB: two pieces and an end.
    state = {f"large.{n}": random((9, 1 << 19), torch.float32) for n in range(4)}
    state |= {f"small.{n}": random((3, 1001 + n % 7), torch.bfloat16) for n in range(1500)}
    (out / "hub").mkdir()
    save_file(state, out / "hub/model.safetensors")
    shardkit.preshard(out / "hub", out / "sharded", world_size=1, wrap="none")
    return out / "sharded", state


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("dtype", ["as stored", torch.float64])
def test_reads_are_few_and_long(
    sharded: tuple[Path, dict[str, torch.Tensor]], calls: Calls, dtype: Any, checks: bool
) -> None:
    """Storage over a network takes a request of each: 4 to 16 MiB, at most 150 a GiB, and small ones at once."""
    directory, state = sharded
    presharded = open_presharded(str(directory))
    assert presharded is not None
    catalog = presharded.open_chunks()
    for part in ("large.", "small."):
        expected = {name: value for name, value in state.items() if name.startswith(part)}
        targets = {
            name: torch.empty(value.shape, dtype=value.dtype if dtype == "as stored" else dtype)
            for name, value in expected.items()
        }
        check = SourceCheck(catalog) if checks else None
        calls.clear()
        filled = fill_all(catalog, targets, check)
        wanted = sum(value.nbytes for value in expected.values())
        assert filled.read_bytes == wanted
        for name, value in expected.items():
            right = value if dtype == "as stored" else value.to(dtype)
            assert same(targets[name], right) or value.isnan().any()
        if part == "large.":
            num_ends = 0 if dtype == "as stored" else 4  # of tensors
            assert len(calls) <= 150 * wanted / 2**30 + num_ends
            assert wanted <= sum(nbytes for _, nbytes in calls) < wanted * 1.001
            assert max(nbytes for _, nbytes in calls) <= 16 << 20
        else:
            assert len(calls) <= 1 + len(expected) // 512
        if check is not None:
            assert check.judge().checked.checked_bytes == wanted


def small_ones(path: Path) -> tuple[Catalog, dict[str, torch.Tensor]]:
    """Many small tensors of all dtypes side by side, of sizes that leave the next one at any place."""
    state = {f"t{n}": random((3, 5 + n), dtype) for n, dtype in enumerate(2 * DTYPES)}
    save_file(state, path / "model.safetensors")
    return formats.open(str(path)).catalog, state


def test_neighbours_of_all_dtypes_are_read_at_once(tmp_path: Path, calls: Calls) -> None:
    """Also those whose memory has other strides, so that they pass through one buffer."""
    catalog, state = small_ones(tmp_path)
    for turned in (True, False):
        targets = {
            name: torch.empty(value.shape[::-1], dtype=value.dtype).t() if turned else torch.empty_like(value)
            for name, value in state.items()
        }
        calls.clear()
        filled = fill_all(catalog, targets)
        assert all(same(targets[name], value) for name, value in state.items())
        assert [nbytes for _, nbytes in calls] == [filled.read_bytes]
        assert filled.elements == {f"model.{name}": value.numel() for name, value in state.items()}


def test_a_neighbour_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    catalog, state = small_ones(tmp_path)
    last = max(catalog.chunks.start)
    name = next(name for name in state if catalog.chunks.start[catalog.tensors[name].first_chunk] == last)
    with SourceFiles(catalog.files) as sources:
        sources.borrow(0)
        os.truncate(tmp_path / "model.safetensors", last + 1)
        reads = reads_of_all(catalog, emptied(state))
        with pytest.raises(IntegrityError, match=rf"ends at byte {last + 1} while model.{name} is read"):
            run_reads(reads, sources)


def test_what_is_read_next_is_being_fetched_and_nothing_else(
    sharded: tuple[Path, dict[str, torch.Tensor]], calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On storage over a network each request is a wait: they are under way together."""
    directory, state = sharded
    presharded = open_presharded(str(directory))
    assert presharded is not None
    asked, advise = list[tuple[int, int, int]](), os.posix_fadvise

    def heard(fd: int, start: int, nbytes: int, advice: int) -> None:
        asked.append((len(calls), start, start + nbytes))
        advise(fd, start, nbytes, advice)

    monkeypatch.setattr(os, "posix_fadvise", heard)
    with SourceFiles((catalog := presharded.open_chunks()).files) as sources:
        run_reads(reads_of_all(catalog, emptied(state)), sources, num_threads=1)
    assert max(stop - start for _, start, stop in asked) == 1 << 20
    for number, (start, nbytes) in enumerate(calls):
        before = [(max(first, start), min(stop, start + nbytes)) for at, first, stop in asked if at <= number]
        assert sum(max(stop - first, 0) for first, stop in before) == nbytes
    # Else the last page is waited for alone.
    assert all(start % BLOCK == stop % BLOCK == 0 for _, start, stop in asked)
    pages = [page for _, start, stop in asked for page in range(start // BLOCK, stop // BLOCK)]
    needed = set[int]()
    for start, nbytes in calls:
        needed.update(range(start // BLOCK, -(-(start + nbytes) // BLOCK)))
    assert len(pages) == len(needed)
    assert set(pages) == needed
    assert sum(at == 0 for at, _, _ in asked) >= 32  # MiB before the first


def test_of_columns_the_rows_they_lie_in_are_fetched_and_no_more_of_them_at_once(
    tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tensor parallelism of 64, 32 MiB of columns lie in 2 GiB."""
    save_file({"w": torch.zeros(8192, 8192, dtype=torch.int8)}, tmp_path / "model.safetensors")
    catalog = formats.open(str(tmp_path)).catalog
    asked = list[tuple[int, int]]()
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, at, nbytes, advice: asked.append((len(calls), nbytes))
    )
    fill(catalog, Region((0, 128), (8192, 128)), torch.empty(8192, 128, dtype=torch.int8))
    for number in range(len(calls)):
        ahead = sum(nbytes for at, nbytes in asked if at <= number) - (number + 1) * READ_NBYTES
        assert ahead <= 40 << 20
    assert 64 << 20 <= sum(nbytes for _, nbytes in asked) <= (64 << 20) + BLOCK
