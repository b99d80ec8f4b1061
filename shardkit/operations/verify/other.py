"""What is no plain DCP directory: Hub models, and the formats of trainers that keep files of their own."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from shardkit.core.catalog import Catalog
from shardkit.core.text import count, escape, listed
from shardkit.errors import ResourceError, SourceError
from shardkit.files import storage
from shardkit.files.file_bytes import Archive, FileBytes, Stretch
from shardkit.files.strict_json import open_regular
from shardkit.formats.checkpoint import Checkpoint
from shardkit.formats.torchsave.archive import Entry, ZipReader, read_directory
from shardkit.operations.verify.result import Report

_SAFETENSORS = ".safetensors"
_MAX_ENTRIES = 1 << 20
_STORAGE = "data/"


def verify_hub(checkpoint: Checkpoint, report: Report) -> list[FileBytes]:
    """Take a Hub model, whose headers and index were checked when it was opened; return its weight files."""
    catalog = checkpoint.catalog
    report.num_tensors += len(catalog.tensors)
    report.add_notes(checkpoint.notes)
    is_legacy = catalog.format == "torch-bin"
    files = _legacy_files(catalog, report) if is_legacy else _files(catalog, checkpoint.path, report)
    if os.path.isdir(checkpoint.path):
        known = {file.name for file in files}
        report.warnings += [
            f"{escape(name)}: not one of the model's weight files"
            for name in sorted(os.listdir(checkpoint.path))
            if name.endswith(_SAFETENSORS) and name not in known
        ]
    return files


def verify_other(checkpoint: Checkpoint, directory: str, report: Report) -> list[FileBytes]:
    """Open all records of all tensors, and return the files with the checksums in them, if they have any.

    Args:
        checkpoint: of a format that is neither DCP nor the Hub's.
        directory: that names are relative to.
        report: gets what is wrong.
    """
    report.num_tensors += len(checkpoint.catalog.tensors)
    report.add_notes(checkpoint.notes)
    try:
        catalog = checkpoint.select(tuple(checkpoint.catalog.tensors))
    except ResourceError as error:
        report.unreadable(error, file=named_file(error.message, directory))
        return []
    except SourceError as error:
        report_failure(error, directory, report)
        return []
    files = _files(catalog, directory, report)
    if checkpoint.check is None:
        return files
    decoded = _decoded(catalog)
    for file in files:
        _add_entries(file, decoded.get(file.path, ()), report)
    return files


def named_file(text: str, directory: str) -> str | None:
    """Return the file that a message begins with, where it does; names in it may be relative to a folder."""
    name = text.partition(":")[0]
    if not name or "\0" in name or os.path.isabs(name):
        return None
    for here, folders, _ in os.walk(directory):
        folders.sort()
        if os.path.isfile(os.path.join(here, name)):
            return os.path.relpath(os.path.join(here, name), directory)
    return None


def report_failure(error: SourceError, directory: str, report: Report) -> None:
    """Add what kept a checkpoint from being opened: what it says of single files as problems of those."""
    others = []
    for line in error.problems:
        file = named_file(line, directory)
        if file is None:
            others.append(line)
        else:
            report.problem(line.partition(":")[2].strip() or error.message, file=file)
    if others or not error.problems:
        report.problem(error.message, file=named_file(error.message, directory), details=tuple(others))


def _files(catalog: Catalog, directory: str, report: Report) -> list[FileBytes]:
    """Return the files that chunks lie in, each with its chunks; of those that exist only decoded, the file itself."""
    table, found = catalog.chunks, dict[str, FileBytes]()
    for source in catalog.files:
        if source.path not in found:
            size = source.size if source.decode is None else os.stat(source.path).st_size
            name = _name(source.path, directory)
            found[source.path] = FileBytes(name=name, path=source.path, follow=True, size=size)
    for fqn, entry in catalog.tensors.items():
        regions = catalog.chunks.regions(entry.chunk_ids)
        for row, region in zip(entry.chunk_ids, regions, strict=True):
            source = catalog.files[table.file[row]]
            report.chunk(table.nbytes[row])
            if source.decode is None:
                part = region if entry.num_chunks > 1 else None
                stretch = Stretch(table.start[row], table.nbytes[row], fqn, part, None)
                found[source.path].stretches.append(stretch)
    report.files.update(file.name for file in found.values())
    return list(found.values())


def _name(path: str, directory: str) -> str:
    """Return a file's name relative to the checkpoint; a trainer's directory may be around its weights."""
    return os.path.relpath(path, directory) if os.path.isdir(directory) else os.path.basename(path)


def _decoded(catalog: Catalog) -> Mapping[str, list[str]]:
    """Return, by path, the tensors of a file whose bytes are no run of it."""
    table, found = catalog.chunks, dict[str, list[str]]()
    for fqn, entry in catalog.tensors.items():
        for path in {catalog.files[table.file[r]].path for r in entry.chunk_ids if _is_decoded(catalog, r)}:
            found.setdefault(path, []).append(fqn)
    return found


def _is_decoded(catalog: Catalog, row: int) -> bool:
    return catalog.files[catalog.chunks.file[row]].decode is not None


def _legacy_files(catalog: Catalog, report: Report) -> list[FileBytes]:
    """Return `.bin` files: zips of torch, whose entries have checksums."""
    files: dict[str, FileBytes] = {}
    for entry in catalog.tensors.values():
        report.chunk(entry.nbytes)
    for source in catalog.files:
        if source.path not in files:
            name, size = os.path.basename(source.path), os.stat(source.path).st_size
            files[source.path] = FileBytes(
                name=name, path=source.path, follow=True, size=size, archives=[Archive(0, size, name)]
            )
            report.files.add(name)
    return list(files.values())


def _add_entries(file: FileBytes, decoded: Sequence[str], report: Report) -> None:
    """Put the entries of a file of `torch.save`, which have checksums, in the place of the tensors in them.

    Several tensors may be parts of one storage.
    """
    try:
        with open_regular(file.path, file.name, follow=file.follow) as (fd, size):
            reader = ZipReader(lambda at, n: storage.pread(fd, n, at), 0, size, escape(file.name))
            entries = read_directory(reader, lambda _: True, max_entries=_MAX_ENTRIES)
    except ResourceError as error:
        report.unreadable(error, file=file.name)
        return
    except SourceError as error:
        report.error(error, file=file.name)
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


def _of_entry(name: str, entry: Entry, inside: Sequence[Stretch], decoded: Sequence[str]) -> Stretch:
    """Return what is known of an entry of a zip: the tensors in it, or those that may be."""
    what, region = f"the data ({name})", None
    tensor = inside[0].tensor if inside else None
    names = {stretch.tensor for stretch in inside}
    if len(inside) == 1 and inside[0].nbytes == entry.nbytes:
        region = inside[0].region
    elif len(names) > 1:
        what = f"{what} that {count(len(names) - 1, 'more tensor')} of the file lie in"
    elif tensor is None and name.startswith(_STORAGE) and decoded:
        tensor = decoded[0] if len(decoded) == 1 else None
        what = what if tensor is not None else f"{what}, perhaps of {listed(decoded)}"
    return Stretch(entry.start, entry.nbytes, tensor, region, entry.crc, what)
