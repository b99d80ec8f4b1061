"""serialization_format=SAFETENSORS: read through the header, since `.metadata` has no true places."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.device_mesh import DeviceMesh

from shardkit.errors import SourceError
from shardkit.formats.dcp.directory import open_dcp
from tests.formats.dcp.samples import alter, assert_holds, open_catalog, save_rank_local, shard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {
    "model.w": torch.arange(20.0).reshape(5, 4),
    "model.mask": torch.tensor([True, False]),
    "model.scale": torch.tensor(2.5, dtype=torch.bfloat16),
    "model.none": torch.zeros(0, 3),
}


def write(directory: Path, state: dict[str, Any], **options: Any) -> str:
    writer = dcp.FileSystemWriter(
        str(directory), serialization_format=SerializationFormat.SAFETENSORS, **options
    )
    dcp.save(state, storage_writer=writer, no_dist=True)
    return str(directory)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    nested = {"model": {name.removeprefix("model."): tensor for name, tensor in STATE.items()}}
    return write(tmp_path / "c", nested)


def test_tensors_are_found_through_the_header(directory: str) -> None:
    opened = open_dcp(directory)
    assert not opened.has_records
    assert_holds(opened.catalog, STATE)
    assert_holds(opened.select(("model.mask",)), {"model.mask": STATE["model.mask"]})
    assert all(file.stamp is not None for file in opened.catalog.files)


def test_byte_entries_come_before_the_tensors(tmp_path: Path) -> None:
    """Where a state dict holds a BytesIO: its bytes lie in front, all other objects go the same way."""
    import io

    state = {"w": torch.arange(4.0), "blob": io.BytesIO(b"some bytes")}
    catalog = open_catalog(write(tmp_path / "c", state), records=True)
    assert catalog.objects == ("blob",)
    assert min(catalog.chunks.start) > 10
    assert_holds(catalog, {"w": torch.arange(4.0)})


def test_one_file_per_tensor(tmp_path: Path) -> None:
    directory = write(tmp_path / "c", dict(STATE), single_file_per_rank=False)
    assert sum(name.endswith(".distcp") for name in os.listdir(directory)) == len(STATE)
    assert_holds(open_catalog(directory), STATE)


def test_parts_of_several_ranks(tmp_path: Path) -> None:
    wide = torch.arange(14.0).reshape(7, 2)

    def make(mesh: DeviceMesh) -> dict[str, Any]:
        return {"w": shard(wide, mesh), "columns": shard(wide, mesh, dim=1)}

    options = {"serialization_format": SerializationFormat.SAFETENSORS}
    directory = save_rank_local(make, 2, tmp_path / "c", **options)
    assert_holds(open_catalog(directory, records=True), {"w": wide, "columns": wide})


def two_chunks(metadata: Metadata) -> None:
    """As a rank lists two chunks of one tensor: both would lie in the file, one does."""
    corner = torch.Size([3, 0])
    (index,) = (index for index in metadata.storage_data if index.fqn == "model.w")
    info = metadata.storage_data[index]
    metadata.state_dict_metadata["model.w"].chunks = [
        ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([3, 4])),
        ChunkStorageMetadata(corner, torch.Size([2, 4])),
    ]
    info.length = 48
    other = type(info)(info.relative_path, info.offset, 32)
    metadata.storage_data[MetadataIndex("model.w", corner, 1)] = other


def absent(metadata: Metadata) -> None:
    metadata.state_dict_metadata["gone"] = metadata.state_dict_metadata["model.mask"]
    (index,) = (index for index in metadata.storage_data if index.fqn == "model.mask")
    metadata.storage_data[MetadataIndex("gone", index.offset, 0)] = metadata.storage_data[index]


def dtype(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.w"].properties.dtype = torch.int32


def elsewhere(metadata: Metadata) -> None:
    (index,) = (index for index in metadata.storage_data if index.fqn == "model.w")
    metadata.storage_data[index].offset = 8


def beyond(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.offset = 1 << 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (two_chunks, r"model\.w: chunk at \[3, 0\]: __0_0\.distcp holds the chunk at \[0, 0\] instead"),
        (absent, r"gone: chunk at \[0\]: __0_0\.distcp does not hold it"),
        (dtype, r"model\.w: chunk at \[0, 0\]: __0_0\.distcp holds float32, expected int32"),
        (elsewhere, r"places the tensors of __0_0\.distcp at 2 different bytes"),
        (beyond, r"__0_0\.distcp: its safetensors part would begin at byte 1099511627776"),
    ],
)
def test_what_metadata_says_is_held_against_the_header(
    directory: str, change: Callable[[Metadata], None], message: str
) -> None:
    alter(directory, change)
    with pytest.raises(SourceError, match=message):
        open_catalog(directory)
