"""verify: whether a checkpoint is whole, and holds the bytes that were written, as far as anything was recorded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NoReturn

from shardkit import manifest
from shardkit.core.text import count, escape
from shardkit.core.units import parse_size
from shardkit.errors import ResourceError, SourceError, UsageError
from shardkit.formats.dcp import is_dcp, remembered
from shardkit.formats.sharded.checkpoint import Checkpoint
from shardkit.formats.sharded.detect import directory_of, layout_of, open_checkpoint
from shardkit.operations.verify_bytes import FileBytes, check_some, check_whole, choose, files_of_manifest
from shardkit.operations.verify_dcp import verify_dcp
from shardkit.operations.verify_manifest import METADATA, Described, read_manifest
from shardkit.operations.verify_other import Other, verify_hub
from shardkit.operations.verify_result import Level, Report, VerifyResult
from shardkit.transfer.progress import NoProgress, Progress

_REMAINS = ("*.distcp", "__*.chunks.json", "*.safetensors", "*.safetensors.index.json", manifest.NAME)
_FOLDERS_ARE_ALL = ("dcp", "accelerate")
"""Layouts of which nothing but their DCP folders is opened: where these are whole, a failure is no damage."""
_NOT_PLAIN_DCP = "bytecheckpoint"  # has a `.metadata` of its own kind


def verify(
    path: str | os.PathLike[str],
    *,
    full: bool = False,
    read: str | int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> VerifyResult:
    """Check a checkpoint of any layout; without torch, but for a legacy `.bin`.

    Everything that is wrong is in the result's `problems`; only what cannot be looked at is raised.

    Args:
        path: a pre-sharded directory, any trainer's checkpoint, a Hub model's directory or weight file.
        full: read every byte that a checksum was recorded of. Otherwise only headers, metadata, chunk lists
            and manifests are read.
        read: read so much of the tensors' bytes, in chunks chosen at random: "5%", a size such as "50GiB", or
            a number of bytes.
        seed: of that choice.
        progress: is told about bytes that are read.

    Raises:
        UsageError: `read` is neither a share nor a size, or given beside `full`.
        SourceError: nothing there, or nothing that is a checkpoint.
        ResourceError: a file may not or cannot be read.
    """
    path = os.fspath(path)
    share, size = _parse_read(read)
    if full and read is not None:
        raise UsageError("a full check reads everything: give either a full check or how much to read")
    level: Level = "full" if full else "structure" if read is None else "sample"
    report = Report(progress=progress or NoProgress())
    with remembered():
        checkpoint, files, other = _structure(path, report)
    if level == "full":
        _read_all(files, other, report)
    elif level == "sample":
        wanted = size if share is None else -int(-report.tensor_bytes * share // 100)
        _read_some(files, other, wanted, seed, report)
    return _result(path, level, checkpoint, seed, report)


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


def _structure(path: str, report: Report) -> tuple[Checkpoint | None, list[FileBytes], Other | None]:
    """Check everything but the tensors' bytes; return what is there to be read."""
    if not os.path.lexists(path):
        raise SourceError(
            f"{escape(path)}: no such file or directory", hint="check the path of the checkpoint"
        )
    failure: SourceError | None = None
    checkpoint: Checkpoint | None = None
    try:
        checkpoint = open_checkpoint(path)
    except ResourceError:
        raise
    except SourceError as error:
        if not _is_damaged_one(path):
            raise
        failure = error
    directory = directory_of(path)
    described, folders = _survey(directory, checkpoint, report)
    files: list[FileBytes] = []
    for folder in folders:
        place = os.path.join(directory, folder)
        files += verify_dcp(place, folder, described.get(folder), report)
    if failure is not None and folders and not report.problems and layout_of(path) in _FOLDERS_ARE_ALL:
        report.add_notes([f"it is whole, but shardkit cannot take the weights from it: {failure.message}"])
    elif failure is not None and all(problem.message != failure.message for problem in report.problems):
        report.error(failure, file=_named_file(failure, directory))
    if checkpoint is None:
        for found in described.values():
            files += files_of_manifest(found, report).values() if found.kind == "hub" else ()
        return None, files, None
    report.add_notes(
        f"not read: {escape(name)}: {escape(reason)}"
        for name, reason in checkpoint.skipped
        if name.rstrip("/") not in folders
    )
    home = os.path.realpath(checkpoint.catalog.directory)
    if any(os.path.realpath(os.path.join(directory, folder)) == home for folder in folders):
        return checkpoint, files, None
    if checkpoint.layout == "hub":
        return checkpoint, files + verify_hub(checkpoint, described.get(""), report), None
    other = Other(checkpoint, report)
    other.check_structure()
    return checkpoint, files, other


