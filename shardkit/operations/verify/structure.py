"""Everything that verify looks at but the tensors' bytes: what is there, and what is recorded of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple, NoReturn

from shardkit import formats
from shardkit.core.text import escape
from shardkit.errors import ResourceError, ShardkitError, SourceError
from shardkit.files import manifest
from shardkit.files.file_bytes import FileBytes, place_of
from shardkit.formats.checkpoint import Checkpoint, inner
from shardkit.formats.dcp.directory import is_dcp
from shardkit.formats.registry import directory_of, recognise
from shardkit.operations.verify.dcp import verify_dcp
from shardkit.operations.verify.manifest import (
    METADATA,
    Described,
    add_recorded,
    check_tensors,
    read_manifest,
)
from shardkit.operations.verify.other import named_file, report_failure, verify_hub, verify_other
from shardkit.operations.verify.result import Report

_REMAINS = ("*.distcp", "__*.chunks.json", "*.safetensors", "*.safetensors.index.json", manifest.NAME)
_NO_CHECKSUM = "safetensors files record no checksum; only a manifest with digests has one"


class Structure(NamedTuple):
    """What was found."""

    checkpoint: Checkpoint | None
    """None where it could not be opened."""
    directory: str
    """That names are relative to; or the file that is the checkpoint."""
    files: list[FileBytes]
    """With what is recorded of each."""
    is_whole: bool
    """It was opened, or is whole all the same: its weights are in a form that shardkit cannot take."""


def check_structure(
    path: str, report: Report, *, manifest_path: str | None = None, is_new: bool = False
) -> Structure:
    """Check everything but the tensors' bytes.

    Args:
        path: a checkpoint of any format.
        report: gets what is wrong.
        manifest_path: of a manifest that lies elsewhere.
        is_new: it is about to get a manifest: none beside it is looked for, and what has no checksum goes without
            saying.

    Raises:
        SourceError: nothing there, or nothing that is a checkpoint; or no manifest at `manifest_path`.
        ResourceError: a directory cannot be listed.
    """
    if not os.path.lexists(path):
        raise SourceError(
            f"{escape(path)}: no such file or directory", hint="check the path of the checkpoint"
        )
    directory = directory_of(path)
    beside = _manifest_beside(directory, manifest_path, report) if not is_new else None
    checkpoint, failure = _open(path, is_known=beside is not None)
    described, folders = _survey(directory, checkpoint, report)
    if beside is not None:
        _add_beside(beside, directory, described, report)
    files: list[FileBytes] = []
    for folder in folders:
        own = next((each for each in described if each.folder == folder and each.is_of_dcp), None)
        here = os.path.join(directory, folder)
        opened = checkpoint.opened_at(here) if checkpoint is not None else None
        files += verify_dcp(here, folder, own, report, opened=opened)
    is_whole = failure is None or _is_whole(path, failure, bool(folders), report)
    if checkpoint is not None:
        report.add_notes(
            f"not read: {escape(name)}: {escape(reason)}"
            for name, reason in (checkpoint.skipped if not is_new else ())  # a manifest has every file
            if name.rstrip("/") not in folders
        )
        files += _weights(checkpoint, directory, folders, report)
        for each in described:
            if not each.is_of_dcp and not each.folder and _has_tensors(each):
                check_tensors(each, checkpoint.catalog, report)
    add_recorded(described, files)
    _count_unrecorded(files, report)
    if not is_new:
        report.add_notes(_lacking(directory, folders, described, files, checkpoint))
    return Structure(checkpoint, directory, files, is_whole)


def _manifest_beside(directory: str, manifest_path: str | None, report: Report) -> str | None:
    """Return the path of the manifest to take that is not in the checkpoint."""
    if manifest_path is not None:
        if not os.path.lexists(manifest_path):
            raise SourceError(
                f"{escape(manifest_path)}: no such file", hint="write one with shardkit manifest"
            )
        return manifest_path
    found = manifest.sidecar_of(directory)
    if not os.path.lexists(found):
        return None
    if os.path.lexists(os.path.join(directory, manifest.NAME)):
        report.add_notes(
            [
                f"{escape(os.path.basename(found))} beside it was not used, for it has a manifest inside; "
                "--manifest takes it"
            ]
        )
        return None
    return found


def _open(path: str, *, is_known: bool) -> tuple[Checkpoint | None, ShardkitError | None]:
    """Open a checkpoint; return what keeps it from being opened, where it is surely one.

    Args:
        path: of it.
        is_known: it has a manifest, so that it is one.
    """
    try:
        return formats.open(path), None
    except ResourceError as error:
        if os.path.isdir(path) and not os.access(path, os.R_OK | os.X_OK):
            raise
        return None, error
    except SourceError as error:
        if not is_known and not _is_damaged_one(path):
            raise
        return None, error


def _is_damaged_one(path: str) -> bool:
    """True for what was a checkpoint once, as far as the names tell."""
    if recognise(path) is not None:
        return True
    directory = directory_of(path)
    return any(_has_remains(place) for place in (directory, *_directories(directory)))


def _directories(path: str) -> Iterator[str]:
    """Yield the directories in a directory that have shard files, and no `.metadata` that tells which."""
    for name in _names(path):
        below = inner(path, name)
        names = _names(below) if below is not None else []
        if below is not None and METADATA not in names and any(name.endswith(".distcp") for name in names):
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
) -> tuple[list[Described], list[str]]:
    """Read every manifest in a checkpoint, and find its DCP directories.

    Returns:
        Both with names relative to the checkpoint; "" is the checkpoint itself.
    """
    described: list[Described] = []
    folders: list[str] = []
    walk = os.walk(directory, onerror=_cannot_list) if os.path.isdir(directory) else ()
    for here, directories, names in walk:
        directories.sort()
        folder = os.path.relpath(here, directory)
        folder = "" if folder == os.curdir else folder
        found = read_manifest(here, folder, report) if manifest.NAME in names else None
        described += [found] if found is not None else []
        is_described = found is not None and found.is_of_dcp
        is_opened = checkpoint is not None and checkpoint.opened_at(here) is not None
        if is_described or is_opened or _is_of_dcp(here):
            folders.append(folder)
    return described, folders


def _is_of_dcp(directory: str) -> bool:
    """True where `.metadata` is the one of torch's DCP."""
    found = recognise(directory) if is_dcp(directory) else None
    return found is not None and found.is_torch_metadata


