"""verify: check that a checkpoint is complete, and that its bytes match the checksums recorded when it was written.

    path -> `structure` (with `dcp` and `manifest`): which files exist, and whether they agree with each other
         -> `bytes` (with --full): the files' bytes against recorded checksums
         -> `gaps`, `orthonormality`, `repo`: further checks

All of these add their problems to one `Report`.

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
from shardkit.operations.holdings import Holdings, find_file_holdings, find_holdings
from shardkit.operations.resolve import find_checkpoint
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

    All problems are listed in the result's `problems`, including files that the system cannot read. An error is raised
    only if the checkpoint cannot be examined at all.

    If transformers is installed, the class that a Hub model's config names is asked which weights `from_pretrained`
    would initialise at random or refuse for their shape. It runs in a separate process, for some seconds. Each such
    weight is a problem. Without transformers, a note says that the class was not asked.

    Args:
        path: a pre-sharded directory, any trainer's checkpoint, a Hub model's directory or weight file, a PEFT
            adapter, or a run directory, whose newest checkpoint is checked; an incomplete one is not skipped.
        full: read every byte that has a recorded checksum; also read the frozen factors of OSFT, and check that their
            directions are orthonormal. Otherwise only headers, metadata, chunk lists and manifests are read.
        manifest: path of another manifest. By default the manifest inside the checkpoint is used, or else the one beside
            it.
        strict: raise warnings as errors, e.g. that the newest checkpoint of a run directory was skipped.
        hub: a repo id. Every file must be equal to the repo's, by the ids that the Hub keeps. Nothing is downloaded.
        revision: branch, tag or commit of the repo.
        jobs: number of threads; by default the cores that this process may use, from 2 to 8.
        holdings: also return which file holds which bytes, for pictures.
        follow_links: follow links that lead out of the checkpoint's directory, and read the files behind them.
            Weight files of a Hub model are read through links in any case.
        progress: called as bytes are read. By default, terminals and notebooks show a bar; False shows none.

    Raises:
        UsageError: two options contradict each other, or a value is out of range.
        SourceError: `path` does not exist, is not a checkpoint, or leads through links that are not followed; the
            manifest does not exist; `hub` cannot be opened; or, with `strict`, there is a warning.
        ResourceError: a directory cannot be listed, or the Hub cannot be reached.
    """
    options.check()
    path, num_threads = stores.as_path(options.path), choose_jobs(options.jobs)
    report = Report(progress=progress_for(options.progress))
    if storage.lexists(path):
        resolved = find_checkpoint(path, strict=True)
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
    result = _refuse_warnings(options, _result(options, path, checkpoint, report, commit=commit))
    return replace(result, holdings=_find_holdings(structure, report) if options.holdings else None)


def _refuse_warnings(options: VerifyOptions, result: VerifyResult) -> VerifyResult:
    """Return the result; with `strict`, raise its warnings if there are no problems.

    Raises:
        SourceError: lists the warnings.
    """
    if options.strict and result.ok:
        refuse_warnings(result.warnings)
    return result


def _find_holdings(structure: Structure, report: Report) -> Holdings:
    """Return which file holds which bytes, as far as known. Files have the same names as in `problems`."""
    names = {place_of(file.path): file.name for file in structure.files}
    catalog = _catalog(structure, report)
    if catalog is None:
        return find_file_holdings(
            (file.name, file.size, [(s.start, s.nbytes, s.tensor or "") for s in file.stretches])
            for file in structure.files
        )
    folder = "" if structure.checkpoint is not None else structure.folders[0]
    holdings = find_holdings(
        catalog, names=lambda file: names.get(place_of(file.path), os.path.join(folder, file.name))
    )
    gone = {problem.file for problem in report.problems if problem.is_missing}
    files = (replace(file, file_bytes=None) if file.name in gone else file for file in holdings.files)
    return replace(holdings, files=tuple(files))


def _catalog(structure: Structure, report: Report) -> Catalog | None:
    """Return the catalog; if the checkpoint cannot be opened, as `.metadata` describes it, or None if that is damaged."""
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
