"""`LocalOutput` does what every output does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardkit.files.output.contract import JobRecord, OutputExists
from shardkit.files.output.local import LocalOutput
from tests.files.outputs.conformance import MARKER, OutputPlace, OutputTests


class LocalPlace(OutputPlace):
    """A directory."""

    sees_other_jobs = True
    exists_is_refused = True

    def __init__(self, directory: Path) -> None:
        self._directory, self._out = directory, directory / "out"

    def output(self, *, overwrite: bool = False) -> LocalOutput:
        def may_replace(path: str) -> None:
            if not overwrite:
                raise OutputExists("it exists")

        return LocalOutput(
            str(self._out), may_replace=may_replace, foreign_files=lambda path: [], overwrite=overwrite
        )

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
