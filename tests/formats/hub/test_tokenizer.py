"""How many tokens a tokenizer has, by its files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import SourceError
from shardkit.formats.hub.tokenizer import open_tokenizer


@pytest.mark.parametrize(
    ("files", "tokens"),
    [
        ({"tokenizer.json": {"model": {"vocab": {"a": 0, "b": 6}}, "added_tokens": [{"id": 9}]}}, 10),
        ({"tokenizer.json": {"model": {"vocab": [["a", 0.0], ["b", -1.0]]}}}, 2),  # Unigram
        ({"vocab.json": {"a": 0, "b": 1}, "added_tokens.json": {"<x>": 4}}, 5),
        ({"vocab.txt": b"a\nb\nc\n", "tokenizer_config.json": {"added_tokens_decoder": {"3": {}}}}, 4),
        # two pieces, and a trainer's field
        ({"tokenizer.model": b"\n\x03\n\x01a\n\x03\n\x01b\x12\x02\x08\x01"}, 2),
        ({"tekken.json": {}}, None),
    ],
)
def test_a_tokenizers_tokens_are_counted(files: dict[str, Any], tokens: int | None, tmp_path: Path) -> None:
    for name, content in files.items():
        data = json.dumps(content).encode() if isinstance(content, dict) else content
        (tmp_path / name).write_bytes(data)
    assert open_tokenizer(str(tmp_path)).tokens == tokens


@pytest.mark.parametrize(
    ("name", "data"), [("tokenizer.json", b"{"), ("tokenizer.model", b"\n"), ("spiece.model", b"\x08\x01")]
)
def test_a_damaged_tokenizer_is_refused(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceError, match=name):
        open_tokenizer(str(tmp_path))
