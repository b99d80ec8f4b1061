"""Factors of orthogonal subspace fine-tuning that cannot be folded are refused by that name, never written as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardkit.errors import SourceError
from shardkit.operations.consolidate import consolidate
from shardkit.training.finalize import load_into
from shardkit.training.model.build import build_model
from shardkit.training.prepare import prepare
from tests.operations.consolidate.checkpoints import hub, save, weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")

Q, K = (f"model.layers.0.self_attn.{name}_proj" for name in "qk")


def factored() -> dict[str, torch.Tensor]:
    """The state of a model under mini_trainer: two matrices are six factors each."""
    state = weights()
    for path in (Q, K):
        u, s, v = torch.linalg.svd(state.pop(f"{path}.weight"), full_matrices=False)
        k = len(s) // 2
        high, low = (u[:, :k], s[:k], v[:k]), (u[:, k:], s[k:], v[k:])
        for name, one, two in zip("USV", high, low, strict=True):
            state[f"{path}.osft_{name}_high"] = one.contiguous()
            state[f"{path}.osft_params.{name}_low"] = two.contiguous()
    return state


def adapted() -> dict[str, torch.Tensor]:
    """The state of a model under PEFT's OSF as its adapter file has it."""
    state = {}
    for path in (Q, K):
        for name, shape in (("U", (16, 4)), ("S", (4,)), ("V", (4, 16))):
            state[f"base_model.model.{path}.osf_svd_params.default.{name}_low"] = torch.ones(shape)
    return state


@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"merge_lora": True}, {"allow_missing": True, "allow_unexpected": True}]
)
def test_refused_with_the_reason(with_base: bool, options: dict[str, bool], tmp_path: Path) -> None:
    if "allow_missing" in options and not with_base:
        options = {}
    base = {"base": hub(tmp_path / "base", weights())} if with_base else {}
    checkpoint = save({"model": adapted()}, tmp_path / "step-3")
    hub(checkpoint / "hf_format", None)
    with pytest.raises(SourceError, match=r"2 matrices are stored as factors .* \(OSFT\)") as caught:
        consolidate(checkpoint, tmp_path / "out", **base, **options)  # type: ignore[arg-type]
    assert len(caught.value.problems) == 2
    assert all(any(path in problem for problem in caught.value.problems) for path in (Q, K))
    assert not (tmp_path / "out").exists()


def test_trained_factors_alone_are_refused(tmp_path: Path) -> None:
    state = {name: value for name, value in factored().items() if "_high" not in name}
    checkpoint = save({"model": state}, tmp_path / "step-3")
    with pytest.raises(SourceError, match=r"only their trained part is here"):
        consolidate(checkpoint, tmp_path / "out")


def test_what_a_person_chooses_beside_them_is_written(tmp_path: Path) -> None:
    checkpoint = save({"model": {**adapted(), **weights()}}, tmp_path / "step-3")
    result = consolidate(checkpoint, tmp_path / "out", exclude=["*osf_*"])
    assert result.num_tensors == len(weights())
    with pytest.raises(SourceError, match="OSFT"):
        consolidate(checkpoint, tmp_path / "other", exclude=["*mlp*"])


@pytest.mark.parametrize("form", ["dcp", "hub"])
@pytest.mark.parametrize("make", [factored, adapted])
def test_training_refuses_them_for_that_reason(make, form, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Not for the matrices that are missing; a model that has the factors itself takes them as they are."""
    save({"model": make()}, tmp_path / "step-3") if form == "dcp" else hub(tmp_path / "step-3", make())
    config = str(hub(tmp_path / "config", None))
    ways = [lambda at: load_into(build_model(config), at)]
    if make is adapted:  # of whole sets prepare makes a model that has factors
        ways.append(lambda at: prepare(config, source=at))
    for load in ways:
        with pytest.raises(SourceError, match=r"2 matrices are stored as factors .* \(OSFT\)"):
            load(str(tmp_path / "step-3"))


def test_a_model_that_has_factors_takes_them(tmp_path: Path) -> None:
    class Factors(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.osft_U_high = torch.nn.Parameter(torch.zeros(4, 2))
            self.osft_S_high = torch.nn.Parameter(torch.zeros(2))

    model = Factors()
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    checkpoint = save({"model": state}, tmp_path / "step-3")
    read = load_into(model, str(checkpoint)).state_dict()
    assert all(torch.equal(read[name], value) for name, value in state.items())
