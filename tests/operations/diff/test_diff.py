"""diff through its Python API: real checkpoints in several formats and chunkings, changed in one place at a time."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from shardkit.core.dtypes import BY_NAME
from shardkit.core.threads import NoProgress
from shardkit.errors import IntegrityError, SourceError, UsageError
from shardkit.operations.consolidate import consolidate
from shardkit.operations.diff import DiffResult, TensorDiff, diff
from shardkit.operations.diff.values import Measure, TensorStats, Tolerance
from shardkit.operations.preshard import preshard
from shardkit.training.finalize import finalize
from shardkit.training.prepare import prepare
from shardkit.training.save import save as save_model
from tests.answers import HIGH_WATER, answer_of
from tests.cases import but_first
from tests.formats.dcp.samples import save as save_dcp
from tests.models.zoo import ZOO, from_pretrained, make_hub
from tests.operations.consolidate.checkpoints import (
    CONFIG,
    EMBED,
    HEAD,
    hub,
    save,
    tiny_moe,
    training_state,
    weights,
)
from tests.operations.consolidate.test_trainers import TRAINERS, write_run
from tests.operations.test_keys import make as make_trainers

pytestmark = pytest.mark.usefixtures("fast_trace")

Q = "model.layers.1.self_attn.q_proj.weight"
MIB = 1 << 20


class ChunkPlanner(dcp.DefaultSavePlanner):
    """Saves every tensor in chunks of its own choice, as ranks of a mesh would."""

    def __init__(self, parts: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = parts
        """Into how many each dim is cut, `torch.chunk` by `torch.chunk`."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            data = item.tensor_data
            items += [item] if data is None else self._cut(item, data)
        self.plan = SavePlan(items, storage_data=plan.storage_data, planner_data=plan.planner_data)
        return self.plan

    def _cut(self, item: WriteItem, data: TensorWriteData) -> list[WriteItem]:
        corners: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
        for dim, size in enumerate(data.size):
            step = -(-size // (self.parts[dim] if dim < len(self.parts) else 1))
            spans = [(start, min(step, size - start)) for start in range(0, size, max(step, 1))] or [(0, 0)]
            corners = [((*o, start), (*s, length)) for o, s in corners for start, length in spans]
        chunk = type(data.chunk)
        items = []
        for number, (offsets, sizes) in enumerate(corners):
            index = MetadataIndex(item.index.fqn, torch.Size(offsets), number)
            box = chunk(torch.Size(offsets), torch.Size(sizes))
            part = TensorWriteData(chunk=box, properties=data.properties, size=data.size)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=part))
        return items

    def resolve_data(self, write_item: WriteItem) -> Any:
        value = super().lookup_object(MetadataIndex(write_item.index.fqn))
        if write_item.tensor_data is None:
            return super().resolve_data(write_item)
        chunk = write_item.tensor_data.chunk
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            value = value.narrow(dim, offset, size)
        return value.detach().contiguous()


