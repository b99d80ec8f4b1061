"""Buckets of S3, Google and Azure, by obstore: listing, reading and removing.

`objects` writes. Texts of the services are never shown to users.

Credentials are those of the store's own tools. For S3 boto3 finds them if it is installed, including profiles, SSO and
assumed roles. Source: obstore 0.12; Amazon S3 API (error codes).
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from shardkit.core.text import escape
from shardkit.core.threads import at_once
from shardkit.errors import ResourceError
from shardkit.files.remote.contract import (
    NO_CREDENTIALS,
    NO_PATH,
    Listing,
    ObjectStat,
    RequestFailure,
    StoreAnswer,
    explain,
    has_expired,
    unusable_error,
)

_CODE = re.compile(r"<Code>([\w.]{1,60})</Code>")
_STATUS = re.compile(r"status (?:code: )?(\d{3})|HTTP status \w+ error \((\d{3})")
_ADDRESS = re.compile(r"\w+://(?!169\.254\.)\S+")  # except addresses of credential services
_MAX_DELETED = 1000  # objects in a request. Source: Amazon S3 API, DeleteObjects
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_CHECKSUM = "AWS_CHECKSUM_ALGORITHM"
"""obstore's own variable. Without a checksum SeaweedFS stores a damaged body."""
_CREDENTIALS_LIVE = timedelta(minutes=5)  # then boto3 is called again, which renews expiring credentials
_METADATA_SERVER = "169.254.169.254"  # credential service for machines in a cloud
_connected_by: list[int] = []  # the process that used obstore first
_buckets = weakref.WeakSet["Bucket"]()


def _after_fork() -> None:
    """In a forked child, keep references to the parent's clients forever.

    A thread of the parent may have held a lock of a client's connections, and dropping the client would wait for it. This
    happened about once in a hundred forks after a read, with obstore 0.12.
    """
    for bucket in _buckets:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(bucket))


os.register_at_fork(after_in_child=_after_fork)


class Bucket:
    """The common part of buckets and containers.

    Args:
        root: scheme and name, such as `s3://bucket`.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._clients: dict[int, Any] = {}
        _buckets.add(self)

    def client(self, *, num_retries: int = 0) -> Any:
        """Return obstore's own store.

        Args:
            num_retries: number of times that obstore itself repeats a failed request.

        Raises:
            ResourceError: obstore is not installed, credentials are missing, or the process was forked.
        """
        if _connected_by and _connected_by[0] != os.getpid():
            raise _forked_error(self._root)
        with self._lock:
            if num_retries not in self._clients:
                self._clients[num_retries] = connect(self._root, num_retries=num_retries)
                _connected_by[:] = [os.getpid()]
            return self._clients[num_retries]

    def list(self, key: str) -> Listing:
        """Return the listing of a directory."""
        client = self.client()
        import obstore

        answer: Any = obstore.list_with_delimiter(client, key or None)
        listing = Listing(
            {
                meta["path"].rpartition("/")[2]: _describe(meta)
                for meta in answer["objects"]
                if meta["path"].strip("/") != key  # SeaweedFS lists an emptied directory itself
            },
            {prefix.rstrip("/").rpartition("/")[2] for prefix in answer["common_prefixes"]},
        )
        listing.objects.pop("", None)
        return listing

    def objects(self, key: str) -> Sequence[tuple[str, int]]:
        """Return (key, bytes) of all objects below a directory."""
        client = self.client()
        import obstore

        pages: Any = obstore.list(client, key or None)
        return [(meta["path"], meta["size"]) for page in pages for meta in page]

    def head(self, key: str) -> ObjectStat:
        """Return an object."""
        client = self.client()
        import obstore

        return _describe(obstore.head(client, key))

    def fetch(self, key: str, version: ObjectStat, start: int, nbytes: int) -> memoryview:
        """Return a range of an object, in obstore's own memory. The request names the version, by its ETag."""
        client = self.client()
        import obstore

        options: Any = {"range": (start, start + nbytes), "if_match": version.etag}
        return memoryview(obstore.get(client, key, options=options).bytes())

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects."""
        client = self.client()
        import obstore

        for start in range(0, len(keys), _MAX_DELETED):
            some = keys[start : start + _MAX_DELETED]
            try:
                obstore.delete(client, some)
            except FileNotFoundError:  # Google's store gets a request per object, and none after this error
                if len(some) > 1:
                    at_once(lambda key: self.delete([key]), some)

    def explain(self, error: Exception, path: str) -> RequestFailure:
        """Return why a call failed."""
        answer = _answer_of_boto3(error) or answer_of(error)
        if has_expired(answer):
            self.forget_credentials()
        return explain(answer, path)

    def forget_credentials(self) -> None:
        """Drop the connection, so that the next request looks for credentials again."""
        with self._lock:
            self._clients.clear()


def connect(root: str, *, num_retries: int = 0) -> Any:
    """Return obstore's store for a bucket.

    Args:
        root: scheme and name, such as `s3://bucket`.
        num_retries: number of times that obstore itself repeats a failed request. For most requests it is 0, because they
            are repeated by `attempt` of `files/remote`.

    Raises:
        ResourceError: obstore is not installed, or its settings are incomplete.
    """
    try:
        from obstore.store import from_url
    except ImportError:
        raise ResourceError(
            f"{escape(root)}: paths of object stores need obstore", hint="`pip install obstore boto3`"
        ) from None
    client: dict[str, Any] = {"timeout": "120s", "connect_timeout": "10s"}
    options: dict[str, Any] = {
        "client_options": client,
        "retry_config": {"max_retries": num_retries},
    }
    try:
        if root.startswith("s3://"):
            options |= _from_boto3()
            if _CHECKSUM not in os.environ:
                options["checksum_algorithm"] = "SHA256"
            endpoint = options.get("endpoint", _endpoint())
            if endpoint and not endpoint.startswith(("http://", "https://")):  # obstore would panic
                raise ValueError  # caught below: `unusable_error` makes the message
            client["allow_http"] = endpoint.startswith("http://")
        elif root.startswith("gs://") and emulator():
            client["allow_http"] = True
            options["service_account_key"] = _emulator_account(emulator())
        make: Any = from_url
        return make(root, **options)
    except Exception as error:  # obstore's own classes; their texts may contain values of the environment
        answer = answer_of(error)
        found_none = answer.code == NO_CREDENTIALS
        raise (explain(answer, root).error if found_none else unusable_error(root, error)) from None


def _endpoint() -> str:
    """Return the endpoint of S3 that the environment names, or ""."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def emulator() -> str:
    """Return the address of an emulator of Google's store, or ""."""
    host = os.environ.get("STORAGE_EMULATOR_HOST", "")
    return host if not host or "://" in host else f"http://{host}"