def _named_file(error: SourceError, directory: str) -> str | None:
    """Return the file that an error begins with, where it does."""
    name = error.message.partition(":")[0]
    return name if name and os.path.isfile(os.path.join(directory, name)) else None


def _is_damaged_one(path: str) -> bool:
    """True for what was a checkpoint once, as far as the names tell."""
    if layout_of(path) is not None:
        return True
    directory = directory_of(path)
    return any(_has_remains(place) for place in (directory, *_directories(directory)))


def _directories(path: str) -> Iterator[str]:
    """Yield the directories in a directory that have shard files, and no `.metadata` that tells which."""
    for name in _names(path):
        below = os.path.join(path, name)
        names = _names(below)
        if METADATA not in names and any(name.endswith(".distcp") for name in names):
            yield below


def _has_remains(path: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in _names(path) for pattern in _REMAINS)


def _names(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _survey(
    directory: str, checkpoint: Checkpoint | None, report: Report
) -> tuple[dict[str, Described], list[str]]:
    """Read every manifest of a checkpoint, and find its DCP directories.

    Returns:
        Both by folder, relative to the checkpoint; "" is the checkpoint itself.
    """
    described: dict[str, Described] = {}
    folders: list[str] = []
    is_plain = checkpoint is None or checkpoint.layout != _NOT_PLAIN_DCP
    walk = os.walk(directory, onerror=_cannot_list) if os.path.isdir(directory) else ()
    for here, inner, names in walk:
        inner.sort()
        folder = os.path.relpath(here, directory)
        folder = "" if folder == os.curdir else folder
        if manifest.NAME in names:
            found = read_manifest(here, folder, report)
            if found is not None:
                described[folder] = found
        is_described = folder in described and described[folder].kind != "hub"
        is_known = checkpoint is not None and checkpoint.layout == "dcp" and not folder
        if is_plain and (is_described or is_known or (is_dcp(here) and layout_of(here) != _NOT_PLAIN_DCP)):
            folders.append(folder)
    return described, folders


def _cannot_list(error: OSError) -> NoReturn:
    raise ResourceError(
        f"{escape(str(error.filename))} cannot be listed: {error.strerror}", hint="it must be readable by you"
    ) from None


def _read_all(files: list[FileBytes], other: Other | None, report: Report) -> None:
    total = sum(file.read_bytes for file in files) + (other.read_bytes if other is not None else 0)
    report.progress.start(total, "verify")
    for file in files:
        check_whole(file, report)
    if other is not None:
        other.check_bytes()
    report.progress.finish()


def _read_some(
    files: list[FileBytes], other: Other | None, num_bytes: int, seed: int, report: Report
) -> None:
    chosen = choose(files, num_bytes, seed)
    if other is not None:
        other.choose(num_bytes, seed)
    total = sum(stretch.nbytes for _, stretches in chosen for stretch in stretches)
    report.progress.start(total + (other.read_bytes if other is not None else 0), "verify")
    for file, stretches in chosen:
        check_some(file, stretches, report)
    if other is not None:
        other.check_bytes()
    report.progress.finish()


def _result(
    path: str, level: Level, checkpoint: Checkpoint | None, seed: int, report: Report
) -> VerifyResult:
    if report.num_unrecorded_chunks:
        report.add_notes(
            [
                f"no checksum is recorded of {count(report.num_unrecorded_chunks, 'chunk')} of "
                f"{count(len(report.unrecorded), 'tensor')}: nothing tells whether the bytes are those that were written"
            ]
        )
    return VerifyResult(
        path=path,
        level=level,
        layout=checkpoint.layout if checkpoint is not None else None,
        writer=checkpoint.writer if checkpoint is not None else None,
        manifests=tuple(report.manifests),
        seed=seed if level == "sample" else None,
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
