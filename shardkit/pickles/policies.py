"""The two policies for parsing pickles. Every caller chooses one.

`Strict` is for files with known contents. A `Vocabulary` lists all allowed names; each maps to an inert value of ours
and is never imported. Anything else in the file is an error.

`Inert` is for arbitrary objects that a training script saves with its weights. It accepts all names: anything but plain
data becomes an `UnmadeObject`, and any operation on an `UnmadeObject` results in an `UnmadeObject`. The only exceptions
are `Maker`s, which are part of shardkit.

Both bound the cost of small files. `Strict` hashes only strings, and records that the vocabulary handles; its memo has
only slots that the file could have filled, and stores only values that are fetched later. `Inert` hashes only strings
and 64-bit integers. It limits the number of opcodes and the memory of their results, and refuses results that contain
themselves or take long to traverse.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.pickles.columns import RunFinder, RunKind
from shardkit.pickles.interpreter import (
    COMMON,
    STOP,
    Handler,
    Interpreter,
    Refusal,
    number,
    plain,
    sized,
    table,
)

_SIZE = b"\x94\x85\x94R\x94"  # follows the tuple of a torch.Size: MEMOIZE TUPLE1 MEMOIZE REDUCE MEMOIZE
_STATE = b"\x94}\x94("  # follows NEWOBJ of a record: MEMOIZE EMPTY_DICT MEMOIZE MARK
_NEWOBJ, _BUILD = 0x81, 0x62
_MAX_KEYS_SHOWN = 4
# MEMOIZE, BINPUT and LONG_BINPUT fill the slots, which are numbered from 0.
_FILLING = (0x94, 0x71, 0x72)
_BLOCK = 4 << 20  # bytes of a large file that are scanned at once for memo fetches
_u32 = struct.Struct("<I").unpack_from
_LONG_GET = re.compile(rb"j(?=(....))", re.DOTALL)


class Record:
    """An inert object: NEWOBJ creates it empty, and BUILD sets its fields, at most once."""

    __slots__ = ()

    def build(self, state: object) -> None:
        """Check and set the fields.

        Raises:
            Refusal: the state is not valid for the class.
        """
        raise Refusal(f"{type(self).__name__} takes no fields")


@dataclass(frozen=True, slots=True, eq=False)
class Global:
    """A name that a pickle may call or instantiate."""

    name: str
    """For messages, e.g. "torch.Size"."""
    new: Callable[[], Record] | None = None
    """Creates the object for NEWOBJ without arguments; None if that is refused."""
    call: Callable[[tuple[Any, ...]], object] | None = None
    """Computes the value for REDUCE, checking the arguments; None if that is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The names and values that are allowed in the pickles of one kind of file."""

    names: Mapping[tuple[str, str], object]
    """(module, name) -> a `Global`, or an inert value."""
    max_bytes: int
    """Larger files are refused."""
    persistent: Callable[[object], object] | None = None
    """Computes the value for BINPERSID, checking the argument; None if that is refused."""
    set_records: Callable[[dict[Any, Any], list[Any]], None] | None = None
    """Stores [key, value, ...] in a dict with records as keys; None if all keys are strings."""
    runs: tuple[RunKind, ...] = ()
    """Records that can be decoded in columns; one value on the stack then represents many records."""


class Strict(Interpreter):
    """Refuses every name, call and key that is not in a vocabulary.

    Args:
        data: the whole pickle.
        vocabulary: the allowed names and values.
        in_columns: decode records in columns where the vocabulary supports it. The same files are accepted, but a
            refusal may be worded differently.
    """

    hint = "nothing in it was executed; if it comes from another tool, its format is not supported"
    faults: ClassVar = {**Interpreter.faults, AttributeError: "a record without its fields"}
    max_int_bytes = 9  # of an unsigned 64-bit value

    def __init__(self, data: bytes, vocabulary: Vocabulary, *, in_columns: bool) -> None:
        # Not a method: a reference cycle would keep the data alive until garbage collection.
        look_up = partial(_look_up, vocabulary.names)
        super().__init__(data, vocabulary.max_bytes, look_up, vocabulary.persistent)
        self.vocabulary, self.in_columns = vocabulary, in_columns
        self.keep = bytearray()
        self.memo: dict[int, Any] = {}
        self.num_memoized = 0
        self.unbuilt: list[Record] = []
        self.field_orders: dict[type[Record], list[str]] = {}  # the keys, checked, of the last of each class
        self.runs: dict[type, RunFinder] = {}

    def execute(self) -> object:
        self.keep = fetched_slots(self.data)
        for kind in self.vocabulary.runs if self.in_columns else ():
            self.runs[kind.classes[-1]] = RunFinder(self.data, kind, self.keep, self.memo, _call_of)
        return super().execute()

    def step_to_stop(self) -> None:
        """Execute opcodes up to STOP; the most frequent ones of `.metadata` are inlined here."""
        data, opcodes, memo, keep = self.data, self.opcodes, self.memo, self.keep
        stack, pos = self.stack, 0
        try:
            while True:
                op = data[pos]
                if op == 0x6A:  # LONG_BINGET
                    stack.append(memo[_u32(data, pos + 1)[0]])
                    pos += 5
                elif op == 0x68:  # BINGET
                    stack.append(memo[data[pos + 1]])
                    pos += 2
                elif op == 0x4B:  # BININT1
                    stack.append(data[pos + 1])
                    pos += 2
                elif op == 0x94:  # MEMOIZE
                    last = stack[-1]  # there has to be one, fetched or not
                    if keep[self.num_memoized]:
                        memo[self.num_memoized] = last
                    self.num_memoized += 1
                    pos += 1
                elif op == STOP:
                    break
                else:
                    pos = opcodes[op](self, pos + 1)
                    stack = self.stack
        finally:
            self.pos = pos

    def place(self) -> str:
        """Name the last key of each dict that is open."""
        stacks = [*self.outer, self.stack]
        keys = [next((item for item in reversed(stack) if type(item) is str), None) for stack in stacks]
        shown = [escape(key) for key in keys if key is not None]
        return f", in {' / '.join(shown[:_MAX_KEYS_SHOWN])}" if shown else ""

    def put_items(self, target: dict[Any, Any], items: list[Any]) -> None:
        set_records = self.vocabulary.set_records
        if items and set_records is not None and isinstance(items[0], Record):
            set_records(target, items)
        else:
            _put_texts(target, items)

    def reduce(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        self.stack.append(_called(function, args))

    def push_empty_tuple(self, pos: int) -> int:
        """Push (), or a new record if NEWOBJ follows; begin its state too if that comes next."""
        stack = self.stack
        if self.data[pos] != _NEWOBJ:
            stack.append(())
            return pos
        cls, slot = stack[-1], self.num_memoized
        if type(cls) is not Global or cls.new is None:
            raise Refusal(f"NEWOBJ of {_describe(cls)}")
        record = stack[-1] = cls.new()
        self.unbuilt.append(record)
        if self.data[pos + 1 : pos + 5] != _STATE or self.keep[slot] or self.keep[slot + 1]:
            return pos + 1
        self.num_memoized = slot + 2
        stack.append({})
        self.outer.append(stack)
        self.stack = []
        return pos + 5

    def refuse_arguments(self, pos: int) -> int:
        raise Refusal("an object made with arguments")

    def build(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        # A record is built once, before its container; BytesStorageMetadata never is.
        while not self.unbuilt or self.unbuilt.pop() is not record:
            if not self.unbuilt:
                raise Refusal(f"BUILD of {_describe(record)}")
        record.build(state)

    def set_marked_items(self, pos: int) -> int:
        """Execute SETITEMS; also BUILD if it follows and builds the latest record from these items."""
        items = self.stack
        stack = self.stack = self.outer.pop()
        if self.data[pos] != _BUILD or stack[-1] != {} or self.unbuilt[-1] is not stack[-2]:
            self.set_items(items)
            return pos
        if len(items) % 2:
            raise Refusal("a dict key without a value")
        state, record = stack.pop(), self.unbuilt.pop()
        keys, kind = items[::2], type(record)
        if self.field_orders.get(kind) == keys:
            state = dict(zip(keys, items[1::2], strict=True))
        else:
            _put_texts(state, items)
            self.field_orders[kind] = list(state)
        record.build(state)
        pos += 1
        if kind in self.runs and _may_begin(self.runs[kind].kind, stack, self.outer):
            run = self.runs[kind].take(pos, self.num_memoized)
            if run is not None:
                stack += run.values
                pos, self.num_memoized = run.stop, run.num_memoized
        return pos


def _look_up(names: Mapping[tuple[str, str], object], module: str, name: str) -> object:
    if (module, name) not in names:
        raise Refusal(f"it names {escape(module)}.{escape(name)}")
    return names[module, name]


def _called(function: object, args: object) -> object:
    if type(function) is not Global or function.call is None or type(args) is not tuple:
        raise Refusal(f"REDUCE of {_describe(function)}")
    return function.call(args)


def _put(layout: str) -> Handler:
    """Return a handler that fills the memo slot whose number has the `struct` format `layout`."""
    size, unpack = struct.calcsize(layout), struct.Struct(layout).unpack_from

    def handle(vm: Strict, pos: int) -> int:
        slot, keep = unpack(vm.data, pos)[0], vm.keep
        if slot >= len(keep) or slot in vm.memo:
            raise Refusal(f"memo slot {slot}{' set again' if slot in vm.memo else ''}")
        last = vm.stack[-1]
        if keep[slot]:
            vm.memo[slot] = last
        vm.num_memoized = len(keep)  # no pickler mixes these with MEMOIZE, which would have no slot number
        return pos + size

    return handle


def _text(vm: Strict, pos: int, nbytes: int) -> int:
    stop = pos + nbytes
    vm.stack.append(vm.data[pos:stop].decode())
    return stop  # the loop stops where that is past the end


def _size_of(num_dims: int) -> Handler:
    """Return a handler that pushes a tuple, or a torch.Size if its opcodes follow."""

    def handle(vm: Strict, pos: int) -> int:
        slot, stack = vm.num_memoized, vm.stack
        if num_dims > len(stack):
            raise IndexError
        value: tuple[Any, ...] = (stack.pop(),)
        for _ in range(num_dims - 1):
            value = (stack.pop(), *value)
        if vm.data[pos : pos + 5] != _SIZE or vm.keep[slot] or vm.keep[slot + 1]:
            stack.append(value)
            return pos
        stack[-1] = _called(stack[-1], (value,))
        vm.num_memoized = slot + 2
        return pos + 4  # the last of the five opcodes is left to the loop

    return handle


Strict.opcodes = table(
    {
        0x29: Strict.push_empty_tuple,  # EMPTY_TUPLE
        0x52: plain(Strict.reduce),  # REDUCE
        0x58: sized("<I", _text),  # BINUNICODE
        0x62: plain(Strict.build),  # BUILD
        0x71: _put("<B"),  # BINPUT
        0x72: _put("<I"),  # LONG_BINPUT
        0x75: Strict.set_marked_items,  # SETITEMS
        0x81: Strict.refuse_arguments,  # NEWOBJ
        0x85: _size_of(1),  # TUPLE1
        0x86: _size_of(2),  # TUPLE2
        0x87: _size_of(3),  # TUPLE3
        0x8C: sized("<B", _text),  # SHORT_BINUNICODE
        0x8D: sized("<Q", _text),  # BINUNICODE8
    }
)


def parse_in_columns(data: bytes, vocabulary: Callable[[int], Vocabulary], where: str) -> object:
    """Interpret a pickle like `Strict`, but decode records in columns, which is faster for large files.

    Args:
        data: the whole pickle.
        vocabulary: creates the vocabulary for one parse, given the number of bytes.
        where: the file, escaped, for messages.

    Raises:
        SourceError: the pickle is damaged, or the vocabulary does not allow it.
    """
    try:
        return Strict(data, vocabulary(len(data)), in_columns=True).run(where)
    except SourceError:
        # Read again step by step: the message then names the record that is wrong.
        return Strict(data, vocabulary(len(data)), in_columns=False).run(where)


def fetched_slots(data: bytes) -> bytearray:
    """Return for each memo slot that a pickle could fill whether it may be fetched.

    This bounds the memory of `Strict`: the memo of a million chunks would have twenty million entries, hardly any of
    which are fetched. Bytes that only look like a LONG_BINGET set flags as well, which is harmless. BINGET can reach the
    first 256 slots; all of them are flagged.
    """
    if len(data) > _BLOCK:
        return _fetched_in_columns(data)
    num_slots = sum(map(data.count, _FILLING)) + 256
    keep = bytearray(num_slots)
    keep[:256] = b"\1" * 256
    for slot in set(_LONG_GET.findall(data)):
        index = int.from_bytes(slot, "little")
        if index < num_slots:
            keep[index] = 1
    return keep


def _fetched_in_columns(data: bytes) -> bytearray:
    """Like `fetched_slots`, with numpy: which saves seconds for a million chunks but takes time to import."""
    import numpy as np

    blocks = [
        np.frombuffer(data, np.uint8, min(_BLOCK, len(data) - offset), offset)
        for offset in range(0, len(data), _BLOCK)
    ]
    num_slots = 256 + sum(int(np.count_nonzero(block == byte)) for block in blocks for byte in _FILLING)
    keep = bytearray(num_slots)
    keep[:256] = b"\1" * 256
    flags = np.frombuffer(keep, dtype=np.uint8)
    for place, block in enumerate(blocks):
        offsets = np.flatnonzero(block == 0x6A) + place * _BLOCK  # LONG_BINGET
        offsets = offsets[offsets < len(data) - 4]
        slots = np.ndarray((len(data) - 4,), "<u4", data, 1, (1,))[offsets]
        flags[slots[slots < num_slots]] = 1
    return keep


def _put_texts(target: dict[Any, Any], items: list[Any]) -> None:
    """Add [key, value, ...] to a dict; keys must be strings, without duplicates."""
    for i in range(0, len(items), 2):
        key = items[i]
        if type(key) is not str:
            raise Refusal(f"a dict key that is {_describe(key)}, not text")
        if key in target:
            raise Refusal(f"dict key {escape(key)!r} is given twice")
        target[key] = items[i + 1]


def _call_of(value: object) -> Callable[[tuple[Any, ...]], object] | None:
    return value.call if type(value) is Global else None


def _describe(value: object) -> str:
    """Describe a value without revealing its contents."""
    return value.name if type(value) is Global else f"something of type {type(value).__name__}"


def _may_begin(kind: RunKind, stack: list[Any], outer: list[list[Any]]) -> bool:
    """True if the stack has complete units, the last one just built, on top of the right container."""
    size = len(kind.classes)
    return (
        len(stack) % size == 0
        and bool(outer and outer[-1])
        and type(outer[-1][-1]) is kind.holder
        and tuple(map(type, stack[-size:])) == kind.classes
    )


class UnmadeObject:
    """A placeholder for anything but plain data; only the name is kept."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: object = None) -> None:
        self.name = name
        """As in the file, e.g. "argparse.Namespace"; not escaped."""
        self.value = value
        """Its only argument, if that is a string, a number or a bool: the value of an enum, a device."""

    def __repr__(self) -> str:
        return f"UnmadeObject({self.name!r})"

    def make(self, args: object) -> object:
        """Return the result of calling or instantiating it with a tuple of arguments."""
        only = args[0] if type(args) is tuple and len(args) == 1 else None
        return UnmadeObject(self.name, only if type(only) in (str, int, float, bool) else None)

    def build(self, state: object) -> None:
        """Ignore the state."""


