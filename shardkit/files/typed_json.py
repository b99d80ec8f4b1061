"""Values of frozen classes from JSON: the types of a class's fields say what the JSON has to be.

A field is a key, or has one in its metadata. A field with a default may be missing, and is None then. An `int` is a whole
number from 0 on, below 2^62; what else a value has to be stands beside its type, in `Annotated`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache, partial
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from shardkit.core.text import escape
from shardkit.errors import ShardkitError
from shardkit.files.strict_json import parse_object

_NUMBERS = range(1 << 62)
_MAX_PROBLEMS = 100
_MAX_SHOWN = 200  # characters of a name or value
_Key = TypeVar("_Key")
_Kind = TypeVar("_Kind")
Decoder = Callable[[Any], Any]
"""Makes a value of one type from JSON, or raises `WrongFields`."""


class WrongFields(Exception):
    """Wrong fields; each problem begins with its place below the value that was decoded."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)


def record_of(kind: type[_Kind], content: object) -> _Kind | None:
    """Return the value of a frozen class from its JSON; None if a field is missing or of another type.

    Args:
        kind: the class.
        content: the JSON; it is used up.
    """
    hint: Any = kind
    try:
        record: _Kind = decoder_of(hint)(content)
    except WrongFields:
        return None
    return record


def parse_record(kind: type[_Kind], data: bytes) -> _Kind | None:
    """Return the value of a frozen class from the bytes of its JSON; None if they are damaged."""
    try:
        return record_of(kind, parse_object(data, ""))
    except ShardkitError:
        return None


def key_of(item: dataclasses.Field[Any]) -> str:
    """Return the key of a field."""
    return str(item.metadata.get("key", item.name))


@cache
def decoder_of(hint: Any) -> Decoder:
    """Return what makes values of a type from JSON."""
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _records(hint)
    if origin is Annotated:
        kind, check, what = arguments
        if kind is float:
            return _scalars({int, float}, what, partial(_is_between, *check))
        is_good = check.fullmatch if isinstance(check, re.Pattern) else check.__contains__
        return _scalars({kind}, what, is_good)
    if origin is Mapping:
        return _mappings(decoder_of(arguments[1]))
    if origin is Sequence or (origin is tuple and arguments[-1] is Ellipsis):
        return _lists(decoder_of(arguments[0]))
    if origin is tuple:
        return _rows([decoder_of(argument) for argument in arguments])
    if NoneType in arguments:
        (given,) = {*arguments} - {NoneType}
        return _optional(decoder_of(given))
    return _SCALARS[hint]


def _records(kind: Any) -> Decoder:
    hints = get_type_hints(kind, include_extras=True)
    parts = [
        (key_of(item), decoder_of(hints[item.name]), MISSING if item.default is MISSING else None)
        for item in fields(kind)
    ]
    # Slots are set directly: the `__init__` of a frozen class would look each of them up by name, for each record.
    setters = [getattr(kind, item.name).__set__ for item in fields(kind)]

    def decode(value: Any) -> Any:
        if type(value) is not dict:
            raise _expected("an object", value)
        record, given = object.__new__(kind), value.get
        decoded = _decode_all(((key, part, given(key, absent)) for key, part, absent in parts), ".{}".format)
        for set_field, (_, item) in zip(setters, decoded, strict=True):
            set_field(record, item)
        return record

    return decode


def _rows(decoders: list[Decoder]) -> Decoder:
    def decode(value: Any) -> Any:
        if type(value) is not list or len(value) != len(decoders):
            raise _expected(f"a list of {len(decoders)}", value)
        items = zip(range(len(value)), decoders, value, strict=True)
        return tuple(item for _, item in _decode_all(items, _at_index))

    return decode


def _lists(decode_item: Decoder) -> Decoder:
    def decode(value: Any) -> Any:
        if type(value) is not list:
            raise _expected("a list", value)
        items = ((index, decode_item, item) for index, item in enumerate(value))
        return tuple(item for _, item in _decode_all(items, _at_index))

    return decode


def _mappings(decode_item: Decoder) -> Decoder:
    def decode(value: Any) -> Any:
        if type(value) is not dict:
            raise _expected("an object", value)
        for name, item in _decode_all(((name, decode_item, value[name]) for name in value), _at_name):
            value[name] = item  # in place: memory holds each tensor only once
        return value

    return decode


def _decode_all(
    items: Iterable[tuple[_Key, Decoder, Any]], place: Callable[[_Key], str]
) -> Iterator[tuple[_Key, Any]]:
    """Yield each key and its decoded value; raise all that is wrong at the end, up to a limit.

    Args:
        items: (key, decoder, value) of each.
        place: what stands before a problem of the value with that key.
    """
    problems = list[str]()
    for key, decode, value in items:
        try:
            yield key, decode(value)
        except WrongFields as wrong:
            problems += (place(key) + problem for problem in wrong.problems)
            if len(problems) >= _MAX_PROBLEMS:
                break
    if problems:
        raise WrongFields(problems)


def _optional(decode_given: Decoder) -> Decoder:
    return lambda value: None if value is None else decode_given(value)


def _scalars(kinds: set[type], what: str, is_good: Callable[[Any], object] | None = None) -> Decoder:
    def decode(value: Any) -> Any:
        # By exact type: True is an int to isinstance.
        if type(value) not in kinds or (is_good and not is_good(value)):
            raise _expected(what, value)
        return value

    return decode


def _anything(value: Any) -> Any:
    if value is MISSING:
        raise _expected("a value", value)
    return value


def _is_name_or_count(value: str | int) -> bool:
    return isinstance(value, str) or value in _NUMBERS


def _is_between(least: float, most: float, value: float) -> bool:
    return least <= value <= most


_SCALARS: Mapping[Any, Decoder] = {
    int: _scalars({int}, "an integer from 0 on", _NUMBERS.__contains__),
    str: _scalars({str}, "text"),
    bool: _scalars({bool}, "true or false"),
    str | int: _scalars({str, int}, "an integer from 0 on", _is_name_or_count),
    int | float: _scalars({int, float}, "a number from 0 on", partial(_is_between, 0.0, sys.float_info.max)),
    object: _anything,
    Any: _anything,
}


def _at_name(name: str) -> str:
    return f'["{escape(name[:_MAX_SHOWN])}"]'


def _at_index(index: int) -> str:
    return f"[{index}]"


def _expected(what: str, value: object) -> WrongFields:
    if value is MISSING:
        return WrongFields([": it is missing"])
    return WrongFields([f": expected {what}, found {short_json(value)}"])


def short_json(value: object) -> str:
    """Return the JSON of a value, or what it is, for a message."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    text = json.dumps(value)
    return escape(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
