"""What a run needs of the place where its output comes to be, whatever kind of place that is.

    begin      others -> check -> the notebook: create, or enter what is there
    write      workplace -> publish each file, with its note -> notes, forget
    commit     describing -> commit -> clean_up; or give_up

A run is part k of n, and all parts share a `Notebook`: what they agree on, and a note of each finished file. A `Place` has
the files themselves, and makes an output of them; it has a notebook, and is none: both are open, and both can be given up,
in two senses. Contents of notes are plain data, which a place does not understand.

No locks. Several processes may do the same at the same time, since whoever writes a file of a name writes the same bytes:
what one of them has published is as good as what another one would. A note vouches for a file that is durable, and is
given only while the place has that file. `commit` makes the output visible at one moment, whole, and once.

`disk` and `store` are the two kinds of place. Another kind is a class for each of the two here, which have the answers of a
place where nothing needs to be done. `tests/files/place` has the tests that each kind has to pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from shardkit.core.text import escape
from shardkit.errors import IncompleteError
from shardkit.files.staging import Owner


class Notes(Protocol):
    """A note for each file that is finished, by number."""

    @property
    def path(self) -> str:
        """Where they lie."""

    def missing(self, count: int) -> list[int]:
        """Return the numbers without a note, of so many, as far as this machine sees them."""

    def notes(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return the notes that there are of these numbers."""

    def forget(self, numbers: Iterable[int]) -> None:
        """Remove the notes of these numbers, if there are some."""


