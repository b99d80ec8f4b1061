"""What lies beside a checkpoint that reshard takes, and is not in its output.

Trainers that nobody has a row for put the optimizer, the files of single ranks and more beside the weights, in the
directory of a step. What is taken may be a part of that; everything else has a name here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from shardkit.core.text import count, escape, listed
from shardkit.errors import ShardkitError
from shardkit.files import storage
from shardkit.files.listing import walk
from shardkit.formats.contract import inner, listing
from shardkit.formats.dcp.directory import is_dcp, open_dcp
from shardkit.keys.trainer_state import is_optimizer_of, is_optimizers, object_kind, optimizer_names
from shardkit.operations.resolve import is_a_step, is_ordered

OF_A_RANK = re.compile(r"(?:^|[_-])rank[_-]?\d+\.|(?:rng_state|random_states)_\d+\.")
_RECORDS = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".safetensors", ".distcp")
_MAX_CLIMBED = 3  # step/model/vision/ckpt
_MAX_OPENED = 64  # DCP directories whose tensors are counted


@dataclass(slots=True, kw_only=True)
class LeftOut:
    """Names relative to the directory around the checkpoint."""

    taken: str
    """The checkpoint."""
    folders: list[str] = field(default_factory=list)
    """DCP directories, with the number of their tensors."""
    optimizers: list[str] = field(default_factory=list)
    """Files of an optimizer."""
    of_ranks: list[str] = field(default_factory=list)
    """Other files of single ranks."""
    others: list[str] = field(default_factory=list)
    """Any other file and directory."""

    def warnings(self) -> Iterator[str]:
        """Yield what a person has to be warned of."""
        if self.folders:
            what = count(len(self.folders), "DCP directory", "DCP directories")
            yield f"{self._beside(what, self.folders)}; reshard takes each by its own path"
        if self.optimizers:
            yield self._beside(f"{count(len(self.optimizers), 'file')} of an optimizer", self.optimizers)
        if self.of_ranks:
            yield self._beside(f"{count(len(self.of_ranks), 'file')} of single ranks", self.of_ranks)

    def notes(self) -> Iterator[str]:
        """Yield what else to tell."""
        if self.others:
            yield self._beside(count(len(self.others), "other name"), self.others)

    def _beside(self, what: str, names: list[str]) -> str:
        is_or_are = "is" if len(names) == 1 else "are"
        return f"{what} beside {escape(self.taken)} {is_or_are} not in the output: {listed(sorted(names))}"


def around(path: str, given: str, *, no_optimizer: bool = False) -> LeftOut:
    """Return what lies beside a checkpoint in the directory of its step, or as its optimizer in any other.

    Outside the path that a person gave only the rest of its step is looked at, and is a warning or nothing: whoever names
    a part may want it alone.

    Args:
        path: the checkpoint.
        given: what a person gave: the checkpoint, or a directory around it.
        no_optimizer: nobody wants the optimizer's state, so it needs no name.
    """
    path, given = storage.absolute(path), storage.absolute(given)
    levels, is_in_step = _levels(path, given)
    home = levels[-1][0] if levels else os.path.dirname(path)
    left = LeftOut(taken=os.path.relpath(path, home))
    for directory, taken in levels:
        is_inside = directory == given or directory.startswith(os.path.join(given, ""))
        for name in sorted(listing(directory) - {taken}):
            if name.startswith(".") or storage.islink(os.path.join(directory, name)):
                continue
            if no_optimizer and is_optimizers(name):
                continue
            if is_in_step or _is_its_optimizer(directory, name, taken):
                _add(left, home, os.path.join(directory, name))
        left.others = left.others if is_inside and is_in_step else []
    return left


def _is_its_optimizer(directory: str, name: str, taken: str) -> bool:
    """True for what holds an optimizer's state alone, and by its name may be that of the checkpoint."""
    stem = os.path.splitext(name)[0] if name.endswith(_RECORDS) else name
    if not is_optimizers(stem) or not _is_state_alone(os.path.join(directory, name)):
        return False
    others = (
        other for other in listing(directory) if other not in (name, taken) and not is_optimizers(other)
    )
    if any(is_optimizer_of(stem, other, is_only=False) for other in others):
        return is_optimizer_of(stem, taken, is_only=False)
    numbers, its_numbers = (re.findall(r"[0-9]+", text) for text in (stem, taken))
    return not numbers or not its_numbers or numbers == its_numbers


