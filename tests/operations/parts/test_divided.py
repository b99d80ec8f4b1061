"""Parts from Python, and what belongs to no part: each in this process, on a tiny model."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
from shardkit.cli.preshard import render
from shardkit.core.text import format_size
from shardkit.errors import IncompleteError, SourceError, UsageError
from shardkit.files import shared, storage
from shardkit.files.place.contract import Beside
from shardkit.files.place.disk import DiskPlace
from shardkit.files.shared import SharedStaging
from shardkit.files.staging import Owner
from shardkit.operations import commit as commit_verb
from shardkit.operations import places
from shardkit.operations.parts.agreement import Agreement
from shardkit.operations.parts.divided import Divided
from shardkit.operations.parts.part import Part
from shardkit.transfer.execute import Execution
from tests.cases import but_first
from tests.contents import contents
from tests.operations.consolidate.checkpoints import hub, save, weights


def preshard(model: Path, out: Path, part: str | None = None, **options: Any) -> shardkit.PreshardResult:
    return shardkit.preshard(model, out, world_size=4, layout="declared", part=part, **options)


def test_parts_and_commit_from_another_directory(
    model: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    first = preshard(Path("model"), Path("out"), "1/2", sha256=True)
    assert first.part is not None
    assert (first.part.num_files, first.part.finished_files, first.part.missing) == (2, 2, ("2/2",))
    assert not out.exists()
    (plan,) = shardkit.status(out).plans
    with pytest.raises(IncompleteError, match=r"2 files of 4 are missing, of 1 part"):
        shardkit.commit(out)
    last = eval(plan.missing[0][2])  # what it says to type does it
    assert last.part is not None
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
    again = preshard(model, out, "1/2", sha256=True)
    assert again.part is not None
    assert again.part.by_another
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
    assert "moved in" not in _time_of(preshard(source, tmp_path / "out", "2/2")), "it wrote nothing"


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
    monkeypatch.setattr(Divided, "commit", lambda self: False)
    preshard(model, tmp_path / "out", "2/2", sha256=True)
    monkeypatch.undo()
    (note,) = tmp_path.glob(".out*/done/0.json")
    note.write_text("{}")
    with pytest.raises(IncompleteError, match="1 file of 4 is missing"):
        shardkit.commit(tmp_path / "out")
    for part in ("1/2", "2/2"):
        preshard(model, tmp_path / "out", part, sha256=True)
    assert contents(tmp_path / "out") == whole


def test_the_relative_source_of_a_commit_elsewhere(
    model: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last part dies before it commits; the commit runs in another directory."""
    monkeypatch.chdir(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    preshard(Path("model"), Path("out"), "1/2", sha256=True)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "hard_link", full)
        with pytest.raises(shardkit.ResourceError, match="No space"):
            preshard(Path("model"), Path("out"), "2/2", sha256=True)
    monkeypatch.chdir("/")
    told = shardkit.commit(tmp_path / "out")
    assert not told.by_another
    assert contents(tmp_path / "out") == whole


