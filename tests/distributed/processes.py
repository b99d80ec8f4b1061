"""Forking ranks from one process that has imported everything: interpreters start far slower than they work."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from shardkit.layout import traced

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


def end_world() -> None:
    """Leave the process group when all ranks are done.

    One that goes while another is still in a collective takes its connections along: the other reads from nobody, and
    its own gloo thread was seen to crash on what still arrived.
    """
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


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


class ForkServer:
    """The process of fork_server.py."""

    def __init__(self) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="fork-server-")
        self._log = Path(self._home.name, "log")
        self._own = {
            **traced._SET,
            "HF_HOME": self._home.name,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        }
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self._own},
        )

    def run(
        self, request: Mapping[str, object], *, timeout_s: float, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Have one request answered.

        Args:
            request: "script" and "argument", or "trace".
            timeout_s: seconds.
            env: variables of the fork, beside those of this process. What is read on import has been read.

        Raises:
            subprocess.TimeoutExpired: it took longer, and was killed.
        """
        assert self._process.stdin
        assert self._process.stdout
        place = {
            "cwd": str(Path.cwd()),
            "env": {**os.environ, **self._own, **(env or {})},
            "log": str(self._log),
        }
        self._process.stdin.write(json.dumps({**request, **place}) + "\n")
        self._process.stdin.flush()
        child = int(self._process.stdout.readline())
        timer = threading.Timer(timeout_s, os.killpg, (child, signal.SIGKILL))
        timer.start()
        status = int(self._process.stdout.readline())
        is_late = not timer.is_alive()
        timer.cancel()
        output = self._log.read_bytes()
        if is_late:
            raise subprocess.TimeoutExpired("fork_server.py", timeout_s, output=output)
        return subprocess.CompletedProcess([], status, stdout=output)

    def trace(self, payload: bytes, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
        """Stand in for `traced._spawn`."""
        return self.run({"trace": payload.decode()}, timeout_s=timeout_s)


@functools.cache
def fork_server() -> ForkServer:
    """Return the server of this process, which ends with it."""
    return ForkServer()


def run_script(
    name: str, argument: str, *, timeout_s: float = _HANGS_S, env: Mapping[str, str] | None = None
) -> None:
    """Run a script of this directory, or the one at an absolute path, in a process of its own."""
    script = str(Path(__file__).parent / name)
    done = fork_server().run({"script": script, "argument": argument}, timeout_s=timeout_s, env=env)
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-4000:]


def forked_trace(payload: bytes, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    """Stand in for `traced._spawn`: a fork of this process has imported everything already."""
    from shardkit.layout import trace_child

    request = json.loads(payload)

    def answer() -> None:
        Path(request["answer"]).write_text(json.dumps(trace_child.answer_request(request)))

    wait([fork(answer)])
    return subprocess.CompletedProcess([], 0, stdout=b"")
