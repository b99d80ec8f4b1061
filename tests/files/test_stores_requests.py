"""How many requests reading takes: no more than a tenth over what coalescing at 8 MiB needs, and many at once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from threading import Barrier, Semaphore, Thread
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardkit
from shardkit.files import stores
from shardkit.files.remote import ranges
from tests.answers import HIGH_WATER, answer_of
from tests.cases import but_first
from tests.worlds import stores as servers

MIB = 1 << 20
RANKS = 32
S3 = "s3://bucket/large"
DATA = 64 << 10  # a range that is longer is one of tensors, not of headers and directories


class Large(nn.Module):
    """96 MiB: each of 32 ranks has half a MiB of each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(2048) for _ in range(6))


class Files(NamedTuple):
    """Checkpoints in the store."""

    served: servers.Served
    home: Path
    """They lie here too."""

    def sizes(self, folder: str) -> list[int]:
        """Bytes of each file with tensors."""
        files = [*(self.home / folder).glob("*.safetensors"), *(self.home / folder).glob("*.distcp")]
        return [path.stat().st_size for path in files]


@pytest.fixture(scope="module")
def large(served: servers.Served, tmp_path_factory: pytest.TempPathFactory) -> Files:
    home = tmp_path_factory.mktemp("large")
    (home / "hub").mkdir()
    torch.manual_seed(0)
    save_file(Large().state_dict(), home / "hub/model.safetensors")
    shardkit.preshard(home / "hub", home / "dcp", world_size=RANKS, wrap="none")
    servers.upload(home, S3)
    return Files(served, home)


def data_requests(large: Files) -> Counter[str]:
    """Return how many ranges of tensors were asked for of each object."""
    return Counter(
        seen.path.partition("?")[0] for seen in large.served.proxy.ranges("/large/") if seen.nbytes > DATA
    )


def fetched(large: Files) -> int:
    return sum(seen.nbytes for seen in large.served.proxy.ranges("/large/"))


