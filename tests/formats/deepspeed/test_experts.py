"""Checkpoints of MoE models that DeepSpeed itself wrote (tests/data/deepspeed), against what its engine held."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardkit import consolidate, diff, inspect, verify
from shardkit.errors import IntegrityError, LayoutError, SourceError
from shardkit.formats.contract.optimizer import OptimizerState
from shardkit.formats.deepspeed.checkpoint import open_deepspeed
from shardkit.operations.reshard import reshard
from tests.bits import raw
from tests.formats.dcp.samples import open_catalog
from tests.formats.deepspeed.samples import Tensors
from tests.formats.reading import contents, expected, read_tensor

ARCHIVE = Path(__file__).parents[2] / "data" / "deepspeed" / "moe.tar.xz"
CASES = {
    "zero0_ep2": "zero0", "zero1_ep1_fp32": "zero1", "zero1_ep4": "zero1", "zero2_ep2": "zero2",
    "zero2_mixed": "zero2", "zero2_data_first": "zero2", "zero2_autoep": "zero2",
}  # fmt: skip
EXPERT = "layer_{}_expert_{}_mp_rank_00_model_states.pt"
SMALL = "zero2_ep2"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive's checkpoints; tests that change one take a copy."""
    folder = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / SMALL, tmp_path / "run"))


def truth(root: Path) -> dict[str, Tensors]:
    found: dict[str, Tensors] = torch.load(root / "truth.pt")
    for tensors in found.values():
        if "embed.weight" in tensors:
            tensors["head.weight"] = tensors["embed.weight"]
        for name in [name for name in tensors if ".mlp.router." in name]:
            tensors[name.replace(".mlp.router.", ".mlp.gate.")] = tensors[name]
    return found


def weights_of(root: Path) -> Tensors:
    """The masters, and the module's values of what has none: frozen parameters and buffers."""
    held = truth(root)
    return {**held["module"], **held["masters"]}


@pytest.mark.parametrize("name", CASES)
def test_values_are_the_engines(saved: Path, name: str) -> None:
    root = saved / name
    checkpoint, held = open_deepspeed(str(root)), truth(root)
    assert contents(checkpoint) == expected(weights_of(root))
    assert checkpoint.format == f"deepspeed-{CASES[name]}"
    assert [what for what, _ in checkpoint.remarks.skipped] == ["optimizer_state_dict"]
    for key, master in held["masters"].items():
        assert torch.equal(master.to(held["module"][key].dtype), held["module"][key]), key


@pytest.mark.parametrize("name", [name for name, kind in CASES.items() if kind != "zero0"])
def test_moments_of_experts_are_their_own(saved: Path, name: str) -> None:
    checkpoint = open_deepspeed(str(saved / name))
    assert checkpoint.contents.optimizer is not None
    state = checkpoint.contents.optimizer()
    assert isinstance(state, OptimizerState)
    wanted = truth(saved / name)["exp_avg"]
    wanted = {key: value for key, value in wanted.items() if key != "head.weight" and ".mlp.gate." not in key}
    for key, value in wanted.items():
        assert read_tensor(state.catalog, f"state.{key}.exp_avg") == raw(value), key


@pytest.mark.parametrize("name", ["zero2_data_first", SMALL])
@pytest.mark.parametrize("setting", [True, False, None])
def test_values_say_which_ranks_share_experts(
    saved: Path, tmp_path: Path, name: str, setting: bool | None
) -> None:
    """Whatever the settings say: a checkpoint may not have them."""
    root = Path(shutil.copytree(saved / name, tmp_path / "run"))
    path = root / "global_step2" / "mp_rank_00_model_states.pt"
    state = torch.load(path)
    assert state["ds_config"].get("use_data_before_expert_parallelism", False) is (name != SMALL)
    state["ds_config"] = "ds.json" if setting is None else {"use_data_before_expert_parallelism": setting}
    torch.save(state, path)
    assert contents(open_deepspeed(str(root))) == expected(weights_of(root))


