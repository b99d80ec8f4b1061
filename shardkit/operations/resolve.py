"""Finds the newest complete checkpoint in a run directory, by each trainer's own rules.

The search goes through a directory newest first: what a tracker file names, what Lightning saved on a failure or as the
last one, the highest step, the highest epoch. It takes the first that opens, and names everything that it passed over,
with the reason; with `strict` that is an error.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import dropwhile, zip_longest

from shardkit import formats
from shardkit.core.result import Result
from shardkit.core.text import escape, listed
from shardkit.errors import ShardkitError, SourceError, UsageError
from shardkit.files import manifest, storage, stores
from shardkit.files.home import home_of, is_data_folder
from shardkit.files.links import locate, read_inside
from shardkit.formats.contract import Checkpoint, absent, has_any, inner, listing
from shardkit.formats.dcp import METADATA
from shardkit.formats.dcp.directory import is_dcp
from shardkit.formats.hub.adapter import ADAPTER_WEIGHTS, is_adapter, is_adapter_file
from shardkit.formats.hub.assets import list_weights, may_be_model
from shardkit.formats.hub.files import PIPELINE, TORCH_FILES, select_weights
from shardkit.formats.registry import directory_of, recognise
from shardkit.formats.trainers.plain_dcp import find_structure, lacks_last, optimizers_beside
from shardkit.keys.names import PEFT, clean, join
from shardkit.keys.peft import base_name
from shardkit.keys.roots import MODEL_WORDS
from shardkit.keys.tree import optimizer_names
from shardkit.operations.leftovers import refuse
from shardkit.operations.resolve_order import (
    BEYOND,
    EPOCH,
    EXPORT_ENDINGS,
    HOME,
    NAMED,
    OTHER,
    RULES,
    STEP,
    TRACKERS,
    Recency,
    family_of,
    is_a_place,
    is_a_step,
    is_left_out,
    is_of_a_run,
    is_ordered,
    is_temporary,
    ordered,
    step_of,
)

# lightning_logs/version_3/checkpoints/ is the deepest that a trainer makes by itself.
_MAX_DEPTH = 3
_MAX_ENTRIES = 20_000
_MAX_TRACKER = 4096
_FILES = (".ckpt",)
_META = "meta.pt"
ITSELF = "it is a checkpoint itself"
# Other files of safetensors may be of anything, such as a model of diffusers.
_REMAINS = (
    *("*.distcp", "__*.chunks.json", "model*.safetensors", "shard-*-model-*.safetensors"),
    *("*.safetensors.index.json", manifest.NAME),
)
_UNDATED = "it is complete, and no step tells how old it is"
# Directories below a name that does not say whether checkpoints are there.
_MAX_PEEKED = 256
_OF_TRAINER = re.compile(r"checkpoint-[0-9]+")
_TRAINER_STATE = "trainer_state.json"
# In names of files: the number of a process, or of a file among several.
_PART = re.compile(r"(?i)(rank|shard|part|stage|gpu|(?<![a-z])[tpcm]p)[-_=]?[0-9]|[0-9]-of-(?!0*1\b)[0-9]")
_ABOVE_MODELS = frozenset({*MODEL_WORDS, *PEFT})


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedCheckpoint(Result):
    """The checkpoint that was taken; `os.fspath` gives its path."""

    path: str
    """The checkpoint, a directory or a file."""
    format: str
    """As `shardkit.inspect` names it."""
    step: int | None
    """The training step, where its name, a tracker file or Lightning's own record in it tells."""
    reason: str
    """Why it was taken, for people: `it has the highest step`, then why each directory above it was."""
    skipped: tuple[tuple[str, str], ...] = ()
    """(path, reason) of each checkpoint that was passed over: it is newer, may be newer, or is incomplete."""
    warnings: tuple[str, ...] = ()
    """A line for each skipped checkpoint that is newer, or may be."""
    notes: tuple[str, ...] = ()
    """A line for each skipped checkpoint of a lower step, and for whatever else the search left out."""

    def headline(self) -> str:
        """Return its path."""
        return escape(self.path)

    def __fspath__(self) -> str:
        return self.path

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The checkpoint that was taken, with everything that was opened to choose it: nobody parses it again."""

    resolved: ResolvedCheckpoint
    opened: tuple[Checkpoint, ...] = ()
    """Its model; several where accelerate saved several. Empty where the choice needed nothing opened."""

    def models(self) -> tuple[Checkpoint, ...]:
        """Return the checkpoint, opened, or each model of one that holds several.

        Raises:
            SourceError, IntegrityError, ResourceError: as opening does.
        """
        return tuple(map(self._without_warnings, self.opened or _open_models(self.resolved.path)))

    def open(self) -> Checkpoint:
        """Return the checkpoint, opened.

        Raises:
            SourceError: it holds several models; or as opening does.
            IntegrityError, ResourceError: as opening does.
        """
        is_open = len(self.opened) == 1
        return self._without_warnings(self.opened[0] if is_open else formats.open(self.resolved.path))

    def _without_warnings(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint without the notes that are warnings here."""
        notes = tuple(note for note in checkpoint.notes if note not in self.resolved.warnings)
        return checkpoint if notes == checkpoint.notes else replace(checkpoint, notes=notes)


