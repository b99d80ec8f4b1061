"""A directory that preshard or reshard wrote, opened from its manifest and chunk lists: no record is looked at."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from shardkit import manifest
from shardkit.core.catalog import Catalog, FileStamp, SourceFile
from shardkit.core.text import count, escape
from shardkit.errors import IntegrityError, ShardkitError, SourceError
from shardkit.formats import chunk_list
from shardkit.formats.chunk_list import ChunkList, ListedChunk
from shardkit.transfer.digest import crc32

METADATA = ".metadata"


@dataclass(frozen=True, slots=True, kw_only=True)
class Presharded:
    """What lies in such a directory."""

    catalog: Catalog
    """Every tensor; extents are raw bytes."""
    digest: int
    """The manifest's own, which covers the digest of every file."""


def open_presharded(directory: str) -> Presharded | None:
    """Open a directory by its manifest; None where it has none, or one of something else.

    Args:
        directory: with `shardkit.json` beside shard files.

    Raises:
        IntegrityError: manifest, chunk lists and files are not of one run, or a file is not whole.
        SourceError: a chunk list cannot be read, or the run that wrote the directory did not end.
    """
    content = manifest.read(directory)
    if content is None or not _is_of_shards(content):
        return None
    if not os.path.exists(os.path.join(directory, METADATA)):
        raise SourceError(
            f"{escape(directory)} has {manifest.NAME} and no {METADATA}, which is written last",
            hint="copy all of the directory; or preshard again",
        )
    lists = _read_lists(directory, content["files"])
    catalog = _catalog(directory, lists)
    _check_whole(catalog, content["tensors"])
    for name, others in sorted({k: v for each in lists for k, v in each.aliases.items()}.items()):
        for other in others if name in catalog.tensors else ():
            catalog.tensors[other] = replace(catalog.tensors[name], fqn=other)
    return Presharded(catalog=catalog, digest=content["crc32"])


def _is_of_shards(content: Mapping[str, Any]) -> bool:
    files = content.get("files")
    return (
        isinstance(content.get("mesh"), dict)
        and isinstance(content.get("tensors"), dict)
        and isinstance(files, list)
        and all(isinstance(file, dict) and isinstance(file.get("chunks"), dict) for file in files)
    )


def _read_lists(directory: str, files: Iterable[Mapping[str, Any]]) -> list[ChunkList]:
    found: list[ChunkList] = []
    errors: list[ShardkitError] = []
    for file in files:
        try:
            found.append(_read_list(directory, file))
        except ShardkitError as error:
            errors.append(error)
    if errors:
        raise IntegrityError(
            f"{escape(directory)}: {count(len(errors), 'file')} not as {manifest.NAME} describes",
            problems=[error.message for error in errors],
            hint="copy the directory again, or preshard again",
        )
    return found


def _read_list(directory: str, file: Mapping[str, Any]) -> ChunkList:
    name = file["name"]
    if not isinstance(name, str) or os.path.basename(name) != name or not name:
        raise IntegrityError(f"{escape(str(name))!r} is no file name")
    listed = chunk_list.read(directory, name)
    if listed.size != file["size"]:
        raise IntegrityError(f"{escape(name)} has {listed.size} bytes, not {file['size']}")
    with open(os.path.join(directory, chunk_list.name_for(name)), "rb") as stream:
        if crc32(stream.read()) != file["chunks"]["crc32"]:
            raise IntegrityError(f"{escape(chunk_list.name_for(name))} has been changed")
    return listed


def _catalog(directory: str, lists: list[ChunkList]) -> Catalog:
    catalog = Catalog(format="dcp", directory=directory)
    rows: dict[str, list[tuple[int, ListedChunk]]] = {}
    for number, listed in enumerate(lists):
        path = os.path.join(directory, listed.file)
        status = os.stat(path)
        stamp = FileStamp(status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)
        catalog.files.append(SourceFile(name=listed.file, path=path, size=listed.size, stamp=stamp))
        for chunk in listed.chunks:
            rows.setdefault(chunk.fqn, []).append((number, chunk))
    for fqn, chunks in rows.items():
        first = chunks[0][1]
        catalog.add_tensor_columns(
            fqn,
            first.dtype,
            first.shape,
            [file for file, _ in chunks],
            [chunk.data_start for _, chunk in chunks],
            [chunk.data_nbytes for _, chunk in chunks],
            [chunk.region for _, chunk in chunks],
        )
    return catalog


def _check_whole(catalog: Catalog, described: Mapping[str, Any]) -> None:
    """Hold the chunks of all files against the tensors that the manifest describes."""
    problems = []
    for fqn, tensor in described.items():
        entry = catalog.tensors.get(fqn)
        if entry is None:
            problems.append(f"{escape(fqn)}: in no file")
            continue
        stored = sum(region.num_elements for region in catalog.chunks.regions(entry.chunk_ids))
        if (list(entry.shape), entry.dtype.name) != (tensor["shape"], tensor["dtype"]):
            problems.append(f"{escape(fqn)}: a chunk list has another dtype or shape")
        elif stored != prod(entry.shape):
            problems.append(f"{escape(fqn)}: {stored} of {prod(entry.shape)} elements are there")
    if problems:
        raise IntegrityError(
            f"{escape(catalog.directory)}: {manifest.NAME} and the chunk lists disagree", problems=problems
        )
