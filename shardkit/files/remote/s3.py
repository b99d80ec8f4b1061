"""Writing into S3, by boto3: it takes a CRC-32 for each part and for the whole, which the store compares.

Credentials are those of boto3's own chain, profiles of `~/.aws` included.

Source: Amazon S3 API (CreateMultipartUpload, UploadPart, CompleteMultipartUpload, PutObject, error codes); boto3 1.44.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from typing import Any

from shardkit.errors import ResourceError
from shardkit.files.remote.cloud import Bucket
from shardkit.files.remote.contract import (
    ABSENT,
    NO_CREDENTIALS,
    StoreAnswer,
    Underway,
    UploadedPart,
    WrittenObject,
    unusable,
)

_NO_CHECKSUMS = ("InvalidArgument", "InvalidRequest", "NotImplemented", "MalformedXML")
_WITH_CRC, _PLAIN = "crc32:", "plain:"
"""What stands before an upload's id: whether the store keeps the CRC-32 of the whole."""


class S3Bucket(Bucket):
    """A bucket of S3.

    Args:
        root: scheme and name, such as `s3://bucket`.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._boto: Any = None

    def forget_credentials(self) -> None:
        """Let the next request look for credentials anew."""
        super().forget_credentials()
        with self._lock:
            self._boto = None

    def answer_of(self, error: Exception) -> StoreAnswer:
        """Return what the store said, from an error of boto3 or obstore."""
        response: Any = getattr(error, "response", None)
        if isinstance(response, dict):
            status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            code = str(response.get("Error", {}).get("Code", ""))
            return StoreAnswer("" if code == str(status) else code, status, type(error).__name__)
        return _answer_of_boto3(error) or super().answer_of(error)

    def ask(self, operation: str, key: str | None = None, **given: Any) -> Any:
        """Send one request about an object, or about the bucket, and return the answer."""
        with self._lock:
            if self._boto is None:
                self._boto = self._connect_boto3()
            client = self._boto
        about = {} if key is None else {"Key": key}
        return getattr(client, operation)(Bucket=self._root.partition("://")[2], **about, **given)

    def _connect_boto3(self) -> Any:
        """Return boto3's client."""
        try:
            import boto3
            from botocore import UNSIGNED
            from botocore.config import Config
        except ImportError:
            raise ResourceError("writing into a store needs boto3", hint="`pip install boto3`") from None
        is_elsewhere = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        config = Config(
            retries={"total_max_attempts": 1},  # `attempt` does that
            connect_timeout=10,
            read_timeout=120,
            max_pool_connections=32,
            s3={"addressing_style": "path" if is_elsewhere else "auto"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        if os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true"):
            config = config.merge(Config(signature_version=UNSIGNED))
        try:
            return self.make_client(boto3.session.Session(), config)
        except Exception as error:  # a profile that is missing, a broken file
            raise unusable(self._root, error) from None

    def make_client(self, session: Any, config: Any) -> Any:
        """Return a client of a session of boto3."""
        region = os.environ.get("AWS_REGION") or session.region_name or "us-east-1"
        return session.client("s3", region_name=region, config=config)

    def sums(self, data: bytes, crc: int) -> dict[str, str]:
        """Return the checksum that goes with a body, for the store to compare."""
        return {"ChecksumAlgorithm": "CRC32", "ChecksumCRC32": _encoded(crc)}

    def condition(self, key: str, instead_of: str) -> dict[str, str]:
        """Return what lets a request replace nothing but one version, or no object."""
        return {"IfNoneMatch": ABSENT} if instead_of == ABSENT else {"IfMatch": instead_of}

    def written(self, key: str) -> WrittenObject:
        """Return an object with its checksum."""
        answer = self.ask("head_object", key, ChecksumMode="ENABLED")
        return _written(answer, answer["ContentLength"])

    def put(self, key: str, data: bytes, crc: int, instead_of: str | None = None) -> WrittenObject:
        """Write a small object."""
        condition = {} if instead_of is None else self.condition(key, instead_of)
        answer = self.ask("put_object", key, Body=data, **self.sums(data, crc), **condition)
        return _written(answer, len(data))

    def begin(self, key: str) -> str:
        """Begin an upload in parts and return its id."""
        given = {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"}
        try:
            return _WITH_CRC + str(self.ask("create_multipart_upload", key, **given)["UploadId"])
        except Exception as error:
            if self.answer_of(error).code not in _NO_CHECKSUMS:
                raise
        return self.begin_plain(key)

    def begin_plain(self, key: str) -> str:
        """Begin an upload whose parts have MD5s, and the whole no checksum."""
        return _PLAIN + str(self.ask("create_multipart_upload", key)["UploadId"])

    def send_part(self, key: str, upload: str, number: int, data: bytes, crc: int) -> UploadedPart:
        """Send a part."""
        sums = {"ChecksumCRC32": _encoded(crc)} if upload.startswith(_WITH_CRC) else md5_of(data)
        answer = self.ask("upload_part", key, UploadId=_id(upload), PartNumber=number, Body=data, **sums)
        return UploadedPart(number, len(data), answer["ETag"], crc)

    def sent_parts(self, key: str, upload: str) -> dict[int, UploadedPart]:
        """Return the parts that an upload has."""
        parts, mark = dict[int, UploadedPart](), 0
        while True:
            answer = self.ask("list_parts", key, UploadId=_id(upload), PartNumberMarker=mark)
            for part in answer.get("Parts", ()):
                number, crc = part["PartNumber"], _decoded(part.get("ChecksumCRC32"), None)
                parts[number] = UploadedPart(number, part["Size"], part["ETag"], -1 if crc is None else crc)
            if not answer.get("IsTruncated"):
                return parts
            mark = answer["NextPartNumberMarker"]

    def complete(self, key: str, upload: str, parts: Sequence[UploadedPart], crc: int) -> WrittenObject:
        """Make an object of all parts of an upload."""
        has_crc = upload.startswith(_WITH_CRC)
        listed = [
            {
                "PartNumber": part.number,
                "ETag": part.etag,
                **({"ChecksumCRC32": _encoded(part.crc32)} if has_crc else {}),
            }
            for part in parts
        ]
        given: dict[str, Any] = {"UploadId": _id(upload), "MultipartUpload": {"Parts": listed}}
        if has_crc:
            given |= {"ChecksumCRC32": _encoded(crc), "ChecksumType": "FULL_OBJECT"}
        answer = self.ask("complete_multipart_upload", key, **given)
        return _written(answer, sum(part.size for part in parts))

    def abort(self, key: str, upload: str) -> None:
        """End an upload; the store drops its parts."""
        self.ask("abort_multipart_upload", key, UploadId=_id(upload))

    def uploads(self, key: str) -> list[Underway]:
        """Return the uploads under way below a directory."""
        prefix = f"{key}/" if key else ""
        uploads, given = list[Underway](), {"Prefix": prefix}
        while True:
            page = self.ask("list_multipart_uploads", **given)
            uploads += [
                Underway(
                    f"{self._root}/{upload['Key']}",
                    _PLAIN + upload["UploadId"],
                )
                for upload in page.get("Uploads", ())
                if upload["Key"].startswith(prefix)  # moto lists every upload
            ]
            if not page.get("IsTruncated"):
                return uploads
            given |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def _answer_of_boto3(error: Exception) -> StoreAnswer | None:
    """Return what an error of boto3 means that is no answer of a store; None for an error of somebody else."""
    kind = type(error)
    if not kind.__module__.startswith("botocore."):
        return None
    from botocore.exceptions import HTTPClientError, ResponseStreamingError

    if isinstance(error, (HTTPClientError, ResponseStreamingError)):
        return StoreAnswer("", 0, kind.__name__)
    if "Token" in kind.__name__:
        return StoreAnswer("ExpiredToken", 0, kind.__name__)
    return StoreAnswer(NO_CREDENTIALS if "Credential" in kind.__name__ else kind.__name__, 0, kind.__name__)


def _id(upload: str) -> str:
    return upload.partition(":")[2]


def md5_of(data: bytes) -> dict[str, str]:
    """Return the MD5 that goes with a body, for the store to compare."""
    digest = hashlib.md5(data, usedforsecurity=False).digest()
    return {"ContentMD5": base64.b64encode(digest).decode()}


def _encoded(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def _decoded(text: str | None, kind: str | None) -> int | None:
    """Return the CRC-32 of a whole object; None if there is none, or only one of CRC-32s of parts."""
    if not text or kind == "COMPOSITE" or "-" in text:
        return None
    return int.from_bytes(base64.b64decode(text), "big")


def _written(answer: Any, size: int) -> WrittenObject:
    """Return an object of so many bytes, from an answer about it."""
    crc = _decoded(answer.get("ChecksumCRC32"), answer.get("ChecksumType"))
    return WrittenObject(size, answer["ETag"], crc)
