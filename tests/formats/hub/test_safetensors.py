"""The safetensors header: golden file, one hostile file for each rule, agreement with safetensors."""

from __future__ import annotations

import json
import os
import struct
import time
from zlib import crc32

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shardkit.core.dtypes import BY_NAME
from shardkit.errors import ResourceError, SourceError
from shardkit.formats.hub.safetensors import read_header


def spell(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


@pytest.fixture
def read(tmp_path):
    def read(content):
        path = tmp_path / "w.safetensors"
        path.write_bytes(content)
        return read_header(str(path), "w.safetensors")

    return read


def test_golden(read):
    text = (
        b'{"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},'
        b'"empty":{"dtype":"F32","shape":[0,9],"data_offsets":[4,4]},'
        b'"a":{"dtype":"I32","shape":[],"data_offsets":[0,4]}}  '
    )
    header = read(spell(text, bytes(16)))
    base = 8 + len(text)
    assert header.tensors == (
        ("a", BY_NAME["int32"], (), base, 4),
        ("empty", BY_NAME["float32"], (0, 9), base + 4, 0),
        ("b", BY_NAME["bfloat16"], (2, 3), base + 4, 12),
    )
    assert header.metadata == {"format": "pt"}
    assert header.size == base + 16
    assert header.crc32 == crc32(text)


def test_f4_counts_pairs(read):
    (found,) = read(spell({"a": tensor("F4", (3, 4), (0, 6))}, bytes(6))).tensors
    assert (found.dtype.name, found.shape, found.nbytes) == ("float4_e2m1fn_x2", (3, 2), 6)


def test_no_tensor_at_all(read):
    assert read(spell({})).tensors == ()


GOOD = tensor()
HOSTILE = {
    "empty file": (b"", "at least 8 bytes"),
    "short length": (b"\x00" * 7, "at least 8 bytes"),
    "header cap": (struct.pack("<Q", 100_000_001), "100000000"),
    "huge length": (b"\xff" * 8, "not a safetensors file"),
    "header past the end": (struct.pack("<Q", 10) + b"{}", "truncated: a header of 10 bytes"),
    "no header": (spell(b""), "does not begin with"),
    "space first": (spell(b" {}"), "does not begin with"),
    "not UTF-8": (spell(b'{"\xff": 1}'), "byte 2 is not UTF-8"),
    "not JSON": (spell(b"{nope}"), "not valid JSON"),
    "list": (spell(b"[]"), "does not begin with"),
    "two objects": (spell(b"{}{}"), "not valid JSON"),
    "control character": (spell(b'{"a\n": 1}'), "not valid JSON"),
    "nested too deeply": (spell(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "not valid JSON"),
    "NaN": (spell(b'{"a": NaN}'), "NaN is not JSON"),
    "Infinity": (spell(b'{"a": -Infinity}'), "Infinity is not JSON"),
    "giant integer": (spell(b'{"a": ' + b"9" * 5000 + b"}"), "integer of 5000 digits"),
    "tensor twice": (spell(b'{"a": 1, "a": 1}'), "  a\n"),
    "field twice": (spell(b'{"a": {"dtype": 1, "dtype": 1}}'), "  dtype\n"),
    "metadata twice": (spell(b'{"__metadata__": {"k": "", "k": ""}}'), "  k\n"),
    "metadata list": (spell({"__metadata__": []}), "__metadata__"),
    "metadata null": (spell({"__metadata__": None}), "__metadata__"),
    "metadata values": (spell({"__metadata__": {"x": 1, "y": None}}), "2 of 2 entries"),
    "metadata is a tensor": (spell({"__metadata__": GOOD}, bytes(8)), "__metadata__"),
    "metadata surrogate": (spell(b'{"__metadata__": {"k": "\\ud800"}}'), "surrogate"),
    "name surrogate": (spell({"\ud800": GOOD}, bytes(8)), "surrogate"),
    "not an object": (spell({"a": 1}), "a: expected an object, found int"),
    "missing field": (spell({"a": {"dtype": "F32"}}), "expected the fields data_offsets, dtype, shape"),
    "extra field": (spell({"a": tensor(more=1)}, bytes(8)), "found data_offsets, dtype, more, shape"),
    "bool in shape": (spell({"a": tensor(shape=(True, 2))}, bytes(8)), "a: shape: expected a list of int"),
    "float in shape": (spell({"a": tensor(shape=(2.0,))}, bytes(8)), "a: shape: expected a list of int"),
    "minus zero": (spell(b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'), "shape"),
    "negative shape": (spell({"a": tensor(shape=(-2,))}, bytes(8)), "from 0 to 2^63"),
    "negative offset": (spell({"a": tensor(offsets=(-8, 0))}, bytes(8)), "data_offsets"),
    "shape is text": (spell({"a": {**GOOD, "shape": "2"}}, bytes(8)), "shape: expected a list"),
    "three offsets": (spell({"a": tensor(offsets=(0, 8, 8))}, bytes(8)), "expected [start, stop]"),
    "offsets reversed": (spell({"a": tensor(offsets=(8, 0))}, bytes(8)), "expected [start, stop]"),
    "unknown dtype": (spell({"a": tensor("F33")}, bytes(8)), "closest name: F32"),
    "dtype is a number": (spell({"a": tensor(1)}, bytes(8)), "dtype: expected a string"),
    "six bits": (spell({"a": tensor("F6_E2M3", (4,), (0, 3))}, bytes(3)), "torch has no such type"),
    "odd F4": (spell({"a": tensor("F4", (2, 3), (0, 3))}, bytes(3)), "even last dim"),
    "scalar F4": (spell({"a": tensor("F4", (), (0, 0))}), "even last dim"),
    "shape overflow": (spell({"a": tensor(shape=(2**40, 2**40))}, bytes(8)), "63 bits"),
    "empty shape overflow": (spell({"a": tensor(shape=(2**40, 0, 2**40), offsets=(0, 0))}), "63 bits"),
    "wrong span": (spell({"a": tensor(shape=(3,))}, bytes(8)), "takes 12 bytes, data_offsets give 8"),
    "overlap": (spell({"a": GOOD, "b": tensor(offsets=(4, 12))}, bytes(12)), "overlap a, which ends at"),
    "same bytes": (spell({"a": GOOD, "b": GOOD}, bytes(8)), "overlap a"),
    "gap": (spell({"a": GOOD, "b": tensor(offsets=(9, 17))}, bytes(17)), "1 byte after the end of a"),
    "gap in front": (spell({"a": tensor(offsets=(1, 9))}, bytes(9)), "after the end of the header"),
    "trailing bytes": (spell({"a": GOOD}, bytes(9)), "1 byte after the end of a belong to no tensor"),
    "only trailing": (spell({}, bytes(1)), "belong to no tensor"),
    "past the end": (spell({"a": GOOD}, bytes(7)), "truncated: the header describes"),
}  # fmt: skip


@pytest.mark.parametrize("rule", HOSTILE)
def test_refused(read, rule):
    content, expected = HOSTILE[rule]
    with pytest.raises(SourceError) as caught:
        read(content)
    assert caught.value.message.startswith("w.safetensors: ")
    assert expected in str(caught.value)
    assert caught.value.hint


def test_lists_every_problem_of_a_kind(read):
    header = {f"bad\x1b{i}": tensor("F33", offsets=(8 * i, 8 * i + 8)) for i in range(30)}
    with pytest.raises(SourceError) as caught:
        read(spell(header, bytes(240)))
    assert len(caught.value.problems) == 30
    assert caught.value.problems[7].startswith("bad\\x1b7: dtype: 'F33'")


def test_millions_of_dims_end_at_once(read):
    text = b'{"a":{"dtype":"U8","shape":[' + b",".join([b"2"] * 300_000) + b'],"data_offsets":[0,1]}}'
    start = time.process_time()
    with pytest.raises(SourceError, match="63 bits"):
        read(spell(text, b"1"))
    assert time.process_time() - start < 5


def test_only_regular_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, what in ((tmp_path / "pipe", "pipe"), (tmp_path, "a directory"), ("/dev/zero", "device")):
        with pytest.raises(SourceError, match=what):
            read_header(str(path), "x")
    with pytest.raises(SourceError, match="no such file"):
        read_header(str(tmp_path / "absent"), "x")
    with pytest.raises(SourceError, match="cannot be opened"):
        read_header("a\0b", "x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(spell({}))
    path.chmod(0)
    with pytest.raises(ResourceError):
        read_header(str(path), "x")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 40) | st.text(max_size=3) | st.sampled_from(["F32", "U8"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F16", "BOOL", "F8_E8M0", "C64", "F9"]) | JUNK,
        "shape": st.lists(st.integers(0, 3), max_size=3) | JUNK,
        "data_offsets": st.tuples(st.integers(0, 9), st.integers(0, 16)) | JUNK,
    }
)
HEADERS = st.dictionaries(st.sampled_from(["a", "b", "__metadata__", ""]), ENTRIES | JUNK, max_size=3)
VALID = spell({"a": tensor("F16", (2, 2), (0, 8)), "b": tensor("U8", (3,), (8, 11))}, bytes(11))


@st.composite
def damaged_files(draw):
    content = bytearray(VALID)
    for _ in range(draw(st.integers(1, 3))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(32, 126) | st.integers(0, 255))
    return bytes(content[: draw(st.integers(0, len(content)) | st.just(len(content)))])


FILES = damaged_files() | st.builds(
    lambda header, size: spell(header, bytes(size)), HEADERS, st.integers(0, 16)
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@example(VALID)
@given(FILES)
def test_agrees_with_safetensors(read, tmp_path, content):
    safetensors = pytest.importorskip("safetensors")
    try:
        found = read(content)
    except SourceError:
        return
    with safetensors.safe_open(tmp_path / "w.safetensors", framework="np") as expected:
        assert {stored.fqn for stored in found.tensors} == set(expected.keys())
        for stored in found.tensors:
            view = expected.get_slice(stored.fqn)
            assert (list(stored.shape), stored.dtype.safetensors) == (view.get_shape(), view.get_dtype())
