"""The shortcut for large metadata: whole runs of records that are spelled alike, decoded in columns with numpy.

A checkpoint of a thousand ranks repeats one unit hundreds of thousands of times: a chunk, or a storage entry with
its index. The interpreter executes one unit. That gives the *form*: the bytes that all units share, and between
them numbers, texts and corners. The bytes that all units begin with tell where the next ones may lie. Then every
byte is compared with the form, and each unit has to begin where the one before ended. So what is taken is what
the interpreter would have made, opcode by opcode. The run ends at the first unit that differs in any way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    Ints = np.ndarray[Any, np.dtype[np.int64]]

_GET = rb"h.|j...."  # BINGET, LONG_BINGET
_INT = rb"K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7}|\x8a\x08.{8}"  # BININT1, BININT2, BININT, LONG1
_get = re.compile(_GET, re.DOTALL)
_number = re.compile(_INT, re.DOTALL)
_head = re.compile(rb"(?:%s)(?:\)\x81\x94\}\x94\(|\)\x81\}\()" % _GET, re.DOTALL)
_corner = re.compile(rb"(%s)((?:%s)+)[\x85-\x87](\x94\x85\x94R\x94|\x85R)" % (_GET, _INT), re.DOTALL)
_TEXT, _NONE, _MEMOIZE, _TAIL = 0x8C, 0x4E, 0x94, b"ub"
_MAX_DIMS = 3  # what TUPLE1 to TUPLE3 take
_MAX_UNIT = 4096  # bytes of a unit that may give the form
_WINDOW, _MAX_WINDOW = 1 << 14, 1 << 19  # bytes looked at for a run: it grows while all of them are taken
_MIN_TAKEN = 8  # units: below that a try costs more than it saves, and the next ones are left alone
_MAX_PAUSE = 1024  # units
_MIN_BYTES = 1 << 20  # of a pickle: numpy's import has to pay
_MAX_KNOWN = 4096  # texts
_MAX_FIELD = 300  # bytes of a field: a text has up to 258


class Numbers(NamedTuple):
    """A field that is an integer."""

    values: Ints


class Texts(NamedTuple):
    """A field that is a string."""

    values: list[str]


class Corners(NamedTuple):
    """A field that is made of a tuple of one to three integers, none negative."""

    num_dims: Ints
    values: Ints
    """One row for each unit: its integers, then zeros."""


Column = Numbers | Texts | Corners | None
"""None: the field is None in all units."""
Fields = Sequence[Mapping[str, Column]]
"""Of each record of the unit."""


class RunKind(NamedTuple):
    """Units that a vocabulary takes in columns."""

    classes: tuple[type, ...]
    """The records of a unit, one after the other on the stack."""
    holder: type
    """What the units must be about to go into: list or dict."""
    maker: Callable[[tuple[Any, ...]], object]
    """What makes a corner."""
    make: Callable[[Fields], tuple[object, ...] | None]
    """Makes what stands for a run, as many values as a unit has records, and checks as the records would;
    None, where it cannot, leaves the run to the interpreter."""


class _Token(NamedTuple):
    """A part of the form: bytes, then a field of which each unit has its own."""

    literal: bytes
    field: tuple[int, str] | None
    """Number of the record and name; None behind the last field."""
    kind: type | None = None
    """`Numbers`, `Texts` or `Corners`; None where the field is None."""


class _Taken(NamedTuple):
    """A run: its values and what the interpreter has to know."""

    values: tuple[object, ...]
    stop: int
    num_slots: int


class Runs:
    """Finds runs of one kind in one pickle.

    Args:
        data: the pickle.
        kind: what to look for.
        keep: a flag for each memo slot that is ever fetched.
        memo: the interpreter's; strings of a run that are fetched later are put into it.
        call_of: gives what REDUCE may call for a value, None where it may not.
    """

    def __init__(
        self,
        data: bytes,
        kind: RunKind,
        keep: bytearray,
        memo: dict[int, Any],
        call_of: Callable[[Any], Callable[[tuple[Any, ...]], object] | None],
    ) -> None:
        self._data, self.kind, self._keep, self._memo, self._call_of = data, kind, keep, memo, call_of
        self._form: list[_Token] | None = None
        self._end = len(data)  # of the unit before
        self._left, self._pause = (0, _MIN_TAKEN) if len(data) >= _MIN_BYTES else (len(data), 0)
        self._window = _WINDOW
        self._texts: dict[bytes, str] = {}

    def take(self, pos: int, num_memoized: int) -> _Taken | None:
        """Return the run that begins at `pos`, just behind a unit that was executed; None where there is none."""
        before, self._end = self._end, pos
        if self._left:
            self._left -= 1
            return None
        if self._form is None and 0 < pos - before <= _MAX_UNIT:
            self._form = self._learn(before, pos)
        if self._form is None:
            return None
        taken = self._read(pos, num_memoized)
        if taken is None:
            self._form, self._window = None, _WINDOW
            self._left, self._pause = self._pause, min(2 * self._pause, _MAX_PAUSE)
            return None
        self._end, self._pause = taken.stop, _MIN_TAKEN
        if taken.stop - pos > self._window // 2:
            self._window = min(2 * self._window, _MAX_WINDOW)
        return taken

    def _learn(self, start: int, stop: int) -> list[_Token] | None:
        """Return the form of a unit that was just executed, None where it has other parts than runs have."""
        form: list[_Token] = []
        data, literal, pos, record = self._data, b"", start, -1
        while pos < stop:
            head = _head.match(data, pos, stop)
            if head is None:
                return None
            literal, pos, record = literal + head.group(), head.end(), record + 1
            names: set[str] = set()
            while data[pos : pos + 2] != _TAIL:
                key = _get.match(data, pos, stop)
                name = self._fetched(key.group()) if key else None
                if key is None or type(name) is not str or name in names:
                    return None
                names.add(name)
                kind, before, after, size = self._learn_field(key.end(), stop)
                if not size:
                    return None
                form.append(_Token(literal + key.group() + before, (record, name), kind))
                literal, pos = after, key.end() + size
            literal, pos = literal + _TAIL, pos + 2
        is_unit = record + 1 == len(self.kind.classes) and pos == stop
        return [*form, _Token(literal, None)] if form and is_unit else None

    def _learn_field(self, pos: int, stop: int) -> tuple[type | None, bytes, bytes, int]:
        """Return a field's kind, the bytes of all such fields before and after it, and its size (0: no field)."""
        data = self._data
        corner, number, text = (each.match(data, pos, stop) for each in (_corner, _number, _get))
        if corner is not None and self._call_of(self._fetched(corner[1])) is self.kind.maker:
            return Corners, corner[1], corner[3], corner.end() - pos
        if number is not None:
            return Numbers, b"", b"", number.end() - pos
        if text is not None:
            return Texts, b"", b"", text.end() - pos
        if data[pos] == _TEXT:
            return Texts, b"", b"", data[pos + 1] + 3
        return None, b"", b"N", 1 if data[pos] == _NONE else 0

    def _fetched(self, text: bytes) -> object:
        """Return what BINGET or LONG_BINGET fetches."""
        return self._memo.get(int.from_bytes(text[1:], "little"))

    def _read(self, pos: int, num_memoized: int) -> _Taken | None:
        assert self._form is not None
        starts = self._starts(pos)
        if len(starts) < _MIN_TAKEN or starts[0] != pos:
            return None
        walk = _Walk(self._data, starts)
        places = [walk.pass_token(token) for token in self._form]
        count = walk.num_taken()
        if count < _MIN_TAKEN:
            return None
        memory = _Memory(walk, count, num_memoized, self._keep, self._memo)
        texts = [memory.texts(place, self._texts) for place in places if type(place) is _TextPlaces]
        if any(column is None for column in texts) or not memory.is_whole():
            return None
        values = self.kind.make(self._fields(places, [column for column in texts if column], count))
        if values is None:
            return None
        self._memo.update(memory.new)
        return _Taken(values, int(walk.at[count - 1]), memory.num_slots)

    def _starts(self, pos: int) -> Ints:
        """Return where units seem to begin, all of whose bytes are certainly in the file."""
        import numpy as np

        assert self._form is not None
        most = sum(len(token.literal) + _MAX_FIELD for token in self._form)
        stop = max(min(pos + self._window, len(self._data) - most), pos)
        ending = self._data.find(_TAIL + (b"e" if self.kind.holder is list else b"u"), pos, stop)
        words = np.ndarray(((stop if ending < 0 else ending) - pos,), "<u8", self._data, pos, (1,))
        return np.flatnonzero(words == int.from_bytes(self._form[0].literal[:8], "little")) + pos

    def _fields(self, places: Sequence[object], texts: list[Texts], count: int) -> Fields:
        """Put the columns under the names of their fields."""
        assert self._form is not None
        fields: list[dict[str, Column]] = [{} for _ in self.kind.classes]
        remaining = iter(texts)
        for token, place in zip(self._form, places, strict=True):
            if token.field is None:
                continue
            column: Column = None
            if type(place) is Numbers:
                column = Numbers(place.values[:count])
            elif type(place) is Corners:
                column = Corners(place.num_dims[:count], place.values[:count])
            elif type(place) is _TextPlaces:
                column = next(remaining)
            fields[token.field[0]][token.field[1]] = column
        return fields


