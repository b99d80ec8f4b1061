"""Files of `torch.save` that hold anything: the zip and the tolerant interpreter; held against torch and Python."""

from __future__ import annotations

import argparse
import io
import math
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardkit.core.catalog import ignore_read
from shardkit.core.regions import Region
from shardkit.formats.torchsave.archive import ZipEntry
from shardkit.formats.torchsave.bin import BinTensor, read_bin
from shardkit.formats.torchsave.file import (
    DistributedRef,
    TensorNames,
    TensorRef,
    TorchFile,
    open_torch_file,
    tree_leaves,
)
from shardkit.pickles.policies import Inert, UnmadeObject
from tests.formats.dcp.samples import as_rank, replicate
from tests.formats.torchsave.classes import unpacked
from tests.fuzz.mutate import pick
from tests.fuzz.mutate_pickle import change_pickle
from tests.fuzz.mutate_zip import change_saved, members
from tests.fuzz.reference import SlowUnpickler, load_tensor
from tests.fuzz.target import MemoryFile, Target, attempt
from tests.fuzz.target_record import raw

_file = MemoryFile()
_GIVE_UP = (TypeError, AttributeError, LookupError, AssertionError, RuntimeError, ValueError)
_MAX_DECODED = 1 << 20  # a stride of 0 makes as many bytes as one likes of a few
_SET_OPCODES = (b"\x8f", b"\x91")


def check_file(data: bytes) -> bool:
    """A file is inert data whose tensors lie in it; where torch loads it too, they are torch's."""
    path = _file.put(data)
    file = attempt(lambda: open_torch_file(path, "f.pt"))
    if file is None:
        return False
    for leaf in tree_leaves(file.tree):
        _check_leaf(leaf.value, len(data))
    if b"distributed" in data:  # torch would make a mesh, and take milliseconds
        return True
    try:
        loaded = load_tensor(data)
    except (pickle.UnpicklingError, *_GIVE_UP):
        return True  # torch knows less of it, or does not want to
    if loaded is not None:
        _compare_loaded(file, file.tree, loaded, data)
    return True


def _check_leaf(value: Any, size: int) -> None:
    """Every value is of a kind that the reader promises, and no tensor leaves the file."""
    if isinstance(value, TensorRef):
        assert 0 <= value.data_start <= value.data_start + value.data_nbytes <= size
        assert value.data_start <= value.start
        assert value.start - value.data_start <= value.reach <= value.data_nbytes
    elif isinstance(value, DistributedRef):
        for part in value.parts:
            _check_leaf(part.tensor, size)
            _check_region(part.region, value)
    else:
        plain = (type(None), bool, int, float, str, bytes, list, dict, tuple, UnmadeObject)
        assert isinstance(value, plain) or type(value).__name__ == "DType", type(value)


def _check_region(region: Region, ref: DistributedRef) -> None:
    assert len(region.offsets) == len(region.sizes)
    assert all(type(number) is int for number in (*region.offsets, *region.sizes))


def _compare_loaded(file: TorchFile, held: Any, loaded: Any, data: bytes) -> None:
    """Hold a tree against what torch loaded, where both know a value."""
    if isinstance(held, TensorRef) and type(loaded) in (torch.Tensor, torch.nn.Parameter):
        assert (held.shape, held.stride) == (tuple(loaded.shape), loaded.stride())
        assert f"torch.{held.dtype.name}" == str(loaded.dtype)
        if held.is_contiguous and held.dtype.name != "bool":
            assert data[held.start : held.start + held.nbytes] == raw(loaded)
    elif type(held) is dict and isinstance(loaded, dict):
        for key in held.keys() & {key for key in loaded if type(key) in (int, str)}:
            _compare_loaded(file, held[key], loaded[key], data)
    elif type(held) in (list, tuple) and type(held) is type(loaded):
        assert len(held) == len(loaded)
        for one, other in zip(held, loaded, strict=True):
            _compare_loaded(file, one, other, data)
    elif type(held) in (int, str, bool, float, type(None)) and type(loaded) is type(held):
        assert _same(held, loaded)


