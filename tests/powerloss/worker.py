"""Runs operations in forks of a process that has imported everything; some with a recorder in front of storage.

A request is a line of JSON: {"verb", "source", "output", "options"} for an undisturbed run; with "log" (a file) it is
recorded below "root" and written there, continued if the file exists; "fatal": as `Recorder`; "mutation": a name in
`mutations`; "clones", "can_exchange" and "steps": as `Scenario`. An answer is a line: {"code": exit code}, and of a recorded
run also how many "calls" there were and "clones" of blocks, and which call was the "last_rename".
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import traceback
from functools import partial
from typing import Any

import numpy  # noqa: F401 (what a run would import)
import torch  # noqa: F401

import shardkit
from shardkit.files import storage
from tests.powerloss.log import Log
from tests.powerloss.mutations import MUTATIONS
from tests.powerloss.recorder import Recorder


def run(request: dict[str, Any], answer: int) -> None:
    """Carry out a request in this process."""
    if request.get("log"):
        recorder = _recorder(request)
        recorder.install()
    if request.get("mutation"):
        MUTATIONS[request["mutation"]]()
    if not request.get("can_exchange", True):
        storage.renameat2 = lambda *_: False
    if request.get("clones"):
        sys.executable = ""  # blocks are shared in the process itself, where it is recorded
    _carry_out(request)
    if request.get("log"):
        recorder.log.take_times(request["root"])
        _save(recorder.log, request["log"])
        report = {
            "calls": recorder.num_calls,
            "clones": recorder.num_clones,
            "last_rename": recorder.last_rename,
        }
        os.write(answer, json.dumps(report).encode())


def _write_page(source: str, output: str, *, overwrite: bool) -> None:
    del overwrite  # a page always replaces a page
    shardkit.inspect(source).save_html(output)


def _carry_out(request: dict[str, Any]) -> None:
    function = _write_page if request["verb"] == "page" else getattr(shardkit, request["verb"])
    verb = partial(function, request["source"], request["output"])
    for step in request.get("steps") or [None]:
        if step == "commit":
            shardkit.commit(request["output"])
        else:
            verb(**request["options"], **({"part": step} if step else {}))


def _recorder(request: dict[str, Any]) -> Recorder:
    path, root = request["log"], request["root"]
    if os.path.exists(path):
        with open(path, "rb") as file:
            log = pickle.load(file)
    else:
        log = Log.of(root)
    sys.setswitchinterval(1e-5)  # so that small files are under way at the same time
    return Recorder(root, log, fatal=request.get("fatal", 0), at_end=lambda: _save(log, path))


def _save(log: Log, path: str) -> None:
    with open(path, "wb") as file:
        pickle.dump(log, file)


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
    for verb in ("preshard", "consolidate", "reshard", "commit", "inspect"):
        getattr(shardkit, verb)  # imported now, not by each fork
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)
