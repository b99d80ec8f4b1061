"""What N ranks read from storage when a job starts, counted by the file system: shardkit's ways to load beside those of others; as root.

    python benchmarks/coldload.py DIRECTORY [--ranks 4] [--megabytes 400] [--model dense] [--mesh fsdp] [--way NAME] [--runs 1]
        [--delay-ms 20] [--mb-per-s 500] [--store | --calls]

DIRECTORY gets generated models of bf16, dense and with experts, and what preshard makes of them: five times `--megabytes` each, which is at
least 360 for the dense one.
Every rank sees them through a file system of its own (benchmarks/slowfs.py), as on a node of its own: with a page cache of its own,
which is empty. It answers requests of at most 1 MiB, reads 1 MiB ahead, and writes all of them down. The whole start counts, from
building the model to looking at every value (mapped files are read then). With --delay-ms and --mb-per-s storage is slow: each
request takes the one, all ranks share the other.

    read          bytes read, to those that the ranks hold; `most_read` of the rank that reads most
    requests      for data, of all ranks; `requests_per_gib` of what is held; `short` are those of at most 8 KiB, of
                  the rank with most: places that ranks compare, and headers, whatever the model's size
    request_bytes the mean
    sequential    share of the bytes that follow within 16 MiB of the read before in the same file
    files         that a rank opens, config and index included; the most of all ranks
    sent          bytes over the process group, to those that the ranks hold
    waiting_s     in which a request was under way; of the rank with most
    start_s       of the slowest rank, the whole start: on busy cores it is that of Python and of building the model

Ranks are forks of one process that has imported what any of the ways imports; 64 of them take less than 8 GB of memory.

"planned prefetch" is in no release: its row is computed from the spans of each rank's tensors. Spans that touch are one, and take
requests of at most 1 MiB.

With --store the models are in a store (benchmarks/slowstore.py) that answers each request after --delay-ms, behind a link of --mb-per-s
that all ranks share: a network namespace with `tc tbf`. What reads no store gets copies of what a rank needs, eight files at once, into
a directory of its own, which counts.

With --calls `strace` counts instead: the calls of shardkit and of stock dcp.load on the directory itself (mapped files make none).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import math
import os
import re
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import links
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import HERE, Report, json_option, run, wait_for, work_in
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardkit

NEAR = 16 << 20
SHORT = 8 << 10
REQUEST = 1 << 20
GIB = 1 << 30
_NEWNS, _NEWNET, _BIND, _PRIVATE, _REC = 0x20000, 0x40000000, 0x1000, 1 << 18, 0x4000
_libc = ctypes.CDLL(None, use_errno=True)


class Place(NamedTuple):
    """A model, as the ranks see it."""

    hub: str
    sharded: str
    profile: str
    """Pre-sharded for transformers' own loader."""
    copies: Path | None = None
    """Where ranks put copies of what they cannot read in a store."""


class World(NamedTuple):
    """The meshes of a run."""

    mesh: Any
    experts: Any
    kind: str


class Mesh(NamedTuple):
    """How parameters are divided, given the number of ranks."""

    preshard: str
    shards: Callable[[int], int]
    """How many parts a weight has."""


MESHES = {
    "fsdp": Mesh("dp_shard={n}", lambda n: n),
    "hsdp": Mesh("dp_replicate=2,dp_shard={half}", lambda n: n // 2),
    "ep": Mesh("dp_shard={n},ep=2", lambda n: n),
}
MODELS = {"dense": ["--hidden", "2048"], "moe": ["--hidden", "512", "--experts", "64"]}


def make_world(kind: str) -> World:
    size = dist.get_world_size()
    if kind == "hsdp":
        return World(
            init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp_replicate", "dp_shard")), None, kind
        )
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp_shard",))
    experts = (
        init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("efsdp", "ep")) if kind == "ep" else None
    )
    return World(mesh, experts, kind)


# The ways


def from_hub(place: Place, world: World) -> nn.Module:
    return finalized(place.hub, place.hub, world)


def presharded(place: Place, world: World) -> nn.Module:
    return finalized(place.hub, place.sharded, world)


def finalized(hub: str, source: str, world: World) -> nn.Module:
    context = shardkit.prepare(hub, source)
    return shardkit.finalize(
        shardkit.wrap(context.model, world.mesh, expert_mesh=world.experts), context, strategy="direct"
    )


