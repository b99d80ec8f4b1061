"""Who holds what: held against the bytes of real files, and against torch's own way of cutting."""

from __future__ import annotations

import json

import pytest
import torch

import shardkit
from shardkit.operations import holdings
from shardkit.operations.holdings import find_file_holdings
from tests.guides.moe import make_small

WEIGHTS = {f"model.layers.{n}.{name}.weight": (9, 6) for n in range(3) for name in ("up", "down")}
WEIGHTS |= {"model.embed.weight": (13, 4), "model.norm.weight": (5,)}


@pytest.fixture
def model(make_hub):
    return make_hub({name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in WEIGHTS.items()})


@pytest.fixture
def sharded(model, tmp_path):
    return shardkit.preshard(model, tmp_path / "out", mesh="dp_replicate=2,dp_shard=4", layout="declared")


def chunk_bytes(rank, num_ranks):
    """What a rank holds of all weights, as torch cuts them."""
    parts = [torch.empty(shape, dtype=torch.bfloat16).chunk(num_ranks) for shape in WEIGHTS.values()]
    return sum(each[rank].nbytes for each in parts if rank < len(each))


def test_ranks_hold_what_torch_would_give_them(sharded):
    held = shardkit.inspect(sharded.output, holdings=True).holdings
    assert [each.held_bytes for each in held.holders] == [chunk_bytes(rank % 4, 4) for rank in range(8)]
    assert all(sum(held.cells[each.cells]) == each.held_bytes for each in held.holders)
    assert [each.reads for each in held.holders] == [((r % 4, chunk_bytes(r % 4, 4)),) for r in range(8)]
    assert [unit.path for unit in held.units] == ["", *(f"model.layers.{n}" for n in range(3))]
    assert held.tensor_bytes == sum(chunk_bytes(rank, 4) for rank in range(4))


def test_records_begin_where_they_are_said_to(sharded, tmp_path):
    held = shardkit.inspect(sharded.output, holdings=True).holdings
    for file in held.files:
        data, strip = (tmp_path / "out" / file.name).read_bytes(), held.strips[file.strip]
        assert len(data) == file.file_bytes
        assert all(
            data[start : start + 4] == b"PK\3\4" for start in strip.starts
        )  # each is a zip of torch.save
        ends = [start + size for start, size in zip(strip.starts, strip.nbytes, strict=True)]
        assert all(end <= start for end, start in zip(ends, strip.starts[1:], strict=False))
        assert ends[-1] <= len(data)


def test_pieces_make_up_each_tensor(sharded):
    held = shardkit.inspect(sharded.output, holdings=True).holdings
    for tensor in held.tensors:
        cut = held.cuts[tensor.cut]
        dims, seen = len(cut.shape), torch.zeros(cut.shape, dtype=torch.int)
        assert cut.shape == WEIGHTS[tensor.name]
        for at in range(cut.num_pieces):
            box = cut.boxes[at * 2 * dims : (at + 1) * 2 * dims]
            seen[tuple(slice(box[d], box[d] + box[dims + d]) for d in range(dims))] += 1
        assert (seen == 1).all()


def test_a_plan_says_what_the_output_then_is(model, tmp_path):
    options = {"world_size": 3, "layout": "declared", "holdings": True}
    planned = shardkit.preshard(model, tmp_path / "out", dry_run=True, **options)
    assert not (tmp_path / "out").exists()
    written = shardkit.preshard(model, tmp_path / "out", **options)
    found = shardkit.inspect(tmp_path / "out", holdings=True)
    assert planned.holdings.holders == written.holdings.holders == found.holdings.holders
    assert [f.file_bytes for f in planned.holdings.files] == [f.file_bytes for f in found.holdings.files]
    assert [s.starts for s in planned.holdings.strips] == [s.starts for s in found.holdings.strips]
    for result in (planned, found):
        assert "holdings" not in result.to_json()
    json.dumps(found.holdings.to_json())


def test_experts_are_gathered_in_part_by_the_plan_and_by_the_output(tmp_path, fast_trace):
    make_small(tmp_path / "moe")
    options = {"mesh": "dp_shard=4,ep=2", "holdings": True}
    planned = shardkit.preshard(tmp_path / "moe", tmp_path / "out", dry_run=True, **options).holdings
    shardkit.preshard(tmp_path / "moe", tmp_path / "out", **options)
    found = shardkit.inspect(tmp_path / "out", holdings=True).holdings
    assert planned.units == found.units


def test_replicated_tensors_are_read_from_the_file_that_has_them(make_hub, tmp_path):
    model = make_hub({"layers.0.up.weight": torch.ones(8, 4), "steps": torch.tensor(7)})
    shardkit.preshard(model, tmp_path / "out", world_size=2, layout="declared")
    held = shardkit.inspect(tmp_path / "out", holdings=True).holdings
    assert held.holders[0].reads == ((0, 64 + 8),)
    assert held.holders[1].reads == ((1, 64), (0, 8))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_of_a_trainer_that_records_no_mesh(model, tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save(
        {"a.0.w": torch.ones(4, 4), "a.1.w": torch.ones(2)}, checkpoint_id=tmp_path / "saved", no_dist=True
    )
    held = shardkit.inspect(tmp_path / "saved", holdings=True).holdings
    assert (held.has_ranks, held.num_holders) == (False, 1)
    assert held.cells[held.holders[0].cells] == (0, 64, 8)
    hub = shardkit.inspect(model, holdings=True).holdings
    assert sum(hub.strips[0].nbytes) == hub.tensor_bytes


def test_what_is_too_much_is_merged_and_said(sharded, monkeypatch):
    monkeypatch.setattr(holdings, "MAX_TENSORS", 4)
    monkeypatch.setattr(holdings, "MAX_UNITS", 8)
    monkeypatch.setattr(holdings, "MAX_PIECES", 5)
    monkeypatch.setattr(holdings, "MAX_ROWS", 3)
    held = shardkit.inspect(sharded.output, holdings=True).holdings
    assert {tensor.name: tensor.count for tensor in held.tensors}["model.layers.*.up.weight"] == 3
    assert sum(tensor.count for tensor in held.tensors) == len(WEIGHTS)
    assert (len(held.holders), held.num_holders) == (3, 8)
    assert sum(not cut.files for cut in held.cuts) == len(held.cuts) - 1
    said = " ".join(held.merged)
    assert all(
        words in said for words in ("first 3 of 8 ranks", "8 tensors share 4 lines", "too many pieces")
    )


def test_records_that_are_too_many_become_runs():
    rows = [(at * 10, 8, f"t{at}") for at in range(holdings.MAX_RECORDS)]
    held = find_file_holdings([("a", 10 * len(rows), rows), ("b", 80, rows[:8])])
    first, second = held.strips
    assert len(first.starts) <= 4000
    assert sum(first.counts) == len(rows)
    assert first.starts[0] == 0
    assert first.starts[-1] + first.nbytes[-1] == 10 * (len(rows) - 1) + 8
    assert second.counts == (1,) * 8
    assert "drawn as one" in held.merged[0]
