"""A shortcut for `pickle_vm`: records that are spelled like the one before are read by one regex match.

A checkpoint of many ranks is the same three records a million times over, in which only numbers and memo
references differ. Once one was executed opcode by opcode, its spelling is turned into a pattern. A
match means just what those opcodes mean: field names are references to the same memo slots (which the
interpreter sets once only), values are decoded as the opcodes say, and the record checks its fields as ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_GET = rb"h.|j...."  # BINGET, LONG_BINGET
_INT = rb"K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7}|\x8a\x08.{8}"  # BININT1, BININT2, BININT, LONG1
_SCALAR = rb"%s|%s|N" % (_GET, _INT)
# A maker called with a tuple of one to three numbers, memoised as pickle does or not at all.
_SIZE = rb"(%s)((?:%s)+[\x85-\x87])(\x94\x85\x94R\x94|\x85R)" % (_GET, _INT)
_HEAD = rb"(\)\x81\x94\}\x94\(|\)\x81\}\()"  # EMPTY_TUPLE NEWOBJ EMPTY_DICT MARK
_TAIL = b"ub"  # SETITEMS BUILD

_record = re.compile(_HEAD + rb"((?:(?:%s)(?:%s|%s))+)ub" % (_GET, _SIZE, _SCALAR), re.DOTALL)
_head_of_item = re.compile(rb"(%s)(?:%s|(%s))" % (_GET, _SIZE, _SCALAR), re.DOTALL)
_token = re.compile(rb"%s" % _INT, re.DOTALL)
_MAX_VALUES = 4096  # of one field; sizes and file names repeat


Maker = Callable[[tuple[Any, ...]], object]


class _Values(dict[bytes, object]):
    """Opcodes of a field -> their value; what was decoded lately is kept."""

    def __init__(self, memo: Mapping[int, Any], call: Maker | None) -> None:
        self._memo, self._call = memo, call

    def __missing__(self, text: bytes) -> object:
        kind, value = text[0], None
        if self._call is not None:
            value = self._call((_numbers(text),))
        elif kind == 0x6A or kind == 0x68:  # LONG_BINGET, BINGET
            value = self._memo[int.from_bytes(text[1:], "little")]
        elif kind != 0x4E:  # NONE
            value = _number(text)
        if len(self) >= _MAX_VALUES:
            self.clear()
        self[text] = value
        return value


class Spelling:
    """How one record was spelled; `match` finds the next that is spelled alike."""

    __slots__ = ("_names", "_values", "match", "num_slots")

    def __init__(self, pattern: bytes, fields: dict[str, _Values], num_slots: int) -> None:
        self.match = re.compile(pattern, re.DOTALL).match
        """Matches at the record's EMPTY_TUPLE; its groups are for `state`."""
        self.num_slots = num_slots
        """Memo slots that the opcodes fill."""
        self._names, self._values = tuple(fields), tuple(fields.values())

    def state(self, groups: tuple[bytes, ...]) -> dict[str, object]:
        """Return the record's fields from the groups of a match."""
        return {
            name: values[text] for name, values, text in zip(self._names, self._values, groups, strict=True)
        }


def learn(
    data: bytes, start: int, stop: int, memo: Mapping[int, Any], call_of: Callable[[Any], Maker | None]
) -> Spelling | None:
    """Return the spelling of a record that was just executed, None where it is not one of this kind.

    Args:
        data: the pickle.
        start: the record's EMPTY_TUPLE, just behind its class.
        stop: the byte after its BUILD.
        memo: the interpreter's, for values that the spelling refers to.
        call_of: gives what REDUCE may call for a value, None where it may not.
    """
    found = _record.fullmatch(data, start, stop)
    if found is None:
        return None
    pattern = [re.escape(found.group(1))]
    num_slots = found.group(1).count(b"\x94")
    fields: dict[str, _Values] = {}
    for item in _head_of_item.finditer(data, found.start(2), found.end(2)):
        key, maker, size, tail, _ = item.groups()
        name = memo.get(int.from_bytes(key[1:], "little"))
        if type(name) is not str or name in fields:
            return None
        pattern.append(re.escape(key))
        if size is None:
            fields[name] = _Values(memo, None)
            pattern.append(b"(%s)" % _SCALAR)
            continue
        call = call_of(memo.get(int.from_bytes(maker[1:], "little")))
        if call is None:
            return None
        fields[name] = _Values(memo, call)
        pattern.append(re.escape(maker) + rb"((?:%s)+[\x85-\x87])" % _INT + re.escape(tail))
        num_slots += tail.count(b"\x94")
    return Spelling(b"".join(pattern) + _TAIL, fields, num_slots)


def _number(text: bytes) -> int:
    if text[0] == 0x4B or text[0] == 0x4D:  # BININT1, BININT2
        return int.from_bytes(text[1:], "little")
    return int.from_bytes(text[1:] if text[0] == 0x4A else text[2:], "little", signed=True)


def _numbers(text: bytes) -> tuple[int, ...]:
    """Decode numbers and the TUPLE1, TUPLE2 or TUPLE3 that takes them all from the stack.

    Raises:
        IndexError: it takes more or fewer, as the interpreter would find.
    """
    numbers = tuple(map(_number, _token.findall(text, 0, len(text) - 1)))
    if len(numbers) != text[-1] - 0x84:
        raise IndexError
    return numbers
