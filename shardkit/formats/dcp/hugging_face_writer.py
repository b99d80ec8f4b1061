"""Make the safetensors shards of a layout, with the names and headers of torch's HuggingFaceStorageWriter.

A safetensors header has one entry for each name. So a file holds at most one region of a tensor, and each tied name has
its own copy of the bytes. Regions without elements are left out, as nothing would read them.

Source: torch 2.13, torch/distributed/checkpoint/hf_storage.py and filesystem.py; transformers 5.23,
distributed/checkpoint.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardkit.core.dtypes import DType
from shardkit.core.placements import Placement
from shardkit.core.regions import Region
from shardkit.formats.hub.safetensors import OutputTensor, are_aligned, check_writable, make_header
from shardkit.keys.names import natural
from shardkit.layout.layout import Layout
from shardkit.transfer.rank_files import Content, PlacedRegion, RankImages

_NAME = "shard-{:05d}-model-00001-of-00001.safetensors"
_VERSION = "1.0"  # torch 2.13: filesystem.py, DCP_VERSION


def without_strided_shards(layout: Layout) -> Layout:
    """Return a layout without strided shards: each rank holds one region of a tensor, which transformers' loader expects."""
    return replace(
        layout,
        tensors={
            fqn: replace(tensor, placements=tuple(Placement(p.shard_dim) for p in tensor.placements))
            for fqn, tensor in layout.tensors.items()
        },
    )


def shard_images(
    layout: Layout,
    dtypes: Mapping[str, DType],
    sources: Mapping[str, str],
    aliases: Mapping[str, Sequence[str]],
) -> RankImages:
    """Return the files of a layout in which every rank holds at most one region of a tensor.

    Args:
        layout: the regions of each tensor, by rank.
        dtypes: the dtype in which each tensor is stored.
        sources: each tensor's name in the source.
        aliases: the other names of a tensor.

    Raises:
        SourceError: dtypes or names that safetensors cannot hold, or a header that is too large.
    """
    file_of = {rank: file for file, rank in enumerate(layout.mesh.file_ranks)}
    files: list[list[PlacedRegion]] = [[] for _ in file_of]
    names = [(name, fqn) for fqn in layout.tensors for name in (fqn, *aliases.get(fqn, ()))]
    for name, fqn in sorted(names, key=lambda pair: natural(pair[0])):
        owners = list(layout.owners(fqn))
        kept = [pair for pair in owners if pair[1].num_elements] or owners[:1]
        for rank, region in kept:
            shape = layout.tensors[fqn].shape
            files[file_of[rank]].append(PlacedRegion(name, sources[fqn], dtypes[fqn], shape, region))
    fqn, shape = next(((f, t.shape) for f, t in layout.tensors.items() if t.shape), ("", ()))
    for placed in files:
        # A rank that stores nothing still gets a file, as a missing file looks like a loss.
        if not placed and fqn:
            empty = Region((shape[0], *(0 for _ in shape[1:])), (0, *shape[1:]))
            placed.append(PlacedRegion(fqn, sources[fqn], dtypes[fqn], shape, empty))
    return RankImages([_content(rank, placed) for rank, placed in enumerate(files) if placed])


def _content(rank: int, placed: Sequence[PlacedRegion]) -> Content:
    name = _NAME.format(rank + 1)
    stored = [OutputTensor(part.fqn, part.source, part.dtype, part.region.sizes) for part in placed]
    check_writable(stored)
    order = list(range(len(placed)))
    if not are_aligned(stored):
        order.sort(key=lambda index: -stored[index].dtype.itemsize)  # stable
    offsets = {part.fqn: {"saved_offsets": list(part.region.offsets)} for part in placed}
    metadata = {"DCP_VERSION": _VERSION, "DCP_SHARDING_INFO": json.dumps(offsets), "format": "pt"}
    header = make_header(name, [stored[index] for index in order], metadata)
    return Content(name, header, [placed[index] for index in order])
