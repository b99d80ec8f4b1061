"""JSON beside the weights: the Hub's index, our manifest, our chunk lists; each in a directory whose rest is good."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import save_file

from shardkit.core.dtypes import DType
from shardkit.core.regions import Region
from shardkit.files import manifest
from shardkit.formats.dcp import chunk_list
from shardkit.formats.hub.directory import open_model, read_index
from shardkit.operations.inspect import inspect
from shardkit.operations.preshard import preshard
from shardkit.operations.verify import verify
from shardkit.training.fill.presharded import open_presharded
from tests.formats.reading import chunk_list_of
from tests.fuzz.mutate import change_json, pick
from tests.fuzz.target import Directory, MemoryFile, Target, attempt, load_json

_INDEX = "model.safetensors.index.json"
_file = MemoryFile()


def _tensors() -> dict[str, torch.Tensor]:
    shapes = {
        "embed.weight": (5, 2),
        "layers.0.w": (4, 3),
        "layers.1.w": (4, 3),
        "norm.weight": (3,),
        "scale": (),
    }
    return {
        name: torch.arange(torch.Size(shape).numel()).float().reshape(shape) for name, shape in shapes.items()
    }


def _files() -> dict[str, str]:
    """Which tensor is in which file."""
    return {name: f"model-{int(number > 2)}.safetensors" for number, name in enumerate(_tensors())}


def _write_model(directory: str) -> None:
    tensors, files = _tensors(), _files()
    for file in set(files.values()):
        part = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(part, os.path.join(directory, file))


_model = Directory(_write_model)


def check_index(data: bytes) -> bool:
    """An index is JSON whose file names stay in the directory; a model that opens has just its tensors."""
    index = attempt(lambda: read_index(_file.put(data), "index"))
    if index is not None:
        assert index.weight_map == load_json(data)["weight_map"]
        for name in index.files:
            path = os.path.normpath(os.path.join("/d", name))
            assert path.startswith("/d/")
            assert name.isprintable()
    _model.put(_INDEX, data)
    model = attempt(lambda: open_model(_model.path()))
    if model is None:
        return False
    assert index is not None
    assert list(model.catalog.tensors) == list(index.weight_map)
    # A file that the index does not list is nobody's.
    assert set(index.weight_map) == {name for name, file in _files().items() if file in index.files}
    return True


@cache
def index_seeds() -> list[bytes]:
    """As transformers writes it."""
    weight_map = _files()
    return [
        json.dumps({"metadata": {"total_size": 152}, "weight_map": weight_map}, indent=2).encode(),
        json.dumps({"weight_map": dict(reversed(weight_map.items()))}).encode(),
    ]


_FILES = (
    *(b'"model-0.safetensors"', b'"model-1.safetensors"', b'"layers.0.w"', b'"scale"', b'"weight_map"'),
    *(b'"metadata"', b'"../model-0.safetensors"', b'"./model-0.safetensors"', b'"total_size"'),
    *(b'"x/../model-0.safetensors"', b'"C:\\\\x"'),
)


def mutate_index(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """Edit tokens."""
    return change_json(rng, pick(rng, seeds), _FILES)


@cache
def _presharded() -> dict[str, bytes]:
    """A model for two ranks, as `preshard` writes it."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "model")
        source.mkdir()
        save_file(_tensors(), source / "model.safetensors", metadata={"format": "pt"})
        preshard(source, Path(folder, "out"), world_size=2)
        return {path.name: path.read_bytes() for path in Path(folder, "out").iterdir()}


def _write_presharded(directory: str) -> None:
    for name, data in _presharded().items():
        Path(directory, name).write_bytes(data)


_shards, _lists = Directory(_write_presharded), Directory(_write_presharded)


def check_manifest(data: bytes) -> bool:
    """Whoever reads a manifest gives a result or an error of ours, also where its digest is right."""
    _shards.put(manifest.NAME, data)
    content = attempt(lambda: manifest.read(_shards.path()))
    if content is None:
        return False
    again = manifest.parse(manifest.dump(content), manifest.NAME)  # without keys that nobody knows
    assert replace(again, crc32=None) == replace(content, crc32=None)
    attempt(lambda: inspect(_shards.path()))
    attempt(lambda: verify(_shards.path()))
    attempt(lambda: _open(_shards.path()))
    return True


