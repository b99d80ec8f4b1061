from __future__ import annotations

import os
import re
import subprocess
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.core.text import (
    Fold,
    escape,
    fold,
    fold_lines,
    format_numbers,
    format_size,
    in_shell,
    nearest,
    nothing_left,
    parse_size,
    spread,
    suggestion,
    suggestions,
    template,
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


def expand(pattern):
    """Return the names that a pattern stands for, as a shell expands braces."""
    pieces = re.split(r"\{([^}]*)\}", pattern)
    choices = [[piece] if n % 2 == 0 else numbers(piece) for n, piece in enumerate(pieces)]
    return ["".join(parts) for parts in product(*choices)]


def numbers(text):
    found = []
    for part in text.split(","):
        first, *rest = map(int, part.split(".."))
        last, step = rest[0] if rest else first, rest[1] if len(rest) > 1 else 1
        found += range(first, last + 1, step)
    return list(map(str, found))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([7], "7"),
        ([0, 1], "{0,1}"),
        ([0, 1, 2], "{0..2}"),
        ([1, 3, 5, 7], "{1..7..2}"),
        ([3, 7], "{3,7}"),
        ([0, 1, 2, 5, 9, 10, 11], "{0..2,5,9..11}"),
    ],
)
def test_numbers(values, text):
    assert format_numbers(values) == text


def test_layers_and_experts():
    names = [f"layers.{n}.up" for n in range(2)]
    names += [f"layers.{n}.experts.{e}.up" for n in range(2, 6) for e in range(8)]
    assert fold((name, 0) for name in names) == [
        Fold("layers.{0,1}.up", 2, 0),
        Fold("layers.{2..5}.experts.{0..7}.up", 32, 0),
    ]


def test_a_layer_that_lacks_an_expert_stands_apart():
    names = [f"l.{n}.e.{e}" for n in range(3) for e in range(3) if (n, e) != (1, 2)]
    assert [f.pattern for f in fold((name, 0) for name in names)] == ["l.{0,2}.e.{0..2}", "l.1.e.{0,1}"]


def test_other_keys_are_not_folded_together():
    found = fold([("l.0.w", "bf16"), ("l.1.w", "fp32"), ("l.2.w", "bf16")])
    assert found == [Fold("l.{0,2}.w", 2, "bf16"), Fold("l.1.w", 1, "fp32")]


@pytest.mark.parametrize(
    "names", [["a.01", "a.1"], ["conv1.w", "conv2.w"], [""], ["a.\u0663"], ["a.9999999999"]]
)
def test_left_as_they_are(names):
    assert [f.pattern for f in fold((name, 0) for name in names)] == names


part = st.sampled_from(["a", "w", "0", "1", "2", "3", "4", "7", "10", "01"])


@given(
    st.lists(st.lists(part, min_size=1, max_size=4).map(".".join), unique=True, max_size=60),
    st.integers(1, 3),
)
def test_patterns_stand_for_exactly_the_names(names, num_keys):
    keys = {name: len(name) % num_keys for name in names}
    found = fold(keys.items())
    expanded = [(name, f.key) for f in found for name in expand(f.pattern)]
    assert sorted(expanded) == sorted(keys.items())
    assert all(f.count == len(expand(f.pattern)) for f in found)


def patterns(lines, **options):
    return [(each.pattern, each.count) for each in fold_lines(lines, **options)]


def test_lines_about_ranks_are_one_in_natural_order():
    lines = sorted(f"not read: rng_state_{n}.pth: state of the trainer" for n in range(64))
    assert patterns([*lines, "a"]) == [
        ("not read: rng_state_{0..63}.pth: state of the trainer", 64),
        ("a", 1),
    ]


def test_numbers_that_go_together_are_one():
    assert patterns(f"layers.{n}.a = layers.{n}.b" for n in range(3)) == [
        ("layers.{0..2}.a = layers.{0..2}.b", 3)
    ]
    crossed = [f"l.{a}.w in __{b}_0.distcp" for a in range(2) for b in range(4)]
    assert patterns(crossed) == [("l.{0,1}.w in __{0..3}_0.distcp", 8)]


@pytest.mark.parametrize(
    "lines",
    [
        ["layers.0.w: [0, 1]", "layers.1.w: [0, 2]"],
        ["1.5 GiB", "1.6 GiB"],
        ["off by 1e-10", "off by 1e-11"],
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ["rank 1", "rank 2"],
        [""],
    ],
)
def test_other_numbers_keep_lines_apart(lines):
    assert patterns(lines) == [(line, 1) for line in lines]


def test_a_line_that_repeats_is_written_once_and_counted():
    assert patterns(["x.0.y", "x.0.y", "x.1.y"]) == [("x.{0,1}.y", 3)]


def test_three_lines_or_more_show_the_least_and_the_most():
    lines = [f"l.{n}.w [{n}:{n + 1}]: bytes {n * 10} to {n * 10 + 10}, {n + 7:,} off" for n in range(12)]
    assert patterns(lines[:2], spreads=True) == [(line, 1) for line in lines[:2]]
    assert patterns(lines, spreads=True) == [("l.{0..11}.w [0:12]: bytes 0 to 120, 7 to 18 off  x12", 12)]
    same = ["w: bytes 1 to 2", "w: bytes 3 to 4", "w: bytes 5 to 6"]
    assert patterns(same, spreads=True) == [(line, 1) for line in same]


def test_spread_numbers():
    texts = ["8,064 of 9,000 in bf16 (0.1%), 1e-05", "99 of 9,000 in bf16 (99%), -2"]
    assert len(set(map(template, texts))) == 1
    assert spread(texts) == "99 to 8,064 of 9,000 in bf16 (0.1 to 99%), -2 to 1e-05"
    assert template("fp16") == "fp16"


def test_globs_that_match_nothing():
    names = [
        f"model.layers.{n}.{part}.weight" for n in range(4) for part in ("up", "down", "gate", "q", "k", "v")
    ]
    lines = unmatched(["model.layer.*.up.*", "x"], names)
    assert lines[:2] == ["model.layer.*.up.*  (closest name: model.layers.*.up.*)", "x"]
    assert lines[2] == "there is model.layers.{0..3}.up.weight"
    assert lines[-1] == "... 1 more"
    error = nothing_left(["model.layer.*", "model.*"], names, 24)
    assert error.message == "include and exclude leave none of 24 tensors"
    assert error.problems[0] == "model.layer.*  (closest name: model.layers.*)"
    assert "there is model.layers.{0..3}.q.weight" in error.problems


@given(st.lists(st.binary(min_size=1, max_size=20).map(lambda raw: raw.replace(b"\0", b"")), max_size=5))
def test_bash_gets_the_words_back_and_a_terminal_only_text(raws: list[bytes]) -> None:
    words = [in_shell(os.fsdecode(raw)) for raw in raws]
    assert all(word.isprintable() for word in words)
    given = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {' '.join(words)}"], capture_output=True, check=True, timeout=60
    )
    assert given.stdout == b"".join(raw + b"\0" for raw in raws or [b""])
