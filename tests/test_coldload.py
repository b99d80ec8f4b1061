"""What benchmarks/coldload.py counts, and the file system that counts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MIB = 1 << 20


@pytest.fixture(scope="module")
def coldload() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import coldload

        yield coldload
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_near_is_what_follows_within_16_mib_in_the_same_file(coldload: Any) -> None:
    spans = [
        ("a", 0, MIB),
        ("b", 0, MIB),
        ("a", MIB, MIB),
        ("a", 18 * MIB, MIB),
        ("a", 36 * MIB, MIB),
        ("a", 30 * MIB, MIB),
    ]
    found = coldload.count(spans, 2)
    assert (found.read, found.requests, found.near, found.files) == (6 * MIB, 6, 3 * MIB, 2)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_planned_spans_of_all_ranks_are_the_model(coldload: Any, tmp_path: Path, shards: int) -> None:
    state = {f"layers.0.mlp.experts.{n}.up.weight": torch.zeros(3, 7) for n in range(5)}
    state |= {"embed.weight": torch.zeros(11, 1 << 18), "norm.weight": torch.zeros(2)}
    save_file(state, tmp_path / "model.safetensors")
    ranks = [coldload.planned(tmp_path, rank, shards) for rank in range(shards)]
    assert sum(rank.read for rank in ranks) == sum(value.nbytes for value in state.values())
    if shards == 1:
        assert ranks[0].requests == 12  # all tensors touch: 11 MiB and a little


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="needs root and FUSE"
)
def test_every_request_is_written_down(tmp_path: Path) -> None:
    source, log, mounts = tmp_path / "source", tmp_path / "log", [tmp_path / "a", tmp_path / "b"]
    (source / "below").mkdir(parents=True)
    content = os.urandom(3 * MIB + 5)
    (source / "below/file").write_bytes(content)
    for each in mounts:
        each.mkdir()
    command = [sys.executable, str(BENCHMARKS / "slowfs.py"), str(source), str(log), *map(str, mounts)]
    server = subprocess.Popen([*command, "--delay-ms", "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        if not server.stdout.readline():
            pytest.skip("may not mount")
        assert (mounts[1] / "below/file").read_bytes() == content
        assert os.listdir(mounts[1]) == ["below"]
        assert not (mounts[0] / "nothing").exists()
        with pytest.raises(OSError, match="Read-only"):
            (mounts[0] / "new").write_bytes(b"")
    finally:
        server.stdin.close()
        server.wait()
        server.stdout.close()
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    reads = sorted((start, nbytes) for _, what, _, start, nbytes, *_ in rows if what == "read")
    assert all(
        (number, name) == (1, "below/file") for number, what, name, *_ in rows if what in ("read", "open")
    )
    assert [start for start, _ in reads] == [
        sum(nbytes for _, nbytes in reads[:at]) for at in range(len(reads))
    ]
    assert sum(nbytes for _, nbytes in reads) == len(content)
    assert max(nbytes for _, nbytes in reads) <= MIB
    assert not os.listdir(mounts[1])
    assert all(answered - asked > 0.0009 for *_, asked, answered in rows)


def test_storage_is_waited_for_while_any_request_is_under_way(coldload: Any) -> None:
    assert coldload.under_way([(0.0, 1.0), (0.5, 2.0), (5.0, 6.0), (5.5, 5.7)]) == 3.0


def test_calls_of_a_rank_are_those_of_all_of_its_threads(coldload: Any, tmp_path: Path) -> None:
    """As strace writes them: one file for each thread, calls on other files among them."""
    lines = {
        10: ["1.0 clone3({flags=CLONE_VM|CLONE_THREAD}, 88) = 12", "1.1 clone(child_stack=NULL) = 11"],
        11: [
            '2.0 read(3</m/config.json>, ""..., 100) = 40',
            '2.1 read(3</m/config.json>, ""..., 100) = 60',
            '2.2 read(3</m/config.json>, ""..., 100) = 0',
            '2.3 preadv(4</m/data>, [{iov_base=""..., iov_len=8}, {iov_base=""..., iov_len=2}], 2, 64) = 10',
            "2.4 clone3({flags=CLONE_VM|CLONE_THREAD}, 88 => {parent_tid=[13]}, 88) = 13",
            '2.5 pread64(4</other/data>, ""..., 256, 0) = 256',
        ],
        12: ['1.5 pread64(4</m/data>, ""..., 256, 0) = 256'],
        13: [
            '2.6 pread64(4</m/data>, ""..., 256, 74) = 256',
            "2.7 pread64(4</m/data>, 0x7f, 256, 9) = -1 EIO (Input/output error)",
        ],
    }
    for thread, content in lines.items():
        (tmp_path / f"calls.{thread}").write_text("\n".join(content))
    (rank,) = coldload.called(tmp_path, "/m", [11])
    assert (rank.read, rank.requests, rank.near, rank.files) == (366, 4, 316, 2)


def test_a_store_answers_and_writes_down_who_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    obstore = pytest.importorskip("obstore")
    from obstore.store import S3Store

    (tmp_path / "source/below").mkdir(parents=True)
    (tmp_path / "source/below/file").write_bytes(bytes(range(100)))
    command = [
        sys.executable,
        str(BENCHMARKS / "slowstore.py"),
        str(tmp_path / "source"),
        str(tmp_path / "log"),
    ]
    server = subprocess.Popen([*command, "127.0.0.1", "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
        keys = {"access_key_id": "rank3", "secret_access_key": "any", "region": "us-east-1"}
        store = S3Store("bucket", endpoint=endpoint, client_options={"allow_http": True}, **keys)
        assert [each["path"] for each in obstore.list(store, "below/").collect()] == ["below/file"]
        assert obstore.list_with_delimiter(store)["common_prefixes"] == ["below"]
        assert bytes(obstore.get_range(store, "below/file", start=10, end=30)) == bytes(range(10, 30))
        assert obstore.head(store, "below/file")["size"] == 100
        with pytest.raises(FileNotFoundError):
            obstore.get(store, "nothing")
    finally:
        server.stdin.close()
        server.wait()
        server.stdout.close()
    rows = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    # As they began: a request is written down when its answer is already there.
    rows.sort(key=lambda row: float(row[5]))
    assert [row[:5] for row in rows] == [
        [3, "list", "below/", 0, 0],
        [3, "list", "", 0, 0],
        [3, "read", "below/file", 10, 20],
        [3, "head", "below/file", 0, 0],
        [3, "head", "nothing", 0, 0],
    ]