def save_chunked(state: Mapping[str, Any], directory: Path, *parts: int) -> Path:
    """Save with stock DCP, every tensor in `parts` chunks along each dim."""
    save_dcp(dict(state), directory, planner=ChunkPlanner(parts))
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The Hub directory of a model."""
    return hub(tmp_path / "model", weights())


def only(result: DiffResult) -> TensorDiff:
    """Return the one tensor that differs."""
    assert len(result.differences) == 1
    assert not result.is_equal
    return result.differences[0]


class TestFormats:
    """The same weights, however they are stored."""

    @pytest.mark.parametrize("parts", [(1,), (3,), (1, 4), (2, 3)])
    def test_dcp_in_any_chunks(self, model: Path, parts: tuple[int, ...], tmp_path: Path) -> None:
        state = save_chunked(training_state(weights()), tmp_path / "c", *parts)
        result = diff(model, state)
        assert result.is_equal
        assert result.count("equal") == len(result.tensors) == 21
        assert (result.format_a, result.format_b) == ("hub", "dcp")
        assert result.read_bytes == 2 * sum(value.nbytes for value in weights().values())
        assert any("63 tensors beside the model's" in note for note in result.notes)
        found = {tensor.name: tensor for tensor in result.tensors}
        assert (found[Q].stored_a, found[Q].stored_b) == (Q, f"model.{Q}")

    @pytest.mark.parametrize(("one", "two"), [((3,), (1, 4)), ((2, 3), (3, 2)), ((1, 5), (1, 2))])
    def test_two_chunkings(self, one: tuple[int, ...], two: tuple[int, ...], tmp_path: Path) -> None:
        a, b = (save_chunked(weights(), tmp_path / name, *cut) for name, cut in (("a", one), ("b", two)))
        assert diff(a, b).is_equal
        changed = weights()
        changed[Q].view(torch.int32)[11, 9] ^= 1
        tensor = only(diff(a, save_chunked(changed, tmp_path / "changed", *two)))
        assert (tensor.name, tensor.status, tensor.num_changed) == (Q, "values", 1)
        assert tensor.first_changed == (11, 9)

    def test_what_preshard_writes_and_what_consolidate_makes_of_it(self, model: Path, tmp_path: Path) -> None:
        out = preshard(str(model), str(tmp_path / "out"), world_size=3, wrap="none").output
        assert diff(model, out).is_equal
        assert diff(out, consolidate(out, tmp_path / "back").output).is_equal

    def test_everything_of_a_training_state(self, tmp_path: Path) -> None:
        state = training_state(weights())
        a = save(state, tmp_path / "a")
        state["optim"]["state"][Q]["exp_avg"][0, 0] += 1
        b = save_chunked(state, tmp_path / "b", 2)
        assert diff(a, b).is_equal
        result = diff(a, b, all_tensors=True)
        assert only(result).name == f"optim.state.{Q}.exp_avg"
        assert len(result.tensors) == 84

    @pytest.mark.parametrize("trainer", TRAINERS)
    def test_a_run_of_any_trainer(self, trainer: str, model: Path, tmp_path: Path) -> None:
        changed = weights()
        changed[Q][7, 1] += 1
        write_run(tmp_path / "run", TRAINERS[trainer], {2: weights(), 4: changed})
        for result in (diff(tmp_path / "run", model), diff(model, tmp_path / "run")):
            assert (only(result).name, only(result).first_changed) == (Q, (7, 1))
            assert len(result.tensors) == 21

    def test_no_model_on_either_side(self, tmp_path: Path) -> None:
        state = {"optim": training_state(weights())["optim"]}
        result = diff(save(state, tmp_path / "a"), save_chunked(state, tmp_path / "b", 2))
        assert result.is_equal
        assert len(result.tensors) == 63
        assert any("stored names" in note for note in result.notes)

    def test_a_run_directory(self, model: Path, tmp_path: Path) -> None:
        save(weights(), tmp_path / "run" / "step-5")
        result = diff(tmp_path / "run", model)
        assert result.is_equal
        assert result.resolved_a == str(tmp_path / "run" / "step-5")


class TestDifferences:
    """One thing differs, and that is what is said."""

    def test_missing_and_extra(self, model: Path, tmp_path: Path) -> None:
        changed = weights()
        del changed[Q]
        changed["extra.weight"] = torch.zeros(2)
        result = diff(model, hub(tmp_path / "b", changed))
        assert [(t.symbol, t.name) for t in result.differences] == [("+", "extra.weight"), ("-", Q)]
        assert result.count("equal") == 20

    @pytest.mark.parametrize("shape", [(256,), (8, 32), (16, 8)])
    def test_shape(self, model: Path, shape: tuple[int, ...], tmp_path: Path) -> None:
        changed = weights()
        changed[Q] = changed[Q].reshape(-1)[: np.prod(shape)].reshape(shape)
        tensor = only(diff(model, hub(tmp_path / "b", changed), stats=True))
        assert (tensor.status, tensor.shape_a, tensor.shape_b) == ("shape", (16, 16), shape)
        assert tensor.num_changed is None

    def test_dtype_with_equal_values(self, model: Path, tmp_path: Path) -> None:
        changed = weights()
        changed[Q] = changed[Q].double()
        tensor = only(diff(model, hub(tmp_path / "b", changed)))
        assert (tensor.status, tensor.dtype_a, tensor.dtype_b) == ("dtype", "float32", "float64")
        assert tensor.num_changed == 0

    def test_dtype_with_other_values(self, model: Path, tmp_path: Path) -> None:
        changed = weights()
        changed[Q] = changed[Q].bfloat16()
        tensor = only(diff(model, hub(tmp_path / "b", changed), stats=True))
        expected = (changed[Q].float() != weights()[Q]).sum().item()
        assert (tensor.status, tensor.num_changed) == ("dtype", expected)
        assert tensor.stats is not None
        assert tensor.stats.max_abs == (changed[Q].float() - weights()[Q]).abs().max().item()

    @pytest.mark.parametrize(
        ("stored", "untied"),
        [
            ((EMBED, HEAD), [("*", HEAD)]),
            ((EMBED,), [("+", HEAD)]),
            ((HEAD,), [("*", HEAD), ("+", EMBED)]),
        ],
    )
    def test_tied(self, stored: tuple[str, ...], untied: list[tuple[str, str]], tmp_path: Path) -> None:
        tied = weights(tied=True)
        left_out = {EMBED, HEAD}.difference(stored)
        one = hub(tmp_path / "a", {name: value for name, value in tied.items() if name not in left_out})
        two = save_chunked(tied, tmp_path / "b", 2)
        for result in (diff(one, two), diff(two, one)):
            assert result.is_equal
            assert result.count("tied") == len(left_out)
        tied[HEAD].view(torch.int32)[36, 15] ^= 1
        changed = diff(one, save(tied, tmp_path / "changed"))
        assert sorted((tensor.symbol, tensor.name) for tensor in changed.differences) == untied

    def test_tensors_that_share_their_bytes_are_tied(self, tmp_path: Path) -> None:
        value = torch.arange(6.0)
        (tmp_path / "a").mkdir()
        torch.save({"one.weight": value, "two.weight": value}, tmp_path / "a" / "pytorch_model.bin")
        b = hub(tmp_path / "b", {"one.weight": value}, None)
        result = diff(tmp_path / "a", b)
        assert result.is_equal
        ties = [(t.name, t.tied_to) for t in result.tensors]
        assert ties == [("one.weight", None), ("two.weight", "one.weight")]
        assert diff(b, tmp_path / "a").is_equal

    def test_equal_tensors_that_no_model_ties_are_not_taken_for_tied(self, tmp_path: Path) -> None:
        state = {"model.norm.weight": torch.ones(4), "model.other.weight": torch.ones(4)}
        a = hub(tmp_path / "a", {"model.norm.weight": torch.ones(4)})
        tensor = only(diff(a, hub(tmp_path / "b", state)))
        assert (tensor.symbol, tensor.name) == ("+", "model.other.weight")

    def test_globs(self, model: Path, tmp_path: Path) -> None:
        changed = weights()
        changed[Q][0, 0] += 1
        other = hub(tmp_path / "b", changed)
        assert diff(model, other, exclude=["*q_proj*"]).is_equal
        assert len(diff(model, other, include=["*q_proj*"]).tensors) == 2
        with pytest.raises(UsageError, match="1 glob of --include and --exclude matches no name"):
            diff(model, other, include=["*q_proj*"], exclude=["nothing*"])
        with pytest.raises(UsageError, match="leave none of"):
            diff(model, other, exclude=["*"])

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_globs_are_about_the_names_that_are_shown(self, tmp_path: Path) -> None:
        """A trainer's own names are those of the Hub by then."""
        base, theirs = make_trainers("torchtitan-llama3", tmp_path)
        dcp.save({"model": theirs}, checkpoint_id=tmp_path / "step-3", no_dist=True)
        compared = diff(base, tmp_path / "step-3", include=["model.layers.0.*.q_proj.weight"])
        assert compared.is_equal
        assert [tensor.name for tensor in compared.tensors] == ["model.layers.0.self_attn.q_proj.weight"]
        with pytest.raises(UsageError, match="matches no name"):
            diff(base, tmp_path / "step-3", include=["tok_embeddings.weight"])

    def test_one_difference_far_into_a_large_tensor(self, tmp_path: Path) -> None:
        value = torch.zeros(1100, 1024)
        a = hub(tmp_path / "a", {"w": value}, None)
        value[1099, 1023] = -0.0
        b = save_chunked({"w": value}, tmp_path / "b", 1, 3)
        for stats in (False, True):
            tensor = only(diff(a, b, stats=stats))
            assert (tensor.num_changed, tensor.first_changed) == (1, (1099, 1023))
        assert tensor.stats is not None
        assert (tensor.stats.max_abs, tensor.stats.cosine) == (0.0, None)


