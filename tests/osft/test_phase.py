"""Factors that parts compute: the files are those of one process, whoever computed what, and whatever was lost."""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar
from zlib import crc32

import pytest
import torch

import shardkit
from shardkit.core.factored import FACTORS
from shardkit.errors import IncompleteError, IntegrityError, UsageError
from shardkit.files import storage
from shardkit.operations.parts import divided
from shardkit.osft import compute
from shardkit.osft.plan import OsftPlan
from shardkit.osft.workers import FactorWorker
from tests.contents import contents
from tests.worlds.factors import Counting, WorkerHere

MakeHub = Callable[..., Path]
NAMES = ("0.self_attn.q", "0.self_attn.k", "0.self_attn.v", "0.self_attn.o", "1.self_attn.q")
COSTLIEST = "model.layers.0.self_attn.o_proj"


def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(7)
    shapes = ((24, 16), (8, 36), (6, 10), (20, 17), (13, 13))
    found = {
        f"model.layers.{name}_proj.weight": torch.randn(shape, generator=draw)
        for name, shape in zip(NAMES, shapes, strict=True)
    }
    found["model.layers.0.self_attn.v_proj.weight"].zero_()
    return {**found, "model.norm.weight": torch.randn(13, generator=draw)}


@pytest.fixture
def source(make_hub: MakeHub) -> Path:
    return make_hub(weights())


def preshard(source: Path, output: Path, part: str | None = None, **options: Any) -> shardkit.PreshardResult:
    return shardkit.preshard(source, output, part=part, **{"world_size": 2, "osft": 0.3, **options})


