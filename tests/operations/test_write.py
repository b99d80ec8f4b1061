"""The one way to write a directory, on real files: whole or not at all, resumed after a kill, and nothing left behind."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardkit.errors import IncompleteError, IntegrityError, Interrupted, ResourceError, UsageError
from shardkit.files import storage
from shardkit.files.output.local import LocalOutput
from shardkit.formats.hub.directory import open_model
from shardkit.formats.hub.safetensors import OutputTensor, SafetensorsImages
from shardkit.formats.owned import OutputKind
from shardkit.operations.commit import abort
from shardkit.operations.options import WriteOptions
from shardkit.operations.parts.agreement import typed
from shardkit.operations.write import Writer, Writing
from shardkit.transfer.checks import OFF
from shardkit.transfer.execute import FileDigest
from shardkit.transfer.plan import TransferPlan, build_plan
from tests.operations.stops import interrupt
from tests.worlds.processes import fork_server

TENSORS = {name: torch.arange(start, start + 512.0) for start, name in enumerate(("a", "b", "c", "d"))}
FILES = [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
INDEX = "model.safetensors.index.json"
KILL_ME = """
import json, sys
from tests.operations.test_write import write_until_killed
write_until_killed(*json.loads(sys.argv[1]))
"""


@dataclass(frozen=True, kw_only=True)
class Options(WriteOptions):
    """Those of a verb that has `strict`."""

    strict: bool = False


@dataclass(frozen=True)
class Copy:
    """A Hub model is written again, with a file for each tensor."""

    plan: TransferPlan
    output: SafetensorsImages
    option: str = ""

    @property
    def decided(self) -> dict[str, object]:
        return {"option": self.option}


def copy_of(source: Path, option: str = "") -> Copy:
    catalog = open_model(str(source)).catalog
    tensors = [OutputTensor(name, name, entry.dtype, entry.shape) for name, entry in catalog.tensors.items()]
    images = SafetensorsImages(tensors, max_shard_bytes=2048)
    return Copy(build_plan(images, catalog), images, option)


class Index:
    """Writes what makes a model of the files; the hooks are what a test wants to happen meanwhile."""

    def __init__(
        self, content: bytes, on_file: Callable[[int], object], on_finish: Callable[[], object]
    ) -> None:
        self._content, self.on_file, self._on_finish = content, on_file, on_finish
        self.directory = ""

    def __call__(self, directory: str, /, *, folder: str = "") -> Index:
        self.directory = directory
        return self

    def finish(self, digests: Mapping[str, FileDigest], scattered: Mapping[str, int]) -> None:
        assert sorted(digests) == FILES
        self._on_finish()
        storage.write_file(os.path.join(self.directory, INDEX), self._content)


def index_of(
    job: Copy,
    on_file: Callable[[int], object] = lambda count: None,
    on_finish: Callable[[], object] = lambda: None,
) -> Index:
    content = job.output.index()
    assert content is not None
    return Index(content, on_file, on_finish)


def write(
    source: Path,
    out: Path,
    *,
    job: Copy | None = None,
    describe: Index | None = None,
    needed_bytes: int = 1 << 16,
    **writing: bool | str | Path,
) -> dict[str, object]:
    """Do what a verb does; return what it can say."""
    job = job or copy_of(source)
    describe = describe or index_of(job)
    options = Options(jobs=1, **writing)  # type: ignore[arg-type]
    writer = Writer(options, kind=OutputKind.HUB, looks_late=True)
    writer.check_destination(str(out), str(source))
    writer.destination.check_beside({})
    writer.find_manifests([job.plan.catalog], str(source))
    counted = itertools.count()
    on_file = describe.on_file
    writer.write(
        Writing(
            job=job,
            describe=describe,
            needed_bytes=needed_bytes,
            on_file=lambda directory, digest: on_file(next(counted)),
        )
    )
    return writer.facts(())


def write_until_killed(source: str, out: str, num_files: int) -> None:
    """Finish some files, then die."""
    add, finished = LocalOutput.add, itertools.count(1)

    def add_and_die(*args: Any) -> None:
        add(*args)
        if next(finished) == num_files:
            os.kill(os.getpid(), signal.SIGKILL)

    LocalOutput.add = add_and_die  # type: ignore[method-assign]
    write(Path(source), Path(out))


def killed_after(num_files: int, source: Path, out: Path) -> Path:
    """Have a process killed once it has finished as many files, or one that was under way more.

    Returns:
        The staging directory that it left.
    """
    request = {"code": KILL_ME, "argument": json.dumps([str(source), str(out), num_files])}
    assert fork_server().run(request).returncode == -signal.SIGKILL
    assert not out.exists()
    (left,) = staged(out)
    return left


def finished_in(left: Path) -> list[str]:
    return [FILES[int(note.stem)] for note in sorted((left / "done").iterdir())]


def staged(out: Path) -> list[Path]:
    """What lies beside a destination under its hidden name."""
    return list(out.parent.glob(f".{out.name}.shardkit*"))


def check_whole(out: Path) -> None:
    """The output is complete, in a stock reader's eyes, and nothing else is left."""
    assert sorted(path.name for path in out.iterdir()) == sorted([*FILES, INDEX])
    for name, file in zip(TENSORS, FILES, strict=True):
        (found,) = load_file(out / file).items()
        assert found[0] == name
        assert torch.equal(found[1], TENSORS[name])
    assert staged(out) == []


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    save_file(TENSORS, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "place").mkdir()
    return tmp_path / "place" / "out"


