"""What makes the Hub's names of a model's: found when its weights are opened, kept with it until it is saved."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardkit.keys.peft import base_name
from shardkit.keys.renaming import find_rules
from shardkit.training.ranks.context import KeyRules, Weights, clean_name

_ATTRIBUTE = "_shardkit_key_rules"


def key_rules(names: Mapping[str, str]) -> KeyRules | None:
    """Return the prefixes that make the Hub's names of a model's; None for a model that PEFT has wrapped.

    Args:
        names: the model's FQN -> the Hub's name.
    """
    if any(
        base_name(fqn) != fqn for fqn in names
    ):  # an adapter is saved under the names that PEFT has for it
        return None
    return tuple((rule.old, rule.new) for rule in find_rules(names))


def remember(model: nn.Module, weights: Weights | None) -> None:
    """Keep with a model what its source told of names; a source that tells nothing changes nothing."""
    if weights is not None and weights.key_rules is not None:
        setattr(model, _ATTRIBUTE, weights.key_rules)


def recall(model: nn.Module) -> KeyRules | None:
    """Return what was kept with a model, whatever it was wrapped in since; None where nothing was."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    for path, module in inner.named_modules():
        if clean_name(path):
            break
        rules: KeyRules | None = getattr(module, _ATTRIBUTE, None)
        if rules is not None:
            return rules
    return None
