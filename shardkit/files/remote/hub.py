"""Repos of the Hub, `hf://organisation/name[@revision][/folder]`, read by ranges, without a copy on the disk.

A branch or tag is resolved to its commit first, and only that commit is read. Requests use huggingface_hub, with its
session, token and environment. Tokens are sent to the Hub only: files on other servers are read by addresses that the
Hub signs. These are never shown, as they are temporarily equivalent to a token. `hub_bucket` does the same for buckets.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote, unquote, urlsplit

from shardkit.core.text import escape
from shardkit.errors import ResourceError, ShardkitError, SourceError, UsageError, causes
from shardkit.files.remote.contract import (
    Listing,
    ObjectStat,
    OtherVersion,
    RequestFailure,
    attempt,
    gone_error,
    may_status_pass,
    short_body_error,
)

SCHEME = "hf://"
_ROOT = re.compile(r"(?P<id>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?")
_PAGE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<root>[^/?#]+/[^/?#]+)"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[^/?#]+)(?P<key>/[^?#]*)?)?/?(?:[?#].*)?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)", re.ASCII)  # RFC 9110, 14.4
_NO_MODELS = ("datasets/", "spaces/", "buckets/", "kernels/")  # prefixes in hf:// paths of huggingface_hub
_FILES = (".json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".metadata", ".py", ".txt")
_PIECE_BYTES = 1 << 16
_PARTIAL = 206
_CONTENT_HASH = "X-Xet-Hash"
"""Header with the hash of a file's content."""
_SIGNATURE_GONE = (401, 403, 404, 410)
_REACH = "check the network and HF_ENDPOINT; then start again"


class Response(Protocol):
    """The common interface of responses in all versions of huggingface_hub."""

    status_code: int
    headers: Any


class Named(NamedTuple):
    """The repo of a path."""

    repo_id: str
    revision: str | None
    """None for the default branch."""


def names_repo(root: str) -> bool:
    """True for `hf://organisation/name[@revision]`."""
    match = _ROOT.fullmatch(root.removeprefix(SCHEME))
    return match is not None and not match["id"].startswith(_NO_MODELS) and not match["id"].endswith(_FILES)


def address_of(page: str) -> str | None:
    """Return the `hf://` address for a page of the Hub: a repo, or a folder or file of it; None for other addresses."""
    match = _PAGE.fullmatch(page)
    if match is None or not names_repo(match["root"]):
        return None
    revision = f"@{match['revision']}" if match["revision"] is not None else ""
    return f"{SCHEME}{match['root']}{revision}{unquote(match['key'] or '').rstrip('/')}"


def named(root: str) -> Named:
    """Return the repo of `hf://organisation/name[@revision]`. A "/" in a revision is written as %2F.

    Raises:
        UsageError: the address has another form.
    """
    match = _ROOT.fullmatch(root.removeprefix(SCHEME))
    if match is None or not names_repo(root):
        raise UsageError(
            f"{escape(root)} is not a repo", hint="write it as hf://organisation/name[@revision][/folder]"
        )
    revision = match["revision"]
    return Named(match["id"], None if revision is None else unquote(revision))


def at_revision(root: str, revision: str | None) -> str:
    """Return a root with the revision of a separate option, if there is one.

    Raises:
        UsageError: the root has another revision.
    """
    repo_id, root_revision = named(root)
    if revision is None:
        return root
    if root_revision not in (None, revision):
        raise UsageError(
            f"{escape(root)} is of revision {escape(str(root_revision))}, and --revision is {escape(revision)}",
            hint="leave out one of the two",
        )
    return f"{SCHEME}{repo_id}@{quote(revision, safe='')}"


def pinned(root: str) -> str:
    """Return a root with the current commit of its revision.

    Raises:
        UsageError, SourceError, ResourceError: the root is not a repo, or the Hub does not answer.
    """
    repo_id, revision = named(root)
    if revision is not None and _COMMIT.fullmatch(revision):
        return root
    repo = HubStore(f"{SCHEME}{repo_id}@{quote(revision or 'main', safe='')}")
    return f"{SCHEME}{repo_id}@{attempt(repo, root, lambda: repo.commit(revision))}"


class Place(NamedTuple):
    """Where the bytes of a file are."""

    url: str
    size: int | None
    version: str | None
    """As a listing says it: the etag of an object."""
    names_version: bool = False
    """Each response has to name the version, as the address is that of the file, whatever its content."""


