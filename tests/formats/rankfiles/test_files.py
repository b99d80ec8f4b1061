"""Files of ranks whose copies of a tensor differ: one is taken, which is said, and no data is read to see it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardkit
from tests.worlds.ranks import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.prove]

three = Ranks(__name__, 3)
WHOLE = torch.arange(24.0).reshape(6, 4)
VERL, ACCELERATE = "model_world_size_3_rank_{}.pt", "pytorch_model_fsdp_0_rank{}.bin"
State = dict[str, torch.Tensor]


def experts(rank: int, mesh: DeviceMesh) -> State:
    """Each rank has its own, outside of FSDP."""
    return {f"layers.{layer}.experts": torch.full((2, 4), 10.0 * rank + layer) for layer in range(3)}


def statistics(rank: int, mesh: DeviceMesh) -> State:
    norm = torch.nn.BatchNorm1d(4)
    norm(torch.full((2, 4), float(rank)))
    return {f"norm.{name}": tensor for name, tensor in norm.state_dict().items()}


def views(rank: int, mesh: DeviceMesh) -> State:
    flat = torch.arange(6.0)
    flat[5] += rank
    return {"first": flat[:3], "second": flat[3:]}


EQUAL: dict[str, Callable[[int, DeviceMesh], State]] = {
    "plain": lambda rank, mesh: {"bias": torch.ones(3), "scale": torch.tensor(2.0), "empty": torch.ones(0)},
    "replicated": lambda rank, mesh: {"bias": distribute_tensor(torch.ones(3), mesh, [Replicate()])},
    "strided": lambda rank, mesh: {
        "view": torch.arange(9.0)[3:6],
        "column": torch.arange(6.0).reshape(2, 3).T,
    },
}
CASES = {
    **EQUAL,
    "experts": experts,
    "drifted": lambda rank, mesh: {
        "bias": DTensor.from_local(torch.ones(3) + (rank == 2), mesh, [Replicate()])
    },
    "statistics": statistics,
    "views": views,
    "unread": lambda rank, mesh: {"bias": torch.full((3,), 0.3)},
}


def save(directory: Path, names: str, make: Callable[[int, DeviceMesh], State]) -> None:
    """Save what a rank has, as verl and others do: a file of torch.save for each."""
    directory.mkdir(exist_ok=True)
    mesh, rank = init_device_mesh("cpu", (3,)), dist.get_rank()
    torch.save(
        {"weight": distribute_tensor(WHOLE, mesh, [Shard(0)]), **make(rank, mesh)},
        directory / names.format(rank),
    )


@three.test_each(CASES.keys())
def test_three_ranks_save(case: str, out: Path) -> None:
    save(out / case, VERL, CASES[case])


@three.test
def test_three_ranks_save_in_other_ways(out: Path) -> None:
    save(out / "accelerate", ACCELERATE, experts)
    mesh, rank = init_device_mesh("cpu", (3,)), dist.get_rank()
    plain = {**experts(rank, mesh), **statistics(rank, mesh), **EQUAL["strided"](rank, mesh)}
    state = {"weight": distribute_tensor(WHOLE, mesh, [Shard(0)]), **plain}
    states = {"model": state, "data": {"order": torch.full((4,), rank)}}
    dcp.save(states, checkpoint_id=out / "rank-local", use_collectives=False)
    was = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        save(out / "unrecorded", VERL, experts)
    finally:
        torch.serialization.set_crc32_options(was)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return three.folder(tmp_path_factory)


@pytest.mark.parametrize(("case", "names"), [("experts", VERL), ("accelerate", ACCELERATE)])
def test_tensors_that_differ_are_named_with_rank_and_file(
    out: Path, tmp_path: Path, case: str, names: str
) -> None:
    path = out / case
    told = f"rank 0's ({names.format(0)}) is used, rank 1's ({names.format(1)}) and 1 more file differs"
    written = (
        shardkit.consolidate(path, tmp_path / "hub"),
        shardkit.reshard(path, tmp_path / "two", world_size=2),
        shardkit.inspect(path),
    )
    for result in written:
        (warning,) = [line for line in result.warnings if "differ" in line]
        assert warning.startswith("3 tensors differ between the files of ranks")
        assert f"layers.{{0..2}}.experts: {told}" in warning
    checked = shardkit.verify(path)
    (problem,) = checked.problems
    assert problem.details == tuple(f"layers.{layer}.experts: {told}" for layer in range(3))
    assert checked.bring_again == ()


def test_ranks_with_metadata_of_their_own_are_compared_too(out: Path, tmp_path: Path) -> None:
    path, told = (
        out / "rank-local",
        "rank 0's (__0_0.distcp) is used, rank 1's (__1_0.distcp) and 1 more file differs",
    )
    model = shardkit.consolidate(path, tmp_path / "hub")
    for result in (model, shardkit.reshard(path, tmp_path / "two", world_size=2), shardkit.inspect(path)):
        (warning,) = [line for line in result.warnings if "differ" in line]
        assert f"model.layers.{{0..2}}.experts: {told}" in warning
        assert ("data.order" in warning) == (result is not model)
        assert any("norm.running_mean" in note for note in result.notes)
    checked = shardkit.verify(path)
    assert len(checked.problems) == 1
    assert checked.warnings == ()  # the copies are no bytes that nothing places


@pytest.mark.parametrize("case", EQUAL)
def test_equal_ones_are_silent(out: Path, tmp_path: Path, case: str) -> None:
    result = shardkit.verify(out / case, full=True)
    assert (result.problems, result.warnings, result.notes) == ((), (), ())
    written = shardkit.reshard(out / case, tmp_path / "two", world_size=2)
    assert (written.warnings, written.notes) == ((), ())


def test_a_replicated_dtensor_that_has_drifted(out: Path) -> None:
    assert shardkit.verify(out / "drifted").problems[0].details == (
        "bias: rank 0's (model_world_size_3_rank_0.pt) is used, rank 2's (model_world_size_3_rank_2.pt) differs",
    )


def test_statistics_of_batches_are_a_note(out: Path, tmp_path: Path) -> None:
    result = shardkit.verify(out / "statistics")
    assert (result.problems, result.warnings) == ((), ())
    assert any(note.startswith("1 buffer differs between the files of ranks") for note in result.notes)
    written = shardkit.reshard(out / "statistics", tmp_path / "two", world_size=2)
    assert written.warnings == ()
    assert any("norm.running_mean" in note for note in written.notes)


@pytest.mark.parametrize(("case", "number"), [("unrecorded", 3), ("views", 2)])
def test_what_has_no_checksum_of_its_own_is_not_compared(out: Path, case: str, number: int) -> None:
    result = shardkit.verify(out / case)
    assert result.problems == ()
    assert any(f"copies of {number} tensors" in note and "were not compared" in note for note in result.notes)


def test_no_data_is_read(out: Path) -> None:
    """Only the zips' directories are: other bytes under the same checksum are not seen."""
    file = out / "unread" / VERL.format(1)
    data = bytearray(file.read_bytes())
    data[data.index(torch.full((3,), 0.3).numpy().tobytes())] ^= 1
    file.write_bytes(data)
    assert shardkit.verify(out / "unread").problems == ()
