"""The output of a job on a local or shared file system: a directory OUT that is whole or absent.

The job has one directory beside OUT, whose name is the state of the job:

    .OUT.shardkit-new-<id>/      being made; renamed to the next name once it is complete
    .OUT.shardkit/               the job is under way
    .OUT.shardkit-commit-<id>/   one process turns it into OUT; there is no way back from here
    .OUT.shardkit-trash-<id>/    the job has ended, and its directory is being removed

Each step is one rename of the whole directory. So no step can be half done, only one process can do it, and every
process that still uses the old name fails with its next call. No path in a job's directory is created a second time.

    job.json, draft/   the `JobRecord`
    data/              finished files under their final names; becomes OUT
    done/7.json        the note of file 7
    tmp/<id>/          unfinished files of one process
    users              flocked (shared) by all processes that work on the job
    lock               flocked by the process that commits or aborts
    witness            hard link to a file of `data`, made before OUT and `data` are exchanged: shows whether they were
    old/               the previous OUT, until it is removed

Safety does not depend on locks, which only make other processes wait. Where flock is missing, or works within one host
only, a process may take over the commit of a live process by renaming its directory; the other process then finds OUT
complete.

What is durable when: the job before `begin` returns, a file before its note has a name, OUT before `commit` returns.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Literal

from shardkit.core.text import escape, in_shell
from shardkit.core.threads import at_once
from shardkit.errors import ResourceError, ShardkitError, SourceError, UsageError
from shardkit.files import storage
from shardkit.files.digest import crc32
from shardkit.files.output.contract import (
    FileNote,
    JobEnded,
    JobRecord,
    JobStatus,
    OutputExists,
    check_complete,
    other_job_error,
)
from shardkit.files.strict_json import parse_object

_RECORD = "job.json"
_MOST_TRIES = 100  # a further try is needed only if another process begins or aborts at the same moment
_MOST_WAITS, _WAIT_S = 20, (1.0, 3.0)  # for a live process's commit, where flock does not work between hosts
_IN_THE_WAY = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
"""Errors of a rename of a directory onto anything but an empty directory."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
_NO_LINKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EMLINK, errno.EXDEV)
_GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)
"""ESTALE: another host has removed the file (NFS). ENOTDIR: a folder of the path is now a file."""
_MAX_HOST_CHARS = 40
_MAX_NAME_BYTES = 120  # of the output's name in the name of a job's directory; file systems allow 255 in all

_OF_A_JOB = re.compile(r"\.(.+)\.shardkit(-(new|commit|trash)-[^/]+)?", re.DOTALL)
"""Matches the name of a job's directory; its groups are the output's name, maybe shortened, and the state."""

MayReplace = Callable[[str, str], None]
"""Raises `OutputExists` if the directory at the first path may not be replaced. The second path is the directory with the
new output, or empty while there is none. Not called for an empty directory."""
ForeignFiles = Callable[[str, str], list[str]]
"""Returns the names in the first directory that shardkit did not write; the second directory is the new output."""


