"""A manifest held against the directory that it describes: names, sizes, and digests of what describes the rest."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import BY_NAME
from shardkit.core.text import count, escape, listed
from shardkit.errors import ResourceError, ShardkitError
from shardkit.files import manifest
from shardkit.files.digest import crc32
from shardkit.files.file_bytes import FileBytes, place_of
from shardkit.files.strict_json import read_small
from shardkit.formats.dcp import chunk_list
from shardkit.formats.dcp.chunk_list import ChunkList
from shardkit.operations.verify.listing import file_size, list_files
from shardkit.operations.verify.result import Report

METADATA = ".metadata"
_LIST = re.compile(r".*\.chunks\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_UPLOADED = (".gitattributes", "README.md")
"""What the Hub itself puts beside a model that is uploaded."""


class Recorded(NamedTuple):
    """What a manifest says of a file that has the right size."""

    size: int
    crc32: int | None
    sha256: str | None
    extents: Mapping[tuple[int, int], int]
    """(first byte, bytes) of chunks that have no checksum in the file -> CRC-32."""


@dataclass(slots=True, kw_only=True)
class Described:
    """What a manifest says of a directory, as far as it could be read."""

    content: Mapping[str, Any]
    where: str
    """The manifest: its name relative to the checkpoint, or its path where it lies elsewhere."""
    folder: str
    """That it describes, relative to the checkpoint."""
    directory: str
    """The same, where it is."""
    files: dict[str, Recorded] = field(default_factory=dict)
    """Those listed under "files" that have the right size; of shards and weights alone, but for the kind "files"."""
    others: dict[str, Recorded] = field(default_factory=dict)
    """Those listed under "others" that have the right size."""
    lists: dict[str, ChunkList] = field(default_factory=dict)
    """Shard file -> its chunk list."""
    names: set[str] = field(default_factory=set)
    """Every file that is listed."""
    is_metadata_damaged: bool = False
    """`.metadata` is not what was written: what it says of files is worth nothing."""

    @property
    def kind(self) -> str:
        """Either "presharded", "checkpoint" (saved by training), "hub" or "files"."""
        return str(self.content.get("kind", "presharded"))

    @property
    def is_of_dcp(self) -> bool:
        """True for the manifest of a DCP directory that shardkit wrote."""
        return self.kind in ("presharded", "checkpoint")

    @property
    def follow(self) -> bool:
        """Links count as files, as in the Hub's cache."""
        return "hub" in (self.kind, self.content.get("layout") if self.kind == manifest.KIND_FILES else None)


def read_manifest(
    directory: str, folder: str, report: Report, *, path: str | None = None
) -> Described | None:
    """Read a manifest and hold a directory against it; None where there is none to go by.

    Args:
        directory: that is described; or a single file.
        folder: the same, relative to the checkpoint.
        report: gets what is wrong.
        path: of a manifest that lies elsewhere; None for the one in the directory.
    """
    where = os.path.join(folder, manifest.NAME) if path is None else path
    report.manifests.append(where)
    try:
        data = manifest.read_bytes(directory) if path is None else read_small(path, path, manifest.MAX_BYTES)
        content = manifest.parse(data, os.path.basename(where))
    except ResourceError as error:
        report.unreadable(error, file=where)
        return None
    except ShardkitError as error:
        report.error(error, file=where)
        return None
    if manifest.dump(content) != data:  # its digest does not cover blanks and the spelling of numbers
        report.problem("it says what was written, in other bytes", file=where)
    is_one_file = not os.path.isdir(directory)
    home = (os.path.dirname(directory) or os.curdir) if is_one_file else directory
    described = Described(content=content, where=where, folder=folder, directory=home)
    try:
        _check_files(described, report)
        if not is_one_file:
            _check_unlisted(described, report)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__} {escape(str(error))}"
        report.problem(f"it lacks what its format has: {reason}", file=where)
    return described