def stock_load(place: Place, world: World) -> nn.Module:
    model = empty(place, world)
    dcp.load(model.state_dict(), checkpoint_id=place.sharded)
    return model


def torch_hf_reader(place: Place, world: World) -> nn.Module:
    model = empty(place, world)
    dcp.load(model.state_dict(), storage_reader=HuggingFaceStorageReader(place.hub))
    return model


def rank0_broadcast(place: Place, world: World) -> nn.Module:
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict
    from transformers import AutoModelForCausalLM

    state: dict[str, torch.Tensor] = {}
    if dist.get_rank() == 0:
        # Without the ranks' variables: it would look for a world of its own.
        state = AutoModelForCausalLM.from_pretrained(place.hub, dtype="auto").state_dict()
    model = empty(place, world)
    accelerator = SimpleNamespace(
        is_main_process=dist.get_rank() == 0,
        device=torch.device("cpu"),
        state=SimpleNamespace(fsdp_plugin=SimpleNamespace(cpu_offload=None)),
        torch_device_mesh=None,
    )
    fsdp2_load_full_state_dict(accelerator, model, state)
    return model


def transformers_from_hub(place: Place, world: World) -> nn.Module:
    return transformers_load(place.hub, world)


def transformers_profile(place: Place, world: World) -> nn.Module:
    return transformers_load(place.profile, world)


def transformers_load(path: str, world: World) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    size = dist.get_world_size()
    sizes = {
        "fsdp": {"fsdp_size": size},
        "hsdp": {"fsdp_size": size // 2, "dp_replicate_size": 2},
        "ep": {"fsdp_size": size, "ep_size": 2},
    }[world.kind]
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        path, distributed_config=DistributedConfig(**sizes), dtype="auto"
    )
    return model


def empty(place: Place, world: World) -> nn.Module:
    """Make a model with memory for its shards."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place.hub), dtype=torch.bfloat16)
    shardkit.wrap(model, world.mesh, expert_mesh=world.experts)
    return model.to_empty(device="cpu")


def copied_stock_load(place: Place, world: World) -> nn.Module:
    """Load a copy of this rank's file, `.metadata` and the config."""
    rank, copy = dist.get_rank(), own_copy(place)
    download(place.hub, copy / "hub", lambda name: name == "config.json")
    download(place.sharded, copy / "sharded", lambda name: name in (".metadata", f"__{rank}_0.distcp"))
    return stock_load(Place(str(copy / "hub"), str(copy / "sharded"), ""), world)


def copied_transformers(place: Place, world: World) -> nn.Module:
    copy = own_copy(place)
    download(place.hub, copy / "hub", lambda _: True)
    return transformers_load(str(copy / "hub"), world)


def own_copy(place: Place) -> Path:
    assert place.copies is not None
    return place.copies / str(dist.get_rank())


def download(source: str, target: Path, is_wanted: Callable[[str], bool]) -> None:
    """Copy the files of a directory in a store, eight at a time, as tools do."""
    import obstore
    from obstore.store import from_url

    bucket, folder = source.rsplit("/", 1)
    store = from_url(bucket)
    target.mkdir(parents=True, exist_ok=True)
    listed = obstore.list(store, f"{folder}/").collect()
    names = [name for each in listed if is_wanted(name := each["path"].rpartition("/")[2])]

    def copy(name: str) -> None:
        with (target / name).open("wb") as file:
            for piece in obstore.get(store, f"{folder}/{name}").stream():
                file.write(piece)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(copy, names))


PLANNED = "transformers, planned prefetch of spans (computed)"
WAYS: dict[str, Callable[[Place, World], nn.Module]] = {
    "shardkit, pre-sharded": presharded,
    "shardkit, Hub files": from_hub,
    "pre-sharded, stock dcp.load": stock_load,
    "--profile transformers, transformers' loader": transformers_profile,
    "transformers, Hub files": transformers_from_hub,
    "accelerate, rank 0 broadcasts": rank0_broadcast,
    "torch's HF reader": torch_hf_reader,
}
FROM_STORE: dict[str, Callable[[Place, World], nn.Module]] = {
    "shardkit, pre-sharded": presharded,
    "shardkit, Hub files": from_hub,
    "pre-sharded, own file copied, stock dcp.load": copied_stock_load,
    "Hub files, all copied, transformers": copied_transformers,
}
CALLING = ("shardkit, pre-sharded", "shardkit, Hub files", "pre-sharded, stock dcp.load")
"""Ways that read by calls, not by mapping files."""