def as_it_is(path: str, checkpoint: Checkpoint) -> Taken:
    """Return a checkpoint that is open, as one that was chosen."""
    resolved = ResolvedCheckpoint(path=path, format=checkpoint.format, step=None, reason=ITSELF)
    return Taken(resolved=resolved, opened=(checkpoint,))


def _open_models(path: str) -> tuple[Checkpoint, ...]:
    """Open a checkpoint, or each model of one that holds several."""
    from shardkit.formats.trainers.accelerate import (
        model_directories,  # here, as a Hub model needs none of it
    )

    path = home_of(path)
    models = model_directories(path)
    places = [os.path.join(path, name) for name in models] if len(models) > 1 else [path]
    return tuple(map(formats.open, places))


def resolve_checkpoint(path: str | os.PathLike[str], *, strict: bool = False) -> ResolvedCheckpoint:
    """Return the newest complete checkpoint at or below a path.

    A path that is a checkpoint is taken as it is. Otherwise the search goes three levels down, and follows no link that
    leads out of the path. A training script that continues where it stopped, and `shardkit consolidate`, get the same
    checkpoint. Where a newer one was passed over, the result's `warnings` name it and say why.

    Args:
        path: a checkpoint, a file of one (`.metadata`, `meta.pt`), a run's directory, or a directory of runs.
        strict: fail where a newer one was passed over.

    Raises:
        UsageError: several complete checkpoints, and nothing tells which is the newest. Lists them.
        SourceError: no complete checkpoint; or, with `strict`, a newer one was passed over. Lists what was passed over
            and why.
        ResourceError: something may not be read.
    """
    return take(path, strict=strict).resolved


def take(path: str | os.PathLike[str], *, strict: bool = False, whole_steps: bool = False) -> Taken:
    """Choose a checkpoint as `resolve_checkpoint` does, and keep what that opens.

    Args:
        path: as in `resolve_checkpoint`.
        strict: the same.
        whole_steps: where one step holds several models (a GAN's two), take all of it. Otherwise one has to be named.

    Raises:
        UsageError, SourceError, ResourceError: as `resolve_checkpoint`.
    """
    given = stores.as_path(path)
    if not storage.lexists(given):
        raise absent(given)
    refuse(given)
    if not storage.isdir(given) and os.path.basename(given) in TRACKERS:
        given = os.path.dirname(given) or os.curdir
    given = adapter_file(given) or directory_of(given)
    search = _Search(given)
    chosen = search.itself()
    if chosen is None and not storage.isdir(given):
        formats.open(given)  # raises, and says why it is none
    chosen = chosen or search.below(given, _MAX_DEPTH) or search.newest_unfinished()
    if PIPELINE in listing(given) and chosen is not None and chosen.path != given and chosen.step is None:
        formats.open(given)  # raises: one model of a pipeline is not the newest checkpoint of a run
    if chosen is not None:
        rivals = search.rivals.get(chosen.path, ())
        step = _step_around(rivals, given) if whole_steps else None
        if step is None:
            _refuse_rivals(given, rivals, search.opened)
        else:
            search.opened[step] = tuple(model for rival in rivals for model in _open_models(rival))
            chosen = replace(chosen, path=step, reason=f"it holds {len(rivals)} models")
        said = list(_passed_over(chosen, given))
        doubt = search.doubt or lacks_last(chosen.path) or lacks_last(given)
        chosen = replace(
            chosen,
            warnings=(*filter(None, [doubt]), *(line for line, is_older in said if not is_older)),
            notes=(*(line for line, is_older in said if is_older), *search.notes),
        )
        if strict and doubt is not None:
            raise SourceError(
                f"{escape(chosen.path)}: {doubt}",
                problems=chosen.warnings[1:],
                hint=f"wait for the save to end, or give {escape(chosen.path)} without --strict",
            )
        if strict and chosen.warnings:
            raise _not_the_newest(given, chosen, search.complete)
        return Taken(resolved=chosen, opened=search.opened.get(chosen.path, ()))
    if not search.skipped and recognise(given) is None:
        formats.open(given)  # raises, and says what the directory looks like: a save that did not finish, ...
    raise SourceError(
        f"{escape(given)}: no complete checkpoint in it",
        problems=[f"{escape(name)}: {reason}" for name, reason in search.skipped]
        or [
            f"looked for directories and .ckpt files of known formats, {_MAX_DEPTH} levels deep",
            f"looked for {', '.join(TRACKERS)}",
        ],
        hint="give the directory that the trainer's save made, or its parent",
    )


def _step_around(paths: Collection[str], given: str) -> str | None:
    """Return the directory of the step that some checkpoints are models of; None if they are of none."""
    above = os.path.commonpath(paths) if len(paths) > 1 else ""
    for _ in range(_MAX_DEPTH):
        if not above or is_a_step(os.path.basename(storage.absolute(above))):
            return above or None
        above = os.path.dirname(above) if above != given else ""
    return None