def _check_files(described: Described, report: Report) -> None:
    content = described.content
    if "metadata" in content:
        entry = content["metadata"]
        if _recorded(described, entry, report) is not None:
            described.is_metadata_damaged = not _read_described(described, entry, report)
    for entry in content["files"]:
        recorded = _recorded(described, entry, report)
        if recorded is not None:
            described.files[entry["name"]] = recorded
        if described.kind == "presharded":
            _check_list(described, entry, report)
    for entry in content.get("others", ()):
        recorded = _recorded(described, entry, report)
        if recorded is not None:
            described.others[entry["name"]] = recorded


def _check_list(described: Described, entry: Mapping[str, Any], report: Report) -> None:
    listed_as, name = entry["chunks"], os.path.join(described.folder, entry["chunks"]["name"])
    if listed_as["name"] != chunk_list.name_for(entry["name"]):
        raise ValueError(f"chunk list {listed_as['name']!r} of {entry['name']!r}")
    if _recorded(described, listed_as, report) is None:
        return
    is_whole = _read_described(described, listed_as, report)
    try:
        described.lists[entry["name"]] = chunk_list.read(described.directory, entry["name"])
    except ResourceError as error:
        report.unreadable(error, file=name)
    except ShardkitError as error:
        if is_whole and entry["name"] in described.files:  # else it was said why
            report.error(error, file=name)


def _digests(entry: Mapping[str, Any]) -> tuple[int | None, str | None]:
    crc, sha256 = entry.get("crc32"), entry.get("sha256")
    if crc is not None and type(crc) is not int:
        raise TypeError("crc32")
    if sha256 is not None and not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
        raise TypeError("sha256")
    return crc, sha256


def _recorded(described: Described, entry: Mapping[str, Any], report: Report) -> Recorded | None:
    """Return what is recorded of a file, where it is there with the right size."""
    name, size = entry["name"], entry["size"]
    if type(size) is not int or not isinstance(name, str):
        raise TypeError("name or size")
    parts = name.split("/")
    if any(part in ("", os.curdir, os.pardir) for part in parts) or "\0" in name:
        raise ValueError(f"file name {name!r}")
    described.names.add(name)
    extents = {(start, nbytes): int(crc) for start, nbytes, crc in entry.get("extents", ())}
    recorded = Recorded(size, *_digests(entry), extents)
    where, held = (
        os.path.join(described.folder, name),
        file_size(described.directory, name, follow=described.follow),
    )
    if held is None:
        is_there = os.path.lexists(os.path.join(described.directory, name))
        reason = "it is no regular file of the directory" if is_there else "there is no such file"
        report.problem(f"{escape(os.path.basename(described.where))} lists it, and {reason}", file=where)
    elif held != size:
        report.problem("size in bytes", file=where, expected=str(size), found=str(held))
    return recorded if held == size else None


def _read_described(described: Described, entry: Mapping[str, Any], report: Report) -> bool:
    """Compare a small file, read whole, with its digests; True where they agree."""
    where = os.path.join(described.folder, entry["name"])
    try:
        data = read_small(os.path.join(described.directory, entry["name"]), where, manifest.MAX_BYTES)
    except ResourceError as error:
        report.unreadable(error, file=where)
        return False
    except ShardkitError as error:
        report.error(error, file=where)
        return False
    crc, sha256 = _digests(entry)
    found = crc32(data)
    if crc not in (None, found):
        report.problem("CRC-32 of the file", file=where, expected=f"{crc:08x}", found=f"{found:08x}")
        return False
    if sha256 is not None and (own := hashlib.sha256(data).hexdigest()) != sha256:
        report.problem("sha256 of the file", file=where, expected=sha256, found=own)
        return False
    return True


def _check_unlisted(described: Described, report: Report) -> None:
    """Look for what is there and not listed.

    A manifest of files lists all; beside a Hub model people put what they like, and DCP directories get stale files.
    """
    if described.is_of_dcp:
        report.warnings += _stale(described)
        return
    if described.kind == "hub" and "others" not in described.content:
        return  # it lists weights alone
    found = list(_unlisted(described))
    if described.kind == manifest.KIND_FILES:
        for name in found:
            report.problem(
                f"{escape(os.path.basename(described.where))} does not list it",
                file=os.path.join(described.folder, name),
            )
    elif found:
        report.warnings.append(
            f"{count(len(found), 'file')} that the manifest does not list: {listed(found)}"
        )


