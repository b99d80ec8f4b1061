"""Requests to Google's store, in its dialect of S3's API: what `s3` sends is made into what Google expects.

Google takes the same requests (objects, listings, uploads in parts), with a token, and with conditions on generations in
place of ETags. It keeps no CRC-32, but compares the MD5 that each request has.

The token is that of Google's own tools, by google-auth. `STORAGE_EMULATOR_HOST` is the address of an emulator, without one.

Source: Google's documentation of the XML API (migration from S3, multipart uploads, x-goog-if-generation-match).
"""

from __future__ import annotations

import os
import threading
from typing import Any

from shardkit.errors import ResourceError

SCHEME = "gs://"
GENERATION = "x-goog-generation"
_HOME = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_lock = threading.Lock()
_credentials: list[Any] = []


def emulator() -> str:
    """Return the address of an emulator, "" if there is none."""
    host = os.environ.get("STORAGE_EMULATOR_HOST", "")
    return host if not host or "://" in host else f"http://{host}"


def connect(session: Any, config: Any) -> Any:
    """Return a client of boto3 for Google's store.

    Args:
        session: boto3's.
        config: of the client; requests are not signed.
    """
    client = session.client("s3", region_name="auto", endpoint_url=emulator() or _HOME, config=config)
    client.meta.events.register("before-sign.s3", _translate)
    return client


def forget() -> None:
    """Let the next request look for credentials anew."""
    with _lock:
        _credentials.clear()


def _translate(request: Any, **_: object) -> None:
    """Make a request of S3 one of Google's."""
    headers = request.headers
    for name in [name for name in headers if name.lower().startswith("x-amz-")]:
        del headers[name]
    for name in ("If-None-Match", "If-Match"):
        said = headers.get(name)
        if said is not None and request.method == "PUT":
            del headers[name]
            headers["x-goog-if-generation-match"] = "0" if said == "*" else said
    if not emulator():
        headers["Authorization"] = f"Bearer {_token()}"


def _token() -> str:
    """Return a token that is valid for a while.

    Raises:
        ResourceError: google-auth is not installed, or finds no credentials.
    """
    try:
        import google.auth
        import google.auth.transport.urllib3
        import urllib3
    except ImportError:
        raise ResourceError("writing to gs:// needs google-auth", hint="pip install google-auth") from None
    with _lock:
        try:
            if not _credentials:
                _credentials.append(google.auth.default(scopes=[_SCOPE])[0])
            if not _credentials[0].valid:
                _credentials[0].refresh(google.auth.transport.urllib3.Request(urllib3.PoolManager()))
            return str(_credentials[0].token)
        except Exception as error:  # its own words may hold what is in a key file
            raise ResourceError(
                f"Google gives no token ({type(error).__name__})",
                hint="set GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login",
            ) from None
