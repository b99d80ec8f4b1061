"""What commit, status and abort do with jobs that went wrong, and with what is no job: real files, in this process."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardkit
from shardkit.cli.parts import abort_lines, status_lines
from shardkit.errors import ResourceError, SourceError, UsageError
from shardkit.files import storage
from shardkit.files.output.contract import JobRecord
from shardkit.files.output.local import LocalOutput
from shardkit.operations.parts.agreement import part_command, typed
from shardkit.operations.parts.part import Part
from tests.operations.parts.tiny import all_but_commit, preshard
from tests.operations.stops import failing


@pytest.fixture
def model(make_hub: Callable[..., Path]) -> Path:
    return make_hub({f"layers.{n}.weight": torch.randn(8, 6) for n in range(4)})


def staged(out: Path) -> list[Path]:
    return list(out.parent.glob(".*.shardkit*"))


class TestNames:
    """What to type names the output, however long its name is."""

    def test_a_long_name_is_shown_whole(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "place" / ("x" * 180)
        out.parent.mkdir()
        preshard(model, out, "1/2")
        (left,) = staged(out)
        assert out.name not in left.name
        monkeypatch.chdir(out.parent)
        result = shardkit.status()
        assert result.outputs == (str(out),)
        (job,) = result.jobs
        assert job.output == str(out)
        eval(job.missing[0][2])  # what it says to type
        assert [path.name for path in out.parent.iterdir()] == [out.name]

    @pytest.mark.parametrize("name", ["../other", "", "\ud800", "other"])
    def test_a_record_that_names_another_output_is_not_believed(
        self, model: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        preshard(model, tmp_path / "out", "1/2")
        record = tmp_path / ".out.shardkit" / "job.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), "output": name}))
        monkeypatch.chdir(tmp_path)
        assert shardkit.status().outputs == (str(tmp_path / "out"),)

    @pytest.mark.parametrize(
        ("command", "expected"),
        [
            ("shardkit preshard a b", "shardkit preshard a b --part 1/2"),
            ("shardkit preshard -q -- -a b", "shardkit preshard -q --part 1/2 -- -a b"),
            ("shardkit preshard 'a -- b' c", "shardkit preshard 'a -- b' c --part 1/2"),
            ("shardkit preshard 'a -- b' -- -c", "shardkit preshard 'a -- b' --part 1/2 -- -c"),
            ("""shardkit preshard 'it'"'"'s -- b' c""", """shardkit preshard 'it'"'"'s -- b' c --part 1/2"""),
        ],
    )
    def test_a_part_is_an_option_wherever_paths_begin(self, command: str, expected: str) -> None:
        record = JobRecord(hash="", command=command, directory="", files=())
        assert part_command(record, Part(number=1, count=2), "out") == expected


class TestCommit:
    """What is no output is not said to be one."""

    @pytest.mark.parametrize("what", ["link", "directory", "file"])
    def test_what_is_there_is_no_output(self, tmp_path: Path, what: str) -> None:
        out = tmp_path / "out"
        if what == "link":
            out.symlink_to("nowhere")
        elif what == "directory":
            out.mkdir()
            (out / "thesis.txt").write_text("mine")
        else:
            out.write_text("mine")
        with pytest.raises(UsageError, match="no output is there"):
            shardkit.commit(out)

    @pytest.mark.parametrize("is_replaced", [False, True])
    def test_a_commit_that_was_interrupted_is_ended_and_names_what_came_late(
        self, model: Path, tmp_path: Path, is_replaced: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out, real = tmp_path / "out", LocalOutput._publish
        if is_replaced:
            preshard(model, out, digest="none")

        with monkeypatch.context() as patch:
            patch.setattr(LocalOutput, "_publish", failing(errno.EIO))
            with pytest.raises(ResourceError):
                preshard(model, out, overwrite=is_replaced)
        (job,) = shardkit.status(out).jobs
        assert job.is_committing
        if is_replaced:

            def meddle(self: LocalOutput, work: str, data: str, old: str) -> None:
                replace(self, work, data, old)
                (Path(data) / "thesis.txt").write_text("mine")

            replace = LocalOutput._replace
            monkeypatch.setattr(LocalOutput, "_replace", meddle)
        assert LocalOutput._publish is real
        result = shardkit.commit(out)
        assert result.by_another
        assert staged(out) == []
        assert shardkit.verify(out, full=True).ok
        kept = [str(path) for path in tmp_path.glob("out.shardkit-replaced-*")]
        assert len(kept) == is_replaced
        assert [kept[0] in warning for warning in result.warnings] == [True] * is_replaced

    def test_a_commit_may_replace_what_came_meanwhile_if_it_says_so(
        self, model: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        all_but_commit(model, out)
        preshard(model, tmp_path / "other")
        (tmp_path / "other").rename(out)
        assert f"next      shardkit commit {out} --overwrite" in "\n".join(status_lines(shardkit.status(out)))
        with pytest.raises(UsageError, match="exists"):
            shardkit.commit(out)
        assert not shardkit.commit(out, overwrite=True).by_another
        assert staged(out) == []


class TestDamage:
    """A job that cannot be read is removed by what the message says."""

    @pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"format": 9}', "[" * 100_000])
    def test_a_record(self, model: Path, tmp_path: Path, content: str) -> None:
        out = tmp_path / "out"
        preshard(model, out, "1/2")
        (tmp_path / ".out.shardkit/job.json").write_text(content)
        for ask in (lambda: shardkit.commit(out), lambda: shardkit.status(out), lambda: preshard(model, out)):
            with pytest.raises(SourceError, match=r"is damaged|another version") as caught:
                ask()
            assert "shardkit abort" in (caught.value.hint or "")
        result = shardkit.abort(out)
        assert result.aborted
        assert result.notes == ()
        assert abort_lines(result) == [f"{out} is not there", "  removed  what was left of a job"]
        assert staged(out) == []
        again = shardkit.abort(out)
        assert (again.aborted, again.notes) == (False, (f"no job is under way for {out}",))

    def test_other_jobs_in_the_directory_are_shown(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("one", "two"):
            preshard(model, tmp_path / name, "1/2")
        (tmp_path / ".one.shardkit/job.json").write_text("{")
        monkeypatch.chdir(tmp_path)
        result = shardkit.status()
        assert result.outputs == (str(tmp_path / "two"), str(tmp_path / "one"))
        assert [job.output for job in result.jobs] == [str(tmp_path / "two")]
        (warning,) = result.warnings
        assert warning.endswith("/.one.shardkit/job.json is damaged; shardkit abort OUTPUT removes the job")

    def test_a_draft_that_is_gone(self, model: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        all_but_commit(model, out)
        (tmp_path / ".out.shardkit/draft/0").unlink()
        assert shardkit.status(out).jobs
        with pytest.raises(SourceError, match="damaged") as caught:
            shardkit.commit(out)
        assert f"shardkit abort {out}" in (caught.value.hint or "")
        assert shardkit.abort(out).jobs
        assert staged(out) == []


class TestOthers:
    """What only has the name of a job's directory stays."""

    @pytest.mark.parametrize("is_directory", [False, True])
    def test_what_is_no_job(self, model: Path, tmp_path: Path, is_directory: bool) -> None:
        out, mine = tmp_path / "out", tmp_path / ".out.shardkit"
        if is_directory:
            mine.mkdir()
            (mine / "thesis.txt").write_text("mine")
        else:
            mine.write_text("mine")
        before = sorted(mine.rglob("*"))
        for ask in (lambda: shardkit.abort(out), lambda: preshard(model, out)):
            with pytest.raises(
                UsageError, match=r"\.out\.shardkit is in the way, and is no job of shardkit's"
            ):
                ask()
        assert sorted(mine.rglob("*")) == before
        assert shardkit.status(out).jobs == ()

    def test_an_empty_directory_is_what_a_file_system_without_locks_leaves(
        self, model: Path, tmp_path: Path
    ) -> None:
        (tmp_path / ".out.shardkit").mkdir()
        assert shardkit.abort(tmp_path / "out").aborted
        assert staged(tmp_path / "out") == []

    @pytest.mark.parametrize("inside", ["out2", "data/out2"])
    def test_no_output_lies_in_the_directory_of_a_job(self, model: Path, tmp_path: Path, inside: str) -> None:
        preshard(model, tmp_path / "out", "1/2")
        with pytest.raises(UsageError, match="lies in the directory of the job for"):
            preshard(model, tmp_path / ".out.shardkit" / inside)


