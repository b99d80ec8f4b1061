"""Which tensors a cast of the model, or of the optimizer's state, is about.

A cast must never round a count: a step of 257 is 256 in bfloat16. So scalars stay, wherever they are, and so
does what schedulers, data loaders and random generators keep; `load_state_dict` converts them when it has to.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardkit.core.catalog import TensorEntry
from shardkit.keys.tree import Kind, object_kind, optimizer_names

_HEAD = 3  # segments that trainers put above a state dict: app.optimizers, policy.optimizer.optim
_SMALL = 4096  # elements: nobody but a model has more under such a name


def optimizer_state(entries: Iterable[TensorEntry], folder: str) -> frozenset[str]:
    """Return the names of an optimizer's state: told by its leaves, or by where it stands.

    Args:
        entries: of one folder.
        folder: where it lies in the checkpoint; a folder of an optimizer (`optimizer_0`) holds nothing else.
    """
    found = list(entries)
    # OLMo-core's model_and_optim holds both
    if any(object_kind(step) == "optimizer" and "model" not in step for step in folder.split("/")):
        return frozenset(entry.fqn for entry in found)
    names = optimizer_names(found)
    return frozenset(
        entry.fqn for entry in found if entry.fqn in names or "optimizer" in _kinds_above(entry.fqn)
    )


def is_convertible(entry: TensorEntry, *, is_optimizer: bool) -> bool:
    """True for a tensor whose values a cast may round."""
    if not entry.shape or not entry.dtype.is_floating or not entry.dtype.is_convertible:
        return False
    if is_optimizer:
        return entry.num_elements > 1  # some keep their step count in a tensor of one element
    return entry.num_elements > _SMALL or not any(_kinds_above(entry.fqn))


def _kinds_above(name: str) -> list[Kind | None]:
    return [object_kind(step) for step in name.split(".")[:_HEAD]]
