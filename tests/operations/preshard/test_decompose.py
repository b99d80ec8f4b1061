"""Weights become factors: which bytes are written, by how many processes, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from zlib import crc32

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardkit
from shardkit.cli import preshard as preshard_command
from shardkit.core.factored import FACTORS, Target
from shardkit.errors import (
    IncompleteError,
    IntegrityError,
    LayoutError,
    MeshError,
    ResourceError,
    ShardkitError,
    SourceError,
    UsageError,
)
from shardkit.files import manifest, storage
from shardkit.files.shared import SharedRecords
from shardkit.operations.environment import computed_by
from shardkit.osft import compute
from shardkit.osft.plan import OsftPlan
from shardkit.osft.svd import Factors, factorise, svd_nbytes
from shardkit.osft.workers import FactorWorker
from tests.contents import contents
from tests.worlds.factors import WorkerHere

MakeHub = Callable[..., Path]
ATTENTION = "model.layers.{}.self_attn.{}_proj.weight"


def weights() -> dict[str, torch.Tensor]:
    """Weights of odd kinds, under the names of a Llama without a config."""
    draw = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    return {
        ATTENTION.format(0, "q"): random(24, 16).bfloat16(),  # tall
        ATTENTION.format(0, "k"): random(8, 36),  # wide, and 36 columns are cut by 2 and 3
        ATTENTION.format(0, "v"): torch.zeros(6, 10),
        ATTENTION.format(0, "o"): random(20, 3) @ random(3, 17),  # of rank 3
        ATTENTION.format(1, "q"): random(13, 13).half(),
        "model.layers.0.self_attn.q_proj.bias": random(24).bfloat16(),
        "model.layers.1.norm.weight": random(13),
    }


@pytest.fixture
def source(make_hub: MakeHub) -> Path:
    return make_hub(weights())


def load(directory: Path) -> dict[str, torch.Tensor]:
    found = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    state = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in found.items()}
    dcp.load(state, checkpoint_id=directory)
    return state


def preshard(source: Path, output: Path, **options: Any) -> shardkit.PreshardResult:
    return shardkit.preshard(source, output, **{"world_size": 2, "osft": 0.3, **options})


@pytest.mark.usefixtures("fast_factors")
@pytest.mark.parametrize("mesh", ["dp_shard=1", "dp_shard=3", "dp_replicate=2,dp_shard=2"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_torch_reads_the_factors_that_factorise_computes(
    mesh: str, source: Path, tmp_path: Path
) -> None:
    result = preshard(source, tmp_path / "out", world_size=None, mesh=mesh)
    held, state = weights(), load(tmp_path / "out")
    said = manifest.read(str(tmp_path / "out"))
    assert isinstance(said, manifest.Presharded)
    assert said.osft is not None
    assert said.osft.ratio == 0.3
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert [name for name in held if name in state] == list(held)[5:]
    for path, module in said.osft.modules.items():
        weight = held[f"{path}.weight"]
        assert tuple(weight.shape) == module.shape
        target = Target(path=path, rows=weight.shape[0], columns=weight.shape[1], rank=module.rank)
        expected = factorise(weight, target)
        assert all(torch.equal(state[f"{path}.{name}"], expected.tensors[name]) for name in FACTORS)
        assert (module.error, module.orthogonality) == (expected.error, expected.orthogonality)
        assert module.algorithm == expected.algorithm
        assert module.error < 1e-6 > module.orthogonality
    assert len(said.osft.modules) == 5
    assert result.osft is not None
    assert result.osft.max_error == max(module.error or 0 for module in said.osft.modules.values())
    assert result.read_bytes == sum(tensor.nbytes for tensor in held.values())
    assert said.tensors[f"{ATTENTION.format(0, 'q')[:-7]}.osft_U_high"].source.dtype == "bfloat16"
    assert shardkit.verify(tmp_path / "out", full=True).ok


def test_any_number_of_processes_gives_the_same_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preshard(source, tmp_path / "two", jobs=2)
    monkeypatch.setattr(compute, "FactorWorker", WorkerHere)
    preshard(source, tmp_path / "one", jobs=1)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert not list(tmp_path.glob(".*"))


def test_a_note_is_written_only_once_its_record_is_on_the_disk(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk, named, noted = dict[str, bytes](), dict[str, bytes](), list[int]()
    sync_file, publish, write_note = storage.sync_file, SharedRecords.publish, SharedRecords.write_note

    def sync(path: str) -> None:
        on_disk[path] = Path(path).read_bytes()
        sync_file(path)

    def name(self: SharedRecords, path: str, record: str, crc: int) -> None:
        assert crc32(on_disk[path]) == crc
        publish(self, path, record, crc)
        named[record.partition("-")[0]] = Path(self.path, record).read_bytes()
        assert named[record.partition("-")[0]] == on_disk[path]

    def note(self: SharedRecords, work: str, number: int, content: bytes) -> bool:
        assert str(number) in named
        noted.append(number)
        return write_note(self, work, number, content)

    monkeypatch.setattr(storage, "sync_file", sync)
    monkeypatch.setattr(SharedRecords, "publish", name)
    monkeypatch.setattr(SharedRecords, "write_note", note)
    preshard(source, tmp_path / "out", jobs=2)
    assert sorted(noted) == [0, 1, 2, 3, 4]


def test_a_disk_that_fails_is_told(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(path: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(storage, "sync_file", sync)
    with pytest.raises(ResourceError, match=r"cannot write .*/factors/\d: Input/output error"):
        preshard(source, tmp_path / "out", jobs=2)
    assert not list(tmp_path.glob("out*"))


class Killed(FactorWorker):
    """Dies as soon as it is asked for its second weight, as a process does when memory runs out."""

    def ask(self, request: dict[str, Any], stop: threading.Event) -> dict[str, Any]:
        if "layers.0.self_attn.k_proj" in request["path"]:
            os.kill(self._process.pid, signal.SIGKILL)
        return super().ask(request, stop)


class Counting(WorkerHere):
    asked: ClassVar[list[str]] = []

    def ask(self, request: dict[str, Any], stop: threading.Event) -> dict[str, Any]:
        self.asked.append(request["path"])
        return super().ask(request, stop)


def test_a_killed_process_is_told_and_what_it_had_computed_is_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(compute, "FactorWorker", Killed)
        with pytest.raises(IncompleteError, match=r"k_proj ended by signal 9") as caught:
            preshard(source, out, jobs=1)
    assert "resume" in str(caught.value.hint)
    assert not out.exists()
    Counting.asked = []
    monkeypatch.setattr(compute, "FactorWorker", Counting)
    resumed = preshard(source, out, jobs=1)
    assert resumed.osft is not None
    assert resumed.osft.num_resumed == 3
    again, Counting.asked = Counting.asked, []
    preshard(source, tmp_path / "whole", jobs=1)
    assert contents(out) == contents(tmp_path / "whole")
    assert (
        Counting.asked == [path for path in Counting.asked if path not in again] + again
    )  # the costliest first
    assert len(again) == 2
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("is_damaged", "num_left"), [(False, 2), (True, 3)])
def test_what_an_interrupted_run_left_is_compared_with_its_notes(
    is_damaged: bool, num_left: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Counting):
        def ask(self, request: dict[str, Any], stop: threading.Event) -> dict[str, Any]:
            if len(self.asked) == 3:
                raise KeyboardInterrupt
            return super().ask(request, stop)

    Counting.asked = []
    monkeypatch.setattr(compute, "FactorWorker", Interrupted)
    with pytest.raises(shardkit.Interrupted):
        preshard(source, tmp_path / "out", jobs=1)
    (left,) = (path for path in tmp_path.glob(".out.shardkit-*") if path.is_dir())
    damaged = min(left.glob("factors/*-*"))
    if is_damaged:
        damaged.write_bytes(bytes(damaged.stat().st_size))
    monkeypatch.setattr(compute, "FactorWorker", Counting)
    Counting.asked = []
    preshard(source, tmp_path / "out", jobs=1)
    assert len(Counting.asked) == num_left
    preshard(source, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("fast_factors")
def test_another_cpu_begins_anew(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "FactorWorker", Killed)
    with pytest.raises(IncompleteError):
        preshard(source, tmp_path / "out", jobs=1)
    monkeypatch.setattr("shardkit.operations.preshard.job.computed_by", lambda: {"cpu": "another"})
    monkeypatch.setattr(compute, "FactorWorker", Counting)
    Counting.asked = []
    preshard(source, tmp_path / "out")
    assert len(Counting.asked) == 5
    assert {"torch", "cpu"} <= computed_by().keys()


@pytest.mark.usefixtures("fast_factors")
@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_is_factored_is_compared_with_its_checksums(
    is_damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "model"
    source.mkdir()
    torch.save(weights(), source / "pytorch_model.bin")
    if is_damaged:
        data = bytearray((source / "pytorch_model.bin").read_bytes())
        place = data.find(weights()[ATTENTION.format(0, "k")].numpy().tobytes())
        data[place + 100] ^= 1
        (source / "pytorch_model.bin").write_bytes(data)
        with pytest.raises(IntegrityError, match="does not have the CRC-32") as caught:
            preshard(source, tmp_path / "out")
        assert ATTENTION.format(0, "k") in str(caught.value)
        return
    whole = preshard(source, tmp_path / "whole")
    assert (whole.checked_bytes, whole.unchecked) == (whole.read_bytes, ())
    with monkeypatch.context() as patch:
        patch.setattr(compute, "FactorWorker", Killed)
        with pytest.raises(IncompleteError):
            preshard(source, tmp_path / "out", jobs=1)
    resumed = preshard(source, tmp_path / "out", jobs=1)
    assert resumed.checked_bytes == whole.checked_bytes  # what the first run read counts
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("fast_factors")
def test_values_that_are_not_finite_are_refused_by_name(make_hub: MakeHub, tmp_path: Path) -> None:
    held = weights()
    held[ATTENTION.format(1, "q")][3, 4] = torch.nan
    with pytest.raises(SourceError, match=r"layers\.1\.self_attn\.q_proj\.weight: has values"):
        preshard(make_hub(held), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.usefixtures("fast_factors")
def test_factors_worse_than_promised_are_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad(*args: Any) -> Factors:
        return replace(factorise(*args), orthogonality=2e-6)

    monkeypatch.setattr("shardkit.osft.child.factorise", bad)
    with pytest.raises(IntegrityError, match="is allowed"):
        preshard(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    preshard(source, tmp_path / "out", osft=OsftPlan(ratio=0.3, svd="fp32"))


@pytest.mark.usefixtures("fast_factors")
@pytest.mark.parametrize(
    ("options", "dense", "said"),
    [
        ({}, "float32", "float32"),
        ({"dtype": "bf16"}, "bfloat16", "bfloat16"),
        ({"dtype": "keep"}, "bfloat16", "bfloat16"),
        ({"dtype": "bf16", "dtype_rules": ["*.bias=fp32"]}, "float32", "float32"),
    ],
)
def test_factors_are_float32_whatever_the_dtype(
    options: dict[str, Any], dense: str, said: str, source: Path, tmp_path: Path
) -> None:
    preshard(source, tmp_path / "out", **options)
    found = manifest.read(str(tmp_path / "out"))
    assert isinstance(found, manifest.Presharded)
    assert {each.dtype for name, each in found.tensors.items() if "osft_" in name} == {"float32"}
    assert found.tensors["model.layers.0.self_attn.q_proj.bias"].dtype == dense
    assert found.osft is not None
    assert found.osft.dense_dtype == said


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_source_of_factors_is_stored_as_it_is_or_refused(make_hub: MakeHub, tmp_path: Path) -> None:
    path = "model.layers.0.self_attn.q_proj"
    tensors = factorise(torch.eye(4), Target(path=path, rows=4, columns=4, rank=2)).tensors
    state = {f"{path}.{name}": tensor for name, tensor in tensors.items()}
    source = make_hub(state)
    with pytest.raises(UsageError, match=f"1 weight as factors of OSFT: {path}"):
        shardkit.preshard(source, tmp_path / "again", world_size=2, osft=0.5)
    shardkit.preshard(source, tmp_path / "out", world_size=2)
    read = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    dcp.load(read, checkpoint_id=tmp_path / "out")
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())
    cut = make_hub({f"{path}.{name}": tensors[name] for name in FACTORS[1:]}, name="cut")
    with pytest.raises(LayoutError, match="are not complete"):
        shardkit.preshard(cut, tmp_path / "none", world_size=2)
    (source / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    with pytest.raises(UsageError, match="layout='declared'"):
        shardkit.preshard(source, tmp_path / "more", world_size=2)


def test_a_dry_run_says_what_it_takes(source: Path, tmp_path: Path) -> None:
    plan = OsftPlan(ratio=0.5, targets="auto,!*.1.*", ranks={"*.k_proj": 3})
    result = preshard(source, tmp_path / "out", osft=plan, dry_run=True, jobs=8)
    assert result.osft is not None
    ranks = {kind.name.rpartition(".")[2]: kind.rank for kind in result.osft.kinds}
    assert ranks == {"q_proj": 8, "k_proj": 3, "v_proj": 3, "o_proj": 8}
    assert result.osft.num_workers == 4
    assert result.osft.max_error is None
    room = sum(kind.factor_bytes for kind in result.osft.kinds)
    assert room <= result.osft.record_bytes <= room + 4 * 6 * storage.BLOCK, "records lie beside the output"
    assert "left dense" in " ".join(result.notes)
    assert json.dumps(result.to_json()["osft"])
    assert "model.layers.*.self_attn.q_proj" in {kind.name for kind in result.osft.kinds}
    assert not (tmp_path / "out").exists()


def test_the_disk_has_to_hold_the_records_too(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    would = preshard(source, tmp_path / "out", dry_run=True)
    assert would.osft is not None
    assert any(line.split()[:2] == ["local", "disk"] for line in preshard_command.render(would))
    usage, room = storage.disk_usage(str(tmp_path)), would.written_bytes + would.osft.record_bytes
    monkeypatch.setattr(storage, "disk_usage", lambda _: usage._replace(free=room - 1))
    for is_dry in (True, False):
        with pytest.raises(ResourceError, match="No space left for"):
            preshard(source, tmp_path / "out", dry_run=is_dry)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_the_memory_bounds_the_processes(tmp_path: Path) -> None:
    targets = [Target(path=str(size), rows=size, columns=size, rank=8) for size in (256, 512)]
    largest = svd_nbytes(targets[1])
    assert compute.choose_num_workers(targets * 9, 8, 3 * largest + 1) == 3
    assert compute.choose_num_workers(targets * 9, 8, 3 * largest + 1, largest) == 2
    assert compute.choose_num_workers(targets, 8, 9 * largest) == 2  # there are no more targets
    assert 1 <= compute.choose_num_workers(targets * 9, 8, None) <= 8
    with pytest.raises(UsageError, match=r"too little for the factors of 512: they take"):
        compute.choose_num_workers(targets, 8, largest - 1)
    with pytest.raises(UsageError, match=r"and 4\.0 MiB on their way into a store"):
        compute.choose_num_workers(targets, 8, largest, 4 << 20)


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"osft": 1.0}, UsageError, "full fine-tuning"),
        ({"osft": 0.0}, UsageError, "nothing would be trained"),
        ({"osft": 0.95}, LayoutError, "none would be kept"),
        ({"mesh": "dp_shard=2,tp=2", "world_size": None}, MeshError, "not cut over tp"),
        ({"profile": "transformers"}, UsageError, "has none for factors"),
        ({"profile": "torchtitan"}, UsageError, "has none for factors"),
        ({"profile": "verl"}, UsageError, "has none for factors"),
        ({"keys": "torchtitan-llama3"}, UsageError, "keys"),
        ({"osft": OsftPlan(ratio=0.3, targets="*.nothing")}, UsageError, "matches no weight"),
        ({"dtype_rules": ["*osft_U_high=bf16"]}, UsageError, "matches no floating tensor"),
    ],
)
def test_what_cannot_be_is_refused(
    options: dict[str, Any], kind: type[ShardkitError], match: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(kind) as caught:
        preshard(source, tmp_path / "out", **options)
    assert match in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.usefixtures("fast_factors")
def test_a_profile_has_factors_below_its_root(source: Path, tmp_path: Path) -> None:
    preshard(source, tmp_path / "out", profile="lightning")
    found = manifest.read(str(tmp_path / "out"))
    assert isinstance(found, manifest.Presharded)
    assert found.osft is not None
    assert "model.layers.0.self_attn.q_proj" in found.osft.modules
    assert "model.model.model.layers.0.self_attn.q_proj.osft_S_high" in found.tensors
    assert all(each.error is not None for each in found.osft.modules.values())
