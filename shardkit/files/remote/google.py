"""Writing into Google's store, in its dialect of S3's API: what `s3` sends is made into what Google expects.

Google takes the same requests (objects, uploads in parts), with a token, and with conditions on generations in place of
ETags. It keeps no CRC-32, but compares the MD5 that each request has.

The token is that of Google's own tools, by google-auth. `STORAGE_EMULATOR_HOST` is the address of an emulator, without one.

Source: Google's documentation of the XML API (migration from S3, multipart uploads, x-goog-if-generation-match).
"""

from __future__ import annotations

import threading
from typing import Any

from shardkit.errors import ResourceError
from shardkit.files.remote.cloud import Bucket, emulator
from shardkit.files.remote.contract import ABSENT, OtherVersion, WrittenObject
from shardkit.files.remote.s3 import S3Bucket, md5_of

_GENERATION = "x-goog-generation"
_HOME = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


class GoogleBucket(S3Bucket):
    """A bucket of Google's.

    Args:
        root: scheme and name, such as `gs://bucket`.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._token_lock = threading.Lock()
        self._credentials: Any = None

    def make_client(self, session: Any, config: Any) -> Any:
        """Return a client of a session of boto3, whose requests are not signed."""
        from botocore import UNSIGNED
        from botocore.config import Config

        unsigned = config.merge(Config(signature_version=UNSIGNED, s3={"addressing_style": "path"}))
        client = session.client("s3", region_name="auto", endpoint_url=emulator() or _HOME, config=unsigned)
        client.meta.events.register("before-sign.s3", self._translate)
        return client

    def sums(self, data: bytes, crc: int) -> dict[str, str]:
        """Return the checksum that goes with a body."""
        return md5_of(data)

    def condition(self, key: str, instead_of: str) -> dict[str, str]:
        """Return what lets a request replace nothing but one version, whose generation stands for its ETag."""
        if instead_of == ABSENT:
            return super().condition(key, instead_of)
        answer = self.ask("head_object", key)
        if answer["ETag"] != instead_of:
            raise OtherVersion(f"{key}: another version is there")
        return {"IfMatch": answer["ResponseMetadata"]["HTTPHeaders"][_GENERATION]}

    def written(self, key: str) -> WrittenObject:
        """Return an object, without a checksum."""
        return Bucket.written(self, key)

    def begin(self, key: str) -> str:
        """Begin an upload in parts and return its id."""
        return self.begin_plain(key)

    def _translate(self, request: Any, **_: object) -> None:
        """Make a request of S3 one of Google's."""
        headers = request.headers
        for name in [name for name in headers if name.lower().startswith("x-amz-")]:
            del headers[name]
        for name in ("If-None-Match", "If-Match"):
            said = headers.get(name)
            if said is not None and request.method == "PUT":
                del headers[name]
                headers["x-goog-if-generation-match"] = "0" if said == ABSENT else said
        if not emulator():
            headers["Authorization"] = f"Bearer {self._token()}"

    def _token(self) -> str:
        """Return a token that is valid for a while.

        Raises:
            ResourceError: google-auth is not installed, or finds no credentials.
        """
        try:
            import google.auth
            import google.auth.transport.urllib3
            import urllib3
        except ImportError:
            raise ResourceError(
                "writing to gs:// needs google-auth", hint="`pip install google-auth`"
            ) from None
        with self._token_lock:
            try:
                if self._credentials is None:
                    self._credentials = google.auth.default(scopes=[_SCOPE])[0]
                if not self._credentials.valid:
                    self._credentials.refresh(google.auth.transport.urllib3.Request(urllib3.PoolManager()))
                return str(self._credentials.token)
            except Exception as error:  # its own words may hold what is in a key file
                raise ResourceError(
                    f"Google gives no token ({type(error).__name__})",
                    hint="set GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login",
                ) from None
