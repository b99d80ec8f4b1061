"""A server of an object store behind a proxy, sources on this machine, and what each verb is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardkit
from shardkit.files import stores
from shardkit.files.remote import contract
from shardkit.files.remote import objects as remote
from shardkit.files.remote.objects import Objects
from tests.contents import contents
from tests.worlds import stores as servers

MIB = 1 << 20
ROWS, NUM_LAYERS = 704, 6
LARGE = MIB // 4
"""What is sent at once and is longer is bytes of tensors."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(ROWS, ROWS, bias=False) for _ in range(NUM_LAYERS))
        self.last = nn.Linear(4, 4)


@pytest.fixture(scope="module", params=servers.PARAMS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[servers.Served]:
    home = tmp_path_factory.mktemp("served")
    with servers.reached(request.param, home) as proxy:
        make(home)
        yield servers.Served(home, proxy)


def make(home: Path) -> None:
    torch.manual_seed(0)
    (home / "hub").mkdir()
    save_file(Model().state_dict(), home / "hub/model.safetensors", {"format": "pt"})
    (home / "hub/config.json").write_text('{"hidden_size": 704}')
    (home / "hub/tokenizer_config.json").write_text('{"a": 1}')
    shardkit.preshard(home / "hub", home / "dcp", world_size=2, wrap="none")


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SHARDKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(contract, "FIRST_WAIT_S", 0.0)
    served = request.getfixturevalue("served") if "served" in request.fixturenames else None
    if served is not None:
        served.proxy.reset()
        # So that small files have several.
        monkeypatch.setattr(remote, "PART_NBYTES", max(2 * MIB, served.proxy.least_part_nbytes))
    yield
    if served is not None:
        served.proxy.reset()
    stores.forget()


@pytest.fixture
def out(request: pytest.FixtureRequest, served: servers.Served) -> str:
    """A place in the store that no other test uses."""
    return f"{served.root}/{request.node.name.replace('[', '-').replace(']', '')}/out"


WRITES: dict[str, Callable[..., Any]] = {
    "preshard": lambda home, out, **more: shardkit.preshard(
        f"{home}/hub", out, world_size=3, wrap="none", **more
    ),
    "reshard": lambda home, out, **more: shardkit.reshard(f"{home}/dcp", out, world_size=3, **more),
    "consolidate": lambda home, out, **more: shardkit.consolidate(
        f"{home}/dcp", out, base=f"{home}/hub", manifest=True, max_shard_size="6MB", **more
    ),
}


def objects(out: str) -> dict[str, bytes]:
    """Return everything below a place in the store."""
    place = Objects(out)
    stored = ((name, place.get(name)) for name in place.sizes())
    return {name: each.data for name, each in stored if each is not None}


def put(out: str, name: str, data: bytes) -> None:
    """Put an object at a place in the store."""
    Objects(out).put(name, len(data), lambda: [data])


def fetch(out: str, directory: Path) -> Path:
    """Copy everything below a place in the store to a directory."""
    for name, data in objects(out).items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


def check_bytes(out: str, directory: Path) -> None:
    """See that an output in a store has the bytes of a local one."""
    found, want = objects(out), contents(directory)
    (folder,) = {name.partition("/")[0] for name in found if "/" in name}
    assert found.keys() == {".metadata", *(f"{folder}/{name}" for name in want if name != ".metadata")}
    for name in want.keys() - {".metadata", "shardkit.json"}:
        assert found[f"{folder}/{name}"] == want[name], name
    theirs, ours = (json.loads(each) for each in (want["shardkit.json"], found[f"{folder}/shardkit.json"]))
    assert ours["metadata"]["size"] == len(found[".metadata"])
    for said in (ours, theirs):  # `.metadata` names the folder
        said.pop("metadata")
        said.pop("crc32", None)
    assert ours == theirs
