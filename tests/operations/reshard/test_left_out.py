"""reshard of a checkpoint in several directories: pairs go together, and whatever stays behind has a name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

import shardkit
from shardkit.cli import main
from shardkit.errors import SourceError

WEIGHT = torch.arange(24.0).reshape(6, 4)
STATE = {"state": {"a.weight": {"exp_avg": WEIGHT * 2, "step": torch.tensor(3.0)}}}
LAST = "checkpoint_manifest.json"
LACKING = f"{LAST} is missing, which VeOmni writes last: the save may not have finished"


def save(path: Path, **tree: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tree, checkpoint_id=path, no_dist=True)


def save_pair(path: Path, model: str, optimizer: str) -> None:
    save(path / model, model={"a.weight": WEIGHT})
    save(path / optimizer, optimizer=STATE)


def write(path: Path, *names: str) -> None:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"state")


def veomni(path: Path, *, is_finished: bool) -> Path:
    """A step as VeOmni has saved it since September 2026: by the owner of each state, its manifest last."""
    save_pair(path, "model/ckpt", "model/optimizer")
    write(path, "model/lr_scheduler.pt", "loader/rank_0.pt", "extra_state/rank_0.pt", *[LAST] * is_finished)
    return path


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ("model_ckpt", "optim_ckpt"),
        ("sharded_model_0", "sharded_optimizer_0"),
        ("generator", "generator_optim"),
        ("weights", "opt_state"),
        ("model/ckpt", "model/optimizer"),
        ("x/ckpt", "x/optimizer"),
    ],
)
def test_pairs_are_resharded_as_pairs(tmp_path: Path, model: str, optimizer: str) -> None:
    save_pair(tmp_path / "run", model, optimizer)
    write(tmp_path / "run", f"{model.rpartition('/')[0] or '.'}/scheduler.pt")
    out, inside = tmp_path / "out", "x" if model[0] == "x" else "."
    result = shardkit.reshard(tmp_path / "run", str(out), world_size=2)
    assert (result.num_tensors, result.num_optimizer_tensors, len(result.copied)) == (1, 2, 1)
    target = {"optimizer": {"state": {"a.weight": {"exp_avg": torch.zeros(6, 4)}}}}
    place = out / Path(optimizer).relative_to(inside)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=place, no_dist=True)
    assert torch.equal(target["optimizer"]["state"]["a.weight"]["exp_avg"], WEIGHT * 2)
    weights_only = shardkit.reshard(tmp_path / "run", str(tmp_path / "w"), world_size=2, no_optimizer=True)
    assert (weights_only.num_tensors, weights_only.num_optimizer_tensors) == (1, 0)
    assert (len(weights_only.copied), weights_only.warnings) == (1, result.warnings)
    weights = shardkit.consolidate(tmp_path / "run", tmp_path / "hub")
    assert weights.num_tensors == 1
    names = {part.what: part.where for part in weights.skipped}
    assert names[str(Path(optimizer).relative_to(inside))] == "optimizer state"


def test_a_pair_beside_steps_is_not_the_run(tmp_path: Path) -> None:
    save_pair(tmp_path, "final", "final_optim")
    save_pair(tmp_path / "checkpoint-10", "pytorch_model_fsdp_0", "optimizer_0")
    found = shardkit.resolve_checkpoint(tmp_path)
    assert (found.step, [line.partition(",")[0] for line in found.warnings]) == (
        10,
        ["skipped final: its name has no step"],
    )


def test_a_step_of_veomni_goes_whole(tmp_path: Path) -> None:
    step = veomni(tmp_path / "global_step_2", is_finished=True)
    result = shardkit.reshard(step, str(tmp_path / "global_step_3"), world_size=3, strict=True)
    assert (result.writer, result.num_optimizer_tensors, result.warnings) == ("VeOmni", 2, ())
    assert set(result.copied) == {
        *("model/lr_scheduler.pt", "loader/rank_0.pt", "extra_state/rank_0.pt"),
        LAST,
    }
    again = shardkit.reshard(tmp_path / "global_step_3", str(tmp_path / "back"), world_size=1)
    assert (again.writer, again.num_optimizer_tensors) == ("VeOmni", 2)


def test_a_step_of_veomni_that_it_did_not_finish(tmp_path: Path) -> None:
    run = tmp_path / "run"
    veomni(run / "global_step_9", is_finished=True)
    newest = veomni(run / "global_step_10", is_finished=False)
    found = shardkit.resolve_checkpoint(run)
    assert found.step == 9
    assert found.warnings == (f"skipped global_step_10: {LACKING}",)
    with pytest.raises(SourceError, match="may not be the newest"):
        shardkit.resolve_checkpoint(run, strict=True)
    (run / "global_step_9" / LAST).unlink()
    for path in (newest, run):
        found = shardkit.resolve_checkpoint(path)
        assert (found.step, found.warnings) == (10, (LACKING,))
        with pytest.raises(SourceError, match=LAST):
            shardkit.resolve_checkpoint(path, strict=True)
        result = shardkit.reshard(path, str(tmp_path / f"out-{path.name}"), world_size=2)
        assert result.warnings == (LACKING,)
        assert LACKING not in result.notes
        assert LACKING in shardkit.inspect(path).warnings
    assert shardkit.verify(newest).warnings == (LACKING,)
    with pytest.raises(SourceError, match=LAST):
        shardkit.verify(run)


@pytest.mark.parametrize("modules", [["llm"], ["llm", "vision"]])
def test_a_step_of_veomni_with_modules(tmp_path: Path, modules: list[str]) -> None:
    for step in (7, 8):
        for module in modules:
            save_pair(tmp_path / f"run/global_step_{step}/model/{module}", "ckpt", "optimizer")
        write(tmp_path / f"run/global_step_{step}", "loader/rank_0.pt")
    write(tmp_path / "run/global_step_7", LAST)
    result = shardkit.reshard(tmp_path / "run", str(tmp_path / "out"), world_size=2)
    assert result.num_optimizer_tensors == 2 * len(modules)
    assert result.warnings[0].startswith("skipped global_step_8")
    assert len(modules) == 1 or result.copied == (LAST, "loader/rank_0.pt")
    assert (
        len(modules) == 2 or "beside model/llm is not in the output: loader/rank_0.pt" in result.warnings[1]
    )
    (tmp_path / "run/global_step_7" / LAST).unlink()
    result = shardkit.reshard(tmp_path / "run", str(tmp_path / "again"), world_size=2)
    assert "global_step_8" in result.checkpoint
    assert result.warnings[0] == LACKING


def test_two_models_of_one_step(tmp_path: Path) -> None:
    for name in ("generator", "discriminator"):
        save(tmp_path / "step_5" / name, model={"a.weight": WEIGHT})
    write(tmp_path / "step_5", "state.json")
    result = shardkit.reshard(tmp_path, str(tmp_path / "out"), world_size=2)
    assert (result.folders, result.copied) == (("discriminator", "generator"), ("state.json",))
    with pytest.raises(shardkit.UsageError, match="2 checkpoints here; say which") as caught:
        shardkit.consolidate(tmp_path, tmp_path / "hub")
    assert "reshard takes all of them" in str(caught.value.hint)
    assert shardkit.consolidate(tmp_path / "step_5/generator", tmp_path / "hub").num_tensors == 1


def test_an_older_step_of_veomni_has_no_such_file(tmp_path: Path) -> None:
    step = tmp_path / "global_step_2"
    save(step, model={"a.weight": WEIGHT}, optimizer=STATE)
    write(step, "extra_state/rank_0.pt")
    assert shardkit.resolve_checkpoint(tmp_path, strict=True).path == str(step)


BESIDE = "1 DCP directory beside {} is not in the output: {} (2 tensors); reshard each by itself"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("global_step_2/model/ckpt", [BESIDE.format("model/ckpt", "model/optimizer"), "2 files of single ranks"]),
        ("steps", [BESIDE.format("model_step20", "optim_step20")]),
        ("steps/model_step10", []),  # a person has named it, and `steps` is no step
        ("plain", ["1 file of an optimizer beside final is not in the output: optimizer.pt"]),
        ("mine", ["2 files of single ranks beside trainer are not in the output: loader/rank_0.pt, loader/rank_1.pt"]),
    ],
)  # fmt: skip
def test_what_stays_behind_is_a_warning(tmp_path: Path, given: str, expected: list[str]) -> None:
    veomni(tmp_path / "global_step_2", is_finished=True)
    for step in (10, 20):
        save_pair(tmp_path / "steps", f"model_step{step}", f"optim_step{step}")
    save(tmp_path / "plain/final", model={"a.weight": WEIGHT})
    write(tmp_path / "plain", "optimizer.pt", "optimizer.yaml", "logs/x")
    save_pair(tmp_path / "mine/step_5", "trainer/weights", "trainer/optim")
    write(tmp_path / "mine/step_5", "loader/rank_0.pt", "loader/rank_1.pt", "args.json")
    result = shardkit.reshard(tmp_path / given, str(tmp_path / "out"), world_size=2)
    assert len(result.warnings) == len(expected)
    assert all(map(str.startswith, result.warnings, expected)), result.warnings
    told = ["1 other name beside trainer is not in the output: args.json"] if given == "mine" else []
    assert [note for note in result.notes if "not in the output" in note] == told


def test_an_optimizer_that_nobody_wants_is_not_warned_of(tmp_path: Path) -> None:
    save_pair(tmp_path / "step_5", "model", "optimizer")
    for path in ("step_5", "step_5/model"):
        result = shardkit.reshard(tmp_path / path, str(tmp_path / path[-5:]), world_size=2, no_optimizer=True)
        assert result.warnings == ()


def test_the_other_model_of_verl(tmp_path: Path) -> None:
    for role in ("actor", "critic"):
        (tmp_path / "global_step_2" / role).mkdir(parents=True)
        for kind, content in (("model", {"a.weight": WEIGHT}), ("optim", {}), ("extra_state", {})):
            torch.save(content, tmp_path / "global_step_2" / role / f"{kind}_world_size_1_rank_0.pt")
    command = ["reshard", str(tmp_path), str(tmp_path / "out"), "--world-size", "2"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0
    assert "2 files of single ranks beside actor are not in the output: critic/extra_state" in done.stderr
    assert (
        "1 file of an optimizer beside actor is not in the output: critic/optim_world_size_1" in done.stderr
    )