class _TextPlaces(NamedTuple):
    """Where the texts of a field are: in the unit itself, or in a memo slot."""

    at: Ints
    is_inline: Any
    value: Ints
    """Bytes of those in the unit, memo slot of the others."""
    slot: Ints
    """Of those in the unit: their own memo slot, counted from the unit's first."""


class _Walk:
    """Reads all units of a run at once, token by token."""

    def __init__(self, data: bytes, starts: Ints) -> None:
        import numpy as np

        self.data = data
        self._bytes = np.frombuffer(data, dtype=np.uint8)
        # The eight bytes at every byte, to be looked up by position.
        self._words: Any = np.ndarray((len(data) - 7,), "<u8", data, 0, (1,))
        self._widths = np.zeros(256, dtype=np.uint64)
        self._widths[[0x4B, 0x4D, 0x4A]] = 1, 2, 4  # BININT1, BININT2, BININT
        self._starts = starts
        self.at: Ints = starts.copy()
        """Where each unit is read next."""
        self.num_slots: Ints = np.zeros(len(starts), dtype=np.int64)
        """Memo slots that each has filled so far."""
        self._is_right = np.ones(len(starts), dtype=bool)

    def pass_token(self, token: _Token) -> Numbers | Texts | Corners | _TextPlaces | None:
        """Read a token of every unit; units that have something else there are not taken."""
        self._pass_literal(token.literal)
        if token.kind is Numbers:
            values, lengths = self._numbers()
            self._is_right &= lengths > 0
            self.at += lengths
            return Numbers(values)
        if token.kind is Corners:
            return self._pass_corners()
        return self._pass_texts() if token.kind is Texts else None

    def num_taken(self) -> int:
        """Return how many units, from the first on, are right and begin where the one before ends."""
        follows = (self.at[:-1] == self._starts[1:]) & self._is_right[:-1]
        count = len(follows) if follows.all() else int(follows.argmin())
        return count + bool(self._is_right[count])

    def _pass_literal(self, literal: bytes) -> None:
        for first in range(0, len(literal), 8):
            part = literal[first : first + 8]
            words = self._words[self.at + first]
            if len(part) < 8:
                words = words & ((1 << 8 * len(part)) - 1)
            self._is_right &= words == int.from_bytes(part, "little")
        self.at += len(literal)
        self.num_slots += literal.count(_MEMOIZE)

    def _numbers(self) -> tuple[Ints, Ints]:
        """Return the integers at the present places and the bytes that they take, 0 where there is none."""
        import numpy as np

        op = self._bytes[self.at]
        widths = self._widths[op]
        shift = (64 - 8 * widths) & np.uint64(63)
        words = self._words[self.at + 1] << shift
        values = np.where(
            op == 0x4A, words.view(np.int64) >> shift.view(np.int64), (words >> shift).view(np.int64)
        )
        lengths = widths.view(np.int64) + (widths > 0)
        long = np.flatnonzero(op == 0x8A)  # LONG1
        if len(long):
            nbytes = self._bytes[self.at[long] + 1].astype(np.int64)
            fits = (nbytes >= 5) & (nbytes <= 8)
            shift = np.where(fits, 64 - 8 * nbytes, 0)
            values[long] = (self._words[self.at[long] + 2].view(np.int64) << shift) >> shift
            lengths[long] = np.where(fits, nbytes + 2, 0)
        return values, lengths

    def _pass_corners(self) -> Corners:
        import numpy as np

        num_dims = np.zeros(len(self.at), dtype=np.int64)
        columns = []
        for _ in range(_MAX_DIMS):
            values, lengths = self._numbers()
            is_there = lengths > 0
            self._is_right &= ~is_there | (values >= 0)
            columns.append(np.where(is_there, values, 0))
            num_dims += is_there
            self.at += lengths
        # TUPLE1 to TUPLE3 take one to three values.
        self._is_right &= (num_dims > 0) & (self._bytes[self.at] == 0x84 + num_dims)
        self.at += 1
        return Corners(num_dims, np.stack(columns, axis=1))

    def _pass_texts(self) -> _TextPlaces:
        import numpy as np

        op, word = self._bytes[self.at], self._words[self.at + 1]
        is_inline, is_short, is_long = op == _TEXT, op == 0x68, op == 0x6A
        value = np.where(is_long, word & 0xFFFFFFFF, word & 0xFF).view(np.int64)
        places = _TextPlaces(self.at + 2, is_inline, value, self.num_slots.copy())
        lengths = np.where(is_inline, value + 3, np.where(is_long, 5, 2))
        memoized = self._bytes[self.at + lengths - 1] == _MEMOIZE
        self._is_right &= (is_inline & memoized) | is_short | is_long
        self.at = self.at + lengths
        self.num_slots += is_inline
        return places