def _refuse_rivals(given: str, rivals: Collection[str], opened: Mapping[str, tuple[Checkpoint, ...]]) -> None:
    """Refuse a choice that would be made by chance.

    Raises:
        UsageError: several checkpoints may be meant.
    """
    if len(rivals) > 1:
        names = [os.path.relpath(path, given) for path in rivals]
        is_one = _step_around(rivals, given) is not None
        why = "they are of one step" if is_one else "no step, date or tracker file tells which is the newest"
        first, second, *_ = (opened.get(path, ()) for path in rivals)
        if not _have_one_model(first, second):
            why += "; each has tensors of its own, a part of the model if they are stages of a pipeline"
        raise UsageError(
            f"{escape(given)}: {len(rivals)} checkpoints here; say which",
            problems=map(escape, names),
            hint=f"{why}: give one by its path, such as {escape(os.path.join(given, names[0]))}"
            + ("; reshard takes all of them" if is_one else ""),
        )


def _not_the_newest(given: str, chosen: ResolvedCheckpoint, complete: Collection[str]) -> SourceError:
    """Return the error for a checkpoint that may not be the newest one, where only that will do."""
    lines = zip(chosen.skipped, _passed_over(chosen, given), strict=True)
    if all(is_older or name in complete for (name, _), (_, is_older) in lines):
        return SourceError(
            f"{escape(given)}: it is not certain which checkpoint in it is the newest",
            problems=chosen.warnings,
            hint=f"name the one to take, such as {escape(chosen.path)}",
        )
    return SourceError(
        f"{escape(given)}: the newest checkpoint in it cannot be taken",
        problems=chosen.warnings,
        hint=f"repair or remove it, or name the one to take: {escape(chosen.path)}",
    )


def stands_for(path: str, *, strict: bool = False) -> ResolvedCheckpoint:
    """Return the checkpoint that a path stands for: the newest one in a run's directory, else the path itself.

    What is left of a checkpoint that was damaged stands for itself.

    Args:
        path: of something that exists.
        strict: fail where a newer checkpoint of a run cannot be taken.

    Raises:
        UsageError, SourceError, ResourceError: as `resolve_checkpoint`.
    """
    adapter = adapter_file(path)
    if adapter is None and storage.isdir(path) and not was_checkpoint(path):
        try:
            return take(path, strict=strict).resolved
        except SourceError:
            if not any(map(storage.lexists, (os.path.join(path, manifest.NAME), manifest.sidecar_of(path)))):
                raise  # else what the manifest lists says what is wrong with it
    doubt = lacks_last(path) if storage.isdir(path) else None
    warnings = () if doubt is None else (doubt,)
    return ResolvedCheckpoint(path=adapter or path, format="", step=None, reason=ITSELF, warnings=warnings)


def was_checkpoint(path: str) -> bool:
    """True for what is or once was a checkpoint, as far as names tell."""
    if recognise(path) is not None:
        return True
    directory = directory_of(path)
    if any(map(is_data_folder, listing(directory))):
        return True
    return any(has_any(listing(place), *_REMAINS) for place in (directory, *_unlisted(directory)))


def _unlisted(path: str) -> Iterator[str]:
    """Yield the directories in a directory that have shard files but no `.metadata` to list them."""
    for name in listing(path):
        below = inner(path, name)
        names = listing(below) if below is not None else frozenset[str]()
        if below is not None and METADATA not in names and has_any(names, "*.distcp"):
            yield below


def adapter_file(path: str) -> str | None:
    """Return the weights in the directory of a PEFT adapter; None for any other path, and if a model lies beside it."""
    return os.path.join(path, ADAPTER_WEIGHTS) if storage.isdir(path) and is_adapter(listing(path)) else None


def named_after(resolved: ResolvedCheckpoint, given: str) -> str:
    """Return the path that gives an output its name: the checkpoint's, or an adapter's directory.

    Args:
        resolved: the checkpoint.
        given: what a person gave. If that is the adapter's file, the file gives the name.
    """
    is_inside = is_adapter_file(resolved.path) and storage.isdir(given)
    return os.path.dirname(resolved.path) if is_inside else resolved.path


def described_at(path: str) -> str:
    """Return what a manifest of a path is about: the whole directory of an adapter or an index, or the path's own."""
    own, around = home_of(directory_of(path)), os.path.dirname(path) or os.curdir
    if storage.isdir(own):
        return own
    if is_adapter_file(path):
        return around if is_adapter(listing(around)) else own
    with contextlib.suppress(SourceError):  # there is no model, or more than one
        if select_weights(listing(around), around).index == os.path.basename(path):
            return around
    return own


