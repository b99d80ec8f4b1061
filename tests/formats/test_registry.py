"""Which format a path has, from markers alone; and what is said where it has none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from shardkit import formats
from shardkit.errors import SourceError, UsageError
from shardkit.formats.registry import format_of


@pytest.mark.parametrize("part", [".metadata", "__0_0.distcp"])
def test_a_part_stands_for_the_checkpoint(save_dcp, weights, tmp_path, part, monkeypatch):
    directory = save_dcp(weights, tmp_path / "c")
    assert format_of(str(directory / part)) == "dcp"
    assert formats.open(str(directory / part)).path == str(directory)
    monkeypatch.chdir(directory)
    assert formats.open(part).path == os.curdir


def touch(directory, *names):
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()
    return str(directory)


def test_a_hub_model_comes_before_the_full_file_beside_it(tmp_path):
    """Trainer with FULL_STATE_DICT writes both; only one of them has the Hub's names."""
    path = touch(tmp_path, "pytorch_model_fsdp.bin", "optimizer.bin")
    assert format_of(path) == "accelerate-bin"
    touch(tmp_path, "model.safetensors")
    assert format_of(path) == "hub"


@pytest.mark.parametrize(
    ("names", "format"),
    [
        (["shard-00001-model-00001-of-00001.safetensors"], "dcp-hf"),
        (["sharded/shard-00001-model-00001-of-00001.safetensors", "model.safetensors"], "dcp-hf"),
        (["model_world_size_2_rank_0.pt"], "verl"),
        (["actor/model_world_size_2_rank_0.pt", "data.pt"], "verl"),
        (["policy/model_world_size_2_rank_0.pt"], "skyrl"),
        (["model/dist_ckpt/.metadata", "ckpt_contents.json"], "verl-megatron"),
        (["mp_rank_00_model_states.pt"], "deepspeed"),
        (["__0.metadata", "__0_0.distcp"], "dcp"),
        (["pytorch_model_fsdp_0_rank0.bin"], "accelerate-bin"),
        (["epoch_0/notes.txt"], None),
    ],
)
def test_formats_from_file_names(tmp_path, names, format):
    assert format_of(touch(tmp_path, *names)) == format


def test_a_format_can_be_said(save_dcp, weights, tmp_path):
    directory = save_dcp({"model": weights}, tmp_path / "last.ckpt")
    torch.save({"epoch": 0}, directory / "meta.pt")
    assert formats.open(str(directory), format="dcp").format == "dcp"
    with pytest.raises(UsageError, match="unknown format 'lightening'"):
        formats.open(str(directory), format="lightening")


def test_hub(make_hub, weights):
    model = make_hub(weights, config={"model_type": "llama"})
    assert format_of(str(model)) == format_of(str(model / "model.safetensors")) == "hub"
    found = formats.open(str(model))
    assert (found.format, dict(found.contents.roots)) == ("hub", {"model": ()})
    assert found.contents.assets == (str(model),)


NOTHING = {
    "unfinished": ([".metadata.tmp", "__0_0.distcp"], "the save did not finish"),
    "no metadata": (["__0_0.distcp"], "without it"),
    "orbax": (["_CHECKPOINT_METADATA"], "Orbax"),
    "nothing": ([], "is an empty directory"),
    "tensorflow": (["tf_model.h5", "config.json"], "a model of TensorFlow, which is not read"),
    "strange": (["notes\x1b[2J.txt"], r"it holds: notes\\x1b\[2J\.txt"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_no_checkpoint(tmp_path, case):
    names, message = NOTHING[case]
    for name in names:
        (tmp_path / name).touch()
    assert format_of(str(tmp_path)) is None
    with pytest.raises(SourceError, match=message) as caught:
        formats.open(str(tmp_path))
    assert any("looked for: .metadata" in problem for problem in caught.value.problems) == (case == "strange")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["adapter_model.safetensors", "adapter_config.json"], "PEFT adapter"),
        (["model-00001-of-00002.safetensors"], "index is missing"),
        (["model.fp16.safetensors", "model.bf16.safetensors"], "2 files could be the weights"),
    ],
)
def test_no_hub_model(tmp_path, names, message):
    for name in names:
        (tmp_path / name).touch()
    assert format_of(str(tmp_path)) is None
    with pytest.raises(SourceError, match=message):
        formats.open(str(tmp_path))


def test_a_directory_that_is_none_is_listed(save_dcp, weights, tmp_path):
    save_dcp(weights, tmp_path / "step-2")
    torch.save(weights, tmp_path / "weights.pt")
    with pytest.raises(SourceError, match="is not a checkpoint") as caught:
        formats.open(str(tmp_path))
    assert caught.value.problems[0] == "it holds: step-2, weights.pt"


def test_nothing_there(tmp_path):
    with pytest.raises(SourceError, match="no such file or directory"):
        formats.open(str(tmp_path / "nothing"))
    assert format_of(str(tmp_path / "nothing")) is None
    assert format_of("a\0b") is None


def test_odd_content_is_no_checkpoint_and_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / ".metadata")
    os.mkfifo(tmp_path / "meta.pt")
    os.mkfifo(tmp_path / "metadata.json")
    format_of(str(tmp_path))
    with pytest.raises(SourceError):
        formats.open(str(tmp_path))
    os.mkfifo(tmp_path / "x.pt")
    with pytest.raises(SourceError):
        formats.open(str(tmp_path / "x.pt"))


def test_a_hub_model_is_opened_without_the_other_formats(tmp_path):
    save_file({"w": torch.zeros(2)}, str(tmp_path / "model.safetensors"))
    code = (
        "import sys; from shardkit import formats; formats.open(sys.argv[1])\n"
        "print([m for m in sys.modules if m.startswith(('shardkit.pickles.', 'shardkit.formats.dcp.', 'shardkit.formats.torchsave.'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "name",
    [
        *("hub/config.json", "hub/model.safetensors", "hub/model.safetensors.index.json"),
        *("hub/pytorch_model.bin", "dcp/.metadata", "dcp/__0_0.distcp", "verl/model_world_size_1_rank_0.pt"),
        *("model.pt", "last.ckpt"),
    ],
)
def test_a_pointer_of_git_lfs_is_called_one(save_dcp, weights, tmp_path, name):
    """What `git clone` without git-lfs brings is neither damaged nor of another format."""
    save_dcp(weights, tmp_path / "dcp")
    (tmp_path / "hub").mkdir()
    if name == "hub/config.json":
        save_file(weights, tmp_path / "hub/model.safetensors")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(SourceError, match="of Git LFS, not the file") as caught:
        formats.open(str(tmp_path / name) if "/" not in name else str((tmp_path / name).parent))
    assert os.path.basename(name) in str(caught.value)
    assert "`git lfs pull`" in str(caught.value.hint)
