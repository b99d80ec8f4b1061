"""Links that leave a checkpoint's directory, in the place of every kind of file that is looked for in one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tests.security.case import ACCEPTED, HARMLESS, REFUSED, Case
from tests.security.dcp_cases import saved
from tests.security.hub_cases import INDEX, ONE

_WEIGHTS = saved({"w": torch.arange(24.0).reshape(6, 4)})
_RANK = "model_world_size_1_rank_0.pt"


def _out(*names: str) -> Callable[[Path], None]:
    """Move files or directories out, and leave links to them."""

    def change(d: Path) -> None:
        (d.parent / "outside").mkdir()
        for name in names:
            there = d.parent / "outside" / Path(name).name
            shutil.move(d / name, there)
            (d / name).symlink_to(there)

    return change


def _made(content: dict[str, bytes], *out: str) -> Callable[[Path], None]:
    """Write files, and move some of them out."""

    def change(d: Path) -> None:
        for name, data in content.items():
            (d / name).parent.mkdir(parents=True, exist_ok=True)
            (d / name).write_bytes(data)
        _out(*out)(d)

    return change


def _to(target: str) -> Callable[[Path], None]:
    """Put a link to something else in the place of a weight file."""

    def change(d: Path) -> None:
        (d / ONE).unlink()
        (d / ONE).symlink_to(target)

    return change


def _to_a_pipe(d: Path) -> None:
    (d.parent / "outside").mkdir()
    os.mkfifo(d.parent / "outside" / "pipe")
    _to("../outside/pipe")(d)


def _within(d: Path) -> None:
    (d / "files").mkdir()
    (d / _RANK).rename(d / "files" / "0.pt")
    (d / _RANK).symlink_to("files/0.pt")


def _shards_behind_a_link(d: Path) -> None:
    (d.parent / "outside").mkdir()
    (d.parent / "outside" / "__0_0.distcp").write_bytes(b"x")
    (d / "model").symlink_to(d.parent / "outside")


def cases() -> Iterator[Case]:
    """Every case of this kind."""

    def case(
        name: str,
        sample: str,
        change: Callable[[Path], None],
        *mention: str,
        expect: str = REFUSED,
        reads: str = "",
    ) -> Case:
        but = {"diff": HARMLESS} if sample == "verl-less" else {}  # with which there is nothing to compare
        return Case(
            id=f"link-{name}",
            sample=sample,
            change=change,
            mention=mention,
            expect=expect,
            but=but,
            reads=reads,
        )

    yield case("rank-file", "verl", _out(_RANK), _RANK)
    yield case("rank-file-inside", "verl", _within, expect=ACCEPTED)
    yield case("fsdp-config", "verl", _out("fsdp_config.json"), "fsdp_config.json")
    yield case("actor", "verl-less", _made({f"actor/{_RANK}": _WEIGHTS}, "actor"), "in")
    yield case(
        "rank-file-of-actor", "verl-less", _made({f"actor/{_RANK}": _WEIGHTS}, f"actor/{_RANK}"), _RANK
    )
    for name in ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_0_rank0.bin"):
        yield case(f"accelerate-{name}", "verl-less", _made({name: _WEIGHTS}, name), name)
    states = "mp_rank_00_model_states.pt"
    yield case(
        "deepspeed", "verl-less", _made({states: saved({"module": {"w": torch.ones(2)}})}, states), states
    )
    steps = {"latest": b"global_step1", f"global_step1/{states}": saved({"module": {"w": torch.ones(2)}})}
    yield case("deepspeed-step", "verl-less", _made(steps, "global_step1"), "in")
    yield case("deepspeed-latest", "verl-less", _made(steps, "latest"), "in", expect=HARMLESS)
    yield case("ckpt-in-a-directory", "verl-less", _made({"epoch=1.ckpt": _WEIGHTS}, "epoch=1.ckpt"), "in")
    yield case("lightning-meta", "lightning", _out("meta.pt"), "meta.pt", expect=HARMLESS)
    shard = "shard-00001-model-00001-of-00001.safetensors"
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    yield case("dcp-hf-shard", "verl-less", _made({shard: data}, shard), shard)
    yield case(
        "dcp-hf-metadata",
        "verl-less",
        _made({shard: data, ".hf_metadata/config.json": b"{}"}, ".hf_metadata"),
        expect=HARMLESS,
    )
    yield case(
        "torch-checkpointing", "verl-less", _made({"metadata.pkl": b"\x80\x02}."}, "metadata.pkl"), "in"
    )
    yield case("megatron", "dcp", _made({"metadata.json": b"{}"}, "metadata.json"), expect=HARMLESS)
    yield case("hub-shard", "hub", _out(ONE), expect=ACCEPTED, reads="outside")
    yield case("hub-shard-to-another-file", "hub", _to("/etc/hostname"), ONE, reads="/etc/hostname")
    yield case("hub-shard-to-a-device", "hub", _to("/dev/zero"), ONE)
    yield case("hub-shard-to-memory", "hub", _to("/proc/self/mem"), ONE, reads="/proc")
    yield case("hub-shard-to-a-directory", "hub", _to("/etc"), ONE)
    yield case("hub-shard-to-a-pipe", "hub", _to_a_pipe, ONE)
    yield case("hub-index", "hub", _out(INDEX), INDEX)
    yield case("hub-config", "hub", _out("config.json"), "config.json", expect=HARMLESS)
    yield case("bin", "bin", _out("pytorch_model.bin"), expect=ACCEPTED, reads="outside")
    adapter = {"adapter_config.json": b"{}", "latest_checkpointed_iteration.txt": b"3"}
    yield case("adapter-and-tracker", "verl", _made(adapter, *adapter), expect=HARMLESS)
    yield case("shards-in-a-directory", "verl-less", _shards_behind_a_link, "in")
    yield Case(
        id="link-records-and-lists",
        sample="presharded",
        change=_out("__0_0.chunks.json", "__0_0.distcp"),
        mention=("__0_0",),
        but={"inspect": HARMLESS},
    )