def _same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down; NaN is NaN."""
    if type(one) is not type(other):
        return False
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if type(one) is dict:
        return list(one) == list(other) and all(map(_same, one.values(), other.values()))
    return one == other or (type(one) is float and math.isnan(one) and math.isnan(other))


def check_bin(data: bytes) -> bool:
    """The tensors of a legacy file of weights lie in it, or give as many bytes as they have."""
    path = _file.put(data)
    found = attempt(lambda: read_bin(path, "f.bin"))
    if found is None:
        return False
    for tensor in found.tensors:
        _check_bin_tensor(tensor, len(data))
    return True


def _check_bin_tensor(tensor: BinTensor, size: int) -> None:
    nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
    assert (tensor.start is None) == (tensor.decoded is not None)
    if tensor.start is not None:
        assert 0 <= tensor.start <= tensor.start + nbytes <= size
    elif tensor.decoded is not None and nbytes <= _MAX_DECODED:
        decode = tensor.decoded.decode
        decoded = attempt(lambda: decode(ignore_read))
        assert decoded is None or decoded.nbytes == nbytes


def check_inert(data: bytes) -> bool:
    """What holds only plain data is what Python's unpickler makes of it.

    The first byte says which seed the storages are taken from.
    """
    tables = _storages()
    names, data = TensorNames(tables[data[0] % len(tables)] if data else {}), data[1:]
    vm = Inert(data, names.look_up, names.storage)
    found = attempt(lambda: [vm.run("f")])
    if found is None:
        return False
    for leaf in tree_leaves(found):
        _check_leaf(leaf.value, 1 << 20)
    # Keys that we drop, Python would hash, endlessly if the file wants it.
    if vm.num_dropped or any(code in data for code in _SET_OPCODES):
        return True
    try:
        expected = SlowUnpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError:
        return True  # it names something
    except (IndexError, TypeError, AttributeError, KeyError):
        return True  # an operation on what is no container, which is let pass where nothing comes of it
    if _is_plain(expected):
        assert _same(found[0], expected)
    return True


def _is_plain(tree: Any) -> bool:
    """No bytearray, no set, no key of another kind; what the reader makes of these has its own name."""
    kinds = (type(None), bool, int, float, str, bytes, list, dict, tuple)
    if type(tree) is dict and not all(type(key) in (int, str) for key in tree):
        return False
    inner = tree.values() if type(tree) is dict else tree if type(tree) in (list, tuple) else ()
    return type(tree) in kinds and all(map(_is_plain, inner))


def _state() -> dict[str, Any]:
    """What a training script saves."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) + i)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def _values() -> Iterator[Any]:
    """Values to save, each while the group of its tensors is there."""
    base = torch.arange(24.0).reshape(4, 6)
    shared = {"a": base, "b": base.t(), "c": base[1:3], "tied": base, "n": torch.nn.Parameter(torch.ones(2))}
    odd = {
        "args": argparse.Namespace(lr=1.0),
        "path": PurePosixPath("/a"),
        "rng": (np.float64(1.5), {1, 2}, frozenset("a"), bytearray(b"xy"), 2**70, -1.5, float("nan")),
        "more": defaultdict(int, a=1),
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        7: [None, True, b"bytes", "\u00e9", (), [], {}],
    }
    yield from (_state(), shared, odd, OrderedDict(shared), [torch.tensor(2.5), torch.empty(0, 3)])
    yield {"w": base.to(torch.float8_e5m2)}
    for world, rank in ((2, 1), (2, 0)):
        with as_rank(rank, world) as mesh:
            parts = base.chunk(world), base.chunk(world, 1)
            rows, cols = (part[rank].clone(memory_format=torch.contiguous_format) for part in parts)
            options = {"run_check": False, "shape": base.shape, "stride": base.stride()}
            sharded = DTensor.from_local(rows, mesh, [Shard(0)], **options)
            yield {
                "s": sharded,
                "r": replicate(base, mesh),
                "c": DTensor.from_local(cols, mesh, [Shard(1)], **options),
            }
    with as_rank(3, 4):
        mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        local = base[2:].clone()
        options = {"run_check": False, "shape": base.shape, "stride": base.stride()}
        yield [DTensor.from_local(local, mesh, [Replicate(), Shard(0)], **options)]
        quarter = base[3:].clone()
        yield [DTensor.from_local(quarter, mesh, [Shard(0), Shard(0)], **options)]


