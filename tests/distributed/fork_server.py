"""Runs scripts and traces in forks of one process that has imported what they import: that takes far longer than they do.

A request is a line of JSON, `{"script": path, "argument": ...}` or `{"trace": payload}`, with "cwd", "env" and "log", a
file for what is printed. The answers are two lines: the pid of the fork, which leads a session of its own, and its exit
status.
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

_IMPORTED = (
    "accelerate",
    "safetensors.torch",
    "shardkit.layout.trace_child",
    "shardkit.training",
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


def work(request: dict[str, Any]) -> None:
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if "trace" in request:
        from shardkit.layout import trace_child

        sys.stdin = types.SimpleNamespace(buffer=io.BytesIO(request["trace"].encode()))  # type: ignore[assignment]
        trace_child.main()
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


def main() -> None:
    for name in _IMPORTED:
        with contextlib.suppress(
            ImportError
        ):  # an old torch has not all, nor has an environment without trainers
            importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        child = fork(json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
