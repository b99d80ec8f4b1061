"""reshard: a sharded checkpoint, model and optimizer, for another mesh.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from shardkit._version import __version__
from shardkit.core.mesh import Mesh, parse_mesh
from shardkit.core.text import KIB, MIB, escape
from shardkit.core.threads import NoProgress, Progress
from shardkit.files import manifest, storage
from shardkit.files.links import may_follow_links
from shardkit.formats.recorded import SourceManifests, find_manifests
from shardkit.operations.companions import BesideFile, copy_file
from shardkit.operations.describe_dcp import Descriptions
from shardkit.operations.destination import check_destination, check_space, free_bytes, is_sharded_checkpoint
from shardkit.operations.reshard.job import ReshardJob, build_job
from shardkit.operations.reshard.parts import take_apart
from shardkit.operations.resolve import take
from shardkit.operations.write import (
    OnWarning,
    check_resume_from,
    check_warnings,
    execute_options,
    run_job,
    warn_all,
)
from shardkit.transfer.checks import Unchecked
from shardkit.transfer.execute import ExecuteOptions, FileDigest

_DESCRIPTION_BYTES = 1 * KIB  # for each chunk, beside the shard files


class ReshardDescriptions:
    """Describes every folder. A context manager, as `Descriptions` is.

    Args:
        source: the checkpoint that siblings are copied from.
        job: what is being written.
        manifests: of the source; siblings are compared with them.
        directory: where.
        sha256: take it of every file.
    """

    def __init__(
        self,
        source: str,
        job: ReshardJob,
        manifests: SourceManifests,
        directory: str,
        *,
        sha256: bool = False,
    ) -> None:
        self._source, self._job, self._directory, self._sha256 = source, job, directory, sha256
        self._manifests = manifests
        self._has_digests = any(part.digest != "none" for part in job.folders.values())
        self._stack = contextlib.ExitStack()
        self._of: dict[str, Descriptions] = {}
        for folder, part in job.folders.items():
            place = os.path.join(directory, folder)
            storage.make_directories(place)
            self._of[folder] = self._stack.enter_context(Descriptions(part, place, sha256=sha256))

    def __enter__(self) -> ReshardDescriptions:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add_file(self, digest: FileDigest) -> None:
        """Write the chunk list of a finished file; may be called from any thread."""
        folder, name = os.path.split(digest.name)
        self._of[folder].add_file(replace(digest, name=name))

    def finish(self, digests: Mapping[str, FileDigest], scattered: Mapping[str, int]) -> None:
        """Copy what lies beside, then let each folder become a checkpoint."""
        for name in self._job.parts.empty:
            storage.make_directories(os.path.join(self._directory, name))
        copied = [self._copy(file) for file in self._job.parts.files]
        self._manifests.check_copies(
            (entry["name"], os.path.join(self._source, entry["name"]), entry["crc32"]) for entry in copied
        )
        if not self._has_digests:
            copied = [{**entry, "crc32": None} for entry in copied]
        for folder, descriptions in self._of.items():
            own = {
                os.path.basename(name): replace(digest, name=os.path.basename(name))
                for name, digest in digests.items()
                if os.path.dirname(name) == folder
            }
            descriptions.finish(own, scattered, others=() if folder else copied)
        if "" not in self._of:
            self._write_manifest(copied)

    def _copy(self, file: BesideFile) -> dict[str, Any]:
        """Copy a file; return what the manifest says of it."""
        is_listed = self._manifests.crc_of(os.path.join(self._source, file.name)) is not None
        crc, sha256 = copy_file(
            self._source, file, self._directory, digest=self._has_digests or is_listed, sha256=self._sha256
        )
        return manifest.file_entry(file.name, file.stamp.size, crc, sha256)

    def _write_manifest(self, copied: list[dict[str, Any]]) -> None:
        """Write the manifest of the whole: the files beside the folders, and the manifests of those."""
        own = [
            manifest.entry_of(
                os.path.join(folder, manifest.NAME), each.manifest, digest=True, sha256=self._sha256
            )
            for folder, each in self._of.items()
        ]
        content = {
            "format": manifest.FORMAT,
            "kind": manifest.KIND_FILES,
            "tool": {"name": "shardkit", "version": __version__},
            "folders": list(self._of),
            "files": sorted((*copied, *own), key=lambda entry: str(entry["name"])),
            "unlisted": [],
        }
        storage.write_file(os.path.join(self._directory, manifest.NAME), manifest.dump(content))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardResult:
    """What reshard wrote, or with `dry_run` would write."""

    source: str
    """As it was given."""
    checkpoint: str
    """The checkpoint that was taken."""
    writer: str
    """Who wrote it, for people."""
    output: str
    dry_run: bool
    world_size: int
    mesh: str
    """Axis names and sizes."""
    num_tensors: int
    """Of the model and of everything else that is not the optimizer's."""
    num_optimizer_tensors: int
    num_objects: int
    """Byte entries: those of DCP carried over unread, those of other forms plain settings."""
    num_files: int
    read_bytes: int
    written_bytes: int
    """Size of all shard files."""
    file_bytes: tuple[int, ...]
    """Size of each shard file, folder by folder."""
    folders: tuple[str, ...]
    """Of the DCP directories, relative to the checkpoint; "" for the checkpoint itself."""
    copied: tuple[str, ...]
    """Files beside them that were copied as they are."""
    peak_memory_bytes: int
    """Bound on the buffers, beside the interpreter and the plan."""
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
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return asdict(self)


