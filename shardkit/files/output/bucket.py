"""The output of one job in a bucket of S3, Google or Azure: whole or absent, and resumed from any machine.

    OUT/model-<hash>-00001-of-00004.safetensors   data; nothing names a file with the job's hash before the commit
    OUT/.shardkit-<hash>/files/config.json        a file without the hash in its name; the commit copies it to its name
    OUT/.shardkit-<hash>/draft/0                  the draft
    OUT/.shardkit-<hash>/job.json                 the record; the job is under way as long as this exists
    OUT/.shardkit-<hash>/7.json                   the note of file 7, put after the file
    OUT/.metadata, or an index                    the marker; one conditional put of it is the commit

No state stays on this machine. Processes of one job put the same bytes under the same names, so they need no lock, and
jobs do not see each other. The tags of a marker name the job that put it, which settles every unclear answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory

from shardkit.core.text import escape, in_shell
from shardkit.core.threads import at_once
from shardkit.errors import ResourceError, SourceError, UsageError
from shardkit.files import cache, storage, stores
from shardkit.files.output.contract import (
    FileNote,
    JobEnded,
    JobRecord,
    JobStatus,
    OutputExists,
    missing_files,
)
from shardkit.files.remote.objects import NO_SUCH_VERSION, Objects, PutResult, StoredObject, Version
from shardkit.files.strict_json import parse_object

_RECORD, _ABORTED = "job.json", "aborted.json"
_JOB, _MARKER = "shardkit_job", "shardkit_marker"
"""Tags: the hash of the job, of a marker and of a record; the name of its marker, of a record."""
_HOME = re.compile(r"(\.shardkit-[0-9a-f]{16})/")
_HASH_DIGITS, _LEAST_DIGITS = 16, 8
"""Of a job's hash, in the name of its folder, and at least in the name of a data file."""
_PIECE_NBYTES = 1 << 20
_NUM_SENT = 2
"""Files that are sent at once by one call; each takes the memory of an upload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredJob:
    """A job, and the names of its objects."""

    record: JobRecord
    """Without the draft, if it was read from the store."""
    marker: str
    draft: Sequence[str]
    """Names in the draft."""

    @property
    def home(self) -> str:
        """The folder of everything but the data."""
        return f".shardkit-{self.record.hash[:_HASH_DIGITS]}"

    @property
    def tags(self) -> dict[str, str]:
        """Of the record."""
        return {_JOB: self.record.hash, _MARKER: self.marker}

    def names(self) -> list[str]:
        """Return the names of all files, and of what is attached to them."""
        return [name for file in self.record.files for name in (file.name, *file.attached)]

    def place(self, name: str) -> str:
        """Return the object of a file before the commit."""
        return name if self.record.hash[:_LEAST_DIGITS] in name else f"{self.home}/files/{name}"

    def note(self, number: int) -> str:
        """Return the object of a note."""
        return f"{self.home}/{number}.json"

    def drafts(self) -> list[str]:
        """Return the objects of the draft."""
        return [f"{self.home}/draft/{number}" for number in range(len(self.draft))]

    def finished(self, sizes: Mapping[str, int]) -> list[int]:
        """Return the numbers of the files that have a note and are there, by the bytes of all objects."""
        return [
            number
            for number, file in enumerate(self.record.files)
            if self.note(number) in sizes
            and sizes.get(self.place(file.name)) == file.size
            and all(self.place(name) in sizes for name in file.attached)
        ]

    def has_put(self, marker: StoredObject | None) -> bool:
        """True if a marker is that of this job."""
        return marker is not None and marker.tags.get(_JOB) == self.record.hash


class BucketOutput:
    """Where the files of one job go. Its methods are those of `JobOutput`.

    Args:
        address: of the output, such as `s3://bucket/model`.
        marker: the name of the file by which readers find the output; the verbs that `join` need not name it.
        may_replace: raises if the output at an address may not be replaced. It is called if there is a marker.
        overwrite: an output may be replaced at all.
    """

    _job: _StoredJob

    def __init__(
        self, address: str, *, marker: str, may_replace: Callable[[str], None], overwrite: bool
    ) -> None:
        self.path = stores.plain(address)
        self._marker, self._may_replace, self._overwrite = marker, may_replace, overwrite
        self._objects = Objects(self.path)
        self._replaced: Version | None = None

    def __enter__(self) -> BucketOutput:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def begin(self, record: JobRecord) -> None:
        """Create the job, or join it."""
        self._job = job = _StoredJob(record=record, marker=self._marker, draft=list(record.draft))
        for turn in range(3):
            try:
                self._look()
            except UsageError:
                if turn:  # it appeared just now: nobody has worked in the new job
                    self._remove_home()
                raise
            if not turn and self._objects.head(f"{job.home}/{_RECORD}") is None:
                drafts = zip(job.drafts(), record.draft.values(), strict=True)
                at_once(lambda each: self._put(*each), drafts, _NUM_SENT)
            # A commit removes the record after it has put the marker. So a record that existed after the look at the
            # marker belongs to a job that was not committed; one that is new may have come after a commit.
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
        """Join the job that is under way and return its record."""
        jobs = [job for job, _ in _jobs(self._objects, self.path)]
        if not jobs:
            return None
        if len(jobs) > 1:
            raise UsageError(
                f"{len(jobs)} jobs are under way for {escape(self.path)}",
                problems=[f"begun by `{escape(job.record.command)}`" for job in jobs],
                hint=f"run the command of one of them, or remove all: `shardkit abort {in_shell(self.path)}`",
            )
        self._job, self._marker = jobs[0], jobs[0].marker
        self._look()
        drafts = [each.data for each in at_once(self._objects.get, self._job.drafts()) if each is not None]
        if len(drafts) < len(self._job.draft):
            self._check_under_way()
            raise SourceError(f"{escape(f'{self.path}/{self._job.home}')}: the draft is damaged")
        return replace(self._job.record, draft=dict(zip(self._job.draft, drafts, strict=True)))

    def notes(self) -> dict[int, FileNote]:
        """Return the notes of the finished files, by number."""
        numbers, notes = self._finished(), dict[int, FileNote]()
        contents = at_once(self._objects.get, map(self._job.note, numbers))
        if None in contents:  # another process has removed one since they were listed: a commit, or `forget`
            self._check_under_way()
        for number, content in zip(numbers, contents, strict=True):
            with contextlib.suppress(SourceError):  # a damaged note counts for nothing
                if content is not None:
                    notes[number] = parse_object(content.data, self._job.note(number))
        return notes

    @contextlib.contextmanager
    def scratch(self) -> Iterator[str]:
        """Give a directory on this machine with the folders of all files. It is removed at the end."""
        home = cache.home()
        directory = storage.scratch_directory(os.path.join(home, "scratch")) if home else TemporaryDirectory()
        with directory as path:
            for folder in self._job.record.folders:
                storage.make_folders(path, folder)
            yield path

    def add(self, scratch: str, number: int, note: FileNote) -> None:
        """Send a finished file, with what is attached to it, and record its note."""
        self._check_under_way()
        file = self._job.record.files[number]
        for name in (*file.attached, file.name):
            self._send(os.path.join(scratch, name), self._job.place(name))
        self._put(self._job.note(number), json.dumps(note).encode())
        for name in (*file.attached, file.name):
            storage.unlink(os.path.join(scratch, name))

    def forget(self, numbers: Iterable[int]) -> None:
        """Remove notes, so that their files are written again."""
        self._check_under_way()
        self._objects.delete(map(self._job.note, numbers))

    def commit(self, beside: str) -> None:
        """Give the finished files, and those in the directory `beside`, their names."""
        error = missing_files(self.path, self._job.record, {number: {} for number in self._finished()})
        if error is not None:
            raise error
        if self._version() != self._replaced:
            raise self._changed()
        paths = [os.path.join(here, name) for here, _, names in storage.walk(beside) for name in names]
        others = {os.path.relpath(path, beside): path for path in paths}
        marker = b"".join(_pieces(others.pop(self._marker)))
        waiting = [name for name in self._job.names() if self._job.place(name) != name]
        at_once(lambda name: self._send(others[name], name), others, _NUM_SENT)
        try:
            at_once(lambda name: self._objects.copy(self._job.place(name), name), waiting)
        finally:  # a file may be missing because the job has ended
            self._check_under_way()
        result = self._objects.put_if(self._marker, marker, {_JOB: self._job.record.hash}, self._replaced)
        if result == "other":
            raise self._changed()
        stores.forget()
        with contextlib.suppress(ResourceError):  # the same command removes the rest when it is run again
            self._remove_home()
        if result == "same":
            raise JobEnded(self.path, is_committed=True)

    def abort(self) -> None:
        """Remove every job of this address that is not committed."""
        for home in _homes(self._objects.sizes()):
            with contextlib.suppress(FileNotFoundError):  # an abort that was killed has removed it
                self._objects.copy(f"{home}/{_RECORD}", f"{home}/{_ABORTED}")
            self._objects.delete([f"{home}/{_RECORD}"])
            sizes = self._objects.sizes()
            with contextlib.suppress(SourceError):  # damaged: its data cannot be found
                job = _read_job(self._objects, self.path, f"{home}/{_ABORTED}")
                if job is not None and not job.has_put(self._objects.head(job.marker)):
                    self._objects.delete(sizes.keys() & {job.place(name) for name in job.names()})
            inside = {name for name in sizes if name.startswith(f"{home}/")}
            self._objects.delete(inside - {f"{home}/{_ABORTED}"})
            self._objects.delete(inside & {f"{home}/{_ABORTED}"})

    def _put_record(self, replaced: Version | None) -> PutResult:
        job = self._job
        return self._objects.put_if(f"{job.home}/{_RECORD}", job.record.dump(), job.tags, replaced)

    def _version(self) -> Version | None:
        """Return the version of the marker; None if there is none. Raises JobEnded if it is that of this job."""
        marker = self._objects.head(self._marker)
        if self._job.has_put(marker):
            self._remove_home()
            raise JobEnded(self.path, is_committed=True)
        return None if marker is None else marker.version

    def _look(self) -> None:
        """Keep the version of the marker. Raises OutputExists if it may not be replaced, and as `_version`."""
        version = self._version()
        if version is not None and version != self._replaced:
            self._may_replace(self.path)
            if not self._overwrite:
                raise OutputExists(
                    f"{escape(self.path)} exists", hint="choose another name, or replace it: --overwrite"
                )
        self._replaced = version

    def _changed(self) -> OutputExists:
        """Return the error of a commit that finds another marker than there was when the process began."""
        how = "appeared" if self._replaced is None else "changed"
        return OutputExists(
            f"{escape(self.path)} {how} while it was being written: another job was faster",
            hint=f"replace it: run the command again with --overwrite; or remove what it wrote: `shardkit abort {in_shell(self.path)}`",
        )

    def _check_under_way(self) -> None:
        """Raise JobEnded if the record is gone."""
        if self._objects.head(f"{self._job.home}/{_RECORD}") is None:
            self._version()
            raise JobEnded(self.path, is_committed=False)

    def _finished(self) -> list[int]:
        sizes = self._objects.sizes()
        if f"{self._job.home}/{_RECORD}" not in sizes:
            self._check_under_way()
        return self._job.finished(sizes)

    def _remove_home(self) -> None:
        """Remove the record and then all else that is not data."""
        self._objects.delete([f"{self._job.home}/{_RECORD}"])
        self._objects.delete(name for name in self._objects.sizes() if name.startswith(f"{self._job.home}/"))

    def _send(self, path: str, name: str) -> None:
        self._objects.put(name, storage.getsize(path), lambda: _pieces(path))

    def _put(self, name: str, data: bytes) -> None:
        self._objects.put(name, len(data), lambda: [data])


def status(address: str) -> list[JobStatus]:
    """Return the jobs of an address that are not committed, with their finished files.

    Raises:
        SourceError: a record is damaged.
        ResourceError: the store refuses.
    """
    path = stores.plain(address)
    return [
        JobStatus(record=job.record, finished=set(job.finished(sizes)))
        for job, sizes in _jobs(Objects(path), path)
    ]


def _jobs(objects: Objects, path: str) -> Iterator[tuple[_StoredJob, Mapping[str, int]]]:
    """Yield the jobs that are under way, each with the bytes of all objects."""
    sizes = objects.sizes()
    for home in _homes(sizes):
        job = _read_job(objects, path, f"{home}/{_RECORD}")
        if job is not None and not job.has_put(objects.head(job.marker)):
            yield job, sizes


def _homes(names: Iterable[str]) -> list[str]:
    return sorted({match[1] for name in names if (match := _HOME.match(name))})


def _read_job(objects: Objects, path: str, name: str) -> _StoredJob | None:
    """Return the job of a record; None if there is none. Raises SourceError if it is damaged."""
    found = objects.get(name)
    if found is None:
        return None
    record, draft = JobRecord.parse(found.data, f"{path}/{name}")
    if _MARKER not in found.tags:
        raise SourceError(f"{escape(f'{path}/{name}')} is damaged: it has no metadata")
    return _StoredJob(record=record, marker=found.tags[_MARKER], draft=draft)


def _pieces(path: str) -> Iterator[bytes]:
    with storage.open_file(path, "rb") as file:
        while piece := file.read(_PIECE_NBYTES):
            yield piece
