"""Open legacy weights, `pytorch_model.bin`, which are a pickled state dict; nothing is unpickled.

`open_torch_file` reads the zip that torch writes since 1.6. The bytes of a contiguous tensor are used as stored. Other
tensors (transposed ones, lazy views) have a function that returns their bytes, and `classes` finds the values of tensors
whose class wraps another tensor. Files from before torch 1.6, which are not zips, are refused.

A few bytes of pickle can make torch's loader hash forever, fill a bytearray of any size, or grow a storage to any size
that a shape requires. `screen_pickle` refuses pickles with such tricks, without executing them.

Source: torch 2.13, torch/_weights_only_unpickler.py (`_get_allowed_globals`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardkit.core.catalog import Checksums, Decoded, FileStamp, OnRead
from shardkit.core.dtypes import DType
from shardkit.core.regions import Shape, full_region
from shardkit.core.text import count, escape, listed
from shardkit.errors import SourceError
from shardkit.files.digest import crc32
from shardkit.files.strict_json import (
    DOWNLOAD_AGAIN,
    ZIP,
    open_regular,
    read_exactly,
    refuse_pointer,
    stamp_of,
)
from shardkit.formats.torchsave.archive import (
    SAVE_AGAIN,
    UnsupportedFile,
    ZipEntry,
    ZipReader,
    pread_of,
    read_directory,
)
from shardkit.formats.torchsave.classes import foreign_objects_error, is_known_class
from shardkit.formats.torchsave.file import (
    HEAD_NBYTES,
    DistributedRef,
    TensorNames,
    TensorRef,
    TorchFile,
    UnreadableTensor,
    class_of,
    is_before_zip,
    open_torch_file,
    tree_leaves,
)
from shardkit.formats.torchsave.record import read_row_major
from shardkit.pickles.interpreter import Refusal
from shardkit.pickles.policies import Inert, Maker, UnmadeObject

_MAX_PICKLE = 1 << 25
_PROTOCOL = 2
"""The protocol that torch.save writes by default; `screen_pickle` knows all of its opcodes."""
_WRAPPERS = ("state_dict", "model", "model_state_dict", "module")
_BESIDE_CLASSES = ("builtins.getattr", "__builtin__.getattr", "_io.BytesIO")
"""Names in pickles for a method of a class and for an extra state; they are never called."""
_DISTRIBUTED = "torch.distributed."
_INT64 = 1 << 63
_KEYS = (str, int, float, bool, bytes, type(None))
_TENSOR_NAMES = re.compile(
    r"torch\._utils\._rebuild_(tensor_v2|tensor_v3|parameter)"
    r"|torch\.([A-Z][A-Za-z0-9]*Storage|Size|(b?float|u?int|complex|bool)[a-z0-9_]*)"
    r"|torch\.storage\.UntypedStorage"
)


class BinTensor(NamedTuple):
    """A tensor with the place of its bytes, or with a decoder that returns them."""

    fqn: str
    dtype: DType
    shape: Shape
    start: int | None
    """First byte in the file; None if its values are not stored contiguously."""
    decoded: Decoded | None
    """The decoder if `start` is None: its bytes are read-only, row-major, contiguous, little-endian. Else None."""


_BinEntries = tuple[tuple[BinTensor, ...], tuple[str, ...], Mapping[str, str]]
"""The tensors, the objects and the unreadable entries of a file, as in `BinFile`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BinFile:
    """An opened legacy file."""

    tensors: tuple[BinTensor, ...]
    """In the order of the state dict."""
    objects: tuple[str, ...]
    """Names of entries that are not tensors."""
    unreadable: Mapping[str, str]
    """Tensors whose values cannot be read from the file: name -> description of the class."""
    size: int
    """Bytes of the file."""
    crc32: int
    """Of the zip's names, sizes and checksums."""
    stamp: FileStamp
    """Stamp of the file before it was read."""
    checksums: Checksums
    """Of the storages."""


def read_bin(path: str, name: str) -> BinFile:
    """Open a state dict that `torch.save` wrote.

    Args:
        path: of the file.
        name: of the file in messages.

    Raises:
        SourceError: not a regular file, damaged, from before torch 1.6, not a state dict, or one with code or with
            tensors that are not dense; names the file and the entries.
        ResourceError: the file may not be read.
    """
    with open_regular(path, name) as (fd, size):
        head = read_exactly(fd, 0, min(size, HEAD_NBYTES), name)
        refuse_pointer(head, name)
        if is_before_zip(head):
            raise UnsupportedFile(
                f"{escape(name)}: the format from before torch 1.6 is not read", hint=SAVE_AGAIN
            )
        if not head.startswith(ZIP):
            raise SourceError(f"{escape(name)}: not a file of torch.save (it is no zip)", hint=DOWNLOAD_AGAIN)
        stamp = stamp_of(fd)
    checksum, checksums, screened = _screen(path, name)
    tensors, objects, unreadable = _read_zip(path, name, screened)
    return BinFile(
        tensors=tensors,
        objects=objects,
        unreadable=unreadable,
        size=size,
        crc32=checksum,
        stamp=stamp,
        checksums=checksums,
    )


