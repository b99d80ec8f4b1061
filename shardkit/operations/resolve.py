"""Find the checkpoint in a run directory that its trainer would resume from.

In each directory, the first of these rules that applies decides: the name in a tracker file (`latest`); the name that
Lightning would resume from (`last.ckpt`); the highest step; the highest epoch. Incomplete checkpoints are skipped, with a
warning. If no rule decides, the error lists all checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardkit import formats
from shardkit.core.keywords import suggests_keywords
from shardkit.core.result import Result
from shardkit.core.text import escape
from shardkit.errors import ShardkitError, SourceError, UsageError
from shardkit.files import manifest, storage, stores
from shardkit.files.home import home_of, is_data_folder
from shardkit.files.links import read_inside
from shardkit.formats.contract import (
    Checkpoint,
    folder_below,
    has_any,
    listing,
    missing_path,
    refuse_unfinished,
)
from shardkit.formats.dcp import METADATA
from shardkit.formats.dcp.directory import is_dcp
from shardkit.formats.hub.adapter import ADAPTER_WEIGHTS, is_adapter, is_adapter_file
from shardkit.formats.hub.assets import list_weights, may_be_model
from shardkit.formats.hub.files import PIPELINE, TORCH_FILES, select_weights
from shardkit.formats.registry import directory_of, recognise, why_unfinished
from shardkit.formats.trainers.plain_dcp import find_structure, missing_last_warning, optimizers_beside

EXPORT_ENDING = "-hf"
"""Suffix of consolidate's default output: `last.ckpt` -> `last-hf`."""

TRACKERS = ("latest_checkpointed_iteration.txt", "latest", "latest_universal")
"""Files in which a trainer records its last save: verl and Megatron as a step, DeepSpeed as a name."""

_EPOCH, _STEP, _LIGHTNING = range(3)
_REASONS = ("{it} has the highest epoch", "{it} has the highest step", "{it} is what Lightning resumes from")
"""Reasons for a choice, by rule; a rule with a higher number takes precedence."""

