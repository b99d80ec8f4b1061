"""The home of a checkpoint: the folder with its files, if it was committed to a place without renames.

    OUT/.metadata                  written last; it names its shards as data-0123456789abcdef/__0_0.distcp
    OUT/data-0123456789abcdef/     the home: shards, manifest, config and the like, as in a local directory
    OUT/data-fedcba9876543210/     of an older save; ignored

A home is treated as a complete checkpoint whose `.metadata` is one level up. Readers get the home of a path, and names
and paths in it, from this module, so that no other one deals with two levels. Any other directory is its own home.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence

from shardkit.errors import ShardkitError
from shardkit.files import storage
from shardkit.files.links import locate
from shardkit.files.strict_json import FOLLOWS_LINKS, read_small

METADATA = ".metadata"
"""The file that describes a checkpoint. It is written last."""
MANIFEST = "shardkit.json"
MAX_METADATA = 1 << 30
_FOLDER = re.compile(r"data-[0-9a-f]{16}", re.ASCII)
_SHARD = b".distcp"
_DATA = re.compile(rb"data-[0-9a-f]{16}/|model-[0-9a-f]{8}-(?=\d{5}-of-)")
# A string of a pickle: one of two opcodes, its length, its bytes. Source: pickletools, SHORT_BINUNICODE and BINUNICODE.
_PLACED = re.compile(rb"(?s:\x8c(.)|X(.{4}))((data-[0-9a-f]{16})/[\w.-]{1,255}?\.distcp)")
_MAX_KNOWN = 256

_folders: dict[tuple[str | int, ...], str | None] = {}


def is_data_folder(name: str) -> bool:
    """True for the name of a folder that may be a home: `data-` and 16 hex digits."""
    return _FOLDER.fullmatch(name) is not None


def data_prefixes(text: bytes) -> list[str]:
    """Return the prefixes of data in a store that occur in a text: folders, or weights of a Hub model."""
    return sorted({match[0].decode() for match in _DATA.finditer(text)})


def home_of(directory: str) -> str:
    """Return the folder with the files of a checkpoint; the directory itself unless all files are in one folder.

    That is the only folder in the names in `.metadata`, if it contains a manifest and the directory does not. A link to
    a folder elsewhere is not a home. Problems with the content raise no error here, but when the checkpoint is opened.
    """
    if storage.lexists(os.path.join(directory, MANIFEST)):
        return directory
    names = _list_names(directory)
    if METADATA not in names or not any(map(is_data_folder, names)):
        return directory
    folder = _named_folder(directory)
    if folder is None or folder not in names:
        return directory
    home = os.path.join(directory, folder)
    try:
        locate(directory, folder)
    except ShardkitError:
        return directory
    return home if storage.lexists(os.path.join(home, MANIFEST)) else directory


def root_of(directory: str) -> str:
    """Return the directory for users: the one above a home, or any other directory unchanged."""
    above, name = os.path.split(directory.rstrip("/"))
    if not is_data_folder(name) or METADATA in _list_names(directory):
        return directory
    above = above or os.curdir
    return above if home_of(above) == os.path.join(above, name) else directory


def path_in(directory: str, name: str) -> str:
    """Return the path of a file of a checkpoint, given its name in the home; `.metadata` is one level up."""
    return os.path.join(root_of(directory) if name == METADATA else directory, name)


def folders_above(name: str) -> Iterator[str]:
    """Yield the parent directories of a relative name."""
    while name := os.path.dirname(name):
        yield name


def names_in(directory: str) -> list[str]:
    """Return the names in a directory; for a home they include `.metadata`.

    Raises:
        OSError, ValueError: the directory cannot be listed.
    """
    names = storage.listdir(directory)
    return [*names, METADATA] if root_of(directory) != directory else names


def known_homes() -> list[object]:
    """Return all homes found so far, as JSON, for `learn_homes` in other processes."""
    return [[list(state), folder] for state, folder in _folders.items()]


def learn_homes(entries: Iterable[tuple[Sequence[str | int], str | None]]) -> None:
    """Adopt the homes of another process. They apply if `.metadata` is the same file."""
    _folders.update((tuple(state), folder) for state, folder in entries)


def _list_names(directory: str) -> list[str]:
    try:
        return storage.listdir(directory)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return []


def _named_folder(directory: str) -> str | None:
    """Return the only folder of all shards named in `.metadata`; None if there is no such folder.

    Paths are searched in the raw bytes of the file, which is fast. Opening the checkpoint parses the file, and refuses
    it if the result was wrong.
    """
    path = os.path.join(directory, METADATA)
    try:
        status = (storage.stat if FOLLOWS_LINKS.get() else storage.lstat)(path)
        state = (storage.realpath(directory), status.st_ino, status.st_size, status.st_mtime_ns)
        if state not in _folders:
            data = read_small(path, METADATA, MAX_METADATA, follow=False)
            if len(_folders) >= _MAX_KNOWN:
                _folders.clear()
            _folders[state] = _only_folder(data)
        return _folders[state]
    except (OSError, ShardkitError):
        return None


def _only_folder(data: bytes) -> str | None:
    """Return the folder in which a `.metadata` places all of its data files; None if there are several, or none.

    Args:
        data: the content of the `.metadata`.
    """
    placed = [
        folder
        for short, long, path, folder in _PLACED.findall(data)
        if int.from_bytes(short or long, "little") == len(path)
    ]
    return placed[0].decode() if len(set(placed)) == 1 and len(placed) == data.count(_SHARD) else None
