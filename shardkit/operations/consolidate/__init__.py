"""consolidate: any trainer's sharded checkpoint becomes a Hub model.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from shardkit import formats
from shardkit.core.keywords import keywords_of
from shardkit.core.text import escape, listed
from shardkit.errors import Interrupted, refuse_warnings, signal_of
from shardkit.files import storage, stores
from shardkit.files.links import reading_as
from shardkit.files.location import location_of
from shardkit.formats.contract import Checkpoint, PlainWeights
from shardkit.formats.dequantize import plain_base
from shardkit.formats.folded import fold_base
from shardkit.formats.hub.adapter import ADAPTER_CONFIG
from shardkit.formats.hub.assets import is_weights
from shardkit.formats.hub.base import Base, FileDifference, find_base, open_base
from shardkit.formats.hub.directory import library_of, model_class_of, own_loader_of
from shardkit.formats.hub.files import refuse_part, variant_of
from shardkit.formats.owned import OutputKind, is_text
from shardkit.formats.quantised import unmarked_tensors
from shardkit.formats.registry import stray_weights
from shardkit.keys.expressions import FusedTensors, NamedTensor
from shardkit.layout.traced import one_process
from shardkit.operations.casts import DTypeCount, count_dtypes, dequantized_as
from shardkit.operations.consolidate.averaged import take_averaged
from shardkit.operations.consolidate.job import ConsolidateJob, build_job, is_copied_quantised
from shardkit.operations.consolidate.options import ConsolidateOptions
from shardkit.operations.consolidate.own import own_differences, take_own
from shardkit.operations.consolidate.run import ClassCheck, HubDescriptions, check_file
from shardkit.operations.destination import (
    check_sidecar,
    default_place,
    label_of,
    write_sidecar,
)
from shardkit.operations.parts.on_ray import run_on_ray
from shardkit.operations.parts.results import WriteResult
from shardkit.operations.resolve import EXPORT_ENDING, ResolvedCheckpoint, Taken, named_after, take
from shardkit.operations.write import Writer, Writing


@keywords_of(ConsolidateOptions, reading_as)
@one_process()
def consolidate(options: ConsolidateOptions) -> ConsolidateResult:
    """Write a sharded checkpoint as a Hub model: safetensors, config, tokenizer.

    Args:
        checkpoint: a checkpoint, or a run's directory, whose newest complete checkpoint is taken.
        output: the directory to make; by default in the working directory, named after the checkpoint.
        base: the model that it was trained from, a directory or a repo id. Names and shapes must be the same. By default
            it is what the trainer put into the checkpoint.
        base_revision: branch, tag or commit of a repo id.
        config: "checkpoint" takes config, generation config, tokenizer and processor from the checkpoint's own directory,
            and what it lacks from the base; "base" takes all of them from the base.
        tokenizer: a directory with the tokenizer to put beside the weights instead of the base's, where training changed
            the vocabulary.
        dtype: "keep", "base" (as the base stores each tensor), "bf16", "fp16" or "fp32"; only floating tensors
            are converted.
        dtype_rules: "GLOB=fp32" for other dtypes of some tensors, by their names in the output. The last that matches
            wins; each must match.
        max_shard_size: most bytes of tensors in a file, as a number or as "5GB". None divides them over files as a base
            on this machine does, if it has the same tensors in the same dtypes; otherwise it is 5GB.
        single_file: one file, whatever its size.
        weights: "model"; "ema", averaged weights; "eval", what `optimizer.eval()` of a schedule-free optimizer gives; or
            another part of the checkpoint by its name.
        root: where the model begins, dotted; then nothing is guessed.
        strip_prefix: prefixes to take off names, instead of a guessed root.
        add_prefix: put before every name.
        rename: REGEX=REPL, in order.
        include: globs over names of the output; only these tensors are written. Each must match.
        exclude: globs over names of the output; these tensors are not written. Each must match.
        fill_from_base: globs of the base's names. What the checkpoint lacks of them is taken from `base`, as it is, if
            the checkpoint holds a part of its model. Only whole parts: no layer of a stack, no expert.
        allow_missing: tensors of the base may be missing.
        allow_unexpected: there may be tensors that the base does not have.
        keys: rules that turn a trainer's own names into the Hub's: "auto" takes a set that shardkit has, if one knows
            all names; "none"; the path of a TOML file; or the name of such a set.
        dequantize: make plain weights of fp8, MXFP4 and NVFP4 ones, in bfloat16 unless a dtype is asked for. Quantised
            sources are refused otherwise; a quantised base is compared with as if it were plain.
        keep_factors: write the factors of OSFT as they are; otherwise they are folded into dense weights.
        ask_class: ask the class that the config names, in a process of its own while bytes move, whether
            `from_pretrained` would find all of its weights; only if no base's weights tell.
        merge_lora: add an adapter to the weights that it was trained on; otherwise the adapter is written.
        adapter_config: an `adapter_config.json` or its directory; by default from the base or the checkpoint.
        check_source: compare the checkpoint, as its bytes move, with the CRC-32s that its files record; a difference is
            refused before the output appears.
        source_manifest: a manifest of the source that lies elsewhere, to compare with too (of
            `consolidate(manifest_file=...)`). One in the source or beside it is found without this.
        manifest: put `shardkit.json` with sizes and digests into the output.
        manifest_file: write the same to this file once the output is complete; for `verify(..., manifest=...)`.
        sha256: take the sha256 of every file too, for the manifest.
        overwrite: replace an existing Hub model, whole and in one step.
        exist_ok: if `output` is there, leave it as it is, without a look inside; the result's `was_there` is true.
        strict: warnings are errors, such as a newer checkpoint in a run directory that had to be passed over.
        dry_run: decide and check everything, and write nothing.
        part: which part of the files this process writes, where several share the work: "3/16", "env" (what torchrun,
            mpirun or SLURM tells) or "env/16". The last to finish makes the output, or `shardkit.commit` does.
        executor: "ray" runs all parts as tasks of Ray: on the cluster that is running, or one on this machine. It needs
            `output`.
        num_parts: the number of Ray's tasks; by default as many as run at the same time.
        digest: "crc32" or "none".
        jobs: threads; by default the cores that this process may use, from 2 to 8.
        max_memory: bytes for all buffers, as a number or as "512MiB".
        push_to_hub: a repo id; the finished directory is uploaded there.
        private: make the repo private if it has to be made.
        branch: a branch of the repo, made if it is missing.
        scratch: directory for files on their way into a store; by default beside the cache, never in memory.
        follow_links: read and copy links that lead out of a checkpoint's directory as the files that they lead to.
            Weight files of a Hub model are read in any case.
        progress: told of the bytes as they move; by default a bar, on a terminal and in a notebook. False: none.
        on_warning: told each warning before anything is written; the result has them all.
        on_step: told what takes seconds and moves no bytes, such as "asking LlamaForCausalLM ...".

    Raises:
        UsageError: options that cannot be carried out, or a destination with something else than this call writes.
        SourceError: the checkpoint is damaged or incomplete, or its names do not fit.
        IntegrityError: its bytes are not what its checksums say.
        ResourceError: disk, permission or network.
        Interrupted: after Ctrl-C or SIGTERM; what was finished is kept.
    """
    if options.is_on_ray:
        return run_on_ray(consolidate, options.given)
    writer = Writer(options, kind=OutputKind.HUB, looks_late=True)
    checkpoint = stores.as_path(options.checkpoint)
    source = take(checkpoint, strict=options.strict)
    resolved = source.resolved
    writer.warn(resolved.warnings)
    named, output = named_after(resolved, checkpoint), options.output
    chosen = default_output(named) if output is None else output
    path = writer.check_destination(os.fspath(chosen), resolved.path, named if output is None else None)
    sidecar = _find_sidecar(options, writer, resolved.path)
    opened, base = _open(source, options)
    job = build_job(opened, base, options, options.share)
    if not location_of(path).renames:
        job = job.marked(writer.agreement(job).hash[:8])
    writer.destination.check_beside(
        {asset.name: asset.read for asset in job.assets if not is_weights(asset.name)}
    )
    if options.strict:
        refuse_warnings(job.warnings)  # all of them at once
    writer.warn(job.warnings)
    manifests, written = writer.find_manifests([job.catalog], resolved.path), list[bytes]()
    with ClassCheck(job, writer.warn) as class_check:
        describe = partial(
            HubDescriptions, job, manifests, on_manifest=written.append, on_written=class_check.settle
        )
        is_to_publish = writer.write(
            Writing(
                job=job, describe=describe, needed_bytes=job.needed_bytes, on_file=partial(check_file, job)
            )
        )
        published = _publish(job, path, sidecar, written) if is_to_publish else _Published()
        settled = class_check.settle() if writer.has_made or options.dry_run else job
    return _result(
        settled,
        resolved,
        writer.facts((*resolved.warnings, *settled.warnings)),
        notes=(*job.notes, *settled.notes[len(job.notes) :], *published.notes),
        pushed_to=published.address,
    )


class _Published(NamedTuple):
    """What became of a manifest apart from the output, and of an upload."""

    address: str | None = None
    """Of the repo; None if nothing was uploaded."""
    notes: tuple[str, ...] = ()


def _publish(
    job: ConsolidateJob, directory: str, sidecar: str | None, manifests: Sequence[bytes]
) -> _Published:
    """Write the manifest apart from the finished output, and upload that, where the options say so.

    Args:
        job: of the output.
        directory: the output.
        sidecar: where the manifest goes apart from it, if anywhere.
        manifests: the one that this call has written; empty if it has written none.
    """
    notes: tuple[str, ...] = ()
    if sidecar is not None and manifests:
        write_sidecar(sidecar, manifests[-1], overwrite=job.options.overwrite)
    elif sidecar is not None:
        notes = (f"{escape(sidecar)} was not written: the output was there",)
    outcome = _push(job.options, directory, [asset.name for asset in job.assets])
    return outcome._replace(notes=(*notes, *outcome.notes))


def _push(options: ConsolidateOptions, directory: str, names: Iterable[str]) -> _Published:
    """Upload a finished output where a repo is named; `names` are those of its files beside the weights."""
    if options.push_to_hub is None:
        return _Published()
    from shardkit.formats.hub.repo import push

    repo = escape(options.push_to_hub)
    options.tell_step(f"uploading to {repo} ...; if that fails, the same command with --exist-ok uploads it")
    try:
        pushed = push(
            directory,
            options.push_to_hub,
            private=options.private,
            branch=options.branch,
            by_people=filter(is_text, names),
        )
    except KeyboardInterrupt as interrupt:
        raise Interrupted(
            f"interrupted: {escape(directory)} is whole; it was not uploaded to {repo}",
            signum=signal_of(interrupt),
            hint="run the same command again with --exist-ok to upload it",
        ) from interrupt
    notes = list[str]()
    if pushed.kept:
        notes.append(f"{repo} keeps its own {listed(pushed.kept)}; ours stayed in {escape(directory)}")
    if pushed.removed:
        notes.append(f"{repo}: {listed(pushed.removed)} of its earlier, quantised weights was removed")
    return _Published(pushed.address, tuple(notes))


def _find_sidecar(options: ConsolidateOptions, writer: Writer, source: str) -> str | None:
    """Return where the manifest goes apart from the output, if anywhere; otherwise as `check_sidecar`."""
    if options.manifest_file is None:
        return None
    may_be_there = options.overwrite or writer.exists
    return check_sidecar(
        os.fspath(options.manifest_file), overwrite=may_be_there, outside=[writer.path, source]
    )


def default_output(checkpoint: str) -> str:
    """Return a name made of a checkpoint's: `run/last.ckpt` -> `last-hf`."""
    return default_place(label_of(checkpoint) + EXPORT_ENDING, checkpoint)