class Maker(UnmadeObject):
    """A name that maps to a function of shardkit, which must check its arguments."""

    __slots__ = ("_call",)

    def __init__(self, name: str, call: Callable[[tuple[Any, ...]], object]) -> None:
        super().__init__(name)
        self._call = call

    def make(self, args: object) -> object:
        return self._call(args) if type(args) is tuple else UnmadeObject(self.name)


class Fields(UnmadeObject):
    """An instance of a known class, whose state is kept."""

    __slots__ = ("args", "items")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        super().__init__(name)
        self.args = args
        """Arguments of its constructor."""
        self.items: dict[str, Any] = {}
        """Its attributes; any other state has the key ""."""

    def build(self, state: object) -> None:
        """Keep the state: a dict, or the pair (dict, dict of slots)."""
        is_pair = (
            type(state) is tuple and len(state) == 2 and all(x is None or type(x) is dict for x in state)
        )
        for part in state if is_pair else (state,):  # type: ignore[attr-defined]
            if type(part) is dict:
                self.items.update(part)
            elif part is not None:
                self.items[""] = part


MAX_INERT_BYTES = 1 << 25
"""`Inert` refuses larger files."""
MAX_NODES = 1 << 22
"""Limit on the values that a traversal of the result of `Inert` visits."""
MAX_THINGS = 1 << 17
"""Limit on visited values that are not plain data, such as tensors, which take more memory."""
MAX_DEPTH = 100
_MAX_CHARGED = 208 << 20  # bytes; with pointers of opcodes and later copies of the result, less than 512 MiB
_CONTAINERS = (list, tuple, dict)
_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_INT64 = 1 << 63

