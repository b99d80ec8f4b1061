"""Find files near a checkpoint that belong to the same training step but will not be in reshard's output.

Unknown trainers write the optimizer, files of single ranks and more into the directory of a step, beside the weights. The
checkpoint that reshard reads may be only one part of this directory, so the user is told about the other parts.

A *level* is a directory around the checkpoint, up to the directory of the step. Beside a checkpoint that is itself named as
a step, an epoch or Lightning's `last` are other checkpoints, so only its optimizer is looked for there.
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
from shardkit.formats.contract import folder_below, listing
from shardkit.formats.dcp.directory import is_dcp, open_dcp
from shardkit.keys.trainer_state import is_optimizer_name, is_optimizer_of, object_kind, optimizer_names
from shardkit.operations.resolve import is_a_step, is_ordered

OF_A_RANK = re.compile(r"(?:^|[_-])rank[_-]?\d+\.|(?:rng_state|random_states)_\d+\.")
_RECORDS = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".safetensors", ".distcp")
_MAX_CLIMBED = 3  # step/model/vision/ckpt
_MAX_OPENED = 64  # DCP directories whose tensors are counted


@dataclass(slots=True, kw_only=True)
class LeftOutFiles:
    """Files and directories that will not be in the output, by kind; names are relative to the directory around them."""

    checkpoint: str
    """The checkpoint that is read."""
    folders: list[str] = field(default_factory=list)
    """DCP directories, with the number of their tensors."""
    optimizers: list[str] = field(default_factory=list)
    """Files of an optimizer."""
    of_ranks: list[str] = field(default_factory=list)
    """Other files of single ranks."""
    other_names: list[str] = field(default_factory=list)
    """Any other file and directory."""

    def warnings(self) -> Iterator[str]:
        """Yield a warning for each kind that training may need."""
        if self.folders:
            what = count(len(self.folders), "DCP directory", "DCP directories")
            yield f"{self._beside(what, self.folders)}; reshard each by itself"
        if self.optimizers:
            yield self._beside(f"{count(len(self.optimizers), 'file')} of an optimizer", self.optimizers)
        if self.of_ranks:
            yield self._beside(f"{count(len(self.of_ranks), 'file')} of single ranks", self.of_ranks)

    def notes(self) -> Iterator[str]:
        """Yield a note about all other names."""
        if self.other_names:
            yield self._beside(count(len(self.other_names), "other name"), self.other_names)

    def _beside(self, what: str, names: list[str]) -> str:
        is_or_are = "is" if len(names) == 1 else "are"
        return (
            f"{what} beside {escape(self.checkpoint)} {is_or_are} not in the output: {listed(sorted(names))}"
        )


def find_left_out(path: str, given_path: str, *, no_optimizer: bool = False) -> LeftOutFiles:
    """Return what is beside a checkpoint in the directory of its step; in any other directory, only its optimizer.

    If the directory of the step is outside of the path that the user named, names of unknown files are not returned: a
    user who names one part of a step may want only that.

    Args:
        path: the checkpoint.
        given_path: the path that the user named: the checkpoint, or a directory around it.
        no_optimizer: skip the optimizer's state, because the user does not want it.
    """
    path, given_path = storage.absolute(path), storage.absolute(given_path)
    levels, is_in_step = _levels(path, given_path)
    home = levels[-1][0] if levels else os.path.dirname(path)
    left_out = LeftOutFiles(checkpoint=os.path.relpath(path, home))
    for directory, child in levels:
        is_inside = directory == given_path or directory.startswith(os.path.join(given_path, ""))
        for name in sorted(listing(directory) - {child}):
            if name.startswith(".") or storage.islink(os.path.join(directory, name)):
                continue
            if no_optimizer and is_optimizer_name(name):
                continue
            if is_in_step or _is_its_optimizer(directory, name, child):
                _add(left_out, home, os.path.join(directory, name))
        left_out.other_names = left_out.other_names if is_inside and is_in_step else []
    return left_out


def _is_its_optimizer(directory: str, name: str, checkpoint_name: str) -> bool:
    """True if a name in a directory has only an optimizer's state, and may belong to the checkpoint by its name.

    With `model_1/` and `model_2/` in the directory, `optimizer_2/` belongs to `model_2/`.
    """
    stem = os.path.splitext(name)[0] if name.endswith(_RECORDS) else name
    if not is_optimizer_name(stem) or not _is_state_alone(os.path.join(directory, name)):
        return False
    other_names = (
        each
        for each in listing(directory)
        if each not in (name, checkpoint_name) and not is_optimizer_name(each)
    )
    if any(is_optimizer_of(stem, each, is_only=False) for each in other_names):
        return is_optimizer_of(stem, checkpoint_name, is_only=False)
    numbers, its_numbers = (re.findall(r"[0-9]+", text) for text in (stem, checkpoint_name))
    return not numbers or not its_numbers or numbers == its_numbers


def _is_state_alone(path: str) -> bool:
    """False for a DCP directory that contains a model: a run may be named after its optimizer, such as `adam/`."""
    if not is_dcp(path):
        return True
    try:
        opened = open_dcp(path)
    except ShardkitError:
        return True
    tensors = opened.catalog.tensors
    state = optimizer_names(tensors.values(), opened.objects)
    return all(name in state or object_kind(name.partition(".")[0]) is not None for name in tensors)


def find_unread(path: str, read: Collection[str], warned_names: Collection[str]) -> LeftOutFiles:
    """Return the directories in a checkpoint that have tensors but were not read.

    Args:
        path: the checkpoint.
        read: real paths of the directories that were read.
        warned_names: names of directories in the checkpoint that another warning names.
    """
    left_out = LeftOutFiles(
        checkpoint=min((os.path.relpath(place, storage.realpath(path)) for place in read), default=".")
    )
    for name in sorted(listing(path)):
        directory = folder_below(path, name)
        if directory is None or name.startswith(".") or name in warned_names or is_a_step(name):
            continue
        real = storage.realpath(directory)
        if object_kind(name) in (None, "optimizer") and not any(_is_at(place, real) for place in read):
            _add(left_out, path, directory)
    left_out.other_names.clear()
    return left_out


def _is_at(path: str, directory: str) -> bool:
    """True if a path is the directory or in it."""
    return path == directory or path.startswith(os.path.join(directory, ""))


def _levels(path: str, given_path: str) -> tuple[list[tuple[str, str]], bool]:
    """Return the directories around a checkpoint, innermost first, and whether the last one is the directory of a step.

    Each is (directory, the name in it that leads to the checkpoint): for "run/step-5/model/dcp", [("run/step-5/model",
    "dcp"), ("run/step-5", "model")] and True. If none is the directory of a step, only those in `given_path` are returned.
    """
    levels = list[tuple[str, str]]()
    here = path
    # A checkpoint that is named as a step (or an epoch, or Lightning's `last`) is a step itself: beside it are other steps.
    while len(levels) < (0 if is_ordered(os.path.basename(path)) else _MAX_CLIMBED):
        here, name = os.path.split(here)
        levels.append((here, name))
        folder = os.path.basename(here)
        # `is_a_step` is stricter than `is_ordered`: it is for directories, and false for Lightning's names. A bare number may
        # also be the id of a job, unless it is within the path that the user named.
        if is_a_step(folder) and (not folder.isdigit() or _is_at(here, given_path)):
            return levels, True
    # If the user names a checkpoint that is not part of a step, directories around it are none of our business. If the user
    # names a directory around it, look at those within; at least at the one with the checkpoint, if it is a step itself.
    inside = [level for level in levels if _is_at(level[0], given_path)]
    return inside or ([] if path == given_path else [os.path.split(path)]), False


def _add(left_out: LeftOutFiles, home: str, path: str) -> None:
    """Add a file, or the content of a directory."""
    name = os.path.relpath(path, home)
    if not storage.isdir(path):
        _add_file(left_out, name)
        return
    before = len(left_out.folders) + len(left_out.optimizers) + len(left_out.of_ranks)
    for here, folder, directories, names in walk(path):
        where = os.path.normpath(os.path.join(name, folder))
        if is_dcp(here):
            left_out.folders.append(f"{where}{_num_tensors(here, len(left_out.folders))}")
            directories.clear()
            continue
        for file in sorted(names):
            if _kind(left_out, file) is not left_out.other_names:
                _add_file(left_out, os.path.join(where, file))
    if len(left_out.folders) + len(left_out.optimizers) + len(left_out.of_ranks) == before:
        left_out.other_names.append(os.path.join(name, ""))


def _add_file(left_out: LeftOutFiles, name: str) -> None:
    """Add a file to the list of its kind."""
    _kind(left_out, os.path.basename(name)).append(name)


def _kind(left_out: LeftOutFiles, name: str) -> list[str]:
    """Return the list to which a file of that name belongs."""
    if name.endswith(_RECORDS) and is_optimizer_name(os.path.splitext(name)[0]):
        return left_out.optimizers
    return left_out.of_ranks if OF_A_RANK.search(name) else left_out.other_names


def _num_tensors(directory: str, number: int) -> str:
    """Return " (12 tensors)" for a DCP directory; "" if it cannot be opened, or if it is not among the first `_MAX_OPENED`."""
    if number >= _MAX_OPENED:
        return ""
    try:
        return f" ({count(len(open_dcp(directory).catalog.tensors), 'tensor')})"
    except ShardkitError:  # not written by torch, or damaged
        return ""
