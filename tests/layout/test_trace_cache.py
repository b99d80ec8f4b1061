"""Answers of the tracing child that were kept: when they serve, and when the child is asked again."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
from shardkit.core.dtypes import CASTS
from shardkit.core.mesh import parse_mesh
from shardkit.errors import LayoutError
from shardkit.layout import trace_cache, traced
from shardkit.layout.binding import ClassNames
from shardkit.layout.trace_cache import Slot, slot_for
from shardkit.layout.traced import (
    ClassAnswer,
    ClassQuestion,
    ask_class,
    read_answer,
    trace_model,
)

MESH = parse_mesh(None, 4)
NAMES = {"model.embed_tokens.weight": (101, 24), "model.norm.weight": (24,)}
ModelDir = Callable[..., str]


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("SHARDKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "traces"


@pytest.fixture
def children(cached: Path, fast_trace: None, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The requests that children get."""
    requests, real = list[bytes](), traced._serve_request

    def spawn(payload: bytes, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
        requests.append(payload)
        return real(payload, timeout_s)

    monkeypatch.setattr(traced, "_serve_request", spawn)
    return requests


def request_of(directory: str, **changes: object) -> dict[str, Any]:
    plain = {
        "directory": directory,
        "names": {"a": [2]},
        "trust_remote_code": False,
        "axes": [["dp", 2, "shard"]],
    }
    return {**plain, "ep": 1, "pp": 1, "stages": "auto", "wrap": "auto", "dtype": None, **changes}


def key_of(directory: str, **changes: object) -> str:
    slot = slot_for(request_of(directory, **changes))
    assert slot is not None
    return slot.key


def test_the_second_time_no_child_is_asked(model_dir: ModelDir, children: list[bytes]) -> None:
    directory, started = model_dir("qwen3", num_hidden_layers=1), list[bool]()

    def on_start() -> None:
        started.append(True)

    def ask() -> list[object]:
        return [
            trace_model(directory, MESH, "auto", on_start=on_start),
            trace_model(directory, MESH, "Qwen3DecoderLayer", names=NAMES, dtype=CASTS["bf16"]),
            ask_class(directory, NAMES, on_start=on_start),
            ask_class(directory, NAMES, in_memory=True, on_start=on_start),
        ]

    first = ask()
    assert len(children) == 4
    assert ask() == first
    assert len(children) == 4
    assert started == [True] * 3


def test_a_model_elsewhere_is_the_same_model(
    model_dir: ModelDir, children: list[bytes], tmp_path: Path
) -> None:
    first = trace_model(model_dir("bert"), MESH, "auto")
    os.rename(tmp_path / "bert", tmp_path / "renamed")
    assert trace_model(str(tmp_path / "renamed"), MESH, "auto") == first
    assert len(children) == 1


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no /dev/shm")
def test_a_model_in_memory_is_kept_too(model_dir: ModelDir, children: list[bytes]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        model = shutil.copytree(model_dir("qwen3", num_hidden_layers=1), os.path.join(directory, "model"))
        assert trace_model(model, MESH, "auto") == trace_model(model, MESH, "auto")
    assert len(children) == 1


def test_errors_are_not_kept(model_dir: ModelDir, children: list[bytes], cached: Path) -> None:
    directory = model_dir("qwen3", hidden_act="no-such-function")
    for _ in range(2):
        with pytest.raises(LayoutError):
            trace_model(directory, MESH, "auto")
    assert len(children) == 2
    assert not cached.exists()


def test_with_a_second_config_nothing_is_kept(model_dir: ModelDir, cached: Path) -> None:
    assert slot_for(request_of(model_dir("bert", configuration_files=["config.4.0.0.json"]))) is None


def test_a_damaged_or_hostile_entry_is_made_anew(
    model_dir: ModelDir, children: list[bytes], cached: Path
) -> None:
    directory = model_dir("bert")
    first = trace_model(directory, MESH, "auto")
    (entry,) = cached.iterdir()
    data = entry.read_bytes()
    content = json.loads(zlib.decompress(data.partition(b"\n")[2]))
    hostile: list[object] = [
        [],
        {"status": []},
        {**content, "status": "cannot_build"},
        {**content, "tensors": [["a", [-1], "x", 0, 0, 9]]},
        {**content, "meshes": 3},
        {**content, "ties": [3]},
    ]
    store = trace_cache.trace_cache()
    assert store is not None
    slot = Slot(cache=store, key=entry.name)
    packed = (
        zlib.compress(text) for text in (b"[" * 100_000, *(json.dumps(each).encode() for each in hostile))
    )
    for other in (b"[]", *packed):
        store.keep(entry.name, other)
        assert slot.find(lambda answer: read_answer(answer, MESH, "auto")) is None
    assert trace_model(directory, MESH, "auto") == first
    assert len(children) == 2
    entry.write_bytes(data[:-1])
    assert trace_model(directory, MESH, "auto") == first
    assert entry.read_bytes() == data


MATCH = ClassNames(missing=["a"], misfits=[("b", "why")]).to_json()
CHILD = f"""
MATCH = {MATCH}
import json, os, sys
for line in sys.stdin:
    answer = {{"status": "ok", "model_class": "BertModel", "match": MATCH}}
    with open(json.loads(line)["answer"], "w") as file:
        json.dump(answer, file)
    os.write(0, b"-")
"""


def test_what_consolidate_asks_beside_its_bytes_is_kept(
    model_dir: ModelDir, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced, "_may_ask_here", lambda: False)
    monkeypatch.setattr(traced, "_command", lambda: [sys.executable, "-S", "-c", CHILD])
    config = json.loads((Path(model_dir("bert")) / "config.json").read_text())
    for is_asked in (True, False):
        with ClassQuestion(config, {"a": (101, 12)}) as question:
            assert (question._thread is not None) is is_asked
            expected = ClassAnswer(model_class="BertModel", missing=("a",), misfits=(("b", "why"),))
            assert question.answer() == expected
    with ClassQuestion(config, {"a": (101, 13)}) as question:
        assert question._thread is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"names": {"a": [3]}},
        {"names": {"b": [2]}},
        {"names": None},
        {"axes": [["dp", 3, "shard"]]},
        {"ep": 2},
        {"pp": 2},
        {"wrap": "none"},
        {"wrap": "BertLayer"},
        {"dtype": "bfloat16"},
        {"asks": "names"},
        {"asks": "hub form"},
    ],
)
def test_every_part_of_a_request_counts(
    changes: dict[str, object], model_dir: ModelDir, cached: Path
) -> None:
    directory = model_dir("bert")
    assert key_of(directory) == key_of(directory)
    assert key_of(directory, **changes) != key_of(directory)


