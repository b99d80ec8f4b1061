"""What each kind of store answers. A new kind is a module with one such class, and a row in `kinds`."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from shardkit.core.text import escape
from shardkit.errors import ResourceError, ShardkitError

_NUM_TRIES = 4
FIRST_WAIT_S = 0.1

_R = TypeVar("_R")


class Object(NamedTuple):
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

    objects: dict[str, Object] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)


class Refusal(NamedTuple):
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
        """Return what lies in a directory; nothing if there is none. The empty key is the whole store."""

    def head(self, key: str) -> Object:
        """Return an object.

        Raises:
            FileNotFoundError: there is none.
        """

    def fetch(self, key: str, version: Object, start: int, nbytes: int) -> memoryview:
        """Return bytes of a version of an object, from byte `start` on; as many as came.

        Raises:
            FileNotFoundError: the object is gone.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; one that is not there is no error."""

    def explain(self, error: Exception, path: str) -> Refusal:
        """Say why a call failed; `path` is for messages."""


def attempt(store: Store, path: str, call: Callable[[], _R]) -> _R:
    """Return what a call of a store gives. Failures that may pass are tried again, with longer and longer waits.

    Raises:
        ShardkitError, OSError: what the last failure means.
    """
    for turn in range(_NUM_TRIES):
        try:
            return call()
        except ShardkitError:
            raise
        except Exception as error:
            refusal = store.explain(error, path)
            if turn + 1 == _NUM_TRIES or not refusal.may_pass:
                raise refusal.error from None
        time.sleep(FIRST_WAIT_S * 2**turn)
    raise AssertionError


def gone(path: str) -> FileNotFoundError:
    """Return what the system raises for a file that does not exist."""
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
