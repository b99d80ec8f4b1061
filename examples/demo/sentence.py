"""The sentence of the demo, and what both sides do with it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

SENTENCE = "Every rank opens its own file, reads it once, and is ready to train."


def embed(model: nn.Module, directory: str) -> Tensor:
    """Return the sentence's embedding, as this model's card computes it: the mean over tokens, length 1."""
    # Not for padding: bit equality needs the same order of additions, so the same number of threads.
    torch.set_num_threads(1)
    tokens = AutoTokenizer.from_pretrained(directory)(SENTENCE, return_tensors="pt")
    with torch.inference_mode():
        hidden: Tensor = model.eval()(**tokens).last_hidden_state
    return nn.functional.normalize(hidden.mean(dim=1), dim=1)[0]


def write_embedding(embedding: Tensor, path: str) -> None:
    """Write the numbers as they lie in memory: float32, nothing else."""
    with open(path, "wb") as file:
        file.write(embedding.contiguous().numpy().tobytes())
