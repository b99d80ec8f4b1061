"""Byte entries that are written here: what torch reads from them, and how they look beside torch's own."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardkit.formats.torchsave.plain_record import is_plain, plain_record

_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False)
    | st.text()
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def same(found: object, expected: object) -> bool:
    """Equal, and of equal types: True is not 1, (1,) is not [1]."""
    return found == expected and repr(found) == repr(expected)


@given(_VALUES)
def test_torch_reads_it_back_as_weights(value: object) -> None:
    if not is_plain(value):  # nested too deeply
        return
    record = plain_record(value)
    assert same(torch.load(io.BytesIO(record), weights_only=True), value)
    assert record == plain_record(value)


def test_integers_of_every_length() -> None:
    """The sign needs a bit of its own."""
    values = [sign * ((1 << bits) + more) for bits in range(63) for more in (-1, 0) for sign in (1, -1)]
    values += [-(1 << 63), (1 << 63) - 1]
    assert torch.load(io.BytesIO(plain_record(list(values))), weights_only=True) == values


def test_a_record_is_torch_s_but_for_the_spelling_of_the_pickle() -> None:
    value = {"lr": 1e-3, "betas": (0.9, 0.999), "params": ["a", "b"], "foreach": None}
    theirs = io.BytesIO()
    torch.save(value, theirs)
    ours, torchs = (zipfile.ZipFile(file) for file in (io.BytesIO(plain_record(value)), theirs))
    assert ours.testzip() is None
    names = [entry.filename for entry in ours.infolist()]
    assert names == [entry.filename for entry in torchs.infolist()]
    for name in names:
        if not name.endswith(("data.pkl", "serialization_id")):
            assert ours.read(name) == torchs.read(name)


@pytest.mark.parametrize("value", [b"bytes", {1: 2}, 1 << 63, {"a": {1, 2}}, [object()], torch.ones(1), 1j])
def test_what_is_not_plain(value: object) -> None:
    assert not is_plain(value)
    nested: object = 1
    for _ in range(20):
        nested = [nested]
    assert not is_plain(nested)
