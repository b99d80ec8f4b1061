"""Parts that share a file system: files get their names by renames, and the output appears by one.

`files/shared` has the directory in which all of that lies, and what becomes of it where processes are killed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

from shardkit.core.text import escape, in_shell
from shardkit.core.threads import Progress
from shardkit.errors import IncompleteError, Interrupted, ResourceError, ShardkitError, UsageError
from shardkit.files import storage
from shardkit.files.shared import SharedStaging, note_name, remove_marks, shared_of
from shardkit.files.staging import identity_of
from shardkit.formats.dcp import METADATA
from shardkit.formats.owned import HUB_INDEX
from shardkit.operations.parts.agreement import Agreement, read_all
from shardkit.operations.parts.alone import Alone
from shardkit.operations.parts.divided import Divided, PartResult
from shardkit.operations.parts.foreign import foreign_in, kept
from shardkit.operations.parts.notes import Note, read_note
from shardkit.operations.parts.part import ALL, Part
from shardkit.osft.phase import PhaseAt
from shardkit.transfer.digests import is_intact
from shardkit.transfer.execute import Describer, ExecuteOptions
from shardkit.transfer.plan import TransferPlan

_T = TypeVar("_T")
_MOST_TRIES = 20  # each only if another process was in the middle of a commit


class DividedOnDisk(Divided):
    """A job that several processes carry out in a directory that all of them see.

    Args:
        destination: absolute.
        agreement, plan, data_nbytes, options, progress, phase: as for `Divided`.
        describe: writes what lies beside the images.
        before: identity of what was at the destination when this process began.
        overwrite: what is at the destination may be replaced.
        check_replaceable: refuses if it may not.
        look: refuses likewise, given what was there once it has lost its name.
        remember: takes note of what is in a directory, before that becomes the output.
        is_ours: tells whether what is at the destination is known to be of this plan, by such a note.
        is_run: one process carries out all of it, or several that were started alike.
    """

    def __init__(
        self,
        destination: str,
        agreement: Agreement,
        plan: TransferPlan,
        data_nbytes: Sequence[int],
        options: ExecuteOptions,
        progress: Progress,
        *,
        phase: PhaseAt | None,
        describe: Callable[[str], AbstractContextManager[Describer]],
        before: tuple[int, int] | None,
        overwrite: bool,
        check_replaceable: Callable[[], object],
        look: Callable[[str], object],
        remember: Callable[[str], object],
        is_ours: Callable[[], bool],
        is_run: bool = False,
    ) -> None:
        self.staging = SharedStaging.of_plan(destination, agreement.plan, foreign_in, is_run=is_run)
        moving = (agreement, plan, data_nbytes, options, progress, phase)
        super().__init__(destination, self.staging, *moving, is_run=is_run)
        self.alone, self._is_kept = Alone(self.staging, agreement, self._folders), False
        self._describe, self._overwrite = describe, overwrite
        self._check_replaceable, self._is_ours = partial(self._ask, check_replaceable), is_ours
        self.staging.look = partial(self._ask, look)
        self._before, self._is_lost, self._work, self._remember = before, False, "", remember

    def run(self, part: Part) -> PartResult:
        """Write the files of a part that are not finished yet; errors as `Divided.run`."""
        for _ in range(_MOST_TRIES):
            try:
                return self._unless_taken(lambda: super(DividedOnDisk, self).run(part))
            except (IncompleteError, ResourceError):
                # Parts end where somebody has given them up; if others have begun anew since, they go on with these.
                if not (self._is_lost and (self._is_run or self.staging.is_open)):
                    raise
            self._begin_again()
        return self._unless_taken(lambda: super(DividedOnDisk, self).run(part))

    def _is_whole(self, note: Note) -> bool:
        is_read = self._is_run and note is not self._own.get(note.digest.name)
        return (not is_read or is_intact(note.digest, self.staging.data)) and super()._is_whole(note)

    def commit(self) -> bool:
        """Make the output of what all parts wrote; False if another process has. Errors as `Divided.commit`."""
        lacks = 0
        for _ in range(_MOST_TRIES if self._is_run else 0):
            try:
                return self._unless_taken(lambda: super(DividedOnDisk, self).commit())
            except (OSError, ShardkitError) as error:
                is_here = self._is_open() or self.staging.has_made
                lacks += is_here and isinstance(error, IncompleteError)
                if is_here and (lacks > 1 or not isinstance(error, IncompleteError)):
                    raise
            # A note could not be read, or a twin has removed it; or all of this was removed, by a twin or with its commit.
            self._begin_again()
            if self.run(ALL).is_committed:
                return False
        return self._unless_taken(lambda: super(DividedOnDisk, self).commit())

    def _begin_again(self) -> None:
        """Forget what was written here, if another process has removed it."""
        if self._is_lost:
            self._is_lost = False
            self._own.clear()

    def _unless_taken(self, work: Callable[[], _T]) -> _T:
        """Do something, and once more where a commit had taken the data meanwhile; that one may have died."""
        for _ in range(_MOST_TRIES):
            try:
                return work()
            except (OSError, ShardkitError) as error:
                is_gone = any(isinstance(each, FileNotFoundError) for each in (error, error.__cause__))
                is_back = self.staging.reopen() or (is_gone and self._is_open())
                # Asked last: that commit may have ended since the work looked.
                if not is_back and not (is_gone and self._has_another_committed()):
                    raise
        return work()

    def _ask(self, look: Callable[..., object], *args: str) -> None:
        """Let what refuses to replace an output say that all that was written is kept."""
        try:
            look(*args)
        except UsageError as error:
            self._is_kept = True
            raise kept(error, self.staging.path) from error

    def bytes_left(self, part: Part) -> int:
        """Return the size of the files that a part still has to write, and of the records of its factors."""
        if self._phase is not None:
            self._phase.take(None)
        return super().bytes_left(part) + self.record_bytes_left(part)

    @contextlib.contextmanager
    def _room_for_records(self) -> Iterator[str]:
        directory = os.path.join(self._work, "factors")
        storage.mkdir(directory)
        yield directory

    def _look_before(self) -> None:
        """Remember what is at the destination while nobody has committed."""
        before = identity_of(self._destination)
        if self.staging.is_open:
            self._before = before

    def _is_open(self) -> bool:
        # There may be another one by now.
        return self.staging.is_open and not self._is_lost

    def _has_another_committed(self) -> bool:
        if self._is_open() or self.staging.has_made:
            return False
        if self.staging.is_committed:
            return True
        # A run that may replace whatever is there does so, unless what is there is known to be of its plan.
        is_other = identity_of(self._destination) not in (None, self._before)
        return is_other and (not (self._is_run and self._overwrite) or self._is_ours())

    @property
    def is_committed(self) -> bool:
        """True if the destination is what parts of this plan have made."""
        return self.staging.is_committed

    @property
    def has_made(self) -> bool:
        return self.staging.has_made

    @property
    def is_left(self) -> bool:
        return self.staging.is_left

    def attended(self) -> AbstractContextManager[None]:
        return self.staging.attended()

    def give_way(self) -> None:
        """Remove what parts of this plan have written: the output is known to be of it, whoever made that."""
        if self.staging.is_open or not self.staging.is_committed:  # else whoever commits is about to do so
            self.staging.remove()

    def after(self, error: BaseException) -> None:
        """Remove what was written, unless somebody is at work there or the run may go on with it; after a signal, put back
        what was moved aside."""
        if isinstance(error, IncompleteError) or not self.staging.is_over:
            return
        with contextlib.suppress(OSError, ShardkitError):
            if isinstance(error, Interrupted):
                self.staging.put_back()
            elif not self._is_kept and not self.staging.is_committed:
                self.staging.give_up()

    def _begin(self) -> bool:
        if not self._is_run:
            return self._begin_part()
        has_begun = self.alone.begin()
        if has_begun is None:
            raise self._given_up()
        return has_begun

    @property
    def _folders(self) -> set[str]:
        """Directories in `data`."""
        return {os.path.dirname(image.name) for image in self._images} - {""}

    def _begin_part(self) -> bool:
        closed = list[str]()
        for _ in range(_MOST_TRIES):
            self.staging.reopen()
            if self.staging.is_committed:
                return False
            remove_marks(self._destination, foreign_in, only_old=True)
            beside = shared_of(self._destination, foreign_in)
            closed = [escape(each.path) for each in beside if not each.is_open and each.exists]
            if not closed:
                break
        UsageError.raise_for(
            closed,
            f"parts have committed {escape(self._destination)}, and it is another one by now",
            hint=f"remove what they left: `shardkit status {in_shell(self._destination)} --abort`",
        )
        is_ours = self.staging.create(self._agreement.dump(), self._folders)
        if is_ours and identity_of(self._destination) != self._before:
            # The last part has committed since this one began: what was made here would never be whole.
            self.staging.remove()
            if self.staging.is_committed:
                return False
            raise UsageError(
                f"{escape(self._destination)} exists: another process has made it while this part began"
            )
        others = read_all(
            [each for each in shared_of(self._destination, foreign_in) if each.path != self.staging.path]
        )
        if others:
            if is_ours:
                self.staging.remove()
            raise self._other_plan([agreement for _, agreement in others])
        return True

    @contextlib.contextmanager
    def _writing(self) -> Iterator[str]:
        self._look_before()
        try:
            with self.staging.workplace() as self._work:
                try:
                    directory = os.path.join(self._work, "data")
                    for folder in ("", *sorted(self._folders)):
                        storage.make_folders(self._work, os.path.join("data", folder))
                    yield directory
                except BaseException:
                    self._is_lost = not storage.isdir(self._work)
                    raise
        except FileNotFoundError:
            self._is_lost = True
            raise

    def _say(self, name: str, content: bytes) -> None:
        self.staging.write_note(self._work, self.staging.parts, name, content, is_synced=not self._is_run)

    def _note(self, number: int) -> Note | None:
        image = self._images[number]
        own = self._own.get(image.name)
        if own is not None and storage.lexists(os.path.join(self.staging.data, image.name)):
            return own
        note = read_note(self.staging, number, image.name, image.size)
        return note if note is not None and self._counts(note) else None

    def _notes(self, numbers: Sequence[int]) -> Iterator[tuple[int, Note]]:
        return ((number, note) for number in numbers if (note := self._note(number)) is not None)

    def _forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._own.pop(self._images[number].name, None)
        self.staging.remove_notes(numbers)

    def _publish(self, directory: str, number: int, note: Note) -> None:
        name = note.digest.name
        path = os.path.join(directory, name)
        if self._note(number) is not None:  # a twin was faster: its file may be in the output already
            storage.unlink(path)
            return
        # A run looks at all names and notes, and writes a file without one of them again: they need no wait for the disk.
        is_synced = not self._is_run
        self.staging.publish(path, name, is_synced=is_synced)
        self.staging.write_note(
            self._work, self.staging.done, note_name(number), note.dump(), is_synced=is_synced
        )
        if self._is_run:  # it need not read again what it has written
            self._own[name] = note

    def _make(self, directory: str) -> bool:
        """Write what lies beside the images, apart from `data`, and then by renames into it; then let `data` appear."""
        digests, scattered = self._finished()
        linked = self._link_images(directory)
        with self._describe(directory) as descriptions:
            for digest in digests.values():
                if digest.name not in linked:
                    descriptions.add_file(digest)
            self._finish(directory, descriptions, digests, scattered)
        self.staging.adopt(directory, linked, last=(METADATA, HUB_INDEX))
        if self._overwrite and storage.lexists(self._destination) and self.staging.is_open:
            self._check_replaceable()
        self._remember(self.staging.data)
        names = [image.name for image in self._images]
        return self.staging.commit(self._work, names, overwrite=self._overwrite)

    def clean_up(self, *, keeps_mark: bool) -> None:
        if keeps_mark:
            self.staging.keep_mark()
            remove_marks(self._destination, foreign_in, only_old=True)
        else:
            self.staging.remove()
            remove_marks(self._destination, foreign_in)

    def _link_images(self, directory: str) -> Collection[str]:
        """Let the images lie beside what describes them. What is little more than a header is copied."""
        linked = set[str]()
        for image in self._images:
            source, target = os.path.join(self.staging.data, image.name), os.path.join(directory, image.name)
            if len(image):
                storage.link(source, target)
                linked.add(image.name)
            else:
                with storage.open_file(source, "rb") as file:
                    storage.write_file(target, file.read())
        return linked


def absolute(output: str) -> str:
    """Return the path of a destination, with all links above it resolved."""
    path = storage.absolute(output)
    return os.path.join(storage.realpath(os.path.dirname(path)), os.path.basename(path))
