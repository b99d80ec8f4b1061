"""The place where `save` writes: a directory that is renamed to the destination, or a folder in a store.

A save is a job of `files/output`. Rank 0 begins and commits it, and sends the place to all ranks, which write their
files there. In a store the commit is one request, which writes a `.metadata` that names the files in the folder. A
save cannot be resumed, because values change in training. So each save has a random hash of its own.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import time
import warnings
from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory
from typing import TypeVar

from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan

from shardkit.core.text import escape, in_shell
from shardkit.errors import ResourceError, ShardkitError, UsageError
from shardkit.files import manifest, storage
from shardkit.files.location import location_of
from shardkit.files.output.bucket import BucketOutput
from shardkit.files.output.contract import JobEnded, JobRecord, OutputExists
from shardkit.files.output.local import LocalOutput, is_free
from shardkit.files.remote import objects
from shardkit.files.strict_json import read_small
from shardkit.formats.dcp import METADATA
from shardkit.formats.owned import OutputKind, find_foreign, output_in
from shardkit.operations.destination import check_destination, check_replaceable, check_target

_MAX_METADATA = 1 << 30
_R = TypeVar("_R")


class SaveJob:
    """Rank 0's side of a save: it begins and commits the job.

    On a disk all ranks write into a directory that rank 0 creates, with a path that no other job ever has. A late rank
    therefore fails instead of writing into the next save. In a store the names of files differ between saves.

    Raises:
        UsageError: the destination exists or cannot be written.
        ResourceError: it cannot be created.
    """

    def __init__(self, path: str, *, overwrite: bool) -> None:
        self._overwrite, self._is_ended = overwrite, False
        job, self._folder = secrets.token_hex(32), ""
        self._output: LocalOutput | BucketOutput
        if location_of(path).renames:
            _make_parents(path)
            kind = OutputKind.SHARDED if overwrite else None
            self.path = check_destination(path, None, overwrite=True, kind=kind)
            """The destination, absolute."""
            is_there = not is_free(self.path)
            self._output = LocalOutput(
                self.path,
                may_replace=self._check_replaceable,
                foreign_files=lambda old, new: find_foreign(old, *output_in(new)),
                overwrite=overwrite,
            )
        else:
            self.path, is_there = check_target(path, None, OutputKind.SHARDED, overwrite=overwrite)
            self._folder = f"data-{job[:16]}"
            self._output = BucketOutput(
                self.path, marker=METADATA, may_replace=lambda _: None, overwrite=overwrite
            )
        if is_there and not overwrite:
            raise UsageError(
                f"{escape(path)} exists", hint="choose another name, or replace it: overwrite=True"
            )
        self.home = os.path.join(self.path, self._folder).rstrip("/")
        """Path of the files after the commit."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._output)
            stack.callback(self._discard)
            self._output.begin(
                JobRecord(
                    hash=job,
                    command=f"shardkit.save(model, {self.path!r})",
                    directory="",
                    files=(),
                    output=os.path.basename(self.path),
                )
            )
            is_stored = bool(self._folder)
            directory = TemporaryDirectory() if is_stored else self._output.scratch()
            self._scratch = stack.enter_context(directory)
            self.place = self.home if is_stored else self._scratch
            """Path where all ranks write their files."""
            self.local_directory = os.path.join(self._scratch, self._folder).rstrip("/")
            """Local directory for the files that rank 0 writes: manifest and assets."""
            if is_stored:
                storage.mkdir(self.local_directory)
            self._stack = stack.pop_all()

    def commit(self, metadata: bytes, folder_metadata: bytes) -> None:
        """Make the written files visible as a whole checkpoint.

        Args:
            metadata: `.metadata` from torch's writer.
            folder_metadata: in a store, the `.metadata` to use if it is in the folder itself.

        Raises:
            UsageError: something else is at the destination by now; the error names the place of the new save.
            ResourceError: the system or the store refuses.
        """
        if self._folder:
            storage.write_file(os.path.join(self._scratch, METADATA), metadata)
        try:
            self._output.commit(self._scratch)
        except OutputExists as error:
            self._is_ended = True
            place, hint = self._keep_in_store(folder_metadata) if self._folder else self._keep_on_disk()
            raise UsageError(
                f"{escape(self.path)} was not replaced: the new save is whole, and lies in {escape(place)}",
                problems=[error.message, *error.problems],
                hint=hint,
            ) from error
        except JobEnded as ended:
            if not ended.is_committed:
                raise ResourceError(
                    f"{escape(self.path)}: what was written was removed while the save wrote there",
                    hint="save again",
                ) from ended
        self._is_ended = True
        for warning in self._output.warnings:
            warnings.warn(warning, stacklevel=4)

    def _check_replaceable(self, path: str, new: str) -> None:
        """Raise OutputExists if the directory at the destination, which may be somebody else's by now, has to stay."""
        kind, made_files = output_in(new) if new else (OutputKind.SHARDED, None)
        check_replaceable(path, escape(path), overwrite=self._overwrite, kind=kind, files=made_files)

    def _keep_on_disk(self) -> tuple[str, str]:
        """Give the new save another name; return its path, and a hint for the user."""
        assert isinstance(self._output, LocalOutput)
        hint = "move what is in its way somewhere else, and give the new save the name; or save again"
        try:
            return self._output.keep(self._scratch), hint
        except (OSError, ShardkitError):
            if storage.isdir(self._scratch) and storage.listdir(self._scratch):  # `data` is not complete
                self._is_ended = False
                raise
        place, free = self._output.data, f"{self.path}-new"
        hint = (
            f"first copy it to {in_shell(free)}: where it lies, the next save to {escape(self.path)} removes it, or "
            "gives it that name"
        )
        return place, hint

    def _keep_in_store(self, metadata: bytes) -> tuple[str, str]:
        """Put a `.metadata` into the folder, so that it is a whole checkpoint. Return as `_keep_on_disk`."""
        assert isinstance(self._output, BucketOutput)
        path = os.path.join(self.local_directory, manifest.NAME)
        content = manifest.load(read_small(path, manifest.NAME, manifest.MAX_BYTES), manifest.NAME)
        listed = manifest.describe_bytes(METADATA, metadata, digest=True, sha256=False)
        storage.write_file(path, manifest.sign({**content, "metadata": manifest.to_json(listed)}))
        storage.write_file(os.path.join(self.local_directory, METADATA), metadata)
        self._output.keep(self._scratch)
        return self.place, "read the new save from there, or save again"

    def close(self) -> None:
        """End the save. Written files are removed unless they were committed or kept."""
        self._stack.close()

    def _discard(self) -> None:
        if not self._is_ended:
            # Files that cannot be removed stay hidden. On a disk the next save removes them.
            with contextlib.suppress(OSError, ShardkitError):
                self._output.discard()


