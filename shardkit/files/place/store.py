"""A place in a store: files are sent to where they stay, and one request makes an output of them.

    the store carries out conditions -> send the files, a note of each -> describe -> ask for every file -> what lies beside
    -> the marker

Nothing that a reader looks for appears before the marker, and that is one request. A run that died leaves data that nobody
sees, which the next one goes on with, or `shardkit abort` removes. Nobody removes a file of parts: another process
may have noted it, or it may be in the output by now.

Parts have their notes in the store (`store_notes`). One process has them in the cache of its machine (`run_notes`): as
objects they would take two requests more for each file.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardkit.core.text import escape, in_shell
from shardkit.core.threads import at_once
from shardkit.errors import (
    IncompleteError,
    IntegrityError,
    ResourceError,
    ShardkitError,
    SourceError,
    UsageError,
)
from shardkit.files import storage, stores
from shardkit.files.digest import crc32
from shardkit.files.home import METADATA, data_prefixes
from shardkit.files.place.contract import Beside, Place, given_up
from shardkit.files.place.store_notes import StoredStaging, shared_in_store
from shardkit.files.remote.contract import WrittenObject
from shardkit.files.remote.writers import writer_of
from shardkit.files.shared import SharedStaging, note_name, remove_runs
from shardkit.files.strict_json import parse_object
from shardkit.files.uploads import PART_NBYTES, Session

PROBE = ".shardkit-probe-"
"""How the names of objects begin by which a store is tried."""
_NOTES_AT_ONCE = 64
_turns: dict[str, threading.Lock] = {}
"""By directory: which of the parts that are threads of this process writes there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredOutput:
    """An output in a store, which may be written."""

    path: str
    """Such as `s3://BUCKET/KEY`, without a "/" at its end."""
    marker: str
    """Name of the file that makes it an output."""
    etag: str | None
    """Of the marker that is to be replaced; None if there is none."""
    plan: str = ""
    """Hash that the names of its files have in them; empty until it is known what is written."""
    overwrites: bool = False
    look: Callable[[str], object] = lambda _: None
    """Refuses to replace what lies in a directory by now; asked before anything is sent under a name that others use."""

    @property
    def is_flat(self) -> bool:
        """True if all files lie side by side, also those of other plans, as those of a Hub model do."""
        return self.marker != METADATA

    @property
    def mark(self) -> str:
        """The word that the marker names, and that files of no other plan have in their paths."""
        return self.plan[:8] if self.is_flat else f"data-{self.plan[:16]}"

    @property
    def directory(self) -> str:
        """Where the files lie."""
        return self.path if self.is_flat else os.path.join(self.path, self.mark)