def _screen(path: str, name: str) -> tuple[int, Checksums, tuple[str, ...] | SourceError]:
    """Check a zip's directory, and screen its pickle.

    Returns:
        A checksum that changes with any entry; the recorded CRC-32s of the storages; and the names that `screen_pickle`
        returns for the pickle, or the error that it raises.
    """
    where = escape(name)
    with open_regular(path, name) as (fd, size):
        try:
            reader = ZipReader(pread_of(fd), 0, size, where)
            entries = read_directory(reader)
            if "data.pkl" not in entries:
                reader.refuse("a zip without data.pkl, not one that torch.save wrote")
            data = reader.content("data.pkl", entries["data.pkl"], _MAX_PICKLE)
        except SourceError as error:
            raise type(error)(error.message, hint=error.hint or DOWNLOAD_AGAIN) from None
    storages = {key[5:]: entry for key, entry in entries.items() if key.startswith("data/")}
    screened: tuple[str, ...] | SourceError
    try:
        screened = screen_pickle(data, storages, where)
    except SourceError as refusal:
        screened = refusal
    rows = [(f"{reader.prefix}/{key}", entry.nbytes, entry.crc) for key, entry in entries.items()]
    stretches = Checksums.of((entry.start, entry.nbytes, entry.crc) for entry in storages.values())
    return crc32(json.dumps(rows).encode()), stretches, screened


def _read_zip(path: str, name: str, screened: tuple[str, ...] | SourceError) -> _BinEntries:
    """Return the entries of a zip; nothing is unpickled.

    Args:
        path: of the file.
        name: of the file in messages.
        screened: from `_screen`.

    Raises:
        UnsupportedFile: the pickle needs classes or functions that would have to be imported.
        SourceError: the pickle did not pass `screen_pickle`.
    """
    file = open_torch_file(path, name)
    entries = list(tree_leaves(file.tree))
    named = file.unknown if isinstance(screened, SourceError) else screened
    classes = [str(leaf.value) for _, leaf in entries if isinstance(leaf, UnreadableTensor) and leaf.value]
    classes += [kind for kind in named if is_known_class(kind)]
    is_special = bool(classes) or any(isinstance(leaf, DistributedRef) for _, leaf in entries)
    needed = ("torch.", "gguf.", *(f"{kind.partition('.')[0]}{end}" for kind in classes for end in "._"))
    foreign = [kind for kind in named if kind in file.unknown or kind.startswith(_DISTRIBUTED)]
    if is_special:
        foreign = [kind for kind in foreign if kind not in _BESIDE_CLASSES and not kind.startswith(needed)]
    if foreign:
        classes_by_key = {
            ".".join(map(str, key)): class_of(leaf)
            for key, leaf in entries
            if type(leaf) is UnmadeObject and leaf.name in foreign
        }
        raise foreign_objects_error(name, path, foreign, classes_by_key, file.data)
    if file.num_dropped:
        raise UnsupportedFile(
            f"{escape(name)}: {count(file.num_dropped, 'entry', 'entries')} of its dicts have keys that are neither text nor "
            "integers",
            hint="save a state dict, whose keys are text",
        )
    if isinstance(screened, SourceError) and file.protocol == _PROTOCOL and not is_special:
        raise screened
    return _content_of(file)


def _content_of(file: TorchFile) -> _BinEntries:
    """Return the entries of a file's state dict."""
    path, name = file.path, file.name
    if not isinstance(file.tree, dict):
        raise _no_state_dict_error(name, file.tree)
    tensors, objects, unreadable, problems = list[BinTensor](), list[str](), dict[str, str](), list[str]()
    for key, value in file.tree.items():
        whole = _whole_tensor(value)
        if not isinstance(key, str):  # the key 1 is not "1", which may be there too
            objects.append(str(key))
        elif isinstance(whole, TensorRef):
            tensors.append(_bin_tensor(str(key), whole, path, name))
        elif isinstance(whole, UnreadableTensor) and whole.value:
            unreadable[str(key)] = whole.name
        elif isinstance(whole, (UnreadableTensor, DistributedRef)):
            why = whole.name if isinstance(whole, UnreadableTensor) else "the part of one rank alone"
            problems.append(f"{escape(str(key))}: {escape(why)}")
        else:
            objects.append(str(key))
    _check_content(name, len(file.tree), bool(tensors or unreadable), objects, problems)
    return tuple(tensors), tuple(objects), unreadable


def _whole_tensor(value: object) -> object:
    """Return the plain tensor for a distributed one whose single part is the whole; return any other value unchanged."""
    if isinstance(value, DistributedRef) and value.problem is None and len(value.parts) == 1:
        part = value.parts[0]
        return part.tensor if part.region == full_region(value.shape) else value
    return value


def _bin_tensor(fqn: str, record: TensorRef, path: str, name: str) -> BinTensor:
    if record.is_contiguous and record.nbytes:
        return BinTensor(fqn, record.dtype, record.shape, record.start, None)

    def decode(on_read: OnRead) -> memoryview:
        return read_row_major(path, name, record, on_read, follow=True)

    return BinTensor(fqn, record.dtype, record.shape, None, Decoded(decode))


