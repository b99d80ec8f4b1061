"""A state dict in the memory of one rank: every other rank gets its shards, or all get one error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardkit.files import manifest
from tests.worlds.processes import run_script

CHECKS = [
    *((1, name) for name in ("plain", "odd")),
    *((3, name) for name in ("odd", "tied model", "compiled", "experts", "buffers")),
    *((3, name) for name in ("replicated", "hub names", "missing", "load_into")),
    (4, "hybrid"),
]
# name: (class, what message or problems say)
REFUSED = {
    "nobody has it": ("UsageError", "rank 1: None, though it is the rank that is named"),
    "another has it": ("UsageError", "rank 2: a state dict; it would be ignored"),
    "the wrong one has it": ("UsageError", "rank 0: a state dict; it would be ignored"),
    "two are named": ("UsageError", "rank 1: from_rank(..., rank=1)"),
    "another kind": ("UsageError", "rank 0: another kind of source"),
    "no such rank": ("UsageError", "rank=3 is none of the 3 ranks"),
    "no number": ("UsageError", "rank='0' is none of the 3 ranks"),
    "missing": ("LayoutError", "missing: model.norm.weight [24]"),
    "unexpected": ("LayoutError", "unexpected: model.layers.9.mlp.up_proj.weight [3]"),
    "shape": ("LayoutError", "shape: model.norm.weight: [24] in the model, [5] in the source"),
    "dtype": ("LayoutError", "dtype: model.norm.weight: float32 in the model, int64 in the source"),
    "dtensor": ("SourceError", "model.norm.weight: a DTensor"),
    "nested": ("UsageError", "checkpoint['model']"),
    "empty": ("UsageError", "none of 0 entries is a tensor"),
    "no names": ("UsageError", "keys that are not text"),
    "a list": ("UsageError", "found list"),
    "fsdp1": ("UsageError", "wrapped by FSDP1"),
    "revision": ("UsageError", "a state dict has none"),
    "direct": ("SourceError", "rank 0: rank 1 alone holds the state dict"),
    "node": ("SourceError", "rank 2: rank 1 alone holds the state dict"),
    "freed": ("IntegrityError", "model.norm.weight of the state dict has no memory any more"),
    "load_into": ("LayoutError", "missing: bias [4]"),
    "load_into nobody": ("UsageError", "rank 1: None, though it is the rank that is named"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("from-rank")
    run_script("training/from_rank_world.py", str(out))
    return out


def told(world: Path, size: int) -> list[dict[str, Any]]:
    return [json.loads((world / f"{size}-{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.dist
@pytest.mark.parametrize(("size", "name"), CHECKS)
def test_every_rank_has_its_part(world: Path, size: int, name: str) -> None:
    assert [each[name] for each in told(world, size)] == [""] * size


@pytest.mark.dist
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_told_to_all_ranks(world: Path, name: str) -> None:
    kind, text = REFUSED[name]
    found = [each["refused"][name] for each in told(world, 3)]
    assert found == [found[0]] * 3
    assert found[0]["error"] == kind
    assert text in json.dumps(found[0], ensure_ascii=False)


@pytest.mark.dist
def test_every_refusal_was_tried(world: Path) -> None:
    assert told(world, 3)[0]["refused"].keys() == REFUSED.keys()


@pytest.mark.dist
def test_names_of_the_hub_are_kept_where_they_are_known(world: Path) -> None:
    """A model's own names tell nothing of the Hub's."""
    rules = [
        manifest.load(manifest.read_bytes(str(world / name)), manifest.NAME)
        for name in ("saved-vl", "saved-own")
    ]
    assert rules[0] is not None
    assert rules[0]["key_rules"]
    assert not (rules[1] or {}).get("key_rules")
