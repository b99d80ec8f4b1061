"""A fused tensor four times larger than `--max-memory`, made and taken apart within it: what the kernel saw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.answers import HIGH_WATER, answer_of

MIB = 1 << 20
NUM_EXPERTS, ROWS, COLUMNS = 32, 1024, 2048  # 256 MiB of experts
FUSED_BYTES = 2 * NUM_EXPERTS * ROWS * COLUMNS * 2
MAX_MEMORY = FUSED_BYTES // 4  # 64 MiB
SLACK = 32 * MIB  # code, numpy, descriptions and the allocator's own
RULES = """
format = 1
[[rule]]
hub = ["experts.{{e}}.gate", "experts.{{e}}.up"]
model = "gate_up"
steps = [{steps}]
"""
STEPS = {
    "as they lie": "{ stack = 'e' }, { concat = 1 }",
    "reordered": "{ permute = [1, 0] }, { stack = 'e' }, { concat = 2 }",
}
RUN = f"""{HIGH_WATER}
import json, sys
import numpy
import shardkit
shardkit.preshard, shardkit.consolidate
if sys.argv[1] == "preshard":  # records are made by torch's own writer
    import torch
    torch.save(torch.ones(2), "/dev/null")
before = high_water()
verb, source, output, options = sys.argv[1:]
getattr(shardkit, verb)(source, output, **json.loads(options))
print(json.dumps([high_water() - before, "torch" in sys.modules]))
"""


def run(verb: str, source: Path, output: Path, **options: Any) -> tuple[int, bool]:
    peak, has_torch = answer_of(RUN, verb, source, output, json.dumps(options))
    return peak, has_torch


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("experts")
    block = torch.arange(ROWS * COLUMNS, dtype=torch.int16).reshape(ROWS, COLUMNS)
    tensors = {
        f"experts.{expert}.{part}": block + 2 * expert + (part == "up")
        for expert in range(NUM_EXPERTS)
        for part in ("gate", "up")
    }
    save_file(tensors, home / "model.safetensors", {"format": "pt"})
    return home


@pytest.mark.prove
@pytest.mark.parametrize("how", STEPS)
def test_peak_memory_both_ways(how: str, hub: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES.format(steps=STEPS[how]))
    common = {"keys": str(rules), "max_memory": MAX_MEMORY}
    peak, _ = run("preshard", hub, tmp_path / "sharded", world_size=3, wrap="none", **common)
    assert peak < MAX_MEMORY + SLACK < FUSED_BYTES // 2
    peak, has_torch = run(
        "consolidate", tmp_path / "sharded", tmp_path / "back", keys="none", max_memory=MAX_MEMORY
    )
    assert not has_torch
    assert peak < MAX_MEMORY + SLACK < FUSED_BYTES // 2
    back, expected = load_file(tmp_path / "back" / "model.safetensors"), load_file(hub / "model.safetensors")
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], expected[name]) for name in back)
