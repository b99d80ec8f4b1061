"""The home of a checkpoint: the folder where its files lie, if it was committed where nothing can be renamed.

    OUT/.metadata                  written last; it names its shards as data-0123456789abcdef/__0_0.distcp
    OUT/data-0123456789abcdef/     the home: shards, manifest, config and the like, as in a local directory
    OUT/data-fedcba9876543210/     of an older save; nobody looks into it

A home counts as a whole checkpoint, whose `.metadata` happens to lie one level up. Readers ask here for the home of a
path, and then for the names and paths in it, so that no other module knows of the two levels. Any other directory is
its own home.
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
"""The file that says what a checkpoint holds. It is written last."""
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
    """Return how the names of data in a store begin that a text has: of a folder, or of the weights of one Hub model."""
    return sorted({match[0].decode() for match in _DATA.finditer(text)})


def home_of(directory: str) -> str:
    """Return the folder in which the files of a checkpoint lie; the directory itself unless all of them lie in one.

    It is the one folder that `.metadata` names, if there is a manifest in it and none in the directory. A link to a
    folder elsewhere is no home. Raises nothing because of what lies there: opening says what is wrong.
    """
    if storage.lexists(os.path.join(directory, MANIFEST)):
        return directory
    names = _listed(directory)
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
    """Return the directory that people name: the one above a home. Any other directory is returned as it is."""
    above, name = os.path.split(directory.rstrip("/"))
    if not is_data_folder(name) or METADATA in _listed(directory):
        return directory
    above = above or os.curdir
    return above if home_of(above) == os.path.join(above, name) else directory


def path_in(directory: str, name: str) -> str:
    """Return the path of a file of a checkpoint, by its name in the home; `.metadata` lies above that."""
    return os.path.join(root_of(directory) if name == METADATA else directory, name)


def folders_above(name: str) -> Iterator[str]:
    """Yield the directories that a relative name lies in."""
    while name := os.path.dirname(name):
        yield name


def names_in(directory: str) -> list[str]:
    """Return the names in a directory; `.metadata` is among those in a home.

    Raises:
        OSError, ValueError: it cannot be listed.
    """
    names = storage.listdir(directory)
    return [*names, METADATA] if root_of(directory) != directory else names


def known() -> list[object]:
    """Return the homes that were looked up, as JSON, for other processes to `learn`."""
    return [[list(state), folder] for state, folder in _folders.items()]


def learn(entries: Iterable[tuple[Sequence[str | int], str | None]]) -> None:
    """Take what another process knows of homes. It counts where a `.metadata` is the very same file."""
    _folders.update((tuple(state), folder) for state, folder in entries)


def _listed(directory: str) -> list[str]:
    try:
        return storage.listdir(directory)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return []


def _named_folder(directory: str) -> str | None:
    """Return the one folder in which all shards lie that `.metadata` names; None if there is no such folder.

    It looks for paths in the bytes of the file, which is quick; whoever opens the checkpoint parses the file, and
    refuses it if this was wrong.
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
    placed = [
        folder
        for short, long, path, folder in _PLACED.findall(data)
        if int.from_bytes(short or long, "little") == len(path)
    ]
    return placed[0].decode() if len(set(placed)) == 1 and len(placed) == data.count(_SHARD) else None
