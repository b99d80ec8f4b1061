"""Writing into a container of Azure. Each request is sent with the MD5 of its body, which Azure compares.

obstore signs the addresses, with whatever credentials it has; the requests are our own, as obstore sends no MD5, and no blocks
by name. A part is a block. Its name has its CRC-32, so that another run knows which blocks are there. Azure drops blocks
that nobody has committed after a week; they cannot be listed or ended.

Source: Azure Blob Storage REST API (Put Blob, Put Block, Put Block List, Get Block List, error codes).
"""

from __future__ import annotations

import base64
import re
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import quote

from shardkit.core.text import escape
from shardkit.errors import UsageError
from shardkit.files.remote.cloud import Bucket
from shardkit.files.remote.contract import ABSENT, StoreAnswer, Underway, UploadedPart, WrittenObject
from shardkit.files.remote.s3 import md5_of

_SIGNED_FOR, _SIGN_AGAIN_S = timedelta(hours=1), 1800
_MAX_SIGNED = 1000
_VERSION = {"x-ms-version": "2021-08-06"}
_BLOCKS = "blocks"  # what stands for an upload: a blob has one set of blocks that nobody has committed
_BLOCK = re.compile(r"<Block><Name>([^<]+)</Name><Size>(\d+)</Size></Block>")
_NAME = re.compile(r"(\d{5})-([0-9a-f]{8})")
_PLAIN_KEY = re.compile(r"[\w./~-]+", re.ASCII)


class _Refused(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(status, code)
        self.status, self.code = status, code


class AzureContainer(Bucket):
    """A container of Azure.

    Args:
        root: scheme and name, such as `az://container`.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._azure_lock = threading.Lock()
        self._signed: dict[tuple[str, str], tuple[str, float]] = {}
        self._pool: Any = None

    def answer_of(self, error: Exception) -> StoreAnswer:
        """Return what the store said."""
        if isinstance(error, _Refused):
            return StoreAnswer(error.code, error.status, "")
        if type(error).__module__.startswith("urllib3."):  # its words have the signed address
            return StoreAnswer("", 0, type(error).__name__)
        return super().answer_of(error)

    def put(self, key: str, data: bytes, crc: int, instead_of: str | None = None) -> WrittenObject:
        """Write a small object."""
        headers = {"x-ms-blob-type": "BlockBlob"}
        if instead_of is not None:
            headers["If-None-Match" if instead_of == ABSENT else "If-Match"] = instead_of
        answer = self._send(key, "", data, headers)
        return WrittenObject(len(data), answer.headers["etag"], None)

    def begin(self, key: str) -> str:
        """Return the id of an upload, the same for all. Nothing is sent before its first part."""
        return _BLOCKS

    def send_part(self, key: str, upload: str, number: int, data: bytes, crc: int) -> UploadedPart:
        """Send a part."""
        name = base64.b64encode(f"{number:05d}-{crc:08x}".encode()).decode()
        self._send(key, f"&comp=block&blockid={quote(name, safe='')}", data)
        return UploadedPart(number, len(data), name, crc)

    def sent_parts(self, key: str, upload: str) -> dict[int, UploadedPart]:
        """Return the parts that nobody has committed."""
        url = self._address(key, "GET") + "&comp=blocklist&blocklisttype=uncommitted"
        answer = self._request("GET", url, None, _VERSION)
        parts = dict[int, UploadedPart]()
        for name, size in _BLOCK.findall(str(answer.data, "utf-8", "replace")):
            said = _NAME.fullmatch(base64.b64decode(name).decode("ascii", "replace"))
            if said is not None:
                number = int(said[1])
                parts[number] = UploadedPart(number, int(size), name, int(said[2], 16))
        return parts

    def complete(self, key: str, upload: str, parts: Sequence[UploadedPart], crc: int) -> WrittenObject:
        """Make an object of all parts. Sent again, the request names blocks that are in the object by then."""
        listed = "".join(f"<Latest>{part.etag}</Latest>" for part in parts)
        body = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{listed}</BlockList>'.encode()
        answer = self._send(key, "&comp=blocklist", body)
        return WrittenObject(sum(part.size for part in parts), answer.headers["etag"], None)

    def abort(self, key: str, upload: str) -> None:
        """Do nothing: Azure has no such request, and drops the blocks after a week."""

    def uploads(self, key: str) -> list[Underway]:
        """Return nothing: blocks that nobody has committed cannot be listed."""
        return []

    def _address(self, key: str, verb: Literal["GET", "PUT"]) -> str:
        """Return the address of an object, signed for a verb."""
        client, now = self.client(), time.monotonic()
        with self._azure_lock:
            url, until = self._signed.get((key, verb), ("", 0.0))
        if now >= until:
            if not _PLAIN_KEY.fullmatch(key):  # obstore signs these in a form that Azure does not expect
                raise UsageError(
                    f"{escape(f'{self._root}/{key}')}: shardkit cannot write names with blanks or special characters to az://",
                    hint="choose a name of letters, digits, '-', '_' and '.'",
                )
            import obstore

            url = obstore.sign(client, verb, key, _SIGNED_FOR)
            with self._azure_lock:
                if len(self._signed) >= _MAX_SIGNED:
                    self._signed.clear()
                self._signed[key, verb] = url, now + _SIGN_AGAIN_S
        return url

    def _send(self, key: str, query: str, body: bytes, headers: dict[str, str] | None = None) -> Any:
        """Send a body to an object, and return the answer.

        Raises:
            _Refused: it is no success.
        """
        sums = {"Content-MD5": md5_of(body)["ContentMD5"]}
        url = self._address(key, "PUT") + query
        return self._request("PUT", url, body, {**_VERSION, **sums, **(headers or {})})

    def _request(self, verb: str, url: str, body: bytes | None, headers: dict[str, str]) -> Any:
        with self._azure_lock:
            if self._pool is None:
                import urllib3

                timeout = urllib3.Timeout(connect=10, read=120)
                self._pool = urllib3.PoolManager(maxsize=32, timeout=timeout, retries=False)
        answer = self._pool.request(verb, url, body=body, headers=headers)
        if answer.status >= 300:
            code = answer.headers.get("x-ms-error-code") or ""
            if code == "InvalidOperation":  # Azurite's word for it
                code = "Md5Mismatch"
            raise _Refused(answer.status, code if re.fullmatch(r"\w{1,60}", code) else "")
        return answer