def warm_up(hub: Path) -> None:
    """Import what any of the ways imports, and make transformers' table of conversions, before ranks are forked."""
    from transformers import AutoModelForCausalLM

    for name in ("accelerate.utils.fsdp_utils", "transformers.distributed"):
        importlib.import_module(name)
    _ = shardkit.wrap
    shardkit.load_into(shardkit.prepare(hub, hub).model, hub)
    AutoModelForCausalLM.from_pretrained(hub, dtype="auto")
    gc.collect()
    gc.freeze()  # a collection would copy the pages that ranks share


def meshes(model: str, args: Any) -> list[str]:
    """Return the meshes of a model; a dense one has no experts to divide."""
    return [kind for kind in args.mesh or MESHES if model == "moe" or kind != "ep"]


def cannot(way: str, model: str) -> str | None:
    """Return why a way does not exist."""
    if way == "torch's HF reader" and model == "moe":
        return "it uses the names in the files, which have single experts; transformers fuses them"
    return None


# A rank


def unshare(flags: int) -> None:
    if _libc.unshare(flags):
        sys.exit(f"unshare: {os.strerror(ctypes.get_errno())}; it takes root")


def bind(source: str, target: str, flags: int = _BIND) -> None:
    if _libc.mount(source.encode(), target.encode(), None, flags, None):
        sys.exit(f"mount {target}: {os.strerror(ctypes.get_errno())}")


def loopback_up(namespace: str | None) -> None:
    """Begin a network of one's own, so that nobody else's bytes are counted, or enter one."""
    import fcntl

    if namespace is None:
        unshare(_NEWNET)
    else:
        with open(f"/run/netns/{namespace}") as file:
            if _libc.setns(file.fileno(), _NEWNET):
                sys.exit(f"setns: {os.strerror(ctypes.get_errno())}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(
            control, 0x8914, struct.pack("16sh", b"lo", 0x1 | 0x40)
        )  # SIOCSIFFLAGS: IFF_UP, IFF_RUNNING


def loopback_bytes() -> int:
    with open("/proc/net/dev") as file:
        return next(int(line.split()[9]) for line in file if line.strip().startswith("lo:"))


def shards(model: nn.Module) -> list[torch.Tensor]:
    """Return this rank's shards, those with two names once."""
    local = (
        value.to_local() if isinstance(value, DTensor) else value for value in model.state_dict().values()
    )
    return [*{value.data_ptr(): value for value in local}.values()]


def use(model: nn.Module) -> None:
    """Look at every value: what is mapped and not yet read would be read in the first step."""
    for shard in shards(model):
        shard.contiguous().view(-1).view(torch.uint8).max() if shard.numel() else None


class Job(NamedTuple):
    """What ranks are to do."""

    way: Callable[[Place, World], nn.Module]
    kind: str
    size: int
    place: Place
    scratch: Path
    seen: Path | None = None
    """Where a rank sees its mount; None if it sees all as it is."""
    namespace: str | None = None
    """Of a network with a link to the store; None is a network of one's own."""

    def mount(self, rank: int) -> Path:
        return self.scratch / f"mount-{rank}"


def one_rank(job: Job, rank: int) -> None:
    size = job.size
    if job.seen is not None:
        unshare(_NEWNS)
        bind("none", "/", _PRIVATE | _REC)
        bind(str(job.mount(rank)), str(job.seen))
    if job.namespace is not None:
        os.environ.update(links.variables(), AWS_ACCESS_KEY_ID=f"rank{rank}")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    # Nothing of a store on disk: 64 ranks that look for each other's addresses in one file take minutes.
    store = dist.TCPStore("127.0.0.1", 29512, size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=10))
    world = make_world(job.kind)
    dist.barrier()
    sent, begun = loopback_bytes(), time.monotonic()
    model = job.way(job.place, world)
    use(model)
    seconds = time.monotonic() - begun
    dist.barrier()
    found = {
        "seconds": seconds,
        "process": os.getpid(),
        "held": sum(shard.nbytes for shard in shards(model)),
        "sent": loopback_bytes() - sent,
    }
    (job.scratch / f"{rank}.json").write_text(json.dumps(found))


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_world(job: Job) -> None:
    """Fork the ranks, and wait for them."""
    loopback_up(job.namespace)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1"
    )
    children = [fork(lambda rank=rank: one_rank(job, rank)) for rank in range(job.size)]
    wait_for(children)


