"""Look into a pickle that may name anything, without importing, calling or building any of it.

What a training script puts beside its weights cannot be listed beforehand. So this interpreter, unlike
`pickle_vm`, knows every opcode of protocols 2 to 5 and refuses no name: what is not plain data becomes an
`Opaque` (`inert`), and whatever is done to an `Opaque` yields an `Opaque`. A `Maker` is the only way to get
anything else, and those are ours. Some rules keep a small file from costing much: only strings and 64-bit integers
are ever hashed; opcodes are limited, and the memory that objects take, of which each is charged about what CPython
needs for it; and a result that contains itself, or that shared parts would make long to walk through, is refused.

Source: CPython 3.13, Lib/pickletools.py (opcodes 2 to 5).
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable
from typing import Any

from shardkit.errors import SourceError
from shardkit.pickles.interpreter import Refusal
from shardkit.pickles.nodes import Opaque
from shardkit.pickles.walk import CONTAINERS, check_walk

_MAX_BYTES = 1 << 25
_MAX_OPCODES = 1 << 23
_MAX_CHARGED = 208 << 20  # bytes; with the opcodes' pointers and what is made of the result, below 512 MiB
_MAX_NAME = 200  # bytes of a module or a name that GLOBAL may give
_MAX_LONG = 1 << 10  # bytes of an integer
_INT64 = 1 << 63

# Bytes that CPython 3.13 takes for one, with its part of what is kept of it elsewhere.
_NUMBER, _TEXT, _LIST, _TUPLE = 32, 56, 72, 56
_DICT, _DICT_TABLE, _DICT_ITEM = 80, 100, 60
_OPAQUE, _THING, _NAME, _SHARED = 80, 250, 600, 250


class InertPickle:
    """Interprets one pickle.

    Args:
        data: the whole pickle.
        names: (module, name) -> the inert value that it stands for; asked for every name.
        persistent: what a persistent id stands for.
    """

    def __init__(
        self,
        data: bytes,
        names: Callable[[str, str], object],
        persistent: Callable[[object], object],
    ) -> None:
        self._data, self._names, self._persistent = data, names, persistent
        self._pos = 0
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []  # the stacks below each open MARK
        self._memo: list[Any] = []  # slots are numbered from 0 on by every pickler that there is
        self._odd_slots: dict[int, Any] = {}  # but `pickletools.optimize` leaves some out
        self._charged = 0
        self._shared: set[int] = set()  # ids of containers that are put somewhere a second time
        self.num_dropped = 0
        """Entries of dicts that were left out, because their keys are neither strings nor integers."""

    def run(self, where: str) -> object:
        """Return what the pickle describes: None, bool, int, float, str, bytes, list, tuple, dict, Opaque.

        Args:
            where: the file, escaped, for messages.

        Raises:
            SourceError: damaged, or larger than such a thing may be.
        """
        # As in `pickle_vm`: what is made is no garbage, and the collector would walk it again and again.
        collecting = gc.isenabled()
        gc.disable()
        try:
            if len(self._data) > _MAX_BYTES:
                raise Refusal(f"it has {len(self._data)} bytes, more than the {_MAX_BYTES} that it may")
            value = self._execute()
            check_walk(value, self._shared)
            return value
        except Refusal as refusal:
            reason = str(refusal)
        except (IndexError, struct.error):
            reason = "it ends too early, or an opcode finds nothing to work on"
        except KeyError:
            reason = "a memo entry is missing"
        except ValueError:  # UnicodeDecodeError is one
            reason = "text that is not UTF-8, or a name without an end"
        finally:
            if collecting:
                gc.enable()
        raise SourceError(
            f"{where} is damaged or not what torch writes: {reason} (near byte {self._pos})",
            hint="nothing in it was executed; use another copy of the file",
        ) from None

    def _execute(self) -> object:
        data, handlers = self._data, _HANDLERS
        if data[:1] != b"\x80" or not 2 <= data[1] <= 5:
            raise Refusal("a pickle protocol other than 2 to 5")
        self._pos = 2
        for _ in range(_MAX_OPCODES):
            op = data[self._pos]
            self._pos += 1
            if op == 0x2E:  # STOP
                break
            handlers[op](self)
        else:
            raise Refusal(f"it has more than {_MAX_OPCODES} opcodes")
        if self._pos != len(data):
            raise Refusal(f"{len(data) - self._pos} bytes follow the end of the pickle")
        if len(self._stack) != 1 or self._outer:
            raise Refusal("the pickle does not end with one object")
        return self._stack[0]

    def _charge(self, nbytes: int) -> None:
        """Count the memory of something that is about to be made; a pointer to it is that of an opcode."""
        self._charged += nbytes
        if self._charged > _MAX_CHARGED:
            raise Refusal(f"what it describes takes more than {_MAX_CHARGED} bytes of memory")

    def _push_new(self, value: object, nbytes: int) -> None:
        self._charged += nbytes
        if self._charged > _MAX_CHARGED:  # most opcodes come here: a call of `_charge` for each would be felt
            self._charge(0)
        self._stack.append(value)

    def _push_again(self, value: object) -> None:
        if type(value) in CONTAINERS and id(value) not in self._shared:
            self._charge(_SHARED)
            self._shared.add(id(value))
        self._stack.append(value)

    def _take(self, nbytes: int) -> bytes:
        start = self._pos
        self._pos = start + nbytes
        if self._pos > len(self._data):
            raise IndexError
        return self._data[start : self._pos]

    def _pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._outer.pop()
        self._charged -= _LIST
        return items

    def _drop_mark(self) -> None:
        self._pop_mark()

    def _mark(self) -> None:
        self._charge(_LIST)
        self._outer.append(self._stack)
        self._stack = []

    def _dup(self) -> None:
        self._push_again(self._stack[-1])

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def _plain_long(self, nbytes: int) -> None:
        if nbytes > _MAX_LONG:
            raise Refusal(f"an integer of {nbytes} bytes")
        self._push_new(int.from_bytes(self._take(nbytes), "little", signed=True), _NUMBER + nbytes)

    def _text(self, nbytes: int) -> None:
        data = self._take(nbytes)
        self._charge(_TEXT + nbytes * (1 if data.isascii() else 4))
        self._stack.append(data.decode())

    def _bytes(self, nbytes: int) -> None:
        self._charge(_TEXT + nbytes)
        self._stack.append(self._take(nbytes))

    def _tuple(self, size: int) -> None:
        if size > len(self._stack):
            raise IndexError
        items = tuple(self._stack[len(self._stack) - size :])
        del self._stack[len(self._stack) - size :]
        self._push_new(items, _TUPLE + 8 * size)

    def _marked_tuple(self) -> None:
        items = self._pop_mark()
        self._push_new(tuple(items), _TUPLE + 8 * len(items))

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is list:
            target.extend(items)
        elif not isinstance(target, Opaque):
            raise Refusal(f"APPENDS to something of type {type(target).__name__}")

    def _append_one(self) -> None:
        item, stack = self._stack.pop(), self._stack
        if type(stack[-1]) is list:
            stack[-1].append(item)
        else:
            self._append([item])

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if len(items) % 2:
            raise Refusal("a dict key without a value")
        if isinstance(target, Opaque):
            return
        if type(target) is not dict:
            raise Refusal(f"SETITEMS on something of type {type(target).__name__}")
        self._charge((0 if target else _DICT_TABLE) + _DICT_ITEM * len(items) // 2)
        for i in range(0, len(items), 2):
            key = items[i]
            if type(key) is not str and not (type(key) is int and -_INT64 <= key < _INT64):
                self.num_dropped += 1
            elif key in target:
                raise Refusal("a dict key that is given twice")
            else:
                target[key] = items[i + 1]

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items([key, value])

    def _dict(self) -> None:
        items = self._pop_mark()
        self._push_new({}, _DICT)
        self._set_items(items)

    def _set(self, num_operands: int) -> None:
        """Sets are not made: nothing here hashes what a file says."""
        if num_operands < 0:
            self._pop_mark()
        self._push_new(Opaque("builtins.set"), _OPAQUE)

    def _global(self) -> None:
        middle = self._data.index(b"\n", self._pos, self._pos + _MAX_NAME)
        stop = self._data.index(b"\n", middle + 1, middle + 1 + _MAX_NAME)
        module, name = self._data[self._pos : middle].decode(), self._data[middle + 1 : stop].decode()
        self._pos = stop + 1
        self._push_new(self._names(module, name), _NAME)

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str or len(name) + len(module) > 2 * _MAX_NAME:
            raise Refusal("a global whose name is not text")
        self._push_new(self._names(module, name), _NAME)

    def _reduce(self, num_operands: int) -> None:
        """REDUCE, NEWOBJ, and with the keywords that are ignored NEWOBJ_EX."""
        operands = [self._stack.pop() for _ in range(num_operands)]
        function = self._stack.pop()
        if not isinstance(function, Opaque):
            raise Refusal(f"a call of something of type {type(function).__name__}")
        made = function.make(operands[-1])
        nbytes = _OPAQUE if type(made) is Opaque else _THING
        if isinstance(made, (tuple, dict)):
            nbytes = _DICT + _DICT_ITEM * len(made)
        self._push_new(made, nbytes)

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, Opaque):
            target.build(state)

    def _get(self, slot: int) -> None:
        self._push_again(self._memo[slot] if slot < len(self._memo) else self._odd_slots[slot])

    def _put(self, slot: int) -> None:
        if slot < len(self._memo) or slot in self._odd_slots:
            raise Refusal(f"memo slot {slot} set again")
        if slot == len(self._memo):
            self._memo.append(self._stack[-1])
        else:
            self._charge(_DICT_ITEM + _NUMBER)
            self._odd_slots[slot] = self._stack[-1]

    def _frame(self, nbytes: int) -> None:
        if nbytes > len(self._data) - self._pos:
            raise Refusal("a frame that reaches past the end")

    def _persistent_id(self) -> None:
        self._push_new(self._persistent(self._stack.pop()), _OPAQUE)

    def _unknown(self) -> None:
        raise Refusal(f"opcode 0x{self._data[self._pos - 1]:02x} is not one of protocols 2 to 5")


def _sized(layout: str, method: Callable[[InertPickle, int], None]) -> Callable[[InertPickle], None]:
    """An opcode with an unsigned number behind it, "<B" to "<Q"."""
    number = struct.Struct(layout)

    def handle(vm: InertPickle) -> None:
        start = vm._pos
        vm._pos = start + number.size
        method(vm, number.unpack_from(vm._data, start)[0])

    return handle


def _number(layout: str) -> Callable[[InertPickle], None]:
    """An opcode that pushes the number behind it."""
    number = struct.Struct(layout)

    def handle(vm: InertPickle) -> None:
        start = vm._pos
        vm._pos = start + number.size
        vm._push_new(number.unpack_from(vm._data, start)[0], _NUMBER)

    return handle


def _constant(value: object) -> Callable[[InertPickle], None]:
    return lambda vm: vm._stack.append(value)


_VM = InertPickle
_KNOWN: dict[int, Callable[[InertPickle], None]] = {
    0x28: _VM._mark,
    0x30: _VM._pop,
    0x31: _VM._drop_mark,
    0x32: _VM._dup,
    0x42: _sized("<I", _VM._bytes),  # BINBYTES
    0x43: _sized("<B", _VM._bytes),  # SHORT_BINBYTES
    0x47: _number(">d"),  # BINFLOAT
    0x4A: _number("<i"),  # BININT
    0x4B: _sized("<B", lambda vm, value: vm._stack.append(value)),  # BININT1
    0x4D: _number("<H"),  # BININT2
    0x4E: _constant(None),
    0x51: _VM._persistent_id,
    0x52: lambda vm: vm._reduce(1),
    0x58: _sized("<I", _VM._text),  # BINUNICODE
    0x5D: lambda vm: vm._push_new([], _LIST),
    0x61: _VM._append_one,
    0x62: _VM._build,
    0x63: _VM._global,
    0x64: _VM._dict,
    0x65: lambda vm: vm._append(vm._pop_mark()),
    0x68: _sized("<B", _VM._get),
    0x6A: _sized("<I", _VM._get),
    0x6C: lambda vm: vm._push_new(vm._pop_mark(), _LIST),
    0x71: _sized("<B", _VM._put),
    0x72: _sized("<I", _VM._put),
    0x73: _VM._set_item,
    0x74: _VM._marked_tuple,
    0x75: lambda vm: vm._set_items(vm._pop_mark()),
    0x7D: lambda vm: vm._push_new({}, _DICT),
    0x81: lambda vm: vm._reduce(1),  # NEWOBJ
    0x85: lambda vm: vm._tuple(1),
    0x86: lambda vm: vm._tuple(2),
    0x87: lambda vm: vm._tuple(3),
    0x88: _constant(True),
    0x89: _constant(False),
    0x8A: _sized("<B", _VM._plain_long),
    0x8B: _sized("<I", _VM._plain_long),
    0x8C: _sized("<B", _VM._text),
    0x8D: _sized("<Q", _VM._text),
    0x8E: _sized("<Q", _VM._bytes),  # BINBYTES8
    0x8F: lambda vm: vm._set(0),  # EMPTY_SET
    0x90: lambda vm: vm._append(vm._pop_mark()),  # ADDITEMS, to a set
    0x91: lambda vm: vm._set(-1),  # FROZENSET
    0x92: lambda vm: vm._reduce(2),  # NEWOBJ_EX
    0x93: _VM._stack_global,
    0x94: lambda vm: vm._put(len(vm._memo) + len(vm._odd_slots)),  # MEMOIZE
    0x95: _sized("<Q", _VM._frame),
    0x96: _sized("<Q", _VM._bytes),  # BYTEARRAY8
    0x29: lambda vm: vm._stack.append(()),
}
_HANDLERS = tuple(_KNOWN.get(op, _VM._unknown) for op in range(256))
"""By opcode."""
