"""Safetensors shards saved through DCP: HuggingFaceStorageWriter, transformers, torchtitan, NeMo Automodel.

    shard-R-model-I-of-N.safetensors                  in the directory itself, or in sharded/ below it
    model-I-of-N.safetensors, ...index.json           beside sharded/, once they have been consolidated
    .hf_metadata/                                     NeMo Automodel: config, and the file of each tensor

Each rank R writes its parts of the tensors into N numbered files. A header has the offsets of each part in its tensor
(DCP_SHARDING_INFO), called its *corner* here, but no file has the shape of the whole tensor: it is assumed to end where
the last part ends. So gaps are noticed, and so is a missing rank between others. Missing files of the last ranks are
noticed only by comparing with a list of names beside the shards, or, when consolidating, with the base or the class
(`LAST_RANKS`).

Consolidated files beside the shards are not read: torch's consolidation writes 0 for scalars.

DCP also has `serialization_format=SAFETENSORS`: a `.metadata`, and each `.distcp` ends with one safetensors
file, its safetensors part. The places in that `.metadata` are wrong: every tensor of a file has the first byte of the
safetensors part and the length of its bare bytes. (torch's own reader cannot load such a save.) The part's header has
the true places, and must agree with `.metadata` on everything else. The writer stores chunks by name: of several chunks
of one tensor in one file, only the last is stored.

Source: torch 2.13, torch/distributed/checkpoint/hf_storage.py, _hf_utils.py and filesystem.py
(`_write_files_from_queue`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

from shardkit.core.catalog import Catalog, SourceFile, TensorEntry, subset
from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape, find_tiling_error
from shardkit.core.text import count, escape
from shardkit.errors import SourceError
from shardkit.files.links import locate
from shardkit.files.strict_json import open_regular, parse_object, read_exactly, stamp_of
from shardkit.formats.contract import (
    Checkpoint,
    Contents,
    Opener,
    Remarks,
    asset_directories,
    folder_below,
    listing,
    matching_names,
    settings_in,
)
from shardkit.formats.dcp.metadata import DcpMetadata
from shardkit.formats.hub.safetensors import (
    LENGTH_BYTES,
    SafetensorsHeader,
    StoredTensor,
    check_header,
    read_header,
    text_length,
)
from shardkit.keys.ties import is_output, ties_embeddings

_NAME = re.compile(r"shard-(\d{5,6})-model-(\d{5,6})-of-(\d{5,6})\.safetensors")
_SHARDED = "sharded"
_HF_METADATA = ".hf_metadata"
_MAPPING = "fqn_to_file_index_mapping.json"
_INDEX = "model.safetensors.index.json"
_MAX_JSON = 256 << 20
_MAX_LISTED = 1000  # missing files: a name with a huge number must not make more
_INFO, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # a key of the header, and of each tensor in it
_MAX_OFFSET = 1 << 62
_COPY = "copy all shard-*.safetensors files of the save; each rank wrote some"
_CONSOLIDATED = "consolidated from the shards, which are read; alone in a directory it is read as a model"
LAST_RANKS = "nothing shows how many ranks saved shards, so those of the last ranks may be missing"
"""A note on every such checkpoint: shapes are those that the shards make up, until they are compared with the model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardDirectory:
    """The directory of the shards, and the model's config beside them."""

    path: str
    """The directory that is opened."""
    directory: str
    """The directory of the shards: `path`, or `sharded/` in it."""
    config: Mapping[str, object]
    """The model's config.json; empty if it is missing."""

    @property
    def writer(self) -> str:
        is_nemo = folder_below(self.path, _HF_METADATA) or folder_below(self.directory, _HF_METADATA)
        return "NeMo Automodel" if is_nemo else "torch.distributed.checkpoint (safetensors)"


def is_dcp_hf(path: str) -> bool:
    """True if the directory has shards, or its `sharded/` does."""
    return _shard_directory(path) is not None


def open_dcp_hf(path: str) -> Checkpoint:
    """Open the shards as a checkpoint; consolidated files beside them are skipped.

    Raises:
        SourceError: files of a rank are missing, a file is damaged, parts have gaps or overlap, or tensors that
            an index lists are missing; names files and tensors.
        ResourceError: a file may not be read.
    """
    directory = _shard_directory(path) or path
    home = _ShardDirectory(path=path, directory=directory, config=_read_config(path, directory))
    assets = asset_directories(
        folder_below(directory, _HF_METADATA),
        folder_below(path, _HF_METADATA),
        path,
        folder_below(path, "consolidated"),
    )
    shards = _open_shards(home)
    return Checkpoint(
        path=path,
        format="dcp-hf",
        writer=home.writer,
        catalog=shards,
        select=partial(subset, shards),
        contents=Contents(assets=assets),
        remarks=Remarks(
            notes=(*shards.notes, LAST_RANKS),
            skipped=tuple(
                (name, _CONSOLIDATED) for name in matching_names(listing(path), "model*.safetensors")
            ),
        ),
    )