class TestTolerance:
    """Bits by default, numpy's allclose on request."""

    def test_bits(self, tmp_path: Path) -> None:
        nan = torch.tensor([0x7FC00000, 0x7FC00001, 0], dtype=torch.int32).view(torch.float32)
        same = hub(tmp_path / "a", {"w": nan}, None)
        assert diff(same, same).is_equal  # NaN, bit for bit
        nan = torch.tensor([0x7FC00000, 0x7FC00002, 0], dtype=torch.int32).view(torch.float32)
        other = hub(tmp_path / "b", {"w": nan}, None)
        assert only(diff(same, other)).first_changed == (1,)
        result = diff(same, other, rtol=0.0)
        assert result.is_equal
        assert (result.tensors[0].status, result.tensors[0].num_outside) == ("close", 0)

    def test_close(self, model: Path, tmp_path: Path) -> None:
        changed = {name: value * (1 + 1e-5) for name, value in weights().items()}
        other = hub(tmp_path / "b", changed)
        assert diff(model, other, rtol=1e-4).count("close") == 21
        assert not diff(model, other, rtol=1e-7).is_equal
        assert not diff(model, other, atol=1e-7).is_equal
        changed[Q][0, 5] += 1
        tensor = only(diff(model, hub(tmp_path / "c", changed), rtol=1e-4))
        assert (tensor.name, tensor.num_outside) == (Q, 1)
        assert (tensor.num_changed or 0) > 200

    @pytest.mark.parametrize(
        "options", [{"rtol": -1.0}, {"atol": float("nan")}, {"max_memory": "1MiB"}, {"sort": "size"}]
    )
    def test_options_that_cannot_be(self, model: Path, options: dict[str, Any]) -> None:
        with pytest.raises(UsageError):
            diff(model, model, **options)


