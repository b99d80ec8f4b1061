"""Safetensors shards of torch's HuggingFaceStorageWriter, put together: `shard-R-model-I-of-N.safetensors`.

Each rank R writes its parts of the tensors, spread over N numbered files; a header says where a part lies in its
tensor (DCP_SHARDING_INFO), but the whole tensor's shape is written nowhere. It is inferred: as far as the
parts reach. So a gap is seen, and a rank missing in between; that the last rank's files are missing can only be
seen where something else says what should be there.

Source: torch 2.13, torch/distributed/checkpoint/hf_storage.py and _hf_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import islice
from typing import NamedTuple

from shardkit.core.catalog import Catalog, SourceFile
from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape, find_tiling_error
from shardkit.core.text import count, escape
from shardkit.errors import SourceError
from shardkit.files.links import locate
from shardkit.formats.dcp.check import is_grid
from shardkit.formats.dcp.sharding_info import saved_offsets
from shardkit.formats.hub.safetensors import read_header

_NAME = re.compile(r"shard-(\d{5,6})-model-(\d{5,6})-of-(\d{5,6})\.safetensors")
_MAX_LISTED = 1000  # missing files: one that is named with a huge number stands for no more
_COPY = "copy all shard-*.safetensors files of the save; each rank wrote some"


class ShardName(NamedTuple):
    """The numbers in a shard's name, all counted from 1."""

    rank: int
    number: int
    total: int


class _Parts(NamedTuple):
    """One tensor's parts; the columns of its chunks."""

    dtype: DType
    files: list[int]
    starts: list[int]
    nbytes: list[int]
    regions: list[Region]
    seen: set[Region]


def shard_names(names: Collection[str]) -> dict[str, ShardName]:
    """Return those of some names that are shards', in the order of rank and number."""
    matches = ((name, _NAME.fullmatch(name)) for name in names)
    found = {name: ShardName(*map(int, match.groups())) for name, match in matches if match}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def open_shards(directory: str, names: Collection[str], prefix: str = "") -> Catalog:
    """Open the shards in a directory as one checkpoint.

    Args:
        directory: where they lie.
        names: what it holds.
        prefix: put before the files' names in messages, e.g. "sharded/".

    Raises:
        SourceError: a rank's files are missing, a file is damaged, parts have gaps, overlap or differ in dtype;
            names files and tensors.
        ResourceError: a file may not be read.
    """
    shards = shard_names(names)
    _check_numbers(shards, prefix)
    catalog = Catalog(format="dcp-safetensors", directory=directory)
    parts: dict[str, _Parts] = {}
    problems: list[str] = []
    for name in shards:
        _read_shard(catalog, parts, locate(directory, name), prefix + name, problems)
    for fqn, found in parts.items():
        _add(catalog, fqn, found, problems)
    if problems:
        raise SourceError(
            f"the shards in {escape(directory)} do not make up {count(len(problems), 'tensor')}",
            problems=problems,
            hint=f"the checkpoint is damaged or incomplete: {_COPY}",
        )
    if not catalog.tensors:
        raise SourceError(f"the shards in {escape(directory)} hold no tensors", hint=_COPY)
    return catalog


def _check_numbers(shards: Mapping[str, ShardName], prefix: str) -> None:
    totals = sorted({shard.total for shard in shards.values()})
    if len(totals) > 1:
        raise SourceError(
            f"shards of several saves in one directory: ...-of-{totals[0]:05d} and ...-of-{totals[-1]:05d}",
            hint="move the files of one save to a directory of their own",
        )
    ranks = {shard.rank for shard in shards.values()}
    numbers = {shard.number for shard in shards.values()}
    wanted = [f"shard-{rank:05d}-model-*" for rank in _gaps(ranks, max(ranks))]
    wanted += [f"shard-*-model-{number:05d}" for number in _gaps(numbers, totals[0])]
    problems = [f"{prefix}{name}-of-{totals[0]:05d}.safetensors: no such file" for name in wanted]
    if problems:
        raise SourceError(f"{count(len(problems), 'shard')} missing", problems=problems, hint=_COPY)


def _gaps(present: Collection[int], last: int) -> list[int]:
    """Return the first of the numbers from 1 to `last` that are not there."""
    return list(islice((number for number in range(1, last + 1) if number not in present), _MAX_LISTED))


def _read_shard(
    catalog: Catalog, parts: dict[str, _Parts], path: str, name: str, problems: list[str]
) -> None:
    header = read_header(path, name)
    corners = saved_offsets(header, name)
    catalog.files.append(SourceFile(name=name, path=path, size=header.size, stamp=header.stamp))
    file = len(catalog.files) - 1
    for tensor in header.tensors:
        corner = corners[tensor.fqn] if corners is not None else (0,) * len(tensor.shape)
        found = parts.setdefault(tensor.fqn, _Parts(tensor.dtype, [], [], [], [], set()))
        region = Region(corner, tensor.shape)
        if found.dtype is not tensor.dtype:
            problems.append(
                f"{escape(tensor.fqn)}: {escape(name)} has {tensor.dtype.name}, another {found.dtype.name}"
            )
        elif found.regions and len(found.regions[0].sizes) != len(tensor.shape):
            problems.append(
                f"{escape(tensor.fqn)}: {escape(name)} has {len(tensor.shape)} dims, another does not"
            )
        elif region not in found.seen:  # an equal one is a replica
            found.seen.add(region)
            found.files.append(file)
            found.starts.append(tensor.start)
            found.nbytes.append(tensor.nbytes)
            found.regions.append(region)


def _add(catalog: Catalog, fqn: str, found: _Parts, problems: list[str]) -> None:
    shape: Shape = tuple(map(max, zip(*(region.stops for region in found.regions), strict=True)))
    reason = _tiling_problem(shape, found.regions)
    if reason:
        files = ", ".join(escape(catalog.files[file].name) for file in dict.fromkeys(found.files[:3]))
        problems.append(f"{escape(fqn)}: {reason} (parts lie in {files}{', ...' * (len(found.files) > 3)})")
        return
    catalog.add_tensor_columns(
        fqn, found.dtype, shape, found.files, found.starts, found.nbytes, found.regions
    )


def _tiling_problem(shape: Shape, regions: list[Region]) -> str | None:
    corners = {region.offsets for region in regions if region.num_elements}
    if len(corners) == sum(1 for region in regions if region.num_elements) and is_grid(shape, regions):
        return None
    return find_tiling_error(shape, regions)