def test_config_and_versions_count(
    model_dir: ModelDir, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = model_dir("bert")
    keys = [key_of(directory)]
    monkeypatch.setattr(trace_cache, "__version__", "0.0.0")
    keys.append(key_of(directory))
    monkeypatch.setattr(sys, "version", "3.99")
    keys.append(key_of(directory))
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: "9.9")
        keys.append(key_of(directory))
    with open(os.path.join(directory, "config.json"), "a", encoding="utf-8") as file:
        file.write(" ")
    keys.append(key_of(directory))
    assert len(set(keys)) == 5


@pytest.mark.parametrize(
    "changes",
    [
        {"wrap": "my_wrap:function"},
        {"wrap": "transformers.models.bert.modeling_bert.BertLayer"},
        {"wrap": "encoder.layer"},
        {"stages": "my_stages:function"},
        {"trust_remote_code": True},
    ],
)
def test_where_other_code_has_a_say_nothing_is_kept(
    changes: dict[str, object], model_dir: ModelDir, cached: Path
) -> None:
    assert slot_for(request_of(model_dir("bert"), **changes)) is None


def test_without_a_cache_or_a_config_nothing_is_kept(
    model_dir: ModelDir, cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert slot_for(request_of(str(tmp_path))) is None
    monkeypatch.setenv("SHARDKIT_CACHE", "off")
    assert slot_for(request_of(model_dir("bert"))) is None


def test_of_an_editable_transformers_nothing_is_kept(
    model_dir: ModelDir, cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, site = model_dir("bert"), tmp_path / "site/transformers-5.23.0.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Name: transformers\nVersion: 5.23.0\n")
    monkeypatch.syspath_prepend(str(site.parent))
    assert slot_for(request_of(directory)) is not None
    (site / "direct_url.json").write_text(json.dumps({"url": "file:///src", "dir_info": {"editable": True}}))
    assert slot_for(request_of(directory)) is None


def test_without_transformers_nothing_is_kept(
    model_dir: ModelDir, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = model_dir("bert")
    monkeypatch.setattr(sys, "path", [])
    assert slot_for(request_of(directory)) is None


def test_the_output_is_the_same_with_and_without_the_cache(
    make_hub: Callable[..., Path], model_dir: ModelDir, children: list[bytes], tmp_path: Path
) -> None:
    directory = model_dir("qwen3", num_hidden_layers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDKIT_CACHE", "off")
        shapes = {fqn: x.shape for fqn, x in trace_model(directory, MESH, "none").layout.tensors.items()}
    state = {fqn: torch.arange(float(prod(shape))).reshape(shape) for fqn, shape in shapes.items()}
    config = json.loads((Path(directory) / "config.json").read_text())
    source = make_hub(state, config=config)
    outputs = []
    for name, cache in (("without", "off"), ("cold", None), ("warm", None)):
        with pytest.MonkeyPatch.context() as patch:
            if cache is not None:
                patch.setenv("SHARDKIT_CACHE", cache)
            made = shardkit.preshard(source, tmp_path / name, world_size=2)
        assert made.layout == "traced"
        outputs.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(children) == 3
