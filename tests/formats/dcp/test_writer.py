"""torch reads the `.metadata` that we write, and finds what we put there."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from shardkit.core.catalog import Catalog, SourceFile
from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import Region
from shardkit.formats.dcp.metadata import parse_metadata
from shardkit.formats.dcp.writer import write_metadata


def unpickled(catalog: Catalog, aliases: dict[str, list[str]]) -> Any:
    out = io.BytesIO()
    write_metadata(out, catalog, aliases)
    return pickle.loads(out.getvalue())


def example(num_tensors: int = 3, num_files: int = 4) -> Catalog:
    catalog = Catalog(format="dcp", directory="", encoding="torch-record")
    for index in range(num_files):
        catalog.files.append(SourceFile(name=f"__{index}_0.distcp", path="", size=1 << 40))
    for number in range(num_tensors):
        rows = num_files * 2
        chunks = [
            (f, (1 << 33) * number + 300 * f, 70_000, Region((2 * f, 0), (2, 5))) for f in range(num_files)
        ]
        catalog.add_tensor(f"layers.{number}.weight", BY_NAME["bfloat16"], (rows, 5), iter(chunks))
    return catalog


def test_every_tensor_chunk_and_place_is_found() -> None:
    catalog = example(num_tensors=400)
    metadata = unpickled(catalog, {})
    assert list(metadata.state_dict_metadata) == list(catalog.tensors)
    for fqn, entry in catalog.tensors.items():
        found = metadata.state_dict_metadata[fqn]
        assert (found.size, found.properties.dtype) == (torch.Size(entry.shape), torch.bfloat16)
        assert found.properties.layout == torch.strided
        assert metadata.planner_data[fqn] == (fqn,)
        for chunk, row in zip(found.chunks, entry.chunk_ids, strict=True):
            region = catalog.chunks.region(row)
            assert (chunk.offsets, chunk.sizes) == (torch.Size(region.offsets), torch.Size(region.sizes))
            info = metadata.storage_data[MetadataIndex(fqn, region.offsets)]
            place = (catalog.files[catalog.chunks.file[row]].name, catalog.chunks.start[row], 70_000)
            assert (info.relative_path, info.offset, info.length) == place
            assert info.transform_descriptors is None
    assert metadata.version == "1.0.0"
    assert metadata.storage_meta.checkpoint_id is None


def test_aliases_point_at_the_same_records() -> None:
    metadata = unpickled(example(), {"layers.1.weight": ["head.weight"]})
    assert metadata.planner_data["head.weight"] == ("head.weight",)
    for offset in (0, 2, 4, 6):
        index = [MetadataIndex(name, (offset, 0)) for name in ("head.weight", "layers.1.weight")]
        assert metadata.storage_data[index[0]] == metadata.storage_data[index[1]]


def test_scalars_empty_names_and_no_tensors_at_all() -> None:
    catalog = Catalog(format="dcp", directory="")
    catalog.files.append(SourceFile(name="__0_0.distcp", path="", size=9))
    catalog.add_tensor("", BY_NAME["int64"], (), iter([(0, 0, 9, Region((), ()))]))
    name = "x" * 300 + "\u00e9"
    catalog.add_tensor(
        name, BY_NAME["bool"], (1, 2, 3, 4, 5), iter([(0, 0, 9, Region((0,) * 5, (1, 2, 3, 4, 5)))])
    )
    metadata = unpickled(catalog, {})
    assert list(metadata.state_dict_metadata) == ["", name]
    assert metadata.state_dict_metadata[""].size == torch.Size(())
    assert unpickled(Catalog(format="dcp", directory=""), {}).state_dict_metadata == {}


def test_byte_entries_and_paths_of_a_nested_state() -> None:
    catalog = example()
    catalog.add_tensor("optim.lr", BY_NAME["uint8"], (900,), iter([(1, 77, 900, Region((0,), (900,)))]))
    paths: dict[str, tuple[str | int, ...]] = {
        "layers.0.weight": ("model", "layers.0.weight"),
        "layers.1.weight": ("a", 0, 300, "b"),
        "optim.lr": ("optim", "param_groups", 0, "lr"),
    }
    out = io.BytesIO()
    write_metadata(out, catalog, {}, objects=["optim.lr"], paths=paths)
    metadata = pickle.loads(out.getvalue())
    assert metadata.state_dict_metadata["optim.lr"] == BytesStorageMetadata()
    info = metadata.storage_data[MetadataIndex("optim.lr")]
    assert (info.relative_path, info.offset, info.length) == ("__1_0.distcp", 77, 900)
    assert metadata.planner_data == {**paths, "layers.2.weight": ("layers.2.weight",)}
    parsed = parse_metadata(out.getvalue())
    assert set(parsed.objects) == {"optim.lr"}
    assert parsed.paths == metadata.planner_data
