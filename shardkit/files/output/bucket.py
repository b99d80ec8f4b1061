"""The output of one job in a bucket of S3, Google or Azure: whole or absent, and resumed from any machine.

    OUT/model-<hash>-00001-of-00004.safetensors   data, with the job's hash in its name: unused until the marker names it
    OUT/.shardkit-<hash>/files/config.json        a file without the hash in its name; the commit copies it to OUT/config.json
    OUT/.shardkit-<hash>/draft/0                  a file of the draft
    OUT/.shardkit-<hash>/job.json                 the record; the job is under way as long as this object exists
    OUT/.shardkit-<hash>/7.json                   the note of file 7, put after the file
    OUT/.metadata, or an index                    the marker: the object by which readers find the output

The commit is one conditional put of the marker, which succeeds only if the marker has not changed since the job began.
The marker's tags name the job. If a put fails with an unclear error, they show whether it has happened.

Processes of one job put the same bytes under the same names, so they need no locks, and keep no state on their machines.
Different jobs do not see each other. A file is written into a local scratch directory and sent from there. Data of a
replaced output stays, since readers may still need it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from shardkit.core.text import escape, escape_command, in_shell
from shardkit.core.threads import at_once, check_interrupt
from shardkit.errors import IncompleteError, ResourceError, SourceError, UsageError
from shardkit.files import cache, storage, stores
from shardkit.files.home import METADATA, data_prefixes
from shardkit.files.output.contract import (
    FileNote,
    JobEnded,
    JobRecord,
    JobStatus,
    OutputExists,
    check_complete,
    other_job_error,
)
from shardkit.files.remote.objects import (
    NO_SUCH_VERSION,
    NUM_SENDS,
    Objects,
    PutResult,
    StoredObject,
    Version,
    upload_nbytes,
)
from shardkit.files.strict_json import parse_object

_RECORD, _ABORTED = "job.json", "aborted.json"
_JOB, _MARKER = "shardkit_job", "shardkit_marker"
"""Tags of objects. Of markers and records: the hash of their job. Of records: the name of the job's marker."""
_HOME = re.compile(r"\.shardkit-[0-9a-f]{16}", re.ASCII)
_HASH_DIGITS, _LEAST_DIGITS = 16, 8
"""Digits of a job's hash in the name of its folder, and at least in the names of its data files."""
_PIECE_NBYTES = 1 << 20
_NUM_PUTS = 6
"""Puts of a record before a store is refused because it ignores conditions. One may fail for another reason."""
_ON_DISK = "/var/tmp"  # temporary files that are kept over a restart. Source: Filesystem Hierarchy Standard
NAME_SCRATCH = "name a directory with enough room: --scratch DIR"


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredJob:
    """A job in the bucket. Methods return the names of its objects, relative to the output."""

    record: JobRecord
    """Read from the store, it has an empty draft."""
    marker: str
    draft: Sequence[str]
    """Names of the draft's files."""

    @property
    def home(self) -> str:
        """The folder of all objects except the data."""
        return _home(self.record.hash)

    @property
    def tags(self) -> dict[str, str]:
        """The tags of the record."""
        return {_JOB: self.record.hash, _MARKER: self.marker}

    def names(self) -> list[str]:
        """Return the names of all files."""
        return [file.name for file in self.record.files]

    def owns(self, name: str) -> bool:
        """True if a name contains the job's hash, so that no other job uses it."""
        return self.record.hash[:_LEAST_DIGITS] in name

    def place(self, name: str) -> str:
        """Return the object that holds a file until the commit: under the file's own name if this has the job's hash."""
        return name if self.owns(name) else f"{self.home}/files/{name}"

    def note(self, number: int) -> str:
        """Return the object of a note."""
        return f"{self.home}/{number}.json"

    def drafts(self) -> list[str]:
        """Return the objects of the draft."""
        return [f"{self.home}/draft/{number}" for number in range(len(self.draft))]

    def finished(self, sizes: Mapping[str, int]) -> list[int]:
        """Return the numbers of the files that have a note and the right size.

        Args:
            sizes: bytes of each object of the job, by name.
        """
        return [
            number
            for number, file in enumerate(self.record.files)
            if self.note(number) in sizes and sizes.get(self.place(file.name)) == file.size
        ]

    def has_put(self, marker: StoredObject | None) -> bool:
        """True if this job has put a marker."""
        return marker is not None and marker.tags.get(_JOB) == self.record.hash


