"""Bytes move while the model's class is asked: what comes of it when the class agrees, and when it does not."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import shardkit
from shardkit.core import threads
from shardkit.core.placements import REPLICATE
from shardkit.errors import IntegrityError, Interrupted, PolicyError, ResourceError
from shardkit.files.staging import abandoned
from shardkit.layout import traced
from shardkit.operations import ahead, write
from shardkit.operations import preshard as verb
from shardkit.operations.preshard import job
from shardkit.transfer.journal import Journal
from tests.models.zoo import ZOO, make_hub
from tests.worlds.threads import threads_left

pytestmark = pytest.mark.usefixtures("fast_trace")
Taken = list[bool]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose experts are fused in memory."""
    directory = tmp_path_factory.mktemp("ahead") / "hub"
    make_hub(ZOO["qwen3_moe"], directory)
    return directory


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    """For each run that moved something ahead, whether that served."""
    found, real = Taken(), ahead.Ahead.take

    def take(self: ahead.Ahead[Any], plan: Any) -> Any:
        underway = real(self, plan)
        found.append(underway is not None)
        return underway

    monkeypatch.setattr(ahead.Ahead, "take", take)
    return found


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def without(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> None:
    """Run something that expects nothing."""
    with monkeypatch.context() as patched:
        patched.setattr(verb, "expect_job", lambda *_: None)
        run()


def is_clean(place: Path, *names: str) -> bool:
    """True if there is nothing but these, and no thread of shardkit is left."""
    return sorted(path.name for path in place.iterdir()) == sorted(names) and not threads_left()


@pytest.mark.parametrize(
    "options", [{}, {"mesh": "dp_replicate=2,dp_shard=2"}, {"dtype": "fp32"}, {"profile": "accelerate"}]
)
def test_the_output_is_that_of_a_run_without_it(
    options: dict[str, Any], hub: Path, tmp_path: Path, taken: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"mesh": "dp_shard=3"} | options
    shardkit.preshard(hub, tmp_path / "out", **options)
    without(monkeypatch, lambda: shardkit.preshard(hub, tmp_path / "plain", **options))
    assert taken == [True, False]
    assert contents(tmp_path / "out") == contents(tmp_path / "plain")
    assert is_clean(tmp_path, "out", "plain")


def test_a_wrong_guess_costs_nothing_but_itself(
    hub: Path, tmp_path: Path, taken: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = job.expect_layout

    def expect(*given: Any) -> Any:
        layout = real(*given)
        assert layout is not None
        name = "model.norm.weight"
        wrong = replace(layout.tensors[name], placements=(REPLICATE,))
        return replace(layout, tensors=layout.tensors | {name: wrong})

    with monkeypatch.context() as patched:
        patched.setattr(job, "expect_layout", expect)
        shardkit.preshard(hub, tmp_path / "out", world_size=2)
    without(monkeypatch, lambda: shardkit.preshard(hub, tmp_path / "plain", world_size=2))
    assert taken == [False, False]
    assert contents(tmp_path / "out") == contents(tmp_path / "plain")
    assert is_clean(tmp_path, "out", "plain")


def test_what_the_class_keeps_in_fp32_is_a_wrong_guess(
    tmp_path: Path, taken: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_hub(ZOO["t5"], tmp_path / "hub")  # wo stays in fp32
    options: dict[str, Any] = {"world_size": 2, "dtype": "fp16"}
    shardkit.preshard(tmp_path / "hub", tmp_path / "out", **options)
    without(monkeypatch, lambda: shardkit.preshard(tmp_path / "hub", tmp_path / "plain", **options))
    assert taken == [False, False]
    assert contents(tmp_path / "out") == contents(tmp_path / "plain")


def test_where_the_class_says_no_nothing_is_left(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(PolicyError):
        shardkit.preshard(hub, tmp_path / "out", world_size=2, wrap="NoSuchClass")
    assert is_clean(tmp_path)


def test_where_there_is_no_room_the_run_says_it(
    hub: Path, tmp_path: Path, taken: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_space(path: str, needed_bytes: int, **_: object) -> None:
        raise ResourceError(f"no room for {needed_bytes}")

    monkeypatch.setattr(ahead, "check_space", check_space)
    shardkit.preshard(hub, tmp_path / "out", world_size=2)
    monkeypatch.setattr(write, "check_space", check_space)
    with pytest.raises(ResourceError, match="no room"):
        shardkit.preshard(hub, tmp_path / "other", world_size=2)
    assert taken == [False, False]
    assert is_clean(tmp_path, "out")


def test_a_damaged_source_is_refused(tmp_path: Path, taken: Taken) -> None:
    make_hub(ZOO["qwen3"], tmp_path / "hub")
    shardkit.write_manifest(tmp_path / "hub")
    (path,) = (tmp_path / "hub").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before = [path.name for path in tmp_path.iterdir()]
    with pytest.raises(IntegrityError):
        shardkit.preshard(tmp_path / "hub", tmp_path / "out", world_size=2)
    assert taken == [True]
    assert is_clean(tmp_path, *before)


def test_after_ctrl_c_while_the_class_is_asked_nothing_is_left(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(traced, "_spawn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shardkit.preshard(hub, tmp_path / "out", world_size=2)
    assert is_clean(tmp_path)


def test_ctrl_c_is_heard_at_any_call(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come when a lock was just taken: nothing waits for that one then, and nothing is left that stays."""
    answers: list[bytes] = []
    asked = traced._spawn

    def spawn(payload: bytes, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
        place = Path(json.loads(payload)["answer"])
        if not answers:
            asked(payload, timeout_s)
            answers.append(place.read_bytes())
        place.write_bytes(answers[0])
        return subprocess.CompletedProcess([], 0, stdout=b"")

    monkeypatch.setattr(traced, "_spawn", spawn)
    shardkit.preshard(hub, tmp_path / "plain", world_size=2)
    expected, at = contents(tmp_path / "plain"), 0
    while _is_interrupted(at, lambda: shardkit.preshard(hub, tmp_path / "out", world_size=2)):
        left = [path for path in tmp_path.iterdir() if path.name != "plain"]
        assert {str(path) for path in left} <= {str(tmp_path / "out"), *abandoned(str(tmp_path / "out"))}, at
        if tmp_path / "out" in left:
            assert contents(tmp_path / "out") == expected, at
        for path in left:
            shutil.rmtree(path)
        at += 1
    assert at > 20
    assert contents(tmp_path / "out") == expected
    assert is_clean(tmp_path, "out", "plain")


def _hangs(*_: object) -> None:
    raise AssertionError("it goes on after Ctrl-C")


def _is_interrupted(at: int, run: Callable[[], object]) -> bool:
    """Run something that is interrupted when the main thread is in `ahead`, at one of its calls or returns; False if it
    has fewer."""
    left, places = at, {ahead.__file__, threads.__file__, threading.__file__}

    def profile(frame: FrameType | None, event: str, _: object) -> None:
        nonlocal left
        if frame is None or frame.f_code.co_filename not in places:
            return
        while frame is not None and frame.f_code.co_filename != ahead.__file__:
            frame = frame.f_back
        if frame is not None and event in ("call", "return", "c_return"):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(60)
    sys.setprofile(profile)
    try:
        run()
    except (KeyboardInterrupt, Interrupted):
        pass
    finally:
        sys.setprofile(None)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return left < 0


def test_after_ctrl_c_the_next_run_keeps_what_was_finished(
    hub: Path, tmp_path: Path, taken: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Journal.add

    def add(self: Journal, *line: Any) -> None:
        real(self, *line)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "add", add)
        with pytest.raises(Interrupted):
            shardkit.preshard(hub, tmp_path / "out", world_size=4)
    result = shardkit.preshard(hub, tmp_path / "out", world_size=4)
    assert taken == [True]  # the second run goes on with what is there
    assert result.resumed_files >= 1
    assert is_clean(tmp_path, "out")


def test_the_bar_ends_with_the_bytes_while_the_class_is_still_asked(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, is_over = traced._spawn, threading.Event()

    class Watched(threads.NoProgress):
        def finish(self) -> None:
            is_over.set()

    def spawn(payload: bytes, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
        assert is_over.wait(60)
        return asked(payload, timeout_s)

    monkeypatch.setattr(traced, "_spawn", spawn)
    result = shardkit.preshard(hub, tmp_path / "out", world_size=2, progress=Watched())
    assert 0 < result.moving_s < result.elapsed_s


def test_a_dry_run_moves_nothing(hub: Path, tmp_path: Path, taken: Taken) -> None:
    shardkit.preshard(hub, tmp_path / "out", world_size=2, dry_run=True)
    assert taken == []
    assert is_clean(tmp_path)
