"""Processes that compute factors: each has one weight at a time, in memory that it shares with this process.

This process reads the weights, so that they are compared with what the source records as everything else is. A worker
has one BLAS thread: another number would give other last bits.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

from shardkit import errors
from shardkit.core.catalog import Catalog
from shardkit.core.regions import Region
from shardkit.core.text import escape
from shardkit.errors import IncompleteError, ResourceError, ShardkitError
from shardkit.files.digest import crc32
from shardkit.transfer.codecs.boxes import read_box
from shardkit.transfer.sources import Reader

_BOOT = "import sys; sys.path[:] = sys.argv[1:-1]; from shardkit.osft.child import main; main()"
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
_POLL_S = 0.2  # how long a worker is waited for before a stop is noticed
_BAND_NBYTES = 8 << 20  # of a weight that are read at a time
_LAST_LINES = 12
_ANSWER_NBYTES = 1 << 16


class FactorWorker:
    """A process that computes factors. A context manager that ends it.

    Args:
        memory_nbytes: size of the largest weight, as it is stored.

    Raises:
        ResourceError: there is no process or no memory to be had.
    """

    def __init__(self, memory_nbytes: int) -> None:
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as opened:
            try:
                self._start(opened, memory_nbytes)
            except OSError as error:
                raise ResourceError(
                    f"cannot start a process that computes factors: {error.strerror}",
                    hint="free some memory, or run it from an ordinary Python interpreter",
                ) from error
            self._stack = opened.pop_all()

    def __enter__(self) -> FactorWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, opened: contextlib.ExitStack, nbytes: int) -> None:
        fd = _memory(opened, nbytes)
        self._memory = mmap.mmap(fd, nbytes)
        self._said = opened.enter_context(tempfile.TemporaryFile())
        # A session of its own: Ctrl-C is for this process, which ends the others.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, *map(os.path.abspath, sys.path), str(fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            pass_fds=(fd,),
            env={**os.environ, **_ONE_THREAD},
            start_new_session=True,
        )
        opened.callback(self._end)

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()

    def read(self, catalog: Catalog, name: str, reader: Reader, fqn: str) -> int:
        """Put a matrix into the worker's memory, and return the CRC-32 of its bytes.

        Args:
            catalog: of raw extents.
            name: the matrix there.
            reader: reads the catalog's files.
            fqn: for messages.

        Raises:
            IntegrityError, ResourceError: as `Reader.read_into`.
        """
        start, crc = 0, 0
        for data in rows_of(catalog, name, reader, fqn):
            self._memory[start : start + len(data)] = data
            start, crc = start + len(data), int(crc32(data, crc))
        return crc

    def ask(self, request: dict[str, Any], stop: threading.Event) -> dict[str, Any]:
        """Send a request and return the answer; both as `child` describes them.

        Raises:
            CancelledError: `stop` was set.
            IncompleteError: the process died.
            ShardkitError: what it answers.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died, as reading shows
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line(request["path"], stop))
        if "message" in answer:
            kind: type[ShardkitError] = getattr(errors, answer["error"])
            raise kind(answer["message"], problems=answer["problems"], hint=answer["hint"])
        return answer

    def _line(self, path: str, stop: threading.Event) -> bytes:
        assert self._process.stdout is not None
        fd, line = self._process.stdout.fileno(), b""
        while not line.endswith(b"\n"):
            if stop.is_set():
                raise CancelledError
            if select.select([fd], [], [], _POLL_S)[0]:
                part = os.read(fd, _ANSWER_NBYTES)
                if not part:
                    raise self._died(path)
                line += part
        return line

    def _died(self, path: str) -> IncompleteError:
        status = self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").splitlines()
        how = f"by signal {-status}" if status < 0 else f"with exit code {status}"
        return IncompleteError(
            f"the process that computed the factors of {escape(path)} ended {how}",
            problems=[escape(line) for line in lines if line.strip()][-_LAST_LINES:],
            hint="what was finished is kept: run the same command again to resume"
            + (", with fewer --jobs if memory ran out" if status == -9 else ""),
        )


def rows_of(catalog: Catalog, name: str, reader: Reader, fqn: str) -> Iterator[bytes]:
    """Yield the bytes of a matrix, some rows at a time; arguments and errors as `FactorWorker.read`."""
    entry = catalog.tensors[name]
    rows, columns = entry.shape
    step = max(_BAND_NBYTES // (columns * entry.dtype.itemsize), 1)
    for first in range(0, rows, step):
        region = Region((first, 0), (min(step, rows - first), columns))
        yield read_box(catalog, name, region, reader, fqn).tobytes()


def _memory(opened: contextlib.ExitStack, nbytes: int) -> int:
    """Return the descriptor of a file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("shardkit-weight")
        opened.callback(os.close, fd)
    else:
        fd = opened.enter_context(tempfile.TemporaryFile()).fileno()
    os.ftruncate(fd, nbytes)
    return fd
