"""A place on a disk: files get their names by renames, and the output appears by one.

`files/shared` has the directory in which all of that lies, and what becomes of it where processes are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from shardkit.core.text import escape
from shardkit.errors import ShardkitError, UsageError
from shardkit.files import storage
from shardkit.files.place.contract import Beside, Place, given_up
from shardkit.files.shared import SharedStaging, note_name, remove_marks, remove_runs, shared_of
from shardkit.files.staging import identity_of
from shardkit.files.strict_json import parse_object


class DiskPlace(Place):
    """A directory beside the destination, which becomes the output.

    Args:
        notebook: that directory.
        files: name and size of each file of the plan.
        linked: names of the files that lie beside what describes them meanwhile; the others are little more than a header.
        markers: names of files that make an output of the others.
        before: identity of what was at the destination when this process began.
        overwrite: what is at the destination may be replaced.
        check_replaceable: refuses if it may not.
        look: refuses likewise, given what was there once it has lost its name.
    """

    vouches = False

    def __init__(
        self,
        notebook: SharedStaging,
        files: Sequence[tuple[str, int]],
        *,
        linked: Collection[str],
        markers: Collection[str],
        before: tuple[int, int] | None,
        overwrite: bool,
        check_replaceable: Callable[[], object],
        look: Callable[[str], object],
    ) -> None:
        self._staging, self._files, self._linked, self._markers = notebook, files, linked, markers
        self._overwrite, self._is_run = overwrite, not notebook.is_of_parts
        self._check_replaceable = check_replaceable
        self._folders = {os.path.dirname(name) for name, _ in files} - {""}
        notebook.look = partial(self._ask, look)
        notebook.look_before = partial(self.check_replaced, is_ours=not self._is_run)
        self.data = notebook.data
        self._before, self._is_lost, self._work, self._is_kept = before, False, "", False
        self._joined: os.stat_result | None = None  # of the data that this process writes into

    @property
    def notebook(self) -> SharedStaging:
        return self._staging

    def _ask(self, look: Callable[..., object], *args: str) -> None:
        """Let what refuses to replace an output say that all that was written is kept."""
        try:
            look(*args)
        except UsageError as error:
            self._is_kept = True
            raise UsageError(
                error.message,
                problems=error.problems,
                hint="move that somewhere else and run the same command again: what was written is kept in "
                f"{escape(self._staging.path)}",
            ) from error

    # What is there

    @property
    def is_committed(self) -> bool:
        return self._staging.is_committed or self._has_become_output()

    def _has_become_output(self) -> bool:
        """True if the data that this process has joined is the output by now."""
        if self._joined is None:
            return False
        try:
            return os.path.samestat(self._joined, storage.lstat(self._staging.destination))
        except OSError:
            return False

    @property
    def has_made(self) -> bool:
        return self._staging.has_made

    @property
    def is_left(self) -> bool:
        return self._staging.is_left

    @property
    def is_open(self) -> bool:
        # There may be another one by now.
        return self._staging.is_open and not self._is_lost

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    def begin_again(self) -> None:
        self._is_lost = False

    def another_has_made(self) -> bool:
        if self.is_open or self._staging.has_made:
            return False
        if self.is_committed:
            return True
        # A run that may replace whatever is there does so, unless what is there is known to be of its plan.
        is_other = identity_of(self._staging.destination) not in (None, self._before)
        return is_other and not (self._is_run and self._overwrite)

    # Beginning

    def others(self) -> Sequence[SharedStaging]:
        return [each for each in self._beside() if each.path != self._staging.path]

    def closed(self) -> Sequence[str]:
        remove_marks(self._staging.destination, self._staging.kept, only_old=True)
        return [each.path for each in self._beside() if not each.is_open and each.exists]

    def _beside(self) -> list[SharedStaging]:
        return shared_of(self._staging.destination, self._staging.kept)

    def check_absent(self, *, is_part: bool) -> None:
        if is_part and not self._overwrite and storage.lexists(self._staging.destination):
            try:
                self._check_replaceable()
            except UsageError:  # asked afterwards: the last part may commit at this very moment
                if not self.is_committed:
                    raise

    def check_replaced(self, *, is_ours: bool) -> None:
        if is_ours and identity_of(self._staging.destination) != self._before:
            # The last part has committed since this one began: what was made here would never be whole.
            raise UsageError(
                f"{escape(self._staging.destination)} exists: another process has made it while this part began"
            )

    def go_on(self) -> None:
        self._staging.set_apart()
        for folder in sorted(self._folders):
            storage.make_folders(self.data, folder)

    # Writing

    @contextlib.contextmanager
    def workplace(self) -> Iterator[str]:
        before = identity_of(self._staging.destination)
        # Nobody has committed, or is about to; where nothing is, a commit that is being taken back may have it aside.
        if before is not None and storage.isdir(self.data):
            self._before = before
        self._work = ""
        try:
            with self._staging.workplace() as self._work:
                try:
                    for folder in ("", *sorted(self._folders)):
                        storage.make_folders(self._work, os.path.join("data", folder))
                    with contextlib.suppress(FileNotFoundError):  # a commit may have it at this moment
                        self._joined = storage.lstat(self.data)
                    yield os.path.join(self._work, "data")
                except BaseException:
                    self._is_lost = not storage.isdir(self._work)
                    raise
        except FileNotFoundError:
            # Parts go on with data that a commit has taken, and that comes back; a run begins again.
            self._is_lost |= not self._work or (self._is_run and not self._staging.is_open)
            raise

    def publish(
        self,
        directory: str,
        number: int,
        note: Mapping[str, Any],
        *,
        crc32: int | None,
        counts: Callable[[Mapping[str, Any]], bool],
    ) -> None:
        name, there = self._files[number][0], self._note(number)
        path = os.path.join(directory, name)
        if there is not None and counts(there):  # a twin was faster: its file may be in the output already
            storage.unlink(path)
            return
        # A run looks at all names and notes, and writes a file without one of them again: they need no wait for the disk.
        self._staging.publish(path, name, is_synced=not self._is_run)
        self._write(self._staging.done.path, note_name(number), json.dumps(note).encode())

    def _write(self, directory: str, name: str, content: bytes) -> None:
        self._staging.write_note(self._work, directory, name, content, is_synced=not self._is_run)

    def has(self, number: int) -> bool:
        return storage.lexists(os.path.join(self.data, self._files[number][0]))

    def notes(self, numbers: Sequence[int]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        return ((number, note) for number in numbers if (note := self._note(number)) is not None)

    def _note(self, number: int) -> Mapping[str, Any] | None:
        name, size = self._files[number]
        try:
            if storage.lstat(os.path.join(self.data, name)).st_size != size:
                return None
            return parse_object(self._staging.done.notes([number])[number], note_name(number))
        except (KeyError, OSError, ShardkitError):
            return None

    def say(self, name: str, content: bytes) -> None:
        self._write(self._staging.parts, name, content)

    # The output

    @contextlib.contextmanager
    def describing(self, directory: str) -> Iterator[Beside]:
        """Let the files lie beside what describes them. What is little more than a header is copied."""
        for name, _ in self._files:
            source, target = os.path.join(self.data, name), os.path.join(directory, name)
            if name in self._linked:
                storage.link(source, target)
            else:
                with storage.open_file(source, "rb") as file:
                    storage.write_file(target, file.read())
        yield Beside(directory, None, self._linked)

    def commit(self, beside: str) -> bool:
        destination = self._staging.destination
        self._staging.adopt(beside, self._linked, last=self._markers)
        if self._overwrite and storage.lexists(destination) and self._staging.is_open:
            self._ask(self._check_replaceable)
        names = [name for name, _ in self._files]
        has_made = self._staging.commit(self._work, names, overwrite=self._overwrite)
        if not (has_made or self.another_has_made()):  # given up, or taken by a commit that has not ended
            raise given_up(self.destination) from FileNotFoundError(self._staging.path)
        return has_made

    def clean_up(self, *, keeps_mark: bool) -> None:
        if self._staging.is_open:  # all was removed, and others have begun anew under the same name
            return
        if keeps_mark:
            self._staging.keep_mark()
        else:
            self._staging.remove(only_closed=True)
        remove_marks(self._staging.destination, self._staging.kept, only_old=keeps_mark)

    def remove_others(self) -> None:
        remove_runs(self._staging.destination, self._staging.kept, but=self._staging.path)

    def give_way(self) -> None:
        # Once it is committed, whoever has done that is about to remove it; what another user left stays.
        if (self._staging.is_open or not self._staging.is_committed) and self._staging.is_own:
            self._staging.remove()

    def give_up(self) -> None:
        if not self._is_kept and not self._staging.is_committed:
            self._staging.give_up()