class BucketOutput:
    """A `JobOutput` in a bucket, as one process of a job sees it.

    Args:
        address: of the output, such as `s3://bucket/model`.
        marker: name of the marker. `join` takes it from the record instead.
        may_replace: raises if the output at an address may not be replaced. Called if there is a marker, and again before
            the commit replaces objects without a hash in their names.
        overwrite: an existing output may be replaced.
        scratch: directory for scratch files; see `scratch_home`.

    Raises:
        UsageError: the store is read only.
    """

    _job: _StoredJob

    def __init__(
        self,
        address: str,
        *,
        marker: str,
        may_replace: Callable[[str], None],
        overwrite: bool,
        scratch: str | None = None,
    ) -> None:
        self._objects = Objects(address)
        self.path = self._objects.path
        self.is_committed = False
        self.replaced: tuple[str, ...] = ()
        """See `JobOutput.replaced`."""
        self.warnings = ()
        self._marker, self._may_replace, self._overwrite = marker, may_replace, overwrite
        self._scratch, self._replaced = scratch, cast("Version | None", None)
        self._sends = threading.Semaphore(NUM_SENDS)

    def __enter__(self) -> BucketOutput:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def is_made(self) -> bool:
        """True if the marker is the one that this job has put; see `JobOutput.is_made`."""
        return "_job" in vars(self) and self._job.has_put(self._objects.head(self._marker))

    def begin(self, record: JobRecord) -> None:
        """Put the draft and then the record, unless the job is under way already; see `JobOutput.begin`."""
        self._job = job = _StoredJob(record=record, marker=self._marker, draft=list(record.draft))
        for turn in range(_NUM_PUTS):
            try:
                self._check_marker()
            except UsageError:
                if turn:  # the marker is new, and so is this job: no process has worked on it
                    self._remove_home()
                raise
            if not turn and self._objects.head(f"{job.home}/{_RECORD}") is None:
                drafts = zip(job.drafts(), record.draft.values(), strict=True)
                at_once(lambda each: self._put(*each), drafts, NUM_SENDS)
            # A commit puts the marker and then removes the record. So if the record still exists now, after the marker was
            # checked, the job is not committed. If this put creates it, a commit may have come between: check again.
            result = self._put_record(None)
            if result == "other":
                raise SourceError(
                    f"{escape(f'{self.path}/{job.home}/{_RECORD}')} is damaged, or the store keeps no metadata",
                    hint=f"remove it: `shardkit abort {in_shell(self.path)}`",
                )
            if result == "same" and (self._replaced is None or self._put_record(NO_SUCH_VERSION) == "same"):
                return
        self._remove_home()
        raise UsageError(
            f"{escape(self.path)}: the store ignores conditions (If-None-Match, If-Match), so that of two jobs that end "
            "at the same time both would think that theirs is the output",
            hint="write into a local directory, and copy that with the store's own tool",
        )

    def join(self) -> JobRecord | None:
        """Join the only job that is under way at the address, and return its record, or None; see `JobOutput.join`."""
        jobs = list(_jobs(self._objects))
        if not jobs:
            return None
        if len(jobs) > 1:
            commands = [escape_command(job.record.command) or "begun by a call from Python" for job in jobs]
            raise UsageError(
                f"{len(jobs)} jobs are under way for {escape(self.path)}",
                problems=commands,
                hint=f"run the command of one of them, or remove all: `shardkit abort {in_shell(self.path)}`",
            )
        self._job, self._marker = jobs[0], jobs[0].marker
        self._check_marker()
        return self._job.record

    def notes(self, numbers: Collection[int]) -> dict[int, FileNote]:
        """Return the notes of the finished files among `numbers`; see `JobOutput.notes`."""
        numbers, notes = [each for each in self._finished() if each in numbers], dict[int, FileNote]()
        contents = at_once(self._objects.get, map(self._job.note, numbers))
        if None in contents:  # removed since the listing, by a commit or by `forget` of another process
            self._check_under_way()
        for number, content in zip(numbers, contents, strict=True):
            with contextlib.suppress(SourceError):  # without a readable note the file is written again
                if content is not None:
                    notes[number] = parse_object(content.data, self._job.note(number))
        return notes

    @contextlib.contextmanager
    def scratch(self) -> Iterator[str]:
        """Make a directory on this machine for unfinished files, with all folders of the job; remove it at the end."""
        with contextlib.ExitStack() as stack:
            above = scratch_home(self._scratch)
            with _scratch_errors(above):
                path = stack.enter_context(storage.scratch_directory(above))
                for folder in self._job.record.folders:
                    storage.make_folders(path, folder)
            yield path

    def add(self, scratch: str, number: int, note: FileNote) -> None:
        """Send a finished file from `scratch`, then its note, then remove the local file; see `JobOutput.add`.

        A killed process leaves at most a file without a note, which is written again.
        """
        self._check_under_way()
        name = self._job.record.files[number].name
        with _scratch_errors(scratch):
            self._send(os.path.join(scratch, name), self._job.place(name))
            self._put(self._job.note(number), json.dumps(note).encode())
            storage.unlink(os.path.join(scratch, name))

    def forget(self, numbers: Iterable[int]) -> None:
        """Remove the notes of files, so that they are written again; see `JobOutput.forget`."""
        self._check_under_way()
        self._objects.delete(map(self._job.note, numbers))

    def commit(self, scratch: str) -> None:
        """Send the files in `scratch`, then replace the marker by one conditional put; see `JobOutput.commit`."""
        check_complete(self.path, self._job.record, self._finished())
        replaced = self._replaced_data()
        paths = [os.path.join(here, name) for here, _, names in storage.walk(scratch) for name in names]
        sources = {os.path.relpath(path, scratch): path for path in paths}
        waiting = [name for name in self._job.names() if self._job.place(name) != name]
        if not self._overwrite:
            at_once(lambda name: self._check_free(name, self._objects.head(name)), waiting)
        elif waiting or not all(self._job.owns(name) or name == self._marker for name in sources):
            self._check_may_replace()
        with _scratch_errors(scratch):
            marker = b"".join(_pieces(sources.pop(self._marker)))
            at_once(lambda name: self._send_beside(sources[name], name), sources, NUM_SENDS)
        lost: FileNotFoundError | None = None
        try:
            at_once(lambda name: self._objects.copy(self._job.place(name), name), waiting)
        except FileNotFoundError as error:
            lost = error
        self._check_under_way()
        if lost is not None:
            raise IncompleteError(
                f"{escape(self.path)}: files were removed while others were written",
                hint="run the same command again",
            ) from lost
        result = self._objects.put_if(self._marker, marker, {_JOB: self._job.record.hash}, self._replaced)
        if result == "other":
            raise self._changed_error()
        self.is_committed = result == "put"
        self.replaced = replaced
        stores.forget()
        with contextlib.suppress(ResourceError):  # if the command is run again, it removes the rest
            self._remove_home()
        if result == "same":
            raise JobEnded(self.path, is_committed=True)

    def keep(self, scratch: str) -> None:
        """End the job without a marker, since the destination may not be replaced: its data stays where it is.

        Args:
            scratch: as for `commit`; all of its files but the marker are sent.
        """
        for here, _, names in storage.walk(scratch):
            for path in sorted(os.path.join(here, name) for name in names):
                if (name := os.path.relpath(path, scratch)) != self._marker:
                    self._send(path, name)
        stores.forget()
        self._remove_home()

    def discard(self) -> None:
        """Remove this job, and its data unless it was committed."""
        is_committed = self._job.has_put(self._objects.head(self._marker))
        if not is_committed:
            self._objects.delete([f"{self._job.home}/{_RECORD}"])
            self._objects.delete(_data(self._objects, self._job))
        self._remove_home()
        stores.forget()

    def abort(self) -> bool:
        """Remove the objects of all uncommitted jobs at the address; see `JobOutput.abort`.

        The record becomes `aborted.json`, which is removed last, so that an interrupted abort can be repeated.
        """
        homes = _homes(self._objects)
        for home in homes:
            with contextlib.suppress(FileNotFoundError):  # a killed abort has removed the record
                self._objects.copy(f"{home}/{_RECORD}", f"{home}/{_ABORTED}")
            self._objects.delete([f"{home}/{_RECORD}"])
            inside = self._objects.sizes(home).keys()
            with contextlib.suppress(SourceError):  # without a readable record the data cannot be found
                job = _read_job(self._objects, self.path, f"{home}/{_ABORTED}")
                if job is not None and not job.has_put(self._objects.head(job.marker)):
                    self._objects.delete(_data(self._objects, job))
            self._objects.delete(inside - {f"{home}/{_ABORTED}"})
            self._objects.delete(inside & {f"{home}/{_ABORTED}"})
        return bool(homes)

    def end_commits(self) -> None:
        """Remove the rest of committed jobs."""
        for home in _homes(self._objects):
            with contextlib.suppress(SourceError):
                job = _read_job(self._objects, self.path, f"{home}/{_RECORD}")
                if job is not None and job.has_put(self._objects.head(job.marker)):
                    self._job = job
                    self._remove_home()

    def _put_record(self, replaced: Version | None) -> PutResult:
        """Put the job's record if the stored one has the version `replaced`; None: if none is stored."""
        job = self._job
        return self._objects.put_if(f"{job.home}/{_RECORD}", job.record.dump(), job.tags, replaced)

    def _version(self) -> Version | None:
        """Return the version of the marker, or None. Raises JobEnded if this job has put it."""
        return self._version_of(self._objects.head(self._marker))

    def _version_of(self, marker: StoredObject | None) -> Version | None:
        if self._job.has_put(marker):
            self._remove_home()
            raise JobEnded(self.path, is_committed=True)
        return None if marker is None else marker.version

    def _check_marker(self) -> None:
        """Remember the version of the marker, which the commit replaces. Raises OutputExists if it may not; and as `_version`."""
        version = self._version()
        if version is not None and version != self._replaced:
            self._check_may_replace()
            if not self._overwrite:
                raise OutputExists(
                    f"{escape(self.path)} exists", hint="choose another name, or replace it: --overwrite"
                )
        self._replaced = version

    def _replaced_data(self) -> tuple[str, ...]:
        """Return the prefixes of the data that the commit will replace. Raises OutputExists if the marker has changed."""
        # Version and content by one request: a commit may come between two.
        marker = self._objects.get(self._marker)
        if self._version_of(marker) != self._replaced:
            raise self._changed_error()
        if marker is None:
            return ()
        return tuple(f"{self.path}/{name}" for name in data_prefixes(marker.data) if not self._job.owns(name))

    def _check_may_replace(self) -> None:
        stores.forget()
        self._may_replace(self.path)

    def _send_beside(self, path: str, name: str) -> None:
        """Send a file that is not in the record, such as config.json.

        Without `overwrite` an existing object of other content is not replaced: it may belong to another job that is about
        to be committed, whose output would then be a mixture.
        """
        if not (self._overwrite or self._job.owns(name)):
            # A conditional put needs the whole file in memory.
            if 2 * storage.getsize(path) <= upload_nbytes(0):
                self._create(name, b"".join(_pieces(path)))
                return
            self._check_free(name, self._objects.head(name))
        self._send(path, name)

    def _create(self, name: str, data: bytes) -> None:
        """Put an object, unless one of the same content exists. Only an object of an aborted job is replaced."""
        replaced: Version | None = None
        for _ in range(3):
            if self._objects.put_if(name, data, {_JOB: self._job.record.hash}, replaced) != "other":
                return
            stored = self._objects.get(name)
            if stored is not None and stored.data == data:
                return
            self._check_free(name, stored)
            replaced = None if stored is None else stored.version
        raise self._changed_error()

    def _check_free(self, name: str, stored: StoredObject | None) -> None:
        """Raise unless an object belongs to this job, or to an aborted one, and so may be replaced."""
        if stored is None or self._job.has_put(stored):
            return
        if _JOB not in stored.tags:
            raise OutputExists(
                f"{escape(f'{self.path}/{name}')} is there, with other content",
                hint="choose another name, or replace it: --overwrite",
            )
        job = _read_job(self._objects, self.path, f"{_home(stored.tags[_JOB])}/{_RECORD}")
        # No record, but a new marker: that job was committed, not aborted.
        if self._version() != self._replaced:
            raise self._changed_error()
        if job is not None:
            raise other_job_error(self.path, job.record, self._job.record)

    def _changed_error(self) -> OutputExists:
        """Return the error for a marker that has changed since this process began."""
        how = "appeared" if self._replaced is None else "changed"
        return OutputExists(
            f"{escape(self.path)} {how} while it was being written: another job was faster",
            hint=f"replace it: run the command again with --overwrite; or remove what this job wrote: `shardkit abort {in_shell(self.path)}`",
        )

    def _check_under_way(self) -> None:
        """Raise JobEnded if the record is gone."""
        if self._objects.head(f"{self._job.home}/{_RECORD}") is None:
            self._version()
            raise JobEnded(self.path, is_committed=False)

    def _finished(self) -> list[int]:
        """Return the numbers of the finished files. Raises JobEnded if the job is no longer under way."""
        sizes = _sizes(self._objects, self._job)
        if f"{self._job.home}/{_RECORD}" not in sizes:
            self._check_under_way()
        return self._job.finished(sizes)

    def _remove_home(self) -> None:
        """Remove the record, then all other objects of the job except the data."""
        self._objects.delete([f"{self._job.home}/{_RECORD}"])
        self._objects.delete(self._objects.sizes(self._job.home))

    def _send(self, path: str, name: str) -> None:
        """Send a file, with the job's hash as a tag."""
        tags = {_JOB: self._job.record.hash}
        with self._sends:
            self._objects.put(name, storage.getsize(path), lambda: _pieces(path), tags)

    def _put(self, name: str, data: bytes) -> None:
        self._objects.put(name, len(data), lambda: [data])