class StorePlace(Place):
    """The files of an output in a store, and what makes an output of them.

    Args:
        output: what it is going to be.
        notebook: has the notes.
        files: name and size of each file of the plan.
    """

    left = "what was finished is kept in the store"

    def __init__(
        self, output: StoredOutput, notebook: StoredStaging | SharedStaging, files: Sequence[tuple[str, int]]
    ) -> None:
        self._output, self._notebook, self._files = output, notebook, files
        self._store = writer_of(output.path)
        self._marker_path = os.path.join(output.path, output.marker)
        self.data = output.directory
        self._marker: bytes | None = None  # what was sent, or is being sent, as the marker
        self._session: Session | None = None
        self._stored: dict[str, WrittenObject] = {}
        """What the store has of each finished file, by name; the CRC-32 is that of what was sent, if it is known."""
        self._beside: list[str] = []
        """Paths of what was sent beside."""
        self._is_named: dict[str, bool] = {}

    @property
    def notebook(self) -> StoredStaging | SharedStaging:
        return self._notebook

    @property
    def destination(self) -> str:
        return self._output.path

    # What is there

    @property
    def is_named(self) -> bool:
        """True if the output that is there is made of these files."""
        there = self._store.head(self._marker_path)
        if there is None:
            return False
        if there.etag not in self._is_named:
            content = self._store.get(self._marker_path)
            self._is_named[there.etag] = content is not None and self._output.mark.encode() in content[0]
        return self._is_named[there.etag]

    @property
    def is_committed(self) -> bool:
        """True if the output is made of this plan's files, and all of them are there."""
        if not self.is_named:
            return False
        sizes = dict(self._store.objects(self.data))
        return all(sizes.get(self.path_of(name)) == size for name, size in self._files)

    @property
    def has_made(self) -> bool:
        return self._marker is not None and self._store.has(self._marker_path, self._marker)

    def path_of(self, name: str) -> str:
        """Return the path of a file."""
        return os.path.join(self.data, name)

    def check(self) -> None:
        check_conditions(self._output.path)

    # Writing

    @abstractmethod
    def _keep(self, directory: str, name: str, content: bytes) -> None:
        """Write a note, into a directory of the notebook."""

    def say(self, name: str, content: bytes) -> None:
        self._keep(self._notebook.parts, name, content)

    def publish(
        self,
        directory: str,
        number: int,
        note: Mapping[str, Any],
        *,
        crc32: int | None,
        counts: Callable[[Mapping[str, Any]], bool],
    ) -> None:
        assert self._session is not None
        name = self._files[number][0]
        stored = self._session.stored[self.path_of(name)]
        if crc32 is not None and stored.crc32 != crc32:
            raise IntegrityError(f"{escape(name)}: other bytes were sent than were written")
        self._stored[name] = stored
        content = {"note": note, "etag": stored.etag, "crc32": stored.crc32}
        self._keep(self._notebook.done.path, note_name(number), json.dumps(content).encode())

    def notes(self, numbers: Sequence[int]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        missing = {*self._notebook.done.missing(len(self._files))}
        wanted = [number for number in numbers if number not in missing]
        for start in range(0, len(wanted), _NOTES_AT_ONCE):
            notes = {
                number: parsed
                for number, data in self._notebook.done.notes(wanted[start : start + _NOTES_AT_ONCE]).items()
                if (parsed := self._parsed(number, data)) is not None
            }
            names = [self._files[number][0] for number in notes]
            there = at_once(self._store.head, map(self.path_of, names))
            for (number, (note, stored)), name, here in zip(notes.items(), names, there, strict=True):
                if is_same(here, stored):
                    self._stored[name] = stored
                    yield number, note

    def _parsed(self, number: int, data: bytes) -> tuple[Mapping[str, Any], WrittenObject] | None:
        """Return a note, and the object that it tells of; None if it is damaged."""
        try:
            content = parse_object(data, str(number))
        except ShardkitError:
            return None
        note, etag, crc = content.get("note"), content.get("etag"), content.get("crc32")
        if not isinstance(note, dict) or not isinstance(etag, str) or not isinstance(crc, int):
            return None
        return note, WrittenObject(self._files[number][1], etag, crc)

    # The output

    @contextlib.contextmanager
    def describing(self, directory: str) -> Iterator[Beside]:
        with tempfile.TemporaryDirectory(prefix="shardkit-") as beside:
            yield Beside(beside, directory, {name for name, _ in self._files})

    @abstractmethod
    def _replaces(self) -> str | None:
        """Return the ETag of the marker that is to be replaced, as far as it may be; None if there must be none."""

    def _last_look(self) -> None:
        """Raise if the marker may not be sent any more: somebody has given all up while what lies beside was sent."""
        if not {*map(self.path_of, self._stored)} <= dict(self._store.objects(self.data)).keys():
            self.check_all()

    def commit(self, beside: str) -> bool:
        self.check_all()
        if self.another_has_made():  # what lies beside the files of whoever was faster stays
            return False
        replaced, output = self._replaces(), self._output
        if output.overwrites and output.is_flat:
            stores.forget()
            output.look(output.path)
        names = sorted(
            os.path.relpath(os.path.join(here, name), beside)
            for here, _, inside in storage.walk(beside)
            for name in inside
        )
        names.remove(output.marker)
        at_once(lambda name: self._send(os.path.join(beside, name), self.path_of(name)), names)
        self._marker = data = _read(os.path.join(beside, output.marker))
        self._last_look()
        before = None if replaced is None else self._store.get(self._marker_path)
        if self._store.put_if(self._marker_path, data, int(crc32(data)), replaced):
            names = [] if before is None else data_prefixes(before[0])
            self.replaced = tuple(f"{output.path}/{name}" for name in names if output.mark not in name)
            return True
        if replaced is not None:
            raise UsageError(
                f"{escape(output.path)} changed while another was being written: it was not replaced"
            )
        raise self._was_slower()

    def check_all(self) -> None:
        """Ask the store for every file: somebody may have removed or replaced one.

        Raises:
            IncompleteError: names each file that is not there as it was written.
        """
        names = sorted(self._stored)
        there = at_once(self._store.head, map(self.path_of, names))
        IncompleteError.raise_for(
            [
                escape(name)
                for name, here in zip(names, there, strict=True)
                if not is_same(here, self._stored[name])
            ],
            f"{escape(self.data)}: files were removed or replaced while others were written",
            hint="run the same command again; two runs of one job should not write at the same time",
        )

    def _end_uploads(self) -> None:
        """End uploads of killed processes, once the files are there."""
        paths = {self.path_of(name) for name, _ in self._files}
        left = [each for each in self._store.uploads(self._output.path) if each.path in paths]
        at_once(lambda each: self._store.abort(each.path, each.upload), left)

    def _was_slower(self) -> UsageError:
        """Return the error of a run that finds an output where none was when it began."""
        return UsageError(
            f"{escape(self._output.path)} appeared while it was being written: another run was faster"
        )

    def _send(self, file: str, path: str) -> None:
        """Send a file that lies beside the data.

        Raises:
            UsageError: another file is there, in a directory that others may have written to.
        """
        self._beside.append(path)
        if storage.getsize(file) > PART_NBYTES:
            storage.send(file, path)
            return
        data = _read(file)
        crc = int(crc32(data))
        if not self._output.is_flat or self._output.overwrites:
            self._store.put(path, data, crc)
        elif not self._store.put_if(path, data, crc, None):
            check_same(path, data)


class PartsInStore(StorePlace):
    """A place of parts, who share nothing but a store.

    Args:
        output, files: as for `StorePlace`.
        plan: hash of what they agree on.
        replaces_any: a commit replaces whatever output is there by now, not the one that was there when the parts began.
    """

    def __init__(
        self,
        output: StoredOutput,
        plan: str,
        files: Sequence[tuple[str, int]],
        *,
        replaces_any: bool,
    ) -> None:
        self._shared = StoredStaging.of_plan(output.path, plan)
        super().__init__(output, self._shared, files)
        self._replaces_any = replaces_any

    @property
    def is_left(self) -> bool:
        return self._shared.exists and self.is_committed

    def another_has_made(self) -> bool:
        if not self.is_committed:
            return False
        if self._shared.exists:  # one process has made the output, or this part came too late
            self.clean_up(keeps_mark=False)
        return True

    def check_absent(self, *, is_part: bool) -> None:
        output = self._output
        if output.etag is not None and not output.overwrites and not self.is_committed:
            raise UsageError(
                f"{escape(output.path)} exists", hint="choose another name, or replace it: --overwrite"
            )

    def others(self) -> Sequence[StoredStaging]:
        there = shared_in_store(self._output.path)
        return [each for each in there if each.path != self._shared.path and each.is_open]

    def check_replaced(self, *, is_ours: bool) -> None:
        self._check_replaced(self._agreed())

    def _check_replaced(self, replaces: str | None) -> None:
        there = self._store.head(self._marker_path)
        if (None if there is None else there.etag) != replaces and not self.is_named:
            shown = in_shell(self._output.path)
            raise UsageError(
                f"{escape(self._output.path)} is not what it was when the parts began: another run has written there",
                hint=f"when all parts are done, `shardkit commit {shown} --overwrite` replaces it; or give up what they "
                f"wrote: `shardkit abort {shown}`",
            )

    def _agreed(self) -> str | None:
        """Return the ETag of what was there when the parts began, as they agree on it, unless all is over."""
        try:
            replaces = parse_object(self._shared.read_record(), self._shared.record).get("replaces")
        except SourceError as error:
            if self._shared.is_open:
                raise
            raise given_up(self._output.path) from error
        return replaces if isinstance(replaces, str) else None

    @contextlib.contextmanager
    def workplace(self) -> Iterator[str]:
        session = self._session = Session(self.data, before_object=self._check_may_make)
        with _turns.setdefault(self.data, threading.Lock()), session:
            yield self.data

    def _check_may_make(self) -> None:
        """Refuse to make an object once all is over: it would replace one of the output, and the source may be another by now.

        Raises:
            IncompleteError: it is.
        """
        if not self._shared.is_open:
            raise given_up(self._output.path)

    def _keep(self, directory: str, name: str, content: bytes) -> None:
        self._shared.write_note(directory, name, content)

    def _replaces(self) -> str | None:
        if self._replaces_any:
            return self._output.etag
        replaces = self._agreed()
        self._check_replaced(replaces)
        return replaces

    def _last_look(self) -> None:
        self._agreed()  # whoever gives all up removes it before any file

    def warnings(self) -> Sequence[str]:
        if not self._output.overwrites:
            return ()
        return (
            f"{escape(self._output.path)} was made of these very files before, so nothing was written; if one of them is "
            "damaged, write all without --part",
        )

    def clean_up(self, *, keeps_mark: bool) -> None:
        """Remove what the parts shared: the output says it to parts that come late."""
        self._shared.close()
        self._end_uploads()
        self._shared.remove()


class RunInStore(StorePlace):
    """A place of one process, or of several of this machine that were started alike.

    Args:
        output, files: as for `StorePlace`.
        notebook: on this machine.
    """

    keeps_after = (ResourceError,)
    needs_notebook = False

    def __init__(
        self, output: StoredOutput, notebook: SharedStaging, files: Sequence[tuple[str, int]]
    ) -> None:
        super().__init__(output, notebook, files)
        self._local, self._work = notebook, ""

    @property
    def is_committed(self) -> bool:
        """True if the output is made of these files; where one is replaced, not by the one that was there before."""
        if self._output.overwrites:
            there = self._store.head(self._marker_path)
            if there is None or there.etag == self._output.etag:
                return False
        return super().is_committed

    @property
    def is_open(self) -> bool:
        return not self.another_has_made()

    def another_has_made(self) -> bool:
        return self.is_committed and not self.has_made

    @contextlib.contextmanager
    def workplace(self) -> Iterator[str]:
        self._session = Session(self.data)
        with self._workplace_here(), self._session:
            yield self.data

    @contextlib.contextmanager
    def _workplace_here(self) -> Iterator[None]:
        """Let notes be written, if they can be: without some a later run takes longer."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                self._work = stack.enter_context(self._local.workplace())
            yield

    def _keep(self, directory: str, name: str, content: bytes) -> None:
        with contextlib.suppress(OSError):
            if self._work:
                self._local.write_note(self._work, directory, name, content, is_synced=False)

    def _replaces(self) -> str | None:
        return self._output.etag

    def remove_others(self) -> None:
        remove_runs(self._local.destination, self._local.kept, but=self._local.path)

    def clean_up(self, *, keeps_mark: bool) -> None:
        """Remove what the run has on this machine, once the output is there, unless another one is at work there."""
        if self._local.is_over:
            self._local.remove()
        self._end_uploads()

    def give_way(self) -> None:
        remove_runs(self._local.destination, self._local.kept, but="")

    def give_up(self) -> None:
        """Remove what was sent, unless the output that is there is made of it."""
        self._local.give_up()
        if not self.is_named:
            own = [] if self._output.is_flat else self._beside
            at_once(self._store.delete, [*own, *map(self.path_of, self._stored)])


def is_same(there: WrittenObject | None, stored: WrittenObject) -> bool:
    """True if an object is the one that was written: it has the same ETag, or else the same CRC-32."""
    if there is None or there.size != stored.size:
        return False
    return there.etag == stored.etag or (there.crc32 is not None and there.crc32 == stored.crc32)


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
