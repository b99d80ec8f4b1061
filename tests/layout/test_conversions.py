"""Every operation of transformers' converters, traced on tensors without memory, against what it does to real ones."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import conversion_mapping, core_model_loading
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Conv3dToLinear,
    ErnieFuseAndSplitTextVisionExperts,
    ErnieSplitAndDecoupleTextVisionExperts,
    Inkling2LoopDequantizeExperts,
    Inkling2LoopMergeMessageQueries,
    Inkling2UnpadVocab,
    Interleave,
    LinearToConv3d,
    MergeModulelist,
    PermuteForRope,
    Split,
    SplitModulelist,
    Transpose,
)

from shardkit.keys.expressions import leaves
from shardkit.layout.conversions import Lowering
from tests.keys.test_expressions import evaluate

CONFIG = SimpleNamespace(num_attention_heads=2, num_experts=3, vocab_size=8, unpadded_vocab_size=5)
CONFIG.get_text_config = lambda: CONFIG
MODEL = SimpleNamespace(
    get_parameter=lambda name: torch.empty({"q": (8, 6), "k": (4, 6), "t": (6, 8)}[name]), config=CONFIG
)

# (operation, shapes of the tensors of each source pattern, target patterns, name of the first target)
CASES: dict[str, tuple[Any, dict[str, list[tuple[int, ...]]], list[str], str]] = {
    "chunk": (Chunk(0), {"qkv": [(12, 6)]}, ["q", "k", "v"], "q"),
    "chunk by config": (Chunk(0, "num_experts"), {"all": [(12, 6)]}, ["one.*"], "one.0"),
    "split": (Split(0), {"qk": [(12, 6)]}, ["q", "k"], "q"),
    "concatenate": (Concatenate(1), {"a": [(2, 3)], "b": [(2, 5)]}, ["ab"], "ab"),
    "interleave": (Interleave(1), {"a": [(3, 8, 2)]}, ["b"], "b"),
    "interleave back": (Interleave(1, inverse=True), {"a": [(3, 8, 2)]}, ["b"], "b"),
    "stack": (MergeModulelist(0), {"e.*.a": [(2, 3)] * 4}, ["e.a"], "e.a"),
    "unstack": (SplitModulelist(0), {"e.a": [(4, 2, 3)]}, ["e.*.a"], "e.0.a"),
    "transpose": (Transpose(1, 2), {"a": [(2, 3, 4)]}, ["b"], "b"),
    "transpose by shape": (Transpose(0, 1, check_dims=True), {"a": [(8, 6)]}, ["t"], "t"),
    "transpose not": (Transpose(0, 1, check_dims=True), {"a": [(6, 8)]}, ["t"], "t"),
    "conv": (Conv3dToLinear(3, (2, 2, 2)), {"a": [(4, 3, 2, 2, 2)]}, ["b"], "b"),
    "conv back": (LinearToConv3d(3, (2, 2, 2)), {"a": [(4, 24)]}, ["b"], "b"),
    "rope": (PermuteForRope(), {"q": [(16, 6)]}, ["q"], "q"),
    "rope back": (PermuteForRope(inverse=True), {"q": [(16, 6)]}, ["q"], "q"),
    "rope of a bias": (PermuteForRope(), {"q": [(16,)]}, ["q"], "q"),
    "text and vision experts": (
        ErnieFuseAndSplitTextVisionExperts(),
        {"gate": [(2, 3)] * 4, "up": [(2, 3)] * 4},
        ["text", "vision"],
        "text",
    ),
    "text and vision experts back": (
        ErnieSplitAndDecoupleTextVisionExperts(),
        {"text": [(2, 4, 3)], "vision": [(2, 4, 3)]},
        ["gate.*", "up.*"],
        "gate.0",
    ),
    "padded vocabulary": (Inkling2UnpadVocab(), {"q": [(8, 6)]}, ["q"], "q"),
    "padded vocabulary back": (Inkling2UnpadVocab(inverse=True), {"q": [(5, 6)]}, ["q"], "q"),
    "message queries": (
        Inkling2LoopMergeMessageQueries(),
        {"query": [(4, 6)], "key": [(4, 6)]},
        ["both"],
        "both",
    ),
}
COMPUTED = {Inkling2LoopDequantizeExperts}
"""Operations that make values of packed ones: they move nothing."""


@pytest.mark.parametrize("name", CASES)
def test_an_operation_is_what_it_does(name: str) -> None:
    operation, shapes, targets, first = CASES[name]
    real: dict[str, list[torch.Tensor]] = {}
    traced: dict[str, list[torch.Tensor]] = {}
    values: dict[str, np.ndarray] = {}
    start = 0
    with Lowering() as lowering:
        for pattern, each in shapes.items():
            for at, shape in enumerate(each):
                stored, numel = f"{pattern}#{at}", int(np.prod(shape))
                values[stored] = np.arange(start, start + numel).reshape(shape)
                start += numel
                real.setdefault(pattern, []).append(torch.from_numpy(values[stored]))
                traced.setdefault(pattern, []).append(lowering.stored(stored, shape))
        found = run(operation, traced, list(shapes), targets, first)
    expected = run(operation, real, list(shapes), targets, first)
    assert found.keys() == expected.keys()
    assert not lowering.unknown
    for target, value in expected.items():
        made = lowering.expression(plain(found[target]))
        assert made is not None
        assert np.array_equal(evaluate(made, values), plain(value).numpy())
        assert all(leaf.name in values for leaf in leaves(made))


def run(
    operation: Any, given: dict[str, list[torch.Tensor]], sources: list[str], targets: list[str], first: str
) -> dict[str, Any]:
    result: dict[str, Any] = operation.convert(
        dict(given),
        source_patterns=sources,
        target_patterns=targets,
        full_layer_name=first,
        model=MODEL,
        config=CONFIG,
    )
    return result


def plain(value: Any) -> torch.Tensor:
    tensor = value[0] if isinstance(value, list) else value
    assert isinstance(tensor, torch.Tensor)
    return tensor


def test_rows_that_are_picked_by_number_are_unknown() -> None:
    """As transformers 5.24 does on the way back of Inkling 2's message queries: the way there is known."""
    operation = Inkling2LoopMergeMessageQueries(inverse=True)
    with Lowering() as lowering:
        run(operation, {"both": [lowering.stored("both", (2, 4, 6))]}, ["both"], ["query", "key"], "query")
    assert set(lowering.unknown) == {"aten.index.Tensor"}


