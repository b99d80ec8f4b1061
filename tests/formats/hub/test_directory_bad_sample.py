"""The shared malformed, hostile and odd-but-legal Hub directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardkit.errors import SourceError
from shardkit.formats.hub.directory import open_model
from tests.formats.reading import expected, held

BAD = Path(__file__).parents[3] / ".." / "shared" / "fixtures" / "bad-sample"


def load_cases() -> list[dict[str, object]]:
    manifest = BAD / "manifest.json"
    if not manifest.exists():
        return []
    return [case for case in json.loads(manifest.read_text())["cases"] if case["kind"] == "hf"]


CASES = load_cases()

pytestmark = [pytest.mark.shared, pytest.mark.skipif(not CASES, reason="shared fixtures are absent")]


@pytest.mark.parametrize("case", [c for c in CASES if c["expect"] == "reject"], ids=lambda case: case["id"])
def test_refused(case):
    with pytest.raises(SourceError) as caught:
        open_model(str(BAD / case["path"]))
    assert any(name in str(caught.value) for name in case["must_mention"])
    assert str(caught.value).replace("\n", "").isprintable()


@pytest.mark.parametrize("case", [c for c in CASES if c["expect"] != "reject"], ids=lambda case: case["id"])
def test_opens_with_equal_bytes(case, monkeypatch, tmp_path):
    from safetensors.torch import load_file

    monkeypatch.setenv("SHARDKIT_CANARY", str(tmp_path / "canary"))
    catalog = open_model(str(BAD / case["path"])).catalog
    stored = {}
    for file in catalog.files:
        stored |= load_file(file.path)
    assert held(catalog) == expected(stored)
    assert not (tmp_path / "canary").exists()
