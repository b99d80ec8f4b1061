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
from shardkit.errors import ShardkitError, refuse_warnings
from shardkit.files import storage, stores
from shardkit.files.digest import place_of
from shardkit.files.links import reading_as
from shardkit.formats.contract import Checkpoint
from shardkit.formats.dcp import METADATA
from shardkit.formats.dcp.directory import described_catalog
from shardkit.formats.hub.repo import Repo, list_repo, named_repo
from shardkit.operations.holdings import Holdings, hold, hold_files
from shardkit.operations.resolve import stands_for
from shardkit.operations.verify.bytes import check_files
from shardkit.operations.verify.gaps import check_gaps
from shardkit.operations.verify.options import VerifyOptions
from shardkit.operations.verify.orthonormality import check_factors
from shardkit.operations.verify.repo import check_repo
from shardkit.operations.verify.result import Report, VerifyResult
from shardkit.operations.verify.structure import Structure, check_structure


@keywords_of(VerifyOptions, reading_as)
def verify(options: VerifyOptions) -> VerifyResult:
    """Check a checkpoint of any format. torch is not imported.

    Everything that is wrong is in the result's `problems`, including files that the system cannot read. Only what
    cannot be looked at at all is raised.

    Where transformers is installed, the class that a Hub model's config names is asked which weights `from_pretrained`
    would initialise at random or refuse for their shape, in a process of its own, which takes seconds. Each is a problem.
    Elsewhere a note says that it was not asked.

    Args:
        path: a pre-sharded directory, any trainer's checkpoint, a Hub model's directory or weight file, a PEFT
            adapter, or a run's directory, whose newest checkpoint is taken; it has to be whole.
        full: read every byte that has a recorded checksum, and the frozen factors of OSFT, whose directions have to be
            orthonormal. Otherwise only headers, metadata, chunk lists and manifests
            are read.
        manifest: one that lies elsewhere. By default it is the one inside the checkpoint, or else the one beside it.
        strict: warnings are errors, such as a newer checkpoint in a run directory that had to be passed over.
        hub: a repo id. Every file must be the repo's, as the ids tell that the Hub keeps. Nothing is downloaded.
        revision: branch, tag or commit of the repo.
        jobs: threads; by default the cores that this process may use, from 2 to 8.
        holdings: tell too which file holds which bytes, for pictures.
        follow_links: links that lead out of a checkpoint's directory are read as the files that they lead to.
            Weight files of a Hub model are read in any case.
        progress: told of the bytes as they are read; by default a bar, on a terminal and in a notebook. False: none.

    Raises:
        UsageError: options that do not go together or are out of range.
        SourceError: there is nothing, no checkpoint, or one whose links lead out of it and are not followed; there is
            no such manifest; `hub` cannot be opened; or, with `strict`, there is a warning.
        ResourceError: a directory cannot be listed, or the Hub cannot be reached.
    """
    options.check()
    path, num_threads = stores.as_path(options.path), choose_jobs(options.jobs)
    report = Report(progress=progress_for(options.progress))
    if storage.lexists(path):
        resolved = stands_for(path, strict=True)
        path = resolved.path
        report.warnings += resolved.warnings
    manifest_path = None if options.manifest is None else os.fspath(options.manifest)
    structure = check_structure(path, report, manifest_path=manifest_path)
    checkpoint = structure.checkpoint
    if checkpoint is not None:
        check_gaps(checkpoint, report)
    commit, remote = None, None
    if options.hub is not None:
        repo = named_repo(options.hub, options.revision) or Repo(options.hub, options.revision)
        commit, remote = list_repo(repo.id, revision=repo.revision)
    if options.full:
        check_files(structure.files, report, num_threads)
    if checkpoint is not None:
        check_factors(checkpoint, report, full=options.full)
    if remote is not None:
        check_repo(remote, structure.directory, report, num_threads)
    result = _judged(options, _result(options, path, checkpoint, report, commit=commit))
    return replace(result, holdings=_hold(structure, report) if options.holdings else None)


def _judged(options: VerifyOptions, result: VerifyResult) -> VerifyResult:
    """Return a result; with `strict` its warnings are errors where no problem says more.

    Raises:
        SourceError: there are such.
    """
    if options.strict and result.ok:
        refuse_warnings(result.warnings)
    return result


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
    holdings = hold(
        catalog, names=lambda file: names.get(place_of(file.path), os.path.join(folder, file.name))
    )
    gone = {problem.file for problem in report.problems if problem.is_missing}
    files = (replace(file, file_bytes=None) if file.name in gone else file for file in holdings.files)
    return replace(holdings, files=tuple(files))


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
        return described_catalog(os.path.join(structure.directory, folder))
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
        repo=options.hub,
        commit=commit,
        **report.collected(),
    )
