"""Every difference between a model and its source, at once; nothing is left random in silence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shardkit.errors import LayoutError, UsageError
from shardkit.training.fill.source import find_weights, open_source
from shardkit.training.model.build import build_model
from shardkit.training.model.fit import ModelFit, check_fit, check_ties
from shardkit.training.ranks.local import describe_tensors
from tests.training import models


class Net(nn.Module):
    """Blocks, a head, and a counter."""

    def __init__(self, head: str = "head", out: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        setattr(self, head, nn.Linear(4, out, bias=False))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))


def fitted(model: nn.Module, state: Mapping[str, torch.Tensor], path: Path, **options: Any) -> ModelFit:
    save_file(dict(state), path / "x.safetensors")
    expected, ties = describe_tensors(model)
    weights = find_weights(open_source(str(path / "x.safetensors")), expected, ties, model=model)
    return check_fit(expected, ties, weights, **options)


def refusal(model: nn.Module, state: Mapping[str, torch.Tensor], path: Path, **options: Any) -> LayoutError:
    with pytest.raises(LayoutError) as caught:
        fitted(model, state, path, **options)
    return caught.value


def test_every_difference_is_listed_at_once(tmp_path: Path) -> None:
    state = Net().state_dict()
    del state["layers.1.bias"]
    state["layers.1.bais"] = torch.ones(4)
    state["head.weight"] = torch.ones(4, 5)
    state["norm.weight"] = torch.ones(4, dtype=torch.int8)
    state["steps"] = torch.zeros(1)
    state["more"] = torch.ones(3)
    error = refusal(build_model(Net), state, tmp_path)
    assert error.problems == (
        "missing: layers.1.bias [4]  (closest name: layers.1.bais)",
        "unexpected: layers.1.bais [4]  (closest name: layers.1.bias)",
        "unexpected: more [3]",
        "dtype: norm.weight: float32 in the model, int8 in the source",
        "shape: head.weight: [5, 4] in the model, [4, 5] in the source",
        "dtype: steps: int64 in the model, float32 in the source",
    )
    assert "differ in 6 places" in error.message


def test_floats_are_converted_and_fp8_is_not(tmp_path: Path) -> None:
    half = {
        name: value.half() if value.is_floating_point() else value
        for name, value in Net().state_dict().items()
    }
    assert fitted(build_model(Net), half, tmp_path) == ModelFit()
    fp8 = {**Net().state_dict(), "norm.weight": torch.ones(4).to(torch.float8_e4m3fn)}
    assert refusal(build_model(Net), fp8, tmp_path).problems == (
        "dtype: norm.weight: float32 in the model, float8_e4m3fn in the source",
    )


def test_a_new_head_is_initialised(tmp_path: Path) -> None:
    """A reward model of a language model: its own head, and the old one is of no use."""
    model, state = build_model(lambda: Net("score", 1)), Net().state_dict()
    error = refusal(model, state, tmp_path)
    assert error.problems == (
        "missing: score.weight [1, 4]",
        "unexpected: head.weight [5, 4]",
    )
    assert "missing='init'" in str(error.hint)
    for missing in ("init", ["score.*"], ["sc*", "norm.*"]):
        fit = fitted(model, state, tmp_path, missing=missing)
        assert fit.initialised == {"score.weight"}
        assert any("head.weight" in note for note in fit.notes)
        assert any("score.weight" in note for note in fit.notes)


def test_what_seems_renamed_is_not_initialised(tmp_path: Path) -> None:
    model, state = build_model(lambda: Net("score")), Net().state_dict()
    error = refusal(model, state, tmp_path, missing="init")
    assert error.problems == ("score.weight [5, 4]: the source has head.weight",)
    assert fitted(model, state, tmp_path, missing=["score.*"]).initialised == {"score.weight"}


def test_blocks_that_the_model_lacks_are_no_old_head(tmp_path: Path) -> None:
    """Fewer layers than the source has, or fused ones, are no matter of initialisation."""
    model = build_model(Net)
    state = {**Net().state_dict(), "layers.2.weight": torch.ones(9, 9)}
    for missing in ("error", "init", ["head.*"]):
        error = refusal(model, state, tmp_path, missing=missing)
        assert error.problems[0].startswith("unexpected: layers.2.weight")


class Towers(Net):
    """Blocks, a head, and another list of blocks with a head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.classifier = nn.Sequential(nn.ReLU(), nn.Linear(3, 2))


def test_a_tower_that_the_model_lacks_is_left_out(tmp_path: Path) -> None:
    fit = fitted(build_model(Net), Towers().state_dict(), tmp_path, missing="init")
    assert not fit.initialised
    assert fit.notes == (
        "in the source, not in the model: classifier.1.bias, classifier.1.weight, tower.0.bias, ...",
    )
    error = refusal(build_model(Net), Towers().state_dict(), tmp_path)
    assert len(error.problems) == 6


@pytest.mark.parametrize("missing", ["init", ["layers.*"]])
def test_blocks_that_the_source_may_have_under_other_names_are_not_left_out(
    missing: Any, tmp_path: Path
) -> None:
    state = {name.replace("layers.", "h."): tensor for name, tensor in Net().state_dict().items()}
    error = refusal(build_model(Net), state, tmp_path, missing=missing)
    assert error.problems[0].startswith("unexpected: h.0.")


def test_a_source_of_another_model_is_never_initialised_over(tmp_path: Path) -> None:
    state = {"embed": torch.ones(3)}
    for missing in ("init", ["*"]):
        error = refusal(build_model(Net), state, tmp_path, missing=missing)
        assert error.problems == ("none of the model's tensors is in the source",)
    assert len(refusal(build_model(Net), state, tmp_path).problems) == 8 + 1