def test_every_operation_in_the_mapping_is_one_of_these() -> None:
    known = {type(operation) for operation, *_ in CASES.values()}
    mapping = conversion_mapping._build_checkpoint_conversion_mapping()
    used = {
        type(operation)
        for transforms in mapping.values()
        for transform in transforms
        for operation in getattr(transform, "operations", ())
    }
    assert used <= known | COMPUTED


def test_rows_of_zeros_that_are_added_are_padding() -> None:
    """As transformers 5.24 gives Inkling 2's head the rows of the files again."""
    with Lowering() as lowering:
        head = lowering.stored("head", (4, 6))
        made = lowering.expression(torch.cat([head, head.new_zeros(2, 6)]))
    assert not lowering.unknown
    assert made is not None
    value = np.arange(24.0).reshape(4, 6)
    assert np.array_equal(evaluate(made, {"head": value}), np.concatenate([value, np.zeros((2, 6))]))


def test_what_computes_is_named_and_not_guessed() -> None:
    with Lowering() as lowering:
        tensor = lowering.stored("a", (4, 6))
        made = (tensor + 1).reshape(24)
        kept = tensor.reshape(24)
    assert lowering.expression(made) is None
    assert lowering.expression(kept) is not None
    assert any("add" in name for name in lowering.unknown)


def test_what_is_used_of_transformers_has_the_same_signatures() -> None:
    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert names(conversion_mapping.get_model_conversion_mapping)[:3] == [
        "model",
        "key_mapping",
        "hf_quantizer",
    ]
    assert names(core_model_loading.rename_source_key)[:3] == [
        "source_key",
        "weight_renamings",
        "weight_converters",
    ]
    assert names(core_model_loading.revert_weight_conversion) == ["model", "state_dict"]
    converter = core_model_loading.WeightConverter
    assert names(converter.add_tensor) == ["self", "target_key", "source_key", "source_pattern", "future"]
    assert names(converter.convert)[:4] == ["self", "layer_name", "model", "config"]
