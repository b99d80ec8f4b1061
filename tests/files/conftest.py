"""A server of an object store with two small checkpoints, behind a proxy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shardkit
from shardkit.files import stores
from shardkit.files.remote import cloud
from tests.contents import contents
from tests.worlds import stores as servers

ROWS, NUM_LAYERS = 1280, 6
S3 = "s3://bucket/try"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(ROWS, ROWS, bias=False) for _ in range(NUM_LAYERS))
        self.last = nn.Linear(4, 4)


@pytest.fixture(scope="module", params=servers.PARAMS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[servers.Served]:
    """`hub` and `dcp`, in this directory and in the bucket of a server behind the proxy."""
    home = tmp_path_factory.mktemp("served")
    with servers.reached(request.param, home) as proxy:
        make(home)
        for folder in ("hub", "dcp"):
            servers.upload(home / folder, f"{S3}/{folder}")
        yield servers.Served(home, proxy)


def make(home: Path) -> None:
    (home / "hub").mkdir()
    torch.manual_seed(0)
    save_file(Model().state_dict(), home / "hub/model.safetensors")
    shardkit.preshard(home / "hub", home / "dcp", world_size=2, wrap="none")


def check_verbs(there: str, home: Path, work: Path) -> None:
    """See that all verbs answer of `hub` and `dcp` in a store as of those in a directory."""
    for source, where in ((there, work / "far"), (str(home), work / "near")):
        where.mkdir()
        shardkit.consolidate(f"{source}/dcp", where / "a")
        shardkit.reshard(f"{source}/dcp", where / "b", world_size=3)
        shardkit.preshard(f"{source}/hub", where / "c", world_size=2, wrap="none")
    assert contents(work / "far") == contents(work / "near")
    for folder in ("hub", "dcp"):
        local, remote = shardkit.inspect(home / folder), shardkit.inspect(f"{there}/{folder}")
        assert (remote.tensors, remote.files, remote.warnings) == (local.tensors, local.files, local.warnings)
        mine, theirs = (shardkit.verify(path, full=True) for path in (home / folder, f"{there}/{folder}"))
        assert (theirs.problems, theirs.warnings, theirs.read_bytes) == ((), (), mine.read_bytes)
    assert shardkit.diff(f"{there}/dcp", f"{there}/hub").is_equal
    assert shardkit.diff(f"{there}/dcp", home / "hub").is_equal
    want, context = load_file(home / "hub/model.safetensors"), shardkit.prepare(Model, f"{there}/dcp")
    first, second = shardkit.finalize(context.model, context), Model()
    shardkit.load_into(second, f"{there}/hub")
    for model in (first, second):
        assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    served = request.getfixturevalue("served") if "served" in request.fixturenames else None
    if served is not None:
        served.proxy.reset()
    yield
    if served is not None:
        served.proxy.reset()
    stores.forget()


def client() -> Any:
    """obstore's own store for the bucket."""
    return cloud.connect("s3://bucket")