def _open(source: Taken, options: ConsolidateOptions) -> tuple[Checkpoint, Base | None]:
    """Open the checkpoint and its base, both with plain and dense weights where they can be made.

    Raises:
        UsageError, SourceError, IntegrityError, LayoutError, ResourceError: as opening and `open_base` do.
    """
    refuse_part(source.resolved.path)
    dtype, is_asked = dequantized_as(options.dtype, options.rules), options.dequantize
    stored = source.open() if options.weights != "ema" else take_averaged(source.open())
    opened = formats.open(
        stored, plain=PlainWeights(dequantize=is_asked, dtype=dtype, by_content=is_asked), folded=True
    )
    base_name = None if options.base is None else os.fspath(options.base)
    base = find_base(opened) if base_name is None else open_base(base_name, revision=options.base_revision)
    if base is not None and base.is_given and options.config == "checkpoint":
        base = take_own(base, opened, has_tokenizer=options.tokenizer is not None)
    # What is copied as NVFP4 is compared with such a base, whose files say so.
    if base is not None and not unmarked_tensors(opened.catalog.tensors):
        base = plain_base(base)
    return opened, None if base is None else fold_base(base)


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
class Upload:
    """What `push_to_hub` would upload; nobody has asked the Hub."""

    repo: str
    branch: str | None
    """None for the repo's default branch. One that does not exist is created."""
    private: bool
    """A new repo is private. False: as the account makes new ones, by default public. One that exists stays as it is."""
    upload_bytes: int
    """At most: what the repo already has is not sent again."""


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
    """(prefix of names in memory, the Hub's prefix, number of these names); a whole name does not end in a dot."""
    split: tuple[FusedTensors, ...]
    """Tensors that become several, as on the Hub."""
    skipped: tuple[SkippedPart, ...]
    candidates: tuple[str, ...]
    """Other roots with weights of their own."""
    base: str | None
    """The model that was named as the base, or whose config and files were found."""
    model_class: str | None
    """The class that the config names; for a model with code of its own the `AutoModel...` that loads it."""
    library: str | None = None
    """The library with that class, "transformers" or "diffusers"; None if config.json names none."""
    variant: str | None = None
    """What `from_pretrained` has to get as `variant`, if the weight files have the names of one."""
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
    pushed_to: str | None
    """Address of the repo on the Hub."""
    upload: Upload | None = None
    """With `dry_run` and `push_to_hub`: what would be uploaded."""
    from_base: tuple[str, ...] = ()
    """Names of the tensors that were taken from the base."""
    from_checkpoint: tuple[str, ...] = ()
    """Names of the files in `assets` that are the checkpoint's own, where a base was named."""
    differs_from_base: tuple[FileDifference, ...] = ()
    """What these files mean otherwise than the base's."""
    unloadable: tuple[str, ...] = ()
    """Why `from_pretrained` would not load all weights of the output; in `warnings` too."""
    held_against: str | None = None
    """What told whether `from_pretrained` finds all weights: "base" or "class". None if only names and shapes told; a
    note says why."""
    names: tuple[NamedTensor, ...] = ()
    """With `dry_run`: all tensors of the output."""
    missing: tuple[str, ...] = ()
    """Names of all weights that the class says `from_pretrained` would initialise at random."""
    misfits: tuple[tuple[str, str], ...] = ()
    """(name, why) of weights that the class says `from_pretrained` would refuse the output for."""

    def headline(self) -> str:
        """Return what was written where, and why `from_pretrained` would not load all of it."""
        why = () if self.unfinished else self.unloadable[:1]
        flaw = "".join(f", which from_pretrained would not load whole: {line}" for line in why)
        return WriteResult.headline(self) + flaw


