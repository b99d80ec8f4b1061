"""Files of `torch.save` are read without torch: tensors where they lie, nothing executed."""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import re
import subprocess
import sys
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import Region
from shardkit.errors import IntegrityError, SourceError
from shardkit.formats.torchsave.archive import UnsupportedFile
from shardkit.formats.torchsave.file import (
    DistributedRef,
    TensorRef,
    TorchFile,
    UnreadableTensor,
    open_torch_file,
    tree_leaves,
)
from shardkit.pickles.policies import Fields, UnmadeObject
from tests.bits import raw
from tests.formats.dcp.samples import as_rank
from tests.formats.torchsave.samples import saved

Save = Callable[..., TorchFile]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Return a function that saves something with torch and opens it."""

    def save(value: Any, **options: Any) -> TorchFile:
        torch.save(value, tmp_path / "file.pt", **options)
        return opened(tmp_path)

    return save


def opened(directory: Path) -> TorchFile:
    return open_torch_file(str(directory / "file.pt"), "file.pt")


def read(file: TorchFile, ref: TensorRef) -> bytes:
    """The bytes of a contiguous tensor, or with its strides through numpy."""
    data = Path(file.path).read_bytes()
    if ref.is_contiguous:
        return data[ref.start : ref.start + ref.nbytes]
    storage = data[ref.data_start : ref.data_start + ref.data_nbytes]
    itemsize = ref.dtype.itemsize
    strides = tuple(step * itemsize for step in ref.stride)
    return np.ndarray(ref.shape, f"V{itemsize}", storage, ref.storage_offset * itemsize, strides).tobytes()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_training_checkpoint(save, protocol):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    file = save(
        {
            "state_dict": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "args": argparse.Namespace(lr=1),
            "path": pathlib.PurePosixPath("/a"),
            "rng": (np.float64(1.5), np.arange(3), {1, 2}),
            "more": defaultdict(int, a=1),
            "epoch": 3,
        },
        pickle_protocol=protocol,
    )
    tree: Any = file.tree
    assert list(tree) == ["state_dict", "optimizer", "args", "path", "rng", "more", "epoch"]
    assert list(tree["state_dict"]) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        ref = tree["state_dict"][name]
        assert (ref.dtype, ref.shape, ref.stride) == (
            BY_NAME[str(tensor.dtype)[6:]],
            tuple(tensor.shape),
            tensor.stride(),
        )
        assert read(file, ref) == raw(tensor)
    assert tree["optimizer"]["param_groups"][0]["lr"] == 0.001
    assert tree["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    first = optimizer.state_dict()["state"][0]["exp_avg"]
    assert read(file, tree["optimizer"]["state"][0]["exp_avg"]) == raw(first)
    assert (tree["more"], tree["epoch"], file.num_dropped) == ({"a": 1}, 3, 0)
    assert [type(value) for value in (tree["path"], *tree["rng"])] == [UnmadeObject] * 4
    assert (type(tree["args"]), tree["args"].items) == (Fields, {"lr": 1})


@pytest.mark.parametrize("name", BY_NAME)
def test_every_dtype(save, name):
    nbytes = BY_NAME[name].itemsize * 6
    tensor = torch.arange(nbytes, dtype=torch.uint8).view(getattr(torch, name)).reshape(2, 3)
    file = save([tensor])
    (ref,) = file.tree
    assert (ref.dtype.name, ref.shape) == (name, (2, 3))
    assert read(file, ref) == bytes(range(nbytes))


def test_kinds_of_tensors(save):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "transposed": base.t(),
        "row": base[2],
        "columns": base[:, 1:3],
        "expanded": torch.ones(1, 3).expand(2, 3),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "parameter": nn.Parameter(torch.ones(2)),
        "buffer": nn.Buffer(torch.zeros(3)),
        "no gradient": nn.Parameter(torch.ones(2), requires_grad=False),
    }
    file = save(OrderedDict(tensors))
    tree: Any = file.tree
    assert list(tree) == list(tensors)
    for name, tensor in tensors.items():
        assert (tree[name].shape, read(file, tree[name])) == (tuple(tensor.shape), raw(tensor)), name
    assert tree["transposed"].key == tree["row"].key == tree["columns"].key != tree["scalar"].key
    assert not tree["transposed"].is_contiguous
    assert tree["row"].is_contiguous


def test_a_parameter_with_attributes(save):
    weight = nn.Parameter(torch.ones(2))
    weight.origin = "somewhere"  # type: ignore[attr-defined]
    state = OrderedDict(weight=weight)
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    file = save(state)
    tree: Any = file.tree
    assert read(file, tree["weight"]) == raw(weight)


class Subclass(torch.Tensor):
    """A tensor whose bytes may mean anything."""


@pytest.mark.filterwarnings("ignore:.*(quantiz|Quantiz|TypedStorage|sparse|Sparse)")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.ones(2, 2).to_sparse(), "sparse tensor"),
        (lambda: torch.ones(2, 2).to_sparse_csr(), "sparse tensor"),
        (lambda: torch.ones(2, device="meta"), "meta"),
        (lambda: torch._neg_view(torch.ones(2, dtype=torch.int64)), "negated"),
        (lambda: torch.ones(2).as_subclass(Subclass), "Subclass"),
    ],
)
def test_tensors_without_plain_bytes(save, make, reason):
    (found,) = save([make()]).tree
    assert isinstance(found, UnreadableTensor)
    assert reason in found.name


@pytest.mark.prove
def test_many_storages(save):
    """More entries than fit into what is read at once, and more than 65,535 (zip64)."""
    file = save({str(i): torch.tensor([i % 251], dtype=torch.uint8) for i in range(66000)})
    assert len(file.storages) == 66000
    for i in (0, 1, 4000, 65999):
        assert read(file, file.tree[str(i)]) == bytes([i % 251])


def test_beyond_four_gib(tmp_path):
    """A sparse file: positions that need 64 bits, without writing them."""
    size = (1 << 32) + 100
    with zipfile.ZipFile(tmp_path / "file.pt", "w", allowZip64=True) as out:
        out.writestr("archive/data.pkl", pickle_of_two(size))
        info = zipfile.ZipInfo("archive/data/0")
        info.file_size = size
        with out.open(info, "w", force_zip64=True) as entry:
            entry._file_size = entry._compress_size = size  # type: ignore[attr-defined]
            out.fp.seek(size, os.SEEK_CUR)  # type: ignore[union-attr]
            entry._crc = 0  # type: ignore[attr-defined]
        out.writestr("archive/data/1", b"\x05")
        out.writestr("archive/byteorder", b"little")
    tree: Any = opened(tmp_path).tree
    assert tree[0].nbytes == size
    assert tree[1].start > 1 << 32
    with open(tmp_path / "file.pt", "rb") as file:
        file.seek(tree[1].start)
        assert file.read(1) == b"\x05"


def pickle_of_two(size: int) -> bytes:
    """[uint8 tensor of `size`, uint8 tensor of 1], as torch pickles it."""

    def tensor(key: bytes, count: int) -> bytes:
        number = b"\x8a\x08" + count.to_bytes(8, "little")
        storage = (
            b"(X\x07\0\0\0storagectorch\nByteStorage\nX\x01\0\0\0" + key + b"X\x03\0\0\0cpu" + number + b"tQ"
        )
        return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0" + number + b"\x85K\x01\x85\x89}tR"

    return b"\x80\x02](" + tensor(b"0", size) + tensor(b"1", 1) + b"e."


def test_leaves_come_in_order():
    tree = {"a": [1, {"b": 2}], 3: (), "c": ({}, 4)}
    assert [(path, value) for path, value in tree_leaves(tree)] == [
        (("a", 0), 1),
        (("a", 1, "b"), 2),
        (("c", 1), 4),
    ]


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch was-executed",)


def test_nothing_is_executed_and_torch_stays_out(save, tmp_path):
    """In an interpreter of its own: reading imports neither torch nor numpy, and runs nothing."""
    file = save({"a": torch.ones(2), "evil": Runs()})
    code = (
        "import sys; from shardkit.formats.torchsave.file import open_torch_file;"
        f"print(open_torch_file({file.path!r}, 'x').tree['evil'].name);"
        "assert not {'torch', 'numpy', 'pickle'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == "posix.system\n", done.stderr
    assert not (tmp_path / "was-executed").exists()


def rezipped(path: Path, change: Callable[[str, bytes], bytes], method: int = zipfile.ZIP_STORED) -> None:
    """Write a file anew with changed entries."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", method) as out:
        for name, content in entries.items():
            out.writestr(name, change(name, content))