@contextlib.contextmanager
def views(source: Path, mounts: list[Path], log: Path, options: list[str]) -> Iterator[None]:
    command = [sys.executable, str(HERE / "slowfs.py"), str(source), str(log), *map(str, mounts), *options]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        if not server.stdout.readline():
            sys.exit("nothing was mounted")
        yield
    finally:
        server.stdin.close()
        server.wait()


# Counting

Span = tuple[str, int, int]
"""(file, first byte, bytes)."""


class Counts(NamedTuple):
    """What one rank asked of storage."""

    read: int
    requests: int
    near: int
    """Bytes that follow within 16 MiB of the read before in the same file."""
    short: int
    """Requests of at most two pages: the places that ranks compare, headers."""
    files: int
    seconds: float
    """In which a request was under way."""


def count(spans: Iterable[Span], num_files: int, seconds: float = 0.0) -> Counts:
    ends: dict[str, int] = {}
    read = requests = near = short = 0
    for file, start, nbytes in spans:
        if abs(start - ends.get(file, start + 2 * NEAR)) <= NEAR:
            near += nbytes
        ends[file] = start + nbytes
        read += nbytes
        requests += 1
        short += nbytes <= SHORT
    return Counts(read, requests, near, short, num_files, seconds)


def counted(log: Path, num_ranks: int) -> list[Counts]:
    """Return the counts of each rank."""
    spans, files = defaultdict[int, list[Span]](list), defaultdict[int, set[str]](set)
    times = defaultdict[int, list[tuple[float, float]]](list)
    for line in log.read_text().splitlines():
        rank, what, file, start, nbytes, asked, answered = json.loads(line)
        times[rank].append((asked, answered))
        if what == "read":
            spans[rank].append((file, start, nbytes))
        if what in ("read", "open"):
            files[rank].add(file)
    return [count(spans[rank], len(files[rank]), under_way(times[rank])) for rank in range(num_ranks)]


_CALL = re.compile(r"([\d.]+) (\w+)\(\d+<([^>]*)>.*?(?:, (\d+))?\) += (\d+)$")
_CHILD = re.compile(r"[\d.]+ (?:clone3?|v?fork)\(.* = (\d+)$")


def called(scratch: Path, root: str, processes: list[int]) -> list[Counts]:
    """Return the counts of each rank's calls, from what strace wrote of each thread.

    Args:
        scratch: has its files, `calls.THREAD`.
        root: what is read below it counts.
        processes: of the ranks.
    """
    rank_of = {process: rank for rank, process in enumerate(processes)}
    lines = {int(path.suffix[1:]): path.read_text().splitlines() for path in scratch.glob("calls.*")}
    parents = {
        int(found[1]): thread
        for thread, content in lines.items()
        for line in content
        if (found := _CHILD.match(line)) is not None
    }
    spans = defaultdict[int, list[tuple[float, Span]]](list)
    for thread, content in lines.items():
        process: int | None = thread
        while process is not None and process not in rank_of:
            process = parents.get(process)
        at = dict[str, int]()  # what `read` goes on from
        for line in content if process is not None else ():
            found = _CALL.match(line)
            if found is None or not found[3].startswith(root) or not int(found[5]):
                continue
            start = at.get(found[3], 0) if found[2] == "read" else int(found[4])
            at[found[3]] = start + int(found[5])
            spans[rank_of[process]].append((float(found[1]), (found[3], start, int(found[5]))))
    each = [[span for _, span in sorted(spans[rank])] for rank in range(len(processes))]
    return [count(own, len({file for file, _, _ in own})) for own in each]


def under_way(times: Iterable[tuple[float, float]]) -> float:
    """Return the seconds in which at least one request was under way."""
    total = end = 0.0
    for asked, answered in sorted(times):
        total += max(answered - max(asked, end), 0.0)
        end = max(end, answered)
    return total


