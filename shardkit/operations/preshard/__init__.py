"""preshard: a Hub model becomes one file for each rank of a device mesh, ready for stock `dcp.load`.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from typing import Any

from shardkit import formats
from shardkit.core.mesh import Mesh, parse_mesh
from shardkit.core.text import KIB, MIB
from shardkit.core.threads import NoProgress, Progress
from shardkit.files.links import is_snapshot, may_follow_links
from shardkit.files.reflink import BLOCK, can_share_extents, nearest_existing
from shardkit.formats.checkpoint import HubModel
from shardkit.formats.recorded import find_manifests
from shardkit.operations.describe_dcp import Descriptions
from shardkit.operations.destination import check_destination, check_space, free_bytes
from shardkit.operations.preshard.job import PreshardJob, build_job
from shardkit.operations.write import check_resume_from, check_warnings, execute_options, run_job
from shardkit.transfer.checks import Unchecked
from shardkit.transfer.execute import ExecuteOptions

# What a chunk adds beside the shard files: its entries in `.metadata` and in a chunk list. Measured: 110
# and 130 bytes for a 2-D weight; names of tied tensors and long paths add some.
_DESCRIPTION_BYTES = 1 * KIB
_MIN_SHARED_BYTES = 16 * BLOCK  # the engine copies what is smaller


@dataclass(frozen=True, slots=True, kw_only=True)
class PreshardResult:
    """What preshard wrote, or with `dry_run` would write."""

    source: str
    """As it was given."""
    source_format: str
    """"safetensors" or "torch-bin"."""
    output: str
    """Directory of the checkpoint."""
    dry_run: bool
    world_size: int
    mesh: str
    """Axis names and sizes, e.g. "dp_replicate=2,dp_shard=16"."""
    layout: str
    """"traced" from the real model, or "declared" from names and shapes."""
    num_units: int
    num_tensors: int
    num_files: int
    read_bytes: int
    """From the source, once."""
    written_bytes: int
    """Size of all shard files."""
    file_bytes: tuple[int, ...]
    """Size of each shard file; `dp_shard` rank c reads file c."""
    imbalance: float
    """Largest file over the mean."""
    num_tensors_with_empty_shards: int
    shares_extents: bool
    """The file system shares blocks between files, so that most bytes are not copied."""
    peak_memory_bytes: int
    """Bound on the buffers, beside the interpreter and the plan."""
    download_bytes: int
    """Still to be brought into the Hub's cache; 0 but for a dry run of a repo."""
    free_bytes: int
    """On the destination's file system, before writing."""
    resumed_files: int
    """Files that an interrupted run had finished."""
    checked_bytes: int
    """Of the source: compared, as they moved, with the CRC-32 recorded for them."""
    unchecked: tuple[Unchecked, ...]
    """What could not be compared, by reason."""
    source_manifests: tuple[str, ...]
    """Manifests of shardkit's that were compared with, beside what the files record."""
    elapsed_s: float
    ties: tuple[tuple[str, ...], ...]
    omitted: tuple[tuple[str, str], ...]
    """(name, reason) of source tensors that are not in the output."""
    skipped: tuple[tuple[str, str], ...]
    """(name, reason) of files with weights beside the model's own; they are not in the output either."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return asdict(self)


@may_follow_links
def preshard(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    world_size: int | None = None,
    mesh: str | None = None,
    wrap: str = "auto",
    dtype: str = "keep",
    revision: str | None = None,
    variant: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    resume: bool = True,
    resume_from: str | os.PathLike[str] | None = None,
    digest: str = "crc32",
    sha256: bool = False,
    check_source: bool = True,
    source_manifest: str | os.PathLike[str] | None = None,
    jobs: int = 2,
    max_memory: str | int = 256 * MIB,
    trust_remote_code: bool = False,
    follow_links: bool = False,
    progress: Progress | None = None,
) -> PreshardResult:
    """Write `source` as a DCP checkpoint with one file for each shard coordinate of a mesh.

    Args:
        source: a directory or file of a Hub model, or a Hub repo id.
        output: the directory to make; by default a name that says model and mesh, in the working directory,
            or beside the source where the working directory lies in it.
        world_size: number of ranks; `mesh` may say it instead.
        mesh: "dp_replicate=2,dp_shard=16"; by default one `dp_shard` axis of `world_size`.
        wrap: "auto", "none", class names, dotted paths, or "module:function".
        dtype: "keep", "bf16", "fp16" or "fp32"; only floating tensors are converted.
        revision: branch, tag or commit of a repo.
        variant: "fp16" for `model.fp16.safetensors` and the like.
        overwrite: replace an existing checkpoint, whole and in one step.
        dry_run: decide and check everything, and write nothing. Of a repo's safetensors files that are not in
            the cache only the headers are read.
        resume: go on with an interrupted run of the same plan, where its process is known to be dead.
        resume_from: go on with this staging directory (`.<output>.shardkit-...`), of another host's run, say.
        digest: "crc32" or "none".
        sha256: take the sha256 of every file too, for the manifest; finished files are read once more.
        check_source: compare the source, as its bytes move, with the CRC-32s that its files record; a difference is
            refused before the output appears.
        source_manifest: a manifest of the source that lies elsewhere, to compare with too (`shardkit manifest`,
            `consolidate(manifest_file=...)`); one in it or beside it is taken by itself.
        jobs: threads.
        max_memory: bytes for all buffers, as a number or as "512MiB".
        trust_remote_code: the model's own code may run while its layout is traced.
        follow_links: links that lead out of a checkpoint's directory are read and copied as the files that they lead
            to. Weight files of a Hub model are read in any case.
        progress: told of the bytes as they move.

    Raises:
        UsageError: options that cannot be carried out, or an existing destination.
        SourceError: the source is damaged or does not fit the model.
        IntegrityError: its bytes are not what its checksums say.
        ResourceError: disk, permission or network.
        Interrupted: after Ctrl-C or SIGTERM; what was finished is kept.
    """
    begun, progress, source = time.monotonic(), progress or NoProgress(), os.fspath(source)
    output = None if output is None else os.fspath(output)
    parsed, options = (
        parse_mesh(mesh, world_size),
        execute_options(jobs, max_memory, digests=digest != "none", check_source=check_source),
    )
    local = source if os.path.exists(source) else None
    if output is not None:  # before anything is downloaded
        check_destination(output, local, overwrite=overwrite)
    model = formats.open(source, format="hub", revision=revision, variant=variant, headers_only=dry_run).hub
    assert model is not None  # what it asked for
    manifests = find_manifests(
        [model.catalog], local or model.directory, given=source_manifest, check_source=check_source
    )
    path = check_destination(output or _default_output(model, local, parsed), local, overwrite=overwrite)
    job = build_job(model, parsed, wrap=wrap, dtype=dtype, digest=digest, trust_remote_code=trust_remote_code)
    shared = _shareable_bytes(job)
    shares = shared > 0 and can_share_extents(model.catalog, os.path.dirname(path))
    options = replace(options, share_extents=shares)
    result = _describe(job, source, path, options, dry_run=dry_run)
    result = replace(
        result,
        shares_extents=shares and shared > job.plan.written_bytes // 2,
        source_manifests=tuple(manifests.paths),
        warnings=(*result.warnings, *manifests.warnings),
    )
    if resume_from is not None:
        resume_from = check_resume_from(os.fspath(resume_from), path, job.plan_hash, resume=resume)
    _check_room(job, path, shared_bytes=shared if shares else 0, resume_from=resume_from)
    if not dry_run:
        ran = run_job(
            job,
            path,
            options,
            progress,
            describe=partial(Descriptions, job, sha256=sha256),
            label="preshard",
            overwrite=overwrite,
            resume=resume,
            resume_from=resume_from,
        )
        result = replace(
            result,
            resumed_files=ran.resumed_files,
            checked_bytes=ran.source.checked_bytes,
            unchecked=ran.source.unchecked,
        )
    return replace(result, elapsed_s=round(time.monotonic() - begun, 3))


def _default_output(model: HubModel, source: str | None, mesh: Mesh) -> str:
    """Say model and mesh: "Qwen3-8B-dp_shard32", "Qwen3-8B-dp_replicate2-dp_shard16"."""
    name = "-".join([model.label, *(f"{axis.name}{axis.size}" for axis in mesh.axes)])
    if source is None or is_snapshot(source):  # what lies beside a snapshot is the Hub cache's own
        return name
    home = os.path.realpath(source)
    return (
        os.path.join(os.path.dirname(home), name) if os.path.commonpath([home, os.getcwd()]) == home else name
    )


def _check_room(job: PreshardJob, path: str, *, shared_bytes: int, resume_from: str | None) -> None:
    """Refuse to begin what cannot end, or to promise it where the source must be downloaded first."""
    needed, cache = _needed_bytes(job, shared_bytes), nearest_existing(job.model.directory)
    if job.model.download_bytes and os.stat(cache).st_dev != os.stat(os.path.dirname(path)).st_dev:
        check_space(os.path.join(cache, job.model.label), job.model.download_bytes)
    elif job.model.download_bytes:
        needed += job.model.download_bytes
    check_space(path, needed, resume_from=resume_from)


def _needed_bytes(job: PreshardJob, shared_bytes: int) -> int:
    """Disk that the run takes: all images but what is shared of them, and the descriptions."""
    return job.plan.written_bytes - shared_bytes + len(job.output.catalog.chunks) * _DESCRIPTION_BYTES


def _shareable_bytes(job: PreshardJob) -> int:
    """Return how many bytes of the images lie in whole blocks of the source, where extents can be shared.

    Cautious: the ragged ends of each hole count as two blocks, and the record around it lies in those.
    """
    total, catalog = 0, job.model.catalog
    for holes in job.plan.images.tensors():
        entry = catalog.tensors[holes.source]
        if holes.dtype is not entry.dtype or holes.source not in job.plan.streamed or entry.num_chunks != 1:
            continue
        sizes = [prod(region) * holes.dtype.itemsize for region in holes.sizes]
        if max(sizes) >= _MIN_SHARED_BYTES:
            small = sum(size for size in sizes if size < _MIN_SHARED_BYTES)  # the one short shard at the end
            total += max(
                holes.nbytes - small - job.output.catalog.tensors[holes.fqn].num_chunks * 2 * BLOCK, 0
            )
    return total


def _describe(
    job: PreshardJob, source: str, path: str, options: ExecuteOptions, *, dry_run: bool
) -> PreshardResult:
    layout, sizes = job.layout, tuple(image.size for image in job.output)
    return PreshardResult(
        source=source,
        source_format=job.model.catalog.format,
        output=path,
        dry_run=dry_run,
        world_size=layout.mesh.size,
        mesh=str(layout.mesh),
        layout=layout.origin,
        num_units=len(layout.units),
        num_tensors=len(layout.tensors),
        num_files=len(sizes),
        read_bytes=job.plan.read_bytes,
        written_bytes=job.plan.written_bytes,
        file_bytes=sizes,
        imbalance=round(max(sizes) * len(sizes) / sum(sizes), 4) if sum(sizes) else 1.0,
        num_tensors_with_empty_shards=_count_empty(job),
        shares_extents=options.share_extents,
        peak_memory_bytes=options.peak_bytes,
        download_bytes=job.model.download_bytes,
        free_bytes=free_bytes(path),
        resumed_files=0,
        checked_bytes=0,
        unchecked=(),
        source_manifests=(),
        elapsed_s=0.0,
        ties=tuple((name, *others) for name, others in job.aliases.items()),
        omitted=layout.omitted,
        skipped=job.model.beside,
        notes=job.notes,
        warnings=(*job.warnings, *check_warnings(options)),
    )


def _count_empty(job: PreshardJob) -> int:
    mesh = job.layout.mesh
    return sum(
        tensor.is_sharded
        and mesh.local_region(tensor.shape, tensor.placements, mesh.num_shards - 1).num_elements == 0
        for tensor in job.layout.tensors.values()
    )
