""".metadata as stock torch pickles it, in every spelling, and as nobody should."""

from __future__ import annotations

import pathlib
import pickle
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardkit.core.regions import Region
from shardkit.errors import SourceError
from shardkit.formats.dcp.metadata import parse_metadata


def chunk(offset: int, size: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([offset, 0]), torch.Size([size, 4]))


def example() -> Metadata:
    """Two chunks of `w`, an object, a scalar."""
    first, second = torch.Size([0, 0]), torch.Size([3, 0])
    return Metadata(
        state_dict_metadata={
            "m.w": TensorStorageMetadata(
                TensorProperties(dtype=torch.bfloat16), torch.Size([5, 4]), [chunk(0, 3), chunk(3, 2)]
            ),
            "step": BytesStorageMetadata(),
            "m.s": TensorStorageMetadata(
                TensorProperties(dtype=torch.float32),
                torch.Size([]),
                [ChunkStorageMetadata(torch.Size([]), torch.Size([]))],
            ),
        },
        planner_data={"m.w": ("m", "w"), "step": ("step",), "m.s": ("m", "list", 0)},
        storage_data={
            MetadataIndex("m.w", second, 1): _StorageInfo("__1_0.distcp", 0, 900),
            MetadataIndex("m.w", first, 0): _StorageInfo("__0_0.distcp", 100, 1000),
            MetadataIndex("step"): _StorageInfo("__0_0.distcp", 0, 100),
            MetadataIndex("m.s", torch.Size([]), 0): _StorageInfo(
                "__0_0.distcp", 1100, 50, ["stream.zstd/1"]
            ),
        },
        storage_meta=StorageMeta(checkpoint_id=pathlib.PosixPath("/data/run 1"), save_id="x"),
        version="1.0.0",
    )


def check(data: bytes) -> None:
    found = parse_metadata(data)
    assert list(found.tensors) == ["m.w", "m.s"]
    entry = found.tensors["m.w"]
    assert (entry.dtype.name, entry.shape, entry.num_chunks) == ("bfloat16", (5, 4), 2)
    table = found.chunks
    places = [
        (found.files[table.file[row]], table.start[row], table.nbytes[row], table.region(row))
        for row in range(len(table))
    ]
    assert places == [
        ("__0_0.distcp", 100, 1000, Region((0, 0), (3, 4))),
        ("__1_0.distcp", 0, 900, Region((3, 0), (2, 4))),
        ("__0_0.distcp", 1100, 50, Region((), ())),
    ]
    assert found.transforms == {2: ("stream.zstd/1",)}
    assert list(found.objects) == ["step"]
    place = found.objects["step"]
    assert place is not None
    assert (found.files[place.file], place.start, place.nbytes) == ("__0_0.distcp", 0, 100)
    assert found.paths == {"m.w": ("m", "w"), "step": ("step",), "m.s": ("m", "list", 0)}
    assert found.orphans == ()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_reads_what_torch_pickles(protocol: int) -> None:
    check(pickle.dumps(example(), protocol))


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize("name", ["PosixPath", "WindowsPath", "PureWindowsPath"])
def test_paths_of_other_systems_and_pythons(module: str, name: str) -> None:
    data = pickle.dumps(example(), 2)
    check(data.replace(b"cpathlib\nPosixPath\n", f"c{module}\n{name}\n".encode()))


def test_python_3_13_spelling_in_protocol_4(monkeypatch: pytest.MonkeyPatch) -> None:
    class PosixPath:
        def __reduce__(self) -> tuple[type, tuple[str, ...]]:
            return PosixPath, ("/", "data")

    PosixPath.__module__, PosixPath.__qualname__ = "pathlib._local", "PosixPath"
    local = types.ModuleType("pathlib._local")
    local.PosixPath = PosixPath  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pathlib._local", local)
    metadata = example()
    metadata.storage_meta = StorageMeta(checkpoint_id=PosixPath())  # type: ignore[arg-type]
    check(pickle.dumps(metadata))


def test_torch_2_2_spelling() -> None:
    old = b"torch.distributed._shard.sharded_tensor.metadata"
    new = b"torch.distributed.checkpoint.metadata"
    data = pickle.dumps(example(), 2)
    for found, wanted in (("TensorProperties", "TensorProperties"), ("_MEM_FORMAT", "MEM_FORMAT")):
        data = data.replace(b"c" + new + b"\n" + found.encode(), b"c" + old + b"\n" + wanted.encode())
    check(data)
    metadata = example()
    for name in ("storage_meta", "version"):
        del metadata.__dict__[name]
    check(pickle.dumps(metadata, 4))