def replaced(old: bytes, new: bytes) -> Callable[[str, bytes], bytes]:
    return lambda name, content: content.replace(old, new) if name.endswith("data.pkl") else content


def legacy(path: Path) -> None:
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "text": (lambda path: path.write_bytes(b"hello" * 100), "no zip"),
    "legacy": (legacy, "before torch 1.6"),
    "cut short": (lambda path: os.truncate(path, path.stat().st_size - 30), "cut short"),
    "a storage too short": (
        lambda path: rezipped(path, lambda name, content: content[:4] if "/data/" in name else content),
        "a storage of 24 bytes, for which the file has 4",
    ),
    "no such storage": (
        lambda path: rezipped(path, replaced(b"X\x01\0\0\x000", b"X\x01\0\0\x007")),
        "not in the file",
    ),
    "past its storage": (
        lambda path: rezipped(path, replaced(b"K\x02K\x03\x86", b"K\x02K\x04\x86")),
        "reaches to byte",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(save, tmp_path, damage):
    file = save({"a": torch.ones(2, 3)})
    spoil, reason = DAMAGE[damage]
    spoil(Path(file.path))
    with pytest.raises(SourceError, match=re.escape(reason)) as caught:
        opened(tmp_path)
    assert caught.value.message.startswith("file.pt")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("method", "order", "reason"),
    [
        (zipfile.ZIP_STORED, b"big", "byte order is 'big'"),
        (zipfile.ZIP_DEFLATED, b"little", "is compressed or encrypted"),
    ],
)
def test_a_file_that_is_stored_in_another_way_is_whole(save, tmp_path, method, order, reason):
    """torch reads it, and swaps its bytes or inflates them; another copy would be the same again."""
    path = Path(save({"a": torch.ones(2)}).path)
    rezipped(path, lambda name, content: order if "byteorder" in name else content, method)
    with pytest.raises(UnsupportedFile, match=f"^file.pt.*{reason}") as caught:
        opened(tmp_path)
    assert "torch.save(torch.load(FILE" in caught.value.hint
    assert "damaged" not in str(caught.value)


