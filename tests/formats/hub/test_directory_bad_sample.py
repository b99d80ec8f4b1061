"""The shared malformed, hostile and odd-but-legal Hub directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardkit.errors import SourceError
from shardkit.formats.hub.directory import open_model

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
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    monkeypatch.setenv("SHARDKIT_CANARY", str(tmp_path / "canary"))
    catalog = open_model(str(BAD / case["path"])).catalog
    expected = {}
    for file in catalog.files:
        expected |= load_file(file.path)
    assert set(catalog.tensors) == set(expected)
    for fqn, entry in catalog.tensors.items():
        (chunk,) = entry.chunk_ids
        file = catalog.files[catalog.chunks.file[chunk]]
        start, nbytes = catalog.chunks.start[chunk], catalog.chunks.nbytes[chunk]
        found = Path(file.path).read_bytes()[start : start + nbytes]
        tensor = expected[fqn]
        assert (entry.shape, f"torch.{entry.dtype.name}") == (tuple(tensor.shape), str(tensor.dtype))
        flat = tensor.contiguous().reshape(-1)
        assert found == (flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    assert not (tmp_path / "canary").exists()
