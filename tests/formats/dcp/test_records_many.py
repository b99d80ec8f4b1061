"""Records that are compared all at once are what reading them one by one says; any other byte sends them that way."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.errors import ShardkitError
from shardkit.files.digest import crc32
from shardkit.formats.dcp import records
from shardkit.formats.torchsave import scan
from tests.formats.dcp.samples import alter, assert_holds, open_catalog, save, save_rank_local, shard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WORLD, NEVER = 5, 1 << 40

SetBulk = Callable[[bool], None]


def tensors(num: int) -> dict[str, torch.Tensor]:
    """Of several kinds: rows of two widths, vectors, ragged and empty last ranks, one that is stored as it lay.

    Args:
        num: how many of matrices, and of vectors.
    """
    made = {f"w{n}": torch.arange(70.0 + n)[: 7 * 10].reshape(7, 10) + n for n in range(num)}
    made |= {f"v{n}": torch.arange(11, dtype=torch.int16) + n for n in range(num)}
    return (
        made
        | {"few": torch.ones(2, 3)}
        | {f"t{n}": torch.arange(6.0).reshape(2, 3).t() + n for n in range(WORLD)}
    )


def checkpoint(path: Path, num: int = 30) -> str:
    state = tensors(num)

    def make(mesh: Any) -> dict[str, Any]:
        sharded = {name: shard(value, mesh) for name, value in state.items() if name[0] != "t"}
        own = f"t{mesh.get_local_rank()}"
        return {**sharded, own: state[own]}

    return save_rank_local(make, WORLD, path)


@pytest.fixture
def set_bulk(monkeypatch: pytest.MonkeyPatch) -> SetBulk:
    def set_bulk(on: bool) -> None:
        monkeypatch.setattr(records, "MIN_TOTAL", 1 if on else NEVER)
        monkeypatch.setattr(records, "_MIN_ROWS", 1)
        monkeypatch.setattr(records, "MIN_COLUMNS", 3)

    return set_bulk


def outcome(directory: str) -> object:
    try:
        found = open_catalog(directory, records=True)
    except ShardkitError as error:
        return type(error), error.message, error.problems
    table = found.chunks
    files = [(file.name, file.size, file.is_raw) for file in found.files]
    return list(table.file), list(table.start), list(table.nbytes), found.tensors, found.notes, files


def test_all_at_once_is_one_by_one(
    tmp_path: Path, set_bulk: SetBulk, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint(tmp_path / "c")
    set_bulk(False)
    expected = outcome(directory)
    set_bulk(True)
    singly: list[int] = []
    original = scan.RecordScanner.read

    def spy(self: Any, kind: Any, offset: int, *args: Any, **kwargs: Any) -> Any:
        singly.append(offset)
        return original(self, kind, offset, *args, **kwargs)

    monkeypatch.setattr(scan.RecordScanner, "read", spy)
    assert outcome(directory) == expected
    # Of 303 records those of the first rank, and of the last two, which have fewer rows; twice what is stored as it lay.
    assert len(singly) <= 61 + 2 * 60 + 2 * WORLD
    assert_holds(open_catalog(directory, records=True), tensors(30))


@pytest.mark.prove
def test_no_changed_byte_gets_by(tmp_path: Path, set_bulk: SetBulk) -> None:
    directory = checkpoint(
        tmp_path / "c", 6
    )  # a place in a record is as often hit where there are fewer of them
    names = sorted(name for name in os.listdir(directory) if name.endswith(".distcp"))
    rng, refused, accepted = random.Random(1), 0, 0
    for trial in range(150):
        path = os.path.join(directory, rng.choice(names[1:]))
        with open(path, "r+b") as file:
            content = file.read()
            at = rng.randrange(len(content))
            file.seek(at)
            file.write(bytes([content[at] ^ 1 << rng.randrange(8)]))
        set_bulk(True)
        found = outcome(directory)
        set_bulk(False)
        assert found == outcome(directory), (trial, path, at)
        refused, accepted = refused + (len(found) == 3), accepted + (len(found) > 3)  # type: ignore[arg-type]
        with open(path, "r+b") as file:
            file.write(content)
    assert refused > 30
    assert accepted > 3


def test_a_changed_crc_gets_by_in_no_place(tmp_path: Path, set_bulk: SetBulk) -> None:
    """It stands behind the data and in the directory; only where both agree is it one."""
    directory = checkpoint(tmp_path / "c")
    catalog = open_catalog(directory, records=True)
    table = catalog.chunks
    row = next(
        row
        for row in catalog.tensors["w7"].chunk_ids
        if catalog.files[table.file[row]].name == "__1_0.distcp"
    )
    path = Path(directory, "__1_0.distcp")
    content = path.read_bytes()
    crc = crc32(content[table.start[row] : table.start[row] + table.nbytes[row]]).to_bytes(4, "little")
    places = [at for at in range(len(content)) if content.startswith(crc, at)]
    assert len(places) == 2
    for at in places:
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        set_bulk(False)
        expected = outcome(directory)
        set_bulk(True)
        assert outcome(directory) == expected


@pytest.mark.parametrize("cut", [1, 700, 5000])
def test_a_file_that_ends_early(tmp_path: Path, cut: int, set_bulk: SetBulk) -> None:
    """The size is looked at before; a file cut in between is found by its records."""
    directory = checkpoint(tmp_path / "c")
    path = os.path.join(directory, "__1_0.distcp")
    answers = []
    for on in (True, False):
        set_bulk(on)
        catalog = open_catalog(directory)
        content = Path(path).read_bytes()
        os.truncate(path, len(content) - cut)
        with pytest.raises(ShardkitError, match=r"__1_0\.distcp") as raised:
            records.select_raw(catalog, {}, tuple(catalog.tensors))
        answers.append((raised.value.message, raised.value.problems))
        Path(path).write_bytes(content)
    assert answers[0] == answers[1]


def test_records_that_many_share_and_gaps(tmp_path: Path, set_bulk: SetBulk) -> None:
    """Two names of one record (ties), and records that are not next to each other."""
    state = {f"w{n}": torch.arange(12.0) + n for n in range(40)}
    directory = save(state, tmp_path / "c")

    def tie(metadata: Any) -> None:
        places = {index.fqn: index for index in metadata.storage_data}
        for n in range(0, 40, 4):
            metadata.storage_data[places[f"w{n}"]] = metadata.storage_data[places[f"w{n + 1}"]]

    alter(directory, tie)
    set_bulk(False)
    expected = outcome(directory)
    set_bulk(True)
    assert outcome(directory) == expected
    assert_holds(
        open_catalog(directory, records=True),
        {name: state[f"w{n + 1}"] if n % 4 == 0 else value for n, (name, value) in enumerate(state.items())},
    )