def _passed_over(chosen: ResolvedCheckpoint, home: str) -> Iterator[tuple[str, bool]]:
    """Yield (a line, whether it is older) for each that was skipped."""
    taken = os.path.relpath(chosen.path, home)
    shown_taken = f"step {chosen.step}" if taken == os.curdir else escape(taken)
    for path, reason in chosen.skipped:
        name, beside = _where_they_part(path, taken)
        step, limit = step_of(name), step_of(beside)
        if limit is None and beside == taken:
            limit = chosen.step  # `last.ckpt` may hold one
        is_known = step is not None and limit is not None and step != limit
        is_older = is_known and (step or 0) < (limit or 0)
        age = f"is {'older' if is_older else 'newer'} than {shown_taken}" if is_known else "may be newer"
        shown = "the model at the top" if path == os.curdir else escape(path)
        yield f"passed over {shown}, which {age}: {reason}", is_older


def _where_they_part(path: str, other: str) -> tuple[str, str]:
    """Return the first pair of names in which two relative paths differ."""
    names, others = path.split(os.sep), other.split(os.sep)
    pairs = zip_longest(names, others, fillvalue="")
    return next(((name, beside) for name, beside in pairs if name != beside), ("", ""))


def _is_older(name: str, other: str) -> bool:
    """True if both names tell a step, and the first one's is lower."""
    step, limit = step_of(name), step_of(other)
    return step is not None and limit is not None and step < limit


