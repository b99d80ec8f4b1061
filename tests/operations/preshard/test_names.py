"""A pre-sharded directory whose model has other names in memory than its files: the manifest knows both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardkit.operations.consolidate import consolidate
from shardkit.operations.diff import diff
from shardkit.operations.preshard import preshard
from shardkit.operations.reshard import reshard
from shardkit.operations.verify import verify
from tests.models.zoo import ZOO, make_hub

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.parametrize("name", ["qwen2_vl", "llava", "gpt_neox"])
def test_preshard_and_consolidate_give_the_hub_model_again(
    name: str, tmp_path: Path, fast_trace: object
) -> None:
    hub, sharded = tmp_path / "hub", tmp_path / "sharded"
    make_hub(ZOO[name], hub)
    preshard(hub, sharded, world_size=2)
    manifest = json.loads((sharded / "shardkit.json").read_text())
    assert any(fqn != tensor["source"]["name"] for fqn, tensor in manifest["tensors"].items())
    reshard(sharded, tmp_path / "resharded", world_size=3)
    for source in ("sharded", "resharded"):
        consolidate(tmp_path / source, tmp_path / f"{source}-hf")
        expected, found = (load_file(each / "model.safetensors") for each in (hub, tmp_path / f"{source}-hf"))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    for one, two in ((hub, sharded), (sharded, hub)):
        assert diff(one, two).differences == ()
    assert verify(sharded, against=hub).problems == ()
    assert diff(sharded, sharded).differences == ()