def test_olmo_core_spelling() -> None:
    """Its writer has a `_StorageInfo` of its own, so that pickle names its module."""
    torchs, own = b"torch.distributed.checkpoint.filesystem", b"olmo_core.distributed.checkpoint.filesystem"
    data = pickle.dumps(example(), 2)
    spelt = data.replace(b"c" + torchs + b"\n_StorageInfo", b"c" + own + b"\n_StorageInfo")
    assert spelt != data
    check(spelt)


def test_megatron_fields_are_passed_over() -> None:
    metadata = example()
    metadata.planner_data = None
    metadata.mcore_data = {"a": {"nested": (1, 2)}, "b": [{"x": "y"}]}  # type: ignore[attr-defined]
    assert parse_metadata(pickle.dumps(metadata)).paths is None


def test_index_hints_do_not_matter() -> None:
    metadata = example()
    metadata.storage_data = {
        MetadataIndex(key.fqn, key.offset, 7 if key.offset else None): value
        for key, value in metadata.storage_data.items()
    }
    check(pickle.dumps(metadata))


def test_orphans_are_listed() -> None:
    metadata = example()
    metadata.storage_data[MetadataIndex("gone", torch.Size([0]))] = _StorageInfo("__0_0.distcp", 0, 1)
    metadata.storage_data[MetadataIndex("m.w", torch.Size([4, 0]))] = _StorageInfo("__0_0.distcp", 0, 1)
    assert sorted(parse_metadata(pickle.dumps(metadata)).orphans) == ["gone", "m.w"]


def change(**fields: object) -> Callable[[Metadata], None]:
    return lambda metadata: metadata.__dict__.update(fields)


def set_tensor(**fields: object) -> Callable[[Metadata], None]:
    return lambda metadata: metadata.state_dict_metadata["m.w"].__dict__.update(fields)


def set_place(**fields: object) -> Callable[[Metadata], None]:
    key = MetadataIndex("m.w", torch.Size([0, 0]))
    return lambda metadata: metadata.storage_data[key].__dict__.update(fields)


def remove_place(metadata: Metadata) -> None:
    del metadata.storage_data[MetadataIndex("m.w", torch.Size([0, 0]))]


def describe_as_object(metadata: Metadata) -> None:
    metadata.state_dict_metadata["m.w"] = BytesStorageMetadata()


PLAN = {"m.w": ("m", "w"), "step": ("step",), "m.s": ("m", "s")}
CONTRADICTIONS: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "chunk without a place": (remove_place, r"m\.w: chunk at \[0, 0\] has no place"),
    "chunk twice": (set_tensor(chunks=[chunk(0, 3), chunk(0, 3)]), r"m\.w: .* is listed twice"),
    "no chunks": (set_tensor(chunks=[]), r"m\.w: has no chunks"),
    "dims": (set_tensor(size=torch.Size([20])), r"m\.w: a chunk has 2 dims, the tensor has 1"),
    "too many elements": (set_tensor(size=torch.Size([2**40, 2**40])), r"m\.w: impossible shape"),
    "object with chunks": (describe_as_object, r"m\.w: an object, but"),
    "path twice": (change(planner_data=PLAN | {"m.s": ("m", "w")}), r"m\.s: .* same path as m\.w"),
    "negative index": (change(planner_data=PLAN | {"m.s": ("m", -1)}), r"m\.s: .* list index -1"),
    "huge index": (change(planner_data=PLAN | {"m.s": ("m", 1 << 24)}), r"m\.s: .* list index"),
    "bool index": (change(planner_data=PLAN | {"m.s": ("m", True)}), r"m\.s: .* type bool"),
    "empty path": (change(planner_data=PLAN | {"m.s": ()}), r"m\.s: .* not a tuple"),
    "long path": (change(planner_data=PLAN | {"m.s": ("x",) * 65}), r"m\.s: .* not a tuple"),
    "version": (change(version="2.0.0"), r"version '2\.0\.0'"),
    "no tensors": (change(state_dict_metadata=None), "state_dict_metadata"),
    "no places": (change(storage_data=None), "storage_data"),
    "places by name": (change(storage_data={"m.w": 1}), "storage_data"),
    "foreign field": (change(__class__2="x"), "Metadata has unknown fields: __class__2"),
    "foreign entry": (lambda m: m.state_dict_metadata.update(x=3), "x: neither a tensor"),
    "key not text": (lambda m: m.state_dict_metadata.update({3: BytesStorageMetadata()}), "dict key"),
    "float offset": (set_place(offset=1.5), "opcode"),
    "bool offset": (set_place(offset=True), "not an integer"),
    "huge offset": (set_place(offset=1 << 64), "64 bits"),
    "text path": (set_place(relative_path=5), "not text"),
    "transforms": (set_place(transform_descriptors=[1]), "not text"),
    "negative size": (set_tensor(size=(5, -4)), "torch.Size"),
    "sparse": (set_tensor(properties=TensorProperties(torch.float32, torch.sparse_coo)), "sparse_coo"),
}