def needed(large: Files, folder: str) -> int:
    """Return what coalescing at 8 MiB needs for all files of a folder."""
    return sum(-(-size // ranges.MAX_REQUEST_NBYTES) for size in large.sizes(folder))


VERBS: dict[str, tuple[str, Callable[[str, Path], Any]]] = {
    "consolidate": ("dcp", lambda source, out: shardkit.consolidate(source, out)),
    "reshard": ("dcp", lambda source, out: shardkit.reshard(source, out, world_size=5)),
    "preshard": ("hub", lambda source, out: shardkit.preshard(source, out, world_size=RANKS, wrap="none")),
    "preshard, more threads": (
        "hub",
        lambda source, out: shardkit.preshard(source, out, world_size=RANKS, wrap="none", jobs=6),
    ),
    "load_into": ("hub", lambda source, out: shardkit.load_into(Large(), source)),
    "load_into of shards": ("dcp", lambda source, out: shardkit.load_into(Large(), source)),
    "diff": ("dcp", lambda source, out: shardkit.diff(source, out)),
    "verify": ("dcp", lambda source, out: shardkit.verify(source, full=True)),
}


@pytest.mark.parametrize("verb", but_first(VERBS))
def test_requests_for_tensors_are_few(large: Files, tmp_path: Path, verb: str) -> None:
    """No byte is fetched twice but small ones, each file is read in requests of 8 MiB, and many are under way at once."""
    folder, run = VERBS[verb]
    large.served.proxy.num_together = 5
    run(f"{S3}/{folder}", large.home / "hub" if verb == "diff" else tmp_path / "out")
    assert data_requests(large).total() <= 1.1 * needed(large, folder)
    assert fetched(large) <= 1.1 * sum(large.sizes(folder))
    assert large.served.proxy.most_together >= 5


def test_nothing_is_fetched_twice_where_many_places_are_read_in_turn() -> None:
    """Chunks are nearly as long as requests: a place needs the rest of one request and the beginning of the next.

    Two threads read every second row of chunks each, the second one a row later.
    """
    count, chunk, size = 16, 1_800_000, 18_000_000
    fetched, content = list[int](), memoryview(bytes(size))

    def fetch(start: int, nbytes: int) -> memoryview:
        fetched.append(nbytes)
        return content[start : start + nbytes]

    with ranges.limited(64 * MIB):
        places = [ranges.Ranges(size, fetch) for _ in range(count)]
        for place in places:
            place.plan([(0, size)], count)
        buffer = memoryview(bytearray(chunk))
        first, second = (
            [(place, start) for start in range(begin, size, 2 * chunk) for place in places]
            for begin in (0, chunk)
        )
        for ours, theirs in zip_longest(first, [None] * count + second):
            for place, start in filter(None, (ours, theirs)):
                assert place.read_into([buffer], start) == chunk
        for place in places:
            place.close()
    assert sum(fetched) <= 1.02 * count * size


def test_what_is_fetched_ahead_is_not_dropped_before_it_is_read() -> None:
    """The thread that reads the second request comes first; what it fetches ahead fills the memory."""
    fetched, content = Counter[int](), memoryview(bytes(64 * MIB))
    done, end = Semaphore(0), 1000

    def fetch(start: int, nbytes: int) -> memoryview:
        fetched[start // (8 * MIB)] += nbytes
        done.release()
        return content[start : start + nbytes]

    with ranges.limited(48 * MIB):
        place = ranges.Ranges(len(content), fetch)
        place.plan([(0, len(content))])
        buffer = memoryview(bytearray(8 * MIB))
        place.read_into([buffer[:-end]], 8 * MIB)  # the rest of it belongs to a third
        for _ in range(5):
            assert done.acquire(timeout=600)
        place.read_into([buffer], 0)
        place.read_into([buffer[:end]], 16 * MIB - end)
        for start in range(16 * MIB, 64 * MIB, 8 * MIB):
            place.read_into([buffer], start)
        place.close()
    assert fetched == dict.fromkeys(range(8), 8 * MIB) | {1: 8 * MIB + end}


def test_looking_takes_a_handful_of_requests(large: Files) -> None:
    for folder, most in (("hub", 6), ("dcp", 10)):
        large.served.proxy.seen.clear()
        shardkit.inspect(f"{S3}/{folder}")
        assert len(large.served.proxy.seen) <= most, folder


def test_many_small_records_are_read_together(served: servers.Served, tmp_path: Path) -> None:
    """One request for each of them would take minutes over a slow link."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(64, 64)) for _ in range(300)])
    (tmp_path / "hub").mkdir()
    save_file(model.state_dict(), tmp_path / "hub/model.safetensors")
    shardkit.preshard(tmp_path / "hub", tmp_path / "small", world_size=2, wrap="none")
    servers.upload(tmp_path / "small", "s3://bucket/small")
    for verb in (
        lambda: shardkit.verify("s3://bucket/small"),
        lambda: shardkit.consolidate("s3://bucket/small", tmp_path / "out"),
    ):
        served.proxy.seen.clear()
        verb()
        assert max(Counter(seen.path for seen in served.proxy.ranges(".distcp")).values()) <= 3


def test_threads_share_what_is_fetched(large: Files) -> None:
    """Six threads read pieces that lie side by side. They keep in step, as what one leaves far behind is not held."""
    path, found = f"{S3}/hub/model.safetensors", dict[int, bytes]()
    size = stores.status(path).st_size
    number = stores.open_number(path, os.O_RDONLY)

    in_step = Barrier(6)

    def read(thread: int) -> None:
        for begin in range(0, size, 3 * MIB):
            in_step.wait()
            start = begin + thread * MIB // 2
            if start < size:
                found[start] = stores.read(number, MIB // 2, start)

    stores.plan_reads(number, [(0, size)], 1, is_soon=False)
    threads = [Thread(target=read, args=(thread,)) for thread in range(6)]
    large.served.proxy.seen.clear()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stores.close_number(number)
    whole = b"".join(found[start] for start in sorted(found))
    assert whole == (large.home / "hub/model.safetensors").read_bytes()
    assert len(large.served.proxy.ranges()) <= 1.1 * -(-size // ranges.MAX_REQUEST_NBYTES)


MEMORY = f"""{HIGH_WATER}
import json, sys
import shardkit
source, output, most, verb = sys.argv[1:]

def run(output, dry_run=False):
    options = dict(max_memory=int(most), dry_run=dry_run)
    if verb == "consolidate":
        return shardkit.consolidate(source, output, **options)
    return shardkit.preshard(source, output, world_size=32, wrap="none", **options)

said = run(output, dry_run=True).peak_memory_bytes  # all that is imported is here now
with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")
before = high_water()
run(output)
print(json.dumps([said, high_water() - before]))
"""


@pytest.mark.parametrize(("verb", "folder"), [("consolidate", "dcp"), ("preshard", "hub")])
@pytest.mark.parametrize("most", but_first([24 * MIB, 96 * MIB]))
def test_memory_stays_below_the_limit(
    large: Files, tmp_path: Path, verb: str, folder: str, most: int
) -> None:
    """The peak of the process, above what it has once all is imported; 32 MiB are the HTTP client's, and what malloc keeps."""
    said, peak = answer_of(MEMORY, f"{S3}/{folder}", tmp_path / "out", most, verb)
    assert said <= most
    assert peak <= most + 32 * MIB
    largest = max(seen.nbytes for seen in large.served.proxy.ranges("/large/"))
    assert largest <= most // 2


def test_opening_takes_one_request_for_each_large_record_and_one_for_each_file(
    served: servers.Served, tmp_path: Path
) -> None:
    """benchmarks/SCALE.md reckons with it."""
    (tmp_path / "hub").mkdir()
    num_files, num_tensors = 2, 3
    tensors = {f"layers.{n}.weight": torch.randn(1024, 512) for n in range(num_tensors)}
    save_file(tensors, tmp_path / "hub/model.safetensors")
    shardkit.preshard(tmp_path / "hub", tmp_path / "dcp", world_size=num_files, wrap="none")
    servers.upload(tmp_path / "dcp", "s3://bucket/records")
    stores.forget()
    served.proxy.seen.clear()
    shardkit.consolidate("s3://bucket/records", tmp_path / "out", dry_run=True)
    seen = [each for each in served.proxy.ranges("/records/") if ".distcp" in each.path]
    assert num_files * num_tensors <= len(seen) <= num_files * (num_tensors + 1)
    assert sum(each.nbytes for each in seen) < 1 << 20
