"""reshard of what stock torch saved: every tensor and every byte entry, for another mesh."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import shardkit
from shardkit.cli import main
from shardkit.formats.dcp import directory as dcp_module
from shardkit.operations.parts.results import Converted
from tests.contents import contents
from tests.operations.stops import InterruptAfter

# torch's own: a save without a process group, and the ShardedTensor that its converter still looks for.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:torch.distributed is disabled")


def nested_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    weights = {
        "model.layers.0.weight": torch.randn(37, 50, generator=generator).to(torch.bfloat16),
        "model.layers.0.steps": torch.arange(5),
        "model.norm.weight": torch.randn(64, generator=generator),
        "model.scale": torch.tensor(2.5),
        "model.turned": torch.randn(6, 8, generator=generator).t(),
    }
    moments = {
        name: {"exp_avg": value.float() * 3, "step": torch.tensor(7.0)}
        for name, value in weights.items()
        if value.is_floating_point()
    }
    return {
        "model": weights,
        "optim": {"state": moments, "param_groups": [{"lr": 1e-3, "params": list(moments)}]},
        "progress": {"epoch": 3, "name": "run \u00e9"},
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved"
    dcp.save(nested_state(), checkpoint_id=path, no_dist=True)
    return path


def loaded(path: Path, tmp_path: Path) -> dict[str, Any]:
    """The whole state, nested as it was saved, by torch's own converter."""
    target = tmp_path / "whole.pt"
    dcp_to_torch_save(path, target)
    state: dict[str, Any] = torch.load(target, weights_only=False)
    return state


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in flat(value, f"{prefix}/{key}").items()}
    if isinstance(tree, list):
        return {k: v for key, value in enumerate(tree) for k, v in flat(value, f"{prefix}/{key}").items()}
    return {prefix: tree}


def assert_same(found: Any, expected: Any) -> None:
    ours, theirs = flat(found), flat(expected)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert ours[key].dtype == value.dtype
            assert torch.equal(ours[key], value), key
        else:
            assert ours[key] == value, key


@pytest.mark.parametrize("mesh", ["dp_shard=1", "dp_shard=3", "dp_replicate=2,dp_shard=2"])
def test_everything_comes_back_nested_as_it_was(saved: Path, tmp_path: Path, mesh: str) -> None:
    result = shardkit.reshard(saved, str(tmp_path / "out"), mesh=mesh)
    assert (result.num_tensors, result.num_optimizer_tensors) == (5, 8)
    assert_same(loaded(tmp_path / "out", tmp_path), nested_state())
    again = shardkit.reshard(tmp_path / "out", str(tmp_path / "again"), world_size=1)
    assert again.num_objects == result.num_objects > 0
    assert_same(loaded(tmp_path / "again", tmp_path), nested_state())


def test_dtypes_go_by_group_and_counters_stay(saved: Path, tmp_path: Path) -> None:
    shardkit.reshard(saved, str(tmp_path / "out"), world_size=2, dtype="fp32", optimizer_dtype="bf16")
    found, expected = loaded(tmp_path / "out", tmp_path), nested_state()
    manifest = json.loads((tmp_path / "out" / "shardkit.json").read_text())
    assert (manifest["dtype"], manifest["optimizer_dtype"]) == ("fp32", "bf16")
    for name, value in expected["model"].items():
        target = value.float() if value.is_floating_point() else value
        assert torch.equal(found["model"][name], target)
        assert found["model"][name].dtype == target.dtype
    for name, moments in expected["optim"]["state"].items():
        ours = found["optim"]["state"][name]
        scalar = moments["exp_avg"].dim() == 0
        target = moments["exp_avg"] if scalar else moments["exp_avg"].to(torch.bfloat16)
        assert torch.equal(ours["exp_avg"], target)
        assert ours["step"].dtype == torch.float32


