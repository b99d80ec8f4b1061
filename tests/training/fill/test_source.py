"""A source opened for a model: which stored tensor is which, and which weights they are."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shardkit._torch import checkpointed_module
from shardkit.core.mesh import parse_mesh
from shardkit.core.placements import Placement
from shardkit.core.regions import Region
from shardkit.errors import IntegrityError, SourceError, UsageError
from shardkit.formats.dcp import chunk_list
from shardkit.operations.preshard import preshard
from shardkit.training.fill.reading import Supply, Weights
from shardkit.training.fill.samples import keep_files_open, take_samples
from shardkit.training.fill.source import find_weights, open_source
from shardkit.training.finalize import finalize, load_into
from shardkit.training.model.build import build_model
from shardkit.training.prepare import prepare
from shardkit.training.ranks.local import describe_tensors
from shardkit.transfer.sources import SourceFiles
from tests.contents import edit_json
from tests.operations.consolidate.checkpoints import save
from tests.training import models


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a model, saved once; several files with an index."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            models.save(name, made[name], max_shard_size="20KB")
        return made[name]

    return find


def opened(model: nn.Module, source: Path | str, **options: Any) -> Weights:
    expected, ties = describe_tensors(model)
    return find_weights(open_source(str(source), **options), expected, ties, model=model)


def read(weights: Weights, stored: str) -> torch.Tensor:
    """Read a stored tensor as the catalog says, byte by byte."""
    catalog = weights.located().catalog
    entry = catalog.tensors[stored]
    dtype = getattr(torch, entry.dtype.name)
    whole = torch.empty(entry.shape, dtype=dtype)
    with SourceFiles(catalog.files) as files, files.reader() as reader:
        for row in entry.chunk_ids:
            region, data = catalog.chunks.region(row), bytearray(catalog.chunks.nbytes[row])
            if data:
                at = catalog.chunks.start[row]
                reader.read_into(catalog.chunks.file[row], memoryview(data), at, stored)
                window = tuple(slice(o, o + s) for o, s in zip(*region, strict=True))
                whole[window] = torch.frombuffer(data, dtype=dtype).view(region.sizes)
    return whole


def assert_is(weights: Weights, model: Any) -> None:
    """Every tensor of a model's state dict is found, with its own bytes."""
    state = model.state_dict()
    firsts = {group[0] for group in describe_tensors(model)[1]}
    lacking = state.keys() - weights.names.keys()
    assert all(
        any(name in group and group[0] in firsts for group in describe_tensors(model)[1]) for name in lacking
    )
    for fqn, stored in weights.names.items():
        assert torch.equal(read(weights, stored), state[fqn]), fqn


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bert-lm", "qwen2-vl", "qwen3-vl"])
def test_a_hub_directory(name: str, hub: Callable[[str], Path]) -> None:
    weights = opened(build_model(str(hub(name))), hub(name))
    assert_is(weights, models.reference(name))
    assert not weights.unused
    assert weights.open_chunks is None  # all places are known
    # Qwen2-VL's file has names of before transformers 4.52, which from_pretrained changes.
    assert bool(weights.notes) == (name == "qwen2-vl")


@pytest.mark.parametrize(("file", "model"), [("llama", "llama-base"), ("bert-lm", "bert")])
def test_a_base_model_of_a_file_with_a_head(file: str, model: str, hub: Callable[[str], Path]) -> None:
    plain = build_model(str(hub(model)))
    weights = opened(plain, hub(file))
    found = {name: read(weights, stored) for name, stored in weights.names.items()}
    reference = models.reference(file).base_model.state_dict()
    assert all(torch.equal(value, reference[name]) for name, value in found.items())
    heads = {name for name in load_index(hub(file)) if not name.startswith(("model.", "bert."))}
    assert weights.unused.keys() == heads
    # BertForMaskedLM has no pooler.
    pooler = set() if file == "llama" else {"pooler.dense.weight", "pooler.dense.bias"}
    assert plain.state_dict().keys() - found.keys() == pooler


