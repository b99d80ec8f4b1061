"""Key rules through the verbs: stock torch loads what preshard wrote, and what it saved becomes the Hub's files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file

import shardkit
from shardkit.cli import main
from shardkit.errors import LayoutError, UsageError
from shardkit.keys.rule_sets import find_shipped
from shardkit.keys.rules import bind_names
from tests.contents import edit_json, json_of
from tests.keys.test_expressions import evaluate
from tests.keys.trainers import SETS, config, numbered
from tests.operations.consolidate.checkpoints import assert_bit_equal, load, save, training_state, weights
from tests.operations.consolidate.checkpoints import hub as make_model
from tests.osft.factored import K, Q, factored
from tests.worlds.processes import ROOT

tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
NAMES = ["torchtitan-llama3", "torchtitan-qwen3", "torchtune-llama"]
NAMES += ["fms-llama", "megatron-llama", "megatron-mixtral"]


def make(name: str, place: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a small model as on the Hub; return its directory, and its tensors in the trainer's model."""
    model_type, shapes = SETS[name]
    values = numbered(shapes)
    tensors = {key: torch.from_numpy(value).to(torch.int32) for key, value in values.items()}
    hub = make_model(place / "hub", tensors, {**config(model_type), "tie_word_embeddings": False})
    rules = find_shipped(name)
    assert rules is not None
    made = bind_names(rules, shapes, config(model_type), side="hub").expressions
    theirs = {key: np.ascontiguousarray(evaluate(each, values)) for key, each in made.items()}
    return hub, {key: torch.from_numpy(value).to(torch.int32) for key, value in theirs.items()}


