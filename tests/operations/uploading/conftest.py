"""A server of an object store behind a proxy, sources on this machine, and what each verb is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardkit
from shardkit.files import stores
from shardkit.files.remote import s3
from shardkit.files.remote.writers import writer_of
from tests.worlds import stores as servers

MIB = 1 << 20
ROWS, NUM_LAYERS = 1280, 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(ROWS, ROWS, bias=False) for _ in range(NUM_LAYERS))
        self.last = nn.Linear(4, 4)


class Served(NamedTuple):
    """A server, and sources on this machine."""

    home: Path
    """With `hub` and `dcp`."""
    proxy: servers.Proxy
    root: str = f"s3://{servers.BUCKET}"
    """The bucket."""


@pytest.fixture(scope="module", params=servers.SERVERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("served")
    with servers.reached(request.param, home) as proxy:
        make(home)
        yield Served(home, proxy)


def make(home: Path) -> None:
    torch.manual_seed(0)
    (home / "hub").mkdir()
    save_file(Model().state_dict(), home / "hub/model.safetensors", {"format": "pt"})
    (home / "hub/config.json").write_text('{"hidden_size": 1280}')
    (home / "hub/tokenizer_config.json").write_text('{"a": 1}')
    shardkit.preshard(home / "hub", home / "dcp", world_size=2, wrap="none")


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SHARDKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(s3, "FIRST_WAIT_S", 0.0)
    served = request.getfixturevalue("served") if "served" in request.fixturenames else None
    if served is not None:
        served.proxy.reset()
    yield
    if served is not None:
        served.proxy.reset()
    stores.forget()


@pytest.fixture
def out(request: pytest.FixtureRequest, served: Served) -> str:
    """A place in the store that no other test uses."""
    return f"{served.root}/{request.node.name.replace('[', '-').replace(']', '')}/out"


WRITES: dict[str, Callable[..., Any]] = {
    "preshard": lambda home, out, **more: shardkit.preshard(
        f"{home}/hub", out, world_size=3, wrap="none", **more
    ),
    "reshard": lambda home, out, **more: shardkit.reshard(f"{home}/dcp", out, world_size=3, **more),
    "consolidate": lambda home, out, **more: shardkit.consolidate(
        f"{home}/dcp", out, base=f"{home}/hub", manifest=True, max_shard_size="20MB", **more
    ),
}


def objects(out: str) -> dict[str, bytes]:
    """Return everything below a place in the store."""
    found = dict[str, bytes]()
    for path, _ in writer_of(out).objects(out):
        content = writer_of(out).get(path)
        assert content is not None
        found[path.removeprefix(out + "/")] = content[0]
    return found


def local(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def fetch(out: str, directory: Path) -> Path:
    """Copy everything below a place in the store to a directory."""
    for name, data in objects(out).items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory
