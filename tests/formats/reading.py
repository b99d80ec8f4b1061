"""Reading tensors back through a checkpoint's catalog, and what they ought to be."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

from shardkit.core.catalog import Catalog, subset
from shardkit.core.regions import relative_to, runs
from shardkit.formats.contract import Checkpoint
from shardkit.formats.contract.optimizer import OptimizerState
from shardkit.formats.dcp import chunk_list
from shardkit.formats.dcp.chunk_list import ChunkList
from tests.bits import raw

Contents = dict[str, tuple[str, tuple[int, ...], bytes]]


def chunk_list_of(directory: str, file: str) -> ChunkList:
    """Return the chunk list of a shard file."""
    return chunk_list.read_beside(directory, file, os.path.getsize(os.path.join(directory, file)))[0]


def contents(checkpoint: Checkpoint) -> Contents:
    """Return dtype, shape and row-major bytes of every tensor."""
    catalog = checkpoint.select(list(checkpoint.catalog.tensors))
    assert catalog.encoding == "raw"
    return held(catalog)


def held(catalog: Catalog) -> Contents:
    """Return the same of a "raw" catalog."""
    return {
        name: (entry.dtype.name, entry.shape, read_tensor(catalog, name))
        for name, entry in catalog.tensors.items()
    }


def read_tensor(catalog: Catalog, name: str) -> bytes:
    entry, table = catalog.tensors[name], catalog.chunks
    out, itemsize, filled = bytearray(entry.nbytes), entry.dtype.itemsize, 0
    for row in entry.chunk_ids:
        source, region = catalog.files[table.file[row]], table.region(row)
        start, nbytes = table.start[row], table.nbytes[row]
        assert nbytes == region.num_elements * itemsize
        if not source.is_raw:
            assert nbytes == source.size
            data = bytes(source.decoded())[start : start + nbytes]
        else:
            with open(source.path, "rb") as file:
                file.seek(start)
                data = file.read(nbytes)
        for run in runs(relative_to(region, (0,) * len(entry.shape)), entry.shape):
            piece = data[run.target * itemsize : (run.target + run.length) * itemsize]
            out[run.source * itemsize : (run.source + run.length) * itemsize] = piece
            filled += len(piece)
    assert filled == entry.nbytes
    return bytes(out)


def tensors_of(state: OptimizerState) -> Contents:
    """Return the tensors of an optimizer's state."""
    return held(subset(state.catalog, [name for name in state.catalog.tensors if name not in state.objects]))


def objects_of(state: OptimizerState) -> dict[str, Any]:
    """Return what an optimizer's state has beside tensors."""
    import torch

    return {
        name: torch.load(io.BytesIO(read_tensor(state.catalog, name)), weights_only=True)
        for name in state.objects
    }


def expected(tensors: Mapping[str, Any]) -> Contents:
    """Return the same of torch tensors."""
    return {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw(tensor))
        for name, tensor in tensors.items()
    }