class _Search:
    """One search: what it has passed over so far, and how many directories it may still look at."""

    def __init__(self, home: str) -> None:
        self.home = home
        self.inside = os.path.join(storage.realpath(home), "")
        self.skipped: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.opened: dict[str, tuple[Checkpoint, ...]] = {}
        """By path, what opened."""
        self.complete: set[str] = set()
        """Names of those that were passed over though nothing is wrong with them."""
        self.rivals: dict[str, tuple[str, ...]] = {}
        """By path of one that was taken by chance, it and all others that might be meant."""
        self.unfinished: list[tuple[ResolvedCheckpoint, str]] = []
        """Those that open, newest first, and why their trainer may not have finished them."""
        self.doubt: str | None = None
        """Why the one that was taken may not be finished."""
        self.alone: set[str] = set()
        """Names of files of `torch.save` that stood for their directories: others of a run are called alike."""
        self.entries_left = _MAX_ENTRIES

    def itself(self) -> ResolvedCheckpoint | None:
        """Return the path itself where it is a checkpoint, and not also a run directory."""
        recognised = recognise(self.home)
        if recognised is None:
            return None
        if not recognised.is_sharded and self._holds_training_states():
            first = "the checkpoints of its training come first; its weight file can be given by itself"
            damage = self._damage(self.home)
            self._skip(self.home, damage or first, is_complete=damage is None)
            return None
        tracked = _tracked(self.home)
        step = _step_at(self.home)
        if recognised.follows_tracker and tracked is not None:
            # The directory stands for the save that its tracker names. Where that is damaged, older ones may be whole.
            reason = self._damage(self.home) if len(self._children(self.home)) > 1 else None
            if reason is not None:
                self._skip(os.path.join(self.home, tracked[1]), reason)
                return None
            order = ordered(self._children(self.home), tracked[1])
            self._mention(self.home, [name for place, name in order if place.rule == BEYOND], tracked[0])
            return self._take(
                self.home, recognised.name, step_of(tracked[1]), f"{tracked[0]} names {escape(tracked[1])}"
            )
        return self._take(self.home, recognised.name, step, ITSELF)

    def newest_unfinished(self) -> ResolvedCheckpoint | None:
        """Return the newest of those that may be taken where nothing finished is there."""
        if not self.unfinished:
            return None
        newest, self.doubt = self.unfinished[0]
        name = os.path.join(os.path.relpath(newest.path, self.home), "")
        self.skipped = [pair for pair in self.skipped if not name.startswith(os.path.join(pair[0], ""))]
        return replace(newest, reason="no finished one is there", skipped=tuple(self.skipped))

    def below(self, directory: str, depth: int) -> ResolvedCheckpoint | None:
        """Return the newest complete checkpoint below a directory, None if there is none.

        Args:
            depth: how many levels of directories to go down.
        """
        tracked = _tracked(directory)
        order = ordered(self._children(directory), tracked[1] if tracked else None)
        if tracked and not any(place.rule == NAMED for place, _ in order):
            self._skip(
                os.path.join(directory, tracked[0]), f"it names {escape(tracked[1])}, which is not there"
            )
        by_rule = {
            rule: [name for place, name in order if place.rule == rule]
            for rule in dict.fromkeys(place.rule for place, _ in order)
        }
        for rule, names in by_rule.items():
            families = list(dict.fromkeys(map(family_of, names))) if rule == OTHER else [None]
            candidates = [
                resolved
                for family in families
                if (resolved := self._first(directory, names, family, depth)) is not None
            ]
            if not candidates:
                continue
            if tracked and rule != BEYOND:
                self._mention(directory, by_rule.get(BEYOND, []), tracked[0])
            best = max(candidates, key=lambda resolved: -1 if resolved.step is None else resolved.step)
            equals = [resolved for resolved in candidates if resolved.step == best.step]
            equals += self._stage_before(directory, names, best, depth) if rule == OTHER else []
            if rule == OTHER and len(equals) > 1:
                self._doubt(directory, names, best, equals)
            name = os.path.relpath(best.path, directory).split(os.sep)[0]
            others = list[tuple[str, str]]()
            if not self._is_in_a_checkpoint(directory):
                others = [*self._others(directory, best, rule, order, depth), *_undated(best, candidates)]
            has_model_at_top = directory == self.home and any(path == os.curdir for path, _ in self.skipped)
            has_others = bool(others) or has_model_at_top
            is_only = not self._has_skipped_beside(directory, name)
            why = _why(best, rule, len(names), len(candidates), is_only=is_only, has_others=has_others)
            it = escape(name) if best.reason else "it"
            why = why.format(tracker=tracked[0] if tracked else "", it=it)
            for path, reason in others:
                self._skip(path, reason, is_complete=True)
            # That checkpoints lie where trainers put them is no reason to tell beside that for one of them.
            told = (best.reason, None if rule == HOME and best.reason else why)
            reason = "; ".join(part for part in told if part)
            return replace(best, reason=reason, skipped=tuple(self.skipped))
        return None

    def _doubt(
        self, directory: str, names: list[str], best: ResolvedCheckpoint, candidates: list[ResolvedCheckpoint]
    ) -> None:
        """Note what else might be meant where nothing tells which of several is the newest.

        Args:
            names: of all in the directory that may be meant, damaged ones too.
            candidates: the newest of those that are numbered alike, all of one step, or of none.
        """
        tops = {
            os.path.relpath(candidate.path, directory).split(os.sep)[0]: candidate.path
            for candidate in candidates
        }
        if all(map(is_of_a_run, tops)):
            return
        rivals, passed = list[str](), {os.path.join(self.home, path) for path, _ in self.skipped}
        for name in names:
            path = os.path.join(directory, name)
            if name in tops:
                rivals += self.rivals.get(tops[name], (tops[name],))
            elif path not in passed and recognise(path) is not None:
                rivals.append(path)
        self.rivals[best.path] = tuple(sorted(rivals))

    def _stage_before(
        self, directory: str, names: list[str], newest: ResolvedCheckpoint, depth: int
    ) -> list[ResolvedCheckpoint]:
        """Return the one that is numbered before another if both are stages of a pipeline: their numbers tell no time.

        Stages of training, and runs, have one model.
        """
        taken = os.path.relpath(newest.path, directory).split(os.sep)[0]
        search, before = _Search(self.home), names[names.index(taken) + 1 :]
        with contextlib.suppress(SourceError):  # too many entries
            stage = search._first(directory, before, family_of(taken), depth)
            self.opened |= search.opened
            if stage and not _have_one_model(self.opened[newest.path], self.opened[stage.path]):
                return [stage]
        return []

    def _others(
        self,
        directory: str,
        best: ResolvedCheckpoint,
        rule: int,
        order: list[tuple[Recency, str]],
        depth: int,
    ) -> list[tuple[str, str]]:
        """Return (path, reason) of complete checkpoints that are, or may be, newer than one that comes first by rule, or that
        are as new by their names.

        Damaged ones on the way are skipped.

        Args:
            order: of the names in the directory, newest first.
            depth: how many levels of directories to go down.
        """
        taken = os.path.relpath(best.path, directory).split(os.sep)[0]
        after = [name for _, name in order].index(taken) + 1
        twins = [
            name
            for place, name in order[after:]
            if place == order[after - 1][0] and rule not in (HOME, OTHER)
        ]
        rest = [
            (place, name)
            for place, name in order[after:]
            if place.rule != BEYOND and (place.rule != rule or rule == HOME)
        ]
        stepped = [name for place, name in rest if place.rule == STEP]
        newer = [name for name in stepped if best.step is not None and (step_of(name) or 0) > best.step]
        others = [
            (twin.path, f"{escape(taken)} comes before it, and their names do not say which is newer")
            for name in twins
            if (twin := self._peek(directory, [name])) is not None
        ]
        first = self._first(directory, newer, None, depth) if newer else None
        if first is not None:
            more = newer[newer.index(os.path.relpath(first.path, directory).split(os.sep)[0]) + 1 :]
            also = f", as are {listed(more)}" if more else ""
            others.append((first.path, f"{_what_it_is(best)} comes before it by its name{also}"))
        if stepped and best.step is None:
            are = "is" if len(stepped) == 1 else "are"
            self.notes.append(
                f"{listed(stepped)} {are} not newer than {escape(taken)}, going by its name alone"
            )
        is_said = rule > STEP  # the trainer itself calls this one the last
        for group in _groups((place, name) for place, name in rest if place.rule != STEP):
            newest = None if is_said and best.step is None else self._peek(directory, group)
            if newest is None or (newest.step is None and is_said):
                continue
            if newest.step is None or best.step is None:
                others.append((newest.path, _UNDATED))
            elif newest.step > best.step:
                others.append((newest.path, f"it is of step {newest.step}, and {best.step} was taken"))
        return others

    def _peek(self, directory: str, names: list[str]) -> ResolvedCheckpoint | None:
        """Return the first complete one of some names, without going deep; names damaged ones as skipped."""
        search = _Search(self.home)
        search.entries_left, search.alone = _MAX_PEEKED, self.alone
        try:
            checkpoint = search._first(directory, names, None, 1)
        except SourceError:  # too many entries: a directory of data, which no trainer fills with checkpoints
            return None
        tops = [os.path.relpath(os.path.join(directory, name), self.home) for name in names]
        for path, reason in search.skipped:
            if path in tops:
                self._skip(os.path.join(self.home, path), reason)
        return checkpoint

    def _is_in_a_checkpoint(self, directory: str) -> bool:
        """True if a directory belongs to a checkpoint, so that it holds parts of one."""
        inside = os.path.relpath(directory, os.path.dirname(storage.absolute(self.home)))
        return any(map(is_a_step, inside.split(os.sep)))

    def _first(
        self, directory: str, names: list[str], family: str | None, depth: int
    ) -> ResolvedCheckpoint | None:
        """Return the first complete one of some names, of one family where one is given."""
        for name in names:
            if family in (None, family_of(name)):
                checkpoint = self._look(os.path.join(directory, name), depth)
                if checkpoint is not None:
                    return checkpoint
        return None

    def _look(self, path: str, depth: int) -> ResolvedCheckpoint | None:
        """Return the checkpoint at a path, or else the newest below it."""
        recognised, step = recognise(path), _step_at(path)
        adapter = adapter_file(path) if recognised is None else None
        if adapter is not None:
            path, recognised = adapter, recognise(adapter)
        if recognised is not None:
            reason = self._damage(path)
            if reason is None:
                resolved = self._take(path, recognised.name, _step_inside(path) if step is None else step, "")
                reason = lacks_last(path)
                if reason is None:
                    return resolved
                self.unfinished.append((resolved, reason))
        elif not storage.isdir(path):
            reason = "not a checkpoint of a known format"
        else:
            reason = _unfinished(path)
            if reason is None:
                found_inside = self._inside(path, depth, step)
                reason = None if found_inside is None else lacks_last(path)
                if found_inside is None or reason is None:
                    return found_inside
                self.unfinished.append((found_inside, reason))
        self._skip(path, reason)
        return None

    def _inside(self, path: str, depth: int, step: int | None) -> ResolvedCheckpoint | None:
        """Return the newest checkpoint in a directory that is not one itself."""
        num_skipped = len(self.skipped)
        checkpoint = self.below(path, depth - 1) if depth > 0 else None
        if checkpoint is not None:
            return checkpoint if checkpoint.step is not None else replace(checkpoint, step=step)
        is_like_others = any(name in listing(path) for name in self.alone)
        if len(self.skipped) != num_skipped or not (is_like_others or is_ordered(os.path.basename(path))):
            return None
        files = [name for name in list_weights(path) if may_be_model(os.path.basename(name))]
        is_alone = len(files) == 1 and files[0].endswith(TORCH_FILES) and os.sep not in files[0]
        if is_alone and not _PART.search(files[0]) and self._is_inside(file := os.path.join(path, files[0])):
            self.alone.add(files[0])
            alone = self._look(file, 0)
            return None if alone is None else replace(alone, step=step)
        may_be = f"; if {escape(files[0])} is a whole model, give it by its own path" if files else ""
        if files or step is not None:
            self._skip(path, f"it holds no checkpoint of a known format{may_be}")
        return None

    def _is_inside(self, path: str) -> bool:
        """False for a link that leads out of the directory that was given."""
        return storage.realpath(path).startswith(self.inside)

    def _has_skipped_beside(self, directory: str, name: str) -> bool:
        """True if something other than `name` was passed over in a directory, unless its step is lower."""
        inside = [os.path.relpath(os.path.join(self.home, path), directory) for path, _ in self.skipped]
        others = {path.split(os.sep)[0] for path in inside} - {name, os.pardir, os.curdir}
        return not all(_is_older(other, name) for other in others)

    def _damage(self, path: str) -> str | None:
        """Return why a checkpoint cannot be taken, None if it opens."""
        structure = find_structure(path) if storage.isdir(path) else None
        known = structure.structure if structure else None
        last = known.last if known is not None and not known.is_taken_without_last else None
        last = _last_of_trainer(path) if last is None else last
        if last is not None and not storage.lexists(os.path.join(path, last)):
            return f"the save did not finish: {last}, which is written last, is missing"
        try:
            self.opened[path] = _open_models(path)
        except SourceError as error:
            return "; ".join((error.message, *error.problems[:1]))
        files = (file.path for model in self.opened[path] for file in model.catalog.files)
        return _unfinished_part(home_of(path), _MAX_DEPTH, {os.path.dirname(file) for file in files})

    def _children(self, directory: str) -> list[str]:
        """Return the names in a directory that may be checkpoints or hold some."""
        names: list[str] = []
        for entry in self._scan(directory):
            if is_left_out(entry.name) or is_data_folder(entry.name):
                continue
            path = entry.path
            if entry.is_symlink() and not storage.exists(path):
                if is_a_place(entry.name):
                    self._skip(path, f"a link to {escape(storage.readlink(path))}, which is not there")
                continue
            if entry.is_symlink() and not self._is_inside(path):
                if is_a_place(entry.name):
                    self._skip(path, f"a link that leads out of {escape(self.home)}: it was not followed")
                continue
            if not storage.isdir(path) and not (entry.name.endswith(_FILES) and storage.isfile(path)):
                continue
            if is_temporary(entry.name):
                self._skip(path, "it has a temporary name: the save did not finish")
                continue
            names.append(entry.name)
        optimizers = optimizers_beside(directory, names)
        if self._is_in_a_checkpoint(directory):
            names = _without_exports(directory, names)
        return [
            name for name in names if name not in optimizers and not self._is_export(directory, name, names)
        ]

    def _scan(self, directory: str) -> Iterator[os.DirEntry[str]]:
        """Yield directories, links and .ckpt files."""
        try:
            with storage.scandir(directory) as entries:
                for entry in entries:
                    if not (entry.is_symlink() or entry.is_dir() or entry.name.endswith(_FILES)):
                        continue  # does not count: a directory of logs or pictures may hold any number
                    self.entries_left -= 1
                    if self.entries_left < 0:
                        raise SourceError(
                            f"{escape(self.home)} holds more than {_MAX_ENTRIES} directories: it is not searched",
                            hint="give the run's own directory",
                        )
                    yield entry
        except OSError as error:
            if directory == self.home:
                formats.open(directory)  # raises, as it cannot be listed
            self._skip(directory, f"cannot be listed: {error.strerror}")

    def _is_export(self, directory: str, name: str, names: list[str]) -> bool:
        """True for what consolidate wrote beside a checkpoint: it has no optimizer and is no newer than that."""
        stem, path = EXPORT_ENDINGS.sub("", name), os.path.join(directory, name)
        return (
            stem != name
            and any(other == stem or other.startswith(f"{stem}.") for other in names)
            and (adapter_file(path) or recognise(path)) is not None
            and not _is_sharded(path)
        )

    def _holds_training_states(self) -> bool:
        """True if a Hub model stands in a run's own directory, beside the checkpoints of its training."""
        if not storage.isdir(self.home):
            return False
        for name in self._children(self.home):
            recognised = recognise(os.path.join(self.home, name)) if step_of(name) is not None else None
            if recognised is not None and recognised.is_sharded:
                return True
        return False

    def _mention(self, directory: str, beyond: list[str], tracker: str) -> None:
        """Skip what was saved after the one that a tracker names."""
        for name in beyond:
            reason = f"newer than what {tracker} names: its save was not recorded as finished"
            self._skip(os.path.join(directory, name), reason)

    def _skip(self, path: str, reason: str, *, is_complete: bool = False) -> None:
        name = os.path.relpath(path, self.home)
        if is_complete:
            self.complete.add(name)
        if all(known != name for known, _ in self.skipped):
            self.skipped.append((name, reason))

    def _take(self, path: str, format: str, step: int | None, reason: str) -> ResolvedCheckpoint:
        return ResolvedCheckpoint(
            path=path, format=format, step=step, reason=reason, skipped=tuple(self.skipped)
        )


