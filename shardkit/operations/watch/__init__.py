"""watch: consolidate each checkpoint of a run while the run goes on, and publish the results.

    every_checkpoint(RUN) -> those that are whole -> `consolidate` into OUTPUT/step-N -> a branch of the repo -> `main`

`watch.json` in OUTPUT lists what was made, so that a watcher which was killed goes on. Models are made in OUTPUT/.watch,
which is the watcher's own, listed, and then renamed: whatever else lies in OUTPUT is never taken for one of them.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardkit.core.result import Result
from shardkit.core.text import count, escape
from shardkit.errors import ResourceError, SourceError, UsageError
from shardkit.files import storage, stores
from shardkit.files.location import location_of
from shardkit.formats.owned import is_text
from shardkit.operations.commit import abort
from shardkit.operations.consolidate import consolidate
from shardkit.operations.resolve import FoundCheckpoint, ResolvedCheckpoint, every_checkpoint, is_saved_again
from shardkit.operations.watch.record import RECORD, ConvertedModel, entries_of, is_name, read_record

_OWN, _LOCK, _TRASH = ".watch", ".watch/lock", "removed."
_LOOK_S = 5.0
"""Seconds between two looks at the run."""
_PATIENCE = 3
"""Times the settling time for which `--once` waits for a checkpoint whose files keep changing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """What to watch, and what to do with each checkpoint."""

    run: str
    directory: str
    """Gets a directory for each checkpoint."""
    consolidate: Mapping[str, Any]
    """Keywords of `consolidate`."""
    repo: str | None = None
    """Repo of the Hub to upload to."""
    private: bool = False
    """Make the repo private if it does not exist."""
    branch_only: bool = False
    """Leave the repo's default branch as it is."""
    keep: int | None = None
    """Number of directories to keep; None for all."""
    settle_s: float = 60
    """Seconds for which a checkpoint without a file that the trainer writes last has to stay unchanged."""
    once: bool = False
    """Stop when nothing is left to do, instead of looking again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchResult(Result):
    """What one run of `watch` did."""

    run: str
    directory: str
    converted: tuple[str, ...]
    """Names of the models that were made."""
    uploaded: tuple[str, ...]
    """Names of the models that were uploaded."""
    removed: tuple[str, ...]
    """Names of the directories that were removed."""
    passed_over: tuple[str, ...]
    """Paths in the run of checkpoints that the trainer removed before they were converted."""

    def headline(self) -> str:
        """Return the number of models."""
        return f"{escape(self.directory)}: {count(len(self.converted), 'checkpoint')} converted"


def watch(options: WatchOptions, say: Callable[[str], object], **callbacks: Any) -> WatchResult:
    """Consolidate each new whole checkpoint of a run, and upload it.

    Args:
        options: what to do.
        say: called with a line about each checkpoint.
        callbacks: `progress`, `on_warning` and `on_step` of `consolidate`.

    Raises:
        UsageError: the directories do not fit, another process works on the output, or names are ambiguous.
        SourceError: a whole checkpoint cannot be converted, or `watch.json` is damaged.
        ResourceError: disk, permission or network. Unless `once`, those of a conversion or an upload are tried again.
    """
    _check(options)
    with _locked(options.directory):
        return _Watcher(options, say, callbacks).run()


def _check(options: WatchOptions) -> None:
    """Refuse directories that do not fit, and make the output directory."""
    run, directory = options.run, options.directory
    if not location_of(directory).renames:
        raise UsageError(
            f"{escape(directory)} is in a store: watch writes into a local directory",
            hint="give one on a disk; --push-to-hub publishes from there, and --keep limits the room",
        )
    if os.path.join(storage.realpath(directory), "").startswith(os.path.join(storage.realpath(run), "")):
        raise UsageError(
            f"{escape(directory)} is in {escape(run)}: its models would be found as checkpoints",
            hint="give an output directory outside of the run",
        )
    if not storage.isdir(os.path.dirname(storage.absolute(run)) or os.curdir) and not storage.lexists(run):
        raise SourceError(
            f"{escape(run)} does not exist, nor does the directory above it", hint="check the path"
        )
    storage.make_directories(os.path.join(directory, _OWN))


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Hold the lock of an output directory.

    Raises:
        UsageError: another process holds it.
    """
    fd = storage.open_fd(os.path.join(directory, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if not storage.flock(fd, exclusive=True, wait=False):
            holder = escape(storage.pread(fd, 200, 0).decode("utf-8", "replace"))
            raise UsageError(
                f"another watch works on {escape(directory)}: {holder or 'its process is unknown'}",
                hint="stop that one first, or give another output directory",
            )
        storage.ftruncate(fd, 0)
        storage.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        storage.close_fd(fd)


class _Watcher:
    def __init__(
        self, options: WatchOptions, say: Callable[[str], object], callbacks: Mapping[str, Any]
    ) -> None:
        self.options, self._say, self._callbacks = options, say, callbacks
        self._run_id = storage.realpath(options.run)
        self.record = read_record(options.directory, self._run_id)
        self._printed_lines = set[str]()
        self._unchanged = dict[str, tuple[object, float]]()
        """Checkpoint -> its files, and the time since when they are the same."""
        self._first_looks = dict[str, float]()
        """Checkpoint -> time of the first look at its files."""
        self._seen = set[str]()
        """Paths in the run of checkpoints that were seen, and are neither converted nor passed over."""
        self._failure: ResourceError | None = None
        self._converted, self._uploaded = list[str](), list[str]()
        self._removed, self._passed_over = list[str](), list[str]()

    def run(self) -> WatchResult:
        """Look at the run until it is interrupted, or once."""
        self._recover()
        while True:
            self._failure, waits = None, False
            try:
                waits = self._look()
                self._push()
                self._remove_old()
            except ResourceError as error:
                self._fail(error)
            except OSError as error:
                self._fail(ResourceError(f"{escape(str(error.filename))}: {error.strerror}"))
            if self.options.once and not waits:
                break
            time.sleep(min(_LOOK_S, max(self.options.settle_s, 0.1)) if self.options.once else _LOOK_S)
        if self._failure is not None:
            raise self._failure
        return WatchResult(
            run=self.options.run,
            directory=self.options.directory,
            converted=tuple(self._converted),
            uploaded=tuple(self._uploaded),
            removed=tuple(self._removed),
            passed_over=tuple(self._passed_over),
        )

    def _recover(self) -> None:
        """Finish what a killed watcher had begun: all that lies in the watcher's own directory."""
        for model in self.record.models:
            if storage.lexists(self._own(_TRASH + model.name)):
                model.is_removed = True
                self._save()
                storage.remove_tree(self._own(_TRASH + model.name))
            if storage.lexists(self._own(model.name)):
                self._put(model)
        for name in [*self.record.unfinished]:
            if storage.lexists(self._own(name)):
                self._list(name)

    def _look(self) -> bool:
        """Convert all checkpoints that are whole, oldest first; return whether one may be whole soon."""
        waits, done = False, {model.name for model in self.record.models}
        checkpoints = self._checkpoints(done)
        present = {self._inside(each.resolved.path) for each in checkpoints}
        whole = {self._inside(each.resolved.path) for each in checkpoints if each.missing is None}
        for name, inside in [*self.record.unfinished.items()]:
            if inside not in whole:
                self._pass_over(inside, name)
        for inside in self._seen - present:
            self._pass_over(inside, None)
        for each in reversed(checkpoints):
            path, name = each.resolved.path, _name_of(each)
            if name in done:
                continue
            self._seen.add(self._inside(path))
            if each.missing is not None:
                self._say_once(f"waiting for {self._shown(path)}: {each.missing}")
            elif each.is_finished or self._is_settled(path):
                self._make(path, name)
            elif time.monotonic() - self._first_looks[path] < _PATIENCE * self.options.settle_s:
                waits = True
            else:
                self._say_once(f"waiting for {self._shown(path)}: its files keep changing")
        return waits

    def _checkpoints(self, done: Collection[str]) -> list[FoundCheckpoint]:
        """Return the checkpoints of the run, newest first; `done` are names that were converted.

        Raises:
            UsageError: the run is a checkpoint, or several of its checkpoints have one name.
        """
        run = self.options.run
        stores.forget()
        if not storage.lexists(run):
            self._say_once(f"waiting for {escape(run)}: it is not there yet")
            return []
        names, checkpoints = dict[str, str](), list[FoundCheckpoint]()
        everything = every_checkpoint(run, lambda candidate: _output_name(candidate) in done)
        for each in everything:
            path = each.resolved.path
            if storage.realpath(path) == self._run_id:
                continue
            if is_saved_again(os.path.basename(path)):
                self._say_once(f"{self._shown(path)} is saved again and again under one name: not published")
                continue
            if not is_name(_name_of(each)):
                self._say_once(f"{self._shown(path)} has a name that no output can have: not published")
                continue
            checkpoints.append(each)
            if each.missing is None and (namesake := names.setdefault(_name_of(each), path)) != path:
                raise UsageError(
                    f"{escape(run)}: two checkpoints would be written as {escape(_name_of(each))}",
                    problems=[self._shown(namesake), self._shown(path)],
                    hint="give the directory of one run",
                )
        if len(everything) == 1 and storage.realpath(everything[0].resolved.path) == self._run_id:
            raise UsageError(
                f"{escape(run)} is a checkpoint itself",
                hint="give the directory that the trainer saves into",
            )
        return checkpoints

    def _is_whole(self, path: str) -> bool:
        stores.forget()
        checkpoints = every_checkpoint(self.options.run) if storage.lexists(self.options.run) else []
        return any(each.resolved.path == path and each.missing is None for each in checkpoints)

    def _is_settled(self, path: str) -> bool:
        now = time.monotonic()
        self._first_looks.setdefault(path, now)
        try:
            files = entries_of(path)
        except OSError:  # the trainer removes it
            return False
        before, since = self._unchanged.get(path, (None, now))
        if before != files:
            self._unchanged[path], since = (files, now), now
        return now - since >= self.options.settle_s

    def _make(self, path: str, name: str) -> None:
        """Convert a checkpoint."""
        if storage.lexists(self._place(name)):
            self._say_once(
                f"{escape(self._place(name))} is there, and {RECORD} does not list it: left as it is"
            )
            return
        self.record.unfinished[name] = self._inside(path)
        self._save()
        if storage.lexists(self._own(name)):  # an error after the commit
            self._list(name)
            return
        begun = time.monotonic()
        try:
            consolidate(path, self._own(name), **self.options.consolidate, **self._callbacks)
        except (SourceError, ResourceError) as error:
            if not self._is_whole(path):
                self._pass_over(self._inside(path), name)
            elif isinstance(error, ResourceError):
                self._fail(error)
            else:
                raise
            return
        self._list(name)
        self._say(f"{name}: converted in {time.monotonic() - begun:.1f} s, from {self._shown(path)}")

    def _list(self, name: str) -> None:
        """List a model that was made, and bring it to its place."""
        abort(self._own(name))  # what a commit leaves that is killed at its end
        number = name.removeprefix("step-")
        step = int(number) if name != number and number.isdecimal() else None
        model = ConvertedModel(name=name, step=step, entries=entries_of(self._own(name)))
        self.record.models.append(model)
        self._seen.discard(self.record.unfinished.pop(name))
        self._save()
        self._put(model)
        self._converted.append(name)

    def _put(self, model: ConvertedModel) -> None:
        try:
            storage.rename_noreplace(self._own(model.name), self._place(model.name))
        except FileExistsError:
            self._say_once(
                f"{escape(self._place(model.name))} is there already: the model is in "
                f"{escape(self._own(model.name))}"
            )

    def _pass_over(self, inside: str, name: str | None) -> None:
        """Name a checkpoint that the trainer has removed, by its path in the run, and end its job."""
        if name is not None:
            abort(self._own(name))
            del self.record.unfinished[name]
            self._save()
        self._seen.discard(inside)
        self._passed_over.append(inside)
        self._say(f"passed over {escape(inside)}: the trainer removed it before it was converted")

    def _push(self) -> None:
        """Upload what is not on the Hub yet; the newest model to the default branch too."""
        repo, models = self.options.repo, self._by_step()
        if repo is None or not models:
            return
        for model in models:
            if not self._is_uploaded(model) and self._may_use(model, "uploaded"):
                model.commit, model.is_on_main = self._upload(repo, model.name, model.name), False
                model.repo = repo
                self._save()
                self._uploaded.append(model.name)
        newest = models[-1]
        if self.options.branch_only or newest.is_on_main or not self._is_uploaded(newest):
            return
        if self._may_use(newest, "uploaded"):
            self._upload(repo, newest.name, None)
            newest.is_on_main = True
            self._save()

    def _upload(self, repo: str, name: str, branch: str | None) -> str:
        from shardkit.formats.hub.repo import push

        place = self._place(name)
        texts = [each for each in entries_of(place) if is_text(each)]
        pushed = push(place, repo, private=self.options.private, branch=branch, by_people=texts)
        self._say(f"{name}: uploaded to {pushed.address}")
        return pushed.commit

    def _remove_old(self) -> None:
        """Remove the oldest directories beyond `keep` that are uploaded, and are as they were written."""
        if self.options.keep is None:
            return
        present = [model for model in self._by_step() if storage.lexists(self._place(model.name))]
        for model in present[: -self.options.keep]:
            if self.options.repo is not None and not self._is_uploaded(model):
                continue
            if self._may_use(model, "removed"):
                trash = self._own(_TRASH + model.name)
                storage.rename(self._place(model.name), trash)
                model.is_removed = True
                self._save()
                storage.remove_tree(trash)
                self._removed.append(model.name)
                self._say(f"{model.name}: removed, {self.options.keep} newer ones are kept")

    def _by_step(self) -> list[ConvertedModel]:
        """Return the models that were not removed, the newest last."""
        models = [model for model in self.record.models if not model.is_removed]
        return sorted(models, key=lambda model: -1 if model.step is None else model.step)

    def _is_uploaded(self, model: ConvertedModel) -> bool:
        return model.commit is not None and model.repo == self.options.repo

    def _may_use(self, model: ConvertedModel, what: str) -> bool:
        """True if a model is as it was written; else say that it is not uploaded, or not removed."""
        place = self._place(model.name)
        if not storage.lexists(place):
            self._say_once(f"{escape(place)} is gone: it is not {what}")
            return False
        if entries_of(place) != model.entries:
            self._say_once(f"{escape(place)} was changed: it is not {what}")
            return False
        return True

    def _fail(self, error: ResourceError) -> None:
        """Remember an error of the machine or the network, which may have passed at the next look."""
        self._failure = error
        if not self.options.once:
            self._say_once(f"{error.message}; it is tried again")

    def _place(self, name: str) -> str:
        return os.path.join(self.options.directory, name)

    def _own(self, name: str) -> str:
        return os.path.join(self.options.directory, _OWN, name)

    def _inside(self, path: str) -> str:
        """Return a path relative to the run."""
        return os.path.relpath(path, self.options.run)

    def _shown(self, path: str) -> str:
        return escape(self._inside(path))

    def _say_once(self, line: str) -> None:
        if line not in self._printed_lines:
            self._printed_lines.add(line)
            self._say(line)

    def _save(self) -> None:
        """Write `watch.json` in one step."""
        written = self._own(RECORD)
        storage.write_file(written, self.record.content(self._run_id))
        storage.rename(written, self._place(RECORD))
        storage.sync_directory(self.options.directory)


def _output_name(candidate: ResolvedCheckpoint) -> str:
    """Return the name of a checkpoint's output."""
    step, name = candidate.step, os.path.basename(candidate.path)
    return name.removesuffix(".ckpt") if step is None else f"step-{step}"


def _name_of(checkpoint: FoundCheckpoint) -> str:
    return _output_name(checkpoint.resolved)
