"""Hub directories: safetensors headers, indexes, file names, configs, legacy weights."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.security.case import ACCEPTED, HARMLESS, Case

ONE, TWO, INDEX = (
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
)
TENSORS = {
    ONE: {"model.layers.0.a": ("F32", (4, 3)), "model.layers.0.b": ("F32", (2, 5))},
    TWO: {"model.norm.w": ("BF16", (6,))},
}
SIZES = {"F32": 4, "BF16": 2}
CONFIG = {
    "architectures": ["NobodysForCausalLM"],
    "hidden_size": 8,
    "vocab_size": 16,
}  # of no class: nothing to trace
BODY = bytes(range(88))  # of the first file


def entries(name: str) -> dict[str, Any]:
    """The header of a good file."""
    made, at = {}, 0
    for fqn, (dtype, shape) in TENSORS[name].items():
        nbytes = SIZES[dtype]
        for size in shape:
            nbytes *= size
        made[fqn] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    return made


def tensor(name: str, fqn: str) -> torch.Tensor:
    """A tensor of a good file."""
    dtype, shape = TENSORS[name][fqn]
    start, stop = entries(name)[fqn]["data_offsets"]
    data = bytearray((BODY if name == ONE else bytes(range(12)))[start:stop])
    return torch.frombuffer(data, dtype={"F32": torch.float32, "BF16": torch.bfloat16}[dtype]).reshape(shape)


def file_of(header: bytes, data: bytes = BODY, length: int | None = None) -> bytes:
    """A safetensors file, with any length before its header."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def write_sample(directory: Path) -> None:
    """A good model."""
    directory.mkdir(parents=True)
    for name in TENSORS:
        data = BODY if name == ONE else bytes(range(12))
        (directory / name).write_bytes(file_of(json.dumps(entries(name)).encode(), data))
    weight_map = {fqn: name for name, held in TENSORS.items() for fqn in held}
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 100}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(CONFIG))


def raw(header: bytes, data: bytes = BODY, length: int | None = None) -> Callable[[Path], None]:
    """Replace the first file."""
    return lambda d: (d / ONE).write_bytes(file_of(header, data, length)) and None


def header(edit: Callable[[dict[str, Any]], None], data: bytes = BODY) -> Callable[[Path], None]:
    """Change the header of the first file."""

    def change(d: Path) -> None:
        content = entries(ONE)
        edit(content)
        (d / ONE).write_bytes(file_of(json.dumps(content).encode(), data))

    return change


def of_b(**fields: object) -> Callable[[Path], None]:
    """Change what is said of the second tensor."""
    return header(lambda content: content["model.layers.0.b"].update(fields))


