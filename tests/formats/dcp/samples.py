"""DCP checkpoints made by stock torch in this process, rank by rank."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardkit.core.catalog import Catalog, SourceFile
from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import Region
from shardkit.formats.dcp.directory import open_dcp
from shardkit.formats.dcp.writer import write_metadata
from tests.formats.reading import expected, held


def assert_holds(catalog: Catalog, tensors: Mapping[str, torch.Tensor]) -> None:
    """The catalog holds these tensors, in any order, and nothing else."""
    assert held(catalog) == expected(tensors)


def open_catalog(directory: str, *, records: bool | Collection[str] = False) -> Catalog:
    """The catalog of a DCP directory; with `records`, of every tensor or of those named, with raw extents."""
    opened = open_dcp(directory)
    catalog = opened.catalog
    if records is False:
        return catalog
    chosen = opened.select(tuple(catalog.tensors) if records is True else records)
    chosen.notes = (*catalog.notes, *chosen.notes)
    if records is True:
        chosen.objects, chosen.paths = catalog.objects, catalog.paths
    return chosen


def save(state: dict[str, Any], directory: Path, **options: Any) -> str:
    """One process's save."""
    with quiet():
        dcp.save(state, checkpoint_id=str(directory), no_dist=True, **options)
    return str(directory)


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's advice on saving in one process, or into a directory that another rank made."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "torch.distributed is disabled|Detected an existing checkpoint|.*no_dist"
        )
        yield


def alter(directory: str, change: Callable[[Metadata], None], name: str = ".metadata") -> None:
    """Change what a metadata file says."""
    path = Path(directory, name)
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[DeviceMesh]:
    """A group of `world` ranks in which this process is one, and nobody else is there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        dist.destroy_process_group()


def shard(tensor: torch.Tensor, mesh: DeviceMesh, dim: int = 0) -> DTensor:
    """This rank's part of a tensor, cut as FSDP cuts it."""
    parts = tensor.chunk(mesh.size(), dim)
    rank, empty = mesh.get_local_rank(), tensor.narrow(dim, 0, 0)
    local = parts[rank] if rank < len(parts) else empty
    options = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(local.contiguous(), mesh, [Shard(dim)], **options)


def replicate(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that every rank holds whole."""
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def save_rank_local(
    make: Callable[[DeviceMesh], dict[str, Any]], world: int, directory: Path, **options: Any
) -> str:
    """What `dcp.save(..., use_collectives=False)` leaves behind in a world of `world` ranks."""
    for rank in range(world):
        with as_rank(rank, world) as mesh, quiet():
            writer = dcp.FileSystemWriter(str(directory), **options)
            dcp.save(make(mesh), storage_writer=writer, use_collectives=False)
    return str(directory)


def save_shards(
    make: Callable[[DeviceMesh], dict[str, Any]],
    world: int,
    directory: Path,
    file_of: dict[str, int] | None = None,
) -> str:
    """What HuggingFaceStorageWriter(save_distributed=True) leaves behind, without torch's removal of replicas."""
    directory.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        part = directory / f"rank{rank}"
        with as_rank(rank, world) as mesh, quiet():
            writer = HuggingFaceStorageWriter(str(part), fqn_to_index_mapping=file_of, save_distributed=True)
            dcp.save(make(mesh), storage_writer=writer, use_collectives=False)
        for name in os.listdir(part):  # each of these plans believes that it is the first
            if name.startswith("shard-00001"):
                os.rename(part / name, directory / name.replace("shard-00001", f"shard-{rank + 1:05d}", 1))
            else:
                os.remove(part / name)
        part.rmdir()
    return str(directory)


def our_metadata(num_ranks: int, num_tensors: int) -> bytes:
    """A `.metadata` that shardkit writes: sizes are fetched, and those of the last rank are others."""
    catalog = Catalog(format="dcp", directory="", encoding="torch-record")
    for rank in range(num_ranks):
        catalog.files.append(SourceFile(name=f"__{rank}_0.distcp", path="", size=1 << 40))
    for number in range(num_tensors):
        rows = 3 * num_ranks - 1 - number % 2
        chunks = [
            (r, (1 << 20) * number, 700, Region((3 * r, 0), (min(3, rows - 3 * r), 5 + number)))
            for r in range(num_ranks)
        ]
        catalog.add_tensor(f"layers.{number}.weight", BY_NAME["bfloat16"], (rows, 5 + number), iter(chunks))
    out = io.BytesIO()
    write_metadata(out, catalog, {})
    return out.getvalue()