def _no_state_dict_error(name: str, value: object) -> UnsupportedFile:
    return UnsupportedFile(
        f"{escape(name)}: expected a state dict, found {type(value).__name__}",
        hint="save model.state_dict(), best as safetensors",
    )


def _check_content(
    name: str, number: int, has_tensors: bool, objects: Collection[str], problems: Collection[str]
) -> None:
    UnsupportedFile.raise_for(
        problems,
        f"{escape(name)}: {len(problems)} of {number} entries are tensors without plain bytes",
        hint="save the model with dense tensors of torch's ordinary dtypes",
    )
    if has_tensors or not objects:
        return
    wrapper = next((key for key in objects if key in _WRAPPERS), None)
    below = f"a training checkpoint, its weights lie below {wrapper!r}"
    raise UnsupportedFile(
        f"{escape(name)}: {below if wrapper else f'no name in it is that of a tensor: {listed(objects)}'}",
        hint="save that state dict by itself, best as safetensors",
    )


def screen_pickle(pickle: bytes, storages: Mapping[str, ZipEntry], where: str) -> tuple[str, ...]:
    """Interpret a pickle of `torch.save`, and return its names besides those of plain data and plain tensors.

    Args:
        pickle: content of `data.pkl`.
        storages: entries of the storages, by key.
        where: name of the pickle in messages, escaped.

    Raises:
        SourceError: damaged, or loading it could cost more than a file of its size justifies.
    """
    tensors = TensorNames(storages)
    other_names: dict[str, None] = {}

    def look_up(module: str, name: str) -> object:
        full = f"{module}.{name}"
        if full in _PLAIN:
            return _PLAIN[full]
        if _TENSOR_NAMES.fullmatch(full):
            return tensors.look_up(module, name)
        other_names[full] = None
        return UnmadeObject(full)

    _PlainPickle(pickle, look_up, tensors.storage).run(where)
    return tuple(other_names)


class _PlainPickle(Inert):
    """Refuses keys of dicts and sets whose hash the file could choose, or that take forever to hash."""

    def set_items(self, items: list[Any]) -> None:
        _check_keys(items[::2])
        super().set_items(items)

    def push_set(self, items: list[Any]) -> None:
        raise Refusal("a set in a form that torch.save never writes")


def _check_keys(keys: list[Any]) -> None:
    for key in keys:
        if type(key) not in _KEYS or (type(key) is int and not -_INT64 <= key < _INT64):
            raise Refusal(f"a key of type {type(key).__name__} in a dict or set")


def _make_set(args: tuple[Any, ...]) -> object:
    if len(args) != 1 or type(args[0]) is not list:
        raise Refusal("a set of something other than a list")
    _check_keys(args[0])
    return UnmadeObject("set")


def _make_counter(args: tuple[Any, ...]) -> object:
    if len(args) != 1 or type(args[0]) is not dict:
        raise Refusal("a Counter of something other than a dict")
    return UnmadeObject("Counter")


def _make_ordered(args: tuple[Any, ...]) -> object:
    if args:
        raise Refusal("an OrderedDict with arguments")
    return {}


def _make_bytes(args: tuple[Any, ...]) -> object:
    """Return bytes from encode(text, "latin1"), their form in protocol 2; other codecs are refused, as some are slow."""
    if len(args) != 2 or type(args[0]) is not str or args[1] != "latin1":
        raise Refusal("text encoded with another codec than latin1")
    return UnmadeObject("bytes")


def _make_bytearray(args: tuple[Any, ...]) -> object:
    is_text = len(args) == 2 and type(args[0]) is str and args[1] == "latin-1"
    if args and not is_text and not (len(args) == 1 and isinstance(args[0], (bytes, UnmadeObject))):
        raise Refusal("a bytearray of something other than its bytes")
    return UnmadeObject("bytearray")


def _make_scalars(name: str, most: int) -> Maker:
    def make(args: tuple[Any, ...]) -> object:
        if len(args) > most or any(type(arg) not in (str, int, float) for arg in args):
            raise Refusal(f"a {name} of something other than numbers or text")
        return UnmadeObject(name)

    return Maker(name, make)


_PLAIN: dict[str, Maker] = {
    "collections.OrderedDict": Maker("OrderedDict", _make_ordered),
    "collections.Counter": Maker("Counter", _make_counter),
    "builtins.set": Maker("set", _make_set),
    "__builtin__.set": Maker("set", _make_set),
    "builtins.bytearray": Maker("bytearray", _make_bytearray),
    "__builtin__.bytearray": Maker("bytearray", _make_bytearray),
    "builtins.complex": _make_scalars("complex", 2),
    "__builtin__.complex": _make_scalars("complex", 2),
    "_codecs.encode": Maker("bytes", _make_bytes),
    "torch.device": _make_scalars("device", 2),
    "torch.serialization._get_layout": _make_scalars("layout", 1),
}
