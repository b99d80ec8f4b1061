"""reshard: write a sharded checkpoint, model and optimizer, for another mesh.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardkit.core.catalog import join_name
from shardkit.core.keywords import keywords_of
from shardkit.files import manifest, storage, stores
from shardkit.files.links import reading_as
from shardkit.files.location import location_of
from shardkit.formats.owned import reader_of
from shardkit.formats.recorded import SourceManifests
from shardkit.operations.describe import OutputFiles
from shardkit.operations.describe_dcp import DESCRIPTION_BYTES, FolderDescriptions
from shardkit.operations.destination import check_one_folder, default_output, label_of
from shardkit.operations.parts.on_ray import run_on_ray
from shardkit.operations.parts.results import WriteResult
from shardkit.operations.reshard.job import Parts, ReshardJob, build_job, open_parts
from shardkit.operations.reshard.options import ReshardOptions
from shardkit.operations.resolve import ResolvedCheckpoint, choose_checkpoint, named_after
from shardkit.operations.ties import shared_record_notes
from shardkit.operations.write import Writer, Writing


def copy_files(parts: Parts, manifests: SourceManifests, output: OutputFiles) -> list[manifest.ListedFile]:
    """Copy the files outside of the DCP directories, and create the empty directories.

    Args:
        parts: the checkpoint.
        manifests: the source's manifests. Copies are compared with them.
        output: writes into the output's directory.

    Returns:
        The files' entries in the manifest.
    """
    for name in parts.empty:
        storage.make_folders(output.directory, name)
    copied = list[manifest.ListedFile]()
    for file in parts.files:
        path = parts.paths[file.name]
        copied.append(output.copy(file, path, is_recorded=manifests.crc_of(path) is not None))
    manifests.check_copies(output.copies)
    return copied


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardResult(WriteResult):
    """What reshard wrote, or with `dry_run` would write; `num_tensors` leaves out the optimizer's tensors."""

    source: str
    """The argument `checkpoint`."""
    checkpoint: str
    """The checkpoint that was used."""
    reason: str
    """Why this one was chosen, as text for people."""
    writer: str
    """The program that wrote it, as text for people."""
    world_size: int
    mesh: str
    """Axis names and sizes."""
    num_optimizer_tensors: int
    num_objects: int
    """Number of byte entries. Those of a DCP checkpoint are copied unread; those of other formats are plain settings."""
    distributed_objects: tuple[str, ...]
    """Byte entries that contain distributed tensors, as one rank of the old mesh had them. Training cannot be resumed
    from these."""
    folders: tuple[str, ...]
    """The DCP directories, relative to the checkpoint; "" for the checkpoint itself."""
    copied: tuple[str, ...]
    """Files outside of these directories, which were copied unchanged."""


@keywords_of(ReshardOptions, reading_as)
def reshard(options: ReshardOptions) -> ReshardResult:
    """Write a sharded checkpoint for another mesh: model, optimizer and everything else.

    Args:
        checkpoint: a checkpoint, or a run directory, whose newest complete checkpoint is used.
        output: the directory to create; by default one in the working directory, named after checkpoint and mesh. The
            same trainer can read it, because all other files of the checkpoint are copied.
        world_size: number of ranks. It may be left out if `mesh` gives it.
        mesh: "dp_replicate=2,dp_shard=16"; by default one `dp_shard` axis of `world_size`.
        dtype: "keep", "bf16", "fp16" or "fp32" for floating tensors outside the optimizer; scalars keep their dtype.
        optimizer_dtype: the same for the optimizer's state.
        no_optimizer: leave out the optimizer's state, without opening it. Everything else is written.
        overwrite: replace an existing checkpoint, whole and in one step.
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
        sha256: compute the sha256 of every file, too, for the manifest; finished files are read once more.
        check_source: compare the source's bytes, as they are read, with the CRC-32s that its files record. If they
            differ, no output appears.
        source_manifest: a further manifest of the source to compare with, such as `consolidate(manifest_file=...)`
            writes. A manifest in or beside the source is found without this.
        jobs: number of threads; by default the cores that this process may use, from 2 to 8.
        max_memory: bytes for all buffers, as a number or as "512MiB".
        scratch: directory for files on their way into a store; by default beside the cache, never in memory.
        follow_links: follow links that lead out of the checkpoint's directory, and read and copy the files behind them.
            Weight files of a Hub model are read through links in any case.
        progress: called as bytes move. By default, terminals and notebooks show a bar; False shows none.
        on_warning: called with each warning before anything is written. The result lists all warnings.

    Raises:
        UsageError: the options contradict each other, or the destination has something other than this call's output.
        SourceError: the checkpoint is damaged or incomplete, or its format is not supported.
        IntegrityError: its bytes do not match its checksums.
        ResourceError: disk or permission.
        Interrupted: after Ctrl-C or SIGTERM; finished files are kept.
    """
    if options.is_on_ray:
        return run_on_ray(reshard, options.given)
    source, writer = stores.as_path(options.checkpoint), Writer(options, looks_late=True)
    checkpoint = choose_checkpoint(source, strict=options.strict, whole_steps=True)
    resolved = checkpoint.resolved
    writer.warn(resolved.warnings)
    named, output = named_after(resolved, source), options.output
    chosen = default_output(label_of(named), named, options.ranks) if output is None else output
    writer.check_destination(os.fspath(chosen), resolved.path, named if output is None else None)
    parts = open_parts(checkpoint, options)
    copied_files = {name: reader_of(path) for name, path in parts.paths.items()}
    writer.destination.check_beside({**copied_files, **{f"{folder}/": bytes for folder in parts.empty}})
    writer.warn(parts.warnings)
    manifests = writer.find_manifests([part.catalog for part in parts.parts], resolved.path)
    if not location_of(writer.path).renames:
        check_one_folder([part.folder for part in parts.parts])
    job = build_job(parts, options)
    chunks = sum(len(part.output.catalog.chunks) for part in job.folders.values())
    copied = sum(file.stamp.size for file in parts.files)
    writer.write(
        Writing(
            job=job,
            describe=partial(
                FolderDescriptions,
                job.folders,
                partial(copy_files, parts, manifests),
                sha256=options.sha256,
            ),
            needed_bytes=job.plan.written_bytes + chunks * DESCRIPTION_BYTES + copied,
        )
    )
    return _result(job, source, writer.path, resolved, writer.facts((*resolved.warnings, *parts.warnings)))


def _result(
    job: ReshardJob, source: str, path: str, resolved: ResolvedCheckpoint, facts: dict[str, Any]
) -> ReshardResult:
    optimizer = sum(len(part.optimizer) for part in job.folders.values())
    tied = [join_name(folder, name) for folder, part in job.folders.items() for name in part.aliases]
    objects = sum(len(part.objects) for part in job.folders.values())
    return ReshardResult(
        **facts,
        source=source,
        checkpoint=resolved.path,
        reason=resolved.reason,
        writer=job.parts.writer,
        world_size=job.mesh.size,
        mesh=str(job.mesh),
        num_tensors=sum(len(part.layout.tensors) for part in job.folders.values()) - optimizer - objects,
        num_optimizer_tensors=optimizer,
        num_objects=objects,
        distributed_objects=tuple(
            join_name(part.folder, name) for part in job.parts.parts for name in part.distributed_objects
        ),
        folders=tuple(job.folders),
        copied=job.parts.siblings,
        notes=(*job.notes, *shared_record_notes(path, tied)),
    )
