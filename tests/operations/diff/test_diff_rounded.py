"""B against A rounded: `--as`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardkit.errors import UsageError
from shardkit.operations.consolidate import consolidate
from shardkit.operations.diff import diff
from tests.operations.consolidate.checkpoints import hub, save, training_state, weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")

NORM, Q = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
Model = dict[str, torch.Tensor]


def floats() -> Model:
    """The model's weights with values that no short float has."""
    torch.manual_seed(3)
    return {name: torch.randn(value.shape) for name, value in weights().items()}


@pytest.mark.parametrize("source", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_export_is_its_run_rounded(dtype: str, source: torch.dtype, tmp_path: Path) -> None:
    state = {name: value.to(source) for name, value in floats().items()}
    state[NORM][:3] = torch.tensor([float("nan"), 1e-30, -1e-42])
    run = save(training_state(state), tmp_path / "run" / "step-3")
    out = consolidate(run, tmp_path / "out", dtype=dtype).output
    result = diff(run, out, as_dtype=dtype)
    assert result.is_equal
    assert result.as_dtype == dtype
    assert result.headline() == f"equal with A rounded to {dtype}"
    assert {tensor.status for tensor in result.tensors} == {"equal"}

    wide = {torch.float32: "fp32", torch.float64: "fp64"}[source]
    for a, b, way in ((run, out, "A B"), (out, run, "B A")):
        plain = diff(a, b)
        assert plain.count("dtype") == len(state)
        one, two = (wide, dtype) if a == run else (dtype, wide)
        assert plain.notes[-1] == (
            f"{len(state)} tensors {one} in A and {two} in B: `diff {way} --as {dtype}` rounds the wider side first"
        )
    assert diff(out, run, as_dtype=dtype).count("dtype") == len(state)  # A is rounded, never B


def test_what_b_has_in_another_dtype_is_compared_as_it_is(tmp_path: Path) -> None:
    state = floats()
    half = {name: value if name == Q else value.bfloat16() for name, value in state.items()}
    run = hub(tmp_path / "run", state)
    assert diff(run, hub(tmp_path / "half", half), as_dtype="bfloat16").is_equal
    half[Q] = half[Q].bfloat16().float()
    (tensor,) = diff(run, hub(tmp_path / "other", half), as_dtype="bf16").differences
    assert (tensor.name, tensor.status) == (Q, "values")


def test_wider_is_exact(tmp_path: Path) -> None:
    half = {name: value.bfloat16() for name, value in floats().items()}
    wide = hub(tmp_path / "wide", {name: value.float() for name, value in half.items()})
    assert diff(hub(tmp_path / "half", half), wide, as_dtype="fp32").is_equal


@pytest.mark.parametrize("options", [{}, {"stats": True}, {"rtol": 1e-3}, {"max_memory": "2MiB"}])
def test_one_value_that_is_not_rounded(options: dict[str, object], tmp_path: Path) -> None:
    """It comes late, after bands that are equal."""
    value = torch.randn(1000, 1024)
    half = value.bfloat16()
    half.view(torch.int16)[900, 7] ^= 1  # the next bf16
    result = diff(hub(tmp_path / "a", {"w": value}, None), hub(tmp_path / "b", {"w": half}, None), as_dtype="bf16", **options)  # type: ignore[arg-type]  # fmt: skip
    (tensor,) = result.differences
    assert (tensor.status, tensor.num_changed, tensor.first_changed) == ("values", 1, (900, 7))
    rounded = value.bfloat16().double()
    expected = float((rounded - half.double()).norm() / max(rounded.norm(), half.double().norm()))
    assert tensor.relative_error == pytest.approx(expected, rel=1e-6)
    assert tensor.stats is None or tensor.stats.max_abs == abs(rounded[900, 7] - half[900, 7].double())


def test_an_unknown_dtype(tmp_path: Path) -> None:
    model = hub(tmp_path / "a", floats())
    with pytest.raises(UsageError, match="--as 'fp8' is not one of bf16, fp16, fp32"):
        diff(model, model, as_dtype="fp8")  # type: ignore[arg-type]
