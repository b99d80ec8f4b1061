"""What consolidate answers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from shardkit.files import storage
from shardkit.formats.registry import stray_weights
from shardkit.operations.consolidate.job import ConsolidateJob
from shardkit.operations.resolve import ResolvedCheckpoint
from shardkit.operations.write import WriteResult


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
    """The beginning of its names, or why it was not read."""
    num_tensors: int
    num_objects: int
    """Entries that are not tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidateResult(WriteResult):
    """What consolidate wrote, or with `dry_run` would write. Its files are the weight files."""

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
    kind: str
    """What was written: "model", "adapter", or "merged", an adapter added to its model."""
    weights: str
    """"model", "ema", ..."""
    root: str
    """Where the model was found to begin, dotted; empty for the top."""
    stripped: tuple[tuple[str, int], ...]
    """(prefix or segment that was taken out of names, number of these names)."""
    renamed: tuple[tuple[str, str, int], ...]
    """(prefix of names in memory, the Hub's prefix instead, number of these names); a whole name has no dot at its end."""
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
    """(name that is kept, equal one that is left out)."""
    untied: tuple[tuple[str, str], ...]
    """(embedding, output layer) that ought to be tied but differ: both are kept."""
    cast: str
    """"keep", "base", "bf16", "fp16" or "fp32"."""
    dtypes: tuple[DTypeCount, ...]
    """The tensors of the output by dtype."""
    num_parameters: int
    """Elements of all tensors."""
    file_names: tuple[str, ...]
    """Names of the weight files."""
    checked: bool
    """The checkpoint was compared with the checksums in it before a byte moved."""
    pushed_to: str | None
    """Address of the repo on the Hub."""
    unloadable: tuple[str, ...] = ()
    """Why `from_pretrained` would not load all weights of the output; in `warnings` too."""
    held_against: str | None = None
    """What told whether `from_pretrained` finds all weights: "base" or "class". None if names and shapes alone told; a note
    says why."""
    missing: tuple[str, ...] = ()
    """Names of all weights that the class says `from_pretrained` would initialise at random."""
    misfits: tuple[tuple[str, str], ...] = ()
    """(name, why) of weights that the class says `from_pretrained` would refuse the output for."""


def _skipped(job: ConsolidateJob) -> tuple[SkippedPart, ...]:
    objects = frozenset(job.checkpoint.catalog.objects)
    home = job.checkpoint.path
    carried = {storage.realpath(asset.path) for asset in job.assets if asset.path is not None}
    beside = [
        (name, reason)
        for name, reason in (*job.checkpoint.skipped, *stray_weights(job.checkpoint))
        if storage.realpath(os.path.join(home, name)) not in carried
    ]
    if job.base is not None:
        said = {storage.realpath(os.path.join(home, name)) for name, _ in beside}
        beside += [
            (name, f"of the base: {what}")
            for name, what in job.base.left_out
            if storage.realpath(os.path.join(job.base.directory, name)) not in said
        ]
    return (
        *(
            SkippedPart(
                what=part.kind, where=part.path, num_tensors=part.num_tensors, num_objects=part.num_objects
            )
            for part in job.selection.skipped
            if part.path not in {module.place for module in job.modules}
        ),
        *(
            SkippedPart(what=name, where=reason, num_tensors=0, num_objects=0)
            for name, reason in beside
            if name not in objects  # counted above
        ),
    )


def _dtypes(job: ConsolidateJob) -> tuple[DTypeCount, ...]:
    counted: dict[str, list[int]] = {}
    for tensor in job.tensors:
        counts = counted.setdefault(tensor.dtype.name, [0, 0])
        counts[0] += 1
        counts[1] += tensor.nbytes
    return tuple(
        DTypeCount(dtype=name, num_tensors=number, tensor_bytes=size)
        for name, (number, size) in counted.items()
    )


def make_result(
    job: ConsolidateJob,
    resolved: ResolvedCheckpoint,
    facts: dict[str, Any],
    *,
    given: str,
    notes: tuple[str, ...],
    checked: bool,
    pushed_to: str | None,
) -> ConsolidateResult:
    """Return the result of a run.

    Args:
        job: with the answer of the model's class, if it was asked.
        resolved: the checkpoint that was taken.
        facts: of `Writer.facts`.
        given: the checkpoint, as it was given.
        notes: all of them.
        checked: the checkpoint was compared with the checksums in it first.
        pushed_to: address of the repo.
    """
    selection, answer = job.selection, job.answer
    is_asked = answer is not None and answer.failure is None
    return ConsolidateResult(
        **facts,
        checkpoint=given,
        resolved=resolved.path,
        reason=resolved.reason,
        step=resolved.step,
        format=job.checkpoint.format,
        writer=job.checkpoint.writer,
        kind=job.kind,
        weights=job.options.naming.weights,
        root=selection.root,
        stripped=tuple((rule.text, rule.num_names) for rule in selection.stripped),
        renamed=tuple((rule.old, rule.new, rule.num_names) for rule in selection.renamed),
        skipped=_skipped(job),
        candidates=selection.candidates,
        base=job.base.label if job.base else None,
        model_class=_model_class(job),
        assets=tuple(sorted([each.name for each in job.assets] + [each.file for each in job.modules])),
        ties=tuple((kept, dropped) for dropped, kept in job.ties.dropped.items()),
        untied=job.ties.diverged,
        cast=job.options.dtype,
        dtypes=_dtypes(job),
        num_tensors=len(job.tensors),
        num_parameters=sum(tensor.num_values for tensor in job.tensors),
        file_names=tuple(image.name for image in job.output),
        checked=checked,
        pushed_to=pushed_to,
        unloadable=job.unloadable,
        held_against="class" if is_asked else "base" if job.fit.is_whole else None,
        missing=answer.missing if answer is not None else (),
        misfits=answer.misfits if answer is not None else (),
        notes=notes,
    )


def _model_class(job: ConsolidateJob) -> str | None:
    named = job.base.config.get("architectures") if job.base and job.base.config else None
    name = named[0] if isinstance(named, list) and named else None
    return name if isinstance(name, str) and name.isidentifier() else None
