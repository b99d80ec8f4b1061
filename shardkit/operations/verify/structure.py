"""Check everything except the tensors' bytes: which files exist, and whether they agree with each other and manifests.

DCP directories are checked by `dcp`; Hub models and trainers' formats with their own files are checked here. Both return
the files with their recorded checksums (`FileBytes`), with which `bytes` compares the content later.

A *stretch* is a range of a file's bytes, such as a tensor's chunk. A tensor has to be *decoded* if its bytes in the file are
not its own: they are compressed, in another order, or inside a pickle. For such a tensor, the entries of the zip around it
are checked. A *folder* is a DCP directory of the checkpoint. *Described* are manifests with the directory of each.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shardkit import formats
from shardkit._folding import fold_lines
from shardkit.core.catalog import Catalog
from shardkit.core.text import count, escape, listed
from shardkit.errors import ResourceError, ShardkitError, SourceError
from shardkit.files import manifest, storage
from shardkit.files.digest import Archive, FileBytes, Stretch, place_of
from shardkit.files.home import path_in
from shardkit.files.listing import walk
from shardkit.files.remote.contract import OtherVersion
from shardkit.files.strict_json import is_about_links, open_regular
from shardkit.formats.contract import (
    Checkpoint,
    DamagedFiles,
    copies_message,
    missing_path,
    refuse_unfinished,
)
from shardkit.formats.dcp import METADATA
from shardkit.formats.dcp.directory import is_dcp
from shardkit.formats.dcp.objects import SavedAsObjects
from shardkit.formats.hub.files import part_notes
from shardkit.formats.registry import recognise
from shardkit.formats.torchsave.archive import UnsupportedFile, ZipEntry, ZipReader, pread_of, read_directory
from shardkit.formats.torchsave.classes import UnreadableClass
from shardkit.keys.moments import NamedShape, parts_of_ranks
from shardkit.operations.resolve import manifest_scope, was_checkpoint
from shardkit.operations.verify.dcp import verify_dcp
from shardkit.operations.verify.manifest import CheckedManifest, add_recorded, check_tensors, read_manifest
from shardkit.operations.verify.result import Report, report_damaged


class Structure(NamedTuple):
    """A checkpoint whose structure was checked."""

    checkpoint: Checkpoint | None
    """None if it could not be opened."""
    directory: str
    """The directory that names are relative to, or the file that is the checkpoint."""
    files: list[FileBytes]
    """The files, with their recorded checksums."""
    is_complete: bool
    """True if it was opened, or if it is complete but its weights are in a form that shardkit cannot read."""
    manifests: tuple[manifest.Manifest, ...]
    """The checkpoint's manifests, kept here so that they are parsed only once."""
    folders: tuple[str, ...] = ()
    """Its DCP directories, relative to the checkpoint."""


def check_structure(path: str, report: Report, *, manifest_path: str | None = None) -> Structure:
    """Check everything except the tensors' bytes.

    Args:
        path: a checkpoint of any format.
        report: gets the problems.
        manifest_path: path of a manifest outside of the checkpoint, or None.

    Raises:
        SourceError: `path` does not exist, is not a checkpoint, or leads through links that are not followed; or
            `manifest_path` does not exist.
        ResourceError: a directory cannot be listed.
    """
    if not storage.lexists(path):
        raise missing_path(path)
    refuse_unfinished(path)
    directory = manifest_scope(path)
    manifest_beside = _manifest_beside(directory, manifest_path, report)
    checkpoint, failure = _open(path, is_known=manifest_beside is not None)
    described, folders = _survey(directory, checkpoint, report)
    if manifest_beside is not None:
        _add_beside(manifest_beside, directory, described, report)
    files: list[FileBytes] = []
    stored, objects = list[NamedShape](), list[str]()
    for folder in folders:
        described_here = next(
            (entry for entry in described if entry.folder == folder and entry.is_for_dcp), None
        )
        here = os.path.join(directory, folder)
        opened = checkpoint.opened_at(here) if checkpoint is not None else None
        files += verify_dcp(
            here, folder, described_here, report, opened=opened, stored=stored, objects=objects
        )
    halved = parts_of_ranks(stored, objects)
    report.add_doubts([] if halved is None else [halved])
    if isinstance(failure, UnreadableClass) and failure.files:
        files, failure = [*files, *_unreadable_files(failure, directory, report)], None
    is_complete = failure is None or _is_complete(path, failure, bool(folders), report)
    if checkpoint is not None:
        strays = _stray_files(checkpoint)
        report.warnings += [f"{escape(name)}: {reason}" for name, reason in strays]
        report.add_notes(
            f"not read: {escape(name)}: {escape(reason)}"
            for name, reason in checkpoint.remarks.skipped
            if name.rstrip("/") not in folders and (name, reason) not in strays
        )
        if checkpoint.remarks.differing:
            lines = tuple(each.line() for each in checkpoint.remarks.differing)
            report.problem(copies_message(checkpoint.remarks.differing), details=lines, is_contradiction=True)
        files += _weights(checkpoint, directory, folders, report)
        report.add_notes(part_notes(os.path.basename(path)) if not storage.isdir(path) else ())
        for entry in described:
            if not entry.is_for_dcp and not entry.folder and _has_tensors(entry):
                check_tensors(entry, checkpoint.catalog, report)
    add_recorded(described, files, report)
    _count_unrecorded(files, report)
    report.add_notes(_checksum_notes(directory, folders, described, files, checkpoint, report))
    manifests = tuple(entry.content for entry in described)
    return Structure(checkpoint, directory, files, is_complete, manifests, tuple(folders))


