"""The child process that traces a model whose weights become factors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from shardkit.layout import trace_child
from shardkit.osft.modules import candidates, factor_modules, placement_fn
from shardkit.osft.plan import OsftPlan, choose_targets


def main() -> None:
    """As `layout.trace_child.main`."""
    trace_child.main(divide)


def divide(model: nn.Module, plan: Mapping[str, Any]) -> trace_child.DividedModel:
    """Put factors in the place of a plan's targets; see `layout.trace_child.Divide`."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    targets, notes = choose_targets(OsftPlan(**plan), candidates(model), model_type)
    factor_modules(model, targets)
    return trace_child.DividedModel(targets, notes, partial(placement_fn, model))