def staging(directory: Path) -> Path:
    (left,) = directory.glob(".out.shardkit-parts-*")
    return left


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The weights that are computed, in their order."""
    monkeypatch.setattr(compute, "FactorWorker", Counting)
    Counting.asked = []
    return Counting.asked


@pytest.mark.usefixtures("fast_factors")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mesh": "dp_shard=5", "world_size": None, "digest": "none", "check_source": False},
        {"mesh": "dp_replicate=2,dp_shard=2", "world_size": None, "sha256": True, "dtype": "bf16"},
        {"profile": "accelerate", "osft": OsftPlan(ratio=0.5, targets="auto,!*.1.*", ranks={"*.k_proj": 3})},
    ],
)
def test_parts_write_what_one_process_writes(options: dict[str, Any], source: Path, tmp_path: Path) -> None:
    whole = preshard(source, tmp_path / "whole", **options)
    results = [preshard(source, tmp_path / "out", f"{number}/3", **options) for number in (1, 2, 3)]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    *others, last = results
    for number, each in enumerate(others, 1):
        assert each.part is not None
        assert (each.part.finished_weights, each.part.finished_files) == (number, 0)
        assert each.osft is not None
        assert each.osft.max_error is not None
    assert last.part is not None
    assert last.part.is_committed
    assert sum(each.part.num_weights for each in results if each.part) == last.part.all_weights
    different = {"output", "part", "elapsed_s", "moving_s", "free_bytes", "peak_memory_bytes"}
    told, expected = last.to_json(), whole.to_json()
    assert {name for name in expected if told[name] != expected[name]} <= different
    late = preshard(source, tmp_path / "out", "1/3", **options)
    assert late.part is not None
    assert (late.part.is_committed, late.part.by_another) == (True, True)
    assert not last.part.by_another
    assert late.osft is not None
    assert late.osft.max_error is None
    assert shardkit.verify(tmp_path / "out", full=True).ok
    assert shardkit.commit(tmp_path / "out").by_another
    assert not list(tmp_path.glob(".out*"))


def test_each_weight_is_computed_once_whoever_goes_on(source: Path, tmp_path: Path, asked: list[str]) -> None:
    preshard(source, tmp_path / "out", "1/4")
    again = preshard(source, tmp_path / "out", "1/4")
    assert again.part is not None
    assert (again.part.num_weights, again.part.resumed_weights) == (1, 1)
    assert again.osft is not None
    assert again.osft.num_resumed == 1
    assert asked == [COSTLIEST], "the costliest has a part of its own"
    preshard(source, tmp_path / "out", "1/2")
    preshard(source, tmp_path / "out", "2/2")
    assert sorted(asked) == sorted(f"model.layers.{name}_proj" for name in NAMES)
    preshard(source, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


class Killed(FactorWorker):
    """Dies when it is asked for its second weight, as a process does when memory runs out."""

    asked: ClassVar[int] = 0

    def ask(self, request: dict[str, Any], stop: threading.Event) -> dict[str, Any]:
        Killed.asked += 1
        if Killed.asked > 1:
            os.kill(self._process.pid, signal.SIGKILL)
        return super().ask(request, stop)


def test_a_killed_process_costs_its_weight(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a real one, as people have it."""
    with monkeypatch.context() as patch:
        patch.setattr(compute, "FactorWorker", Killed)
        Killed.asked = 0
        with pytest.raises(IncompleteError, match="ended by signal 9"):
            preshard(source, tmp_path / "out", "1/1", jobs=1)
    assert len(list((staging(tmp_path) / "factors").glob("*.json"))) == 1
    assert not list((staging(tmp_path) / "work").iterdir())
    monkeypatch.setattr(compute, "FactorWorker", Counting)
    Counting.asked = []
    told = preshard(source, tmp_path / "out", "1/1", jobs=1)
    assert told.osft is not None
    assert (told.osft.num_resumed, len(Counting.asked)) == (1, 4)
    preshard(source, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("ends", ["commit", "part", "twin"])
def test_whoever_sees_all_factors_writes_the_files_that_are_left(
    ends: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    """The last part has computed its factors, and dies when it begins to write."""

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    preshard(source, tmp_path / "out", "1/2")
    with monkeypatch.context() as patch:
        patch.setattr(divided.Divided, "_move", dies)
        with pytest.raises(shardkit.Interrupted):
            preshard(source, tmp_path / "out", "2/2")
    (plan,) = shardkit.status(tmp_path / "out").plans
    assert (plan.num_weights, plan.finished_weights, plan.finished_files) == (5, 5, 0)
    assert [(part, number) for part, number, _ in plan.missing] == [("1/2", 1), ("2/2", 1)]
    if ends == "commit":
        told = shardkit.commit(tmp_path / "out")
        assert (told.by_another, told.num_files) == (False, 2)
    else:
        again = preshard(source, tmp_path / "out", "1/2" if ends == "part" else "3/7")
        assert again.part is not None
        assert again.part.is_committed
    assert len(asked) == 5
    preshard(source, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("fast_factors")
def test_what_is_missing_is_named(source: Path, tmp_path: Path) -> None:
    for number in (2, 3, 4):
        preshard(source, tmp_path / "out", f"{number}/4")
    with pytest.raises(IncompleteError, match=r"factors of 1 weight of 5 are missing, of 1 part") as caught:
        shardkit.commit(tmp_path / "out")
    (problem,) = caught.value.problems
    assert problem.startswith("part 1/4: 1 weight; shardkit.preshard(source=")
    assert "osft=0.3" in problem
    with pytest.raises(UsageError, match="parts of another plan are under way") as refused:
        preshard(source, tmp_path / "out", "1/2", osft=0.4)
    assert "osft: 0.3 there, 0.4 here" in "".join(refused.value.problems)
    assert shardkit.status(tmp_path / "out", abort=True).aborted
    assert not list(tmp_path.glob(".out*"))


def test_a_dry_run_says_what_a_part_takes(source: Path, tmp_path: Path) -> None:
    would = preshard(source, tmp_path / "out", "1/4", dry_run=True)
    assert would.part is not None
    assert (would.part.num_weights, would.part.all_weights, would.part.num_files) == (1, 5, 1)
    assert would.osft is not None
    assert [kind.name for kind in would.osft.kinds] == ["model.layers.*.self_attn.o_proj"]
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.usefixtures("fast_factors")
def test_a_pool_computes_them(source: Path, tmp_path: Path) -> None:
    whole = preshard(source, tmp_path / "whole")
    plan = OsftPlan(ratio=0.3)
    with ThreadPoolExecutor(1) as pool:
        told = preshard(source, tmp_path / "out", osft=plan, executor=pool, num_parts=3)
    assert told.part is None
    assert told.osft == whole.osft
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not list(tmp_path.glob(".out*"))


class Impatient(ThreadPoolExecutor):
    """Has each part carried out again when all have ended, as an engine does that has lost its worker's answer."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done = super().submit(function, *args, **kwargs)
        if kwargs["part"] == "1/2":
            again = functools.partial(function, *args, **kwargs)
            done.result = lambda timeout=None: again()  # type: ignore[method-assign]
        else:
            done.result()
        return done


@pytest.mark.usefixtures("fast_factors")
def test_a_part_that_came_late_does_not_tell_the_result(source: Path, tmp_path: Path) -> None:
    whole = preshard(source, tmp_path / "whole")
    with Impatient(1) as pool:
        told = preshard(source, tmp_path / "out", executor=pool, num_parts=2)
    assert told.osft == whole.osft


@pytest.mark.parametrize("factor", ["U", "V"])
def test_a_damaged_record_is_found_and_computed_again(
    factor: str, source: Path, tmp_path: Path, asked: list[str]
) -> None:
    """U is cut by rows, and its parts make up a CRC-32; V by columns, and is compared as it is read."""
    preshard(source, tmp_path / "out", "1/4")
    (record,) = (path for path in (staging(tmp_path) / "factors").iterdir() if path.suffix != ".json")
    data = bytearray(record.read_bytes())
    at = 100 if factor == "U" else 2 * 4096 + 100  # each factor begins at a block
    data[at] ^= 1
    record.write_bytes(data)
    preshard(source, tmp_path / "out", "2/2")
    with pytest.raises(IntegrityError, match="factors") as caught:
        preshard(source, tmp_path / "out", "1/2")
    assert caught.value.problems == (f"{COSTLIEST}.osft_{factor}_high",)
    assert not (tmp_path / "out").exists()
    with pytest.raises(IncompleteError, match="factors of 1 weight of 5 are missing"):
        shardkit.commit(tmp_path / "out")
    asked.clear()
    preshard(source, tmp_path / "out", "1/2")
    assert asked == [COSTLIEST]
    preshard(source, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_record_of_another_size_is_computed_again(source: Path, tmp_path: Path, asked: list[str]) -> None:
    """The new one has the name of the one that is there."""
    preshard(source, tmp_path / "out", "1/4")
    (record,) = (path for path in (staging(tmp_path) / "factors").iterdir() if path.suffix != ".json")
    os.truncate(record, 100)
    asked.clear()
    for part in ("1/4", "1/4", "2/2", "1/2"):
        told = preshard(source, tmp_path / "out", part)
    assert told.part is not None
    assert told.part.is_committed
    assert len(asked) == 5
    preshard(source, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_note_with_numbers_that_are_no_crcs_does_not_count(
    source: Path, tmp_path: Path, asked: list[str]
) -> None:
    """CRC-32s of 33 bits combine as if they had 32, and a record may have any name."""
    preshard(source, tmp_path / "out", "1/4")
    (record,) = (path for path in (staging(tmp_path) / "factors").iterdir() if path.suffix != ".json")
    (note,) = (staging(tmp_path) / "factors").glob("*.json")
    for more in (1 << 32, -(1 << 32)):
        content = json.loads(note.read_bytes())
        content["target"]["whole"] = {name: crc + more for name, crc in content["target"]["whole"].items()}
        number, text = note.stem, json.dumps([content["target"]["whole"][name] for name in FACTORS])
        os.link(record, record.with_name(f"{number}-{crc32(text.encode()):08x}"))
        note.write_text(json.dumps(content))
        asked.clear()
        assert preshard(source, tmp_path / "out", "1/4").osft.num_resumed == 0  # type: ignore[union-attr]
        assert len(asked) == 1


@pytest.mark.usefixtures("fast_factors")
def test_what_is_read_is_compared_and_nothing_vouches_for_damage(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    path = model / "pytorch_model.bin"
    torch.save(weights(), path)
    whole = preshard(model, tmp_path / "whole")
    stamp, good = path.stat(), path.read_bytes()
    data = bytearray(good)
    data[data.find(weights()[f"{COSTLIEST}.weight"].numpy().tobytes()) + 100] ^= 1
    for content in (bytes(data), good):
        path.write_bytes(content)
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        if content != good:
            with pytest.raises(IntegrityError, match=rf"{COSTLIEST}\.weight"):
                preshard(model, tmp_path / "out", "1/2")
            assert not list((staging(tmp_path) / "factors").glob("*.json"))
    preshard(model, tmp_path / "out", "1/2")
    last = preshard(model, tmp_path / "out", "2/2")
    assert (last.checked_bytes, last.unchecked) == (whole.checked_bytes, whole.unchecked)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_machines_of_two_kinds_are_told(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    preshard(source, tmp_path / "out", "1/2")
    monkeypatch.setattr("shardkit.operations.preshard.job.computed_by", lambda: {"cpu": "another"})
    last = preshard(source, tmp_path / "out", "2/2")
    assert [text for text in last.warnings if "2 kinds of machine" in text]
    assert len(asked) == 5


def test_what_a_twin_has_computed_meanwhile_is_taken(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    class Overtaken(Counting):
        def ask(self, request: dict[str, Any], stop: threading.Event) -> dict[str, Any]:
            with monkeypatch.context() as patch:
                patch.setattr(compute, "FactorWorker", Counting)
                preshard(source, tmp_path / "out", "1/2", jobs=1)
            return super().ask(request, stop)

    monkeypatch.setattr(compute, "FactorWorker", Overtaken)
    slow = preshard(source, tmp_path / "out", "1/2", jobs=1)
    assert slow.part is not None
    assert (slow.part.num_weights, slow.part.resumed_weights) == (3, 0)
    assert len(asked) == 3 + 1
    monkeypatch.setattr(compute, "FactorWorker", WorkerHere)
    preshard(source, tmp_path / "out", "2/2")
    preshard(source, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


class OtherBits(WorkerHere):
    """Has another last bit somewhere, as another CPU may."""

    def ask(self, request: dict[str, Any], stop: threading.Event) -> dict[str, Any]:
        answer = super().ask(request, stop)
        path, (name, start), size = request["record"], request["starts"][0], request["rows"] * request["rank"]
        with open(path, "r+b") as file:
            file.seek(start)
            data = bytearray(file.read(4 * size))
            data[0] ^= 1
            file.seek(start)
            file.write(data)
        crc = crc32(data)
        return {**answer, "whole": {**answer["whole"], name: crc}}


def crc_of_u(left: Path) -> int:
    (note,) = (left / "factors").glob("*.json")
    return int(json.loads(note.read_text())["target"]["whole"]["osft_U_high"])


def test_of_twins_with_other_bits_the_faster_counts(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A twin on another machine has published factors of a weight when this part has just computed them, too."""
    sync_file, synced = storage.sync_file, list[str]()

    def sync(path: str) -> None:
        sync_file(path)
        if not synced:
            synced.append(path)
            with monkeypatch.context() as patch:
                patch.setattr(compute, "FactorWorker", OtherBits)
                preshard(source, tmp_path / "out", "1/4")
            synced.append(str(crc_of_u(staging(tmp_path))))

    monkeypatch.setattr(compute, "FactorWorker", WorkerHere)
    monkeypatch.setattr(storage, "sync_file", sync)
    preshard(source, tmp_path / "out", "1/4")
    assert synced[1] == str(crc_of_u(staging(tmp_path)))
    assert len(list((staging(tmp_path) / "factors").iterdir())) == 2, "a record and its note"


def test_files_of_other_factors_are_written_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files are there, and then a record is lost and computed on another kind of machine."""

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(compute, "FactorWorker", WorkerHere)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "hard_link", full)
        with pytest.raises(shardkit.ResourceError, match="No space"):
            preshard(source, tmp_path / "out", "1/1")
    assert len(list((staging(tmp_path) / "done").iterdir())) == 2
    next(path for path in (staging(tmp_path) / "factors").iterdir() if path.suffix != ".json").unlink()
    monkeypatch.setattr(compute, "FactorWorker", OtherBits)
    told = preshard(source, tmp_path / "out", "1/1")
    assert told.osft is not None
    assert (told.osft.num_resumed, told.resumed_files) == (4, 0)
    monkeypatch.setattr(compute, "FactorWorker", WorkerHere)
    preshard(source, tmp_path / "whole")
    assert shardkit.verify(tmp_path / "out", full=True).ok
    assert not shardkit.diff(tmp_path / "out", tmp_path / "whole").is_equal
