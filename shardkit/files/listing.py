"""What lies in a directory, and how that differs from the files that a manifest lists."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from typing import NamedTuple, NoReturn

from shardkit.core.text import escape
from shardkit.errors import ResourceError, SourceError
from shardkit.files import manifest, storage
from shardkit.files.home import METADATA, path_in, root_of
from shardkit.files.links import locate
from shardkit.files.strict_json import FOLLOWS_LINKS

_LEFT_OUT = (".git", os.path.join(".cache", "huggingface"))
"""Directories in which git and `hf download` keep their own state."""


_UPLOADED = (".gitattributes", "README.md")
"""What the Hub itself puts beside an uploaded model."""


class FolderContent(NamedTuple):
    """What a directory holds, at any depth. Names are relative to it."""

    files: dict[str, int]
    """Name -> bytes, of regular files; in the order of the names."""
    unlisted: tuple[str, ...]
    """Links that are not followed, pipes, sockets and devices."""


def walk(path: str) -> Iterator[tuple[str, str, list[str], list[str]]]:
    """Yield (path, name, directories in it, files in it) of a directory and of each below it, in order.

    The name is relative to `path`; that of `path` itself is "". Directories that a caller takes out of the list are
    passed over.

    Raises:
        ResourceError: a directory cannot be listed.
    """
    for here, directories, names in storage.walk(path, onerror=_cannot_list):
        directories.sort()
        folder = os.path.relpath(here, path)
        yield here, "" if folder == os.curdir else folder, directories, names


def _cannot_list(error: OSError) -> NoReturn:
    raise ResourceError(
        f"{escape(str(error.filename))} cannot be listed: {error.strerror}",
        hint="give yourself permission to read it",
    ) from None


def list_files(directory: str, *, follow: bool) -> FolderContent:
    """Return the files below a directory, without the state that git and `hf download` keep there.

    Args:
        directory: of a checkpoint.
        follow: a link counts as the file that it leads to, unless it leaves the directory (and, in the Hub's cache,
            the repo). Where `FOLLOWS_LINKS` says so, every one does. Links to directories are never followed.

    Raises:
        ResourceError: a directory cannot be listed.
    """
    sizes = {name: file_size(directory, name, follow=follow) for name in sorted(_names(directory))}
    return FolderContent(
        {name: size for name, size in sizes.items() if size is not None},
        tuple(name for name, size in sizes.items() if size is None),
    )


def _names(directory: str) -> Iterator[str]:
    """Yield the names of everything but directories."""
    if root_of(directory) != directory:
        yield METADATA
    for here, folder, inner, names in walk(directory):
        links = [name for name in inner if storage.islink(os.path.join(here, name))]
        inner[:] = [name for name in inner if os.path.join(folder, name) not in _LEFT_OUT]
        yield from (os.path.join(folder, name) for name in (*links, *names))


def file_size(directory: str, name: str, *, follow: bool) -> int | None:
    """Return the size of a regular file in bytes; None for anything else, and for a link out of the directory.

    Args:
        directory: that the name is relative to.
        name: of a file at any depth.
        follow: as for `list_files`.
    """
    path = path_in(directory, name)
    try:
        status = storage.lstat(path)
        if stat.S_ISLNK(status.st_mode) and not (follow or FOLLOWS_LINKS.get()):
            return None
        if stat.S_ISLNK(status.st_mode) or os.sep in name:  # a directory on the way may be a link
            locate(directory, name)
            status = storage.stat(path)
    except (OSError, SourceError, ValueError):  # ValueError: a NUL in the name
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def unlike(
    directory: str, files: Iterable[manifest.SavedFile], *, follow: bool = False
) -> dict[str, int | None]:
    """Return the files that do not lie in a directory as a manifest lists them: name -> bytes that there are.

    Args:
        directory: that names are relative to.
        files: as they are listed.
        follow: as for `list_files`.

    Returns:
        The listed order; None where there is no such regular file.
    """
    return {
        file.name: size
        for file in files
        if (size := file_size(directory, file.name, follow=follow)) != file.size
    }


def unlisted(directory: str, content: manifest.Manifest) -> Iterator[str]:
    """Yield the names in a directory that its manifest does not list, in order.

    Folders with a manifest of their own are left to that manifest.
    """
    listing = list_files(directory, follow=manifest.follows_links(content))
    listed_names = {*(file.name for file in manifest.every_file(content)), manifest.NAME}
    folders: tuple[str, ...] = ()
    if isinstance(content, manifest.FileList):
        listed_names.update(content.unlisted)
        folders = tuple(f"{folder}/" for folder in content.folders or ())
    else:
        listed_names.update(_UPLOADED)
    for name in sorted((*listing.files, *listing.unlisted)):
        if name not in listed_names and not name.startswith(folders):
            yield name