@pytest.mark.parametrize("name", NAMES)
def test_stock_torch_loads_a_trainers_own_tensors_and_what_it_saves_becomes_the_hubs(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub, theirs = make(name, tmp_path)
    shardkit.preshard(hub, tmp_path / "sharded", world_size=3, keys=name, wrap="none")
    loaded = {key: torch.zeros_like(value) for key, value in theirs.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "sharded")
    assert all(torch.equal(loaded[key], theirs[key]) for key in theirs)
    assert shardkit.verify(tmp_path / "sharded").ok
    dcp.save(loaded, checkpoint_id=tmp_path / "trained")
    with caplog.at_level("DEBUG", "shardkit"):
        done = shardkit.consolidate(tmp_path / "trained", tmp_path / "back", base=hub)
    assert f"key rules {name} fit all names" in caplog.messages
    assert any(name.partition("-")[0] in note.lower() for note in done.notes)
    assert not done.unloadable
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (hub / "model.safetensors").read_bytes()
    back = shardkit.consolidate(tmp_path / "sharded", tmp_path / "again", base=hub)
    assert not back.unloadable
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (hub / "model.safetensors").read_bytes()


@pytest.mark.parametrize("named", [False, True])
def test_globs_are_about_the_names_that_rules_give(named: bool, tmp_path: Path) -> None:
    hub, theirs = make("megatron-mixtral", tmp_path)
    stray = {"decoder.layers.rotary": torch.zeros(3)} if named else {}
    dcp.save({**theirs, **stray}, checkpoint_id=tmp_path / "trained")
    options: dict[str, Any] = {"keys": "megatron-mixtral"} if named else {}
    expected = load_file(hub / "model.safetensors")
    options |= {"base": hub, "exclude": list(stray), "allow_missing": True, "overwrite": True}
    for include, part in (("*.experts.1.*", ".experts.1."), ("lm_head*", "lm_head")):
        shardkit.consolidate(tmp_path / "trained", tmp_path / "some", include=[include], **options)
        found = load_file(tmp_path / "some" / "model.safetensors")
        assert found.keys() == {name for name in expected if part in name}
        assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("name", ["torchtitan-llama3", "megatron-mixtral"])
@pytest.mark.parametrize("keys", ["auto", None])
def test_a_language_model_is_known_in_the_config_of_a_larger_one(
    name: str, keys: str | None, tmp_path: Path
) -> None:
    """Its numbers are there too, and its names become those of the larger model."""
    hub, theirs = make(name, tmp_path)
    whole = {f"language_model.{key}": value for key, value in load_file(hub / "model.safetensors").items()}
    whole["vision_tower.proj.weight"] = torch.ones(2, 3, dtype=torch.int32)
    base = make_model(tmp_path / "base", whole, {"model_type": "llava", "text_config": json_of(hub)})
    dcp.save({"model": theirs}, checkpoint_id=tmp_path / "trained")
    options = {"base": base, "keys": keys or name, "fill_from_base": ["vision_tower.*"]}
    done = shardkit.consolidate(tmp_path / "trained", tmp_path / "out", **options)
    assert (done.warnings, done.from_base) == ((), ("vision_tower.proj.weight",))
    assert_bit_equal(load(tmp_path / "out"), whole)


@pytest.mark.parametrize("name", ["torchtitan-llama3", "megatron-mixtral"])
def test_all_verbs_find_the_numbers_of_a_language_model_in_the_config_of_a_larger_one(
    name: str, tmp_path: Path
) -> None:
    hub, theirs = make(name, tmp_path)
    larger = {"model_type": "llava", "text_config": json_of(hub)}
    (hub / "config.json").write_text(json.dumps(larger))
    done = shardkit.preshard(hub, tmp_path / "sharded", world_size=1, keys=name, wrap="none", layout="auto")
    assert not any(title(name) in warning for warning in done.warnings)
    read = {key: torch.zeros_like(value) for key, value in theirs.items()}
    dcp.load(read, checkpoint_id=tmp_path / "sharded", no_dist=True)
    model = Tree(theirs)
    shardkit.load_into(model, hub, keys=name)
    for key, value in theirs.items():
        assert torch.equal(read[key], value)
        assert torch.equal(model.state_dict()[key], value)


def test_all_verbs_say_that_rules_are_for_another_architecture(tmp_path: Path) -> None:
    hub, theirs = make("torchtitan-llama3", tmp_path)
    edit_json(hub / "config.json", model_type="phi3")
    dcp.save({"model": theirs}, checkpoint_id=tmp_path / "trained", no_dist=True)
    keys, out = "torchtitan-llama3", str(tmp_path / "out")
    context = shardkit.prepare(lambda: Tree(theirs), hub, keys=keys)
    assert context.weights is not None
    told = [
        shardkit.preshard(hub, out, world_size=1, keys=keys, dry_run=True).warnings,
        shardkit.consolidate(tmp_path / "trained", out, base=hub, keys=keys, dry_run=True).warnings,
        context.weights.notes,
    ]
    for lines in told:
        assert sum("and phi3 is none of these" in line for line in lines) == 1


def test_a_model_that_a_person_built_is_filled_through_rules(tmp_path: Path) -> None:
    hub, theirs = make("torchtitan-llama3", tmp_path)
    model = Tree(theirs)
    shardkit.load_into(model, hub, keys="torchtitan-llama3")
    state = model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in theirs.items())
    context = shardkit.prepare(lambda: Tree(theirs), hub, keys="torchtitan-llama3")
    assert len(context.expected) == len(theirs)
    with pytest.raises(LayoutError):
        shardkit.load_into(Tree(theirs), hub)


def title(name: str) -> str:
    found = find_shipped(name)
    assert found is not None
    return found.title