def status(address: str) -> list[JobStatus]:
    """Return the uncommitted jobs of an address.

    Raises:
        SourceError: a record is damaged.
        ResourceError: the store refuses.
    """
    objects, jobs = Objects(address), list[JobStatus]()
    for job in _jobs(objects):
        drafts = zip(job.draft, at_once(objects.get, job.drafts()), strict=True)
        record = replace(job.record, draft={name: each.data for name, each in drafts if each is not None})
        jobs.append(JobStatus(record=record, finished=set(job.finished(_sizes(objects, job)))))
    return jobs


def unnamed_data(address: str, markers: Iterable[str]) -> list[str]:
    """Return the prefixes of data that belongs neither to an output nor to a job that is under way.

    It is data of replaced outputs, or of jobs of an earlier version of shardkit.

    Args:
        address: of the output.
        markers: all names that markers may have.

    Raises:
        SourceError, ResourceError: as `status`.
    """
    objects = Objects(address)
    listing, jobs = objects.listing(), list(_jobs(objects))
    names = "\n".join([*listing.objects, *(f"{folder}/" for folder in listing.folders)])
    named = b"".join(each.data for each in at_once(objects.get, markers) if each is not None)
    unnamed = [
        prefix
        for prefix in data_prefixes(names.encode())
        if prefix.encode() not in named and not any(job.owns(prefix) for job in jobs)
    ]
    # Of two saves at once, an earlier version left the second one as a complete checkpoint with a marker in its folder.
    markers_inside = at_once(lambda prefix: prefix.endswith("/") and objects.head(prefix + METADATA), unnamed)
    return [
        f"{objects.path}/{prefix}"
        for prefix, marker in zip(unnamed, markers_inside, strict=True)
        if not marker
    ]


