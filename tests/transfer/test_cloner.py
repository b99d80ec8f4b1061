"""Extents that cannot be shared after all are copied, whatever the reason: the result is the same."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.core.dtypes import BY_NAME
from shardkit.transfer.cloner import Cloner, CloneRange
from tests.transfer.test_engine import Tensors, cut, planned, run, source, stored
from tests.worlds.processes import ROOT

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


def test_more_batches_than_sockets_hold(tmp_path: Path) -> None:
    with open(tmp_path / "f", "w+b") as file, Cloner() as cloner:
        piece = CloneRange(0, 0, 4096, 0, "a")
        tickets = [cloner.submit(file.fileno(), [piece], lambda _: file.fileno()) for _ in range(2000)]
        assert [cloner.wait(ticket) for ticket in tickets] == [
            [piece]
        ] * 2000  # a file is not shared with itself


WITHOUT_PRIVILEGES = """
import os, resource, signal, sys
sys.path[:0] = [{root!r}]
from shardkit.transfer.cloner import Cloner, CloneRange
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
files = [os.memfd_create("f") for _ in range(40)]
pieces = [CloneRange(at, 0, 4096, 0, "a") for at in range(40)]
with Cloner() as cloner:
    first = cloner.submit(files[0], pieces, files.__getitem__)
    os.kill(cloner._process.pid, signal.SIGSTOP)
    # More descriptors under way than a process may have open: the kernel refuses to send them.
    tickets = [first, *(cloner.submit(files[0], pieces, files.__getitem__) for _ in range(9))]
    os.kill(cloner._process.pid, signal.SIGCONT)
    print([len(cloner.wait(ticket)) for ticket in tickets] == [40] * 10)
"""


def drop_privileges() -> None:
    """For the program that is started next: root may send as many descriptors as it likes."""
    cap_sys_admin, cap_sys_resource, pr_capbset_drop = 21, 24, 24
    for capability in (cap_sys_admin, cap_sys_resource):
        ctypes.CDLL(None).prctl(pr_capbset_drop, capability, 0, 0, 0)


def test_descriptors_that_cannot_be_sent(tmp_path: Path) -> None:
    code = WITHOUT_PRIVILEGES.format(root=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        preexec_fn=drop_privileges,
    )
    assert done.stdout == "True\n", done.stderr