def _cannot_list(error: OSError) -> NoReturn:
    raise ResourceError(
        f"{escape(str(error.filename))} cannot be listed: {error.strerror}", hint="it must be readable by you"
    ) from None


def _add_beside(path: str, directory: str, described: list[Described], report: Report) -> None:
    """Take a manifest that is not in the checkpoint; one that says how it was made stands for the one inside."""
    found = read_manifest(directory, "", report, path=path)
    if found is None:
        return
    if not found.lists_files:
        described[:] = [each for each in described if each.folder or each.lists_files]
    described.append(found)


def _is_whole(path: str, failure: ShardkitError, has_folders: bool, report: Report) -> bool:
    """Say why a checkpoint could not be opened, unless what is wrong with its folders says it.

    Returns:
        True where nothing is wrong with it.
    """
    directory = directory_of(path)
    of_the_machine = isinstance(failure, ResourceError)  # it may be gone when the folders are looked at
    found = recognise(path) if has_folders and not report.problems and not of_the_machine else None
    if found is not None and found.is_dcp_alone:
        report.add_notes([f"it is whole, but shardkit cannot take the weights from it: {failure.message}"])
        return True
    if any(problem.message == failure.message for problem in report.problems):
        return False
    if isinstance(failure, ResourceError):
        report.unreadable(failure, file=named_file(failure.message, directory))
    elif isinstance(failure, SourceError):
        report_failure(failure, directory, report)
    return False


def _weights(checkpoint: Checkpoint, directory: str, folders: list[str], report: Report) -> list[FileBytes]:
    """Return the weight files of what is no DCP directory."""
    home = os.path.realpath(checkpoint.catalog.directory)
    if any(os.path.realpath(os.path.join(directory, folder)) == home for folder in folders):
        return []
    if checkpoint.hub is not None:
        return verify_hub(checkpoint, report)
    return verify_other(checkpoint, directory, report)


def _has_tensors(described: Described) -> bool:
    """True where the kind of manifest has tensors; that of the files beside several folders need not."""
    return not isinstance(described.content, manifest.FileList) or described.content.tensors is not None


def _count_unrecorded(files: list[FileBytes], report: Report) -> None:
    for file in files:
        if not file.has_digest:
            lacking = [s.tensor for s in file.stretches if s.crc32 is None and s.tensor is not None]
            report.num_unrecorded_chunks += len(lacking)
            report.unrecorded.update((os.path.dirname(file.name), name) for name in lacking)


def _lacking(
    directory: str,
    folders: list[str],
    described: list[Described],
    files: list[FileBytes],
    checkpoint: Checkpoint | None,
) -> Iterator[str]:
    """Yield notes on what has no checksum anywhere."""
    covered = {place_of(file.path) for file in files if file.has_digest}
    owners = {each.folder for each in described if each.metadata is not None}
    if any(
        folder not in owners and place_of(os.path.join(directory, folder, METADATA)) not in covered
        for folder in folders
    ):
        yield f"{METADATA} has no checksum: that it says what was saved cannot be proved"
    if all(file.has_digest for file in files):
        return
    if checkpoint is not None and checkpoint.hub is not None and checkpoint.catalog.format != "torch-bin":
        yield _NO_CHECKSUM
    elif checkpoint is not None and checkpoint.check is None:
        yield f"checkpoints of this format ({checkpoint.format}) record no checksum"
