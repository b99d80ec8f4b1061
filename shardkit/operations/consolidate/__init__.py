"""consolidate: any trainer's sharded checkpoint becomes a Hub model.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from shardkit.core.dtypes import short_dtype
from shardkit.core.text import MIB, escape, listed, parse_size
from shardkit.core.threads import OnStep, Progress, silent
from shardkit.errors import UsageError
from shardkit.files import storage, stores
from shardkit.files.links import may_follow_links
from shardkit.files.stores import is_remote
from shardkit.formats.contract import Checkpoint
from shardkit.formats.dequantize import plain_base, take_plain
from shardkit.formats.fold import folded_base, take_folded
from shardkit.formats.hub.assets import is_weights
from shardkit.formats.hub.base import Base, find_base, open_base
from shardkit.formats.hub.directory import model_class_of
from shardkit.formats.hub.tokenizer import open_tokenizer
from shardkit.formats.owned import HUB_INDEX, OutputKind, is_text
from shardkit.formats.registry import stray_weights
from shardkit.keys.select import Naming
from shardkit.operations.casts import DTypeCount, count_dtypes, dequantized_as, parse_rules
from shardkit.operations.consolidate.assets import earlier_assets
from shardkit.operations.consolidate.job import ConsolidateJob, ConsolidateOptions, build_job
from shardkit.operations.consolidate.run import ClassCheck, HubDescriptions, Recording
from shardkit.operations.destination import is_file_of, label_of, write_sidecar
from shardkit.operations.parts.agreement import Command, Share, as_share
from shardkit.operations.parts.pool import Executor, in_pool
from shardkit.operations.resolve import ResolvedCheckpoint, Taken, adapter_file, take
from shardkit.operations.resolve_order import EXPORT_ENDING
from shardkit.operations.write import Moving, OnWarning, Writer, WriteResult, Writing

_SHARD_SIZE = "5GB"  # as transformers and huggingface_hub have it


@may_follow_links
def consolidate(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    base: str | os.PathLike[str] | None = None,
    base_revision: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    dtype: str = "keep",
    dtype_rules: Sequence[str] = (),
    max_shard_size: str | int | None = None,
    single_file: bool = False,
    weights: str = "model",
    root: str | None = None,
    strip_prefix: Sequence[str] = (),
    add_prefix: str = "",
    rename: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    fill_from_base: Sequence[str] = (),
    allow_missing: bool = False,
    allow_unexpected: bool = False,
    keys: str | os.PathLike[str] = "auto",
    ask_class: bool = True,
    dequantize: bool = False,
    keep_factors: bool = False,
    merge_lora: bool = False,
    adapter_config: str | None = None,
    check_source: bool = True,
    source_manifest: str | os.PathLike[str] | None = None,
    manifest: bool = False,
    manifest_file: str | os.PathLike[str] | None = None,
    sha256: bool = False,
    overwrite: bool = False,
    strict: bool = False,
    dry_run: bool = False,
    resume: bool = True,
    part: str | Share | None = None,
    executor: Executor | Literal["ray"] | None = None,
    num_parts: int | None = None,
    digest: str = "crc32",
    jobs: int | None = None,
    max_memory: str | int = 256 * MIB,
    push_to_hub: str | None = None,
    private: bool = False,
    branch: str | None = None,
    follow_links: bool = False,
    progress: Progress | None = None,
    on_warning: OnWarning | None = None,
    on_step: OnStep | None = None,
) -> ConsolidateResult:
    """Write a sharded checkpoint as a Hub model: safetensors, config, tokenizer.

    Args:
        checkpoint: a checkpoint, or a run's directory, whose newest complete checkpoint is taken.
        output: the directory to make; by default beside the checkpoint and named after it.
        base: the model that it was trained from, a directory or a repo id. Config and tokenizer are taken from it, and
            names and shapes must be the same. By default it is what the trainer put into the checkpoint.
        base_revision: branch, tag or commit of a repo id.
        tokenizer: a directory with the tokenizer to put beside the weights instead of the base's, where training changed
            the vocabulary.
        dtype: "keep", "base" (as the base stores each tensor), "bf16", "fp16" or "fp32"; only floating tensors
            are converted.
        dtype_rules: "GLOB=fp32" for other dtypes of some tensors, by their names in the output. The last that matches
            wins; each must match.
        max_shard_size: most bytes of tensors in a file, as a number or as "5GB". None divides them over files as a base
            on this machine does, if it has the same tensors in the same dtypes; otherwise it is 5GB.
        single_file: one file, whatever its size.
        weights: "model", "ema", or another part of the checkpoint by its name.
        root: where the model begins, dotted; then nothing is guessed.
        strip_prefix: prefixes to take off names, instead of a guessed root.
        add_prefix: put before every name.
        rename: REGEX=REPL, in order.
        include: globs; only these tensors are written.
        exclude: globs; these tensors are not written.
        fill_from_base: globs of the base's names. What the checkpoint lacks of them is taken from `base`, as it is, if
            the checkpoint holds a part of its model. Only whole parts: no layer of a stack, no expert.
        allow_missing: tensors of the base may be missing.
        allow_unexpected: there may be tensors that the base does not have.
        keys: rules that turn a trainer's own names into the Hub's: "auto" takes a set that shardkit has, if one knows
            all names; "none"; the path of a TOML file; or the name of such a set.
        dequantize: make plain weights of fp8 and MXFP4 ones, in bfloat16 unless a dtype is asked for. Quantised
            sources are refused otherwise; a quantised base is compared with as if it were plain.
        keep_factors: write the factors of OSFT as they are; otherwise they are folded into dense weights.
        ask_class: ask the class that the config names, in a process of its own while bytes move, whether
            `from_pretrained` would find all of its weights; only if no base's weights tell.
        merge_lora: add an adapter to the weights that it was trained on; otherwise the adapter is written.
        adapter_config: an `adapter_config.json` or its directory; by default from the base or the checkpoint.
        check_source: compare the checkpoint, as its bytes move, with the CRC-32s that its files record; a difference is
            refused before the output appears.
        source_manifest: a manifest of the source that lies elsewhere, to compare with too (`shardkit manifest`,
            `consolidate(manifest_file=...)`). One in the source or beside it is found without this.
        manifest: put `shardkit.json` with sizes and digests into the output.
        manifest_file: write the same to this file once the output is complete; for `verify(..., manifest=...)`.
        sha256: take the sha256 of every file too, for the manifest.
        overwrite: replace an existing Hub model, whole and in one step.
        strict: refuse a run directory in which a newer checkpoint had to be passed over.
        dry_run: decide and check everything, and write nothing.
        resume: go on with an interrupted run of the same plan if its process is known to be dead.
        part: which part of the files this process writes, where several share the work: "3/16", "env" (what torchrun,
            mpirun or SLURM tells) or "env/16". The last to finish makes the output, or `shardkit.commit` does.
        executor: a pool whose workers carry out the parts, anything like `concurrent.futures.Executor`; or "ray", for the
            Ray cluster that is running, or one on this machine. `output` has to be named, and callbacks stay here.
        num_parts: how many parts the pool is given; Ray is given as many as can run at the same time by default.
        digest: "crc32" or "none".
        jobs: threads; by default the cores that this process may use, from 2 to 8.
        max_memory: bytes for all buffers, as a number or as "512MiB".
        push_to_hub: a repo id; the finished directory is uploaded there.
        private: make the repo private if it has to be made.
        branch: a branch of the repo, made if it is missing.
        follow_links: read and copy links that lead out of a checkpoint's directory as the files that they lead to.
            Weight files of a Hub model are read in any case.
        progress: told of the bytes as they move.
        on_warning: told each warning before anything is written; the result has them all.
        on_step: told what takes seconds and moves no bytes, such as "asking LlamaForCausalLM ...".

    Raises:
        UsageError: options that cannot be carried out, or a destination with something else than this call writes.
        SourceError: the checkpoint is damaged or incomplete, or its names do not fit.
        IntegrityError: its bytes are not what its checksums say.
        ResourceError: disk, permission or network.
        Interrupted: after Ctrl-C or SIGTERM; what was finished is kept.
    """
    dtype = short_dtype(dtype)
    if executor is not None or num_parts is not None:
        return in_pool(consolidate, locals())
    command, share = None if part is None else Command.of("consolidate", locals()), as_share(part)
    naming = Naming(
        weights=weights,
        root=root,
        strip_prefix=tuple(strip_prefix),
        add_prefix=add_prefix,
        rename=tuple(rename),
        include=tuple(include),
        exclude=tuple(exclude),
    )
    options = ConsolidateOptions(
        naming=naming,
        fill_from_base=tuple(fill_from_base),
        allow_missing=allow_missing,
        allow_unexpected=allow_unexpected,
        dtype=dtype,
        dtype_rules=parse_rules(dtype_rules),
        max_shard_bytes=_shard_limit(_SHARD_SIZE if max_shard_size is None else max_shard_size, single_file),
        follows_base=max_shard_size is None and not single_file,
        digest=digest,
        keep_factors=keep_factors,
        merge_lora=merge_lora,
        adapter_config=adapter_config,
        keys=os.fspath(keys),
        ask_class=ask_class,
        tokenizer=None if tokenizer is None else open_tokenizer(stores.as_path(tokenizer)),
    )
    moving = Moving(
        jobs=jobs,
        max_memory=max_memory,
        digest=digest,
        check_source=check_source,
        source_manifest=source_manifest,
    )
    writing = Writing(
        overwrite=overwrite,
        dry_run=dry_run,
        resume=resume,
        share=share,
        command=command,
        recorded=[name for name, asked in (("sha256", sha256), ("manifest", manifest)) if asked],
    )
    request = _Request(
        checkpoint=stores.as_path(checkpoint),
        output=None if output is None else os.fspath(output),
        base=None if base is None else os.fspath(base),
        base_revision=base_revision,
        strict=strict,
        ask_class=ask_class,
        dequantize=dequantize,
    )
    recording = Recording(manifest=manifest, manifest_file=manifest_file, sha256=sha256)
    publishing = _HubUpload(repo_id=push_to_hub, private=private, branch=branch)

    told = set[str]()

    def warn_once(text: str) -> None:
        if on_warning is not None and text not in told:
            on_warning(text)
        told.add(text)

    writer = Writer(
        "consolidate",
        moving,
        writing,
        kind=OutputKind.HUB,
        looks_late=True,
        progress=progress,
        on_warning=warn_once,
    )
    return _consolidate(request, options, recording, publishing, writer, on_step or silent)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What is read, and what is asked about it."""

    checkpoint: str
    output: str | None
    base: str | None
    base_revision: str | None
    strict: bool
    ask_class: bool
    dequantize: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _HubUpload:
    """Where the finished directory is uploaded."""

    repo_id: str | None
    private: bool
    branch: str | None

    def check(self, output: str | None) -> None:
        """Refuse what could not be uploaded, before anything is read.

        Raises:
            UsageError: the options lack a repo, or its name is not a repo id, or the output goes into a store.
            ResourceError: huggingface_hub is missing.
        """
        if self.repo_id is not None and is_remote(output):
            raise UsageError(
                "--push-to-hub uploads a local directory, and the output goes into a store",
                hint="leave one of the two out",
            )
        if self.repo_id is not None:
            from shardkit.formats.hub.repo import check_push

            check_push(self.repo_id)
        elif self.private or self.branch is not None:
            raise UsageError("--private and --branch belong to --push-to-hub, which is not given")

    def push(self, directory: str, names: Iterable[str]) -> tuple[str | None, list[str]]:
        """Upload a directory where a repo is named; return the repo's address, and notes.

        Args:
            directory: the finished output.
            names: of its files beside the weights.
        """
        if self.repo_id is None:
            return None, []
        from shardkit.formats.hub.repo import push

        texts = filter(is_text, names)
        pushed = push(directory, self.repo_id, private=self.private, branch=self.branch, by_people=texts)
        repo, notes = escape(self.repo_id), list[str]()
        if pushed.kept:
            notes.append(f"{repo} keeps its own {listed(pushed.kept)}; ours stayed in {escape(directory)}")
        if pushed.removed:
            notes.append(f"{repo}: {listed(pushed.removed)} of its earlier, quantised weights was removed")
        return pushed.address, notes


