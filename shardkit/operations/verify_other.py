"""What is no plain DCP directory: Hub models, and the layouts of trainers that keep files of their own."""

from __future__ import annotations

import os
import random

from shardkit.core.catalog import Catalog
from shardkit.core.text import escape
from shardkit.errors import ResourceError, SourceError
from shardkit.formats.sharded.checkpoint import Checkpoint
from shardkit.operations.verify_bytes import Archive, FileBytes, Stretch
from shardkit.operations.verify_manifest import Described, check_tensors, tensor_crc
from shardkit.operations.verify_result import Report

_SAFETENSORS = ".safetensors"
NO_CHECKSUM = "safetensors files record no checksum; only a manifest with digests has one"


def verify_hub(checkpoint: Checkpoint, described: Described | None, report: Report) -> list[FileBytes]:
    """Take a Hub model, whose headers and index were checked when it was opened.

    Returns:
        Its files, with what the manifest records of them.
    """
    catalog = checkpoint.catalog
    report.num_tensors += len(catalog.tensors)
    report.add_notes(checkpoint.notes)
    if described is not None:
        check_tensors(described, catalog, report)
    files = (
        _legacy_files(catalog, report)
        if catalog.format == "torch-bin"
        else _files(catalog, described, report)
    )
    if os.path.isdir(checkpoint.path):
        known = {file.name for file in files}
        report.warnings += [
            f"{escape(name)}: not one of the model's weight files"
            for name in sorted(os.listdir(checkpoint.path))
            if name.endswith(_SAFETENSORS) and name not in known
        ]
    return files


def _files(catalog: Catalog, described: Described | None, report: Report) -> list[FileBytes]:
    table = catalog.chunks
    files = [
        FileBytes(
            name=source.name,
            path=source.path,
            follow=True,
            size=source.size,
            crc32=described.crcs.get(source.name) if described is not None else None,
        )
        for source in catalog.files
    ]
    for fqn, entry in catalog.tensors.items():
        crc = tensor_crc(described, fqn)
        for row in entry.chunk_ids:
            stretch = Stretch(table.start[row], table.nbytes[row], fqn, None, crc)
            files[table.file[row]].stretches.append(stretch)
            report.chunk("", fqn, stretch.nbytes, has_checksum=crc is not None)
    report.files.update(file.name for file in files)
    if any(file.crc32 is None for file in files):
        report.add_notes([NO_CHECKSUM])
    return files


def _legacy_files(catalog: Catalog, report: Report) -> list[FileBytes]:
    """Return `.bin` files: zips of torch, whose entries have checksums."""
    files: dict[str, FileBytes] = {}
    for fqn, entry in catalog.tensors.items():
        report.chunk("", fqn, entry.nbytes, has_checksum=True)
    for source in catalog.files:
        if source.path not in files:
            name, size = os.path.basename(source.path), os.stat(source.path).st_size
            files[source.path] = FileBytes(
                name=name, path=source.path, follow=True, size=size, archives=[Archive(0, size, name)]
            )
            report.files.add(name)
    return list(files.values())


class Other:
    """A checkpoint of a layout that compares bytes with its own checksums, if it has any.

    Args:
        checkpoint: opened.
        report: gets what is found.
    """

    def __init__(self, checkpoint: Checkpoint, report: Report) -> None:
        self._checkpoint, self._report = checkpoint, report
        self._names: list[str] = []

    def check_structure(self) -> None:
        """Open all records of all tensors.

        Raises:
            ResourceError: a file may not be read.
        """
        checkpoint, report = self._checkpoint, self._report
        report.num_tensors += len(checkpoint.catalog.tensors)
        report.add_notes(checkpoint.notes)
        try:
            catalog = checkpoint.select(tuple(checkpoint.catalog.tensors))
        except ResourceError:
            raise
        except SourceError as error:
            report.error(error)
            return
        self._names = list(catalog.tensors)
        has_checksum = checkpoint.check is not None
        table = catalog.chunks
        for fqn, entry in catalog.tensors.items():
            for row in entry.chunk_ids:
                report.chunk("", fqn, table.nbytes[row], has_checksum=has_checksum)
        report.files.update(file.name for file in catalog.files if file.decode is None)
        if not has_checksum:
            report.add_notes([f"checkpoints of this layout ({checkpoint.layout}) record no checksum"])

    def choose(self, num_bytes: int, seed: int) -> None:
        """Let only some tensors be read, chosen at random until they have `num_bytes`."""
        random.Random(seed).shuffle(self._names)
        tensors, chosen = self._checkpoint.catalog.tensors, list[str]()
        for fqn in self._names:
            if num_bytes <= 0:
                break
            chosen.append(fqn)
            num_bytes -= tensors[fqn].nbytes
        self._names = chosen

    @property
    def read_bytes(self) -> int:
        """Bytes that `check_bytes` reads."""
        if self._checkpoint.check is None:
            return 0
        return sum(self._checkpoint.catalog.tensors[fqn].nbytes for fqn in self._names)

    def check_bytes(self) -> None:
        """Compare the bytes of the tensors with the checksums that lie with them.

        Raises:
            ResourceError: a file may not be read.
        """
        if self._checkpoint.check is None or not self._names:
            return
        try:
            for line in self._checkpoint.check(self._names):
                self._report.problem(line)
        except ResourceError:
            raise
        except SourceError as error:
            self._report.error(error)
        tensors = self._checkpoint.catalog.tensors
        self._report.num_checked_chunks += sum(tensors[fqn].num_chunks for fqn in self._names)
        self._report.read(self.read_bytes)
