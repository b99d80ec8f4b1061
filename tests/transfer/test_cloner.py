"""Extents that cannot be shared after all are copied, whatever the reason: the result is the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from shardkit.core.dtypes import BY_NAME
from shardkit.transfer.cloner import Cloner, CloneRange
from tests.transfer.test_engine import Tensors, cut, planned, run, source, stored

TENSORS: Tensors = {
    "large": (BY_NAME["bfloat16"], (700, 600), 0),
    "small": (BY_NAME["int32"], (5,), None),
    "other": (BY_NAME["int32"], (999, 400), 0),
}


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("jobs", [1, 2])
def test_what_cannot_be_shared_is_copied(tmp_path: Path, digests: bool, jobs: int) -> None:
    catalog, data = source(tmp_path, TENSORS, 7)
    starts = {fqn: catalog.chunks.start[entry.first_chunk] for fqn, entry in catalog.tensors.items()}
    images, plan = planned(catalog, TENSORS, 3, phase=starts.__getitem__)
    plain, shared = tmp_path / "plain", tmp_path / "shared"
    plain.mkdir()
    shared.mkdir()
    expected = run(plan, plain, digests=digests, jobs=jobs)
    # Most file systems refuse to share, others do it: either way the files are the same.
    assert run(plan, shared, digests=digests, share_extents=True, jobs=jobs) == expected
    for image in images:
        assert (shared / image.name).read_bytes() == (plain / image.name).read_bytes()
    for fqn, (dtype, shape, _) in TENSORS.items():
        for region, content in stored(images, shared, fqn):
            assert content == cut(data[fqn], dtype, shape, region)


def test_a_process_that_dies_leaves_its_ranges_to_be_copied(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(8192))
    pieces = [CloneRange(0, 0, 4096, 0, "a"), CloneRange(0, 4096, 4096, 4096, "b")]
    with (
        open(tmp_path / "source", "rb") as origin,
        open(tmp_path / "target", "w+b") as target,
        Cloner() as cloner,
    ):
        cloner.wait(cloner.submit(target.fileno(), pieces, lambda file: origin.fileno()))
        assert cloner._process is not None
        os.kill(cloner._process.pid, signal.SIGKILL)
        cloner._process.wait()
        ticket = cloner.submit(target.fileno(), pieces, lambda file: origin.fileno())
        assert sorted(cloner.wait(ticket)) == pieces


def test_the_process_ends_with_the_cloner(tmp_path: Path) -> None:
    with open(tmp_path / "f", "w+b") as file, Cloner() as cloner:
        cloner.wait(cloner.submit(file.fileno(), [CloneRange(0, 0, 4096, 0, "a")], lambda _: file.fileno()))
    assert cloner._process is not None
    assert cloner._process.returncode == 0
