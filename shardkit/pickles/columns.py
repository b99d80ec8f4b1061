"""A fast path for `.metadata`: runs of records with identical spelling, decoded in columns.

A checkpoint of a thousand ranks repeats one unit hundreds of thousands of times: a chunk, or a storage entry with its
index. The interpreter executes one unit, which yields the *form*: the bytes that all units share, with numbers, texts
and corners between them. The form, as a regular expression, then matches the units that follow without gaps. The result
is therefore exactly what the interpreter would have built, opcode by opcode. The run ends at the first unit that
differs in any way.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, cast

from shardkit.pickles.interpreter import Refusal

_GET = rb"(?:h.|j....)"  # BINGET, LONG_BINGET
_INT = rb"(?:K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7}|\x8a\x08.{8})"  # BININT1, 2, BININT, LONG1
_TEXT = rb"(?:%s|\x8c.[^\x94]{0,255}\x94)" % _GET  # or SHORT_BINUNICODE MEMOIZE, if 0x94 is not in it
_CORNER = rb"(?:%s{1,3}[\x85-\x87]|\(%s{0,64}t)" % (_INT, _INT)  # TUPLE1 to TUPLE3, or MARK and TUPLE
_OWN = (_INT, _TEXT, _CORNER, _GET)
"""Parts that vary between units."""
_head = re.compile(rb"%s(\)\x81\x94\}\x94\(|\)\x81\}\()" % _GET, re.DOTALL)
_key = re.compile(_GET, re.DOTALL)
_int = re.compile(_INT, re.DOTALL)
_field = re.compile(
    rb"(?P<corner>(%s)%s(\x94\x85\x94R\x94|\x85R))|(?P<number>%s)|(?P<text>%s)|N"
    % (_GET, _CORNER, _INT, _TEXT),
    re.DOTALL,
)
_TAIL = b"ub"
_MEMOIZE = b"\x94"
_SHORT_TEXT, _MARK, _TUPLE1, _BININT, _LONG1 = 0x8C, 0x28, 0x85, 0x4A, 0x8A
_MAX_UNIT = 4096  # bytes; longer units yield no form
_WINDOW = 1 << 17  # bytes that are matched at once
_MIN_BYTES = 1 << 15  # smaller pickles do not justify compiling regular expressions
_MAX_FORMS = 16  # of one kind in a file
_MAX_PAUSE = 1024  # units
_MAX_KNOWN = 4096  # cached decoded values


class Numbers(NamedTuple):
    """A field that is an integer."""

    values: list[int]
    """All fit in 64 bits."""


class Texts(NamedTuple):
    """A field that is a string."""

    values: list[str]


class Corners(NamedTuple):
    """A field built from a tuple of integers."""

    values: list[bytes]
    """Each as native 64-bit integers."""


Column = Numbers | Texts | Corners | None
"""None: the field is None in all units."""
RecordFields = Sequence[Mapping[str, Column]]
"""Of each record of the unit."""


class RunKind(NamedTuple):
    """A kind of unit that a vocabulary accepts in columns."""

    classes: tuple[type, ...]
    """Classes of a unit's records, in stack order."""
    holder: type
    """Type of the container that the units go into: list or dict."""
    maker: Callable[[tuple[Any, ...]], tuple[int, ...]]
    """Builds a corner."""
    corner_type: type[tuple[int, ...]]
    """What it returns."""
    make: Callable[[RecordFields], tuple[object, ...] | None]
    """Builds the values that represent a run, one for each record of a unit, with the checks of the records. None
    leaves this run and all later ones to the interpreter."""


class _Field(NamedTuple):
    """A field whose value varies between units."""

    record: int
    name: str
    kind: str | None
    """Name of the group of `_field`; "fetched_corner" for a corner from the memo; None if the field is None."""
    slot: int
    """Number of memo slots that the form fills before it."""


class _UnitForm(NamedTuple):
    """The structure that all units share."""

    unit: re.Pattern[bytes]
    """A unit, with a group for each field that is not None."""
    run: re.Pattern[bytes]
    """One or more units without gaps."""
    fields: tuple[_Field, ...]
    num_slots: int
    """Number of memo slots that a unit fills, not counting inline texts."""
    nbytes: int
    """Bytes of a unit outside of groups."""


class _TakenRun(NamedTuple):
    """A run: its values, and the interpreter's state after it."""

    values: tuple[object, ...]
    stop: int
    num_memoized: int


