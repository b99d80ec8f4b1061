"""Run preshard and die, by SIGKILL, at the n-th call that changes the file system.

One request is a line of JSON: {"fatal": n, "source", "output", "options": of `shardkit.preshard`, "columns":
cut matrices along their last dim}; with n = 0 the run lives on. Each run is a fork of this process, which
has imported everything. One answer is a line: {"code": exit code, or minus the signal}, and of a run
that lived: "calls" there were, files that it "resumed", and "threads" that wrote.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy  # noqa: F401 (what a run would import)
import torch  # noqa: F401

import shardkit
from shardkit.core.mesh import Placement
from shardkit.layout.layout import Layout, TensorLayout
from shardkit.operations import preshard_job
from shardkit.transfer import storage

CALLS = (
    "mkdir",
    "open_fd",
    "ftruncate",
    "pwrite",
    "write",
    "fsync",
    "rename",
    "renameat2",
    "unlink",
    "rmdir",
)
pwrite = storage.pwrite


class Counter:
    """Counts calls of all threads; the fatal one ends the process."""

    def __init__(self, fatal: int) -> None:
        self._fatal, self.num_calls, self.writers = fatal, 0, set[int]()
        self._lock = threading.Lock()

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.num_calls += 1
                is_fatal = self.num_calls == self._fatal
            if call is pwrite:
                self.writers.add(threading.get_ident())
            if is_fatal:
                if call is pwrite:  # half of the bytes are on their way to the disk
                    call(args[0], args[1][: len(args[1]) // 2], args[2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapper


def cut_columns(layout: Layout) -> Layout:
    """Return the layout with every matrix cut along its last dim, which is scattered."""

    def cut(tensor: TensorLayout) -> TensorLayout:
        dim = len(tensor.shape) - 1
        placements = tuple(p if p.shard_dim is None else Placement(dim) for p in tensor.placements)
        return replace(tensor, placements=placements)

    return replace(layout, tensors={fqn: cut(tensor) for fqn, tensor in layout.tensors.items()})


def run(request: dict[str, Any], answer: int) -> None:
    """Carry out a request in this process, and write what is to be said about it."""
    if request["columns"]:
        make_layout = preshard_job.make_layout
        preshard_job.make_layout = lambda *args, **more: cut_columns(make_layout(*args, **more))
    sys.setswitchinterval(1e-5)  # so that small files are under way at the same time
    counter = Counter(request["fatal"])
    for name in CALLS:
        setattr(storage, name, counter.counted(getattr(storage, name)))
    result = shardkit.preshard(request["source"], request["output"], wrap="none", **request["options"])
    report = {
        "calls": counter.num_calls,
        "resumed": result.resumed_files,
        "threads": len(counter.writers),
    }
    os.write(answer, json.dumps(report).encode())


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Fork a run and wait for its end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run(request, writer)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        report = file.read()
    _, status = os.waitpid(child, 0)
    return {"code": os.waitstatus_to_exitcode(status), **json.loads(report or b"{}")}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)
