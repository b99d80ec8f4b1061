"""What each kind of output does: a test class for each kind derives from `OutputTests` and gives its `place`."""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from shardkit.errors import IncompleteError, SourceError, UsageError
from shardkit.files.output.contract import (
    FileNote,
    JobEnded,
    JobFile,
    JobOutput,
    JobRecord,
    JobStatus,
    OutputExists,
)

MARKER = "marker.json"
"""It lists the names of all files of an output."""
DRAFT = {"config.json": b"{}", "index.json": b""}


class OutputPlace(ABC):
    """A destination that nothing else uses, and its kind of output."""

    sees_other_jobs: bool
    """A second job for the destination is refused."""
    exists_is_refused: bool
    """A job that was committed before is refused as any other output; else it ends with JobEnded."""

    @abstractmethod
    def output(self, *, overwrite: bool = False) -> JobOutput:
        """Return an output of the destination, as a new process has it."""

    @abstractmethod
    def status(self) -> list[JobStatus]:
        """Return the jobs of the destination that are not committed."""

    @abstractmethod
    def look(self, name: str) -> bytes | None:
        """Return a file of the output that readers see; None if there is none."""

    @abstractmethod
    def put(self, files: dict[str, bytes]) -> None:
        """Put an output there that no job has made, the marker last."""

    @abstractmethod
    def leftovers(self) -> list[str]:
        """Return the names of what jobs that are not committed have left."""

    @abstractmethod
    def damage_record(self) -> None:
        """Put other bytes into the record of the job that is under way."""

    @abstractmethod
    def lose(self, record: JobRecord, number: int) -> None:
        """Remove a finished file of a job that is under way, but not its note."""

    def read(self) -> dict[str, bytes] | None:
        """Return the output as a reader finds it, by its marker; None if there is none."""
        marker = self.look(MARKER)
        if marker is None:
            return None
        files = {name: self.look(name) for name in json.loads(marker)}
        assert None not in files.values(), f"not whole: {files}"
        return {name: content for name, content in files.items() if content is not None}


def make_record(seed: str = "new", num_parts: int = 2) -> JobRecord:
    """Return a job of four files: one in no folder, one in two, one without the job's hash in its name, an empty one
    with an odd name.
    """
    digest = hashlib.sha256(seed.encode()).hexdigest()
    data = f"data-{digest[:16]}"
    files = [
        JobFile(name=f"model-{digest[:8]}-00001-of-00001.bin", size=len(content(seed, 0))),
        JobFile(name=f"{data}/deep/1.bin", size=len(content(seed, 1))),
        JobFile(name="tokenizer.json", size=len(content(seed, 2))),
        JobFile(name=f"{data}/\xf6 %2B&=+empty", size=len(content(seed, 3))),
    ]
    return JobRecord(
        hash=digest,
        command=f"shardkit preshard {seed} out",
        directory="/home/somebody",
        files=files,
        num_parts=num_parts,
        draft=DRAFT,
    )


def content(seed: str, number: int) -> bytes:
    """Return the bytes of a file of a job."""
    return b"" if number == 3 else f"file {number} of {seed}".encode() * (number + 1)


def note(number: int) -> FileNote:
    """Return the note of a file."""
    return {"crc32": number, "tensors": {"layers.0": [number, "x"]}}


def expected(seed: str = "new") -> dict[str, bytes]:
    """Return the output of a job."""
    record, files = make_record(seed), {"README.md": seed.encode(), "folder/config.json": b"{}"}
    for number, file in enumerate(record.files):
        files[file.name] = content(seed, number)
    return files


def add(output: JobOutput, numbers: Iterable[int], seed: str = "new") -> None:
    """Write files of a job and add them."""
    with output.scratch() as scratch:
        for number in numbers:
            file = make_record(seed).files[number]
            (Path(scratch) / file.name).write_bytes(content(seed, number))
            output.add(scratch, number, note(number))


@contextmanager
def begun(
    place: OutputPlace, numbers: Iterable[int] = (), seed: str = "new", *, overwrite: bool = False
) -> Iterator[JobOutput]:
    """Give an output whose job has begun, with some of its files."""
    with place.output(overwrite=overwrite) as output:
        output.begin(make_record(seed))
        add(output, numbers, seed)
        yield output


@contextmanager
def ended(*, is_committed: bool) -> Iterator[None]:
    """See that a job has ended, and how."""
    with pytest.raises(JobEnded) as caught:
        yield
    assert caught.value.is_committed is is_committed


