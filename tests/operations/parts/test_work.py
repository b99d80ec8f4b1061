"""Parts from Python, and what belongs to no part: each in this process, on a tiny model."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
from shardkit.cli.preshard import render
from shardkit.core.text import format_size
from shardkit.errors import IncompleteError, SourceError, UsageError
from shardkit.files import storage
from shardkit.files.output.contract import JobRecord
from shardkit.files.output.local import LocalOutput
from shardkit.operations import commit as commit_verb
from shardkit.operations import places, write
from shardkit.transfer.execute import Execution
from tests.cases import but_first
from tests.contents import contents
from tests.operations.consolidate.checkpoints import save, weights
from tests.operations.parts.tiny import all_but_commit, preshard
from tests.operations.stops import failing


def test_parts_and_commit_from_another_directory(
    model: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    first = preshard(Path("model"), Path("out"), "1/2", sha256=True)
    assert first.part is not None
    assert (first.part.num_files, first.part.finished_files, first.part.missing) == (2, 2, ("2/2",))
    assert not out.exists()
    (job,) = shardkit.status(out).jobs
    with pytest.raises(IncompleteError, match=r"2 files of 4 are missing, of 1 part"):
        shardkit.commit(out)
    last = eval(job.missing[0][2])  # what it says to type does it
    assert last.part.is_committed
    assert contents(out) == whole
    monkeypatch.chdir("/")
    assert shardkit.commit(out).by_another
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "whole"]


def test_parts_whose_scripts_make_the_directory_first(
    model: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """As each of them does: `mkdir -p out`."""
    out = tmp_path / "out"
    out.mkdir()
    preshard(model, out, "1/2", sha256=True)
    assert not shardkit.status(out).is_there
    with pytest.raises(IncompleteError):
        shardkit.commit(out)
    last = preshard(model, out, "2/2", sha256=True)
    assert last.part is not None
    assert last.part.is_committed
    assert contents(out) == whole
    again = preshard(model, out, "1/2", sha256=True, exist_ok=True)
    assert again.part is not None
    assert again.part.by_another
    with pytest.raises(UsageError, match="exists"):
        preshard(model, out, "1/2", sha256=True)
    assert shardkit.commit(out).by_another
    assert contents(out) == whole


def test_a_part_shows_the_rate_of_its_own_bytes(make_hub: Callable[..., Path], tmp_path: Path) -> None:
    """Whichever it is: the last one makes the output too, in a time in which none of its bytes move."""
    source = make_hub({f"layers.{n}.weight": torch.randn(512, 1024) for n in range(4)})
    for part in ("1/2", "2/2"):
        result = preshard(source, tmp_path / "out", part)
        assert result.part is not None
        assert 0 < result.moving_s < result.elapsed_s
        rate = format_size(round(result.part.written_bytes / result.moving_s))
        assert _time_of(result).endswith(f"; bytes of the part moved in {result.moving_s:.2f} s: {rate}/s")
    late = preshard(source, tmp_path / "out", "2/2", exist_ok=True)
    assert "moved in" not in _time_of(late), "it wrote nothing"


def _time_of(result: shardkit.PreshardResult) -> str:
    (line,) = [line for line in render(result) if line.startswith("  time")]
    return line


def test_a_dry_run_tells_what_a_part_would_write(model: Path, tmp_path: Path) -> None:
    would = preshard(model, tmp_path / "out", "2/3", dry_run=True)
    assert would.part is not None
    assert (would.part.num_files, would.part.is_committed) == (1, False)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_note_that_is_damaged_is_one_that_is_missing(
    model: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    preshard(model, tmp_path / "out", "1/2", sha256=True)
    all_but_commit(model, tmp_path / "out", "2/2", sha256=True)
    (note,) = tmp_path.glob(".out*/done/0.json")
    note.write_text("{}")
    with pytest.raises(IncompleteError, match="1 file of 4 is missing"):
        shardkit.commit(tmp_path / "out")
    assert preshard(model, tmp_path / "out", "1/2", sha256=True).resumed_files == 1
    assert contents(tmp_path / "out") == whole


def test_the_relative_source_of_a_commit_elsewhere(
    model: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last part dies before it commits; the commit runs in another directory."""
    monkeypatch.chdir(tmp_path)
    preshard(Path("model"), Path("out"), "1/2", sha256=True)
    all_but_commit(Path("model"), Path("out"), "2/2", sha256=True)
    monkeypatch.chdir("/")
    result = shardkit.commit(tmp_path / "out")
    assert not result.by_another
    assert contents(tmp_path / "out") == whole


