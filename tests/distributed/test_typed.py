"""What README, docs/training.md, the command line and an example say to type gives a right model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.worlds.processes import ROOT, run_script

pytestmark = [pytest.mark.prove, pytest.mark.dist]

# A job of eight GPUs becomes one of two processes.
CHANGES = {'"cuda"': '"cpu"', "(8,)": "(2,)", "dp_shard8": "dp_shard2", "Qwen/Qwen3-8B": "./my-model"}
TEXTS = {
    "README": ("README.md", "context = shardkit.prepare("),
    "three phases": ("docs/start.md", "context = shardkit.prepare("),
    "load_into": ("docs/start.md", "shardkit.load_into(model"),
    "stock": ("docs/start.md", "torch.distributed.checkpoint.load("),
    "guide": ("docs/training.md", "context = shardkit.prepare("),
}
MODELS = {
    "llama": {"model.rotary_emb.inv_freq"},
    "gemma3": {"model.rotary_emb.full_attention_inv_freq", "model.embed_tokens.embed_scale"},
}


def block_with(text: str, needle: str) -> str:
    """Return the first block of code in a document, fenced or indented, that has some words."""
    fenced = (
        block
        for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        if needle in block
    )
    found = next(fenced, None)
    if found is not None:
        return str(found)
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if needle in line and line.startswith("    "))
    start = stop = at
    while start and (lines[start - 1].startswith("    ") or not lines[start - 1]):
        start -= 1
    while stop < len(lines) and (lines[stop].startswith("    ") or not lines[stop]):
        stop += 1
    return "\n".join(line[4:] for line in lines[start:stop])


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    out: Path = tmp_path_factory.mktemp("typed")
    texts = {name: block_with((ROOT / file).read_text(), needle) for name, (file, needle) in TEXTS.items()}
    for old, new in CHANGES.items():
        texts = {name: code.replace(old, new) for name, code in texts.items()}
    run_script("distributed/typed_world.py", json.dumps({"out": str(out), "texts": texts}))
    return [json.loads((out / f"typed-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("text", [*TEXTS, "printed", "example"])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_said_gives_the_model_of_from_pretrained(
    typed: list[dict[str, list[str]]], model: str, text: str
) -> None:
    for found in typed:
        assert MODELS[model] <= set(found[f"{model} buffers"])  # in no checkpoint
        assert found[f"{model} {text}"] == []