def _have_one_model(models: Collection[Checkpoint], others: Collection[Checkpoint]) -> bool:
    """True if most names of the smaller of two checkpoints are in both, or if one is an adapter, with names of its own."""
    left, right = _base_names(models), _base_names(others)
    return (None in left) != (None in right) or 2 * len(left & right) >= min(len(left), len(right))


def _base_names(models: Collection[Checkpoint]) -> set[str | None]:
    """Return names of weights without what is put above a model, and None if there are an adapter's."""
    catalogs = [model.catalog for model in models]
    names = {fqn for each in catalogs for fqn in each.tensors}
    names -= {fqn for each in catalogs for fqn in optimizer_names(each.tensors.values(), each.objects)}
    return {base_name(join(dropwhile(_ABOVE_MODELS.__contains__, clean(name)))) for name in names}


def _why(
    best: ResolvedCheckpoint, rule: int, num_names: int, num_found: int, *, is_only: bool, has_others: bool
) -> str:
    """Return why a checkpoint was taken from a directory.

    Args:
        num_names: how many names the rule matches.
        num_found: how many complete ones it found, among names that are not numbered alike.
        is_only: nothing that may be newer is incomplete.
        has_others: other complete ones may be newer.
    """
    if rule not in (STEP, EPOCH, OTHER):
        return RULES[rule]
    if num_found > 1 and best.step is None:
        return "nothing tells whether {it} is the newest one"
    why = "{it} has the highest step of runs that are not numbered alike" if num_found > 1 else RULES[rule]
    if num_names > 1 or num_found > 1:
        return why if is_only else f"{why}, of those that are complete"
    if has_others and rule != OTHER:
        what = "a step" if rule == STEP else "an epoch"
        return f"{{it}} is the only {'one' if is_only else 'complete one'} with {what} in its name"
    return "{it} is the only one" if is_only else "{it} is the only complete one"


