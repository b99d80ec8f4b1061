"""accelerate's `.bin` files: parts of ranks, the whole, and flat parameters."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from shardkit import formats
from shardkit.errors import SourceError
from shardkit.formats.checkpoints.accelerate import is_accelerate_bin, open_accelerate_bin
from shardkit.formats.registry import format_of
from tests.formats.reading import contents, expected


@pytest.fixture
def parts(rank_files: Path, tmp_path: Path) -> Path:
    """`pytorch_model_fsdp_0_rankR.bin` of four ranks, and what stands beside them."""
    for rank in range(4):
        source = rank_files / "fsdp1" / f"model_world_size_4_rank_{rank}.pt"
        shutil.copy(source, tmp_path / f"pytorch_model_fsdp_0_rank{rank}.bin")
        (tmp_path / f"optimizer_0_rank{rank}.bin").write_bytes(b"never opened")
        (tmp_path / f"random_states_{rank}.pkl").write_bytes(b"never opened")
    return tmp_path


@pytest.mark.dist
def test_parts_of_ranks(parts, rank_files):
    assert format_of(str(parts)) == "accelerate-bin"
    checkpoint = formats.open(str(parts))
    assert contents(checkpoint) == expected(torch.load(rank_files / "fsdp1.truth"))
    assert checkpoint.roots == {"model": ()}
    assert dict(checkpoint.skipped) == {
        **{f"optimizer_0_rank{rank}.bin": "optimizer state" for rank in range(4)},
        **{f"random_states_{rank}.pkl": "state of the trainer" for rank in range(4)},
    }
    assert formats.open(str(parts / "pytorch_model_fsdp_0_rank2.bin")).format == "accelerate-bin"


@pytest.mark.dist
def test_missing_ranks(parts):
    (parts / "pytorch_model_fsdp_0_rank1.bin").unlink()
    with pytest.raises(SourceError, match="1 of 4 ranks are missing") as caught:
        open_accelerate_bin(str(parts))
    assert caught.value.problems == ("pytorch_model_fsdp_0_rank1.bin",)


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
    assert (checkpoint.roots, checkpoint.assets) == ({"model": ()}, (str(tmp_path),))
    assert ("optimizer.bin", "optimizer state") in checkpoint.skipped


def test_several_models(tmp_path, weights):
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
    assert caught.value.problems == tuple(flat)


def test_other_directories(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    assert not is_accelerate_bin(str(tmp_path))
    assert not is_accelerate_bin(str(tmp_path / "nothing"))
    (tmp_path / "pytorch_model_fsdp.bin").touch()
    assert not is_accelerate_bin(str(tmp_path / "pytorch_model_fsdp.bin"))