def _unlisted(described: Described) -> Iterator[str]:
    """Yield the names that are not listed; what lies in folders with manifests of their own belongs to those."""
    content = described.content
    listing = list_files(described.directory, follow=described.follow)
    known = {*described.names, *_texts(content.get("unlisted", ())), manifest.NAME}
    if described.kind == "hub":
        known.update(_UPLOADED)
    folders = tuple(f"{folder}/" for folder in _texts(content.get("folders", ())))
    for name in sorted((*listing.files, *listing.unlisted)):
        if name not in known and not name.startswith(folders):
            yield name


def _texts(values: Iterable[object]) -> list[str]:
    texts = list(values)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a list of names")
    return [str(text) for text in texts]


def _stale(described: Described) -> Iterator[str]:
    """Yield a warning for each chunk list that belongs to no file of the manifest."""
    for name in sorted(os.listdir(described.directory)):
        if _LIST.fullmatch(name) and name not in described.names:
            yield f"{escape(os.path.join(described.folder, name))}: not of this checkpoint"


def add_recorded(described: Iterable[Described], files: list[FileBytes]) -> None:
    """Give files what manifests record of them as a whole; those that hold no tensors are added."""
    known = {place_of(file.path): file for file in files}
    for each in described:
        for name, recorded in {**each.files, **each.others}.items():
            if recorded.crc32 is None and recorded.sha256 is None:
                continue
            path = os.path.join(each.directory, name)
            file = known.get(place_of(path))
            if file is None:
                file = FileBytes(
                    name=os.path.join(each.folder, name), path=path, follow=each.follow, size=recorded.size
                )
                files.append(file)
                known[place_of(path)] = file
            file.crc32 = recorded.crc32 if recorded.crc32 is not None else file.crc32
            file.sha256 = recorded.sha256 or file.sha256
            _add_crcs_of_chunks(each, recorded, file)


def _add_crcs_of_chunks(described: Described, recorded: Recorded, file: FileBytes) -> None:
    """Let chunks that have no checksum in the file have the manifest's; that of the tensor where they are whole."""
    for at, stretch in enumerate(file.stretches):
        if stretch.crc32 is None and stretch.tensor is not None:
            crc = recorded.extents.get((stretch.start, stretch.nbytes))
            crc = tensor_crc(described, stretch.tensor, stretch.nbytes) if crc is None else crc
            file.stretches[at] = stretch._replace(crc32=crc)


def check_tensors(described: Described, catalog: Catalog, report: Report) -> None:
    """Hold names, dtypes and shapes of the manifest's tensors against those that are stored."""
    where = described.where
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
    tied = _names(content["ties"]) if "kind" not in content else set()  # which alone leaves them out
    for fqn in catalog.tensors.keys() - tensors.keys() - tied:
        report.problem("it is stored, and the manifest does not list it", file=where, tensor=fqn)


def _names(groups: Iterable[Iterable[str]]) -> set[str]:
    return {name for group in groups for name in group}


def tensor_crc(described: Described, fqn: str, nbytes: int) -> int | None:
    """Return the recorded CRC-32 of a tensor of `nbytes` in all, None where there is none."""
    tensors = described.content.get("tensors")
    entry = tensors.get(fqn) if isinstance(tensors, dict) else None
    if not isinstance(entry, dict) or type(entry.get("crc32")) is not int:
        return None
    dtype, shape = BY_NAME.get(str(entry.get("dtype"))), entry.get("shape")
    if dtype is None or not isinstance(shape, list) or not all(type(size) is int for size in shape):
        return None
    return int(entry["crc32"]) if prod(shape) * dtype.itemsize == nbytes else None