def memory(tensor: torch.Tensor) -> memoryview:
    return memoryview(bytearray(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()))


def measured(
    a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance | None = None, cut: int | None = None
) -> Measure:
    one, two = (BY_NAME[str(side.dtype).removeprefix("torch.")] for side in (a, b))
    measure = Measure(one, two, tolerance=tolerance, stats=True)
    for start in range(0, len(a), cut or len(a)):
        stop = start + (cut or len(a))
        measure.add(memory(a[start:stop]), memory(b[start:stop]))
    return measure


def figures(measure: Measure) -> TensorStats:
    stats = measure.stats()
    assert stats is not None
    return stats


FLOATS = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


class TestFigures:
    """Against what torch and numpy say of the same values."""

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_floats(self, dtype: torch.dtype) -> None:
        torch.manual_seed(1)
        a = torch.randn(300).to(dtype)
        b = (a.double() + torch.randn(300).double() / 8).to(dtype)
        measure, one, two = measured(a, b, Tolerance(0.05, 0.01), cut=70), a.double(), b.double()
        stats = figures(measure)
        assert measure.num_changed == (memory_words(a) != memory_words(b)).sum()
        assert measure.num_outside == (~np.isclose(one, two, rtol=0.05, atol=0.01)).sum()
        assert stats.max_abs == (one - two).abs().max().item()
        larger = torch.maximum(one.abs(), two.abs())
        assert stats.max_rel == torch.nan_to_num((one - two).abs() / larger).max().item()
        assert stats.cosine == pytest.approx(torch.cosine_similarity(one, two, dim=0).item())
        error = ((one - two).norm() / torch.maximum(one.norm(), two.norm())).item()
        assert stats.relative_error == pytest.approx(error)

    @pytest.mark.parametrize("dtype", INTS)
    def test_integers(self, dtype: torch.dtype) -> None:
        info = torch.iinfo(dtype)
        a = torch.tensor([info.min, 0, 5, info.max], dtype=dtype)
        b = torch.tensor([info.max, 0, 6, info.max], dtype=dtype)
        measure = measured(a, b, Tolerance(0.0, 1.0))
        assert (measure.num_changed, measure.first_changed, measure.num_outside) == (2, 0, 1)
        assert figures(measure).max_abs == float(info.max - info.min)

    def test_a_difference_of_one_that_float64_cannot_hold(self) -> None:
        assert figures(measured(torch.tensor([2**53]), torch.tensor([2**53 + 1]))).max_abs == 1.0

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
    def test_complex(self, dtype: torch.dtype) -> None:
        a = torch.tensor([1 + 2j, 3 - 4j, 0j], dtype=dtype)
        b = torch.tensor([1 + 2j, 3 - 4.5j, 0j], dtype=dtype)
        measure = measured(a, b, Tolerance(0.0, 0.1))
        assert (measure.num_changed, measure.first_changed, measure.num_outside) == (1, 1, 1)
        assert figures(measure).max_abs == 0.5

    def test_infinity_and_nan(self) -> None:
        inf, nan = float("inf"), float("nan")
        signalling = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
        assert measured(signalling, signalling + 0).num_changed == 1
        measure = measured(torch.tensor([inf, inf, nan, 1.0, 2.0]), torch.tensor([inf, -inf, nan, nan, 3.0]))
        assert measure.num_changed == 3
        assert (figures(measure).num_nonfinite, figures(measure).max_abs) == (2, 1.0)

    def test_two_dtypes(self) -> None:
        a = torch.tensor([1.0, 2.0, -0.0, float("nan")])
        b = torch.tensor([1.0, 2.5, 0.0, float("nan")], dtype=torch.bfloat16)
        measure = measured(a, b, Tolerance(0.0, 0.1))
        assert (measure.num_changed, measure.num_outside) == (2, 1)
        mixed = measured(torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0, 3.5], dtype=torch.float16))
        assert mixed.num_changed == 1
        real = measured(torch.tensor([1 + 0j, 2 + 1j]), torch.tensor([1.0, 2.0]))
        assert (real.num_changed, figures(real).max_abs) == (1, 1.0)

    def test_packed_fp4_is_compared_as_bits_only(self) -> None:
        a, b = (torch.tensor(x, dtype=torch.uint8) for x in ([1, 2, 3], [1, 2, 4]))
        dtype = BY_NAME["float4_e2m1fn_x2"]
        measure = Measure(dtype, dtype, tolerance=Tolerance(9.0, 9.0), stats=True)
        measure.add(memory(a), memory(b))
        assert (measure.num_changed, measure.num_outside, measure.stats()) == (1, 1, None)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), min_size=1, max_size=30))
    def test_any_floats(self, pairs: list[tuple[float, float]]) -> None:
        a, b = (torch.tensor(side, dtype=torch.float32) for side in zip(*pairs, strict=True))
        measure = measured(a, b, Tolerance(1e-3, 1e-5))
        with np.errstate(all="ignore"):
            close = np.isclose(a.double(), b.double(), rtol=1e-3, atol=1e-5, equal_nan=True)
        changed = memory_words(a) != memory_words(b)
        assert measure.num_changed == changed.sum()
        assert measure.num_outside == (changed & ~close).sum()
        assert json.loads(json.dumps(measure.num_changed)) >= measure.num_outside


