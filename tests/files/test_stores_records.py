"""What a part of a consolidate fetches of records in a store: what describes a record comes with its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import shardkit
from tests.contents import contents
from tests.formats.dcp.samples import save, save_rank_local, shard
from tests.worlds import stores as servers

RANKS, LAYERS, PARTS = 4, 12, 3
DESCRIPTION = 64 << 10  # a request that is longer brings data
OPTIONS: dict[str, Any] = {"max_shard_size": 2_000_000, "ask_class": False, "manifest": True}


def layers(mesh: DeviceMesh) -> dict[str, Any]:
    """Of each layer a rank has 200 KB."""
    return {
        f"layers.{n}.weight": shard(torch.full((400, 500), n / 8, dtype=torch.float32), mesh)
        for n in range(LAYERS)
    }


def test_no_record_takes_a_request_of_its_own(served: servers.Served, tmp_path: Path) -> None:
    """And all bytes are compared with what the records say."""
    save_rank_local(layers, RANKS, tmp_path / "dcp")
    servers.upload(tmp_path / "dcp", "s3://bucket/records")
    whole = shardkit.consolidate(tmp_path / "dcp", tmp_path / "whole", **OPTIONS)
    for number in range(1, PARTS + 1):
        served.proxy.seen.clear()
        last = shardkit.consolidate(
            "s3://bucket/records", tmp_path / "out", part=f"{number}/{PARTS}", **OPTIONS
        )
        small = [seen for seen in served.proxy.ranges("/records/__") if seen.nbytes <= DESCRIPTION]
        assert len(small) <= RANKS  # their .metadata
    manifest = "shardkit.json"
    assert {**contents(tmp_path / "out"), manifest: b""} == {**contents(tmp_path / "whole"), manifest: b""}
    assert (last.checked_bytes, last.unchecked) == (whole.checked_bytes, whole.unchecked)
    assert last.checked_bytes == last.read_bytes


def test_a_record_of_another_form_is_found_as_it_is_read(served: servers.Served, tmp_path: Path) -> None:
    """One rank stored a layer by columns."""

    def make(mesh: DeviceMesh) -> dict[str, Any]:
        made = layers(mesh)
        if mesh.get_local_rank() == 2:
            local = torch.arange(50_000.0).reshape(500, 100).t()
            made["layers.7.weight"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        return made

    save_rank_local(make, RANKS, tmp_path / "dcp")
    servers.upload(tmp_path / "dcp", "s3://bucket/another")
    shardkit.consolidate(tmp_path / "dcp", tmp_path / "whole", **OPTIONS)
    for number in range(1, PARTS + 1):
        last = shardkit.consolidate(
            "s3://bucket/another", tmp_path / "out", part=f"{number}/{PARTS}", **OPTIONS
        )
    assert last.part is not None
    assert last.part.is_committed
    weights = {name: data for name, data in contents(tmp_path / "out").items() if "safetensors" in name}
    assert weights.items() <= contents(tmp_path / "whole").items()
    assert len(weights) > PARTS


def test_a_record_of_another_form_in_one_of_several_files(served: servers.Served, tmp_path: Path) -> None:
    """The last part reads a layer that is stored by columns, and nothing of the other files."""
    state = {f"layers.{n}.weight": torch.full((500, 400), n / 8) for n in range(4)}
    state["layers.3.weight"] = torch.arange(200_000.0).reshape(400, 500).t()
    save(state, tmp_path / "dcp", storage_writer=dcp.FileSystemWriter(str(tmp_path / "dcp"), thread_count=4))
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 4
    servers.upload(tmp_path / "dcp", "s3://bucket/apart")
    options = {**OPTIONS, "max_shard_size": 900_000}
    whole = shardkit.consolidate(tmp_path / "dcp", tmp_path / "whole", **options)
    for number in range(1, 5):
        last = shardkit.consolidate("s3://bucket/apart", tmp_path / "out", part=f"{number}/4", **options)
    manifest = "shardkit.json"
    assert {**contents(tmp_path / "out"), manifest: b""} == {**contents(tmp_path / "whole"), manifest: b""}
    assert (last.checked_bytes, last.unchecked) == (whole.checked_bytes, whole.unchecked)


def test_large_records_are_fetched_once(served: servers.Served, tmp_path: Path) -> None:
    """Each is longer than a request. What describes it lies at both ends.

    One thread reads: several that are out of step may drive out what another has not used yet. So little memory may not hold
    the end of a record, which is read first, until the data have come so far.
    """

    def make(mesh: DeviceMesh) -> dict[str, Any]:
        return {f"layers.{n}.weight": shard(torch.full((4096, 2048), n / 8), mesh) for n in range(3)}

    save_rank_local(make, RANKS, tmp_path / "dcp")
    servers.upload(tmp_path / "dcp", "s3://bucket/long")
    served.proxy.seen.clear()
    options: dict[str, Any] = {"ask_class": False, "max_memory": 32 << 20, "jobs": 1}
    done = shardkit.consolidate("s3://bucket/long", tmp_path / "out", part="1/1", **options)
    assert done.checked_bytes == done.read_bytes
    fetched = sum(seen.nbytes for seen in served.proxy.ranges("/long/__") if "distcp" in seen.path)
    assert fetched <= 1.07 * sum(path.stat().st_size for path in (tmp_path / "dcp").glob("*.distcp"))
