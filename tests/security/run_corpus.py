"""Runs every command over every case, in processes that are watched; writes a report.

    python run_corpus.py DIRECTORY [PART OF AN ID]

Interpreters start far slower than they work, so all are forked from this one, which has imported everything. A
forked process may take little more memory than it has, and little time; an audit hook tells what it does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import os
import pickle
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import zstandard

import shardkit.cli
from tests.security import dcp_cases, hub_cases, large_cases, link_cases, trainer_cases
from tests.security.case import ACCEPTED, Case
from tests.security.payloads import bare
from tests.security.watch import Watch
from tests.worlds.processes import import_all

MAX_MIB, MAX_S = 512, 30  # seconds of the processor, which are longer where others use its caches too
_WALL_S = 600  # only what hangs takes so long, however busy the machine is; MAX_S is of the processor
_NUM_BATCHES = 16
_SLACK = 1 << 30  # address space is not memory: threads' stacks, allocators' arenas
_STATE = {
    "model.w": torch.arange(24.0).reshape(6, 4),
    "model.b": torch.arange(5).bfloat16(),
    "model.s": torch.tensor(3.0),
    "step": 7,
    "opt": {"lr": 0.1, "betas": (0.9, 0.99)},
}
_WEIGHTS = {"w": torch.arange(24.0).reshape(6, 4)}


def write_samples(base: Path) -> None:
    """The good checkpoints that cases are made of."""
    hub_cases.write_sample(base / "hub")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("dcp", "lightning"):
            writer = dcp.FileSystemWriter(str(base / name), thread_count=2)
            dcp.save(dict(_STATE), storage_writer=writer, no_dist=True)
    torch.save(
        {"epoch": 1, "pytorch-lightning_version": "2.6.6", "hyper_parameters": {}},
        base / "lightning" / "meta.pt",
    )
    for name, file in (
        ("bin", "pytorch_model.bin"),
        ("verl", "model_world_size_1_rank_0.pt"),
        ("full", "model.ckpt"),
    ):
        (base / name).mkdir()
        torch.save(_WEIGHTS, base / name / file)
    (base / "bin" / "config.json").write_text(json.dumps(hub_cases.CONFIG))
    (base / "verl" / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 1}')
    (base / "verl-less").mkdir()
    run(["preshard", str(base / "hub"), str(base / "presharded"), "--world-size", "2", "--wrap", "none"])


def run(args: list[str]) -> tuple[int, str]:
    """Run the command line in this process; return its exit code and what it said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = shardkit.cli.main(args=args, standalone_mode=True)
        except SystemExit as ended:
            code = ended.code
    return int(code or 0), said.getvalue()


def arguments(command: str, source: Path, output: Path, other: Path) -> list[str]:
    """What is typed."""
    quiet = "--no-progress"
    return {
        "inspect": ["inspect", str(source), "--tensors"],
        "verify": ["verify", str(source), "--full", quiet],
        "diff": ["diff", str(source), str(other), quiet],
        "consolidate": ["consolidate", str(source), str(output), quiet],
        "preshard": ["preshard", str(source), str(output), "--world-size", "2", "--wrap", "none", quiet],
        "reshard": ["reshard", str(source), str(output), "--world-size", "2", quiet],
    }[command]


def resident_mib(field: str) -> float:
    """VmRSS or VmHWM of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0]) / 1024


def work(cases: Sequence[Case], base: Path) -> list[dict[str, Any]]:
    """In a forked process: make checkpoints, one after the other, and run the commands over them."""
    watch = Watch()
    sys.addaudithook(watch)
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + _SLACK
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return [report for case in cases for report in work_on(case, base, watch)]


def work_on(case: Case, base: Path, watch: Watch) -> Iterator[dict[str, Any]]:
    """Make a case's checkpoint and run the commands over it; yield a report for each."""
    room, sample = base / "cases" / case.id, base / "samples" / case.sample
    source, output = room / "in", room / "out" / "made"
    shutil.copytree(sample, source)
    case.change(source)
    output.parent.mkdir()
    os.environ["SHARDKIT_CANARY"] = str(room / "canary")
    os.chdir(output.parent)
    for command in case.commands:
        given, other = source, sample
        if case.sample == "full":  # is a file
            given, other = source / "model.ckpt", other / "model.ckpt"
        args = arguments(command, given, output, other)
        stores = [str(room / case.reads)] if case.reads else []
        watch.allow(readable=[str(source), str(sample), *stores], writable=[str(output.parent)])
        signal.alarm(_WALL_S)
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        before = resident_mib("VmRSS")
        known, start = set(sys.modules), time.process_time()
        watch.is_on = True
        try:
            code, said = run(args)
        finally:
            watch.is_on = False
        seconds = time.process_time() - start
        signal.alarm(0)
        imported = sorted(set(sys.modules) - known)
        left = sorted(name for name in os.listdir(output.parent))
        made = values(output, command) if code == 0 and left == ["made"] else None
        yield {
            "case": case.id,
            "command": command,
            "code": code,
            "said": said,
            "seconds": round(seconds, 3),
            "mib": round(resident_mib("VmHWM") - before, 1),
            "seen": [*watch.found, *(f"import {name}" for name in imported)],
            "left": left,
            "canary": (room / "canary").exists(),
            "made": made,
        }
        for name in left:
            shutil.rmtree(output.parent / name)
    os.chdir(base)
    shutil.rmtree(room)


