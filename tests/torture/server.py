"""Run shardkit's command line in forks of this process, which has imported everything, with a fault at a chosen call.

A request is a line of JSON: {"runs": [run, ...]}; all of them run at the same time. A run:

    args        what is typed after the program's name
    fault       see `faults.Fault`; absent: none
    columns     cut matrices along their last dim, which is scattered
    exchange    false: the system cannot rename with a flag (NFS, some FUSE)
    locks       false: nor can it lock a file (Lustre without flock, NFS without lockd)
    uid         whom to run as
    limits      {"RLIMIT_FSIZE": n, ...}
    after_s, signum     a signal from outside, so many seconds after the start; of the first run of a request

The answer is a line: a list of {"code": exit code, or minus the signal, "out", "err": what was printed, "hit":
the call at which the fault was, of a run that ended by itself "calls": names of all, in order, and "num_writers": threads}.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import time
import traceback
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy  # noqa: F401 (what a run would import)
import torch

from shardkit.cli import main
from shardkit.core.placements import Placement
from shardkit.layout.layout import Layout, TensorLayout
from shardkit.operations.preshard import job as preshard_job
from tests.torture.faults import Faults
from tests.worlds.processes import import_all

ALSO = ("huggingface_hub.utils.tqdm", "tomllib")
"""What they import when they run; half of a run's time if each fork did so."""


def cut_columns(layout: Layout) -> Layout:
    """Return the layout with every matrix cut along its last dim."""

    def cut(tensor: TensorLayout) -> TensorLayout:
        dim = len(tensor.shape) - 1
        placements = tuple(p if p.shard_dim is None else Placement(dim) for p in tensor.placements)
        return replace(tensor, placements=placements)

    return replace(layout, tensors={fqn: cut(tensor) for fqn, tensor in layout.tensors.items()})


def run(request: dict[str, Any], report: int) -> int:
    """Carry out a run in this process; return the exit code."""
    if request.get("columns"):
        make_layout = preshard_job.make_layout
        preshard_job.make_layout = lambda *args, **more: cut_columns(make_layout(*args, **more))
    for name, limit in request.get("limits", {}).items():
        kind = getattr(resource, name)
        resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))
    if "uid" in request:
        os.setgroups([])
        os.setgid(request["uid"])
        os.setuid(request["uid"])
    # As a terminal has them: what a shell starts with "&" ignores Ctrl-C, what nohup starts ignores a hang-up.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sys.setswitchinterval(1e-5)  # so that small files are under way at the same time
    faults = Faults(request.get("fault"), report)
    faults.install(exchange=request.get("exchange", True), locks=request.get("locks", True))
    try:
        main.main(args=request["args"], prog_name="shardkit")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    faults.report_calls()
    return code


def start(request: dict[str, Any], gate: int, opener: int, files: tuple[int, int, int]) -> int:
    """Fork a run, which waits until the server has closed its end of the gate; return its process id."""
    child = os.fork()
    if child:
        return child
    os.close(opener)
    code = 70
    try:
        os.dup2(files[0], 1)
        os.dup2(files[1], 2)
        os.read(gate, 1)  # the end of the pipe, once the server has closed it
        code = run(request, files[2])
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def text(fd: int) -> str:
    """Return all that was written to a file of memory, and close it."""
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    os.close(fd)
    return data.decode(errors="replace")


def serve(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fork the runs, let them go together, and wait for their ends."""
    gate, opener = os.pipe()
    started = []
    for request in requests:
        files = (os.memfd_create("out"), os.memfd_create("err"), os.memfd_create("report"))
        child = start(request, gate, opener, files)
        started.append((child, files))
    os.close(opener)
    os.close(gate)
    if "after_s" in requests[0]:
        time.sleep(requests[0]["after_s"])
        os.kill(
            started[0][0], requests[0]["signum"]
        )  # it has not been waited for: the number is still its own
    answers = []
    for child, files in started:
        _, status = os.waitpid(child, 0)
        out, err, report = map(text, files)
        lines = [json.loads(line) for line in report.splitlines()]
        answer: dict[str, Any] = {"code": os.waitstatus_to_exitcode(status), "out": out, "err": err}
        answer["hit"] = next((line["hit"] for line in lines if "hit" in line), None)
        answer |= next((line for line in lines if "calls" in line), {})
        answers.append(answer)
    return answers


if __name__ == "__main__":
    import_all()
    for name in ALSO:
        import_module(name)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # so that forks copy fewer pages
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line)["runs"])), flush=True)
