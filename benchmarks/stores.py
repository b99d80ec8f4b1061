"""Reading from an object store, against the best that its client library does with the same objects.

    AWS_ENDPOINT_URL=http://127.0.0.1:8333 python benchmarks/stores.py s3://bucket/benchmark --gigabytes 0.5

Uploads a model of two files, and then, in each run, downloads it with obstore in several ways and reads it as shardkit
does: by ranges that are planned beforehand, in pieces of 1 MiB, with two threads. Prints the medians in MB/s, the
ratio to obstore's best, and `shardkit preshard` of it. Nothing is kept of what is read. What was uploaded
stays.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from common import Report, json_option, spread
from safetensors.torch import save_file

import shardkit
from shardkit.files import storage, stores
from shardkit.files.remote import cloud, ranges

MIB = 1 << 20
PIECE_NBYTES = MIB
NUM_FILES = 2
THREADS = 2


def upload(uri: str, nbytes: int) -> dict[str, int]:
    """Make a model and upload it; return its objects and their sizes."""
    import obstore

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    client, found = cloud.connect(f"s3://{bucket}"), dict[str, int]()
    rows = nbytes // NUM_FILES // 8 // (4096 * 2)
    with tempfile.TemporaryDirectory() as name:
        weight_map = dict[str, str]()
        for number in range(NUM_FILES):
            file = f"model-{number + 1:05}-of-{NUM_FILES:05}.safetensors"
            tensors = {f"layers.{number}.{n}": torch.randn(rows, 4096).to(torch.bfloat16) for n in range(8)}
            save_file(tensors, Path(name) / file)
            weight_map |= dict.fromkeys(tensors, file)
            found[f"{prefix}/{file}"] = (Path(name) / file).stat().st_size
        (Path(name) / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        for path in sorted(Path(name).iterdir()):
            obstore.put(client, f"{prefix}/{path.name}", path)
    return found


def by_obstore(client: Any, objects: dict[str, int], threads: int, nbytes: int) -> None:
    """Download with obstore: ranges of some size, or whole objects for 0."""
    import obstore

    def get(part: tuple[str, int, int]) -> int:
        key, start, stop = part
        if not nbytes:
            return len(obstore.get(client, key).bytes())
        return len(obstore.get_range(client, key, start=start, end=stop))

    parts = [
        (key, start, min(start + (nbytes or size), size))
        for key, size in objects.items()
        for start in range(0, size, nbytes or size)
    ]
    with ThreadPoolExecutor(threads) as pool:
        assert sum(pool.map(get, parts)) == sum(objects.values())


def by_shardkit(bucket: str, objects: dict[str, int]) -> None:
    """Read as a verb does: the ranges are told, and then read front to back."""
    with storage.limit_fetched(220 * MIB):  # what --max-memory 256MiB leaves
        for key, size in objects.items():
            fd = storage.open_fd(f"{bucket}/{key}", os.O_RDONLY)
            try:
                storage.will_read(fd, [(0, size)])
                buffers = [bytearray(PIECE_NBYTES) for _ in range(THREADS)]

                def read(start: int, fd: int = fd, buffers: list[bytearray] = buffers) -> int:
                    buffer = buffers.pop()
                    done = storage.preadv(fd, [buffer], start)
                    buffers.append(buffer)
                    return done

                with ThreadPoolExecutor(THREADS) as pool:
                    assert sum(pool.map(read, range(0, size, PIECE_NBYTES))) == size
            finally:
                storage.close_fd(fd)


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("uri", help="s3://BUCKET/PREFIX to upload to")
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--runs", type=int, default=5)
    json_option(parser)
    options = parser.parse_args()
    objects = upload(options.uri, int(options.gigabytes * 1e9))
    bucket = "/".join(options.uri.split("/")[:3])
    client, total = cloud.connect(bucket), sum(objects.values())

    def preshard() -> None:
        with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
            shardkit.preshard(options.uri, Path(name) / "out", world_size=8, wrap="none")

    ways: dict[str, Callable[[], object]] = {
        "obstore, whole objects": lambda: by_obstore(client, objects, 2, 0)
    }
    for threads in (2, 4, 8, 16):
        ways[f"obstore, 8 MiB, {threads} threads"] = lambda threads=threads: by_obstore(
            client, objects, threads, ranges.MAX_REQUEST_NBYTES
        )
    ways["shardkit"] = lambda: by_shardkit(bucket, objects)
    ways["shardkit preshard, 8 ranks"] = preshard
    stores.forget()
    by_shardkit(bucket, objects)  # connections are open, and what is imported is there
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.runs):
        for name, way in ways.items():
            took[name].append(seconds(way))
    speeds = {name: total / 1e6 / statistics.median(each) for name, each in took.items()}
    best = max(speed for name, speed in speeds.items() if name.startswith("obstore"))
    with Report(options) as report:
        for name, speed in speeds.items():
            more = {"to_best": speed / best} if name == "shardkit" else {}
            found = spread(took[name], "elapsed", "_s")
            report.add("store", name, runs=options.runs, **found, mb_per_s=speed, moved_bytes=total, **more)


if __name__ == "__main__":
    main()
