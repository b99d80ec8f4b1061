from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.core.text import (
    escape,
    format_size,
    in_shell,
    nearest,
    parse_size,
    suggestion,
    suggestions,
    unmatched,
)
from shardkit.errors import UsageError


def test_leaves_plain_names_alone() -> None:
    assert escape("model.layers.0.weight") == "model.layers.0.weight"


def test_escapes_what_a_terminal_acts_on() -> None:
    assert escape("a\x1b[31mb\n") == "a\\x1b[31mb\\n"
    assert escape("a\u202eb") == "a\\u202eb"
    assert escape("a\ud800b") == "a\\ud800b"
    assert escape("a\\nb") == "a\\\\nb"


@given(st.text(st.characters(exclude_categories=())))
def test_always_printable_and_short(name: str) -> None:
    shown = escape(name)
    assert shown.isprintable()
    shown.encode()
    assert len(shown) <= 10 * 203


def test_cuts_very_long_names() -> None:
    assert len(escape("a" * 100_000)) == 203


@pytest.mark.parametrize(
    ("name", "candidate", "is_meant"),
    [
        ("layers.0.mlp.up_proj.weight", "layers.0.mlp.up.weight", True),
        ("pooler.dense.wieght", "pooler.dense.weight", True),
        ("norm.weight", "base_model.model.model.norm.weight", True),
        ("net.layers.3.up.weight", "model.layers.3.up.weight", True),
        ("layers.2.mlp.up_proj.weight", "layers.3.mlp.up_proj.weight", False),
        ("layers.0.mlp.down_proj.weight", "layers.0.ffn_norm.weight", False),
        ("layers.0.gate_proj.weight", "layers.0.up_proj.weight", False),
        ("score.weight", "head.weight", False),
    ],
)
def test_a_name_is_suggested_only_if_it_may_be_meant(name, candidate, is_meant):
    assert nearest(name, [candidate]) == (candidate if is_meant else None)


def test_suggestions_are_the_same_for_all_layers():
    found = suggestions(
        [f"l.{n}.up.weight" for n in range(30)], [f"model.l.{n}.up.weight" for n in range(29)]
    )
    assert list(found.items())[28] == ("l.28.up.weight", "  (closest name: model.l.28.up.weight)")
    assert len(found) == 29


def test_nearest_name() -> None:
    assert nearest("up_proj", ["down_proj", "up.proj", "x"]) == "up.proj"
    assert nearest("up_proj", ["x"]) is None
    assert nearest("layer.*.up.wieght", ["layers.0.up.weight", "layers.0.x"]) == "layers.*.up.weight"
    assert nearest("layer.*.down.weight", ["layers.0.x.weight"]) is None
    assert nearest("*.lmhead.*", ["lm_head.weight"]) == "lm_head.*"
    assert nearest("*up_prj*", ["layers.0.up_proj.weight"]) == "*up_proj*"
    assert nearest("layers.*", ["model.layers.0.up.weight"]) == "*.layers.*"
    assert nearest("up\nproj", ["up\n_proj"]) == "up\\n_proj"
    assert suggestion("up_proj", ["up_prj"]) == "  (closest name: up_prj)"
    assert suggestion("up_proj", []) == ""


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1024", 1024),
        ("5GB", 5 * 10**9),
        ("5GiB", 5 << 30),
        ("512 MiB", 512 << 20),
        ("1.5gb", 1_500_000_000),
        ("0.5KiB", 512),
        (" 7 B ", 7),
        ("9007199254740993", 9007199254740993),  # above 2^53: no float on the way
        ("1.0000001PB", 1_000_000_100_000_000),
        (7, 7),
    ],
)
def test_parses_sizes(text: str | int, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GB", "-5GB", "5 G B", "5XB", "1e9", "0x10", "5.", ".5GB", "nan", "\u0665GB", "5G"]
)
def test_refuses_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (-1536, "-1.5 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 50, "3.0 PiB"),
        (3000 << 50, "3000.0 PiB"),
    ],
)
def test_formats_sizes(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


@given(st.integers(0, 1 << 60))
def test_what_is_printed_parses_to_nearly_the_same(num_bytes: int) -> None:
    assert abs(parse_size(format_size(num_bytes)) - num_bytes) <= num_bytes * 0.05 + 1


@given(st.integers(0, 10**15), st.sampled_from(["", "B", "kb", "MB", "GiB", "tib"]))
def test_whole_numbers_are_exact(number: int, unit: str) -> None:
    assert parse_size(f"{number}{unit}") == number * parse_size(f"1{unit}")


def test_globs_that_match_nothing():
    names = [
        f"model.layers.{n}.{part}.weight" for n in range(4) for part in ("up", "down", "gate", "q", "k", "v")
    ]
    lines = unmatched(["model.layer.*.up.*", "x"], names)
    assert lines[:2] == ["model.layer.*.up.*  (closest name: model.layers.*.up.*)", "x"]
    assert lines[2] == "there is model.layers.{0..3}.up.weight"
    assert lines[-1] == "... 1 more"


@given(st.lists(st.binary(min_size=1, max_size=20).map(lambda raw: raw.replace(b"\0", b"")), max_size=5))
def test_bash_gets_the_words_back_and_a_terminal_only_text(raws: list[bytes]) -> None:
    words = [in_shell(os.fsdecode(raw)) for raw in raws]
    assert all(word.isprintable() for word in words)
    given = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {' '.join(words)}"], capture_output=True, check=True, timeout=60
    )
    assert given.stdout == b"".join(raw + b"\0" for raw in raws or [b""])
