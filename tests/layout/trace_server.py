"""Answers trace requests from forks of one process that has imported torch and transformers already.

A trace costs seconds of imports and a tenth of a second of work; the tests make dozens of traces. One
request is a line `{"payload": ..., "cwd": ..., "log": path}`, one answer a line with the exit status.
"""

import io
import json
import os
import sys
import types

import torch
import transformers

from shardkit.layout import trace_child

torch.set_num_threads(1)
for name in ("LlamaForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel", "BertModel"):
    getattr(transformers, name)


def serve(request: dict[str, str]) -> None:
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(request["cwd"])
    sys.stdin = types.SimpleNamespace(buffer=io.BytesIO(request["payload"].encode()))  # type: ignore[assignment]
    trace_child.main()


for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            serve(json.loads(line))
        finally:
            os._exit(70)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