def test_one_header_that_says_that_it_is_compressed_is_damage(save, tmp_path):
    path = Path(save({"a": torch.ones(2)}).path)
    rezipped(path, lambda name, content: content, zipfile.ZIP_DEFLATED)
    data = bytearray(path.read_bytes())
    data[8:10] = b"\0\0"  # the method in the first entry's own header
    path.write_bytes(data)
    with pytest.raises(SourceError, match="is compressed") as caught:
        opened(tmp_path)
    assert not isinstance(caught.value, UnsupportedFile)


def test_a_changed_pickle_is_not_believed(save, tmp_path):
    file = save({"abc": torch.ones(2)})
    path = Path(file.path)
    path.write_bytes(path.read_bytes().replace(b"abc", b"abd", 1))
    with pytest.raises(IntegrityError, match="CRC-32"):
        opened(tmp_path)


def test_pipes_and_missing_files(tmp_path):
    with pytest.raises(SourceError, match="no such file"):
        opened(tmp_path)
    os.mkfifo(tmp_path / "file.pt")
    with pytest.raises(SourceError, match="pipe"):
        opened(tmp_path)


@pytest.mark.prove
def test_any_damage_ends_well(tmp_path):
    """Bytes changed anywhere, with CRCs that are not recorded: a tree or a SourceError, and no hang."""
    value = {"a": torch.ones(2, 3).t(), "b": [1, "x", torch.zeros(3, dtype=torch.bfloat16)], "c": Runs()}
    good, rng = saved(value), random.Random(2)
    interesting = [i for i, byte in enumerate(good) if byte]
    for _ in range(1500):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            data[rng.choice(interesting)] = rng.randrange(256)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        (tmp_path / "file.pt").write_bytes(data)
        try:
            file = opened(tmp_path)
        except SourceError:
            continue
        for _, found in tree_leaves(file.tree):
            if isinstance(found, TensorRef):
                assert 0 <= found.data_start <= found.data_start + found.reach <= len(data)


@pytest.fixture
def one_of_four() -> Iterator[None]:
    """This process as rank 2 of 4, with nobody to talk to."""
    with as_rank(2, 4):
        yield