# Ascending in precedence. If a file already exists, Lightning adds a version to the name.
_OF_LIGHTNING = tuple(
    re.compile(pattern)
    for pattern in (
        r"last(?:-v([0-9]{1,9}))?\.ckpt",
        r"on_exception(?:-v([0-9]{1,9}))?\.ckpt",
        r"hpc_ckpt_([0-9]{1,9})\.ckpt",
    )
)
_STEPS = tuple(
    re.compile(rf"(?<![a-z])(?:{words})[-_=]?([0-9]{{1,15}})", re.IGNORECASE)
    for words in (r"(?:global_?)?(?:steps?|iter(?:ation)?|it)", "checkpoint|ckpt|ckp|ba|batch|save")
)
_EPOCHS = re.compile(r"(?<![a-z])(?:epoch|ep)[-_=]?([0-9]{1,15})", re.IGNORECASE)
_BARE = re.compile(r"[0-9]{1,15}")
_VERSION = re.compile(r"-v([0-9]{1,9})(?:\.ckpt)?$")
# Names of parts of one model, with the number of a rank, of a pipeline stage, or of a file among several.
_PART = re.compile(
    r"(?i)(rank|shard|part|stage|pipe(line)?|gpu|(?<![a-z])[tpcm]p)[-_=]?[0-9]|[0-9]-of-(?!0*1\b)[0-9]"
)
_NOT_MODELS = re.compile(
    r"(optim(izers?|izer_state)?|critic|ref|reward(_model)?|ema|scheduler|dataloader)(_[0-9]+)?"
    r"|wandb|tensorboard|tb_logs|huggingface|hf|__pycache__|node_modules|site-packages"
)
_UNFINISHED = re.compile(
    r".*\.(tmp|temp|partial|incomplete|part)|(tmp|temp)[-_].+|.*[-_](tmp|temp)", re.IGNORECASE
)
# Trainers nest directories at most this deep by default: lightning_logs/version_3/checkpoints/.
_MAX_DEPTH = 3
_MAX_ENTRIES = 20_000
_MAX_TRACKER = 4096
_FILES = ".ckpt"
ITSELF = "given directly"
# Files that show that a directory was a checkpoint. Other safetensors files may be anything, such as a diffusers model.
_REMAINS = (
    *("*.distcp", "__*.chunks.json", "model*.safetensors", "shard-*-model-*.safetensors"),
    *("*.safetensors.index.json", manifest.NAME),
)
_OF_TRAINER = re.compile(r"checkpoint-[0-9]+")
_TRAINER_STATE = "trainer_state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedCheckpoint(Result):
    """The chosen checkpoint; `os.fspath` gives its path."""

    path: str
    """The checkpoint, a directory or a file."""
    format: str
    """As `shardkit.inspect` names it."""
    step: int | None
    """The training step, if the name or a tracker file has it."""
    reason: str
    """Why it was chosen, as text for people: `it has the highest step`."""
    skipped: tuple[tuple[str, str], ...] = ()
    """(path, reason) of each checkpoint that was skipped: it is newer but incomplete, or has no step in its name."""
    warnings: tuple[str, ...] = ()
    """A line for each skipped checkpoint, and one if the trainer may not have finished saving the chosen one."""

    def headline(self) -> str:
        """Return its path."""
        return escape(self.path)

    def __fspath__(self) -> str:
        return self.path

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenCheckpoint:
    """The chosen checkpoint, with all that was opened to choose it, so that it is not parsed again."""

    resolved: ResolvedCheckpoint
    opened: tuple[Checkpoint, ...] = ()
    """The opened model, or several models of one step. Empty if nothing was opened for the choice."""

    def models(self) -> tuple[Checkpoint, ...]:
        """Return the opened checkpoint, or each of its models if it has several.

        Raises:
            SourceError, IntegrityError, ResourceError: as opening does.
        """
        return tuple(map(self._without_warnings, self.opened or _open_models(self.resolved.path)))

    def open(self) -> Checkpoint:
        """Return the opened checkpoint.

        Raises:
            SourceError: it has several models; or as opening does.
            IntegrityError, ResourceError: as opening does.
        """
        is_open = len(self.opened) == 1
        return self._without_warnings(self.opened[0] if is_open else formats.open(self.resolved.path))

    def _without_warnings(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint without notes that repeat a warning of the choice."""
        notes = tuple(note for note in checkpoint.remarks.notes if note not in self.resolved.warnings)
        return replace(checkpoint, remarks=replace(checkpoint.remarks, notes=notes))


def _open_models(path: str) -> tuple[Checkpoint, ...]:
    """Open a checkpoint, or each of its models if it has several."""
    from shardkit.formats.trainers.accelerate import (
        model_directories,  # here, as a Hub model needs none of it
    )

    path = home_of(path)
    models = model_directories(path)
    places = [os.path.join(path, name) for name in models] if len(models) > 1 else [path]
    return tuple(map(formats.open, places))


@suggests_keywords
def resolve_checkpoint(path: str | os.PathLike[str], *, strict: bool = False) -> ResolvedCheckpoint:
    """Return the checkpoint that the trainer of a run would resume from.

    A path that is a checkpoint itself is returned as it is. Otherwise the search goes three levels down, without
    following links that lead out of the path. The first of these decides: a tracker file; the name that Lightning would
    resume from; the highest step, or else the highest epoch, that is complete. `shardkit consolidate` uses the same
    checkpoint. The result's `warnings` list skipped checkpoints with the reasons.

    Args:
        path: a checkpoint, a file in one (`.metadata`, `meta.pt`), a run directory, or a directory of runs.
        strict: raise such warnings as errors.

    Raises:
        UsageError: there are several checkpoints, and none of the rules decides. Lists them.
        SourceError: there is no complete checkpoint; a tracker file names an incomplete one; or, with `strict`, a
            checkpoint was skipped. Lists them with the reasons.
        ResourceError: a file or directory cannot be read.
    """
    return choose_checkpoint(path, strict=strict).resolved


def choose_checkpoint(
    path: str | os.PathLike[str],
    *,
    strict: bool = False,
    whole_steps: bool = False,
    before_tracker: bool = False,
) -> ChosenCheckpoint:
    """Choose a checkpoint as `resolve_checkpoint` does, and keep open what was opened for the choice.

    Args:
        path: as in `resolve_checkpoint`.
        strict: as in `resolve_checkpoint`.
        whole_steps: if one step has several models (the two of a GAN), choose the directory of the step. Otherwise the
            user has to name one of the models.
        before_tracker: if a tracker file names a checkpoint that is not whole, choose the newest one before it, with a
            warning.

    Raises:
        UsageError, SourceError, ResourceError: as `resolve_checkpoint`.
    """
    place = stores.as_path(path)
    if not storage.lexists(place):
        raise missing_path(place)
    refuse_unfinished(place)
    if not storage.isdir(place) and os.path.basename(place) in TRACKERS:
        place = os.path.dirname(place) or os.curdir
    place = adapter_file(place) or directory_of(place)
    if recognise(place) is None and not storage.isdir(place):
        formats.open(place)  # raises, with the reason why it is not a checkpoint
    search, candidates = _search(place, before_tracker=before_tracker)
    if PIPELINE in listing(place) and any(each.path != place and each.step is None for each in candidates):
        formats.open(place)  # raises: one model of a pipeline is not the checkpoint of a run
    if not candidates and not search.skipped and not search.not_searched:
        formats.open(place)  # raises, with what the directory looks like: an unfinished save, ...
    is_followed = all(search.why_not_followed(each.path) is None for each in candidates)
    step = _step_around(candidates, place) if whole_steps and is_followed else None
    if step is not None:
        search.opened[step] = tuple(model for each in candidates for model in _open_models(each.path))
        candidates = [replace(candidates[0], path=step, reason=f"it holds {len(candidates)} models")]
    if len(candidates) != 1 or search.damage(candidates[0]) is not None:
        raise search.nothing_to_take(candidates)
    chosen = search.finish(candidates[0])
    if strict and chosen.warnings:
        raise SourceError(
            f"{escape(chosen.path)} may not be the newest checkpoint that is whole",
            problems=chosen.warnings,
            hint=f"give {escape(chosen.path)} by its path if it is meant, or repair or remove the other ones",
        )
    return ChosenCheckpoint(resolved=chosen, opened=search.opened.get(chosen.path, ()))


class FoundCheckpoint(NamedTuple):
    """A checkpoint of a run."""

    resolved: ResolvedCheckpoint
    missing: str | None
    """Why it does not count as whole; None if it opens."""
    is_finished: bool
    """True if a file that the trainer writes last shows that it is whole: `.metadata`, or a tracker file."""


def every_checkpoint(
    place: str, is_whole: Callable[[ResolvedCheckpoint], bool] | None = None
) -> list[FoundCheckpoint]:
    """Return every checkpoint at or below a path, newest first.

    Args:
        place: a run.
        is_whole: true for checkpoints that are known to be whole, and are not opened.

    Raises:
        UsageError: there are too many directories.
    """
    place = adapter_file(place) or directory_of(place)
    search = _Search(place, needs_last=True, before_tracker=True)
    candidates = sorted(search.every(place, _MAX_DEPTH), key=lambda each: each.path)
    candidates.sort(key=lambda each: _place(_name_of(each.path)) or (-1,), reverse=True)
    candidates.sort(key=lambda each: -1 if each.step is None else each.step, reverse=True)
    return [
        FoundCheckpoint(each, None, True)
        if is_whole is not None and is_whole(each)
        else search.describe(each)
        for each in candidates
    ]


def _search(place: str, *, before_tracker: bool) -> tuple[_Search, list[ResolvedCheckpoint]]:
    """Search a path; return the search and its candidates. Saves that may be unfinished count only if no other is whole."""
    for needs_last in (True, False):
        search = _Search(place, needs_last=needs_last, before_tracker=before_tracker)
        candidates = search.path_itself() or search.below(place, _MAX_DEPTH)
        if any(search.damage(each) is None for each in candidates):
            break
    return search, candidates


def _step_around(candidates: Collection[ResolvedCheckpoint], place: str) -> str | None:
    """Return the directory of the step that several sharded models belong to; None if there is no such step."""
    rows = [recognise(each.path) for each in candidates] if len(candidates) > 1 else []
    if not rows or not all(row is not None and row.is_sharded for row in rows):
        return None
    above = os.path.commonpath([each.path for each in candidates])
    while above and not is_a_step(os.path.basename(storage.absolute(above))):
        above = os.path.dirname(above) if above != place else ""
    return above or None


def find_checkpoint(path: str, *, strict: bool = False) -> ResolvedCheckpoint:
    """Return the checkpoint that a path stands for: the chosen one of a run directory, else the path itself.

    The remains of a damaged checkpoint stand for themselves.

    Args:
        path: an existing path.
        strict: raise an error if a checkpoint of a run was skipped.

    Raises:
        UsageError, SourceError, ResourceError: as `resolve_checkpoint`.
    """
    adapter = adapter_file(path)
    if adapter is None and storage.isdir(path) and not was_checkpoint(path):
        try:
            return choose_checkpoint(path, strict=strict).resolved
        except SourceError:
            if not any(map(storage.lexists, (os.path.join(path, manifest.NAME), manifest.sidecar_of(path)))):
                raise  # with a manifest, verify can list what is wrong
    doubt = tuple(filter(None, [missing_last_warning(path)]))
    return ResolvedCheckpoint(path=adapter or path, format="", step=None, reason=ITSELF, warnings=doubt)


def was_checkpoint(path: str) -> bool:
    """True if a path is a checkpoint, or was one, according to file names."""
    if recognise(path) is not None:
        return True
    directory = directory_of(path)
    if any(map(is_data_folder, listing(directory))):
        return True
    return any(has_any(listing(place), *_REMAINS) for place in (directory, *_unlisted(directory)))


def _unlisted(path: str) -> Iterator[str]:
    """Yield the directories in a directory that have shard files but no `.metadata` to list them."""
    for name in listing(path):
        below = folder_below(path, name)
        names = listing(below) if below is not None else frozenset[str]()
        if below is not None and METADATA not in names and has_any(names, "*.distcp"):
            yield below


def adapter_file(path: str) -> str | None:
    """Return the weight file in the directory of a PEFT adapter; None for other paths, or if a model is beside it."""
    return os.path.join(path, ADAPTER_WEIGHTS) if storage.isdir(path) and is_adapter(listing(path)) else None


def named_after(resolved: ResolvedCheckpoint, given_path: str) -> str:
    """Return the path after which an output is named: the checkpoint's, or the directory of an adapter.

    Args:
        resolved: the checkpoint.
        given_path: the path that the user named. If it is the adapter's file, the output is named after the file.
    """
    is_inside = is_adapter_file(resolved.path) and storage.isdir(given_path)
    return os.path.dirname(resolved.path) if is_inside else resolved.path


def manifest_scope(path: str) -> str:
    """Return the directory or file that a path's manifest describes.

    For the weight file of an adapter, or an index, this is the directory around it.
    """
    home, around = home_of(directory_of(path)), os.path.dirname(path) or os.curdir
    if storage.isdir(home):
        return home
    if is_adapter_file(path):
        return around if is_adapter(listing(around)) else home
    with contextlib.suppress(SourceError):  # there is no model, or more than one
        if select_weights(listing(around), around).index == os.path.basename(path):
            return around
    return home


def _place(name: str) -> tuple[int, ...] | None:
    """Return the sort key of a checkpoint's name, (rule, numbers ...); the greatest is chosen. None if no rule applies.

    "epoch=1-step=200-v2.ckpt" -> (_STEP, 200, 1, 2).
    """
    for rank, pattern in enumerate(_OF_LIGHTNING):
        if saved := pattern.fullmatch(name):
            return _LIGHTNING, rank, int(saved[1] or 0)
    step, epochs, version = step_of(name), _EPOCHS.findall(name), _VERSION.search(name)
    if (step is None and not epochs) or _PART.search(name):
        return None
    later = int(epochs[-1]) if epochs else 0, int(version[1]) if version else 0
    return (_EPOCH, *later) if step is None else (_STEP, step, *later)


def step_of(name: str) -> int | None:
    """Return the training step in a name, or None."""
    for pattern in () if _is_of_lightning(name) else _STEPS:
        numbers = pattern.findall(name)
        if numbers:
            return int(numbers[-1])
    return int(name) if _BARE.fullmatch(name) else None


def _is_of_lightning(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in _OF_LIGHTNING)


def is_saved_again(name: str) -> bool:
    """True for a name of Lightning under which it saves again and again, such as `last.ckpt`."""
    return _is_of_lightning(name)


def is_ordered(name: str) -> bool:
    """True for a name of a checkpoint in a run: with a step or an epoch, or Lightning's `last`."""
    return _place(name) is not None


def is_a_step(name: str) -> bool:
    """True for a directory name that is a step or an epoch, and not the name of a model (ckpt-8b-sft)."""
    place = _place(name) if name[-1:].isdigit() else None
    return place is not None and place[0] != _LIGHTNING


def is_left_out(name: str) -> bool:
    """True for names that cannot be a model's checkpoint: hidden ones, optimizers, logs."""
    return name.startswith(".") or _NOT_MODELS.fullmatch(name.lower()) is not None


def is_temporary(name: str) -> bool:
    """True for temporary names, which unfinished saves have."""
    return _UNFINISHED.fullmatch(name) is not None


class _Search:
    """One search below a path: the checkpoints that it skipped or opened, and how many entries it may still visit."""

    def __init__(self, home: str, *, needs_last: bool, before_tracker: bool) -> None:
        self.home, self.before_tracker = home, before_tracker
        self.inside = os.path.join(storage.realpath(home), "")
        self.needs_last = needs_last
        """Skip checkpoints without the file that their trainer writes last, even if they can be opened."""
        self.skipped = dict[str, str]()
        """Path -> why it was skipped."""
        self.not_searched = dict[str, str]()
        """Path without a step -> why it was not searched."""
        self.broken = dict[str, str]()
        """Path -> why it cannot be opened."""
        self.opened = dict[str, tuple[Checkpoint, ...]]()
        """Path -> its opened models."""
        self.warnings = list[str]()
        """About trackers that were not followed."""
        self.tracked = set[str]()
        """Paths of the step that a tracker file names, and of those before it."""
        self.entries_left = _MAX_ENTRIES

    def path_itself(self) -> list[ResolvedCheckpoint]:
        """Return the path itself if it is a checkpoint and not also a run directory."""
        recognised, tracked = recognise(self.home), _tracker_in(self.home)
        if recognised is None:
            return []
        if not recognised.is_sharded and self._holds_training_states(self.home):
            self.skipped[self.home] = (
                "it has checkpoints of a training below it; to use the model, give the path of its weight file"
            )
            return []
        if recognised.follows_tracker and tracked is not None:
            return self._tracked(self.home, self._names(self.home), *tracked, _MAX_DEPTH)
        doubt = tuple(filter(None, [missing_last_warning(self.home)]))
        return [replace(self._candidate(self.home, recognised.name, ITSELF), warnings=doubt)]

    def below(self, directory: str, depth: int) -> list[ResolvedCheckpoint]:
        """Return the checkpoint that the trainer of a directory would resume from.

        These may be several: models of one step, or equal steps. If no complete one is found, all are returned, including
        damaged ones.

        Args:
            directory: a run directory, or one above or below it.
            depth: how many levels of directories to descend.

        Raises:
            SourceError: a tracker file names an incomplete checkpoint.
            UsageError: there are too many directories.
        """
        names, tracked = self._names(directory), _tracker_in(directory)
        if tracked is not None:
            return self._tracked(directory, names, *tracked, depth)
        return self._newest(directory, names, depth)

    def every(self, directory: str, depth: int) -> Iterator[ResolvedCheckpoint]:
        """Yield every checkpoint at or below a path; those that a tracker does not name yet are skipped ones."""
        row, tracked = recognise(directory), _tracker_in(directory)
        is_run = row is not None and row.follows_tracker and tracked is not None
        if row is not None and not is_run:
            yield from self._at(directory, 0)
            if row.is_sharded or not self._holds_training_states(directory):
                return
        names = self._names(directory) if storage.isdir(directory) else []
        if tracked is not None:
            self._skip_later(directory, names, *tracked)
        for name in names:
            path = os.path.join(directory, name)
            if tracked is not None and _is_covered(name, tracked[1]):
                self.tracked.add(path)
            is_known = recognise(path) is not None
            candidates = [] if is_known else self._at(path, 0)
            if is_known or (not candidates and depth > 0 and self.why_not_followed(path) is None):
                candidates = list(self.every(path, depth - 1))
            yield from (
                each if each.step is not None else replace(each, step=step_of(name)) for each in candidates
            )

    def describe(self, candidate: ResolvedCheckpoint) -> FoundCheckpoint:
        """Open a checkpoint that `every` found."""
        path = candidate.path
        missing = self.skipped.get(path) or self.damage(candidate)
        models = self.opened.get(path, ())
        is_tracked = any(path == each or path.startswith(os.path.join(each, "")) for each in self.tracked)
        is_finished = is_tracked or (bool(models) and all(each.dcp is not None for each in models))
        return FoundCheckpoint(candidate, missing, missing is None and is_finished)

    def _newest(self, directory: str, names: Sequence[str], depth: int) -> list[ResolvedCheckpoint]:
        """Return the newest checkpoint among names, as `below` does for a directory without a tracker file."""
        places = {name: place for name in names if (place := _place(name)) is not None}
        damaged = list[ResolvedCheckpoint]()
        for place in sorted(set(places.values()), reverse=True):
            equal = [name for name in names if places.get(name) == place]
            steps = {name: self._at(os.path.join(directory, name), depth) for name in equal}
            if any(step and not any(map(self.damage, step)) for step in steps.values()):
                why = _REASONS[place[0]] + (" of those that are whole" if damaged else "")
                candidates = [
                    self._chosen(each, directory, name, why) for name, step in steps.items() for each in step
                ]
                if place[0] != _LIGHTNING:
                    later = [name for name in names if name not in places or places[name][0] < place[0]]
                    self._mention(directory, later, os.path.basename(candidates[0].path))
                return candidates
            for name, step in steps.items():
                if not step:
                    path = os.path.join(directory, name)
                    self.skipped[path] = _holds_nothing(path)
                self.skipped |= {each.path: reason for each in step if (reason := self.damage(each))}
                damaged += step
        rest = [name for name in names if name not in places]
        return damaged + [each for name in rest for each in self._at(os.path.join(directory, name), depth)]

    def damage(self, candidate: ResolvedCheckpoint) -> str | None:
        """Return why a checkpoint cannot be used; None if it can be opened."""
        path = candidate.path
        if candidate.reason == ITSELF or path in self.opened:
            return None
        if path not in self.broken and (reason := self._open(path)) is not None:
            self.broken[path] = reason
        return self.broken.get(path)

    def finish(self, candidate: ResolvedCheckpoint) -> ResolvedCheckpoint:
        """Return the chosen checkpoint, with the skipped ones."""
        skipped = tuple((os.path.relpath(path, self.home), why) for path, why in self.skipped.items())
        lines = (
            f"skipped {'the model at the top' if name == os.curdir else escape(name)}: {why}"
            for name, why in skipped
        )
        return replace(candidate, skipped=skipped, warnings=(*candidate.warnings, *self.warnings, *lines))

    def nothing_to_take(self, candidates: list[ResolvedCheckpoint]) -> ShardkitError:
        """Return the error for a path with several possible checkpoints, or without a complete one."""
        if any(self.damage(each) is None for each in candidates):
            paths = sorted(each.path for each in candidates)
            names = [escape(os.path.relpath(path, self.home)) for path in paths]
            whole = next(each.path for each in candidates if self.damage(each) is None)
            return UsageError(
                f"{escape(self.home)}: {len(candidates)} checkpoints here; say which",
                problems=[
                    f"{name}: {self.broken[path]}" if path in self.broken else name
                    for name, path in zip(names, paths, strict=True)
                ],
                hint=f"give one by its path, such as {escape(whole)}"
                + (
                    "; they are of one step, and reshard takes all of them"
                    if _step_around(candidates, self.home)
                    else ""
                ),
            )
        problems = (
            self.skipped | {each.path: self.broken[each.path] for each in candidates} | self.not_searched
        )
        return SourceError(
            f"{escape(self.home)}: no checkpoint in it opens whole",
            problems=[f"{escape(os.path.relpath(path, self.home))}: {why}" for path, why in problems.items()],
            hint="give the directory that the trainer's save made, or its parent",
        )

    def _tracked(
        self, directory: str, names: list[str], tracker: str, text: str, depth: int
    ) -> list[ResolvedCheckpoint]:
        """Return the checkpoint that a tracker file names.

        Args:
            directory: the directory with the tracker file.
            names: names of possible checkpoints in it.
            tracker: name of the tracker file.
            text: its content, a step or a name.
            depth: how many levels of directories to descend.

        Raises:
            SourceError: the checkpoint does not exist, or is incomplete.
        """
        steps = [name for name in names if _BARE.fullmatch(text) and step_of(name) == int(text)]
        name = text if text in names else min(steps, key=len, default=None)
        row = recognise(directory)
        if row is not None and row.follows_tracker:
            candidates = [replace(self._candidate(directory, row.name, ""), step=step_of(text))]
        else:
            candidates = [] if name is None else self._at(os.path.join(directory, name), depth)
        reasons = [reason for each in candidates if (reason := self.damage(each)) is not None]
        self._skip_later(directory, names, tracker, text)
        if not candidates or reasons:
            why = "which cannot be opened" if name is not None else "which is not there"
            wrong = f"{escape(directory)}: {tracker} names {escape(text)}, {why}"
            if not self.before_tracker:
                raise SourceError(wrong, problems=reasons, hint="give the path of the step to use")
            self.warnings.append(f"{wrong}: consolidate refuses this run, unless it gets the path of a step")
            earlier = [each for each in names if os.path.join(directory, each) not in self.skipped]
            return self._newest(directory, earlier, depth)
        return [self._chosen(each, directory, name or text, f"{tracker} names {{it}}") for each in candidates]

    def _skip_later(self, directory: str, names: Iterable[str], tracker: str, text: str) -> None:
        """Record the steps after the one that a tracker file names as skipped."""
        limit = step_of(text)
        for later in names:
            if limit is not None and (step_of(later) or 0) > limit:
                path = os.path.join(directory, later)
                self.skipped[path] = f"{tracker} does not name it, so its save may not have finished"

    def _at(self, path: str, depth: int) -> list[ResolvedCheckpoint]:
        """Return the checkpoint at a path, or the chosen one below it; several if no rule decides."""
        candidates = self._look(path, depth) if path not in self.broken else []
        lacking = missing_last_warning(path) if candidates else None
        if lacking is not None and self.needs_last:
            self.broken[path] = lacking
        if path in self.broken:
            return [self._candidate(path, "", "")]
        step, warnings = step_of(_name_of(path)), () if lacking is None else (lacking,)
        return [
            replace(each, step=step if each.step is None else each.step, warnings=each.warnings + warnings)
            for each in candidates
        ]

    def _look(self, path: str, depth: int) -> list[ResolvedCheckpoint]:
        if recognise(path) is None:
            adapter, reason = adapter_file(path), why_unfinished(path)
            if adapter is None and reason is not None:
                self.broken[path] = reason
                return []
            is_deeper = adapter is None and depth > 0 and storage.isdir(path)
            below = self.below(path, depth - 1) if is_deeper else []
            if below:
                return below
            path = adapter or _only_file(path) or path
        recognised = recognise(path) if self.why_not_followed(path) is None else None
        return [] if recognised is None else [self._candidate(path, recognised.name, "it is the only one")]

    def _mention(self, directory: str, names: list[str], file: str) -> None:
        """Record the checkpoints among names without a step as skipped; `file` is the name of the chosen checkpoint."""
        for name in names:
            path = os.path.join(directory, name)
            is_file = file.endswith(TORCH_FILES) and file in listing(path)
            if is_file or (recognise(path) or adapter_file(path)) is not None:
                self.skipped[path] = "its name has no step, so it may be newer"

    def _open(self, path: str) -> str | None:
        """Open a checkpoint; return why it cannot be used, or None."""
        structure = find_structure(path) if storage.isdir(path) else None
        last = (
            structure.structure.last if structure and not structure.structure.is_taken_without_last else None
        )
        last = last or _last_of_trainer(path)
        if last is not None and not storage.lexists(os.path.join(path, last)):
            return f"the save did not finish: {last}, which is written last, is missing"
        try:
            opened = _open_models(path)
        except SourceError as error:
            return "; ".join((error.message, *error.problems[:1]))
        files = (file.path for model in opened for file in model.catalog.files)
        reason = _unfinished_part(home_of(path), _MAX_DEPTH, {os.path.dirname(file) for file in files})
        if reason is None:
            self.opened[path] = opened
        return reason

    def _names(self, directory: str) -> list[str]:
        """Return the names in a directory that may be checkpoints, or contain some."""
        names, neighbours = list[str](), dict[str, str]()
        for entry in self._scan(directory):
            name, path = entry.name, entry.path
            if is_left_out(name) or is_data_folder(name):
                continue
            reason = self.why_not_followed(path)
            if reason is None and not (
                storage.isdir(path) or (name.endswith(_FILES) and storage.isfile(path))
            ):
                continue
            if reason is None and is_temporary(name):
                reason = "it has a temporary name: the save did not finish"
            if reason is not None:
                (self.broken if is_ordered(name) else self.not_searched)[path] = reason
            elif entry.is_symlink() and not _is_of_lightning(name):
                neighbours[name] = storage.realpath(path)
            if reason is None or is_ordered(name):
                names.append(name)
        real = {os.path.join(storage.realpath(directory), name) for name in names} if neighbours else set()
        stems = {stem for name in names for stem in (name, name.removesuffix(_FILES))}
        out = optimizers_beside(directory, names)
        out |= {name for name, target in neighbours.items() if target in real}
        out |= {name for name in names if name.removesuffix(EXPORT_ENDING) in stems - {name}}
        return sorted(set(names) - out)

    def why_not_followed(self, link: str) -> str | None:
        """Return why a link is not followed; None if it is, or if the path is not a link."""
        if not storage.islink(link):
            return None
        if not storage.exists(link):
            return f"a link to {escape(storage.readlink(link))}, which is not there"
        is_inside = storage.realpath(link).startswith(self.inside)
        return None if is_inside else f"a link that leads out of {escape(self.home)}: it was not followed"

    def _scan(self, directory: str) -> Iterator[os.DirEntry[str]]:
        """Yield directories, links and .ckpt files."""
        try:
            with storage.scandir(directory) as entries:
                for entry in entries:
                    if not (entry.is_symlink() or entry.is_dir() or entry.name.endswith(_FILES)):
                        continue  # not counted: a directory of logs or pictures may have any number of files
                    self.entries_left -= 1
                    if self.entries_left < 0:
                        raise UsageError(
                            f"{escape(self.home)} holds more than {_MAX_ENTRIES} directories: it is not searched",
                            hint="give the run's own directory",
                        )
                    yield entry
        except OSError as error:
            if directory == self.home:
                formats.open(directory)  # raises, as it cannot be listed
            self.broken[directory] = f"cannot be listed: {error.strerror}"

    def _holds_training_states(self, directory: str) -> bool:
        """True if a path is a run directory with sharded checkpoints, apart from the Hub model in it."""
        if not storage.isdir(directory):
            return False
        steps = (
            os.path.join(directory, name) for name in self._names(directory) if step_of(name) is not None
        )
        return any((row := recognise(step)) is not None and row.is_sharded for step in steps)

    def _candidate(self, path: str, format: str, reason: str) -> ResolvedCheckpoint:
        return ResolvedCheckpoint(path=path, format=format, step=step_of(_name_of(path)), reason=reason)

    def _chosen(
        self, candidate: ResolvedCheckpoint, directory: str, name: str, why: str
    ) -> ResolvedCheckpoint:
        it = "it" if candidate.path == os.path.join(directory, name) else escape(name)
        return replace(candidate, reason=why.format(it=it))


def _is_covered(name: str, text: str) -> bool:
    """True if a directory is what a tracker file with this text names, or an earlier step."""
    step, limit = step_of(name), step_of(text)
    return name == text or (step is not None and limit is not None and step <= limit)


def _name_of(path: str) -> str:
    """Return the name of a checkpoint that has its step: of the path, or of the link's target for `last.ckpt`."""
    name = os.path.basename(storage.absolute(path))
    return name if step_of(name) is not None else os.path.basename(storage.realpath(path))


def _weights_in(path: str) -> list[str]:
    return [name for name in list_weights(path) if may_be_model(os.path.basename(name))]


def _only_file(path: str) -> str | None:
    """Return the `torch.save` file with all weights in the directory of a step; None if there is no single one."""
    files = _weights_in(path) if is_ordered(os.path.basename(path)) else []
    is_whole = len(files) == 1 and files[0].endswith(TORCH_FILES) and os.sep not in files[0]
    return os.path.join(path, files[0]) if is_whole and not _PART.search(files[0]) else None


def _holds_nothing(path: str) -> str:
    files = _weights_in(path)
    may_be = f"; if {escape(files[0])} is a whole model, give it by its own path" if files else ""
    return f"it holds no checkpoint of a known format{may_be}"


def _last_of_trainer(path: str) -> str | None:
    """Return the name of the file that transformers' Trainer writes last, if a checkpoint beside this one has it."""
    parent, name = os.path.split(storage.absolute(path))
    if not _OF_TRAINER.fullmatch(name):
        return None
    steps = [os.path.join(parent, name) for name in listing(parent) if _OF_TRAINER.fullmatch(name)]
    is_trainer = any(storage.isfile(os.path.join(step, _TRAINER_STATE)) and recognise(step) for step in steps)
    return _TRAINER_STATE if is_trainer else None


def _unfinished_part(path: str, depth: int, read: Collection[str]) -> str | None:
    """Return why the save of a part, such as the optimizer, is known to be unfinished; else None.

    Args:
        path: a checkpoint, or a folder of it.
        depth: levels of folders to search.
        read: folders with files that the opened checkpoint uses; they have no `.metadata` if that is above them.
    """
    for name in sorted(listing(path)) if depth else ():
        part = os.path.join(path, name)
        if step_of(name) is not None or part in read or storage.islink(part) or not storage.isdir(part):
            continue
        reason = None if is_dcp(part) else why_unfinished(part) or _unfinished_part(part, depth - 1, read)
        if reason is not None:
            return f"{escape(name)}: {reason}"
    return None


def _tracker_in(directory: str) -> tuple[str, str] | None:
    """Return (tracker file, its content) of a directory, or None."""
    for tracker in TRACKERS:
        try:
            data = read_inside(directory, tracker, _MAX_TRACKER)
        except ShardkitError:  # missing, or something else of that name, such as a link to a checkpoint
            continue
        text = data.decode("utf-8", "replace").strip()
        if text and os.path.basename(text) == text and text not in (os.curdir, os.pardir):
            return tracker, text
    return None