def load_index(directory: Path) -> dict[str, str]:
    """Return the file of every stored tensor."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return dict.fromkeys(load_file(directory / "model.safetensors"), "model.safetensors")
    names: dict[str, str] = json.loads(index.read_text())["weight_map"]
    return names


def test_a_model_with_a_head_of_a_base_models_file(hub: Callable[[str], Path]) -> None:
    weights = opened(build_model(str(hub("llama"))), hub("llama-base"))
    assert weights.names["model.layers.0.mlp.up_proj.weight"] == "layers.0.mlp.up_proj.weight"
    assert "lm_head.weight" not in weights.names
    assert len(weights.names) == 29
    assert not weights.unused


class Reward(nn.Module):
    """Somebody's own head around a model of transformers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import transformers

        config = models.config_of(name)
        self.backbone = getattr(transformers, config.architectures[0])(config)
        self.score = nn.Linear(24, 1)


@pytest.mark.parametrize("name", ["llama", "qwen2-vl"])
def test_a_model_inside_a_module(name: str, hub: Callable[[str], Path]) -> None:
    model = build_model(lambda: Reward(name))
    weights = opened(model, hub(name))
    inner = models.reference(name).state_dict()
    assert weights.names.keys() == {f"backbone.{key}" for key in inner}
    assert all(torch.equal(read(weights, s), inner[k[9:]]) for k, s in weights.names.items())


