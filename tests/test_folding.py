from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit._folding import FoldedNames, fold, fold_lines, format_numbers, merge_ranges, template


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
        FoldedNames("layers.{0,1}.up", 2, 0),
        FoldedNames("layers.{2..5}.experts.{0..7}.up", 32, 0),
    ]


def test_a_layer_that_lacks_an_expert_stands_apart():
    names = [f"l.{n}.e.{e}" for n in range(3) for e in range(3) if (n, e) != (1, 2)]
    assert [f.pattern for f in fold((name, 0) for name in names)] == ["l.{0,2}.e.{0..2}", "l.1.e.{0,1}"]


def test_other_keys_are_not_folded_together():
    found = fold([("l.0.w", "bf16"), ("l.1.w", "fp32"), ("l.2.w", "bf16")])
    assert found == [FoldedNames("l.{0,2}.w", 2, "bf16"), FoldedNames("l.1.w", 1, "fp32")]


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
    assert merge_ranges(texts) == "99 to 8,064 of 9,000 in bf16 (0.1 to 99%), -2 to 1e-05"
    assert merge_ranges(["box at [0, 1,200, 4]", "box at [2, 1,200, 4]"]) == "box at [0 to 2, 1,200, 4]"
    assert template("fp16") == "fp16"
