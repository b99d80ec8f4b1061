"""Chunks of a DCP checkpoint whose bytes lie in no file as they are.

A dense tensor that was not contiguous is stored with its strides. A record that went through a stream
extension (torch's `ZStandard`) is stored compressed. Both become a file that is one chunk and exists only
after decoding (`SourceFile.decode`).

Source: torch 2.13, torch/distributed/checkpoint/_extension.py.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

from shardkit.core.catalog import OnRead, SourceFile, TensorEntry
from shardkit.core.regions import Region, Shape
from shardkit.core.text import escape
from shardkit.errors import IntegrityError, ResourceError, SourceError
from shardkit.files.strict_json import open_regular, read_exactly
from shardkit.formats.checkpoint import Place
from shardkit.formats.torchsave.record import TensorRecord, read_entries

_ZSTD = "stream.zstd"
_PIECE = 1 << 20
_MAX_OVERHEAD = 1 << 16  # bytes of a record that are not its data; torch writes less than 2 KiB
_MAX_WINDOW = 1 << 27  # bytes a decompressor may keep; torch's default level takes 2 MiB


class Packed(NamedTuple):
    """A chunk whose record was put through extensions."""

    entry: TensorEntry
    region: Region
    start: int
    """First byte of the transformed record in its file."""
    nbytes: int
    transforms: tuple[str, ...]


def check_transforms(chunks: Mapping[int, Packed]) -> None:
    """Refuse chunks whose transforms cannot be undone here; all tensors at once.

    Raises:
        SourceError: names the tensors, their extensions and what to install.
    """
    unknown: dict[str, str] = {}
    for chunk in chunks.values():
        names = chunk.transforms
        if len(names) != 1 or not _is_zstd(names[0]):
            unknown[chunk.entry.fqn] = ", ".join(map(escape, names))
    if unknown:
        raise SourceError(
            f"{len(unknown)} tensors were saved through extensions that cannot be undone",
            problems=[f"{escape(fqn)}: {names}" for fqn, names in unknown.items()],
            hint="load it with torch.distributed.checkpoint where the extension is known, and save it without",
        )
    if chunks and _find_zstd() is None:
        fqns = list(dict.fromkeys(escape(chunk.entry.fqn) for chunk in chunks.values()))
        raise SourceError(
            f"{len(fqns)} tensors are compressed with {_ZSTD}, and no module here can decompress it",
            problems=[f"{fqn}: {_ZSTD}" for fqn in fqns],
            hint="pip install 'shardkit[zstd]'",
        )


def strided_file(source: SourceFile, entry: TensorEntry, record: TensorRecord) -> SourceFile:
    """Return a file that is one chunk, put in row-major order when it is decoded."""

    def decode(on_read: OnRead) -> memoryview:
        with open_regular(source.path, source.name, follow=False) as (fd, _):
            data = memoryview(read_exactly(fd, record.data_start, record.data_nbytes, source.name))
        on_read(source.path, record.data_start, data)
        return gather(data, record)

    file = _decoded_file(source, entry, record.nbytes, decode)
    return replace(file, decoded_from=(record.data_start, record.data_start + record.data_nbytes))


def packed_file(source: SourceFile, chunk: Packed) -> SourceFile:
    """Return a file that is one chunk, decompressed and checked (CRC-32 too) when it is decoded."""
    nbytes = chunk.region.num_elements * chunk.entry.dtype.itemsize

    def decode(_: OnRead) -> memoryview:
        where = escape(source.name)
        try:
            data = _decompress(source, chunk.start, chunk.nbytes, nbytes + _MAX_OVERHEAD)
            record = _read_memory(data, where)
            reason = difference(chunk.entry, chunk.region.sizes, record)
            if reason:
                raise IntegrityError(f"{where}: {reason}")
        except ResourceError:
            raise
        except SourceError as error:
            raise type(error)(
                f"{escape(chunk.entry.fqn)}: {error.message}",
                hint="the checkpoint is damaged: use another copy",
            ) from None
        if record.is_contiguous:
            return data[record.start : record.start + record.nbytes]
        return gather(data[record.data_start : record.data_start + record.data_nbytes], record)

    return replace(_decoded_file(source, chunk.entry, nbytes, decode), is_proved=True)


def decode_object(source: SourceFile, fqn: str, place: Place, limit: int) -> memoryview:
    """Return the bytes of an entry that is not a tensor, as they were before it went through extensions.

    Args:
        source: its file.
        fqn: its name.
        place: where it lies.
        limit: most bytes that it may have.

    Raises:
        SourceError: extensions that cannot be undone here, or damaged data.
        IntegrityError: it has more bytes than `limit`.
        ResourceError: the file may not be read.
    """
    if len(place.transforms) != 1 or not _is_zstd(place.transforms[0]) or _find_zstd() is None:
        names = ", ".join(map(escape, place.transforms))
        raise SourceError(
            f"{escape(fqn)} was saved through extensions that cannot be undone here: {names}",
            hint="for stream.zstd, pip install 'shardkit[zstd]'",
        )
    return _decompress(source, place.start, place.nbytes, limit)


def difference(entry: TensorEntry, sizes: Shape, record: TensorRecord) -> str | None:
    """Return how a record differs from its chunk, None where it does not."""
    if record.dtype != entry.dtype:
        return f"stored as {record.dtype.name}, .metadata says {entry.dtype.name}"
    if record.shape != sizes:
        return f"stored with shape {list(record.shape)}, .metadata says {list(sizes)}"
    return None


def gather(storage: memoryview, record: TensorRecord) -> memoryview:
    """Return a strided tensor's bytes in row-major order."""
    import numpy as np

    itemsize = record.dtype.itemsize
    view = np.ndarray(
        record.shape,
        np.dtype((np.void, itemsize)),  # numpy has no bfloat16 or float8; bytes are moved, not values
        storage,
        record.storage_offset * itemsize,
        tuple(stride * itemsize for stride in record.stride),
    )
    return memoryview(view.tobytes())


