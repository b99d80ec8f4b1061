"""The pictures in a terminal."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from shardkit.cli import main
from shardkit.pictures.glyphs import ASCII, BLOCKS, Row, _draw_rows, glyphs_for


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command in a terminal of a width, with an encoding."""
    monkeypatch.chdir(tmp_path)
    plain = {f"model.layers.{n}.up.weight": torch.ones(8, 4) for n in range(4)} | {
        "model.norm.weight": torch.ones(1)
    }
    for name, factor in {"tiny": 0.0, "tuned": 0.1}.items():
        (tmp_path / name).mkdir()
        tensors = {n: t * (1 + factor * int(n[13])) if "layers" in n else t for n, t in plain.items()}
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})

    def begin(*args, width=80, charset="utf-8"):
        monkeypatch.setenv("COLUMNS", str(width))
        return CliRunner(charset=charset).invoke(main, args, prog_name="shardkit")

    return begin


def drawn(result):
    """The lines of the picture: the last paragraph."""
    return result.stdout.rstrip().rpartition("\n\n")[2].splitlines()


def test_ranks_by_units(run):
    run("preshard", "tiny", "out", "--world-size", "4", "--layout", "declared")
    title, first, others = drawn(run("inspect", "out", "--picture"))
    assert title.startswith("ranks x units, in forward order (5)")
    assert first.split() == ["rank", "0", "\u2592\u2588\u2588\u2588\u2588", "\u2588" * 16, "132", "B"]
    assert others.split()[:3] == ["ranks", "1-3", "\u00b7\u2588\u2588\u2588\u2588"]
    assert others.endswith(" 128 B")


def test_modules_by_layers(run):
    title, up, norm = drawn(run("diff", "tiny", "tuned", "--stats", "--picture"))
    assert title.startswith("modules x layers (5)")
    assert up.split() == ["model.layers.#.up.weight", "\u00b7\u2593\u2588\u2588"]
    assert norm.split() == ["model.norm.weight", "\u00b7"]


def test_ascii_where_the_encoding_lacks_blocks(run):
    result = run("diff", "tiny", "tuned", "--stats", "--picture", charset="latin-1")
    assert drawn(result)[1].split() == ["model.layers.#.up.weight", ".*##"]
    assert result.stdout.isascii()
    assert [glyphs_for(each) for each in ("utf-8", "ascii", "cp1252", None, "no such")] == [
        BLOCKS,
        *[ASCII] * 4,
    ]


def test_no_colour_and_no_picture_where_nobody_wants_it(run):
    assert "\x1b" not in run("inspect", "tiny", "--picture").stdout
    assert run("inspect", "tiny", "--picture", "--json").stdout == run("inspect", "tiny", "--json").stdout
    assert run("diff", "tiny", "tuned", "--picture", "--quiet").stdout == ""


@pytest.mark.parametrize("width", [24, 40, 80, 300])
@pytest.mark.parametrize("has_total", [True, False])
def test_lines_are_no_longer_than_a_terminal_is_wide(width, has_total):
    rows = [Row("a" * 60 + str(n), [n / 100] * 200, n * 1000 if has_total else None) for n in range(100)]
    lines = list(_draw_rows(rows, width, BLOCKS))
    assert all(len(line) <= max(width, 40) for line in lines)
    assert lines[-1].strip() == "... 68 more lines, see --html"


def test_the_largest_of_neighbours_is_seen():
    (line,) = _draw_rows([Row("a", [0.0] * 499 + [1.0])], 40, ASCII)
    assert line.endswith("#")
    (line,) = _draw_rows([Row("a", [0.0, "bad"] + [0.5] * 498)], 40, ASCII)
    assert line.split()[1][0] == "X"
