"""Where parts write to: a directory that all of them see, or a store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from shardkit.core.text import escape
from shardkit.core.threads import at_once
from shardkit.errors import UsageError
from shardkit.files import storage, stores
from shardkit.files.location import location_of
from shardkit.files.remote.writers import writer_of
from shardkit.files.shared import has_commits, remove_marks, shared_of
from shardkit.files.shared_store import shared_in_store
from shardkit.files.staging import identity_of, remove_abandoned
from shardkit.operations.leftovers import Leftover, leftovers
from shardkit.operations.parts.agreement import PartsStaging
from shardkit.operations.parts.foreign import foreign_in
from shardkit.operations.parts.on_disk import absolute
from shardkit.operations.uploading.local_records import remove_records
from shardkit.operations.uploading.status import MARKERS, StoredStatus, remove_uncommitted, uncommitted


class Place(Protocol):
    """Where an output goes."""

    path: str
    """Absolute."""

    def stagings(self) -> Sequence[PartsStaging]:
        """Return the directories that parts share there, whatever their plans."""

    def identity(self) -> object:
        """Return the identity of the output that is there; None if there is none."""

    def has_commits(self) -> bool:
        """True if parts are known to have made what is there."""

    def clean(self) -> None:
        """Remove what commits have left."""

    def uncommitted(self) -> StoredStatus | None:
        """Describe the files beside the output that are no part of it; None where they are not looked for."""

    def runs(self) -> tuple[Leftover, ...]:
        """Return the directories that runs of one process have left, or are writing."""

    def give_up(self) -> None:
        """Remove what nobody has committed, once the parts share nothing any more."""


class _Disk:
    """A directory that all parts see."""

    def __init__(self, output: str) -> None:
        self.path = absolute(output)

    def stagings(self) -> Sequence[PartsStaging]:
        return shared_of(self.path, foreign_in)

    def identity(self) -> object:
        return identity_of(self.path)

    def has_commits(self) -> bool:
        return has_commits(self.path)

    def clean(self) -> None:
        remove_marks(self.path, foreign_in)
        if storage.lexists(self.path):
            remove_abandoned(self.path, foreign_in)  # of a process that died after it had committed

    def uncommitted(self) -> StoredStatus | None:
        return None

    def runs(self) -> tuple[Leftover, ...]:
        return leftovers(self.path)

    def give_up(self) -> None:
        remove_marks(self.path, foreign_in)


class _Store:
    """A place in a store."""

    def __init__(self, output: str) -> None:
        self.path = stores.plain(output)

    def stagings(self) -> Sequence[PartsStaging]:
        return shared_in_store(self.path)

    def identity(self) -> object:
        found = at_once(writer_of(self.path).head, [os.path.join(self.path, name) for name in MARKERS])
        return next((each.etag for each in found if each is not None), None)

    def has_commits(self) -> bool:
        return False

    def clean(self) -> None:
        pass

    def uncommitted(self) -> StoredStatus | None:
        return uncommitted(self.path)

    def runs(self) -> tuple[Leftover, ...]:
        return ()

    def give_up(self) -> None:
        remove_uncommitted(self.path)
        remove_records(self.path)


def place_of(output: str | os.PathLike[str]) -> Place:
    """Return where an output goes.

    Raises:
        UsageError: no output can be there.
    """
    given = os.fspath(output)
    location = location_of(given)
    if not location.is_writable:
        raise UsageError(f"{escape(given)}: this store is read only so far, so nothing is written there")
    return _Disk(given) if location.renames else _Store(given)
