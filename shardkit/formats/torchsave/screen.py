"""Looking through a pickle that somebody else's unpickler is to load: what it names, and what it would cost.

torch's weights-only loader runs nothing that it does not know. But a few bytes can have it hash for ever, fill a
bytearray of any size, or grow a storage to whatever a shape says. Such pickles are refused here first.

Source: torch 2.13, torch/_weights_only_unpickler.py (`_get_allowed_globals`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardkit.formats.torchsave.archive import Entry
from shardkit.formats.torchsave.values import TensorNames
from shardkit.pickles.interpreter import Refusal
from shardkit.pickles.policies import Inert, Maker, Opaque

_INT64 = 1 << 63
_KEYS = (str, int, float, bool, bytes, type(None))
_TENSOR_NAMES = re.compile(
    r"torch\._utils\._rebuild_(tensor_v2|tensor_v3|parameter)"
    r"|torch\.([A-Z][A-Za-z0-9]*Storage|Size|(b?float|u?int|complex|bool)[a-z0-9_]*)"
    r"|torch\.storage\.UntypedStorage"
)


def screen(pickle: bytes, storages: Mapping[str, Entry], where: str) -> tuple[str, ...]:
    """Look through the pickle of a file of `torch.save`; return what it names besides plain data and plain tensors.

    Args:
        pickle: `data.pkl`, the whole of it.
        storages: by key, where the file has them.
        where: what to call it in messages, escaped.

    Raises:
        SourceError: damaged, or it would cost more to load than a file of its size may.
    """
    tensors = TensorNames(storages)
    others: dict[str, None] = {}

    def look_up(module: str, name: str) -> object:
        full = f"{module}.{name}"
        if full in _PLAIN:
            return _PLAIN[full]
        if _TENSOR_NAMES.fullmatch(full):
            return tensors.look_up(module, name)
        others[full] = None
        return Opaque(full)

    _PlainPickle(pickle, look_up, tensors.storage).run(where)
    return tuple(others)


class _PlainPickle(Inert):
    """Refuses keys whose hashes a file could choose, or make endless to take; what is hashed here torch hashes too."""

    def set_items(self, items: list[Any]) -> None:
        _check_keys(items[::2])
        super().set_items(items)

    def push_set(self, items: list[Any]) -> None:
        raise Refusal("a set as no file of torch.save spells it")


def _check_keys(keys: list[Any]) -> None:
    for key in keys:
        if type(key) not in _KEYS or (type(key) is int and not -_INT64 <= key < _INT64):
            raise Refusal(f"a key of type {type(key).__name__} in a dict or set")


def _make_set(args: tuple[Any, ...]) -> object:
    if len(args) != 1 or type(args[0]) is not list:
        raise Refusal("a set of something other than a list")
    _check_keys(args[0])
    return Opaque("set")


def _make_counter(args: tuple[Any, ...]) -> object:
    if len(args) != 1 or type(args[0]) is not dict:
        raise Refusal("a Counter of something other than a dict")
    return Opaque("Counter")


def _make_ordered(args: tuple[Any, ...]) -> object:
    if args:
        raise Refusal("an OrderedDict with arguments")
    return {}


def _make_bytes(args: tuple[Any, ...]) -> object:
    """bytes, as protocol 2 spells them: encode(text, "latin1"); other codecs may cost anything."""
    if len(args) != 2 or type(args[0]) is not str or args[1] != "latin1":
        raise Refusal("text encoded with another codec than latin1")
    return Opaque("bytes")


def _make_bytearray(args: tuple[Any, ...]) -> object:
    is_text = len(args) == 2 and type(args[0]) is str and args[1] == "latin-1"
    if args and not is_text and not (len(args) == 1 and isinstance(args[0], (bytes, Opaque))):
        raise Refusal("a bytearray of something other than its bytes")
    return Opaque("bytearray")


def _make_scalars(name: str, most: int) -> Maker:
    def make(args: tuple[Any, ...]) -> object:
        if len(args) > most or any(type(arg) not in (str, int, float) for arg in args):
            raise Refusal(f"a {name} of something other than numbers or text")
        return Opaque(name)

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
