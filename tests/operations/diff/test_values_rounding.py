"""Equal after rounding: the rounding itself against torch, then what diff and verify say of whole checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from shardkit.core.dtypes import BY_NAME
from shardkit.errors import UsageError
from shardkit.operations.consolidate import consolidate
from shardkit.operations.diff import diff
from shardkit.operations.diff.values import rounded
from shardkit.operations.verify import verify
from tests.operations.consolidate.checkpoints import hub, save, training_state, weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")

NORM, Q = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
MIB = 1 << 20
Model = dict[str, torch.Tensor]


def floats(seed: int = 3) -> Model:
    """The model's weights with values that no short float holds."""
    torch.manual_seed(seed)
    return {name: torch.randn(value.shape) for name, value in weights().items()}


def as_torch(values: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    return values.to(dtype).double().numpy()


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_every_float32_rounds_as_in_torch(name: str) -> None:
    """All signs, exponents and leading bits of mantissas, with what lies below, on and above each tie."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for low in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF):
        values = (upper | np.uint32(low)).view(np.float32)
        expected = as_torch(torch.from_numpy(values), getattr(torch, name))
        with np.errstate(invalid="ignore"):
            found = rounded(values.astype(np.float64), BY_NAME[name])
        both_nan = np.isnan(found) & np.isnan(expected)
        assert np.array_equal(found.view(np.uint64)[~both_nan], expected.view(np.uint64)[~both_nan])


def test_float64_is_rounded_once() -> None:
    """Through float32 each of these would become a tie first, and then fall to the even side."""
    tiny = 2.0**-45
    for name, bits, smallest in (("bfloat16", 7, -133), ("float16", 10, -24)):
        half = 2.0 ** -(bits + 1)
        step = 2 * half
        cases = [
            (1 + half, 1.0),
            (1 + half + tiny, 1 + step),
            (1 + step + half, 1 + 2 * step),
            (1 + step + half - tiny, 1 + step),
            (-(1 + half + tiny), -(1 + step)),
            (2.0**smallest * (0.5 + tiny), 2.0**smallest),
            (2.0**smallest * 0.5, 0.0),
            (2.0**smallest * (1.5 - tiny), 2.0**smallest),
        ]
        values, expected = (np.array(side) for side in zip(*cases, strict=True))
        assert rounded(values, BY_NAME[name]).tolist() == expected.tolist()
    random = np.random.default_rng(5)
    words = random.integers(0, 1 << 64, 1 << 16, dtype=np.uint64).view(np.float64)
    scaled = random.standard_normal(1 << 16) * 2.0 ** random.integers(-30, 17, 1 << 16)
    for values in (words, scaled):
        with np.errstate(all="ignore"):
            expected = values.astype(np.float16).astype(np.float64)  # numpy rounds float64 to float16 at once
            assert np.array_equal(rounded(values, BY_NAME["float16"]), expected, equal_nan=True)


@pytest.mark.parametrize(("dtype", "short"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_float64_is_rounded_as_torch_casts_or_once(dtype: str, short: torch.dtype, tmp_path: Path) -> None:
    """torch goes through float32: beside a tie that may end on the other side. A tensor is the one or the other."""
    state = {name: value.double() for name, value in floats().items()}
    half = 2.0**-8 if dtype == "bf16" else 2.0**-11
    state[Q][0, :2] = torch.tensor([1 + half + 2.0**-40, -(1 + 3 * half - 2.0**-40)], dtype=torch.float64)
    once = torch.tensor([1 + 2 * half, -(1 + 2 * half)], dtype=torch.float64)
    run = save(training_state(state), tmp_path / "run" / "step-3")
    out = consolidate(run, tmp_path / "out", dtype=dtype).output
    cast = {name: value.to(short) for name, value in state.items()}
    assert cast[Q][0, :2].double().tolist() == [1, -(1 + 4 * half)], "torch rounds twice"
    exact = {**cast, Q: cast[Q].clone()}
    exact[Q][0, :2] = once
    for other in (out, hub(tmp_path / "exact", exact)):
        for a, b in ((run, other), (other, run)):
            result = diff(a, b)
            assert {t.status for t in result.tensors} == {"rounded"}
            assert {t.num_off_rounding for t in result.tensors} == {0}
            assert verify(a, against=b).ok
    mixed = {**exact, Q: exact[Q].clone()}
    mixed[Q][0, 0] = 1
    (tensor,) = diff(run, hub(tmp_path / "mixed", mixed)).differences
    assert (tensor.name, tensor.num_off_rounding) == (Q, 1)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_export_is_its_run_rounded(dtype: str, tmp_path: Path) -> None:
    """An fp32 run and what consolidate makes of it: diff and verify say so, in both orders."""
    state = floats()
    state[NORM][:3] = torch.tensor([float("nan"), 1e-30, -1e-42])
    state["small"] = torch.ones(4)  # the same number in either dtype
    run = save(training_state(state), tmp_path / "run" / "step-3")
    out = consolidate(run, tmp_path / "out", dtype=dtype).output
    name = {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    num_flushed = {"bf16": 1, "fp16": 2}[dtype]
    for a, b, side in ((run, out, "b"), (out, run, "a")):
        result = diff(a, b)
        assert (result.is_equal, result.is_equal_after_rounding) == (False, True)
        assert (result.rounded_side, result.num_flushed) == (side, num_flushed)
        assert {(t.status, t.rounded_to) for t in result.tensors} == {("rounded", name)}
        checked = verify(a, against=b)
        assert checked.problems == ()
        assert checked.num_rounded_tensors == len(state)
        (note,) = (note for note in checked.notes if "rounded" in note)
        assert note.startswith(f"{out} holds {len(state)} tensors of {run} rounded to {dtype}")
        assert f"{num_flushed} value" in note
    plain = json.loads(json.dumps(diff(run, out).to_json(), allow_nan=False))
    assert (plain["rounded_side"], plain["num_rounded"], plain["num_flushed"]) == (
        "b",
        len(state),
        num_flushed,
    )


def changed(change: Callable[[Model], object], dtype: torch.dtype = torch.float32) -> Model:
    """Return the weights rounded to bf16, stored as `dtype`, and changed."""
    state = {name: value.bfloat16().to(dtype) for name, value in floats().items()}
    change(state)
    return state


def test_rounded_values_under_the_dtype_of_the_others(tmp_path: Path) -> None:
    """bf16 values stored as fp32: diff says what they are, verify takes them only when asked to."""
    run = hub(tmp_path / "run", floats())
    kept = changed(lambda state: state.update({Q: floats()[Q]}))  # one tensor is as it was
    other = hub(tmp_path / "other", kept)
    result = diff(run, other)
    assert (result.rounded_side, result.is_equal_after_rounding) == ("b", True)
    assert (result.count("rounded"), result.count("equal")) == (len(kept) - 1, 1)
    refused = verify(other, against=run)
    assert len(refused.problems) == len(kept) - 1
    assert all("--rounded" in problem.message for problem in refused.problems)
    assert all(f"after rounding {run}'s to bf16" in problem.message for problem in refused.problems)
    assert verify(other, against=run, rounded=True).ok
    with pytest.raises(UsageError, match="against"):
        verify(other, rounded=True)


def one_ulp(state: Model) -> None:
    state[Q].view(torch.int32)[2, 7] ^= 0x10000  # the next bf16


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (one_ulp, "the next bf16"),
        (lambda state: state[Q].view(torch.int32)[2, 7].bitwise_xor_(1), "not a bf16"),
        (lambda state: state[Q].__setitem__((0, 0), float("inf")), "finite became infinite"),
        (lambda state: state[Q].__setitem__((0, 0), float("nan")), "a number became NaN"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_value_that_is_not_rounded(
    change: Callable[[Model], object], what: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    state = {name: value.to(dtype) for name, value in changed(change).items()}
    result = diff(hub(tmp_path / "run", floats()), hub(tmp_path / "other", state))
    (tensor,) = result.differences
    assert tensor.name == Q, what
    assert tensor.status == ("values" if dtype is torch.float32 else "dtype")
    assert result.count("rounded") == len(state) - 1
    assert not verify(tmp_path / "other", against=tmp_path / "run", rounded=True).ok


@pytest.mark.parametrize("stats", [False, True])
def test_equal_elements_before_the_first_that_differs_count(stats: bool, tmp_path: Path) -> None:
    """A megabyte that is equal, and is no bf16, and only then rounded values."""
    value = torch.full((600, 1024), 1.2345)
    half = value.clone()
    half[400:] = half[400:].bfloat16().float()
    result = diff(
        hub(tmp_path / "a", {"w": value}, None), hub(tmp_path / "b", {"w": half}, None), stats=stats
    )
    assert [tensor.status for tensor in result.tensors] == ["values"]
    value[:400] = half[:400] = 0.5
    result = diff(
        hub(tmp_path / "c", {"w": value}, None), hub(tmp_path / "d", {"w": half}, None), stats=stats
    )
    assert [tensor.status for tensor in result.tensors] == ["rounded"]
    assert result.tensors[0].num_flushed == 0


def test_one_direction(tmp_path: Path) -> None:
    """What is rounded the other way than most tensors is a difference."""
    one, two = floats(), {name: value.bfloat16() for name, value in floats().items()}
    one[Q], two[Q] = two[Q], one[Q]
    result = diff(hub(tmp_path / "a", one), hub(tmp_path / "b", two))
    assert (result.rounded_side, [tensor.name for tensor in result.differences]) == ("b", [Q])
    assert result.differences[0].status == "dtype"
    assert [problem.tensor for problem in verify(tmp_path / "b", against=tmp_path / "a").problems] == [Q]


def test_what_rounding_is_not_about(tmp_path: Path) -> None:
    """Infinity that fp16 would make of a number, bits of NaN alone, signs of zero, integers, fp64 as fp32."""
    nan = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    one = {
        "overflow": torch.tensor([65520.0, 1.1]),
        "nan": torch.stack([nan[0], torch.ones((), dtype=torch.bfloat16)]),
        "zero": torch.tensor([0.0, 1.1]),
        "count": torch.tensor([1, 2]),
        "wide": torch.tensor([1.1], dtype=torch.float64),
    }
    two = {
        "overflow": one["overflow"].half(),
        "nan": torch.stack([nan[1], torch.ones((), dtype=torch.bfloat16)]),
        "zero": torch.tensor([-0.0, 1.1]).bfloat16().float(),
        "count": torch.tensor([1, 3]),
        "wide": one["wide"].float(),
    }
    result = diff(hub(tmp_path / "a", one, None), hub(tmp_path / "b", two, None))
    assert {t.name: t.status for t in result.tensors} == {
        "overflow": "dtype",
        "nan": "values",
        "zero": "values",
        "count": "values",
        "wide": "dtype",
    }
    assert result.rounded_side is None