def planned(hub: Path, rank: int, shards: int) -> Counts:
    """Return what a rank reads that reads the spans of its rows, and of its experts, alone."""
    spans: list[Span] = []
    for path in sorted(hub.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        experts = max((int(found[1]) for name in header if (found := _EXPERT.search(name))), default=-1) + 1
        own: list[tuple[int, int]] = []
        for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = (8 + size + offset for offset in tensor["data_offsets"])
            found = _EXPERT.search(name)
            if found is not None:
                first, last = part(experts, rank, shards)
                own += [(begin, end)] if first <= int(found[1]) < last else []
                continue
            rows = tensor["shape"][0]
            first, last = part(rows, rank, shards)
            own.append((begin + (end - begin) // rows * first, begin + (end - begin) // rows * last))
        for begin, end in joined(own):
            spans += [(path.name, at, min(REQUEST, end - at)) for at in range(begin, end, REQUEST)]
    return count(spans, len({file for file, _, _ in spans}) + 2)


_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def part(total: int, rank: int, shards: int) -> tuple[int, int]:
    """Return the rows of a shard, as torch.chunk cuts them."""
    step = math.ceil(total / shards)
    return min(rank * step, total), min((rank + 1) * step, total)


def joined(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield spans; those that touch are one."""
    begin = end = 0
    for first, last in spans:
        if first != end:
            if end > begin:
                yield begin, end
            begin = first
        end = max(last, first)
    if end > begin:
        yield begin, end


# All of it


def start(work: Path, model: str, kind: str, way: str, args: Any) -> dict[str, float]:
    """Start ranks once, and return what they took."""
    scratch = work / "run"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    counts = (by_strace if args.calls else from_store if args.store else by_mounts)(
        work, model, kind, way, args
    )
    ranks = said(scratch, args.ranks)
    held = sum(rank["held"] for rank in ranks)
    found = figures(counts, [rank["held"] for rank in ranks])
    found["sent"] = ranks[0]["sent"] / held
    found["waiting_s"] = max(rank.seconds for rank in counts)
    found["start_s"] = max(rank["seconds"] for rank in ranks)
    return found


def said(scratch: Path, num_ranks: int) -> list[dict[str, Any]]:
    """Return what each rank has written of itself."""
    return [json.loads((scratch / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def run_forked(job: Job) -> None:
    _, status = os.waitpid(fork(lambda: run_world(job)), 0)
    if status:
        raise ChildProcessError(str(job.way))


def names(kind: str) -> tuple[str, str, str]:
    """Return the directories of a model: the Hub's, pre-sharded, pre-sharded for transformers."""
    return "hub", f"sharded-{kind}", f"profile-{kind}"


def by_mounts(work: Path, model: str, kind: str, way: str, args: Any) -> list[Counts]:
    """Let each rank see the files through a file system of its own, which counts."""
    scratch, seen = work / "run", work / "seen"
    seen.mkdir(exist_ok=True)
    place = Place(*(str(seen / name) for name in names(kind)))
    job = Job(WAYS[way], kind, args.ranks, place, scratch, seen)
    mounts = [job.mount(rank) for rank in range(args.ranks)]
    for each in mounts:
        each.mkdir()
    options = ["--delay-ms", str(args.delay_ms), "--mb-per-s", str(args.mb_per_s)]
    with views(work / model, mounts, scratch / "log", options):
        run_forked(job)
    return counted(scratch / "log", args.ranks)


def from_store(work: Path, model: str, kind: str, way: str, args: Any) -> list[Counts]:
    """Let ranks read from a store, behind a link that all share; the store counts."""
    scratch, log, port = work / "run", work / "run/log", links.PORTS["s3"]
    place = Place(*(f"s3://{links.BUCKET}/{name}" for name in names(kind)), scratch / "copies")
    command = [
        sys.executable,
        str(HERE / "slowstore.py"),
        str(work / model),
        str(log),
        links.SERVER,
        str(port),
    ]
    with links.links(1, args.mb_per_s or 1000) as (namespace,):
        server = subprocess.Popen(
            [*command, "--delay-ms", str(args.delay_ms)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            if not server.stdout.readline():
                sys.exit("the store has not begun")
            run_forked(Job(FROM_STORE[way], kind, args.ranks, place, scratch, namespace=namespace))
        finally:
            server.stdin.close()
            server.wait()
    shutil.rmtree(scratch / "copies", ignore_errors=True)
    return counted(log, args.ranks)


def by_strace(work: Path, model: str, kind: str, way: str, args: Any) -> list[Counts]:
    """Let ranks read the directory itself; `strace` writes down their calls. It has to start them, so they import anew."""
    scratch = work / "run"
    command = ["strace", "-ff", "-y", "--seccomp-bpf", "-ttt", "-s0", "-o", str(scratch / "calls")]
    command += ["-e", "trace=clone,clone3,fork,vfork,read,pread64,preadv,preadv2"]
    options = ["--ranks", str(args.ranks), "--model", model, "--mesh", kind, "--way", way, "--inside"]
    done = subprocess.run([*command, sys.executable, __file__, str(work), *options], check=False)
    if done.returncode:
        raise ChildProcessError(way)
    return called(scratch, str(work / model), [rank["process"] for rank in said(scratch, args.ranks)])


def run_inside(work: Path, args: Any) -> None:
    """Start the ranks of `by_strace`."""
    (model,), (kind,), (way,) = args.model, args.mesh, args.way
    warm_up(work / model / "hub")
    place = Place(*(str(work / model / name) for name in names(kind)))
    run_forked(Job(WAYS[way], kind, args.ranks, place, work / "run"))


def figures(ranks: list[Counts], held: list[int]) -> dict[str, float]:
    requests, read = sum(rank.requests for rank in ranks), sum(rank.read for rank in ranks)
    return {
        "read": read / sum(held),
        "most_read": max(rank.read / own for rank, own in zip(ranks, held, strict=True)),
        "requests": requests,
        "requests_per_gib": requests / sum(held) * GIB,
        "short": max(rank.short for rank in ranks),
        "request_bytes": read / max(requests, 1),
        "sequential": sum(rank.near for rank in ranks) / max(read, 1),
        "files": max(rank.files for rank in ranks),
    }


def make_model(work: Path, model: str, args: Any) -> None:
    """Make a Hub model, and what preshard makes of it for each mesh."""
    home = work / model
    options = [
        "--gigabytes",
        str(args.megabytes / 1000),
        *MODELS[model],
        "--file-megabytes",
        str(args.megabytes / 4),
    ]
    print(run([sys.executable, str(HERE / "model.py"), str(home / "hub"), *options]).strip())
    for kind in meshes(model, args):
        mesh = MESHES[kind].preshard.format(n=args.ranks, half=args.ranks // 2)
        shardkit.preshard(home / "hub", home / f"sharded-{kind}", mesh=mesh)
        shardkit.preshard(home / "hub", home / f"profile-{kind}", mesh=mesh, profile="transformers")


def measure(report: Report, work: Path, args: Any) -> None:
    for model in args.model or MODELS:
        make_model(work, model, args)
        warm_up(work / model / "hub")
        for way in WAYS if not args.calls and not args.store else ():
            if why := cannot(way, model):
                report.leave_out(f"{way}, {model}", why)
        for kind in meshes(model, args):
            measure_ways(report, work, model, kind, args)
        shutil.rmtree(work / model)


def measure_ways(report: Report, work: Path, model: str, kind: str, args: Any) -> None:
    """Add a row for each way, and the computed one."""
    table = f"{model}, {kind}, {args.ranks} ranks"
    known = CALLING if args.calls else FROM_STORE if args.store else WAYS
    ways = [way for way in args.way or known if way in known and not cannot(way, model)]
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(args.runs):  # in turn: other work on the machine meets all of them
        for way in [*runs]:
            try:
                runs[way].append(start(work, model, kind, way, args))
            except ChildProcessError:
                report.leave_out(f"{table}: {way}", "it fails")
                del runs[way]
    for way, found in runs.items():
        report.add(table, way, **{key: statistics.median(one[key] for one in found) for key in found[0]})
    if known is WAYS and (args.way is None or PLANNED in args.way):
        report.add(table, PLANNED, **planned_figures(work / model / "hub", kind, args.ranks), sent=0.0)


def planned_figures(hub: Path, kind: str, num_ranks: int) -> dict[str, float]:
    shards = MESHES[kind].shards(num_ranks)
    ranks = [planned(hub, rank % shards, shards) for rank in range(num_ranks)]
    return figures(ranks, [rank.read for rank in ranks])


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=400.0)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--mesh", action="append", choices=MESHES)
    parser.add_argument("--way", action="append", choices=dict.fromkeys([*WAYS, PLANNED, *FROM_STORE]))
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--mb-per-s", type=float, default=0.0)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--store", action="store_true", help="read from a store, with what can")
    where.add_argument("--calls", action="store_true", help="count calls by strace")
    where.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    json_option(parser)
    args = parser.parse_args()
    import transformers  # once, before the ranks are forked

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if args.inside:
        run_inside(args.directory, args)
        return
    work = work_in(args.directory.resolve())
    with Report(args) as report, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measure(report, work, args)
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
