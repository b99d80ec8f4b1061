"""Writing an output into a store: what a staging directory and a rename are on a disk.

    probe the store -> send the files, front to back -> describe -> ask for every file -> send what lies beside -> the marker

Nothing that a reader looks for appears before the marker, and that is one request. A run that died leaves data that nobody
sees, which the next one takes over, or `shardkit status --abort` removes.
"""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from shardkit.core.text import escape, in_shell
from shardkit.core.threads import Progress, at_once
from shardkit.errors import IncompleteError, IntegrityError, Interrupted, ResourceError, UsageError
from shardkit.files import storage, stores
from shardkit.files.digest import crc32
from shardkit.files.remote.contract import WrittenObject
from shardkit.files.remote.writers import writer_of
from shardkit.files.uploads import PART_NBYTES, Session
from shardkit.formats.owned import PROBE
from shardkit.operations.uploading.notes import Notes
from shardkit.operations.uploading.place import UploadTarget
from shardkit.transfer.chains import Evidence
from shardkit.transfer.checks import SourceCheck
from shardkit.transfer.execute import Describer, ExecuteOptions, Execution, FileDigest, ReadingExecution
from shardkit.transfer.plan import TransferPlan


class Describe(Protocol):
    """Returns what writes the rest of the files into a directory."""

    def __call__(self, directory: str, /, *, shards: str | None = None) -> AbstractContextManager[Describer]:
        """Return it.

        Args:
            directory: where the rest goes.
            shards: where the described files lie, if not there: a directory of a store, from whose parent they are named.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A job that is to be written into a store."""

    target: UploadTarget
    plan: TransferPlan
    """From `in_order`."""
    plan_hash: str
    """Stands for inputs, options and version; the names of the data have it in them."""
    data_nbytes: Sequence[int]
    """Bytes of all holes of each image."""
    describe: Describe
    options: ExecuteOptions
    """From `into_store`."""
    verb: str
    progress: Progress
    resume: bool
    overwrites: bool
    versions: Mapping[str, str] | None = None
    """Of packages that decided the plan, for whoever goes on."""
    on_resumed: Callable[[Sequence[Mapping[str, str]]], object] = lambda _: None
    """Is told those under which earlier runs wrote what this one takes over."""
    look: Callable[[str], object] = lambda _: None
    """Refuses to replace what lies in a directory by now; asked before anything is sent under a name that others use."""
    computed: str = ""
    """Stands for what was computed for the files; a run goes on only with files that were made of the same."""

    def run(self, check: SourceCheck | None) -> int:
        """Write everything.

        Args:
            check: compares what is read with what the source records.

        Returns:
            How many files an earlier run had finished.

        Raises:
            Interrupted: after a signal; what was finished is kept.
            UsageError: the store has no conditional requests, or somebody else was faster.
            IncompleteError, ResourceError: the store fails; what was finished is kept.
            IntegrityError: as `Execution.run`; nothing of the output is kept.
        """
        check_conditions(self.target.path)
        return _UploadRun(self, check).run()

    def describe_again(self, check: SourceCheck | None) -> None:
        """Describe the output that is there, made of these very files; nothing goes into the store.

        Args:
            check: compares the source, which is read once more for its digests, with what it records.

        Raises:
            IntegrityError, ResourceError: as `Execution.run`.
        """
        shards = self.target.data(self.plan_hash)
        with (
            tempfile.TemporaryDirectory(prefix="shardkit-") as directory,
            self.describe(directory, shards=shards) as descriptions,
        ):
            self.progress.start(self.plan.hole_bytes, "describing")
            execution = ReadingExecution(
                self.plan,
                shards,
                self.options,
                finished={},
                on_finished=lambda digest, _: descriptions.add_file(digest),
                progress=self.progress,
                check=check,
            )
            try:
                descriptions.finish(*execution.run())
            finally:
                self.progress.finish()


