"""Models whose names in memory are not the Hub's: what training saves becomes the Hub model it started from."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.numpy import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import shardkit
from shardkit.errors import IntegrityError, LayoutError
from shardkit.files import manifest
from shardkit.training.fill.reading import HubNaming, Weights
from shardkit.training.fill.source import find_weights, key_rules, open_source, recall, remember
from shardkit.training.finalize import finalize, load_into
from shardkit.training.prepare import prepare
from shardkit.training.ranks.local import describe_tensors
from shardkit.training.save import save
from shardkit.training.wrap import wrap
from tests.operations.consolidate.checkpoints import assert_bit_equal, load
from tests.training import models
from tests.training.wrapping import full
from tests.worlds.ranks import Ranks

pytestmark = [pytest.mark.prove, pytest.mark.usefixtures("fast_trace")]

QWEN_VL = [("model.language_model.", "model."), ("model.visual.", "visual.")]
LLAVA_TIED = [
    ("model.language_model.", "language_model.model."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.vision_tower.", "vision_tower."),
]
RULES = {
    "qwen2-vl": QWEN_VL,
    "qwen2-vl-tied": QWEN_VL,
    "qwen2.5-vl": QWEN_VL,
    "llava": [("lm_head.", "language_model.lm_head."), *LLAVA_TIED],
    "llava-tied": LLAVA_TIED,
    "qwen3-vl": [],
    "gpt-neox": [("lm_head.", "embed_out.")],
}


TWICE = ("qwen2-vl", "llava-tied")


class Task(nn.Module):
    """As a LightningModule has its model."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


def make_hub(out: Path) -> None:
    for name in RULES:
        models.save(name, out / name)


