"""What prepare decides once and the later phases carry out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardkit.core.catalog import Catalog
from shardkit.core.regions import Region, full_region
from shardkit.keys.names import clean_name as clean_name
from shardkit.keys.peft import base_name
from shardkit.keys.renaming import find_rules
from shardkit.transfer.checks import CheckedSource

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


KeyRules = tuple[tuple[str, str], ...]
"""(prefix of a model's names, the Hub's in its place), as `keys.renaming.KeyRule` spells them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTensor:
    """A parameter or buffer as the plain model has it."""

    fqn: str
    """Its first name in the model, without wrappers."""
    shape: tuple[int, ...]
    """Of the whole tensor, in elements."""
    dtype: torch.dtype
    """What the filled tensor is to have."""
    kind: str
    """"parameter" or "buffer"."""
    persistent: bool
    """It stands in the model's state dict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A source of weights, opened for one model: no tensor has been read."""

    path: str
    """Where it lies, for messages."""
    catalog: Catalog
    """Of the tensors that the model wants, under their stored names; extents are raw bytes. It has no chunks yet where
    there is an `open_chunks`."""
    names: Mapping[str, str]
    """The model's FQN -> stored name. A tie's names may all be there, or one of them."""
    identity: str
    """Hex digest that is the same for every copy of these weights, whatever its path and times: of the manifest, or
    of sizes and headers."""
    presharded: str | None = None
    """Directory that preshard wrote, with a chunk list for each file; None for any other source."""
    unused: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape of every weight of the source that the model has no place for, by its stored name."""
    made: frozenset[str] = frozenset()
    """FQNs that the source lacks and that the model makes itself, as its class says: sinusoids, masks."""
    follows_class: bool = False
    """The model is transformers': what else the source has is left out, as `from_pretrained` does."""
    fused: Mapping[str, str] = field(default_factory=dict)
    """Stored name -> FQN, where the model holds several stored tensors as one, or one in another form."""
    quantised: str | None = None
    """What shows that the stored values mean nothing by themselves."""
    notes: tuple[str, ...] = ()
    """What a person should be told."""
    key_rules: KeyRules | None = None
    """What makes the Hub's names of the model's; None where the source does not have the Hub's."""
    open_chunks: Callable[[Mapping[str, Sequence[Region]]], Catalog] | None = None
    """Makes a catalog with the chunks of some regions, by stored name."""

    def located(self, wanted: Mapping[str, Sequence[Region]] | None = None) -> Weights:
        """Return these weights with the chunks in which some regions lie.

        Args:
            wanted: regions of tensors, in elements, by stored name; None is all there is.

        Raises:
            IntegrityError, SourceError: what says where they lie is damaged or not there.
        """
        if self.open_chunks is None:
            return self
        if wanted is None:
            wanted = {name: [full_region(entry.shape)] for name, entry in self.catalog.tensors.items()}
        return replace(self, catalog=self.open_chunks(wanted), open_chunks=None)


@dataclass(kw_only=True, slots=True)
class ModelInitializationContext:
    """A prepared model: what it is to hold, where that comes from, and what is made anew.

    Returned by `prepare`, consumed by `finalize`. It holds no weights but buffers.
    """

    model: nn.Module
    """Parameters on meta, buffers real on the CPU."""
    source: object
    """As it was given: a path, a repo id, or what `from_rank` returned; None initialises from scratch."""
    weights: Weights | None
    """None without a source, or where this rank cannot open it; `unavailable` says why."""
    unavailable: str | None = None
    """Why this rank cannot open the source, where others can."""
    expected: dict[str, ExpectedTensor] = field(default_factory=dict)
    """Every parameter and buffer (non-persistent ones too) by clean FQN, ties under their first name."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of names that are one parameter, first name first."""
    initialised: frozenset[str] = frozenset()
    """FQNs that are initialised and not read: `missing`, new heads, or everything without a source."""
    grown: dict[str, int] = field(default_factory=dict)
    """FQN -> rows that the source has, for tensors that were made longer (`align_vocab`); the rest is initialised."""
    seed: int = 0
    """Of everything that is initialised; the same on every rank."""
    blueprint: nn.Module | None = None
    """A copy of the plain model on meta, whose own initialisation makes what is not read; None when nothing is."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Every buffer's computed value on the CPU, by clean FQN: finalize restores what a wrapper lost."""
    notes: tuple[str, ...] = ()
    """What a person should be told, once."""
    checked: CheckedSource | None = None
    """How much of the source all ranks together compared with the CRC-32s in it; `finalize` sets it."""