def _make_parents(path: str) -> None:
    """Create missing directories above a destination, and sync their names to the disk."""
    parent = above = os.path.dirname(os.path.abspath(path))
    missing = []
    while not storage.lexists(above):
        missing.append(above)
        above = os.path.dirname(above)
    try:
        storage.make_directories(parent)
        for directory in missing:
            storage.sync_directory(os.path.dirname(directory))
    except OSError as error:
        raise ResourceError(
            f"{escape(parent)} cannot be made: {error.strerror}", hint="choose another destination"
        ) from error


def writer_files(place: str) -> FileSystem:
    """Return the file system for torch's writer of this rank.

    Args:
        place: `Lead.place`, from rank 0.
    """
    return _StoreFiles(objects.Objects(place)) if location_of(place).sends else _LocalFiles()


def write_with_retries(files: FileSystem, plan: SavePlan, write: Callable[[], _R]) -> _R:
    """Write this rank's file. In a store, repeat it as a whole after a failure, since single requests are not repeated.

    Args:
        files: result of `writer_files`.
        plan: torch's plan of this rank.
        write: writes the file.
    """
    if not isinstance(files, _StoreFiles):
        return write()
    tensors = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    nbytes = sum(tensor.chunk.sizes.numel() * tensor.properties.dtype.itemsize for tensor in tensors)
    files.expected_nbytes = nbytes * 9 // 8
    for turn in range(objects.NUM_PUTS):
        try:
            return write()
        except ShardkitError:
            if turn + 1 == objects.NUM_PUTS:
                raise
        time.sleep(objects.FIRST_PAUSE_S * 2**turn)
    raise AssertionError


def read_metadata(files: FileSystem, place: str) -> bytes:
    """Return the `.metadata` that torch's writer has written."""
    path = os.path.join(place, METADATA)
    return files.small[path] if isinstance(files, _StoreFiles) else read_small(path, METADATA, _MAX_METADATA)


class _LocalFiles(FileSystem):
    """Files on a disk, for torch's writer."""

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: rank 0 has created the directory, and if it was removed since, it must not be created again."""


class _StoreFiles(FileSystem):
    """Files in a store, for torch's writer. Each is sent while it is written.

    `.metadata` stays in memory, because writing it is the commit.

    Args:
        folder: the folder for the files.
    """

    def __init__(self, folder: objects.Objects) -> None:
        self._folder = folder
        self.small: dict[str, bytes] = {}
        self.expected_nbytes = 0
        """Estimated size of the file that this rank writes, not less than its real size."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file for writing."""
        name = os.path.basename(path)
        if name.startswith(METADATA):
            with io.BytesIO() as small:
                yield small
                self.small[str(path)] = small.getvalue()
            return
        with self._folder.writing(name, self.expected_nbytes) as stream:
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """Return the path of a file in a directory."""
        return os.path.join(str(path), suffix)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file that is in memory."""
        self.small[str(new_path)] = self.small.pop(str(path))

    def init_path(self, path: str | os.PathLike[str]) -> str:
        """Return a path as a string."""
        return str(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: a store has no directories."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True for a path of a store."""
        return location_of(checkpoint_id).sends

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """True for a file that is in memory. The folder itself is always new, so it does not exist."""
        return str(path) in self.small

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Remove a file from memory."""
        del self.small[str(path)]
