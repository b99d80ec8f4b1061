"""A pickle that names anything at all is looked into, and nothing of it happens."""

from __future__ import annotations

import argparse
import collections
import enum
import os
import pickle
import random
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import SourceError
from shardkit.pickles import policies
from shardkit.pickles.policies import Inert, UnmadeObject

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(st.characters(codec="utf-8")) | st.integers(-(2**63), 2**63 - 1), inner)
    ),
    max_leaves=30,
)


class Colour(enum.Enum):
    RED = 3


def look_into(data: bytes) -> Any:
    return pickle_of(data).run("file")


def pickle_of(data: bytes) -> Inert:
    return Inert(
        data, lambda module, name: UnmadeObject(f"{module}.{name}"), lambda value: UnmadeObject("storage")
    )


@given(PLAIN, st.integers(2, 5))
def test_plain_data_is_what_pickle_gives(value, protocol):
    assert look_into(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("size", [0, 1, 255, 256, 70000])
def test_bytes_are_plain_data(size, protocol):
    assert look_into(pickle.dumps([bytes(size), "after"], protocol)) == [bytes(size), "after"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "value",
    [
        argparse.Namespace(lr=0.1, inner=argparse.Namespace()),
        PurePosixPath("/tmp"),
        collections.Counter("aab"),
        collections.deque([1, 2]),
        {1, 2},
        frozenset("ab"),
        complex(1, 2),
        Colour.RED,
        Colour,
        os.system,
        ValueError("no"),
        slice(1, 2),
        range(3),
    ],
)
def test_everything_else_is_opaque(value, protocol):
    found = look_into(pickle.dumps([value, "after"], protocol))
    assert isinstance(found[0], UnmadeObject)
    assert found[1] == "after"


def test_the_value_of_an_enum_is_kept():
    found = look_into(pickle.dumps(Colour.RED, 2))
    assert (found.name, found.value) == (f"{__name__}.Colour", 3)


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch was-executed",)


def test_nothing_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert look_into(pickle.dumps({"a": Runs()}))["a"].name == "posix.system"
    assert not Path("was-executed").exists()


def test_keys_that_are_not_text_or_small_integers_are_dropped():
    machine = pickle_of(pickle.dumps({"a": 1, 2: 2, (1, 2): 3, None: 4, 0.5: 5, 2**64: 6, True: 7}))
    assert machine.run("file") == {"a": 1, 2: 2}
    assert machine.num_dropped == 5


def test_shared_parts_stay_shared():
    inner = [1]
    found = look_into(pickle.dumps([inner, inner]))
    assert found == [[1], [1]]
    assert found[0] is found[1]


def shared_too_often(levels: int) -> bytes:
    """Lists of ten times the list before: a few bytes for 10 ** levels values."""
    return (
        b"\x80\x04]\x94"
        + b"".join(b"0](" + b"h" + bytes([i]) + (b"h" + bytes([i])) * 9 + b"e\x94" for i in range(levels))
        + b"."
    )


def contains_itself() -> bytes:
    value: list[Any] = []
    value.append(value)
    return pickle.dumps(value)


def deep(levels: int) -> bytes:
    return b"\x80\x02" + b"]" * levels + b"a" * (levels - 1) + b"."


HOSTILE = {
    "no protocol": (b"I1\n.", "protocol"),
    "protocol 0": (pickle.dumps([1], 0), "protocol"),
    "an unknown opcode": (b"\x80\x02\xff.", "opcode 0xff"),
    "an extension": (b"\x80\x02\x82\x01.", "opcode 0x82"),
    "text after the end": (pickle.dumps(1) + b"x", "follow the end"),
    "two values": (b"\x80\x02NN.", "one object"),
    "an open mark": (b"\x80\x02N(.", "one object"),
    "no value": (b"\x80\x02.", "one object"),
    "a call of text": (b"\x80\x02X\x01\0\0\0a)R.", "a call of something of type str"),
    "items of text": (b"\x80\x02X\x01\0\0\0a(NNu.", "SETITEMS"),
    "appending to text": (b"\x80\x02X\x01\0\0\0aNa.", "APPENDS"),
    "half an item": (b"\x80\x02}(X\x01\0\0\0au.", "without a value"),
    "a key twice": (b"\x80\x02}(X\x01\0\0\0aNX\x01\0\0\0aNu.", "twice"),
    "a memo slot twice": (b"\x80\x02Nq\x00q\x00.", "set again"),
    "no such memo entry": (b"\x80\x02h\x00.", "memo entry"),
    "not UTF-8": (b"\x80\x02X\x01\0\0\0\xff.", "UTF-8"),
    "a name without an end": (b"\x80\x02cos\nsystem.", "without an end"),
    "a long integer": (b"\x80\x02\x8b\0\0\0\x7f.", "an integer of"),
    "a frame past the end": (b"\x80\x04\x95\xff\0\0\0\0\0\0\0N.", "frame"),
    "itself": (contains_itself(), "contains itself"),
    "deep": (deep(500), "levels deep"),
    "shared too often": (shared_too_often(12), "more than 4194304 values"),
    "a bomb of marks": (b"\x80\x02" + b"(" * 5000, "of memory"),
    "a bomb of lists": (b"\x80\x02" + b"]" * 5000, "of memory"),
    "a bomb of tuples": (b"\x80\x02)" + b"\x85" * 5000 + b".", "of memory"),
    "too large": (b"\x80\x02" + b"N" * (1 << 25), "more than the"),
}


@pytest.mark.parametrize("data", [data for data, _ in HOSTILE.values()], ids=HOSTILE)
def test_hostile(data, monkeypatch):
    monkeypatch.setattr(policies, "_MAX_CHARGED", 200_000)
    reason = next(reason for known, reason in HOSTILE.values() if known is data)
    with pytest.raises(SourceError, match=reason):
        look_into(data)


def test_damage_is_always_refused_or_harmless():
    """Any damage ends in a value of the known kinds or in a SourceError."""
    good = pickle.dumps({"a": [1, (2.5, "x"), {"b": argparse.Namespace(c={1})}], "d": b"xyz"}, 4)
    rng = random.Random(1)
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            look_into(bytes(data))
        except SourceError:
            continue
    for stop in range(len(good)):
        with pytest.raises(SourceError):
            look_into(good[:stop])


@given(
    st.lists(st.sampled_from([b"\x94", b"q\x00", b"r", b"h\x05", b"j\x00\x01\x00\x00", b"j\x01\x01", b"x"])),
    st.binary(),
)
def test_fetched_slots_of_a_large_file_are_those_of_a_small_one(parts: list[bytes], rest: bytes) -> None:
    data = bytes(8) + b"".join(parts) + rest
    with pytest.MonkeyPatch.context() as patch:
        small = policies.fetched_slots(data)
        for block in (1, 3, 8):
            patch.setattr(policies, "_BLOCK", block)
            assert policies.fetched_slots(data) == small
