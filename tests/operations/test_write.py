"""The one way to write a directory, on real files: whole or not at all, resumed after a kill, and nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardkit.errors import IntegrityError, Interrupted, ResourceError, UsageError
from shardkit.files import storage
from shardkit.files.place.disk import DiskPlace
from shardkit.files.shared import SharedStaging, runs_of
from shardkit.files.staging import nothing
from shardkit.formats.hub.directory import open_model
from shardkit.formats.hub.safetensors import OutputTensor, SafetensorsImages
from shardkit.formats.owned import OutputKind
from shardkit.operations.options import WriteOptions
from shardkit.operations.parts.divided import Divided
from shardkit.operations.parts.notes import Note
from shardkit.operations.write import Writer, Writing
from shardkit.transfer.checks import OFF
from shardkit.transfer.execute import FileDigest
from shardkit.transfer.plan import TransferPlan, build_plan
from tests.worlds.processes import fork_server

TENSORS = {name: torch.arange(start, start + 512.0) for start, name in enumerate(("a", "b", "c", "d"))}
FILES = [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
INDEX = "model.safetensors.index.json"
KILL_ME = """
import json, sys
from tests.operations.test_write import write_until_killed
write_until_killed(*json.loads(sys.argv[1]))
"""


@dataclass(frozen=True)
class Copy:
    """A Hub model is written again, with a file for each tensor."""

    plan: TransferPlan
    output: SafetensorsImages
    option: str = ""

    @property
    def decided(self) -> dict[str, object]:
        return {"option": self.option}

    @property
    def beside(self) -> tuple[str, ...]:
        return ()


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

    def __call__(self, directory: str, /, *, shards: str | None = None) -> Index:
        self.directory = directory
        return self

    def add_file(self, digest: FileDigest) -> None:
        pass

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
    options = WriteOptions(jobs=1, **writing)  # type: ignore[arg-type]
    writer = Writer(options, kind=OutputKind.HUB, looks_late=True)
    writer.check_destination(str(out), str(source))
    writer.destination.check_beside({})
    writer.find_manifests([job.plan.catalog], str(source))
    with after_each_file(describe.on_file):
        writer.write(Writing(job=job, describe=describe, needed_bytes=needed_bytes))
    return writer.facts(())


@contextlib.contextmanager
def after_each_file(hook: Callable[[int], object]) -> Iterator[None]:
    """Call a hook with the number of files that have been finished, whenever one has."""
    publish, counted = Divided._publish, itertools.count(1)

    def hooked(divided: Divided, directory: str, number: int, note: Note) -> None:
        publish(divided, directory, number, note)
        hook(next(counted))

    Divided._publish = hooked  # type: ignore[method-assign]
    try:
        yield
    finally:
        Divided._publish = publish  # type: ignore[method-assign]


def write_until_killed(source: str, out: str, num_files: int) -> None:
    """Write some files, then die."""

    def die(count: int) -> None:
        if count == num_files:
            os.kill(os.getpid(), signal.SIGKILL)

    job = copy_of(Path(source))
    write(Path(source), Path(out), job=job, describe=index_of(job, on_file=die))


def killed_after(num_files: int, source: Path, out: Path) -> Path:
    """Have a process killed once it has written as many files, or one that was under way more.

    Returns:
        The staging directory that it left.
    """
    request = {"code": KILL_ME, "argument": json.dumps([str(source), str(out), num_files])}
    assert fork_server().run(request).returncode == -signal.SIGKILL
    assert not out.exists()
    (left,) = staged(out)
    return left


def finished_in(left: Path) -> list[str]:
    (run,) = runs_of(str(left.parent / "out"), nothing)
    assert run.path == str(left)
    missing = run.done.missing(len(FILES))
    return [name for number, name in enumerate(FILES) if number not in missing]


def staged(out: Path) -> list[Path]:
    """What lies beside a destination under its hidden name."""
    return list(out.parent.glob(f".{out.name}.shardkit-*"))


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
            assert sorted(os.listdir(index.directory)) == FILES

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

    def test_what_somebody_puts_into_an_empty_directory_meanwhile_stays(
        self, source: Path, out: Path
    ) -> None:
        out.mkdir()
        job = copy_of(source)
        index = index_of(job, on_finish=lambda: (out / "thesis.txt").write_text("mine"))
        with pytest.raises(UsageError, match="appeared while it was being written"):
            write(source, out, job=job, describe=index)
        assert [path.name for path in out.parent.rglob("*")] == ["out", "thesis.txt"]

    def test_what_somebody_puts_there_meanwhile_stays(self, source: Path, out: Path) -> None:
        def meddle() -> None:
            out.mkdir()
            (out / "thesis.txt").write_text("mine")

        job = copy_of(source)
        with pytest.raises(UsageError):
            write(source, out, job=job, describe=index_of(job, on_finish=meddle))
        assert [path.name for path in out.parent.rglob("*")] == ["out", "thesis.txt"]

    @pytest.mark.parametrize("has_renameat2", [True, False])
    @pytest.mark.parametrize("moment", ["before the last look", "after it"])
    def test_what_somebody_puts_into_the_old_output_meanwhile_stays(
        self, source: Path, out: Path, moment: str, has_renameat2: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nor is the work lost: the same command goes on once it is moved away."""
        write(source, out)
        before, plain = (out / INDEX).read_bytes(), storage.sync_directories
        if not has_renameat2:
            monkeypatch.setattr(storage, "renameat2", lambda *_: False)

        def meddle(*paths: str) -> None:
            (out / "thesis.txt").write_text("mine")

        job = copy_of(source)
        describe = index_of(job, on_finish=meddle) if moment == "before the last look" else index_of(job)
        with monkeypatch.context() as patch:
            if moment == "after it":
                patch.setattr(storage, "sync_directories", lambda path: (meddle(), plain(path)))
            with pytest.raises(UsageError, match="holds what shardkit did not write") as caught:
                write(source, out, job=job, describe=describe, overwrite=True)
        (left,) = staged(out)
        assert str(left) in (caught.value.hint or "")
        assert caught.value.problems == ("thesis.txt",)
        assert ((out / "thesis.txt").read_text(), (out / INDEX).read_bytes()) == ("mine", before)
        with pytest.raises(UsageError, match="holds what shardkit did not write"):
            write(source, out, overwrite=True)
        (out / "thesis.txt").unlink()
        assert write(source, out, overwrite=True)["resumed_files"] == len(FILES)
        check_whole(out)
        assert list(out.parent.iterdir()) == [out]


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
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
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
            (
                OSError(28, "No space left on device"),
                ResourceError,
                "cannot write to .*: No space left on device",
            ),
            (IntegrityError("the source has changed"), IntegrityError, "the source has changed"),
            (ZeroDivisionError("a bug"), ZeroDivisionError, "a bug"),
        ],
        ids=["system", "ours", "bug"],
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
        if overwrite:
            write(source, out)
        job = copy_of(source)

        def fail(*count: int) -> None:
            raise raised

        with pytest.raises(expected, match=said):
            write(source, out, job=job, describe=index_of(job, **{moment: fail}), overwrite=overwrite)
        if overwrite:
            check_whole(out)
        else:
            assert list(out.parent.iterdir()) == []

    def test_a_source_that_is_damaged_gives_no_output(self, source: Path, out: Path) -> None:
        job = copy_of(source)
        os.truncate(source / "model.safetensors", 5000)
        with pytest.raises(IntegrityError):
            write(source, out, job=job)
        assert list(out.parent.iterdir()) == []


