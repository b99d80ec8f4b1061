"""Files of a checkpoint's directory: regular files, or links that stay inside it.

A path from the user may be a link to anywhere. The content of a directory was chosen by its creator, so links in it must
not leave it. Weights of a Hub model may be links to shared files elsewhere, as only tensors are read from them.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

from shardkit.core.text import count, escape, listed, parse_size
from shardkit.errors import SourceError
from shardkit.files import storage, stores
from shardkit.files.remote import ranges
from shardkit.files.strict_json import FOLLOW_OR_COPY, FOLLOWS_LINKS, read_small

_MAX_LEVELS = 3  # a checkpoint is a commit's directory, or up to two levels below: COMMIT/run/checkpoint-100

_P = ParamSpec("_P")
_R = TypeVar("_R")


@contextlib.contextmanager
def reading_sources(*, follow_links: bool = False, max_memory: object = None) -> Iterator[None]:
    """Give the context of an operation: links that leave a checkpoint's directory are allowed if `follow_links` is true.

    Cached listings of stores are dropped, and fetched data of stores stay within the operation's `max_memory`.
    """
    stores.forget()
    token = FOLLOWS_LINKS.set(FOLLOWS_LINKS.get() or follow_links)
    try:
        with storage.limit_fetched(_held_bytes(max_memory)):
            yield
    finally:
        FOLLOWS_LINKS.reset(token)


def reading_as(options: Any) -> AbstractContextManager[None]:
    """Return `reading_sources` for a verb's options."""
    max_memory = getattr(options, "max_memory", None)
    return reading_sources(follow_links=options.follow_links, max_memory=max_memory)


def may_follow_links(operation: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return an operation that runs in `reading_sources`, by its keyword `follow_links`."""

    @functools.wraps(operation)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with reading_sources(follow_links=bool(kwargs.get("follow_links"))):
            return operation(*args, **kwargs)

    return run


def _held_bytes(max_memory: object) -> int:
    """Return the limit for fetched data of stores while sources are opened; less than while moving."""
    most = ranges.DEFAULT_LIMIT_NBYTES
    return min(parse_size(max_memory) // 4, most) if isinstance(max_memory, (int, str)) else most


def is_below(name: str) -> bool:
    """True if a relative name from a file cannot leave its directory.

    None of its parts may be "", "." or "..". Links may still lead elsewhere: see `locate`.
    """
    return "\\" not in name and "\0" not in name and not {"", ".", ".."}.intersection(name.split("/"))


def locate(directory: str, name: str, trusted: bool = False) -> str:
    """Return the path of a file, which need not exist.

    Args:
        directory: the checkpoint's.
        name: relative to the directory.
        trusted: the user named the file, so it may be a link to anywhere.

    Raises:
        SourceError: the file is a link that leaves the directory, and `FOLLOWS_LINKS` does not allow it. Links of the
            Hub's cache are allowed: snapshots/<commit>/<name> -> ../../blobs/<hash>.
    """
    path = os.path.join(directory, name)
    if trusted or FOLLOWS_LINKS.get() or _is_inside(directory, path):
        return path
    raise SourceError(
        f"{escape(name)}: a symbolic link that leaves its directory, to {escape(storage.realpath(path))}",
        hint=FOLLOW_OR_COPY,
    )


def locate_weights(directory: str, name: str) -> str:
    """Return the path of a weight file, which may be a link to a regular file anywhere, and need not exist.

    Raises:
        SourceError: the file is a link to something else outside of the directory, such as a device. It is not opened.
    """
    path = os.path.join(directory, name)
    if storage.exists(path) and not storage.isfile(path) and not _is_inside(directory, path):
        raise SourceError(
            f"{escape(name)}: a symbolic link to {escape(storage.realpath(path))}, which is no regular file",
            hint="put the real file in its place",
        )
    return path


def _is_inside(directory: str, path: str) -> bool:
    real = storage.realpath(path)
    return any(real.startswith(os.path.join(place, "")) for place in _allowed_directories(directory))


def link_notes(directory: str, paths: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note about files of a directory that are links to files elsewhere; empty if there are none.

    Args:
        directory: the checkpoint's.
        paths: name -> path.
    """
    links = [
        f"{escape(name)} -> {escape(storage.realpath(path))}"
        for name, path in paths.items()
        if not _is_inside(directory, path)
    ]
    if not links:
        return ()
    are = count(len(links), "weight file is a link to a file", "weight files are links to files")
    return (f"{are} outside of {escape(directory)}: {listed(links)}",)


def locate_all(directory: str, names: Sequence[str]) -> list[str]:
    """Return the paths of files, like `locate`.

    Raises:
        SourceError: lists all links that leave the directory.
    """
    paths, problems, hint = list[str](), list[str](), None
    for name in names:
        try:
            paths.append(locate(directory, name))
        except SourceError as error:
            problems.append(error.message)
            hint = error.hint
    SourceError.raise_for(
        problems, f"{len(problems)} of {len(names)} files are outside of {escape(directory)}", hint=hint
    )
    return paths


def _allowed_directories(directory: str) -> Iterator[str]:
    """Yield the directories that files of a directory may be in: itself, and the blobs of its repo in the Hub's cache.

        /c/models--o--m/snapshots/abc/run -> /c/models--o--m/snapshots/abc/run, /c/models--o--m/blobs

    Links are resolved.
    """
    here = storage.realpath(directory)
    yield here
    for level in range(_MAX_LEVELS):
        # A directory in one called "snapshots" (level 0) counts as a commit even if the repo's folder was renamed. Further
        # up, that name alone is too common: there the repo's folder must have the Hub's own name.
        top = os.path.dirname(os.path.dirname(here))
        if is_snapshot(here) and (not level or os.path.basename(top).startswith("models--")):
            yield os.path.join(top, "blobs")
        here = os.path.dirname(here)


def is_snapshot(directory: str) -> bool:
    """True for the directory of a commit in the Hub's cache, which consists of links to files elsewhere."""
    return os.path.basename(os.path.dirname(storage.realpath(directory))) == "snapshots"


def read_inside(directory: str, name: str, limit: int) -> bytes:
    """Return the content of a small file of a directory.

    Args:
        directory: the checkpoint's.
        name: relative to the directory; messages use it too.
        limit: maximum bytes.

    Raises:
        SourceError: the file is missing, not regular, larger than `limit`, or a link that leaves the directory.
        ResourceError: the file cannot be opened or read.
    """
    return read_small(locate(directory, name), name, limit)
