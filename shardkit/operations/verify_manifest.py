"""A manifest held against the directory that it lies in: names, sizes, and digests of what describes the rest."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardkit import manifest
from shardkit.core.catalog import Catalog
from shardkit.core.text import escape
from shardkit.errors import ResourceError, ShardkitError
from shardkit.formats import chunk_list
from shardkit.formats.chunk_list import ChunkList
from shardkit.formats.strict import read_small
from shardkit.operations.verify_result import Report
from shardkit.transfer.digest import crc32

METADATA = ".metadata"
_LIST = re.compile(r".*\.chunks\.json")
_MAX_BYTES = 1 << 30


@dataclass(slots=True, kw_only=True)
class Described:
    """What a manifest says of its directory, as far as it could be read."""

    content: Mapping[str, Any]
    folder: str
    """Relative to the checkpoint."""
    directory: str
    crcs: dict[str, int | None] = field(default_factory=dict)
    """File -> its recorded CRC-32, of those that have the right size."""
    lists: dict[str, ChunkList] = field(default_factory=dict)
    """Shard file -> its chunk list."""
    names: set[str] = field(default_factory=set)
    """Every file that is listed."""
    is_metadata_damaged: bool = False
    """`.metadata` is not what was written: what it says of files is worth nothing."""

    @property
    def kind(self) -> str:
        """Either "presharded", "checkpoint" (saved by training) or "hub"."""
        return str(self.content.get("kind", "presharded"))


def read_manifest(directory: str, folder: str, report: Report) -> Described | None:
    """Read the manifest of a directory and hold the directory against it; None where there is none to go by.

    Raises:
        ResourceError: a file may not be read.
    """
    where = os.path.join(folder, manifest.NAME)
    report.manifests.append(where)
    try:
        data = read_small(os.path.join(directory, manifest.NAME), where, _MAX_BYTES)
        content = manifest.read(directory)
    except ResourceError:
        raise
    except ShardkitError as error:
        report.error(error, file=where)
        return None
    if content is None:
        return None
    if manifest.dump(content) != data:  # its digest does not cover blanks and the spelling of numbers
        report.problem("it says what was written, in other bytes", file=where)
    described = Described(content=content, folder=folder, directory=directory)
    try:
        _check_files(described, report)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__} {escape(str(error))}"
        report.problem(f"it lacks what its format has: {reason}", file=where)
    return described


def _check_files(described: Described, report: Report) -> None:
    content = described.content
    if "metadata" in content:
        entry = content["metadata"]
        if _has_size(described, entry, report):
            described.is_metadata_damaged = not _read_described(described, entry, report)
    for entry in content["files"]:
        if _has_size(described, entry, report):
            described.crcs[entry["name"]] = _crc(entry)
        if described.kind == "presharded":
            _check_list(described, entry, report)
    if described.kind != "hub":
        report.warnings += _stale(described)


def _check_list(described: Described, entry: Mapping[str, Any], report: Report) -> None:
    listed, name = entry["chunks"], os.path.join(described.folder, entry["chunks"]["name"])
    if listed["name"] != chunk_list.name_for(entry["name"]):
        raise ValueError(f"chunk list {listed['name']!r} of {entry['name']!r}")
    if not _has_size(described, listed, report):
        return
    is_whole = _read_described(described, listed, report)
    try:
        described.lists[entry["name"]] = chunk_list.read(described.directory, entry["name"])
    except ResourceError:
        raise
    except ShardkitError as error:
        if is_whole and entry["name"] in described.crcs:  # else it was said why
            report.error(error, file=name)


def _crc(entry: Mapping[str, Any]) -> int | None:
    crc = entry.get("crc32")
    if crc is not None and type(crc) is not int:
        raise TypeError("crc32")
    return crc


def _has_size(described: Described, entry: Mapping[str, Any], report: Report) -> bool:
    """Look whether a file is there with the size that is recorded."""
    name, size = entry["name"], entry["size"]
    if type(size) is not int or not isinstance(name, str):
        raise TypeError("name or size")
    parts = name.split("/")
    if any(part in ("", os.curdir, os.pardir) for part in parts) or "\0" in name:
        raise ValueError(f"file name {name!r}")
    described.names.add(name)
    where, held = os.path.join(described.folder, name), _file_size(os.path.join(described.directory, name))
    if held is None:
        report.problem(f"{manifest.NAME} lists it, and there is no such file", file=where)
    elif held != size:
        report.problem("size in bytes", file=where, expected=str(size), found=str(held))
    return held == size


def _file_size(path: str) -> int | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _read_described(described: Described, entry: Mapping[str, Any], report: Report) -> bool:
    """Compare a small file, read whole, with its digest; True where they agree."""
    expected, where = _crc(entry), os.path.join(described.folder, entry["name"])
    try:
        data = read_small(os.path.join(described.directory, entry["name"]), where, _MAX_BYTES)
    except ResourceError:
        raise
    except ShardkitError as error:
        report.error(error, file=where)
        return False
    found = crc32(data)
    if expected is not None and found != expected:
        report.problem("CRC-32 of the file", file=where, expected=f"{expected:08x}", found=f"{found:08x}")
    return expected in (None, found)


def _stale(described: Described) -> Iterator[str]:
    """Yield a warning for each chunk list that belongs to no file of the manifest."""
    for name in sorted(os.listdir(described.directory)):
        if _LIST.fullmatch(name) and name not in described.names:
            yield f"{escape(os.path.join(described.folder, name))}: not of this checkpoint"


def check_tensors(described: Described, catalog: Catalog, report: Report) -> None:
    """Hold names, dtypes and shapes of the manifest's tensors against those that are stored."""
    where = os.path.join(described.folder, manifest.NAME)
    if described.kind == "checkpoint":
        return
    try:
        _check_tensors(described.content, catalog, where, report)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        report.problem(
            f"it lacks what its format has: {type(error).__name__} {escape(str(error))}", file=where
        )


def _check_tensors(content: Mapping[str, Any], catalog: Catalog, where: str, report: Report) -> None:
    tensors = content["tensors"]
    for fqn, said in tensors.items():
        entry = catalog.tensors.get(fqn)
        if entry is None:
            report.problem("the manifest lists it, and it is not stored", file=where, tensor=fqn)
            continue
        meant, held = (said["dtype"], list(said["shape"])), (entry.dtype.name, list(entry.shape))
        if meant != held:
            expected, found = (f"{dtype} {shape}" for dtype, shape in (meant, held))
            report.problem("dtype and shape", file=where, tensor=fqn, expected=expected, found=found)
    tied = _names(content["ties"]) if content.get("kind") != "hub" else set()
    for fqn in catalog.tensors.keys() - tensors.keys() - tied:
        report.problem("it is stored, and the manifest does not list it", file=where, tensor=fqn)


def _names(groups: Iterable[Iterable[str]]) -> set[str]:
    return {name for group in groups for name in group}


def tensor_crc(described: Described | None, fqn: str) -> int | None:
    """Return the recorded CRC-32 of a whole tensor, None where there is none."""
    tensors = described.content.get("tensors") if described is not None else None
    entry = tensors.get(fqn) if isinstance(tensors, dict) else None
    crc = entry.get("crc32") if isinstance(entry, dict) else None
    return crc if type(crc) is int else None
