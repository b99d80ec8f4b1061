"""DCP saved with `serialization_format=SAFETENSORS`: each `.distcp` ends with one safetensors file.

The places in its `.metadata` are not true: every tensor of a file is placed where the safetensors part
begins, with the length of its bare bytes. (torch's own reader cannot load it.) The header of that part says
where the bytes lie, and must agree with `.metadata` on everything else. Its DCP_SHARDING_INFO says which part
of a tensor the file holds. The writer keeps the parts by name, so of several chunks of one tensor in one file
only the last is there.

Source: torch 2.13, torch/distributed/checkpoint/filesystem.py (`_write_files_from_queue`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardkit.core.catalog import SourceFile, TensorEntry
from shardkit.core.regions import Region, Shape
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.files.strict_json import open_regular, parse_object, read_exactly, stamp_of
from shardkit.formats.dcp.metadata import DcpMetadata
from shardkit.formats.hub.safetensors import (
    LENGTH_BYTES,
    SafetensorsHeader,
    StoredTensor,
    check_header,
    text_length,
)

_KEY = "DCP_SHARDING_INFO"
_FIELD = "saved_offsets"
_LIMIT = 1 << 62


def holds_bare_bytes(metadata: DcpMetadata) -> bool:
    """True where every chunk has exactly the bytes of its elements: no record is as short as that."""
    table = metadata.chunks
    return bool(metadata.tensors) and all(
        table.nbytes[row] == table.region(row).num_elements * entry.dtype.itemsize
        for entry in metadata.tensors.values()
        for row in entry.chunk_ids
    )


def point_at_parts(metadata: DcpMetadata, files: list[SourceFile]) -> None:
    """Point every chunk at its bytes in the safetensors part of its file; the encoding becomes "raw".

    Raises:
        SourceError: a part is damaged, or lacks chunks that `.metadata` lists; names files and tensors.
        ResourceError: a file may not be read.
    """
    rows_of: dict[int, list[tuple[int, TensorEntry]]] = {}
    for entry in metadata.tensors.values():
        for row in entry.chunk_ids:
            rows_of.setdefault(metadata.chunks.file[row], []).append((row, entry))
    problems: list[str] = []
    for file, rows in rows_of.items():
        files[file] = _point_in_file(metadata, files[file], rows, problems)
    if problems:
        raise SourceError(
            f"{len(problems)} chunks that {metadata.where} lists are not in their files",
            problems=problems,
            hint="torch keeps one chunk of a tensor in each safetensors file: what is lost cannot be recovered",
        )
    metadata.encoding = "raw"


def _point_in_file(
    metadata: DcpMetadata,
    source: SourceFile,
    rows: Sequence[tuple[int, TensorEntry]],
    problems: list[str],
) -> SourceFile:
    table = metadata.chunks
    starts = {table.start[row] for row, _ in rows}
    if len(starts) > 1:
        raise SourceError(
            f"{metadata.where} places the tensors of {escape(source.name)} at {len(starts)} different bytes, "
            "as bare data and not as records: torch writes no such file"
        )
    base = starts.pop()
    with open_regular(source.path, source.name, follow=False) as (fd, size):
        header, stamp = _read_part(fd, base, size, source.name), stamp_of(fd)
    stored = {tensor.fqn: tensor for tensor in header.tensors}
    corners = saved_offsets(header, source.name)
    for row, entry in rows:
        region, tensor = table.region(row), stored.get(entry.fqn)
        corner = None if corners is None else corners.get(entry.fqn)
        reason = _difference(entry, region, tensor, corner)
        if reason or tensor is None:
            problems.append(
                f"{escape(entry.fqn)}: chunk at {list(region.offsets)}: {escape(source.name)} {reason}"
            )
        else:
            table.start[row], table.nbytes[row] = base + tensor.start, tensor.nbytes
    return replace(source, size=size, stamp=stamp)


def _read_part(fd: int, base: int, size: int, name: str) -> SafetensorsHeader:
    """Read the header at byte `base` of a file; the places in it count from there."""
    size -= base
    if size < 0:
        raise SourceError(f"{escape(name)}: its safetensors part would begin at byte {base}, past its end")
    start = read_exactly(fd, base, min(size, LENGTH_BYTES), name)
    text = read_exactly(fd, base + LENGTH_BYTES, text_length(start, size, name), name)
    return check_header(text, size, name)


def _difference(
    entry: TensorEntry, region: Region, tensor: StoredTensor | None, corner: tuple[int, ...] | None
) -> str | None:
    if tensor is None:
        return "does not hold it"
    if corner is None:
        return "has no DCP_SHARDING_INFO"
    if corner != region.offsets:
        return f"holds the chunk at {list(corner)} instead"
    if tensor.dtype is not entry.dtype:
        return f"holds {tensor.dtype.name}, expected {entry.dtype.name}"
    if tensor.shape != region.sizes:
        return f"holds shape {list(tensor.shape)}, expected {list(region.sizes)}"
    return None


def saved_offsets(header: SafetensorsHeader, name: str) -> dict[str, Shape] | None:
    """Return the offsets of each tensor's part in the whole tensor, as DCP_SHARDING_INFO gives them.

    Args:
        header: of the file.
        name: of the file, for messages.

    Returns:
        By name; None where the file has no such info.

    Raises:
        SourceError: malformed, or at odds with the header; names file and tensors.
    """
    text = header.metadata.get(_KEY)
    if text is None:
        return None
    info = parse_object(text.encode(), f"{name}, {_KEY}")
    found: dict[str, Shape] = {}
    problems: list[str] = []
    for tensor in header.tensors:
        fields = info.get(tensor.fqn)
        offsets = fields.get(_FIELD) if isinstance(fields, dict) else None
        corner = _corner(offsets, len(tensor.shape))
        if corner is None:
            problems.append(
                f"{escape(tensor.fqn)}: expected {len(tensor.shape)} offsets, found {escape(repr(offsets))}"
            )
        else:
            found[tensor.fqn] = corner
    if problems:
        raise SourceError(
            f"{escape(name)}: {_KEY} does not place {len(problems)} tensors",
            problems=problems,
            hint="the file is damaged or was put together by hand: use another copy",
        )
    return found


def _corner(offsets: object, num_dims: int) -> Shape | None:
    if not isinstance(offsets, list) or len(offsets) != num_dims:
        return None
    if any(type(offset) is not int or not 0 <= offset < _LIMIT for offset in offsets):
        return None
    return tuple(offsets)