def test_the_commit_of_a_save_that_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, net = tmp_path / "out", torch.nn.Linear(2, 2)
    with monkeypatch.context() as patch:
        patch.setattr(LocalOutput, "_publish", failing(errno.EIO))
        with pytest.raises(ResourceError):
            shardkit.save(net, out)
    lines = "\n".join(status_lines(shardkit.status(out)))
    assert (
        "state     its output is being committed, or that was interrupted: shardkit commit OUTPUT completes it"
        in lines
    )
    assert "0 of 0" not in lines
    assert shardkit.commit(out).by_another
    assert shardkit.verify(out, full=True).ok
    assert staged(out) == []


def test_a_save_that_is_aborted_has_no_number_of_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with LocalOutput(str(out), may_replace=lambda *_: None, foreign_files=lambda *_: []) as output:
        output.begin(JobRecord(hash="0" * 64, command="shardkit.save(...)", directory="", files=()))
        lines = abort_lines(shardkit.abort(out))
    assert lines[1:] == ["  removed  all files of shardkit.save(...)"]


@pytest.mark.parametrize("is_file", [False, True])
def test_a_save_where_something_is_names_its_own_option(tmp_path: Path, is_file: bool) -> None:
    out, net = tmp_path / "out", torch.nn.Linear(2, 2)
    if is_file:
        out.write_text("mine")
    else:
        shardkit.save(net, out)
    with pytest.raises(UsageError, match="exists") as caught:
        shardkit.save(net, out)
    hint = caught.value.hint or ""
    assert "--" not in hint
    assert ("overwrite=True" in hint) == (not is_file)


def test_a_command_is_recorded_without_its_part(model: Path, tmp_path: Path) -> None:
    with typed("shardkit preshard model -- out"):
        preshard(model, tmp_path / "out", "1/2")
    (job,) = shardkit.status(tmp_path / "out").jobs
    assert storage.current_directory() == job.directory
    assert job.missing == (("2/2", 2, "shardkit preshard model --part 2/2 -- out"),)
