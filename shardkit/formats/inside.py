"""Files that are found in a checkpoint's directory: regular ones, or links that do not leave it.

A path that a person gives may be a link to anywhere; what lies in the directory was chosen by whoever made it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.formats.strict import read_small

_MAX_LEVELS = 3  # of directories below one commit in the Hub's cache, for checkpoints that were uploaded


def locate(directory: str, name: str, trusted: bool = False) -> str:
    """Return the path of a file, which need not be there.

    Args:
        directory: that it was found in.
        name: relative to the directory.
        trusted: a person named the file, so it may be a link to anywhere.

    Raises:
        SourceError: a link that leaves the directory. The Hub's cache is made of links, and they are allowed:
            snapshots/<commit>/<name> -> ../../blobs/<hash>.
    """
    path = os.path.join(directory, name)
    real = os.path.realpath(path)
    if trusted or any(real.startswith(os.path.join(place, "")) for place in _places(directory)):
        return path
    raise SourceError(
        f"{escape(name)}: a symbolic link that leaves its directory, to {escape(real)}",
        hint="copy the directory with its links resolved (cp -rL)",
    )


def locate_all(directory: str, names: Sequence[str]) -> list[str]:
    """Return the paths of files, as `locate`.

    Raises:
        SourceError: lists every link that leaves the directory.
    """
    paths, problems, hint = list[str](), list[str](), None
    for name in names:
        try:
            paths.append(locate(directory, name))
        except SourceError as error:
            problems.append(error.message)
            hint = error.hint
    if problems:
        raise SourceError(
            f"{len(problems)} of {len(names)} files lie outside of {escape(directory)}",
            problems=problems,
            hint=hint,
        )
    return paths


def _places(directory: str) -> Iterator[str]:
    """Yield where a file of a directory may lie."""
    here = os.path.realpath(directory)
    yield here
    for level in range(_MAX_LEVELS):
        top = os.path.dirname(os.path.dirname(here))
        if is_snapshot(here) and (not level or os.path.basename(top).startswith("models--")):
            yield os.path.join(top, "blobs")
        here = os.path.dirname(here)


def is_snapshot(directory: str) -> bool:
    """True for the directory of one commit in the Hub's cache, which is made of links to files elsewhere."""
    return os.path.basename(os.path.dirname(os.path.realpath(directory))) == "snapshots"


def read_inside(directory: str, name: str, limit: int) -> bytes:
    """Return the content of a small file that was found in a directory.

    Args:
        directory: that it was found in.
        name: relative to the directory; that is also how messages call it.
        limit: the most bytes that it may have.

    Raises:
        SourceError: missing, not a regular file, a link that leaves the directory, or larger than `limit`.
        ResourceError: it may not be opened, or the device fails.
    """
    return read_small(locate(directory, name), name, limit)
