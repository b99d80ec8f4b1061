"""Other layouts: files of `torch.save` that trainers write, legacy weights, safetensors shards of DCP."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.security.case import HARMLESS, REFUSED, Case
from tests.security.dcp_cases import archive, good_pickle, saved, wide, with_pickle
from tests.security.hub_cases import file_of, put
from tests.security.payloads import BOMBS, bare, stealth

_CODE = ("system", "eval", "inst", "obj", "dotted", "newobj", "build", "popen", "import-by-name")


def _of(payload: str) -> str:
    """These two leave a dict, in which there is nothing."""
    return HARMLESS if payload in ("build", "hash") else REFUSED


def _lightning() -> Iterator[Case]:
    """`meta.pt` is looked into, never loaded."""
    for name in (*_CODE, "pickle-in-pickle", "torch-load"):
        yield Case(
            id=f"meta-code-{name}",
            sample="lightning",
            change=put("meta.pt", with_pickle(bare(name))),
            mention=("meta.pt",),
            expect=HARMLESS,
        )
    for name, data in BOMBS.items():
        yield Case(
            id=f"meta-bomb-{name}",
            sample="lightning",
            change=put("meta.pt", with_pickle(data)),
            mention=("meta.pt",),
            expect=HARMLESS,
        )
    yield Case(
        id="meta-a-fifo",
        sample="lightning",
        change=lambda d: ((d / "meta.pt").unlink(), os.mkfifo(d / "meta.pt")) and None,
        mention=("meta.pt",),
        expect=HARMLESS,
    )


def _legacy() -> Iterator[Case]:
    """`pytorch_model.bin`."""
    for name in (*_CODE, "numpy", "getattr", "partial"):
        yield Case(
            id=f"bin-code-{name}",
            sample="bin",
            change=put("pytorch_model.bin", with_pickle(bare(name))),
            mention=("pytorch_model.bin",),
        )
    yield Case(
        id="bin-stealth",
        sample="bin",
        change=put("pytorch_model.bin", with_pickle(stealth(good_pickle({"w": torch.zeros(6, 4)})))),
        mention=("pytorch_model.bin",),
    )
    yield Case(
        id="bin-legacy-pickle",
        sample="bin",
        change=put("pytorch_model.bin", bare("system")),
        mention=("pytorch_model.bin",),
    )
    for name, data in BOMBS.items():
        yield Case(
            id=f"bin-bomb-{name}",
            sample="bin",
            change=put("pytorch_model.bin", with_pickle(data)),
            mention=("pytorch_model.bin",),
        )
    yield Case(
        id="bin-traversal",
        sample="bin",
        change=put("pytorch_model.bin", archive({"../../x": b"", "archive/data.pkl": good_pickle()})),
        mention=("pytorch_model.bin",),
    )
    yield Case(
        id="bin-without-bytes",
        sample="bin",
        change=put(
            "pytorch_model.bin", with_pickle(b"\x80\x02}X\1\0\0\0w" + wide(1 << 24)[2:-1] + b"s.", bytes(16))
        ),
        mention=("pytorch_model.bin",),
    )


def _ranks() -> Iterator[Case]:
    """verl's files of ranks, and a whole file of `torch.save`."""
    name = "model_world_size_1_rank_0.pt"
    for payload in _CODE:
        for sample, file in (("verl", name), ("full", "model.ckpt")):
            yield Case(
                id=f"{sample}-code-{payload}",
                sample=sample,
                change=put(file, with_pickle(bare(payload))),
                mention=(file,),
                expect=_of(payload),
            )
    for payload, data in BOMBS.items():
        change = put(name, with_pickle(data))
        yield Case(
            id=f"verl-bomb-{payload}", sample="verl", change=change, mention=(name,), expect=_of(payload)
        )
    yield Case(
        id="verl-stealth",
        sample="verl",
        change=put(name, with_pickle(stealth(good_pickle({"w": torch.zeros(6, 4)})))),
        mention=(name,),
        expect=HARMLESS,
    )
    yield Case(
        id="verl-config",
        sample="verl",
        change=put("fsdp_config.json", b'{"world_size": -' + b"9" * 5000 + b"}"),
        mention=("fsdp_config.json",),
        expect=HARMLESS,
    )