def _manifest_beside(directory: str, manifest_path: str | None, report: Report) -> str | None:
    """Return the path of the manifest to use if it is outside of the checkpoint, else None."""
    if manifest_path is not None:
        if not storage.lexists(manifest_path):
            raise SourceError(
                f"{escape(manifest_path)}: no such file",
                hint="name an existing manifest, or leave --manifest out",
            )
        return manifest_path
    sidecar = manifest.sidecar_of(directory)
    if not storage.lexists(sidecar):
        return None
    if storage.lexists(os.path.join(directory, manifest.NAME)):
        report.add_notes(
            [
                f"{escape(os.path.basename(sidecar))} beside it was not used, as it has a manifest inside; "
                "--manifest uses it"
            ]
        )
        return None
    return sidecar


def _open(path: str, *, is_known: bool) -> tuple[Checkpoint | None, ShardkitError | None]:
    """Open a checkpoint. If it is one but cannot be opened, return the error.

    Args:
        path: path of the checkpoint.
        is_known: a manifest was found, so the path is a checkpoint.

    Raises:
        SourceError: the path is not a checkpoint, or leads through links that are not followed.
        ResourceError: the directory cannot be listed.
    """
    try:
        return formats.open(path), None
    except ResourceError as error:
        if storage.isdir(path) and not storage.access(path, os.R_OK | os.X_OK):
            raise
        return None, error
    except SourceError as error:
        if (
            isinstance(error, (UnsupportedFile, OtherVersion))
            or is_about_links(error)
            or not (is_known or was_checkpoint(path))
        ):
            raise
        return None, error


def _survey(
    directory: str, checkpoint: Checkpoint | None, report: Report
) -> tuple[list[CheckedManifest], list[str]]:
    """Read every manifest in a checkpoint, and find its DCP directories.

    Returns:
        The manifests, and the DCP directories relative to the checkpoint; "" is the checkpoint itself.
    """
    described: list[CheckedManifest] = []
    folders: list[str] = []
    for here, folder, _, names in walk(directory) if storage.isdir(directory) else ():
        record = read_manifest(here, folder, report) if manifest.NAME in names else None
        described += [record] if record is not None else []
        is_described = record is not None and record.is_for_dcp
        is_opened = checkpoint is not None and checkpoint.opened_at(here) is not None
        if is_described or is_opened or is_dcp(here):
            folders.append(folder)
    return described, folders


def _add_beside(path: str, directory: str, described: list[CheckedManifest], report: Report) -> None:
    """Use a manifest outside of the checkpoint. If it says how the checkpoint was made, it replaces the one inside."""
    record = read_manifest(directory, "", report, path=path)
    if record is None:
        return
    if not record.lists_files:
        described[:] = [entry for entry in described if entry.folder or entry.lists_files]
    described.append(record)


def _unreadable_files(failure: UnreadableClass, directory: str, report: Report) -> list[FileBytes]:
    """Warn that tensors of some class cannot be read, and return their files, whose zip entries have checksums."""
    folded = [line.pattern for line in fold_lines(failure.problems, spreads=True)]
    names = [*folded[:_MAX_WARNED], *(["..."] if folded[_MAX_WARNED:] else [])]
    report.warnings.append(f"{failure.message}: {'; '.join(names)}")
    report.files.update(_name(file.path, directory) for file in failure.files)
    return [
        FileBytes(
            name=_name(file.path, directory),
            path=file.path,
            follow=True,
            size=file.size,
            archives=[Archive(0, file.size, file.name)],
        )
        for file in failure.files
    ]


