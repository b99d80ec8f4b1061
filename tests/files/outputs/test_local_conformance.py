"""`LocalOutput` does what every output does."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkit.errors import UsageError
from shardkit.files import storage
from shardkit.files.output.contract import JobRecord, JobStatus, OutputExists
from shardkit.files.output.local import LocalOutput, status
from tests.files.outputs.conformance import MARKER, OutputPlace, OutputTests


class LocalPlace(OutputPlace):
    """A directory."""

    sees_other_jobs = True
    exists_is_refused = True

    def __init__(self, directory: Path) -> None:
        self._directory, self._out = directory, directory / "out"

    def output(self, *, overwrite: bool = False) -> LocalOutput:
        def may_replace(path: str, new: str) -> None:
            if not overwrite:
                raise OutputExists("it exists")

        return LocalOutput(
            str(self._out), may_replace=may_replace, foreign_files=lambda path, new: [], overwrite=overwrite
        )

    def status(self) -> list[JobStatus]:
        return status(str(self._out))

    def look(self, name: str) -> bytes | None:
        path = self._out / name
        return path.read_bytes() if path.is_file() else None

    def put(self, files: dict[str, bytes]) -> None:
        self._out.mkdir()
        for name, content in files.items():
            (self._out / name).write_bytes(content)
        (self._out / MARKER).write_text(json.dumps(list(files)))

    def leftovers(self) -> list[str]:
        return [path.name for path in self._directory.iterdir() if path != self._out]

    def damage_record(self) -> None:
        (self._directory / ".out.shardkit/job.json").write_bytes(b"{")

    def lose(self, record: JobRecord, number: int) -> None:
        (self._directory / ".out.shardkit/data" / record.files[number].name).unlink()


class TestLocalOutput(OutputTests):
    """The tests of all outputs."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> LocalPlace:
        return LocalPlace(tmp_path)


WHOLE = {MARKER: b'["0.bin"]', "0.bin": b"whole"}
"""What a job without numbered files commits."""


class TestJobsWithoutFiles:
    """All that they commit is in the directory `beside`."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> LocalPlace:
        return LocalPlace(tmp_path)

    @pytest.fixture(autouse=True)
    def _scratches(self) -> Iterator[None]:
        with contextlib.ExitStack() as self._stack:
            yield

    def begin(self, output: LocalOutput, job_hash: str = "new") -> str:
        """Begin a job, and write all of it into the directory that is returned."""
        output.begin(JobRecord(hash=job_hash, command="shardkit.save(...)", directory="", files=()))
        scratch = self._stack.enter_context(output.scratch())
        for name, content in WHOLE.items():
            (Path(scratch) / name).write_bytes(content)
        return scratch

    def test_an_output_is_exchanged(self, place: LocalPlace, monkeypatch: pytest.MonkeyPatch) -> None:
        place.put({"0.bin": b"old", "1.bin": b"old"})
        calls, renameat2 = list[str](), storage.renameat2

        def exchange(source: str, target: str, flags: int) -> bool:
            calls.append(target)
            return renameat2(source, target, flags)

        monkeypatch.setattr(storage, "renameat2", exchange)
        with place.output(overwrite=True) as output:
            output.commit(self.begin(output))
        assert calls == [output.path]
        assert place.read() == {"0.bin": b"whole"}
        assert place.leftovers() == []

    def test_an_output_that_may_not_be_replaced_is_kept(self, place: LocalPlace, tmp_path: Path) -> None:
        (tmp_path / "out-new").mkdir()
        with place.output() as output:
            scratch = self.begin(output)
            place.put({"0.bin": b"old"})
            with pytest.raises(OutputExists):
                output.commit(scratch)
            kept = output.keep(scratch)
        assert kept == str(tmp_path / "out-new2")
        assert {path.name: path.read_bytes() for path in Path(kept).iterdir()} == WHOLE
        assert place.look("0.bin") == b"old"
        assert sorted(place.leftovers()) == ["out-new", "out-new2"]

    def test_one_that_is_discarded(self, place: LocalPlace) -> None:
        with place.output() as output:
            self.begin(output)
            output.discard()
            output.discard()
        assert place.leftovers() == []

    def test_one_whose_commit_was_interrupted_is_not_discarded(
        self, place: LocalPlace, tmp_path: Path
    ) -> None:
        with place.output() as output:
            output.begin(JobRecord(hash="new", command="", directory="", files=()))
            (tmp_path / ".out.shardkit").rename(tmp_path / ".out.shardkit-commit-me")
            output.discard()
        assert place.leftovers() == []
        assert (tmp_path / "out").is_dir()

    def test_the_job_of_another_process_is_not_discarded(self, place: LocalPlace) -> None:
        with place.output() as output, place.output(overwrite=True) as other:
            scratch = self.begin(output)
            with pytest.raises(UsageError, match="another job is under way"):
                self.begin(other, "other")
            other.discard()
            with place.output() as joined:
                assert joined.join() is not None
                joined.discard()
            output.commit(scratch)
        assert place.read() == {"0.bin": b"whole"}

    def test_a_dead_one_gives_way(self, place: LocalPlace) -> None:
        with place.output() as output:
            self.begin(output, "dead")
        with place.output() as output:
            output.commit(self.begin(output))
        assert place.read() == {"0.bin": b"whole"}
        assert place.leftovers() == []
