"""The staging directory that several processes share, on one machine or on many.

    .<name>.shardkit-parts-<hash>/    a sibling of the destination, the same for all who carry out one plan
        plan.json                     what they agree on
        data/                         becomes the destination
        done/                         a note for each finished file, by its number in the plan
        parts/                        who began and who ended, for people
        work/<owner>/                 what one process is writing
        new-<owner>/                  of one commit, which has taken
            data/                     it, until it is at the destination
            old/                      what was there; where the two are exchanged, the new output until then
        data.old/                     what was there, in directories of earlier versions, which are named after their process
        gone-.../                     either of them once it was looked through, while it is removed
        committed.json                sizes and times of the files that became the destination

It appears whole, with one rename, and nothing makes a second `data`: where it is missing, it has become the
destination, or a commit has taken it, and it comes back if that commit dies. A commit moves everything into or out of
its own `new-<owner>`. Whoever takes over empties that and removes it; whoever removes everything renames the whole
directory and then does so to all of them. After that no rename of a slow commit succeeds, even by a handle that a network
file system has kept. Files get their names in `data` by a rename, and whoever writes a file of that name writes the same
bytes, so that a process may work on what another one was believed to have lost. No locks. Only a commit moves `data`, and
only a commit or a person removes the rest: the name is not one of a process. After the commit `plan.json`,
`committed.json` and `work` lie there until what comes after the output is done; then, where a part commits, `plan.json`
and `committed.json` stay under a name that ends in `.done`, so that parts that come late see that all is done; a person,
or the job that comes after, removes that with a commit of its own.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from shardkit.core.text import escape
from shardkit.errors import ResourceError, ShardkitError, UsageError
from shardkit.files import storage
from shardkit.files.staging import (
    IS_THERE,
    KeptFiles,
    Owner,
    Staging,
    identity_of,
    nothing,
    owned,
    owner_of,
    place_directory,
    prefix_of,
    remove_but,
    rename_noreplace,
)
from shardkit.files.strict_json import parse_object, read_small

_MARK, _RUN = "parts-", "run-"
_HASH_DIGITS = 16
_DONE = ".done"
_NAME = re.compile(r"(parts|run)-[0-9a-f]{16}", re.ASCII)
_COMMITTED, _APART = "committed.json", "kept"
TAKEN, GONE, OLD, ASIDE = "new-", "gone-", "old", "data.old"
PATIENCE_S = 5.0
"""How long a commit may take that is not known to be dead, from when it takes the data, before another takes it over."""
_LOOK_AGAIN_S = 0.02
_MAX_BYTES, _MAX_TOLD_BYTES, _MAX_NOTE_BYTES = 1 << 28, 1 << 16, 1 << 30


def note_name(number: int) -> str:
    """Return the name of the note of a file."""
    return f"{number}.json"


class SharedStaging:
    """The staging directory of one plan and one destination.

    Args:
        destination: absolute.
        path: where it lies, or will lie.
        kept: what stays of it when it is removed.
    """

    def __init__(self, destination: str, path: str, kept: KeptFiles) -> None:
        self.destination, self.path, self.kept = destination, path, kept
        self.record = os.path.join(path, "plan.json")
        self.data = os.path.join(path, "data")
        self.done = SharedNotes(os.path.join(path, "done"))
        self.parts = os.path.join(path, "parts")
        self._work = os.path.join(path, "work")
        self._committed = os.path.join(path, "committed.json")
        self.has_made = False
        """True once this process has made the destination."""
        self._seen = ""
        """Name of the `new-<owner>` with what was there, once this process has looked through that."""
        self.look: Callable[[str], object] = lambda path: None
        """Given the path of the old content once it has lost its name, so that nobody adds anything to it. Whatever it
        raises is raised, and the old content is at the destination again."""
        self.look_before: Callable[[], object] = lambda: None
        """Called once all is made but its name, by which others find and join it. Whatever it raises is raised."""

    @classmethod
    def of_plan(
        cls, destination: str, plan_hash: str, kept: KeptFiles, *, is_run: bool = False
    ) -> SharedStaging:
        """Return the one of a plan, whether it exists or not.

        Args:
            destination: absolute.
            plan_hash: of the plan.
            kept: what stays of it when it is removed.
            is_run: one process carries out all of the plan; it and others that are started alike share it.
        """
        parent, name = os.path.split(destination)
        mark = _RUN if is_run else _MARK
        return cls(destination, os.path.join(parent, prefix_of(name) + mark + plan_hash[:_HASH_DIGITS]), kept)

    @property
    def is_of_parts(self) -> bool:
        """True if processes share it that have a part each; else it is of runs of one process."""
        return os.path.basename(self.path).rpartition(".shardkit-")[2].startswith(_MARK)

    def read_record(self) -> bytes:
        """Return the content of `plan.json`.

        Raises:
            SourceError: it is missing, or a link.
            ResourceError: it cannot be read.
        """
        name = os.path.join(os.path.basename(self.path), os.path.basename(self.record))
        return read_small(self.record, name, _MAX_BYTES, follow=False)

    def told(self) -> Iterator[tuple[str, bytes]]:
        """Yield (name, content) of what parts said of themselves."""
        for name in _names(self.parts):
            with contextlib.suppress(ShardkitError):
                yield name, read_small(os.path.join(self.parts, name), name, _MAX_TOLD_BYTES, follow=False)

    @property
    def exists(self) -> bool:
        """True from `create` until it is removed."""
        return storage.lexists(self.path)

    @property
    def is_open(self) -> bool:
        """True until the data is at the destination, or everything was removed; also while a commit has taken it."""
        # Whoever takes over moves the data, to where this may have looked already: it looks twice.
        return any(self._has_it or any(map(self._has_data, self._commits())) for _ in range(2))

    @property
    def _has_it(self) -> bool:
        """True while no commit has taken the data."""
        return storage.isdir(self.data)

    @property
    def is_committed(self) -> bool:
        """True if the destination is what was committed here, and has not been touched since."""
        places = (self.path + _DONE,) if self.is_open else (self.path, self.path + _DONE)
        return any(_is_untouched(os.path.join(place, _COMMITTED), self.destination) for place in places)

    def create(self, record: bytes, folders: Collection[str] = (), owner: Owner | None = None) -> bool:
        """Make it, unless another process has; return whether it was made here.

        Args:
            record: content of `plan.json`.
            folders: directories in `data`, relative to it. Nobody makes any later.
            owner: who has entered it from the first moment on, as by `enter`.

        Raises:
            ResourceError: the parent does not exist or cannot be written.
        """
        if self.exists:
            return False
        fresh = Staging.create(self.destination)
        here = SharedStaging(self.destination, fresh.path, self.kept)
        try:
            for directory in (here.done.path, here.parts, here._work):
                storage.mkdir(directory)
            if owner is not None:
                here.enter(owner)
            for folder in sorted(folders):
                storage.make_folders(here.path, os.path.join("data", folder))
            storage.write_file(here.record, record)
            storage.sync_directories(fresh.path)
            self.look_before()
            rename_noreplace(fresh.path, self.path)
            storage.sync_directory(os.path.dirname(self.path))
        except OSError as error:
            fresh.discard()
            if error.errno in IS_THERE:
                return False
            raise ResourceError(f"cannot make {escape(self.path)}: {error.strerror}") from error
        except BaseException:
            fresh.discard()
            raise
        fresh.release()
        return True

    def enter(self, owner: Owner) -> bool:
        """Let others see that somebody is at work in it, until `leave`; False if it is gone.

        Raises:
            OSError: the system refuses.
        """
        try:
            storage.mkdir(os.path.join(self._work, str(owner)))
        except FileExistsError:
            pass
        except FileNotFoundError:
            return False
        return True

    def leave(self, owner: Owner) -> None:
        """End what `enter` began."""
        owner.end()
        storage.remove_tree(os.path.join(self._work, str(owner)))

    def set_apart(self) -> None:
        """Move what stays of it from among the files of a run to where no run looks: this one goes on with the others.

        Raises:
            OSError: the system refuses.
        """
        for name in self.kept(self.path):
            if name.startswith("data" + os.sep):
                for number in itertools.count(1):
                    apart = f"{_APART}{number if number > 1 else ''}"
                    target = os.path.join(apart, os.path.relpath(name, "data"))
                    try:
                        storage.make_folders(self.path, os.path.dirname(target))
                        rename_noreplace(os.path.join(self.path, name), os.path.join(self.path, target))
                    except OSError as error:
                        if error.errno not in IS_THERE:
                            raise
                    else:
                        break
                self._remove_empty(os.path.dirname(name))

    def _remove_empty(self, folder: str) -> None:
        """Remove a folder in `data` and those around it, as far as nothing is in them."""
        while os.path.dirname(folder):
            try:
                storage.rmdir(os.path.join(self.path, folder))
            except OSError:
                return
            folder = os.path.dirname(folder)

    @contextlib.contextmanager
    def workplace(self) -> Iterator[str]:
        """Give a directory of one's own for unfinished files; it goes afterwards, with those of dead processes.

        Raises:
            UsageError: the shared directory is a link, or belongs to somebody else.
            OSError: the system refuses, or the shared directory is gone.
        """
        owner = Owner.new_run()
        path = os.path.join(self._work, str(owner))
        try:
            self._remove_dead()
            storage.mkdir(path)
            self._check_owner(path)
            yield path
        finally:
            self.leave(owner)

    @property
    def is_own(self) -> bool:
        """False if another user made it, as the file system knows users: root may be somebody else there.

        Raises:
            OSError, ResourceError: the system refuses to say it.
        """
        try:
            made_by = storage.lstat(self.path).st_uid
        except (FileNotFoundError, NotADirectoryError):
            return True
        if made_by == os.geteuid():
            return True
        fresh = Staging.create(self.path)
        try:
            return storage.lstat(fresh.path).st_uid == made_by
        finally:
            fresh.discard()

    def check_owner(self) -> None:
        """Refuse what another user has put there; errors as `workplace`."""
        with self.workplace():
            pass

    def _remove_dead(self, *, also_living: bool = False) -> None:
        for name in storage.listdir(self._work):
            owner = Owner.parse(name)
            if owner is not None and (also_living or owner.is_provably_dead()):
                storage.remove_tree(os.path.join(self._work, name))

    def _check_owner(self, own: str) -> None:
        """Refuse what somebody else made: its record says what `commit` carries out.

        Users are compared as the file system knows them: on network file systems root may be somebody else.
        """
        wanted = storage.lstat(own).st_uid
        for path in (self.path, self.record):
            status = storage.lstat(path)
            if status.st_uid != wanted or stat.S_ISLNK(status.st_mode):
                raise UsageError(
                    f"{escape(path)} belongs to another user, or is a link",
                    hint="parts and commit have to be run by the user who began; or choose another destination",
                )

    def publish(self, path: str, name: str, *, is_synced: bool = True) -> None:
        """Give a finished file, which is on the disk, its name in `data`.

        Args:
            path: in a `workplace`.
            name: relative to `data`.
            is_synced: the name is on the disk before this returns. Else a power loss may take it, unless another file had it.

        Raises:
            OSError: the system refuses, or `data` is gone.
        """
        target = os.path.join(self.data, name)
        is_new = not storage.lexists(target)
        storage.rename(path, target)
        if is_synced or not is_new:  # a note must not stand for what had the name before
            storage.sync_directory(os.path.dirname(target))

    def write_note(
        self, work: str, directory: str, name: str, content: bytes, *, is_synced: bool = True
    ) -> None:
        """Write a small file into `done` or `parts`: whole, or not at all.

        Args:
            work: a `workplace`.
            directory: where it goes.
            name: of the file.
            content: all of it.
            is_synced: it is on the disk before this returns. Else a power loss may take it, or leave nothing in it.

        Raises:
            OSError: the system refuses, or the directory is gone.
        """
        fresh = os.path.join(work, name)
        storage.write_file(fresh, content, is_synced=is_synced)
        storage.rename(fresh, os.path.join(directory, name))
        if is_synced:
            storage.sync_directory(directory)

    def adopt(self, directory: str, kept: Collection[str], last: Collection[str]) -> None:
        """Move the files of a directory into `data`; others may be moving the same bytes.

        Args:
            directory: in a `workplace`.
            kept: files that stay, by their paths in it.
            last: names of files that make an output of the others; they come last.

        Raises:
            OSError: the system refuses, or `data` is gone.
        """
        found = list[str]()
        for here, folders, names in storage.walk(directory):
            inside = os.path.relpath(here, directory)
            for folder in folders:
                storage.make_folders(self.data, os.path.normpath(os.path.join(inside, folder)))
            found += (os.path.normpath(os.path.join(inside, name)) for name in names)
        for path in sorted(found, key=lambda path: os.path.basename(path) in last):
            if path not in kept:
                storage.rename(os.path.join(directory, path), os.path.join(self.data, path))

    def commit(self, work: str, names: Iterable[str], *, overwrite: bool) -> bool:
        """Make `data` the destination, in one rename; `remove` or `keep_mark` comes next.

        With `overwrite` what is at the destination is exchanged: its name has the old or the new one at every moment.
        Where the system cannot exchange, the old one is moved aside first.

        Args:
            work: a `workplace` of this process.
            names: the files in `data` that tell the output from others.
            overwrite: what is there may be replaced.

        Returns:
            False if another process has taken the data, whether its commit has ended or not, or has removed all.

        Raises:
            UsageError: the destination exists, or `look` refuses.
            ResourceError: the system cannot rename, or bring it to the disk.
        """
        own = os.path.join(self.path, TAKEN + os.path.basename(work))
        try:
            self.reopen()
            storage.sync_directories(self.data)
            can_exchange = overwrite and storage.lexists(self.destination) and _can_exchange(work)
            storage.mkdir(os.path.join(work, "new"))
            storage.rename(os.path.join(work, "new"), own)
            storage.sync_directory(self.path)
            try:
                self._replace(own, names, overwrite=overwrite, can_exchange=can_exchange)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._take_over(own)
                raise
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno in IS_THERE:
                raise self._appeared() from error
            raise ResourceError(f"cannot rename to {escape(self.destination)}: {error.strerror}") from error
        self.has_made = True
        with contextlib.suppress(OSError):  # nothing was there
            storage.rmdir(own)
        try:
            storage.sync_directory(os.path.dirname(self.destination))
        except OSError as error:
            raise ResourceError(
                f"cannot bring {escape(self.destination)} to the disk (it is there, and whole): {error.strerror}"
            ) from error
        return True

    @property
    def is_left(self) -> bool:
        """True after a commit whose process is not known to be alive: what comes after the output may not have been done."""
        is_over = not self.is_open and storage.isdir(self._work)  # which goes once all is done
        return is_over and not self.is_attended and _is_untouched(self._committed, self.destination)

    @property
    def is_attended(self) -> bool:
        """True while a process of this machine is known to be at work in it."""
        return any(owner.is_provably_alive() for owner in self.owners())

    @property
    def is_over(self) -> bool:
        """True if all who worked in it are known to be over, or have left it."""
        with contextlib.suppress(OSError):  # who may not look cannot know
            return all(owner.is_provably_dead() for owner in self._owners())
        return False

    @property
    def is_unknown(self) -> bool:
        """True if somebody may be at work in it of whom nobody can tell that here."""
        return any(not (owner.is_provably_dead() or owner.is_provably_alive()) for owner in self.owners())

    def owners(self) -> list[Owner]:
        """Return who is at work in it, or was until it was killed, as far as this process may look."""
        try:
            return self._owners()
        except OSError:
            return []

    def _owners(self) -> list[Owner]:
        if (own := owner_of(self.path)) is not None:
            return [own]
        try:
            names = storage.listdir(self._work)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [owner for owner in map(Owner.parse, names) if owner is not None]

    def keep_mark(self) -> None:
        """After the commit, leave only what says that there was one.

        Raises:
            ResourceError: the system refuses.
        """
        mark = SharedStaging(self.destination, self.path + _DONE, self.kept)
        try:
            mark._remove()  # of an earlier commit of the same plan
            storage.rename(self.path, mark.path)
            if self._goes_on(mark):
                return
            storage.sync_directory(os.path.dirname(mark.path))
        except FileNotFoundError:  # another process has removed all
            return
        except OSError as error:
            raise ResourceError(f"cannot rename {escape(self.path)}: {error.strerror}") from error
        if self.kept(mark.path):  # no mark with somebody's files in it
            mark._remove()
        else:
            _strip(mark.path)

    def _replace(self, own: str, names: Iterable[str], *, overwrite: bool, can_exchange: bool) -> None:
        """Take the data, and make it the destination; arguments and errors as `commit`, and its own `new-<owner>`."""
        data, old = os.path.join(own, "data"), os.path.join(own, OLD)
        storage.rename(self.data, data)
        # From here on nobody writes into it. Descriptions may be written by several at once, and have other times then.
        states = {name: _state(os.path.join(data, name)) for name in names}
        self.write_note(own, self.path, _COMMITTED, json.dumps(states).encode())
        try:
            return place_directory(data, self.destination)
        except OSError as error:
            if error.errno not in IS_THERE or not overwrite:
                raise
        try:
            if can_exchange:
                storage.rename(data, old)
                _exchange(old, self.destination)
            else:
                storage.rename(self.destination, old)
        except FileNotFoundError:  # nothing is there any more, or another process has taken over
            return place_directory(old if can_exchange else data, self.destination)
        try:
            self.look(old)
        except BaseException:
            if can_exchange:
                _exchange(old, self.destination)
            raise
        if not can_exchange:
            place_directory(data, self.destination)
        if storage.lexists(old):  # else another has moved it
            self._seen = os.path.basename(own)

    def _commits(self) -> list[str]:
        """Return the paths of each `new-<owner>`."""
        return [os.path.join(self.path, name) for name in _names(self.path) if _committer(name) is not None]

    def reopen(self) -> bool:
        """Put back what a commit that did not end has taken, and what it has moved aside; True if it had taken the data.

        One that may be alive has some time to end. Then it is taken over.

        Raises:
            UsageError: something else is at the destination by now.
            ResourceError: the system refuses.
        """
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until and any(map(self._may_live, self._commits())):
            time.sleep(_LOOK_AGAIN_S)
        try:
            is_back = self._put_back()
        except OSError as error:
            raise ResourceError(f"cannot write to {escape(self.path)}: {error.strerror}") from error
        left = self.replaced()
        if left and self._has_it and all(map(storage.lexists, left)):
            raise UsageError(
                f"{escape(self.destination)} was moved aside by a commit, and cannot go back: something else is there",
                problems=self._what_was_there(),
                hint="keep what you want of the two, and remove that directory",
            )
        return is_back

    def _put_back(self, *, everything: bool = False) -> bool:
        """Do so at once."""
        if self._has_it:  # of an earlier version, in a directory of one process
            self._goes_back(os.path.join(self.path, ASIDE))
        taken = sorted(self._commits(), key=self._has_data, reverse=True)  # the data first
        return any([self._take_over(path) for path in taken if everything or self._has_some(path)])

    def _take_over(self, path: str) -> bool:
        """Empty a `new-<owner>`, remove it, and put back what was in it; True if that was the data."""
        owner = Owner.new_run()
        own = os.path.join(self.path, TAKEN + str(owner))
        data, old = os.path.join(own, "data"), os.path.join(own, OLD)
        try:
            while not _is_removed(path):
                storage.make_folders(self.path, os.path.basename(own))
                storage.sync_directory(self.path)
                for name in storage.listdir(path):
                    storage.rename(os.path.join(path, name), os.path.join(own, name))
                storage.sync_directory(own)
            if is_back := self._has_data(own):
                storage.rename(data if storage.lexists(data) else old, self.data)
                storage.sync_directory(self.path)
            if self._has_it:
                self._goes_back(old)
            return is_back
        except (FileNotFoundError, NotADirectoryError):  # another process was faster
            return False
        finally:
            owner.end()

    def _goes_back(self, old: str) -> None:
        if storage.lexists(old) and identity_of(self.destination) is None:
            place_directory(old, self.destination)
            storage.sync_directory(os.path.dirname(self.destination))

    def _goes_on(self, there: SharedStaging, *, may_be_open: bool = False) -> bool:
        """Put back what commits have taken or moved aside, once all of it was moved `there`, so that none goes on.

        True if it is open, and that is not meant: it has its own name again.
        """
        if self._seen:
            _set_free(there.path, self._seen)
        with contextlib.suppress(OSError):
            there._put_back(everything=True)
        if there.is_open and not may_be_open:
            with contextlib.suppress(FileExistsError):  # others have begun once more
                rename_noreplace(there.path, self.path)
                return True
        with contextlib.suppress(OSError):  # without a workplace none begins
            there._remove_dead(also_living=True)
            there._put_back(everything=True)
        return False

    def _may_live(self, own: str) -> bool:
        """True if a commit has data there, and is not known to be dead."""
        owner = _committer(os.path.basename(own))
        return owner is not None and not owner.is_provably_dead() and self._has_data(own)

    def _has_some(self, own: str) -> bool:
        """True if a commit has data there, or an old output that can go back."""
        can_go = self._has_it and identity_of(self.destination) is None
        return self._has_data(own) or (can_go and storage.lexists(os.path.join(own, OLD)))

    def _has_data(self, own: str) -> bool:
        old = os.path.join(own, OLD)  # what is about to be exchanged has the name of what comes back for it
        return storage.lexists(os.path.join(own, "data")) or _is_untouched(self._committed, old)

    def replaced(self) -> list[str]:
        """Return where old outputs lie that a commit has moved aside."""
        places = [os.path.join(self.path, ASIDE), *(os.path.join(path, OLD) for path in self._commits())]
        return [path for path in places if storage.lexists(path) and not _is_untouched(self._committed, path)]

    def _what_was_there(self) -> list[str]:
        return [f"what was there before: {escape(path)}" for path in self.replaced()]

    def _appeared(self) -> UsageError:
        """Say what is in the way, and what was there before."""
        said, hint = "appeared while it was being written", None
        if self.is_of_parts:
            said = "exists: something else was put there"
            hint = "remove it, or replace it: shardkit commit takes --overwrite"
        return UsageError(f"{escape(self.destination)} {said}", problems=self._what_was_there(), hint=hint)

    def keep(self) -> str:
        """Give `data` a free name beside the destination, `last-new`, and remove the rest; return its path.

        Raises:
            UsageError, OSError: what was moved aside cannot go back, or the system refuses; all of it stays.
        """
        self.reopen()
        storage.sync_directories(self.data)
        for number in itertools.count(1):
            path = f"{self.destination}-new{number if number > 1 else ''}"
            try:
                rename_noreplace(self.data, path)
            except FileExistsError:
                continue
            with contextlib.suppress(OSError, ResourceError):  # it has its name in any case
                storage.sync_directory(os.path.dirname(path))
                self.remove()
            return path
        raise AssertionError("there is always another number")

    def remove(self, *, only_closed: bool = False) -> None:
        """Remove all of it. What a commit has moved aside meanwhile goes back, unless something else is there.

        Args:
            only_closed: it stays if it is open: others have begun anew under its name, or a commit has not ended.

        Raises:
            ResourceError: the system refuses.
        """
        self._remove(may_be_open=not only_closed)
        remove_abandoned(self.destination, self.kept)  # of a process that died while it did this

    def give_up(self) -> None:
        """Put back what was moved aside, and remove the rest.

        Raises:
            UsageError: what was moved aside cannot go back, because something else is there by now.
            ResourceError: the system refuses.
        """
        self.reopen()
        self._remove()

    def _remove(self, *, may_be_open: bool = True) -> None:
        """Remove it but what is kept: under a name of a run of this process first, so that nobody goes on in it."""
        if not self.exists or (self.is_open and not may_be_open):
            return
        # Where nothing can be written, a rename would say that nothing is there.
        if not storage.access(self.path, os.W_OK | os.X_OK) and storage.isdir(
            self.path
        ):  # not: gone meanwhile
            raise ResourceError(f"cannot remove {escape(self.path)}: {os.strerror(errno.EACCES)}")
        owner = Owner.new_run()
        parent, name = os.path.split(self.destination)
        taken = os.path.join(parent, prefix_of(name) + str(owner))
        try:
            storage.rename(self.path, taken)
            # Else a power loss would bring it back under its name, without what is removed here.
            storage.sync_directory(parent)
            if self._goes_on(SharedStaging(self.destination, taken, self.kept), may_be_open=may_be_open):
                return
            stays = self.kept(taken)
            if not any(name.startswith(TAKEN) for name in stays):
                _set_free(taken, TAKEN)
            remove_but(taken, stays)
            if owner_of(self.path) is not None and storage.lexists(
                taken
            ):  # a person may have been told this path
                storage.rename(taken, self.path)
        except FileNotFoundError:  # another process was faster
            return
        except OSError as error:
            raise ResourceError(f"cannot remove {escape(self.path)}: {error.strerror}") from error
        finally:
            owner.end()


class SharedNotes:
    """Notes of files, by their numbers in the plan, in a directory that all parts see.

    Args:
        path: of the directory.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def missing(self, count: int) -> list[int]:
        """Return the numbers without a note, of so many. Network file systems may show one later."""
        names = {*_names(self.path)}  # also lets network file systems look again
        return [
            number
            for number in range(count)
            if note_name(number) not in names and not storage.lexists(self._note(number))
        ]

    def notes(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return the notes that there are of these numbers, and that can be read."""
        found = dict[int, bytes]()
        for number in numbers:
            with contextlib.suppress(OSError, ShardkitError):
                name = note_name(number)
                found[number] = read_small(self._note(number), name, _MAX_NOTE_BYTES, follow=False)
        return found

    def forget(self, numbers: Iterable[int]) -> None:
        """Remove the notes of these numbers, if there are some: what they stand for is made anew."""
        for number in numbers:
            with contextlib.suppress(OSError):
                storage.unlink(self._note(number))

    def _note(self, number: int) -> str:
        return os.path.join(self.path, note_name(number))


def _names(directory: str) -> list[str]:
    """Return the names in a directory, sorted; none where this process may not look, or it is gone."""
    try:
        return sorted(storage.listdir(directory))
    except OSError:
        return []


def _committer(name: str) -> Owner | None:
    """Return whose a `new-<owner>` is; None if a name is none of those."""
    return Owner.parse(name.removeprefix(TAKEN)) if name.startswith(TAKEN) else None


def _exchange(one: str, other: str) -> None:
    if not storage.renameat2(one, other, storage.RENAME_EXCHANGE):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), other)


def _is_removed(folder: str) -> bool:
    """Remove a folder; False if something has come into it."""
    try:
        storage.rmdir(folder)
    except OSError as error:
        if error.errno not in IS_THERE:
            raise
        return False
    return True


def _can_exchange(work: str) -> bool:
    """True if the system can exchange directories; tried with two that are empty.

    Args:
        work: a `workplace` on the same file system.

    Raises:
        OSError: the system refuses.
    """
    one, other = os.path.join(work, "one"), os.path.join(work, "other")
    for path in (one, other):
        storage.mkdir(path)
    return storage.renameat2(one, other, storage.RENAME_EXCHANGE)


def _state(path: str) -> list[int]:
    """Return size and time of a file, in microseconds, as all machines see them."""
    status = storage.lstat(path)
    return [status.st_size, status.st_mtime_ns // 1000]


def _is_untouched(path: str, directory: str) -> bool:
    """True if every file that a `committed.json` lists is in a directory, with the size and time of the commit."""
    try:
        files = parse_object(read_small(path, _COMMITTED, _MAX_BYTES, follow=False), _COMMITTED)
        return all(_state(os.path.join(directory, name)) == state for name, state in files.items())
    except (OSError, ShardkitError):
        return False


def _set_free(directory: str, start: str) -> None:
    """Move old outputs that were looked through, so that half of one is not looked through again by whoever goes on."""
    with contextlib.suppress(OSError):
        for name in storage.listdir(directory):
            if name.startswith(start):
                storage.rename(os.path.join(directory, name), os.path.join(directory, GONE + name))


def _strip(mark: str) -> None:
    """Remove all but what says that there was a commit."""
    _set_free(mark, TAKEN)
    with contextlib.suppress(OSError):
        storage.remove_all_but(mark, ("plan.json", _COMMITTED))


def remove_marks(destination: str, kept: KeptFiles, *, only_old: bool = False) -> None:
    """Remove what says that parts have committed; nothing that is under way.

    Args:
        destination: absolute.
        kept: what stays.
        only_old: leave what says it of the output that is there now.

    Raises:
        ResourceError: the system refuses.
    """
    for path in _beside(destination, _DONE):
        if not (only_old and _is_untouched(os.path.join(path, _COMMITTED), destination)):
            SharedStaging(destination, path, kept)._remove()
        elif not kept(path):  # whoever made it was killed
            _strip(path)


def has_commits(destination: str) -> bool:
    """True if what is at a destination was committed by parts, and was not touched since."""
    marks = [path.removesuffix(_DONE) for path in _beside(destination, _DONE)]
    return any(
        SharedStaging(destination, path, nothing).is_committed for path in (*marks, *_beside(destination))
    )


def shared_of(destination: str, kept: KeptFiles) -> list[SharedStaging]:
    """Return the shared staging directories of a destination, whatever their plans."""
    return [SharedStaging(destination, path, kept) for path in _beside(destination)]


def runs_of(destination: str, kept: KeptFiles) -> list[SharedStaging]:
    """Return the directories in which single processes work, or have until they were killed.

    Those that are named after their process come first: of runs that begin or end, and of earlier versions, which wrote
    whole outputs there. Nobody goes on with these, but what they moved aside goes back.
    """
    paths = [path for path, _ in owned(destination) if storage.isdir(path)]
    return [SharedStaging(destination, path, kept) for path in (*paths, *_beside(destination, mark=_RUN))]


def staging_at(path: str, kept: KeptFiles) -> SharedStaging | None:
    """Return what a run works in, what parts share, or have left once they had committed; None if a path is no such thing.

    A long name is cut in the name of its directory, and so is the destination here.

    Args:
        path: absolute.
        kept: what stays of it when it is removed.
    """
    parent, name = os.path.split(path)
    found, _, mark = name.rpartition(".shardkit-")
    is_staging = _NAME.fullmatch(mark.removesuffix(_DONE)) or owner_of(path)
    if len(found) < 2 or not found.startswith(".") or not is_staging or not storage.isdir(path):
        return None
    return SharedStaging(os.path.join(parent, found[1:]), path, kept)


def remove_runs(destination: str, kept: KeptFiles, *, but: str) -> None:
    """Remove what this user's runs of other plans have left whose processes are all over; first what one moved aside goes
    back.

    Args:
        destination: absolute.
        kept: what stays.
        but: path of the one that stays.

    What cannot go stays, and is named where somebody asks for it: it is in nobody's way.
    """
    for run in runs_of(destination, kept):
        if run.path != but and run.is_over:
            with contextlib.suppress(OSError, ShardkitError):
                if run.is_own:
                    run.give_up()


def remove_abandoned(destination: str, kept: KeptFiles) -> None:
    """Remove what is named after a dead process; what it has moved aside goes back.

    Args:
        destination: absolute.
        kept: what stays.
    """
    for path, owner in owned(destination):
        if owner.is_provably_dead():
            with contextlib.suppress(OSError, ShardkitError):
                SharedStaging(destination, path, kept).give_up()


def recover_output(destination: str) -> None:
    """Put back what dead runs moved aside and did not replace; errors as `reopen`."""
    for run in runs_of(destination, nothing):
        if run.replaced() and run.is_over and storage.access(run.path, os.W_OK):
            run.reopen()


def reclaimable_bytes(destination: str) -> int:
    """Return the disk that the files of dead runs take: a new run goes on with them or removes them.

    Args:
        destination: absolute.
    """
    total = 0
    for path in (run.path for run in runs_of(destination, nothing) if run.is_over):
        for directory, _, names in storage.walk(path):
            for name in names:
                with contextlib.suppress(OSError):
                    total += storage.lstat(os.path.join(directory, name)).st_blocks * 512
    return total


def _beside(destination: str, ending: str = "", mark: str = _MARK) -> list[str]:
    parent, name = os.path.split(destination)
    prefix = prefix_of(name)
    return [
        os.path.join(parent, entry)
        for entry in _names(parent)
        if entry.startswith(prefix + mark)
        and entry.endswith(ending)
        and _NAME.fullmatch(entry.removeprefix(prefix).removesuffix(ending))
    ]
