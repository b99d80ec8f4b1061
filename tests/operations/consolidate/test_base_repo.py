"""--base as a repo id: everything but the weights is fetched, and of the weights their headers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tests.formats.hub.test_repo import COMMIT, REPOS, fetch, hub
from tests.operations.consolidate.checkpoints import CONFIG, HEAD, assert_bit_equal, load, weights
from tests.operations.consolidate.checkpoints import save as save_checkpoint

__all__ = ["fetch", "hub"]  # fixtures
SCRIPT = """
import json, sys
import shardkit
for base, checkpoint in json.loads(sys.argv[1]):
    try:
        output = checkpoint + base.replace("/", "-")
        print(json.dumps(shardkit.consolidate(checkpoint, output, base=base).to_json()))
    except shardkit.ShardkitError as error:
        print(json.dumps(error.to_json()))
"""


@pytest.fixture
def repos(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Add repos of bases to the server's."""
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"hello",
        "training_args.bin": b"not needed",
    }
    added = {
        "org/base": {**files, "model.safetensors": save(weights(torch.bfloat16), {"format": "pt"})},
        "org/legacy": {**files, "pytorch_model.bin": b"never read"},
        "org/sentence": {
            **files,
            "model.safetensors": save(weights()),
            "modules.json": json.dumps([{"name": "1", "path": "1_Dense", "type": "Dense"}]).encode(),
            "1_Dense/model.safetensors": save({"linear.weight": torch.ones(2)}),
            "1_Dense/config.json": b"{}",
            "onnx/model.onnx": b"never read",
        },
        "org/bare": {"model.safetensors": save(weights())},
    }
    for name, content in added.items():
        monkeypatch.setitem(REPOS, name, content)
    return added


def test_only_headers_of_its_weights_are_read(
    hub: Any, fetch: Any, repos: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = save_checkpoint({"model": weights()}, tmp_path / "c")
    bases = ("org/base", "org/legacy", "org/bare", "org/nowhere")
    hub.fetched.clear()
    hub.weight_bytes = 0
    given, legacy, bare, absent = fetch(
        tmp_path / "cache", *((base, str(checkpoint)) for base in bases), script=SCRIPT
    )
    data_bytes = sum(value.nbytes for value in weights(torch.bfloat16).values())
    assert (
        hub.weight_bytes
        <= len(repos["org/base"]["model.safetensors"])
        - data_bytes
        + len(repos["org/bare"]["model.safetensors"])
        - 2 * data_bytes
    )
    fetched = {path.rpartition("/")[2] for path in hub.fetched if "/resolve/" in path}
    assert not fetched & {"training_args.bin", "pytorch_model.bin"}

    assert given["base"] == "org/base"
    assert given["assets"] == ["README.md", "chat_template.jinja", "config.json", "tokenizer.json"]
    card = (Path(given["output"]) / "README.md").read_text()
    assert card.startswith("---\nbase_model: org/base ")
    assert not any("the same as in org/base" in note for note in given["notes"])  # as it should be
    assert_bit_equal(load(given["output"]), weights())
    assert (Path(given["output"]) / "chat_template.jinja").read_bytes() == b"hello"
    assert [part["what"] for part in given["skipped"]] == ["training_args.bin"]
    assert any("were not compared" in note for note in legacy["warnings"])
    assert "has no config.json" in bare["message"]
    assert (absent["error"], absent["exit_code"]) == ("SourceError", 3)


@pytest.mark.prove
def test_modules_of_their_own_are_fetched(
    hub: Any, fetch: Any, repos: dict[str, Any], tmp_path: Path
) -> None:
    """sentence-transformers' modules.json names a directory; of it, and of nothing else, the weights are fetched."""
    checkpoint = save_checkpoint({"model": weights()}, tmp_path / "c")
    hub.fetched.clear()
    body = {name: value for name, value in weights().items() if name != HEAD}
    headless = save_checkpoint({"model": body}, tmp_path / "headless")
    pairs = [("org/sentence", str(checkpoint)), ("org/sentence", str(headless))]
    given, part = fetch(tmp_path / "cache", *pairs, script=SCRIPT)
    needed = "--fill-from-base 'lm_head.*' takes them from a base on this machine"
    assert part["hint"] == f"{needed}: `hf download org/sentence --revision {COMMIT}` brings it here"
    name = "1_Dense/model.safetensors"
    assert {name, "1_Dense/config.json", "modules.json"} <= set(given["assets"])
    assert (Path(given["output"]) / name).read_bytes() == repos["org/sentence"][name]
    assert [part["what"] for part in given["skipped"]] == ["training_args.bin", "onnx/"]
    assert not any(
        path.endswith((".onnx", "training_args.bin")) for path in hub.fetched if "/resolve/" in path
    )
