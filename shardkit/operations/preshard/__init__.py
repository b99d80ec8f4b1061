"""preshard: a Hub model becomes one file for each rank of a device mesh, ready for stock `dcp.load`.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from shardkit import formats
from shardkit.core.mesh import Mesh, parse_mesh
from shardkit.core.text import MIB
from shardkit.core.threads import Progress
from shardkit.files import storage
from shardkit.files.links import is_snapshot, may_follow_links
from shardkit.files.storage import BLOCK, can_share_extents, nearest_existing
from shardkit.formats.contract import HubModel
from shardkit.operations.describe_dcp import DESCRIPTION_BYTES, Descriptions
from shardkit.operations.destination import check_space
from shardkit.operations.preshard.job import PreshardJob, build_job
from shardkit.operations.write import Moving, Writer, WriteResult, Writing

_MIN_SHARED_BYTES = 16 * BLOCK  # the engine copies what is smaller


@dataclass(frozen=True, slots=True, kw_only=True)
class PreshardResult(WriteResult):
    """What preshard wrote, or with `dry_run` would write."""

    source: str
    """As it was given."""
    source_format: str
    """"safetensors" or "torch-bin"."""
    world_size: int
    mesh: str
    """Axis names and sizes, e.g. "dp_replicate=2,dp_shard=16". Rank c of `dp_shard` reads file c."""
    layout: str
    """"traced" from the real model, or "declared" from names and shapes."""
    num_units: int
    imbalance: float
    """Size of the largest file over the mean."""
    num_tensors_with_empty_shards: int
    shares_extents: bool
    """Most bytes are not copied: the file system shares blocks between files."""
    download_bytes: int
    """What is still to be fetched into the Hub's cache; 0 except in a dry run of a repo."""
    ties: tuple[tuple[str, ...], ...]
    omitted: tuple[tuple[str, str], ...]
    """(name, reason) of source tensors that are not in the output."""
    skipped: tuple[tuple[str, str], ...]
    """(name, reason) of files that hold weights beside the model's own; they are not in the output either."""


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
        output: the directory to make. By default it is named after model and mesh and lies in the working directory,
            or beside the source if the working directory lies in the source.
        world_size: number of ranks; `mesh` may tell it instead.
        mesh: "dp_replicate=2,dp_shard=16"; by default one `dp_shard` axis of `world_size`.
        wrap: "auto", "none", class names, dotted paths, or "module:function".
        dtype: "keep", "bf16", "fp16" or "fp32"; only floating tensors are converted.
        revision: branch, tag or commit of a repo.
        variant: "fp16" for `model.fp16.safetensors` and the like.
        overwrite: replace an existing checkpoint, whole and in one step.
        dry_run: decide and check everything, and write nothing. Of a repo's safetensors files that are not in
            the cache, only the headers are read.
        resume: go on with an interrupted run of the same plan if its process is known to be dead.
        resume_from: go on with this staging directory (`.<output>.shardkit-...`), for example of another host's run.
        digest: "crc32" or "none".
        sha256: take the sha256 of every file too, for the manifest; finished files are read once more.
        check_source: compare the source, as its bytes move, with the CRC-32s that its files record; a difference is
            refused before the output appears.
        source_manifest: a manifest of the source that lies elsewhere, to compare with too (`shardkit manifest`,
            `consolidate(manifest_file=...)`). One in the source or beside it is found without this.
        jobs: threads.
        max_memory: bytes for all buffers, as a number or as "512MiB".
        trust_remote_code: the model's own code may run while its layout is traced.
        follow_links: read and copy links that lead out of a checkpoint's directory as the files that they lead to.
            Weight files of a Hub model are read in any case.
        progress: told of the bytes as they move.

    Raises:
        UsageError: options that cannot be carried out, or an existing destination.
        SourceError: the source is damaged or does not fit the model.
        IntegrityError: its bytes are not what its checksums say.
        ResourceError: disk, permission or network.
        Interrupted: after Ctrl-C or SIGTERM; what was finished is kept.
    """
    source = os.fspath(source)
    parsed = parse_mesh(mesh, world_size)
    writer = Writer(
        "preshard",
        Moving(
            jobs=jobs,
            max_memory=max_memory,
            digest=digest,
            check_source=check_source,
            source_manifest=source_manifest,
        ),
        Writing(overwrite=overwrite, dry_run=dry_run, resume=resume, resume_from=resume_from),
        progress=progress,
    )
    local = source if storage.exists(source) else None
    if output is not None:  # before anything is downloaded
        writer.check_destination(os.fspath(output), local)
    model = formats.open(source, format="hub", revision=revision, variant=variant, headers_only=dry_run).hub
    assert model is not None  # what it asked for
    writer.find_manifests([model.catalog], local or model.directory)
    path = writer.check_destination(os.fspath(output or _default_output(model, local, parsed)), local)
    job = build_job(model, parsed, wrap=wrap, dtype=dtype, digest=digest, trust_remote_code=trust_remote_code)
    shared = _shareable_bytes(job)
    shares = shared > 0 and can_share_extents(model.catalog, os.path.dirname(path))
    writer.write(
        job,
        partial(Descriptions, job, sha256=sha256),
        needed_bytes=_needed_bytes(job, path, shared if shares else 0),
        share_extents=shares,
    )
    is_mostly_shared = shares and shared > job.plan.written_bytes // 2
    return _result(job, source, writer.facts(job.warnings), shares_extents=is_mostly_shared)


def _default_output(model: HubModel, source: str | None, mesh: Mesh) -> str:
    """Return a name made of model and mesh: "Qwen3-8B-dp_shard32", "Qwen3-8B-dp_replicate2-dp_shard16"."""
    name = "-".join([model.label, *(f"{axis.name}{axis.size}" for axis in mesh.axes)])
    if source is None or is_snapshot(source):  # the place beside a snapshot belongs to the Hub's cache
        return name
    home = storage.realpath(source)
    return (
        os.path.join(os.path.dirname(home), name) if os.path.commonpath([home, os.getcwd()]) == home else name
    )


def _needed_bytes(job: PreshardJob, path: str, shared_bytes: int) -> int:
    """Return the room that the run takes on the disk of its output.

    These are the images without their shared bytes, the descriptions, and a download to the same disk.

    Raises:
        ResourceError: the source is downloaded to another disk, which lacks the room.
    """
    needed = job.plan.written_bytes - shared_bytes + len(job.output.catalog.chunks) * DESCRIPTION_BYTES
    download, cache = job.model.download_bytes, nearest_existing(job.model.directory)
    if download and storage.stat(cache).st_dev != storage.stat(os.path.dirname(path)).st_dev:
        check_space(os.path.join(cache, job.model.label), download)
        return needed
    return needed + download


def _shareable_bytes(job: PreshardJob) -> int:
    """Return how many bytes of the images lie in whole blocks of the source, so that their extents can be shared.

    It is a cautious estimate: the ragged ends of each hole count as two blocks, which hold the record around it too.
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


def _result(job: PreshardJob, source: str, facts: dict[str, Any], *, shares_extents: bool) -> PreshardResult:
    layout, sizes = job.layout, [image.size for image in job.output]
    return PreshardResult(
        **facts,
        source=source,
        source_format=job.model.catalog.format,
        world_size=layout.mesh.size,
        mesh=str(layout.mesh),
        layout=layout.origin,
        num_units=len(layout.units),
        num_tensors=len(layout.tensors),
        imbalance=round(max(sizes) * len(sizes) / sum(sizes), 4) if sum(sizes) else 1.0,
        num_tensors_with_empty_shards=_count_empty(job),
        shares_extents=shares_extents,
        download_bytes=job.model.download_bytes,
        ties=tuple((name, *others) for name, others in job.aliases.items()),
        omitted=layout.omitted,
        skipped=job.model.beside,
        notes=job.notes,
    )


def _count_empty(job: PreshardJob) -> int:
    mesh = job.layout.mesh
    return sum(
        tensor.is_sharded
        and mesh.local_region(tensor.shape, tensor.placements, mesh.num_shards - 1).num_elements == 0
        for tensor in job.layout.tensors.values()
    )
