"""Answers of the tracing child that were kept: when they serve, and when the child is asked again."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import types
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from shardkit.layout.trace_cache import Slot, evidence, slot_for
from shardkit.layout.traced import (
    ClassAnswer,
    ClassQuestion,
    ask_hub_form,
    ask_names,
    read_answer,
    trace_model,
)

MESH = parse_mesh(None, 4)
NAMES = {"model.embed_tokens.weight": (101, 24), "model.norm.weight": (24,)}
FOREVER_NS = 1 << 62
ModelDir = Callable[..., str]


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("SHARDKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "traces"


@pytest.fixture
def children(cached: Path, fast_trace: None, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The requests that children get. Files of shardkit may have been edited a moment ago."""
    asked, real = list[bytes](), traced._spawn

    def spawn(payload: bytes, timeout_s: float, child: str) -> subprocess.CompletedProcess[bytes]:
        asked.append(payload)
        return real(json.dumps(json.loads(payload) | {"asked_ns": FOREVER_NS}).encode(), timeout_s, child)

    monkeypatch.setattr(traced, "_spawn", spawn)
    return asked


def request_of(directory: str, **changes: object) -> dict[str, Any]:
    plain = {
        "directory": directory,
        "names": {"a": [2]},
        "trust_remote_code": False,
        "axes": [["dp", 2, "shard"]],
    }
    return {**plain, "ep": 1, "pp": 1, "stages": "auto", "wrap": "auto", "dtype": None, **changes}


def slot_of(directory: str, environment: Mapping[str, str] = {}, **changes: object) -> Slot:
    slot = slot_for(request_of(directory, **changes), environment)
    assert slot is not None
    return slot


def answer_of(slot: Slot, **files: str) -> dict[str, Any]:
    beside = {"config.json": slot.config_mark}
    return {"status": "ok", "said": 1, "evidence": {"files": files, "beside": beside}}


def said(answer: Mapping[str, Any]) -> int:
    return int(answer["said"])


def test_the_second_time_no_child_is_asked(model_dir: ModelDir, children: list[bytes]) -> None:
    directory, started = model_dir("qwen3", num_hidden_layers=1), list[bool]()

    def on_start() -> None:
        started.append(True)

    def ask() -> list[object]:
        return [
            trace_model(directory, MESH, "auto", on_start=on_start),
            trace_model(directory, MESH, "Qwen3DecoderLayer", names=NAMES, dtype=CASTS["bf16"]),
            ask_names(directory, NAMES, on_start=on_start),
            ask_hub_form(directory, NAMES, on_start=on_start),
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


def test_a_file_that_the_config_names_is_looked_at_too(
    model_dir: ModelDir, children: list[bytes], tmp_path: Path
) -> None:
    directory = model_dir("bert", configuration_files=["config.4.0.0.json"])
    other = tmp_path / "bert" / "config.4.0.0.json"
    plain = json.loads((tmp_path / "bert" / "config.json").read_text())
    for num_layers in (1, 1, 3):
        other.write_text(json.dumps({**plain, "num_hidden_layers": num_layers}))
        layout = trace_model(directory, MESH, "auto").layout
        assert len([unit for unit in layout.units if unit.class_name == "BertLayer"]) == num_layers
    assert len(children) == 2


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
        {"answer": []},
        {**content, "evidence": None},
        {**content, "evidence": {"files": {"/": 3}, "beside": {}}},
        {**content, "evidence": {"files": {"/dev/zero": "sha256:0"}, "beside": {}}},
        {**content, "answer": {**content["answer"], "status": "cannot_build"}},
        {**content, "answer": {**content["answer"], "tensors": [["a", [-1], "x", 0, 0, 9]]}},
        {**content, "answer": {**content["answer"], "meshes": 3}},
        {**content, "answer": {**content["answer"], "ties": [3]}},
    ]
    store = trace_cache.trace_cache()
    assert store is not None
    slot = Slot(cache=store, key=entry.name, directory=directory, config_mark="", asked_ns=0)
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


CHILD = """
import hashlib, json, sys
request = json.load(sys.stdin)
with open(request["directory"] + "/config.json", "rb") as file:
    mark = "sha256:" + hashlib.sha256(file.read()).hexdigest()
answer = {"status": "ok", "model_class": "BertModel", "match": {"missing": ["a"], "misfits": [["b", "why"]]}}
with open(request["answer"], "w") as file:
    json.dump({**answer, "evidence": {"files": {}, "beside": {"config.json": mark}}}, file)
"""


def test_what_consolidate_asks_beside_its_bytes_is_kept(
    model_dir: ModelDir, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced, "_may_ask_here", lambda: False)
    monkeypatch.setattr(traced, "_command", lambda: [sys.executable, "-S", "-c", CHILD])
    config = json.loads((Path(model_dir("bert")) / "config.json").read_text())
    for is_asked in (True, False):
        monkeypatch.setattr(traced, "_answers", {})
        with ClassQuestion(config, {"a": (101, 12)}) as question:
            assert (question._child is not None) is is_asked
            expected = ClassAnswer(model_class="BertModel", missing=("a",), misfits=(("b", "why"),))
            assert question.answer() == expected
    with ClassQuestion(config, {"a": (101, 13)}) as question:
        assert question._child is not None


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
    assert slot_of(directory).key == slot_of(directory).key
    assert slot_of(directory, **changes).key != slot_of(directory).key


