"""What consolidate answers: the result object and its parts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shardkit.transfer.checks import Unchecked


@dataclass(frozen=True, slots=True, kw_only=True)
class DTypeCount:
    """The tensors of one dtype."""

    dtype: str
    """torch's name."""
    num_tensors: int
    tensor_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedPart:
    """A part of the checkpoint that was left out."""

    what: str
    """"optimizer", "random state", a file's name, ..."""
    where: str
    """What its names begin with, or why it was not read."""
    num_tensors: int
    num_objects: int
    """Entries that are not tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidateResult:
    """What consolidate wrote, or with `dry_run` would write."""

    checkpoint: str
    """As it was given."""
    resolved: str
    """The checkpoint that was taken."""
    reason: str
    """Why that one."""
    step: int | None
    """Its training step, where that is known."""
    format: str
    """Stable identifier, e.g. "dcp", "lightning", "verl"."""
    writer: str
    """Who wrote it, for people."""
    output: str
    """Directory of the model."""
    dry_run: bool
    kind: str
    """What was written: "model", "adapter", or "merged", an adapter added to its model."""
    weights: str
    """"model", "ema", ..."""
    root: str
    """What was taken as the model's beginning, dotted; empty for the top."""
    stripped: tuple[tuple[str, int], ...]
    """(prefix or segment that was taken out of names, of how many)."""
    renamed: tuple[tuple[str, str, int], ...]
    """(prefix of names in memory, the Hub's in its place, of how many); whole names have no dot at the end."""
    skipped: tuple[SkippedPart, ...]
    candidates: tuple[str, ...]
    """Other roots with weights of their own."""
    base: str | None
    """The model whose config and files were taken."""
    model_class: str | None
    """The class that the config names."""
    assets: tuple[str, ...]
    """Names of the files beside the weights."""
    ties: tuple[tuple[str, str], ...]
    """(name that is kept, its equal that is left out)."""
    untied: tuple[tuple[str, str], ...]
    """(embedding, output layer) that ought to be tied and differ: both are kept."""
    cast: str
    """"keep", "base", "bf16", "fp16" or "fp32"."""
    dtypes: tuple[DTypeCount, ...]
    """Of what is written."""
    num_tensors: int
    num_parameters: int
    """Numbers in all tensors."""
    num_files: int
    """Weight files."""
    file_names: tuple[str, ...]
    """Of the weight files."""
    file_bytes: tuple[int, ...]
    """Size of each weight file."""
    read_bytes: int
    """Of the checkpoint's tensors, once."""
    written_bytes: int
    """Size of all weight files."""
    checked: bool
    """The bytes of the checkpoint were compared with the checksums in it before any was moved."""
    checked_bytes: int
    """Of the source: compared, as they moved, with the CRC-32 recorded for them."""
    unchecked: tuple[Unchecked, ...]
    """What could not be compared, by reason."""
    source_manifests: tuple[str, ...]
    """Manifests of shardkit's that were compared with, beside what the files record."""
    peak_memory_bytes: int
    """Bound on the buffers, beside the interpreter and the plan."""
    free_bytes: int
    """On the destination's file system, before writing."""
    resumed_files: int
    """Files that an interrupted run had finished."""
    pushed_to: str | None
    """Address of the repo on the Hub."""
    elapsed_s: float
    unloadable: tuple[str, ...] = ()
    """Why `from_pretrained` would not load all weights of the output; in `warnings` too."""
    held_against: str | None = None
    """What told whether `from_pretrained` finds all weights: "base", "class", or None: then names and shapes alone did,
    and a note says why."""
    missing: tuple[str, ...] = ()
    """Names of all weights that the class says `from_pretrained` would initialise at random."""
    misfits: tuple[tuple[str, str], ...] = ()
    """(name, why) of weights that the class says `from_pretrained` would refuse the output for."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return asdict(self)
