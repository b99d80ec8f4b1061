"""Requests that change a container of Azure. Each is sent with the MD5 of its body, which Azure compares.

obstore signs the addresses, with whatever credentials it has; the requests are our own, as obstore sends no MD5, and no blocks
by name. A part is a block. Its name has its CRC-32, so that another run knows which blocks are there. Azure drops blocks
that nobody has committed after a week; they cannot be listed or ended.

Source: Azure Blob Storage REST API (Put Blob, Put Block, Put Block List, Get Block List, error codes).
"""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import quote

from shardkit.core.text import escape
from shardkit.errors import ShardkitError, UsageError
from shardkit.files.remote.cloud import Bucket
from shardkit.files.remote.contract import (
    FIRST_WAIT_S,
    NUM_TRIES,
    Underway,
    UploadedPart,
    WrittenObject,
    attempt,
)

_SCHEME = "az://"
_SIGNED_FOR, _SIGN_AGAIN_S = timedelta(hours=1), 1800
_MAX_SIGNED = 1000
_VERSION = "2021-08-06"
_BLOCKS = "blocks"  # what stands for an upload: a blob has one set of blocks that nobody has committed
_BLOCK = re.compile(r"<Block><Name>([^<]+)</Name><Size>(\d+)</Size></Block>")
_NAME = re.compile(r"(\d{5})-([0-9a-f]{8})")
_PLAIN_KEY = re.compile(r"[\w./~-]+", re.ASCII)

_lock = threading.Lock()
_buckets: dict[str, Bucket] = {}
_signed: dict[tuple[str, str], tuple[str, float]] = {}
_pools: list[Any] = []