def _shard_directory(path: str) -> str | None:
    for directory in (path, folder_below(path, _SHARDED)):
        if directory is not None and _shard_names(listing(directory)):
            return directory
    return None


def _read_config(path: str, directory: str) -> Mapping[str, object]:
    places = (
        (home, name) for name in (f"{_HF_METADATA}/config.json", "config.json") for home in (directory, path)
    )
    return next((config for home, name in places if (config := settings_in(home, name))), {})


def _open_shards(home: _ShardDirectory) -> Catalog:
    """Open the shards, and compare their tensors with the lists of names beside them."""
    catalog = _read_shards(home.directory, f"{_SHARDED}/" if home.directory != home.path else "")
    SourceError.raise_for(
        list(_absent_tensors(home, catalog)),
        f"the shards in {escape(home.directory)} are not all of the model: files of the last ranks may be missing",
        hint=_COPY,
    )
    return catalog


def _absent_tensors(home: _ShardDirectory, catalog: Catalog) -> Iterator[str]:
    """Yield a line for each tensor that a list of names beside the shards has, but the shards lack."""
    is_tied = ties_embeddings(home.config)
    for name, fqns in _lists_of_names(home):
        for fqn in fqns:
            if fqn not in catalog.tensors and not (is_tied and is_output(fqn)):
                yield f"{escape(fqn)}: listed in {name}, in no shard"


def _lists_of_names(home: _ShardDirectory) -> Iterator[tuple[str, Mapping[str, object]]]:
    for directory in dict.fromkeys((home.directory, home.path)):
        mapping = settings_in(directory, f"{_HF_METADATA}/{_MAPPING}", _MAX_JSON)
        if mapping:
            yield f"{_HF_METADATA}/{_MAPPING}", mapping
        names = settings_in(directory, _INDEX, _MAX_JSON).get("weight_map")
        if isinstance(names, dict):
            yield _INDEX, names


class _ShardName(NamedTuple):
    """The numbers in a shard's name, all counted from 1."""

    rank: int
    number: int
    total: int


class _PartExtent(NamedTuple):
    """The place of a part's bytes."""

    file: int
    start: int
    nbytes: int


class _PartsOfTensor(NamedTuple):
    """The parts of one tensor."""

    dtype: DType
    chunks: dict[Region, _PartExtent]


def _shard_names(names: Collection[str]) -> dict[str, _ShardName]:
    """Return the names of shards, in the order of rank and number."""
    matches = ((name, _NAME.fullmatch(name)) for name in names)
    shards = {name: _ShardName(*map(int, match.groups())) for name, match in matches if match}
    return dict(sorted(shards.items(), key=lambda item: item[1]))


def _read_shards(directory: str, prefix: str) -> Catalog:
    """Open the shards in a directory as one checkpoint.

    Args:
        directory: of the shards.
        prefix: put before the files' names in messages, e.g. "sharded/".

    Raises:
        SourceError: a rank's files are missing, a file is damaged, parts have gaps, overlap or differ in dtype;
            names files and tensors.
        ResourceError: a file may not be read.
    """
    shards = _shard_names(listing(directory))
    _check_numbers(shards, prefix)
    catalog = Catalog(format="dcp-safetensors", directory=directory)
    parts: dict[str, _PartsOfTensor] = {}
    problems: list[str] = []
    for name in shards:
        _read_shard(catalog, parts, locate(directory, name), prefix + name, problems)
    for fqn, tensor_parts in parts.items():
        _add_tensor(catalog, fqn, tensor_parts, problems)
    SourceError.raise_for(
        problems,
        f"the shards in {escape(directory)} do not make up {count(len(problems), 'tensor')}",
        hint=f"the checkpoint is damaged or incomplete: {_COPY}",
    )
    if not catalog.tensors:
        raise SourceError(f"the shards in {escape(directory)} hold no tensors", hint=_COPY)
    return catalog