two = Ranks(__name__, 2, first=make_hub)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each model as a Hub directory, NAME, and what two ranks saved of it: NAME-dcp by stock torch, NAME-saved by shardkit.

    Of some there is NAME-flat too (no dict around the names), and NAME-again (saved once more, from what was saved).
    """
    return two.folder(tmp_path_factory)


def start(hub: Path, source: Path) -> nn.Module:
    ctx = prepare(str(hub), str(source))
    model = wrap(ctx.model, init_device_mesh("cpu", (2,)), mixed_precision=None)
    return finalize(model, ctx)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(value) for name, value in get_model_state_dict(model).items()}


@two.test_each(RULES.keys())
def test_training_saves_a_model_with_other_names(name: str, out: Path) -> None:
    model = start(out / name, out / name)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=out / f"{name}-dcp")
    save(model, out / f"{name}-saved")


@two.test_each(TWICE)
def test_training_goes_on_from_what_was_saved(name: str, out: Path) -> None:
    model = start(out / name, out / name)
    dcp.save(get_model_state_dict(model), checkpoint_id=out / f"{name}-flat")
    again = start(out / name, out / f"{name}-saved")
    save(again, out / f"{name}-again")
    save(Task(again), out / f"{name}-task")
    expected, found = whole(model), whole(again)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    load_into(model, out / f"{name}-dcp")
    assert all(torch.equal(expected[key], value) for key, value in whole(model).items())


def assert_is(found: Path, hub: Path) -> None:
    """Names, dtypes and bits."""
    assert_bit_equal(load(found), load(hub))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "kind"),
    [*itertools.product(RULES, ["dcp", "saved"]), ("qwen2-vl", "flat"), ("llava-tied", "flat")],
)
def test_a_base_gives_its_names(out: Path, name: str, kind: str, tmp_path: Path) -> None:
    """Saved by `dcp.save`, nested or not, and by `shardkit.save`."""
    done = shardkit.consolidate(out / f"{name}-{kind}", tmp_path / "hub", base=out / name, manifest=True)
    assert_is(tmp_path / "hub", out / name)
    assert [rule[:2] for rule in done.renamed] == RULES[name]
    assert done.warnings == ()
    assert [part for part in done.skipped if part.num_tensors] == []
    described = manifest.load(manifest.read_bytes(str(tmp_path / "hub")), manifest.NAME)
    assert described is not None
    assert [tuple(rule) for rule in described["key_rules"]] == [*done.stripped, *done.renamed]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "kind"), [*itertools.product(RULES, ["saved"]), ("qwen2-vl", "again"), ("llava-tied", "again")]
)
def test_what_shardkit_saved_knows_the_names(out: Path, name: str, kind: str, tmp_path: Path) -> None:
    """Without a base; also when it was started from what was saved before."""
    said = json.loads((out / f"{name}-{kind}" / "shardkit.json").read_text())
    assert [tuple(rule) for rule in said["key_rules"]] == RULES[name]
    done = shardkit.consolidate(out / f"{name}-{kind}", tmp_path / "hub")
    assert_is(tmp_path / "hub", out / name)
    assert [rule[:2] for rule in done.renamed] == RULES[name]
    assert done.warnings == ()


@pytest.mark.dist
@pytest.mark.parametrize("name", TWICE)
def test_a_model_below_another_keeps_its_names(out: Path, name: str, tmp_path: Path) -> None:
    done = shardkit.consolidate(out / f"{name}-task", tmp_path / "hub")
    assert_is(tmp_path / "hub", out / name)
    assert done.warnings == ()


@pytest.mark.dist
def test_transformers_loads_it(out: Path, tmp_path: Path) -> None:
    shardkit.consolidate(out / "llava-dcp", tmp_path / "hub", base=out / "llava")
    kind = transformers.LlavaForConditionalGeneration
    model, info = kind.from_pretrained(tmp_path / "hub", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = kind.from_pretrained(out / "llava").state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


@pytest.mark.dist
def test_another_base_is_refused(out: Path, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="does not fit") as caught:
        shardkit.consolidate(out / "llava-dcp", tmp_path / "hub", base=out / "qwen2-vl")
    assert "rename" in str(caught.value)
    assert not (tmp_path / "hub").exists()


@pytest.mark.dist
def test_a_damaged_manifest_is_no_licence_to_guess(out: Path, tmp_path: Path) -> None:
    place = tmp_path / "saved"
    shutil.copytree(out / "llava-saved", place)
    text = (place / "shardkit.json").read_text()
    (place / "shardkit.json").write_text(text.replace('"lm_head."', '"lm_tail."'))
    with pytest.raises(IntegrityError, match="has been changed"):
        shardkit.consolidate(place, tmp_path / "hub")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_fused_experts_become_single_ones_with_a_base_and_are_warned_of_without(tmp_path: Path) -> None:
    model = models.save("qwen3-moe", tmp_path / "moe")
    save(model, tmp_path / "saved")
    done = shardkit.consolidate(tmp_path / "saved", tmp_path / "hub", base=tmp_path / "moe")
    assert_is(tmp_path / "hub", tmp_path / "moe")
    (split,) = done.split
    assert split.are_experts
    assert split.num_tensors > split.num_stored > 0
    assert f"{split.num_stored} expert tensors into {split.num_tensors}" in str(done)
    assert done.notes == ()
    done = shardkit.consolidate(tmp_path / "saved", tmp_path / "own-config")
    assert_is(tmp_path / "own-config", tmp_path / "moe")
    shutil.rmtree(tmp_path / "saved/huggingface")
    done = shardkit.consolidate(tmp_path / "saved", tmp_path / "bare")
    assert any("experts fused" in warning for warning in done.warnings)
    assert done.renamed == ()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_each_save_knows_the_hubs_form(tmp_path: Path) -> None:
    """Also one of a training that began with what `save` wrote."""
    models.save("qwen3-moe", tmp_path / "moe")
    source = tmp_path / "moe"
    for turn in ("once", "twice"):
        ctx = prepare(str(tmp_path / "moe"), str(source))
        source = tmp_path / turn
        save(finalize(ctx.model, ctx), source)
        shutil.rmtree(source / "huggingface")
        shardkit.consolidate(source, tmp_path / f"{turn}-hub")
        assert_is(tmp_path / f"{turn}-hub", tmp_path / "moe")


def test_an_adapters_names_are_not_renamed() -> None:
    assert key_rules({"base_model.model.a.q.base_layer.weight": "b.q.weight"}) is None
    assert key_rules({"a.q.weight": "b.q.weight"}) == (("a.", "b."),)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_rules_stay_with_a_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert recall(model) is None
    save(model, tmp_path / "none")
    assert "key_rules" not in json.loads((tmp_path / "none" / "shardkit.json").read_text())
    remember(model, _weights((("0.", "net."),)))
    remember(model, _weights(None))  # a source that knows nothing
    remember(model, None)
    expected = HubNaming((("0.", "net."),), {})
    assert recall(model) == expected
    assert recall(_Compiled(model)) == expected
    assert recall(nn.Sequential(model)) is None  # a part of another model: its names are others
    assert recall(nn.Sequential(model), ["0.0.weight", "1.weight"]) is None
    assert recall(nn.Sequential(model), ["0.0.weight", "0.0.bias"]) == HubNaming((("0.0.", "net."),), {}, [])
    assert "_shardkit_key_rules" not in model.state_dict()
    save(model, tmp_path / "some")
    done = shardkit.consolidate(tmp_path / "some", tmp_path / "hub")
    assert load_file(tmp_path / "hub" / "model.safetensors").keys() == {"net.weight", "net.bias"}
    assert done.renamed == (("0.", "net.", 2),)


def test_ties_that_are_no_embeddings_and_heads_come_from_the_manifest(tmp_path: Path) -> None:
    """ProphetNet's encoder and decoder share their embedding with the model; the Hub has it once."""
    sizes: dict[str, int] = {"vocab_size": 31, "hidden_size": 8, "max_position_embeddings": 16}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_ffn_dim": 8, f"num_{side}_layers": 1, f"num_{side}_attention_heads": 2}
    config = transformers.ProphetNetConfig(**sizes)
    transformers.ProphetNetForConditionalGeneration(config).save_pretrained(tmp_path / "hub")
    shardkit.preshard(tmp_path / "hub", tmp_path / "pre", world_size=2)
    shardkit.reshard(tmp_path / "pre", tmp_path / "three", world_size=3)
    for name in ("pre", "three"):
        result = shardkit.consolidate(tmp_path / name, tmp_path / f"{name}-hub", ask_class=False)
        assert_is(tmp_path / f"{name}-hub", tmp_path / "hub")
        assert result.warnings == ()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_rules_outlive_reshard(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    remember(model, _weights((("0.", "net."), ("1.", "head."))))
    save(model, tmp_path / "saved", optimizer=torch.optim.AdamW(model.parameters()))
    shardkit.reshard(tmp_path / "saved", tmp_path / "two", world_size=2)
    shardkit.reshard(tmp_path / "two", tmp_path / "three", world_size=3)
    for name in ("saved", "two", "three"):
        shardkit.consolidate(tmp_path / name, tmp_path / f"{name}-hub")
        assert_is(tmp_path / f"{name}-hub", tmp_path / "saved-hub")
        weights = find_weights(open_source(str(tmp_path / name)), describe_tensors(model)[0])
        assert weights.naming.key_rules == (("0.", "net."), ("1.", "head.")), name
    assert shardkit.verify(tmp_path / "three").ok


class _Compiled(nn.Module):
    """As torch.compile wraps a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def _weights(rules: Any) -> Weights:
    from shardkit.core.catalog import Catalog

    naming = None if rules is None else HubNaming(rules, {})
    return Weights(path="", catalog=Catalog(format="", directory=""), names={}, identity="", naming=naming)