@may_follow_links
def reshard(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    world_size: int | None = None,
    mesh: str | None = None,
    dtype: str = "keep",
    optimizer_dtype: str = "keep",
    overwrite: bool = False,
    strict: bool = False,
    dry_run: bool = False,
    resume: bool = True,
    resume_from: str | os.PathLike[str] | None = None,
    digest: str = "crc32",
    sha256: bool = False,
    check_source: bool = True,
    source_manifest: str | os.PathLike[str] | None = None,
    jobs: int = 2,
    max_memory: str | int = 256 * MIB,
    follow_links: bool = False,
    progress: Progress | None = None,
    on_warning: OnWarning | None = None,
) -> ReshardResult:
    """Write a sharded checkpoint anew, for another mesh: model, optimizer and everything else.

    Args:
        checkpoint: a checkpoint, or a run directory, whose newest complete checkpoint is taken.
        output: the directory to make. It is of the same trainer's kind: what lies beside the shards is copied.
        world_size: number of ranks; `mesh` may say it instead.
        mesh: "dp_replicate=2,dp_shard=16"; by default one `dp_shard` axis of `world_size`.
        dtype: "keep", "bf16", "fp16" or "fp32" for floating tensors outside the optimizer; scalars stay.
        optimizer_dtype: the same for the optimizer's state.
        overwrite: replace an existing checkpoint, whole and in one step.
        strict: refuse a run directory in which a newer checkpoint had to be passed over.
        dry_run: decide and check everything, and write nothing.
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
        follow_links: links that lead out of a checkpoint's directory are read and copied as the files that they lead
            to. Weight files of a Hub model are read in any case.
        progress: told of the bytes as they move.
        on_warning: told each warning before anything is written; the result has them all.

    Raises:
        UsageError: options that cannot be carried out, or an existing destination.
        SourceError: the checkpoint is damaged, incomplete or not understood.
        IntegrityError: its bytes are not what its checksums say.
        ResourceError: disk or permission.
        Interrupted: after Ctrl-C or SIGTERM; what was finished is kept.
    """
    begun, progress, source = time.monotonic(), progress or NoProgress(), os.fspath(checkpoint)
    parsed = parse_mesh(mesh, world_size)
    options = execute_options(jobs, max_memory, digests=digest != "none", check_source=check_source)
    chosen = take(source, strict=strict)
    resolved = chosen.resolved
    warn_all(on_warning, resolved.warnings)
    path = check_destination(
        os.fspath(output), resolved.path, overwrite=overwrite, why_not=is_sharded_checkpoint
    )
    parts = take_apart(chosen, check_source=check_source)
    manifests = find_manifests(
        [part.catalog for part in parts.parts],
        resolved.path,
        given=source_manifest,
        check_source=check_source,
    )
    warn_all(on_warning, (*parts.warnings, *check_warnings(options), *manifests.warnings))
    job = build_job(parts, parsed, dtype=dtype, optimizer_dtype=optimizer_dtype, digest=digest)
    taken = (
        [f"{escape(resolved.path)}: {resolved.reason}"]
        if resolved.path.rstrip("/") != source.rstrip("/")
        else []
    )
    result = _describe(job, source, resolved.path, path, parsed, options, dry_run=dry_run)
    result = replace(
        result,
        notes=(*taken, *resolved.notes, *result.notes),
        warnings=(*resolved.warnings, *result.warnings, *manifests.warnings),
        source_manifests=tuple(manifests.paths),
    )
    chunks = sum(len(part.output.catalog.chunks) for part in job.folders.values())
    copied = sum(file.stamp.size for file in parts.files)
    if resume_from is not None:
        resume_from = check_resume_from(os.fspath(resume_from), path, job.plan_hash, resume=resume)
    needed = job.plan.written_bytes + chunks * _DESCRIPTION_BYTES + copied
    check_space(path, needed, resume_from=resume_from)
    if not dry_run:
        ran = run_job(
            job,
            path,
            options,
            progress,
            describe=partial(ReshardDescriptions, resolved.path, job, manifests, sha256=sha256),
            label="reshard",
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


def _describe(
    job: ReshardJob,
    source: str,
    checkpoint: str,
    path: str,
    mesh: Mesh,
    options: ExecuteOptions,
    *,
    dry_run: bool,
) -> ReshardResult:
    sizes = tuple(image.size for image in job.output)
    optimizer = sum(len(part.optimizer) for part in job.folders.values())
    objects = sum(len(part.part.objects) for part in job.folders.values())
    return ReshardResult(
        source=source,
        checkpoint=checkpoint,
        writer=job.parts.writer,
        output=path,
        dry_run=dry_run,
        world_size=mesh.size,
        mesh=str(mesh),
        num_tensors=sum(len(part.layout.tensors) for part in job.folders.values()) - optimizer - objects,
        num_optimizer_tensors=optimizer,
        num_objects=objects,
        num_files=len(sizes),
        read_bytes=job.plan.read_bytes,
        written_bytes=job.plan.written_bytes,
        file_bytes=sizes,
        folders=tuple(job.folders),
        copied=job.parts.siblings,
        peak_memory_bytes=options.peak_bytes,
        free_bytes=free_bytes(path),
        resumed_files=0,
        checked_bytes=0,
        unchecked=(),
        source_manifests=(),
        elapsed_s=0.0,
        notes=job.notes,
        warnings=(*job.parts.warnings, *check_warnings(options)),
    )
