"""Damages every file of a checkpoint, again and again, and lets `verify --full` look for it.

    python -m tests.corruption.sweep [--count 1000] [--seed 0] [KIND ...]

prints a line for each kind of checkpoint; `make corruption` goes through all of them.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from shardkit.core.catalog import Catalog
from shardkit.errors import ShardkitError
from shardkit.formats.dcp.directory import open_dcp
from shardkit.formats.hub.directory import open_model
from shardkit.operations.verify import verify
from shardkit.operations.verify.result import VerifyProblem
from tests.corruption.damage import KINDS, SIZES, changed_bytes, damaged
from tests.corruption.outputs import FOREIGN, OURS, make
from tests.formats.dcp.samples import open_catalog

SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""In memory, where there is such a place."""
DATA, RECORD, HEADER, METADATA, REST = "data", "record", "header", "metadata", "rest"
"""Where the bytes are that changed: tensors' data, what torch puts around it, the header of a safetensors file,
`.metadata`, anywhere else."""


class Extent(NamedTuple):
    """Bytes of a file, first and one after the last."""

    start: int
    stop: int
    names: frozenset[str]


@dataclass(slots=True)
class Places:
    """What lies where in the files of a checkpoint."""

    data: dict[str, list[Extent]] = field(default_factory=dict)
    records: dict[str, list[Extent]] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Path) -> Places:
        """Open a checkpoint and ask."""
        found = cls()
        for metadata in directory.rglob(".metadata"):
            folder = metadata.parent
            prefix = os.path.relpath(folder, directory)
            for records, extents in ((True, found.data), (False, found.records)):
                opened = open_catalog(str(folder), records=records)
                extents.update(_extents(opened, prefix))
            _add_objects(folder, prefix, found.records)
        if not found.data:
            found.data = _extents(open_model(str(directory)).catalog, "")
        return found

    def kind(self, file: str, changed: Sequence[int]) -> str:
        """Return where changed bytes are; of several places, the one that matters most."""
        if file.endswith(METADATA):
            return METADATA
        if file.endswith(".safetensors") and changed[0] < min(place.start for place in self.data[file]):
            return HEADER
        for kind, extents in ((DATA, self.data), (RECORD, self.records)):
            if any(place.start <= at < place.stop for place in extents.get(file, ()) for at in changed):
                return kind
        return REST

    def tensors(self, file: str, changed: Sequence[int]) -> list[frozenset[str]]:
        """Return the names of each tensor that has changed bytes; tied ones have several.

        None where a header is damaged too: it alone says where the tensors lie.
        """
        places = self.data.get(file, ()) if changed and self.kind(file, changed) != HEADER else ()
        return [place.names for place in places if any(place.start <= at < place.stop for at in changed)]


def _extents(catalog: Catalog, prefix: str) -> dict[str, list[Extent]]:
    names: dict[tuple[str, int, int], set[str]] = {}
    for fqn, entry in catalog.tensors.items():
        for row in entry.chunk_ids:
            table = catalog.chunks
            file = os.path.normpath(os.path.join(prefix, catalog.files[table.file[row]].name))
            place = (file, table.start[row], table.start[row] + table.nbytes[row])
            names.setdefault(place, set()).add(fqn)
    found: dict[str, list[Extent]] = {}
    for (file, start, stop), fqns in names.items():
        found.setdefault(file, []).append(Extent(start, stop, frozenset(fqns)))
    return found


def _add_objects(folder: Path, prefix: str, records: dict[str, list[Extent]]) -> None:
    """Add the records of what is no tensor."""
    opened = open_dcp(str(folder))
    for name, place in opened.objects.items():
        if place is not None:
            file = os.path.normpath(os.path.join(prefix, opened.catalog.files[place.file].name))
            extent = Extent(place.start, place.start + place.nbytes, frozenset({name}))
            records.setdefault(file, []).append(extent)