class TestAppearing:
    """An output has its name when it is whole, and not before."""

    def test_what_was_moved_and_described_is_there(self, source: Path, out: Path) -> None:
        facts = write(source, out)
        check_whole(out)
        sizes = tuple((out / name).stat().st_size for name in FILES)
        assert facts["output"] == str(out)
        assert facts["num_files"] == 4
        assert facts["file_bytes"] == sizes
        assert facts["written_bytes"] == sum(sizes)
        assert facts["read_bytes"] == 4 * 2048
        assert facts["resumed_files"] == 0
        assert facts["dry_run"] is False

    def test_until_the_end_it_lies_beside_under_another_name(self, source: Path, out: Path) -> None:
        job = copy_of(source)

        def look() -> None:
            assert not out.exists()
            (place,) = staged(out)
            assert Path(index.directory).is_relative_to(place)
            assert sorted(os.listdir(place / "data")) == FILES

        index = index_of(job, on_finish=look)
        write(source, out, job=job, describe=index)
        check_whole(out)

    def test_a_dry_run_says_the_same_and_writes_nothing(self, source: Path, out: Path) -> None:
        dry = write(source, out, dry_run=True)
        assert list(out.parent.iterdir()) == []
        wet = write(source, out)
        differ = {name for name in wet if dry[name] != wet[name]} - {"elapsed_s", "moving_s", "free_bytes"}
        assert differ <= {"dry_run", "checked_bytes", "unchecked"}  # what was compared is known afterwards

    def test_what_exists_is_replaced_only_if_asked(self, source: Path, out: Path) -> None:
        write(source, out)
        (out / FILES[0]).unlink()
        with pytest.raises(UsageError, match="--overwrite"):
            write(source, out)
        assert not (out / FILES[0]).exists()
        write(source, out, overwrite=True)
        check_whole(out)

    def test_an_empty_directory_is_as_good_as_none(self, source: Path, out: Path) -> None:
        out.mkdir()
        write(source, out, dry_run=True)
        assert list(out.parent.rglob("*")) == [out]
        write(source, out)
        check_whole(out)

    @pytest.mark.parametrize("is_made", [False, True])
    @pytest.mark.parametrize("moment", ["before the last look", "after it"])
    def test_what_somebody_puts_there_meanwhile_stays(
        self, source: Path, out: Path, moment: str, is_made: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nor is the work lost: the same command ends it once that is moved away."""
        if is_made:
            out.mkdir()

        def meddle(*paths: str) -> None:
            out.mkdir(exist_ok=True)
            (out / "thesis.txt").write_text("mine")

        job, plain = copy_of(source), storage.sync_directories
        describe = index_of(job, on_finish=meddle) if moment == "before the last look" else index_of(job)
        with monkeypatch.context() as patch:
            if moment == "after it":
                patch.setattr(storage, "sync_directories", lambda path: (meddle(), plain(path)))
            with pytest.raises(UsageError, match="exists"):
                write(source, out, job=job, describe=describe)
        assert [path.name for path in out.rglob("*")] == ["thesis.txt"]
        with pytest.raises(UsageError, match="exists"):
            write(source, out)
        (out / "thesis.txt").unlink()
        out.rmdir()
        write(source, out)
        check_whole(out)
        assert list(out.parent.iterdir()) == [out]

    @pytest.mark.parametrize("has_renameat2", [True, False])
    @pytest.mark.parametrize("moment", ["before the last look", "after it"])
    def test_what_somebody_puts_into_the_old_output_meanwhile_stays(
        self, source: Path, out: Path, moment: str, has_renameat2: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(source, out)
        warnings = list[str]()
        if not has_renameat2:
            monkeypatch.setattr(storage, "renameat2", lambda *_: False)

        def meddle(*paths: str) -> None:
            (out / "thesis.txt").write_text("mine")

        job = copy_of(source)
        with monkeypatch.context() as patch:
            if moment == "before the last look":
                describe = index_of(job, on_finish=meddle)
                with pytest.raises(UsageError, match="holds what shardkit did not write") as caught:
                    write(source, out, job=job, describe=describe, overwrite=True)
                assert caught.value.problems == ("thesis.txt",)
                assert (out / "thesis.txt").read_text() == "mine"
                (out / "thesis.txt").unlink()
                assert write(source, out, overwrite=True)["resumed_files"] == len(FILES)
            else:
                exchange = LocalOutput._replace
                patch.setattr(LocalOutput, "_replace", lambda *args: (meddle(), exchange(*args)))
                patch.setattr(LocalOutput, "_check_replaceable", lambda *_: None)
                write(source, out, job=job, overwrite=True, on_warning=warnings.append)  # type: ignore[arg-type]
                (kept,) = out.parent.glob("out.shardkit-replaced-*")
                assert (kept / "thesis.txt").read_text() == "mine"
                assert [str(kept) in warning for warning in warnings] == [True]
        check_whole(out)
        assert len(list(out.parent.iterdir())) == (1 if moment == "before the last look" else 2)


class TestFailing:
    """An error leaves nothing of the new output, and all of the old one."""

    def test_too_little_room_is_found_before_anything_is_written(self, source: Path, out: Path) -> None:
        with pytest.raises(ResourceError, match="No space left"):
            write(source, out, needed_bytes=1 << 62)
        assert list(out.parent.iterdir()) == []

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_a_file_that_cannot_grow(self, source: Path, out: Path, overwrite: bool) -> None:
        """As on a full disk, by the kernel's limit on the size of a file."""
        if overwrite:
            write(source, out)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1900, limits[1]))
        try:
            with pytest.raises(ResourceError):
                write(source, out, overwrite=overwrite)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if overwrite:
            check_whole(out)
        else:
            assert list(out.parent.iterdir()) == []

    @pytest.mark.parametrize(
        ("raised", "expected", "said"),
        [
            (OSError(28, "No space left on device"), ResourceError, "No space left on device"),
            (ResourceError("a disk fails"), ResourceError, "a disk fails"),
            (IntegrityError("the source has changed"), IntegrityError, "the source has changed"),
            (ZeroDivisionError("a bug"), ZeroDivisionError, "a bug"),
        ],
        ids=["system", "ours", "damaged", "bug"],
    )
    @pytest.mark.parametrize("moment", ["on_file", "on_finish"])
    @pytest.mark.parametrize("overwrite", [False, True])
    def test_an_error_in_the_middle(
        self,
        source: Path,
        out: Path,
        raised: Exception,
        expected: type[Exception],
        said: str,
        moment: str,
        overwrite: bool,
    ) -> None:
        """What was finished stays for the same command, and is named; nothing stays if nothing was finished."""
        if overwrite:
            write(source, out)
        job, warnings = copy_of(source), list[str]()

        def fail(*counts: int) -> None:
            if counts != (0,):
                raise raised

        describe = index_of(job, **{moment: fail})
        with pytest.raises(expected, match=said):
            write(source, out, job=job, describe=describe, overwrite=overwrite, on_warning=warnings.append)  # type: ignore[arg-type]
        if overwrite:
            assert sorted(path.name for path in out.iterdir()) == sorted([*FILES, INDEX])
        else:
            assert not out.exists()
        num_finished = sum(len(finished_in(left)) for left in staged(out))
        if isinstance(raised, IntegrityError) and moment == "on_file":
            assert num_finished == 0
        assert any("run the same command again to resume" in warning for warning in warnings) == (
            num_finished > 0 and expected is not ZeroDivisionError
        )
        assert write(source, out, overwrite=overwrite)["resumed_files"] == num_finished
        check_whole(out)

    def test_what_is_kept_does_not_hide_the_error(self, source: Path, out: Path) -> None:
        """With `strict` as well: that files stay beside the output is no warning about the model."""
        job, warnings = copy_of(source), list[str]()

        def fail() -> None:
            raise ResourceError("a disk fails")

        with pytest.raises(ResourceError, match="a disk fails"):
            write(
                source,
                out,
                job=job,
                describe=index_of(job, on_finish=fail),
                strict=True,
                on_warning=warnings.append,  # type: ignore[arg-type]
            )
        (warning,) = warnings
        assert warning.startswith("4 of 4 files are finished and kept")

    def test_what_other_parts_have_finished_is_not_said_to_resume_whatever_the_source(
        self, source: Path, out: Path
    ) -> None:
        write(source, out, part="1/2")
        job, warnings = copy_of(source), list[str]()
        os.truncate(source / "model.safetensors", 5000)
        with pytest.raises(IntegrityError):
            write(source, out, job=job, part="2/2", on_warning=warnings.append)  # type: ignore[arg-type]
        (warning,) = warnings
        assert warning.startswith("2 of 4 files are finished and kept: if the source is unchanged, run the")
        assert warning.endswith(f"`shardkit abort {out}`")

    def test_a_source_that_is_damaged_gives_no_output(self, source: Path, out: Path) -> None:
        job = copy_of(source)
        os.truncate(source / "model.safetensors", 5000)
        with pytest.raises(IntegrityError):
            write(source, out, job=job)
        assert list(out.parent.iterdir()) == []