class FilesOnHub(ABC):
    """Files of the Hub.

    Args:
        name: `organisation/name`.
        revision: the commit; None where there are none.
    """

    _offline_hint = "unset it; for a model in the cache leave hf:// out"

    def __init__(self, name: str, revision: str | None = None) -> None:
        self._id, self._revision = name, revision
        self._places: dict[tuple[str, str], Place] = {}
        """(key, version) -> its place."""
        self._lock = threading.Lock()

    @abstractmethod
    def _entries(self, key: str) -> Iterator[tuple[str, ObjectStat | None]]:
        """Yield (path, attributes) of what a directory has, and perhaps of more; a folder has no attributes."""

    @abstractmethod
    def _place_of(self, key: str) -> Place:
        """Return the current place of a file."""

    def list(self, key: str) -> Listing:
        """Return the listing of a directory."""
        from huggingface_hub import errors

        listing = Listing()
        try:
            entries = [*self._entries(key)]
        except errors.EntryNotFoundError:
            return listing
        for path, stat in entries:
            folder, _, name = path.rpartition("/")
            if folder != key:
                continue
            if name in ("", ".", ".."):
                raise SourceError(
                    f"{escape(self._id)}: {escape(path)!r} cannot be read as a path",
                    hint="rename or remove such files, or copy the others to a disk",
                )
            if stat is None:
                listing.folders.add(name)
            else:
                listing.objects[name] = stat
        return listing

    def head(self, key: str) -> ObjectStat:
        """Return a file."""
        folder, _, name = key.rpartition("/")
        stat = self.list(folder).objects.get(name)
        if stat is None:
            raise gone_error(key)
        return stat

    def fetch(self, key: str, version: ObjectStat, start: int, nbytes: int) -> memoryview:
        """Return a range of a file."""
        place, is_new = self._place(key, version)
        try:
            return _fetch(key, place, version, start, nbytes)
        except Exception as error:
            if is_new or status_of(error) not in _SIGNATURE_GONE:
                raise
        with self._lock:  # signed addresses are valid for a while
            self._places.pop((key, version.etag), None)
        return _fetch(key, self._place(key, version)[0], version, start, nbytes)

    def _place(self, key: str, version: ObjectStat) -> tuple[Place, bool]:
        """Return the place of a file's bytes, and whether it was just requested from the Hub."""
        with self._lock:
            place = self._places.get((key, version.etag))
        if place is not None:
            return place, False
        place = self._place_of(key)
        if place.size not in (None, version.size) or place.version not in (None, version.etag):
            raise _other_version(key)
        with self._lock:
            self._places[key, version.etag] = place
        return place, True

    def explain(self, error: Exception, path: str) -> RequestFailure:
        """Return why a call failed."""
        from huggingface_hub import errors

        if isinstance(error, (FileNotFoundError, ShardkitError)):
            return RequestFailure(error, may_pass=False)
        if isinstance(error, errors.EntryNotFoundError):
            return RequestFailure(gone_error(path), may_pass=False)
        if any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in causes(error)):
            offline = f"{escape(path)}: a request to the Hub is needed, but HF_HUB_OFFLINE is set"
            return RequestFailure(ResourceError(offline, hint=self._offline_hint), may_pass=False)
        explained = explain(error, self._id, self._revision)
        if explained is not None:
            return RequestFailure(explained, may_pass=False)
        status = next((code for cause in causes(error) if (code := status_of(cause)) is not None), None)
        detail = f"HTTP {status}" if status else type(error).__name__
        problem = ResourceError(f"{escape(path)}: the Hub cannot be reached or fails ({detail})", hint=_REACH)
        return RequestFailure(problem, may_pass=status is None or may_status_pass(status))


class HubStore(FilesOnHub):
    """A repo at one commit.

    Args:
        root: including the commit.
    """

    def __init__(self, root: str) -> None:
        super().__init__(*named(root))

    def commit(self, revision: str | None) -> str:
        """Return the commit of a branch or tag; of the default branch for None."""
        from huggingface_hub import HfApi

        return str(HfApi().model_info(self._id, revision=revision).sha)

    def _entries(self, key: str) -> Iterator[tuple[str, ObjectStat | None]]:
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFolder

        for entry in HfApi().list_repo_tree(self._id, key or None, revision=self._revision):
            if isinstance(entry, RepoFolder):
                yield entry.path, None
            else:
                yield entry.path, ObjectStat(entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id, 0)

    def _place_of(self, key: str) -> Place:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        metadata = get_hf_file_metadata(hf_hub_url(self._id, key, revision=self._revision))
        return Place(metadata.location, metadata.size, metadata.etag)


