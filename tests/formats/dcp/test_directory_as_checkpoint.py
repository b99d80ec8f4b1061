"""A DCP directory as a checkpoint: what is none, and what cannot be recovered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardkit.errors import SourceError
from shardkit.formats.dcp.directory import is_dcp, open_dcp_checkpoint
from tests.formats.dcp.samples import save


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