def memory_words(tensor: torch.Tensor) -> Any:
    return np.frombuffer(memory(tensor), dtype=f"u{tensor.element_size()}")


def test_sorted_by_difference(tmp_path: Path) -> None:
    base = {name: torch.ones(8) for name in "abcdef"}
    changed = {name: value.clone() for name, value in base.items()}
    changed["b"][0] += 0.01
    changed["c"] *= 2
    changed["d"][:] = float("nan")
    changed["e"] = torch.ones(9)
    result = diff(hub(tmp_path / "a", base, None), hub(tmp_path / "b", changed, None), sort="difference")
    assert [t.name for t in result.differences] == ["e", "d", "c", "b"]
    plain = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert [t["symbol"] for t in plain["tensors"]] == ["*", "*", "*", "*", "=", "="]
    assert (plain["num_equal"], plain["num_values"], plain["num_shape"], plain["num_tensors"]) == (2, 3, 1, 6)
    assert plain["tensors"][3]["share_changed"] == 0.125


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("options", [{}, {"stats": True}, {"atol": 1e-3}, {"max_memory": "2MiB"}])
def test_each_of_fused_experts_has_an_error_of_its_own(
    options: dict[str, Any], chunked: bool, tmp_path: Path
) -> None:
    before = torch.randn(7, 300, 130, dtype=torch.bfloat16)
    after = before.float()
    after[2, 0, 0] += 1  # one element
    after[4] *= 1.5
    after[6] = -after[6]
    after = after.bfloat16()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    hub(tmp_path / "a", {name: before})
    if chunked:
        save_chunked({name: after}, tmp_path / "b", 3)
    else:
        hub(tmp_path / "b", {name: after})
    found = only(diff(tmp_path / "a", tmp_path / "b", **options))
    assert found.experts is not None
    one, two = before.double().flatten(1), after.double().flatten(1)
    larger = torch.maximum(one.norm(dim=1), two.norm(dim=1))
    assert found.experts == pytest.approx(((one - two).norm(dim=1) / larger).tolist(), rel=1e-9)
    assert [bool(error) for error in found.experts] == [False, False, True, False, True, False, True]
    whole = (one - two).norm() / max(one.norm(), two.norm())
    assert found.relative_error == pytest.approx(float(whole), rel=1e-9)


