"""Run the few pickle opcodes that checkpoint files need, without `pickle` and without calling anything.

A pickle is a program. This interpreter knows the opcodes that plain data, fixed record classes and a few
named makers need, and a `Vocabulary` says which names exist: each stands for an inert value of ours, is
never imported, and everything else in the file is an error. Three more rules keep a small file from
costing much: only strings (and records that the vocabulary takes care of) are ever hashed, memo slots
may not be numbered beyond what the file could have filled, and values that are never fetched again are
not kept.

Source: CPython 3.13, Lib/pickletools.py (opcodes 2 to 5); pickles written by torch 2.2 to 2.13.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.pickles.columns import RunKind, Runs
from shardkit.pickles.slots import fetched_slots

_MAX_NAME = 200  # bytes of a module or a name that GLOBAL may give
_SIZE = b"\x94\x85\x94R\x94"  # what follows the tuple of a torch.Size: MEMOIZE TUPLE1 MEMOIZE REDUCE MEMOIZE
_STATE = b"\x94}\x94("  # what follows NEWOBJ of a record: MEMOIZE EMPTY_DICT MEMOIZE MARK
_MAX_KEYS_SHOWN = 4
_INT64 = 9  # bytes of the longest LONG1 that can be an unsigned 64-bit value


class Refusal(Exception):
    """Something in a pickle that the vocabulary does not admit; `parse` adds file and byte."""


class Record:
    """An inert object: NEWOBJ makes it empty and BUILD, at most once, gives it its fields."""

    __slots__ = ()

    def build(self, state: object) -> None:
        """Check and take the fields.

        Raises:
            Refusal: the class has no such state.
        """
        raise Refusal(f"{type(self).__name__} takes no fields")


@dataclass(frozen=True, slots=True, eq=False)
class Global:
    """A name that a pickle may use in more ways than as a plain value."""

    name: str
    """For messages, e.g. "torch.Size"."""
    new: Callable[[], Record] | None = None
    """What NEWOBJ with no arguments makes, None where that is refused."""
    call: Callable[[tuple[Any, ...]], object] | None = None
    """What REDUCE makes of its arguments (it must check them), None where that is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What the pickles of one kind of file may say."""

    names: Mapping[tuple[str, str], object]
    """(module, name) -> a `Global`, or the inert value that the name stands for."""
    max_bytes: int
    """Size beyond which a file is not looked at."""
    persistent: Callable[[object], object] | None = None
    """What BINPERSID makes of its argument (it must check it), None where that is refused."""
    set_records: Callable[[dict[Any, Any], list[Any]], None] | None = None
    """Stores [key, value, ...] with records as keys in a dict; None where keys are strings only."""
    has_bytes: bool = False
    """Bytes may stand as values; otherwise they are refused."""
    runs: tuple[RunKind, ...] = ()
    """Records that may come in columns (`pickle_batches`): one value then stands for many on the stack. What is
    accepted is the same without them, but what is refused may be refused in other words."""


def parse(data: bytes, vocabulary: Vocabulary, where: str) -> object:
    """Return the inert value that a pickle describes.

    Args:
        data: the whole pickle.
        where: the file, escaped, for messages.

    Raises:
        SourceError: damaged, or anything that the vocabulary does not admit.
    """
    if len(data) > vocabulary.max_bytes:
        raise SourceError(f"{where} has {len(data)} bytes, more than the {vocabulary.max_bytes} that it may")
    # A million records are being made and none is garbage: the collector would only walk them again and again.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _execute(data, vocabulary, where)
    finally:
        if collecting:
            gc.enable()


def parse_in_columns(data: bytes, vocabulary: Callable[..., Vocabulary], where: str) -> object:
    """Return the same, sooner: records that may come in columns do.

    Args:
        data: the whole pickle.
        vocabulary: given the number of bytes and `runs`, makes one for a parse.
        where: the file, escaped, for messages.

    Raises:
        SourceError: damaged, or anything that the vocabulary does not admit.
    """
    try:
        return parse(data, vocabulary(len(data), runs=True), where)
    except SourceError:
        # Once more, step by step: what is wrong is then told by the record that it is wrong with.
        return parse(data, vocabulary(len(data), runs=False), where)


def _execute(data: bytes, vocabulary: Vocabulary, where: str) -> object:
    """The interpreter's loop.

    One long function with literal opcodes, in the order of their frequency: a call or a look-up of a constant for
    each would be seconds where records do not come in columns (`Vocabulary.runs`).
    Reading past the end raises IndexError or struct.error; a slice that comes out short does so at the
    next opcode, because the last byte has to be STOP.
    """
    names, set_records, persistent = vocabulary.names, vocabulary.set_records, vocabulary.persistent
    keep = fetched_slots(data)
    memo: dict[int, Any] = {}
    num_memoized = 0
    stack: list[Any] = []
    outer: list[list[Any]] = []  # the stacks below each open MARK
    unbuilt: list[Record] = []
    field_orders: dict[type[Record], list[str]] = {}  # the keys, checked, of the last of each class
    runs = {kind.classes[-1]: Runs(data, kind, keep, memo, _call_of) for kind in vocabulary.runs}
    unpack_u32, unpack_i32 = struct.Struct("<I").unpack_from, struct.Struct("<i").unpack_from
    pos = 0
    try:
        while True:
            op = data[pos]
            pos += 1
            if op == 0x6A:  # LONG_BINGET
                stack.append(memo[unpack_u32(data, pos)[0]])
                pos += 4
            elif op == 0x68:  # BINGET
                stack.append(memo[data[pos]])
                pos += 1
            elif op == 0x4B:  # BININT1
                stack.append(data[pos])
                pos += 1
            elif op == 0x4D:  # BININT2
                stack.append(data[pos] | data[pos + 1] << 8)
                pos += 2
            elif op == 0x4A:  # BININT
                stack.append(unpack_i32(data, pos)[0])
                pos += 4
            elif op == 0x8A:  # LONG1
                stop = pos + 1 + data[pos]
                if data[pos] > _INT64:
                    raise Refusal(f"an integer of {data[pos]} bytes")
                stack.append(int.from_bytes(data[pos + 1 : stop], "little", signed=True))
                pos = stop
            elif op == 0x86 or op == 0x85:  # TUPLE2, TUPLE1
                if op == 0x86:
                    last = stack.pop()
                    value: Any = (stack.pop(), last)
                else:
                    value = (stack.pop(),)
                if data[pos : pos + 5] == _SIZE and not keep[num_memoized] and not keep[num_memoized + 1]:
                    function = stack.pop()
                    if type(function) is not Global or function.call is None:
                        raise Refusal(f"REDUCE of {_describe(function)}")
                    value = function.call((value,))
                    num_memoized += 2  # the last MEMOIZE of the five opcodes is left to the loop
                    pos += 4
                stack.append(value)
            elif op == 0x94:  # MEMOIZE
                last = stack[-1]  # there has to be one, fetched or not
                if keep[num_memoized]:
                    memo[num_memoized] = last
                num_memoized += 1
            elif op == 0x29:  # EMPTY_TUPLE
                if data[pos] != 0x81:
                    stack.append(())
                    continue
                pos += 1  # NEWOBJ
                cls = stack[-1]
                if type(cls) is not Global or cls.new is None:
                    raise Refusal(f"NEWOBJ of {_describe(cls)}")
                record = stack[-1] = cls.new()
                unbuilt.append(record)
                if data[pos : pos + 4] == _STATE and not keep[num_memoized] and not keep[num_memoized + 1]:
                    num_memoized += 2
                    pos += 4
                    stack.append({})
                    outer.append(stack)
                    stack = []
            elif op == 0x75:  # SETITEMS
                items, stack = stack, outer.pop()
                if data[pos] != 0x62 or stack[-1] != {} or unbuilt[-1] is not stack[-2]:
                    _set_items(stack[-1], items, set_records)
                    continue
                pos += 1  # BUILD of the latest record from just these items
                state, record = stack.pop(), unbuilt.pop()
                keys = items[::2]
                if field_orders.get(type(record)) == keys and len(items) == 2 * len(keys):
                    state = dict(zip(keys, items[1::2], strict=True))
                else:
                    _set_items(state, items, None)
                    field_orders[type(record)] = list(state)
                record.build(state)
                kind = type(record)
                if kind in runs and _may_begin(runs[kind].kind, stack, outer):
                    taken = runs[kind].take(pos, num_memoized)
                    if taken is not None:
                        stack += taken.values
                        pos, num_memoized = taken.stop, num_memoized + taken.num_slots
            elif op == 0x4E:  # NONE
                stack.append(None)
            elif op == 0x28:  # MARK
                outer.append(stack)
                stack = []
            elif op == 0x7D:  # EMPTY_DICT
                stack.append({})
            elif op == 0x81:  # NEWOBJ
                raise Refusal("an object made with arguments")
            elif op == 0x62:  # BUILD
                state, record = stack.pop(), stack[-1]
                # A record is built once, before whatever holds it; BytesStorageMetadata never is.
                while not unbuilt or unbuilt.pop() is not record:
                    if not unbuilt:
                        raise Refusal(f"BUILD of {_describe(record)}")
                record.build(state)
            elif op == 0x52:  # REDUCE
                args, function = stack.pop(), stack.pop()
                if type(function) is not Global or function.call is None or type(args) is not tuple:
                    raise Refusal(f"REDUCE of {_describe(function)}")
                stack.append(function.call(args))
            elif op == 0x8C:  # SHORT_BINUNICODE
                stop = pos + 1 + data[pos]
                stack.append(data[pos + 1 : stop].decode())
                pos = stop
            elif op == 0x71 or op == 0x72:  # BINPUT, LONG_BINPUT
                slot = data[pos] if op == 0x71 else unpack_u32(data, pos)[0]
                pos += 1 if op == 0x71 else 4
                if slot >= len(keep):
                    raise Refusal(f"memo slot {slot}")
                if slot in memo:
                    raise Refusal(f"memo slot {slot} set again")
                last = stack[-1]
                if keep[slot]:
                    memo[slot] = last
                num_memoized = len(keep)  # a MEMOIZE after it would have no number: no pickler mixes them
            elif op == 0x58:  # BINUNICODE
                stop = pos + 4 + unpack_u32(data, pos)[0]
                stack.append(data[pos + 4 : stop].decode())
                pos = stop
            elif op == 0x74:  # TUPLE
                items, stack = stack, outer.pop()
                stack.append(tuple(items))
            elif op == 0x87:  # TUPLE3
                items = stack[-3:]
                del stack[-2:]
                stack[-1] = (items[0], items[1], items[2])
            elif op == 0x88 or op == 0x89:  # NEWTRUE, NEWFALSE
                stack.append(op == 0x88)
            elif op == 0x5D:  # EMPTY_LIST
                stack.append([])
            elif op == 0x65:  # APPENDS
                items, stack = stack, outer.pop()
                if type(stack[-1]) is not list:
                    raise Refusal("APPENDS to something that is not a list")
                stack[-1].extend(items)
            elif op == 0x61:  # APPEND
                value = stack.pop()
                if type(stack[-1]) is not list:
                    raise Refusal("APPEND to something that is not a list")
                stack[-1].append(value)
            elif op == 0x73:  # SETITEM
                value, key = stack.pop(), stack.pop()
                _set_items(stack[-1], [key, value], set_records)
            elif op == 0x93:  # STACK_GLOBAL
                name, module = stack.pop(), stack.pop()
                stack.append(_look_up(names, module, name))
            elif op == 0x63:  # GLOBAL
                middle = data.index(b"\n", pos, pos + _MAX_NAME)
                stop = data.index(b"\n", middle + 1, middle + 1 + _MAX_NAME)
                stack.append(_look_up(names, data[pos:middle].decode(), data[middle + 1 : stop].decode()))
                pos = stop + 1
            elif op == 0x51 and persistent is not None:  # BINPERSID
                stack.append(persistent(stack.pop()))
            elif (op == 0x43 or op == 0x42) and vocabulary.has_bytes:  # SHORT_BINBYTES, BINBYTES
                start = pos + (1 if op == 0x43 else 4)
                pos = start + int.from_bytes(data[pos:start], "little")
                stack.append(data[start:pos])
            elif op == 0x95:  # FRAME
                pos += 8
                if int.from_bytes(data[pos - 8 : pos], "little") > len(data) - pos:
                    raise Refusal("a frame that reaches past the end")
            elif op == 0x8D:  # BINUNICODE8
                stop = pos + 8 + int.from_bytes(data[pos : pos + 8], "little")
                stack.append(data[pos + 8 : stop].decode())
                pos = stop
            elif op == 0x80:  # PROTO
                if pos != 1 or not 2 <= data[pos] <= 5:
                    raise Refusal("a pickle protocol other than 2 to 5")
                pos += 1
            elif op == 0x2E:  # STOP
                if pos != len(data):
                    raise Refusal(f"{len(data) - pos} bytes follow the end of the pickle")
                if len(stack) != 1 or outer:
                    raise Refusal("the pickle does not end with one object")
                return stack[0]
            else:
                raise Refusal(f"opcode 0x{op:02x} is not one that checkpoints use")
    except Refusal as refusal:
        raise _error(where, pos, f"{refusal}{_place([*outer, stack])}") from None
    except (IndexError, struct.error):
        reason = "it ends too early" if pos >= len(data) else "an opcode finds nothing to work on"
    except KeyError:
        reason = "a field or memo entry is missing"
    except AttributeError:
        reason = "a record without its fields"
    except ValueError:  # UnicodeDecodeError is one
        reason = "text that is not UTF-8, or a name without an end"
    raise _error(where, pos, reason)


def _error(where: str, pos: int, reason: str) -> SourceError:
    return SourceError(
        f"{where} is damaged or not what torch writes: {reason} (near byte {pos})",
        hint="nothing in it was executed; if it comes from another tool, its format is not supported",
    )


def _place(stacks: list[list[Any]]) -> str:
    """Return where in the dicts the value lies that is being made: the last key of each that is open."""
    keys = [next((item for item in reversed(stack) if type(item) is str), None) for stack in stacks]
    found = [escape(key) for key in keys if key is not None]
    return f", in {' / '.join(found[:_MAX_KEYS_SHOWN])}" if found else ""


def _may_begin(kind: RunKind, stack: list[Any], outer: list[list[Any]]) -> bool:
    """True where whole units, the last of which was just made, are about to go into the right holder."""
    size = len(kind.classes)
    return (
        len(stack) % size == 0
        and bool(outer and outer[-1])
        and type(outer[-1][-1]) is kind.holder
        and tuple(map(type, stack[-size:])) == kind.classes
    )


def _set_items(
    target: Any, items: list[Any], set_records: Callable[[dict[Any, Any], list[Any]], None] | None
) -> None:
    """Put [key, value, ...] into a dict; a key is a string, given once."""
    if type(target) is not dict:
        raise Refusal("SETITEMS on something that is not a dict")
    if len(items) % 2:
        raise Refusal("a dict key without a value")
    if items and set_records is not None and isinstance(items[0], Record):
        set_records(target, items)
        return
    for i in range(0, len(items), 2):
        key = items[i]
        if type(key) is not str:
            raise Refusal(f"a dict key that is {_describe(key)}")
        if key in target:
            raise Refusal(f"dict key {escape(key)!r} is given twice")
        target[key] = items[i + 1]


def _look_up(names: Mapping[tuple[str, str], object], module: object, name: object) -> object:
    if type(module) is not str or type(name) is not str:
        raise Refusal("a global whose name is not text")
    if (module, name) not in names:
        raise Refusal(f"it names {escape(module)}.{escape(name)}")
    return names[module, name]


def _call_of(value: object) -> Callable[[tuple[Any, ...]], object] | None:
    return value.call if type(value) is Global else None


def _describe(value: object) -> str:
    """Say what a value is, without its contents."""
    return value.name if type(value) is Global else f"of type {type(value).__name__}"