def _emulator_account(address: str) -> str:
    """Return a key file for an emulator, which accepts any. Source: object_store, ServiceAccountCredentials."""
    settings = {"gcs_base_url": address, "disable_oauth": True}
    return json.dumps({**settings, "client_email": "", "private_key": "", "private_key_id": ""})


def _from_boto3() -> dict[str, Any]:
    """Return credentials, region and endpoint as boto3 finds them (profiles, SSO, roles), as options for obstore.

    Empty if the environment has keys or asks for unsigned requests, which obstore handles itself; if boto3 is not
    installed; or if it finds no credentials. Importing boto3 takes a third of a second, so the environment comes first.
    """
    if os.environ.get("AWS_SKIP_SIGNATURE") or all(map(os.environ.get, _KEYS)):
        return {}
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return {}
    session = boto3.Session()
    if session.get_credentials() is None:
        return {}
    endpoint = session.client("s3").meta.endpoint_url
    return {
        "credential_provider": Boto3CredentialProvider(session, ttl=_CREDENTIALS_LIVE),
        **({"region": session.region_name} if session.region_name else {}),
        **({"endpoint": endpoint} if "amazonaws.com" not in endpoint else {}),
    }


def _forked_error(path: str) -> ResourceError:
    """Return the error for a process that was forked after its parent had used a store.

    obstore's threads do not exist in the child, where a request would wait for them forever (obstore 0.12).
    """
    return ResourceError(
        f"{escape(path)}: this process was forked from one that had opened stores, and cannot reach them",
        hint="start processes that read stores with multiprocessing's 'spawn', or before anything is read",
    )


def _describe(meta: Any) -> ObjectStat:
    if not meta["e_tag"]:
        raise ResourceError(
            f"{escape(meta['path'])}: the store returns no ETag, so changes could not be detected",
            hint="copy it to a local disk with the store's own tool",
        )
    return ObjectStat(meta["size"], meta["e_tag"], int(meta["last_modified"].timestamp() * 1e9))


def answer_of(error: Exception) -> StoreAnswer:
    """Extract the store's answer from an error of obstore."""
    from obstore import exceptions

    text = str(error)
    match, number = _CODE.search(text), _STATUS.search(text)
    code, status = match.group(1) if match else "", int(number.group(1) or number.group(2)) if number else 0
    for kind, means in (
        (FileNotFoundError, 404),
        (exceptions.PreconditionError, 412),
        (exceptions.PermissionDeniedError, 403),
        (exceptions.UnauthenticatedError, 401),
    ):
        if isinstance(error, kind):
            status = means
            break
    else:
        if isinstance(error, (exceptions.InvalidPathError, ValueError)):
            code = NO_PATH
        elif "incorrectly configured region" in text:
            code = "PermanentRedirect"
        words = _ADDRESS.sub("", text)  # names of buckets and objects may contain such words
        is_about_credentials = _METADATA_SERVER in text or "credential" in words.lower()
        if is_about_credentials and not code and status not in (401, 403, 412, 429) and status < 500:
            code = NO_CREDENTIALS
    return StoreAnswer(code, status, type(error).__name__)


def _answer_of_boto3(error: Exception) -> StoreAnswer | None:
    """Return the meaning of an error of boto3 while finding credentials; None for other errors."""
    kind = type(error)
    if not kind.__module__.startswith("botocore."):
        return None
    from botocore.exceptions import HTTPClientError, ResponseStreamingError

    if isinstance(error, (HTTPClientError, ResponseStreamingError)):
        return StoreAnswer("", 0, kind.__name__)
    if "Token" in kind.__name__:
        return StoreAnswer("ExpiredToken", 0, kind.__name__)
    return StoreAnswer(NO_CREDENTIALS if "Credential" in kind.__name__ else kind.__name__, 0, kind.__name__)
