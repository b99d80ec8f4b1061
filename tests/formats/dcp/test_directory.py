"""DCP directories that stock torch wrote open to the same bytes; damaged ones are refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import flat_offset
from shardkit.errors import IntegrityError, SourceError
from shardkit.formats.dcp.directory import is_dcp
from tests.bits import raw
from tests.formats.dcp.samples import alter, assert_holds, open_catalog, save
from tests.formats.reading import read_tensor

SHARED = Path(__file__).resolve().parents[4] / "shared" / "fixtures"

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*no_dist.*"),
]


@pytest.fixture
def simple(tmp_path: Path) -> str:
    return save(
        {"model": {"w": torch.arange(20.0).reshape(5, 4), "b": torch.ones(5)}, "step": 3}, tmp_path / "c"
    )


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    state = {}
    for name, dtype in BY_NAME.items():
        for shape in ((), (0, 3), (5,), (3, 4), (2, 3, 4)):
            nbytes = dtype.itemsize * torch.Size(shape).numel()
            data = torch.tensor([i % 2 for i in range(nbytes)], dtype=torch.uint8)
            state[f"{name}.{'x'.join(map(str, shape))}"] = data.view(getattr(torch, name)).reshape(shape)
    catalog = open_catalog(save(state, tmp_path / "c"), records=True)
    assert (catalog.format, catalog.encoding, catalog.notes) == ("dcp", "raw", ())
    assert_holds(catalog, state)


def test_strided_tensors_come_out_row_major(tmp_path: Path) -> None:
    base = torch.arange(60, dtype=torch.bfloat16).reshape(3, 4, 5)
    image = torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state = {"t": base.permute(2, 0, 1), "cl": image, "gap": base[:, ::2], "row": base[1:2]}
    catalog = open_catalog(save(state, tmp_path / "c"), records=True)
    assert_holds(catalog, state)
    decoded = {file.name for file in catalog.files if not file.is_raw}
    assert decoded == {"__0_0.distcp:cl", "__0_0.distcp:t"}


def test_nested_state_with_an_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "list": [torch.ones(2), 1]}
    catalog = open_catalog(save(state, tmp_path / "c"), records=True)
    assert catalog.paths is not None
    assert catalog.paths["model.0.weight"] == ("model", "0.weight")
    assert catalog.paths["list.0"] == ("list", 0)
    assert "optim.param_groups.0.lr" in catalog.objects
    for name, tensor in model.state_dict().items():
        assert read_tensor(catalog, f"model.{name}") == raw(tensor)
    assert read_tensor(catalog, "optim.state.0.exp_avg") == raw(optimizer.state[model[0].weight]["exp_avg"])


def test_without_records_the_extents_are_the_records(simple: str) -> None:
    catalog = open_catalog(simple)
    assert catalog.encoding == "torch-record"
    row = catalog.tensors["model.w"].first_chunk
    source = catalog.files[catalog.chunks.file[row]]
    data = Path(source.path).read_bytes()
    start, nbytes = catalog.chunks.start[row], catalog.chunks.nbytes[row]
    assert data[start : start + 4] == b"PK\x03\x04"
    assert data[start + nbytes - 22 : start + nbytes - 18] == b"PK\x05\x06"
    assert catalog.objects == ("step",)


def test_tied_names_may_share_a_record(simple: str) -> None:
    def tie(metadata: Metadata) -> None:
        metadata.state_dict_metadata["tied"] = metadata.state_dict_metadata["model.w"]
        (key,) = (key for key in metadata.storage_data if key.fqn == "model.w")
        metadata.storage_data[MetadataIndex("tied", key.offset, 0)] = metadata.storage_data[key]

    alter(simple, tie)
    catalog = open_catalog(simple, records=True)
    assert read_tensor(catalog, "tied") == read_tensor(catalog, "model.w")


def test_notes_tell_what_was_left_alone(simple: str) -> None:
    Path(simple, "__7_0.distcp").write_bytes(b"of a larger world")
    key = MetadataIndex("gone", torch.Size([0]))
    alter(simple, lambda metadata: metadata.storage_data.update({key: _StorageInfo("__9_0.distcp", 0, 9)}))
    orphan, stale = open_catalog(simple, records=True).notes
    assert "gone" in orphan
    assert "__7_0.distcp" in stale


def test_missing_metadata_says_why(tmp_path: Path) -> None:
    for present, message in (
        ("x", "not a DCP checkpoint"),
        (".metadata.tmp", "did not finish"),
    ):
        (tmp_path / present).touch()
        assert not is_dcp(str(tmp_path))
        with pytest.raises(SourceError, match=rf"has no \.metadata: .*{message}"):
            open_catalog(str(tmp_path))


def place(**fields: object) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        (key,) = (key for key in metadata.storage_data if key.fqn == "model.w")
        metadata.storage_data[key].__dict__.update(fields)

    return change


def chunks(*boxes: tuple[list[int], list[int]]) -> Callable[[Metadata], None]:
    """Give model.w other chunks, all placed somewhere."""

    def change(metadata: Metadata) -> None:
        (key,) = (key for key in metadata.storage_data if key.fqn == "model.w")
        info = metadata.storage_data.pop(key)
        listed = []
        for offsets, sizes in boxes:
            listed.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            metadata.storage_data[MetadataIndex("model.w", torch.Size(offsets))] = info
        metadata.state_dict_metadata["model.w"].chunks = listed

    return change


def dtype(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.w"].properties = TensorProperties(torch.float64)


BROKEN: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "leaves": (place(relative_path="../x.distcp"), r"\.\./x\.distcp: not the name .*model\.w"),
    "absolute": (place(relative_path="/x.distcp"), r"/x\.distcp: not the name"),
    "backslash": (place(relative_path="..\\x.distcp"), r"x\.distcp: not the name"),
    "nul": (place(relative_path="x\0.distcp"), r"x\\x00\.distcp: not the name"),
    "itself": (place(relative_path=".metadata"), r"\.metadata: not the name .*model\.w"),
    "missing": (place(relative_path="__1_0.distcp"), r"__1_0\.distcp: no such file .*model\.w"),
    "directory": (place(relative_path="d.distcp"), r"d\.distcp: not a regular file"),
    "fifo": (place(relative_path="f.distcp"), r"f\.distcp: not a regular file"),
    "link": (place(relative_path="l.distcp"), r"l\.distcp: a symbolic link; pass --follow-links"),
    "far": (place(offset=1 << 40), r"model\.w: bytes .*__0_0\.distcp, which has"),
    "negative": (place(offset=-5), r"model\.w: bytes -5"),
    "empty": (place(length=0), r"model\.w: bytes"),
    "huge": (place(length=1 << 62), r"model\.w: bytes"),
    "overlap": (place(offset=1), "overlapping bytes"),
    "gap": (chunks(([0, 0], [2, 4]), ([3, 0], [2, 4])), r"model\.w: chunks hold 16 of 20"),
    "both": (chunks(([0, 0], [3, 4]), ([2, 0], [3, 4])), r"model\.w: chunks .* overlap"),
    "outside": (chunks(([0, 0], [3, 4]), ([3, 0], [3, 4])), r"model\.w: chunk .* reaches outside"),
    "short": (chunks(([0, 0], [5, 3])), r"model\.w: chunks hold 15 of 20"),
    "uneven": (chunks(([0, 0], [3, 2]), ([0, 2], [2, 2]), ([3, 0], [2, 4])), r"chunks hold 18 of 20"),
    "dtype": (dtype, r"model\.w: __0_0\.distcp: stored as float32, \.metadata says float64"),
    "shape": (
        chunks(([0, 0], [3, 4]), ([3, 0], [2, 4])),
        r"model\.w: __0_0\.distcp: stored with shape \[5, 4\]",
    ),
    "cipher": (place(transform_descriptors=["stream.aes/1"]), r"model\.w: stream\.aes/1"),
    "not a record": (place(length=900), r"model\.w: __0_0\.distcp, record at byte"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_what_metadata_says_is_checked(simple: str, change: Callable[[Metadata], None], message: str) -> None:
    os.mkdir(os.path.join(simple, "d.distcp"))
    os.mkfifo(os.path.join(simple, "f.distcp"))
    os.symlink("__0_0.distcp", os.path.join(simple, "l.distcp"))
    alter(simple, change)
    with pytest.raises(SourceError, match=message):
        open_catalog(simple, records=True)


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_metadata_must_be_a_regular_file(simple: str, kind: str) -> None:
    path = os.path.join(simple, ".metadata")
    os.rename(path, path + ".old")
    make = {"link": lambda: os.symlink(".metadata.old", path), "fifo": lambda: os.mkfifo(path)}
    make.get(kind, lambda: os.mkdir(path))()
    with pytest.raises(SourceError, match=r"^\.metadata"):
        open_catalog(simple)


def test_exchanged_records_differ_from_metadata(tmp_path: Path) -> None:
    directory = save({"a": torch.ones(3), "b": torch.ones(3, dtype=torch.int64)}, tmp_path / "c")

    def exchange(metadata: Metadata) -> None:
        first, second = metadata.storage_data
        table = metadata.storage_data
        table[first], table[second] = table[second], table[first]

    alter(directory, exchange)
    with pytest.raises(IntegrityError) as caught:
        open_catalog(directory, records=True)
    assert len(caught.value.problems) == 2


def test_grids_of_chunks_are_tilings(tmp_path: Path) -> None:
    """2-D cuts with short cells, in no order; and a cut that is no grid, but still a tiling."""
    for boxes in (
        [([r, c], [min(3, 8 - r), min(2, 5 - c)]) for c in (4, 0, 2) for r in (6, 3, 0)],
        [([0, 0], [4, 5]), ([4, 0], [4, 2]), ([4, 2], [4, 3])],
        [([0, 0], [8, 5]), ([8, 0], [0, 5])],
    ):
        metadata = Metadata(
            {
                "t": TensorStorageMetadata(
                    TensorProperties(torch.float32),
                    torch.Size([8, 5]),
                    [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes],
                )
            },
            storage_data={
                MetadataIndex("t", torch.Size(o)): _StorageInfo("__0_0.distcp", 10 * i, 10)
                for i, (o, _) in enumerate(boxes)
            },
        )
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        (tmp_path / "__0_0.distcp").write_bytes(bytes(100))
        catalog = open_catalog(str(tmp_path))
        assert len(catalog.chunks) == len(boxes)
        assert flat_offset(catalog.chunks.region(0).offsets, (8, 5)) == boxes[0][0][0] * 5 + boxes[0][0][1]


def bad_cases() -> list[Any]:
    manifest = SHARED / "bad-sample" / "manifest.json"
    cases = json.loads(manifest.read_text())["cases"] if manifest.is_file() else []
    return [pytest.param(case, id=case["id"]) for case in cases if case["kind"] == "dcp"]


# What opening cannot tell: only another copy's digests, or the names that a model needs.
FOR_OTHERS = {"dcp-mixed-saves", "dcp-bytes-to-tensor"}


@pytest.mark.shared
@pytest.mark.parametrize("case", bad_cases())
def test_bad_samples(case: dict[str, Any]) -> None:
    directory = str(SHARED / "bad-sample" / case["path"])
    accepted = case["expect"] == "accept" or case["id"] in FOR_OTHERS
    refusal = refusal_of(directory)
    if accepted:  # some may be refused all the same, by name
        mentions = case.get("must_mention_if_rejected") or [""]
        assert refusal is None or any(text in refusal for text in mentions)
    else:
        assert refusal is not None
        assert any(text in refusal for text in case["must_mention"])


def refusal_of(directory: str) -> str | None:
    """Why a checkpoint cannot be opened and read, None where it can."""
    try:
        catalog = open_catalog(directory, records=True)
        for fqn, entry in catalog.tensors.items():
            assert len(read_tensor(catalog, fqn)) == entry.nbytes
    except SourceError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    archive = SHARED / "sharded.tar.xz"
    if not archive.is_file():
        pytest.skip("no shared fixtures")
    target = tmp_path_factory.mktemp("sharded")
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name
            if name.endswith((".metadata", ".distcp", "truth/state_dict.sha256.json")) and member.isfile():
                tar.extract(member, target, filter="data")
    return target / "sharded"


@pytest.mark.shared
def test_checkpoints_of_real_trainers(sharded: Path) -> None:
    compared = 0
    for marker in sorted(sharded.rglob(".metadata")):
        example = marker.relative_to(sharded).parts[0]
        if example.startswith("bytecheckpoint"):
            with pytest.raises(
                SourceError, match=r"^\.metadata is one of ByteCheckpoint, which is not read\n"
            ):
                open_catalog(str(marker.parent))
            continue
        catalog = open_catalog(str(marker.parent), records=True)
        truth = sharded / example / "truth" / "state_dict.sha256.json"
        expected = json.loads(truth.read_text()) if truth.is_file() else {}
        for fqn, path in (catalog.paths or {}).items():
            found = expected.get(path[-1]) if path[0] in ("model", path[-1]) and len(path) <= 2 else None
            if found and fqn in catalog.tensors:
                digest = hashlib.sha256(read_tensor(catalog, fqn)).hexdigest()
                assert digest == found["sha256"], f"{example}: {fqn}"
                compared += 1
    assert compared > 500