def test_a_commit_that_another_overtakes_says_so(
    model: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one commits, and removes what the parts wrote, when this one has just begun."""
    preshard(model, tmp_path / "out", "1/2", sha256=True)
    all_but_commit(model, tmp_path / "out", "2/2", sha256=True)
    others = list[bool]()

    def overtaken(*_: object) -> None:
        monkeypatch.undo()
        others.append(shardkit.commit(tmp_path / "out").by_another)

    monkeypatch.setattr(commit_verb, "_wait_for_all", overtaken)
    assert shardkit.commit(tmp_path / "out").by_another
    assert others == [False]
    assert contents(tmp_path / "out") == whole


@pytest.mark.parametrize("meanwhile", ["aborted", "committed"])
def test_a_part_whose_job_ends_once_it_has_written_its_files(
    meanwhile: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, finish = tmp_path / "out", write.finish

    def late(*args: Any) -> None:
        monkeypatch.undo()
        if meanwhile == "aborted":
            assert shardkit.abort(out).aborted
        else:
            assert not shardkit.commit(out).by_another
        finish(*args)

    preshard(model, out, "1/2")
    monkeypatch.setattr(write, "finish", late)
    if meanwhile == "aborted":
        with pytest.raises(IncompleteError, match="aborted by another process"):
            preshard(model, out, "2/2")
        assert not out.exists()
    else:
        last = preshard(model, out, "2/2")
        assert last.part is not None
        assert last.part.by_another
        assert not last.part.missing
    assert list(tmp_path.glob(".out*")) == []


def test_what_a_person_put_into_the_old_output_is_named_by_parts_and_by_commit(
    model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    preshard(model, out, digest="none")
    preshard(model, out, "1/2", overwrite=True)
    all_but_commit(model, out, "2/2", overwrite=True)
    (out / "notes.txt").write_text("mine")
    for ask in (
        lambda: preshard(model, out, "2/2", overwrite=True),
        lambda: shardkit.commit(out),
        lambda: shardkit.commit(out, overwrite=True),
    ):
        with pytest.raises(UsageError, match="holds what shardkit did not write") as caught:
            ask()
        assert caught.value.problems == ("notes.txt",)
    assert (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    assert not shardkit.commit(out).by_another
    assert shardkit.verify(out, full=True).ok


@pytest.mark.parametrize("is_same", but_first([True, False]))
@pytest.mark.parametrize("when", but_first(["before it begins", "before it commits"]))
@pytest.mark.parametrize("verb", but_first(["preshard", "consolidate"]))
@pytest.mark.parametrize("part", but_first(["2/2", None]))
def test_an_output_that_another_process_makes_meanwhile(
    part: str | None,
    verb: str,
    when: str,
    is_same: bool,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"

    def run(**more: Any) -> Any:
        if verb == "preshard":
            return preshard(tmp_path / "hub", out, **more)
        return consolidate(trained, out, **more)

    shardkit.consolidate(trained, tmp_path / "hub", ask_class=False)
    if part is not None:
        run(part="1/2")
    others = {} if is_same else {"dtype": "fp16"}

    def meddle(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        run(**others)
        return inner(*args, **options)

    where, name = (places, "check_space") if when == "before it begins" else (Execution, "run")
    inner = getattr(where, name)
    monkeypatch.setattr(where, name, meddle)
    if part is None and when == "before it begins":  # this process was not in the job
        with pytest.raises(UsageError, match="exists"):
            run()
        assert [path.name for path in tmp_path.glob(".out*")] == []
        return
    if is_same:
        made = run(part=part)
        assert made.was_there
        assert made.part is None or made.part.is_committed
    else:  # the one that comes second is refused
        with pytest.raises(UsageError, match="another job is under way"):
            run(part=part)
        monkeypatch.undo()
        assert not run(part=part).was_there
    assert [path.name for path in tmp_path.glob(".out*")] == []
    there = contents(out)
    assert run(overwrite=True).was_there is False
    assert contents(out) == there


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.EPERM])  # the second is that of exFAT
def test_without_hard_links(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    preshard(model, tmp_path / "whole")
    monkeypatch.setattr(storage, "hard_link", failing(code))
    preshard(model, tmp_path / "out", "1/1")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert preshard(model, tmp_path / "out", exist_ok=True).was_there


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A trainer's checkpoint, whose records have checksums."""
    return save({"model": weights()}, tmp_path / "trained")


def consolidate(
    trained: Path, out: Path, part: str | None = None, **options: Any
) -> shardkit.ConsolidateResult:
    return shardkit.consolidate(trained, out, part=part, max_shard_size=2000, ask_class=False, **options)


def test_a_manifest_file_is_written_by_whoever_commits(trained: Path, tmp_path: Path) -> None:
    consolidate(trained, tmp_path / "whole", manifest_file=tmp_path / "whole.json")
    made = tmp_path / "parts.json"
    for number in (1, 2, 3):
        assert not made.exists()
        consolidate(trained, tmp_path / "out", f"{number}/3", manifest_file=made)
    assert made.read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    late = consolidate(trained, tmp_path / "out", "1/3", manifest_file=made, exist_ok=True)
    assert late.part is not None
    assert late.part.is_committed
    with pytest.raises(UsageError, match=r"parts\.json exists"):
        consolidate(trained, tmp_path / "new", "1/3", manifest_file=made)


def test_parts_that_record_or_check_something_else_are_refused(trained: Path, tmp_path: Path) -> None:
    consolidate(trained, tmp_path / "out", "1/2", check_source=False)
    others: list[dict[str, Any]] = [{}, {"check_source": False, "manifest_file": tmp_path / "m"}]
    for options in others:
        with pytest.raises(UsageError, match="another job is under way"):
            consolidate(trained, tmp_path / "out", "2/2", **options)


def test_whoever_commits_reads_no_file_for_its_sha256(
    model: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = dict[str, int]()
    preadv = storage.preadv

    def counted(fd: int, buffers: Sequence[Any], start: int) -> int:
        found = preadv(fd, buffers, start)
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        read[name] = read.get(name, 0) + found
        return found

    preshard(model, tmp_path / "out", "1/2", sha256=True)
    all_but_commit(model, tmp_path / "out", "2/2", sha256=True)
    monkeypatch.setattr(storage, "preadv", counted)
    shardkit.commit(tmp_path / "out")
    assert contents(tmp_path / "out") == whole
    assert ".metadata.part" in read, "else nothing was counted"
    assert not [name for name in read if name.endswith(".distcp")]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_directory_of_another_user_is_refused(model: Path, tmp_path: Path) -> None:
    preshard(model, tmp_path / "out", "1/2")
    left = tmp_path / ".out.shardkit"
    os.chown(left, 12345, -1)
    for run in (lambda: preshard(model, tmp_path / "out", "2/2"), lambda: shardkit.commit(tmp_path / "out")):
        with pytest.raises(UsageError, match="belongs to another user"):
            run()
    os.chown(left, 0, -1)
    preshard(model, tmp_path / "out", "2/2")


@pytest.mark.parametrize("name", ["job.json", "draft/0"])
@pytest.mark.parametrize(
    "content", ["", "{}", '{"format": 1}', '{"format": 2}', '{"format": 1, "command": []}']
)
def test_a_damaged_record_is_named_and_can_be_removed(
    content: str, name: str, model: Path, tmp_path: Path
) -> None:
    preshard(model, tmp_path / "out", "1/2")
    (tmp_path / ".out.shardkit" / name).write_text(content)
    with pytest.raises(SourceError, match=r"damaged|another version"):
        shardkit.commit(tmp_path / "out")
    shardkit.abort(tmp_path / "out")
    assert list(tmp_path.glob(".out*")) == []


def test_every_field_of_a_record_is_there_and_of_its_type(model: Path, tmp_path: Path) -> None:
    """What is meant by a field that is missing is not guessed."""
    preshard(model, tmp_path / "out", "1/2")
    record = tmp_path / ".out.shardkit" / "job.json"
    content = json.loads(record.read_text())
    changed = {f"with {name}": {**content, name: 1.5} for name in content.keys() - {"num_parts"}}
    for name in content:
        changed[f"without {name}"] = {key: value for key, value in content.items() if key != name}
    for label, other in changed.items():
        with pytest.raises(SourceError, match=r"damaged|another version"):
            pytest.fail(f"{label}: {JobRecord.parse(json.dumps(other).encode(), record.name)}")
    plan = tmp_path / ".out.shardkit" / "draft" / "0"
    agreement = json.loads(plan.read_text())
    agreement["command"]["options"]["later"] = 1
    plan.write_text(json.dumps(agreement))
    preshard(model, tmp_path / "out", "1/2")
    all_but_commit(model, tmp_path / "out", "2/2")
    with pytest.raises(SourceError, match="damaged"):
        shardkit.commit(tmp_path / "out")


@pytest.mark.parametrize(
    "damage",
    ["", "[]", "{}", '{"digest": {"name": 1}}', '{"scattered": [[0, "x"]]}', "the file is gone"],
)
def test_without_its_note_or_its_bytes_a_file_is_written_again(
    damage: str, model: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    preshard(model, tmp_path / "out", "1/2", sha256=True)
    left = tmp_path / ".out.shardkit"
    note = next((left / "done").iterdir())
    if damage == "the file is gone":
        next((left / "data").glob("*.distcp")).unlink()
    elif damage.startswith('{"'):
        note.write_text(json.dumps({**json.loads(note.read_text()), **json.loads(damage)}))
    else:
        note.write_text(damage)
    assert preshard(model, tmp_path / "out", "1/2", sha256=True).resumed_files == 1
    preshard(model, tmp_path / "out", "2/2", sha256=True)
    assert contents(tmp_path / "out") == whole


def test_a_cache_of_the_hub_on_each_machine(model: Path, tmp_path: Path) -> None:
    """The files have other times there, and the names of their content."""
    caches = []
    for number in (1, 2):
        blobs = tmp_path / f"cache{number}" / "models--a--b" / "blobs"
        snapshot = blobs.parent / "snapshots" / "abc"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        shutil.copyfile(model / "model.safetensors", blobs / "1234")
        os.utime(blobs / "1234", ns=(number, number))
        (snapshot / "model.safetensors").symlink_to("../../blobs/1234")
        caches.append(snapshot)
    out = tmp_path / "out"
    first = preshard(caches[0], out, "1/2")
    last = preshard(caches[1], out, "2/2")
    assert first.part is not None
    assert last.part is not None
    assert first.part.plan == last.part.plan
    assert last.part.is_committed


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("step", ["_adopt", "commit"])
def test_what_is_aborted_during_a_commit_is_not_said_to_be_there(
    step: str, overwrite: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "out", getattr(LocalOutput, step)
    if overwrite:
        shardkit.preshard(model, out, world_size=2, layout="declared")
    before = contents(out) if overwrite else None
    preshard(model, out, "1/2", overwrite=overwrite)

    def late(*args: Any) -> Any:
        monkeypatch.undo()
        # An abort waits for a commit that has begun; somebody with rm does not.
        shutil.rmtree(tmp_path / ".out.shardkit")
        return real(*args)

    monkeypatch.setattr(LocalOutput, step, late)
    with pytest.raises(IncompleteError, match="aborted by another process"):
        preshard(model, out, "2/2", overwrite=overwrite)
    assert (contents(out) if out.exists() else None) == before


def test_a_run_of_all_files_ends_what_parts_began(
    model: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """And another number of parts goes on with it."""
    preshard(model, tmp_path / "out", "1/2", sha256=True)
    assert preshard(model, tmp_path / "out", "1/4", sha256=True).resumed_files == 1
    assert preshard(model, tmp_path / "out", sha256=True).resumed_files == 2
    assert contents(tmp_path / "out") == whole


def test_a_run_of_one_process_may_be_committed(model: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    all_but_commit(model, tmp_path / "out", sha256=True)
    (job,) = shardkit.status(tmp_path / "out").jobs
    assert (job.finished_files, job.missing, job.is_committing) == (4, (), False)
    assert not shardkit.commit(tmp_path / "out").by_another
    assert contents(tmp_path / "out") == whole


def test_a_part_without_files_does_nothing(model: Path, tmp_path: Path) -> None:
    result = preshard(model, tmp_path / "out", "5/8")
    assert result.part is not None
    assert (result.part.num_files, result.part.is_committed, len(result.part.missing)) == (0, False, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