@pytest.mark.parametrize("gone", [[(0, 1), (1, 3)], [(layer, e) for layer in (0, 1) for e in range(4)]])
@pytest.mark.parametrize("keep_optimizer", [True, False])
def test_missing_files_are_named(run: Path, gone: list[tuple[int, int]], keep_optimizer: bool) -> None:
    for key in gone:
        (run / "global_step2" / EXPERT.format(*key)).unlink()
    for path in [] if keep_optimizer else run.glob("*/*_optim_states.pt"):
        path.unlink()
    with pytest.raises(SourceError, match=f"{len(gone)} of 8 files of experts are missing") as caught:
        open_deepspeed(str(run))
    assert list(caught.value.problems) == [f"global_step2/{EXPERT.format(*key)}" for key in gone]
    assert "ds_to_universal" not in str(caught.value.hint)


def test_without_the_optimizer_all_values_are_the_modules(run: Path) -> None:
    for path in run.glob("*/*_optim_states.pt"):
        path.unlink()
    checkpoint = open_deepspeed(str(run))
    assert contents(checkpoint) == expected(truth(run)["module"])
    assert "the module's weights, not the fp32 masters" in checkpoint.remarks.notes[0]


def test_files_of_other_experts_are_named(run: Path) -> None:
    """A save with more experts, or more layers, under the same tag."""
    tag, more = run / "global_step2", [EXPERT.format(0, 4), EXPERT.format(2, 0)]
    for name in more:
        shutil.copy(tag / EXPERT.format(0, 0), tag / name)
    checkpoint = open_deepspeed(str(run))
    assert contents(checkpoint) == expected(weights_of(run))
    assert {what for what, _ in checkpoint.remarks.skipped} == {
        "optimizer_state_dict", *(f"global_step2/{name}" for name in more)
    }  # fmt: skip


def test_experts_of_another_save_are_refused(saved: Path, run: Path) -> None:
    """No file of an expert says its step: its values are compared with the masters."""
    tag = run / "global_step2"
    for expert in (0, 1):
        name = EXPERT.format(0, expert)
        tensors = {key: value + 1 for key, value in torch.load(tag / name).items()}
        torch.save(tensors, tag / name)
    with pytest.raises(IntegrityError, match="not the values of the experts' files") as caught:
        open_deepspeed(str(run))
    assert any(EXPERT.format(0, 0) in problem for problem in caught.value.problems)
    shutil.copy(tag / EXPERT.format(1, 0), tag / EXPERT.format(1, 1))
    with pytest.raises(IntegrityError):
        open_deepspeed(str(run))


@pytest.mark.parametrize("number", [1 << 40, [1 << 14] * 100])
def test_numbers_of_experts_are_bounded(run: Path, number: object) -> None:
    path = run / "global_step2" / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path), "num_experts": number}, path)
    with pytest.raises(SourceError, match="more experts than any model"):
        open_deepspeed(str(run))


def test_a_file_that_is_no_experts(run: Path) -> None:
    name = EXPERT.format(1, 2)
    torch.save({"step": 3}, run / "global_step2" / name)
    with pytest.raises(SourceError, match="does not hold the tensors of an expert") as caught:
        open_deepspeed(str(run))
    assert name in str(caught.value)


def test_experts_of_a_transformers_model_get_its_names(saved: Path, tmp_path: Path) -> None:
    root, base = saved / "zero2_autoep", saved / "base"
    rename = [
        r"mlp\.experts\.(w[123])\.(\d+)$=block_sparse_moe.experts.\2.\1.weight",
        r"mlp\.router\.gate=block_sparse_moe.gate",
    ]
    result = consolidate(root, tmp_path / "hub", base=base, rename=rename, ask_class="off")
    found, held = load_file(tmp_path / "hub" / "model.safetensors"), weights_of(root)
    assert set(found) == set(load_file(base / "model.safetensors"))
    for layer, expert, part in [(0, 0, "w1"), (0, 3, "w2"), (1, 2, "w3")]:
        name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight"
        assert torch.equal(found[name], held[f"model.layers.{layer}.mlp.experts.{part}.{expert}"])
    assert not result.warnings


