"""Writing into a store: files are sent to where they stay, and one request makes an output of them.

    the store carries out conditions -> send the files, a note of each -> describe -> ask for every file -> what lies beside
    -> the marker

Of parts, `files/shared_store` has what they share meanwhile, and nobody removes a file: another process may have noted it,
or it may be in the output by now. What nobody has committed is left to `status --abort` and `gc`. Of a run of one process,
`run_in_store` has what is its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from shardkit.core.text import escape, in_shell
from shardkit.core.threads import at_once
from shardkit.errors import IntegrityError, ResourceError, ShardkitError, SourceError, UsageError
from shardkit.files.remote.contract import WrittenObject
from shardkit.files.remote.writers import writer_of
from shardkit.files.shared import SharedStaging
from shardkit.files.shared_store import StoredStaging, shared_in_store
from shardkit.files.strict_json import parse_object
from shardkit.files.uploads import Session
from shardkit.operations.parts.agreement import Agreement, read_all
from shardkit.operations.parts.divided import Divided, PartResult
from shardkit.operations.parts.notes import Note, load_note
from shardkit.operations.parts.part import Part
from shardkit.operations.uploading.local_records import remove_records, room_for_records
from shardkit.operations.uploading.notes import UploadNotes
from shardkit.operations.uploading.run import StoredFiles, Upload, check_conditions, is_same
from shardkit.osft.phase import PhaseAt

_turns: dict[str, threading.Lock] = {}
"""By directory: which of the parts that are threads of this process writes there."""
_NOTES_AT_ONCE = 64
_MOST_TRIES = 20  # each only if another process was in the middle of a commit


class InStore(Divided):
    """A job whose files go into a store.

    Args:
        upload: what is written.
        notebook: has the notes.
        agreement, phase, is_run: as for `Divided`.
    """

    def __init__(
        self,
        upload: Upload,
        notebook: StoredStaging | SharedStaging,
        agreement: Agreement,
        phase: PhaseAt | None,
        *,
        is_run: bool = False,
    ) -> None:
        moving = (upload.plan, upload.data_nbytes, upload.options, upload.progress, phase)
        super().__init__(upload.target.path, notebook, agreement, *moving, is_run=is_run)
        self._store = writer_of(upload.target.path)
        self._upload, self._files, self._notebook = upload, StoredFiles(upload), notebook
        self._session: Session | None = None

    @property
    def has_made(self) -> bool:
        files = self._files
        return files.marker is not None and self._store.has(files.marker_path, files.marker)

    @abstractmethod
    def _write_note(self, number: int, content: bytes) -> None:
        """Note that a file is finished."""

    @abstractmethod
    def _is_over(self) -> bool:
        """True if another process has made the output of these files."""

    @abstractmethod
    def _replaced(self) -> str | None:
        """Return the ETag of the marker that is to be replaced, as far as it may be; None if there must be none."""

    def _last_look(self) -> object:
        """Raise if the marker may not be sent any more."""

    def _publish(self, directory: str, number: int, note: Note) -> None:
        assert self._session is not None
        stored = self._session.stored[os.path.join(directory, note.digest.name)]
        self._files.add(note.digest, stored)
        content = {"note": json.loads(note.dump()), "etag": stored.etag, "crc32": stored.crc32}
        self._write_note(number, json.dumps(content).encode())

    def _notes(self, numbers: Sequence[int]) -> Iterator[tuple[int, Note]]:
        noted = self._notebook.noted()
        wanted = [number for number in numbers if number in noted]
        for start in range(0, len(wanted), _NOTES_AT_ONCE):
            some = wanted[start : start + _NOTES_AT_ONCE]
            found = {
                number: parsed
                for number, data in self._notebook.notes(some).items()
                if (parsed := self._parsed(number, data)) is not None
            }
            there = at_once(
                self._store.head, [self._files.path(note.digest.name) for note, _ in found.values()]
            )
            for (number, (note, stored)), here in zip(found.items(), there, strict=True):
                if here is not None and is_same(here, stored):
                    self._files.stored[note.digest.name] = stored
                    yield number, note

    def _parsed(self, number: int, data: bytes) -> tuple[Note, WrittenObject] | None:
        """Return a note, and the object that it tells of; None if it is damaged."""
        image = self._images[number]
        try:
            content: dict[str, Any] = parse_object(data, str(number))
        except ShardkitError:
            return None
        entry, etag, crc = content.get("note"), content.get("etag"), content.get("crc32")
        note = load_note(entry, image.name, image.size) if isinstance(entry, dict) else None
        if note is None or not isinstance(etag, str) or type(crc) is not int:
            return None
        if not self._counts(note):
            return None
        return note, WrittenObject(image.size, etag, crc)

    def _forget(self, numbers: Sequence[int]) -> None:
        self._notebook.remove_notes(numbers)

    def _make(self, directory: str) -> bool:
        if self._is_over():
            return False
        digests, scattered = self._finished()
        with tempfile.TemporaryDirectory(prefix="shardkit-") as beside:
            with self._upload.describe(beside, shards=directory) as descriptions:
                self._finish(directory, descriptions, digests, scattered)
            self._files.check_all()
            if self._is_over():  # what lies beside the files of whoever was faster stays
                return False
            self._files.commit(beside, self._replaced(), last_look=self._last_look)
        return True


class DividedInStore(InStore):
    """A job that several processes carry out, who share nothing but a store.

    Args:
        upload: what each of them would write alone.
        agreement: what they have to agree on.
        phase: as for `Divided`.
        replaces_any: a commit replaces whatever output is there by now, not the one that was there when the parts began.
    """

    def __init__(
        self, upload: Upload, agreement: Agreement, phase: PhaseAt | None, *, replaces_any: bool
    ) -> None:
        self.staging = StoredStaging.of_plan(upload.target.path, agreement.plan)
        super().__init__(upload, self.staging, agreement, phase)
        self._replaces_any, self._number = replaces_any, ""

    @property
    def is_committed(self) -> bool:
        """True if the output is made of this plan's files, and all of them are there."""
        return self._files.are_committed

    def check_absent(self) -> None:
        """Refuse if an output is there that parts of this very plan have not made, and nothing is to be replaced.

        Of one that has factors, what is lost is not made anew.

        Raises:
            UsageError: it is.
        """
        if self._upload.target.etag is not None and not self._upload.overwrites and not self.is_committed:
            raise UsageError(
                f"{escape(self._destination)} exists", hint="choose another name, or replace it: --overwrite"
            )
        if self._phase is not None and self._files.is_named and not self.is_committed:
            raise self._not_whole()

    def run(self, part: Part) -> PartResult:
        """Write the files of a part that are not finished yet; errors as `Divided.run`."""
        self._number = str(part)
        return super().run(part)

    def warnings(self) -> tuple[str, ...]:
        """Say that nothing was replaced, to those who want that."""
        found = super().warnings()
        if not self.was_there or not self._upload.overwrites:
            return found
        return (
            *found,
            f"{escape(self._destination)} was made of these very files before, so nothing was written; if one of them is "
            "damaged, write all without --part",
        )

    def _begin(self) -> bool:
        for _ in range(_MOST_TRIES):
            if self.is_committed:
                return False
            self._check_alone()
            is_ours = not self.staging.is_open
            if is_ours:
                check_conditions(self._destination)
                is_ours = self.staging.create(self._agreement.dump())
            try:
                if is_ours:
                    self._check_alone()
                if self._is_over():  # the last part may have committed meanwhile, and removed what it found
                    return False
                self._check_replaced(Agreement.of(self.staging))
            except SourceError:
                if self.staging.is_open:
                    raise
                continue  # given up, or committed, at this very moment
            except UsageError:
                if is_ours:
                    self.staging.remove()
                raise
            return True
        raise ResourceError(
            f"{escape(self._destination)}: others begin and give up all the time", hint="run it again"
        )

    def _is_over(self) -> bool:
        if not self.is_committed:
            return False
        if self.staging.exists:  # one process has made the output, or this part came too late
            self.clean_up(keeps_mark=False)
        return True

    @property
    def is_left(self) -> bool:
        return self.staging.exists and self.is_committed

    def _check_alone(self) -> None:
        others = [each for each in shared_in_store(self._destination) if each.path != self.staging.path]
        if found := read_all([each for each in others if each.is_open]):
            raise self._other_plan([agreement for _, agreement in found])

    def _check_replaced(self, agreement: Agreement) -> None:
        """Refuse to go on if what is there is neither what was there at the beginning nor this plan's."""
        there = self._store.head(self._files.marker_path)
        if (None if there is None else there.etag) != agreement.replaces and not self._files.is_named:
            place = in_shell(self._destination)
            raise UsageError(
                f"{escape(self._destination)} is not what it was when the parts began: another run has written there",
                hint=f"when all parts are done, `shardkit commit {place} --overwrite` replaces it; or give up what they "
                f"wrote: `shardkit status {place} --abort`",
            )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[str]:
        """Give the directory of the store. Uploads that this process leaves unfinished go on when it is started again."""
        notes = UploadNotes(self._destination, f"{self._agreement.plan} {self._number}")
        session = Session(
            self._files.directory,
            known=notes.begun,
            on_begin=notes.add_upload,
            before_object=self._agreement_is_there,
        )
        self._session = session
        try:
            with _turns.setdefault(session.directory, threading.Lock()), session:
                yield self._files.directory
        except (OSError, ShardkitError) as error:
            if isinstance(error, IntegrityError) or not self.staging.is_open:
                session.abort()
                notes.remove()
            raise
        else:
            notes.remove()
        finally:
            notes.close()

    @contextlib.contextmanager
    def _room_for_records(self) -> Iterator[str]:
        """Give a directory that goes afterwards, with those of dead runs: the store has the records."""
        with room_for_records(self._destination) as directory:
            try:
                yield directory
            finally:
                self.staging.factors.here.clear()

    def _write_note(self, number: int, content: bytes) -> None:
        self.staging.write_note(number, content)

    def _say(self, name: str, content: bytes) -> None:
        self.staging.tell(name, content)

    def _is_open(self) -> bool:
        return self.staging.is_open

    def _has_another_committed(self) -> bool:
        return self.is_committed

    def _replaced(self) -> str | None:
        if self._replaces_any:
            return self._upload.target.etag
        agreement = self._agreed()
        self._check_replaced(agreement)
        return agreement.replaces

    def _last_look(self) -> object:
        return self._agreed()  # whoever gives all up removes it before any file

    def _agreement_is_there(self) -> None:
        """Refuse to make an object once all is over: it would replace one of the output, and the source may be another by now.

        Raises:
            IncompleteError: it is.
        """
        if not self.staging.is_open:
            raise self._given_up()
        if self._phase is not None and self._files.is_named:  # its factors may have other bits
            raise self._given_up() if self._is_over() else self._not_whole()

    def _not_whole(self) -> UsageError:
        return UsageError(
            f"{escape(self._destination)} has lost some of its files: parts do not replace the others, whose factors may "
            "have other bits",
            hint="write all of them into another folder: --overwrite, without --part",
        )

    def _agreed(self) -> Agreement:
        """Return the parts' agreement, unless all is over."""
        try:
            return Agreement.of(self.staging)
        except SourceError as error:
            if self.staging.is_open:
                raise
            raise self._given_up() from error

    def clean_up(self, *, keeps_mark: bool) -> None:
        """Remove what the parts shared, here too, and end uploads of lost ones: the output tells parts that come late."""
        self.staging.close()
        paths = {self._files.path(image.name) for image in self._images}
        left = [each for each in self._store.uploads(self._destination) if each.path in paths]
        at_once(lambda each: self._store.abort(each.path, each.upload), left)
        self.staging.remove()
        remove_records(self._destination)
