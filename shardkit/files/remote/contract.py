"""What each kind of store answers. A new kind is a module with one such class, and a row in `kinds`."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from shardkit.core.text import escape
from shardkit.errors import IncompleteError, ResourceError, ShardkitError

NUM_TRIES = 4
FIRST_WAIT_S = 0.1

_R = TypeVar("_R")


class ObjectStat(NamedTuple):
    """What a store says of an object."""

    size: int
    """Bytes."""
    etag: str
    """Names the version. Two versions of an object never have the same."""
    modified_ns: int
    """0 where the store does not say."""


@dataclass(slots=True)
class Listing:
    """What lies in a directory, by name."""

    objects: dict[str, ObjectStat] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)


class RequestFailure(NamedTuple):
    """Why a request failed."""

    error: Exception
    """In our words. A store's own words may hold keys and names, so they are never shown."""
    may_pass: bool
    """The same request may succeed a moment later."""


class Store(Protocol):
    """A bucket, a container, or a repo at one commit.

    Each method is tried once. Whatever it raises goes to `explain`. A key has no "/" at its ends.
    """

    def list(self, key: str) -> Listing:
        """Return the listing of a directory, empty if there is none. The empty key is the whole store."""

    def head(self, key: str) -> ObjectStat:
        """Return an object.

        Raises:
            FileNotFoundError: there is none.
        """

    def fetch(self, key: str, version: ObjectStat, start: int, nbytes: int) -> memoryview:
        """Return bytes of a version of an object, from byte `start` on; as many as came.

        Raises:
            FileNotFoundError: the object is gone.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; one that is not there is no error."""

    def explain(self, error: Exception, path: str) -> RequestFailure:
        """Say why a call failed; `path` is for messages."""


class WrittenObject(NamedTuple):
    """What a store says of an object that was written."""

    size: int
    etag: str
    crc32: int | None
    """Of the whole object; None if the store keeps none."""


class UploadedPart(NamedTuple):
    """A part of an object, once the store has it."""

    number: int
    """From 1 on."""
    size: int
    etag: str
    crc32: int


class Underway(NamedTuple):
    """An upload that nobody has completed."""

    path: str
    upload: str
    begun_s: float
    """When it was begun, in seconds since 1970, by the store's clock."""


class LostUpload(IncompleteError):
    """The store no longer knows an upload."""


class StoreWriter(Protocol):
    """What changes a store: the functions of a module. Paths are whole, such as `s3://bucket/key`.

    Failures that may pass are tried again; what is raised are the errors that users see.
    """

    def head(self, path: str) -> WrittenObject | None:
        """Return the size, ETag and checksum of an object; None if there is no such object."""

    def get(self, path: str) -> tuple[bytes, str] | None:
        """Return the bytes and the ETag of a small object; None if there is none."""

    def put(self, path: str, data: bytes, crc: int) -> WrittenObject:
        """Write a small object, replacing one of that name. The store compares a checksum."""

    def put_if(self, path: str, data: bytes, crc: int, etag: str | None) -> bool:
        """Write an object if there is none of its name, or only the one of a given ETag; False if another is there.

        The answer to a request may get lost. Then the object itself tells whether it was carried out.
        """

    def has(self, path: str, data: bytes) -> bool:
        """True if an object has exactly these bytes."""

    def delete(self, path: str) -> None:
        """Remove an object, if there is one."""

    def begin(self, path: str) -> str:
        """Begin an upload in parts and return its id."""

    def send_part(self, path: str, upload: str, number: int, data: bytes, crc: int) -> UploadedPart:
        """Send a part; number 1 is the first. The store compares a checksum."""

    def sent_parts(self, path: str, upload: str) -> dict[int, UploadedPart] | None:
        """Return the parts that an upload has; None if there is no such upload."""

    def is_part(self, sent: UploadedPart, data: bytes, crc: int) -> bool:
        """True if a part that the store has is surely this one."""

    def complete(self, path: str, upload: str, parts: Sequence[UploadedPart], crc: int) -> WrittenObject:
        """Make an object of all parts of an upload, in order."""

    def abort(self, path: str, upload: str) -> None:
        """End an upload."""

    def uploads(self, directory: str) -> list[Underway]:
        """Return the uploads under way below a directory."""

    def objects(self, directory: str) -> Iterator[tuple[str, int]]:
        """Yield (path, bytes) of every object below a directory."""


def attempt(store: Store, path: str, call: Callable[[], _R]) -> _R:
    """Call a store and return its answer. Failures that may pass are tried again, with longer and longer waits.

    Raises:
        ShardkitError, OSError: what the last failure means.
    """
    for turn in range(NUM_TRIES):
        try:
            return call()
        except ShardkitError:
            raise
        except Exception as error:
            refusal = store.explain(error, path)
            if turn + 1 == NUM_TRIES or not refusal.may_pass:
                raise refusal.error from None
        time.sleep(FIRST_WAIT_S * 2**turn)
    raise AssertionError


def gone(path: str) -> FileNotFoundError:
    """Return the error that the system raises for a file that does not exist."""
    return FileNotFoundError(errno.ENOENT, "no such object", path)


def is_short(error: Exception) -> bool:
    """True if a body was too short, or longer than it was asked for."""
    return isinstance(error, OSError) and error.errno == errno.EIO


def short_body() -> OSError:
    """Return the error of a body with other bytes than it was asked for."""
    return OSError(errno.EIO, "a body of another length")


def unreachable(path: str, said: str, hint: str) -> ResourceError:
    """Return the error of a store that does not answer.

    Args:
        path: of what was wanted.
        said: a code or a status, or the kind of the error; nothing that may hold a secret.
        hint: what to check.
    """
    return ResourceError(f"{escape(path)}: the store cannot be reached or fails ({said})", hint=hint)
