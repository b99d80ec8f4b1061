"""Tiny model directories, and traces that do not pay for imports each time."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardkit.layout import traced

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 11,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 101,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 12,
    "intermediate_size": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 17,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 17,
    "vocab_size": 101,
}
CONFIGS: dict[str, dict[str, object]] = {
    "llama": LLAMA,
    "llama-tied": {**LLAMA, "tie_word_embeddings": True},
    "qwen3": {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2},
    "gpt2": GPT2,
    "bert": BERT,
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "d_model": 12,
        "d_kv": 4,
        "d_ff": 19,
        "num_layers": 1,
        "num_heads": 3,
        "vocab_size": 101,
        "tie_word_embeddings": True,
    },
    "bert-lm": {**BERT, "architectures": ["BertForMaskedLM"]},
}


class TraceServer:
    """The process of trace_server.py; `spawn` stands in for `traced._spawn`."""

    def __init__(self, scratch: Path) -> None:
        self._log = scratch / "log"
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("trace_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                **traced._SET,
                "HF_HOME": str(scratch),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
        )

    def spawn(self, payload: bytes, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
        request = {"payload": payload.decode(), "cwd": str(Path.cwd()), "log": str(self._log)}
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        return subprocess.CompletedProcess([], status, stdout=self._log.read_bytes())

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="session")
def trace_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceServer]:
    server = TraceServer(tmp_path_factory.mktemp("trace-server"))
    yield server
    server.close()


@pytest.fixture
def fast_trace(trace_server: TraceServer, monkeypatch: pytest.MonkeyPatch) -> TraceServer:
    """Traces of this test come from the session's server."""
    monkeypatch.setattr(traced, "_spawn", trace_server.spawn)
    return trace_server


@pytest.fixture
def model_dir(tmp_path: Path) -> Callable[..., str]:
    """Make a directory with the config of a name in CONFIGS, changed by keyword arguments."""

    def make(name: str, **changes: object) -> str:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({**CONFIGS[name], **changes}))
        return str(directory)

    return make
