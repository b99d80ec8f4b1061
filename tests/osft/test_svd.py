"""Factors of single matrices: exact, orthogonal, in order, and the same whatever the orientation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardkit.core.factored import FACTORS, Target
from shardkit.errors import SourceError
from shardkit.osft import svd
from shardkit.osft.svd import MAX_ERROR, Factors, factorise
from tests.cases import but_first
from tests.osft.factored import fold
from tests.worlds.processes import return_freed_memory


def of(weight: torch.Tensor, rank: int | None = None) -> tuple[Factors, Target]:
    rows, columns = weight.shape
    target = Target(path="layer", rows=rows, columns=columns, rank=rank or min(rows, columns) // 2)
    return factorise(weight, target), target


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def deficient() -> torch.Tensor:
    return normal(40, 5) @ normal(5, 30)


def steep() -> torch.Tensor:
    """Return a matrix whose smallest singular value is far below what a Gram matrix can tell."""
    left, _ = torch.linalg.qr(normal(48, 48).double())
    right, _ = torch.linalg.qr(normal(32, 32).double())
    weight: torch.Tensor = (left[:, :32] * torch.logspace(0, -9, 32, dtype=torch.float64)) @ right
    return weight.float()


MATRICES = {
    "tall": normal(96, 40),
    "wide": normal(40, 96),
    "square": normal(64, 64),
    "bf16": normal(50, 70).bfloat16(),
    "deficient": deficient(),
    "deficient wide": deficient().T.contiguous(),
    "steep": steep(),
    "two rows": normal(2, 9),
    "equal singular values": torch.eye(24),
    "small numbers": normal(30, 20) * 1e-20,
}


@pytest.mark.parametrize("name", MATRICES)
def test_factors_are_the_weight(name: str) -> None:
    weight = MATRICES[name]
    found, target = of(weight)
    assert {f"layer.{key}": tuple(x.shape) for key, x in found.tensors.items()} == target.shapes
    assert all(x.dtype is torch.float32 and x.is_contiguous() for x in found.tensors.values())
    norm = float(weight.double().norm())
    assert float((fold(found.tensors) - weight.double()).norm()) <= MAX_ERROR * norm
    left = torch.cat((found.tensors["osft_U_high"], found.tensors["osft_params.U_low"]), 1).double()
    right = torch.cat((found.tensors["osft_V_high"], found.tensors["osft_params.V_low"]), 0).double()
    for products in (left.T @ left, right @ right.T):
        assert float((products - torch.eye(len(products)).double()).abs().max()) <= MAX_ERROR
    sizes = torch.cat((found.tensors["osft_S_high"], found.tensors["osft_params.S_low"]))
    assert bool((sizes[:-1] >= sizes[1:]).all())
    assert bool((sizes >= 0).all())
    exact = torch.linalg.svdvals(weight.double())
    assert torch.allclose(sizes.double(), exact, rtol=1e-6, atol=1e-6 * float(exact[0]))
    assert found.error <= MAX_ERROR
    assert found.orthogonality <= MAX_ERROR
    distances = [
        products - torch.eye(len(products)).double() for products in (left.T @ left, right @ right.T)
    ]
    worst = max(float(distance.abs().max()) for distance in distances)
    assert worst <= found.orthogonality <= 100 * worst + 1e-12
    missed = float((fold(found.tensors) - weight.double()).norm())
    assert found.error * (norm or 1) == pytest.approx(missed, rel=0.5, abs=1e-12)


def test_which_algorithm() -> None:
    """A Gram matrix squares how near to singular a matrix is, so it is left where it cannot tell."""
    assert of(MATRICES["tall"])[0].algorithm == "gram"
    assert of(MATRICES["wide"])[0].algorithm == "gram"
    assert of(MATRICES["deficient"])[0].algorithm == "svd"
    assert of(MATRICES["steep"])[0].algorithm == "svd"


def test_zero_folds_to_zero() -> None:
    found, _ = of(torch.zeros(12, 8))
    assert not fold(found.tensors).any()
    assert found.error == 0
    assert found.orthogonality <= MAX_ERROR


def test_signs_are_fixed() -> None:
    """The largest entry of each left direction is positive, so a matrix and its copy in float64 have one result."""
    weight = MATRICES["tall"]
    once, _ = of(weight)
    again, _ = of(weight.double())
    for name in FACTORS:
        assert torch.equal(once.tensors[name], again.tensors[name])
    left = torch.cat((once.tensors["osft_U_high"], once.tensors["osft_params.U_low"]), 1)
    assert bool((left.gather(0, left.abs().argmax(0)[None]) > 0).all())


def test_threads_change_nothing() -> None:
    before = torch.get_num_threads()
    weight = normal(300, 200)
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(of(weight)[0])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0].tensors[name], found[1].tensors[name]) for name in FACTORS)


def test_rows_fold_alone() -> None:
    found, _ = of(MATRICES["tall"])
    whole = fold(found.tensors)
    parts = [fold(found.tensors, slice(start, start + 7)) for start in range(0, 96, 7)]
    assert torch.allclose(torch.cat(parts), whole, rtol=0, atol=1e-14)


def test_a_bf16_weight_comes_back() -> None:
    weight = normal(256, 192).bfloat16()
    back = fold(of(weight)[0].tensors).bfloat16()
    assert float((back == weight).double().mean()) >= 0.999


def test_fp32_is_less_exact_and_said_so() -> None:
    weight = normal(128, 64)
    target = Target(path="layer", rows=128, columns=64, rank=20)
    found = factorise(weight, target, "fp32")
    assert found.algorithm == "svd fp32"
    assert factorise(weight, target).orthogonality < found.orthogonality < 1e-4


def test_what_is_not_finite_is_refused() -> None:
    weight = normal(8, 8)
    weight[3, 4] = float("nan")
    with pytest.raises(SourceError, match=r"layer\.weight: has values that are not finite"):
        of(weight)


@pytest.mark.parametrize("shape", [(700, 700), (400, 1100), (1100, 400)])
@pytest.mark.parametrize(
    "least_ratio", but_first([0.0, 9.0])
)  # by the Gram matrix, and by what takes its place
def test_memory_is_bounded_by_the_size(
    shape: tuple[int, int], least_ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(svd, "_LEAST_RATIO", least_ratio)
    monkeypatch.setattr(svd, "_BLOCK", 1 << 16)
    target = Target(path="a", rows=shape[0], columns=shape[1], rank=200)
    weight = (normal(*shape) + 80 * torch.eye(*shape)).bfloat16()
    factorise(weight, target)  # libraries allocate when they are first used
    return_freed_memory()
    before = high_water_mark()
    found = factorise(weight, target)
    assert found.algorithm == ("svd" if least_ratio else "gram")
    rows, columns = shape  # matrix and products in float64, factors in float32
    most = 8 * 3 * (rows * columns + min(shape) ** 2) + 4 * min(shape) * (rows + columns)
    assert high_water_mark() - before < most + (6 << 20)


def high_water_mark() -> int:
    """Return the most memory since the last call, in bytes; before the first, since the process began."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def test_what_lapack_cannot_do_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.eye(4)
    target = Target(path="layers.3.up", rows=4, columns=4, rank=2)

    def refuse(*_: object, **__: object) -> None:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", refuse)
    assert factorise(weight, target).algorithm == "svd"
    monkeypatch.setattr(torch.linalg, "svd", refuse)
    with pytest.raises(SourceError, match=r"^layers\.3\.up\.weight: no singular values were found: did not"):
        factorise(weight, target)