def _open(directory: str) -> None:
    """What training does with it."""
    opened = open_presharded(directory)
    if opened is not None:
        opened.open_chunks()


@cache
def manifest_seeds() -> list[bytes]:
    """What `preshard` wrote."""
    return [_presharded()[manifest.NAME]]


_KEYS = (
    *(b'"format"', b'"tensors"', b'"files"', b'"chunks"', b'"name"', b'"size"', b'"crc32"', b'"shape"'),
    *(b'"dtype"', b'"mesh"', b'"axes"', b'"kind"', b'"hub"', b'"checkpoint"', b'"R"', b'"S(0)"'),
    *(b'"S(9)"', b'"float32"', b'"ties"', b'"__0_0.distcp"', b'"__1_0.chunks.json"', b'".metadata"'),
    *(b'"../__0_0.distcp"', b'"scale"', b'"embed.weight"', b'"presharded"', b'"files"'),
    *(b'"model.safetensors"', b'"shardkit.json"', b'"placements"', b'"metadata"'),
)


def mutate_manifest(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """Edit tokens; mostly give it a digest that is right."""
    data = change_json(rng, pick(rng, seeds), _KEYS)
    if rng.random() < 0.15:
        return data
    try:
        content = json.loads(data)
        return manifest.sign(content) if isinstance(content, dict) else data
    except (ValueError, RecursionError):
        return data


_SHARD = "__0_0.distcp"


def check_list(data: bytes) -> bool:
    """A chunk list that is accepted describes boxes of tensors; whoever reads it gives a result or an error."""
    _lists.put(chunk_list.name_for(_SHARD), data)
    listed = attempt(lambda: chunk_list_of(_lists.path(), _SHARD))
    if listed is None:
        return False
    for chunk in listed.chunks:
        _check_chunk(chunk)
    assert all(type(name) is str for names in listed.aliases.values() for name in names)
    content = json.loads(_presharded()[manifest.NAME])
    entry = next(file for file in content["files"] if file["name"] == _SHARD)["chunks"]
    entry["size"], entry["crc32"] = len(data), crc32(data)
    _lists.put(manifest.NAME, manifest.sign(content))
    attempt(lambda: verify(_lists.path()))
    attempt(lambda: _open(_lists.path()))
    return True


def _check_chunk(chunk: chunk_list.ListedChunk) -> None:
    assert (type(chunk.dtype), type(chunk.fqn), type(chunk.region)) == (DType, str, Region)
    numbers: list[Any] = [*chunk.shape, *chunk.region.offsets, *chunk.region.sizes, *chunk[4:8]]
    assert all(type(number) is int and number >= 0 for number in numbers)
    assert chunk.crc32 is None or (type(chunk.crc32) is int and 0 <= chunk.crc32 < 1 << 32)
    offsets, sizes = chunk.region
    assert len(offsets) == len(sizes) == len(chunk.shape), "a region of another number of dims"
    assert all(at + size <= full for at, size, full in zip(offsets, sizes, chunk.shape, strict=True)), (
        "outside"
    )
    assert chunk.region.num_elements * chunk.dtype.itemsize == chunk.data_nbytes, (
        "bytes of another number of elements"
    )


@cache
def list_seeds() -> list[bytes]:
    """What `preshard` wrote."""
    return [_presharded()[chunk_list.name_for(_SHARD)]]


def mutate_list(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """Edit tokens."""
    return change_json(rng, pick(rng, seeds), _KEYS)


TARGETS = {
    "index": Target(check_index, index_seeds, mutate_index, _model.remove),
    "manifest": Target(check_manifest, manifest_seeds, mutate_manifest, _shards.remove),
    "chunk_list": Target(check_list, list_seeds, mutate_list, _lists.remove),
}