def _consolidate(
    request: _Request,
    options: ConsolidateOptions,
    recording: Recording,
    publishing: _HubUpload,
    writer: Writer,
    on_step: OnStep,
) -> ConsolidateResult:
    if request.base_revision is not None and request.base is None:
        raise UsageError("--base-revision belongs to --base, which is not given")
    recording.check()
    publishing.check(request.output)
    adapter = adapter_file(request.checkpoint)
    taken = take(request.checkpoint, strict=request.strict)
    resolved = taken.resolved
    writer.warn(resolved.warnings)
    beside = request.checkpoint if adapter else resolved.path
    output = default_output(beside) if request.output is None else request.output
    path = writer.check_destination(output, resolved.path)
    share = writer.writing.share
    made = os.path.join(path, HUB_INDEX) if is_remote(path) else path
    is_parts = share is not None and storage.lexists(made)
    may_be_ours = writer.writing.overwrite or writer.exists or is_parts
    sidecar = recording.check_file([path, resolved.path], overwrite=may_be_ours)
    writer.describes_elsewhere = sidecar is not None
    opened, base = _open(taken, request, options)
    # What is there is compared as a whole, whatever this process would write of it.
    moved = None if writer.exists else share
    as_read = not writer.writing.dry_run
    job = build_job(opened, base, options, share=moved, as_read=as_read, on_step=on_step)
    if is_remote(path):
        job = job.marked(writer.hash_in_store(job)[:8])
    writer.open_all = job.whole
    writer.check_beside(
        {asset.name: asset.read for asset in job.assets if not is_weights(asset.name)},
        {} if base is None else earlier_assets(base),
    )
    writer.warn(job.warnings)
    manifests = writer.find_manifests(
        [job.catalog, *(module.catalog for module in job.modules)], resolved.path
    )
    written, pushed = list[bytes](), list[tuple[str | None, list[str]]]()
    with ClassCheck(job, is_on=request.ask_class, warn=writer.warn, on_step=on_step) as asked:
        describe = partial(
            HubDescriptions,
            job,
            manifests,
            moving=writer.options,
            recording=recording,
            on_manifest=written.append,
            on_written=asked.settle,
        )

        def publish() -> None:
            asked.settle()
            if sidecar is not None:
                _write_record(sidecar, written[-1], writer.writing)
            pushed.append(publishing.push(path, [asset.name for asset in job.assets]))

        writer.write(job, describe, needed_bytes=job.needed_bytes, after=publish)
        settled = asked.settle() if writer.ends or writer.writing.dry_run else job
    address, kept = pushed[0] if pushed else (None, [])
    return _result(
        settled,
        resolved,
        writer.facts((*resolved.warnings, *settled.warnings)),
        given=request.checkpoint,
        notes=(*resolved.notes, *job.notes, *settled.notes[len(job.notes) :], *kept),
        pushed_to=address,
    )