def _skipped(job: ConsolidateJob) -> tuple[SkippedPart, ...]:
    objects = frozenset(job.checkpoint.catalog.objects)
    home = job.checkpoint.path
    carried = {storage.realpath(asset.path) for asset in job.assets if asset.path is not None}
    skipped_files = [
        (name, reason)
        for name, reason in (*job.checkpoint.remarks.skipped, *stray_weights(job.checkpoint))
        if _place(home, name) not in carried
    ]
    if job.base is not None:
        places = {_place(home, name) for name, _ in skipped_files}
        skipped_files += [
            (name, f"of the base: {what}")
            for name, what in job.base.left_out
            if _place(job.base.directory, name) not in places
        ]
    return (
        *(
            SkippedPart(
                what=part.kind, where=part.path, num_tensors=part.num_tensors, num_objects=part.num_objects
            )
            for part in job.selection.skipped
        ),
        *(
            SkippedPart(what=name, where=reason, num_tensors=0, num_objects=0)
            for name, reason in skipped_files
            if name not in objects  # counted above
        ),
    )


def _place(directory: str, name: str) -> str:
    """Return where a file lies; a name may be an entry's too, which no file could have."""
    path = os.path.join(directory, name)
    return storage.realpath(path) if storage.lexists(path) else path


def _result(
    job: ConsolidateJob,
    resolved: ResolvedCheckpoint,
    facts: dict[str, Any],
    *,
    notes: tuple[str, ...],
    pushed_to: str | None,
) -> ConsolidateResult:
    """Return the result of a run.

    Args:
        job: with the answer of the model's class, if it was asked.
        resolved: the checkpoint that was taken.
        facts: of `Writer.facts`.
        notes: all of them.
        pushed_to: address of the repo.
    """
    selection, answer, repo = job.selection, job.answer, job.options.push_to_hub
    is_asked = answer is not None and answer.failure is None
    own_files = job.base.own_files if job.base is not None else None
    config = job.base.config if job.base is not None else None
    return ConsolidateResult(
        **facts,
        checkpoint=stores.as_path(job.options.checkpoint),
        resolved=resolved.path,
        reason=resolved.reason,
        step=resolved.step,
        format=job.checkpoint.format,
        writer=job.checkpoint.writer,
        kind=job.kind,
        weights=job.weights,
        root=selection.root,
        stripped=tuple((rule.text, rule.num_names) for rule in selection.stripped),
        renamed=tuple((rule.old, rule.new, rule.num_names) for rule in selection.renamed),
        split=job.split,
        skipped=_skipped(job),
        candidates=selection.candidates,
        base=job.base.label if job.base else None,
        model_class=own_loader_of(config) or model_class_of(config),
        library=None if is_copied_quantised(job.checkpoint) else library_of(config),
        variant=next((variant_of(image.name) for image in job.output), None),
        assets=tuple(sorted(job.beside)),
        ties=tuple((kept, dropped) for dropped, kept in job.ties.dropped.items()),
        untied=job.ties.diverged,
        from_base=job.fit.carried,
        from_checkpoint=tuple(sorted(own_files.names.intersection(job.beside)))
        if own_files is not None
        else (),
        differs_from_base=own_differences(
            job.base, (*job.beside, *([ADAPTER_CONFIG] if job.kind == "merged" else []))
        ),
        cast=job.options.dtype,
        dtypes=tuple(count_dtypes((tensor.dtype.name, tensor.nbytes) for tensor in job.tensors)),
        num_tensors=len(job.tensors),
        num_parameters=sum(tensor.num_values for tensor in job.tensors),
        file_names=tuple(image.name for image in job.output),
        pushed_to=pushed_to,
        upload=None
        if repo is None or not job.options.dry_run
        else Upload(
            repo=repo,
            branch=job.options.branch,
            private=job.options.private,
            upload_bytes=job.needed_bytes,
        ),
        unloadable=job.unloadable,
        held_against="class" if is_asked else "base" if job.fit.is_whole else None,
        missing=answer.missing if answer is not None else (),
        names=job.names,
        misfits=answer.misfits if answer is not None else (),
        notes=notes,
    )
