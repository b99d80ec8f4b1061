"""Buckets of S3, Google and Azure, by obstore. What their services answer is never shown as it is.

Credentials are those that the store's own tools take. For S3 boto3 finds them, where it is installed: profiles, SSO and
assumed roles too. Source: obstore 0.12; Amazon S3 API (error codes).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from shardkit.core.text import escape
from shardkit.errors import IntegrityError, ResourceError
from shardkit.files.remote import google
from shardkit.files.remote.contract import Listing, ObjectStat, RequestFailure, gone, is_short, unreachable

SCHEMES = ("s3://", "gs://", "az://")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_STATUS = re.compile(r"status (?:code: )?(\d{3})|HTTP status \w+ error \((\d{3})")
_PASSING = (
    "SlowDown",
    "InternalError",
    "ServiceUnavailable",
    "RequestTimeout",
    "ServerBusy",
    "OperationTimedOut",
)
_SPOILED = "Md5Mismatch"  # what was sent is not what came
_EXPIRED = ("ExpiredToken", "TokenRefreshRequired", "RequestExpired")
_BUSY = 429
_MAX_DELETED = 1000  # objects in a request. Source: Amazon S3 API, DeleteObjects
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_CREDENTIALS_LIVE = timedelta(minutes=5)  # then boto3 is asked again, which renews those that expire
_connected_by: list[int] = []  # the process that used obstore first
_CREDENTIALS = {
    "s3": "AWS_PROFILE (with boto3 installed), or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


def credentials_for(path: str) -> str:
    """Return how credentials are given for the store of a path."""
    return _CREDENTIALS.get(path.partition("://")[0], "the store's own tools")


def reach(path: str) -> str:
    """Return the hint for a store that does not answer."""
    elsewhere = ", and AWS_ENDPOINT_URL if the store is not Amazon's" if path.startswith("s3://") else ""
    return f"check the network{elsewhere}"


class Bucket:
    """A bucket or container.

    Args:
        root: scheme and name, such as `s3://bucket`.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._client: Any = None

    def client(self) -> Any:
        """Return obstore's own store.

        Raises:
            ResourceError: obstore is not installed, there are no credentials, or the process was forked.
        """
        if _connected_by and _connected_by[0] != os.getpid():
            raise _forked(self._root)
        with self._lock:
            if self._client is None:
                self._client = connect(self._root)
                _connected_by[:] = [os.getpid()]
            return self._client

    def list(self, key: str) -> Listing:
        """Return the listing of a directory."""
        client = self.client()
        import obstore

        answer: Any = obstore.list_with_delimiter(client, key or None)
        found = Listing(
            {
                meta["path"].rpartition("/")[2]: _describe(meta)
                for meta in answer["objects"]
                if meta["path"].strip("/")
                != key  # SeaweedFS lists a directory itself, when it has become empty
            },
            {each.rstrip("/").rpartition("/")[2] for each in answer["common_prefixes"]},
        )
        found.objects.pop("", None)
        return found

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
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(client, keys[start : start + _MAX_DELETED])

    def explain(self, error: Exception, path: str) -> RequestFailure:
        """Say why a call failed."""
        with self._lock:
            if _said(error)[0] in _EXPIRED:
                self._client = None  # whoever gave the credentials may have new ones
        return explain(error, path)


def connect(root: str) -> Any:
    """Return obstore's store for a bucket.

    Raises:
        ResourceError: obstore is not installed, or what it needs is missing.
    """
    try:
        from obstore.store import from_url
    except ImportError:
        raise ResourceError(
            f"{escape(root)}: paths of object stores need obstore", hint="pip install obstore boto3"
        ) from None
    client: dict[str, Any] = {"timeout": "120s", "connect_timeout": "10s"}
    retry: Any = {"max_retries": 3, "backoff": {"init_backoff": timedelta(milliseconds=100)}}
    options: dict[str, Any] = {"client_options": client, "retry_config": retry}
    try:
        if root.startswith("s3://"):
            options |= _from_boto3()
            if options.get("endpoint", _endpoint()).startswith("http://"):
                client["allow_http"] = True
        elif root.startswith(google.SCHEME) and google.emulator():
            client["allow_http"] = True
            options["service_account_key"] = _no_account(google.emulator())
        make: Any = from_url
        return make(root, **options)
    except Exception as error:  # its own classes, none of which may show what is in the environment
        raise explain(error, root).error from None


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def _no_account(address: str) -> str:
    """Return a key file for an emulator, which takes any. Source: object_store, ServiceAccountCredentials."""
    said = {"gcs_base_url": address, "disable_oauth": True}
    return json.dumps({**said, "client_email": "", "private_key": "", "private_key_id": ""})