class _Refused(Exception):
    """An answer that is no success; in the words that `cloud.explain` looks for."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"status code: {status} <Code>{code}</Code>" if code else f"status code: {status}")
        self.status, self.code = status, code


def forget_client() -> None:
    """Let the next request read the environment anew."""
    with _lock:
        _buckets.clear()
        _signed.clear()
        _pools.clear()


def _find(path: str) -> tuple[Bucket, str]:
    """Return (the container of a path, its key)."""
    name, _, key = path.removeprefix(_SCHEME).partition("/")
    with _lock:
        return _buckets.setdefault(name, Bucket(_SCHEME + name)), key


def _address(path: str, verb: Literal["GET", "PUT"]) -> str:
    """Return the address of an object, signed for a verb."""
    bucket, key = _find(path)
    client, now = bucket.client(), time.monotonic()
    with _lock:
        url, until = _signed.get((path, verb), ("", 0.0))
    if now >= until:
        if not _PLAIN_KEY.fullmatch(key):  # obstore signs these in a form that Azure does not expect
            raise UsageError(
                f"{escape(path)}: shardkit cannot write names with blanks or special characters to az://",
                hint="choose a name of letters, digits, '-', '_' and '.'",
            )
        import obstore

        url = obstore.sign(client, verb, key, _SIGNED_FOR)
        with _lock:
            if len(_signed) >= _MAX_SIGNED:
                _signed.clear()
            _signed[path, verb] = url, now + _SIGN_AGAIN_S
    return url


def _pool() -> Any:
    with _lock:
        if not _pools:
            import urllib3

            timeout = urllib3.Timeout(connect=10, read=120)
            _pools.append(urllib3.PoolManager(maxsize=32, timeout=timeout, retries=False))
        return _pools[0]


def _send(path: str, query: str = "", body: bytes = b"", **headers: str) -> Any:
    """Send a body to an object, and return the answer's headers.

    Raises:
        _Refused: the answer is no success.
    """
    sums = {"Content-MD5": base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()}
    url = _address(path, "PUT") + query
    answer = _pool().request("PUT", url, body=body, headers={"x-ms-version": _VERSION, **sums, **headers})
    if answer.status >= 300:
        raise _refusal(answer)
    return answer.headers


def _refusal(answer: Any) -> _Refused:
    code = answer.headers.get("x-ms-error-code") or ""
    if code == "InvalidOperation":  # Azurite's word for it
        code = "Md5Mismatch"
    return _Refused(answer.status, code if re.fullmatch(r"\w{1,60}", code) else "")


def head(path: str) -> WrittenObject | None:
    """Return the size and ETag of an object; None if there is no such object."""
    bucket, key = _find(path)
    try:
        found = attempt(bucket, path, lambda: bucket.head(key))
    except FileNotFoundError:
        return None
    return WrittenObject(found.size, found.etag, None)


def get(path: str) -> tuple[bytes, str] | None:
    """Return the bytes and the ETag of a small object; None if there is none."""
    bucket, key = _find(path)

    def call() -> tuple[bytes, str]:
        client = bucket.client()
        import obstore

        answer: Any = obstore.get(client, key)
        return bytes(answer.bytes()), answer.meta["e_tag"]

    try:
        return attempt(bucket, path, call)
    except FileNotFoundError:
        return None


def _put(path: str, data: bytes, **headers: str) -> WrittenObject:
    said = _send(path, "", data, **{"x-ms-blob-type": "BlockBlob", **headers})
    return WrittenObject(len(data), said["etag"], None)


def put(path: str, data: bytes, crc: int) -> WrittenObject:
    """Write a small object, replacing one of that name."""
    return attempt(_find(path)[0], path, lambda: _put(path, data))


def put_if(path: str, data: bytes, crc: int, etag: str | None) -> bool:
    """Write an object if there is none of its name, or only the one of a given ETag; False if another is there."""
    condition = {"If-None-Match": "*"} if etag is None else {"If-Match": etag}
    bucket, is_unclear = _find(path)[0], False
    for turn in range(NUM_TRIES):
        try:
            _put(path, data, **condition)
        except ShardkitError:
            raise
        except Exception as error:
            is_condition = isinstance(error, _Refused) and (error.status, error.code) in (
                (412, "ConditionNotMet"),
                (409, "BlobAlreadyExists"),
                *([(404, "BlobNotFound")] if etag is not None else []),
            )
            if is_condition:
                return is_unclear and has(path, data)
            refusal = bucket.explain(error, path)
            if not refusal.may_pass:
                raise refusal.error from None
            is_unclear = True
            if turn + 1 == NUM_TRIES:
                if has(path, data):
                    return True
                raise refusal.error from None
            time.sleep(FIRST_WAIT_S * 2**turn)
        else:
            return True
    raise AssertionError


def has(path: str, data: bytes) -> bool:
    """True if an object has exactly these bytes."""
    found = get(path)
    return found is not None and found[0] == data


def delete(path: str) -> None:
    """Remove an object, if there is one."""
    bucket, key = _find(path)
    attempt(bucket, path, lambda: bucket.delete([key]))


def begin(path: str) -> str:
    """Return the id of an upload, the same for all. Nothing is sent before its first part."""
    return _BLOCKS


def _block(number: int, crc: int) -> str:
    return base64.b64encode(f"{number:05d}-{crc:08x}".encode()).decode()


def send_part(path: str, upload: str, number: int, data: bytes, crc: int) -> UploadedPart:
    """Send a part; number 1 is the first."""
    name = _block(number, crc)
    query = f"&comp=block&blockid={quote(name, safe='')}"
    attempt(_find(path)[0], path, lambda: _send(path, query, data))
    return UploadedPart(number, len(data), name, crc)


def sent_parts(path: str, upload: str) -> dict[int, UploadedPart] | None:
    """Return the parts that nobody has committed; None if there are none."""

    def call() -> str:
        url = _address(path, "GET") + "&comp=blocklist&blocklisttype=uncommitted"
        answer = _pool().request("GET", url, headers={"x-ms-version": _VERSION})
        if answer.status == 404:
            return ""
        if answer.status >= 300:
            raise _refusal(answer)
        return str(answer.data, "utf-8", "replace")

    found = dict[int, UploadedPart]()
    for name, size in _BLOCK.findall(attempt(_find(path)[0], path, call)):
        said = _NAME.fullmatch(base64.b64decode(name).decode("ascii", "replace"))
        if said is not None:
            number = int(said[1])
            found[number] = UploadedPart(number, int(size), name, int(said[2], 16))
    return found or None


def is_part(sent: UploadedPart, data: bytes, crc: int) -> bool:
    """True if a part that the store has is this one."""
    return (sent.size, sent.crc32) == (len(data), crc)


def complete(path: str, upload: str, parts: Sequence[UploadedPart], crc: int) -> WrittenObject:
    """Make an object of all parts. The request may be sent again: it names blocks that are in the object by then."""
    listed = "".join(f"<Latest>{part.etag}</Latest>" for part in parts)
    body = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{listed}</BlockList>'.encode()
    said = attempt(_find(path)[0], path, lambda: _send(path, "&comp=blocklist", body))
    return WrittenObject(sum(part.size for part in parts), said["etag"], None)


def abort(path: str, upload: str) -> None:
    """Do nothing: Azure has no such request, and drops the blocks after a week."""


def uploads(directory: str) -> list[Underway]:
    """Return nothing: blocks that nobody has committed cannot be listed."""
    return []


def objects(directory: str) -> Iterator[tuple[str, int]]:
    """Yield (path, bytes) of every object below a directory."""
    bucket, key = _find(directory)

    def call() -> list[Any]:
        client = bucket.client()
        import obstore

        return [each for page in obstore.list(client, key or None) for each in page]

    root = directory.removesuffix(f"/{key}") if key else directory
    for each in attempt(bucket, directory, call):
        yield f"{root}/{each['path']}", each["size"]
