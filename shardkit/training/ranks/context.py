"""What prepare decides once and the later phases carry out, and the names by which they know a model's tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardkit._torch import non_persistent_buffers
from shardkit.core.catalog import Catalog
from shardkit.core.regions import Region, full_region
from shardkit.keys.names import clean_name
from shardkit.keys.peft import base_name
from shardkit.keys.renaming import find_rules
from shardkit.transfer.checks import CheckedSource

KeyRules = tuple[tuple[str, str], ...]
"""(prefix of a model's names, the Hub's prefix in its place), as `keys.renaming.KeyRule` spells them."""

_ATTRIBUTE = "_shardkit_key_rules"


class Place(NamedTuple):
    """A parameter or buffer where a module has it."""

    fqn: str
    """Without what wrappers put in."""
    path: str
    """Of the module, with what wrappers put in."""
    module: nn.Module
    name: str
    """In the module."""
    tensor: torch.Tensor
    kind: str
    """"parameter" or "buffer"."""
    persistent: bool
    """It is in the model's state dict."""


def full_name(path: str, name: str) -> str:
    """Return the FQN of what a module at `path` calls `name`, without what wrappers put in."""
    return clean_name(f"{path}.{name}" if path else name)


def places(model: nn.Module, *, once: bool = False) -> Iterator[Place]:
    """Yield every parameter and buffer, module by module, ties under all of their names.

    Args:
        model: wrapped or not.
        once: list a module that lies at several paths at the first of them only.
    """
    for path, module in model.named_modules(remove_duplicate=once):
        hidden = non_persistent_buffers(module)
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            yield Place(full_name(path, name), path, module, name, parameter, "parameter", True)
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            yield Place(full_name(path, name), path, module, name, buffer, "buffer", name not in hidden)