def _decoded_file(
    source: SourceFile, entry: TensorEntry, nbytes: int, decode: Callable[[OnRead], memoryview]
) -> SourceFile:
    name = f"{source.name}:{entry.fqn}"
    return SourceFile(name=name, path=source.path, size=nbytes, decode=decode, stamp=source.stamp)


def _read_memory(data: memoryview, where: str) -> TensorRecord:
    def pread(start: int, nbytes: int) -> bytes:
        return bytes(data[start : start + nbytes])

    return read_entries(pread, 0, len(data), where=where, check_crc=True)[0]


def _is_zstd(descriptor: str) -> bool:
    """True for "stream.zstd/1" and its minor versions, as torch's own reader takes them."""
    name, _, version = descriptor.partition("/")
    return name == _ZSTD and version.partition(".")[0] == "1"


def _decompress(source: SourceFile, start: int, nbytes: int, limit: int) -> memoryview:
    """Return the record; never holds much more than `limit` bytes, whatever the file says."""
    zstd, out = _find_zstd(), bytearray()
    assert zstd is not None  # check_transforms saw to it
    pieces, damaged = zstd
    with open_regular(source.path, source.name, follow=False) as (fd, _):
        packed = _Range(fd, start, nbytes, source.name)
        try:
            for piece in pieces(packed):
                out += piece
                if len(out) > limit:
                    raise IntegrityError(
                        f"{escape(source.name)}: bytes {start} to {start + nbytes} decompress to more than the "
                        f"{limit} that there may be"
                    )
        except damaged as error:
            raise SourceError(
                f"{escape(source.name)}: zstd data at byte {start} is damaged: {escape(str(error))}"
            ) from None
    return memoryview(out)


class _Range(io.RawIOBase):
    """A byte range of an open file as a stream."""

    def __init__(self, fd: int, start: int, nbytes: int, name: str) -> None:
        self._fd, self._at, self._stop, self._name = fd, start, start + nbytes, name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._stop - self._at)
        buffer[:count] = read_exactly(self._fd, self._at, count, self._name)
        self._at += count
        return count


_Pieces = Callable[[io.RawIOBase], Iterator[bytes]]


def _find_zstd() -> tuple[_Pieces, type[Exception]] | None:
    """Return a decompressor in pieces and what it raises: Python's own (3.14) or the zstandard package's."""
    for name, pieces in (("compression.zstd", _stdlib_pieces), ("zstandard", _package_pieces)):
        try:
            module = import_module(name)
        except ImportError:
            continue
        return lambda packed, pieces=pieces, module=module: pieces(packed, module), module.ZstdError
    return None


def _package_pieces(packed: io.RawIOBase, zstandard: Any) -> Iterator[bytes]:
    reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(packed)
    while piece := reader.read(_PIECE):
        yield piece


def _stdlib_pieces(packed: io.RawIOBase, zstd: Any) -> Iterator[bytes]:
    options = {zstd.DecompressionParameter.window_log_max: _MAX_WINDOW.bit_length() - 1}
    decompressor = zstd.ZstdDecompressor(options=options)
    while not decompressor.eof:
        data = packed.read(_PIECE) if decompressor.needs_input else b""
        if decompressor.needs_input and not data:
            raise zstd.ZstdError("it ends too early")
        yield decompressor.decompress(data, _PIECE)