def values(output: Path, command: str) -> dict[str, str]:
    """Every tensor of an output, read by other means than ours: dtype, shape and bytes."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    if command == "consolidate":
        for file in output.glob("*.safetensors"):
            tensors |= load_file(file)
    else:
        metadata = dcp.FileSystemReader(str(output)).read_metadata()
        for fqn, held in metadata.state_dict_metadata.items():
            if hasattr(held, "size"):
                tensors[fqn] = torch.empty(held.size, dtype=held.properties.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(tensors, checkpoint_id=str(output), no_dist=True)
    return spelled(tensors)


def spelled(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Every tensor's dtype, shape and bytes."""
    return {
        fqn: f"{t.dtype} {list(t.shape)} {t.reshape(-1).view(torch.uint8).tolist()}"
        for fqn, t in tensors.items()
    }


def fork(name: str, base: Path, do: Callable[[], list[dict[str, Any]]]) -> int:
    """Start a process; its report goes to a file."""
    child = os.fork()
    if child:
        return child
    try:  # nothing may let this process go on as if it were its parent
        try:
            done = do()
        except BaseException:
            done = [{"case": name, "command": "all", "failed": traceback.format_exc()}]
        (base / "reports" / f"{name}.json").write_text(json.dumps(done))
    finally:
        os._exit(0)


def all_cases() -> list[Case]:
    """The corpus."""
    found = [
        *hub_cases.cases(),
        *dcp_cases.cases(),
        *trainer_cases.cases(),
        *link_cases.cases(),
        *large_cases.cases(),
    ]
    assert len({case.id for case in found}) == len(found)
    return found


def good_cases() -> Iterator[Case]:
    """The samples as they are."""
    for name in ("hub", "dcp", "lightning", "bin", "verl", "full", "presharded"):
        yield Case(id=f"good-{name}", sample=name, change=lambda d: None, mention=(), expect=ACCEPTED)


def unpickle_for_real(base: Path) -> list[dict[str, Any]]:
    """In a forked process: do what no command may, so that a test can tell that the watch sees it."""
    room = base / "cases" / "control"
    (room / "out").mkdir(parents=True)
    os.environ["SHARDKIT_CANARY"] = str(room / "canary")
    watch = Watch()
    watch.allow(readable=[], writable=[str(room / "out")])
    sys.addaudithook(watch)
    watch.is_on = True
    acts: list[Callable[[], object]] = [
        lambda: pickle.loads(bare("system")),
        lambda: pickle.loads(bare("eval")),
        lambda: subprocess.run(["true"], check=True),
        lambda: socket.socket().close(),
        lambda: __import__("antigravity"),
        lambda: (room / "elsewhere").write_text("x"),
        lambda: Path("/etc/hostname").read_bytes(),
        lambda: (room / "made").mkdir(),
        lambda: os.listdir("/etc"),
        lambda: ctypes.CDLL("libc.so.6"),
    ]
    for act in acts:
        with contextlib.suppress(Exception):
            act()
    watch.is_on = False
    canary = (room / "canary").exists()
    return [{"case": "control", "command": "all", "seen": list(watch.found), "canary": canary}]


def truth(sample: str) -> str:
    """The tensors of a sample as `values` gives them, in JSON; worked out without anything of ours."""
    if sample in ("hub", "presharded"):
        tensors = {
            fqn: hub_cases.tensor(name, fqn) for name, held in hub_cases.TENSORS.items() for fqn in held
        }
    elif sample in ("dcp", "lightning"):
        tensors = {fqn: value for fqn, value in _STATE.items() if isinstance(value, torch.Tensor)}
    else:
        tensors = dict(_WEIGHTS)
    return json.dumps(list(spelled(tensors).values()))


def gather(cases: Sequence[Case], base: Path) -> list[dict[str, Any]]:
    """Run all cases, two processes at a time; return what they reported.

    A process has many cases, for forking one takes longer than a case. Where it dies, each gets one of its own.
    """
    jobs: dict[str, Callable[[], list[dict[str, Any]]]] = {"control": partial(unpickle_for_real, base)}
    batches = {f"batch-{n}": cases[n::_NUM_BATCHES] for n in range(_NUM_BATCHES) if cases[n::_NUM_BATCHES]}
    jobs |= {name: partial(work, batch, base) for name, batch in batches.items()}
    running: dict[int, str] = {}
    reports: list[dict[str, Any]] = []
    while jobs or running:
        while jobs and len(running) < 2:
            name, job = jobs.popitem()
            running[fork(name, base, job)] = name
        child, status = os.wait()
        name = running.pop(child)
        path, batch = base / "reports" / f"{name}.json", batches.pop(name, ())
        done = json.loads(path.read_text()) if path.exists() else []
        if done and "failed" not in done[0]:
            reports += done
        elif len(batch) > 1:
            for case in batch:
                shutil.rmtree(base / "cases" / case.id, ignore_errors=True)
            batches |= {case.id: [case] for case in batch}
            jobs |= {case.id: partial(work, [case], base) for case in batch}
        else:
            ended = f"the process ended with status {status}"
            reports += done or [{"case": name, "command": "all", "failed": ended}]
    return reports


def main() -> None:
    base, part = Path(sys.argv[1]).absolute(), sys.argv[2] if len(sys.argv) > 2 else ""
    for name in ("cases", "reports", "samples"):
        (base / name).mkdir()
    torch.set_num_threads(1)
    import_all()
    zstandard.ZstdCompressor()
    write_samples(base / "samples")
    gc.freeze()  # or every process would have its own copy of what is collected
    cases = [*good_cases(), *(case for case in all_cases() if part in case.id)]
    reports = gather(cases, base)
    (base / "report.json").write_text(json.dumps({"reports": reports}))


if __name__ == "__main__":
    main()
