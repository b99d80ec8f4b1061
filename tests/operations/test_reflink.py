"""On a file system that shares extents no data moves, and the result is the copying path's, bit for bit."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

import shardkit
from shardkit.core.catalog import Catalog, SourceFile
from shardkit.errors import ResourceError
from shardkit.files import storage
from shardkit.files.storage import can_share_extents
from tests.operations.preshard.test_scale import sparse_model

pytestmark = pytest.mark.root


@pytest.fixture(params=["xfs", "btrfs"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A mounted image of a file system that shares extents."""
    make = {"xfs": ["mkfs.xfs", "-q", "-m", "reflink=1"], "btrfs": ["mkfs.btrfs", "-q"]}[request.param]
    if os.geteuid() != 0 or shutil.which(make[0]) is None:
        pytest.skip(f"needs root and {make[0]}")
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(1 << 30)
    for command in ([*make, str(image)], ["mount", "-o", "loop", str(image), str(mount)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount an image here: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def used_bytes(path: Path) -> int:
    os.sync()
    status = os.statvfs(path)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def test_a_file_yet_to_be_downloaded_is_tried_where_it_will_lie(shared: Path, tmp_path: Path) -> None:
    def of(path: Path) -> Catalog:
        file = SourceFile(name="model.safetensors", path=str(path), size=1 << 20)
        return Catalog(format="safetensors", directory="", files=[file])

    for cache in (shared, shared / "hub" / "snapshots"):
        assert can_share_extents(of(cache / "model.safetensors"), str(shared))
        assert not can_share_extents(of(cache / "model.safetensors"), str(tmp_path))
    assert not can_share_extents(of(tmp_path / "model.safetensors"), str(shared))
    assert {path.name for path in shared.iterdir()} <= {"lost+found"}


def test_every_device_is_tried_and_its_number_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs two file systems")
    with tempfile.TemporaryDirectory(dir=memory) as other:
        files = []
        for number, directory in enumerate((tmp_path, tmp_path, Path(other))):
            (directory / str(number)).write_bytes(bytes(4096))
            files.append(SourceFile(name=str(number), path=str(directory / str(number)), size=4096))
        catalog = Catalog(format="safetensors", directory="", files=files)
        both, refused = [tmp_path.stat().st_dev, memory.stat().st_dev], list[int]()
        tried = list[int]()

        def clone(source_fd: int, *_: int) -> None:
            tried.append(os.fstat(source_fd).st_dev)
            if tried[-1] in refused:
                raise OSError(errno.EXDEV, "Invalid cross-device link")

        monkeypatch.setattr(storage, "clone_range", clone)
        assert can_share_extents(catalog, str(tmp_path))
        assert tried == both
        for device in both:
            refused[:] = [device]
            assert not can_share_extents(catalog, str(tmp_path))


def test_btrfs_shares_across_subvolumes(shared: Path) -> None:
    made = shutil.which("btrfs") and subprocess.run(
        ["btrfs", "subvolume", "create", str(shared / "other")], capture_output=True, check=False
    )
    if not made or made.returncode:
        pytest.skip("only Btrfs has subvolumes")
    source = sparse_model(shared / "model", 2, (64, 1500))
    assert shardkit.preshard(str(source), str(shared / "other" / "out"), world_size=2).shares_extents


def test_room_is_asked_for_what_is_copied(shared: Path) -> None:
    source = sparse_model(shared / "model", 12, (4096, 1500))  # 147 MB
    status = os.statvfs(shared)
    with (shared / "fill").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - (30 << 20))
    ask = partial(shardkit.preshard, str(source), str(shared / "out"), dry_run=True)
    assert ask(world_size=8).shares_extents
    with pytest.raises(ResourceError, match="No space left"):  # other bytes
        ask(world_size=8, dtype="fp16")
    with pytest.raises(ResourceError, match="No space left"):  # too small to be shared
        ask(world_size=256)


@pytest.mark.parametrize("digest", ["none", "crc32"])
def test_extents_are_shared_and_bits_are_equal(shared: Path, tmp_path: Path, digest: str) -> None:
    source = sparse_model(shared / "model", 12, (4096, 1500))  # 147 MB
    path = source / "model.safetensors"
    size = path.stat().st_size
    header = path.read_bytes()[: int.from_bytes(path.read_bytes()[:8], "little") + 8]
    path.write_bytes(header + numpy.random.default_rng(0).bytes(size - len(header)))
    before = used_bytes(shared)
    result = shardkit.preshard(str(source), str(shared / "out"), world_size=8, digest=digest)
    extra = used_bytes(shared) - before
    assert result.shares_extents
    assert extra <= 0.02 * size
    copied = tmp_path / "copied"
    assert not shardkit.preshard(str(source), str(copied), world_size=8, digest=digest).shares_extents
    assert sorted(p.name for p in copied.iterdir()) == sorted(p.name for p in (shared / "out").iterdir())
    for expected in copied.iterdir():
        assert (shared / "out" / expected.name).read_bytes() == expected.read_bytes(), expected.name


@pytest.mark.parametrize("jobs", [1, 2])
def test_more_source_files_than_may_be_open(shared: Path, tmp_path: Path, jobs: int) -> None:
    source, files = shared / "model", {}
    source.mkdir()
    random = numpy.random.default_rng(0)
    for number in range(100):
        name = f"model-{number + 1:05d}-of-00100.safetensors"
        save_file({f"layers.{number}.w": random.random((300, 300), numpy.float32)}, source / name)
        files[f"layers.{number}.w"] = name
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (160, limits[1]))
    try:
        result = shardkit.preshard(
            str(source), str(shared / "out"), world_size=4, wrap="none", digest="none", jobs=jobs
        )
        shardkit.preshard(
            str(source), str(tmp_path / "out"), world_size=4, wrap="none", digest="none", jobs=jobs
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert result.shares_extents
    for path in sorted((shared / "out").glob("*.distcp")):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name
