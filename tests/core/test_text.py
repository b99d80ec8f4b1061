from hypothesis import given
from hypothesis import strategies as st

from shardkit.core.text import escape, nearest, suggestion


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


def test_nearest_name() -> None:
    assert nearest("up_proj", ["down_proj", "up.proj", "x"]) == "up.proj"
    assert nearest("up_proj", ["x"]) is None
    assert nearest("up\nproj", ["up\n_proj"]) == "up\\n_proj"
    assert suggestion("up_proj", ["up_prj"]) == "  (closest name: up_prj)"
    assert suggestion("up_proj", []) == ""
