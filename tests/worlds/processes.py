"""Forking ranks from one process that has imported everything: interpreters start far slower than they work."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

import shardkit
from shardkit.keys.rule_sets import choose_shipped
from shardkit.layout import traced

ROOT = Path(__file__).parents[2]
_M_MMAP_THRESHOLD = -3  # malloc.h
_NOT_IMPORTED = ("shardkit.__main__", "shardkit.layout.trace_child")
_HANGS_S = 1200  # only what hangs takes so long, however busy the machine is
_OF_WORLDS = (
    "accelerate",
    "boto3",
    "obstore",
    "safetensors.torch",
    "shardkit.operations.consolidate",
    "shardkit.operations.preshard",
    "tests.worlds.s3_models",
    *sorted(
        home for home in shardkit._HOMES if home.startswith(("shardkit.osft.training.", "shardkit.training."))
    ),
    "torch._dynamo",  # which the first step of an optimizer imports, in each rank
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.parallel",
    "torch.testing._internal.distributed.fake_pg",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2_vl.modeling_qwen2_vl",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
"""An old torch has not all of them, nor has an environment without trainers."""


def import_all() -> None:
    """Import, read and compile all that a command may need of its own, so that forks of this process do not."""
    for module in pkgutil.walk_packages(shardkit.__path__, "shardkit."):
        if module.name not in _NOT_IMPORTED:
            import_module(module.name)
    for name in ("ascii", "cp437", "unicode_escape"):  # for messages, and names in zips
        import_module(f"encodings.{name}")
    choose_shipped({"weight": (1,)}, None, side="model", padding=None)
    choose_shipped({"weight": (1,)}, None, side="hub", padding=None)


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


def return_freed_memory() -> None:
    """Have malloc hand back what is free, and from now on each freed block of 1 MiB or more: what is left is in use.

    It would keep blocks of up to 32 MiB, as many as others of the process happen to lie above them, and a fork of it
    would find room in there.
    """
    libc = ctypes.CDLL(None)
    assert libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    libc.malloc_trim(0)


def wait(children: list[int]) -> None:
    """Wait for children; a failed one ends this process."""
    for child in children:
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"a process failed: {status}")


@contextlib.contextmanager
def agent_store() -> Iterator[dict[str, str]]:
    """Hold a store as torchrun's agent does, for one world; yield the variables by which `env://` finds it.

    It has its port already: one that was merely free a moment before may be somebody else's by now. It lives in a
    process of its own. Its thread asks the C library for the names of those who connect, under a lock: a rank that was
    forked beside it at that moment waited for the lock for ever.
    """
    told, tell = os.pipe()
    child = fork(functools.partial(_serve_store, tell))
    os.close(tell)
    with open(told, "rb") as answer:
        port = answer.read().decode()
    try:
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _serve_store(tell: int) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(tell, str(store.port).encode())
    os.close(tell)
    signal.pause()


class ForkServer:
    """The process of fork_server.py."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start it.

        Args:
            modules: imported before the first fork.
            environment: variables beside those of this process, in all forks too.
        """
        self._home = tempfile.TemporaryDirectory(prefix="fork-server-")
        self._own = {
            "HF_HOME": self._home.name,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            **(environment or {}),
        }
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py")), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self._own},
        )

    def run(
        self,
        request: Mapping[str, object],
        *,
        timeout_s: float = _HANGS_S,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        is_apart: bool = False,
    ) -> subprocess.CompletedProcess[bytes]:
        """Have one request answered.

        Args:
            request: "script" or "code" with "argument", or "trace".
            timeout_s: seconds.
            env: variables of the fork beside those of this process, None for one that it has not. What is read on
                import has been read.
            cwd: this process's by default.
            is_apart: stderr is not in stdout, but has a place of its own.

        Raises:
            subprocess.TimeoutExpired: it took longer, and was killed.
        """
        assert self._process.stdin
        assert self._process.stdout
        out, err = (Path(self._home.name, name) for name in ("out", "err" if is_apart else "out"))
        for path in (out, err):
            path.write_bytes(b"")
        named = {**os.environ, **self._own, **(env or {})}
        place = {
            "cwd": str(cwd or Path.cwd()),
            "env": {name: value for name, value in named.items() if value is not None},
            "out": str(out),
            "err": str(err),
        }
        self._process.stdin.write(json.dumps({**request, **place}) + "\n")
        self._process.stdin.flush()
        child = int(self._process.stdout.readline())
        timer = threading.Timer(timeout_s, os.killpg, (child, signal.SIGKILL))
        timer.start()
        status = int(self._process.stdout.readline())
        is_late = not timer.is_alive()
        timer.cancel()
        if is_late:
            raise subprocess.TimeoutExpired("fork_server.py", timeout_s, output=out.read_bytes())
        return subprocess.CompletedProcess([], status, stdout=out.read_bytes(), stderr=err.read_bytes())

    def trace(self, payload: bytes, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
        """Stand in for `traced._spawn`."""
        return self.run({"trace": payload.decode()}, timeout_s=timeout_s)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        self._home.cleanup()


@functools.cache
def fork_server() -> ForkServer:
    """Return the server for worlds and traces of this process, which ends with it."""
    return ForkServer(_OF_WORLDS, {**traced._SET, "OMP_NUM_THREADS": "1"})


def run_script(
    name: str, argument: str, *, timeout_s: float = _HANGS_S, env: Mapping[str, str] | None = None
) -> None:
    """Run a script of tests/, or the one at an absolute path, in a process of its own."""
    script = str(ROOT / "tests" / name)
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