def unnamed_content_error(key: str) -> ResourceError:
    """Return the error for an answer that does not name the hash of a file's content."""
    return ResourceError(
        f"{escape(key)}: the answer does not name the hash of the file's content",
        hint="check HF_ENDPOINT and any proxy; or copy the directory to a disk with `hf buckets sync`",
    )


def _other_version(key: str) -> OtherVersion:
    return OtherVersion(f"{escape(key)}: the Hub returned another version than it listed", hint="start again")


def _fetch(key: str, place: Place, version: ObjectStat, start: int, nbytes: int) -> memoryview:
    """Return a range of a file's bytes."""
    from huggingface_hub import utils

    url, size = place.url, version.size
    stop, done, into = start + nbytes, 0, memoryview(bytearray(nbytes))
    with _stream(url, {**_headers(url), "Range": f"bytes={start}-{stop - 1}"}) as (response, pieces):
        utils.hf_raise_for_status(response)  # type: ignore[attr-defined, arg-type]
        if place.names_version:
            content = response.headers.get(_CONTENT_HASH)
            if content != version.etag:
                raise unnamed_content_error(key) if content is None else _other_version(key)
        content_range = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if response.status_code == _PARTIAL:
            if content_range is None or (int(content_range[1]), int(content_range[2]) + 1) != (start, stop):
                raise short_body_error()
        elif (start, stop) != (0, size):
            raise ResourceError(
                "the server of the Hub's files ignores ranges",
                hint="check HF_ENDPOINT and any proxy, or download the files first",
            )
        for piece in pieces:
            if done + len(piece) > len(into):
                raise short_body_error()
            into[done : done + len(piece)] = piece
            done += len(piece)
    return into[:done]


def _headers(url: str) -> dict[str, str]:
    """Return the headers of a request. The token is sent to the Hub only."""
    from huggingface_hub import utils as installed

    utils: Any = installed  # its functions are not in __all__
    headers: dict[str, str] = utils.build_hf_headers(token=None if is_the_hubs(url) else False)
    return {**headers, "Accept-Encoding": "identity"}  # compression would hide sizes


def is_the_hubs(url: str) -> bool:
    """True for an address of the Hub itself, rather than of a server that keeps its files."""
    from huggingface_hub import constants

    return urlsplit(url)[:2] == urlsplit(constants.ENDPOINT)[:2]


@contextmanager
def _stream(url: str, headers: dict[str, str]) -> Iterator[tuple[Response, Iterable[bytes]]]:
    """Send a request, and yield the response before reading its body. No retries: these would log the address."""
    from huggingface_hub import constants
    from huggingface_hub import utils as installed

    utils: Any = installed
    session, timeout = utils.get_session(), constants.HF_HUB_DOWNLOAD_TIMEOUT
    if hasattr(session, "stream"):
        with session.stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
            yield response, response.iter_bytes(_PIECE_BYTES)
    else:  # huggingface_hub before 1.0, which used requests
        with session.get(url, headers=headers, timeout=timeout, stream=True) as response:
            yield response, response.iter_content(_PIECE_BYTES)


def explain(error: Exception, repo_id: str, revision: str | None) -> ShardkitError | None:
    """Return the error for users for one of huggingface_hub; None for errors of the network or a server."""
    from huggingface_hub import errors

    name, chain = escape(repo_id), list(causes(error))
    if isinstance(error, errors.GatedRepoError):
        return SourceError(
            f"{name}: a gated model, and this account has no access to it",
            hint="accept its terms on the model's page, then log in with `hf auth login`",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return SourceError(
            f"{name}: no such model on the Hub, or a private one",
            hint="check the spelling; for a private model log in with `hf auth login`",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return SourceError(
            f"{name}: no revision {escape(revision or 'main')!r}",
            hint="give a branch, a tag or a commit of that repo",
        )
    if isinstance(error, errors.HFValidationError):
        return SourceError(f"{escape(repo_id)!r} is not a repo id", hint="write it as organisation/name")
    if any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in chain):
        return ResourceError(
            f"{name}: incomplete in the cache, and HF_HUB_OFFLINE is set",
            hint="unset HF_HUB_OFFLINE, or run once with network access",
        )
    status = next((code for code in map(status_of, chain) if code is not None), None)
    if status in (401, 403):
        return SourceError(
            f"{name}: the Hub refuses access (HTTP {status})",
            hint="log in with `hf auth login`, or check HF_TOKEN",
        )
    return None


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error, or None."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None
