"""What each kind of store answers, what a failure means, and trying again. A new kind is a class, and a row in `kinds`."""

from __future__ import annotations

import enum
import errno
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from shardkit.core.text import escape
from shardkit.errors import IntegrityError, ResourceError, ShardkitError

NUM_TRIES = 7
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
    """The same request may succeed a moment later. It may have been carried out, too."""


class Store(Protocol):
    """A bucket, a container, or a repo at one commit.

    Each method sends its requests once. Whatever it raises goes to `explain`. A key has no "/" at its ends.
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

    def explain(self, error: Exception, path: str) -> RequestFailure:
        """Say why a call failed; `path` is for messages."""


class OtherVersion(IntegrityError):
    """An object is not the version that a request names."""


class Unanswered(ResourceError):
    """A store does not answer, or fails. The request may have been carried out all the same."""


class StoreAnswer(NamedTuple):
    """What a store says of a request that failed; empty and 0 where it says nothing."""

    code: str
    status: int
    kind: str
    """Of the error, by which the request failed: it is shown where there is nothing else."""


class _Meaning(enum.Enum):
    PASSING = enum.auto()
    LASTING = enum.auto()
    OTHER_VERSION = enum.auto()
    NO_OBJECT = enum.auto()
    NO_BUCKET = enum.auto()
    EXPIRED = enum.auto()
    DENIED = enum.auto()
    NO_CREDENTIALS = enum.auto()


NO_CREDENTIALS = "NoCredentials"
"""Stands for a store's code where nothing was asked, as there are no credentials."""
_CODES = {
    **dict.fromkeys(("SlowDown", "ServerBusy", "Throttling", "ThrottlingException"), _Meaning.PASSING),
    **dict.fromkeys(("InternalError", "ServiceUnavailable"), _Meaning.PASSING),
    **dict.fromkeys(("RequestTimeout", "OperationTimedOut"), _Meaning.PASSING),
    # what came is not what was sent
    **dict.fromkeys(("BadDigest", "InvalidDigest", "Md5Mismatch", "MalformedXML"), _Meaning.PASSING),
    **dict.fromkeys(("XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"), _Meaning.PASSING),
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException"), _Meaning.EXPIRED),
    **dict.fromkeys(("TokenRefreshRequired", "RequestExpired"), _Meaning.EXPIRED),
    "BlobAlreadyExists": _Meaning.OTHER_VERSION,
    "InvalidToken": _Meaning.DENIED,
    "NoSuchBucket": _Meaning.NO_BUCKET,
    "NoSuchUpload": _Meaning.NO_OBJECT,
    NO_CREDENTIALS: _Meaning.NO_CREDENTIALS,
}
_STATUSES = {
    401: _Meaning.DENIED,
    403: _Meaning.DENIED,
    404: _Meaning.NO_OBJECT,
    408: _Meaning.PASSING,
    409: _Meaning.PASSING,  # somebody else is writing it at this moment
    412: _Meaning.OTHER_VERSION,
    429: _Meaning.PASSING,
}
_SERVER_ERROR = 500
NO_PATH = "InvalidPath"
"""Stands for a store's code where a name in it is no path, and obstore gives nothing of its directory."""
_REGION = "the bucket is in another region", "set AWS_REGION to the region of the bucket"
_REFUSALS = {
    **dict.fromkeys(("PermanentRedirect", "AuthorizationHeaderMalformed"), _REGION),
    "RequestTimeTooSkewed": ("this machine and the store differ in time", "set the clock; then start again"),
    "InvalidObjectState": (
        "the object is archived",
        "restore it with the store's own tools; then start again",
    ),
    NO_PATH: (
        "a name there has '//', a part '.' or '..', or a control character, and cannot be read as a path",
        "rename or remove such objects with the store's own tools, or copy the others to a local disk",
    ),
}
"""What is wrong, and what to do, by the code of a store that refuses."""
_CREDENTIALS = {
    "s3": "AWS_PROFILE (with boto3 installed), or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


def explain(answer: StoreAnswer, path: str) -> RequestFailure:
    """Say in our words what an answer means; only its code and its status are shown.

    Args:
        answer: of the store.
        path: of the object.
    """
    meaning, where = _meaning(answer), escape(path)
    shown = (escape(answer.code[:60]), f"HTTP {answer.status}" if answer.status else "")
    detail = ", ".join(filter(None, shown)) or answer.kind
    if answer.code in _REFUSALS:
        problem, hint = _REFUSALS[answer.code]
        return RequestFailure(ResourceError(f"{where}: {problem} ({detail})", hint=hint), may_pass=False)
    if meaning in (_Meaning.PASSING, _Meaning.LASTING):
        return RequestFailure(unanswered(path, detail), may_pass=meaning is _Meaning.PASSING)
    credentials = _CREDENTIALS.get(path.partition("://")[0], "the store's own tools")
    unsigned = ", or AWS_SKIP_SIGNATURE=true for a public bucket" if path.startswith("s3://") else ""
    errors = {
        _Meaning.NO_OBJECT: gone(path),
        _Meaning.OTHER_VERSION: OtherVersion(
            f"{where}: the object changed while it was read",
            hint="start again once the source is at rest; nothing that was made of it is kept",
        ),
        _Meaning.NO_BUCKET: ResourceError(
            f"{where}: there is no such bucket ({detail})", hint="check the name of the bucket"
        ),
        _Meaning.EXPIRED: ResourceError(
            f"{where}: the credentials have expired ({detail})",
            hint="get new ones as you do for the store's own tools, such as aws sso login; then start again",
        ),
        _Meaning.DENIED: ResourceError(
            f"{where}: the store denies access ({detail})",
            hint=f"give credentials that may do it: what the store's own tools take, such as {credentials}",
        ),
        _Meaning.NO_CREDENTIALS: ResourceError(
            f"{where}: no credentials were found", hint=f"set {credentials}{unsigned}"
        ),
    }
    return RequestFailure(errors[meaning], may_pass=False)


def unusable(root: str, error: Exception) -> ResourceError:
    """Return the error of a store that was asked nothing: its name, or this machine's settings, are wrong.

    The error's own words may hold what is in a file, so they are not shown.
    """
    scheme = root.partition("://")[0]
    endpoint = ", AWS_ENDPOINT_URL (with http:// or https://) and ~/.aws" if scheme == "s3" else ""
    return ResourceError(
        f"{escape(root)} cannot be used with the settings of this machine ({type(error).__name__})",
        hint=f"check the name, {_CREDENTIALS[scheme]}{endpoint}",
    )


def _meaning(answer: StoreAnswer) -> _Meaning:
    if answer.code in _CODES:
        return _CODES[answer.code]
    if answer.status in _STATUSES:
        return _STATUSES[answer.status]
    is_moment = answer.status >= _SERVER_ERROR or not (answer.code or answer.status)  # or the network's
    return _Meaning.PASSING if is_moment else _Meaning.LASTING


def has_expired(answer: StoreAnswer) -> bool:
    """True if whoever gave the credentials may have new ones."""
    return _meaning(answer) is _Meaning.EXPIRED


def may_status_pass(status: int) -> bool:
    """True for the HTTP status of something that may be over in a moment."""
    return _meaning(StoreAnswer("", status, "")) is _Meaning.PASSING


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
            failure = store.explain(error, path)
            if turn + 1 == NUM_TRIES or not failure.may_pass:
                raise failure.error from None
        # many processes that failed at once do not come back at once
        time.sleep(FIRST_WAIT_S * 2**turn * random.uniform(0.5, 1))
    raise AssertionError


def attempt_without_object(store: Store, path: str, call: Callable[[], _R]) -> _R:
    """As `attempt`, for a request that needs no object to be there: "not found" is a failure of the store.

    Raises:
        ShardkitError: what the last failure means.
    """
    try:
        return attempt(store, path, call)
    except FileNotFoundError:
        raise unanswered(path, "HTTP 404") from None


def gone(path: str) -> FileNotFoundError:
    """Return the error that the system raises for a file that does not exist."""
    return FileNotFoundError(errno.ENOENT, "no such object", path)


def short_body() -> OSError:
    """Return the error of a body with other bytes than it was asked for."""
    return OSError(errno.EIO, "a body of another length")


def unanswered(path: str, detail: str) -> Unanswered:
    """Return the error of a store that does not answer.

    Args:
        path: of what was wanted.
        detail: a code or a status, or the kind of the error; nothing that may hold a secret.
    """
    elsewhere = ", and AWS_ENDPOINT_URL if the store is not Amazon's" if path.startswith("s3://") else ""
    return Unanswered(
        f"{escape(path)}: the store cannot be reached or fails ({detail})",
        hint=f"check the network{elsewhere}; then start again",
    )
