"""Requests that change an S3 store, by boto3: it takes a CRC-32 for each part and for the whole, which the store compares.

Google's store takes them too, with MD5s in place of CRC-32s; `google` has what else is different there.

Credentials are those of boto3's own chain, profiles of `~/.aws` included. What a store answers is never shown as it is:
it may hold keys. Failures that may pass are tried again, with longer and longer waits.

Source: Amazon S3 API (CreateMultipartUpload, UploadPart, CompleteMultipartUpload, PutObject, error codes); boto3 1.44.
"""

from __future__ import annotations

import base64
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from shardkit.core.text import escape
from shardkit.errors import IntegrityError, ResourceError
from shardkit.files.remote import google
from shardkit.files.remote.cloud import credentials_for, reach
from shardkit.files.remote.contract import LostUpload, Underway, UploadedPart, WrittenObject

NUM_TRIES = 7
FIRST_WAIT_S = 0.1
_BUSY = (
    "SlowDown",
    "InternalError",
    "ServiceUnavailable",
    "RequestTimeout",
    "Throttling",
    "ThrottlingException",
)
_SPOILED = (
    "BadDigest",
    "InvalidDigest",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
    "MalformedXML",  # boto3 makes no such; the list of parts has no checksum of its own
)
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired")
_NO_CHECKSUMS = ("InvalidArgument", "InvalidRequest", "NotImplemented", "MalformedXML")
_WITH_CRC, _PLAIN = "crc32:", "plain:"
"""What stands before an upload's id: whether the store keeps the CRC-32 of the whole."""

_R = TypeVar("_R")


_lock = threading.Lock()
_clients: dict[tuple[int, bool], Any] = {}


def _is_google(path: str) -> bool:
    return path.startswith(google.SCHEME)


def _client(path: str) -> Any:
    """Return the client of this process for the store of a path."""
    mine = (os.getpid(), _is_google(path))
    with _lock:
        if mine not in _clients:
            for other in [key for key in _clients if key[0] != mine[0]]:
                del _clients[other]
            _clients[mine] = _connect(is_google=mine[1])
        return _clients[mine]


def forget_client() -> None:
    """Let the next request read the environment anew."""
    with _lock:
        _clients.clear()
    google.forget()