def _undated(best: ResolvedCheckpoint, candidates: Iterable[ResolvedCheckpoint]) -> list[tuple[str, str]]:
    """Return (path, reason) of those whose age no step tells, of several found by one rule."""
    return [
        (other.path, _UNDATED)
        for other in candidates
        if other is not best and None in (other.step, best.step)
    ]


def _is_sharded(path: str) -> bool:
    recognised = recognise(path)
    return recognised is not None and recognised.is_sharded


def _without_exports(directory: str, names: list[str]) -> list[str]:
    """Return the names in a step's directory without Hub models, if a sharded checkpoint of that step is there."""
    recognised = {name: recognise(os.path.join(directory, name)) for name in names}
    if not any(row is not None and row.is_sharded for row in recognised.values()):
        return names
    return [name for name, row in recognised.items() if row is None or row.name != "hub"]


def _groups(places: Iterable[tuple[Recency, str]]) -> Iterator[list[str]]:
    """Yield together the names that are numbered alike, or that trainers give one meaning."""
    groups = dict[tuple[int, str], list[str]]()
    for place, name in places:
        groups.setdefault((place.rule, family_of(name) if place.rule in (HOME, OTHER) else ""), []).append(
            name
        )
    yield from groups.values()


def _what_it_is(checkpoint: ResolvedCheckpoint) -> str:
    """Describe a checkpoint whose name tells no step: where its link leads, or the step that it holds."""
    name = escape(os.path.basename(checkpoint.path))
    if storage.islink(checkpoint.path):
        return f"{name}, a link to {escape(storage.readlink(checkpoint.path))},"
    return f"{name}, which holds step {checkpoint.step},"


