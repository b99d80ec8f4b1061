"""accelerate's and Trainer's FSDP checkpoints: DCP directories, and `.bin` files of ranks or of the whole model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from shardkit import formats
from shardkit.errors import SourceError
from shardkit.formats.registry import format_of
from shardkit.formats.trainers.accelerate import (
    is_accelerate,
    is_accelerate_bin,
    open_accelerate,
    open_accelerate_bin,
)
from tests.formats.rankfiles.samples import copy_ranks
from tests.formats.reading import contents, expected


@pytest.fixture
def checkpoint(save_dcp, weights, adam, tmp_path):
    home = tmp_path / "run" / "checkpoint-2"
    save_dcp({"model": weights}, home / "pytorch_model_fsdp_0")
    save_dcp({"optimizer": adam}, home / "optimizer_0")
    (home / "random_states_0.pkl").touch()
    return home


def test_model_is_opened(checkpoint, weights):
    (checkpoint / "scheduler.bin").touch()
    assert is_accelerate(str(checkpoint))
    found = open_accelerate(str(checkpoint))
    assert (found.format, found.writer, found.path) == ("accelerate", "accelerate (FSDP)", str(checkpoint))
    assert set(found.catalog.tensors) == {f"model.{name}" for name in weights}
    assert dict(found.contents.roots) == {"model": ("model",)}
    assert found.remarks.skipped == (
        ("optimizer_0", "optimizer state"),
        ("random_states_0.pkl", "state of the trainer"),
        ("scheduler.bin", "state of the trainer"),
    )
    assert found.contents.assets == ()


def test_trainer(checkpoint):
    (checkpoint / "trainer_state.json").write_text("{}")
    (checkpoint.parent / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (checkpoint / "tokenizer.json").write_text("{}")
    found = open_accelerate(str(checkpoint))
    assert found.writer == "transformers Trainer (FSDP)"
    assert found.contents.assets == (str(checkpoint), str(checkpoint.parent))


def test_config_of_something_else_is_no_asset(checkpoint):
    (checkpoint / "config.json").write_text(json.dumps({"learning_rate": 0.1}))
    assert open_accelerate(str(checkpoint)).contents.assets == ()
    (checkpoint / "config.json").write_text("not JSON")
    assert open_accelerate(str(checkpoint)).contents.assets == ()


def test_the_model_directory_itself(checkpoint):
    path = str(checkpoint / "pytorch_model_fsdp_0")
    found = formats.open(path)
    assert (found.format, found.path) == ("accelerate", path)
    assert dict(found.contents.roots) == {"model": ("model",)}
    assert ("optimizer_0", "optimizer state") in found.remarks.skipped


def test_several_models_have_to_be_named(checkpoint, save_dcp, weights):
    save_dcp({"model": weights}, checkpoint / "pytorch_model_fsdp_1")
    with pytest.raises(SourceError, match="holds 2 models") as caught:
        open_accelerate(str(checkpoint))
    assert caught.value.problems[1].endswith("pytorch_model_fsdp_1")
    found = open_accelerate(str(checkpoint / "pytorch_model_fsdp_1"))
    assert ("pytorch_model_fsdp_0", "another model") in found.remarks.skipped


def test_empty_model_of_peft(checkpoint, save_dcp):
    shutil.rmtree(checkpoint / "pytorch_model_fsdp_0")
    save_dcp({"model": {}}, checkpoint / "pytorch_model_fsdp_0")
    with pytest.raises(SourceError, match="pytorch_model_fsdp_0 is empty: the state dict that was") as caught:
        open_accelerate(str(checkpoint))
    assert "FSDP1 and LoRA" in (caught.value.hint or "")


def test_what_it_is_not(checkpoint, tmp_path):
    assert not is_accelerate(str(checkpoint / "optimizer_0"))
    shutil.rmtree(checkpoint / "pytorch_model_fsdp_0")
    (checkpoint / "pytorch_model_fsdp_0").mkdir()  # a save that has not begun
    assert not is_accelerate(str(checkpoint))
    assert not is_accelerate(str(tmp_path / "nothing"))


def test_link_out_of_the_checkpoint(checkpoint, tmp_path):
    shutil.move(checkpoint / "pytorch_model_fsdp_0", tmp_path / "elsewhere")
    (checkpoint / "pytorch_model_fsdp_0").symlink_to(tmp_path / "elsewhere")
    assert not is_accelerate(str(checkpoint))


@pytest.fixture
def parts(rank_files: Path, tmp_path: Path) -> Path:
    """`pytorch_model_fsdp_0_rankR.bin` of four ranks, and what stands beside them."""
    copy_ranks("fsdp1", rank_files, lambda rank: tmp_path / f"pytorch_model_fsdp_0_rank{rank}.bin")
    for rank in range(4):
        (tmp_path / f"optimizer_0_rank{rank}.bin").write_bytes(b"never opened")
        (tmp_path / f"random_states_{rank}.pkl").write_bytes(b"never opened")
    return tmp_path


@pytest.mark.dist
def test_what_lies_beside_parts_of_ranks(parts):
    checkpoint = formats.open(str(parts))
    assert checkpoint.contents.roots == {"model": ()}
    assert dict(checkpoint.remarks.skipped) == {
        **{f"optimizer_0_rank{rank}.bin": "optimizer state" for rank in range(4)},
        **{f"random_states_{rank}.pkl": "state of the trainer" for rank in range(4)},
    }
    assert formats.open(str(parts / "pytorch_model_fsdp_0_rank2.bin")).format == "accelerate-bin"


@pytest.mark.dist
def test_the_last_rank_is_missing(parts):
    """Nothing but the parts tells how many ranks there were."""
    (parts / "pytorch_model_fsdp_0_rank3.bin").unlink()
    with pytest.raises(SourceError, match="do not make up the tensor") as caught:
        open_accelerate_bin(str(parts))
    assert "0.weight: chunks hold 63 of 70 elements" in caught.value.problems
    assert "a rank is missing" in str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model_fsdp.bin", "pytorch_model_fsdp_0.bin"])
def test_the_whole_model(tmp_path, weights, name):
    torch.save(weights, tmp_path / name)
    (tmp_path / "optimizer.bin").write_bytes(b"never opened")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert format_of(str(tmp_path)) == "accelerate-bin"
    checkpoint = formats.open(str(tmp_path))
    assert contents(checkpoint) == expected(weights)
    assert (checkpoint.contents.roots, checkpoint.contents.assets) == ({"model": ()}, (str(tmp_path),))
    assert ("optimizer.bin", "optimizer state") in checkpoint.remarks.skipped


def test_several_models_in_files(tmp_path, weights):
    torch.save(weights, tmp_path / "pytorch_model_fsdp.bin")
    torch.save(weights, tmp_path / "pytorch_model_fsdp_1.bin")
    with pytest.raises(SourceError, match="holds several models") as caught:
        open_accelerate_bin(str(tmp_path))
    assert caught.value.problems == ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin")


@pytest.mark.dist
def test_the_whole_beside_parts(parts, weights):
    torch.save(weights, parts / "pytorch_model_fsdp.bin")
    with pytest.raises(SourceError, match="as a whole and in parts"):
        open_accelerate_bin(str(parts))


def test_flat_parameters_are_refused(tmp_path):
    flat = {"_fsdp_wrapped_module.flat_param": torch.ones(8), "layer._flat_param": torch.ones(8)}
    for rank in range(2):
        torch.save(flat, tmp_path / f"pytorch_model_fsdp_rank{rank}.bin")
    with pytest.raises(SourceError, match="flat parameters") as caught:
        open_accelerate_bin(str(tmp_path))
    assert caught.value.problems == tuple(f"{name}: 8 elements" for name in flat)


def test_directories_without_its_files(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    assert not is_accelerate_bin(str(tmp_path))
    assert not is_accelerate_bin(str(tmp_path / "nothing"))
    (tmp_path / "pytorch_model_fsdp.bin").touch()
    assert not is_accelerate_bin(str(tmp_path / "pytorch_model_fsdp.bin"))