def _from_boto3() -> dict[str, Any]:
    """Return credentials, region and endpoint as the tools of AWS take them; nothing where obstore does the same.

    boto3 takes a third of a second to import, so it is asked only if the environment has no keys.
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


def _forked(path: str) -> ResourceError:
    """Return the error of a process that was forked after its parent had used a store.

    obstore's threads are not in the child, and a request would wait for them for ever. Tried with obstore 0.12.
    """
    return ResourceError(
        f"{escape(path)}: this process was forked from one that had opened stores, and cannot reach them",
        hint="start processes that read stores with multiprocessing's 'spawn', or before anything is read",
    )


def _describe(meta: Any) -> ObjectStat:
    if not meta["e_tag"]:
        raise ResourceError(
            f"{escape(meta['path'])}: the store gives no ETag, so a change could not be noticed",
            hint="copy it to a local disk with the store's own tool",
        )
    return ObjectStat(meta["size"], meta["e_tag"], int(meta["last_modified"].timestamp() * 1e9))


def _said(error: Exception) -> tuple[str | None, int | None]:
    """Return the store's error code and HTTP status, if it gave any; None for codes that stand for a moment."""
    code, status = _CODE.search(str(error)), _STATUS.search(str(error))
    found = code.group(1) if code else None
    if found in _PASSING:
        found = None
    return found, int(status.group(1) or status.group(2)) if status else None


def explain(error: Exception, path: str) -> RequestFailure:
    """Say in our words why a store did not answer; its own words may hold keys."""
    from obstore import exceptions

    where, (code, status) = escape(path), _said(error)
    said = ", ".join(filter(None, (code, f"HTTP {status}" if status else None))) or type(error).__name__

    def lasting(problem: Exception) -> RequestFailure:
        return RequestFailure(problem, may_pass=False)

    if isinstance(error, exceptions.PreconditionError) or status == 412:
        return lasting(
            IntegrityError(
                f"{where}: the object changed while it was read",
                hint="start again once the source is at rest; nothing that was made of it is kept",
            )
        )
    if code == "NoSuchBucket":
        return lasting(
            ResourceError(f"{where}: there is no such bucket ({said})", hint="check the name of the bucket")
        )
    if isinstance(error, FileNotFoundError):
        return lasting(gone(path))
    if code in _EXPIRED:
        return lasting(
            ResourceError(
                f"{where}: the credentials have expired ({said})",
                hint="get new ones as you do for the store's own tools, such as aws sso login",
            )
        )
    denied = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
    if isinstance(error, denied) or status in (401, 403):
        return lasting(
            ResourceError(
                f"{where}: the store denies access ({said})",
                hint=f"give credentials that may do it: what the store's own tools take, such as {credentials_for(path)}",
            )
        )
    if "169.254.169.254" in str(error) or "credential" in str(error).lower():
        return lasting(
            ResourceError(
                f"{where}: no credentials were found",
                hint=f"set {credentials_for(path)}"
                + (", or AWS_SKIP_SIGNATURE=true for a public bucket" if path.startswith("s3://") else ""),
            )
        )
    is_lasting = code is not None or (status is not None and 400 <= status < 500 and status != _BUSY)
    return RequestFailure(
        unreachable(path, said, f"{reach(path)}; then start again"),
        may_pass=is_short(error) or code == _SPOILED or not is_lasting,
    )
