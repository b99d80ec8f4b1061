"""The objects below an address of S3, Google or Azure, for what writes: whole files, and puts under a condition.

Names are relative to the address. Requests that may succeed a moment later are repeated, and errors are in our own
words. obstore repeats no part that a store refused as damaged or expired, and no end of an upload whose answer was
lost, so a put of a file is repeated as a whole.

Source: obstore 0.12.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, cast

from shardkit.errors import UsageError
from shardkit.files.remote.cloud import Bucket
from shardkit.files.remote.contract import attempt, unanswered
from shardkit.files.remote.kinds import WRITABLE, split, store_of

PART_NBYTES = 8 << 20
NUM_SENT = 4
"""Parts of a file that are sent at once. An upload takes (NUM_SENT + 1) parts of memory."""
NUM_PUTS, FIRST_PAUSE_S = 3, 1.0
"""Of a file. obstore looks for credentials again during the pause."""
NUM_RETRIES = 5
"""Of a part, by obstore."""
_MAX_PARTS = 9_000  # stores take 10,000

Version = Mapping[str, str]
"""What a condition names: the ETag, the generation, or both."""
NO_SUCH_VERSION: Version = {"e_tag": '"0123456789abcdef0123456789abcdef"', "version": "1"}
PutResult = Literal["put", "same", "other"]
"""Of a conditional put: this call has put the object, one with the same tags was there, or another one was."""
_R = TypeVar("_R")


class StoredObject(NamedTuple):
    """An object."""

    tags: Mapping[str, str]
    """Its metadata. Azure takes no "-" in a key."""
    version: Version
    data: bytes
    """Empty if it was not read."""


class Objects:
    """The objects below an address.

    Args:
        path: the address, in its plain form.

    Raises:
        UsageError: the store is read only.
    """

    def __init__(self, path: str) -> None:
        if not path.startswith(WRITABLE):
            raise UsageError(f"{path.partition('://')[0]}:// is read only", hint="write to a local directory")
        key = split(path)[1]
        self.path, self._prefix = path, f"{key}/" if key else ""
        self._store = cast(Bucket, store_of(path)[0])

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each object, by name."""
        key, start = self._prefix.rstrip("/"), len(self._prefix)
        return {found[start:]: size for found, size in self._attempt("", lambda _: self._store.objects(key))}

    def head(self, name: str) -> StoredObject | None:
        """Return an object without its content; None if there is none."""
        return self._find(name, is_read=False)

    def get(self, name: str) -> StoredObject | None:
        """Return a small object; None if there is none."""
        return self._find(name, is_read=True)

    def put(self, name: str, size: int, pieces: Callable[[], Iterable[bytes]]) -> None:
        """Put an object, and replace one of its name.

        Args:
            name: of the object.
            size: in bytes.
            pieces: returns the content, each time from the beginning. Python runs between the pieces of a large
                object, so that Ctrl-C ends its upload at once.
        """
        import obstore

        part_nbytes = max(PART_NBYTES, -(-size // _MAX_PARTS))
        for turn in range(NUM_PUTS):
            client = self._store.client(num_retries=NUM_RETRIES)
            body: Any = pieces() if size > part_nbytes else b"".join(pieces())
            try:
                obstore.put(
                    client, self._prefix + name, body, chunk_size=part_nbytes, max_concurrency=NUM_SENT
                )
                return
            except _errors() as error:
                if isinstance(error, OSError) and error.errno is not None:  # the local file is gone
                    raise
                failure = self._store.explain(error, f"{self.path}/{name}").error
                if isinstance(failure, FileNotFoundError):  # the store has forgotten the upload
                    failure = unanswered(f"{self.path}/{name}", "HTTP 404")
                if turn + 1 == NUM_PUTS:
                    raise failure from None
            time.sleep(FIRST_PAUSE_S * 2**turn)

    def put_if(self, name: str, data: bytes, tags: Mapping[str, str], replaced: Version | None) -> PutResult:
        """Put a small object in place of one version, or where there is none.

        obstore's error says little: a request may have been carried out before it failed, or have been sent twice. The
        object's tags decide.
        """
        num_tries = 0

        def put(key: str) -> PutResult:
            nonlocal num_tries
            import obstore
            from obstore.exceptions import AlreadyExistsError, PreconditionError

            num_tries += 1
            mode: Any = "create" if replaced is None else replaced
            try:
                obstore.put(self._store.client(), key, data, mode=mode, attributes=dict(tags))
                return "put"
            except _errors() as error:
                found = self._request(key, is_read=False)
                if found is not None and tags.items() <= found.tags.items():
                    is_clear = num_tries == 1 and isinstance(error, (AlreadyExistsError, PreconditionError))
                    return "same" if is_clear else "put"
                if (found and found.version) != replaced:
                    return "other"
                raise

        return self._attempt(name, put)

    def copy(self, name: str, target: str) -> None:
        """Copy an object inside the store, with its tags.

        Raises:
            FileNotFoundError: there is none.
        """

        def copy(key: str) -> None:
            import obstore

            obstore.copy(self._store.client(), key, self._prefix + target)

        self._attempt(name, copy)

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects. It is no error if one does not exist."""
        keys = [self._prefix + name for name in names]
        if keys:
            self._attempt("", lambda _: self._store.delete(keys))

    def _find(self, name: str, *, is_read: bool) -> StoredObject | None:
        return self._attempt(name, lambda key: self._request(key, is_read=is_read))

    def _request(self, key: str, *, is_read: bool) -> StoredObject | None:
        """Send one request for an object."""
        import obstore

        try:
            answer: Any = obstore.get(self._store.client(), key, options={"head": not is_read})
            data = bytes(answer.bytes()) if is_read else b""
        except FileNotFoundError:
            return None
        version = {each: answer.meta[each] for each in ("e_tag", "version") if answer.meta[each]}
        return StoredObject(dict(answer.attributes), version, data)

    def _attempt(self, name: str, call: Callable[[str], _R]) -> _R:
        return attempt(
            self._store, f"{self.path}/{name}" if name else self.path, lambda: call(self._prefix + name)
        )


def _errors() -> tuple[type[Exception], ...]:
    """Return what obstore raises for a request. Its FileNotFoundError has no number."""
    from obstore.exceptions import BaseError

    return BaseError, FileNotFoundError
