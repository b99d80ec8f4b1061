"""Open a file of `torch.save` without torch: what it holds, and where the bytes of its tensors lie.

The pickle inside is interpreted, never executed, and no tensor data is read. A tensor becomes a `TensorRef`,
or a `DistributedRef` where it is one rank's part of a larger one. Everything else that is not plain data
becomes an `Opaque`.

Source: torch 2.13, torch/serialization.py (`_save`); zip files since torch 1.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardkit.core.catalog import Checksums, FileStamp, SourceFile
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.files import storage
from shardkit.files.strict_json import open_regular, read_exactly, stamp_of
from shardkit.formats.torchsave.archive import Entry, ZipReader, crc_of_range, read_directory
from shardkit.formats.torchsave.values import DistributedRef, Part, TensorNames, TensorRef, UnreadableTensor
from shardkit.pickles.policies import Inert, Opaque

__all__ = [
    "DistributedRef",
    "Opaque",
    "Part",
    "TensorRef",
    "TorchFile",
    "UnreadableTensor",
    "differing_storages",
    "leaves",
    "open_torch_file",
]

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_MAX_ENTRIES = 1 << 18
_MAX_PICKLE = 1 << 25
_SAVE_AGAIN = "load it with torch where you trust it, and save it again with torch 1.6 or later"
_ANOTHER_COPY = "the file is cut short or damaged: use another copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile:
    """A file of `torch.save`, opened."""

    path: str
    name: str
    """How to call it in messages; not escaped."""
    stamp: FileStamp
    """The file's, when its description was read."""
    tree: object
    """None, bool, int, float, str, bytes, lists, tuples, dicts with strings and integers as keys.
    `TensorRef`, `DistributedRef` and `Opaque` stand for tensors and everything else. Size and depth (100
    levels) of the tree are bounded, though equal parts may be one object. It leaves out attributes that were
    set on a dict or tensor."""
    num_dropped: int
    """Entries of dicts that are left out because their keys are neither strings nor integers."""
    storages: Mapping[str, Entry]
    """Where the storages lie, by key; positions count from the first byte of the file."""

    @property
    def source(self) -> SourceFile:
        """The file, for a catalog."""
        entries = self.storages.values()
        return SourceFile(
            name=self.name,
            path=self.path,
            size=self.stamp.size,
            stamp=self.stamp,
            checksums=Checksums.of((entry.start, entry.nbytes, entry.crc) for entry in entries),
        )


class Leaf(NamedTuple):
    """Something in a tree that is not a dict, list or tuple."""

    path: tuple[str | int, ...]
    """Keys, and indexes of lists, from the top of the tree."""
    value: object


def open_torch_file(path: str, name: str, extent: tuple[int, int] | None = None) -> TorchFile:
    """Open a file that `torch.save` wrote. Reads its directory and its pickle, not the tensors.

    Args:
        path: where the file is.
        name: how to call it in messages.
        extent: first byte and number of bytes, for a record inside the file.

    Raises:
        SourceError: missing, not a regular file, damaged, or from before torch 1.6.
        IntegrityError: its pickle is not the one that was written (CRC-32).
        ResourceError: the file may not be read.
    """
    where = escape(name)
    with open_regular(path, name) as (fd, size):
        stamp = stamp_of(fd)
        begin, length = extent or (0, size)
        _check_magic(read_exactly(fd, begin, min(length, len(_ZIP)), name), length, where)
        try:
            reader = ZipReader(lambda start, nbytes: storage.pread(fd, nbytes, start), begin, length, where)
            entries = read_directory(reader, lambda entry: True, max_entries=_MAX_ENTRIES)
            if "data.pkl" not in entries or "constants.pkl" in entries:
                reader.refuse(
                    "a zip, but none of torch.save: no data.pkl is in it, or it is a TorchScript program"
                )
            order = reader.content("byteorder", entries["byteorder"]) if "byteorder" in entries else b"little"
            if order != b"little":
                reader.refuse(f"its byte order is {escape(order.decode('ascii', 'replace'))!r}, not little")
            if "version" in entries:
                reader.check_version(reader.content("version", entries["version"]))
            data = reader.content("data.pkl", entries["data.pkl"], _MAX_PICKLE)
        except SourceError as error:
            raise type(error)(error.message, hint=error.hint or _ANOTHER_COPY) from None
    storages = {
        key[5:]: entry._replace(start=begin + entry.start)
        for key, entry in entries.items()
        if key.startswith("data/")
    }
    names = TensorNames(storages)
    pickle = Inert(data, names.look_up, names.storage)
    tree = pickle.run(f"{where}, data.pkl")
    return TorchFile(
        path=path, name=name, stamp=stamp, tree=tree, num_dropped=pickle.num_dropped, storages=storages
    )


def _check_magic(magic: bytes, size: int, where: str) -> None:
    if magic == _ZIP:
        return
    if not size:
        raise SourceError(f"{where}: the file is empty", hint=_ANOTHER_COPY)
    if magic.startswith(_PICKLE):
        raise SourceError(
            f"{where}: a pickle that is not in a zip: the format from before torch 1.6, or not of torch",
            hint=_SAVE_AGAIN,
        )
    raise SourceError(f"{where}: not a file of torch.save (it is no zip)", hint=_SAVE_AGAIN)


def leaves(tree: object, *, into: Callable[[object], bool] = lambda value: True) -> Iterator[Leaf]:
    """Yield what a tree holds, in its order; empty dicts and lists hold nothing.

    Args:
        tree: that of a file, or a part of it.
        into: whether to go into a dict, list or tuple; otherwise it is a leaf itself.
    """
    todo = [Leaf((), tree)]
    while todo:
        path, value = leaf = todo.pop()
        if isinstance(value, dict) and into(value):
            todo.extend(Leaf((*path, key), value[key]) for key in reversed(value))
        elif isinstance(value, (list, tuple)) and into(value):
            todo.extend(Leaf((*path, index), value[index]) for index in reversed(range(len(value))))
        else:
            yield leaf


def differing_storages(file: TorchFile, keys: Iterable[str]) -> Iterator[str]:
    """Read storages and yield the key of each whose CRC-32 is not the recorded one.

    Storages without a CRC-32 are skipped.

    Args:
        file: an opened file.
        keys: of its storages; repeated ones are read once.

    Raises:
        SourceError, ResourceError: the file cannot be read.
    """
    with open_regular(file.path, file.name) as (fd, _):
        for key in dict.fromkeys(keys):
            entry = file.storages[key]
            if not entry.crc or not entry.nbytes:
                continue
            if crc_of_range(fd, entry.start, entry.nbytes, file.name) != entry.crc:
                yield key
