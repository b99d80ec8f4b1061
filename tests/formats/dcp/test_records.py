"""Tensors are selected from a DCP directory by name: only their records are opened, checked and stamped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardkit.core.catalog import UNSEEN, Catalog, Unforeseen
from shardkit.errors import IntegrityError, SourceError
from shardkit.files import storage
from shardkit.formats.dcp.directory import open_dcp
from shardkit.formats.torchsave.record import TensorRecord
from shardkit.formats.torchsave.scan import RecordScanner
from tests.formats.dcp.samples import (
    assert_holds,
    open_catalog,
    read_tensor,
    save,
    save_rank_local,
    shard,
)

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


def test_the_opened_catalog_stays_as_it_was(directory: str) -> None:
    opened = open_dcp(directory)
    before = (list(opened.catalog.chunks.start), list(opened.catalog.files), opened.catalog.encoding)
    assert_holds(opened.select(tuple(STATE)), STATE)
    assert (list(opened.catalog.chunks.start), list(opened.catalog.files), opened.catalog.encoding) == before


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
    from torch.serialization import get_crc32_options, set_crc32_options

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


def columns(catalog: Catalog) -> list[list[int]]:
    return [list(catalog.chunks.file), list(catalog.chunks.start), list(catalog.chunks.nbytes)]


def stretches(catalog: Catalog) -> list[tuple[int, int, int]]:
    """(first byte, bytes, CRC-32) of all that the files record."""
    return [row for file in catalog.files if file.checksums is not None for row in file.checksums.rows()]


def test_places_are_foreseen_and_records_opened_before_they_are_read(
    cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, read = open_dcp(cut), list[int]()
    inner = RecordScanner.read

    def counted(scanner: RecordScanner, kind: Any, offset: int, length: int, *, where: str) -> TensorRecord:
        read.append(offset)
        return inner(scanner, kind, offset, length, where=where)

    exact = opened.select(tuple(CUT))
    monkeypatch.setattr(RecordScanner, "read", counted)
    foreseen = opened.foresee(tuple(CUT))
    num_kinds = len(read)
    assert num_kinds == 4 < len(exact.chunks)
    assert columns(foreseen) == columns(exact)
    assert [file.stamp for file in foreseen.files] == [file.stamp for file in exact.files]
    assert [row[:2] for row in stretches(foreseen)] == [row[:2] for row in stretches(exact)]
    assert [crc for _, _, crc in stretches(foreseen)].count(UNSEEN) == len(exact.chunks) - num_kinds
    del read[:]
    assert foreseen.records is not None
    foreseen.records.open(["b"])
    assert len(read) == 4
    known = {row for row in stretches(foreseen) if row[2] != UNSEEN}
    assert known < set(stretches(exact))
    assert len(known) > num_kinds
    foreseen.records.open(tuple(CUT))
    assert stretches(foreseen) == stretches(exact)


def test_files_without_records_to_look_at_are_not_opened(cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of hundreds of parts would open the files of all ranks."""
    opened, names, inner = open_dcp(cut), list[str](), storage.open_fd

    def counted(path: str, flags: int) -> int:
        names.append(os.path.basename(path))
        return inner(path, flags)

    monkeypatch.setattr(storage, "open_fd", counted)
    catalog = opened.foresee(("b",))
    assert names == ["__0_0.distcp"]
    assert len([file for file in catalog.files if file.stamp is not None]) == 4


def test_a_record_that_is_not_as_foreseen(tmp_path: Path) -> None:
    """One rank's data are stored by columns, in as many bytes."""

    def make(mesh: DeviceMesh) -> dict[str, DTensor]:
        made = {fqn: shard(tensor, mesh) for fqn, tensor in CUT.items()}
        if mesh.get_local_rank() == 2:
            local = CUT["a"].chunk(4)[2].t().contiguous().t()
            made["a"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        return made

    directory = save_rank_local(make, 4, tmp_path / "c")
    assert_holds(open_dcp(directory).select(tuple(CUT)), CUT)
    foreseen = open_dcp(directory).foresee(tuple(CUT))
    assert foreseen.records is not None
    foreseen.records.open(["b", "c"])
    with pytest.raises(Unforeseen):
        foreseen.records.open(["a"])
    whole = open_dcp(directory).foresee(tuple(CUT), opens_all=True)
    assert whole.records is None
    assert whole.is_foreseen
    assert_holds(whole, CUT)


def test_damaged_records_are_refused_by_whoever_opens_them(cut: str) -> None:
    """Of one that stands for others that is everybody."""
    catalog = open_dcp(cut).foresee(tuple(CUT))
    first, last = (catalog.chunks.start[catalog.tensors["b"].first_chunk + rank] for rank in (0, 3))
    spoil(cut, last - 80, "__3_0.distcp")
    foreseen = open_dcp(cut).foresee(tuple(CUT))
    assert foreseen.records is not None
    foreseen.records.open(["a", "bias", "c"])
    with pytest.raises(SourceError, match="b: __3_0"):
        foreseen.records.open(["b"])
    spoil(cut, first - 80)
    with pytest.raises(SourceError, match="b: __0_0"):
        open_dcp(cut).foresee(("b", "a"))


def test_what_cannot_be_foreseen_is_opened(directory: str) -> None:
    """One of these is not contiguous."""
    catalog = open_dcp(directory).foresee(tuple(STATE))
    assert catalog.records is None
    assert_holds(catalog, STATE)


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
    import torch.distributed.checkpoint as dcp

    state = {f"layers.{n}.w": torch.full((3, 5), float(n)) for n in range(40)}
    state["other"] = torch.arange(15.0).reshape(5, 3).t()
    writer = dcp.FileSystemWriter(str(tmp_path), single_file_per_rank=False, thread_count=2)
    dcp.save(state, storage_writer=writer, no_dist=True)
    catalog = open_catalog(str(tmp_path), records=True)
    assert len({file.path for file in catalog.files}) == 41
    assert_holds(catalog, state)


def test_exchanged_dtypes_of_one_length_are_told_apart(tmp_path: Path) -> None:
    """Records of equal length, of which one is not what `.metadata` says."""
    from torch.distributed.checkpoint.metadata import Metadata

    from tests.formats.dcp.samples import alter

    directory = save({f"w{n}": torch.full((4,), float(n)) for n in range(5)}, tmp_path / "c")

    def lie(metadata: Metadata) -> None:
        metadata.state_dict_metadata["w3"].properties.dtype = torch.int32

    alter(directory, lie)
    with pytest.raises(IntegrityError) as caught:
        open_catalog(directory, records=True)
    assert caught.value.problems == ("w3: __0_0.distcp: stored as float32, .metadata says int32",)
    assert (
        read_tensor(open_catalog(directory, records=("w4",)), "w4") == torch.full((4,), 4.0).numpy().tobytes()
    )
