import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.core.sizes import format_size, parse_size
from shardkit.errors import UsageError


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
def test_parses(text: str | int, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GB", "-5GB", "5 G B", "5XB", "1e9", "0x10", "5.", ".5GB", "nan", "\u0665GB", "5G"]
)
def test_refuses(text: str) -> None:
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
def test_formats(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


@given(st.integers(0, 1 << 60))
def test_what_is_printed_parses_to_nearly_the_same(num_bytes: int) -> None:
    assert abs(parse_size(format_size(num_bytes)) - num_bytes) <= num_bytes * 0.05 + 1


@given(st.integers(0, 10**15), st.sampled_from(["", "B", "kb", "MB", "GiB", "tib"]))
def test_whole_numbers_are_exact(number: int, unit: str) -> None:
    assert parse_size(f"{number}{unit}") == number * parse_size(f"1{unit}")
