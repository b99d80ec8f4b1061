"""inspect: Hub models, pre-sharded directories, DCP directories, and what is refused."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch

import shardkit
from shardkit.core.text import format_size
from shardkit.errors import IntegrityError, SourceError
from shardkit.files import manifest
from tests.manifests import change_manifest
from tests.operations.consolidate.checkpoints import hub, save


@pytest.fixture
def model(tmp_path):
    tensors = {f"layers.{n}.w": torch.zeros(4, 2, dtype=torch.bfloat16) for n in range(3)}
    tensors |= {"embed.weight": torch.zeros(6, 2), "mask": torch.zeros(3, dtype=torch.bool)}
    return hub(tmp_path / "model", tensors, None)


@pytest.fixture
def sharded(model, tmp_path):
    shardkit.preshard(str(model), str(tmp_path / "out"), world_size=2, wrap="none")
    return tmp_path / "out"


def test_hub(model):
    config = {"architectures": ["TinyForCausalLM"], "tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(config))
    found = shardkit.inspect(str(model))
    assert (found.kind, found.format, found.model_class) == ("hub", "safetensors", "TinyForCausalLM")
    assert (found.num_tensors, found.tensor_bytes) == (5, 48 + 48 + 3)
    dtypes = [(d.dtype, d.num_tensors, d.tensor_bytes) for d in found.dtypes]
    assert dtypes == [("bfloat16", 3, 48), ("float32", 1, 48), ("bool", 1, 3)]
    (file,) = found.files
    assert (file.file_bytes, file.tensor_bytes) == (os.path.getsize(model / "model.safetensors"), 99)
    assert "ties the word embeddings" in found.notes[-1]
    assert shardkit.inspect(str(model / "model.safetensors")).tensors == found.tensors


def test_a_quantised_model_is_called_one(model):
    config = {"quantization_config": {"quant_method": "gp\x1btq", "bits": 4}}
    (model / "config.json").write_text(json.dumps(config))
    (note,) = shardkit.inspect(model).notes
    assert note.startswith("the model is quantised: config.json has a quantization_config (gp\\x1btq)")


def test_legacy_file_is_one_file(tmp_path):
    torch.save({"a.w": torch.zeros(2), "b.w": torch.zeros(3)}, tmp_path / "pytorch_model.bin")
    found = shardkit.inspect(str(tmp_path))
    assert found.format == "torch-bin"
    assert [(file.name, file.tensor_bytes) for file in found.files] == [("pytorch_model.bin", 20)]


def test_presharded(sharded):
    found = shardkit.inspect(str(sharded))
    assert (found.kind, found.world_size) == ("presharded", 2)
    assert (found.mesh, found.layout) == ("dp_shard=2", "declared")
    assert (found.policy, found.source) == ("none", "model.safetensors")
    assert {(t.name, t.count, t.placements) for t in found.tensors} == {
        ("layers.{0..2}.w", 3, "S(0)"),
        ("embed.weight", 1, "S(0)"),
        ("mask", 1, "R"),
    }
    sizes = [os.path.getsize(sharded / f"__{n}_0.distcp") for n in range(2)]
    assert [file.file_bytes for file in found.files] == sizes
    assert (found.num_tensors, found.tensor_bytes, found.warnings) == (5, 99, ())


@pytest.mark.parametrize("name", [".metadata", "shardkit.json", "__0_0.distcp"])
def test_a_part_stands_for_the_checkpoint(sharded, name):
    assert shardkit.inspect(str(sharded / name)).num_tensors == 5


def test_manifest_alone_is_read(sharded, monkeypatch):
    monkeypatch.setattr("shardkit.formats.dcp.directory.open_dcp", None)
    (sharded / ".metadata").write_bytes(b"x" * os.path.getsize(sharded / ".metadata"))
    assert shardkit.inspect(str(sharded)).warnings == ()


def test_differences_from_the_manifest(sharded):
    (sharded / "__0_0.distcp").write_bytes(b"short")
    (sharded / "__1_0.chunks.json").unlink()
    (sharded / "__7_0.distcp").touch()
    found = shardkit.inspect(str(sharded))
    first, second, third = found.warnings
    assert first.startswith("__0_0.distcp: ")
    assert first.endswith(" bytes in the manifest, 5 on disk")
    assert second == "__1_0.chunks.json: the manifest lists it, and there is no such file"
    assert third == "1 .distcp files are not of this checkpoint: __7_0.distcp"
    assert found.files[0].file_bytes == 5


def test_a_missing_file_is_shown_as_missing(sharded):
    sizes = [os.path.getsize(sharded / name) for name in ("__0_0.distcp", "__1_0.distcp")]
    (sharded / "__1_0.distcp").unlink()
    found = shardkit.inspect(str(sharded))
    assert [file.file_bytes for file in found.files][:2] == [sizes[0], None]
    assert f"files    1 of 2 shard files, {format_size(sizes[0])}" in str(found)
    assert re.search(r"^  __1_0\.distcp +missing$", str(found), re.M)


def test_ties_and_units_of_a_manifest(sharded):
    def change(content):
        content["ties"] = [["embed.weight", "head.weight"]]
        layers = [{"path": f"l.{n}", "class": "L"} for n in range(4)]
        content["units"] = [{"path": "", "class": None}, *layers]

    change_manifest(sharded, change)
    found = shardkit.inspect(str(sharded))
    assert found.ties == (("embed.weight", "head.weight"),)
    assert [(u.path, u.count, u.class_name) for u in found.units] == [("", 1, None), ("l.{0..3}", 4, "L")]


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("mesh"),
        lambda content: content.update(tensors=[]),
        lambda content: content["tensors"]["mask"].update(dtype="float9"),
        lambda content: content["files"][0].update(name="../outside"),
    ],
)
def test_foreign_manifest(sharded, change):
    change_manifest(sharded, change)
    with pytest.raises(SourceError, match=r"shardkit\.json does not have"):
        shardkit.inspect(str(sharded))


def test_changed_manifest(sharded):
    path = sharded / manifest.NAME
    path.write_text(path.read_text().replace('"none"', '"auto"'))
    with pytest.raises(IntegrityError):
        shardkit.inspect(str(sharded))


def test_dcp_of_torch(tmp_path):
    state = {"w": torch.zeros(3, 2), "layers": {"0": torch.zeros(4), "1": torch.zeros(4)}, "step": 5}
    found = shardkit.inspect(str(save(state, tmp_path / "ckpt")))
    assert (found.kind, found.mesh, found.world_size) == ("dcp", None, None)
    assert {(t.name, t.count) for t in found.tensors} == {("w", 1), ("layers.{0,1}", 2)}
    assert found.objects == ("step",)
    assert sum(file.tensor_bytes for file in found.files) == found.tensor_bytes == 56


def test_ties_of_a_dcp(tmp_path):
    from shardkit.core.catalog import Catalog, SourceFile
    from shardkit.core.dtypes import BY_NAME
    from shardkit.core.regions import full_region
    from shardkit.formats.dcp.writer import write_metadata

    catalog = Catalog(format="dcp", directory="", encoding="torch-record")
    catalog.files = [SourceFile(name="__0_0.distcp", path="", size=1000)]
    catalog.add_tensor("a", BY_NAME["float32"], (5,), iter([(0, 0, 1000, full_region((5,)))]))
    (tmp_path / "__0_0.distcp").write_bytes(bytes(1000))
    with open(tmp_path / ".metadata", "wb") as file:
        write_metadata(file, catalog, {"a": ("b",)})
    found = shardkit.inspect(str(tmp_path))
    assert found.ties == (("a", "b"),)
    assert (found.num_tensors, found.tensor_bytes, found.files[0].tensor_bytes) == (1, 20, 20)


def test_byte_entries_of_a_resharded_checkpoint(tmp_path):
    save({"w": torch.zeros(4, 2), "step": 7}, tmp_path / "in")
    shardkit.reshard(str(tmp_path / "in"), str(tmp_path / "out"), world_size=2)
    found = shardkit.inspect(str(tmp_path / "out"))
    assert (found.kind, found.objects, found.num_tensors, found.warnings) == ("presharded", ("step",), 1, ())


@pytest.fixture
def trained(tmp_path):
    """What a trainer leaves: accelerate's model and optimizer, each in a directory of its own."""
    home = tmp_path / "checkpoint-2"
    state = {"model": {f"layers.{n}.w": torch.zeros(4, 2) for n in range(3)}}
    save(state, home / "pytorch_model_fsdp_0")
    save({"optimizer": {"x": torch.zeros(2)}}, home / "optimizer_0")
    (home / "tokenizer.json").write_text("{}")
    return home