@pytest.mark.parametrize("leaf", ["momentum_buffer", "row_var"])
def test_an_optimizer_of_any_name_is_known_by_its_groups(tmp_path: Path, leaf: str) -> None:
    weight = torch.randn(6, 4)
    opt = {"state": {"w": {leaf: weight / 3}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    dcp.save({"model": {"w": weight}, "opt": opt}, checkpoint_id=tmp_path / "saved", no_dist=True)
    shardkit.reshard(tmp_path / "saved", tmp_path / "out", world_size=2, dtype="bf16")
    found = loaded(tmp_path / "out", tmp_path)
    assert found["model"]["w"].dtype == torch.bfloat16
    assert torch.equal(found["opt"]["state"]["w"][leaf], weight / 3)


STEP = 257.0  # bfloat16 makes 256 of it
COUNTED: dict[str, dict[str, Any]] = {
    "adagrad": {"sum": 2},
    "asgd": {"eta": 0, "mu": 0, "ax": 2},
    "rprop": {"prev": 2, "step_size": 2},
    "sgd": {"momentum_buffer": 2},
    "nobody knows": {"slow_buffer": 2},
}


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("is_flat", [False, True])
def test_no_cast_rounds_a_count(tmp_path: Path, name: str, is_flat: bool) -> None:
    """Whatever the optimizer calls its state; and schedulers and counters of the trainer stay."""
    state = {"step": torch.tensor(STEP), "steps_of_one": torch.tensor([STEP])}
    state |= {leaf: torch.full((3, 5)[:dims], STEP) for leaf, dims in COUNTED[name].items()}
    tree: dict[str, Any] = {
        "model": {"weight": torch.full((3, 5), STEP), "scale": torch.tensor(STEP)},
        "optimizer": {"state": {"weight": state}, "param_groups": [{"lr": torch.tensor(STEP)}]},
        "lr_scheduler": {"seen": torch.tensor([STEP])},
        "train_state": {"ntokens": torch.full((3,), STEP)},
        "step": torch.tensor(STEP),
    }
    saved = {key[1:].replace("/", "."): value for key, value in flat(tree).items()} if is_flat else tree
    dcp.save(saved, checkpoint_id=tmp_path / "saved", no_dist=True)
    kept = shardkit.reshard(tmp_path / "saved", str(tmp_path / "kept"), world_size=2, dtype="bf16")
    assert (kept.num_tensors, kept.num_optimizer_tensors) == (5, 3 + len(COUNTED[name]))
    assert kept.converted == (Converted(stored="float32", written="bfloat16", num_tensors=1),)
    expected = dict(flat(saved))
    weight = next(key for key in expected if key.endswith("model/weight") or key.endswith("model.weight"))
    found = flat(loaded(tmp_path / "kept", tmp_path))
    assert {key for key in expected if found[key].dtype != torch.float32} == {weight}
    assert all(torch.equal(found[key], value) for key, value in expected.items() if key != weight)
    shardkit.reshard(tmp_path / "saved", str(tmp_path / "cast"), world_size=2, optimizer_dtype="bf16")
    found = flat(loaded(tmp_path / "cast", tmp_path))
    cast = {key for key in expected if found[key].dtype != torch.float32}
    assert {key.replace(".", "/").rpartition("/")[2] for key in cast} == {
        leaf for leaf, dims in COUNTED[name].items() if dims
    }


def test_a_folder_of_an_optimizer_holds_nothing_else(tmp_path: Path) -> None:
    source = trainer_directory(tmp_path)
    dcp.save({"slow": torch.full((3, 5), STEP)}, checkpoint_id=source / "optimizer_1", no_dist=True)
    shardkit.reshard(source, str(tmp_path / "out"), world_size=2, dtype="bf16")
    assert loaded(tmp_path / "out/optimizer_1", tmp_path)["slow"].dtype == torch.float32


def test_a_large_metadata_is_parsed_once(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed, parse = [], dcp_module.parse_metadata
    monkeypatch.setattr(
        dcp_module, "parse_metadata", lambda *args, **more: parsed.append(1) or parse(*args, **more)
    )
    shardkit.reshard(saved.parent, str(tmp_path / "out"), world_size=2)
    assert len(parsed) == 1
    shardkit.reshard(saved.parent / "saved", str(tmp_path / "again"), world_size=2)
    assert len(parsed) == 2, "what one run read is not kept for the next"


def test_links_to_a_checkpoint(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("saved")
    result = shardkit.reshard(tmp_path / "latest", str(tmp_path / "out"), world_size=2)
    assert_same(loaded(tmp_path / "out", tmp_path), nested_state())
    assert result.copied == ()
    with pytest.raises(shardkit.UsageError, match="inside the source"):
        shardkit.reshard(tmp_path / "latest", str(saved / "x"), world_size=2)


def trainer_directory(tmp_path: Path) -> Path:
    """Model and optimizer apart, as accelerate saves them, and files beside."""
    path, state = tmp_path / "run" / "checkpoint-2", nested_state()
    dcp.save({"model": state["model"]}, checkpoint_id=path / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": state["optim"]}, checkpoint_id=path / "optimizer_0", no_dist=True)
    (path / "scheduler.pt").write_bytes(b"schedule")
    (path / "rng_state_0.pth").write_bytes(b"random")
    (path / "trainer_state.json").write_text("{}")
    os.symlink(path / "scheduler.pt", path / "latest.pt")
    return path


def test_a_trainers_checkpoint_stays_one(tmp_path: Path) -> None:
    source, out = trainer_directory(tmp_path), tmp_path / "out"
    result = shardkit.reshard(source.parent, str(out), world_size=3)
    assert result.checkpoint == str(source)
    assert result.copied == ("rng_state_0.pth", "scheduler.pt", "trainer_state.json")
    assert any("rng_state_0.pth" in note for note in result.notes)
    assert any("latest.pt" in note for note in result.notes)
    for name in result.copied:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert sorted(p.name for p in out.iterdir()) == sorted([*result.copied, *result.folders, "shardkit.json"])
    state = nested_state()
    assert_same(loaded(out / "pytorch_model_fsdp_0", tmp_path), {"model": state["model"]})
    assert_same(loaded(out / "optimizer_0", tmp_path), {"optimizer": state["optim"]})


@pytest.mark.parametrize("calls", range(1, 12, 2))
def test_an_interrupted_run_goes_on_and_ends_with_the_same_bytes(tmp_path: Path, calls: int) -> None:
    source, out = trainer_directory(tmp_path), tmp_path / "out"
    shardkit.reshard(source, str(tmp_path / "plain"), world_size=4)
    with pytest.raises(shardkit.Interrupted):
        shardkit.reshard(source, str(out), world_size=4, jobs=1, progress=InterruptAfter(calls))
    assert not out.exists()
    shardkit.reshard(source, str(out), world_size=4, jobs=1)
    assert contents(out) == contents(tmp_path / "plain")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "plain", "run"]


def test_the_command_line(saved: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(main, ["reshard", *arguments, "--world-size", "2"], prog_name="shardkit")

    dry = run(str(saved), out, "--json", "--dry-run")
    assert dry.exit_code == 0, dry.stderr
    assert json.loads(dry.stdout)["dry_run"] is True
    assert not os.path.exists(out)
    done = run(str(saved), out)
    assert done.exit_code == 0, done.stderr
    assert "5 tensors, 8 of the optimizer" in done.stdout
    for arguments, code, words in (
        ([str(saved), out, "--dtype", "bf16"], 2, "exists"),
        ([str(saved), str(saved / "x")], 2, "inside the source"),
        ([str(tmp_path / "absent"), str(tmp_path / "x")], 3, "absent"),
    ):
        refused = run(*arguments)
        assert refused.exit_code == code, refused.stderr
        assert words in refused.stderr


def test_tied_names_point_at_the_same_bytes_again(make_hub: Any, tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.randn(11, 4), "model.proj.weight": torch.randn(11, 4)}
    config = {"architectures": ["TinyForCausalLM"], "tie_word_embeddings": True}
    two, three = str(tmp_path / "two"), str(tmp_path / "three")
    shardkit.preshard(str(make_hub(tensors, config=config)), two, world_size=2, wrap="none")
    result = shardkit.reshard(two, three, world_size=3)
    assert result.num_tensors == 2
    manifest = json.loads((tmp_path / "three" / "shardkit.json").read_text())
    assert manifest["ties"] == [["model.embed_tokens.weight", "lm_head.weight"]]
    state = {name: torch.empty(11, 4) for name in (*tensors, "lm_head.weight")}
    dcp.load(state, checkpoint_id=three, no_dist=True)
    for name, value in (*tensors.items(), ("lm_head.weight", tensors["model.embed_tokens.weight"])):
        assert torch.equal(state[name], value), name
