"""The files in a directory, and differences to those that a manifest lists."""

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
"""Files that the Hub adds to an uploaded model."""


class FolderContent(NamedTuple):
    """The content of a directory, at any depth. Names are relative to it."""

    files: dict[str, int]
    """Size of each regular file, sorted by name."""
    unlisted: tuple[str, ...]
    """Links that are not followed, pipes, sockets and devices."""


def walk(path: str) -> Iterator[tuple[str, str, list[str], list[str]]]:
    """Yield (path, name, subdirectories, files) of a directory and of all directories below it, parents first.

    The name is relative to `path`; that of `path` itself is "". Subdirectories are visited by name; the names of files are
    in no order. Subdirectories that the caller removes from the list are skipped.

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
        hint="make it readable for your user",
    ) from None


def list_files(directory: str, *, follow: bool) -> FolderContent:
    """Return the files below a directory, without the state that git and `hf download` keep there.

    Args:
        directory: of a checkpoint.
        follow: links count as their target file, unless they leave the directory (in the Hub's cache, the repo). With
            `FOLLOWS_LINKS` all links do. Links to directories are never followed.

    Raises:
        ResourceError: a directory cannot be listed.
    """
    sizes = {name: file_size(directory, name, follow=follow) for name in sorted(_names(directory))}
    return FolderContent(
        {name: size for name, size in sizes.items() if size is not None},
        tuple(name for name, size in sizes.items() if size is None),
    )


def _names(directory: str) -> Iterator[str]:
    """Yield the names of all entries except directories."""
    if root_of(directory) != directory:
        yield METADATA
    for here, folder, inner, names in walk(directory):
        links = [name for name in inner if storage.islink(os.path.join(here, name))]
        inner[:] = [name for name in inner if os.path.join(folder, name) not in _LEFT_OUT]
        yield from (os.path.join(folder, name) for name in (*links, *names))


def file_size(directory: str, name: str, *, follow: bool) -> int | None:
    """Return the size of a regular file in bytes; None for other entries, and for links that leave the directory.

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
        if stat.S_ISLNK(status.st_mode) or os.sep in name:  # a parent directory may be a link
            locate(directory, name)
            status = storage.stat(path)
    except (OSError, SourceError, ValueError):  # ValueError: a NUL in the name
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def differing_sizes(
    directory: str, files: Iterable[manifest.SavedFile], *, follow: bool = False
) -> dict[str, int | None]:
    """Return the files of a manifest whose size in a directory differs: name -> actual size.

    Args:
        directory: that names are relative to.
        files: of the manifest.
        follow: as for `list_files`.

    Returns:
        In the order of the manifest; None for a missing file, or one that is not regular.
    """
    return {
        file.name: size
        for file in files
        if (size := file_size(directory, file.name, follow=follow)) != file.size
    }


def unlisted_names(directory: str, content: manifest.Manifest) -> Iterator[str]:
    """Yield the names in a directory that its manifest does not list, sorted.

    Folders with their own manifest are skipped.
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
