"""Old layouts as they lie on the Hub: through preshard, the three phases and consolidate --base, as `from_pretrained`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.training import old_layouts
from tests.worlds.processes import run_script


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The world proves names, values and logits; what preshard and consolidate said is left to look at."""
    place = tmp_path_factory.mktemp("old")
    run_script("training/old_layouts_world.py", str(place))
    found: dict[str, dict[str, Any]] = json.loads((place / "results.json").read_text())
    return found


@pytest.mark.dist
def test_every_old_layout_goes_there_and_back(told: dict[str, dict[str, Any]]) -> None:
    assert told.keys() == old_layouts.OLD.keys()
    assert {each["preshard"]["layout"] for each in told.values()} == {"traced"}


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
def test_what_preshard_leaves_out_is_named(
    name: str, omitted: list[str], told: dict[str, dict[str, Any]]
) -> None:
    assert sorted(each for each, _ in told[name]["preshard"]["omitted"]) == omitted
    assert all(reason for _, reason in told[name]["preshard"]["omitted"])


@pytest.mark.dist
def test_what_the_model_computes_or_has_no_place_for_is_said(told: dict[str, dict[str, Any]]) -> None:
    assert any("MarianMTModel computes them" in note for note in told["marian"]["preshard"]["notes"])
    notes = "; ".join(told["marian"]["consolidate"]["notes"])
    assert "not written, the model computes them: model.decoder.embed_positions.weight" in notes
    notes = "; ".join(told["bert"]["consolidate"]["notes"])
    assert "has no place for them: bert.pooler" in notes
    assert "every model computes them: bert.embeddings.position_ids" in notes
    (warning,) = told["llama-untied"]["preshard"]["warnings"]
    assert "as from_pretrained does" in warning
    # Its files have two values, before and after: the base is not tied, and nothing has come apart.
    assert told["llama-untied"]["consolidate"]["untied"] == []
    assert not any("tied" in line for line in told["llama-untied"]["consolidate"]["warnings"])
