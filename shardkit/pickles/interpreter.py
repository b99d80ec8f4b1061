"""A pickle interpreter with its own table of opcodes. It never calls anything that a file names.

A pickle is a program for a small stack machine. `Interpreter` is that machine: its state, its loop, and the opcodes
that mean the same for all policies. A policy (`shardkit.pickles.policies`) completes the table. It decides which names,
calls and dict keys are allowed, what the memo keeps, and the limits on size.

Source: CPython 3.13, Lib/pickletools.py (opcodes of protocols 2 to 5).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from shardkit.errors import SourceError
from shardkit.files.strict_json import uncollected

Handler = Callable[[Any, int], int]
"""Executes an opcode on an `Interpreter`; takes the position after the opcode, returns that of the next one."""

_MAX_NAME = 200  # bytes of a module or a name in GLOBAL
STOP = 0x2E
_CUT = "it ends too early"


class Refusal(Exception):
    """Something in a pickle that is not allowed; `Interpreter.run` adds the file and the byte."""


class Interpreter:
    """Interprets one pickle. Policies are subclasses, so that all state is in one object.

    Args:
        data: the whole pickle.
        max_bytes: larger pickles are refused.
        names: returns the inert value for a (module, name).
        persistent: returns the value for a persistent id; None if those are refused.
    """

    opcodes: ClassVar[tuple[Handler, ...]]
    """A handler for each of the 256 bytes; `table` makes them."""
    hint: ClassVar[str]
    faults: ClassVar[Mapping[type[Exception], str]] = {
        KeyError: "a field or memo entry is missing",
        ValueError: "text that is not UTF-8, or a name without an end",  # UnicodeDecodeError is one
    }
    """Explanation of each exception that an opcode may raise."""
    max_opcodes: ClassVar[int] = 1 << 62
    """Limit on the number of opcodes."""
    max_int_bytes: ClassVar[int]
    passive: ClassVar[tuple[type, ...]] = ()
    """Types whose items are accepted and discarded."""

    def __init__(
        self,
        data: bytes,
        max_bytes: int,
        names: Callable[[str, str], object],
        persistent: Callable[[object], object] | None,
    ) -> None:
        self.data, self.max_bytes, self.names, self.persistent = data, max_bytes, names, persistent
        self.pos = 0  # of the latest opcode, once the interpreter has stopped
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []  # the stacks below each open MARK

    @uncollected()
    def run(self, where: str) -> object:
        """Return the value that the pickle describes.

        Args:
            where: the file, escaped, for messages.

        Raises:
            SourceError: the pickle is too large, damaged, or not allowed by the policy; names the byte.
        """
        if len(self.data) > self.max_bytes:
            raise SourceError(
                f"{where} has {len(self.data)} bytes, more than the {self.max_bytes} that it may"
            )
        try:
            return self.execute()
        except Refusal as refusal:
            reason = f"{refusal}{self.place()}"
        except struct.error:
            reason = _CUT
        except IndexError:
            reason = _CUT if self.pos + 1 >= len(self.data) else "an opcode finds nothing to work on"
        except tuple(self.faults) as error:
            reason = next(text for kind, text in self.faults.items() if isinstance(error, kind))
        raise SourceError(
            f"{where} is damaged or not what torch writes: {reason} (near byte {self.pos})", hint=self.hint
        ) from None

    def execute(self) -> object:
        """Execute all opcodes, and return the only value left on the stack."""
        self.step_to_stop()
        if self.pos + 1 != len(self.data):
            raise Refusal(f"{len(self.data) - self.pos - 1} bytes follow the end of the pickle")
        if len(self.stack) != 1 or self.outer:
            raise Refusal("the pickle does not end with one object")
        return self.stack[0]

    def step_to_stop(self) -> None:
        """Execute opcodes up to STOP."""
        data, opcodes, pos = self.data, self.opcodes, 0
        try:
            for _ in range(self.max_opcodes):
                op = data[pos]
                if op == STOP:
                    break
                pos = opcodes[op](self, pos + 1)
            else:
                raise Refusal(f"it has more than {self.max_opcodes} opcodes")
        finally:
            self.pos = pos

    def put_items(self, target: dict[Any, Any], items: list[Any]) -> None:
        """Add [key, value, ...] to a dict, checking the keys."""
        raise NotImplementedError

    def place(self) -> str:
        """Return the position in the result of the value under construction, for messages."""
        return ""

    def take(self, pos: int, nbytes: int) -> bytes:
        """Return `nbytes` of the file from `pos` on."""
        if pos + nbytes > len(self.data):
            raise Refusal(_CUT)
        return self.data[pos : pos + nbytes]

    def pop(self, num: int) -> list[Any]:
        """Remove the topmost values from the stack, and return them."""
        if num > len(self.stack):
            raise IndexError
        items = self.stack[-num:]
        del self.stack[-num:]
        return items

    def mark(self) -> None:
        """Begin a new stack on top of this one."""
        self.outer.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        """Pop the values above the latest MARK, and the MARK; return the values."""
        items, self.stack = self.stack, self.outer.pop()
        return items

    def push_bytes(self, pos: int, nbytes: int) -> int:
        self.stack.append(self.take(pos, nbytes))
        return pos + nbytes

    def push_int(self, pos: int, nbytes: int) -> int:
        if nbytes > self.max_int_bytes:
            raise Refusal(f"an integer of {nbytes} bytes")
        self.stack.append(int.from_bytes(self.take(pos, nbytes), "little", signed=True))
        return pos + nbytes

    def push_list(self) -> None:
        items = self.pop_mark()
        self.stack.append(items)

    def push_tuple(self) -> None:
        items = self.pop_mark()
        self.stack.append(tuple(items))

    def set_items(self, items: list[Any]) -> None:
        """Add [key, value, ...] to the topmost value."""
        target = self.stack[-1]
        if len(items) % 2:
            raise Refusal("a dict key without a value")
        if type(target) is dict:
            self.put_items(target, items)
        elif not isinstance(target, self.passive):
            raise Refusal("SETITEMS on something that is not a dict")

    def append(self, items: list[Any]) -> None:
        """Append to the topmost value."""
        target = self.stack[-1]
        if type(target) is list:
            target.extend(items)
        elif not isinstance(target, self.passive):
            raise Refusal("APPENDS to something that is not a list")

    def push_name(self, pos: int) -> int:
        """Push the value of the name in the next two lines."""
        middle = self.data.index(b"\n", pos, pos + _MAX_NAME)
        stop = self.data.index(b"\n", middle + 1, middle + 1 + _MAX_NAME)
        self.stack.append(self.names(self.data[pos:middle].decode(), self.data[middle + 1 : stop].decode()))
        return stop + 1

    def push_named(self, module: object, name: object) -> None:
        if type(name) is not str or type(module) is not str or len(name) + len(module) > 2 * _MAX_NAME:
            raise Refusal("a global whose name is not text, or too long")
        self.stack.append(self.names(module, name))

    def push_persistent(self, pos: int) -> int:
        if self.persistent is None:
            return self.refuse(pos)
        self.stack.append(self.persistent(self.stack.pop()))
        return pos

    def check_protocol(self, pos: int) -> int:
        if pos != 1 or not 2 <= self.data[1] <= 5:
            raise Refusal("a pickle protocol other than 2 to 5")
        return pos + 1

    def check_frame(self, pos: int, nbytes: int) -> int:
        if nbytes > len(self.data) - pos:
            raise Refusal("a frame that reaches past the end")
        return pos

    def refuse(self, pos: int) -> int:
        """Refuse the opcode that was just read."""
        raise Refusal(f"opcode 0x{self.data[pos - 1]:02x} is not one that checkpoints use")


def plain(action: Callable[[Any], object]) -> Handler:
    """Return a handler for an opcode without an argument."""

    def handle(vm: Interpreter, pos: int) -> int:
        action(vm)
        return pos

    return handle


def sized(layout: str, action: Callable[[Any, int, int], int]) -> Handler:
    """Return a handler that reads a number in the `struct` format `layout`, and passes it to `action`."""
    size, unpack = struct.calcsize(layout), struct.Struct(layout).unpack_from
    return lambda vm, pos: action(vm, pos + size, unpack(vm.data, pos)[0])


def number(layout: str) -> Handler:
    """Return a handler that pushes the opcode's argument, a number in the `struct` format `layout`."""
    size, unpack = struct.calcsize(layout), struct.Struct(layout).unpack_from

    def handle(vm: Interpreter, pos: int) -> int:
        vm.stack.append(unpack(vm.data, pos)[0])
        return pos + size

    return handle


