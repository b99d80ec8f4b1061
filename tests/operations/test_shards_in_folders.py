"""A DCP directory whose `.metadata` names files in folders below it: every verb reads it as the plain one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import shardkit
from shardkit.errors import ShardkitError, SourceError
from tests.bits import flip_byte
from tests.contents import contents
from tests.formats.dcp.samples import quiet
from tests.manifests import write_file_list
from tests.nested import Model, place

FOLDERS = ("data-abc", "data-abc/more")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`hub`, `flat` and `deep`: the same weights; the shards of `deep` lie in folders."""
    home = tmp_path_factory.mktemp("folders")
    (home / "hub").mkdir()
    torch.manual_seed(0)
    save_file(Model().state_dict(), home / "hub/model.safetensors")
    shardkit.preshard(home / "hub", home / "flat", world_size=2, wrap="none")
    for name in ("shardkit.json", "__0_0.chunks.json", "__1_0.chunks.json"):
        (home / "flat" / name).unlink()
    shutil.copytree(home / "flat", home / "deep")
    move_shards(home / "deep")
    return home


@pytest.fixture
def made(kept: Path, tmp_path: Path) -> Path:
    """A copy of them that a test may change."""
    for name in ("hub", "flat", "deep"):
        shutil.copytree(kept / name, tmp_path / name)
    return tmp_path


def move_shards(directory: Path) -> None:
    for rank, folder in enumerate(FOLDERS):
        (directory / folder).mkdir()
        (directory / f"__{rank}_0.distcp").rename(directory / folder / f"__{rank}_0.distcp")
    place(directory, lambda name: f"{FOLDERS[int(name[2])]}/{name}")


def written(directory: Path) -> dict[str, bytes]:
    """Its files, without the manifest, which names the source."""
    return {name: data for name, data in contents(directory).items() if name != "shardkit.json"}


@pytest.mark.parametrize("reader", [FileSystemReader, FsspecReader, shardkit.SafeReader])
def test_stock_load_reads_it(kept: Path, reader: Callable[[str], Any]) -> None:
    want = load_file(kept / "hub/model.safetensors")
    state = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    with quiet():
        dcp.load(state, storage_reader=reader(str(kept / "deep")), no_dist=True)
    assert all(torch.equal(state[name], want[name]) for name in want)


def test_inspect_names_the_files(kept: Path) -> None:
    flat, deep = shardkit.inspect(kept / "flat"), shardkit.inspect(kept / "deep")
    assert flat.tensors == deep.tensors
    assert [file.name for file in deep.files] == ["data-abc/__0_0.distcp", "data-abc/more/__1_0.distcp"]


@pytest.mark.parametrize("full", [False, True])
def test_verify_checks_every_chunk(kept: Path, full: bool) -> None:
    flat, deep = (shardkit.verify(kept / name, full=full) for name in ("flat", "deep"))
    assert (deep.problems, deep.warnings) == ((), ())
    for seen in ("num_files", "num_chunks", "num_checked_chunks", "read_bytes", "notes"):
        assert getattr(deep, seen) == getattr(flat, seen)


def test_verify_finds_what_is_damaged_and_what_is_left_over(made: Path) -> None:
    shutil.copy(made / "deep/data-abc/__0_0.distcp", made / "deep/data-abc/__7_0.distcp")
    damaged = made / "deep/data-abc/more/__1_0.distcp"
    flip_byte(damaged, damaged.stat().st_size // 2)
    report = shardkit.verify(made / "deep", full=True)
    assert {problem.file for problem in report.problems} == {"data-abc/more/__1_0.distcp"}
    assert report.warnings == ("data-abc/__7_0.distcp: not of this checkpoint",)


@pytest.mark.parametrize(
    "verb",
    [
        lambda source, out: shardkit.consolidate(source, out),
        lambda source, out: shardkit.reshard(source, out, world_size=3),
    ],
    ids=["consolidate", "reshard"],
)
def test_the_same_bytes_are_written(kept: Path, tmp_path: Path, verb: Callable[[Path, Path], object]) -> None:
    for name in ("flat", "deep"):
        verb(kept / name, tmp_path / name)
    assert written(tmp_path / "deep") == written(tmp_path / "flat")


def test_a_run_is_searched_for_it(kept: Path, tmp_path: Path) -> None:
    """Folders of shards beside `.metadata` are no saves that did not finish."""
    shutil.copytree(kept / "deep", tmp_path / "run/step-2")
    assert shardkit.diff(tmp_path / "run", kept / "flat").is_equal
    shardkit.consolidate(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").exists()


def test_a_manifest_lists_the_folders(made: Path) -> None:
    write_file_list(made / "deep", inside=True)
    assert shardkit.verify(made / "deep", full=True).problems == ()
    os.truncate(made / "deep/data-abc/__0_0.distcp", 100)
    assert shardkit.verify(made / "deep").problems


def test_models_are_filled(kept: Path) -> None:
    want = load_file(kept / "hub/model.safetensors")
    context = shardkit.prepare(Model, kept / "deep")
    first, second = shardkit.finalize(context.model, context), Model()
    shardkit.load_into(second, kept / "deep")
    for model in (first, second):
        assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())


HOSTILE = (
    "../outside/__0_0.distcp",
    "data-abc/../../outside/__0_0.distcp",
    "data-abc/../data-abc/__0_0.distcp",
    "./data-abc/__0_0.distcp",
    "data-abc//__0_0.distcp",
    "data-abc/./__0_0.distcp",
    "/{home}/outside/__0_0.distcp",
    "data-abc\\__0_0.distcp",
    "data-abc/__0_0.distcp/",
    "data-abc/.distcp",
    "data-abc/\0/__0_0.distcp",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_leaves_the_directory_is_refused(made: Path, name: str) -> None:
    shutil.copytree(made / "deep/data-abc", made / "outside")
    name = name.replace("{home}", str(made).lstrip("/"))
    place(made / "deep", lambda old: name if "__0_0" in old else old)
    for verb in (shardkit.inspect, lambda path: shardkit.load_into(Model(), path)):
        with pytest.raises(SourceError, match=r"not the name of a \.distcp file in or below") as refused:
            verb(made / "deep")
    assert "\0" not in str(refused.value)


def test_a_folder_that_is_a_link_out_is_refused(made: Path) -> None:
    (made / "deep/data-abc").rename(made / "outside")
    (made / "deep/data-abc").symlink_to("../outside")
    for verb in (shardkit.inspect, lambda path: shardkit.consolidate(path, made / "out")):
        with pytest.raises(ShardkitError, match="symbolic link that leaves its directory"):
            verb(made / "deep")
    shardkit.consolidate(made / "deep", made / "out", follow_links=True)
    assert shardkit.verify(made / "out").problems == ()


def test_a_folder_that_is_a_link_inside_is_read(made: Path) -> None:
    (made / "deep/data-abc").rename(made / "deep/elsewhere")
    (made / "deep/data-abc").symlink_to("elsewhere")
    assert shardkit.inspect(made / "deep").num_tensors == shardkit.inspect(made / "flat").num_tensors


@pytest.mark.parametrize("kind", ["missing", "directory", "link"])
def test_what_is_no_file_is_refused(made: Path, kind: str) -> None:
    path = made / "deep/data-abc/__0_0.distcp"
    path.rename(made / "elsewhere")
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(made / "elsewhere")
    with pytest.raises(SourceError, match=r"data-abc/__0_0\.distcp: (no such|not a regular|a symbolic)"):
        shardkit.inspect(made / "deep")
