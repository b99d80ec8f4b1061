"""The chunk list beside each shard file: it lists the chunks of that file, so that a rank need not parse `.metadata`.

`.metadata` describes every chunk of every rank, and takes seconds to parse at a thousand ranks. A rank's own
list has one line for each of its chunks. docs/format.md specifies the format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardkit.core.dtypes import BY_NAME, DType
from shardkit.core.regions import Region, Shape
from shardkit.core.text import escape
from shardkit.errors import IntegrityError, SourceError
from shardkit.files.digest import crc32
from shardkit.files.links import locate
from shardkit.files.strict_json import read_small

FORMAT = 1
_MAX_BYTES = 1 << 28
_MAX_DIMS = 64  # torch's own limit


class ListedChunk(NamedTuple):
    """One chunk of a shard file."""

    fqn: str
    dtype: DType
    shape: Shape
    """Of the whole tensor, in elements."""
    region: Region
    record_start: int
    """First byte of the `torch.save` record in the file."""
    record_nbytes: int
    data_start: int
    """First byte of the data in the file."""
    data_nbytes: int
    crc32: int | None
    """CRC-32 of the data; None if digests are off."""


class ChunkList(NamedTuple):
    """The parsed list of one shard file; its chunks are in file order."""

    file: str
    size: int
    """Bytes of the file."""
    aliases: dict[str, tuple[str, ...]]
    """By tensor, the other names of the same parameter."""
    chunks: tuple[ListedChunk, ...]


def name_for(file: str) -> str:
    """Return the name of the chunk list of a shard file: `__3_0.distcp` has `__3_0.chunks.json`."""
    return file.removesuffix(".distcp") + ".chunks.json"


class LineFormatter:
    """Formats the lines of one tensor's chunks of equal size; the text that they share is made once."""

    __slots__ = ("_before", "_data_nbytes", "_head", "_record_nbytes", "_sizes")

    def __init__(
        self, fqn: str, dtype: DType, shape: Shape, sizes: Shape, record: tuple[int, int, int]
    ) -> None:
        """Make the text that all these lines share.

        Args:
            fqn: the tensor's name.
            dtype: the tensor's dtype.
            shape: of the whole tensor, in elements.
            sizes: of the chunks' regions, in elements.
            record: bytes of each record, bytes before the data in it, bytes of the data.
        """
        self._head = json.dumps([fqn, dtype.name, list(shape)], separators=(",", ":"))[:-1]
        self._sizes = str(list(sizes))
        self._record_nbytes, self._before, self._data_nbytes = record

    def line(self, offsets: list[int], start: int, crc: int | None) -> str:
        """Return one chunk's line.

        Args:
            offsets: of its region, in elements.
            start: first byte of its record in the file.
            crc: CRC-32 of its data; None if digests are off.
        """
        places = f"{start},{self._record_nbytes},{start + self._before},{self._data_nbytes}"
        return f"{self._head},{offsets},{self._sizes},{places},{'null' if crc is None else crc}]"


def dump(file: str, size: int, aliases: Mapping[str, Sequence[str]], lines: Sequence[str]) -> bytes:
    """Return the bytes of a chunk list, a JSON object with one chunk on each line.

    Args:
        file: name of the shard file.
        size: bytes of the shard file.
        aliases: by tensor, the other names of the same parameter.
        lines: of its chunks in file order, from `LineFormatter`.
    """
    head = json.dumps({"format": FORMAT, "file": file, "size": size, "aliases": aliases})
    rows = ",\n".join(lines)
    return f'{head[:-1]}, "chunks": [\n{rows}\n]}}\n'.encode()


def read_beside(directory: str, file: str, size: int) -> tuple[ChunkList, int]:
    """Return the chunk list of a shard file and the CRC-32 of the list's bytes, without opening the shard file.

    Args:
        directory: of both files.
        file: name of the shard file.
        size: of the shard file, in bytes.

    Raises:
        SourceError: the list is missing or malformed, not a regular file, or a link that leaves the directory.
        IntegrityError: it disagrees with the name or size of its file.
        ResourceError: it may not be read.
    """
    name = name_for(file)
    data = read_small(locate(directory, name), name, _MAX_BYTES)
    try:
        content = json.loads(data)
        listed = _parse(content)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SourceError(f"{escape(name)} is not a chunk list") from error
    if listed.file != file or listed.size != size:
        raise IntegrityError(
            f"{escape(name)} describes {escape(listed.file)} of {listed.size} bytes, {escape(file)} has {size}"
        )
    return listed, crc32(data)


def _parse(content: Mapping[str, object]) -> ChunkList:
    if content["format"] != FORMAT:
        raise ValueError("format")
    rows, aliases = content["chunks"], content["aliases"]
    file, size = content["file"], content["size"]
    if not (
        isinstance(rows, list)
        and isinstance(aliases, dict)
        and isinstance(file, str)
        and isinstance(size, int)
    ):
        raise TypeError("fields")
    chunks = tuple(_chunk(row, size) for row in rows)
    return ChunkList(file, size, {str(k): tuple(map(str, v)) for k, v in aliases.items()}, chunks)


def _chunk(row: Sequence[Any], file_size: int) -> ListedChunk:
    fqn, dtype, shape, offsets, sizes, start, nbytes, data, data_nbytes, crc = row
    numbers = [*shape, *offsets, *sizes, start, nbytes, data, data_nbytes, 0 if crc is None else crc]
    # One test for all of them: a thousand ranks have hundreds of thousands of rows. A bool is not an int here.
    if set(map(type, numbers)) != {int} or min(numbers) < 0:
        raise TypeError("not a list of non-negative ints")
    if not isinstance(fqn, str) or not start <= data <= data + data_nbytes <= start + nbytes <= file_size:
        raise ValueError("extent")
    if crc is not None and crc >= 1 << 32:
        raise ValueError("CRC-32")
    if not len(shape) == len(offsets) == len(sizes) <= _MAX_DIMS:
        raise ValueError("dims")
    if any(offset + size > full for offset, size, full in zip(offsets, sizes, shape, strict=True)):
        raise ValueError("region")
    region, kind = Region(tuple(offsets), tuple(sizes)), BY_NAME[dtype]
    if region.num_elements * kind.itemsize != data_nbytes:
        raise ValueError("bytes")
    return ListedChunk(fqn, kind, tuple(shape), region, start, nbytes, data, data_nbytes, crc)