def _connect(*, is_google: bool) -> Any:
    try:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config
    except ImportError:
        raise ResourceError("writing into a store needs boto3", hint="pip install boto3") from None
    is_elsewhere = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    config = Config(
        retries={"total_max_attempts": 1},
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
        session = boto3.session.Session()
        if is_google:
            unsigned = config.merge(Config(signature_version=UNSIGNED, s3={"addressing_style": "path"}))
            return google.connect(session, unsigned)
        region = os.environ.get("AWS_REGION") or session.region_name or "us-east-1"
        return session.client("s3", region_name=region, config=config)
    except (
        Exception
    ) as error:  # a profile that is missing, a broken file: its own words may hold what is in it
        raise ResourceError(
            f"S3 cannot be used with the settings of this machine ({type(error).__name__})",
            hint="check AWS_PROFILE, AWS_ENDPOINT_URL and ~/.aws",
        ) from None


def bucket_and_key(path: str) -> tuple[str, str]:
    """Return the bucket and the key of `s3://BUCKET/KEY`."""
    bucket, _, key = path.partition("://")[2].partition("/")
    return bucket, key


def _ask(path: str, operation: str, **given: Any) -> Any:
    """Send one request about an object."""
    bucket, key = bucket_and_key(path)
    return getattr(_client(path), operation)(Bucket=bucket, Key=key, **given)


def _retried(path: str, call: Callable[[], _R]) -> _R:
    """Send a request and return its answer; failures that may pass are tried again."""
    for turn in range(NUM_TRIES):
        try:
            return call()
        except ResourceError:
            raise
        except Exception as error:  # boto3's own classes
            if turn + 1 == NUM_TRIES or not _may_pass(error):
                _refuse(error, path)
        _wait(turn)
    raise AssertionError


def _wait(turn: int) -> None:
    time.sleep(
        FIRST_WAIT_S * 2**turn * random.uniform(0.5, 1)
    )  # many processes that failed at once do not come back at once


def _said(error: Exception) -> tuple[str, int]:
    """Return the store's error code and HTTP status; empty and 0 where it gave none."""
    response: Any = getattr(error, "response", None)
    if not isinstance(response, dict):
        return "", 0
    code = str(response.get("Error", {}).get("Code", ""))
    return code, int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _may_pass(error: Exception) -> bool:
    from botocore.exceptions import HTTPClientError, ResponseStreamingError

    code, status = _said(error)
    is_network = isinstance(error, (HTTPClientError, ResponseStreamingError, ConnectionError, TimeoutError))
    return is_network or status >= 500 or status in (408, 429) or code in (*_BUSY, *_SPOILED)


def _refuse(error: Exception, path: str) -> NoReturn:
    """Raise in our words why a store did not do it."""
    where, (code, status) = escape(path), _said(error)
    said = (
        ", ".join(filter(None, (escape(code[:60]), f"HTTP {status}" if status else "")))
        or type(error).__name__
    )
    if code == "NoSuchUpload":
        raise LostUpload(
            f"{where}: the store no longer knows the upload, somebody ended it",
            hint="run the same command again; what was finished is kept",
        ) from None
    if code == "NoSuchBucket":
        raise ResourceError(
            f"{where}: there is no such bucket ({said})", hint="check the name of the bucket"
        ) from None
    if code in _EXPIRED or "Token" in type(error).__name__:
        raise ResourceError(
            f"{where}: the credentials have expired ({said})",
            hint="get new ones as you do for the store's own tools, such as aws sso login; then run the same command again",
        ) from None
    if "Credential" in type(error).__name__:
        raise ResourceError(
            f"{where}: no credentials were found",
            hint=f"give them as the store's own tools take them: {credentials_for(path)}",
        ) from None
    if status in (401, 403):
        raise ResourceError(
            f"{where}: the store denies access ({said})",
            hint=f"give credentials that may read, write and list there: {credentials_for(path)}",
        ) from None
    raise ResourceError(
        f"{where}: the store cannot be reached or fails ({said})",
        hint=f"{reach(path)}; then run the same command again",
    ) from None


def _sums(path: str, data: bytes, crc: int) -> dict[str, str]:
    """Return the checksum that goes with a body, for the store to compare."""
    if _is_google(path):
        return {"ContentMD5": _md5(data)}
    return {"ChecksumAlgorithm": "CRC32", "ChecksumCRC32": _encoded(crc)}


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _encoded(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def _decoded(text: str | None, kind: str | None) -> int | None:
    """Return the CRC-32 of a whole object; None if there is none, or only one of CRC-32s of parts."""
    if not text or kind == "COMPOSITE" or "-" in text:
        return None
    return int.from_bytes(base64.b64decode(text), "big")


def _is_missing(error: Exception) -> bool:
    code, status = _said(error)
    return status == 404 and code != "NoSuchBucket"


def _head(path: str) -> Any:
    """Return the whole answer about an object; None if there is none."""

    def call() -> Any:
        try:
            return _ask(path, "head_object", ChecksumMode="ENABLED")
        except Exception as error:
            if _is_missing(error):
                return None
            raise

    return _retried(path, call)


def head(path: str) -> WrittenObject | None:
    """Return the size, ETag and checksum of an object; None if there is no such object.

    Raises:
        ResourceError: the store does not answer.
    """
    answer = _head(path)
    if answer is None:
        return None
    crc = _decoded(answer.get("ChecksumCRC32"), answer.get("ChecksumType"))
    return WrittenObject(answer["ContentLength"], answer["ETag"], crc)


def get(path: str) -> tuple[bytes, str] | None:
    """Return the bytes and the ETag of a small object; None if there is none.

    Raises:
        ResourceError: the store does not answer.
    """

    def call() -> tuple[bytes, str] | None:
        try:
            answer = _ask(path, "get_object")
            data = answer["Body"].read()
        except Exception as error:
            if _is_missing(error):
                return None
            raise
        if len(data) != answer["ContentLength"]:
            raise ConnectionError("a short body")
        return data, answer["ETag"]

    return _retried(path, call)


def put(path: str, data: bytes, crc: int) -> WrittenObject:
    """Write a small object, replacing one of that name.

    Raises:
        ResourceError: the store does not take it.
        IntegrityError: the store says that it has other bytes.
    """
    given = {"Body": data, **_sums(path, data, crc)}
    answer = _retried(path, lambda: _ask(path, "put_object", **given))
    return _checked(path, answer, len(data), crc)


def _checked(path: str, answer: Any, size: int, crc: int) -> WrittenObject:
    """Compare what the store says of a new object with what it was sent."""
    kept = _decoded(answer.get("ChecksumCRC32"), answer.get("ChecksumType"))
    if kept is not None and kept != crc:
        raise IntegrityError(
            f"{escape(path)}: the store has other bytes than it was sent: CRC-32 {kept:08x}, sent {crc:08x}",
            hint="run the same command again",
        )
    return WrittenObject(size, answer["ETag"], kept)


def put_if(path: str, data: bytes, crc: int, etag: str | None) -> bool:
    """Write an object if there is none of its name, or only the one of a given ETag.

    The answer to a request may get lost. Then the object itself tells whether it was carried out.

    Args:
        path: of the object.
        data: all of it.
        crc: its CRC-32.
        etag: of the object that is replaced; None if there must be none.

    Returns:
        False if another object is there.

    Raises:
        ResourceError: the store refuses for another reason, or fails.
    """
    if etag is not None and _is_google(path):
        etag = _generation(path, etag)
        if etag is None:
            return False
    condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
    given = {"Body": data, **_sums(path, data, crc), **condition}
    is_unclear = False
    for turn in range(NUM_TRIES):
        try:
            _ask(path, "put_object", **given)
        except ResourceError:
            raise
        except Exception as error:
            code, status = _said(error)
            is_gone = status == 404 and code != "NoSuchBucket" and etag is not None
            if status == 412 or is_gone:
                return is_unclear and has(path, data)
            is_conflict = status == 409  # somebody else is writing it at this moment
            if not is_conflict and not _may_pass(error):
                _refuse(error, path)
            is_unclear = is_unclear or not is_conflict
            if turn + 1 == NUM_TRIES:
                if has(path, data):
                    return True
                _refuse(error, path)
            _wait(turn)
        else:
            return True
    raise AssertionError


def _generation(path: str, etag: str) -> str | None:
    """Return the generation that has an ETag, if that is the object now."""
    answer = _head(path)
    if answer is None or answer["ETag"] != etag:
        return None
    said: str | None = answer["ResponseMetadata"]["HTTPHeaders"].get(google.GENERATION)
    return said


def has(path: str, data: bytes) -> bool:
    """True if an object has exactly these bytes.

    Raises:
        ResourceError: the store does not answer.
    """
    found = get(path)
    return found is not None and found[0] == data


def delete(path: str) -> None:
    """Remove an object, if there is one.

    Raises:
        ResourceError: the store refuses.
    """

    def call() -> None:
        try:
            _ask(path, "delete_object")
        except Exception as error:
            if not _is_missing(error):  # Google says so
                raise

    _retried(path, call)


def begin(path: str) -> str:
    """Begin an upload in parts and return its id.

    Raises:
        ResourceError: the store refuses.
    """
    given = {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"}

    def call() -> str:
        try:
            if _is_google(path):
                return _PLAIN + str(_ask(path, "create_multipart_upload")["UploadId"])
            return _WITH_CRC + str(_ask(path, "create_multipart_upload", **given)["UploadId"])
        except Exception as error:
            if _said(error)[0] not in _NO_CHECKSUMS:
                raise
        return _PLAIN + str(_ask(path, "create_multipart_upload")["UploadId"])

    return _retried(path, call)


def _id(upload: str) -> str:
    return upload.partition(":")[2]


def send_part(path: str, upload: str, number: int, data: bytes, crc: int) -> UploadedPart:
    """Send a part; number 1 is the first.

    Raises:
        LostUpload: the store no longer knows the upload.
        ResourceError: the store does not take it.
    """
    given: dict[str, Any] = {"UploadId": _id(upload), "PartNumber": number, "Body": data}
    if upload.startswith(_WITH_CRC):
        given["ChecksumCRC32"] = _encoded(crc)
    else:
        given["ContentMD5"] = _md5(data)
    answer = _retried(path, lambda: _ask(path, "upload_part", **given))
    return UploadedPart(number, len(data), answer["ETag"], crc)


def sent_parts(path: str, upload: str) -> dict[int, UploadedPart] | None:
    """Return the parts that an upload has, with a CRC-32 of -1 where the store does not tell; None if there is no upload.

    Raises:
        ResourceError: the store does not answer.
    """
    found, given = dict[int, UploadedPart](), {"UploadId": _id(upload), "PartNumberMarker": 0}
    while True:
        try:
            answer = _retried(path, lambda: _ask(path, "list_parts", **given))
        except LostUpload:
            return None
        for each in answer.get("Parts", ()):
            crc = _decoded(each.get("ChecksumCRC32"), None)
            found[each["PartNumber"]] = UploadedPart(
                each["PartNumber"], each["Size"], each["ETag"], -1 if crc is None else crc
            )
        if not answer.get("IsTruncated"):
            return found
        given["PartNumberMarker"] = answer["NextPartNumberMarker"]


def is_part(sent: UploadedPart, data: bytes, crc: int) -> bool:
    """True if a part that the store has is surely this one: by its CRC-32, or by the MD5 that is its ETag."""
    if sent.size != len(data):
        return False
    if sent.crc32 >= 0:
        return sent.crc32 == crc
    return sent.etag.strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest()


def complete(path: str, upload: str, parts: Sequence[UploadedPart], crc: int) -> WrittenObject:
    """Make an object of all parts of an upload.

    Args:
        path: of the object.
        upload: its id.
        parts: all of them, in order.
        crc: CRC-32 of the whole.

    Raises:
        LostUpload: the store no longer knows the upload, and has no such object.
        IntegrityError: the store says that it has other bytes.
        ResourceError: the store refuses.
    """
    size, has_crc = sum(part.size for part in parts), upload.startswith(_WITH_CRC)
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
    try:
        answer = _retried(path, lambda: _ask(path, "complete_multipart_upload", **given))
    except LostUpload:  # an answer that got lost: the object is there all the same
        found = head(path)
        if found is None or found.size != size or not _is_made_of(found, parts, crc):
            raise
        return found
    return _checked(path, answer, size, crc)


def _is_made_of(found: WrittenObject, parts: Sequence[UploadedPart], crc: int) -> bool:
    if found.crc32 is not None:
        return found.crc32 == crc
    return found.etag.strip('"') == etag_of(parts)


def etag_of(parts: Sequence[UploadedPart]) -> str:
    """Return the ETag that most stores give an object of parts: the MD5 of their MD5s, and their number."""
    try:
        joined = b"".join(bytes.fromhex(part.etag.strip('"')) for part in parts)
    except ValueError:
        return ""
    return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(parts)}"


def abort(path: str, upload: str) -> None:
    """End an upload; the store drops its parts.

    Raises:
        ResourceError: the store refuses.
    """
    try:
        _retried(path, lambda: _ask(path, "abort_multipart_upload", UploadId=_id(upload)))
    except LostUpload:
        pass


def uploads(directory: str) -> list[Underway]:
    """Return the uploads under way below a directory.

    Raises:
        ResourceError: the store does not answer.
    """
    marks = (("KeyMarker", "NextKeyMarker"), ("UploadIdMarker", "NextUploadIdMarker"))
    return [
        Underway(path, _PLAIN + each["UploadId"], each["Initiated"].timestamp())
        for page in _pages(directory, "list_multipart_uploads", marks)
        for each in page.get("Uploads", ())
        if (path := _path_of(directory, each["Key"])).startswith(directory + "/")  # moto lists every upload
    ]


def objects(directory: str) -> Iterator[tuple[str, int]]:
    """Yield (path, bytes) of every object below a directory.

    Raises:
        ResourceError: the store does not answer.
    """
    for page in _pages(directory, "list_objects_v2", (("ContinuationToken", "NextContinuationToken"),)):
        for each in page.get("Contents", ()):
            yield _path_of(directory, each["Key"]), each["Size"]


def _path_of(directory: str, key: str) -> str:
    return f"{directory.partition('://')[0]}://{bucket_and_key(directory)[0]}/{key}"


def _pages(directory: str, operation: str, marks: Sequence[tuple[str, str]]) -> Iterator[Any]:
    """Yield the pages of a listing; `marks` are (what is asked for, what the page before says of it)."""
    bucket, key = bucket_and_key(directory)
    given: dict[str, Any] = {"Bucket": bucket, "Prefix": f"{key}/" if key else ""}

    def ask() -> Any:
        return getattr(_client(directory), operation)(**given)

    while True:
        page = _retried(directory, ask)
        yield page
        if not page.get("IsTruncated"):
            return
        given |= {mark: page[said] for mark, said in marks}