def test_a_commit_that_another_overtakes_says_so(
    model: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one commits, and removes what the parts wrote, when this one has just begun."""

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    preshard(model, tmp_path / "out", "1/2", sha256=True)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "hard_link", full)
        with pytest.raises(shardkit.ResourceError, match="No space"):
            preshard(model, tmp_path / "out", "2/2", sha256=True)
    read = Agreement.of
    others = list[bool]()

    def overtaken(staging: Any) -> Agreement:
        agreement = read(staging)
        monkeypatch.setattr(Agreement, "of", read)
        others.append(shardkit.commit(tmp_path / "out").by_another)
        return agreement

    monkeypatch.setattr(Agreement, "of", overtaken)
    monkeypatch.setattr(commit_verb, "_wait_for_all", lambda *_: None)
    assert shardkit.commit(tmp_path / "out").by_another
    assert others == [False]
    assert contents(tmp_path / "out") == whole


@pytest.mark.parametrize("looks_for", ["files", "notes"])
def test_a_commit_that_ends_while_another_asks_what_became_of_its_data(
    looks_for: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other has taken the data when this one looks, and exchanged it before this one could take it back."""
    out = tmp_path / "out"
    preshard(model, out, digest="none")
    preshard(model, out, "1/2", overwrite=True)
    monkeypatch.setattr(Divided, "commit", lambda self: False)
    preshard(model, out, "2/2", overwrite=True)  # all is there, and nobody has committed
    monkeypatch.undo()
    ours, has_taken, may_end = threading.current_thread(), threading.Event(), threading.Event()
    link, renameat2, reopen = storage.link, storage.renameat2, SharedStaging.reopen
    finished = Divided._finished
    results: list[bool] = []
    other = threading.Thread(target=lambda: results.append(shardkit.commit(out, overwrite=True).by_another))

    def let_other_take(looks: str) -> None:
        if threading.current_thread() is ours and looks == looks_for and not other.ident:
            other.start()
            assert has_taken.wait(600)

    def link_later(source: str, target: str) -> None:
        let_other_take("files")
        link(source, target)

    def finished_later(self: Divided) -> Any:
        let_other_take("notes")
        return finished(self)

    def exchange_later(source: str, target: str, flags: int) -> bool:
        if threading.current_thread() is other and flags == storage.RENAME_EXCHANGE and target == str(out):
            has_taken.set()
            assert may_end.wait(600)
        return renameat2(source, target, flags)

    def reopen_later(staging: SharedStaging) -> bool:
        if threading.current_thread() is ours and has_taken.is_set() and not may_end.is_set():
            may_end.set()
            other.join(600)
        return reopen(staging)

    monkeypatch.setattr(storage, "link", link_later)
    monkeypatch.setattr(Divided, "_finished", finished_later)
    monkeypatch.setattr(storage, "renameat2", exchange_later)
    monkeypatch.setattr(SharedStaging, "reopen", reopen_later)
    last = preshard(model, out, "2/2", overwrite=True)
    assert last.part is not None
    assert last.part.by_another
    assert results == [False]
    assert shardkit.verify(out, full=True).ok


def test_a_part_that_is_late_leaves_to_others_what_it_has_begun_anew(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is made and removed just before it begins, and another part has joined it just after."""
    out, (first, second), create = tmp_path / "out", ("1/2", "2/2"), SharedStaging.create
    preshard(model, out, digest="none")

    def create_late(self: SharedStaging, *args: Any) -> bool:
        monkeypatch.setattr(SharedStaging, "create", create)
        look = self.look_before

        def look_too_early() -> None:
            look()
            for part in (first, second):
                preshard(model, out, part, overwrite=True)
            assert shardkit.commit(out).by_another
            assert len(list(tmp_path.glob(".out.*"))) == 1  # what is about to get its name

        monkeypatch.setattr(self, "look_before", look_too_early)
        is_made = create(self, *args)
        assert self.enter(joined)
        return is_made

    joined = Owner.new_run()
    monkeypatch.setattr(SharedStaging, "create", create_late)
    try:
        with pytest.raises(UsageError, match="another process has made it while this part began"):
            preshard(model, out, first, overwrite=True)
        (begun,) = tmp_path.glob(".out.*")
        assert list((begun / "work").iterdir()) == [begun / "work" / str(joined)]
    finally:
        joined.end()
    preshard(model, out, second, overwrite=True)
    preshard(model, out, first, overwrite=True)
    assert shardkit.verify(out, full=True).ok


@pytest.mark.parametrize("meanwhile", ["given up", "committed"])
def test_a_part_whose_files_go_once_it_has_written_them_does_not_say_that_they_are_missing(
    meanwhile: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, tell = tmp_path / "out", Divided._tell

    def tell_last(self: Divided, part: Part, *, is_done: bool) -> None:
        tell(self, part, is_done=is_done)
        if is_done:
            monkeypatch.setattr(Divided, "_tell", tell)
            if meanwhile == "given up":
                shardkit.abort(out)
            else:
                shardkit.commit(out)

    preshard(model, out, "1/2")
    monkeypatch.setattr(Divided, "_tell", tell_last)
    if meanwhile == "given up":
        with pytest.raises(IncompleteError, match="was given up meanwhile"):
            preshard(model, out, "2/2")
        assert not out.exists()
    else:
        last = preshard(model, out, "2/2")
        assert last.part is not None
        assert last.part.by_another
        assert not last.part.missing


def test_a_part_that_began_while_a_commit_was_taken_back_does_not_take_the_old_output_for_a_new_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, aside, workplace, tell = tmp_path / "out", tmp_path / "aside", DiskPlace.workplace, Divided._tell

    @contextlib.contextmanager
    def with_old_aside(self: DiskPlace) -> Iterator[str]:
        monkeypatch.setattr(DiskPlace, "workplace", workplace)
        os.rename(out, aside)
        with workplace(self) as directory:
            os.rename(aside, out)
            yield directory

    def tell_and_give_up(self: Divided, part: Part, *, is_done: bool) -> None:
        tell(self, part, is_done=is_done)
        shardkit.abort(out)

    preshard(model, out, digest="none")
    old = contents(out)
    preshard(model, out, "1/2", overwrite=True)
    monkeypatch.setattr(DiskPlace, "workplace", with_old_aside)
    monkeypatch.setattr(Divided, "_tell", tell_and_give_up)
    with pytest.raises(IncompleteError, match="was given up meanwhile"):
        preshard(model, out, "2/2", overwrite=True)
    assert contents(out) == old


def test_a_part_goes_on_where_another_put_the_data_back_before_it_looked(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit has taken the data and died, while this part was about to write; what said so is a cause of a cause."""
    out, aside = tmp_path / "out", tmp_path / "taken"
    preshard(model, out, "1/2")
    move = Divided._move

    def without_data(self: Divided, mine: object, directory: str, label: str) -> int:
        monkeypatch.setattr(Divided, "_move", move)
        os.rename(self._shared.data, aside)
        try:
            return os.lstat(self._shared.data).st_size
        except FileNotFoundError as error:
            raise shardkit.ResourceError("cannot write __1_0.distcp") from error

    def reopened_by_another(staging: SharedStaging) -> bool:
        if aside.exists():
            os.rename(aside, staging.data)
        return False

    monkeypatch.setattr(Divided, "_move", without_data)
    monkeypatch.setattr(SharedStaging, "reopen", reopened_by_another)
    last = preshard(model, out, "2/2")
    assert last.part is not None
    assert last.part.is_committed
    assert shardkit.verify(out, full=True).ok


def test_what_a_person_put_into_the_old_output_is_named_by_parts_and_by_commit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    preshard(model, out, digest="none")
    preshard(model, out, "1/2", overwrite=True)
    monkeypatch.setattr(Divided, "commit", lambda self: False)
    preshard(model, out, "2/2", overwrite=True)  # all is there, and nobody has committed
    monkeypatch.undo()
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
    """With `exist_ok` it stays."""
    out = tmp_path / "out"

    def run(**more: Any) -> Any:
        if verb == "preshard":
            return preshard(tmp_path / "hub", out, **more)
        return shardkit.consolidate(trained, out, max_shard_size=2000, ask_class=False, **more)

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
    if is_same:
        made = run(part=part, exist_ok=True)
        assert made.was_there
        assert made.part is None or made.part.is_committed
        shardkit.abort(out)  # what the part had written for an output that it did not make
        assert [path.name for path in tmp_path.glob(".out*")] == []
    else:
        with pytest.raises(UsageError, match=r"exists|appeared"):
            run(part=part)
    there = contents(out)
    assert run(overwrite=True, **others).was_there is False
    assert contents(out) == there


@pytest.mark.parametrize("can_exchange", [True, False])
def test_what_appears_in_the_old_output_right_before_the_commit_stays(
    can_exchange: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked through once more when it has lost its name, as by one process."""
    out, commit = tmp_path / "out", SharedStaging.commit
    preshard(model, out, digest="none")
    preshard(model, out, "1/2", overwrite=True)

    def meddle(staging: SharedStaging, *args: Any, **options: Any) -> bool:
        (out / "notes.txt").write_text("mine")
        return commit(staging, *args, **options)

    before = contents(out)
    with monkeypatch.context() as patch:
        patch.setattr(SharedStaging, "commit", meddle)
        if not can_exchange:
            patch.setattr(shared, "_can_exchange", lambda work: False)
        for ask in (lambda: preshard(model, out, "2/2", overwrite=True), lambda: shardkit.commit(out)):
            with pytest.raises(UsageError, match="holds what shardkit did not write") as caught:
                ask()
            assert caught.value.problems == ("notes.txt",)
            assert "what was written is kept in" in (caught.value.hint or "")
            assert contents(out) == {**before, "notes.txt": b"mine"}
            (out / "notes.txt").unlink()
    told = preshard(model, out, "2/2", overwrite=True)
    assert (told.was_there, told.part and told.part.resumed_files) == (False, 2)
    assert shardkit.verify(out, full=True).ok
    assert [path.suffix for path in tmp_path.glob(".out*")] == [".done"]


@pytest.mark.parametrize("is_other", [False, True])
def test_what_appears_there_and_was_not_looked_through_stays(
    is_other: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that has exchanged the two was killed. Whoever comes next keeps and names it, be it an output of another
    kind that somebody has put there."""
    out = tmp_path / "out"
    preshard(model, out, digest="none")
    preshard(model, out, "1/2", overwrite=True)

    class Killed(BaseException):
        pass

    def nothing_any_more(*_: object) -> None:
        raise Killed

    def die(place: DiskPlace, look: Callable[..., object], *old: str) -> None:
        if old:
            if is_other:
                shutil.rmtree(*old)
                shutil.copytree(model, *old)
            (Path(*old) / "notes.txt").write_text("mine")
            for name in ("renameat2", "mkdir", "rename"):
                patch.setattr(storage, name, nothing_any_more)
            raise Killed
        look()

    with monkeypatch.context() as patch:
        patch.setattr(DiskPlace, "_ask", die)
        with pytest.raises(Killed):
            preshard(model, out, "2/2", overwrite=True)
    told = preshard(model, out, "2/2", overwrite=True)
    assert told.was_there
    assert [each for each in told.warnings if "notes.txt" in each]
    (kept,) = tmp_path.rglob("notes.txt")
    assert (kept.read_text(), out in kept.parents) == ("mine", False)
    wanted = {**(contents(model) if is_other else {}), "notes.txt": b"mine"}
    assert contents(kept.parent) == wanted, "the old output itself is gone"


@pytest.mark.parametrize(
    ("absent", "code"),
    [(["hard_link"], errno.ENOTSUP), (["hard_link", "symbolic_link"], errno.EPERM)],  # the second is exFAT
)
def test_without_links(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: list[str], code: int
) -> None:
    preshard(model, tmp_path / "whole")

    def none(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    for call in absent:
        monkeypatch.setattr(storage, call, none)
    preshard(model, tmp_path / "out", "1/1")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert preshard(model, tmp_path / "out", exist_ok=True).was_there


def test_what_a_part_cannot_do(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--part goes without --no-resume"):
        preshard(model, tmp_path / "out", "1/2", resume=False)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


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
    late = consolidate(trained, tmp_path / "out", "1/3", manifest_file=made)
    assert late.part is not None
    assert late.part.is_committed
    with pytest.raises(UsageError, match=r"parts\.json exists"):
        consolidate(trained, tmp_path / "new", "1/3", manifest_file=made)


def test_what_has_become_the_output_is_not_made_again_by_who_is_slow(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is about to copy a file into a folder when a twin commits and removes what the parts wrote."""
    out, base, inner = tmp_path / "out", tmp_path / "base", DiskPlace.describing
    (hub(base, weights()) / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")

    @contextlib.contextmanager
    def overtaken(place: DiskPlace, directory: str) -> Iterator[Beside]:
        monkeypatch.undo()
        with inner(place, directory) as beside:
            assert not shardkit.commit(out).by_another
            yield beside

    consolidate(trained, out, "1/2", base=base)
    monkeypatch.setattr(DiskPlace, "describing", overtaken)
    last = consolidate(trained, out, "2/2", base=base)
    assert last.part is not None
    assert last.part.by_another
    assert [path.name for path in tmp_path.glob(".out*") if path.suffix != ".done"] == []


def test_parts_that_record_or_check_something_else_are_refused(trained: Path, tmp_path: Path) -> None:
    consolidate(trained, tmp_path / "out", "1/2", check_source=False)
    others: list[dict[str, Any]] = [{}, {"check_source": False, "manifest_file": tmp_path / "m"}]
    for options in others:
        with pytest.raises(UsageError, match="parts of another plan"):
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

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    preshard(model, tmp_path / "out", "1/2", sha256=True)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "hard_link", full)
        with pytest.raises(shardkit.ResourceError, match="No space"):
            preshard(model, tmp_path / "out", "2/2", sha256=True)
    monkeypatch.setattr(storage, "preadv", counted)
    shardkit.commit(tmp_path / "out")
    assert contents(tmp_path / "out") == whole
    assert ".metadata.part" in read, "else nothing was counted"
    assert not [name for name in read if name.endswith(".distcp")]


def test_a_record_that_somebody_else_wrote_is_not_carried_out(model: Path, tmp_path: Path) -> None:
    preshard(model, tmp_path / "out", "1/2")
    (left,) = tmp_path.glob(".out.shardkit-parts-*")
    record = left / "plan.json"
    elsewhere = tmp_path / "elsewhere.json"
    record.rename(elsewhere)
    record.symlink_to(elsewhere)
    with pytest.raises(SourceError, match="symbolic link"):
        shardkit.commit(tmp_path / "out")
    with pytest.raises(UsageError, match="belongs to another user, or is a link"):
        preshard(model, tmp_path / "out", "2/2")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_directory_of_another_user_is_refused(model: Path, tmp_path: Path) -> None:
    preshard(model, tmp_path / "out", "1/2")
    (left,) = tmp_path.glob(".out.shardkit-parts-*")
    os.chown(left, 12345, -1)
    for run in (lambda: preshard(model, tmp_path / "out", "2/2"), lambda: shardkit.commit(tmp_path / "out")):
        with pytest.raises((UsageError, IncompleteError)):
            run()
    os.chown(left, 0, -1)
    preshard(model, tmp_path / "out", "2/2")


@pytest.mark.parametrize(
    "content", ["", "{}", '{"format": 1}', '{"format": 2}', '{"format": 1, "command": []}']
)
def test_a_damaged_record_is_said_and_can_be_given_up(content: str, model: Path, tmp_path: Path) -> None:
    preshard(model, tmp_path / "out", "1/2")
    (left,) = tmp_path.glob(".out.shardkit-parts-*")
    (left / "plan.json").write_text(content)
    with pytest.raises(SourceError, match=r"plan\.json"):
        shardkit.commit(tmp_path / "out")
    assert shardkit.abort(tmp_path / "out").aborted
    assert not left.exists()


def test_every_field_of_a_record_is_there_and_of_its_type(model: Path, tmp_path: Path) -> None:
    """What a field means that nobody here knows, or what is meant by one that is missing, is not guessed."""
    preshard(model, tmp_path / "out", "1/2")
    (record,) = tmp_path.glob(".out.shardkit-parts-*/plan.json")
    content = json.loads(record.read_text())
    optional = {"weights", "beside", "here", "cwd", "replaces"}
    changed = {f"with {name}": {**content, name: 1.5} for name in {*content, "later"}}
    changed |= {
        f"without {name}": {key: value for key, value in content.items() if key != name}
        for name in content.keys() - optional
    }
    changed["a later option of the command"] = {**content, "command": {**content["command"], "later": 1}}
    for label, other in changed.items():
        with pytest.raises(SourceError, match=r"damaged|another version"):
            pytest.fail(f"{label}: {Agreement.parse(json.dumps(other).encode(), record.name)}")


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"digest": {"name": 1}}', '{"scattered": [[0, "x"]]}'])
def test_a_damaged_note_means_that_the_file_is_written_again(
    damage: str, model: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    preshard(model, tmp_path / "out", "1/2", sha256=True)
    (left,) = tmp_path.glob(".out.shardkit-parts-*")
    note = next((left / "done").iterdir())
    content = json.loads(note.read_text())
    note.write_text(
        json.dumps({**content, **json.loads(damage)}) if damage.startswith("{") and damage != "{}" else damage
    )
    again = preshard(model, tmp_path / "out", "1/2", sha256=True)
    assert again.resumed_files == 1
    preshard(model, tmp_path / "out", "2/2", sha256=True)
    assert contents(tmp_path / "out") == whole


def test_a_file_that_is_gone_is_written_again(model: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    preshard(model, tmp_path / "out", "1/2", sha256=True)
    (left,) = tmp_path.glob(".out.shardkit-parts-*")
    next((left / "data").glob("*.distcp")).unlink()
    assert preshard(model, tmp_path / "out", "1/2", sha256=True).resumed_files == 1
    preshard(model, tmp_path / "out", "2/2", sha256=True)
    assert contents(tmp_path / "out") == whole


def test_an_output_that_was_touched_since_is_written_again_by_parts(
    model: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """Its mark no longer stands for it: a file has its size, and neither its time nor its bytes."""
    out = tmp_path / "out"
    for part in ("1/2", "2/2"):
        preshard(model, out, part, sha256=True)
    damaged = next(out.glob("*.distcp"))
    damaged.write_bytes(bytes(damaged.stat().st_size))
    os.utime(damaged, (1, 1))
    for part in ("1/2", "2/2"):
        assert not preshard(model, out, part, sha256=True, overwrite=True).was_there
    assert contents(out) == whole
    late = preshard(model, out, "1/2", sha256=True, overwrite=True)
    assert late.was_there  # the mark is a new one


def test_a_cache_of_the_hub_on_each_machine(make_hub: Callable[..., Path], tmp_path: Path) -> None:
    """The files have other times there, and the names of their content."""
    model = make_hub({f"layers.{n}.weight": torch.randn(8, 6) for n in range(4)})
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
@pytest.mark.parametrize("step", ["adopt", "commit"])
def test_what_is_given_up_during_a_commit_is_not_said_to_be_there(
    step: str, overwrite: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "out", getattr(SharedStaging, step)
    if overwrite:
        shardkit.preshard(model, out, world_size=2, layout="declared")
    before = contents(out) if overwrite else None
    preshard(model, out, "1/2", overwrite=overwrite)

    def late(*args: Any, **options: Any) -> Any:
        assert shardkit.abort(out).aborted
        return real(*args, **options)

    monkeypatch.setattr(SharedStaging, step, late)
    with pytest.raises(IncompleteError, match="was given up meanwhile"):
        preshard(model, out, "2/2", overwrite=overwrite)
    assert (contents(out) if out.exists() else None) == before