def with_fields(*more: object) -> bytes:
    """A tensor that another torch described: with further fields."""
    metadata = example()
    properties: Any = metadata.state_dict_metadata["m.w"].properties
    state = (*properties.__getstate__()[:5], *more)
    properties.__getstate__ = lambda: state
    return pickle.dumps(metadata, 4)


@pytest.mark.parametrize("strides", [None, (4, 1), (1, 5), (0, 0), (), torch.Size([4, 1])], ids=repr)
def test_strides_of_torch_2_15_are_passed_over(strides: object) -> None:
    check(with_fields(strides))


@pytest.mark.parametrize(
    "strides", [7, [4, 1], ("a",), (1.0,), (True,), (-1,), (1 << 63,), (1,) * 65], ids=repr
)
def test_strides_that_no_tensor_has(strides: object) -> None:
    with pytest.raises(SourceError, match=r"TensorProperties\.strides|torch\.Size|opcode") as caught:
        parse_metadata(with_fields(strides))
    assert "state_dict_metadata / m.w / properties" in caught.value.message


def test_further_fields_of_a_tensor_are_refused_by_name() -> None:
    with pytest.raises(SourceError, match=r"TensorProperties has 7 fields; torch writes .* 2\.15"):
        parse_metadata(with_fields((4, 1), "something new"))


@pytest.mark.parametrize(("alter", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradictions_are_named(alter: Callable[[Metadata], None], message: str) -> None:
    metadata = example()
    alter(metadata)
    with pytest.raises(SourceError, match=message) as caught:
        parse_metadata(pickle.dumps(metadata, 4))
    assert ".metadata" in caught.value.message


def test_all_problems_are_told_at_once() -> None:
    metadata = example()
    remove_place(metadata)
    change(planner_data={"m.w": ("a",), "m.s": ("a",)})(metadata)
    with pytest.raises(SourceError) as caught:
        parse_metadata(pickle.dumps(metadata))
    assert len(caught.value.problems) == 2


def test_one_list_of_chunks_for_many_tensors_does_not_multiply() -> None:
    metadata = example()
    chunks = [chunk(i, 1) for i in range(300)]
    for i in range(300):
        metadata.state_dict_metadata[f"t{i}"] = TensorStorageMetadata(
            TensorProperties(), torch.Size([300, 4]), chunks
        )
    with pytest.raises(SourceError, match="more chunks than"):
        parse_metadata(pickle.dumps(metadata))


@pytest.mark.prove
def test_every_truncation_is_refused() -> None:
    for protocol in (2, 4):
        data = pickle.dumps(example(), protocol)
        for stop in range(len(data)):
            with pytest.raises(SourceError, match=r"^\.metadata"):
                parse_metadata(data[:stop])


def plain(data: bytes) -> Any:
    """torch's own view, for pickles that ours accepted: their names are the allowed ones."""
    return pickle.loads(data)


@pytest.mark.prove
def test_mutations_are_refused_or_read_as_torch_does() -> None:
    sources = [pickle.dumps(example(), protocol) for protocol in (2, 4, 5)]
    rng = random.Random(3)
    accepted = 0
    for _ in range(6000):
        changed = bytearray(rng.choice(sources))
        for _ in range(rng.choice((1, 1, 2, 4))):
            changed[rng.randrange(len(changed))] = rng.choice((0, 255, rng.randrange(256)))
        try:
            found = parse_metadata(bytes(changed))
        except SourceError:
            continue
        accepted += 1
        theirs = plain(bytes(changed))
        for fqn, entry in found.tensors.items():
            assert tuple(theirs.state_dict_metadata[fqn].size) == entry.shape
    assert accepted > 50
