"""Tensors are selected from a DCP directory by name: only their records are opened, checked and stamped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from shardkit.errors import IntegrityError, SourceError
from shardkit.formats.dcp.directory import open_dcp
from tests.formats.dcp.samples import assert_holds, open_catalog, read_tensor, save

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


def spoil(directory: str, at: int) -> None:
    with open(os.path.join(directory, "__0_0.distcp"), "r+b") as file:
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
