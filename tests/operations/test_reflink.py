"""On a file system that shares extents no data moves, and the result is the copying path's, bit for bit."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

import shardkit
from tests.operations.test_scale import sparse_model

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