@dataclass(slots=True)
class Tally:
    """What became of the changes to one checkpoint."""

    drawn: Counter[str] = field(default_factory=Counter)
    """Changes by where they are; not those after which the bytes were the same."""
    found: Counter[str] = field(default_factory=Counter)
    """Of those, how many verify answered with a problem."""
    num_tensors: int = 0
    """Tensors in which bytes changed, each time."""
    unfound: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    """Found, but the file or a tensor is not named, or verify raised."""

    @property
    def total(self) -> int:
        """All changes."""
        return sum(self.drawn.values())


def sweep(directory: Path, count: int, pick: random.Random) -> Tally:
    """Change files of a checkpoint, one at a time, `count` times; each file and each kind of damage in turn."""
    tally, places = Tally(), Places.of(directory)
    files = {str(path.relative_to(directory)): path.read_bytes() for path in _files(directory)}
    turns = [(file, kind) for file in files for kind in KINDS]
    while tally.total < count:
        pick.shuffle(turns)
        for file, kind in turns[: count - tally.total]:
            changed = damaged(files[file], kind, pick)
            if changed is not None:
                (directory / file).write_bytes(changed)
                _look(directory, file, kind, files[file], changed, places, tally)
                (directory / file).write_bytes(files[file])
    assert verify(directory, full=True).ok
    return tally


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def _look(
    directory: Path, file: str, kind: str, old: bytes, new: bytes, places: Places, tally: Tally
) -> None:
    """Let verify look for one change."""
    changed = [] if kind in SIZES else changed_bytes(old, new)
    where = kind if kind in SIZES else places.kind(file, changed)
    story = f"{file}: {kind}, {len(changed)} bytes from {changed[0] if changed else len(new)}"
    tally.drawn[where] += 1
    try:
        problems: Sequence[VerifyProblem] = verify(directory, full=True).problems
    except ShardkitError as error:
        tally.found[where] += 1
        tally.unnamed.append(f"{story}: raised {error.message}")
        return
    if not problems:
        tally.unfound.append(story)
        return
    tally.found[where] += 1
    own = [p for p in problems if p.file == file or any(f" of {file}," in line for line in p.details)]
    if not own:
        tally.unnamed.append(f"{story}: {'; '.join(problem.line() for problem in problems[:3])}")
    for names in places.tensors(file, changed):
        tally.num_tensors += 1
        if not names & {problem.tensor for problem in own}:
            tally.unnamed.append(
                f"{story}: {'/'.join(sorted(names))} is not named: {own[0].line() if own else ''}"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Go through kinds of checkpoints and print what was found; 1 where a change of ours was not."""
    parser = argparse.ArgumentParser(
        description="Damage every kind of checkpoint, and let verify look for it."
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", default=[*OURS, *FOREIGN])
    parser.add_argument("--count", type=int, default=1000, help="changes of each (1000)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    total = num_wrong = 0
    with tempfile.TemporaryDirectory(dir=SCRATCH, prefix="shardkit-corruption-") as root:
        for kind in options.kinds:
            directory, begun = make(kind, Path(root)), time.monotonic()
            tally = sweep(directory, options.count, random.Random(f"{kind} {options.seed}"))
            total += tally.total
            _print(kind, tally, time.monotonic() - begun)
            num_wrong += len(tally.unfound) + len(tally.unnamed) if kind in OURS else 0
    print(f"{total} changes, {num_wrong} of our own not found or not named")
    return 1 if num_wrong else 0


def _print(kind: str, tally: Tally, elapsed_s: float) -> None:
    shares = ", ".join(f"{where} {tally.found[where]}/{tally.drawn[where]}" for where in sorted(tally.drawn))
    print(
        f"{kind:<20}{tally.total:>6} changes in {elapsed_s:.0f} s; found: {shares}; "
        f"{tally.num_tensors} tensors to name; {len(tally.unnamed)} not named",
        flush=True,
    )
    for line in [*tally.unfound[:5], *tally.unnamed[:5]]:
        print(f"    {line}")


if __name__ == "__main__":
    sys.exit(main())
