"""The files of a checkpoint's directory, all of them: what a manifest lists."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from shardkit.core.text import escape
from shardkit.errors import ResourceError, SourceError
from shardkit.files.links import locate
from shardkit.files.strict_json import FOLLOWS_LINKS

_LEFT_OUT = (".git", os.path.join(".cache", "huggingface"))
"""Directories of git and of `hf download`, which keep state of their own in a checkpoint's directory."""


class Listing(NamedTuple):
    """What a directory holds, at any depth. Names are relative to it."""

    files: dict[str, int]
    """Name -> bytes, of regular files; in the order of the names."""
    unlisted: tuple[str, ...]
    """Links that are not followed, pipes, sockets and devices."""


def list_files(directory: str, *, follow: bool) -> Listing:
    """Return the files below a directory; what git and `hf download` keep there is left out.

    Args:
        directory: of a checkpoint.
        follow: a link counts as the file that it leads to, unless it leaves the directory (and, in the Hub's cache,
            the repo). Where `FOLLOWS_LINKS` says so, every one does. Links to directories are never followed.

    Raises:
        ResourceError: a directory cannot be listed.
    """
    files, unlisted = dict[str, int](), list[str]()
    for name in _names(directory):
        size = file_size(directory, name, follow=follow)
        if size is None:
            unlisted.append(name)
        else:
            files[name] = size
    return Listing(dict(sorted(files.items())), tuple(sorted(unlisted)))


def _names(directory: str) -> Iterator[str]:
    """Yield the name of everything that is no directory."""
    for here, inner, names in os.walk(directory, onerror=_cannot_list):
        folder = os.path.relpath(here, directory)
        folder = "" if folder == os.curdir else folder
        links = [name for name in inner if os.path.islink(os.path.join(here, name))]
        inner[:] = [name for name in inner if os.path.join(folder, name) not in _LEFT_OUT]
        yield from (os.path.join(folder, name) for name in (*links, *names))


def file_size(directory: str, name: str, *, follow: bool) -> int | None:
    """Return the bytes of a regular file; None for anything else, and for what leads out of the directory.

    Args:
        directory: that the name is relative to.
        name: of a file at any depth.
        follow: as for `list_files`.
    """
    path = os.path.join(directory, name)
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode) and not (follow or FOLLOWS_LINKS.get()):
            return None
        if stat.S_ISLNK(status.st_mode) or os.sep in name:  # a directory on the way may be a link
            locate(directory, name)
            status = os.stat(path)
    except (OSError, SourceError, ValueError):  # ValueError: a NUL in the name
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _cannot_list(error: OSError) -> NoReturn:
    raise ResourceError(
        f"{escape(str(error.filename))} cannot be listed: {error.strerror}", hint="it must be readable by you"
    ) from None