class LocalOutput:
    """A `JobOutput` on a file system, as one process of a job sees it.

    Args:
        path: the output directory; absolute.
        may_replace: checks what is at `path`, when a job begins and again just before the replacement.
        foreign_files: finds files that somebody put into the old output during its replacement; they are kept.
        overwrite: remove another job that no process works on, even if it has finished files.
    """

    def __init__(
        self, path: str, *, may_replace: MayReplace, foreign_files: ForeignFiles, overwrite: bool = False
    ) -> None:
        self.path = path
        self.warnings: list[str] = []
        """See `JobOutput.warnings`."""
        self.replaced: tuple[str, ...] = ()
        """See `JobOutput.replaced`."""
        self._may_replace, self._foreign_files, self._overwrite = may_replace, foreign_files, overwrite
        self._work = _beside(path)
        self._done = os.path.join(self._work, "done")
        self._record: JobRecord | None = None
        self._users_fd = self._data_fd = -1
        self._tmp = ""
        self._stage: Literal["", "begun", "claimed", "committed"] = ""
        """The last step of this process in the job. "claimed": it has begun the commit, which another process may take over."""

    def __enter__(self) -> LocalOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the job. After an error remove it, if no file is finished and no other process works on it."""
        with contextlib.suppress(OSError):
            if error is not None and self._stage != "claimed" and self._is_joined():
                self._discard_if_idle(with_files=False)
        self._leave()

    @property
    def is_committed(self) -> bool:
        """True once this process has committed the job; see `JobOutput.is_committed`."""
        return self._stage == "committed"

    def is_made(self) -> bool:
        """True if the destination is the `data` of the joined job; see `JobOutput.is_made`."""
        return self.is_committed or _is_same(self.path, self._data_fd)

    @property
    def record(self) -> JobRecord:
        """The job that this process has joined."""
        assert self._record is not None
        return self._record

    @property
    def data(self) -> str:
        """The directory of the finished files, until the job is committed."""
        return os.path.join(self._work, "data")

    def begin(self, record: JobRecord) -> None:
        """Complete interrupted commits, then create the job or join it; see `JobOutput.begin`."""
        with _system_errors(self.path):
            for _ in range(_MOST_TRIES):
                if record.hash in self._finish_commits():
                    self._join()  # a directory that this process has created meanwhile is removed when it leaves
                    self._stage = "committed"
                    raise JobEnded(self.path, is_committed=True)
                if self._join() is None:
                    self._refuse_foreign()
                    self._check_replaceable()
                    _create(self.path, record)
                    continue
                storage.sync_directory(os.path.dirname(self.path))
                self._check_replaceable()  # again: another job may have been committed before this one was created
                if self.record.hash == record.hash:
                    self._stage = "begun"
                    return
                if not self._discard_if_idle(with_files=self._overwrite):
                    raise other_job_error(self.path, self.record, record)
        raise ResourceError(
            f"{escape(self.path)}: other processes keep restarting jobs for it",
            hint=f"run the command again; if that does not help: `shardkit abort {in_shell(self.path)}`",
        )

    def join(self) -> JobRecord | None:
        """Complete interrupted commits, then join the job that is under way, if any; see `JobOutput.join`."""
        with _system_errors(self.path):
            ended = set[str]()
            # While this process joins, another one may remove its directory in tmp.
            for _ in range(_MOST_TRIES):
                ended |= self._finish_commits()
                record = self._join()
                if record is not None or not _exists(self._work):
                    break
        if record is None and ended:
            raise JobEnded(self.path, is_committed=True)
        return record

    def notes(self, numbers: Collection[int]) -> dict[int, FileNote]:
        """Return the notes of the finished files among `numbers`; see `JobOutput.notes`."""
        notes = dict[int, FileNote]()
        with self._in_job():
            for number in self._finished().intersection(numbers):
                # Without a readable note the file is written again.
                with _if_there(), contextlib.suppress(SourceError):
                    note = os.path.join(self._done, f"{number}.json")
                    notes[number] = parse_object(storage.read_file(note), note)
            self._require_joined()  # else notes may be missing because the job has ended
        return notes

    @contextlib.contextmanager
    def scratch(self) -> Iterator[str]:
        """Make a directory in `tmp` for unfinished files, with all folders of the job; remove it at the end.

        Never call `makedirs` below it: if the job has ended, its directories must not be created again.
        """
        path = os.path.join(self._tmp, _new_id())
        try:
            with self._in_job():
                storage.mkdir(path)
                for folder in self.record.folders:
                    storage.mkdir(os.path.join(path, folder))
                yield path
        finally:
            storage.remove_tree(path)

    def add(self, scratch: str, number: int, note: FileNote) -> None:
        """Rename a finished file from `scratch` into `data`, then its note into `done`; see `JobOutput.add`."""
        name = self.record.files[number].name
        note_in_scratch = os.path.join(scratch, f"{number}.note")
        with self._in_job():
            storage.sync_file(os.path.join(scratch, name))
            storage.rename(os.path.join(scratch, name), os.path.join(self.data, name))
            storage.sync_directory(os.path.join(self.data, os.path.dirname(name)))
            storage.write_file(note_in_scratch, json.dumps(note).encode())
            storage.rename(note_in_scratch, os.path.join(self._done, f"{number}.json"))
            storage.sync_directory(self._done)

    def forget(self, numbers: Iterable[int]) -> None:
        """Remove the notes of files, so that they are written again; see `JobOutput.forget`."""
        with self._in_job():
            for number in numbers:
                with _if_there():
                    storage.unlink(os.path.join(self._done, f"{number}.json"))
            storage.sync_directory(self._done)

    def commit(self, scratch: str) -> None:
        """Move the files in `scratch` into `data`, and rename `data` to the destination; see `JobOutput.commit`."""
        with self._in_job(), _locked(self._work):
            check_complete(self.path, self.record, self._finished())
            self._adopt(scratch)
            self._check_replaceable(self.data)
            storage.sync_directories(self.data)
            self._work = _rename(self.path, self._work, "commit")
            self._stage = "claimed"
            self._publish_own()
        self._leave()

    def keep(self, scratch: str) -> str:
        """End the job by giving its output a name beside the destination, which may not be replaced: `OUT-new`.

        Args:
            scratch: as for `commit`, which may have moved the files already.

        Returns:
            The path of the output.
        """
        with self._in_job(), _locked(self._work):
            if self._stage != "claimed":
                self._adopt(scratch)
            storage.sync_directories(self.data)
            for number in itertools.count(1):
                kept = f"{self.path}-new{number if number > 1 else ''}"
                with contextlib.suppress(FileExistsError):
                    storage.rename_noreplace(self.data, kept)
                    break
            with contextlib.suppress(OSError):  # the output is complete; the next job reports what remains
                storage.sync_directory(os.path.dirname(self.path))
                self._discard(self._work)
        self._leave()
        return kept

    def discard(self) -> None:
        """Remove the job that this process has begun, unless it has ended."""
        if self._stage == "begun" and self._tmp:
            with contextlib.suppress(JobEnded), self._in_job(), _locked(self._work):
                self._discard(self._work)
            self._leave()

    def abort(self) -> bool:
        """Remove all uncommitted jobs of the destination; see `JobOutput.abort`.

        A commit that has not changed the destination yet is undone with its job; any other commit is completed.
        """
        with _system_errors(self.path):
            has_leftovers = is_under_way(self.path) or bool(unremoved(self.path))
            self._refuse_foreign()
            with _if_there(), _locked(self._work):
                self._discard(self._work)
            for work in _listed(self.path, "commit"):
                with _if_there(), _locked(work):
                    if _has_new(work) and not _exists(os.path.join(work, "old")):
                        self._discard(work)
            self._finish_commits()
            self._discard_all("new")
        self._leave()
        return has_leftovers

    def end_commits(self) -> None:
        """Complete interrupted commits, and remove the remaining directories of jobs that have ended.

        Raises:
            OutputExists: the destination holds something else by now. Nothing is changed.
            ResourceError: the system refuses.
        """
        with _system_errors(self.path):
            self._finish_commits()
            self._discard_all("new")

    def _join(self) -> JobRecord | None:
        """Join the job that is under way, and return its record, or None."""
        self._leave()
        users = os.path.join(self._work, "users")
        with _if_there():
            # For writing: over NFS an exclusive lock needs it.
            self._users_fd = _open(users, os.O_RDWR)
            is_alone = _flock(self._users_fd, exclusive=True, wait=False)
            # This process creates files only below here, and renames them into the job. So it can never add a file to
            # another job that has the same path by then: there this directory does not exist.
            self._tmp = os.path.join(self._work, "tmp", _new_id())
            storage.mkdir(self._tmp)
            if is_alone and _is_same(users, self._users_fd):
                self._remove_scratch_of_dead()
            _flock(self._users_fd, exclusive=False)
            # Notes of other users are not trusted. The owner is that of `tmp`, which this process has just made, and not
            # geteuid(): NFS may map users. The lstat fails if another process has removed `tmp`.
            _check_owner(self.path, storage.lstat(self._tmp).st_uid)
            self._data_fd = _open(self.data, os.O_RDONLY | os.O_DIRECTORY)
            self._record = _read_record(self._work)
            if _is_same(users, self._users_fd) and self._is_joined():
                return self._record
        self._leave()
        return None

    def _leave(self) -> None:
        """Close what belongs to this process, and remove its unfinished files."""
        tmp, fds = self._tmp, (self._users_fd, self._data_fd)
        self._tmp, self._users_fd, self._data_fd = "", -1, -1
        for fd in fds:
            if fd >= 0:
                with contextlib.suppress(OSError):
                    storage.close_fd(fd)
        if tmp:
            storage.remove_tree(tmp)

    def _is_joined(self) -> bool:
        """True while the job that this process has joined is under way."""
        return _is_same(self.data, self._data_fd)

    @contextlib.contextmanager
    def _in_job(self) -> Iterator[None]:
        """Raise JobEnded instead of an error that is a consequence of the end of the job."""
        try:
            self._require_joined()
            yield
        except (OSError, ShardkitError) as error:
            if isinstance(error, (JobEnded, UsageError)):
                raise
            with _system_errors(self.path):
                if self._is_joined() or self._stage in ("claimed", "committed"):
                    raise
                raise self._ended_error() from error

    def _ended_error(self) -> JobEnded:
        """Complete any interrupted commit, and return the error for a process whose job is gone."""
        data_fd = self._data_fd
        self._finish_commits()
        return JobEnded(self.path, is_committed=_is_same(self.path, data_fd))

    def _require_joined(self) -> None:
        """Raise FileNotFoundError if the joined job is no longer under way; `_in_job` turns it into JobEnded."""
        if not self._is_joined():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.data)

    def _finished(self) -> set[int]:
        """Return the numbers of the files that have a note and exist with the right size."""
        finished = set[int]()
        for name in storage.listdir(self._done):
            stem = name.removesuffix(".json")
            number = int(stem) if stem.isdecimal() else -1
            if 0 <= number < len(self.record.files):
                file = self.record.files[number]
                with _if_there():
                    if storage.lstat(os.path.join(self.data, file.name)).st_size == file.size:
                        finished.add(number)
        self._require_joined()  # else files may be missing because the job has ended
        return finished

    def _remove_scratch_of_dead(self) -> None:
        """Remove unfinished files of this host's other processes, which are all dead: only this one has locked `users`."""
        tmp, mine = os.path.split(self._tmp)
        for name in storage.listdir(tmp):
            if name.rpartition("-")[0] == _host() and name != mine:
                moved = os.path.join(self._tmp, name)
                storage.rename(os.path.join(tmp, name), moved)
                storage.remove_tree(moved)

    def _discard_if_idle(self, *, with_files: bool) -> bool:
        """Leave the job. Remove it if no other process works on it and it has no finished files, or `with_files` is set.

        Returns:
            True if the job no longer exists.
        """
        try:
            is_idle = _flock(self._users_fd, exclusive=True, wait=False)
            is_idle = is_idle and (with_files or not storage.listdir(self._done))
            self._require_joined()
            if is_idle:
                self._discard(self._work)
            return is_idle
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return True
        finally:
            self._leave()

    def _check_replaceable(self, new: str = "") -> None:
        """Raise OutputExists if the destination may not be replaced. `new` is the directory with the new output, if any."""
        if is_free(self.path):
            return
        try:
            with _if_there():
                self._may_replace(self.path, new)
        except OutputExists:
            self._discard_all("new")
            raise

    def _refuse_foreign(self) -> None:
        """Raise UsageError if the path of the job's directory holds something that is not a job."""
        with _if_there():
            before = storage.lstat(self._work)
            names = storage.listdir(self._work) if stat.S_ISDIR(before.st_mode) else ["a file"]
            if names and _RECORD not in names and os.path.samestat(before, storage.lstat(self._work)):
                raise UsageError(
                    f"{escape(self._work)} is in the way, and is no job of shardkit's",
                    hint="move it somewhere else",
                )

    def _adopt(self, directory: str, below: str = "") -> None:
        """Move all files of a directory into `data`. Another process may be moving files of the same names."""
        files = list[str]()
        for entry in storage.listdir(os.path.join(directory, below)):
            name = os.path.join(below, entry)
            if stat.S_ISDIR(storage.lstat(os.path.join(directory, name)).st_mode):
                with contextlib.suppress(FileExistsError):
                    storage.mkdir(os.path.join(self.data, name))
                self._adopt(directory, name)
            else:
                files.append(name)
        paths = [os.path.join(directory, name) for name in files]
        # Syncing a thousand small files one by one takes seconds; for a few files threads cost more than they save.
        at_once(storage.sync_file, paths, num_threads=min(max(len(paths) // 64, 1), 16))
        for name in files:
            storage.rename(os.path.join(directory, name), os.path.join(self.data, name))

    def _finish_commits(self) -> set[str]:
        """Complete interrupted commits. Wait for the commit of a live process.

        Returns:
            The hashes of the jobs whose commits this call has completed.

        Raises:
            OutputExists: the destination holds something else by now. Nothing is changed.
        """
        ended = set[str]()
        for waits in range(_MOST_WAITS):
            works = _listed(self.path, "commit")
            if not works:
                self._discard_all("trash")
                return ended
            if waits:  # without working locks: another process has taken the commit over, and completes it
                time.sleep(random.uniform(*_WAIT_S))
            for work in works:
                with _if_there(), _locked(work):
                    claimed = _rename(self.path, work, "commit")
                    record = _read_record(claimed)
                    self._publish(claimed)
                    ended.add(record.hash)
        raise ResourceError(
            f"{escape(works[0])} cannot be brought to its end",
            hint="if no process works there, remove it yourself",
        )

    def _publish_own(self) -> None:
        """Publish the job whose commit this process has begun.

        Raises:
            ResourceError: the output is complete, but could not be made durable.
            OSError: the system refuses, or another process has taken the commit over.
        """
        try:
            self._publish(self._work, is_own=True)
        except OSError as error:
            if self.is_committed:
                return  # the next command removes the rest of the job
            if error.errno in _GONE:
                self._stage = "begun"
            elif _is_same(self.path, self._data_fd):
                raise ResourceError(
                    f"cannot bring {escape(self.path)} to the disk (it is there, and whole): {error.strerror}",
                    hint="run the same command again",
                ) from error
            raise

    def _publish(self, work: str, *, is_own: bool = False) -> None:
        """Rename `data` to the destination, unless this has been done, and remove the rest of the job.

        Only this process uses the path `work`. If another process takes the commit over, the path no longer exists and the
        next call fails; until then nothing else changes below it.
        """
        data, old, parent = os.path.join(work, "data"), os.path.join(work, "old"), os.path.dirname(self.path)
        if _has_new(work):
            storage.sync_directory(parent)
            self._replace(work, data, old)
        if _exists(data):  # after an exchange
            storage.rename(data, old)
        storage.sync_directory(parent)  # else a power loss may lose this rename and keep the next one
        # Somebody may have added files after `_check_replaceable`.
        if _exists(old) and self._foreign_files(old, self.path):
            kept = os.path.join(parent, os.path.basename(_beside(self.path, "replaced"))[1:])  # not hidden
            storage.rename(old, kept)
            self.warnings.append(
                f"files were put into the old {escape(self.path)} while it was replaced: it is {escape(kept)} now"
            )
        if is_own:
            self._stage = "committed"
        self._discard(work)
        self._discard_all("new")

    def _replace(self, work: str, data: str, old: str) -> None:
        """Rename `data` to the destination, and what is there now to `old`; exchange both in one step if possible.

        Raises:
            OutputExists: the destination may not be replaced, or something was put there in between.
        """
        try:
            if _exists(old) or is_free(self.path):
                storage.rename(data, self.path)
                return
            self._check_replaceable(data)
            if not _exchange(work, self.path):
                with _if_there():
                    storage.rename(self.path, old)
                storage.rename(data, self.path)
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
            raise OutputExists(
                f"something was put at {escape(self.path)} meanwhile",
                hint=f"move it away and run the same command again; the new output is whole in {escape(data)}",
            ) from error

    def _discard(self, work: str) -> None:
        """End a job by renaming its directory to the state "trash", then remove it; add a warning if that fails."""
        trash = _rename(self.path, work, "trash")
        storage.sync_directory(os.path.dirname(self.path))  # else a power loss brings it back, half empty
        if not storage.remove_tree(trash):
            self.warnings.append(
                f"{escape(trash)} is over and could not be removed: once you may write in all of it, "
                f"`shardkit abort {in_shell(self.path)}` removes it"
            )

    def _discard_all(self, state: str) -> None:
        """Remove all directories of jobs in the state "trash" or "new". A live process whose "new" one is gone starts again."""
        for work in _listed(self.path, state):
            with _if_there():
                self._discard(work)


def status(path: str) -> list[JobStatus]:
    """Return the uncommitted job of a destination as a list of at most one. Nothing is changed.

    Raises:
        SourceError: the record of the job is damaged.
        ResourceError: the system refuses.
    """
    with _system_errors(path), _if_there():  # the parent directory may not exist
        for work in [*_listed(path, "commit"), _beside(path)]:
            with _if_there():
                names = storage.listdir(os.path.join(work, "done"))
                finished = {int(name.removesuffix(".json")) for name in names if name[:-5].isdecimal()}
                record = replace(_read_record(work), draft=_read_draft(work))
                return [JobStatus(record=record, finished=finished, is_committing=work != _beside(path))]
    return []


def output_of(path: str) -> str | None:
    """Return the output of the job whose directory contains a path, or is that path; None outside of jobs.

    Args:
        path: absolute.
    """
    parent, name = os.path.split(path)
    while name:
        match = _OF_A_JOB.fullmatch(name)
        if match and _exists(os.path.join(parent, name, _RECORD)):
            return _output_of(parent, match)
        parent, name = os.path.split(parent)
    return None


def is_under_way(path: str) -> bool:
    """True if a destination has an uncommitted job; False also if the system refuses to list the directory."""
    with contextlib.suppress(OSError):
        return _exists(_beside(path)) or bool(_listed(path, "commit"))
    return False


def unremoved(path: str) -> list[str]:
    """Return the directories of a destination's ended jobs that are being removed, or could not be removed."""
    with _if_there():
        return _listed(path, "trash")
    return []


def outputs_in(directory: str) -> list[str]:
    """Return the outputs in a directory that have a job's directory beside them, in any state."""
    matches = filter(None, map(_OF_A_JOB.fullmatch, storage.listdir(directory)))
    return sorted({_output_of(directory, match) for match in matches})


def _output_of(parent: str, match: re.Match[str]) -> str:
    """Return the output of a job's directory: by its record, as its name may be shortened, else by that name."""
    path = os.path.join(parent, match[1])
    with contextlib.suppress(OSError, ShardkitError, ValueError):  # ValueError: a lone surrogate
        recorded = os.path.join(parent, _read_record(os.path.join(parent, match[0])).output)
        return recorded if _stem(recorded) == _stem(path) else path
    return path


def _create(path: str, record: JobRecord) -> None:
    """Create the directory of a job, unless another process does so first."""
    new = _beside(path, "new")
    storage.mkdir(new)
    try:
        folders = ["data", "done", "draft", "tmp", *(f"data/{folder}" for folder in record.folders)]
        for folder in folders:
            storage.mkdir(os.path.join(new, folder))
        drafts = {f"draft/{number}": content for number, content in enumerate(record.draft.values())}
        for name, content in {"users": b"", "lock": b"", _RECORD: record.dump(), **drafts}.items():
            storage.write_file(os.path.join(new, name), content)
        for folder in [*reversed(folders), ""]:
            storage.sync_directory(os.path.join(new, folder))
        storage.rename(new, _beside(path))
    except OSError as error:
        # _GONE: another process has removed `new`. _IN_THE_WAY: another process was faster.
        if error.errno not in (*_GONE, *_IN_THE_WAY):
            raise
    finally:
        storage.remove_tree(new)


def _read_record(work: str) -> JobRecord:
    """Read the record of a job's directory, without its draft."""
    path = os.path.join(work, _RECORD)
    return JobRecord.parse(storage.read_file(path), path)[0]


def _read_draft(work: str) -> dict[str, bytes]:
    """Read the files of a job's draft that exist."""
    path = os.path.join(work, _RECORD)
    names = JobRecord.parse(storage.read_file(path), path)[1]
    paths = {name: os.path.join(work, "draft", str(number)) for number, name in enumerate(names)}
    return {name: storage.read_file(path) for name, path in paths.items() if _exists(path)}


def _has_new(work: str) -> bool:
    """True if `data` is the new output. False if OUT is, and `data` is the old output or absent."""
    data, witness = os.path.join(work, "data"), os.path.join(work, "witness")
    if not _exists(data):
        return False
    return not _exists(witness) or _is_same(witness, _first_file(work))


def _exchange(work: str, path: str) -> bool:
    """Exchange `data` and OUT in one step.

    Returns:
        False if the file system cannot exchange directories, or has no hard links, without which nobody could find out
        after a crash whether the exchange has happened.
    """
    witness, first = os.path.join(work, "witness"), _first_file(work)
    link = f"{witness}.new"
    if not first:
        return False
    try:
        with contextlib.suppress(FileExistsError):
            storage.hard_link(first, link)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise
    if not _is_same(link, first):  # such a link would show an exchange that has not happened
        return False
    storage.rename(link, witness)
    storage.sync_directory(work)
    try:
        return storage.renameat2(os.path.join(work, "data"), path, storage.RENAME_EXCHANGE)
    except OSError as error:
        if error.errno not in _GONE or _exists(path):
            raise
        return False


def _first_file(work: str) -> str:
    """Return the path in `data` of the job's first file; for a save, whose record lists no files, of the first one found."""
    files, data = _read_record(work).files, os.path.join(work, "data")
    if files:
        return os.path.join(data, files[0].name)
    paths = (os.path.join(data, name) for name in sorted(storage.listdir(data)))
    return next((path for path in paths if stat.S_ISREG(storage.lstat(path).st_mode)), "")


def _stem(path: str) -> str:
    """Return the beginning of the names of an output's job directories, short enough for any file system."""
    name = os.path.basename(path)
    data = os.fsencode(name)
    if len(data) > _MAX_NAME_BYTES:
        name = f"{os.fsdecode(data[: _MAX_NAME_BYTES - 9])}~{crc32(data):08x}"
    return f".{name}.shardkit"


def _beside(path: str, state: str = "") -> str:
    """Return the path of an output's job directory; with a state, a new path for that state."""
    parent, stem = os.path.dirname(path), _stem(path)
    return os.path.join(parent, f"{stem}-{state}-{_new_id()}" if state else stem)


def _listed(path: str, state: str) -> list[str]:
    """Return an output's job directories in a state."""
    parent, prefix = os.path.dirname(path), f"{_stem(path)}-{state}-"
    return [os.path.join(parent, entry) for entry in storage.listdir(parent) if entry.startswith(prefix)]


def _rename(path: str, work: str, state: str) -> str:
    """Move a job's directory to a state, under a name that only this process uses; return the new path."""
    renamed = _beside(path, state)
    storage.rename(work, renamed)
    return renamed


@contextlib.contextmanager
def _locked(work: str) -> Iterator[None]:
    """Lock a job's directory. It may be gone by the time the lock is free; then the next call fails.

    Raises:
        FileNotFoundError: the directory does not exist.
    """
    fd = _open(os.path.join(work, "lock"), os.O_RDWR | os.O_CREAT)  # missing if somebody has removed it
    try:
        _flock(fd, exclusive=True)
        yield
    finally:
        with contextlib.suppress(OSError):
            storage.close_fd(fd)


def _flock(fd: int, *, exclusive: bool, wait: bool = True) -> bool:
    """Lock an open file. On a file system without locks the result is True with `wait`, else False."""
    try:
        return storage.flock(fd, exclusive=exclusive, wait=wait)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return wait


def _open(path: str, flags: int) -> int:
    return storage.open_fd(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)


def _exists(path: str) -> bool:
    with _if_there():
        storage.lstat(path)
        return True
    return False


def is_free(path: str) -> bool:
    """True if the path does not exist or is an empty directory, which a rename replaces."""
    with _if_there():
        return stat.S_ISDIR(storage.lstat(path).st_mode) and not storage.listdir(path)
    return True


def _is_same(path: str, path_or_descriptor: str | int) -> bool:
    """True if a path is the same file or directory as another path or a descriptor."""
    try:
        second = (
            storage.fstat(path_or_descriptor)
            if isinstance(path_or_descriptor, int)
            else storage.lstat(path_or_descriptor)
        )
        return os.path.samestat(storage.lstat(path), second)
    except OSError as error:
        if error.errno in (*_GONE, errno.EBADF):  # EBADF: this process has left the job
            return False
        raise


@contextlib.contextmanager
def _if_there() -> Iterator[None]:
    """Run the block only until it finds a file or directory missing."""
    try:
        yield
    except OSError as error:
        if error.errno not in _GONE:
            raise


@contextlib.contextmanager
def _system_errors(path: str) -> Iterator[None]:
    """Raise ResourceError instead of OSError; UsageError if the reason is that the job belongs to another user."""
    try:
        yield
    except OSError as error:
        if isinstance(error, PermissionError):
            with contextlib.suppress(OSError):
                _check_owner(path, os.geteuid())
        raise ResourceError(
            f"cannot write beside {escape(path)}: {error.strerror}", hint=storage.WAYS_OUT.get(error.errno)
        ) from error


def _check_owner(path: str, uid: int) -> None:
    """Raise UsageError if the job of an output belongs to another user than `uid`."""
    for work in [_beside(path), *_listed(path, "commit")]:
        if _exists(work) and storage.lstat(work).st_uid != uid:
            raise UsageError(
                f"the job under way for {escape(path)} belongs to another user",
                hint=f"choose another output, or have that user run `shardkit abort {in_shell(path)}`",
            )


def _new_id() -> str:
    """Return a unique id that begins with the name of this host."""
    return f"{_host()}-{secrets.token_hex(6)}"


def _host() -> str:
    return socket.gethostname().partition(".")[0][:_MAX_HOST_CHARS]
