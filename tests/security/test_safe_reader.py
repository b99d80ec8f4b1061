"""SafeReader: what stock `dcp.load` gives through it, and what it refuses without running any of it."""

from __future__ import annotations

import io
import os
import pickle
import sys
import time
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardkit
from shardkit.errors import IntegrityError, SourceError
from shardkit.training.extras.safe_reader import vet_entry
from tests.formats.dcp.samples import quiet
from tests.security import dcp_cases, payloads
from tests.security.case import REFUSED
from tests.worlds.ranks import Ranks

W, STEP = "model.w", "step"
STATE = {
    "model.w": torch.arange(24.0).reshape(6, 4),
    "model.b": torch.arange(5).bfloat16(),
    "step": 7,
    "opt": {"lr": 0.1, "betas": (0.9, 0.99)},
}


def empty() -> dict[str, Any]:
    return {
        "model.w": torch.zeros(6, 4),
        "model.b": torch.zeros(5).bfloat16(),
        "step": 0,
        "opt": {"lr": 0.0, "betas": ()},
    }


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDKIT_CANARY", str(tmp_path / "canary"))
    with quiet():
        dcp.save(dict(STATE), storage_writer=dcp.FileSystemWriter(tmp_path / "in"), no_dist=True)
    return tmp_path / "in"


