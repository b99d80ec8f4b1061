"""Changing a store, whatever its kind: trying again, and finding out what became of a request without an answer.

A request that failed, or whose answer got lost, may have been carried out. Sent again, it finds that the object is there
already, or that the upload is gone. So the object itself is read, and compared with what was sent.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from shardkit.core.text import escape
from shardkit.errors import IntegrityError, UsageError
from shardkit.files.remote import kinds
from shardkit.files.remote.contract import (
    ABSENT,
    LostUpload,
    OtherVersion,
    Unanswered,
    Underway,
    UploadedPart,
    WritableStore,
    WrittenObject,
    attempt,
    attempt_without_object,
    unanswered,
)

WRITABLE = kinds.WRITABLE
_R = TypeVar("_R")


@functools.cache
def _of_root(root: str) -> StoreWriter:
    return StoreWriter(root)


def writer_of(path: str) -> StoreWriter:
    """Return what changes the store of a path.

    Raises:
        UsageError: the store is read only.
    """
    if not path.startswith(WRITABLE):
        scheme = path.partition("://")[0]
        raise UsageError(f"{scheme}:// is read only", hint="remove files of a repo with hf, or on its page")
    return _of_root(kinds.split(path)[0])


class StoreWriter:
    """What changes a store. Paths are whole, such as `s3://bucket/key`.

    Failures that may pass are tried again; what is raised are the errors that users see.

    Args:
        root: scheme and name, such as `s3://bucket`.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    def _store_of(self, path: str) -> tuple[WritableStore, str]:
        store, key = kinds.store_of(path)
        return cast(WritableStore, store), key

    def _ask(self, path: str, request: Callable[[WritableStore, str], _R]) -> _R:
        """Send a request about an object until it is answered."""
        store, key = self._store_of(path)
        return attempt(store, path, lambda: request(store, key))

    def _change(self, path: str, request: Callable[[WritableStore, str], _R]) -> _R:
        """Send a request that needs no object to be there.

        Raises:
            ResourceError: the store fails.
        """
        store, key = self._store_of(path)
        return attempt_without_object(store, path, lambda: request(store, key))

    def head(self, path: str) -> WrittenObject | None:
        """Return the size, ETag and checksum of an object; None if there is no such object.

        Raises:
            ResourceError: the store does not answer.
        """
        try:
            return self._ask(path, lambda store, key: store.written(key))
        except FileNotFoundError:
            return None

    def get(self, path: str) -> tuple[bytes, str] | None:
        """Return the bytes and the ETag of a small object; None if there is none.

        Raises:
            ResourceError: the store does not answer.
        """
        try:
            return self._ask(path, lambda store, key: store.get(key))
        except FileNotFoundError:
            return None

    def has(self, path: str, data: bytes) -> bool:
        """True if an object has exactly these bytes.

        Raises:
            ResourceError: the store does not answer.
        """
        stored = self.get(path)
        return stored is not None and stored[0] == data

    def put(self, path: str, data: bytes, crc: int) -> WrittenObject:
        """Write a small object, replacing one of that name. The store compares a checksum.

        Raises:
            ResourceError: the store does not take it.
            IntegrityError: the store says that it has other bytes.
        """
        return _checked(path, self._change(path, lambda store, key: store.put(key, data, crc)), crc)

    def create(self, path: str, data: bytes, crc: int) -> bool:
        """Write an object if there is none of its name.

        Returns:
            False if somebody else has written one, even of the same bytes.

        Raises:
            ResourceError: the store refuses for another reason, or fails.
        """
        return self._put_instead(path, data, crc, ABSENT)

    def put_if(self, path: str, data: bytes, crc: int, etag: str | None) -> bool:
        """Write an object if there is none of its name, or only the one of a given ETag.

        Args:
            path: of the object.
            data: all of it.
            crc: its CRC-32.
            etag: of the object that is replaced; None if there must be none.

        Returns:
            False if an object of other bytes is there.

        Raises:
            ResourceError: the store refuses for another reason, or fails.
        """
        return self._put_instead(path, data, crc, ABSENT if etag is None else etag) or self.has(path, data)

    def _put_instead(self, path: str, data: bytes, crc: int, instead_of: str) -> bool:
        """Write an object under a condition; False if it does not hold, and no try before has made it untrue."""
        num_tries = 0

        def send(store: WritableStore, key: str) -> None:
            nonlocal num_tries
            num_tries += 1
            store.put(key, data, crc, instead_of)

        try:
            self._ask(path, send)
        except (OtherVersion, FileNotFoundError) as error:
            if isinstance(error, FileNotFoundError) and instead_of == ABSENT:
                raise unanswered(path, "HTTP 404") from None
            return num_tries > 1 and self.has(path, data)
        except Unanswered:
            if not self.has(path, data):
                raise
        return True

    def delete(self, path: str) -> None:
        """Remove an object, if there is one.

        Raises:
            ResourceError: the store refuses.
        """
        self.delete_all([path])

    def delete_all(self, paths: Sequence[str]) -> None:
        """Remove objects of this store; one that is not there is no error.

        Raises:
            ResourceError: the store refuses.
        """
        keys = [kinds.split(path)[1] for path in paths]
        self._change(paths[0], lambda store, _: store.delete(keys))

    def begin(self, path: str) -> str:
        """Begin an upload in parts and return its id.

        Raises:
            ResourceError: the store refuses.
        """
        return self._change(path, lambda store, key: store.begin(key))

    def send_part(self, path: str, upload: str, number: int, data: bytes, crc: int) -> UploadedPart:
        """Send a part; number 1 is the first. The store compares a checksum.

        Raises:
            LostUpload: the store no longer knows the upload.
            ResourceError: the store does not take it.
        """
        return self._change(path, lambda store, key: store.send_part(key, upload, number, data, crc))

    def sent_parts(self, path: str, upload: str) -> dict[int, UploadedPart] | None:
        """Return the parts that an upload has; None if there is no such upload.

        Raises:
            ResourceError: the store does not answer.
        """
        try:
            return self._ask(path, lambda store, key: store.sent_parts(key, upload))
        except (LostUpload, FileNotFoundError):
            return None

    def complete(self, path: str, upload: str, parts: Sequence[UploadedPart], crc: int) -> WrittenObject:
        """Make an object of all parts of an upload, in order.

        Args:
            path: of the object.
            upload: its id.
            parts: all of them.
            crc: CRC-32 of the whole.

        Raises:
            LostUpload: the store no longer knows the upload, and has no such object.
            IntegrityError: the store says that it has other bytes.
            ResourceError: the store refuses.
        """
        try:
            made = self._change(path, lambda store, key: store.complete(key, upload, parts, crc))
        except (LostUpload, Unanswered):
            stored = self.head(path)
            if stored is None or not _is_made_of(stored, parts, crc):
                raise
            return stored
        return _checked(path, made, crc)

    def abort(self, path: str, upload: str) -> None:
        """End an upload; one that the store does not know is no error.

        Raises:
            ResourceError: the store refuses.
        """
        with contextlib.suppress(LostUpload):
            self._change(path, lambda store, key: store.abort(key, upload))

    def uploads(self, directory: str) -> list[Underway]:
        """Return the uploads under way below a directory.

        Raises:
            ResourceError: the store does not answer.
        """
        return self._change(directory, lambda store, key: store.uploads(key))

    def objects(self, directory: str) -> list[tuple[str, int]]:
        """Return (path, bytes) of every object below a directory.

        Raises:
            ResourceError: the store does not answer.
        """
        objects = self._change(directory, lambda store, key: store.objects(key))
        return [(f"{self._root}/{key}", size) for key, size in objects]


def _checked(path: str, made: WrittenObject, crc: int) -> WrittenObject:
    """Compare what a store says of a new object with what it was sent."""
    if made.crc32 is not None and made.crc32 != crc:
        raise IntegrityError(
            f"{escape(path)}: the store has other bytes than it was sent: CRC-32 {made.crc32:08x}, sent {crc:08x}",
            hint="run the same command again",
        )
    return made


def _is_made_of(stored: WrittenObject, parts: Sequence[UploadedPart], crc: int) -> bool:
    if stored.size != sum(part.size for part in parts):
        return False
    return stored.crc32 == crc if stored.crc32 is not None else stored.etag.strip('"') == _etag_of(parts)


def _etag_of(parts: Sequence[UploadedPart]) -> str:
    """Return the ETag that most stores give an object of parts: the MD5 of their MD5s, and their number."""
    try:
        joined = b"".join(bytes.fromhex(part.etag.strip('"')) for part in parts)
    except ValueError:
        return ""
    return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(parts)}"
