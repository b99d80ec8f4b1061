"""Tensors are selected from a DCP directory by name: only their records are opened, checked and stamped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.serialization import get_crc32_options, set_crc32_options

from shardkit.core.catalog import subset
from shardkit.core.regions import Region
from shardkit.errors import IntegrityError, SourceError
from shardkit.files import storage
from shardkit.formats.dcp.directory import open_dcp
from shardkit.formats.torchsave.record import TensorRecord
from shardkit.formats.torchsave.scan import RecordScanner
from shardkit.keys.expressions import Stored, concat
from shardkit.keys.expressions import cut as cut_out
from shardkit.transfer.codecs.bound import bind
from tests.bits import raw
from tests.formats.dcp.samples import (
    alter,
    assert_holds,
    open_catalog,
    save,
    save_rank_local,
    shard,
)
from tests.formats.reading import read_tensor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {
    "a": torch.arange(20.0).reshape(5, 4),
    "t": torch.arange(6.0).reshape(2, 3).t(),
    "b": torch.arange(9),
    "empty": torch.zeros(0, 3),
}


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return save(STATE, tmp_path / "c")


def places(directory: str) -> dict[str, tuple[int, int]]:
    """(first byte, bytes) of each tensor's record."""
    catalog = open_catalog(directory)
    rows = {fqn: entry.first_chunk for fqn, entry in catalog.tensors.items()}
    return {fqn: (catalog.chunks.start[row], catalog.chunks.nbytes[row]) for fqn, row in rows.items()}