class _Memory:
    """The memo, as the first `count` units of a run use it."""

    def __init__(
        self, walk: _Walk, count: int, num_memoized: int, keep: bytearray, memo: Mapping[int, Any]
    ) -> None:
        import numpy as np

        self._data, self._count, self._memo = walk.data, count, memo
        each = walk.num_slots[:count]
        self.num_slots = int(each.sum())
        self._firsts: Ints = num_memoized + np.cumsum(each) - each
        self._keep = np.frombuffer(keep, dtype=np.uint8)
        self._num_kept = int(np.count_nonzero(self._keep[num_memoized : num_memoized + self.num_slots]))
        self.new: dict[int, str] = {}
        """Strings of the run that are fetched later, by slot."""

    def is_whole(self) -> bool:
        """True where all that is fetched later was found: of a run's values, only strings may be."""
        return len(self.new) == self._num_kept

    def texts(self, places: _TextPlaces, known: dict[bytes, str]) -> Texts | None:
        """Return the strings of a field, None where one is fetched from a slot without one."""
        import numpy as np

        at, is_inline, value, slot = (column[: self._count] for column in places)
        values: list[str] = [""] * self._count
        rows = np.flatnonzero(is_inline)
        starts, stops = at[rows].tolist(), (at[rows] + value[rows]).tolist()
        for row, start, stop in zip(rows.tolist(), starts, stops, strict=True):
            raw = self._data[start:stop]
            text = known.get(raw)
            if text is None:
                if len(known) >= _MAX_KNOWN:
                    known.clear()
                text = known[raw] = raw.decode()
            values[row] = text
        slots = self._firsts[rows] + slot[rows]
        for index in np.flatnonzero(self._keep[slots]).tolist():
            self.new[int(slots[index])] = values[int(rows[index])]
        rows = np.flatnonzero(~is_inline)
        if (value[rows] >= self._firsts[rows]).any():
            return None
        for row, number in zip(rows.tolist(), value[rows].tolist(), strict=True):
            text = self._memo.get(number, self.new.get(number))
            if type(text) is not str:
                return None
            values[row] = text
        return Texts(values)
