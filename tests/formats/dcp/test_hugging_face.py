"""Safetensors shards that torch's HuggingFaceStorageWriter wrote, and what may be missing from them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh

from shardkit.errors import SourceError
from shardkit.formats.contract import Checkpoint
from shardkit.formats.dcp.hugging_face import LAST_RANKS, is_dcp_hf, open_dcp_hf
from shardkit.formats.hub.directory import open_hub_directory
from tests.formats.dcp.samples import assert_holds, quiet, replicate, save_shards, shard

FULL = {
    "model.embed_tokens.weight": torch.arange(28.0).reshape(7, 4),
    "model.few": torch.arange(3).reshape(1, 3),
    "model.columns": torch.arange(15, dtype=torch.bfloat16).reshape(3, 5),
    "model.same": torch.arange(3.0),
    "model.scale": torch.tensor(4.0),
    "model.mask": torch.tensor([True, False]),
}
FILE_OF = {name: 1 + (name in ("model.few", "model.columns")) for name in FULL}


def make(mesh: DeviceMesh) -> dict[str, Any]:
    cut = {"model.embed_tokens.weight": 0, "model.few": 0, "model.columns": 1}
    sharded = {name: shard(FULL[name], mesh, dim) for name, dim in cut.items()}
    return {**FULL, **sharded, "model.same": replicate(FULL["model.same"], mesh)}


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return save_shards(make, 3, tmp_path / "c")


def assert_opens(checkpoint: Checkpoint, expected: dict[str, torch.Tensor] = FULL) -> None:
    assert checkpoint.format == "dcp-hf"
    assert checkpoint.hub is None  # consolidated files too are part of a training
    assert_holds(checkpoint.select(tuple(checkpoint.catalog.tensors)), expected)


@pytest.mark.parametrize("file_of", [None, FILE_OF])
@pytest.mark.parametrize("world", [1, 3])
def test_shapes_are_inferred_from_the_parts(
    tmp_path: Path, world: int, file_of: dict[str, int] | None
) -> None:
    directory = save_shards(make, world, tmp_path / "c", file_of)
    assert is_dcp_hf(directory)
    assert_opens(open_dcp_hf(directory))


OBJECTS: dict[str, Any] = {
    "number": 3,
    "text": "x",
    "nothing": None,
    "dict": {"lr": 0.1, "betas": (0.9, 0.99)},
    "object with tensors": (torch.ones(1000), b"PK\x05\x06" + bytes(18)),
    "end of a record in it": b"PK\x05\x06" + bytes(18),
}


@pytest.mark.parametrize("names", [["number"], list(OBJECTS)])
def test_records_before_the_tensors_are_passed_over(tmp_path: Path, names: list[str]) -> None:
    """torch writes them in front, and cannot read its own file."""
    objects = {name: OBJECTS[name] for name in names}
    checkpoint = open_dcp_hf(save_shards(lambda mesh: {**make(mesh), **objects}, 2, tmp_path / "c"))
    assert_opens(checkpoint)
    assert any("begins with" in note and "of torch.save" in note for note in checkpoint.remarks.notes)


def test_records_before_the_tensors_of_one_file(tmp_path: Path) -> None:
    """Without `save_distributed` it is the form of the Hub, with an index that lists what is no tensor."""
    with quiet():
        dcp.save(
            {**FULL, "step": 3, "names": ("a",)},
            storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "c")),
            no_dist=True,
        )
    checkpoint = open_hub_directory(str(tmp_path / "c"))
    assert_holds(checkpoint.select(tuple(checkpoint.catalog.tensors)), FULL)
    assert set(checkpoint.catalog.objects) == {"step", "names"}
    assert (
        "model-00001-of-00001.safetensors begins with 2 records of torch.save" in checkpoint.remarks.notes[0]
    )
    index = tmp_path / "c/model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.more"] = "model-00001-of-00001.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(SourceError, match=r"model\.more: listed in .*, which lacks it"):
        open_hub_directory(str(tmp_path / "c"))


def test_records_and_nothing_behind(tmp_path: Path) -> None:
    torch.save(FULL, tmp_path / "model.safetensors")
    with pytest.raises(SourceError, match=r"1 record of torch\.save and nothing behind") as error:
        open_hub_directory(str(tmp_path))
    assert "damaged" not in str(error.value.hint)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-30])
    with pytest.raises(SourceError, match=r"a record of torch\.save that has no end"):
        open_hub_directory(str(tmp_path))


def test_shards_below_in_sharded(directory: str, tmp_path: Path) -> None:
    os.mkdir(tmp_path / "run")
    os.rename(directory, tmp_path / "run" / "sharded")
    assert is_dcp_hf(str(tmp_path / "run"))
    checkpoint = open_dcp_hf(str(tmp_path / "run"))
    assert_opens(checkpoint)
    assert checkpoint.catalog.files[0].name == "sharded/shard-00001-model-00001-of-00001.safetensors"


def test_files_of_nemo_automodel_beside_them(directory: str) -> None:
    beside = Path(directory, ".hf_metadata")
    beside.mkdir()
    (beside / "config.json").write_text('{"model_type": "llama", "vocab_size": 7, "hidden_size": 4}')
    (beside / "fqn_to_file_index_mapping.json").write_text(json.dumps(FILE_OF))
    checkpoint = open_dcp_hf(directory)
    assert_opens(checkpoint)
    assert (checkpoint.writer, checkpoint.contents.assets) == ("NeMo Automodel", (str(beside),))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("shard-00002-model-00001-of-00002", r"model\.embed_tokens\.weight: chunks hold 16 of 28 elements"),
        ("shard-00001-model-00002-of-00002", r"model\.columns: .*parts lie in shard-00002-model-00002"),
    ],
)
def test_a_missing_file_leaves_a_gap(tmp_path: Path, missing: str, message: str) -> None:
    directory = save_shards(make, 3, tmp_path / "c", FILE_OF)
    os.remove(os.path.join(directory, f"{missing}.safetensors"))
    with pytest.raises(SourceError, match=message):
        open_dcp_hf(directory)


def test_a_number_that_no_rank_has(tmp_path: Path) -> None:
    directory = save_shards(make, 2, tmp_path / "c", FILE_OF)
    for name in os.listdir(directory):
        if "model-00002" in name:
            os.remove(os.path.join(directory, name))
    with pytest.raises(SourceError, match=r"shard-\*-model-00002-of-00002\.safetensors: no such file"):
        open_dcp_hf(directory)


def test_the_last_ranks_may_be_missing(directory: str) -> None:
    os.remove(os.path.join(directory, "shard-00003-model-00001-of-00001.safetensors"))
    checkpoint = open_dcp_hf(directory)
    assert checkpoint.catalog.tensors["model.embed_tokens.weight"].shape == (6, 4)
    assert checkpoint.remarks.notes == (LAST_RANKS,)


def test_a_list_of_names_tells_what_is_missing(directory: str) -> None:
    names = dict.fromkeys((*FULL, "model.gone", "lm_head.weight"), "model-00001-of-00001.safetensors")
    Path(directory, "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(SourceError) as caught:
        open_dcp_hf(directory)
    assert caught.value.problems == (
        "model.gone: listed in model.safetensors.index.json, in no shard",
        "lm_head.weight: listed in model.safetensors.index.json, in no shard",
    )
    Path(directory, "config.json").write_text('{"tie_word_embeddings": true}')
    with pytest.raises(SourceError) as caught:
        open_dcp_hf(directory)
    assert len(caught.value.problems) == 1


def test_shards_of_two_saves(directory: str) -> None:
    name = os.path.join(directory, "shard-00001-model-00001-of-0000{}.safetensors")
    shutil.copy(name.format(1), name.format(2))
    with pytest.raises(
        SourceError, match=r"several saves in one directory: \.\.\.-of-00001 and \.\.\.-of-00002"
    ):
        open_dcp_hf(directory)


def rewrite(directory: str, rank: int, tensors: dict[str, torch.Tensor], corners: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    info = {name: {"saved_offsets": corner} for name, corner in corners.items()}
    path = os.path.join(directory, f"shard-{rank:05d}-model-00001-of-00001.safetensors")
    save_file(tensors, path, metadata={"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0"})


@pytest.mark.parametrize(
    ("tensors", "corners", "message"),
    [
        ({"w": torch.ones(2)}, {"w": [1]}, r"w: chunks at \[0\] and \[1\] overlap"),
        ({"w": torch.ones(2)}, {"w": [3]}, r"w: chunks hold 4 of 5 elements"),
        ({"w": torch.ones(2)}, {"w": [1 << 50]}, r"w: chunks hold 4 of"),
        ({"w": torch.ones(2)}, {"w": [1 << 62]}, r"w: expected 1 offsets, found \[4611686018427387904\]"),
        ({"w": torch.ones(2)}, {"w": [-1]}, r"w: expected 1 offsets, found \[-1\]"),
        ({"w": torch.ones(2)}, {"w": [True]}, r"w: expected 1 offsets, found \[True\]"),
        ({"w": torch.ones(2)}, {"w": [0, 0]}, r"shard-00002-.*DCP_SHARDING_INFO does not place 1 tensors"),
        ({"w": torch.ones(2)}, {}, r"w: expected 1 offsets, found None"),
        ({"w": torch.ones(2).half()}, {"w": [2]}, r"w: shard-00002-.* has float16, another float32"),
        ({"w": torch.ones(2, 1)}, {"w": [2, 0]}, r"w: shard-00002-.* has 2 dims, another does not"),
    ],
)
def test_parts_that_do_not_fit(
    tmp_path: Path, tensors: dict[str, torch.Tensor], corners: dict[str, Any], message: str
) -> None:
    rewrite(str(tmp_path), 1, {"w": torch.zeros(2)}, {"w": [0]})
    rewrite(str(tmp_path), 2, tensors, corners)
    with pytest.raises(SourceError, match=message):
        open_dcp_hf(str(tmp_path))


class TestConsolidated:
    """model-*-of-*.safetensors beside sharded/, as torch's own consolidation leaves them."""

    STATE = (
        "model.embed_tokens.weight",
        "model.columns",
        "model.same",
        "model.scale",
    )  # it fails on int and bool

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

        def some(mesh: DeviceMesh) -> dict[str, Any]:
            return {name: tensor for name, tensor in make(mesh).items() if name in self.STATE}

        directory = save_shards(some, 2, tmp_path / "run" / "sharded")
        file_of = dict.fromkeys(self.STATE, 1)
        consolidate_safetensors_files(directory, str(tmp_path / "run"), file_of)
        return tmp_path / "run"

    def expected(self) -> dict[str, torch.Tensor]:
        return {name: FULL[name] for name in self.STATE}

    def test_they_are_skipped(self, run: Path) -> None:
        checkpoint = open_dcp_hf(str(run))
        assert_opens(checkpoint, self.expected())
        assert checkpoint.catalog.tensors["model.columns"].num_chunks == 2
        assert [name for name, _ in checkpoint.remarks.skipped] == ["model-00001-of-00001.safetensors"]
        os.truncate(run / checkpoint.remarks.skipped[0][0], 9)
        assert_opens(open_dcp_hf(str(run)), self.expected())

    def test_they_do_not_stand_for_shards(self, run: Path) -> None:
        os.remove(run / "sharded" / "shard-00001-model-00001-of-00001.safetensors")
        with pytest.raises(SourceError, match="no such file"):
            open_dcp_hf(str(run))
        shutil.rmtree(run / "sharded")
        assert set(open_hub_directory(str(run)).catalog.tensors) == set(self.STATE)


def test_odd_paths_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "sharded").write_text("a file")
    (tmp_path / "shard-1-model-1-of-1.safetensors").touch()
    for path in (str(tmp_path), str(tmp_path / "none"), "a\0b"):
        assert not is_dcp_hf(path)