def _deepspeed() -> Iterator[Case]:
    for payload in ("system", "eval", "inst"):

        def change(d: Path, payload: str = payload) -> None:
            for file in list(d.iterdir()):
                file.unlink()
            (d / "latest").write_text("global_step1")
            (d / "global_step1").mkdir()
            (d / "global_step1" / "mp_rank_00_model_states.pt").write_bytes(with_pickle(bare(payload)))

        yield Case(
            id=f"deepspeed-code-{payload}",
            sample="verl",
            change=change,
            mention=("mp_rank_00_model_states.pt",),
        )
    for number, where in enumerate(("../../outside", "/etc", "global_step1\0", "\x1b[2J", "x" * 10_000)):

        def latest(d: Path, where: str = where) -> None:
            for file in list(d.iterdir()):
                file.unlink()
            (d / "latest").write_text(where)
            (d / "global_step1").mkdir()
            (d / "global_step1" / "mp_rank_00_model_states.pt").write_bytes(
                saved({"module": {"w": torch.ones(2)}})
            )

        yield Case(
            id=f"deepspeed-latest-{number}",
            sample="verl",
            change=latest,
            mention=("latest",),
            expect=HARMLESS,
        )


def _own_formats() -> Iterator[Case]:
    """ByteCheckpoint and torch_checkpointing, whose markers alone lead there."""
    head = b"\x80\x02cbytecheckpoint.checkpointer.meta_type\nMetadata\n)\x81"

    def byte(data: bytes) -> Case:
        def change(d: Path) -> None:
            (d / "model").mkdir()
            (d / "model" / ".metadata").write_bytes(data)
            (d / ".metadata").write_bytes(data)

        return Case(
            id=f"bytecheckpoint-{len(data)}",
            sample="verl-less",
            change=change,
            mention=(".metadata",),
            but={"diff": HARMLESS},  # with which there is nothing to compare
        )

    yield byte(head + bare("system")[2:-1] + b"b.")
    yield byte(head + b"}" + bare("eval")[2:-1] + b"0b.")
    for payload in ("system", "build"):
        yield Case(
            id=f"torch-checkpointing-{payload}",
            sample="verl-less",
            change=put("metadata.pkl", bare(payload)),
            mention=("metadata.pkl",),
        )
    yield Case(
        id="megatron-metadata",
        sample="dcp",
        change=put(
            "metadata.json",
            b'{"sharded_backend": "torch_dist", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        ),
        mention=("metadata.json",),
        expect=HARMLESS,
    )


def _sharding_info() -> Iterator[Case]:
    """What DCP's safetensors shards say of themselves."""
    good = {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}

    def shard(info: str) -> bytes:
        content = {"__metadata__": {"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0"}, **good}
        return file_of(json.dumps(content).encode(), bytes(24))

    for name, info in {
        "4-tb": json.dumps({"w": {"saved_offsets": [1 << 20, 1 << 20]}}),
        "negative": json.dumps({"w": {"saved_offsets": [-1, 0]}}),
        "bigint": json.dumps({"w": {"saved_offsets": [10**18, 10**18]}}),
        "float": json.dumps({"w": {"saved_offsets": [0.5, 0]}}),
        "other-dims": json.dumps({"w": {"saved_offsets": [0]}}),
        "not-json": "{",
        "a-list": "[]",
        "deep": "[" * 100_000,
        "python": "__import__('os').system('touch $SHARDKIT_CANARY')",
    }.items():
        file = "shard-00001-model-00001-of-00001.safetensors"
        yield Case(
            id=f"sharding-info-{name}", sample="verl-less", change=put(file, shard(info)), mention=(file, "w")
        )


def _directories() -> Iterator[Case]:
    def nested(d: Path) -> None:
        deep = d
        for _ in range(60):
            deep = deep / "x"
        deep.mkdir(parents=True)

    def cyclic(d: Path) -> None:
        (d / "checkpoint-1").symlink_to(d)

    def outside(d: Path) -> None:
        (d.parent / "outside").mkdir()
        (d.parent / "outside" / "secret").write_text("s")
        (d / "tokenizer.json").symlink_to(d.parent / "outside" / "secret")
        (d / "generation_config.json").symlink_to("/etc/hostname")

    for name, change in {"nested": nested, "cyclic": cyclic}.items():
        yield Case(id=f"directory-{name}", sample="verl-less", change=change, mention=("in",))
    yield Case(id="directory-with-links", sample="dcp", change=outside, mention=(), expect=HARMLESS)
    yield Case(
        id="directory-of-one-fifo",
        sample="verl-less",
        change=lambda d: os.mkfifo(d / "model.safetensors"),
        mention=("model.safetensors", "in"),
    )


def cases() -> Iterator[Case]:
    """Every case of this kind."""
    yield from _lightning()
    yield from _legacy()
    yield from _ranks()
    yield from _deepspeed()
    yield from _own_formats()
    yield from _sharding_info()
    yield from _directories()