def _push_byte(vm: Interpreter, pos: int) -> int:
    vm.stack.append(vm.data[pos])
    return pos + 1


_VM = Interpreter
COMMON: Mapping[int, Handler] = {
    0x28: plain(_VM.mark),  # MARK
    0x29: plain(lambda vm: vm.stack.append(())),  # EMPTY_TUPLE
    0x4A: number("<i"),  # BININT
    0x4B: _push_byte,  # BININT1
    0x4D: number("<H"),  # BININT2
    0x4E: plain(lambda vm: vm.stack.append(None)),  # NONE
    0x51: _VM.push_persistent,  # BINPERSID
    0x5D: plain(lambda vm: vm.stack.append([])),  # EMPTY_LIST
    0x61: plain(lambda vm: vm.append(vm.pop(1))),  # APPEND
    0x63: _VM.push_name,  # GLOBAL
    0x65: plain(lambda vm: vm.append(vm.pop_mark())),  # APPENDS
    0x73: plain(lambda vm: vm.set_items(vm.pop(2))),  # SETITEM
    0x74: plain(_VM.push_tuple),  # TUPLE
    0x75: plain(lambda vm: vm.set_items(vm.pop_mark())),  # SETITEMS
    0x7D: plain(lambda vm: vm.stack.append({})),  # EMPTY_DICT
    0x80: _VM.check_protocol,  # PROTO
    0x85: plain(lambda vm: vm.stack.append(tuple(vm.pop(1)))),  # TUPLE1
    0x86: plain(lambda vm: vm.stack.append(tuple(vm.pop(2)))),  # TUPLE2
    0x87: plain(lambda vm: vm.stack.append(tuple(vm.pop(3)))),  # TUPLE3
    0x88: plain(lambda vm: vm.stack.append(True)),  # NEWTRUE
    0x89: plain(lambda vm: vm.stack.append(False)),  # NEWFALSE
    0x8A: sized("<B", _VM.push_int),  # LONG1
    0x93: plain(lambda vm: vm.push_named(*vm.pop(2))),  # STACK_GLOBAL
    0x95: sized("<Q", _VM.check_frame),  # FRAME
}
"""Opcodes that all policies share."""


def table(rows: Mapping[int, Handler]) -> tuple[Handler, ...]:
    """Return the handlers of a policy: `rows` override COMMON; all other bytes are refused."""
    return tuple(rows.get(op) or COMMON.get(op, Interpreter.refuse) for op in range(256))