@cache
def file_seeds() -> list[bytes]:
    """As torch saves them, and tensors of classes as these do."""
    seeds = []
    for number, value in enumerate(_values()):
        out = io.BytesIO()
        torch.save(value, out, pickle_protocol=(2, 2, 4, 2, 3)[number % 5])
        seeds.append(out.getvalue())
    return [*seeds, *class_seeds(".pt"), *class_seeds(".bin")]


@cache
def class_seeds(ending: str) -> list[bytes]:
    """What classes of trainers wrote: one tensor in each `.pt`, a state dict in each `.bin`."""
    with TemporaryDirectory() as folder:
        return [path.read_bytes() for path in sorted(unpacked(Path(folder)).glob(f"*{ending}"))]


def bin_seeds() -> list[bytes]:
    """The state dicts among them, and one that torch loads."""
    out = io.BytesIO()
    torch.save({"w": torch.arange(6.0), "t": torch.ones(2, 3).t(), "step": 3}, out)
    return [out.getvalue(), *class_seeds(".bin")]


@cache
def _storages() -> list[dict[str, ZipEntry]]:
    """The storages of each seed: key -> where it could lie."""
    tables = []
    for seed in file_seeds():
        found = {
            part.name.split(b"/data/")[1].decode(): part for part in members(seed) if b"/data/" in part.name
        }
        tables.append({key: ZipEntry(64, len(part.data), 1, 0) for key, part in found.items()})
    return tables


@cache
def inert_seeds() -> list[bytes]:
    """The pickles of the same, and plain data in every protocol."""
    plain = [
        {"a": [1, 2.5, None, (True, False)], "b": {"c": "text", "d": b"bytes"}, 3: [[[]]], "": ()},
        [{str(i): i * 1000**i for i in range(6)}, *("x" * 3,) * 3, (1, 2, 3, 4), -1, 2**40],
    ]
    seeds = [b"\0" + pickle.dumps(value, protocol) for value in plain for protocol in (2, 3, 4, 5)]
    return seeds + [bytes([i]) + members(seed)[0].data for i, seed in enumerate(file_seeds())]


_WORDS = (
    *("storage", "0", "1", "2", "9", "cpu", "meta", "torch", "FloatStorage", "torch._utils"),
    *("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter", "collections", "OrderedDict"),
    *("Size", "builtins", "eval", "torch.distributed.tensor.placement_types", "Shard", "Replicate"),
    *("_StridedShard", "dim", "split_factor", "_local_tensor", "_spec", "mesh", "placements"),
    *("_coordinate_on_dim", "shard_order", "tensor_meta", "torch._tensor", "_rebuild_from_type_v2"),
    *("DTensor", "ShardedTensor", "_rebuild_qtensor", "_dim", "_rebuild_wrapper_subclass", "torchao"),
    *("_rebuild_parameter_with_state", "quant_state", "getattr", "_make_in_reduce_ex", "QInt8Storage"),
    *(
        "_rebuild_sparse_tensor",
        "_rebuild_nested_tensor",
        "Float8Tensor",
        "_tensor",
        "elem",
        "_precomputed_scale",
    ),
)


def mutate_file(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """Edit the pickle, the entries or the headers of a zip."""
    return change_saved(rng, seeds, _WORDS)


def mutate_inert(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """Edit opcodes."""
    seed = pick(rng, seeds)
    return seed[:1] + change_pickle(rng, seed[1:], (pick(rng, seeds)[1:],), _WORDS)


TARGETS = {
    "torch_file": Target(check_file, file_seeds, mutate_file),
    "bin_file": Target(check_bin, bin_seeds, mutate_file),
    "inert_pickle": Target(check_inert, inert_seeds, mutate_inert),
}
