"""A DCP directory as a checkpoint: selecting, checking, and what cannot be recovered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardkit.errors import SourceError
from shardkit.formats.dcp.directory import is_dcp, open_dcp_checkpoint
from tests.formats.dcp.samples import assert_holds, save, save_rank_local, shard

STATE = {"model": {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}, "step": 1}


def test_select_gives_the_tensors_in_order(tmp_path: Path) -> None:
    directory = save(STATE, tmp_path / "c")
    assert is_dcp(directory)
    checkpoint = open_dcp_checkpoint(directory)
    assert (checkpoint.path, checkpoint.format, checkpoint.contents.assets) == (directory, "dcp", ())
    assert checkpoint.catalog.encoding == "torch-record"
    chosen = checkpoint.select(["model.b", "model.a.weight"])
    assert list(chosen.tensors) == ["model.b", "model.a.weight"]
    assert chosen.encoding == "raw"
    assert_holds(chosen, {"model.b": STATE["model"]["b"], "model.a.weight": STATE["model"]["a.weight"]})


def test_safetensors_files_have_no_checksums(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    wide = torch.arange(12.0).reshape(4, 3)
    directory = save_rank_local(
        lambda mesh: {"w": shard(wide, mesh)},
        2,
        tmp_path / "c",
        serialization_format=SerializationFormat.SAFETENSORS,
    )
    checkpoint = open_dcp_checkpoint(directory)
    assert_holds(checkpoint.select(["w"]), {"w": wide})


def test_flat_parameters_are_refused(tmp_path: Path) -> None:
    state = {
        "model": {"_flat_param": torch.ones(8), "layers.0._fsdp_wrapped_module.flat_param": torch.ones(4)}
    }
    with pytest.raises(SourceError, match=r"2 flat parameters of FSDP1") as caught:
        open_dcp_checkpoint(save(state, tmp_path / "c"))
    assert caught.value.problems[0] == "model._flat_param: 8 elements"
    assert "SHARDED_STATE_DICT" in str(caught.value.hint)


def test_a_parameter_that_only_sounds_flat(tmp_path: Path) -> None:
    state = {
        "flat_param.weight": torch.ones(2),
        "my_flat_params": torch.ones(2),
        "flat_param": torch.ones(2, 2),
    }
    assert len(open_dcp_checkpoint(save(state, tmp_path / "c")).catalog.tensors) == 3


@pytest.mark.parametrize(
    ("state", "reason"),
    [({}, "nothing at all"), ({"lr": 0.1, "step": 3}, "only 2 entries that are not tensors")],
)
def test_without_tensors_it_says_so(tmp_path: Path, state: dict[str, float], reason: str) -> None:
    with pytest.raises(SourceError, match=rf"has no tensors: {reason}"):
        open_dcp_checkpoint(save(state, tmp_path / "c"))


def test_odd_paths_are_no_directories(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (str(tmp_path), str(tmp_path / "file"), str(tmp_path / "none"), "a\0b"):
        assert not is_dcp(path)


def test_neither_torch_nor_numpy_is_imported(tmp_path: Path) -> None:
    directory = save(STATE, tmp_path / "c")
    code = (
        "import sys; from shardkit.formats.dcp.directory import open_dcp_checkpoint as o;"
        f"c = o({directory!r}); c.select(list(c.catalog.tensors));"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
