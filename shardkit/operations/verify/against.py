"""Compares a checkpoint with another one, value by value, or with a repo on the Hub, by the ids of its files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import partial

from shardkit.core.dtypes import short_dtype
from shardkit.core.text import count, escape, in_shell
from shardkit.core.threads import Progress
from shardkit.errors import SourceError
from shardkit.files import storage
from shardkit.files.digest import ByteReader
from shardkit.files.listing import list_files
from shardkit.files.strict_json import open_regular
from shardkit.formats.contract import Checkpoint
from shardkit.formats.hub.repo import RepoFile
from shardkit.operations.diff import Comparison, DiffResult, TensorDiff
from shardkit.operations.diff.options import DiffOptions
from shardkit.operations.diff.sides import ComparisonWording
from shardkit.operations.resolve import Taken, as_it_is, take
from shardkit.operations.verify.result import Report, in_threads


def open_comparison(
    path: str, checkpoint: Checkpoint | None, other: str, taken: Taken | None, progress: Progress
) -> Comparison | SourceError:
    """Open a checkpoint, and another one whose weights it should have; return what keeps them from being compared.

    Args:
        path: what is verified.
        checkpoint: the same, opened; None if that failed.
        other: what to compare with: a checkpoint of any format or a run directory.
        taken: the checkpoint that `other` stands for, where that is known already.
        progress: told of the bytes.

    Raises:
        ResourceError: one of them cannot be opened.
    """
    diff = f"`shardkit diff {in_shell(path)} {in_shell(other)} --all`"  # verify has no --all
    wording = ComparisonWording((escape(path), escape(other)), f"{diff} compares all")
    try:
        mine = take(path) if checkpoint is None else as_it_is(path, checkpoint)
        sides = (mine, taken or take(other))
        return Comparison(sides, DiffOptions(path, other, progress=progress), wording)
    except SourceError as error:
        return error


def check_against(
    comparison: Comparison | SourceError, path: str, other: str, report: Report, *, rounded: bool
) -> None:
    """Compare the weights of a checkpoint with those of another one; each that differs is a problem.

    Values that are the other's, rounded to bf16 or fp16, are no problem where the stored dtypes show it.

    Args:
        comparison: of `open_comparison`, with `path` and `other`.
        report: gets what differs.
        rounded: values may be rounded even where the dtype is the same, such as bf16 values stored as fp32.

    Raises:
        SourceError: they cannot be compared. If problems were found before, a note says so instead.
    """
    try:
        if isinstance(comparison, SourceError):
            raise comparison
        result = comparison.compare()
    except SourceError as error:
        if not report.problems:
            raise
        report.add_notes([f"not compared with {escape(other)}: {error.message}"])
        return
    report.add_notes(result.notes)
    report.warnings += result.warnings
    if result.resolved_b.rstrip("/") != other.rstrip("/"):
        report.add_notes([f"{escape(other)}: took {escape(result.resolved_b)}"])
    report.num_compared_tensors += result.count("equal", "close", "rounded", "folded", "dtype", "values")
    _report_rounded(result, path, other, report, rounded=rounded)
    for tensor in result.differences:
        _report(tensor, escape(other), report)


def _report_rounded(result: DiffResult, path: str, other: str, report: Report, *, rounded: bool) -> None:
    """Note which side is rounded. A tensor whose dtype does not show it is a problem, unless it may be rounded."""
    tensors = [tensor for tensor in result.tensors if tensor.status == "rounded"]
    if not tensors:
        return
    one, two = escape(path), escape(other)
    if result.rounded_side == "b":
        one, two = two, one
    dtypes = " or ".join(sorted({short_dtype(tensor.rounded_to) for tensor in tensors}))
    flushed = f"; {count(result.num_flushed, 'value')} became 0" if result.num_flushed else ""
    report.add_notes([f"{one} holds {count(len(tensors), 'tensor')} of {two} rounded to {dtypes}{flushed}"])
    report.num_rounded_tensors += len(tensors)
    for tensor in [] if rounded else tensors:
        if not tensor.is_said_by_dtypes:
            report.problem(
                f"it is not that of {escape(other)}{_values(tensor)}, though equal after rounding {two}'s to "
                f"{short_dtype(tensor.rounded_to)}; --rounded accepts it",
                tensor=tensor.name,
            )


def _report(tensor: TensorDiff, other: str, report: Report) -> None:
    match tensor.status:
        case "only_a":
            report.problem(f"{other} has no such tensor", tensor=tensor.name)
        case "only_b":
            report.problem(f"it is missing: only {other} has it", tensor=tensor.name)
        case "shape":
            expected, actual = str(list(tensor.shape_b or ())), str(list(tensor.shape_a or ()))
            rows = tensor.rows
            what = "shape" if rows is None else f"{count(rows[1], 'row')} and {count(rows[0], 'row')}"
            report.problem(what, tensor=tensor.name, expected=expected, found=actual)
        case "dtype":
            message = f"dtype{_values(tensor)}"
            report.problem(message, tensor=tensor.name, expected=tensor.dtype_b, found=tensor.dtype_a)
        case _:
            report.problem(f"it is not that of {other}{_values(tensor)}", tensor=tensor.name)


def _values(tensor: TensorDiff) -> str:
    if not tensor.num_changed:
        return ""
    first = f", the first at {list(tensor.first_changed)}" if tensor.first_changed else ""
    return f" ({tensor.num_changed:,} of {tensor.num_elements:,} elements differ{first})"


_LEFT_OUT = (".gitattributes", "shardkit.json")
"""What the Hub or shardkit puts beside a model; it is no part of the model."""


def check_repo(remote: Mapping[str, RepoFile], directory: str, report: Report, jobs: int) -> None:
    """Report the files that differ from those of a repo, that are missing, and that the repo lacks.

    Args:
        remote: the files of the repo, by name.
        directory: with the files; or one file.
        report: gets what is wrong.
        jobs: threads.
    """
    is_one_file = not storage.isdir(directory)
    home = (os.path.dirname(directory) or os.curdir) if is_one_file else directory
    held, wanted = list_files(home, follow=True).files, [*remote]
    if is_one_file:
        wanted = [os.path.basename(directory)]
        held = {name: held[name] for name in wanted if name in held}
    for name in sorted({*held, *wanted}):
        if name in held and name in remote:
            if held[name] != remote[name].size:
                expected, actual = str(remote[name].size), str(held[name])
                report.problem("size in bytes in the repo", file=name, expected=expected, found=actual)
        elif name not in _LEFT_OUT:
            is_extra = name in held
            which = "extra: the repo has no such file" if is_extra else "missing: the repo has it"
            report.problem(which, file=name, is_contradiction=is_extra, is_missing=not is_extra)
    alike = [name for name in held if name in remote and held[name] == remote[name].size]
    tasks = [partial(_compare, os.path.join(home, name), remote[name]) for name in alike]
    in_threads(report, tasks, jobs, label="hash", total_bytes=sum(held[name] for name in alike))


def _compare(path: str, remote: RepoFile, report: Report) -> None:
    """Compare a file with its id in the repo: the sha256 of a large file, git's id of a small one."""
    with report.failing(remote.name), open_regular(path, remote.name) as (fd, size):
        reader = ByteReader(fd, remote.name, size, report.read, ahead=True)
        if remote.sha256 is not None:
            hashed, kind, expected = hashlib.sha256(), "sha256", remote.sha256
        else:
            hashed, kind, expected = hashlib.sha1(usedforsecurity=False), "git id", remote.git_id
            # man git-hash-object: the type, the size in decimal, a NUL, then the content
            hashed.update(b"blob %d\0" % size)
        reader.update(hashed)
        report.num_checked_files += 1
        if (digest := hashed.hexdigest()) != expected:
            report.problem(
                f"{kind} of the file in the repo", file=remote.name, expected=expected, found=digest
            )
