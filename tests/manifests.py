"""Manifests that are changed after they were written, and lists of files as earlier versions wrote them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardkit.core.catalog import Catalog
from shardkit.core.regions import is_contiguous
from shardkit.files import manifest, storage
from shardkit.files.digest import FileBytes, crc32, place_of
from shardkit.files.home import path_in
from shardkit.files.listing import list_files
from shardkit.files.strict_json import open_regular, read_exactly
from shardkit.operations.resolve import find_checkpoint
from shardkit.operations.verify.result import Report
from shardkit.operations.verify.structure import check_structure


def change_manifest(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the manifest in a directory says, its own digest included."""
    content = json.loads((directory / manifest.NAME).read_text())
    change(content)
    (directory / manifest.NAME).write_bytes(manifest.sign(content))


def write_file_list(
    path: str | Path, output: str | Path | None = None, *, inside: bool = False, sha256: bool = False
) -> Path:
    """Write a manifest of files for a checkpoint that somebody else made, as earlier versions could.

    Args:
        path: a whole checkpoint of any format.
        output: the manifest; by default beside the checkpoint.
        inside: put it into the checkpoint.
        sha256: record the sha256 of every file too.
    """
    structure = check_structure(find_checkpoint(str(path), strict=True).path, Report())
    directory, checkpoint = structure.directory, structure.checkpoint
    assert structure.is_complete
    is_hub = checkpoint is not None and checkpoint.hub is not None
    catalog = checkpoint.select(tuple(checkpoint.catalog.tensors)) if checkpoint is not None else None
    target = output or (Path(directory, manifest.NAME) if inside else Path(manifest.sidecar_of(directory)))
    if storage.isdir(directory):
        listing, home = list_files(directory, follow=is_hub), directory
        names, unlisted = (
            [name for name in listing.files if not inside or name != manifest.NAME],
            listing.unlisted,
        )
    else:
        names, unlisted, home = [os.path.basename(directory)], (), os.path.dirname(directory)
    files = {place_of(file.path): file for file in structure.files}
    entries = []
    for name in names:
        data = _content(path_in(home, name))
        file = files.get(place_of(path_in(home, name)))
        extents = () if file is None or catalog is None else tuple(_extents(file, data, catalog))
        digest = hashlib.sha256(data).hexdigest() if sha256 else None
        entries.append(
            manifest.ListedFile(
                name=name, size=len(data), crc32=crc32(data), sha256=digest, extents=extents or None
            )
        )
    tensors = None
    if checkpoint is not None and catalog is not None:
        tensors = {
            fqn: manifest.ListedTensor(
                dtype=entry.dtype.name, shape=entry.shape, crc32=_tensor_crc(catalog, fqn)
            )
            for fqn, entry in checkpoint.catalog.tensors.items()
        }
    listed = manifest.FileList(
        tool=manifest.TOOL,
        layout=checkpoint.format if checkpoint is not None else "",
        writer=checkpoint.writer if checkpoint is not None else "unknown",
        files=tuple(entries),
        unlisted=unlisted,
        tensors=tensors,
    )
    Path(target).write_bytes(manifest.dump(listed))
    return Path(target)


def _content(path: str) -> bytes:
    with open_regular(path, path, follow=True) as (fd, size):
        return read_exactly(fd, 0, size, path)


def _extents(file: FileBytes, data: bytes, catalog: Catalog) -> Iterator[tuple[int, int, int]]:
    """Yield (first byte, bytes, CRC-32) of each part of a tensor that has no checksum in the file."""
    for stretch in sorted(file.stretches, key=lambda each: each.start):
        entry = catalog.tensors.get(stretch.tensor) if stretch.tensor is not None else None
        if stretch.crc32 is None and (entry is None or entry.nbytes != stretch.nbytes):
            start, stop = stretch.start, stretch.start + stretch.nbytes
            yield start, stretch.nbytes, crc32(data[start:stop])


def _tensor_crc(catalog: Catalog, fqn: str) -> int | None:
    """Return the CRC-32 of a tensor whose chunks are runs of it as they lie; None for any other."""
    entry, chunks, crc = catalog.tensors[fqn], catalog.chunks, 0
    for region, row in sorted(zip(chunks.regions(entry.chunk_ids), entry.chunk_ids, strict=True)):
        file, start = catalog.files[chunks.file[row]], chunks.start[row]
        if not file.is_raw or not is_contiguous(region, entry.shape):
            return None
        crc = crc32(_content(file.path)[start : start + chunks.nbytes[row]], crc)
    return crc