class Notebook(Protocol):
    """What the processes of one plan share until there is an output.

    It appears whole, with the record of what they agree on, and `is_open` until a commit, or until somebody gives it up.
    """

    destination: str
    """Where the output goes; absolute."""
    path: str
    """Where it lies."""
    record: str
    """Path of `plan.json`, for messages."""

    @property
    @abstractmethod
    def done(self) -> Notes:
        """Notes of the files that are finished."""

    @property
    @abstractmethod
    def exists(self) -> bool:
        """True until all of it is removed."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """True until a commit, or until it was given up."""

    @property
    def is_committed(self) -> bool:
        """True if it says that the output which is there was made of it."""
        return False

    @property
    def is_left(self) -> bool:
        """True after a commit whose process is not known to be alive: what comes after the output may not have been done."""
        return False

    @property
    def is_attended(self) -> bool:
        """True while a process of this machine is known to be at work in it."""
        return False

    @property
    def is_over(self) -> bool:
        """True if all who worked in it are known to be over, or have left it."""
        return True

    @property
    def is_own(self) -> bool:
        """False if another user has put there what is there, as far as that can be known."""
        return True

    @abstractmethod
    def create(self, record: bytes, folders: Collection[str] = (), owner: Owner | None = None) -> bool:
        """Make it, unless another process has; return whether it was made here.

        Args:
            record: what all who share it agree on.
            folders: directories that files lie in.
            owner: who has entered it from the first moment on, as by `enter`.
        """

    def enter(self, owner: Owner) -> bool:
        """Let others see that somebody is at work in it, until `leave`; False if it is gone."""
        return self.is_open

    def leave(self, owner: Owner) -> None:
        """End what `enter` began."""
        owner.end()

    def reopen(self) -> bool:
        """Put back what a commit that did not end has taken, and what it has replaced; True if it had taken the data."""
        return False

    def check_owner(self) -> None:
        """Refuse what another user has put there, as far as that can be known."""
        return

    @abstractmethod
    def read_record(self) -> bytes:
        """Return what `create` was given; raises `SourceError` if it is gone."""

    @abstractmethod
    def told(self) -> Iterator[tuple[str, bytes]]:
        """Yield (name, content) of what parts said of themselves."""

    @abstractmethod
    def remove(self, *, only_closed: bool = False) -> None:
        """Remove all of it. If `only_closed`, what is open by now stays: others have begun anew, or a commit has not ended."""

    def give_up(self) -> None:
        """Remove all of it; what a commit that did not end has replaced goes back."""
        self.remove()


class Beside(NamedTuple):
    """Where the files are described that an output has beside those of the plan."""

    path: str
    """A directory on this machine, for what lies beside."""
    shards: str | None
    """Where the described files lie, if not there."""
    linked: Collection[str]
    """Names of the described files that are there; the others are written again, since they are little more than a header."""


class Place(ABC):
    """Where the files of one plan go, and what makes an output of them."""

    left: str = "what was finished is kept beside it"
    """What a message says of a run that was interrupted."""
    keeps_after: tuple[type[Exception], ...] = ()
    """Errors after which a run goes on where it was, and nothing is removed."""
    needs_notebook: bool = True
    """False if a run can do without one, where none can be written."""
    vouches: bool = True
    """It says of a file with a note that its bytes are those that were written: nobody need read them once more."""
    data: str = ""
    """The directory where published files are read, if they can be."""
    replaced: tuple[str, ...] = ()
    """How the paths begin of the data that a commit has replaced and left, since readers may need them."""

    @property
    @abstractmethod
    def notebook(self) -> Notebook:
        """What the processes of the plan share."""

    @property
    def destination(self) -> str:
        """Where the output goes; absolute."""
        return self.notebook.destination

    # What is there

    @property
    @abstractmethod
    def is_committed(self) -> bool:
        """True if the output is known to be what processes with this plan have made."""

    @property
    @abstractmethod
    def has_made(self) -> bool:
        """True once this process has made the output."""

    @property
    def is_left(self) -> bool:
        """True if the output is there, and what comes after it may not be done: whoever made it is not known to be alive."""
        return self.is_committed

    @property
    def is_open(self) -> bool:
        """True while what this process has begun, or joined, is there."""
        return self.notebook.is_open

    @property
    def is_lost(self) -> bool:
        """True if what this process was writing was removed, until `begin_again`."""
        return False

    def begin_again(self) -> None:
        """Write once more what was lost."""
        return

    @abstractmethod
    def another_has_made(self) -> bool:
        """True if another process has made the output."""

    # Beginning

    def check(self) -> None:
        """Refuse a place where no commit is safe; asked before anything is written."""
        return

    def others(self) -> Sequence[Notebook]:
        """Return what parts of other plans share there."""
        return ()

    def closed(self) -> Sequence[str]:
        """Return the paths of notebooks of outputs that were made, and have been replaced since."""
        return ()

    def check_absent(self, *, is_part: bool) -> None:
        """Refuse to go on if an output is there that processes of this plan have not made, and nothing is to be replaced.

        Args:
            is_part: this process writes; else it makes the output of what others wrote.
        """
        return

    def check_replaced(self, *, is_ours: bool) -> None:
        """Refuse to go on if what is at the destination is not what was there when the parts began.

        Args:
            is_ours: this process has begun.
        """
        return

    def go_on(self) -> None:
        """Make ready a notebook that another process has begun, once this one has entered it."""
        return

    # Writing

    @abstractmethod
    def workplace(self) -> AbstractContextManager[str]:
        """Give the directory in which this process writes files."""

    @abstractmethod
    def publish(
        self,
        directory: str,
        number: int,
        note: Mapping[str, Any],
        *,
        crc32: int | None,
        counts: Callable[[Mapping[str, Any]], bool],
    ) -> None:
        """Put a finished file where all have theirs, and note it. May be called from any thread.

        Args:
            directory: of `workplace`, where it lies.
            number: of the file in the plan.
            note: plain data.
            crc32: of the file's bytes, where it is known.
            counts: true for a note of a twin's that does as well; the file need not replace that one's then.

        Raises:
            IntegrityError: the place got other bytes.
            OSError, ShardkitError: the place is gone, or refuses.
        """

    def has(self, number: int) -> bool:
        """True unless a file that this process has published is known to be gone."""
        return True

    @abstractmethod
    def notes(self, numbers: Sequence[int]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield number and note of those files that are finished and still there."""

    def forget(self, numbers: Sequence[int]) -> None:
        """Remove notes: the files are written anew."""
        self.notebook.done.forget(numbers)

    @abstractmethod
    def say(self, name: str, content: bytes) -> None:
        """Leave something for people to see."""

    # The output

    @abstractmethod
    def describing(self, directory: str) -> AbstractContextManager[Beside]:
        """Give the place for what lies beside the files; `directory` is that of `workplace`."""

    @abstractmethod
    def commit(self, beside: str) -> bool:
        """Make the output visible, at one moment; False if another process has.

        Args:
            beside: has what lies beside the files, and the marker.

        Raises:
            IncompleteError: a file is not there as it was written, or all was given up.
            UsageError: something else is at the destination by now.
        """

    def warnings(self) -> Sequence[str]:
        """Return what a person should know to whom nothing was written, since the output was there."""
        return ()

    def clean_up(self, *, keeps_mark: bool) -> None:
        """Remove what is left after the commit, but what parts that come late look for."""
        self.notebook.remove()

    def remove_others(self) -> None:
        """Remove what dead runs of other plans have left, for its room."""
        return

    def give_way(self) -> None:
        """Remove what processes of this plan have written: the output is known to be of it, whoever made that."""
        if self.notebook.exists:
            self.notebook.remove()

    def give_up(self) -> None:
        """Remove all that processes of this plan have written, unless the output is made of it."""
        self.notebook.give_up()


def given_up(destination: str) -> IncompleteError:
    """Return the error of a process whose notebook somebody has removed."""
    return IncompleteError(
        f"{escape(destination)} was given up meanwhile", hint="run all parts again to begin anew"
    )