def _is_complete(path: str, failure: ShardkitError, has_folders: bool, report: Report) -> bool:
    """Report why a checkpoint could not be opened, unless the problems of its folders explain it.

    Returns:
        True if the checkpoint is complete, and only its format cannot be opened by shardkit.
    """
    directory = manifest_scope(path)
    of_the_machine = isinstance(failure, ResourceError)  # may be gone when folders are checked
    recognised = recognise(path) if has_folders and not report.problems and not of_the_machine else None
    if recognised is not None and recognised.is_dcp_alone and not isinstance(failure, SavedAsObjects):
        report.add_notes(
            [f"nothing in it is damaged, but shardkit cannot read its weights: {failure.message}"]
        )
        return True
    if any(problem.message == failure.message for problem in report.problems):
        return False
    if has_folders and isinstance(failure, DamagedFiles):  # each of them was reported
        return False
    report_failure(failure, directory, report)
    return False


def _weights(checkpoint: Checkpoint, directory: str, folders: list[str], report: Report) -> list[FileBytes]:
    """Return the weight files outside of DCP directories, with the checksums that they contain.

    Headers and index of a Hub model were checked when it was opened. In other formats, all records are opened here.
    """
    catalog = checkpoint.catalog
    home = storage.realpath(catalog.directory)
    if any(storage.realpath(os.path.join(directory, folder)) == home for folder in folders):
        return []
    report.num_tensors += len(catalog.tensors)
    report.add_notes(checkpoint.remarks.notes)
    if checkpoint.hub is None:
        try:
            catalog = checkpoint.select(tuple(catalog.tensors))
        except OtherVersion:
            raise
        except (ResourceError, SourceError) as error:
            report_failure(error, directory, report)
            return []
    files = _files(catalog, directory, report)
    if _has_checksums(checkpoint):
        decoded = _decoded(catalog)
        for file in files:
            _add_entries(file, decoded.get(file.path, ()), report)
    return files


def _has_checksums(checkpoint: Checkpoint) -> bool:
    """True if the checkpoint's files have CRC-32s of their tensors."""
    if checkpoint.dcp is not None:
        return checkpoint.dcp.has_records
    return any(file.checksums is not None for file in checkpoint.catalog.files)


