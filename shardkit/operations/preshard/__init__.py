"""preshard: write a Hub model as one file for each rank of a device mesh, ready for stock `dcp.load`.

    source -> layout -> stored tensors (ties, dtypes) -> images -> plan -> `operations.write`

A *layout* says which rank stores which region of which tensor; an *image* describes one file to write, with a *hole* for
each region. Files *share extents* if the file system keeps one copy of a block for several files.

`job` makes all decisions up to the plan: it reads headers and traces a layout, but writes nothing.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

from shardkit import formats
from shardkit.core.catalog import Catalog, SourceFile, join_name
from shardkit.core.keywords import keywords_of
from shardkit.core.mesh import Mesh
from shardkit.core.result import DrawnResult
from shardkit.core.text import escape, in_shell
from shardkit.errors import ShardkitError, SourceError
from shardkit.files import storage
from shardkit.files.links import reading_as
from shardkit.files.location import location_of
from shardkit.files.storage import BLOCK, can_share_extents, nearest_existing
from shardkit.formats.contract import Checkpoint, PlainWeights
from shardkit.formats.hub.directory import loader_of
from shardkit.formats.hub.files import refuse_part
from shardkit.formats.owned import reader_of
from shardkit.formats.registry import recognise
from shardkit.keys.expressions import EXPERTS, FusedTensors, NamedTensor, leaves
from shardkit.layout.layout import Layout, TensorLayout
from shardkit.operations.casts import dequantized_as
from shardkit.operations.describe_dcp import DESCRIPTION_BYTES, DcpOutput, FolderDescriptions
from shardkit.operations.describe_files import FileDescriptions, FilesOutput
from shardkit.operations.destination import check_space, default_output
from shardkit.operations.holdings import Holdings, find_holdings, imbalance_of
from shardkit.operations.parts.on_ray import run_on_ray
from shardkit.operations.parts.results import WriteResult
from shardkit.operations.preshard.job import PreshardJob, build_job
from shardkit.operations.preshard.options import PreshardOptions
from shardkit.operations.preshard.profiles import find_assets, write_companions
from shardkit.operations.resolve import find_checkpoint
from shardkit.operations.ties import shared_record_notes
from shardkit.operations.write import Writer, Writing
from shardkit.transfer.rank_files import PlacedRegion

_MIN_SHARED_BYTES = 16 * BLOCK  # the engine copies smaller pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class PreshardResult(WriteResult, DrawnResult):
    """What preshard wrote, or with `dry_run` would write."""

    source: str
    """The argument `source`."""
    source_format: str
    """"safetensors" or "torch-bin"."""
    world_size: int
    mesh: str
    """Axis names and sizes, e.g. "dp_replicate=2,dp_shard=16". Rank c of `dp_shard` reads file c."""
    loader: str
    """The class of transformers that loads the model, according to config.json; "AutoModel" if that names none."""
    profile: str
    """The trainer for which the directory was written; "plain" for stock `dcp.load`."""
    layout: str
    """"traced" from the real model, or "declared" from names and shapes."""
    num_units: int
    imbalance: float
    """Size of the largest file, divided by the mean size."""
    num_tensors_with_empty_shards: int
    fused: tuple[FusedTensors, ...]
    """Tensors that were made of several tensors of the source, as from_pretrained makes them."""
    shares_extents: bool
    """Most bytes are not copied: the file system shares blocks between files."""
    download_bytes: int
    """Bytes that still have to be downloaded into the Hub's cache; 0 except in a dry run of a repo."""
    ties: tuple[tuple[str, ...], ...]
    omitted: tuple[tuple[str, str], ...]
    """(name, reason) of source tensors that are not in the output."""
    copied: tuple[str, ...]
    """The model's config, tokenizer and the like, by their names in the output."""
    skipped: tuple[tuple[str, str], ...]
    """(name, reason) of files of the source with other weights than the model's; they are not in the output."""
    names: tuple[NamedTensor, ...] = ()
    """With `dry_run`: all tensors of the output."""
    holdings: Holdings | None = None
    """Which rank and which file holds which bytes; None without the option `holdings`. It has its own `to_json`."""


