"""verify --store: what a real store says of its objects tells damage, and no byte of them is asked for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import shardkit
from shardkit.cli import main
from shardkit.errors import SourceError, UsageError
from shardkit.files import stores
from shardkit.files.digest import crc32
from shardkit.files.home import home_of
from shardkit.files.remote import cloud, contract
from shardkit.files.remote.writers import writer_of
from tests.worlds import stores as servers

S3 = f"s3://{servers.BUCKET}"


@pytest.fixture(scope="module", params=servers.SERVERS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[servers.Served]:
    home = tmp_path_factory.mktemp("vouched")
    torch.manual_seed(0)
    (home / "hub").mkdir()
    weights = {f"layers.{number}.weight": torch.randn(1024, 1024) for number in range(6)}
    save_file(weights, home / "hub/model.safetensors", {"format": "pt"})
    (home / "hub/config.json").write_text("{}")
    with servers.reached(request.param, home) as proxy:
        shardkit.preshard(home / "hub", f"{S3}/sharded", world_size=2, wrap="none", layout="declared")
        shardkit.consolidate(f"{S3}/sharded", f"{S3}/hub", manifest=True, max_shard_size="12MB")
        yield servers.Served(home, proxy)


def names(path: str) -> set[str]:
    """Return the keys of everything in a checkpoint but its manifest."""
    return {each for each, _ in writer_of(path).objects(path) if not each.endswith("/shardkit.json")}


@pytest.mark.parametrize("folder", ["sharded", "hub"])
def test_each_file_is_asked_for_once_and_not_read(served: servers.Served, folder: str) -> None:
    path = f"{S3}/{folder}"
    served.proxy.reset()
    result = shardkit.verify(path, store=True)
    assert (result.ok, result.level, result.problems, result.notes) == (True, "store", (), ())
    assert result.num_vouched_files == len(names(path))
    assert result.vouched_bytes == sum(
        size for each, size in writer_of(path).objects(path) if each in names(path)
    )
    asked = [(seen.method, seen.path.partition("?")[0], seen.is_range) for seen in served.proxy.seen]
    heads = Counter(f"s3:/{key}" for method, key, _ in asked if method == "HEAD")
    assert [heads[each] for each in names(path)] == [1] * len(names(path))
    read = {key.rpartition("/")[2] for _, key, is_range in asked if is_range}
    assert read <= {".metadata", "shardkit.json"}


def test_a_file_of_the_same_size_is_found(served: servers.Served) -> None:
    path = f"{home_of(f'{S3}/sharded')}/__1_0.distcp"
    data, _ = writer_of(path).get(path) or (b"", "")
    other = bytes([data[0] ^ 1]) + data[1:]
    writer_of(path).put(path, other, int(crc32(other)))
    try:
        (problem,) = shardkit.verify(f"{S3}/sharded", store=True).problems
        assert problem.line() == (
            f"__1_0.distcp: CRC-32 that the store has: expected {crc32(data):08x}, found {crc32(other):08x}"
        )
        done = CliRunner().invoke(main, ["verify", f"{S3}/sharded", "--store"])
        assert done.exit_code == 1
        stores.delete([path])
        (problem,) = shardkit.verify(f"{S3}/sharded", store=True).problems
        assert problem.line() == "__1_0.distcp: the manifest lists it, and there is no such object"
        writer_of(path).put(path, data[:-1], int(crc32(data[:-1])))
        (problem,) = shardkit.verify(f"{S3}/sharded", store=True).problems
        assert problem.line() == f"__1_0.distcp: size in bytes: expected {len(data)}, found {len(data) - 1}"
    finally:
        writer_of(path).put(path, data, int(crc32(data)))
    assert shardkit.verify(f"{S3}/sharded", store=True).ok


def test_what_the_store_cannot_tell_is_said(served: servers.Served) -> None:
    """An object that another tool sent has no CRC-32 of the whole: that is not damage, and not a success."""
    import obstore

    path = f"{home_of(f'{S3}/sharded')}/__1_0.distcp"
    data, _ = writer_of(path).get(path) or (b"", "")
    key = path.removeprefix(f"{S3}/")
    obstore.put(cloud.connect(S3), key, data, use_multipart=True, chunk_size=5 << 20)
    assert (writer_of(path).head(path) or contract.WrittenObject(0, "", 0)).crc32 is None
    try:
        result = shardkit.verify(f"{S3}/sharded", store=True)
        (problem,) = result.problems
        assert result.is_only_unreadable
        assert problem.details == ("__1_0.distcp",)
        assert problem.message == (
            "the store keeps no CRC-32 of 1 file: only sizes were compared, a full check reads the bytes"
        )
        done = CliRunner().invoke(main, ["verify", f"{S3}/sharded", "--store", "--json"])
        assert done.exit_code == 5
        assert (
            json.loads(done.stdout)["num_vouched_files"]
            == result.num_vouched_files
            == len(names(f"{S3}/sharded")) - 1
        )
    finally:
        writer_of(path).put(path, data, int(crc32(data)))


def test_what_is_no_such_path_is_refused(served: servers.Served, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="store=True asks an object store"):
        shardkit.verify(served.home / "hub", store=True)
    with pytest.raises(UsageError, match="store=True reads no bytes"):
        shardkit.verify(f"{S3}/sharded", store=True, full=True)
    with pytest.raises(SourceError, match="there is no manifest"):
        shardkit.verify(f"{S3}/hub", store=True, manifest=tmp_path / "none.json")
    with pytest.raises(SourceError, match="no such"):
        shardkit.verify(f"{S3}/nothing", store=True)


def test_a_manifest_is_said_to_be_written_elsewhere(served: servers.Served, tmp_path: Path) -> None:
    """Nothing is written beside what lies in a store."""
    shardkit.consolidate(f"{S3}/sharded", f"{S3}/bare")
    assert f"`shardkit manifest {S3}/bare --output FILE`" in shardkit.verify(f"{S3}/bare").notes[-1]
    with pytest.raises(UsageError, match="lies in a store") as caught:
        shardkit.write_manifest(f"{S3}/bare")
    assert "output" in str(caught.value.hint)
    shardkit.write_manifest(f"{S3}/bare", tmp_path / "m.json")
    assert shardkit.verify(f"{S3}/bare", manifest=tmp_path / "m.json", full=True).ok
