"""One process that writes into a store: part 1 of 1, with notes and records of factors on this machine.

What a run on a disk has beside its output, a run into a store has in the cache (`local_records`), but for the files. Notes
as objects, such as parts have, would take two requests more for each file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardkit.errors import IncompleteError, Interrupted, ResourceError, ShardkitError
from shardkit.files import storage
from shardkit.files.shared import SharedStaging, note_name
from shardkit.files.staging import nothing
from shardkit.files.uploads import Session
from shardkit.operations.parts.agreement import Agreement
from shardkit.operations.parts.alone import Alone
from shardkit.operations.parts.notes import Note
from shardkit.operations.uploading.in_store import InStore
from shardkit.operations.uploading.notes import UploadNotes
from shardkit.operations.uploading.run import StoredFiles, Upload, check_conditions
from shardkit.osft.phase import PhaseAt


class RunInStore(InStore):
    """A job that one process carries out, or several of this machine that were started alike.

    Args:
        upload: what is written.
        agreement, phase: as for `Divided`.
        place: path beside which this machine has what runs for this output share; its directory exists.
        resume: go on with what an earlier run has sent.
    """

    def __init__(
        self, upload: Upload, agreement: Agreement, phase: PhaseAt | None, *, place: str, resume: bool
    ) -> None:
        if phase is not None and StoredFiles(upload).is_named:
            # Whoever reads the output that is there must not get the factors of two machines.
            by = f"{upload.plan_hash} {agreement.ingredients.get('computed_by')}"
            upload = replace(upload, plan_hash=hashlib.sha256(by.encode()).hexdigest())
        self.staging = SharedStaging.of_plan(place, agreement.plan, nothing, is_run=True)
        super().__init__(upload, self.staging, agreement, phase, is_run=True)
        self.alone, self._resume, self._work = Alone(self.staging, agreement), resume, ""

    @property
    def left(self) -> str:
        what = "what was finished is kept in the store"
        return what if self._phase is None else f"what was computed is kept here, and {what}"

    @property
    def is_committed(self) -> bool:
        """True if the output is made of these files, and was not when this process began."""
        there = self._store.head(self._files.marker_path)
        is_new = there is not None and there.etag != self._upload.target.etag
        return is_new and self._files.are_committed

    @property
    def is_left(self) -> bool:
        return False

    def _begin(self) -> bool:
        check_conditions(self._destination)  # before hours of computing
        try:
            if self.alone.begin() is None:
                raise self._given_up()
        except ResourceError:
            if self._phase is not None:
                raise
        return True

    @contextlib.contextmanager
    def _writing(self) -> Iterator[str]:
        """Give the directory of the store. Uploads that are not finished go on when the run is started again."""
        notes = UploadNotes(self._destination, self._agreement.plan, resume=self._resume)
        session = self._session = Session(
            self._files.directory,
            known=notes.begun,
            on_begin=notes.add_upload,
            before_object=self._check_not_read,
        )
        try:
            with self._workplace(), session:
                yield self._files.directory
        except (IncompleteError, ResourceError, KeyboardInterrupt):
            raise
        except BaseException:
            session.abort()
            notes.remove()
            raise
        else:
            notes.remove()
        finally:
            notes.close()

    @contextlib.contextmanager
    def _workplace(self) -> Iterator[None]:
        """Let notes be written, if they can be: without some a later run takes longer, but factors need their place."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(*[OSError] if self._phase is None else []):
                self._work = stack.enter_context(self.staging.workplace())
            yield

    @contextlib.contextmanager
    def _room_for_records(self) -> Iterator[str]:
        directory = os.path.join(self._work, "factors")
        storage.mkdir(directory)
        yield directory

    def _check_not_read(self) -> None:
        """Refuse to replace a file of an output that has appeared: what was computed may have other bits in it.

        Raises:
            UsageError: another run of this job was faster.
        """
        if self._phase is not None and self._files.is_named:
            raise self._files.was_slower()

    def _say(self, name: str, content: bytes) -> None:
        self._keep(self.staging.parts, name, content)

    def _write_note(self, number: int, content: bytes) -> None:
        self._keep(self.staging.done, note_name(number), content)

    def _keep(self, directory: str, name: str, content: bytes) -> None:
        with contextlib.suppress(OSError):
            if self._work:
                self.staging.write_note(self._work, directory, name, content, is_synced=False)

    def _publish(self, directory: str, number: int, note: Note) -> None:
        super()._publish(directory, number, note)
        self._own[note.digest.name] = note

    def _notes(self, numbers: Sequence[int]) -> Iterator[tuple[int, Note]]:
        own = {number: note for number in numbers if (note := self._own.get(self._images[number].name))}
        yield from own.items()
        yield from super()._notes([number for number in numbers if number not in own])

    def _forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._own.pop(self._images[number].name, None)
        super()._forget(numbers)

    def _missing(self) -> list[int]:
        return [number for number in super()._missing() if self._images[number].name not in self._own]

    def _is_open(self) -> bool:
        return not self._is_over()

    def _has_another_committed(self) -> bool:
        return self._is_over()

    def _is_over(self) -> bool:
        return self.is_committed and not self.has_made

    def _replaced(self) -> str | None:
        return self._upload.target.etag

    def after(self, error: BaseException) -> None:
        """Remove what was sent and computed, unless the run can go on with it, or another one does."""
        if isinstance(error, IncompleteError | Interrupted | ResourceError) or not self.staging.is_over:
            return
        with contextlib.suppress(OSError, ShardkitError):
            self.staging.give_up()
            self._files.remove()

    def clean_up(self, *, keeps_mark: bool) -> None:
        """Remove what the run has on this machine, once the output is there, unless another one is at work there."""
        if self.staging.is_over:
            self.staging.remove()
