"""Folding in pieces: any range of a weight, however its factors are cut and typed, and the memory that it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardkit.core.catalog import Catalog
from shardkit.core.factored import Target
from shardkit.errors import LayoutError
from shardkit.formats.folded import floating_targets
from shardkit.formats.hub.directory import open_model
from shardkit.transfer.codecs.derive import derive
from shardkit.transfer.codecs.fold import Fold, steps
from tests.answers import HIGH_WATER, answer_of
from tests.operations.consolidate.checkpoints import save
from tests.osft.factored import fold
from tests.transfer.codecs.test_dequantize import read

MIB = 1 << 20


def catalog_of(folder: Path, tensors: dict[str, torch.Tensor]) -> Catalog:
    save_file(tensors, folder / "model.safetensors")
    catalog = open_model(str(folder)).catalog
    targets = floating_targets(catalog.tensors)
    return derive(catalog, {target.weight: Fold(target) for target in targets.values()})


def random(rows: int, columns: int, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Factors of no decomposition: what is folded need not be orthogonal."""
    torch.manual_seed(rows + columns)
    target = Target(path="a.b", rows=rows, columns=columns, rank=rank)
    return {name: torch.randn(shape).to(dtype) for name, shape in target.shapes.items()}


def whole(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return fold({name.removeprefix("a.b."): value for name, value in tensors.items()}).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("rows", "columns"), [(40, 24), (24, 40), (300, 290)])
def test_any_range(rows: int, columns: int, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = random(rows, columns, 7, dtype)
    catalog = catalog_of(tmp_path, tensors)
    assert list(catalog.tensors) == ["a.b.weight"]
    torch.testing.assert_close(read(catalog, "a.b.weight"), whole(tensors), rtol=1e-6, atol=1e-5)


def test_other_tensors_stay_in_their_order(tmp_path: Path) -> None:
    tensors = {"a.a": torch.ones(2), **random(4, 6, 2), "a.c": torch.ones(3), "a.b.bias": torch.ones(4)}
    catalog = catalog_of(tmp_path, tensors)
    assert set(catalog.tensors) == {"a.a", "a.b.weight", "a.c", "a.b.bias"}


def test_integers_are_refused(tmp_path: Path) -> None:
    tensors = random(4, 6, 2)
    tensors["a.b.osft_S_high"] = torch.ones(2, dtype=torch.int32)
    with pytest.raises(LayoutError, match="not floating-point numbers") as caught:
        catalog_of(tmp_path, tensors)
    assert list(caught.value.problems) == ["a.b.osft_S_high: int32"]


def test_what_a_block_takes() -> None:
    """Sums, rows of U read twice, directions of V as they are read and in float64."""
    for rows, columns in ((14336, 4096), (4096, 14336), (50, 70), (256, 200_000)):
        target = Target(path="a", rows=rows, columns=columns, rank=min(rows, columns) // 2)
        for room in (8 * MIB, 16 * MIB, 32 * MIB):
            directions, step = steps(target, (rows, columns), room)
            taken = step * (8 * columns + 8 * target.num_directions) + 16 * directions * columns
            assert step == 1 or taken <= room
            assert (directions, step) >= (1, 1)


def test_how_often_v_is_read() -> None:
    """Of a box of 4 MiB, once or twice: there are as few blocks as possible."""
    for rows, hidden, columns, blocks in ((512, 2048, 2048, 2), (256, 4096, 4096, 2), (73, 4096, 14336, 1)):
        target = Target(path="a", rows=hidden, columns=columns, rank=hidden // 2)
        assert steps(target, (rows, columns), 16 * MIB)[1] == -(-rows // blocks)
        assert steps(target, (0, columns), 16 * MIB)[1] == 1


PEAK = f"""{HIGH_WATER}
import json, sys
import torch
import shardkit
from tests.worlds.processes import return_freed_memory
torch.randn(300, 300, dtype=torch.float64) @ torch.randn(300, 300, dtype=torch.float64)
shardkit.consolidate
return_freed_memory()
before = high_water()
shardkit.consolidate(sys.argv[1], sys.argv[2], max_memory=int(sys.argv[3]), dtype="bf16")
print(json.dumps(high_water() - before))
"""


@pytest.mark.prove
def test_peak_memory(tmp_path: Path) -> None:
    """A tall weight and a wide one, 106 MiB each with its factors in float64: in 16 MiB, and the least that blocks take."""
    tensors = random(6144, 1024, 512)
    wide = {name.replace("a.b.", "a.c."): value for name, value in random(1024, 6144, 512).items()}
    checkpoint = save({"model": tensors | wide}, tmp_path / "step-1")
    assert answer_of(PEAK, checkpoint, tmp_path / "out", 16 * MIB) < (16 + 32) * MIB