# Bytes per value in CPython 3.13, including its share of other structures.
_NUMBER, _TEXT, _LIST, _TUPLE = 32, 56, 72, 56
_DICT, _DICT_TABLE, _DICT_ITEM = 80, 100, 60
_OPAQUE, _THING, _NAME, _SHARED = 80, 250, 600, 250


class Inert(Interpreter):
    """Accepts all names; results consist of None, bool, int, float, str, bytes, list, tuple, dict and `UnmadeObject`.

    Args:
        data: the whole pickle.
        names: returns the inert value for a (module, name).
        persistent: returns the value for a persistent id.
    """

    hint = "nothing in it was executed; use another copy of the file"
    max_opcodes = 1 << 23
    max_int_bytes = 1 << 10
    passive = (UnmadeObject,)

    def __init__(
        self, data: bytes, names: Callable[[str, str], object], persistent: Callable[[object], object]
    ) -> None:
        super().__init__(data, MAX_INERT_BYTES, names, persistent)
        self.memo: list[Any] = []  # picklers number slots from 0
        self.odd_slots: dict[int, Any] = {}  # but `pickletools.optimize` skips some
        self.charged = 0
        self.shared: set[int] = set()  # ids of containers that are referenced more than once
        self.num_dropped = 0
        """Number of dict entries that were dropped, as their keys are neither strings nor integers."""

    def execute(self) -> object:
        if self.data[:1] != b"\x80":
            raise Refusal("a pickle protocol other than 2 to 5")
        value = super().execute()
        if type(value) in _CONTAINERS:
            _Walk(self.shared).measure(value, 1)
        return value

    def charge(self, nbytes: int) -> None:
        """Count the memory of a value before creating it; its pointer is counted with the opcode."""
        self.charged += nbytes
        if self.charged > _MAX_CHARGED:
            raise Refusal(f"what it describes takes more than {_MAX_CHARGED} bytes of memory")

    def pop_mark(self) -> list[Any]:
        items = super().pop_mark()
        self.charged -= _LIST
        return items

    def put_items(self, target: dict[Any, Any], items: list[Any]) -> None:
        self.charge((0 if target else _DICT_TABLE) + _DICT_ITEM * len(items) // 2)
        for i in range(0, len(items), 2):
            key = items[i]
            if type(key) is not str and not (type(key) is int and -_INT64 <= key < _INT64):
                self.num_dropped += 1
            elif key in target:
                raise Refusal("a dict key that is given twice")
            else:
                target[key] = items[i + 1]

    def get(self, pos: int, slot: int) -> int:
        self.push_again(self.memo[slot] if slot < len(self.memo) else self.odd_slots[slot])
        return pos

    def put(self, pos: int, slot: int) -> int:
        if slot < len(self.memo) or slot in self.odd_slots:
            raise Refusal(f"memo slot {slot} set again")
        if slot == len(self.memo):
            self.memo.append(self.stack[-1])
        else:
            self.charge(_DICT_ITEM + _NUMBER)
            self.odd_slots[slot] = self.stack[-1]
        return pos

    def push_again(self, value: object) -> None:
        """Push a value that is already referenced elsewhere."""
        if type(value) in _CONTAINERS and id(value) not in self.shared:
            self.charge(_SHARED)
            self.shared.add(id(value))
        self.stack.append(value)

    def push_text(self, pos: int, nbytes: int) -> int:
        data = self.take(pos, nbytes)
        self.charge(_TEXT + nbytes * (1 if data.isascii() else 4))
        self.stack.append(data.decode())
        return pos + nbytes

    def push_bytes(self, pos: int, nbytes: int) -> int:
        self.charge(_TEXT + nbytes)
        return super().push_bytes(pos, nbytes)

    def push_int(self, pos: int, nbytes: int) -> int:
        stop = super().push_int(pos, nbytes)
        self.charge(_NUMBER + nbytes)
        return stop

    def push_tuple(self) -> None:
        self.charge(_TUPLE + 8 * len(self.stack))
        super().push_tuple()

    def push_dict(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self.set_items(items)

    def push_set(self, items: list[Any]) -> None:
        """Push a placeholder for a set: values from a file are never hashed."""
        self.stack.append(UnmadeObject("builtins.set"))

    def pop_one(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.pop_mark()

    def make(self, function: object, args: object, *keywords: object) -> None:
        """REDUCE, NEWOBJ, and with keywords, which are ignored, NEWOBJ_EX."""
        if not isinstance(function, UnmadeObject):
            raise Refusal(f"a call of something of type {type(function).__name__}")
        value = function.make(args)
        if isinstance(value, (tuple, dict)):
            self.charge(_DICT + _DICT_ITEM * len(value))
        else:
            self.charge(_OPAQUE if type(value) is UnmadeObject else _THING)
        self.stack.append(value)

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, UnmadeObject):
            target.build(state)
        elif type(target) not in _CONTAINERS:  # their attributes are not used; a tensor may be replaced
            raise Refusal(f"BUILD of {_describe(target)}")


def _charged(nbytes: int, handler: Handler) -> Handler:
    """Return a handler that charges for the result of another one."""

    def handle(vm: Inert, pos: int) -> int:
        vm.charged += nbytes
        if vm.charged > _MAX_CHARGED:  # a call of `charge` for each opcode would be slow
            vm.charge(0)
        return handler(vm, pos)

    return handle


_PRICES = {
    **dict.fromkeys((0x4A, 0x4D), _NUMBER),  # BININT, BININT2
    **dict.fromkeys((0x28, 0x5D), _LIST),  # MARK, EMPTY_LIST
    **dict.fromkeys((0x63, 0x93), _NAME),  # GLOBAL, STACK_GLOBAL
    **{0x84 + size: _TUPLE + 8 * size for size in (1, 2, 3)},  # TUPLE1 to TUPLE3
    0x51: _OPAQUE,  # BINPERSID
    0x7D: _DICT,  # EMPTY_DICT
}
"""Charges for the opcodes that all policies share."""

Inert.opcodes = table(
    {
        **{op: _charged(nbytes, COMMON[op]) for op, nbytes in _PRICES.items()},
        0x30: plain(Inert.pop_one),  # POP
        0x31: plain(Inert.pop_mark),  # POP_MARK
        0x32: plain(lambda vm: vm.push_again(vm.stack[-1])),  # DUP
        0x42: sized("<I", Inert.push_bytes),  # BINBYTES
        0x43: sized("<B", Inert.push_bytes),  # SHORT_BINBYTES
        0x47: _charged(_NUMBER, number(">d")),  # BINFLOAT
        0x52: plain(lambda vm: vm.make(*vm.pop(2))),  # REDUCE
        0x58: sized("<I", Inert.push_text),  # BINUNICODE
        0x62: plain(Inert.build),  # BUILD
        0x64: _charged(_DICT, plain(Inert.push_dict)),  # DICT
        0x68: sized("<B", Inert.get),  # BINGET
        0x6A: sized("<I", Inert.get),  # LONG_BINGET
        0x6C: _charged(_LIST, plain(Inert.push_list)),  # LIST
        0x71: sized("<B", Inert.put),  # BINPUT
        0x72: sized("<I", Inert.put),  # LONG_BINPUT
        0x74: plain(Inert.push_tuple),  # TUPLE
        0x81: plain(lambda vm: vm.make(*vm.pop(2))),  # NEWOBJ
        0x8A: sized("<B", Inert.push_int),  # LONG1
        0x8B: sized("<I", Inert.push_int),  # LONG4
        0x8C: sized("<B", Inert.push_text),  # SHORT_BINUNICODE
        0x8D: sized("<Q", Inert.push_text),  # BINUNICODE8
        0x8E: sized("<Q", Inert.push_bytes),  # BINBYTES8
        0x8F: _charged(_OPAQUE, plain(lambda vm: vm.push_set([]))),  # EMPTY_SET
        0x90: plain(lambda vm: vm.append(vm.pop_mark())),  # ADDITEMS, to a set
        0x91: _charged(_OPAQUE, plain(lambda vm: vm.push_set(vm.pop_mark()))),  # FROZENSET
        0x92: plain(lambda vm: vm.make(*vm.pop(3))),  # NEWOBJ_EX
        0x94: lambda vm, pos: vm.put(pos, len(vm.memo) + len(vm.odd_slots)),  # MEMOIZE
        0x96: sized("<Q", Inert.push_bytes),  # BYTEARRAY8
    }
)


class _Walk:
    """Traverses a result as its users will, and refuses results that are not safe to traverse.

    The limits on opcodes and memory do not cover this: a few bytes can put a list into another one a thousand times, and
    that one into a third. Sizes are therefore those of the traversal, not of the memory.

    Args:
        shared: ids of the containers that may be visited more than once; only these are remembered.
    """

    def __init__(self, shared: Collection[int]) -> None:
        self._shared = shared
        self._sizes: dict[int, tuple[int, int, int]] = {}  # of the shared ones that are finished
        self._open: set[int] = set()
        self._num_steps = 0

    def measure(self, container: Any, level: int) -> tuple[int, int, int]:
        """Return the number of values in a container, the number of those that are not plain data, and its depth.

        Raises:
            Refusal: the container contains itself, is too deep, or too large when shared values are counted each time.
        """
        if id(container) in self._open:
            raise Refusal("what it describes contains itself")
        values = container.values() if type(container) is dict else container
        compound = [value for value in values if type(value) not in _SCALARS]
        inner = [value for value in compound if type(value) in _CONTAINERS]
        num_nodes, num_things, depth = 1 + len(container) - len(inner), len(compound) - len(inner), 1
        self._open.add(id(container))
        self._num_steps += num_nodes + len(inner)
        self._check(num_nodes, num_things, level)
        while inner:
            child = inner.pop()
            size = self._sizes.get(id(child)) or self.measure(child, level + 1)
            num_nodes, num_things = num_nodes + size[0], num_things + size[1]
            depth = max(depth, size[2] + 1)
            self._check(num_nodes, num_things, level + depth - 1)
        self._open.discard(id(container))
        if id(container) in self._shared:
            self._sizes[id(container)] = num_nodes, num_things, depth
        return num_nodes, num_things, depth

    def _check(self, num_nodes: int, num_things: int, depth: int) -> None:
        if max(self._num_steps, num_nodes) > MAX_NODES or num_things > MAX_THINGS:
            raise Refusal(
                f"it describes more than {MAX_NODES} values, or more than {MAX_THINGS} that are not plain data"
            )
        if depth > MAX_DEPTH:
            raise Refusal(f"what it describes is nested more than {MAX_DEPTH} levels deep")