def test_of_experts_that_are_no_numbers_the_share_of_elements_is_known(tmp_path: Path) -> None:
    name, before = "model.layers.0.mlp.experts.up_proj", torch.zeros(3, 2, 4)
    after = before.clone()
    after[1, 0, 0], after[2, 0, :2] = -0.0, float("nan")  # other bits, no other number; no number
    for path, tensor in {"a": before, "b": after}.items():
        hub(tmp_path / path, {name: tensor})
    assert only(diff(tmp_path / "a", tmp_path / "b")).experts == (0.0, 1 / 8, 2 / 8)


def test_scalars_empty_tensors_and_every_dtype(tmp_path: Path) -> None:
    state = {
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "flag": torch.tensor([True, False]),
        "half": torch.ones(3).half(),
        "eight": torch.ones(5).to(torch.float8_e4m3fn),
        "complex": torch.ones(3, dtype=torch.complex64),
    }
    a, b = hub(tmp_path / "a", state, None), save_chunked(state, tmp_path / "b", 2)
    result = diff(a, b, stats=True)
    assert result.is_equal
    assert len(result.tensors) == 6
    state["scalar"] = torch.tensor(8)
    tensor = only(diff(a, save(state, tmp_path / "c")))
    assert (tensor.name, tensor.first_changed, tensor.num_elements) == ("scalar", (), 1)


def test_integers_that_float64_cannot_tell_apart_are_not_within_a_tolerance(tmp_path: Path) -> None:
    a = hub(tmp_path / "a", {"count": torch.tensor([2**53, -(2**63), 5])}, None)
    b = hub(tmp_path / "b", {"count": torch.tensor([2**53 + 1, 2**63 - 1, 5])}, None)
    assert only(diff(a, b, atol=0.5)).num_outside == 2
    assert only(diff(a, b, atol=1.0)).num_outside == 1
    assert diff(a, b, rtol=3.0).is_equal


def test_a_legacy_file(tmp_path: Path) -> None:
    state = weights()
    state[Q] = state[Q].t()  # decoded: it does not lie row-major in the file
    (tmp_path / "legacy").mkdir()
    torch.save(state, tmp_path / "legacy" / "pytorch_model.bin")
    contiguous = {name: value.contiguous() for name, value in state.items()}
    assert diff(tmp_path / "legacy", hub(tmp_path / "b", contiguous), stats=True).is_equal
    contiguous[Q][2, 4] += 1
    tensor = only(diff(tmp_path / "legacy", save_chunked(contiguous, tmp_path / "c", 1, 3)))
    assert (tensor.name, tensor.first_changed) == (Q, (2, 4))