def _check_numbers(shards: Mapping[str, _ShardName], prefix: str) -> None:
    """Raise SourceError if the names of shards are of several saves, or if numbers are missing among them."""
    totals = sorted({shard.total for shard in shards.values()})
    if len(totals) > 1:
        raise SourceError(
            f"shards of several saves in one directory: ...-of-{totals[0]:05d} and ...-of-{totals[-1]:05d}",
            hint="move the files of one save to a directory of their own",
        )
    ranks = {shard.rank for shard in shards.values()}
    numbers = {shard.number for shard in shards.values()}
    missing_names = [f"shard-{rank:05d}-model-*" for rank in _missing_numbers(ranks, max(ranks))]
    missing_names += [f"shard-*-model-{number:05d}" for number in _missing_numbers(numbers, totals[0])]
    problems = [f"{prefix}{name}-of-{totals[0]:05d}.safetensors: no such file" for name in missing_names]
    SourceError.raise_for(problems, f"{count(len(problems), 'shard')} missing", hint=_COPY)


def _missing_numbers(present: Collection[int], last: int) -> list[int]:
    """Return the first few of the numbers from 1 to `last` that are absent."""
    return list(islice((number for number in range(1, last + 1) if number not in present), _MAX_LISTED))


def _read_shard(
    catalog: Catalog, parts: dict[str, _PartsOfTensor], path: str, name: str, problems: list[str]
) -> None:
    """Add the parts of tensors in one shard to `parts`, and a line to `problems` for each part that contradicts another one.

    Args:
        catalog: gets the shard as a file, and the notes on it.
        parts: tensor -> its parts so far.
        path: of the shard.
        name: of the shard, for messages.
        problems: of all shards.
    """
    header = read_header(path, name)
    corners = saved_offsets(header, name)
    catalog.notes += header.notes
    catalog.files.append(SourceFile(name=name, path=path, size=header.size, stamp=header.stamp))
    file = len(catalog.files) - 1
    for tensor in header.tensors:
        corner = corners[tensor.fqn] if corners is not None else (0,) * len(tensor.shape)
        tensor_parts = parts.setdefault(tensor.fqn, _PartsOfTensor(tensor.dtype, {}))
        region = Region(corner, tensor.shape)
        if tensor_parts.dtype is not tensor.dtype:
            problems.append(
                f"{escape(tensor.fqn)}: {escape(name)} has {tensor.dtype.name}, another {tensor_parts.dtype.name}"
            )
        elif any(len(first.sizes) != len(tensor.shape) for first in islice(tensor_parts.chunks, 1)):
            problems.append(
                f"{escape(tensor.fqn)}: {escape(name)} has {len(tensor.shape)} dims, another does not"
            )
        else:  # a second part with the same region is a replica
            tensor_parts.chunks.setdefault(region, _PartExtent(file, tensor.start, tensor.nbytes))


def _add_tensor(catalog: Catalog, fqn: str, parts: _PartsOfTensor, problems: list[str]) -> None:
    """Add a tensor to the catalog, with the shape at whose end its last part ends; or a line to `problems` if parts do not fit."""
    regions, chunks = list(parts.chunks), list(parts.chunks.values())
    shape: Shape = tuple(map(max, zip(*(region.stops for region in regions), strict=True)))
    reason = find_tiling_error(shape, regions)
    if reason:
        names = dict.fromkeys(escape(catalog.files[chunk.file].name) for chunk in chunks[:3])
        more = ", ..." if len(chunks) > 3 else ""
        problems.append(f"{escape(fqn)}: {reason} (parts lie in {', '.join(names)}{more})")
        return
    files, starts, nbytes = ([chunk[column] for chunk in chunks] for column in range(3))
    catalog.add_tensor_columns(fqn, parts.dtype, shape, files, starts, nbytes, regions)


def point_at_parts(metadata: DcpMetadata, files: list[SourceFile]) -> None:
    """Give every chunk its true place in the safetensors part of its file; the encoding becomes "raw".

    Raises:
        SourceError: a part is damaged, or lacks chunks that `.metadata` lists; names files and tensors.
        ResourceError: a file may not be read.
    """
    rows_of: dict[int, list[tuple[int, TensorEntry]]] = {}
    for entry in metadata.tensors.values():
        for row in entry.chunk_ids:
            rows_of.setdefault(metadata.chunks.file[row], []).append((row, entry))
    problems: list[str] = []
    for file, rows in rows_of.items():
        files[file] = _point_in_file(metadata, files[file], rows, problems)
    SourceError.raise_for(
        problems,
        f"{len(problems)} chunks that {metadata.where} lists are missing from their files",
        hint="torch stores one chunk of a tensor in each safetensors file: the others are lost",
    )
    metadata.encoding = "raw"