def buffer_places(model: nn.Module, *, once: bool = False) -> Iterator[Place]:
    """Yield every buffer, as `places` does."""
    return (place for place in places(model, once=once) if place.kind == "buffer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTensor:
    """A parameter or buffer as the plain model has it."""

    fqn: str
    """Its first name in the model, without wrappers."""
    shape: tuple[int, ...]
    """Of the whole tensor, in elements."""
    dtype: torch.dtype
    """What the filled tensor must have."""
    kind: str
    """"parameter" or "buffer"."""
    persistent: bool
    """It is in the model's state dict, under at least one of its names."""


def distinct(model: nn.Module) -> list[tuple[tuple[str, ...], torch.Tensor, ExpectedTensor]]:
    """Return every parameter, then every buffer, once: its names, the first one first, the tensor, and what it is."""
    groups: dict[int, list[Place]] = {}
    for place in places(model):
        groups.setdefault(id(place.tensor), []).append(place)
    found = []
    for group in sorted(groups.values(), key=lambda group: group[0].kind != "parameter"):
        first = group[0]
        expected = ExpectedTensor(
            fqn=first.fqn,
            shape=tuple(first.tensor.shape),
            dtype=first.tensor.dtype,
            kind=first.kind,
            persistent=any(place.persistent for place in group),
        )
        found.append((tuple(dict.fromkeys(place.fqn for place in group)), first.tensor, expected))
    return found


def describe(model: nn.Module) -> tuple[dict[str, ExpectedTensor], tuple[tuple[str, ...], ...]]:
    """Return every parameter and buffer of a model by its first name, and the groups of names that share one."""
    found = distinct(model)
    ties = tuple(names for names, _, _ in found if len(names) > 1)
    return {expected.fqn: expected for _, _, expected in found}, ties


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A source of weights, opened for one model: no tensor has been read."""

    path: str
    """Where it lies, for messages."""
    catalog: Catalog
    """Of the tensors that the model wants, under their stored names; extents are raw bytes. If there is an
    `open_chunks`, it has no chunks yet."""
    names: Mapping[str, str]
    """The model's FQN -> stored name. A tie may have all of its names here, or one of them."""
    identity: str
    """Hex digest that is the same for every copy of these weights, whatever its path and times: of the manifest, or
    of sizes and headers."""
    unused: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape of every weight of the source that the model has no place for, by its stored name."""
    made: frozenset[str] = frozenset()
    """FQNs that the source lacks and that the model makes itself, as its class says: sinusoids, masks."""
    follows_class: bool = False
    """The model is one of transformers. Whatever else the source has is left out, as by `from_pretrained`."""
    fused: Mapping[str, str] = field(default_factory=dict)
    """Stored name -> FQN, where the model holds several stored tensors as one, or one in another form."""
    quantised: str | None = None
    """What shows that the stored values mean nothing by themselves."""
    notes: tuple[str, ...] = ()
    """What a person should be told."""
    key_rules: KeyRules | None = None
    """They turn the model's names into the Hub's; None if the source does not have the Hub's names."""
    open_chunks: Callable[[Mapping[str, Sequence[Region]]], Catalog] | None = None
    """Makes a catalog with the chunks of some regions, by stored name."""

    def located(self, wanted: Mapping[str, Sequence[Region]] | None = None) -> Weights:
        """Return these weights with the chunks in which some regions lie.

        Args:
            wanted: regions of tensors, in elements, by stored name; None is everything.

        Raises:
            IntegrityError, SourceError: the record of where they lie is damaged or missing.
        """
        if self.open_chunks is None:
            return self
        if wanted is None:
            wanted = {name: [full_region(entry.shape)] for name, entry in self.catalog.tensors.items()}
        return replace(self, catalog=self.open_chunks(wanted), open_chunks=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """What a model's tensors are filled with, as this rank sees it."""

    weights: Weights | None
    """None if this rank cannot open the source."""
    unavailable: str | None = None
    """Why it cannot."""
    initialised: Collection[str] = ()
    """FQNs that are not read."""
    grown: Mapping[str, int] = field(default_factory=dict)
    """FQN -> rows in the source, for tensors that are longer in the model."""


@dataclass(kw_only=True, slots=True)
class ModelInitializationContext:
    """A prepared model: what it must hold, where that comes from, and what is made anew.

    `prepare` returns it and `finalize` consumes it. It holds no weights but buffers.
    """

    model: nn.Module
    """Parameters on meta, buffers real on the CPU."""
    source: object
    """As it was given: a path, a repo id, or what `from_rank` returned; None initialises from scratch."""
    weights: Weights | None
    """None without a source, or if this rank cannot open it; `unavailable` says why."""
    unavailable: str | None = None
    """Why this rank cannot open the source that others can open."""
    expected: dict[str, ExpectedTensor] = field(default_factory=dict)
    """Every parameter and buffer (non-persistent ones too) by clean FQN, ties under their first name."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of names that are one parameter, first name first."""
    initialised: frozenset[str] = frozenset()
    """FQNs that are initialised and not read: `missing`, new heads, or everything without a source."""
    grown: dict[str, int] = field(default_factory=dict)
    """FQN -> rows in the source, for tensors that `align_vocab` made longer; the other rows are initialised."""
    seed: int = 0
    """Of everything that is initialised; the same on every rank."""
    blueprint: nn.Module | None = None
    """A copy of the plain model on meta. Its own initialisation makes what is not read; None if everything is."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Every buffer's computed value on the CPU, by clean FQN: finalize restores what a wrapper lost."""
    notes: tuple[str, ...] = ()
    """What a person should be told, once."""
    checked: CheckedSource | None = None
    """How much of the source all ranks together compared with the CRC-32s in it; `finalize` sets it."""


def key_rules(names: Mapping[str, str]) -> KeyRules | None:
    """Return the prefixes that turn a model's names into the Hub's; None for a model that PEFT has wrapped.

    Args:
        names: the model's FQN -> the Hub's name.
    """
    if any(base_name(fqn) != fqn for fqn in names):  # an adapter is saved under PEFT's own names
        return None
    return tuple((rule.old, rule.new) for rule in find_rules(names))


def remember(model: nn.Module, weights: Weights | None) -> None:
    """Keep with a model what its source told about names, for `save`; a source that tells nothing changes nothing."""
    if weights is not None and weights.key_rules is not None:
        setattr(model, _ATTRIBUTE, weights.key_rules)


def recall(model: nn.Module) -> KeyRules | None:
    """Return what was kept with a model, whatever it has been wrapped in since; None if nothing was."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    for path, module in inner.named_modules():
        if clean_name(path):
            break
        rules: KeyRules | None = getattr(module, _ATTRIBUTE, None)
        if rules is not None:
            return rules
    return None
