"""What every format of sharded checkpoint opens to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from shardkit.core.catalog import Catalog
from shardkit.formats.optimizer import OptimizerState, Unmapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A sharded checkpoint, opened: names, dtypes, shapes and places; no tensor data."""

    path: str
    """The directory or file that was opened."""
    format: str
    """Stable identifier, e.g. "dcp", "dcp-hf", "lightning", "accelerate", "verl", "deepspeed-zero3", "hub"."""
    writer: str
    """Who wrote it, for people, e.g. "Lightning FSDPStrategy"."""
    catalog: Catalog
    """Every tensor of it, model or not, under its stored name. Extents may still be records (`encoding`)."""
    select: Callable[[Collection[str]], Catalog]
    """Return a catalog of some of the tensors, in the order given, whose extents are raw bytes. Opens and checks their
    records and nothing else.

    Raises:
        SourceError, IntegrityError, ResourceError: naming file and tensor; all problems of a kind at once.
    """
    check: Callable[[Collection[str]], Iterator[str]] | None = None
    """Read the bytes of some tensors and yield one line for each that differs from the CRC-32 recorded with it, naming
    tensor and file. None where the format records none."""
    roots: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    """Paths that the format itself gives a meaning: "model", "optimizer", "ema" -> prefix path of their state dicts. A
    root that is the empty tuple holds everything. Absent where only the names can tell."""
    refused_weights: Mapping[str, str] = field(default_factory=dict)
    """Kinds of weights that are there but cannot be recovered, with the reason, e.g. {"ema": "..."}."""
    optimizer: Callable[[], OptimizerState | Unmapped] | None = None
    """Open the optimizer's state, which the catalog does not have: it lies in files or entries of its own. None where
    there is none, or where the catalog has it.

    Raises:
        SourceError, IntegrityError, ResourceError: as opening does.
    """
    has_boxes: bool = True
    """Whether the chunks are how tensors were cut for ranks. Flat partitions, and tensors saved whole, say nothing of it."""
    assets: tuple[str, ...] = ()
    """Directories with config, tokenizer and the like that belong to the model, best first."""
    skipped: tuple[tuple[str, str], ...] = ()
    """(file or entry, why it was not read)."""
    notes: tuple[str, ...] = ()
    """What a person should be told."""
