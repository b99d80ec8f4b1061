"""Safetensors shards saved through DCP: torch's HuggingFaceStorageWriter, transformers, torchtitan, NeMo Automodel.

    shard-R-model-I-of-N.safetensors                  in the directory itself, or in sharded/ below it
    model-I-of-N.safetensors, ...index.json           beside sharded/, once they have been consolidated
    .hf_metadata/                                     NeMo Automodel: config, and the file of each tensor

Where consolidated files are there and whole, they are the model. torch's consolidation writes 0 for scalars, though:
a scalar is always taken from the shards.

Safetensors shards of torch's HuggingFaceStorageWriter, put together: `shard-R-model-I-of-N.safetensors`.

Each rank R writes its parts of the tensors, spread over N numbered files; a header says where a part lies in its
tensor (DCP_SHARDING_INFO), but the whole tensor's shape is written nowhere. It is inferred: as far as the
parts reach. So a gap is seen, and a rank missing in between; that the last rank's files are missing can only be
seen where something else says what should be there.

Source: torch 2.13, torch/distributed/checkpoint/hf_storage.py and _hf_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from shardkit.core.catalog import Catalog, SourceFile, ignore_read, subset
from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape, find_tiling_error, is_grid
from shardkit.core.text import count, escape, listed
from shardkit.errors import ResourceError, SourceError
from shardkit.files.links import locate, read_inside
from shardkit.files.strict_json import open_regular, parse_object, read_exactly
from shardkit.formats.checkpoint import Checkpoint, Opener, asset_directories, inner, listing
from shardkit.formats.dcp.safetensors import saved_offsets
from shardkit.formats.hub.directory import is_hub_directory, open_hub_directory
from shardkit.formats.hub.safetensors import read_header
from shardkit.keys.ties import is_output, ties_embeddings

_SHARDED = "sharded"
_HF_METADATA = ".hf_metadata"
_MAPPING = "fqn_to_file_index_mapping.json"
_INDEX = "model.safetensors.index.json"
_MAX_JSON = 256 << 20
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
_NORMS = ("norm.weight", "ln_f.weight", "norm_f.weight", "final_layernorm.weight", "final_layer_norm.weight")
_COPY = "copy all shard-*.safetensors files of the save; each rank wrote some"


def is_dcp_hf(path: str) -> bool:
    """True where shards lie in the directory, or in `sharded/` below it."""
    return _shard_directory(path) is not None


def open_dcp_hf(path: str) -> Checkpoint:
    """Open the consolidated files beside the shards where they are whole, and the shards otherwise.

    Raises:
        SourceError: files of a rank are missing, a file is damaged, parts have gaps or overlap, tensors that
            an index lists are not there; names files and tensors.
        ResourceError: a file may not be read.
    """
    directory = _shard_directory(path) or path
    assets = asset_directories(
        inner(directory, _HF_METADATA), inner(path, _HF_METADATA), path, inner(path, "consolidated")
    )
    notes: tuple[str, ...] = ()
    if is_hub_directory(path):
        checkpoint = _open_consolidated(path, directory)
        if checkpoint is not None:
            return replace(checkpoint, assets=assets)
        notes = (
            "the consolidated files are damaged, or of another save than the shards: the shards were taken",
        )
    catalog = _open_sharded(path, directory)
    return Checkpoint(
        path=path,
        format="dcp-hf",
        writer=_writer(path, directory),
        catalog=catalog,
        select=lambda names: subset(catalog, names),
        assets=assets,
        notes=(*catalog.notes, *_unproved(path, directory, catalog), *notes),
    )


def _unproved(path: str, directory: str, catalog: Catalog) -> Iterator[str]:
    """Say so where nothing tells how far the tensors should reach."""
    embeddings = [fqn for fqn in catalog.tensors if fqn.endswith(_EMBEDDINGS)]
    by_config = embeddings and type(_config(path, directory).get("vocab_size")) is int
    if not by_config and not any(True for fqn in embeddings for _ in _norms_beside(catalog, fqn)):
        yield (
            "how many ranks saved shards is written nowhere: nothing tells whether those of the last ranks are here; "
            "--base MODEL compares the shapes"
        )


def _shard_directory(path: str) -> str | None:
    for directory in (path, inner(path, _SHARDED)):
        if directory is not None and shard_names(listing(directory)):
            return directory
    return None


def _writer(path: str, directory: str) -> str:
    is_nemo = inner(path, _HF_METADATA) or inner(directory, _HF_METADATA)
    return "NeMo Automodel" if is_nemo else "torch.distributed.checkpoint (safetensors)"


def _open_sharded(path: str, directory: str) -> Catalog:
    """Open the shards, and hold them against whatever else says what should be there."""
    prefix = f"{_SHARDED}/" if directory != path else ""
    catalog = open_shards(directory, listing(directory), prefix)
    problems = [*_absent(path, directory, catalog), *_too_small(path, directory, catalog)]
    if problems:
        raise SourceError(
            f"the shards in {escape(directory)} are not all of the model: files of the last ranks may be missing",
            problems=problems,
            hint=_COPY,
        )
    return catalog


def _absent(path: str, directory: str, catalog: Catalog) -> Iterator[str]:
    """Yield each tensor that a list of names beside the shards has and the shards have not."""
    is_tied = ties_embeddings(_config(path, directory))
    for name, fqns in _lists_of_names(path, directory):
        for fqn in fqns:
            if fqn not in catalog.tensors and not (is_tied and is_output(fqn)):
                yield f"{escape(fqn)}: listed in {name}, in no shard"


def _lists_of_names(path: str, directory: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    for home in dict.fromkeys((directory, path)):
        mapping = _read_json(home, f"{_HF_METADATA}/{_MAPPING}")
        if mapping:
            yield f"{_HF_METADATA}/{_MAPPING}", mapping
        names = _read_json(home, _INDEX).get("weight_map")
        if isinstance(names, dict):
            yield _INDEX, names


def _too_small(path: str, directory: str, catalog: Catalog) -> Iterator[str]:
    """Yield each embedding that is smaller than the config says, and each norm smaller than its embedding.

    The parts at the end are missing: shards say where they begin, and nowhere how large the whole is.
    """
    config = _config(path, directory)
    rows, columns = config.get("vocab_size"), config.get("hidden_size")
    for fqn, entry in catalog.tensors.items():
        if not fqn.endswith(_EMBEDDINGS) or len(entry.shape) != 2:
            continue
        for dim, (size, key) in enumerate(((rows, "vocab_size"), (columns, "hidden_size"))):
            if type(size) is int and entry.shape[dim] < size:
                yield f"{escape(fqn)}: {entry.shape[dim]} in dim {dim}, {key} of config.json is {size}"
        for norm in _norms_beside(catalog, fqn):
            size = catalog.tensors[norm].shape[0]
            if size < entry.shape[1]:
                yield f"{escape(norm)}: {size} in dim 0, dim 1 of {escape(fqn)} is {entry.shape[1]}"


def _norms_beside(catalog: Catalog, embedding: str) -> Iterator[str]:
    """Yield the norms behind the last layer: as long as the embedding is wide, and cut along that dim."""
    home = embedding.removesuffix(next(end for end in _EMBEDDINGS if embedding.endswith(end)))
    for end in _NORMS:
        entry = catalog.tensors.get(home + end)
        if entry is not None and len(entry.shape) == 1:
            yield home + end


def _config(path: str, directory: str) -> Mapping[str, object]:
    places = (
        (home, name) for name in (f"{_HF_METADATA}/config.json", "config.json") for home in (directory, path)
    )
    for home, name in places:
        config = _read_json(home, name)
        if config:
            return config
    return {}


def _read_json(directory: str, name: str) -> Mapping[str, object]:
    """Return a JSON object that lies beside the weights, empty where there is none to be read."""
    try:
        return parse_object(read_inside(directory, name, _MAX_JSON), name)
    except (SourceError, ResourceError):
        return {}


def _open_consolidated(path: str, directory: str) -> Checkpoint | None:
    """Open the consolidated files, with scalars from the shards; None where they are not whole."""
    try:
        checkpoint = open_hub_directory(path)
    except SourceError:
        return None
    catalog, notes = checkpoint.catalog, list(checkpoint.notes)
    try:
        shards = _open_sharded(path, directory)
    except SourceError as error:
        notes.append(f"the consolidated files were taken; the shards cannot be: {error.message}")
        return replace(checkpoint, format="dcp-hf", writer=_writer(path, directory), notes=tuple(notes))
    if any(fqn not in catalog.tensors for fqn in shards.tensors) or any(
        shards.tensors[fqn].shape != entry.shape
        for fqn, entry in catalog.tensors.items()
        if fqn in shards.tensors
    ):
        return None
    catalog = subset(catalog, tuple(catalog.tensors))
    changed = [
        fqn
        for fqn, entry in catalog.tensors.items()
        if not entry.shape and _take_scalar(catalog, shards, fqn)
    ]
    if changed:
        notes.append(
            f"{count(len(changed), 'scalar')} of the consolidated files differ from the shards, whose values were "
            f"taken: {listed(changed)}"
        )
    return replace(
        checkpoint,
        format="dcp-hf",
        writer=_writer(path, directory),
        catalog=catalog,
        select=lambda names: subset(catalog, names),
        notes=tuple(notes),
    )


def _take_scalar(catalog: Catalog, shards: Catalog, fqn: str) -> bool:
    """Point a scalar at the shards where they hold another value; True where they do."""
    if fqn not in shards.tensors or shards.tensors[fqn].dtype is not catalog.tensors[fqn].dtype:
        return False
    found, wanted = (_bytes_of(each, fqn) for each in (catalog, shards))
    if found == wanted:
        return False
    row, other = catalog.tensors[fqn].first_chunk, shards.tensors[fqn].first_chunk
    catalog.files.append(shards.files[shards.chunks.file[other]])
    catalog.chunks.file[row] = len(catalog.files) - 1
    catalog.chunks.start[row] = shards.chunks.start[other]
    return True


def _bytes_of(catalog: Catalog, fqn: str) -> bytes:
    row, table = catalog.tensors[fqn].first_chunk, catalog.chunks
    source = catalog.files[table.file[row]]
    if source.decode is not None:
        return bytes(source.decode(ignore_read))
    with open_regular(source.path, source.name) as (fd, _):
        return read_exactly(fd, table.start[row], table.nbytes[row], source.name)


_NAME = re.compile(r"shard-(\d{5,6})-model-(\d{5,6})-of-(\d{5,6})\.safetensors")
_MAX_LISTED = 1000  # missing files: one that is named with a huge number stands for no more


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


OPENERS = {"dcp-hf": Opener(is_dcp_hf, open_dcp_hf)}