class Plain(nn.Module):
    """Not of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.head = nn.Linear(3, 2)
        self.register_buffer("scale", torch.ones(3), persistent=False)


def test_prefixes_of_plain_modules(tmp_path: Path) -> None:
    state = {key: torch.randn_like(value) for key, value in Plain().state_dict().items()}
    for number, prefix in enumerate(("", "net.", "_orig_mod.", "a.b.")):
        file = tmp_path / f"{number}.safetensors"
        save_file({prefix + key: value for key, value in state.items()}, file)
        weights = opened(build_model(Plain), file)
        assert weights.names == {key: prefix + key for key in state}
    wrapped = build_model(lambda: nn.ModuleDict({"net": Plain()}))
    assert opened(wrapped, tmp_path / "0.safetensors").names == {f"net.{key}": key for key in state}
    plain = build_model(Plain)
    plain.body = nn.ModuleList(map(checkpointed_module, plain.body))  # type: ignore[arg-type]
    assert "body.0._checkpoint_wrapped_module.weight" in dict(plain.named_parameters())
    assert opened(plain, tmp_path / "0.safetensors").names == {key: key for key in state}


def test_what_the_model_computes_is_left_out(tmp_path: Path) -> None:
    state = dict(Plain().state_dict())
    save_file({**state, "scale": torch.ones(3)}, tmp_path / "x.safetensors")
    weights = opened(build_model(Plain), tmp_path / "x.safetensors")
    assert not weights.unused
    assert "scale" not in weights.names
    assert weights.notes == ("left out of the source, the model computes them: scale",)


def test_old_buffers_of_transformers_are_left_out(hub: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(hub("llama"), tmp_path / "old")
    models.save("llama", tmp_path / "old")
    (tmp_path / "old/model.safetensors.index.json").unlink()
    path = tmp_path / "old/model.safetensors"
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    save_file({**load_file(path), **old}, path, metadata={"format": "pt"})
    for stray in (tmp_path / "old").glob("model-0*"):
        stray.unlink()
    weights = opened(build_model(str(hub("llama"))), tmp_path / "old")
    assert not weights.unused
    assert "inv_freq" in weights.notes[0]


def test_two_models_in_one_file_are_refused(tmp_path: Path) -> None:
    state = Plain().state_dict()
    both = {**state, **{f"_orig_mod.{key}": value.clone() for key, value in state.items()}}
    save_file(both, tmp_path / "x.safetensors")
    with pytest.raises(SourceError, match="several stored tensors") as caught:
        opened(build_model(Plain), tmp_path / "x.safetensors")
    assert len(caught.value.problems) == len(state)


def test_only_the_models_own_files_are_taken(hub: Callable[[str], Path], tmp_path: Path) -> None:
    """Not every *.safetensors of the directory: adapters and originals often lie beside it."""
    shutil.copytree(hub("llama"), tmp_path / "model")
    wrong = {key: torch.full_like(value, 7) for key, value in models.reference("llama").state_dict().items()}
    save_file(wrong, tmp_path / "model/consolidated.safetensors")
    save_file(wrong, tmp_path / "model/adapter_model.safetensors")
    torch.save(wrong, tmp_path / "model/training_state.bin")
    assert_is(opened(build_model(str(hub("llama"))), tmp_path / "model"), models.reference("llama"))


@pytest.fixture(scope="module")
def sharded(hub: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    bare, out = (tmp_path_factory.mktemp("sharded") / name for name in ("bare", "out"))
    shutil.copytree(hub("qwen3"), bare)
    (bare / "config.json").unlink()  # names and shapes are all there is: nothing is traced
    preshard(str(bare), str(out), world_size=3, wrap="none")
    return out


def test_a_presharded_directory(hub: Callable[[str], Path], sharded: Path) -> None:
    model = build_model(str(hub("qwen3")))
    weights = opened(model, sharded)
    assert weights.open_chunks is not None
    assert_is(weights, models.reference("qwen3"))
    assert [file.name for file in weights.catalog.files] == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]


def test_a_rank_reads_no_list_but_those_of_its_files(
    hub: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a thousand ranks the lists of all of them are hundreds of thousands of lines, for each rank."""
    shutil.copytree(hub("qwen3"), tmp_path / "bare")
    (tmp_path / "bare" / "config.json").unlink()
    preshard(str(tmp_path / "bare"), str(tmp_path / "out"), mesh="dp_replicate=2,dp_shard=8", wrap="none")
    read, lists = chunk_list.read_beside, list[str]()

    def counted(directory: str, file: str, size: int) -> tuple[chunk_list.ChunkList, int]:
        lists.append(file)
        return read(directory, file, size)

    monkeypatch.setattr(chunk_list, "read_beside", counted)
    weights = opened(build_model(str(hub("qwen3"))), tmp_path / "out")
    assert not lists
    mesh = parse_mesh("dp_replicate=2,dp_shard=8", None)
    own = {
        name: [part.region for part in mesh.held(entry.shape, (Placement(), Placement(0)), 3)]
        for name, entry in weights.catalog.tensors.items()
    }
    located = weights.located({name: regions for name, regions in own.items() if regions[0].num_elements})
    assert lists == ["__3_0.distcp"]
    assert len(located.catalog.chunks) == sum(bool(regions[0].num_elements) for regions in own.values())
    lists.clear()
    embedding = next(name for name in own if "embed" in name)
    rows = weights.catalog.tensors[embedding].shape
    weights.located({embedding: [Region((0, 0), (rows[0] // 2, rows[1]))]})  # a world of two
    assert sorted(lists) == [f"__{shard}_0.distcp" for shard in range(4)]


def test_identity_is_that_of_every_copy(hub: Callable[[str], Path], sharded: Path, tmp_path: Path) -> None:
    model = build_model(str(hub("qwen3")))
    state = {"model": models.reference("qwen3").state_dict()}
    save(state, tmp_path / "dcp")
    for number, source in enumerate((hub("qwen3"), sharded, tmp_path / "dcp")):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(source, copy)
        os.utime(copy, (1, 1))
        for file in copy.iterdir():
            os.utime(file, (number + 5, number + 5))
        assert identity(opened(model, copy)) == identity(opened(model, source))


def identity(weights: Weights) -> str:
    with keep_files_open(Supply(weights=weights)) as supply:
        return f"{weights.identity} {take_samples(supply.weights)}"


def test_identity_of_other_weights_differs(hub: Callable[[str], Path], tmp_path: Path) -> None:
    """Fine-tunes of one model have equal headers and sizes."""
    model = build_model(str(hub("qwen3")))
    tuned = models.reference("qwen3", seed=1)
    tuned.save_pretrained(tmp_path / "tuned", max_shard_size="20KB")
    assert load_index(tmp_path / "tuned") == load_index(hub("qwen3"))
    for number in range(2):
        save(models.reference("qwen3").state_dict(), tmp_path / str(number))
    sources = [hub("qwen3"), tmp_path / "tuned", tmp_path / "0", tmp_path / "1"]
    assert len({identity(opened(model, source)) for source in sources}) == 4


@pytest.mark.parametrize("root", ["", "model.", "state_dict.model.", "app.model.module."])
def test_a_checkpoint_is_opened_for_the_models_tensors_alone(
    root: str, hub: Callable[[str], Path], tmp_path: Path
) -> None:
    reference = models.reference("llama")
    state = {root + key: value for key, value in reference.state_dict().items()}
    moments = {
        f"optimizer.state.{key}.exp_avg": torch.zeros_like(value)
        for key, value in reference.state_dict().items()
    }
    save({**state, **moments}, tmp_path / "step")
    weights = opened(build_model(str(hub("llama"))), tmp_path / "step")
    assert_is(weights, reference)
    assert not weights.unused
    assert all("exp_avg" not in name for name in weights.catalog.tensors)
    assert weights.located().catalog.encoding == "raw"


@pytest.mark.parametrize("damage", ["truncate", "no .metadata", "other list", "no list", "no file"])
def test_a_damaged_presharded_directory(
    damage: str, hub: Callable[[str], Path], sharded: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(sharded, broken)
    file, chunks = broken / "__1_0.distcp", broken / "__1_0.chunks.json"
    if damage == "truncate":
        os.truncate(file, file.stat().st_size - 8)
    elif damage == "no .metadata":
        (broken / ".metadata").unlink()
    elif damage == "other list":
        chunks.write_text(chunks.read_text().replace("norm", "morn"))
    else:
        (chunks if damage == "no list" else file).unlink()
    with pytest.raises(SourceError) as caught:
        opened(build_model(str(hub("qwen3"))), broken).located()
    assert "__1_0" in str(caught.value) or damage == "no .metadata"


def test_chunk_lists_that_cover_less_are_refused(
    hub: Callable[[str], Path], sharded: Path, tmp_path: Path
) -> None:
    from shardkit.files import manifest

    broken = tmp_path / "broken"
    shutil.copytree(sharded, broken)
    content = json.loads((broken / "shardkit.json").read_text())
    content["files"].pop()
    (broken / "shardkit.json").write_bytes(manifest.sign(content))
    with pytest.raises(IntegrityError, match="disagree") as caught:
        opened(build_model(str(hub("qwen3"))), broken).located()
    assert len(caught.value.problems) > 20
    content["files"][0]["name"] = "../x.distcp"
    (broken / "shardkit.json").write_bytes(manifest.sign(content))
    with pytest.raises(SourceError, match=r"files\[0\]\.name: expected a file name"):
        opened(build_model(str(hub("qwen3"))), broken)


def test_sources_that_are_none(hub: Callable[[str], Path], tmp_path: Path) -> None:
    model = build_model(str(hub("llama")))
    with pytest.raises(SourceError, match="no such file"):
        opened(model, tmp_path / "ab--sent/")
    with pytest.raises(SourceError, match="an empty directory"):
        opened(model, tmp_path)
    with pytest.raises(UsageError, match="no revision"):
        opened(model, hub("llama"), revision="main")


def test_quantised_sources_say_so(hub: Callable[[str], Path], tmp_path: Path) -> None:
    model = build_model(str(hub("llama")))
    shutil.copytree(hub("llama"), tmp_path / "fp8")
    edit_json(tmp_path / "fp8/config.json", quantization_config={"quant_method": "fp8"})
    assert "fp8" in str(opened(model, tmp_path / "fp8").quantised)
    state = models.reference("llama").state_dict()
    scales = {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1)}
    save_file({**state, **scales}, tmp_path / "x.safetensors")
    assert "weight_scale_inv" in str(opened(model, tmp_path / "x.safetensors").quantised)
    packed = {"model.layers.0.mlp.up_proj.weight": torch.ones(2, 4, dtype=torch.uint32)}
    packed["model.layers.0.mlp.up_proj.scales"] = torch.ones(2, 1)
    save_file({**state, **packed}, tmp_path / "y.safetensors")
    assert "uint32" in str(opened(model, tmp_path / "y.safetensors").quantised)
    assert opened(model, hub("llama")).quantised is None


class Wrapped(nn.Module):
    """A Linear as PEFT's LoRA leaves it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})


class Saved(nn.Module):
    """A module that PEFT trains in full."""

    def __init__(self, original: nn.Module, copy: nn.Module) -> None:
        super().__init__()
        self.original_module = original
        self.modules_to_save = nn.ModuleDict({"default": copy})


def adapted() -> nn.Module:
    plain = Plain()
    plain.body[1] = Wrapped(plain.body[1])  # type: ignore[arg-type]
    plain.head = Saved(plain.head, nn.Linear(3, 2))  # type: ignore[assignment]
    return nn.ModuleDict({"base_model": nn.ModuleDict({"model": plain})})


def test_names_of_peft_are_those_of_the_base(tmp_path: Path) -> None:
    state = Plain().state_dict()
    save_file(state, tmp_path / "base.safetensors")
    weights = opened(build_model(adapted), tmp_path / "base.safetensors")
    assert not weights.unused
    root = "base_model.model."
    assert weights.names[f"{root}body.0.weight"] == "body.0.weight"
    assert weights.names[f"{root}body.1.base_layer.weight"] == "body.1.weight"
    assert weights.names[f"{root}head.original_module.bias"] == "head.bias"
    assert weights.names[f"{root}head.modules_to_save.default.bias"] == "head.bias"
    lacking = {name for name in adapted().state_dict() if name not in weights.names}
    assert lacking == {f"{root}body.1.lora_{part}.default.weight" for part in "AB"}


def test_a_trained_adapter_finds_itself(tmp_path: Path) -> None:
    state = adapted().state_dict()
    save({"model": state}, tmp_path / "step")
    weights = opened(build_model(adapted), tmp_path / "step")
    assert weights.names == {name: f"model.{name}" for name in state}


def test_weights_in_a_shared_store_are_read(hub: Callable[[str], Path], tmp_path: Path) -> None:
    """The links of everything else are followed on request; the same weights have the same identity."""
    store, place = hub("llama"), tmp_path / "model"
    place.mkdir()
    for file in store.iterdir():
        if file.suffix == ".safetensors":
            (place / file.name).symlink_to(file)
        else:
            shutil.copy(file, place)
    model = build_model(str(store))
    weights, plain = opened(model, place), opened(model, store)
    assert weights.identity == plain.identity
    assert any(f"links to files outside of {place}" in note for note in weights.notes)
    name = next(iter(weights.names.values()))
    assert torch.equal(read(weights, name), read(plain, name))
    (place / "config.json").unlink()
    (place / "config.json").symlink_to(store / "config.json")
    with pytest.raises(SourceError, match=r"config\.json: a symbolic link that leaves") as caught:
        prepare(str(place), str(place))
    assert "--follow-links" in str(caught.value)
    context = prepare(str(place), str(place), follow_links=True)
    assert torch.equal(
        finalize(context.model, context).state_dict()[name],
        load_into(build_model(str(store)), store).state_dict()[name],
    )
    with pytest.raises(SourceError, match="a symbolic link"):
        load_into(build_model(str(store)), str(place))
    load_into(build_model(str(store)), str(place), follow_links=True)