def test_universal_experts_of_a_transformers_model(saved: Path) -> None:
    """What ds_to_universal.py makes has the experts stacked; it was refused, and the hint was to convert it."""
    found = contents(open_deepspeed(str(saved / "zero2_autoep_universal")))
    held = weights_of(saved / "zero2_autoep")
    for layer in (0, 1):
        for part in ("w1", "w2", "w3"):
            name = f"model.layers.{layer}.mlp.experts.{part}"
            held[name] = torch.stack([held.pop(f"{name}.{expert}") for expert in range(4)])
    assert found == expected(held)


def test_missing_universal_experts_are_named(saved: Path, tmp_path: Path) -> None:
    """Frozen ones too: only AutoEP's own entry says that there are experts of this layer."""
    root = Path(shutil.copytree(saved / "zero2_autoep_universal", tmp_path / "run"))
    path = root / "global_step2" / "mp_rank_00_model_states.pt"
    state, name = torch.load(path), "model.layers.0.mlp.experts.w1"
    for group in state["param_shapes"]:
        group.pop(name, None)
    torch.save(state, path)
    shutil.rmtree(path.parent / "zero" / name)
    with pytest.raises(SourceError, match="parameters have no fp32") as caught:
        open_deepspeed(str(root))
    assert list(caught.value.problems) == [f"global_step2/zero/{name}/fp32.pt"]


@pytest.mark.parametrize("change", ["order", "format"])
def test_experts_in_places_of_their_own_are_refused(saved: Path, tmp_path: Path, change: str) -> None:
    root = Path(shutil.copytree(saved / "zero2_autoep", tmp_path / "run"))
    path = root / "global_step2" / "mp_rank_00_model_states.pt"
    state = torch.load(path)
    layer = state["ds_autoep_layers"][1]
    if change == "order":
        layer["expert_placement"]["ranks"] = layer["expert_placement"]["ranks"][::-1]
    else:
        layer["checkpoint_format"] = "partitioned"
    torch.save(state, path)
    with pytest.raises(SourceError, match="AutoEP") as caught:
        open_deepspeed(str(root))
    assert "ds_to_universal" in str(caught.value.hint)


def test_all_verbs(saved: Path, tmp_path: Path) -> None:
    root, held = saved / "zero2_mixed", weights_of(saved / "zero2_mixed")
    consolidate(root, tmp_path / "hub")
    found = load_file(tmp_path / "hub" / "model.safetensors")
    assert set(held) - set(found) <= {"embed.weight", "head.weight"}  # tied: one of them is written
    assert expected(found) == expected({key: held[key] for key in found})
    reshard(root, tmp_path / "out", world_size=3)
    catalog = open_catalog(str(tmp_path / "out"), records=True)
    for key, value in truth(root)["exp_avg"].items():
        if key != "head.weight":
            assert read_tensor(catalog, f"optim.state.{key}.exp_avg") == raw(value), key
    assert verify(root).ok
    assert diff(root, tmp_path / "out").is_equal
    assert inspect(root).num_tensors == len(held) - 1  # ties count once


def test_frozen_parameters_that_the_save_left_out_are_said(saved: Path, tmp_path: Path) -> None:
    """As DeepSpeed 0.19.8 writes with `exclude_frozen_parameters=True` (engine.module_state_dict, _save_checkpoint)."""
    consolidate(saved / "zero2_mixed", tmp_path / "base")
    (tmp_path / "base/config.json").write_text('{"model_type": "own", "architectures": ["Own"]}')
    run = Path(shutil.copytree(saved / "zero2_mixed", tmp_path / "run"))
    (file,) = run.glob("**/mp_rank_00_model_states.pt")
    content = torch.load(file, weights_only=False)
    frozen = [
        name for name in content["frozen_param_shapes"] if content["module"].pop(name, None) is not None
    ]
    content["frozen_param_shapes"] = content["frozen_param_fragments"] = None
    torch.save(content, file)
    assert frozen
    assert any("exclude_frozen_parameters=True" in note for note in inspect(run).notes)
    with pytest.raises(LayoutError, match=r"it was saved with exclude_frozen_parameters=True") as error:
        consolidate(run, tmp_path / "out", base=tmp_path / "base")
    assert "--fill-from-base" in str(error.value.hint)
    assert not any("exclude_frozen" in note for note in inspect(saved / "zero2_mixed").notes)