def _is_state_alone(path: str) -> bool:
    """False for a DCP directory with a model in it: a run may be called after its optimizer."""
    if not is_dcp(path):
        return True
    try:
        opened = open_dcp(path)
    except ShardkitError:
        return True
    tensors = opened.catalog.tensors
    state = optimizer_names(tensors.values(), opened.objects)
    return all(name in state or object_kind(name.partition(".")[0]) is not None for name in tensors)


def unread(path: str, read: Collection[str], said: Collection[str]) -> LeftOut:
    """Return the directories with tensors in a checkpoint of which nothing was read.

    Args:
        path: the checkpoint.
        read: real paths of the directories that were read.
        said: names of directories in it that a warning names anyway.
    """
    left = LeftOut(taken=min((os.path.relpath(place, storage.realpath(path)) for place in read), default="."))
    for name in sorted(listing(path)):
        directory = inner(path, name)
        if directory is None or name.startswith(".") or name in said or is_a_step(name):
            continue
        real = storage.realpath(directory)
        if object_kind(name) in (None, "optimizer") and not any(_is_at(place, real) for place in read):
            _add(left, path, directory)
    left.others.clear()
    return left


def _is_at(path: str, directory: str) -> bool:
    return path == directory or path.startswith(os.path.join(directory, ""))


def _levels(path: str, given: str) -> tuple[list[tuple[str, str]], bool]:
    """Return (directory, name in it that leads to the checkpoint) of those around it, and whether they are a step's."""
    levels = list[tuple[str, str]]()
    here = path
    while len(levels) < (0 if is_ordered(os.path.basename(path)) else _MAX_CLIMBED):
        here, name = os.path.split(here)
        levels.append((here, name))
        own = os.path.basename(here)
        if is_a_step(own) and (not own.isdigit() or _is_at(here, given)):  # a bare number may be a job's
            return levels, True
    # Whoever gives a checkpoint that is no part of a step has not asked anybody to look around it.
    inside = [level for level in levels if _is_at(level[0], given)]
    return inside or ([] if path == given else [os.path.split(path)]), False


def _add(left: LeftOut, home: str, path: str) -> None:
    """Add a file, or what a directory holds."""
    name = os.path.relpath(path, home)
    if not storage.isdir(path):
        _add_file(left, name)
        return
    before = len(left.folders) + len(left.optimizers) + len(left.of_ranks)
    for here, folder, directories, names in walk(path):
        where = os.path.normpath(os.path.join(name, folder))
        if is_dcp(here):
            left.folders.append(f"{where}{_num_tensors(here, len(left.folders))}")
            directories.clear()
            continue
        for file in sorted(names):
            if _kind(left, file) is not left.others:
                _add_file(left, os.path.join(where, file))
    if len(left.folders) + len(left.optimizers) + len(left.of_ranks) == before:
        left.others.append(os.path.join(name, ""))


def _add_file(left: LeftOut, name: str) -> None:
    _kind(left, os.path.basename(name)).append(name)


def _kind(left: LeftOut, name: str) -> list[str]:
    if name.endswith(_RECORDS) and is_optimizers(os.path.splitext(name)[0]):
        return left.optimizers
    return left.of_ranks if OF_A_RANK.search(name) else left.others


def _num_tensors(directory: str, number: int) -> str:
    if number >= _MAX_OPENED:
        return ""
    try:
        return f" ({count(len(open_dcp(directory).catalog.tensors), 'tensor')})"
    except ShardkitError:  # not torch's, or damaged
        return ""