@keywords_of(PreshardOptions, reading_as)
def preshard(options: PreshardOptions) -> PreshardResult:
    """Write `source` as a DCP checkpoint with one file for each shard coordinate of a mesh.

    Args:
        source: a directory or file of a Hub model, or a Hub repo id.
        output: the directory to create. By default it is named after model and mesh and is in the working directory,
            or beside the source if the working directory is inside the source.
        world_size: number of ranks. It may be left out if `mesh` gives it.
        mesh: "dp_replicate=2,dp_shard=16", "dp_shard=4,tp=2" or "dp_shard=4,ep=2"; by default one `dp_shard` axis of
            `world_size`.
        wrap: "auto", "none", class names, dotted paths, or "module:function".
        parallel_rules: "GLOB=STYLE" says how the matching tensors, or all tensors of a matching module, are cut over
            `tp` or `ep`, instead of the plans of the model's class. If several rules match, the last wins.
        stages: which stage of `pp` holds what: "auto", or "module:function".
        layout: "traced" from the model of transformers; "declared" from the names and shapes in the files, without
            building a model; or "auto": traced if a model can be built.
        keys: rules that turn the Hub's names and tensors into a trainer's own: the path of a TOML file, or the name of
            a rule set of shardkit's; "none" leaves that to the model's class.
        names: "live" stores the tensors of the live model of transformers, under its names; "hub" those of the files.
        profile: the trainer that will start from the output: "plain" (stock `dcp.load`), "torchtitan", "accelerate",
            "lightning" (FSDPStrategy), "lightning-mp" (ModelParallelStrategy) or "transformers".
        attribute: with a profile of Lightning, the attribute of the LightningModule that holds the model; "" if the
            LightningModule is the model.
        dtype: "keep", "bf16", "fp16" or "fp32"; only floating tensors are converted.
        dtype_rules: "GLOB=fp32" sets the dtype of the tensors whose names in the output match the glob. If several
            rules match, the last wins. Each rule must match a tensor.
        dequantize: convert fp8, MXFP4 and NVFP4 weights to plain ones, in bfloat16 unless `dtype` says otherwise.
            Without it, a quantised source is refused.
        revision: branch, tag or commit of a repo.
        variant: "fp16" for `model.fp16.safetensors` and the like.
        overwrite: replace an existing checkpoint, whole and in one step.
        exist_ok: if `output` exists, leave it as it is, without looking inside; the result's `was_there` is true.
        dry_run: decide and check everything, but write nothing. Of a repo's safetensors files that are not in the
            cache, only the headers are read.
        holdings: also return which rank and which file holds which bytes, for pictures.
        part: which part of the files this process writes, if several processes share the work: "3/16", "env" (as
            torchrun, mpirun or SLURM number their processes) or "env/16". The last process to finish commits the output,
            or `shardkit.commit` does.
        executor: "ray" runs all parts as Ray tasks, on the running cluster, or on a new one on this machine. It needs
            `output`.
        num_parts: number of Ray tasks; by default as many as can run at the same time.
        digest: "crc32" or "none".
        sha256: compute the sha256 of every file, too, for the manifest; finished files are read once more.
        check_source: compare the source's bytes, as they are read, with the CRC-32s that its files record. If they
            differ, no output appears.
        source_manifest: a further manifest of the source to compare with, such as `consolidate(manifest_file=...)`
            writes. A manifest in or beside the source is found without this.
        jobs: number of threads; by default the cores that this process may use, from 2 to 8.
        max_memory: bytes for all buffers, as a number or as "512MiB"; by default 256 MiB.
        trust_remote_code: allow the model's own code to run while its layout is traced, and to convert tensors in ways
            that shardkit does not know.
        scratch: directory for files on their way into a store; by default beside the cache, never in memory.
        follow_links: follow links that lead out of the checkpoint's directory, and read and copy the files behind them.
            Weight files of a Hub model are read through links in any case.
        progress: called as bytes move. By default, terminals and notebooks show a bar; False shows none.
        on_warning: called with each warning before anything is written. The result lists all warnings.
        on_step: called before a step that takes seconds and moves no bytes, such as "tracing LlamaForCausalLM ...".

    Raises:
        UsageError: the options contradict each other, or the destination has something other than this call's output.
        SourceError: the source is damaged or does not fit the model.
        IntegrityError: its bytes do not match its checksums.
        ResourceError: disk, permission or network.
        Interrupted: after Ctrl-C or SIGTERM; finished files are kept.
    """
    if options.is_on_ray:
        return run_on_ray(preshard, options.given)
    source, output = os.fspath(options.source), options.output
    if not location_of(output).renames:
        options.trainer.check_in_store()
    local = source if storage.exists(source) else None
    writer = Writer(options, looks_late=local is not None)
    if output is not None:  # before anything is downloaded
        writer.check_destination(os.fspath(output), local)
    checkpoint = _open(source, options, writer)
    refuse_part(source)
    model = checkpoint.hub
    assert model is not None  # because of format="hub"
    writer.find_manifests([model.catalog], local or model.directory)
    as_dtype = dequantized_as(options.dtype, options.rules)
    plain = formats.open(
        checkpoint, plain=PlainWeights(dequantize=options.dequantize, dtype=as_dtype, by_content=True)
    )
    assert plain.hub is not None
    chosen = default_output(plain.hub.label, local, options.ranks) if output is None else output
    path = writer.check_destination(os.fspath(chosen), local, local if output is None else None)

    copied_files = find_assets(options.trainer, plain.hub).files
    writer.destination.check_beside({name: reader_of(file) for name, file in copied_files.items()})
    job = build_job(plain, options)
    shared_bytes = _shared_bytes(job, path)
    writer.warn(job.warnings)
    writer.write(
        Writing(
            job=job,
            describe=partial(_describe, job, sha256=options.sha256),
            needed_bytes=_needed_bytes(job, path, shared_bytes),
            share_extents=shared_bytes > 0,
        )
    )
    facts = writer.facts(job.warnings)
    notes = (*job.notes, *shared_record_notes(path, job.aliases if isinstance(job.part, DcpOutput) else ()))
    result = _result(job, source, facts, notes, shares_extents=shared_bytes > job.plan.written_bytes // 2)
    return replace(result, holdings=_find_holdings(job)) if options.holdings else result


def _open(source: str, options: PreshardOptions, writer: Writer) -> Checkpoint:
    """Open the source as a Hub model; raises as `formats.open`."""
    try:
        return formats.open(
            source,
            format="hub",
            revision=options.revision,
            variant=options.variant,
            headers_only=options.dry_run or writer.exists,
        )
    except SourceError as error:
        raise _not_hub_error(source, options.ranks, error) from error


def _not_hub_error(source: str, mesh: Mesh, error: SourceError) -> SourceError:
    """Return the error for a source that is not a Hub model; for a training checkpoint, with the right commands."""
    if not storage.exists(source):
        return error
    try:
        checkpoint = find_checkpoint(source).path
    except ShardkitError:
        return error
    recognised = recognise(checkpoint)
    if recognised is None or recognised.name == "hub":
        return error
    place = in_shell(source)
    ways = [f"`shardkit consolidate {place}` makes a Hub model of it"]
    if mesh.pp == 1:
        ways.insert(0, f"`shardkit reshard {place} --mesh {mesh}` writes it for this mesh")
    what = (
        "a checkpoint"
        if checkpoint == source
        else f"a run's directory with checkpoints, such as {escape(checkpoint)}"
    )
    return SourceError(f"{escape(source)} is {what}, not a Hub model", hint="; ".join(ways))


def _describe(
    job: PreshardJob, directory: str, *, sha256: bool, folder: str = ""
) -> FolderDescriptions | FileDescriptions:
    """Return the writer of the files other than shards in a directory: metadata, the model's files, the manifest."""
    write_others = partial(write_companions, job.profile, job.assets)
    if isinstance(job.part, FilesOutput):
        return FileDescriptions(job.part, write_others, directory, sha256=sha256)
    return FolderDescriptions(
        {job.profile.folder: job.part},
        write_others,
        directory,
        sha256=sha256,
        folder=folder,
    )


def _needed_bytes(job: PreshardJob, path: str, shared_bytes: int) -> int:
    """Return the bytes that are needed on the output's disk.

    These are the images without their shared bytes, the descriptions, and a download to the same disk.

    Raises:
        ResourceError: the source is downloaded to another disk, and that has too little room.
    """
    needed = job.plan.written_bytes - shared_bytes + job.num_chunks * DESCRIPTION_BYTES
    if location_of(path).sends:
        return needed
    download, cache = job.model.download_bytes, nearest_existing(job.model.directory)
    if download and storage.stat(cache).st_dev != storage.stat(os.path.dirname(path)).st_dev:
        check_space(os.path.join(cache, job.model.label), download)
        return needed
    return needed + download


def _shared_bytes(job: PreshardJob, path: str) -> int:
    """Return how many bytes of the images take no room on the disk, because it can share blocks with the source's files.

    This is a cautious estimate: two blocks are subtracted for each hole, for its unaligned ends and the record around it.
    """
    total, catalog = 0, job.model.catalog
    if isinstance(job.part, FilesOutput):  # the data follow headers of any length, so blocks are not aligned
        return 0
    for holes in job.part.output.tensors():  # all holes of one tensor
        entry = catalog.tensors[holes.source]
        is_copied = holes.source in job.plan.streamed
        if holes.dtype is not entry.dtype or not is_copied or entry.num_chunks != 1:
            continue
        sizes = [prod(region) * holes.dtype.itemsize for region in holes.sizes]
        if max(sizes) >= _MIN_SHARED_BYTES:
            small = sum(size for size in sizes if size < _MIN_SHARED_BYTES)  # the one short shard at the end
            total += max(
                holes.nbytes - small - job.part.output.catalog.tensors[holes.fqn].num_chunks * 2 * BLOCK, 0
            )
    return total if total and can_share_extents(catalog, os.path.dirname(path)) else 0


def _result(
    job: PreshardJob, source: str, facts: dict[str, Any], notes: tuple[str, ...], *, shares_extents: bool
) -> PreshardResult:
    layout = job.layout
    return PreshardResult(
        **facts,
        source=source,
        source_format=job.model.catalog.format,
        world_size=layout.mesh.size,
        mesh=str(layout.mesh),
        loader=loader_of(job.model.config),
        profile=job.profile.name,
        layout=layout.origin,
        num_units=len(layout.units),
        num_tensors=len(layout.tensors),
        imbalance=round(imbalance_of([image.size for image in job.output]), 4),
        num_tensors_with_empty_shards=sum(
            _has_empty_shards(layout, fqn, tensor) for fqn, tensor in layout.tensors.items()
        ),
        fused=tuple(_count_fused(layout)),
        shares_extents=shares_extents,
        download_bytes=job.model.download_bytes,
        ties=tuple((name, *other_names) for name, other_names in job.aliases.items()),
        omitted=layout.omitted,
        copied=tuple(job.assets),
        skipped=job.model.other_weights,
        names=tuple(_named_tensors(job)) if facts["dry_run"] else (),
        notes=notes,
    )


def _named_tensors(job: PreshardJob) -> Iterator[NamedTensor]:
    """Yield each tensor of the output with its sources and who decided its name."""
    expressions = job.layout.expressions
    for fqn in job.layout.tensors:
        stored = job.layout.sources[fqn]
        sources = (
            dict.fromkeys(leaf.name for leaf in leaves(expressions[stored]))
            if stored in expressions
            else [stored]
        )
        yield NamedTensor.made_of(fqn, job.named_by, sources)


def _count_fused(layout: Layout) -> Iterator[FusedTensors]:
    """Yield how many tensors of the source were fused into how many, first for experts, then for all others."""
    for are_experts in (True, False):
        trees = [
            tree
            for fqn, stored in layout.sources.items()
            if (tree := layout.expressions.get(stored)) is not None and (EXPERTS in fqn) == are_experts
        ]
        if trees:
            parts = {leaf.name for tree in trees for leaf in leaves(tree)}
            yield FusedTensors(are_experts=are_experts, num_stored=len(parts), num_tensors=len(trees))


def _has_empty_shards(layout: Layout, fqn: str, tensor: TensorLayout) -> bool:
    """True if some rank has no element of a sharded tensor. The last rank has the least, so only that is examined."""
    mesh = layout.mesh if tensor.stage is None else layout.mesh.on_stage(tensor.stage)
    last_rank = (mesh.ranks or range(mesh.size))[-1]
    return tensor.is_sharded and not any(part.region.num_elements for part in layout.held(fqn, last_rank))


def _find_holdings(job: PreshardJob) -> Holdings:
    """Return which rank and which file will hold which bytes, computed before any byte moves."""
    if isinstance(job.part, DcpOutput):
        folder = job.profile.folder
        return find_holdings(
            job.part.output.catalog, job.part.layout, names=lambda file: join_name(folder, file.name)
        )
    catalog = Catalog(format="", directory="")  # describes rank files that do not exist yet
    places: dict[str, list[tuple[int, int, PlacedRegion]]] = {}
    for number, image in enumerate(job.part.output):
        catalog.files.append(SourceFile(name=image.name, path="", size=image.size))
        for placed, hole in zip(image.placed, image.holes, strict=True):
            places.setdefault(placed.fqn, []).append((number, hole.start, placed))
    for fqn, rows in places.items():
        _, _, first = rows[0]
        catalog.add_tensor_columns(
            fqn,
            first.dtype,
            first.shape,
            [number for number, _, _ in rows],
            [start for _, start, _ in rows],
            [placed.nbytes for _, _, placed in rows],
            [placed.region for _, _, placed in rows],
        )
    return find_holdings(catalog, job.layout)
