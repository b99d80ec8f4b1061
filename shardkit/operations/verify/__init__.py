"""verify: tells whether a checkpoint is whole and holds the bytes that were written, as far as anything was recorded.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

from shardkit.core.catalog import Catalog
from shardkit.core.keywords import keywords_of
from shardkit.core.threads import choose_jobs, progress_for
from shardkit.errors import ShardkitError
from shardkit.files import storage, stores
from shardkit.files.digest import place_of
from shardkit.files.links import may_follow_links
from shardkit.formats.contract import Checkpoint
from shardkit.formats.dcp import METADATA
from shardkit.formats.dcp.directory import told_catalog
from shardkit.formats.hub.repo import Repo, list_repo, named_repo
from shardkit.operations.holdings import Holdings, hold, hold_files
from shardkit.operations.resolve import stands_for, take
from shardkit.operations.verify.bytes import check_files, check_sample
from shardkit.operations.verify.gaps import check_gaps
from shardkit.operations.verify.options import VerifyOptions
from shardkit.operations.verify.orthonormality import check_factors
from shardkit.operations.verify.result import Report, VerifyResult
from shardkit.operations.verify.store import check_stored
from shardkit.operations.verify.structure import Structure, check_structure


@may_follow_links
@keywords_of(VerifyOptions)
def verify(options: VerifyOptions) -> VerifyResult:
    """Check a checkpoint of any format. Only a legacy `.bin` needs torch.

    Everything that is wrong is in the result's `problems`, including files that the system cannot read. Only what
    cannot be looked at at all is raised.

    Args:
        path: a pre-sharded directory, any trainer's checkpoint, a Hub model's directory or weight file, a PEFT
            adapter, or a run's directory, whose newest checkpoint is taken; it has to be whole.
        full: read every byte that has a recorded checksum, and the frozen factors of OSFT, whose directions have to be
            orthonormal. Otherwise only headers, metadata, chunk lists and manifests
            are read.
        read: how much of the bytes with a checksum to read, in chunks chosen at random: "5%", a size such as "50GiB",
            or a number of bytes.
        seed: of that choice.
        manifest: one that lies elsewhere. By default it is the one inside the checkpoint, or else the one beside it.
        against: another checkpoint of any format. Its weights must be the same, bit by bit. Where dtypes differ, one
            side may be the other rounded to bf16 or fp16.
        rounded: with `against`: values may be rounded even where the dtypes are the same.
        strict: with `against`: refuse a run directory in which a newer checkpoint had to be passed over.
        hub: a repo id. Every file must be the repo's, as the ids tell that the Hub keeps. Nothing is downloaded.
        revision: branch, tag or commit of the repo.
        store: ask the object store in which the checkpoint lies for size and CRC-32 of each file that the manifest
            lists, and read none of them. Where the store keeps no CRC-32 of a whole file, `problems` say so.
        ask_class: ask the class that a Hub model's config names, as the installed transformers has it, which weights
            `from_pretrained` would initialise at random or refuse for their shape. Each is a problem. By default config
            and names alone tell what seems to be missing, which is a warning.
        jobs: threads; by default the cores that this process may use, from 2 to 8.
        holdings: tell too which file holds which bytes, for pictures.
        follow_links: links that lead out of a checkpoint's directory are read as the files that they lead to.
            Weight files of a Hub model are read in any case.
        progress: told of the bytes as they are read; by default a bar, on a terminal and in a notebook. False: none.

    Raises:
        UsageError: options that do not go together or are out of range.
        SourceError: there is nothing, no checkpoint, or one whose links lead out of it and are not followed; there is
            no such manifest; `against` or `hub` cannot be opened; or, with `strict`, `against` has something newer.
            That is raised before anything is read.
        ResourceError: a directory cannot be listed, or the Hub cannot be reached.
    """
    options.check()
    path, num_threads = stores.as_path(options.path), choose_jobs(options.jobs)
    other = take(options.against, strict=True) if options.strict and options.against is not None else None
    report = Report(progress=progress_for(options.progress))
    if storage.lexists(path):
        taken = stands_for(path, strict=True)
        path = taken.path
        report.warnings += taken.warnings
        report.add_notes(taken.notes)
    manifest_path = None if options.manifest is None else os.fspath(options.manifest)
    if options.store:
        check_stored(path, manifest_path, report)
        return _result(options, path, None, report)
    structure = check_structure(path, report, manifest_path=manifest_path)
    checkpoint = structure.checkpoint
    if checkpoint is not None:
        check_gaps(checkpoint, report, ask_class=options.ask_class)
    compared = None if options.against is None else stores.as_path(options.against)
    comparison, commit, remote = None, None, None
    if compared is not None:
        # Only here: with diff, verify would start a tenth later.
        from shardkit.operations.verify.against import check_against, open_comparison

        comparison = open_comparison(path, checkpoint, compared, other, report.progress)
    if options.hub is not None:
        repo = named_repo(options.hub, options.revision) or Repo(options.hub, options.revision)
        commit, remote = list_repo(repo.id, revision=repo.revision)
    if options.level == "full":
        check_files(structure.files, report, num_threads)
    elif options.level == "sample":
        num_bytes = options.sample_bytes(sum(file.recorded_bytes for file in structure.files))
        check_sample(structure.files, report, num_threads, num_bytes=num_bytes, seed=options.seed)
    if checkpoint is not None:
        check_factors(checkpoint, report, full=options.full)
    if compared is not None and comparison is not None:
        check_against(comparison, path, compared, report, rounded=options.rounded)
    if remote is not None:
        from shardkit.operations.verify.against import check_repo

        check_repo(remote, structure.directory, report, num_threads)
    result = _result(options, path, checkpoint, report, commit=commit)
    return replace(result, holdings=_hold(structure, report) if options.holdings else None)


def _hold(structure: Structure, report: Report) -> Holdings:
    """Return which file holds what, by the names that problems give, as far as it is known."""
    names = {place_of(file.path): file.name for file in structure.files}
    catalog = _catalog(structure, report)
    if catalog is None:
        return hold_files(
            (file.name, file.size, [(s.start, s.nbytes, s.tensor or "") for s in file.stretches])
            for file in structure.files
        )
    folder = "" if structure.checkpoint is not None else structure.folders[0]
    held = hold(catalog, names=lambda file: names.get(place_of(file.path), os.path.join(folder, file.name)))
    gone = {problem.file for problem in report.problems if problem.is_missing}
    files = (replace(file, file_bytes=None) if file.name in gone else file for file in held.files)
    return replace(held, files=tuple(files))


def _catalog(structure: Structure, report: Report) -> Catalog | None:
    """Return the catalog, or else what `.metadata` says of files that may not be there; None if it is damaged too."""
    if structure.checkpoint is not None:
        return structure.checkpoint.catalog
    if len(structure.folders) != 1:
        return None
    (folder,) = structure.folders
    if os.path.join(folder, METADATA) in {problem.file for problem in report.problems}:
        return None
    with contextlib.suppress(ShardkitError):
        return told_catalog(os.path.join(structure.directory, folder))
    return None


def _result(
    options: VerifyOptions,
    path: str,
    checkpoint: Checkpoint | None,
    report: Report,
    commit: str | None = None,
) -> VerifyResult:
    return VerifyResult(
        path=stores.as_path(options.path),
        resolved=path,
        level=options.level,
        format=checkpoint.format if checkpoint is not None else None,
        writer=checkpoint.writer if checkpoint is not None else None,
        against=None if options.against is None else os.fspath(options.against),
        repo=options.hub,
        commit=commit,
        seed=options.seed if options.level == "sample" else None,
        **report.collected(),
    )