def load(directory: Path, state: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Stock `dcp.load` with its own planner; raises what our reader raised."""
    state = empty() if state is None else state
    with quiet():
        try:
            dcp.load(state, storage_reader=shardkit.SafeReader(directory, **options), no_dist=True)
        except dcp.api.CheckpointException as failed:
            raise failed.failures[0][0] from None
    return state


_RUNS = ("os.system", "subprocess.Popen")
_LOOKED_UP = ("posix", "os", "builtins", "subprocess")


class _Recorder:
    """An audit hook. It cannot be taken off again, and each makes every event slower: so there is one."""

    events: list[str] | None = None

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.events is None:
            return
        if event in _RUNS:
            self.events.append(event)
        elif event == "pickle.find_class" and args[0] in _LOOKED_UP:
            self.events.append(f"{args[0]}.{args[1]}")


@pytest.fixture(scope="module")
def recorder() -> _Recorder:
    made = _Recorder()
    sys.addaudithook(made)
    return made


@pytest.fixture
def seen(recorder: _Recorder) -> Iterator[list[str]]:
    """Names of what was looked up by an unpickler, or run by one."""
    recorder.events = []
    yield recorder.events
    recorder.events = None


def test_the_recorder_sees_what_unpickling_does(saved: Path, tmp_path: Path, seen: list[str]) -> None:
    pickle.loads(payloads.bare("system"))
    assert seen == ["posix.system", "os.system"]
    assert (tmp_path / "canary").exists()


two = Ranks(__name__, 2)


def trained(mesh: DeviceMesh, seed: int) -> dict[str, Any]:
    """An FSDP2 model and its AdamW after a step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (seed + 1), betas=(0.8, 0.9 + seed / 100))
    model(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    scheduler = {"last_lr": [0.1 * seed], "name": "cosine", "milestones": {3: seed}, "empty": None}
    rng = torch.get_rng_state()
    return {
        "model": model_state,
        "optim": optimizer_state,
        "scheduler": scheduler,
        "step": seed,
        "rng": rng,
        "blob": (seed, b"\0\xff", {1, seed}, torch.Size([seed, 2]), torch.bfloat16, torch.arange(seed + 3)),
    }


def placed(mesh: DeviceMesh, seed: int) -> dict[str, Any]:
    """DTensors that are cut along either dim, and what torch stores in other ways."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(9, 6, generator=generator)
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole.bfloat16(), mesh, [Shard(1)]),
        "whole": distribute_tensor(whole * 2, mesh, [Replicate()]),
        "strided": whole.t() if seed else torch.zeros(6, 9),
        "scalar": torch.tensor(seed),
        "empty": torch.zeros(0, 3),
        "bool": whole > 0,
        "nested": {"list": [whole[0] + 1, {"a": seed}], "tuple": (seed, "x")},
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, DTensor):
        return isinstance(b, DTensor) and a.placements == b.placements and same(a.to_local(), b.to_local())
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@two.test_each(
    {
        "trained-async": (trained, "async"),
        "trained-zstd": (trained, "zstd"),
        "placed-plain": (placed, "plain"),
        "placed-zstd": (placed, "zstd"),
    }
)
def test_equals_torchs_reader(
    case: tuple[Callable[[DeviceMesh, int], dict[str, Any]], str], out: Path
) -> None:
    make, way = case
    path, mesh = str(out / f"{make.__name__}-{way}"), init_device_mesh("cpu", (2,))
    with quiet():
        if way == "async":
            dcp.async_save(make(mesh, 1), checkpoint_id=path).result()
        else:
            extensions = [ZStandard()] if way == "zstd" else None
            dcp.save(make(mesh, 1), storage_writer=dcp.FileSystemWriter(path, _extensions=extensions))
        dist.barrier()
        ours, stock = make(mesh, 0), make(mesh, 0)
        dcp.load(stock, storage_reader=dcp.FileSystemReader(path))
        dcp.load(ours, storage_reader=shardkit.SafeReader(path, check_crc=way != "async"))
    assert same(ours, stock)
    assert not same(ours, make(mesh, 0))


@two.test
def test_equals_torchs_reader_where_each_rank_saved_for_itself(out: Path) -> None:
    path, mesh = str(out / "rank-local"), init_device_mesh("cpu", (2,))
    with quiet():
        dcp.save(placed(mesh, 1), checkpoint_id=path, use_collectives=False)
        dist.barrier()
        ours, stock = placed(mesh, 0), placed(mesh, 0)
        dcp.load(stock, checkpoint_id=path)
        dcp.load(ours, storage_reader=shardkit.SafeReader(path))
    assert same(ours, stock)
    assert not same(ours, placed(mesh, 0))


@pytest.mark.dist
def test_one_process_loads_whole_what_two_ranks_saved(tmp_path_factory: pytest.TempPathFactory) -> None:
    saved = two.folder(tmp_path_factory) / "placed-plain"
    ours, stock = (
        {"rows": torch.zeros(9, 6), "columns": torch.zeros(9, 6), "scalar": torch.zeros((), dtype=int)}
        for _ in "ab"
    )
    with quiet():
        dcp.load(stock, storage_reader=dcp.FileSystemReader(saved), no_dist=True)
    load(saved, ours)
    for name, tensor in stock.items():
        assert torch.equal(tensor, ours[name])
        assert tensor.any()


def test_one_process_and_values_of_all_kinds(saved: Path) -> None:
    state = load(saved, check_crc=True)
    assert torch.equal(state["model.w"], STATE["model.w"])
    assert torch.equal(state["model.b"], STATE["model.b"])
    assert (state["step"], state["opt"]) == (7, {"lr": 0.1, "betas": (0.9, 0.99)})
    assert type(state["opt"]["betas"]) is tuple


def test_other_planners_targets_and_dtypes(saved: Path) -> None:
    built: dict[str, Any] = {}
    reader = shardkit.SafeReader(saved)
    with quiet():
        dcp.state_dict_loader._load_state_dict(
            built, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True
        )
    assert torch.equal(built["model.w"], STATE["model.w"])
    assert built["opt"] == STATE["opt"]
    strided = torch.zeros(4, 6, dtype=torch.float64).t()
    state = load(saved, {"model.w": strided})
    assert torch.equal(state["model.w"], STATE["model.w"].double())
    with quiet():
        dcp.load(
            state, checkpoint_id=str(saved), storage_reader=shardkit.SafeReader("elsewhere"), no_dist=True
        )


CASES = {case.id: case for case in dcp_cases.cases() if case.sample == "dcp" and case.expect == REFUSED}


@pytest.mark.parametrize("name", CASES)
def test_refuses_the_corpus(name: str, saved: Path, tmp_path: Path, seen: list[str]) -> None:
    case = CASES[name]
    case.change(saved)
    seen.clear()
    before, start = os.times(), time.monotonic()
    with pytest.raises((SourceError, AssertionError)) as caught:
        load(saved, {"model.w": torch.zeros(6, 4)})
    assert any(mention in str(caught.value) for mention in case.mention)
    assert not (tmp_path / "canary").exists()
    assert seen == []
    assert os.times().user - before.user < 5 or time.monotonic() - start < 5


@pytest.mark.parametrize("name", payloads.CALLS)
def test_byte_entries_are_not_executed(name: str, saved: Path, tmp_path: Path, seen: list[str]) -> None:
    """With torch's own planner, which would: it gets nothing."""
    dcp_cases.with_record(STEP, dcp_cases.with_pickle(payloads.bare(name)))(saved)
    seen.clear()
    with pytest.raises(SourceError, match=r"^step"):
        load(saved)
    assert seen == []
    assert not (tmp_path / "canary").exists()
    assert load(saved, {"model.w": torch.zeros(6, 4)})["model.w"].any()


@pytest.mark.parametrize("name", payloads.BOMBS)
def test_byte_entries_cost_little(name: str, saved: Path) -> None:
    start = time.process_time()
    dcp_cases.with_record(STEP, dcp_cases.with_pickle(payloads.BOMBS[name]))(saved)
    if name == "memo":  # None, where C's unpickler would first make room for 2^28 others
        assert load(saved)["step"] is None
    else:
        with pytest.raises(SourceError, match=r"^step"):
            load(saved)
    assert time.process_time() - start < 10


def test_compressed_byte_entries_do_not_fill_memory(saved: Path) -> None:
    compressed = ["stream.zstd/1"]
    dcp_cases.with_record(STEP, dcp_cases.zstd(dcp_cases.saved(9)), compressed)(saved)
    assert load(saved)["step"] == 9
    dcp_cases.with_record(STEP, dcp_cases.zstd(bytes(1 << 28)), compressed)(saved)
    with pytest.raises(IntegrityError, match="more than the 67108864"):
        load(saved)


class Custom:
    """A class of the program's own."""

    def __init__(self) -> None:
        self.x = 1


def test_all_refused_entries_are_listed_and_classes_can_be_trusted(saved: Path) -> None:
    for fqn in (STEP, "opt.lr"):
        dcp_cases.with_record(fqn, dcp_cases.saved(Custom()))(saved)
    with pytest.raises(SourceError, match="2 byte entries") as caught:
        load(saved)
    assert {"step", "opt.lr"} <= {word for line in caught.value.problems for word in line.split()}
    assert f"{__name__}.Custom" in str(caught.value)
    with torch.serialization.safe_globals([Custom]):
        assert load(saved)["step"].x == 1
    with pytest.raises(SourceError, match="2 byte entries"):
        load(saved)


PLAIN: list[Any] = [
    None, True, 7, 1 << 70, 2.5, "text", b"\0\xff", bytearray(b"ab"), (1, ("a",)), [1, [2]], {"a": 1, 2: 3, 2.5: None},
    {1, 2}, 3j, OrderedDict(b=1, a=2), Counter("aab"), torch.Size([2, 3]), torch.float8_e4m3fn, torch.device("cpu"),
    torch.strided, [torch.arange(3)] * 2,
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_come_out_as_they_were(value: Any) -> None:
    found = torch.load(vet_entry(memoryview(dcp_cases.saved(value)), "x"), weights_only=False)
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def put(data: bytes, name: str, content: bytes) -> bytes:
    """Add an entry to a zip of torch.save."""
    out = io.BytesIO(data)
    with zipfile.ZipFile(out, "a") as archive:
        archive.writestr(name, content)
    return out.getvalue()


def test_entries_that_another_zip_reader_might_take_are_refused() -> None:
    """torch finds names whatever their case is."""
    data = dcp_cases.with_pickle(dcp_cases.good_pickle(3))
    for name in ("archive/DATA.PKL", "Archive/data.pkl", "archive/Data/0", "archive/code/a.py"):
        with pytest.raises(SourceError, match="unknown or given twice"):
            vet_entry(memoryview(put(data, name, payloads.bare("system"))), "x")


def test_a_bit_flip_is_seen_unless_it_may_pass(saved: Path) -> None:
    path, start, length = dcp_cases.record_of(saved, W)
    data = bytearray(path.read_bytes())
    at = data.index(STATE["model.w"].numpy().tobytes(), start, start + length)
    data[at + 5] ^= 1
    path.write_bytes(data)
    assert not torch.equal(load(saved, check_source=False)["model.w"], STATE["model.w"])
    for options in ({}, {"check_crc": True}):
        with pytest.raises(IntegrityError, match=r"CRC-32") as caught:
            load(saved, **options)
        assert W in str(caught.value)


def test_only_the_records_that_are_needed_are_opened(saved: Path) -> None:
    dcp_cases.with_record("model.b", b"damaged" * 50)(saved)
    assert load(saved, {"model.w": torch.zeros(6, 4)})["model.w"].any()
    with pytest.raises(SourceError, match=r"1 records cannot be read") as caught:
        load(saved)
    assert "model.b" in str(caught.value)


def test_names_that_are_not_there(saved: Path) -> None:
    def drop(content: Any) -> None:
        del content.storage_data[MetadataIndex(STEP)]

    dcp_cases.alter(drop)(saved)
    with pytest.raises(SourceError, match=r"step: .*no bytes"):
        load(saved)
    with pytest.raises(RuntimeError, match="other"):
        load(saved, {"other": torch.zeros(2)})


def test_planner_paths_make_no_long_lists(saved: Path) -> None:
    def stretch(content: Any) -> None:
        for number in range(5):
            content.state_dict_metadata[f"x{number}"] = BytesStorageMetadata()
            content.planner_data[f"x{number}"] = (f"x{number}", (1 << 24) - 1)

    dcp_cases.alter(stretch)(saved)
    with pytest.raises(SourceError, match="planner_data make lists of 83886080 entries"):
        shardkit.SafeReader(saved).read_metadata()


def test_rank_local_metadata_never_stands_in_for_a_damaged_one(saved: Path) -> None:
    whole = (saved / ".metadata").read_bytes()
    (saved / "__0.metadata").write_bytes(whole)
    (saved / ".metadata").write_bytes(whole[:-50])
    with pytest.raises((SourceError, AssertionError), match=r"\.metadata is damaged"):
        load(saved)
    (saved / ".metadata").unlink()
    assert load(saved)["step"] == 7
    assert (
        pickle.loads(whole).state_dict_metadata.keys()
        == shardkit.SafeReader(saved).read_metadata().state_dict_metadata.keys()
    )


def test_is_a_storage_reader_like_torchs(saved: Path) -> None:
    reader = shardkit.SafeReader(saved)
    assert isinstance(reader, dcp.StorageReader)
    assert reader.checkpoint_id == str(saved)
    assert shardkit.SafeReader.validate_checkpoint_id(saved)
    reader.reset("elsewhere")
    assert reader.checkpoint_id == "elsewhere"
    with pytest.raises(SourceError, match="elsewhere"):
        reader.read_metadata()
