"""Forking ranks from one process that has imported everything: interpreters start far slower than they work."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
_HANGS_S = 1200  # only what hangs takes so long, however busy the machine is


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a child process and return its pid."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def wait(children: list[int]) -> None:
    """Wait for children; a failed one ends this process."""
    for child in children:
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"a process failed: {status}")


@contextlib.contextmanager
def agent_store() -> Iterator[dict[str, str]]:
    """Hold a store as torchrun's agent does, for one world; yield the variables by which `env://` finds it.

    It has its port already: one that was merely free a moment before may be somebody else's by now.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def run_script(
    name: str, argument: str, *, timeout_s: float = _HANGS_S, env: Mapping[str, str] | None = None
) -> None:
    """Run a script of this directory, or the one at an absolute path, in an interpreter of its own."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / name), argument],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def forked_trace(payload: bytes, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    """Stand in for `traced._spawn`: a fork of this process has imported everything already."""
    from shardkit.layout import trace_child

    request = json.loads(payload)

    def answer() -> None:
        Path(request["answer"]).write_text(json.dumps(trace_child.answer_request(request)))

    wait([fork(answer)])
    return subprocess.CompletedProcess([], 0, stdout=b"")