class TestExisting:
    """Somebody else has made the output while this job was written."""

    @pytest.fixture
    def others(self, source: Path, tmp_path: Path) -> Path:
        """What they have made."""
        (tmp_path / "elsewhere").mkdir()
        write(source, tmp_path / "elsewhere" / "out", job=copy_of(source, option="another"))
        return tmp_path / "elsewhere" / "out"

    @pytest.mark.parametrize("is_aborted", [False, True])
    def test_an_output_that_may_stay_ends_the_job(
        self, source: Path, out: Path, others: Path, is_aborted: bool
    ) -> None:
        job = copy_of(source)

        def meddle() -> None:
            shutil.copytree(others, out)
            assert not is_aborted or abort(out).aborted  # by a twin

        assert write(source, out, job=job, describe=index_of(job, on_finish=meddle), exist_ok=True)[
            "was_there"
        ]
        check_whole(out)

    def test_what_is_kept_is_named(self, source: Path, out: Path, others: Path) -> None:
        job, warnings = copy_of(source), list[str]()
        describe = index_of(job, on_finish=lambda: shutil.copytree(others, out))
        with pytest.raises(UsageError, match="exists"):
            write(source, out, job=job, describe=describe, on_warning=warnings.append)  # type: ignore[arg-type]
        (warning,) = warnings
        assert warning.startswith("4 of 4 files are finished and kept: with --overwrite run the same command")
        assert warning.endswith(f"`shardkit abort {out}`")
        assert write(source, out, overwrite=True)["resumed_files"] == 4
        check_whole(out)