def _write_record(path: str, data: bytes, writing: Writing) -> None:
    """Write the manifest to its own place, unless it is there already.

    Raises:
        UsageError: another one is there, and nothing is to be replaced.
        ResourceError: the system refuses.
    """
    if is_file_of(path, data):
        return
    if storage.lexists(path) and not writing.overwrite:
        raise UsageError(
            f"{escape(path)} exists, and is not the manifest that this command writes",
            hint="move it somewhere else, or choose another --manifest-file, and run the same command again",
        )
    write_sidecar(path, data, overwrite=writing.overwrite)


def default_output(checkpoint: str) -> str:
    """Return a sibling named after a checkpoint: `run/last.ckpt` -> `run/last-hf`."""
    return os.path.join(os.path.dirname(storage.absolute(checkpoint)), label_of(checkpoint) + EXPORT_ENDING)


def _shard_limit(max_shard_size: str | int, single_file: bool) -> int | None:
    if single_file:
        return None
    limit = parse_size(max_shard_size)
    if limit < 1:
        raise UsageError(f"--max-shard-size must be at least one byte, not {max_shard_size}")
    return limit


def _open(taken: Taken, request: _Request, options: ConsolidateOptions) -> tuple[Checkpoint, Base | None]:
    """Open the checkpoint and its base, both with plain and dense weights where they can be made.

    Raises:
        UsageError, SourceError, IntegrityError, LayoutError, ResourceError: as opening and `open_base` do.
    """
    dtype = dequantized_as(options.dtype, options.dtype_rules)
    is_asked = request.dequantize
    opened = take_folded(take_plain(taken.open(), dequantize=is_asked, dtype=dtype, by_content=is_asked))
    given = request.base
    base = find_base(opened) if given is None else open_base(given, revision=request.base_revision)
    return opened, None if base is None else folded_base(plain_base(base))


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
    """(prefix of names in memory, the Hub's prefix, number of these names); a whole name does not end in a dot."""
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
    pushed_to: str | None
    """Address of the repo on the Hub."""
    from_base: tuple[str, ...] = ()
    """Names of the tensors that were taken from the base."""
    unloadable: tuple[str, ...] = ()
    """Why `from_pretrained` would not load all weights of the output; in `warnings` too."""
    held_against: str | None = None
    """What told whether `from_pretrained` finds all weights: "base" or "class". None if only names and shapes told; a
    note says why."""
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
        if _place(home, name) not in carried
    ]
    if job.base is not None:
        said = {_place(home, name) for name, _ in beside}
        beside += [
            (name, f"of the base: {what}")
            for name, what in job.base.left_out
            if _place(job.base.directory, name) not in said
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


def _place(directory: str, name: str) -> str:
    """Return where a file lies; a name may be an entry's too, which no file could have."""
    path = os.path.join(directory, name)
    return storage.realpath(path) if storage.lexists(path) else path


def _result(
    job: ConsolidateJob,
    resolved: ResolvedCheckpoint,
    facts: dict[str, Any],
    *,
    given: str,
    notes: tuple[str, ...],
    pushed_to: str | None,
) -> ConsolidateResult:
    """Return the result of a run.

    Args:
        job: with the answer of the model's class, if it was asked.
        resolved: the checkpoint that was taken.
        facts: of `Writer.facts`.
        given: the checkpoint, as it was given.
        notes: all of them.
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
        model_class=model_class_of(job.base.config if job.base else None),
        assets=tuple(sorted([each.name for each in job.assets] + [each.file for each in job.modules])),
        ties=tuple((kept, dropped) for dropped, kept in job.ties.dropped.items()),
        untied=job.ties.diverged,
        from_base=job.fit.carried,
        cast=job.options.dtype,
        dtypes=tuple(count_dtypes((tensor.dtype.name, tensor.nbytes) for tensor in job.tensors)),
        num_tensors=len(job.tensors),
        num_parameters=sum(tensor.num_values for tensor in job.tensors),
        file_names=tuple(image.name for image in job.output),
        pushed_to=pushed_to,
        unloadable=job.unloadable,
        held_against="class" if is_asked else "base" if job.fit.is_whole else None,
        missing=answer.missing if answer is not None else (),
        misfits=answer.misfits if answer is not None else (),
        notes=notes,
    )