def is_job_folder(name: str) -> bool:
    """True for the name of an uncommitted job's folder."""
    return _HOME.fullmatch(name) is not None


def scratch_nbytes(sizes: Iterable[int]) -> int:
    """Return the bytes needed for scratch files, by the sizes of the files that this process writes."""
    return sum(sorted(sizes)[-NUM_SENDS:])


def scratch_home(directory: str | None) -> str:
    """Return the directory for scratch files, which need not exist: the user's, or else the first of these that will do.

    They are `scratch` in shardkit's cache (unless caching is disabled), `$TMPDIR`, and /var/tmp. One will do if it can be
    written and is not on a file system in memory (tmpfs), since the files may be larger than the memory.

    Raises:
        UsageError: the user's directory is in a store.
        ResourceError: none of the three will do.
    """
    if directory is not None:
        if stores.is_remote(directory):
            raise UsageError(
                f"--scratch {escape(directory)} is not on this machine", hint="give a local directory"
            )
        return storage.absolute(directory)
    home = cache.home()  # None if caching is disabled, or if the user has no home directory
    candidates = [home and os.path.join(home, "scratch"), os.environ.get("TMPDIR"), _ON_DISK]
    for each in map(storage.absolute, filter(None, candidates)):
        existing = storage.nearest_existing(each)
        if storage.access(existing, os.W_OK) and not storage.is_in_memory(existing):
            return each
    raise ResourceError("no directory on a disk was found for scratch files", hint=NAME_SCRATCH)


