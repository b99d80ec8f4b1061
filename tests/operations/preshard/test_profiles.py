"""Directories in the form of a trainer: what shardkit itself reads in them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import shardkit
from shardkit.cli.preshard import render
from shardkit.errors import Interrupted, SourceError, UsageError
from shardkit.operations import environment
from tests.cases import but_first
from tests.contents import contents, json_of
from tests.models.zoo import ZOO, from_pretrained, make_hub
from tests.operations.consolidate.checkpoints import assert_bit_equal, load
from tests.operations.stops import InterruptAfter

MakeHub = Callable[..., Path]
FOLDER = {"accelerate": "pytorch_model_fsdp_0", "lightning": "", "lightning-mp": "", "transformers": ""}
CAUSAL = {"architectures": ["TinyForCausalLM"]}  # no model_type: declared, without a child process

# torch saves in one process, as asked.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hub") / "hub"
    make_hub(ZOO["qwen3_moe"], directory)
    return directory


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose experts are fused in memory, below another name."""
    directory = tmp_path_factory.mktemp("mixtral") / "hub"
    make_hub(ZOO["mixtral"], directory)
    return directory


@pytest.mark.parametrize("profile", but_first(FOLDER))
def test_renamed_and_fused_experts_come_back_byte_for_byte(
    profile: str, mixtral: Path, tmp_path: Path, fast_trace: object
) -> None:
    out = tmp_path / "out"
    shardkit.preshard(mixtral, out, world_size=2, profile=profile)
    assert shardkit.verify(out, full=True).problems == ()
    assert shardkit.diff(out, mixtral).is_equal
    sources = [out, out / FOLDER[profile], tmp_path / "other"]
    shardkit.reshard(out, sources[-1], world_size=3)
    for source in dict.fromkeys(sources):
        back = tmp_path / f"back-{source.name}"
        shardkit.consolidate(source, back)
        assert_bit_equal(load(back), load(mixtral))


@pytest.mark.parametrize("profile", but_first(FOLDER))
def test_a_model_is_loaded_from_it_and_saved_under_the_names_of_the_hub(
    profile: str, mixtral: Path, tmp_path: Path, fast_trace: object
) -> None:
    out = tmp_path / "out"
    shardkit.preshard(mixtral, out, world_size=2, profile=profile)
    expected = from_pretrained(ZOO["mixtral"], mixtral).state_dict()
    for source in dict.fromkeys((out, out / FOLDER[profile])):
        model = from_pretrained(ZOO["mixtral"], mixtral)
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        shardkit.load_into(model, source)
        assert_bit_equal(model.state_dict(), expected)
        saved = tmp_path / f"saved-{source.name}"
        shardkit.save(model, saved)
        shardkit.consolidate(saved, tmp_path / f"back-{source.name}")
        assert shardkit.diff(tmp_path / f"back-{source.name}", mixtral).is_equal