def test_a_source_that_changes_meanwhile(model: Path, tmp_path: Path) -> None:
    other = hub(tmp_path / "b", weights())

    class Touch(NoProgress):
        def start(self, total_bytes: int, label: str) -> None:
            changed = weights()
            changed[Q][0, 0] += 1
            path = other / "model.safetensors"
            save_file(changed, path)
            os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # a clock of jiffies may stand still

    with pytest.raises(IntegrityError, match="changed while being read"):
        diff(model, other, progress=Touch())


def test_progress_counts_one_side(model: Path, tmp_path: Path) -> None:
    counted: list[int] = []

    class Count(NoProgress):
        def start(self, total_bytes: int, label: str) -> None:
            counted.extend([total_bytes, 0])

        def advance(self, num_bytes: int) -> None:
            counted[-1] += num_bytes

    total = sum(value.nbytes for value in weights().values())
    changed = weights()
    changed[Q][3, 3] += 1
    for stats in (False, True):
        diff(model, hub(tmp_path / f"b{stats}", changed), stats=stats, progress=Count())
    assert counted == [total] * 4


def test_nothing_there(model: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        diff(model, model / "absent")


PEAK = f"""{HIGH_WATER}
import json, sys
import shardkit.operations.diff as module, shardkit.operations.diff.values
before = high_water()
options = json.loads(sys.argv[3])
result = module.diff(sys.argv[1], sys.argv[2], **options)
print(json.dumps([high_water() - before, "torch" in sys.modules, result.differences[0].num_changed]))
"""


@pytest.mark.prove
@pytest.mark.parametrize("stats", [False, True])
def test_peak_memory(stats: bool, tmp_path: Path) -> None:
    value = torch.arange(24 * MIB, dtype=torch.float32).reshape(4096, -1)  # 96 MiB
    a = hub(tmp_path / "a", {"w": value}, None)
    value[4095, 5] += 8
    b = save_chunked({"w": value}, tmp_path / "b", 2, 3)
    options = json.dumps({"stats": stats, "max_memory": 8 * MIB})
    peak, has_torch, num_changed = answer_of(PEAK, a, b, options)
    assert num_changed == 1
    assert not has_torch
    assert peak < (8 + 12) * MIB  # and modules that are imported on the way


def test_config_is_not_weights(model: Path, tmp_path: Path) -> None:
    assert diff(model, hub(tmp_path / "b", weights(), {**CONFIG, "use_cache": False})).is_equal


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_fused_experts_are_compared_with_the_single_ones_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_moe()
    model.save_pretrained(tmp_path / "hub")
    preshard(tmp_path / "hub", tmp_path / "sharded", world_size=2)
    for found in (diff(tmp_path / "hub", tmp_path / "sharded"), diff(tmp_path / "sharded", tmp_path / "hub")):
        assert found.is_equal
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[2, 9, 3] += 1
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "trained")  # nothing but the class tells
    changed = diff(tmp_path / "hub", tmp_path / "trained")
    assert [each.name for each in changed.differences] == ["model.layers.1.mlp.experts.2.up_proj.weight"]
    # Where the class cannot be asked, that is said: the weights may be the same.
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    unasked = diff(tmp_path / "hub", tmp_path / "trained")
    assert not unasked.is_equal
    assert any("torch is not installed (`pip install 'shardkit[trace]'`)" in note for note in unasked.notes)


