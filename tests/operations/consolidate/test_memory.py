"""A tensor larger than `--max-memory` is converted within it: what the kernel saw, of a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.answers import HIGH_WATER, answer_of
from tests.operations.consolidate.checkpoints import save

MIB = 1 << 20
TENSOR_BYTES = 256 * MIB
MAX_MEMORY = 16 * MIB
SLACK = 24 * MIB  # code, descriptions and the allocator's own
CONSOLIDATE = f"""{HIGH_WATER}
import json, sys
import shardkit
shardkit.consolidate(sys.argv[1], sys.argv[2], root="", dtype=sys.argv[3], max_memory=int(sys.argv[4]))
print(json.dumps([high_water(), "torch" in sys.modules]))
"""
IMPORTS = f"""{HIGH_WATER}
import json, sys
import shardkit
shardkit.consolidate
if sys.argv[1] == "numpy":
    import numpy
print(json.dumps(high_water()))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = torch.arange(TENSOR_BYTES // 4096, dtype=torch.float32)
    tensor = rows.unsqueeze(1).expand(-1, 1024) + torch.arange(1024) / 1024
    return save({"w.weight": tensor.contiguous()}, tmp_path_factory.mktemp("memory") / "c")


@pytest.mark.prove
@pytest.mark.parametrize(("dtype", "imports"), [("keep", "nothing"), ("bf16", "numpy")])
def test_peak_memory(checkpoint: Path, dtype: str, imports: str, tmp_path: Path) -> None:
    peak, has_torch = answer_of(CONSOLIDATE, checkpoint, tmp_path / "out", dtype, MAX_MEMORY)
    assert not has_torch
    assert peak - answer_of(IMPORTS, imports) < MAX_MEMORY + SLACK < TENSOR_BYTES // 4
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        part = file.get_slice("w.weight")[-3:]
    rows = torch.arange(TENSOR_BYTES // 4096 - 3, TENSOR_BYTES // 4096, dtype=torch.float32)
    expected = rows.unsqueeze(1) + torch.arange(1024) / 1024
    assert torch.equal(part, expected if dtype == "keep" else expected.bfloat16())
