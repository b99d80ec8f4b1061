"""A verb writes into a third kind of place, SQLite (`tests/files/place/sqlite`): the same bytes as on a disk, killed or not."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

import shardkit
from shardkit.errors import UsageError
from shardkit.files.place.contract import Notebook, Place
from shardkit.operations import places
from shardkit.operations.options import WriteOptions
from shardkit.operations.parts.agreement import Agreement
from tests.files.place.sqlite import Database, Entries, SqlitePlace
from tests.operations.consolidate.checkpoints import hub

pytestmark = pytest.mark.prove

ENDING = ".sqlite"


class SqliteDestination(places.Destination):
    """A file of SQLite."""

    step: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, output: str, options: WriteOptions, *_: object) -> None:
        self.path, self.exists, self.made, self._options = output, None, {}, options
        self._db = Database(output, self.step)

    def stagings(self) -> Sequence[Notebook]:
        return ()

    def identity(self) -> object:
        return self._db.output() or None

    def check(self, output: str, source: str | None, named_after: str | None) -> None:
        if self._db.output() and not self._options.overwrite:
            self.exists = UsageError(f"{output} exists")

    def may_be_there(self) -> bool:
        return bool(self._db.output())

    @contextlib.contextmanager
    def place(self, job: object, agreement: Agreement) -> Iterator[Place]:
        overwrite = self._options.overwrite
        yield SqlitePlace(self._db, agreement.plan, agreement.files, overwrite=overwrite)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    kind = (lambda output: str(output).endswith(ENDING), SqliteDestination)
    monkeypatch.setattr(places, "KINDS", [kind, *places.KINDS])
    torch.manual_seed(0)
    return hub(tmp_path / "hub", {f"layers.{n}.weight": torch.randn(9, 8) for n in range(4)}, config=None)


def preshard(source: Path, output: Path, **options: object) -> shardkit.PreshardResult:
    return shardkit.preshard(source, output, world_size=3, wrap="none", jobs=1, progress=False, **options)  # type: ignore[arg-type]


def content(output: Path) -> dict[str, bytes] | None:
    """Return the files of the output that is there, by name."""
    database = Database(str(output))
    return next((Entries(database, plan).all("file") for plan, _ in database.output()), None)


def in_a_process(source: Path, output: Path, *, kill_at: int = 0, **options: object) -> tuple[int, int]:
    """Run in a fork, which may be killed at one of its steps; return how it ended, and the number of its steps."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):

            def step() -> None:
                os.write(writing, b".")
                if len(steps) + 1 == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                steps.append(None)

            steps = list[None]()
            SqliteDestination.step = staticmethod(step)
            preshard(source, output, **options)
            os._exit(0)
        os._exit(1)
    os.close(writing)
    with open(reading, "rb") as pipe:
        num_steps = len(pipe.read())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), num_steps


def test_the_bytes_are_those_on_a_disk(source: Path, tmp_path: Path) -> None:
    result = preshard(source, tmp_path / "out.sqlite")
    assert not result.was_there
    preshard(source, tmp_path / "out")
    names = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert content(tmp_path / "out.sqlite") == {
        str(p.relative_to(tmp_path / "out")): p.read_bytes() for p in names
    }
    assert preshard(source, tmp_path / "out.sqlite").was_there


def test_parts_make_it_together(source: Path, tmp_path: Path) -> None:
    preshard(source, tmp_path / "whole.sqlite")
    preshard(source, tmp_path / "out.sqlite", part="1/2")
    assert content(tmp_path / "out.sqlite") is None
    preshard(source, tmp_path / "out.sqlite", part="2/2")
    assert content(tmp_path / "out.sqlite") == content(tmp_path / "whole.sqlite")


@pytest.mark.parametrize("options", [{}, {"overwrite": True}], ids=["fresh", "overwrite"])
def test_killed_at_any_step(options: dict[str, bool], source: Path, tmp_path: Path) -> None:
    """The output is absent, the old one or the new one, and whoever runs the same command again ends well."""
    other = hub(tmp_path / "other", {"layers.0.weight": torch.ones(3, 3)}, config=None)
    preshard(source, tmp_path / "whole.sqlite")
    whole, old = content(tmp_path / "whole.sqlite"), None
    num_steps = in_a_process(source, tmp_path / "counted.sqlite")[1]
    draw = random.Random(str(options))
    for number in (*draw.sample(range(1, num_steps - 4), 3), *range(num_steps - 4, num_steps + 1)):
        output = tmp_path / f"{number}.sqlite"
        if options:
            preshard(other, output)
            old = content(output)
        assert in_a_process(source, output, kill_at=number, **options)[0] == -signal.SIGKILL
        assert content(output) in (old, whole)
        assert in_a_process(source, output, **options)[0] == 0
        assert content(output) == whole
        with Database(str(output))() as do:
            assert do("SELECT DISTINCT kind FROM entry ORDER BY kind", []) == [("file",), ("output",)]
