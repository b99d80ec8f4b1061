"""The interface of stores, the meaning of failures, and retries. A new kind is a class, and a row in `kinds`."""

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
    """The attributes of an object in a store."""

    size: int
    """Bytes."""
    etag: str
    """Identifies the version: different versions of an object have different tags."""
    modified_ns: int
    """0 if unknown."""


@dataclass(slots=True)
class Listing:
    """The content of a directory, by name."""

    objects: dict[str, ObjectStat] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)


class RequestFailure(NamedTuple):
    """The reason for a failed request."""

    error: Exception
    """The error for users. Texts of stores may contain keys and names, so they are never shown."""
    may_pass: bool
    """True if a retry may succeed. The request may also have been executed already."""


class Store(Protocol):
    """A bucket, a container, a repo of the Hub at one commit, or a bucket there.

    Methods do not retry. Their errors are passed to `explain`. A key has no "/" at its ends.
    """

    def list(self, key: str) -> Listing:
        """Return the listing of a directory, empty if it does not exist. The empty key is the whole store."""

    def head(self, key: str) -> ObjectStat:
        """Return the attributes of an object.

        Raises:
            FileNotFoundError: the object does not exist.
        """

    def fetch(self, key: str, version: ObjectStat, start: int, nbytes: int) -> memoryview:
        """Return bytes of a version of an object from `start` on, possibly fewer than requested.

        Raises:
            FileNotFoundError: the object no longer exists.
        """

    def explain(self, error: Exception, path: str) -> RequestFailure:
        """Return why a call failed; `path` is for messages."""


class OtherVersion(IntegrityError):
    """An object is not the requested version."""


class Unanswered(ResourceError):
    """A store does not answer, or fails. The request may have been executed nevertheless."""


class StoreAnswer(NamedTuple):
    """A store's answer to a failed request; code and status are empty and 0 if unknown."""

    code: str
    status: int
    kind: str
    """Class of the error, which is shown if code and status are unknown."""


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
"""Placeholder code if no request was sent, as there are no credentials."""
_CODES = {
    **dict.fromkeys(("SlowDown", "ServerBusy", "Throttling", "ThrottlingException"), _Meaning.PASSING),
    **dict.fromkeys(("InternalError", "ServiceUnavailable"), _Meaning.PASSING),
    **dict.fromkeys(("RequestTimeout", "OperationTimedOut"), _Meaning.PASSING),
    # the data were damaged in transit
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
    409: _Meaning.PASSING,  # another process is writing the object
    412: _Meaning.OTHER_VERSION,
    429: _Meaning.PASSING,
}
_SERVER_ERROR = 500
NO_PATH = "InvalidPath"
"""Placeholder code if an object's name is not a path, and obstore lists nothing of its directory."""
_REGION = "the bucket is in another region", "set AWS_REGION to the region of the bucket"
_REFUSALS = {
    **dict.fromkeys(("PermanentRedirect", "AuthorizationHeaderMalformed"), _REGION),
    "RequestTimeTooSkewed": ("this machine's clock differs from the store's", "set it; then start again"),
    "InvalidObjectState": (
        "the object is archived",
        "restore it with the store's own tools; then start again",
    ),
    NO_PATH: (
        "a name there has '//', a part '.' or '..', or a control character, and cannot be read as a path",
        "rename or remove such objects with the store's own tools, or copy the others to a local disk",
    ),
}
"""Code of a store's refusal -> (problem, hint)."""
_CREDENTIALS = {
    "s3": "AWS_PROFILE (with boto3 installed), or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


def explain(answer: StoreAnswer, path: str) -> RequestFailure:
    """Return the error for an answer; of the answer, only code and status are shown.

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
        _Meaning.NO_OBJECT: gone_error(path),
        _Meaning.OTHER_VERSION: OtherVersion(
            f"{where}: the object changed while it was read",
            hint="start again once the source no longer changes; nothing from this run is kept",
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


def unusable_error(root: str, error: Exception) -> ResourceError:
    """Return the error for a wrong name of a store, or wrong settings of this machine, before any request.

    The original text may contain the content of a file, so it is not shown.
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
    # Without code and status it is an error of the network.
    is_moment = answer.status >= _SERVER_ERROR or not (answer.code or answer.status)
    return _Meaning.PASSING if is_moment else _Meaning.LASTING


def has_expired(answer: StoreAnswer) -> bool:
    """True if new credentials may be available."""
    return _meaning(answer) is _Meaning.EXPIRED


def may_status_pass(status: int) -> bool:
    """True for the HTTP status of a temporary failure."""
    return _meaning(StoreAnswer("", status, "")) is _Meaning.PASSING


def attempt(store: Store, path: str, call: Callable[[], _R]) -> _R:
    """Call a store and return its answer. Temporary failures are retried with increasing waits.

    Raises:
        ShardkitError, OSError: the last failure.
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
        # random, so that processes that failed together do not retry together
        time.sleep(FIRST_WAIT_S * 2**turn * random.uniform(0.5, 1))
    raise AssertionError


def attempt_without_object(store: Store, path: str, call: Callable[[], _R]) -> _R:
    """Like `attempt`, for a request that does not need an object: "not found" is then a failure of the store.

    Raises:
        ShardkitError: the last failure.
    """
    try:
        return attempt(store, path, call)
    except FileNotFoundError:
        raise unanswered(path, "HTTP 404") from None


def gone_error(path: str) -> FileNotFoundError:
    """Return the error of the system for a missing file."""
    return FileNotFoundError(errno.ENOENT, "no such object", path)


def short_body_error() -> OSError:
    """Return the error for a body of unexpected length."""
    return OSError(errno.EIO, "a body of another length")


def unanswered(path: str, detail: str) -> Unanswered:
    """Return the error for a store that does not answer.

    Args:
        path: of the object.
        detail: a code, a status, or the class of the error; must not contain secrets.
    """
    elsewhere = ", and AWS_ENDPOINT_URL if the store is not Amazon's" if path.startswith("s3://") else ""
    return Unanswered(
        f"{escape(path)}: the store cannot be reached or fails ({detail})",
        hint=f"check the network{elsewhere}; then start again",
    )
