"""verify: tells whether a checkpoint is whole and holds the bytes that were written, as far as anything was recorded.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import os
from functools import partial

from shardkit.core.text import count, parse_size
from shardkit.core.threads import NoProgress, Progress, choose_jobs
from shardkit.errors import UsageError
from shardkit.files.links import may_follow_links
from shardkit.formats.contract import Checkpoint
from shardkit.operations.resolve import take
from shardkit.operations.verify.bytes import check_some, check_whole, choose
from shardkit.operations.verify.factors import check_factors
from shardkit.operations.verify.result import Level, Report, VerifyResult, in_threads
from shardkit.operations.verify.structure import check_structure


@may_follow_links
def verify(
    path: str | os.PathLike[str],
    *,
    full: bool = False,
    read: str | int | None = None,
    seed: int = 0,
    manifest: str | os.PathLike[str] | None = None,
    against: str | os.PathLike[str] | None = None,
    rounded: bool = False,
    strict: bool = False,
    hub: str | None = None,
    revision: str | None = None,
    jobs: int | None = None,
    follow_links: bool = False,
    progress: Progress | None = None,
) -> VerifyResult:
    """Check a checkpoint of any format. Only a legacy `.bin` needs torch.

    Everything that is wrong is in the result's `problems`, including files that the system cannot read. Only what
    cannot be looked at at all is raised.

    Args:
        path: a pre-sharded directory, any trainer's checkpoint, a Hub model's directory or weight file.
        full: read every byte that has a recorded checksum, and the frozen factors of OSFT, whose directions have to be
            orthonormal. Otherwise only headers, metadata, chunk lists and manifests
            are read.
        read: how much of the tensors' bytes to read, in chunks chosen at random: "5%", a size such as "50GiB", or a
            number of bytes.
        seed: of that choice.
        manifest: one that lies elsewhere. By default it is the one inside the checkpoint, or else the one beside it.
        against: another checkpoint of any format. Its weights must be the same, bit by bit. Where dtypes differ, one
            side may be the other rounded to bf16 or fp16.
        rounded: with `against`: values may be rounded even where the dtypes are the same.
        strict: with `against`: refuse a run directory in which a newer checkpoint had to be passed over.
        hub: a repo id. Every file must be the repo's, as the ids tell that the Hub keeps. Nothing is downloaded.
        revision: branch, tag or commit of the repo.
        jobs: threads; by default the cores that this process may use, from 2 to 8.
        follow_links: links that lead out of a checkpoint's directory are read as the files that they lead to.
            Weight files of a Hub model are read in any case.
        progress: told of the bytes as they are read.

    Raises:
        UsageError: options that do not go together or are out of range.
        SourceError: there is nothing, or no checkpoint; there is no such manifest; `against` or `hub` cannot be opened;
            or, with `strict`, `against` has something newer. That is raised before anything is read.
        ResourceError: a directory cannot be listed, or the Hub cannot be reached.
    """
    path = os.fspath(path)
    share, size = _parse_read(read)
    if full and read is not None:
        raise UsageError("a full check reads everything: give either --full or --read")
    if revision is not None and hub is None:
        raise UsageError("--revision belongs to --hub, which is not given")
    for option, is_given in (("--rounded", rounded), ("--strict", strict)):
        if is_given and against is None:
            raise UsageError(f"{option} belongs to --against, which is not given")
    num_threads = choose_jobs(jobs)
    other = take(against, strict=True) if strict and against is not None else None
    level: Level = "full" if full else "structure" if read is None else "sample"
    report = Report(progress=progress or NoProgress())
    structure = check_structure(path, report, manifest_path=None if manifest is None else os.fspath(manifest))
    if level == "full":
        total = sum(file.read_bytes for file in structure.files)
        whole = [partial(check_whole, file) for file in structure.files]
        in_threads(whole, num_threads, report, label="verify", total_bytes=total)
    elif level == "sample":
        wanted = size if share is None else -int(-report.tensor_bytes * share // 100)
        chosen = choose(structure.files, wanted, seed)
        total = sum(stretch.nbytes for _, stretches in chosen for stretch in stretches)
        some = [partial(check_some, file, stretches) for file, stretches in chosen]
        in_threads(some, num_threads, report, label="verify", total_bytes=total)
    if structure.checkpoint is not None:
        check_factors(structure.checkpoint, report, full=full)
    if against is not None:
        from shardkit.operations.verify.against import compare

        compare(path, structure.checkpoint, os.fspath(against), other, report, rounded=rounded)
    commit = None
    if hub is not None:
        from shardkit.operations.verify.against import compare_with_repo

        commit = compare_with_repo(structure.directory, hub, revision, num_threads, report)
    return _result(
        path,
        level,
        structure.checkpoint,
        report,
        seed=seed if level == "sample" else None,
        against=None if against is None else os.fspath(against),
        repo=hub,
        commit=commit,
    )


def _parse_read(read: str | int | None) -> tuple[float | None, int]:
    """Return (percent or None, bytes)."""
    if read is None:
        return None, 0
    text = str(read).strip()
    if not text.endswith("%"):
        return None, parse_size(read)
    try:
        share = float(text[:-1])
    except ValueError:
        share = -1
    if not 0 < share <= 100:
        raise UsageError(
            f"not a share: {text!r}", hint="write a percentage such as 5%, or a size such as 50GiB"
        )
    return share, 0


def _result(
    path: str,
    level: Level,
    checkpoint: Checkpoint | None,
    report: Report,
    *,
    seed: int | None,
    against: str | None,
    repo: str | None,
    commit: str | None,
) -> VerifyResult:
    if report.num_unrecorded_chunks:
        report.add_notes(
            [
                f"no checksum is recorded of {count(report.num_unrecorded_chunks, 'chunk')} of "
                f"{count(len(report.unrecorded), 'tensor')}: nothing tells whether these bytes are what was written"
            ]
        )
    return VerifyResult(
        path=path,
        level=level,
        format=checkpoint.format if checkpoint is not None else None,
        writer=checkpoint.writer if checkpoint is not None else None,
        manifests=tuple(report.manifests),
        against=against,
        num_compared_tensors=report.num_compared_tensors,
        num_rounded_tensors=report.num_rounded_tensors,
        repo=repo,
        commit=commit,
        seed=seed,
        num_files=len(report.files),
        num_tensors=report.num_tensors,
        num_chunks=report.num_chunks,
        tensor_bytes=report.tensor_bytes,
        num_checked_chunks=report.num_checked_chunks,
        num_unrecorded_chunks=report.num_unrecorded_chunks,
        num_unrecorded_tensors=len(report.unrecorded),
        num_checked_files=report.num_checked_files,
        read_bytes=report.read_bytes,
        problems=tuple(report.problems),
        warnings=tuple(report.warnings),
        notes=tuple(report.notes),
    )