class TestResuming:
    """What a run had finished is not written again; everything else is."""

    def test_after_an_interrupt(self, source: Path, out: Path) -> None:
        job = copy_of(source)

        def interrupt(count: int) -> None:
            if count == 2:
                raise KeyboardInterrupt

        with pytest.raises(Interrupted, match="of 4 files are finished and kept"):
            write(source, out, job=job, describe=index_of(job, on_file=interrupt))
        assert not out.exists()
        assert len(staged(out)) == 1
        resumed = write(source, out)["resumed_files"]
        assert resumed in (2, 3, 4)  # files that were under way came to their end
        check_whole(out)

    def test_after_a_kill(self, source: Path, out: Path) -> None:
        left = killed_after(2, source, out)
        data, names = left / "data", finished_in(left)
        assert len(names) >= 2
        finished = {name: (data / name).stat() for name in names}
        for name in set(FILES) - set(names):
            (data / name).write_bytes(b"half of it")
        assert write(source, out)["resumed_files"] == len(names)
        check_whole(out)
        for name, before in finished.items():
            after = (out / name).stat()
            assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), name

    @pytest.mark.parametrize("change", ["source", "option"])
    def test_another_job_is_refused_until_the_first_is_gone(
        self, source: Path, out: Path, change: str
    ) -> None:
        left = killed_after(2, source, out)
        if change == "source":
            os.utime(source / "model.safetensors", (1, 1))
        with pytest.raises(UsageError, match="another job is under way") as caught:
            write(source, out, job=copy_of(source, option=change))
        assert f"shardkit abort {out}" in (caught.value.hint or "")
        assert finished_in(left)
        assert write(source, out, job=copy_of(source, option=change), overwrite=True)["resumed_files"] == 0
        check_whole(out)

    def test_a_dry_run_refuses_another_job_too(self, source: Path, out: Path) -> None:
        killed_after(2, source, out)
        another = copy_of(source, option="another")
        with pytest.raises(UsageError, match="another job is under way"):
            write(source, out, job=another, dry_run=True)
        write(source, out, job=another, dry_run=True, overwrite=True)
        write(source, out, dry_run=True)
        assert write(source, out)["resumed_files"] >= 2  # type: ignore[operator]

    @pytest.mark.parametrize("again", ["shardkit consolidate run out", "shardkit consolidate other out"])
    def test_the_same_command_says_that_the_source_has_changed(
        self, source: Path, out: Path, again: str
    ) -> None:
        job = copy_of(source)

        def interrupt(count: int) -> None:
            if count == 2:
                raise KeyboardInterrupt

        with typed("shardkit consolidate run out"), pytest.raises(Interrupted):
            write(source, out, job=job, describe=index_of(job, on_file=interrupt))
        os.utime(source / "model.safetensors", (1, 1))
        with typed(again), pytest.raises(UsageError, match="another job is under way") as caught:
            write(source, out)
        (line,) = caught.value.problems
        assert line.startswith("it was begun by `shardkit consolidate run out`")
        assert ("since then the source" in line) == (again == "shardkit consolidate run out")

    def test_a_job_that_has_finished_nothing_gives_way(self, source: Path, out: Path) -> None:
        left = killed_after(1, source, out)
        for note in (left / "done").iterdir():
            note.unlink()
        write(source, out, job=copy_of(source, option="another"))
        check_whole(out)