class Tree(torch.nn.Module):
    """A module for each part of dotted names, with integers as parameters."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in tensors.items():
            *path, leaf = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, torch.nn.Parameter(torch.zeros_like(value), requires_grad=False))


@pytest.mark.parametrize(
    "options", [{"rename": ["^norm=x"]}, {"add_prefix": "m"}, {"strip_prefix": ["tok_embeddings"]}]
)
def test_options_that_rules_would_undo_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    hub, theirs = make("torchtitan-llama3", tmp_path)
    dcp.save(theirs, checkpoint_id=tmp_path / "trained")
    options |= {"base": hub, "keys": "torchtitan-llama3"}
    with pytest.raises(UsageError, match="would have no effect"):
        shardkit.consolidate(tmp_path / "trained", tmp_path / "back", **options)
    assert not (tmp_path / "back").exists()


def test_without_a_config_the_reason_is_said_and_nothing_is_permuted(tmp_path: Path) -> None:
    """One true statement: not that no rule set has the names."""
    _, theirs = make("torchtitan-llama3", tmp_path)
    dcp.save(theirs, checkpoint_id=tmp_path / "trained")
    planned = shardkit.consolidate(tmp_path / "trained", tmp_path / "back", dry_run=True)
    done = shardkit.consolidate(tmp_path / "trained", tmp_path / "back")
    assert planned.warnings == done.warnings
    (said,) = done.warnings
    assert said.startswith("the names are torchtitan's own")
    assert said.endswith("; add --base MODEL")
    assert done.unloadable == done.warnings
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(written[key], theirs[key]) for key in theirs)


def test_rules_that_do_not_fit_are_refused_before_a_byte_moves(tmp_path: Path) -> None:
    hub, theirs = make("torchtitan-llama3", tmp_path)
    rules = tmp_path / "rules.toml"
    rules.write_text('format = 1\n[[rule]]\nhub = "model.norm.weight"\nmodel = "norm.weight"\n')
    with pytest.raises(LayoutError) as caught:
        shardkit.preshard(hub, tmp_path / "sharded", world_size=2, keys=rules)
    assert len(caught.value.problems) == len(theirs) - 1
    assert not (tmp_path / "sharded").exists()
    dcp.save(theirs, checkpoint_id=tmp_path / "trained")
    with pytest.raises(LayoutError):
        shardkit.consolidate(tmp_path / "trained", tmp_path / "back", base=hub, keys=rules)
    assert not (tmp_path / "back").exists()
    with pytest.raises(UsageError, match="no rule set of that name") as unknown:
        shardkit.preshard(hub, tmp_path / "sharded", world_size=2, keys="torchtitan-lama3")
    assert "torchtitan-llama3" in str(unknown.value)
    with pytest.raises(UsageError, match=r"^rules\.tml: no such file"):
        shardkit.preshard(hub, tmp_path / "sharded", world_size=2, keys="rules.tml", dry_run=True)


def test_a_dry_run_shows_every_name_and_who_decided_it(tmp_path: Path) -> None:
    hub, theirs = make("torchtitan-qwen3", tmp_path)
    dcp.save(theirs, checkpoint_id=tmp_path / "trained")
    out, trained = str(tmp_path / "out"), str(tmp_path / "trained")
    expert = "model.layers.1.mlp.experts.2.up_proj.weight"
    stacked = "layers.1.moe.routed_experts.inner_experts.w3_EFD"

    def names(*typed: str) -> dict[str, dict[str, Any]]:
        shown = CliRunner().invoke(main, [*typed, "--dry-run", "--json", "--quiet"])
        assert shown.exit_code == 0, shown.output
        return {tensor["name"]: tensor for tensor in json.loads(shown.stdout)["names"]}

    for rules, by in (("torchtitan-qwen3", "person"), ("auto", "shipped rules")):
        found = names("consolidate", trained, out, "--base", str(hub), "--keys", rules)
        assert found.keys() == load_file(hub / "model.safetensors").keys()
        assert found[expert] == {"name": expert, "by": by, "sources": [stacked]}
    words = ("preshard", str(hub), out, "--world-size", "2", "--wrap", "none")
    found = names(*words, "--keys", "torchtitan-qwen3")
    assert found.keys() == theirs.keys()
    part = "model.layers.1.mlp.experts.{0..2}.up_proj.weight"
    assert found[stacked] == {"name": stacked, "by": "person", "sources": [part]}
    assert {tensor["by"] for tensor in names(*words, "--layout", "declared").values()} == {"equal names"}
    assert not shardkit.consolidate(trained, out, base=hub).names


def test_names_are_by_the_manifest_of_what_preshard_wrote(tmp_path: Path) -> None:
    hub, _ = make("torchtitan-llama3", tmp_path)
    sharded = tmp_path / "sharded"
    shardkit.preshard(hub, sharded, world_size=2, layout="declared")
    done = shardkit.consolidate(sharded, tmp_path / "out", dry_run=True)
    assert {tensor.by for tensor in done.names} == {"manifest"}
    done = shardkit.consolidate(sharded, tmp_path / "out", add_prefix="m", dry_run=True)
    assert {tensor.by for tensor in done.names} == {"person"}


def test_numbers_of_both_sides_are_folded_alike(tmp_path: Path) -> None:
    """Layers and experts as in every other list; -v has each tensor."""
    hub, theirs = make("torchtitan-qwen3", tmp_path)
    dcp.save(theirs, checkpoint_id=tmp_path / "trained")
    words = ["consolidate", str(tmp_path / "trained"), str(tmp_path / "out"), "--base", str(hub), "--dry-run"]
    said = CliRunner().invoke(main, words).output
    router = "model.layers.{0,1}.mlp.gate.weight = layers.{0,1}.moe.router.gate.weight (shipped rules)\n"
    assert router in said
    of_experts = "layers.{0,1}.moe.routed_experts.inner_experts.w3_EFD (shipped rules)"
    assert f"model.layers.{{0,1}}.mlp.experts.{{0..2}}.up_proj.weight = {of_experts}" in said
    whole = CliRunner().invoke(main, [*words, "-v"]).output
    assert "model.layers.1.mlp.gate.weight = layers.1.moe.router.gate.weight (shipped rules)\n" in whole


def test_rules_that_match_nothing_are_a_mistake_of_the_command(tmp_path: Path) -> None:
    hub, theirs = make("torchtitan-llama3", tmp_path)
    dcp.save(theirs, checkpoint_id=tmp_path / "trained", no_dist=True)
    rules, out = str(tmp_path / "rules.toml"), str(tmp_path / "out")
    text = (ROOT / "shardkit/keys/shipped/torchtitan-llama3.toml").read_text()
    text = text.replace("optional = true", "")
    Path(rules).write_text(f'{text}\n[[rule]]\nhub = "a.{{i}}"\nmodel = "b.{{i}}"\n')
    for typed in (
        ["preshard", str(hub), out, "--world-size", "2"],
        ["consolidate", str(tmp_path / "trained"), out, "--base", str(hub)],
    ):
        answer = CliRunner().invoke(main, [*typed, "--keys", rules, "--dry-run"])
        assert (answer.exit_code, "(a.{i} = b.{i}): matches nothing" in answer.output) == (2, True)
    with pytest.raises(UsageError, match="do not fit"):
        shardkit.load_into(Tree(theirs), hub, keys=rules)


def test_factors_are_named_as_the_weights_that_they_are(tmp_path: Path) -> None:
    state = factored(weights())
    source = save(training_state(state), tmp_path / "step-3")
    shown = shardkit.consolidate(source, tmp_path / "out", dry_run=True).names
    assert {f"{Q}.weight", f"{K}.weight"} < {tensor.name for tensor in shown}
    assert not any("osft" in name for tensor in shown for name in (tensor.name, *tensor.sources))


def test_the_schema_takes_the_shipped_sets_and_refuses_mistakes() -> None:
    schema = json.loads((ROOT / "docs/keys.schema.json").read_text())
    files = sorted((ROOT / "shardkit/keys/shipped").glob("*.toml"))
    assert {path.stem for path in files} == SETS.keys()
    for path in files:
        jsonschema.validate(tomllib.loads(path.read_text()), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"format": 1, "rule": [{"hub": "a"}]}, schema)


def test_every_shipped_set_is_documented() -> None:
    text = (ROOT / "docs/keys.md").read_text()
    assert all(f"`{name}`" in text for name in SETS)
