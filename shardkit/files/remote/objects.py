"""Writing objects below an address of S3, Google or Azure: whole files, and conditional puts.

Names are relative to the address. Temporary failures are retried, and errors have our own texts. obstore does not retry a
part that a store refused as damaged or expired, or the end of an upload whose answer was lost, so the put of a file is
retried as a whole.

Source: obstore 0.12.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar, cast

from shardkit.core.text import escape
from shardkit.errors import UsageError
from shardkit.files.remote.cloud import Bucket
from shardkit.files.remote.contract import NUM_TRIES, Listing, attempt, attempt_without_object, unanswered
from shardkit.files.remote.kinds import WRITABLE, split, store_of

PART_NBYTES = 8 << 20
NUM_SENT = 4
"""Number of concurrent parts of a file."""
NUM_SENDS = 2
"""Number of concurrent files of a job."""
NUM_PUTS, FIRST_PAUSE_S = 3, 1.0
"""Of a file. obstore looks for credentials again during the pause."""
NUM_RETRIES = 5
"""Of a part, by obstore."""
_MAX_PARTS = 9_000  # stores allow 10,000
_PIECE_NBYTES = 1 << 20  # per call of obstore, during which Python does not handle Ctrl-C

Version = Mapping[str, str]
"""The version in a condition: ETag, generation, or both."""
NO_SUCH_VERSION: Version = {"e_tag": '"0123456789abcdef0123456789abcdef"', "version": "1"}
PutResult = Literal["put", "same", "other"]
"""Result of a conditional put: written, an object with the same tags existed, or a different one did."""
_R = TypeVar("_R")


class StoredObject(NamedTuple):
    """An object."""

    tags: Mapping[str, str]
    """Its metadata. Azure does not allow "-" in keys."""
    version: Version
    size: int
    """In bytes."""
    data: bytes
    """Empty if not read."""


def upload_nbytes(size: int) -> int:
    """Return the memory for the upload of a file of `size` bytes."""
    return (NUM_SENT + 1) * _part_nbytes(size)


class Objects:
    """The objects below an address.

    Args:
        address: such as `s3://bucket/model`.

    Raises:
        UsageError: the store is read only.
    """

    def __init__(self, address: str) -> None:
        if not address.startswith(WRITABLE):
            scheme = escape(address.partition("://")[0])
            raise UsageError(
                f"{scheme}:// is read only", hint="write to s3://, gs:// or az://, or to a local directory"
            )
        root, key = split(address)
        self.path, self._prefix = (f"{root}/{key}", f"{key}/") if key else (root, "")
        self._store = cast(Bucket, store_of(root)[0])

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the size of each object below a folder, at any depth, by name."""
        above, start = f"{self._prefix}{folder}".rstrip("/"), len(self._prefix)
        return {key[start:]: size for key, size in self._attempt("", lambda _: self._store.objects(above))}

    def listing(self) -> Listing:
        """Return the names of the objects and folders at the address itself."""
        return self._attempt("", lambda _: self._store.list(self._prefix.rstrip("/")))

    def head(self, name: str) -> StoredObject | None:
        """Return an object without its content, or None."""
        return self._find(name, is_read=False)

    def get(self, name: str) -> StoredObject | None:
        """Return a small object with its content, or None."""
        return self._find(name, is_read=True)

    def put(
        self,
        name: str,
        size: int,
        pieces: Callable[[], Iterable[bytes]],
        tags: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Put an object, replacing one with the same name.

        Args:
            name: of the object.
            size: in bytes.
            pieces: returns the content, from the beginning on each call. Python code runs between the pieces of a large
                object, so that Ctrl-C ends its upload immediately.
            tags: of the object.
        """
        import obstore

        part_nbytes = _part_nbytes(size)
        for turn in range(NUM_PUTS):
            client = self._store.client(num_retries=NUM_RETRIES)
            body: Any = pieces() if size > part_nbytes else b"".join(pieces())
            try:
                obstore.put(
                    client,
                    self._prefix + name,
                    body,
                    attributes=dict(tags),
                    chunk_size=part_nbytes,
                    max_concurrency=NUM_SENT,
                )
                return
            except _errors() as error:
                if isinstance(error, OSError) and error.errno is not None:  # an error of the local file
                    raise
                failure = self._store.explain(error, f"{self.path}/{name}").error
                if isinstance(failure, FileNotFoundError):  # the store has forgotten the upload
                    failure = unanswered(f"{self.path}/{name}", "HTTP 404")
                if turn + 1 == NUM_PUTS:
                    raise failure from None
            time.sleep(FIRST_PAUSE_S * 2**turn)

    @contextlib.contextmanager
    def writing(self, name: str, expected_nbytes: int) -> Iterator[ObjectStream]:
        """Yield a stream whose bytes are sent while they are written. The object exists after the block succeeds.

        An error of the store replaces any error of the block. Only obstore's own retries are made, so callers that can
        write the same content again should do so.

        Args:
            name: of the object; an existing one is replaced.
            expected_nbytes: approximate size of the object, not much too small.
        """
        stream = ObjectStream(self._store, self._prefix + name, f"{self.path}/{name}", expected_nbytes)
        try:
            yield stream
        except Exception as error:
            if stream.failure is None:
                raise
            raise stream.failure from error
        stream.finish()

    def put_if(self, name: str, data: bytes, tags: Mapping[str, str], replaced: Version | None) -> PutResult:
        """Put a small object if the existing one has a given version, or does not exist.

        obstore's errors are not conclusive: a request may have been executed before it failed, or may have been sent
        twice. The object's tags decide.
        """
        is_unclear = False  # some request failed that may have been executed

        def put(key: str, num_left: int = NUM_TRIES) -> PutResult:
            nonlocal is_unclear
            import obstore
            from obstore.exceptions import AlreadyExistsError, PreconditionError

            mode: Any = "create" if replaced is None else replaced
            try:
                obstore.put(self._store.client(), key, data, mode=mode, attributes=dict(tags))
                return "put"
            except _errors() as error:
                is_refused = isinstance(error, (AlreadyExistsError, PreconditionError))
                is_unclear = is_unclear or not is_refused
                stored = self._request(key, is_read=False)
                if stored is not None and tags.items() <= stored.tags.items():
                    return "put" if is_unclear else "same"
                if (stored and stored.version) != replaced:
                    return "other"
                if not (is_refused and num_left > 1):
                    raise
            return put(key, num_left - 1)  # another process has removed the object that refused this one

        return attempt_without_object(self._store, f"{self.path}/{name}", lambda: put(self._prefix + name))

    def copy(self, name: str, target: str) -> None:
        """Copy an object inside the store, including its tags.

        Raises:
            FileNotFoundError: the object does not exist.
        """

        def copy(key: str) -> None:
            import obstore

            obstore.copy(self._store.client(), key, self._prefix + target)

        self._attempt(name, copy)

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; missing ones are ignored."""
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
        return StoredObject(dict(answer.attributes), version, answer.meta["size"], data)

    def _attempt(self, name: str, call: Callable[[str], _R]) -> _R:
        return attempt(
            self._store, f"{self.path}/{name}" if name else self.path, lambda: call(self._prefix + name)
        )


class ObjectStream(io.RawIOBase):
    """An object that is written front to back.

    Args:
        store: of the object.
        key: of the object.
        path: of the object, for messages.
        expected_nbytes: as for `Objects.writing`.
    """

    def __init__(self, store: Bucket, key: str, path: str, expected_nbytes: int) -> None:
        import obstore

        self._store, self._path, self._offset = store, path, 0
        self._writer = obstore.open_writer(
            store.client(num_retries=NUM_RETRIES),
            key,
            buffer_size=_part_nbytes(expected_nbytes),
            max_concurrency=NUM_SENT,
        )
        self.failure: Exception | None = None
        """The error for users if the store has failed."""

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE_NBYTES):
            # A copy: obstore reads the memory later, and torch reuses it immediately.
            piece = bytes(view[start : start + _PIECE_NBYTES])
            self._try(partial(self._writer.write, piece))
            self._offset += len(piece)
        return len(view)

    def finish(self) -> None:
        """Complete the object."""
        self._try(self._writer.close)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            failure = self._store.explain(error, self._path).error
            if isinstance(failure, FileNotFoundError):  # the store has forgotten the upload
                failure = unanswered(self._path, "HTTP 404")
            self.failure = self.failure or failure
            raise failure from None


def _part_nbytes(size: int) -> int:
    return max(PART_NBYTES, -(-size // _MAX_PARTS))


def _errors() -> tuple[type[Exception], ...]:
    """Return the error of a request. A FileNotFoundError of obstore has no errno."""
    from obstore.exceptions import BaseError

    return BaseError, FileNotFoundError