@pytest.mark.parametrize("name", ["torchtune-llama", "megatron-llama"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_trainers_own_names_are_the_hubs_where_one_set_of_key_rules_knows_them(
    name: str, tmp_path: Path
) -> None:
    """As `consolidate` has it: names, forms and the padding of the vocabulary."""
    source, theirs = make_trainers(name, tmp_path)
    rows = {"output_layer.weight", "embedding.word_embeddings.weight"}
    padded = {
        key: torch.cat([value, value.new_zeros(128 - len(value), *value.shape[1:])]) if key in rows else value
        for key, value in theirs.items()
    }
    dcp.save({"model": padded}, checkpoint_id=tmp_path / "trained")
    for found in (diff(tmp_path / "trained", source), diff(source, tmp_path / "trained")):
        assert found.is_equal
        assert any("names turned into the Hub's by the key rules of" in note for note in found.notes)
    padded = {key: value.clone() for key, value in padded.items()}
    changed = next(key for key in padded if key not in rows)
    padded[changed].view(-1)[0] += 1
    dcp.save({"model": padded}, checkpoint_id=tmp_path / "changed")
    assert len(diff(tmp_path / "changed", source).differences) == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_key_rules_leave_out_is_named(tmp_path: Path) -> None:
    """A result "equal" that is silent about a tensor of one side is no result."""
    source, theirs = make_trainers("torchtitan-llama3-0.2", tmp_path)
    dcp.save({"model": {**theirs, "freqs_cis": torch.randn(4)}}, checkpoint_id=tmp_path / "trained")
    for found in (diff(tmp_path / "trained", source), diff(source, tmp_path / "trained")):
        assert found.is_equal
        assert any("not compared, the key rules leave them out: freqs_cis" in note for note in found.notes)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_names_and_forms_change_together(tmp_path: Path) -> None:
    """The manifest speaks of names in memory; its rules have given the tensors those of the Hub by then."""
    make_hub(ZOO["mixtral"], tmp_path / "hub")
    context = prepare(str(tmp_path / "hub"), str(tmp_path / "hub"))
    save_model(finalize(context.model, context), tmp_path / "saved")
    assert diff(tmp_path / "saved", tmp_path / "hub").is_equal


def test_experts_that_lie_turned_in_the_files_are_compared(tmp_path: Path, fast_trace: object) -> None:
    """Qwen3-VL-MoE: the same name in memory and on the Hub, in shapes that are not the same."""
    source = tmp_path / "hub"
    make_hub(ZOO["qwen3_vl_moe+repo"], source)
    for profile in ("plain", "transformers"):
        preshard(source, tmp_path / profile, world_size=2, profile=profile)
        assert diff(tmp_path / profile, source).is_equal
        assert diff(source, tmp_path / profile).is_equal


def test_the_state_dict_of_a_tied_vision_model_is_no_difference(tmp_path: Path) -> None:
    """Below `model.` in memory, its towers have the names of the Hub, and the language model has not."""
    make_hub(ZOO["llava+tied"], tmp_path / "hub")
    state = from_pretrained(ZOO["llava+tied"], tmp_path / "hub").state_dict()
    save(state, tmp_path / "run")
    assert diff(tmp_path / "run", tmp_path / "hub").is_equal
    assert diff(tmp_path / "hub", tmp_path / "run").is_equal
    changed = "model.language_model.layers.1.mlp.up_proj.weight"
    save({**state, changed: state[changed] + 1}, tmp_path / "changed")
    found = diff(tmp_path / "changed", tmp_path / "hub")
    assert [each.status for each in found.differences] == ["values"]


@pytest.mark.parametrize("name", but_first(["diffusion_gemma", "t5gemma2"]))
def test_what_the_class_alone_ties_is_no_difference(name: str, tmp_path: Path) -> None:
    """Stock `dcp.save` wrote every copy, the Hub has one of each: verify said that the others are problems."""
    make_hub(ZOO[name], tmp_path / "hub")
    state = from_pretrained(ZOO[name], tmp_path / "hub").state_dict()
    save({"model": state}, tmp_path / "run")
    assert diff(tmp_path / "run", tmp_path / "hub").is_equal
    assert diff(tmp_path / "hub", tmp_path / "run").is_equal
    copies = [each.name for each in diff(tmp_path / "run", tmp_path / "hub").tensors if each.status == "tied"]
    state = {fqn: tensor.clone() for fqn, tensor in state.items()}
    with torch.no_grad():
        state[copies[-1]].view(-1)[-1] += 1
    save({"model": state}, tmp_path / "changed")
    found = diff(tmp_path / "changed", tmp_path / "hub")
    assert [(each.name, each.status) for each in found.differences] == [(copies[-1], "only_a")]
