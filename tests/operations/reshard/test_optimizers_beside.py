"""Which directory beside a checkpoint holds its optimizer, by what it is called and what lies in it."""

from __future__ import annotations

from pathlib import Path

from shardkit.keys.trainer_state import is_optimizer_name, is_optimizer_of
from shardkit.operations.reshard.left_out import find_left_out
from tests.operations.reshard.test_left_out import BESIDE, STATE, WEIGHT, save, save_pair


def test_an_optimizer_beside_is_told_from_another_run(tmp_path: Path) -> None:
    save(tmp_path / "baseline", model={"a.weight": WEIGHT})
    save(tmp_path / "muon_optimizer", model={"a.weight": WEIGHT}, optimizer=STATE)
    save_pair(tmp_path, "model_step20", "optim_step20")
    assert not [*find_left_out(str(tmp_path / "baseline"), str(tmp_path)).warnings()]
    save(tmp_path / "optimizer_0", optimizer=STATE)
    found = find_left_out(str(tmp_path / "baseline"), str(tmp_path))
    assert [*found.warnings()] == [BESIDE.format("baseline", "optimizer_0")]


def test_names_of_optimizers() -> None:
    for name in ("optim", "optimizer_0", "optim_ckpt", "generator-optimizers", "opt_state", "Optim.dcp"):
        assert is_optimizer_name(name), name
    for name in ("model_and_optim", "model_optim_rng", "opt-125m", "model", "optimum", "critic"):
        assert not is_optimizer_name(name), name
    assert is_optimizer_of("optim_step20", "model_step20", is_only=False)
    assert not is_optimizer_of("optim_step20", "model_step10", is_only=True)
    assert not is_optimizer_of("muon_optimizer", "baseline", is_only=True), (
        "two runs, named after what they try"
    )
    assert is_optimizer_of("optimizer", "baseline", is_only=True)
    assert not is_optimizer_of("optimizer", "baseline", is_only=False)
