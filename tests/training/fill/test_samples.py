"""Which bytes of a source ranks compare: a few of each tensor or of a handful of files, the same for the same content."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shardkit.core.catalog import Catalog, SourceFile
from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import Region
from shardkit.files import storage
from shardkit.training.fill.reading import Supply, Weights
from shardkit.training.fill.samples import keep_files_open, take_samples

NBYTES = 4096


def source(directory: Path, num_files: int, num_tensors: int, *, is_listed: bool = True) -> Catalog:
    """Make files with as many tensors each; chunks of a pre-sharded directory are not known beforehand."""
    directory.mkdir()
    catalog = Catalog(format="test", directory=str(directory))
    for number in range(num_files):
        path, nbytes = directory / str(number), num_tensors * NBYTES
        path.write_bytes(bytes(nbytes))
        catalog.files.append(SourceFile(name=path.name, path=str(path), size=nbytes))
        for at in range(num_tensors if is_listed else 0):
            chunk = (number, at * NBYTES, NBYTES, Region((0,), (NBYTES,)))
            catalog.add_tensor(f"{number}.{at}", BY_NAME["uint8"], (NBYTES,), iter([chunk]))
    return catalog


def sampled(catalog: Catalog, identity: str = "a", most_files: int = 127) -> tuple[str, set[str]]:
    weights = Weights(path="", catalog=catalog, names={}, identity=identity, sampled_files=most_files)
    with keep_files_open(Supply(weights=weights)) as supply:
        return take_samples(supply.weights), {Path(path).name for path in supply.weights.opened}


def change(catalog: Catalog, file: int, tensor: int) -> None:
    with Path(catalog.files[file].path).open("r+b") as out:
        out.seek(tensor * NBYTES)
        out.write(b"\1" * NBYTES)


def test_every_tensor_counts_where_there_are_few(tmp_path: Path) -> None:
    catalog = source(tmp_path / "few", 2, 60)
    before, files = sampled(catalog)
    assert files == {"0", "1"}
    for file, tensor in ((0, 0), (0, 31), (1, 59)):
        change(catalog, file, tensor)
        after, _ = sampled(catalog)
        assert after != before
        before = after


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_handful_of_files_however_many_there_are(tmp_path: Path, is_listed: bool) -> None:
    for size in (1, 4, 9, 300):
        catalog = source(tmp_path / str(size), size, 3, is_listed=is_listed)
        digest, files = sampled(catalog, most_files=4)
        assert min(size, 2) <= len(files) <= 4
        assert sampled(catalog, most_files=4) == (digest, files)
        for file in range(size):
            change(catalog, file, file % 3)  # a third of all bytes
        assert sampled(catalog, most_files=4)[0] != digest


def test_other_content_has_other_places(tmp_path: Path) -> None:
    catalog = source(tmp_path / "many", 300, 1)
    assert sampled(catalog, "a", 4)[1] != sampled(catalog, "b", 4)[1]
    assert sampled(catalog, "a", 0)[1] == set()


def test_all_places_are_being_fetched_before_the_first_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, each is a wait on storage over a network."""
    asked, read = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
    pread = storage.pread

    def heard(fd: int, start: int, nbytes: int, _: int) -> None:
        assert not read
        asked.append((fd, start, nbytes))

    def counted(fd: int, nbytes: int, start: int) -> bytes:
        read.append((fd, start, nbytes))
        return pread(fd, nbytes, start)

    monkeypatch.setattr(os, "posix_fadvise", heard)
    monkeypatch.setattr(storage, "pread", counted)
    sampled(source(tmp_path / "places", 3, 40))
    assert asked == read
    assert len(read) >= 64


def test_a_system_that_takes_no_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    catalog = source(tmp_path / "places", 3, 40)
    expected = sampled(catalog)
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    assert sampled(catalog) == expected
