"""accelerate's and Trainer's FSDP directories: the model is opened, the rest is named as skipped."""

from __future__ import annotations

import json
import shutil

import pytest

from shardkit.errors import SourceError
from shardkit.formats.checkpoints.accelerate import is_accelerate, open_accelerate


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
    assert dict(found.roots) == {"model": ("model",)}
    assert found.skipped == (
        ("optimizer_0", "optimizer state"),
        ("random_states_0.pkl", "state of the trainer"),
        ("scheduler.bin", "state of the trainer"),
    )
    assert found.assets == ()


def test_trainer(checkpoint):
    (checkpoint / "trainer_state.json").write_text("{}")
    (checkpoint.parent / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (checkpoint / "tokenizer.json").write_text("{}")
    found = open_accelerate(str(checkpoint))
    assert found.writer == "transformers Trainer (FSDP)"
    assert found.assets == (str(checkpoint), str(checkpoint.parent))


def test_config_of_something_else_is_no_asset(checkpoint):
    (checkpoint / "config.json").write_text(json.dumps({"learning_rate": 0.1}))
    assert open_accelerate(str(checkpoint)).assets == ()
    (checkpoint / "config.json").write_text("not JSON")
    assert open_accelerate(str(checkpoint)).assets == ()


def test_the_model_directory_itself(checkpoint):
    path = str(checkpoint / "pytorch_model_fsdp_0")
    assert is_accelerate(path)
    found = open_accelerate(path)
    assert (found.path, dict(found.roots)) == (path, {"model": ("model",)})
    assert ("optimizer_0", "optimizer state") in found.skipped


def test_several_models_have_to_be_named(checkpoint, save_dcp, weights):
    save_dcp({"model": weights}, checkpoint / "pytorch_model_fsdp_1")
    with pytest.raises(SourceError, match="holds 2 models") as caught:
        open_accelerate(str(checkpoint))
    assert caught.value.problems[1].endswith("pytorch_model_fsdp_1")
    found = open_accelerate(str(checkpoint / "pytorch_model_fsdp_1"))
    assert ("pytorch_model_fsdp_0", "another model") in found.skipped


def test_empty_model_of_peft(checkpoint):
    model = checkpoint / "pytorch_model_fsdp_0"
    for file in model.glob("*.distcp"):
        file.write_bytes(b"")
    with pytest.raises(SourceError, match=r"pytorch_model_fsdp_0 is empty: its 1 \.distcp files") as caught:
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
