"""The files of an output in a store, and the requests that make an output of them.

Nothing that a reader looks for appears before the marker, and that is one request. A run that died leaves data that nobody
sees, which the next one goes on with, or `shardkit status --abort` removes.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from shardkit.core.text import escape
from shardkit.core.threads import Progress, at_once
from shardkit.errors import IncompleteError, IntegrityError, UsageError
from shardkit.files import storage, stores
from shardkit.files.digest import crc32
from shardkit.files.remote.contract import WrittenObject
from shardkit.files.remote.writers import writer_of
from shardkit.files.uploads import PART_NBYTES
from shardkit.formats.owned import PROBE
from shardkit.operations.uploading.place import UploadTarget
from shardkit.transfer.checks import SourceCheck
from shardkit.transfer.execute import Describer, ExecuteOptions, FileDigest, ReadingExecution
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
    progress: Progress
    overwrites: bool
    look: Callable[[str], object] = lambda _: None
    """Refuses to replace what lies in a directory by now; asked before anything is sent under a name that others use."""

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