def test_config_and_surroundings_count(
    model_dir: ModelDir, cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = model_dir("bert")
    keys = {slot_of(directory).key}

    def expect(is_new: bool) -> None:
        keys_before = len(keys)
        keys.add(slot_of(directory).key)
        assert len(keys) == keys_before + is_new

    monkeypatch.setattr(trace_cache, "__version__", "0.0.0")
    expect(is_new=True)
    monkeypatch.setattr(sys, "version", "3.99")
    expect(is_new=True)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    expect(is_new=True)
    (tmp_path / "site" / "torch-9.9.dist-info").mkdir(parents=True)
    expect(is_new=True)
    os.utime(tmp_path / "site" / "torch-9.9.dist-info", ns=(1, 1))  # installed again
    expect(is_new=True)
    (tmp_path / "site" / "notes.txt").write_text("no package")
    expect(is_new=False)
    (tmp_path / "site" / "torch").mkdir()
    (tmp_path / "site" / "torch" / "__init__.py").write_text("")
    monkeypatch.delitem(sys.modules, "torch")
    importlib.invalidate_caches()
    expect(is_new=True)
    with open(os.path.join(directory, "config.json"), "a", encoding="utf-8") as file:
        file.write(" ")
    expect(is_new=True)


def test_variables_count_but_secrets_are_not_looked_at(model_dir: ModelDir, cached: Path) -> None:
    directory = model_dir("bert")
    plain = slot_of(directory).key
    assert slot_of(directory, {"HF_HOME": "/x"}).key != plain
    assert slot_of(directory, {"HF_TOKEN": "secret", "PWD": "/y"}).key == plain


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
    assert slot_for(request_of(model_dir("bert"), **changes), {}) is None


def test_without_a_cache_or_a_config_nothing_is_kept(
    model_dir: ModelDir, cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert slot_for(request_of(str(tmp_path)), {}) is None
    monkeypatch.setenv("SHARDKIT_CACHE", "off")
    assert slot_for(request_of(model_dir("bert")), {}) is None


def test_a_transformers_that_is_edited_is_asked_each_time(
    model_dir: ModelDir, cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable install has the package elsewhere, and its list of files has a finder only."""
    directory, site = model_dir("bert"), tmp_path / "site"
    record = site / "transformers-5.23.0.dist-info" / "RECORD"
    for folder in (site / "transformers", record.parent, tmp_path / "src" / "transformers"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")

    def is_kept(root: Path) -> bool:
        origin = str(root / "transformers" / "__init__.py")
        monkeypatch.setattr(trace_cache, "_origin", lambda package: origin)
        return slot_for(request_of(directory), {}) is not None

    record.write_text("__editable___transformers_finder.py,sha256=0,9\n")
    assert not is_kept(site)
    assert not is_kept(tmp_path / "src")
    record.write_text("transformers/__init__.py,sha256=0,9\ntransformers/x.py,sha256=0,9\n")
    assert is_kept(site)
    assert not is_kept(tmp_path / "src")


def test_a_missing_package_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trace_cache._origin("no_such_package") is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: (_ for _ in ()).throw(ValueError(name)))
    assert trace_cache._origin("torch") is None


def test_files_that_were_loaded_are_looked_at_again(
    model_dir: ModelDir, cached: Path, tmp_path: Path
) -> None:
    slot, module = slot_of(model_dir("bert")), tmp_path / "modeling.py"
    module.write_text("a = 1")
    by_digest, by_time = (str(trace_cache._mark(str(module), by_digest=how)) for how in (True, False))
    slot.keep(answer_of(slot, **{str(module): by_digest}))
    assert slot.find(said) == 1
    os.utime(module, ns=(1, 1))
    assert slot.find(said) == 1
    module.write_text("a = 2")
    assert slot.find(said) is None
    module.write_text("a = 1")
    slot.keep(answer_of(slot, **{str(module): by_time}))
    assert slot.find(said) is None
    slot.keep(answer_of(slot, **{str(module): by_digest}))
    assert slot.find(said) == 1
    module.unlink()
    assert slot.find(said) is None


def test_answers_without_whole_evidence_are_not_kept(model_dir: ModelDir, cached: Path) -> None:
    slot = slot_of(model_dir("bert"))
    slot.keep({"status": "ok", "said": 1})
    slot.keep({"status": "ok", "said": 1, "evidence": None})
    slot.keep(answer_of(replace(slot, config_mark="sha256:changed while it was read")))
    assert not cached.exists()


def test_evidence_is_code_of_models_by_digest_and_the_rest_by_time(tmp_path: Path) -> None:
    for name in ("config.json", "other.json", "read.py"):
        (tmp_path / name).write_text("{}")
    read = [
        str(tmp_path / "config.json"),
        str(tmp_path / "other.json"),
        str(tmp_path / "read.py"),
        "/dev/null",
    ]
    found = evidence(str(tmp_path), read, FOREVER_NS)
    assert found is not None
    assert sorted(found["beside"]) == ["config.json", "other.json"]
    files = found["files"]
    assert files[trace_cache.__file__].startswith("sha256:")
    assert torch.__file__ is not None
    assert files[torch.__file__].split() == [str(n) for n in _size_and_time(torch.__file__)]
    assert json.__file__ not in files


def _size_and_time(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def test_what_changed_after_the_question_is_no_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert evidence(str(tmp_path), [], 0) is None
    monkeypatch.setitem(sys.modules, "transformers_modules.mine", types.ModuleType("mine"))
    assert evidence(str(tmp_path), [], FOREVER_NS) is None


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