def test_checkpoint_of_a_trainer(trained):
    found = shardkit.inspect(str(trained))
    assert (found.kind, found.format, found.made_by) == ("sharded", "accelerate", "accelerate (FSDP)")
    assert {(t.name, t.count) for t in found.tensors} == {("model.layers.{0..2}.w", 3)}
    assert found.roots == (("model", "model"),)
    assert found.assets == (str(trained),)
    assert found.skipped == (("optimizer_0", "optimizer state"),)
    assert [(file.name, file.tensor_bytes) for file in found.files] == [("__0_0.distcp", 96)]


def test_weights_that_are_refused(tmp_path):
    save({"model": {"w": torch.zeros(2)}}, tmp_path)
    torch.save({"epoch": 0, "callbacks": {"EMA": {"w": torch.zeros(2)}}}, tmp_path / "meta.pt")
    found = shardkit.inspect(str(tmp_path))
    assert found.format == "lightning"
    assert [kind for kind, _ in found.refused] == ["ema"]


def test_files_of_rank_tensors_are_counted_once():
    """A chunk that exists only decoded belongs to the file that it is decoded from."""
    from shardkit.core.catalog import Catalog, Decoded, SourceFile
    from shardkit.core.dtypes import BY_NAME
    from shardkit.core.regions import full_region
    from shardkit.operations.inspect import _files

    catalog = Catalog(format="torch", directory="nowhere")
    catalog.files = [
        SourceFile(name="r0.pt", path="r0.pt", size=100),
        SourceFile(name="r0.pt:b", path="", size=8, derivation=Decoded(lambda _: memoryview(bytes(8)))),
    ]
    region = full_region((2,))
    catalog.add_tensor("a", BY_NAME["float32"], (2,), iter([(0, 10, 8, region)]))
    catalog.add_tensor("b", BY_NAME["float32"], (2,), iter([(1, 0, 8, region)]))
    (file,) = _files(catalog, set())
    assert (file.name, file.file_bytes, file.tensor_bytes) == ("r0.pt", 100, 16)


def test_unfinished_save(sharded):
    (sharded / ".metadata").unlink()
    assert ".metadata: the manifest lists it" in shardkit.inspect(str(sharded)).warnings[0]
    (sharded / manifest.NAME).unlink()
    with pytest.raises(SourceError, match=r"there are \.distcp files without it"):
        shardkit.inspect(str(sharded))


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_nothing_to_inspect(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError):
        shardkit.inspect(str(tmp_path / name))
