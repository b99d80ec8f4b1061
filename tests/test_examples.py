"""The example that users copy from, run as its docstring says; and the demo notices what it is there to notice."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import shardkit

EXAMPLES = Path(__file__).parents[1] / "examples"


def make_model(directory: Path) -> float:
    """Save a tiny Llama with tied embeddings, and return the loss that the example should print."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    tokens = torch.arange(16).unsqueeze(0)
    return float(model(input_ids=tokens, labels=tokens).loss.detach())


@pytest.mark.dist
def test_fsdp2_example_starts_from_the_presharded_weights(tmp_path: Path) -> None:
    loss = make_model(tmp_path / "model")
    shardkit.preshard(str(tmp_path / "model"), str(tmp_path / "checkpoint"), world_size=2)

    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
    script = [str(EXAMPLES / "fsdp2_load.py"), str(tmp_path / "model"), str(tmp_path / "checkpoint")]
    done = subprocess.run(
        [sys.executable, *torchrun, "--nproc-per-node", "2", *script],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr
    word, printed = done.stdout.split()
    assert word == "loss"
    assert float(printed) == pytest.approx(loss, abs=2e-6)


def write_ranks(directory: Path, embeddings: list[bytes]) -> list[dict[str, list[str]]]:
    """Write what the demo's processes leave behind; return the ranks' reports."""
    (directory / "reference.embedding").write_bytes(b"same")
    for rank, embedding in enumerate(embeddings):
        (directory / f"rank{rank}.embedding").write_bytes(embedding)
    return [{"opened": [f"__{rank}_0.distcp"]} for rank in range(len(embeddings))]


def test_demo_notices_what_differs(tmp_path: Path) -> None:
    find_problems = runpy.run_path(str(EXAMPLES / "demo" / "run.py"))["find_problems"]
    result = {"omitted": [["embeddings.position_ids", "why"]]}

    assert find_problems(tmp_path, result, write_ranks(tmp_path, [b"same", b"same"])) == []

    reports = write_ranks(tmp_path, [b"same", b"sane"])
    reports[0]["opened"].append("__1_0.distcp")
    assert find_problems(tmp_path, {"omitted": []}, reports) == [
        "rank 0 opened ['__0_0.distcp', '__1_0.distcp'], not its own file",
        "the embedding of rank 1 differs from the whole model's",
        "preshard left out [], not ['embeddings.position_ids']",
    ]
