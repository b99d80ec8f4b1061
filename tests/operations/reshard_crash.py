"""As crash.py, for reshard: one request is {"fatal": n, "source", "output", "options": of `shardkit.reshard`}."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import shardkit
from shardkit.transfer import storage
from tests.operations import crash


def run(request: dict[str, Any], answer: int) -> None:
    """Carry out a request in this process, and write what is to be said about it."""
    sys.setswitchinterval(1e-5)  # so that small files are under way at the same time
    counter = crash.Counter(request["fatal"])
    for name in crash.CALLS:
        setattr(storage, name, counter.counted(getattr(storage, name)))
    result = shardkit.reshard(request["source"], request["output"], **request["options"])
    os.write(answer, json.dumps({"calls": counter.num_calls, "resumed": result.resumed_files}).encode())


if __name__ == "__main__":
    crash.run = run
    for line in sys.stdin:
        print(json.dumps(crash.serve(json.loads(line))), flush=True)
