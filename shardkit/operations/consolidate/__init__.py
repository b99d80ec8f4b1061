"""consolidate: turn any trainer's sharded checkpoint into a Hub model.

    checkpoint + base -> `job` decides -> `operations.write` moves the bytes -> `run` writes config, tokenizer, index

The *base* is the model that training started from. A user names it (`--base`), or it is found by what the trainer
recorded. It provides names, shapes, config and tokenizer.

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
from shardkit.errors import Interrupted, signal_of
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
from shardkit.operations.consolidate.averaged import averaged_beside
from shardkit.operations.consolidate.job import ConsolidateJob, build_job, is_copied_quantised
from shardkit.operations.consolidate.options import ConsolidateOptions
from shardkit.operations.consolidate.own import own_differences, use_own_files
from shardkit.operations.consolidate.run import ClassCheck, HubDescriptions, check_file
from shardkit.operations.destination import (
    check_sidecar,
    default_place,
    label_of,
    write_sidecar,
)
from shardkit.operations.parts.on_ray import run_on_ray
from shardkit.operations.parts.results import WriteResult
from shardkit.operations.resolve import (
    EXPORT_ENDING,
    ChosenCheckpoint,
    ResolvedCheckpoint,
    choose_checkpoint,
    named_after,
)
from shardkit.operations.write import Writer, Writing


@keywords_of(ConsolidateOptions, reading_as)
@one_process()
def consolidate(options: ConsolidateOptions) -> ConsolidateResult:
    """Write a sharded checkpoint as a Hub model: safetensors, config, tokenizer.

    Args:
        checkpoint: a checkpoint, or a run directory, whose newest complete checkpoint is used.
        output: the directory to create; by default in the working directory, named after the checkpoint.
        base: the model that it was trained from, a directory or a repo id. Names and shapes must be the same. By
            default, shardkit uses what the trainer saved with the checkpoint.
        base_revision: branch, tag or commit of a repo id.
        config: "checkpoint" uses config, generation config, tokenizer and processor from the checkpoint's own
            directory, and those that are missing there from the base; "base" uses the base's for all of them.
        tokenizer: a directory with the tokenizer to write instead of the base's, if training changed the vocabulary.
        dtype: "keep", "base" (as the base stores each tensor), "bf16", "fp16" or "fp32"; only floating tensors
            are converted.
        dtype_rules: "GLOB=fp32" sets the dtype of the tensors whose names in the output match the glob. If several
            rules match, the last wins. Each rule must match a tensor.
        max_shard_size: maximum bytes of tensors per file, as a number or as "5GB". With None, the tensors are divided
            over files as in the base, if it is on this machine and has the same tensors in the same dtypes; otherwise
            the maximum is 5GB.
        single_file: write one file, whatever its size.
        weights: "model"; "ema" for averaged weights; "eval" for those that `optimizer.eval()` of a schedule-free
            optimizer gives; or the name of another part of the checkpoint.
        root: where the model begins in the checkpoint's names, dotted, e.g. "state.model". By default it is guessed.
        strip_prefix: prefixes to remove from names, instead of a guessed root.
        add_prefix: prefix to put before every name.
        rename: "REGEX=REPL" substitutions, applied in order.
        include: globs over names in the output; only these tensors are written. Each glob must match.
        exclude: globs over names in the output; these tensors are not written. Each glob must match.
        fill_from_base: globs over the base's names. Matching tensors that the checkpoint lacks are copied from `base`
            unchanged, for a checkpoint of only a part of the base's model. They must be whole parts, such as a vision
            tower: not one layer of a stack, not one expert.
        allow_missing: accept a checkpoint that lacks tensors of the base.
        allow_unexpected: accept tensors that the base does not have.
        keys: rules that turn a trainer's own names into the Hub's: "auto" uses a rule set of shardkit's that matches
            all names, if there is one; "none"; the path of a TOML file; or the name of a rule set of shardkit's.
        dequantize: convert fp8, MXFP4 and NVFP4 weights to plain ones, in bfloat16 unless `dtype` says otherwise.
            Without it, a quantised source is refused. A quantised base is treated as if it were plain.
        quantize: "base" quantises the weights that the base has in fp8, in its form (blocks of DeepSeek V3 and Qwen3, or
            rows of compressed-tensors); all other tensors get the base's dtypes.
        keep_factors: write the factors of OSFT unchanged; otherwise they are folded into dense weights.
        ask_class: check whether `from_pretrained` would find all weights, by asking the class that the config names, in
            a separate process while bytes move. It is skipped if the weights of a base answer the question.
        merge_lora: add an adapter to the weights that it was trained on; otherwise the adapter itself is written.
        adapter_config: an `adapter_config.json` or its directory; by default that of the base or the checkpoint.
        check_source: compare the checkpoint's bytes, as they are read, with the CRC-32s that its files record. If they
            differ, no output appears.
        source_manifest: a further manifest of the source to compare with, such as `consolidate(manifest_file=...)`
            writes. A manifest in or beside the source is found without this.
        manifest: write `shardkit.json` with sizes and digests into the output.
        manifest_file: write the same to this file once the output is complete, for `verify(..., manifest=...)`.
        sha256: compute the sha256 of every file, too, for the manifest.
        overwrite: replace an existing Hub model, whole and in one step.
        exist_ok: if `output` exists, leave it as it is, without looking inside; the result's `was_there` is true.
        strict: raise warnings as errors, e.g. that the newest checkpoint of a run directory was skipped.
        dry_run: decide and check everything, but write nothing.
        part: which part of the files this process writes, if several processes share the work: "3/16", "env" (as
            torchrun, mpirun or SLURM number their processes) or "env/16". The last process to finish commits the output,
            or `shardkit.commit` does.
        executor: "ray" runs all parts as Ray tasks, on the running cluster, or on a new one on this machine. It needs
            `output`.
        num_parts: number of Ray tasks; by default as many as can run at the same time.
        digest: "crc32" or "none".
        jobs: number of threads; by default the cores that this process may use, from 2 to 8.
        max_memory: bytes for all buffers, as a number or as "512MiB".
        push_to_hub: repo id to upload the finished directory to.
        private: if the repo has to be created, make it private.
        branch: branch of the repo, created if it does not exist.
        scratch: directory for files on their way into a store; by default beside the cache, never in memory.
        follow_links: follow links that lead out of the checkpoint's directory, and read and copy the files behind them.
            Weight files of a Hub model are read through links in any case.
        progress: called as bytes move. By default, terminals and notebooks show a bar; False shows none.
        on_warning: called with each warning before anything is written. The result lists all warnings.
        on_step: called before a step that takes seconds and moves no bytes, such as "asking LlamaForCausalLM ...".

    Raises:
        UsageError: the options contradict each other, or the destination has something other than this call's output.
        SourceError: the checkpoint is damaged or incomplete, or its names do not fit.
        IntegrityError: its bytes do not match its checksums.
        ResourceError: disk, permission or network.
        Interrupted: after Ctrl-C or SIGTERM; finished files are kept.
    """
    if options.is_on_ray:
        return run_on_ray(consolidate, options.given)
    writer = Writer(options, kind=OutputKind.HUB, looks_late=True)
    checkpoint = stores.as_path(options.checkpoint)
    source = choose_checkpoint(checkpoint, strict=options.strict)
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
    """What happened after the commit: an upload, and a manifest outside the output."""

    address: str | None = None
    """Address of the repo; None if nothing was uploaded."""
    notes: tuple[str, ...] = ()


def _publish(
    job: ConsolidateJob, directory: str, sidecar: str | None, manifests: Sequence[bytes]
) -> _Published:
    """Write `--manifest-file` and upload the finished output, if the options ask for it.

    Args:
        job: the consolidation.
        directory: the finished output.
        sidecar: path of `--manifest-file`, or None.
        manifests: content of the manifest; empty if this call did not write the output.
    """
    notes: tuple[str, ...] = ()
    if sidecar is not None and manifests:
        write_sidecar(sidecar, manifests[-1], overwrite=job.options.overwrite)
    elif sidecar is not None:
        notes = (f"{escape(sidecar)} was not written: the output was there",)
    outcome = _push(job.options, directory, [asset.name for asset in job.assets])
    return outcome._replace(notes=(*notes, *outcome.notes))


def _push(options: ConsolidateOptions, directory: str, names: Iterable[str]) -> _Published:
    """Upload a finished output, if `--push-to-hub` names a repo.

    Args:
        options: with the repo.
        directory: the output.
        names: its files other than weights.
    """
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
    """Return the path of `--manifest-file`, or None; raises as `check_sidecar`."""
    if options.manifest_file is None:
        return None
    may_be_there = options.overwrite or writer.exists
    return check_sidecar(
        os.fspath(options.manifest_file), overwrite=may_be_there, outside=[writer.path, source]
    )


def default_output(checkpoint: str) -> str:
    """Return the default output for a checkpoint: `run/last.ckpt` -> `last-hf`."""
    return default_place(label_of(checkpoint) + EXPORT_ENDING, checkpoint)


def _open(source: ChosenCheckpoint, options: ConsolidateOptions) -> tuple[Checkpoint, Base | None]:
    """Open the checkpoint and its base, both as plain, dense weights where quantised or factored ones can be converted.

    Raises:
        UsageError, SourceError, IntegrityError, LayoutError, ResourceError: as opening and `open_base` do.
    """
    refuse_part(source.resolved.path)  # one of several weight files
    dtype, is_asked = dequantized_as(options.dtype, options.rules), options.dequantize
    # Averaged weights may be in a folder or file of their own, beside the checkpoint's.
    stored = source.open() if options.weights != "ema" else averaged_beside(source.open())
    # Only with --dequantize, weights count as quantised by their content: dtypes of few bits, with scales beside them.
    opened = formats.open(
        stored, plain=PlainWeights(dequantize=is_asked, dtype=dtype, by_content=is_asked), folded=True
    )
    base_name = None if options.base is None else os.fspath(options.base)
    base = find_base(opened) if base_name is None else open_base(base_name, revision=options.base_revision)
    if base is not None and base.is_given and options.config == "checkpoint":
        base = use_own_files(base, opened, has_tokenizer=options.tokenizer is not None)
    # Unmarked: names do not show that a weight is quantised, as with NVFP4. In a training checkpoint, which has no config
    # to show it, such weights are copied as they are without --dequantize. Then the base, which describes them, stays too.
    if base is not None and not unmarked_tensors(opened.catalog.tensors):
        base = plain_base(base)
    return opened, None if base is None else fold_base(base)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedPart:
    """A part of the checkpoint that was left out."""

    what: str
    """"optimizer", "random state", a file name, ..."""
    where: str
    """The prefix of its names, or why it was not read."""
    num_tensors: int
    num_objects: int
    """Entries that are not tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """What `push_to_hub` would upload; the Hub was not asked."""

    repo: str
    branch: str | None
    """None for the repo's default branch. A missing branch is created."""
    private: bool
    """A new repo is made private. If False, the account's setting decides, by default public. An existing repo keeps
    its visibility."""
    upload_bytes: int
    """The maximum: files that the repo already has are not sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidateResult(WriteResult):
    """What consolidate wrote, or with `dry_run` would write. "Files" are the weight files, others are `assets`."""

    checkpoint: str
    """The argument `checkpoint`."""
    resolved: str
    """The checkpoint that was used."""
    reason: str
    """Why this one was chosen."""
    step: int | None
    """Its training step, if known."""
    format: str
    """Stable identifier, e.g. "dcp", "lightning", "verl"."""
    writer: str
    """The program that wrote it, as text for people."""
    kind: str
    """What was written: "model", "adapter", or "merged", an adapter added to its model."""
    weights: str
    """"model", "ema", ..."""
    root: str
    """Where the model begins in the checkpoint's names, dotted; empty for the top."""
    stripped: tuple[tuple[str, int], ...]
    """(prefix or segment that was removed from names, number of these names)."""
    renamed: tuple[tuple[str, str, int], ...]
    """(prefix of names in memory, the Hub's prefix, number of these names); a whole name does not end in a dot."""
    split: tuple[FusedTensors, ...]
    """Tensors that were split into several, as on the Hub."""
    skipped: tuple[SkippedPart, ...]
    candidates: tuple[str, ...]
    """Other roots that have weights."""
    base: str | None
    """The base that the user named, or the model whose config and files were found."""
    model_class: str | None
    """The class that the config names; for a model with its own code, the `AutoModel...` that loads it."""
    library: str | None = None
    """The library with that class, "transformers" or "diffusers"; None if config.json names none."""
    variant: str | None = None
    """The `variant` to pass to `from_pretrained`, if the weight files are named after one."""
    assets: tuple[str, ...]
    """Names of the files other than weights."""
    ties: tuple[tuple[str, str], ...]
    """(name that was kept, equal tensor that was left out)."""
    untied: tuple[tuple[str, str], ...]
    """(embedding, output layer) that should be tied but differ: both were kept."""
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
    """Names of the tensors that were copied from the base."""
    from_checkpoint: tuple[str, ...] = ()
    """Names of the files in `assets` that are the checkpoint's own; only if the user named a base."""
    differs_from_base: tuple[FileDifference, ...] = ()
    """Settings in which these files differ from the base's."""
    unloadable: tuple[str, ...] = ()
    """Reasons why `from_pretrained` would not load all weights of the output; also in `warnings`."""
    held_against: str | None = None
    """What showed whether `from_pretrained` finds all weights: the "base", or the model's "class". None if only names
    and shapes were checked; a note says why."""
    names: tuple[NamedTensor, ...] = ()
    """With `dry_run`: all tensors of the output."""
    missing: tuple[str, ...] = ()
    """Names of weights that `from_pretrained` would initialise at random, according to the class."""
    misfits: tuple[tuple[str, str], ...] = ()
    """(name, reason) of weights for which `from_pretrained` would refuse the output, according to the class."""

    def headline(self) -> str:
        """Return what was written where, and why `from_pretrained` would not load all of it."""
        why = () if self.unfinished else self.unloadable[:1]
        flaw = "".join(f", which from_pretrained would not load whole: {line}" for line in why)
        return WriteResult.headline(self) + flaw


def _skipped(job: ConsolidateJob) -> tuple[SkippedPart, ...]:
    """Return what was left out: other kinds of state in the checkpoint, then files of the checkpoint and of the base."""
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
    """Return the real path of a file in a directory. The name may also be that of an entry in a file."""
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
    """Return the result.

    Args:
        job: with the answer of the model's class, if it was asked.
        resolved: the checkpoint that was used.
        facts: from `Writer.facts`.
        notes: all notes.
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
        from_base=job.fit.from_base,
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
        held_against="class" if is_asked else "base" if job.fit.has_all_weights else None,
        missing=answer.missing if answer is not None else (),
        names=job.names,
        misfits=answer.misfits if answer is not None else (),
        notes=notes,
    )