def index(edit: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Change the index."""

    def change(d: Path) -> None:
        content = json.loads((d / INDEX).read_text())
        edit(content)
        (d / INDEX).write_text(json.dumps(content))

    return change


def points(target: str) -> Callable[[Path], None]:
    """Let the index look for the second tensor somewhere else."""
    return index(lambda content: content["weight_map"].update({"model.layers.0.b": target}))


def put(name: str, data: bytes) -> Callable[[Path], None]:
    """Write a file."""
    return lambda d: (d / name).write_bytes(data) and None


def special(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    """Put something in the place of a file."""

    def change(d: Path) -> None:
        (d / name).unlink()
        make(d / name)

    return change


def config(**fields: object) -> Callable[[Path], None]:
    """Change config.json."""
    return put("config.json", json.dumps({**CONFIG, **fields}).encode())


def renamed(name: str) -> Callable[[Path], None]:
    """Give the second tensor another name, in its file and in the index."""

    def change(d: Path) -> None:
        content = {name if key == _B else key: value for key, value in entries(ONE).items()}
        (d / ONE).write_bytes(file_of(json.dumps(content).encode()))
        found = json.loads((d / INDEX).read_text())
        found["weight_map"] = {name if key == _B else key: file for key, file in found["weight_map"].items()}
        (d / INDEX).write_text(json.dumps(found))

    return change


_GOOD = json.dumps(entries(ONE)).encode()
_B = "model.layers.0.b"

_HEADERS: Mapping[str, Callable[[Path], None]] = {
    "length-short": put(ONE, b"\x08\0\0"),
    "length-huge": raw(_GOOD, length=(1 << 64) - 1),
    "length-100-gb": raw(_GOOD, length=100 << 30),
    "length-past-the-end": raw(_GOOD, length=4000),
    "empty": put(ONE, b""),
    "not-json": raw(b"hello"),
    "json-list": raw(b"[]"),
    "json-trailing": raw(_GOOD + b"{}"),
    "json-deep": raw(b'{"__metadata__":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "json-deep-objects": raw(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "json-bigint": raw(_GOOD.replace(b"[2, 5]", b"[" + b"9" * 5000 + b"]")),
    "json-bigint-20": of_b(shape=[10**19, 0]),
    "json-float": of_b(data_offsets=[48.0, 88.0]),
    "json-exponent": raw(_GOOD.replace(b"[48, 88]", b"[48, 88e0]")),
    "json-nan": raw(_GOOD.replace(b"[48, 88]", b"[NaN, 88]")),
    "json-bool": of_b(shape=[True, 10]),
    "json-surrogate": raw(_GOOD.replace(b"layers.0.b", b"layers.\\ud800")),
    "json-bom": raw(b"\xef\xbb\xbf" + _GOOD),
    "json-utf-16": raw(_GOOD.decode().encode("utf-16")),
    "json-not-utf-8": raw(_GOOD.replace(b"layers.0.b", b"layers.\xff")),
    "duplicate-tensor": raw(_GOOD[:-1] + b"," + _GOOD[1:]),
    "duplicate-field": raw(_GOOD.replace(b'"dtype"', b'"dtype": "F64", "dtype"', 1)),
    "overlap": of_b(data_offsets=[40, 80]),
    "same-bytes-twice": of_b(data_offsets=[0, 40]),
    "gap": of_b(data_offsets=[52, 92]),
    "reversed": of_b(data_offsets=[88, 48]),
    "negative": of_b(data_offsets=[-40, 0]),
    "past-the-end": of_b(data_offsets=[48, 1 << 40], shape=[1 << 37, 2]),
    "overflow": of_b(data_offsets=[48, (1 << 64) + 88]),
    "shape-overflow": of_b(shape=[1 << 32, 1 << 32, 1 << 32]),
    "shape-and-size-differ": of_b(shape=[3, 5]),
    "shape-of-many-dims": of_b(shape=[1] * 100_000),
    "dtype-unknown": of_b(dtype="F31"),
    "dtype-a-list": of_b(dtype=["F32"]),
    "offsets-of-three": of_b(data_offsets=[48, 60, 88]),
    "metadata-not-text": header(lambda content: content.update({"__metadata__": {"a": 1}})),
    "metadata-a-tensor": header(lambda content: content.update({"__metadata__": content.pop(_B)})),
    "trailing-bytes": raw(_GOOD, data=BODY + bytes(100)),
    "cut": raw(_GOOD, data=BODY[:-1]),
    "header-only": raw(_GOOD, data=b""),
}

_CONFIGS: Mapping[str, Callable[[Path], None]] = {
    "config-remote-code": config(auto_map={"AutoModelForCausalLM": "payload--payload.Model"}),
    "config-not-json": put("config.json", b"{"),
    "config-a-list": put("config.json", b"[]"),
    "config-deep": put("config.json", b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "config-bigint": put("config.json", b'{"hidden_size": ' + b"9" * 100_000 + b"}"),
    "config-wrong-types": config(architectures={"a": 1}, torch_dtype=7, auto_map=3, tie_word_embeddings="y"),
    "config-class-by-path": config(architectures=["os.system"], _name_or_path="/etc/passwd"),
    "config-quantized": config(
        quantization_config={"quant_method": "__import__('os')", "modules_to_not_convert": 1}
    ),
    "config-sub-configs": config(text_config=[1], vision_config={"a": [None]}, num_hidden_layers=-(10**30)),
}


def _hostile_adapter(d: Path) -> None:
    (d / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "r": -1,
                "lora_alpha": 1e400,
                "base_model_name_or_path": "../../../etc",
                "target_modules": [[]],
            }
        )
    )


def _evil_python(d: Path) -> None:
    config(auto_map={"AutoConfig": "configuration.Config", "AutoModelForCausalLM": "modeling.Model"})(d)
    for name in (
        "configuration.py",
        "modeling.py",
        "torch.py",
        "json.py",
        "transformers.py",
        "sitecustomize.py",
    ):
        (d / name).write_text("import os; os.system('touch $SHARDKIT_CANARY')\n")


def cases() -> Iterator[Case]:
    """Every case of this kind."""
    for name, change in _HEADERS.items():
        yield Case(id=f"header-{name}", sample="hub", change=change, mention=(ONE,))
    yield Case(id="shard-missing", sample="hub", change=lambda d: (d / ONE).unlink(), mention=(ONE,))
    yield Case(id="shard-a-directory", sample="hub", change=special(ONE, Path.mkdir), mention=(ONE,))
    yield Case(id="shard-a-fifo", sample="hub", change=special(ONE, os.mkfifo), mention=(ONE,))
    yield Case(
        id="shard-a-device",
        sample="hub",
        change=special(ONE, lambda p: p.symlink_to("/dev/zero")),
        mention=(ONE,),
    )
    yield Case(
        id="shard-a-link-to-itself",
        sample="hub",
        change=special(ONE, lambda p: p.symlink_to(p.name)),
        mention=(ONE,),
    )
    for name, target in {
        "parent": "../outside.safetensors",
        "absolute": "/etc/hostname",
        "deep": f"a/../../{ONE}",
        "backslash": "..\\outside.safetensors",
        "itself": INDEX,
        "dot": ".",
        "empty": "",
        "directory": "sub",
        "url": "https://127.0.0.1:9/x.safetensors",
        "control": "\x1b[2J.safetensors",
        "home": "~/x.safetensors",
        "proc": "/proc/self/mem",
    }.items():
        shown = {"control": "\\x1b[2J", "backslash": "outside.safetensors"}.get(name, target)
        yield Case(id=f"index-path-{name}", sample="hub", change=points(target), mention=(shown or _B,))
    yield Case(id="index-path-nul", sample="hub", change=points("a\0b.safetensors"), mention=(INDEX,))
    yield Case(id="index-path-surrogate", sample="hub", change=points("\ud800.safetensors"), mention=(INDEX,))
    yield Case(id="index-other-shard", sample="hub", change=points(TWO), mention=(_B,))
    yield Case(id="index-omits", sample="hub", change=index(lambda c: c["weight_map"].pop(_B)), mention=(_B,))
    yield Case(
        id="index-invents",
        sample="hub",
        change=index(lambda c: c["weight_map"].update({"no.such": ONE})),
        mention=("no.such",),
    )
    for name, data in {
        "not-json": b"{",
        "a-list": b"[]",
        "empty": b"{}",
        "map-a-list": b'{"weight_map": []}',
        "map-of-ints": b'{"weight_map": {"a": 3}}',
        "map-of-dicts": b'{"weight_map": {"a": {"b": 1}}}',
        "deep": b'{"weight_map":' * 100_000 + b"1" + b"}" * 100_000,
        "not-utf-8": b'{"weight_map": {"\xff": "a"}}',
        "nan": b'{"metadata": {"total_size": NaN}, "weight_map": {}}',
    }.items():
        yield Case(id=f"index-{name}", sample="hub", change=put(INDEX, data), mention=(INDEX,))
    yield Case(
        id="index-duplicate",
        sample="hub",
        change=lambda d: (
            (d / INDEX).write_bytes(
                (d / INDEX)
                .read_bytes()
                .replace(b'"weight_map": {', b'"weight_map": {"model.layers.0.b": "x", ')
            )
            and None
        ),
        mention=(_B,),
    )
    yield Case(id="index-a-fifo", sample="hub", change=special(INDEX, os.mkfifo), mention=(INDEX,))
    yield Case(
        id="two-models", sample="hub", change=put("model.safetensors", b"x"), mention=("model.safetensors",)
    )
    for name, change in _CONFIGS.items():
        yield Case(id=name, sample="hub", change=change, mention=("config.json",), expect=HARMLESS)
    yield Case(
        id="config-a-fifo",
        sample="hub",
        change=special("config.json", os.mkfifo),
        mention=("config.json",),
        expect=HARMLESS,
    )
    yield Case(
        id="config-with-code",
        sample="hub",
        change=_evil_python,
        mention=(),
        expect=HARMLESS,
        but={"preshard": ACCEPTED},
    )
    yield Case(id="adapter-hostile", sample="hub", change=_hostile_adapter, mention=(), expect=HARMLESS)
    for name, fqn in {
        "escape": "\x1b]0;owned\x07\x1b[2J",
        "newline": "a\nerror: all is well\r",
        "bidi": "\u202egnp.exe",
        "path": "../../../../tmp/owned",
        "empty": "",
        "long": "x" * 60_000,
        "dunder": "__class__.__init__.__globals__",
        "format": "%s%n{0.__class__}{{}}",
    }.items():
        yield Case(
            id=f"name-{name}",
            sample="hub",
            change=renamed(fqn),
            mention=(),
            expect=ACCEPTED,
            but={"diff": HARMLESS, "consolidate": HARMLESS},
        )