def check_ended(output: JobOutput, *, is_committed: bool) -> None:
    """See that nothing can be done for a job that has ended."""
    for call in (
        lambda: add(output, [1]),
        lambda: output.notes(ALL),
        lambda: output.forget([0]),
        lambda: commit(output),
    ):
        with ended(is_committed=is_committed):
            call()


def commit(output: JobOutput, seed: str = "new") -> None:
    """Commit a job with what lies beside its files."""
    with tempfile.TemporaryDirectory() as directory:
        beside, files = Path(directory), expected(seed)
        (beside / "folder").mkdir()
        for name in ("README.md", "folder/config.json"):
            (beside / name).write_bytes(files[name])
        (beside / MARKER).write_text(json.dumps(sorted(files)))
        output.commit(str(beside))


def together(*calls: Callable[[], object]) -> list[BaseException | None]:
    """Make calls at the same time; return what each has raised."""
    errors: list[BaseException | None] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            calls[number]()
        except BaseException as error:
            errors[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


OLD = {"old.bin": b"old", "README.md": b"old"}
ALL = range(4)


class OutputTests:
    """The tests. `place` is a fixture of each class that derives from this one."""

    def test_a_job_from_its_begin_to_its_commit(self, place: OutputPlace) -> None:
        with place.output() as output:
            assert output.join() is None
            output.begin(make_record())
            assert output.notes(ALL) == {}
            with output.scratch() as scratch:
                assert all((Path(scratch) / folder).is_dir() for folder in make_record().folders)
            assert not Path(scratch).exists()
            add(output, ALL)
            assert output.notes(ALL) == {number: note(number) for number in ALL}
            assert place.read() is None
            assert not output.is_made()
            commit(output)
            assert output.is_made()
        assert place.read() == expected()
        assert place.leftovers() == []
        with place.output() as output:
            assert output.join() is None
            assert not output.is_made()

    def test_a_file_is_moved_out_of_scratch(self, place: OutputPlace) -> None:
        with begun(place) as output:
            with output.scratch() as scratch:
                (Path(scratch) / "tokenizer.json").write_bytes(content("new", 2))
                output.add(scratch, 2, note(2))
                assert not [path for path in Path(scratch).rglob("*") if path.is_file()]

    def test_another_process_resumes(self, place: OutputPlace) -> None:
        with begun(place, [2, 0]):
            pass
        with place.output() as second:
            second.begin(make_record())
            assert second.notes(ALL) == {0: note(0), 2: note(2)}
            add(second, [1, 3])
            commit(second)
        assert place.read() == expected()

    def test_an_error_leaves_the_job(self, place: OutputPlace) -> None:
        scratches = []

        def fail() -> None:
            with begun(place, [1]) as output:
                with output.scratch() as scratch:
                    scratches.append(Path(scratch))
                    (scratches[0] / "half").write_bytes(b"half")
                    raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert not scratches[0].exists()
        with place.output() as output:
            assert output.join() is not None
            assert set(output.notes(ALL)) == {1}

    def test_join_returns_the_record(self, place: OutputPlace) -> None:
        with begun(place, ALL):
            pass
        with place.output() as output:
            record = output.join()
            assert record is not None
            assert record.dump() == replace(make_record(), draft={}).dump()
            (job,) = place.status()
            assert job.record.dump() == make_record().dump()
            assert job.record.draft == DRAFT
            commit(output)
        assert place.read() == expected()

    def test_parts_of_another_number_join(self, place: OutputPlace) -> None:
        with place.output() as first, place.output() as second:
            first.begin(make_record(num_parts=2))
            add(first, [0])
            second.begin(make_record(num_parts=3))
            assert set(second.notes(ALL)) == {0}
            add(second, [1, 2, 3])
            assert set(first.notes(ALL)) == {*ALL}
        with place.output() as output:
            record = output.join()
            assert record is not None
            assert record.num_parts == 2

    def test_processes_that_commit_together(self, place: OutputPlace) -> None:
        with place.output() as first, place.output() as second:
            assert (
                together(lambda: first.begin(make_record()), lambda: second.begin(make_record()))
                == [None] * 2
            )
            assert together(lambda: add(first, [0, 1, 2]), lambda: add(second, [2, 3, 1])) == [None] * 2
            errors = [error for error in together(lambda: commit(first), lambda: commit(second)) if error]
        assert len(errors) <= 1
        assert all(isinstance(error, JobEnded) and error.is_committed for error in errors), errors
        assert place.read() == expected()
        assert place.leftovers() == []

    def test_files_are_added_from_threads(self, place: OutputPlace) -> None:
        with begun(place) as output:
            errors = together(*(lambda number=number: add(output, [number]) for number in ALL))
            assert errors == [None] * 4
            assert set(output.notes(ALL)) == {*ALL}

    def test_a_late_twin(self, place: OutputPlace) -> None:
        with begun(place) as late, begun(place, ALL) as first:
            commit(first)
            check_ended(late, is_committed=True)
        assert place.read() == expected()
        assert place.leftovers() == []

    def test_the_same_job_after_its_commit(self, place: OutputPlace) -> None:
        with begun(place, ALL) as output:
            commit(output)
        with (
            place.output() as again,
            pytest.raises(OutputExists if place.exists_is_refused else JobEnded) as caught,
        ):
            again.begin(make_record())
        assert place.exists_is_refused or (isinstance(caught.value, JobEnded) and caught.value.is_committed)
        assert place.read() == expected()
        assert place.leftovers() == []

    def test_missing_files(self, place: OutputPlace) -> None:
        with begun(place, [0, 2]) as output:
            with pytest.raises(IncompleteError, match="2 of 4 files are not finished") as caught:
                commit(output)
            assert not isinstance(caught.value, JobEnded)
            assert [problem for problem in caught.value.problems if problem.endswith(("/1.bin", "empty"))]
            assert place.read() is None
            add(output, [1, 3])
            commit(output)
        assert place.read() == expected()

    def test_a_note_that_is_forgotten(self, place: OutputPlace) -> None:
        with begun(place, ALL) as output:
            output.forget([1, 2])
            assert set(output.notes(ALL)) == {0, 3}
            output.forget([1])
            with pytest.raises(IncompleteError, match="2 of 4"):
                commit(output)
            add(output, [1, 2])
            commit(output)
        assert place.read() == expected()

    def test_a_file_that_is_lost_is_not_finished(self, place: OutputPlace) -> None:
        with begun(place, ALL) as output:
            place.lose(make_record(), 1)
            assert set(output.notes(ALL)) == {0, 2, 3}
            with pytest.raises(IncompleteError, match="1 of 4"):
                commit(output)

    def test_an_output_that_exists(self, place: OutputPlace) -> None:
        place.put(OLD)
        with place.output() as output:
            with pytest.raises(OutputExists):
                output.begin(make_record())
            assert output.join() is None
        assert place.read() == OLD
        assert place.leftovers() == []

    def test_an_output_that_is_replaced(self, place: OutputPlace) -> None:
        place.put(OLD)
        with begun(place, ALL, overwrite=True) as output:
            assert place.read() == OLD
            commit(output)
        assert place.read() == expected()
        assert place.leftovers() == []

    def test_an_output_that_appears(self, place: OutputPlace) -> None:
        with begun(place, ALL) as output:
            place.put(OLD)
            with pytest.raises(OutputExists):
                commit(output)
        assert place.read() == OLD
        with begun(place, overwrite=True) as output:  # the job stays
            assert set(output.notes(ALL)) == {*ALL}
            commit(output)
        assert place.read() == expected()

    def test_another_job(self, place: OutputPlace) -> None:
        with begun(place, [0], "first") as first, place.output() as second:
            if place.sees_other_jobs:
                with pytest.raises(UsageError, match="another job is under way") as caught:
                    second.begin(make_record("second"))
                assert make_record("first").command in str(caught.value.problems)
                return
            second.begin(make_record("second"))
            assert second.notes(ALL) == {}
            add(second, ALL, "second")
            add(first, [1, 2, 3], "first")
            commit(second, "second")
            with pytest.raises(OutputExists):
                commit(first, "first")
            assert place.read() == expected("second")

    def test_a_record_that_is_damaged(self, place: OutputPlace) -> None:
        with begun(place, [0]):
            pass
        place.damage_record()
        with place.output() as output:
            with pytest.raises(SourceError):
                output.join()
            output.abort()
        with place.output() as output:
            assert output.join() is None
            output.begin(make_record())

    def test_a_job_that_is_aborted_while_others_work(self, place: OutputPlace) -> None:
        with begun(place, [0, 1]) as output:
            with place.output() as other:
                other.abort()
            assert place.leftovers() == []
            check_ended(output, is_committed=False)
        assert place.read() is None
        assert place.leftovers() == []
        with begun(place) as output:
            assert output.notes(ALL) == {}
            add(output, ALL)
            commit(output)
        assert place.read() == expected()

    def test_abort_leaves_an_output(self, place: OutputPlace) -> None:
        with place.output() as output:
            output.abort()
            assert place.status() == []
            output.begin(make_record("old"))
            add(output, ALL, "old")
            commit(output, "old")
        with begun(place, ALL, overwrite=True):
            pass
        with place.output() as output:
            output.abort()
            output.abort()
        assert place.read() == expected("old")
        assert place.leftovers() == []
