"""However many ranks there are, a store is listed by one of them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardkit
from tests.nested import FOLDER, OLDER, nest
from tests.training.stores_world import Model
from tests.worlds import stores as servers
from tests.worlds.processes import run_script

pytestmark = pytest.mark.prove

S3 = f"s3://{servers.BUCKET}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Served]:
    home = tmp_path_factory.mktemp("listed")
    with servers.reached("any", home) as proxy:
        make(home)
        for name in ("hub", "nested"):
            servers.upload(home / name, f"{S3}/{name}")
        for rank in range(2):
            servers.upload(home / "hub", f"{S3}/copy-{rank}")
        yield servers.Served(home, proxy)


def make(home: Path) -> None:
    (home / "hub").mkdir()
    torch.manual_seed(0)
    save_file(Model().state_dict(), home / "hub/model.safetensors")
    shardkit.preshard(home / "hub", home / "flat", world_size=4, wrap="none")
    nest(home / "flat", home / "nested")
    shutil.copytree(home / "nested" / FOLDER, home / "nested" / OLDER)


def read(served: servers.Served, out: Path, verb: str, name: str, num_ranks: int) -> list[str]:
    """Have ranks read, see that the values are right, and return the listings that the server was asked for."""
    out.mkdir()
    served.proxy.reset()
    request = {"verb": verb, "source": f"{S3}/{name}", "out": str(out), "num_ranks": num_ranks}
    run_script("training/stores_world.py", json.dumps(request), env=servers.environment(served.proxy.url))
    want = {
        name: value.double().sum().item()
        for name, value in load_file(served.home / "hub/model.safetensors").items()
    }
    for rank in range(num_ranks):
        assert json.loads((out / f"{rank}.json").read_text()) == want
    return [seen.path for seen in served.proxy.seen if "list-type" in seen.path]


@pytest.mark.dist
@pytest.mark.parametrize("name", ["hub", "nested"])
@pytest.mark.parametrize("verb", ["prepare", "load_into"])
def test_one_rank_lists(served: servers.Served, tmp_path: Path, verb: str, name: str) -> None:
    alone, four = (read(served, tmp_path / str(size), verb, name, size) for size in (1, 4))
    assert sorted(four) == sorted(alone)
    assert four
    metadata = [seen for seen in served.proxy.seen if seen.path.endswith(".metadata")]
    assert len(metadata) == (name == "nested")


@pytest.mark.dist
def test_what_is_read_of_one_version_is_not_compared(served: servers.Served, tmp_path: Path) -> None:
    """Each request names the version that the first rank has listed."""
    read(served, tmp_path / "four", "load_into", "nested", 4)
    shards = Counter(seen.path for seen in served.proxy.seen if ".distcp" in seen.path)
    assert len(shards) == 4
    assert set(shards.values()) == {1}


@pytest.mark.dist
def test_copies_of_other_versions_are_compared_and_read_by_each(
    served: servers.Served, tmp_path: Path
) -> None:
    read(served, tmp_path / "two", "load_into", "copy-{rank}", 2)
    requests = Counter(seen.path for seen in served.proxy.seen if "model.safetensors" in seen.path)
    first, second = (requests[f"/{servers.BUCKET}/copy-{rank}/model.safetensors"] for rank in range(2))
    assert first == second == 3  # the header, the bytes that are compared, the tensors
