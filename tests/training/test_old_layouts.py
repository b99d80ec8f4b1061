"""Old layouts as they lie on the Hub: through preshard, the three phases and consolidate --base, as `from_pretrained`.

In the ranks' folder lie then, of each model, NAME (the Hub directory), NAME-pre (pre-sharded), NAME-run (saved by stock
torch after the three phases), and NAME.json: what preshard said.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardkit
from shardkit.layout import traced
from shardkit.training.finalize import finalize
from shardkit.training.prepare import prepare
from shardkit.training.wrap import wrap
from tests.formats.dcp.samples import quiet
from tests.training import old_layouts
from tests.worlds.processes import forked_trace
from tests.worlds.ranks import Ranks

pytestmark = pytest.mark.prove

MODES = (("", "direct"), ("", "broadcast"), ("-pre", "direct"))


def preshard_all(out: Path) -> None:
    with mock.patch.object(traced, "_serve_request", forked_trace):
        for name in old_layouts.OLD:
            old_layouts.write(name, out / name)
            result = shardkit.preshard(out / name, out / f"{name}-pre", world_size=2)
            (out / f"{name}.json").write_text(json.dumps(result.to_json()))


two = Ranks(__name__, 2, first=preshard_all)


@two.test_each(tuple(old_layouts.OLD))
def test_two_ranks_start_as_from_pretrained(name: str, out: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    judged, expected = old_layouts.judge(name, out / name)
    inputs = old_layouts.inputs(judged)
    with torch.no_grad():
        logits = judged(**inputs).logits
    for ending, strategy in MODES:
        context = prepare(str(out / name), str(out / f"{name}{ending}"))
        model = finalize(wrap(context.model, mesh, mixed_precision=None), context, strategy=strategy)
        state = get_model_state_dict(model)
        whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}
        assert whole.keys() == expected.keys(), (ending, strategy)
        wrong = [fqn for fqn, value in whole.items() if not torch.equal(value, expected[fqn])]
        assert not wrong, (ending, strategy)
        with torch.no_grad():
            assert torch.equal(model.eval()(**inputs).logits, logits), (ending, strategy)
    dcp.save({"model": state}, checkpoint_id=out / f"{name}-run")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two.folder(tmp_path_factory)


def said_by_preshard(name: str, out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    return found


@pytest.mark.dist
@pytest.mark.parametrize("name", old_layouts.OLD)
def test_stock_torch_loads_what_preshard_wrote(name: str, out: Path) -> None:
    """Into the state dict of the live model; what the model computes stays."""
    assert said_by_preshard(name, out)["layout"] == "traced"
    _, expected = old_layouts.judge(name, out / name)
    state = {fqn: torch.full_like(value, 7) for fqn, value in expected.items()}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=name == "marian")
    with quiet():
        dcp.load(state, checkpoint_id=out / f"{name}-pre", no_dist=True, planner=planner)
    wrong = {fqn for fqn, value in state.items() if not torch.equal(value, expected[fqn])}
    assert wrong == ({fqn for fqn in expected if "embed_positions" in fqn} if name == "marian" else set())


SAID = {
    "bert": [", the model computes them or has no place for them: bert.embeddings.position_ids, bert.pooler"],
    "marian": ["not written, the model computes them: model.decoder.embed_positions.weight"],
}


def _names(directory: Path) -> set[str]:
    with safe_open(directory / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.dist
@pytest.mark.parametrize("name", old_layouts.OLD)
def test_what_was_saved_becomes_a_hub_model_with_the_names_of_the_base(
    name: str, out: Path, tmp_path: Path
) -> None:
    result = shardkit.consolidate(out / f"{name}-run", tmp_path / "out", base=out / name)
    _, expected = old_layouts.judge(name, out / name)
    _, found = old_layouts.judge(name, tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[fqn], value) for fqn, value in expected.items())
    notes = "; ".join(result.notes)
    assert all(note in notes for note in SAID.get(name, ()))
    assert name != "bert" or _names(tmp_path / "out") == _names(out / name)
    # The files of llama-untied have two values, before and after: the base is not tied, and nothing has come apart.
    assert name != "llama-untied" or not result.untied
    assert name != "llama-untied" or not any("tied" in line for line in result.warnings)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "omitted"),
    [
        ("gpt2", ["h.0.attn.bias", "h.0.attn.masked_bias", "h.1.attn.bias", "h.2.attn.bias"]),
        (
            "bert",
            [
                "bert.embeddings.position_ids",
                "bert.pooler.dense.bias",
                "bert.pooler.dense.weight",
                "cls.seq_relationship.bias",
                "cls.seq_relationship.weight",
            ],
        ),
        ("llama", [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(3)]),
        ("llama-untied", []),
        ("marian", []),
        ("marian-all", []),
    ],
)
def test_what_preshard_leaves_out_is_named(name: str, omitted: list[str], out: Path) -> None:
    said = said_by_preshard(name, out)
    assert sorted(each for each, _ in said["omitted"]) == omitted
    assert all(reason for _, reason in said["omitted"])


@pytest.mark.dist
def test_what_the_model_computes_or_has_twice_is_said(out: Path) -> None:
    assert any("MarianMTModel computes them" in note for note in said_by_preshard("marian", out)["notes"])
    (warning,) = said_by_preshard("llama-untied", out)["warnings"]
    assert "as from_pretrained does" in warning