def test_what_another_process_aborts_is_not_made(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = copy_of(source)
    with pytest.raises(IncompleteError, match="aborted by another process"):
        write(source, out, job=job, describe=index_of(job, on_finish=lambda: abort(out)))
    assert list(out.parent.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_job_of_another_user_is_not_joined(source: Path, out: Path) -> None:
    left = killed_after(1, source, out)
    os.chown(left, 65534, 65534)
    noted = sorted((left / "done").iterdir())
    for option in ("", "another"):
        with pytest.raises(UsageError, match="belongs to another user"):
            write(source, out, job=copy_of(source, option=option))
    assert sorted((left / "done").iterdir()) == noted
    os.chown(left, 0, -1)
    assert write(source, out)["resumed_files"] == len(noted)


def test_what_is_finished_needs_no_room(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = killed_after(2, source, out)
    num_files = len(finished_in(left))
    needed = copy_of(source).plan.written_bytes
    monkeypatch.setattr("shardkit.operations.destination.free_bytes", lambda path: needed * 3 // 4)
    assert write(source, out, needed_bytes=needed)["resumed_files"] == num_files
    with pytest.raises(ResourceError, match="No space left"):
        write(source, out, needed_bytes=needed, overwrite=True)


def test_an_interrupt_while_the_rest_of_a_job_is_removed(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is there: that is said, and not that the run was interrupted."""

    def interrupt(path: str) -> bool:
        if "-trash-" in path:
            raise KeyboardInterrupt
        return remove_tree(path)

    remove_tree = storage.remove_tree
    with monkeypatch.context() as patch:
        patch.setattr(storage, "remove_tree", interrupt)
        facts = write(source, out)
    assert (facts["was_there"], facts["num_files"]) == (False, 4)
    (left,) = staged(out)
    assert "-trash-" in left.name
    write(source, out, overwrite=True)
    check_whole(out)


@pytest.mark.parametrize(
    "raised", [KeyboardInterrupt(), OSError(5, "Input/output error")], ids=["ctrl-c", "EIO"]
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_output_that_has_its_name_is_not_said_to_be_absent(
    source: Path, out: Path, raised: BaseException, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is any file of it said to be kept."""
    warnings = list[str]()
    if overwrite:
        write(source, out, job=copy_of(source, option="another"))
    before = out.stat().st_ino if overwrite else 0

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any) -> Any:
            done = call(*args)
            if args[1] == str(out):
                raise raised
            return done

        return make

    with monkeypatch.context() as patch:
        for name in ("rename", "renameat2"):
            patch.setattr(storage, name, failing(getattr(storage, name)))
        with pytest.raises((Interrupted, ResourceError), match="is there, and whole"):
            write(source, out, overwrite=overwrite, on_warning=warnings.append)  # type: ignore[arg-type]
    assert warnings == []
    assert out.stat().st_ino != before
    assert len(staged(out)) == 1
    assert write(source, out)["was_there"]
    check_whole(out)


def test_an_interrupted_commit_is_ended_by_the_same_command(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(LocalOutput, "_replace", interrupt)
        with pytest.raises(Interrupted):
            write(source, out)
    assert not out.exists()
    assert write(source, out)["was_there"]
    check_whole(out)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (WriteOptions(digest="md5"), "--digest 'md5' is not one of crc32, none"),
        (WriteOptions(jobs=0), "--jobs must be at least 1, not 0"),
        (WriteOptions(max_memory="1MiB"), "--max-memory must be at least 2MiB, not 1MiB"),
        (WriteOptions(jobs=5, max_memory="2MiB"), "--max-memory 2MiB is too little for --jobs 5"),
    ],
    ids=["digest", "jobs", "memory", "memory for jobs"],
)
def test_what_cannot_be_moved_is_refused_first(options: WriteOptions, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Writer(options)
    assert said in str(caught.value.to_json()["message"])


def test_a_source_that_is_not_compared_is_warned_of(source: Path, out: Path) -> None:
    told: list[str] = []
    writer = Writer(WriteOptions(check_source=False, on_warning=told.append))
    writer.find_manifests([copy_of(source).plan.catalog], str(source))
    assert told == [OFF]
    assert writer.facts(["the verb's own"])["warnings"] == ("the verb's own", OFF)