def test_what_torch_converts_to_one_file_is_nested(make_hub: MakeHub, tmp_path: Path) -> None:
    tensors = {"layers.0.weight": torch.randn(5, 3), "layers.1.weight": torch.randn(5, 3)}
    model = make_hub(tensors, config=CAUSAL)
    shardkit.preshard(model, tmp_path / "out", world_size=2, profile="accelerate")
    dcp_to_torch_save(tmp_path / "out" / "pytorch_model_fsdp_0", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert found.keys() == {"model"}
    assert found["model"].keys() == tensors.keys()


def test_bytes_of_tensors_are_those_of_the_plain_form(make_hub: MakeHub, tmp_path: Path) -> None:
    model = make_hub({"layers.0.weight": torch.randn(5, 3)}, config=CAUSAL)
    shardkit.preshard(model, tmp_path / "plain", world_size=2)
    shardkit.preshard(model, tmp_path / "accelerate", world_size=2, profile="accelerate")
    for name in ("__0_0.distcp", "__1_0.distcp"):
        same = tmp_path / "accelerate" / "pytorch_model_fsdp_0" / name
        assert (tmp_path / "plain" / name).read_bytes() == same.read_bytes()


@pytest.mark.parametrize(
    ("attribute", "before"), [(None, "model.model."), ("net", "model.net."), ("", "model.")]
)
def test_the_attribute_of_a_lightning_module_is_a_part_of_the_names(
    attribute: str | None, before: str, make_hub: MakeHub, tmp_path: Path
) -> None:
    model = make_hub({"layers.0.weight": torch.randn(5, 3)}, config=CAUSAL)
    shardkit.preshard(model, tmp_path / "out", world_size=2, profile="lightning", attribute=attribute)
    assert list(manifest_of(tmp_path / "out")["tensors"]) == [f"{before}layers.0.weight"]
    meta = torch.load(tmp_path / "out" / "meta.pt", weights_only=True)
    assert meta == {"epoch": 0, "global_step": 0, "pytorch-lightning_version": "2.6.6"}
    assert shardkit.diff(tmp_path / "out", model).is_equal


@pytest.mark.parametrize("profile", ["accelerate", "transformers"])
def test_it_replaces_itself_alone(profile: str, make_hub: MakeHub, tmp_path: Path) -> None:
    model = make_hub({"layers.0.weight": torch.randn(5, 3)}, config=CAUSAL)
    write = {"world_size": 2, "profile": profile}
    first = shardkit.preshard(model, tmp_path / "out", **write)  # type: ignore[arg-type]
    assert (first.profile, first.num_files) == (profile, 2)
    assert shardkit.preshard(model, tmp_path / "out", exist_ok=True, **write).was_there  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="exists"):
        shardkit.preshard(model, tmp_path / "out", **write, dtype="bf16")  # type: ignore[arg-type]
    shardkit.preshard(model, tmp_path / "out", overwrite=True, **write)  # type: ignore[arg-type]
    assert shardkit.verify(tmp_path / "out", full=True).problems == ()


@pytest.mark.parametrize("profile", ["accelerate", "transformers"])
def test_an_interrupted_run_goes_on(profile: str, make_hub: MakeHub, tmp_path: Path) -> None:
    model = make_hub({f"layers.{n}.weight": torch.randn(5, 3) for n in range(30)}, config=CAUSAL)
    stop = InterruptAfter(40)
    with pytest.raises(Interrupted):
        shardkit.preshard(model, tmp_path / "out", world_size=3, profile=profile, jobs=1, progress=stop)
    assert not (tmp_path / "out").exists()
    result = shardkit.preshard(model, tmp_path / "out", world_size=3, profile=profile)
    assert result.resumed_files > 0
    shardkit.preshard(model, tmp_path / "whole", world_size=3, profile=profile)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_the_manifest_lists_tied_names(tmp_path: Path, fast_trace: object) -> None:
    make_hub(ZOO["llama+tied"], tmp_path / "hub")
    out = tmp_path / "out"
    shardkit.preshard(tmp_path / "hub", out, world_size=2, profile="transformers")
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= manifest_of(out)["tensors"].keys()
    assert shardkit.verify(out, full=True).problems == ()
    assert shardkit.diff(out, tmp_path / "hub").is_equal


def test_torchtitan_has_its_own_names(hub: Path, tmp_path: Path) -> None:
    shardkit.preshard(hub, tmp_path / "out", world_size=2, profile="torchtitan")
    assert "layers.0.attention.qkv_linear.wq.weight" in manifest_of(tmp_path / "out")["tensors"]
    shardkit.preshard(hub, tmp_path / "old", world_size=2, profile="torchtitan", keys="torchtitan-qwen3-0.2")
    assert "layers.0.attention.wq.weight" in manifest_of(tmp_path / "old")["tensors"]