class StoredFiles:
    """The files of an output in a store, and what makes an output of them."""

    def __init__(self, upload: Upload) -> None:
        self._upload, self._target = upload, upload.target
        self._store = writer_of(self._target.path)
        self.directory = self._target.data(upload.plan_hash)
        """Where the files lie."""
        self.marker_path = os.path.join(self._target.path, self._target.marker)
        self.marker: bytes | None = None
        """What was sent, or is being sent, as the marker."""
        self.stored: dict[str, WrittenObject] = {}
        """What the store has of each finished file, by name; the CRC-32 is that of what was sent, if it is known."""
        self.beside: list[str] = []
        """Paths of what was sent beside."""
        self._is_named: dict[str, bool] = {}

    def path(self, name: str) -> str:
        """Return the path of a file."""
        return os.path.join(self.directory, name)

    @property
    def is_named(self) -> bool:
        """True if the output that is there is made of these files."""
        there = self._store.head(self.marker_path)
        if there is None:
            return False
        if there.etag not in self._is_named:
            content = self._store.get(self.marker_path)
            self._is_named[there.etag] = (
                content is not None and self._target.mark(self._upload.plan_hash).encode() in content[0]
            )
        return self._is_named[there.etag]

    @property
    def are_committed(self) -> bool:
        """True if the output is made of these files, and all of them are there."""
        if not self.is_named:
            return False
        sizes = dict(self._store.objects(self.directory))
        return all(sizes.get(self.path(image.name)) == image.size for image in self._upload.plan.images)

    def add(self, digest: FileDigest, stored: WrittenObject) -> None:
        """Take note of a file that was sent. May be called from any thread.

        Raises:
            IntegrityError: other bytes were sent.
        """
        if digest.crc32 is not None and stored.crc32 != digest.crc32:
            raise IntegrityError(f"{escape(digest.name)}: other bytes were sent than were written")
        self.stored[digest.name] = stored

    def check_all(self) -> None:
        """Ask the store for every file: somebody may have removed or replaced one.

        Raises:
            IncompleteError: names each file that is not there as it was written.
        """
        names = sorted(self.stored)
        found = at_once(self._store.head, map(self.path, names))
        IncompleteError.raise_for(
            [
                escape(name)
                for name, there in zip(names, found, strict=True)
                if not is_same(there, self.stored[name])
            ],
            f"{escape(self.directory)}: files were removed or replaced while others were written",
            hint="run the same command again; two runs of one job should not write at the same time",
        )

    def commit(
        self, directory: str, replaced: str | None, *, last_look: Callable[[], object] = lambda: None
    ) -> None:
        """Send what lies beside the data, then the marker.

        Args:
            directory: what lies beside, and the marker.
            replaced: ETag of the marker that is replaced; None if there must be none.
            last_look: called right before the marker is sent; raises if it may not be any more.

        Raises:
            UsageError: somebody else was faster, or other files are there.
        """
        if self._upload.overwrites and self._target.is_flat:
            stores.forget()
            self._upload.look(self._target.path)
        names = sorted(
            os.path.relpath(os.path.join(here, name), directory)
            for here, _, found in storage.walk(directory)
            for name in found
        )
        names.remove(self._target.marker)
        at_once(lambda name: self._send(os.path.join(directory, name), self.path(name)), names)
        self.marker = data = _read(os.path.join(directory, self._target.marker))
        last_look()
        shown = escape(self._target.path)
        if self._store.put_if(self.marker_path, data, int(crc32(data)), replaced):
            return
        if replaced is not None:
            raise UsageError(f"{shown} changed while another was being written: it was not replaced")
        raise self.was_slower()

    def was_slower(self) -> UsageError:
        """Return the error of a run that finds an output where none was when it began."""
        return UsageError(
            f"{escape(self._target.path)} appeared while it was being written: another run was faster"
        )

    def _send(self, file: str, path: str) -> None:
        """Send a file that lies beside the data.

        Raises:
            UsageError: another file is there, in a directory that others may have written to.
        """
        self.beside.append(path)
        if storage.getsize(file) > PART_NBYTES:
            storage.send(file, path)
            return
        data = _read(file)
        crc = int(crc32(data))
        if not self._target.is_flat or self._upload.overwrites:
            self._store.put(path, data, crc)
        elif not self._store.put_if(path, data, crc, None):
            check_same(path, data)

    def remove(self) -> None:
        """Remove what was written, unless the output that is there is made of it."""
        if not self.is_named:
            own = [] if self._target.is_flat else self.beside
            at_once(self._store.delete, [*own, *map(self.path, self.stored)])


def is_same(there: WrittenObject | None, stored: WrittenObject) -> bool:
    """True if an object is the one that was written: it has the same ETag, or else the same CRC-32."""
    if there is None or there.size != stored.size:
        return False
    return there.etag == stored.etag or (there.crc32 is not None and there.crc32 == stored.crc32)


