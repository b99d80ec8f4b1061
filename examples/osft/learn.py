"""Train an encoder and a head on a task, and judge them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tasks import Examples
from torch import Tensor, nn
from torch.nn import functional

BATCH = 16
HEAD_RATE = 1e-2
"""Learning rate of a task's head, which starts from nothing."""
SCALE = 8.0
"""Length of an embedding: at length 1, a head's logits would stay close together."""


def embed(model: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over each excerpt's tokens, at one length: (number, hidden)."""
    hidden = model(input_ids=tokens, attention_mask=mask).last_hidden_state
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return SCALE * functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1)


@torch.no_grad()
def judge(model: nn.Module, head: nn.Module, examples: Examples) -> tuple[float, float]:
    """Return accuracy and mean loss."""
    parts = zip(examples.tokens.split(64), examples.mask.split(64), strict=True)
    logits = torch.cat([head(embed(model, *part)) for part in parts])
    right = (logits.argmax(dim=1) == examples.labels).double().mean()
    return float(right), float(functional.cross_entropy(logits, examples.labels))


def train(
    model: nn.Module,
    head: nn.Module,
    examples: Examples,
    *,
    rate: float,
    num_steps: int,
    seed: int,
    hook: Callable[[nn.Module, torch.optim.Optimizer], object] | None = None,
) -> None:
    """Train what requires a gradient, with AdamW.

    Args:
        model: an encoder, without dropout: runs this short do not overfit.
        head: of this task.
        examples: to learn from.
        rate: highest learning rate of the encoder, after five steps; from there it falls to zero.
        num_steps: of `BATCH` examples.
        seed: of the order of the examples.
        hook: called with model and optimizer: `shardkit.osft_optimizer` for a model with factors.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": parameters, "lr": rate}, {"params": list(head.parameters()), "lr": HEAD_RATE}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    if hook is not None:
        hook(model, optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 5) * (1 - step / num_steps)
    )
    generator, number = torch.Generator().manual_seed(seed), len(examples.labels)
    rounds = [torch.randperm(number, generator=generator) for _ in range(1 + num_steps * BATCH // number)]
    for batch in torch.cat(rounds).split(BATCH)[:num_steps]:
        logits = head(embed(model, examples.tokens[batch], examples.mask[batch]))
        functional.cross_entropy(logits, examples.labels[batch]).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