def test_what_stock_torch_fills_wrong_is_refused(hub: Path, tmp_path: Path, fast_trace: object) -> None:
    with pytest.raises(UsageError, match="fills 2 tensors wrong") as caught:
        shardkit.preshard(hub, tmp_path / "out", mesh="dp_shard=2,tp=2", profile="accelerate")
    assert all(name.endswith("mlp.experts.gate_up_proj") for name in caught.value.problems)


def test_what_a_profile_cannot_have_is_refused(make_hub: MakeHub, tmp_path: Path) -> None:
    tensors = {"layers.0.weight": torch.randn(5, 3)}
    plain = make_hub(tensors, config=CAUSAL, name="plain")
    old = make_hub(tensors, config={"model_type": "llama4"}, name="old")

    def refused(model: Path, **options: str) -> UsageError:
        with pytest.raises(UsageError) as caught:
            shardkit.preshard(model, tmp_path / "out", world_size=2, **options)  # type: ignore[arg-type]
        assert not (tmp_path / "out").exists()
        return caught.value

    bare = make_hub(tensors, name="bare")
    with pytest.raises(SourceError, match="there is no config"):
        shardkit.preshard(bare, tmp_path / "out", world_size=2, profile="transformers", wrap="none")
    assert "closest name: accelerate" in refused(plain, profile="acelerate").message
    assert "there is no module around the model" in refused(plain, attribute="net").message
    assert refused(plain, profile="verl").hint == "verl starts from the Hub's files"
    unknown = refused(plain, profile="torchtitan")
    assert "without a model_type" in unknown.message
    assert len(unknown.problems) > 5
    (problem,) = refused(old, profile="torchtitan").problems
    assert problem.split(":")[0] == "torchtitan-llama4-0.2"


@pytest.mark.parametrize(
    ("config", "loader"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"architectures": ["KimiK25ForConditionalGeneration"]}, "KimiK25ForConditionalGeneration"),
        ({"architectures": ["Own"], "auto_map": {"AutoConfig": "a.b", "AutoModelForCausalLM": "a.Own"}}, "AutoModelForCausalLM"),
        ({"architectures": ["os; import x"], "auto_map": ["AutoModel"]}, "AutoModel"),
        ({}, "AutoModel"),
    ],
)  # fmt: skip
def test_who_loads_it_is_the_class_of_the_config(
    config: dict[str, object], loader: str, make_hub: MakeHub, tmp_path: Path
) -> None:
    hub = make_hub({"a": torch.ones(4)}, config=config)
    result = shardkit.preshard(hub, tmp_path / "out", world_size=2, profile="transformers", wrap="none")
    assert result.loader == loader
    assert f"  transformers: {loader}.from_pretrained(" in render(result)


def test_versions_of_a_traced_layout_are_recorded(
    hub: Path, tmp_path: Path, fast_trace: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {name: environment.package_version(name) for name in ("torch", "transformers")}
    for name, version, there in (("old", "4.57.6", True), ("new", installed["transformers"], False)):
        versions = installed | {"transformers": version}
        with monkeypatch.context() as patch:
            patch.setattr(environment, "package_version", versions.get)
            result = shardkit.preshard(hub, tmp_path / name, world_size=2)
        assert any("traced with transformers 4.57.6" in note for note in result.notes) == there
        assert manifest_of(tmp_path / name)["layout"]["traced_with"] == versions
    declared = shardkit.preshard(hub, tmp_path / "declared", world_size=2, layout="declared", names="hub")
    assert "traced_with" not in manifest_of(tmp_path / "declared")["layout"]
    assert not any("traced" in note for note in declared.notes)
    said = "pre-sharded with transformers 4.57.6, and this job has"
    assert any(said in note for note in shardkit.prepare(hub, tmp_path / "old").notes)
    assert not any(said in note for note in shardkit.prepare(hub, tmp_path / "new").notes)


def manifest_of(directory: Path) -> Any:
    return json_of(directory, "shardkit.json")
