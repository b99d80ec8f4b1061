"""Where `save` writes: a directory that is then renamed, or a folder of a store that `.metadata` then names.

Rank 0 begins a save and ends it. What it says of the place goes to all ranks, which write their files there.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan

from shardkit._version import __version__
from shardkit.core.text import escape, in_shell
from shardkit.errors import ResourceError, ShardkitError, UsageError
from shardkit.files import manifest, storage, stores, uploads
from shardkit.files.digest import crc32
from shardkit.files.location import location_of
from shardkit.files.place.store import check_conditions
from shardkit.files.remote.writers import writer_of
from shardkit.files.shared import SharedStaging, remove_runs
from shardkit.files.staging import Owner
from shardkit.files.strict_json import read_small
from shardkit.formats.dcp import METADATA
from shardkit.formats.owned import Made, OutputKind, content_of, is_text, refusal
from shardkit.operations.destination import check_destination
from shardkit.operations.parts.agreement import SAVE, Agreement, Command
from shardkit.operations.parts.foreign import foreign_in
from shardkit.operations.uploading.place import check_target

_MAX_METADATA = 1 << 30
_PIECE_NBYTES = 1 << 20  # memory for it is given back once its part is sent


class _DiskLead:
    """What rank 0 has of a save on a disk.

    It is a run of its own at the place: all ranks write into its `data`, and nobody else joins it or goes on with it.
    """

    def __init__(self, path: str, overwrite: bool) -> None:
        _make_parents(path)
        self.path = self.home = check_destination(path, None, overwrite=overwrite)
        """The destination, absolute, where the files lie once they are committed."""
        remove_runs(self.path, foreign_in, but="")
        plan = secrets.token_hex(8)
        self._staging = SharedStaging.of_plan(self.path, plan, foreign_in, is_run=True)
        self._staging.look = self._look
        self._made: Made = {}
        self.place, self._is_kept = self._staging.data, False
        """The directory in which all ranks write, and whether it stays whatever happens."""
        try:
            self._owner = Owner.new_run()
        except OSError as error:
            raise ResourceError(f"cannot write beside {escape(self.path)}: {error.strerror}") from error
        command = Command(verb=SAVE, options={})
        agreement = Agreement(
            plan=plan, version=__version__, ingredients={}, command=command, typed="", num_parts=1, files=()
        )
        is_made = self._staging.create(agreement.dump(), (), self._owner)
        assert is_made  # nobody else makes one of this name

    def commit(self, metadata: bytes, *, overwrite: bool, beside: bytes = b"") -> None:
        """Make what was written visible, whole.

        Args:
            metadata: `.metadata`, as torch's writer has made it.
            overwrite: what was at the destination may be replaced.
            beside: in a store, `.metadata` as it would lie beside the files.

        Raises:
            UsageError: something else is at the destination by now; says where what was written lies, whole.
            ResourceError: the system or the store refuses.
        """
        try:
            self._made = self._texts()
            # It may be somebody else's by now.
            check_destination(self.path, None, overwrite=overwrite, made=self._made)
            with self._staging.workplace() as work:
                is_made = self._staging.commit(work, storage.listdir(self.place), overwrite=overwrite)
        except UsageError as error:
            raise self._kept(error) from error
        except OSError as error:
            raise ResourceError(f"cannot write to {escape(self._staging.path)}: {error.strerror}") from error
        if not is_made:
            raise ResourceError(f"{escape(self._staging.path)} was removed while the save wrote there")
        # The save is there, whatever stays beside it; the next one removes that.
        with contextlib.suppress(ResourceError):
            self._staging.remove()
        self._staging.leave(self._owner)

    def _look(self, path: str) -> None:
        refused = refusal(path, escape(self.path), OutputKind.SHARDED, self._made)
        if refused is not None:
            raise refused

    def _texts(self) -> Made:
        """Return the texts that this save writes; they are read now, as they move when they are committed."""
        texts = dict[str, Callable[[], bytes]]()
        for here, _, names in storage.walk(self.place):
            for path in (os.path.join(here, name) for name in names if is_text(name)):
                texts[os.path.relpath(path, self.place)] = partial(bytes, content_of(path)())
        return texts

    def _kept(self, error: UsageError) -> UsageError:
        """Keep the new save whole, beside what appeared at the destination meanwhile, and return what says where."""
        self._is_kept = True
        hint = "move what is in its way somewhere else, and give the new save the name; or save again"
        try:
            place = self._staging.keep()
        except (OSError, ShardkitError):
            place, free = self.place, f"{self.path}-new"
            hint = f"first `mv {in_shell(place)} {in_shell(free)}`: another save to {escape(self.path)} removes it where it lies"
        return UsageError(
            f"{escape(self.path)} was not replaced: the new save is whole, and lies in {escape(place)}",
            problems=[error.message, *error.problems],
            hint=hint,
        )

    def discard(self) -> None:
        """Remove what was written, unless it was committed."""
        self._staging.leave(self._owner)
        with contextlib.suppress(OSError, ShardkitError):
            if not (self._is_kept or self._staging.is_committed):
                self._staging.give_up()


class _StoreLead:
    """What rank 0 has of a save in a store; as `_DiskLead`, but the files lie where they were written."""

    def __init__(self, path: str, overwrite: bool) -> None:
        self._target = check_target(path, None, OutputKind.SHARDED, overwrite=overwrite)
        check_conditions(self._target.path)
        self.path = self._target.path
        self._folder = f"data-{secrets.token_hex(8)}"
        self.place = self.home = os.path.join(self.path, self._folder)
        self._marker, self._is_kept = os.path.join(self.path, METADATA), False

    def commit(self, metadata: bytes, *, overwrite: bool, beside: bytes = b"") -> None:
        if not writer_of(self._marker).put_if(
            self._marker, metadata, int(crc32(metadata)), self._target.etag
        ):
            what = "changed" if self._target.etag is not None else "appeared"
            self._keep(beside)
            raise UsageError(
                f"{escape(self.path)} {what} while it was being saved: it was not replaced; "
                f"the new save is whole, and lies in {escape(self.place)}",
                hint="read the new save from there, or save again",
            )
        stores.forget()

    def _keep(self, metadata: bytes) -> None:
        """Make a whole checkpoint of the folder: its own `.metadata` lies in it, written last."""
        self._is_kept = True
        path = os.path.join(self.place, manifest.NAME)
        content = manifest.load(read_small(path, manifest.NAME, manifest.MAX_BYTES), manifest.NAME)
        listed = manifest.describe_bytes(METADATA, metadata, digest=True, sha256=False)
        storage.write_file(path, manifest.sign({**content, "metadata": manifest.to_json(listed)}))
        storage.write_file(os.path.join(self.place, METADATA), metadata)
        stores.forget()

    def discard(self) -> None:
        if self._is_kept:
            return
        # What cannot be asked or removed stays: nobody sees it, and `shardkit abort` removes it.
        with contextlib.suppress(ShardkitError, OSError):
            stored = writer_of(self._marker).get(self._marker)
            if stored is None or self._folder.encode() not in stored[0]:
                stores.forget()
                storage.remove_tree(self.place)


Lead = _DiskLead | _StoreLead


def begin(path: str, *, overwrite: bool) -> Lead:
    """Begin a save.

    Raises:
        UsageError: the destination exists or cannot be written.
        ResourceError: it cannot be made.
    """
    return _DiskLead(path, overwrite) if location_of(path).renames else _StoreLead(path, overwrite)


def _make_parents(path: str) -> None:
    """Make missing directories above a destination, and sync their names to the disk."""
    parent = above = os.path.dirname(os.path.abspath(path))
    missing = []
    while not storage.lexists(above):
        missing.append(above)
        above = os.path.dirname(above)
    try:
        storage.make_directories(parent)
        for made in missing:
            storage.sync_directory(os.path.dirname(made))
    except OSError as error:
        raise ResourceError(
            f"{escape(parent)} cannot be made: {error.strerror}", hint="choose another destination"
        ) from error


@contextlib.contextmanager
def writing_to(place: str) -> Iterator[FileSystem]:
    """Give what makes this rank's files in a place; uploads that were not completed are ended.

    Args:
        place: of the rank that leads.
    """
    if not location_of(place).sends:
        yield FileSystem()
        return
    with uploads.Session(place):
        yield _StoreFiles()


def expect(files: FileSystem, plan: SavePlan) -> None:
    """Tell what makes files how large this rank's file gets, as far as its tensors tell."""
    if isinstance(files, _StoreFiles):
        tensors = [item.tensor_data for item in plan.items if item.tensor_data is not None]
        nbytes = sum(tensor.chunk.sizes.numel() * tensor.properties.dtype.itemsize for tensor in tensors)
        files.expected_nbytes = nbytes * 9 // 8