def _step_inside(path: str) -> int | None:
    """Return the step that Lightning keeps in a .ckpt file, or in the meta.pt of a directory."""
    file = os.path.join(home_of(path), _META) if storage.isdir(path) else path
    if not file.endswith((_META, *_FILES)) or not storage.isfile(file):
        return None
    from shardkit.formats.torchsave.file import open_torch_file  # here, as most names tell the step

    try:
        tree = open_torch_file(locate(os.path.dirname(file), os.path.basename(file)), file).tree
    except ShardkitError:
        return None
    step = tree.get("global_step") if isinstance(tree, dict) else None
    return step if type(step) is int and step >= 0 else None


def _step_at(path: str) -> int | None:
    """Return the step that a name tells; `last.ckpt` may be a link to one that does."""
    step = step_of(os.path.basename(storage.absolute(path)))
    return step if step is not None else step_of(os.path.basename(storage.realpath(path)))


def _last_of_trainer(path: str) -> str | None:
    """Return the file that transformers' Trainer writes last, if a checkpoint beside this one has it."""
    parent, name = os.path.split(storage.absolute(path))
    if not _OF_TRAINER.fullmatch(name):
        return None
    beside = (other for other in listing(parent) if _OF_TRAINER.fullmatch(other))
    is_trainer = any(
        storage.isfile(os.path.join(parent, other, _TRAINER_STATE))
        and recognise(os.path.join(parent, other)) is not None
        for other in beside
    )
    return _TRAINER_STATE if is_trainer else None


def _unfinished_part(path: str, depth: int, held: Collection[str]) -> str | None:
    """Return the evidence that the save of a part, such as the optimizer, did not finish; None if there is none.

    Args:
        path: a checkpoint, or a folder of it.
        depth: levels of folders to look at.
        held: folders with files that the checkpoint itself uses; its `.metadata` may lie above them.
    """
    for name in sorted(listing(path)) if depth else ():
        part = os.path.join(path, name)
        if step_of(name) is not None or part in held or storage.islink(part) or not storage.isdir(part):
            continue
        reason = None if is_dcp(part) else _unfinished(part) or _unfinished_part(part, depth - 1, held)
        if reason is not None:
            return f"{escape(name)}: {reason}"
    return None


def _tracked(directory: str) -> tuple[str, str] | None:
    """Return (tracker file, its content) of a directory, None if it has none."""
    for tracker in TRACKERS:
        try:
            data = read_inside(directory, tracker, _MAX_TRACKER)
        except ShardkitError:  # none, or something else under that name, such as a link to a checkpoint
            continue
        text = data.decode("utf-8", "replace").strip()
        if text and os.path.basename(text) == text and text not in (os.curdir, os.pardir):
            return tracker, text
    return None


def _unfinished(path: str) -> str | None:
    """Return the evidence that a directory is a save that did not finish; None if there is none."""
    names = listing(path)
    if ".metadata.tmp" in names:
        return "the save did not finish: .metadata.tmp was never renamed"
    if has_any(names, "*.distcp"):
        return "the save did not finish: there are .distcp files without .metadata"
    if any(map(is_data_folder, names)):
        return "the save did not finish: .metadata is missing, which is written last"
    return None
