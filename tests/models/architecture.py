"""What the zoo holds of an architecture: its class, a tiny config, inputs for its forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

VOCABULARY = 99
"""Words of every text model; odd, so that no number of ranks divides it."""

Inputs = Callable[[], dict[str, torch.Tensor]]


def generator(seed: int = 0) -> torch.Generator:
    """Return a generator that the seed decides."""
    return torch.Generator().manual_seed(seed)


def tokens(length: int = 9, *, batch: int = 2, seed: int = 0) -> torch.Tensor:
    """Return token ids that are no special tokens, which are below 5."""
    return torch.randint(5, 90, (batch, length), generator=generator(seed))


def noise(*shape: int) -> torch.Tensor:
    """Return pixels or sound in fp32, as processors give them."""
    return torch.randn(shape, generator=generator(1))


def text() -> dict[str, torch.Tensor]:
    """Return inputs of a decoder or an encoder."""
    return {"input_ids": tokens()}


def masked() -> dict[str, torch.Tensor]:
    """Return inputs of an encoder, the second row padded."""
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, -3:] = 0
    return {"input_ids": tokens(), "attention_mask": mask}


def translation() -> dict[str, torch.Tensor]:
    """Return inputs of an encoder and a decoder."""
    return {"input_ids": tokens(), "decoder_input_ids": tokens(5, seed=2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model of the zoo."""

    name: str
    """transformers' `model_type`; after a "+" what tells it from others of that type."""
    kind: str
    """The group in which the documentation shows it."""
    model_class: str
    """A class of transformers."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Of the smallest model that has every part."""
    inputs: Inputs = text
    names: str = "hub"
    """Of the tensors in its file: "hub", those that `save_pretrained` gives it, "live", those of the model in memory, or "repo", those
    of a real repo."""

    @property
    def model_type(self) -> str:
        """What AutoConfig calls it."""
        return self.name.partition("+")[0]
