"""Factors of OSFT become dense weights, or stay as they are, under the names and in the dtypes of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import shardkit
from shardkit.core.factored import FACTORS
from shardkit.errors import IntegrityError, LayoutError, UsageError
from shardkit.files import manifest
from tests.bits import flip, raw
from tests.operations.consolidate.checkpoints import hub, load, save, training_state, weights
from tests.osft.factored import K, Q, factored, folded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")


def wide(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.float() for name, value in state.items()}


def assert_nearly_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Nearly all bits are equal, and the rest is one unit in the last place away; all of it, beside factors."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        kind = {2: torch.int16, 4: torch.int32}[tensor.itemsize]
        steps = (found[name].view(kind).long() - tensor.view(kind).long()).abs()
        assert steps.max() <= 1, name
        assert (steps == 0).double().mean() >= 0.99 if Q in name or K in name else not steps.any(), name


def test_an_untrained_model_comes_back(tmp_path: Path) -> None:
    """Beside an optimizer, whose state is about factors too; without a base float32 stays, as in the checkpoint."""
    dense = weights()
    checkpoint = save(training_state(factored(dense)), tmp_path / "step-3")
    result = shardkit.consolidate(checkpoint, tmp_path / "out")
    found = load(tmp_path / "out")
    assert {name: value.dtype for name, value in found.items()} == dict.fromkeys(dense, torch.float32)
    for name in dense:
        torch.testing.assert_close(found[name], dense[name], rtol=2e-6, atol=2e-7)
    expected = folded(factored(dense))
    assert all(raw(found[f"{path}.weight"]) == raw(expected[f"{path}.weight"].float()) for path in (Q, K))
    assert "folded from factors of OSFT: 2 weights" in result.notes
    assert any(note.startswith("2 folded weights in float32") for note in result.notes)


@pytest.mark.parametrize("dtype", ["keep", "base"])
@pytest.mark.parametrize("is_wide", [True, False])
def test_the_base_tells_the_dtypes(is_wide: bool, dtype: str, tmp_path: Path) -> None:
    dense = weights(torch.bfloat16)
    base = hub(tmp_path / "base", dense)
    state = factored(wide(dense) if is_wide else dense)
    checkpoint = save(training_state(state), tmp_path / "step-3")
    result = shardkit.consolidate(checkpoint, tmp_path / "out", base=base, dtype=dtype)
    assert_nearly_equal(load(tmp_path / "out"), dense)
    beside = ", and 19 tensors beside them that OSFT held in fp32" if is_wide else ""
    assert f"folded weights have the dtypes of {base}{beside}; --dtype fp32 keeps all digits" in result.notes
    assert not result.warnings
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_without_a_base_the_other_weights_tell(tmp_path: Path) -> None:
    dense = weights(torch.bfloat16)
    checkpoint = save({"model": factored(dense)}, tmp_path / "step-3")
    shardkit.consolidate(checkpoint, tmp_path / "out")
    assert_nearly_equal(load(tmp_path / "out"), dense)


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", torch.float32), ("fp16", torch.float16)])
def test_what_is_asked_for_counts(dtype: str, expected: torch.dtype, tmp_path: Path) -> None:
    base = hub(tmp_path / "base", weights(torch.bfloat16))
    checkpoint = save({"model": factored(weights())}, tmp_path / "step-3")
    shardkit.consolidate(checkpoint, tmp_path / "out", base=base, dtype=dtype)
    assert {value.dtype for value in load(tmp_path / "out").values()} == {expected}


def test_kept_factors(tmp_path: Path) -> None:
    """They are the bits that were saved, and a source as good as the checkpoint."""
    dense = weights(torch.bfloat16)
    base, state = hub(tmp_path / "base", dense), factored(dense)
    checkpoint = save(training_state(state), tmp_path / "step-3")
    options = {"base": base, "keep_factors": True, "manifest": True}
    result = shardkit.consolidate(checkpoint, tmp_path / "kept", **options)
    found = load(tmp_path / "kept")
    assert found.keys() == state.keys()
    assert all(raw(found[name]) == raw(value) for name, value in state.items())
    assert "from_pretrained cannot load" in result.unloadable[0]
    described = manifest.read(str(tmp_path / "kept"))
    assert isinstance(described, manifest.HubModel)
    assert described.tensors[f"{Q}.osft_S_high"].dtype == "float32"
    shardkit.verify(tmp_path / "kept", full=True)
    shardkit.consolidate(tmp_path / "kept", tmp_path / "again")
    assert_nearly_equal(load(tmp_path / "again"), dense)
    shardkit.consolidate(tmp_path / "kept", tmp_path / "fp16", base=base, dtype="fp16", keep_factors=True)
    stored = {name: value.dtype for name, value in load(tmp_path / "fp16").items() if name.startswith(Q)}
    assert {name.rpartition(".")[2]: dtype for name, dtype in stored.items()} == {
        name.rpartition(".")[2]: torch.float32 for name in FACTORS
    }


def test_keeping_what_is_not_there(tmp_path: Path) -> None:
    checkpoint = save({"model": weights()}, tmp_path / "step-3")
    with pytest.raises(UsageError, match="--keep-factors: the checkpoint holds no factors"):
        shardkit.consolidate(checkpoint, tmp_path / "out", keep_factors=True)


def test_a_missing_factor(tmp_path: Path) -> None:
    """All are named; nothing is written."""
    state = factored(weights())
    del state[f"{Q}.osft_S_high"], state[f"{Q}.osft_params.V_low"], state[f"{K}.osft_params.U_low"]
    checkpoint = save({"model": state}, tmp_path / "step-3")
    with pytest.raises(LayoutError, match="are incomplete") as caught:
        shardkit.consolidate(checkpoint, tmp_path / "out")
    assert sorted(caught.value.problems) == [
        f"{K}: lacks osft_params.U_low".replace(K, f"model.{K}"),
        f"model.{Q}: lacks osft_S_high, osft_params.V_low",
    ]
    assert not (tmp_path / "out").exists()


def test_factors_of_other_shapes(tmp_path: Path) -> None:
    state = factored(weights())
    state[f"{Q}.osft_S_high"] = torch.ones(3)
    checkpoint = save({"model": state}, tmp_path / "step-3")
    with pytest.raises(LayoutError, match="factors of 1 weight do not match") as caught:
        shardkit.consolidate(checkpoint, tmp_path / "out")
    assert f"model.{Q}.osft_S_high: [3]" in caught.value.problems[0]


def test_factors_are_compared_with_their_checksums(tmp_path: Path) -> None:
    """V is read for each block of rows, and compared with its CRC-32 all the same."""
    state = factored(weights())
    checkpoint = save({"model": state}, tmp_path / "step-3")
    result = shardkit.consolidate(checkpoint, tmp_path / "out")
    assert not result.unchecked
    flip(checkpoint / "__0_0.distcp", state[f"{Q}.osft_params.V_low"], at=100)
    with pytest.raises(IntegrityError, match="source is corrupt"):
        shardkit.consolidate(checkpoint, tmp_path / "other")


def test_names_of_wrappers(tmp_path: Path) -> None:
    wrapper = "_checkpoint_wrapped_module.self_attn"
    state = {name.replace("self_attn", wrapper): value for name, value in factored(weights()).items()}
    checkpoint = save({"model": state}, tmp_path / "step-3")
    shardkit.consolidate(checkpoint, tmp_path / "out", base=hub(tmp_path / "base", weights()))
    assert load(tmp_path / "out").keys() == weights().keys()


def test_a_dense_name_chooses_it(tmp_path: Path) -> None:
    checkpoint = save({"model": factored(weights())}, tmp_path / "step-3")
    shardkit.consolidate(checkpoint, tmp_path / "out", include=["*.q_proj.weight"])
    assert list(load(tmp_path / "out")) == [f"model.layers.{at}.self_attn.q_proj.weight" for at in (0, 1)]


def test_a_checkpoint_of_mini_trainer(tmp_path: Path) -> None:
    """Its full-state form: DCP in a folder, the optimizer of each rank beside it in a file that nobody can map."""
    checkpoint = tmp_path / "step_3"
    state = factored(weights())
    save({"model": state}, checkpoint / "distributed")
    hub(tmp_path / "config", None)
    (checkpoint / "config.json").write_bytes((tmp_path / "config" / "config.json").read_bytes())
    for name in ("optimizer_rank_0.pt", "rng_state_rank_0.pt", "training_state.pt"):
        torch.save({"step": 3}, checkpoint / name)
    result = shardkit.consolidate(checkpoint, tmp_path / "out")
    assert result.writer == "mini_trainer"
    assert load(tmp_path / "out").keys() == weights().keys()
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    shardkit.reshard(checkpoint, tmp_path / "other", world_size=3)
    assert shardkit.diff(checkpoint, tmp_path / "other").is_equal
    found = (shardkit.inspect(path).osft for path in (tmp_path / "other", tmp_path / "other/distributed"))
    assert len(next(filter(None, found))) == 2


def test_averaged_factors(tmp_path: Path) -> None:
    """Each set is folded by itself, whatever part of the checkpoint it belongs to."""
    state = factored(weights())
    ema = {name: value * 1.5 if name.endswith("S_low") else value for name, value in state.items()}
    checkpoint = save({"model": state, "ema": ema}, tmp_path / "step-3")
    shardkit.consolidate(checkpoint, tmp_path / "out", weights="ema")
    found, expected = load(tmp_path / "out"), folded(ema)
    for path in (Q, K):
        torch.testing.assert_close(found[f"{path}.weight"], expected[f"{path}.weight"].float())


@pytest.mark.parametrize("form", ["it.pt", "model.safetensors", "pytorch_model.bin"])
def test_factors_in_other_files(form: str, tmp_path: Path) -> None:
    """Turned matrices of torch are decoded; the factors are the same."""
    state = factored(weights())
    source = hub(tmp_path / "it", state if form == "model.safetensors" else None)
    if form != "model.safetensors":
        turned = {name: value.T.contiguous().T if value.ndim == 2 else value for name, value in state.items()}
        torch.save(turned, source / form)
    source = source / form if form == "it.pt" else source
    shardkit.consolidate(source, tmp_path / "out", base=hub(tmp_path / "base", weights()))
    found, expected = load(tmp_path / "out"), folded(state)
    assert found.keys() == expected.keys()
    for path in (Q, K):
        assert raw(found[f"{path}.weight"]) == raw(expected[f"{path}.weight"].float())