def _point_in_file(
    metadata: DcpMetadata, source: SourceFile, rows: Sequence[tuple[int, TensorEntry]], problems: list[str]
) -> SourceFile:
    """Give the chunks in one file their true places, from the header of its safetensors part; return the checked file.

    Args:
        metadata: its table of chunks is changed.
        source: the file.
        rows: (row in that table, tensor) of each chunk in the file.
        problems: a line is added for each chunk that the file lacks.
    """
    table = metadata.chunks
    starts = {table.start[row] for row, _ in rows}
    if len(starts) > 1:
        raise SourceError(
            f"{metadata.where} places the tensors of {escape(source.name)} at {len(starts)} different bytes, "
            "as bare data and not as records: torch writes no such file"
        )
    base = starts.pop()
    with open_regular(source.path, source.name, follow=False) as (fd, size):
        header, stamp = _read_part(fd, base, size, source.name), stamp_of(fd)
    stored = {tensor.fqn: tensor for tensor in header.tensors}
    corners = saved_offsets(header, source.name)
    for row, entry in rows:
        region, tensor = table.region(row), stored.get(entry.fqn)
        corner = None if corners is None else corners.get(entry.fqn)
        reason = _difference(entry, region, tensor, corner)
        if reason or tensor is None:
            problems.append(
                f"{escape(entry.fqn)}: chunk at {list(region.offsets)}: {escape(source.name)} {reason}"
            )
        else:
            table.start[row], table.nbytes[row] = base + tensor.start, tensor.nbytes
    return replace(source, size=size, stamp=stamp)


def _read_part(fd: int, base: int, size: int, name: str) -> SafetensorsHeader:
    """Return the header of the safetensors part at byte `base` of a file; its places are relative to `base`."""
    size -= base
    if size < 0:
        raise SourceError(f"{escape(name)}: its safetensors part would begin at byte {base}, past its end")
    start = read_exactly(fd, base, min(size, LENGTH_BYTES), name)
    text = read_exactly(fd, base + LENGTH_BYTES, text_length(start, size, name), name)
    return check_header(text, size, name)


def _difference(
    entry: TensorEntry, region: Region, tensor: StoredTensor | None, corner: tuple[int, ...] | None
) -> str | None:
    """Return how a chunk in a file differs from what `.metadata` lists, as the end of a sentence about the file, or None.

    Args:
        entry: the tensor, by `.metadata`.
        region: of the chunk, by `.metadata`.
        tensor: what the file's safetensors part has under the tensor's name, or None.
        corner: the offsets of that part in the tensor; None if the file does not record them.
    """
    if tensor is None:
        return "does not hold it"
    if corner is None:
        return f"has no {_INFO}"
    if corner != region.offsets:
        return f"holds the chunk at {list(corner)} instead"
    if tensor.dtype is not entry.dtype:
        return f"holds {tensor.dtype.name}, expected {entry.dtype.name}"
    if tensor.shape != region.sizes:
        return f"holds shape {list(tensor.shape)}, expected {list(region.sizes)}"
    return None


def saved_offsets(header: SafetensorsHeader, name: str) -> dict[str, Shape] | None:
    """Return the offsets of each tensor's part in the whole tensor, from the header's DCP_SHARDING_INFO.

    Args:
        header: of the file.
        name: of the file, for messages.

    Returns:
        Offsets in elements by tensor; None if the header has no DCP_SHARDING_INFO.

    Raises:
        SourceError: malformed, or at odds with the header; names file and tensors.
    """
    text = header.metadata.get(_INFO)
    if text is None:
        return None
    info = parse_object(text.encode(), f"{name}, {_INFO}")
    corners: dict[str, Shape] = {}
    problems: list[str] = []
    for tensor in header.tensors:
        fields = info.get(tensor.fqn)
        offsets = fields.get(_OFFSETS) if isinstance(fields, dict) else None
        corner = _parse_offsets(offsets, len(tensor.shape))
        if corner is None:
            problems.append(
                f"{escape(tensor.fqn)}: expected {len(tensor.shape)} offsets, found {escape(repr(offsets))}"
            )
        else:
            corners[tensor.fqn] = corner
    SourceError.raise_for(
        problems,
        f"{escape(name)}: {_INFO} does not place {len(problems)} tensors",
        hint="the file is damaged or was put together by hand: use another copy",
    )
    return corners


def _parse_offsets(offsets: object, num_dims: int) -> Shape | None:
    if not isinstance(offsets, list) or len(offsets) != num_dims:
        return None
    if any(type(offset) is not int or not 0 <= offset < _MAX_OFFSET for offset in offsets):
        return None
    return tuple(offsets)


OPENERS = {"dcp-hf": Opener(is_dcp_hf, open_dcp_hf)}