def _stray_files(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Return (name, reason) of safetensors files in a Hub model's directory that do not belong to the model."""
    if checkpoint.hub is None or not storage.isdir(checkpoint.path):
        return []
    return [(name, what) for name, what in checkpoint.remarks.skipped if name.endswith(_SAFETENSORS)]


def _has_tensors(described: CheckedManifest) -> bool:
    """True if the manifest lists tensors. A manifest of files alone may not, for a checkpoint of several folders."""
    return not isinstance(described.content, manifest.FileList) or described.content.tensors is not None


def _count_unrecorded(files: list[FileBytes], report: Report) -> None:
    """Count the chunks that no recorded checksum covers: neither their own nor their file's."""
    for file in files:
        if not file.has_digest:
            lacking = [s.tensor for s in file.stretches if s.crc32 is None and s.tensor is not None]
            report.num_unrecorded_chunks += len(lacking)
            report.unrecorded.update((os.path.dirname(file.name), name) for name in lacking)


def _checksum_notes(
    directory: str,
    folders: list[str],
    described: list[CheckedManifest],
    files: list[FileBytes],
    checkpoint: Checkpoint | None,
    report: Report,
) -> Iterator[str]:
    """Yield notes about `.metadata` and chunks without a checksum; one note with the reason for all chunks."""
    covered = {place_of(file.path) for file in files if file.has_digest}
    owners = {entry.folder for entry in described if entry.metadata is not None}
    paths = [path_in(os.path.join(directory, folder), METADATA) for folder in folders if folder not in owners]
    if any(storage.lexists(path) and place_of(path) not in covered for path in paths):
        yield f"{METADATA} has no checksum, so its content cannot be checked"
    if not report.num_unrecorded_chunks:
        return
    why = ""
    if checkpoint is not None and not _has_checksums(checkpoint):
        what = "safetensors" if checkpoint.hub is not None else "such"
        why = f" ({what} files have none, only a manifest with digests has)"
    chunks, tensors = count(report.num_unrecorded_chunks, "chunk"), count(len(report.unrecorded), "tensor")
    yield f"no checksum is recorded for {chunks} of {tensors}{why}: their content cannot be checked"


_MAX_WARNED = 3
_SAFETENSORS = ".safetensors"
_STORAGE = "data/"


def named_file(text: str, directory: str) -> str | None:
    """Return the file whose name begins a message, or None. The name may be relative to a folder of the checkpoint.

    "__0_0.distcp: it is truncated" -> "folder/__0_0.distcp".
    """
    name = text.partition(":")[0]
    if not name or "\0" in name or os.path.isabs(name):
        return None
    for here, folders, _ in storage.walk(directory):
        folders.sort()
        if storage.isfile(os.path.join(here, name)):
            return os.path.relpath(os.path.join(here, name), directory)
    return None


def report_failure(error: ShardkitError, directory: str, report: Report) -> None:
    """Report the error of opening a checkpoint. Its lines that begin with a file's name become problems of that file."""
    if isinstance(error, ResourceError):
        report.unreadable(error, file=named_file(error.message, directory))
        return
    if isinstance(error, DamagedFiles):
        report_damaged(error, directory, report)
        return
    other_lines = []
    for line in error.problems:
        file = named_file(line, directory)
        if file is None:
            other_lines.append(line)
        else:
            report.problem(line.partition(":")[2].strip() or error.message, file=file)
    if other_lines or not error.problems:
        report.problem(error.message, file=named_file(error.message, directory), details=tuple(other_lines))


def _files(catalog: Catalog, directory: str, report: Report) -> list[FileBytes]:
    """Return the catalog's files, each with its chunks, except chunks that have to be decoded."""
    table, files = catalog.chunks, dict[str, FileBytes]()
    for source in catalog.files:
        if source.path not in files:
            size = source.size if source.is_raw else storage.stat(source.path).st_size
            name = _name(source.path, directory)
            files[source.path] = FileBytes(name=name, path=source.path, follow=True, size=size)
    for fqn, entry in catalog.tensors.items():
        regions = catalog.chunks.regions(entry.chunk_ids)
        for row, region in zip(entry.chunk_ids, regions, strict=True):
            source = catalog.files[table.file[row]]
            report.chunk(table.nbytes[row])
            if source.is_raw:
                part = region if entry.num_chunks > 1 else None
                stretch = Stretch(table.start[row], table.nbytes[row], fqn, part, None)
                files[source.path].stretches.append(stretch)
    report.files.update(file.name for file in files.values())
    return list(files.values())


def _name(path: str, directory: str) -> str:
    """Return a file's name relative to the checkpoint, which may be a trainer's directory around the weights."""
    return os.path.relpath(path, directory) if storage.isdir(directory) else os.path.basename(path)


def _decoded(catalog: Catalog) -> Mapping[str, list[str]]:
    """Return the tensors that have to be decoded, by the path of their file."""
    table, names = catalog.chunks, dict[str, list[str]]()
    for fqn, entry in catalog.tensors.items():
        files = (catalog.files[number] for number in {table.file[row] for row in entry.chunk_ids})
        for path in {file.path for file in files if not file.is_raw}:
            names.setdefault(path, []).append(fqn)
    return names


def _add_entries(file: FileBytes, decoded: Sequence[str], report: Report) -> None:
    """Replace the tensors of a `torch.save` file by the zip entries around them, which have checksums.

    Several tensors may be in one entry, as parts of one storage.
    """
    entries = None
    with (
        report.collect_errors(file.name),
        open_regular(file.path, file.name, follow=file.follow) as (fd, size),
    ):
        reader = ZipReader(pread_of(fd), 0, size, escape(file.name))
        entries = read_directory(reader)
    if entries is None:
        return
    tensors = sorted(file.stretches, key=lambda stretch: stretch.start)
    starts = [stretch.start for stretch in tensors]
    kept = []
    for name, entry in entries.items():
        inside = tensors[bisect_left(starts, entry.start) : bisect_left(starts, entry.start + entry.nbytes)]
        if entry.crc:
            kept.append(_of_entry(name, entry, inside, decoded))
        else:
            kept += inside
    file.stretches = kept


def _of_entry(name: str, entry: ZipEntry, inside: Sequence[Stretch], decoded: Sequence[str]) -> Stretch:
    """Return a zip entry as a stretch, described by the tensors that are or may be in it.

    Args:
        name, entry: the entry.
        inside: the tensors whose bytes are in it.
        decoded: names of tensors of the file that have to be decoded: nothing shows in which entry they are.
    """
    what, region = f"the data ({name})", None
    tensor = inside[0].tensor if inside else None
    names = {stretch.tensor for stretch in inside}
    if len(inside) == 1 and inside[0].nbytes == entry.nbytes:
        region = inside[0].region
    elif len(names) > 1:
        what = f"{what} shared with {count(len(names) - 1, 'more tensor')} of the file"
    elif tensor is None and name.startswith(_STORAGE) and decoded:
        tensor = decoded[0] if len(decoded) == 1 else None
        what = what if tensor is not None else f"{what}, perhaps of {listed(decoded)}"
    return Stretch(entry.start, entry.nbytes, tensor, region, entry.crc, what)