@contextlib.contextmanager
def _scratch_errors(directory: str) -> Iterator[None]:
    """Raise ResourceError instead of errors of the local file system. A store's FileNotFoundError has no errno."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise ResourceError(
            f"scratch files in {escape(directory)}: {error.strerror}", hint=NAME_SCRATCH
        ) from error


def _jobs(objects: Objects) -> Iterator[_StoredJob]:
    """Yield the uncommitted jobs."""
    for home in _homes(objects):
        job = _read_job(objects, objects.path, f"{home}/{_RECORD}")
        if job is not None and not job.has_put(objects.head(job.marker)):
            yield job


def _home(job_hash: str) -> str:
    return f".shardkit-{job_hash[:_HASH_DIGITS]}"


def _homes(objects: Objects) -> list[str]:
    """Return the folders of all jobs that have objects at an address, committed ones too."""
    return sorted(filter(is_job_folder, objects.listing().folders))


def _sizes(objects: Objects, job: _StoredJob, places: Iterable[str] | None = None) -> dict[str, int]:
    """Return the bytes of a job's objects, by name. Other objects, of which there may be many, are not listed.

    Args:
        objects: of the output's address.
        job: in that address.
        places: objects of the job's files; by default of the files that have notes.
    """
    sizes = objects.sizes(job.home)
    if places is None:
        files = enumerate(job.record.files)
        places = {job.place(file.name) for number, file in files if job.note(number) in sizes}
    tops = {place: place.partition("/")[0] for place in places if place not in sizes}
    folders = {top for place, top in tops.items() if top != place and job.owns(top)}
    for folder in sorted(folders):
        sizes |= objects.sizes(folder)
    elsewhere = [place for place, top in tops.items() if top not in folders]
    heads = zip(elsewhere, at_once(objects.head, elsewhere), strict=True)
    return sizes | {place: head.size for place, head in heads if head is not None}


def _data(objects: Objects, job: _StoredJob) -> set[str]:
    """Return the existing data objects of a job: its files, and all objects in the folder with its hash."""
    places = {job.place(name) for name in job.names()}
    folder = f"data-{job.record.hash[:_HASH_DIGITS]}"
    return (_sizes(objects, job, places).keys() & places) | objects.sizes(folder).keys()


def _read_job(objects: Objects, path: str, name: str) -> _StoredJob | None:
    """Return the job of a record, or None. Raises SourceError if the record is damaged."""
    stored = objects.get(name)
    if stored is None:
        return None
    record, draft = JobRecord.parse(stored.data, f"{path}/{name}")
    if _MARKER not in stored.tags:
        raise SourceError(f"{escape(f'{path}/{name}')} is damaged: it has no metadata")
    return _StoredJob(record=record, marker=stored.tags[_MARKER], draft=draft)


def _pieces(path: str) -> Iterator[bytes]:
    with storage.open_file(path, "rb") as file:
        while piece := file.read(_PIECE_NBYTES):
            check_interrupt()
            yield piece
