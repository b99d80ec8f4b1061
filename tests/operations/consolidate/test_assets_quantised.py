"""What says how weights are quantised goes where such weights go: `quantization_config`, and ModelOpt's own file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import shardkit
from shardkit.errors import LayoutError

UP = "model.layers.0.mlp.up_proj"
REST = {
    "model.embed_tokens.weight": torch.ones(64, 32).bfloat16(),
    "model.norm.weight": torch.ones(32).bfloat16(),
}
TENSORS = {
    "plain": {f"{UP}.weight": torch.ones(32, 32).bfloat16()},
    "NVFP4": {
        f"{UP}.weight": torch.full((32, 16), 7, dtype=torch.uint8),
        f"{UP}.weight_scale": torch.ones(32, 2).to(torch.float8_e4m3fn),
        f"{UP}.weight_scale_2": torch.tensor(0.5),
        f"{UP}.input_scale": torch.tensor(0.1),
    },
    "FP8": {
        f"{UP}.weight": torch.ones(32, 32).to(torch.float8_e4m3fn),
        f"{UP}.weight_scale": torch.tensor(0.5),
        f"{UP}.input_scale": torch.tensor(0.1),
    },
}
CONFIG = {"model_type": "own", "num_hidden_layers": 1, "vocab_size": 64, "dtype": "bfloat16"}
FILE = "hf_quant_config.json"


def exported(directory: Path, kind: str, *, in_config: bool = False) -> Path:
    """Write what ModelOpt exports; newer versions say it in config.json too."""
    directory.mkdir()
    save_file({**REST, **TENSORS[kind]}, directory / "model.safetensors", {"format": "pt"})
    beside(directory, kind, in_config=in_config)
    return directory


def beside(directory: Path, kind: str, *, in_config: bool) -> None:
    said = {"quantization_config": {"quant_method": "modelopt", "quant_algo": kind}} if in_config else {}
    (directory / "config.json").write_text(json.dumps({**CONFIG, **said}))
    (directory / FILE).write_text(json.dumps({"quantization": {"quant_algo": kind}}))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def trained(directory: Path, kind: str) -> Path:
    dcp.save({**REST, **TENSORS[kind]}, checkpoint_id=str(directory), no_dist=True)
    return directory


def says(output: str) -> tuple[bool, bool]:
    """Return whether ModelOpt's file is there, and whether config.json says something."""
    config: dict[str, Any] = json.loads((Path(output) / "config.json").read_text())
    return (Path(output) / FILE).exists(), "quantization_config" in config


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("in_config", [False, True])
def test_tensors_that_stay_as_they_are_keep_it(tmp_path: Path, in_config: bool) -> None:
    base = exported(tmp_path / "base", "NVFP4", in_config=in_config)
    result = shardkit.consolidate(trained(tmp_path / "run", "NVFP4"), base=str(base))
    assert says(result.output) == (True, in_config)
    assert (Path(result.output) / FILE).read_bytes() == (base / FILE).read_bytes()
    if not in_config:
        again = shardkit.consolidate(base, tmp_path / "again")
        assert says(again.output) == (True, False)
        assert shardkit.consolidate(base, tmp_path / "again", overwrite=True).assets == again.assets


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(("kind", "quantised"), [("plain", "FP8"), ("FP8", "FP8"), ("plain", "NVFP4")])
def test_plain_weights_lose_it(tmp_path: Path, kind: str, quantised: str) -> None:
    run, base = trained(tmp_path / "run", kind), exported(tmp_path / "base", quantised)
    result = shardkit.consolidate(run, base=str(base), dequantize=kind == "FP8")
    assert says(result.output) == (False, False)
    assert any(f"{FILE} of {base} left out: the weights are plain" in note for note in result.notes)
    if kind == "plain":  # as a trainer leaves the base's files beside what it trained
        beside(run, quantised, in_config=True)
        result = shardkit.consolidate(run, tmp_path / "found")
        assert says(result.output) == (False, False)
        assert any(f"{FILE} of" in note for note in result.notes)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_a_base_of_another_kind_is_refused_as_before(tmp_path: Path) -> None:
    beside(base := exported(tmp_path / "base", "FP8"), "W4A16_AWQ", in_config=True)
    with pytest.raises(
        LayoutError, match=r"is quantised \(modelopt\), the weights of the checkpoint are not"
    ):
        shardkit.consolidate(trained(tmp_path / "run", "plain"), base=str(base))
    plain = exported(tmp_path / "plain", "plain")
    with pytest.raises(LayoutError, match="does not fit"):
        shardkit.consolidate(trained(tmp_path / "quantised", "NVFP4"), base=str(plain))


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_a_trainers_directory_has_plain_weights(tmp_path: Path) -> None:
    hub = exported(tmp_path / "hub", "FP8")
    options = {"world_size": 2, "layout": "declared", "dequantize": True, "profile": "transformers"}
    shardkit.preshard(hub, tmp_path / "out", **options)
    assert (tmp_path / "out" / "config.json").exists()
    assert not (tmp_path / "out" / FILE).exists()