def spoil(directory: str, at: int, name: str = "__0_0.distcp") -> None:
    with open(os.path.join(directory, name), "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_only_what_is_named_is_opened(directory: str) -> None:
    start, nbytes = places(directory)["b"]
    spoil(directory, start + nbytes - 1)
    catalog = open_catalog(directory, records=("t", "a"))
    assert list(catalog.tensors) == ["t", "a"]
    assert_holds(catalog, {name: STATE[name] for name in ("t", "a")})
    with pytest.raises(SourceError, match=r"b: __0_0\.distcp, record at byte"):
        open_catalog(directory, records=("a", "b"))


def test_files_are_held_to_the_state_they_were_read_in(directory: str) -> None:
    catalog = open_catalog(directory, records=("t",))
    status = os.stat(os.path.join(directory, "__0_0.distcp"))
    for source in catalog.files:
        assert source.path.endswith("__0_0.distcp")
        assert source.stamp is not None
        assert (source.stamp.size, source.stamp.inode) == (status.st_size, status.st_ino)


@pytest.mark.parametrize("name", ["a", "t", "b"])
def test_a_flipped_bit_is_found(directory: str, name: str) -> None:
    opened = open_dcp(directory)
    assert list(opened.check(tuple(STATE))) == []
    catalog = opened.select(("a", "b"))
    at = catalog.chunks.start[0] if name == "a" else catalog.chunks.start[1]
    if name == "t":  # its bytes come after decoding: find the record's own data
        record, _ = places(directory)["t"]
        with open(os.path.join(directory, "__0_0.distcp"), "rb") as file:
            at = file.read().index(STATE["t"].t().contiguous().numpy().tobytes(), record)
    spoil(directory, at + 5)
    (line,) = opened.check(tuple(STATE))
    assert line.startswith(f"{name}: __0_0.distcp: bytes ")
    assert list(opened.check([other for other in STATE if other != name])) == []


def test_records_without_a_crc_are_counted(tmp_path: Path) -> None:
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        directory = save(STATE, tmp_path / "c")
    finally:
        set_crc32_options(before)
    opened = open_dcp(directory)
    assert list(opened.check(tuple(STATE))) == []
    catalog = opened.select(tuple(STATE))
    assert catalog.notes == ("3 of 4 records have no CRC-32 to check them by",)
    assert_holds(catalog, STATE)


CUT = {
    "a": torch.randn(16, 4),
    "b": torch.randn(16, 4),
    "bias": torch.randn(16),
    "c": torch.randn(10, 4),
}
"""For four ranks, of which the last one has fewer rows of `c`."""


@pytest.fixture
def cut(tmp_path: Path) -> str:
    return save_rank_local(lambda mesh: {fqn: shard(t, mesh) for fqn, t in CUT.items()}, 4, tmp_path / "c")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """First bytes of the records that were opened."""
    found, inner = list[int](), RecordScanner.read

    def counted(scanner: RecordScanner, kind: Any, offset: int, length: int, *, where: str) -> TensorRecord:
        found.append(offset)
        return inner(scanner, kind, offset, length, where=where)

    monkeypatch.setattr(RecordScanner, "read", counted)
    return found


def test_records_are_opened_by_those_who_read_them(cut: str, read: list[int]) -> None:
    whole = open_dcp(cut).select(tuple(CUT))
    del read[:]
    closed = open_dcp(cut).defer(tuple(CUT))
    assert read == []
    assert closed.open_records is not None
    for names in (("c", "b"), ("a", "bias"), ()):
        opened = closed.open_records(names)
        assert len(read) == sum(whole.tensors[name].num_chunks for name in names)
        assert list(opened.tensors) == list(CUT)
        assert opened.encoding == "raw"
        assert opened.open_records is None
        for fqn, entry in opened.tensors.items():
            assert (entry.dtype, entry.shape) == (whole.tensors[fqn].dtype, whole.tensors[fqn].shape)
            if fqn in names:
                assert read_tensor(opened, fqn) == raw(CUT[fqn])
            else:
                assert entry.num_chunks == 0
        del read[:]


def test_files_without_records_to_look_at_are_not_opened(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of hundreds of parts would open the files of all ranks."""
    closed, names, inner = open_dcp(directory).defer(tuple(STATE)), list[str](), storage.open_fd

    def counted(path: str, flags: int) -> int:
        names.append(os.path.basename(path))
        return inner(path, flags)

    monkeypatch.setattr(storage, "open_fd", counted)
    assert closed.open_records is not None
    closed.open_records(())
    assert names == []
    closed.open_records(("a",))
    assert names == ["__0_0.distcp"]


def test_what_is_made_of_closed_records_opens_what_it_is_made_of(directory: str, read: list[int]) -> None:
    """The second is made of the first."""
    at, closed = places(directory), open_dcp(directory).defer(tuple(STATE))
    half = bind(closed, {"half": cut_out(Stored("a", (5, 4)), Region((0, 0), (5, 2)))})
    twice = bind(half, {"twice": concat([Stored("half", (5, 2)), Stored("half", (5, 2))], 0)})
    assert twice.tensors["twice"].shape == (10, 2)
    assert read == []
    assert twice.open_records is not None
    opened = twice.open_records(("twice", "b"))
    assert sorted(read) == sorted(at[name][0] for name in ("a", "b"))
    assert list(opened.tensors) == [*STATE, "half", "twice"]
    assert read_tensor(opened, "twice") == raw(STATE["a"][:, :2].repeat(2, 1))
    assert [fqn for fqn, entry in opened.tensors.items() if not entry.num_chunks] == ["t", "empty"]
    del read[:]
    assert not twice.open_records(("empty",)).tensors["twice"].num_chunks
    assert read == [at["empty"][0]]


def test_records_of_one_kind_that_are_stored_in_two_ways(tmp_path: Path) -> None:
    """One rank's data are stored by columns, in as many bytes."""

    def make(mesh: DeviceMesh) -> dict[str, DTensor]:
        made = {fqn: shard(tensor, mesh) for fqn, tensor in CUT.items()}
        if mesh.get_local_rank() == 2:
            local = CUT["a"].chunk(4)[2].t().contiguous().t()
            made["a"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        return made

    directory = save_rank_local(make, 4, tmp_path / "c")
    closed = open_dcp(directory).defer(tuple(CUT))
    assert closed.open_records is not None
    for names in (("a",), tuple(CUT)):
        opened = closed.open_records(names)
        assert_holds(subset(opened, names), {name: CUT[name] for name in names})


def test_damaged_records_are_refused_by_whoever_opens_them(cut: str) -> None:
    start, nbytes = open_catalog(cut).chunks.start, open_catalog(cut).chunks.nbytes
    row = open_catalog(cut).tensors["b"].first_chunk + 3
    spoil(cut, start[row] + nbytes[row] - 80, "__3_0.distcp")
    closed = open_dcp(cut).defer(tuple(CUT))
    assert closed.open_records is not None
    closed.open_records(("a", "bias", "c"))
    with pytest.raises(SourceError, match="b: __3_0"):
        closed.open_records(("b",))


def test_a_damaged_description_ends_the_check(directory: str) -> None:
    start, _ = places(directory)["a"]
    spoil(directory, start)
    with pytest.raises(SourceError, match=r"a: __0_0\.distcp"):
        list(open_dcp(directory).check(("b", "a")))


def test_a_link_put_in_place_of_a_file_is_refused(directory: str) -> None:
    opened = open_dcp(directory)
    path = os.path.join(directory, "__0_0.distcp")
    os.rename(path, path + ".real")
    os.symlink("__0_0.distcp.real", path)
    with pytest.raises(SourceError, match=r"__0_0\.distcp is a symbolic link"):
        opened.select(("a",))


def test_many_files_and_chunks_of_one_kind(tmp_path: Path) -> None:
    """File per tensor; most records are spelled alike, and each still has its own bytes and place."""
    state = {f"layers.{n}.w": torch.full((3, 5), float(n)) for n in range(40)}
    state["other"] = torch.arange(15.0).reshape(5, 3).t()
    writer = dcp.FileSystemWriter(str(tmp_path), single_file_per_rank=False, thread_count=2)
    save(state, tmp_path, storage_writer=writer)
    catalog = open_catalog(str(tmp_path), records=True)
    assert len({file.path for file in catalog.files}) == 41
    assert_holds(catalog, state)


def test_exchanged_dtypes_of_one_length_are_told_apart(tmp_path: Path) -> None:
    """Records of equal length, of which one is not what `.metadata` says."""
    directory = save({f"w{n}": torch.full((4,), float(n)) for n in range(5)}, tmp_path / "c")

    def lie(metadata: Metadata) -> None:
        metadata.state_dict_metadata["w3"].properties.dtype = torch.int32

    alter(directory, lie)
    with pytest.raises(IntegrityError) as caught:
        open_catalog(directory, records=True)
    assert caught.value.problems == ("w3: __0_0.distcp: stored as float32, .metadata says int32",)
    assert_holds(open_catalog(directory, records=("w4",)), {"w4": torch.full((4,), 4.0)})
