"""verify against another checkpoint, whatever its format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardkit.errors import SourceError
from shardkit.operations.preshard import preshard
from shardkit.operations.verify import verify
from tests.operations.consolidate.checkpoints import HEAD, hub, save, training_state, weights
from tests.operations.verify.test_verify import flip

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(training_state(weights()), tmp_path / "step-3")


def test_any_two_formats(checkpoint: Path, tmp_path: Path) -> None:
    """Names differ (`model.` before each), and so do files, meshes and what lies beside the model."""
    model = hub(tmp_path / "hub", weights(), None)
    preshard(model, tmp_path / "sharded", world_size=3, wrap="none")
    for path, other in ((checkpoint, model), (model, checkpoint), (tmp_path / "sharded", checkpoint)):
        result = verify(path, against=other)
        assert result.problems == ()
        assert (result.against, result.num_compared_tensors) == (str(other), len(weights()))
    (note,) = (note for note in result.notes if "beside the model" in note)
    command = f"`shardkit diff {tmp_path / 'sharded'} {checkpoint} --all`"
    assert (note.startswith(f"{checkpoint}: "), note.endswith(f"not compared; {command} compares all")) == (
        True,
        True,
    )


def test_notes_have_the_names_that_were_given(tmp_path: Path) -> None:
    for name, tensors in (
        ("gptq", {"up.qweight": torch.ones(2, 4, dtype=torch.int32), "up.scales": torch.ones(2, 4)}),
        ("plain", {"up.weight": torch.ones(4, 8)}),
    ):
        hub(tmp_path / name, tensors, None)
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "gptq" / "config.json").write_text(json.dumps(config))
    result = verify(tmp_path / "plain", against=tmp_path / "gptq")
    (note,) = (note for note in result.notes if "quantised" in note)
    assert note.startswith(f"{tmp_path / 'gptq'} is quantised in a way that is not known here")
    assert f"and {tmp_path / 'plain'} is not" in note


def test_each_kind_of_difference(checkpoint: Path, tmp_path: Path) -> None:
    changed = weights()
    changed["model.norm.weight"][5] += 1
    changed["model.layers.0.mlp.up_proj.weight"] = changed["model.layers.0.mlp.up_proj.weight"].T.contiguous()
    changed["model.layers.1.mlp.up_proj.weight"] = changed["model.layers.1.mlp.up_proj.weight"].double()
    changed["more"] = torch.ones(2)
    del changed[HEAD]
    result = verify(checkpoint, against=hub(tmp_path / "other", changed))
    assert not result.ok
    found = {problem.tensor: problem for problem in result.problems}
    assert found.keys() == {
        "model.norm.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "more",
        HEAD,
    }
    assert "1 of 16 elements differ, the first at [5]" in found["model.norm.weight"].message
    shape = found["model.layers.0.mlp.up_proj.weight"]
    assert (shape.message, shape.expected, shape.found) == ("shape", "[16, 24]", "[24, 16]")
    dtype = found["model.layers.1.mlp.up_proj.weight"]
    assert (dtype.message, dtype.expected, dtype.found) == ("dtype", "float64", "float32")
    assert "only" in found["more"].message
    assert "has no such tensor" in found[HEAD].message


def test_one_flipped_bit(checkpoint: Path, tmp_path: Path) -> None:
    model = hub(tmp_path / "hub", weights())
    data = (model / "model.safetensors").read_bytes()
    flip(model / "model.safetensors", data.index(weights()["model.norm.weight"].numpy().tobytes()) + 9)
    assert verify(model, full=True).ok  # nothing is recorded of it
    (problem,) = verify(model, against=checkpoint).problems
    assert problem.tensor == "model.norm.weight"
    assert "the first at [2]" in problem.message


def test_what_is_damaged_is_told_once(checkpoint: Path, tmp_path: Path) -> None:
    model = hub(tmp_path / "hub", weights())
    shard = checkpoint / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-9])
    result = verify(checkpoint, against=model)
    assert not result.ok
    assert any("not compared with" in note for note in result.notes)


def test_what_it_is_compared_with_must_be_there(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        verify(checkpoint, against=tmp_path / "absent")