class TestResuming:
    """What a run had finished is not written again; everything else is."""

    def test_after_an_interrupt(self, source: Path, out: Path) -> None:
        job = copy_of(source)

        def interrupt(count: int) -> None:
            if count == 2:
                raise KeyboardInterrupt

        with pytest.raises(Interrupted, match="what was finished is kept beside it"):
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
        (data / INDEX).write_bytes(b"half of it")
        assert write(source, out)["resumed_files"] == len(names)
        check_whole(out)
        for name, before in finished.items():
            after = (out / name).stat()
            assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), name

    def test_a_finished_file_that_was_changed_is_made_again(self, source: Path, out: Path) -> None:
        left = killed_after(2, source, out)
        first, *others = finished_in(left)
        with open(left / "data" / first, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
        assert write(source, out)["resumed_files"] == len(others)
        check_whole(out)

    @pytest.mark.parametrize("change", ["source", "option", "begin anew"])
    def test_another_job_begins_anew(self, source: Path, out: Path, change: str) -> None:
        killed_after(2, source, out)
        if change == "source":
            os.utime(source / "model.safetensors", (1, 1))
        job = copy_of(source, option=change)
        assert write(source, out, job=job, resume=change != "begin anew")["resumed_files"] == 0
        check_whole(out)


def test_a_persons_files_never_become_part_of_the_output(source: Path, out: Path) -> None:
    """Whatever their names and their place; and a later run still knows them for what they are."""
    left = killed_after(1, source, out)
    names = ("data/mine.safetensors", "data/config.json", "data/mine.txt", "done/notes.txt", "work/notes.txt")
    for name in (*names, "parts/notes.txt", "kept"):
        (left / name).write_bytes(name.encode())
    write(source, out)
    assert sorted(path.name for path in out.iterdir()) == sorted([*FILES, INDEX])
    for again in (False, True):
        if again:
            write(source, out, overwrite=True)
        (stayed,) = staged(out)
        found = {file.read_text() for file in stayed.rglob("*") if file.is_file()}
        assert found == {*names, "parts/notes.txt", "kept"}


def test_what_is_removed_may_leave_files_of_a_person(source: Path, out: Path) -> None:
    left = killed_after(1, source, out)
    (left / "data" / "mine.safetensors").write_text("mine")
    for option in ("another", "and another"):
        write(source, out, job=copy_of(source, option=option), overwrite=True)
        (stayed,) = staged(out)
        assert [file.name for file in stayed.rglob("*") if file.is_file()] == ["mine.safetensors"]


@pytest.mark.parametrize("moment", ["_make", "commit"])
def test_what_another_process_removes_is_written_again(
    moment: str, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of another plan or of another host takes this one for dead, also between its last file and its output."""
    original, removed = getattr(Divided, moment), list[Path]()

    def remove_first(divided: Divided, *args: str) -> bool:
        if not removed:
            removed.extend(staged(out))
            shutil.rmtree(removed[0])
        return bool(original(divided, *args))

    monkeypatch.setattr(Divided, moment, remove_first)
    write(source, out)
    assert removed
    check_whole(out)


def test_an_old_output_is_looked_through_also_while_a_twin_begins(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(source, out)
    ask = DiskPlace._ask

    def after_a_twin(place: DiskPlace, look: Callable[..., object], *old: str) -> None:
        if old:
            Path(*old, "thesis.txt").write_text("mine")
            assert not place.notebook.reopen()  # as another process does when it begins
            assert Path(*old).exists()
        ask(place, look, *old)

    monkeypatch.setattr(DiskPlace, "_ask", after_a_twin)
    with pytest.raises(UsageError, match="holds what shardkit did not write"):
        write(source, out, overwrite=True)
    assert (out / "thesis.txt").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_another_user_left_stays(source: Path, out: Path) -> None:
    left = killed_after(1, source, out)
    os.chown(left, 65534, 65534)
    noted = sorted((left / "done").iterdir())
    for resume in (True, False):
        with pytest.raises(UsageError, match="belongs to another user"):
            write(source, out, resume=resume)
    assert sorted((left / "done").iterdir()) == noted
    (left / "work").rename(work := out.parent / "work")
    with pytest.raises(UsageError, match="belongs to another user"):
        write(source, out)
    work.rename(left / "work")
    write(source, out, job=copy_of(source, option="another"))
    assert staged(out) == [left]
    shutil.rmtree(out)
    os.chown(left, 0, -1)
    shutil.copytree(left, kept := out.parent / "kept", symlinks=True)
    write(source, out)
    kept.rename(left)
    os.chown(left, 65534, -1)
    assert write(source, out, exist_ok=True)["was_there"]
    assert staged(out) == [left]


def test_whose_workers_cannot_be_listed_is_not_taken_for_dead(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = killed_after(1, source, out)
    (run,) = runs_of(str(out), nothing)
    assert run.is_over
    listdir = storage.listdir

    def refuse(path: str) -> list[str]:
        if path == str(left / "work"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return listdir(path)

    monkeypatch.setattr(storage, "listdir", refuse)
    assert not run.is_over


def test_what_another_host_finished_needs_no_room(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = killed_after(2, source, out)
    num_files = len(finished_in(left))
    for worker in (left / "work").iterdir():
        worker.rename(worker.with_name(f"01234567-{worker.name.partition('-')[2]}"))
    needed = copy_of(source).plan.written_bytes
    monkeypatch.setattr("shardkit.operations.destination.free_bytes", lambda path: needed * 3 // 4)
    assert write(source, out, needed_bytes=needed)["resumed_files"] == num_files
    with pytest.raises(ResourceError, match="No space left"):
        write(source, out, needed_bytes=needed, overwrite=True)


def test_an_interrupt_after_another_process_has_made_the_output(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Divided.commit

    def by_another(divided: Divided) -> bool:
        assert commit(divided)
        notebook = divided.place.notebook
        assert isinstance(notebook, SharedStaging)
        notebook.has_made = False
        raise KeyboardInterrupt

    monkeypatch.setattr(Divided, "commit", by_another)
    assert write(source, out)["was_there"]
    assert staged(out) == []


def test_a_dead_run_beside_an_output_that_exists(source: Path, out: Path) -> None:
    """Its room counts as free, and a run that replaces the output removes it."""
    killed_after(1, source, out)
    write(source, out, job=copy_of(source, option="another"))
    killed = out.with_name("killed")
    out.rename(killed)
    killed_after(1, source, out)
    killed.rename(out)
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds what shardkit did not write"):
        write(source, out, overwrite=True)
    assert len(staged(out)) == 1
    (out / "thesis.txt").unlink()
    write(source, out, overwrite=True)
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