class RunFinder:
    """Finds runs of one kind in one pickle.

    Args:
        data: the pickle.
        kind: what to look for.
        keep: for each memo slot, whether it is ever fetched.
        memo: of the interpreter; strings of a run that are fetched later are added to it.
        call_of: returns the function that REDUCE may call for a value; None if it may not.
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
        self._form: _UnitForm | None = None
        self._forms_left = _MAX_FORMS if len(data) >= _MIN_BYTES else 0
        self._end = len(data)  # of the previous unit
        self._num_skips, self._pause = 0, 1
        # Not bound to self: a reference cycle would keep the data alive until garbage collection.
        self._text = lru_cache(_MAX_KNOWN)(partial(_text, memo))
        self._fetched_corner = lru_cache(_MAX_KNOWN)(partial(_fetched_corner, memo, kind.corner_type))
        self._corner = lru_cache(_MAX_KNOWN)(partial(_corner, kind.maker))

    def take(self, pos: int, num_memoized: int) -> _TakenRun | None:
        """Return the run that begins at `pos`, right after an executed unit, or None."""
        before, self._end = self._end, pos
        if self._num_skips:
            self._num_skips -= 1
            return None
        run = self._read(pos, num_memoized)
        if run is None and self._forms_left and 0 < pos - before <= _MAX_UNIT:
            form = self._learn(before, pos)
            if form is None:
                self._rest()
            elif form != self._form:
                self._form, self._forms_left = form, self._forms_left - 1
                run = self._read(pos, num_memoized)
        if run is not None:
            self._end = run.stop
        return run

    def _rest(self) -> None:
        """Skip units, twice as many each time, so that a form that keeps failing is not retried at every unit."""
        self._num_skips, self._pause = self._pause, min(2 * self._pause, _MAX_PAUSE)

    def _learn(self, start: int, stop: int) -> _UnitForm | None:
        """Return the form of the unit that was just executed, or None if runs cannot have such parts."""
        data, parts, pos, record, num_slots = self._data, list[bytes](), start, -1, 0
        fields: dict[tuple[int, str], _Field] = {}
        while pos < stop:
            head = _head.match(data, pos, stop)
            if head is None:
                return None
            parts, pos, record = [*parts, re.escape(head.group())], head.end(), record + 1
            num_slots += head[1].count(_MEMOIZE)
            while data[pos : pos + 2] != _TAIL:
                key = _key.match(data, pos, stop)
                match = key and _field.match(data, key.end(), stop)
                name = self._fetched(key.group()) if key else None
                if key is None or not match or type(name) is not str or (record, name) in fields:
                    return None
                kind, field_parts = self._pattern_of(match)
                if not field_parts:
                    return None
                fields[record, name] = _Field(record, name, kind, num_slots)
                parts, pos = [*parts, re.escape(key.group()), *field_parts], match.end()
                num_slots += (match[3] or b"").count(_MEMOIZE)
            parts, pos = [*parts, _TAIL], pos + 2
        if record + 1 != len(self.kind.classes) or pos != stop:
            return None
        unit = re.compile(b"".join(b"(%s)" % part if part in _OWN else part for part in parts), re.DOTALL)
        run = re.compile(b"(?:%s)+" % b"".join(parts), re.DOTALL)
        example = unit.fullmatch(data, start, stop)
        if example is None or unit.groups < 2:  # with two, `findall` gives tuples
            return None
        nbytes = stop - start - sum(map(len, example.groups()))
        return _UnitForm(unit, run, tuple(fields.values()), num_slots, nbytes)

    def _pattern_of(self, field: re.Match[bytes]) -> tuple[str | None, tuple[bytes, ...]]:
        """Return the kind of a field and the pattern of such fields, in parts; no parts if runs cannot have it."""
        text, kind = field["text"], field.lastgroup
        if field["corner"] is not None:
            is_made = self._call_of(self._fetched(field[2])) is self.kind.maker
            return kind, (re.escape(field[2]), _CORNER, re.escape(field[3])) if is_made else ()
        if text is not None:
            if text[0] != _SHORT_TEXT and self._fetched_corner(text) is not None:
                return "fetched_corner", (_GET,)
            return kind, (_TEXT,) if self._text(text) is not None else ()
        return kind, (b"N",) if field["number"] is None else (_INT,)

    def _fetched(self, text: bytes) -> object:
        """Return the value that BINGET or LONG_BINGET fetches."""
        return self._memo.get(int.from_bytes(text[1:], "little"))

    def _read(self, pos: int, num_memoized: int) -> _TakenRun | None:
        """Decode units up to the first that differs or that the interpreter has to execute."""
        form = self._form
        run = form and form.run.match(self._data, pos, pos + _WINDOW)
        if form is None or run is None:
            return None
        units = form.unit.findall(self._data, pos, run.end())
        count, num_memoized = self._memoize(form, units, num_memoized)
        if count == len(units):
            self._pause, stop = 1, run.end()
        else:  # no unit matched completely
            self._rest()
            del units[count:]
            stop = pos + count * form.nbytes + sum(map(len, chain.from_iterable(units)))
        if not units:
            return None
        values = self.kind.make(self._fields(form, units))
        if values is None:
            self._form, self._forms_left = None, 0
            return None
        return _TakenRun(values, stop, num_memoized)

    def _memoize(self, form: _UnitForm, units: Sequence[tuple[bytes, ...]], first: int) -> tuple[int, int]:
        """Add strings that are fetched later to the memo.

        Return the number of valid units, and the memo slot after the last of them. A unit is invalid if a text field is
        not a string, or if any other value of it is fetched later.
        """
        varying = [field for field in form.fields if field.kind]
        texts = [(column, field.slot) for column, field in enumerate(varying) if field.kind == "text"]
        corner_columns = [column for column, field in enumerate(varying) if field.kind == "fetched_corner"]
        num_slots = form.num_slots
        if None in map(self._fetched_corner, {unit[column] for unit in units for column in corner_columns}):
            wrong = (
                row
                for row, unit in enumerate(units)
                if None in (self._fetched_corner(unit[column]) for column in corner_columns)
            )
            units = units[: next(wrong)]
        raws = Counter(chain.from_iterable(map(itemgetter(column), units) for column, _ in texts))
        num_inline = sum(count for raw, count in raws.items() if raw[0] == _SHORT_TEXT)
        stop = first + num_slots * len(units) + num_inline
        # `_text` caches its results, so it must not be called for a string that is not in the memo yet. The first
        # half of the condition ensures that.
        if self._keep.find(1, first, stop) < 0 and None not in map(self._text, raws):
            return len(units), stop
        kept = self._keep.find(1, first, stop)
        for row, unit in enumerate(units):
            after, num_kept = first + num_slots, 0
            for column, slot in texts:
                raw = unit[column]
                text = self._text(raw)
                if text is None:
                    return row, first
                if raw[0] == _SHORT_TEXT:
                    slot += after - num_slots
                    after += 1
                    if slot >= kept >= 0 and self._keep[slot]:
                        self._memo[slot] = text
                        num_kept += 1
            if 0 <= kept < after:
                if self._keep.count(1, first, after) != num_kept:
                    return row, first
                kept = self._keep.find(1, after, stop)
            first = after
        return len(units), first

    def _fields(self, form: _UnitForm, units: Sequence[tuple[bytes, ...]]) -> RecordFields:
        """Return the decoded columns by field name."""
        fields: list[dict[str, Column]] = [{} for _ in self.kind.classes]
        columns = zip(*units, strict=True)
        for record, name, kind, _ in form.fields:
            column: Column = None
            if kind == "text":
                column = Texts(cast("list[str]", list(map(self._text, next(columns)))))
            elif kind == "number":
                column = Numbers(list(map(_number, next(columns))))
            elif kind is not None:
                decode = self._corner if kind == "corner" else self._fetched_corner
                column = Corners(cast("list[bytes]", list(map(decode, next(columns)))))
            fields[record][name] = column
        return fields


def _text(memo: Mapping[int, Any], raw: bytes) -> str | None:
    """Return a string that is inline or in the memo; None for anything else."""
    if raw[0] == _SHORT_TEXT:
        return raw[2:-1].decode() if len(raw) == raw[1] + 3 else None
    value = memo.get(int.from_bytes(raw[1:], "little"))
    return value if type(value) is str else None


def _fetched_corner(memo: Mapping[int, Any], corner_type: type[tuple[int, ...]], raw: bytes) -> bytes | None:
    """Return a corner from the memo; None for anything else."""
    value = memo.get(int.from_bytes(raw[1:], "little"))
    return array("q", value).tobytes() if isinstance(value, corner_type) else None


def _corner(maker: Callable[[tuple[Any, ...]], tuple[int, ...]], raw: bytes) -> bytes:
    numbers = tuple(map(_number, _int.findall(raw, raw[0] == _MARK, len(raw) - 1)))
    if raw[0] != _MARK and raw[-1] != _TUPLE1 - 1 + len(numbers):
        raise Refusal("a tuple of more or fewer numbers than stand before it")
    return array("q", maker((numbers,))).tobytes()


@lru_cache(_MAX_KNOWN)
def _number(raw: bytes) -> int:
    """Return the value of BININT1, BININT2, BININT or LONG1."""
    start = 2 if raw[0] == _LONG1 else 1
    return int.from_bytes(raw[start:], "little", signed=raw[0] in (_BININT, _LONG1))
