"""What the other tests show on the CPU, on a GPU with nccl."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.worlds.processes import ROOT, agent_store

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

START = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import shardkit
source, model_directory, strategy, dtype = sys.argv[1:]
torch.cuda.set_device(0)
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp_shard",))
context = shardkit.prepare(model_directory, source, dtype=dtype)
model = shardkit.finalize(shardkit.wrap(context.model, mesh, mixed_precision=None), context, strategy=strategy)
from transformers import AutoModelForCausalLM
expected = AutoModelForCausalLM.from_pretrained(model_directory, dtype=dtype).state_dict()
found = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in model.state_dict().items()}
assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
for name, value in expected.items():
    assert found[name].is_cuda
    assert found[name].dtype == value.dtype
    assert torch.equal(found[name].cpu(), value), name
tokens = torch.arange(16, device="cuda").unsqueeze(0)
model(input_ids=tokens, labels=tokens).loss.backward()
assert float(shardkit.clip_grad_norm_(model, 1.0)) > 0
print("equal")
dist.destroy_process_group()
"""

FACTORS = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import shardkit
model_directory, strategy = sys.argv[1:]
torch.cuda.set_device(0)
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp_shard",))
context = shardkit.prepare(model_directory, model_directory, osft=0.3)
model = shardkit.finalize(shardkit.wrap(context.model, mesh, mixed_precision=None), context, strategy=strategy)
from transformers import AutoModelForCausalLM
dense = AutoModelForCausalLM.from_pretrained(model_directory, dtype="float32").cuda()
tokens = torch.arange(16, device="cuda").unsqueeze(0)
assert all(parameter.is_cuda for parameter in model.parameters())
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = shardkit.osft_optimizer(model, torch.optim.AdamW(trained, lr=1e-3))
found = model(input_ids=tokens, labels=tokens)
assert (found.logits - dense(input_ids=tokens).logits).abs().max() < 1e-5
found.loss.backward()
optimizer.step()
assert shardkit.osft_leak(model) < 1e-6
print("equal")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", ["direct", "broadcast"])
@pytest.mark.parametrize("kind", ["hub", "presharded"])
def test_weights_are_the_whole_models(kind: str, strategy: str, dtype: str, tmp_path: Path) -> None:
    import shardkit
    from tests.training.models import save

    save("llama-tied", tmp_path / "model")
    source = tmp_path / "model"
    if kind == "presharded":
        source = tmp_path / "presharded"
        shardkit.preshard(str(tmp_path / "model"), str(source), world_size=1)
    _run(START, str(source), str(tmp_path / "model"), strategy, dtype)


@pytest.mark.parametrize("strategy", ["direct", "broadcast"])
def test_factors_are_computed_and_trained(strategy: str, tmp_path: Path) -> None:
    from tests.training.models import save

    save("llama-tied", tmp_path / "model")
    _run(FACTORS, str(tmp_path / "model"), strategy)


def _run(script: str, *arguments: str) -> None:
    place = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }
    with agent_store() as rendezvous:
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            env={**os.environ, **rendezvous, **place},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.stdout.endswith("equal\n"), done.stderr