class _UploadRun:
    """One run of an upload."""

    def __init__(self, upload: Upload, check: SourceCheck | None) -> None:
        self._upload, self._check = upload, check
        self._files = StoredFiles(upload)
        self._notes = Notes(
            upload.target.path,
            upload.plan_hash + upload.computed,
            resume=upload.resume,
            versions=upload.versions,
        )
        self._session = Session(
            self._files.directory,
            known=self._notes.begun,
            on_begin=self._notes.add_upload,
            before_object=self._check_not_read,
        )

    def _check_not_read(self) -> None:
        """Refuse to replace a file of an output that has appeared: what was computed may have other bits in it.

        Raises:
            UsageError: another run of this job was faster.
        """
        if self._upload.computed and self._files.is_named:
            raise self._files.was_slower()

    def run(self) -> int:
        upload, files = self._upload, self._files
        try:
            upload.progress.start(upload.plan.hole_bytes, upload.verb)
            finished = self._finished()
            with self._session, tempfile.TemporaryDirectory(prefix="shardkit-") as directory:
                self._move(directory, finished)
                files.check_all()
                self._check_not_read()
                files.commit(directory, upload.target.etag)
        except KeyboardInterrupt as interrupt:
            if files.marker is not None and writer_of(files.marker_path).has(files.marker_path, files.marker):
                return len(finished)
            raise interrupted(
                interrupt, upload.target, "what was finished is kept in the store"
            ) from interrupt
        except (IncompleteError, ResourceError):
            raise
        except BaseException:
            self._session.abort()
            files.remove()
            self._notes.remove()
            raise
        finally:
            upload.progress.finish()
            self._notes.close()
        self._notes.remove()
        return len(finished)

    def _finished(self) -> dict[str, FileDigest]:
        """Return the files that an earlier run finished and the store still has."""
        plan, found, versions = self._upload.plan, dict[str, FileDigest](), list[Mapping[str, str]]()
        numbers = {image.name: number for number, image in enumerate(plan.images)}
        noted = [each for name, each in self._notes.files.items() if name in numbers]
        there = at_once(
            writer_of(self._files.directory).head, [self._files.path(each.digest.name) for each in noted]
        )
        for each, stored in zip(noted, there, strict=True):
            number, digest = numbers[each.digest.name], each.digest
            if stored is None or not is_same(stored, WrittenObject(digest.size, each.etag, digest.crc32)):
                continue
            if plan.images[number].size == digest.size and (
                self._check is None or self._check.load(each.source)
            ):
                found[digest.name] = digest
                versions.append(each.versions)
                self._files.stored[digest.name] = stored
                self._upload.progress.advance(self._upload.data_nbytes[number])
        self._upload.on_resumed(versions)
        return found

    def _move(self, directory: str, finished: Mapping[str, FileDigest]) -> None:
        """Send the files, and describe them into a directory."""
        upload, check = self._upload, self._check
        with upload.describe(directory, shards=self._files.directory) as descriptions:

            def on_finished(digest: FileDigest, read: Evidence) -> None:
                stored = self._session.stored[self._files.path(digest.name)]
                self._files.add(digest, stored)
                self._notes.add_file(digest, stored.etag, None if check is None else check.dump(read))
                descriptions.add_file(digest)

            execution = Execution(
                upload.plan,
                self._files.directory,
                upload.options,
                finished=finished,
                on_finished=on_finished,
                progress=upload.progress,
                check=check,
            )
            descriptions.finish(*execution.run())


def interrupted(interrupt: KeyboardInterrupt, target: UploadTarget, kept: str) -> Interrupted:
    """Return the error that reports a signal.

    Args:
        interrupt: by a signal.
        target: what was being written.
        kept: says what is left for the next run.
    """
    return Interrupted(
        f"interrupted: {escape(target.path)} was not made; {kept}",
        signum=getattr(interrupt, "signum", signal.SIGINT),
        hint=f"run the same command again to resume, or give it up: "
        f"`shardkit status {in_shell(target.path)} --abort`",
    )


def check_beside(path: str, files: Mapping[str, Callable[[], bytes]]) -> None:
    """Refuse files that are there already with another content.

    Args:
        path: the directory in the store.
        files: what each file is going to hold, by name.

    Raises:
        UsageError: names the first such file.
    """
    at_once(lambda name: check_same(os.path.join(path, name), files[name]()), files)


def check_same(path: str, data: bytes) -> None:
    """Refuse to replace a file that says something else.

    Raises:
        UsageError: it does.
    """
    found = writer_of(path).get(path)
    if found is not None and found[0] != data:
        raise UsageError(
            f"{escape(path)} is there, with other content",
            hint="choose another name, or replace it: --overwrite",
        )


def check_conditions(path: str) -> None:
    """Find out, with an object of our own, whether a store carries out conditional requests.

    Raises:
        UsageError: it does not.
    """
    probe = os.path.join(path, PROBE + secrets.token_hex(8))
    store = writer_of(path)
    try:
        holds = store.put_if(probe, b"1", int(crc32(b"1")), None) and not store.put_if(
            probe, b"2", int(crc32(b"2")), None
        )
        other = '"00000000000000000000000000000000"'
        holds = holds and not store.put_if(probe, b"3", int(crc32(b"3")), other)
    finally:
        store.delete(probe)
    if not holds:
        raise UsageError(
            f"{escape(path)}: the store ignores conditions (If-None-Match, If-Match), so that of two runs that end at the "
            "same time both would think that theirs is the output",
            hint="write into a local directory, and copy that with the store's own tool",
        )


def _read(path: str) -> bytes:
    with storage.open_file(path, "rb") as file:
        data: bytes = file.read()
    return data
