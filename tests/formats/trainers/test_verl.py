"""verl's files of ranks: every layout that DTensor and ShardedTensor have, and what is wrong with some."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from shardkit import formats
from shardkit.errors import IntegrityError, SourceError
from shardkit.formats.registry import format_of
from shardkit.formats.trainers.verl import is_verl, open_verl
from tests.formats.rankfiles.samples import RANK_FILE as NAME
from tests.formats.rankfiles.samples import copy_ranks
from tests.formats.reading import contents, expected


@pytest.fixture
def actor(rank_files: Path, tmp_path: Path) -> Path:
    """global_step_2/actor with the files of `fsdp2`, and what verl puts beside them."""
    directory = tmp_path / "global_step_2" / "actor"
    shutil.copytree(rank_files / "fsdp2", directory)
    (directory / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 4}')
    for rank in range(4):
        (directory / f"optim_world_size_4_rank_{rank}.pt").write_bytes(b"never opened")
        (directory / f"extra_state_world_size_4_rank_{rank}.pt").write_bytes(b"never opened")
    (directory / "huggingface").mkdir()
    (directory / "huggingface" / "config.json").write_text('{"model_type": "qwen2"}')
    return directory


@pytest.mark.dist
@pytest.mark.parametrize("case", ["fsdp2", "hsdp", "fsdp2_tp", "fsdp1", "placed"])
def test_tensors_are_put_together(case, rank_files):
    truth = torch.load(rank_files / f"{case}.truth")
    checkpoint = open_verl(str(rank_files / case))
    assert contents(checkpoint) == expected(truth)


@pytest.mark.dist
def test_replicas_are_taken_once(rank_files):
    catalog = open_verl(str(rank_files / "hsdp")).catalog
    assert catalog.tensors["wide.weight"].num_chunks == 2
    assert catalog.tensors["step"].num_chunks == 1


@pytest.mark.dist
def test_only_what_is_not_contiguous_is_decoded(rank_files):
    catalog = open_verl(str(rank_files / "placed")).catalog
    decoded = {source.name for source in catalog.files if not source.is_raw}
    assert decoded == {f"{NAME.format(rank)}:strided" for rank in range(4)}


@pytest.mark.dist
def test_unfinished_sums_are_refused(rank_files):
    with pytest.raises(SourceError, match="the stored bytes are not the values") as caught:
        open_verl(str(rank_files / "partial"))
    assert "Partial" in caught.value.problems[0]


@pytest.mark.dist
def test_files_under_a_name_of_ones_own_are_read_under_the_name_in_the_error(rank_files, tmp_path):
    truth = copy_ranks("fsdp2", rank_files, lambda rank: tmp_path / f"rank_{rank}.pt")
    with pytest.raises(SourceError, match="is not a checkpoint") as caught:
        formats.open(str(tmp_path))
    assert any("model_world_size_" in line for line in caught.value.problems)
    for rank in range(4):
        (tmp_path / f"rank_{rank}.pt").rename(tmp_path / NAME.format(rank))
    assert contents(formats.open(str(tmp_path))) == truth


@pytest.mark.dist
def test_what_lies_beside_the_weights(actor):
    parent = str(actor.parent)
    assert format_of(parent) == format_of(str(actor)) == "verl"
    for path in (parent, str(actor), str(actor / NAME.format(1))):
        checkpoint = formats.open(path)
        assert set(checkpoint.catalog.tensors) >= {"wide.weight", "few.weight"}
        assert checkpoint.contents.roots == {"model": ()}
        assert checkpoint.contents.assets == (str(actor / "huggingface"),)
        assert checkpoint.writer == "verl (FSDP2)"
        assert ("optim_world_size_4_rank_3.pt", "optimizer state") in checkpoint.remarks.skipped
    assert formats.open(parent).path == parent


@pytest.mark.dist
def test_the_actor_before_the_critic(actor):
    shutil.copytree(actor, actor.parent / "critic")
    checkpoint = open_verl(str(actor.parent))
    assert {os.path.dirname(source.path) for source in checkpoint.catalog.files} == {str(actor)}
    assert ("critic", "another model") in checkpoint.remarks.skipped
    assert any("critic" in note for note in checkpoint.remarks.notes)
    shutil.rmtree(actor)
    critic = open_verl(str(actor.parent))
    assert {os.path.basename(os.path.dirname(source.path)) for source in critic.catalog.files} == {"critic"}


@pytest.mark.dist
def test_lora_is_told(actor):
    (actor / "lora_train_meta.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    assert any("r=4, lora_alpha=8" in note for note in open_verl(str(actor)).remarks.notes)


@pytest.mark.dist
def test_missing_ranks_are_named(actor):
    (actor / NAME.format(1)).unlink()
    (actor / NAME.format(3)).unlink()
    with pytest.raises(SourceError, match="2 of 4 ranks") as caught:
        open_verl(str(actor))
    assert caught.value.problems == (NAME.format(1), NAME.format(3))


@pytest.mark.dist
def test_leftovers_of_another_world_size(actor):
    shutil.copy(actor / NAME.format(0), actor / "model_world_size_2_rank_0.pt")
    assert len(open_verl(str(actor)).catalog.tensors) == 7
    (actor / "fsdp_config.json").unlink()
    skipped = dict(open_verl(str(actor)).remarks.skipped)
    assert skipped["model_world_size_2_rank_0.pt"] == "of a save with another number of ranks"
    shutil.copy(actor / NAME.format(1), actor / "model_world_size_2_rank_1.pt")
    with pytest.raises(SourceError, match="saved by 2 and by 4 ranks"):
        open_verl(str(actor))


@pytest.mark.dist
def test_ranks_that_are_not_of_one_save(actor):
    shutil.copy(actor / NAME.format(0), actor / NAME.format(1))
    with pytest.raises(SourceError, match="do not make up the tensor") as caught:
        open_verl(str(actor))
    assert any(problem.startswith("wide.weight: ") for problem in caught.value.problems)


@pytest.mark.dist
def test_ranks_that_contradict_each_other(actor):
    state = torch.load(actor / NAME.format(0), weights_only=False)
    state["mask"] = torch.zeros(4)
    state["wide.bias"] = torch.zeros(10)
    torch.save(state, actor / NAME.format(2))
    with pytest.raises(SourceError, match="2 tensors are different") as caught:
        open_verl(str(actor))
    assert caught.value.problems == (
        f"mask: {NAME.format(2)}: float32 [4], elsewhere bool [3]",
        f"wide.bias: {NAME.format(2)}: a whole tensor here, a part of one elsewhere",
    )


@pytest.mark.dist
def test_cut_files_are_named_all_at_once(actor):
    for rank in (0, 2):
        file = actor / NAME.format(rank)
        os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(SourceError, match="2 of 4 files") as caught:
        open_verl(str(actor))
    named = [problem.partition(":")[0] for problem in caught.value.problems]
    assert named == [NAME.format(0), NAME.format(2)]


@pytest.mark.dist
def test_a_changed_pickle_is_not_believed(actor):
    file = actor / NAME.format(0)
    data = file.read_bytes()
    file.write_bytes(data.replace(b"wide.weight", b"wild.weight", 1))
    with pytest.raises(IntegrityError, match="CRC-32") as caught:
        open_verl(str(actor))
    assert NAME.format(0) in str(caught.value)


def test_other_directories_are_not_verl(tmp_path):
    assert not is_verl(str(tmp_path / "nothing"))
    assert not is_verl(str(tmp_path))
    (tmp_path / "model_world_size_two_rank_0.pt").touch()
    (tmp_path / "actor").mkdir()
    assert not is_verl(str(tmp_path))
    with pytest.raises(SourceError, match="holds no model_world_size"):
        open_verl(str(tmp_path))


@pytest.mark.dist
def test_an_actor_outside_is_not_followed(actor, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "actor").symlink_to(actor)
    assert not is_verl(str(other))