@pytest.mark.usefixtures("one_of_four")
class TestDistributed:
    """One rank's parts, whatever torch called its classes."""

    def dtensor(self, shape: tuple[int, ...] = (2, 4), *, ranks: Any = None) -> Any:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]] if ranks is None else ranks)
        local = torch.arange(float(np.prod(shape))).reshape(shape)
        cut = [Shard(0), Replicate()][: mesh.ndim]
        return DTensor.from_local(local, mesh, cut, run_check=False, shape=torch.Size((4, 4)), stride=(4, 1))

    @pytest.mark.parametrize("wrap", [lambda tensor: tensor, nn.Parameter], ids=["bare", "a parameter"])
    def test_a_dtensor(self, save, wrap):
        (found,) = save([wrap(self.dtensor())]).tree
        assert isinstance(found, DistributedRef)
        assert (found.shape, found.dtype.name) == ((4, 4), "float32")
        assert [part.region for part in found.parts] == [Region((2, 0), (2, 4))]

    def test_outside_of_the_mesh(self, save):
        (found,) = save([self.dtensor(ranks=[1, 3])]).tree
        assert (found.parts, found.problem) == ((), None)

    def test_a_part_of_the_wrong_shape(self, save):
        (found,) = save([self.dtensor((3, 4))]).tree
        assert "shape [3, 4], its placements give [2, 4]" in found.problem

    @pytest.mark.parametrize("kind", ["2.2", "2.9", "nothing"])
    def test_meshes_of_other_versions(self, save, tmp_path, monkeypatch, kind):
        """What `DeviceMesh` and the modules around it looked like, put in the place of today's."""
        from torch.distributed.device_mesh import DeviceMesh

        def state(mesh: Any) -> dict[str, Any]:
            common = {"device_type": "cpu", "mesh_dim_names": None, "_coordinate_on_dim": [1, 0]}
            if kind == "2.2":
                return {**common, "mesh": torch.tensor([[0, 1], [2, 3]]), "_flatten_mesh_list": (0, 1, 2, 3)}
            layout = type(mesh._layout).__new__(type(mesh._layout))
            layout.__dict__.update({"shape": (2, 2), "stride": (2, 1)} if kind == "2.9" else {})
            return {**common, "_layout": layout}

        monkeypatch.setattr(DeviceMesh, "__getstate__", state)
        file = save([self.dtensor()])
        if kind == "2.2":
            rezipped(Path(file.path), replaced(b"torch.distributed.tensor", b"torch.distributed._tensor"))
        (found,) = opened(tmp_path).tree
        if kind == "nothing":
            assert "the rank's position" in found.problem
        else:
            assert [part.region for part in found.parts] == [Region((2, 0), (2, 4))]

    @pytest.mark.parametrize(
        ("old", "new", "problem"),
        [
            (b"placement_types\nShard\n", b"placement_types\nOther\n", "placement Other"),
            (b"device_mesh\nDeviceMesh\n", b"device_mesh\nOtherMesh\n", None),
            (b"_coordinate_on_dim", b"_coordinate_on_dix", "the rank's position"),
        ],
    )
    def test_what_is_not_understood(self, save, tmp_path, old, new, problem):
        file = save([self.dtensor()])
        rezipped(Path(file.path), replaced(old, new))
        (found,) = opened(tmp_path).tree
        assert found.problem is None if problem is None else problem in found.problem

    @pytest.mark.filterwarnings("ignore:Please use DTensor")
    def test_a_sharded_tensor(self, save):
        from torch.distributed._shard.metadata import ShardMetadata
        from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
        from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

        shard = Shard.from_tensor_and_offsets(torch.ones(3, 4, dtype=torch.bfloat16), [2, 0], 2)
        whole = ShardedTensorMetadata(
            shards_metadata=[ShardMetadata([0, 0], [2, 4], placement="rank:0/cpu"), shard.metadata],
            size=torch.Size((5, 4)),
            tensor_properties=TensorProperties(dtype=torch.bfloat16),
        )
        (found,) = save([ShardedTensor._init_from_local_shards_and_global_metadata([shard], whole)]).tree
        assert isinstance(found, DistributedRef)
        assert (found.shape, found.dtype.name) == ((5, 4), "bfloat16")
        assert [part.region for part in found.parts] == [Region((2, 0), (3, 4))]
