"""consolidate: any trainer's sharded checkpoint becomes a Hub model.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from shardkit.core.text import MIB, count, escape, parse_size
from shardkit.core.threads import NoProgress, Progress
from shardkit.errors import IntegrityError, UsageError
from shardkit.files.links import may_follow_links
from shardkit.formats.hub.base import find_base, open_base
from shardkit.formats.recorded import find_manifests
from shardkit.formats.registry import stray_weights
from shardkit.keys import Naming
from shardkit.operations.consolidate.job import ConsolidateJob, JobOptions, build_job
from shardkit.operations.consolidate.result import ConsolidateResult, DTypeCount, SkippedPart
from shardkit.operations.consolidate.run import ClassCheck, Descriptions
from shardkit.operations.destination import check_destination, check_space, free_bytes, is_hub_model
from shardkit.operations.resolve import ResolvedCheckpoint, take
from shardkit.operations.resolve_order import EXPORT_ENDING
from shardkit.operations.sidecar import check_sidecar, write_sidecar
from shardkit.operations.write import (
    OnWarning,
    check_resume_from,
    check_warnings,
    execute_options,
    run_job,
    warn_all,
)
from shardkit.transfer.execute import ExecuteOptions

_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors", ".safetensors.index.json", ".bin.index.json")


@may_follow_links
def consolidate(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    base: str | os.PathLike[str] | None = None,
    base_revision: str | None = None,
    dtype: str = "keep",
    max_shard_size: str | int = "5GB",
    single_file: bool = False,
    weights: str = "model",
    root: str | None = None,
    strip_prefix: Sequence[str] = (),
    add_prefix: str = "",
    rename: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    allow_missing: bool = False,
    allow_unexpected: bool = False,
    ask_class: bool = True,
    merge_lora: bool = False,
    adapter_config: str | None = None,
    check: bool = False,
    check_source: bool = True,
    source_manifest: str | os.PathLike[str] | None = None,
    manifest: bool = False,
    manifest_file: str | os.PathLike[str] | None = None,
    sha256: bool = False,
    overwrite: bool = False,
    strict: bool = False,
    dry_run: bool = False,
    resume: bool = True,
    resume_from: str | os.PathLike[str] | None = None,
    digest: str = "crc32",
    jobs: int = 2,
    max_memory: str | int = 256 * MIB,
    push_to_hub: str | None = None,
    private: bool = False,
    branch: str | None = None,
    follow_links: bool = False,
    progress: Progress | None = None,
    on_warning: OnWarning | None = None,
) -> ConsolidateResult:
    """Write a sharded checkpoint as a Hub model: safetensors, config, tokenizer.

    Args:
        checkpoint: a checkpoint, or a run's directory, whose newest complete one is taken.
        output: the directory to make; by default beside the checkpoint and named after it.
        base: the model that it was trained from, a directory or a repo id: config and tokenizer are taken
            from it, names and shapes must be its. By default what the trainer put into the checkpoint.
        base_revision: branch, tag or commit of a repo id.
        dtype: "keep", "base" (as the base stores each tensor), "bf16", "fp16" or "fp32"; only floating tensors
            are converted.
        max_shard_size: most bytes of tensors in a file, as a number or as "5GB".
        single_file: one file, whatever its size.
        weights: "model", "ema", or another part of the checkpoint by its name.
        root: dotted; the model begins there, and nothing is guessed.
        strip_prefix: taken off names instead of a guessed root.
        add_prefix: put before every name.
        rename: REGEX=REPL, in order.
        include: globs; only these tensors.
        exclude: globs; not these tensors.
        allow_missing: tensors of the base may be missing.
        allow_unexpected: tensors may be there that the base does not have.
        ask_class: ask the class that the config names, in a process of its own while bytes move, whether
            `from_pretrained` would find all of its weights; only where no base's weights tell.
        merge_lora: add an adapter to the weights that it was trained on; otherwise the adapter is written.
        adapter_config: an `adapter_config.json` or its directory; by default from the base or the checkpoint.
        check: compare the checkpoint's bytes with the checksums in it first, before any is moved.
        check_source: compare the checkpoint, as its bytes move, with the CRC-32s that its files record; a difference is
            refused before the output appears.
        source_manifest: a manifest of the source that lies elsewhere, to compare with too (`shardkit manifest`,
            `consolidate(manifest_file=...)`); one in it or beside it is taken by itself.
        manifest: put `shardkit.json` with sizes and digests into the output.
        manifest_file: write the same there, once the output is complete; for `verify(..., manifest=...)`.
        sha256: take the sha256 of every file too, for the manifest.
        overwrite: replace an existing Hub model, whole and in one step.
        strict: refuse a run directory in which a newer checkpoint had to be passed over.
        dry_run: decide and check everything, and write nothing.
        resume: go on with an interrupted run of the same plan, where its process is known to be dead.
        resume_from: go on with this staging directory (`.<output>.shardkit-...`), of another host's run, say.
        digest: "crc32" or "none".
        jobs: threads.
        max_memory: bytes for all buffers, as a number or as "512MiB".
        push_to_hub: a repo id; the finished directory is uploaded there.
        private: a repo that has to be made is private.
        branch: of the repo, made where it is absent.
        follow_links: links that lead out of a checkpoint's directory are read and copied as the files that they lead
            to. Weight files of a Hub model are read in any case.
        progress: told of the bytes as they move.
        on_warning: told each warning before anything is written; the result has them all.

    Raises:
        UsageError: options that cannot be carried out, or an existing destination.
        SourceError: the checkpoint is damaged or incomplete, or its names do not fit.
        IntegrityError: its bytes are not what its checksums say.
        ResourceError: disk, permission or network.
        Interrupted: after Ctrl-C or SIGTERM; what was finished is kept.
    """
    begun, progress = time.monotonic(), progress or NoProgress()
    options = JobOptions(
        naming=Naming(
            weights=weights,
            root=root,
            strip_prefix=tuple(strip_prefix),
            add_prefix=add_prefix,
            rename=tuple(rename),
            include=tuple(include),
            exclude=tuple(exclude),
        ),
        allow_missing=allow_missing,
        allow_unexpected=allow_unexpected,
        dtype=dtype,
        max_shard_bytes=_shard_limit(max_shard_size, single_file),
        digest=digest,
        merge_lora=merge_lora,
        adapter_config=adapter_config,
        manifest=manifest,
    )
    moving = execute_options(jobs, max_memory, digests=digest != "none", check_source=check_source)
    if base_revision is not None and base is None:
        raise UsageError("--base-revision is about --base, which is not there")
    if sha256 and not manifest and manifest_file is None:
        raise UsageError(
            "--sha256 is recorded in a manifest, and none is to be written",
            hint="add --manifest, or --manifest-file FILE",
        )
    _check_push(push_to_hub, private=private, branch=branch)
    given = os.fspath(checkpoint)
    output = None if output is None else os.fspath(output)
    base = None if base is None else os.fspath(base)
    taken = take(given, strict=strict)
    resolved = taken.resolved
    warn_all(on_warning, resolved.warnings)
    path = check_destination(
        output or default_output(resolved.path), resolved.path, overwrite=overwrite, why_not=is_hub_model
    )
    sidecar = (
        check_sidecar(os.fspath(manifest_file), overwrite=overwrite, outside=[path, resolved.path])
        if manifest_file is not None
        else None
    )
    opened = taken.open()
    found = open_base(base, revision=base_revision) if base is not None else find_base(opened)
    decided = build_job(opened, found, options)
    catalogs = [decided.catalog, *(module.catalog for module in decided.modules)]
    manifests = find_manifests(catalogs, resolved.path, given=source_manifest, check_source=check_source)
    warn_all(on_warning, (*decided.warnings, *check_warnings(moving), *manifests.warnings))
    with ClassCheck(decided, is_on=ask_class, on_warning=on_warning) as asked:
        job = _checked(decided) if check else decided
        result = _describe(
            job, given, resolved, path, moving, dry_run=dry_run, checked=check and opened.check is not None
        )
        result = replace(
            result,
            source_manifests=tuple(manifests.paths),
            warnings=(*result.warnings, *manifests.warnings),
        )
        if resume_from is not None:
            resume_from = check_resume_from(os.fspath(resume_from), path, job.plan_hash, resume=resume)
        needed = job.plan.written_bytes + sum(asset.nbytes for asset in job.assets)
        needed += sum(module.plan.written_bytes for module in job.modules)
        check_space(path, needed, resume_from=resume_from)
        written: list[bytes] = []
        if not dry_run:
            ran = run_job(
                job,
                path,
                moving,
                progress,
                describe=partial(
                    Descriptions,
                    job,
                    manifests,
                    moving=moving,
                    sha256=sha256,
                    on_manifest=written.append if sidecar is not None else None,
                    on_written=asked.settle,
                ),
                label="consolidate",
                overwrite=overwrite,
                resume=resume,
                resume_from=resume_from,
                why_not=is_hub_model,
            )
            result = replace(
                result,
                resumed_files=ran.resumed_files,
                checked_bytes=ran.source.checked_bytes,
                unchecked=ran.source.unchecked,
            )
        result = _with_answer(result, len(resolved.warnings), decided, asked.settle())
    if sidecar is not None and not dry_run:
        write_sidecar(sidecar, written[-1], overwrite=overwrite)
    if push_to_hub is not None and not dry_run:
        from shardkit.formats.hub.push import push

        result = replace(result, pushed_to=push(path, push_to_hub, private=private, branch=branch))
    return replace(result, elapsed_s=round(time.monotonic() - begun, 3))


def default_output(checkpoint: str) -> str:
    """Return a sibling named after a checkpoint: `run/last.ckpt` -> `run/last-hf`."""
    path = os.path.abspath(checkpoint)
    parent, name = os.path.split(path)
    stem = next(
        (name.removesuffix(s) for s in sorted(_SUFFIXES, key=len, reverse=True) if name.endswith(s)), name
    )
    return os.path.join(parent, (stem or name or "model") + EXPORT_ENDING)


def _shard_limit(max_shard_size: str | int, single_file: bool) -> int | None:
    if single_file:
        return None
    limit = parse_size(max_shard_size)
    if limit < 1:
        raise UsageError(f"--max-shard-size must be at least one byte, not {max_shard_size}")
    return limit


def _check_push(repo_id: str | None, *, private: bool, branch: str | None) -> None:
    if repo_id is not None:
        from shardkit.formats.hub.push import check_push

        check_push(repo_id)
    elif private or branch is not None:
        raise UsageError("--private and --branch are about --push-to-hub, which is not there")


def _checked(job: ConsolidateJob) -> ConsolidateJob:
    """Compare the bytes that are about to be moved with the checksums that lie with them."""
    check = job.checkpoint.check
    if check is None:
        note = f"--check: {escape(job.checkpoint.writer)} writes no checksums to compare with"
        return replace(job, notes=(*job.notes, note))
    beside = [tensor for module in job.modules for image in module.output for tensor in image.tensors]
    problems = list(check([tensor.source for tensor in (*job.tensors, *beside)]))
    if problems:
        raise IntegrityError(
            f"the checkpoint is not what its checksums say in {count(len(problems), 'place')}",
            problems=problems,
            hint="the checkpoint is damaged: use another copy",
        )
    return job


def _skipped(job: ConsolidateJob) -> tuple[SkippedPart, ...]:
    objects = frozenset(job.checkpoint.catalog.objects)
    home = job.checkpoint.path
    carried = {os.path.realpath(asset.path) for asset in job.assets if asset.path is not None}
    beside = [
        (name, reason)
        for name, reason in (*job.checkpoint.skipped, *stray_weights(job.checkpoint))
        if os.path.realpath(os.path.join(home, name)) not in carried
    ]
    if job.base is not None:
        said = {os.path.realpath(os.path.join(home, name)) for name, _ in beside}
        beside += [
            (name, f"of the base: {what}")
            for name, what in job.base.left_out
            if os.path.realpath(os.path.join(job.base.directory, name)) not in said
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


def _describe(
    job: ConsolidateJob,
    given: str,
    resolved: ResolvedCheckpoint,
    path: str,
    moving: ExecuteOptions,
    *,
    dry_run: bool,
    checked: bool,
) -> ConsolidateResult:
    selection, checkpoint = job.selection, job.checkpoint
    return ConsolidateResult(
        checkpoint=given,
        resolved=resolved.path,
        reason=resolved.reason,
        step=resolved.step,
        format=checkpoint.format,
        writer=checkpoint.writer,
        output=path,
        dry_run=dry_run,
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
        num_files=len(job.output),
        file_names=tuple(image.name for image in job.output),
        file_bytes=tuple(image.size for image in job.output),
        read_bytes=job.plan.read_bytes,
        written_bytes=job.plan.written_bytes,
        checked=checked,
        checked_bytes=0,
        unchecked=(),
        source_manifests=(),
        peak_memory_bytes=moving.peak_bytes,
        free_bytes=free_bytes(path),
        resumed_files=0,
        pushed_to=None,
        elapsed_s=0.0,
        unloadable=job.unloadable,
        notes=(*resolved.notes, *job.notes),
        warnings=(*resolved.warnings, *job.warnings, *check_warnings(moving)),
    )


def _with_answer(
    result: ConsolidateResult, first: int, decided: ConsolidateJob, settled: ConsolidateJob
) -> ConsolidateResult:
    """Return the result as it is once the model's class has answered, if it was asked.

    Args:
        result: with the warnings of the job as it was decided.
        first: where they begin.
        decided: before the answer.
        settled: with it.
    """
    answer = settled.answer
    is_asked = answer is not None and answer.failure is None
    return replace(
        result,
        unloadable=settled.unloadable,
        held_against="class" if is_asked else "base" if settled.fit.is_whole else None,
        missing=answer.missing if answer is not None else (),
        misfits=answer.misfits if answer is not None else (),
        notes=(*result.notes, *settled.notes[len(decided.notes) :]),
        warnings=(
            *result.warnings[:first],
            *settled.warnings,
            *result.warnings[first + len(decided.warnings) :],
        ),
    )


def _model_class(job: ConsolidateJob) -> str | None:
    named = job.base.config.get("architectures") if job.base and job.base.config else None
    name = named[0] if isinstance(named, list) and named else None
    return name if isinstance(name, str) and name.isidentifier() else None
