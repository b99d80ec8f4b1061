"""Runs scripts, code and traces in forks of one process that has imported what they import: that takes far longer than they do.

The arguments are names of modules; those that this environment lacks are left out. A request is a line of JSON: one of
`{"script": path, "argument": ...}`, `{"code": Python, "argument": ...}` and `{"trace": payload}`, with "cwd", "env",
and "out" and "err", files for what is printed. The answers are two lines: the pid of the fork, which leads a session of
its own, and its exit status.
"""

import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import sys
import types
from typing import Any


def work(request: dict[str, Any]) -> None:
    os.setsid()
    for fd, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if "trace" in request:
        from shardkit.layout import trace_child

        sys.stdin = types.SimpleNamespace(buffer=io.BytesIO(request["trace"].encode()))  # type: ignore[assignment]
        trace_child.main()
    elif "code" in request:
        sys.argv = ["-c", request["argument"]]
        exec(compile(request["code"], "<code>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [request["script"], request["argument"]]
        sys.path.insert(0, os.path.dirname(request["script"]))
        runpy.run_path(request["script"], run_name="__main__")


def fork(request: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work(request)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def make_conversions() -> None:
    """Have transformers make its table of conversions, which takes 60 ms, once for all forks."""
    with contextlib.suppress(ImportError):  # an old transformers has none
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")


def main() -> None:
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if "transformers" in sys.modules:
        make_conversions()
    gc.freeze()
    gc.set_threshold(
        10_000, 10, 10
    )  # what forks import, transformers' models, stays too: as in tests/conftest.py
    for line in sys.stdin:
        child = fork(json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