def read_metadata(files: FileSystem, place: str) -> bytes:
    """Return the `.metadata` that torch's writer has made."""
    path = os.path.join(place, METADATA)
    return files.small[path] if isinstance(files, _StoreFiles) else read_small(path, METADATA, _MAX_METADATA)


class _StoreFiles(FileSystem):
    """Files of a store, as torch's writer makes them: each is sent while it is written.

    `.metadata` is kept in memory; it is the commit.
    """

    def __init__(self) -> None:
        self.small: dict[str, bytes] = {}
        self.expected_nbytes = 0
        """Of the file that this rank writes, or somewhat more."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Give a file to write."""
        path = str(path)
        if os.path.basename(path).startswith(METADATA):
            with io.BytesIO() as small:
                yield small
                self.small[path] = small.getvalue()
            return
        fd = storage.open_fd(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        stream = _SentStream(fd, self.expected_nbytes)
        try:
            yield stream
            storage.fsync(fd)
        except Exception as error:
            if stream.failure is None:
                raise
            raise stream.failure from error  # after a failed write torch closes its archive, and hides why
        finally:
            storage.close_fd(fd)

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """Return the path of a file in a directory."""
        return os.path.join(str(path), suffix)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a small file."""
        self.small[str(new_path)] = self.small.pop(str(path))

    def init_path(self, path: str | os.PathLike[str]) -> str:
        """Return a path as it is used here."""
        return str(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: a store has no directories."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True for a path of a store."""
        return location_of(checkpoint_id).sends

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """True for a small file that was made; the place itself is new."""
        return str(path) in self.small

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Remove a small file."""
        del self.small[str(path)]


class _SentStream(io.RawIOBase):
    """A file that is written front to back. A part of it is sent as soon as something follows.

    Args:
        fd: of the file.
        expected_nbytes: it may get so many, and not many more.
    """

    def __init__(self, fd: int, expected_nbytes: int) -> None:
        self._fd, self._offset, self._settled = fd, 0, 0
        self.failure: Exception | None = None
        """What a write failed with."""
        self._step = uploads.opened(fd).expect(expected_nbytes)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def write(self, data: Any) -> int:
        try:
            return self._write(data)
        except Exception as error:
            self.failure = self.failure or error
            raise

    def _write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE_NBYTES):
            self._offset += storage.pwrite(self._fd, view[start : start + _PIECE_NBYTES], self._offset)
            while self._offset > self._settled + self._step:
                storage.settle(self._fd, self._settled, self._settled + self._step)
                self._settled += self._step
        return len(view)