def test_globs_that_match_nothing_are_typing_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="1 glob") as caught:
        fitted(build_model(Net), Net().state_dict(), tmp_path, missing=["head.*", "scroe.*"])
    assert caught.value.problems[0].startswith("scroe.*")
    with pytest.raises(UsageError, match="neither"):
        fitted(build_model(Net), Net().state_dict(), tmp_path, missing="head.*")
    # One that matches what the source has is none: it is read.
    fit = fitted(build_model(Net), Net().state_dict(), tmp_path, missing=["head.*"])
    assert fit.initialised == frozenset()


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
@pytest.mark.parametrize("missing", ["error", "init", ["*.experts.*"]])
def test_fused_experts_are_never_left_random(name: str, missing: Any, tmp_path: Path) -> None:
    """AReaL: 4 missing, 24 unexpected, a warning, and random experts. Here one expert of the file is lost."""
    models.save(name, tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    lost = next(name for name in state if ".layers.1." in name and ".experts.2." in name)
    del state[lost]
    save_file(state, path, {"format": "pt"})
    model = build_model(str(tmp_path))
    expected, ties = describe_tensors(model)
    weights = find_weights(open_source(str(tmp_path)), expected, ties, model=model)
    with pytest.raises(LayoutError) as caught:
        check_fit(expected, ties, weights, missing=missing)
    assert any(".layers.1." in problem and ".experts." in problem for problem in caught.value.problems)
    assert all(".layers.0." not in problem for problem in caught.value.problems)


def test_fused_experts_of_a_trained_checkpoint_fit(tmp_path: Path) -> None:
    """Its names are those of the model itself."""
    reference = models.reference("qwen3-moe")
    models.config_of("qwen3-moe").save_pretrained(tmp_path)
    assert fitted(build_model(str(tmp_path)), reference.state_dict(), tmp_path) == ModelFit()


def test_fused_experts_of_anybodys_model(tmp_path: Path) -> None:
    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(4, 2)
            self.experts = nn.ParameterDict({"up": torch.empty(2, 4, 4)})

    state = {**nn.ModuleDict({"router": nn.Linear(4, 2)}).state_dict()}
    state |= {f"experts.{at}.up.weight": torch.ones(4, 4) for at in range(2)}
    error = refusal(build_model(Moe), state, tmp_path, missing="init")
    assert "experts one by one" in error.message
    assert error.problems[0].startswith("experts.up: of 2 stored tensors: ")


def test_quantised_sources_are_refused(tmp_path: Path) -> None:
    state = {**Net().state_dict(), "layers.0.weight_scale_inv": torch.ones(1)}
    error = refusal(build_model(Net), state, tmp_path, missing="init")
    assert error.message.startswith("quantised: ")
    assert "weight_scale_inv" in error.message


class Tied(nn.Module):
    """Two names for one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 3)
        self.head = nn.Linear(3, 6, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("stored", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]])
def test_any_name_of_a_tie_will_do(stored: list[str], tmp_path: Path) -> None:
    model = build_model(Tied)
    value = torch.randn(6, 3)
    save_file({name: value.clone() for name in stored}, tmp_path / "x.safetensors")
    expected, ties = describe_tensors(model)
    assert ties == (("embed.weight", "head.weight"),)
    assert list(expected) == ["embed.weight"]
    weights = find_weights(open_source(str(tmp_path / "x.safetensors")), expected, ties)
    assert sorted(weights.names) == sorted(stored)
    assert check_fit(expected, ties, weights) == ModelFit()
    check_ties(ties, weights)


def test_a_tie_with_two_values_would_lose_one(tmp_path: Path) -> None:
    """transformers unties such a model; here it was built as its config says."""
    save_file(
        {"embed.weight": torch.ones(6, 3), "head.weight": torch.ones(6, 3) * 2}, tmp_path / "x.safetensors"
    )
    expected, ties = describe_tensors(build_model(Tied))
    weights = find_weights(open_source(str(tmp_path / "x.safetensors")), expected, ties)
    with pytest.raises(LayoutError, match="one of them would be lost") as caught:
        check_ties(ties, weights)
    assert caught.value.problems == ("embed.weight and head.weight",)


def test_both_names_of_a_tie_are_held_against_the_model(tmp_path: Path) -> None:
    state = {"embed.weight": torch.ones(6, 3), "head.weight": torch.ones(7, 3)}
    error = refusal(build_model(Tied), state, tmp_path)
    assert error.problems == ("shape: head.weight: [6, 3] in the model, [7, 3] in the source",)


def test_rows_of_grown_tensors_are_those_of_the_source(tmp_path: Path) -> None:
    class Vocabulary(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.embed = nn.Embedding(rows, 3)

    model = build_model(lambda: Vocabulary(16))
    for rows, expected in ((10, {"embed.weight": 10}), (12, {"embed.weight": 12}), (16, {})):
        state = Vocabulary(rows).state_dict()
        assert fitted(model, state, tmp_path, grown={"embed.weight": 10}).grown == expected
    for rows in (10, 17):
        error = refusal(model, Vocabulary(rows).state_dict(), tmp_path)
        assert f"[{rows}, 3] in the source" in error.problems[0]
        assert "tokenizer" in str(error.hint)
    assert refusal(model, Vocabulary(17).state_dict(), tmp_path, grown={"embed.weight": 10}).problems
