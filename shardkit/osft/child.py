"""The process that computes the factors of one weight after another and writes them into records.

    start (argv)       descriptor of the memory in which the parent puts each weight
    request (a line)   {"path", "rows", "columns", "rank", "svd", "dtype", "record": path of a file that exists,
                       "hint": where it cannot be written, "starts": [[factor, first byte]]}
    answer (a line)    {"whole": CRC-32 of each factor, "algorithm", "error", "orthogonality"}, or an error as
                       `ShardkitError.to_json`

It ends when stdin does, also in the middle of a decomposition: then the parent is gone, and somebody else may resume.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from shardkit.core.factored import Target
from shardkit.core.text import escape
from shardkit.errors import ResourceError, ShardkitError
from shardkit.files import storage
from shardkit.files.digest import crc32
from shardkit.osft.svd import Factors, check_factors, factorise
from shardkit.transfer.stream import write_all


def main() -> None:
    """Serve requests until stdin ends."""
    torch.set_num_threads(1)
    # Libraries may print; answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    memory = int(sys.argv[-1])
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    while True:
        request = json.loads(requests.get())
        answers.write(json.dumps(_answer(request, memory)) + "\n")
        answers.flush()


def _read_requests(requests: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


def _answer(request: dict[str, Any], memory: int) -> dict[str, Any]:
    try:
        return serve(request, memory)
    except MemoryError:
        error: ShardkitError = ResourceError(
            f"{escape(request['path'])}: not enough memory to compute its factors",
            hint="give --jobs 1, or use a machine with more memory",
        )
    except ShardkitError as caught:
        error = caught
    return error.to_json()


def serve(request: dict[str, Any], memory: int) -> dict[str, Any]:
    """Compute a target's factors, write them, and say how good they are.

    Args:
        request: see above.
        memory: descriptor of a file that begins with the weight's bytes.

    Raises:
        SourceError: the weight has no factors.
        IntegrityError: they are not as good as promised.
        ResourceError: a file cannot be written.
    """
    target = Target(**{key: request[key] for key in ("path", "rows", "columns", "rank")})
    dtype: torch.dtype = getattr(torch, request["dtype"])
    mapped = mmap.mmap(memory, target.rows * target.columns * dtype.itemsize)
    weight = torch.frombuffer(mapped, dtype=dtype).reshape(target.rows, target.columns)
    factors = check_factors(factorise(weight, target, request["svd"]), target, request["svd"])
    return {
        "whole": write(factors, request["record"], request["starts"], request["hint"]),
        "algorithm": factors.algorithm,
        "error": factors.error,
        "orthogonality": factors.orthogonality,
    }


def write(factors: Factors, path: str, starts: Sequence[tuple[str, int]], hint: str) -> dict[str, int]:
    """Write factors into a file that exists, and return the CRC-32 of each; who asked brings it to the disk.

    Args:
        factors: the factors.
        path: of the file.
        starts: (factor, first byte).
        hint: what to do where the file cannot be written.

    Raises:
        ResourceError: the system refuses.
    """
    crcs = dict[str, int]()
    try:
        fd = storage.open_fd(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            for name, start in starts:
                data = _bytes(factors.tensors[name])
                write_all(fd, data, start, path, name, hint=hint)
                crcs[name] = int(crc32(data))
        finally:
            storage.close_fd(fd)
    except OSError as error:
        raise ResourceError(f"cannot write {escape(path)}: {error.strerror}", hint=hint) from error
    return crcs


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = numpy.ascontiguousarray(tensor.numpy()).reshape(-1)
    return flat.view(numpy.uint8).data
