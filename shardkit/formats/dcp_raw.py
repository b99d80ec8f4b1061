"""From records to bytes: open every `torch.save` record of a DCP catalog and point at the data inside.

A record says for itself what it holds; where that is not what `.metadata` says, nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from shardkit.core.catalog import Catalog, SourceFile, TensorEntry
from shardkit.core.regions import Shape
from shardkit.core.text import escape
from shardkit.errors import IntegrityError, SourceError
from shardkit.formats.strict import open_regular, read_exactly
from shardkit.formats.torch_record import TensorRecord, read_record


def point_at_data(catalog: Catalog, transforms: Mapping[int, tuple[str, ...]]) -> None:
    """Replace each extent, a record, by the bytes of the chunk inside it; the encoding becomes "raw".

    A dense tensor that was not contiguous is stored as it lay: such a chunk gets a file of its own that
    exists only after decoding (`SourceFile.decode`).

    Args:
        catalog: with encoding "torch-record"; changed in place.
        transforms: by chunk, where a record was put through extensions.

    Raises:
        SourceError: records that are damaged, or were transformed.
        IntegrityError: records that are intact, but not what `.metadata` says.
    """
    _refuse_transforms(catalog, transforms)
    chunks, tensor_of = catalog.chunks, _tensors_by_chunk(catalog)
    damaged: list[str] = []
    different: list[str] = []
    for row, record in _records(catalog, damaged):
        entry = tensor_of[row]
        reason = _difference(entry, chunks.region(row).sizes, record)
        if reason:
            different.append(f"{escape(entry.fqn)}: {reason}")
        elif record.is_contiguous:
            chunks.start[row], chunks.nbytes[row] = record.start, record.nbytes
        else:
            catalog.files.append(_strided_file(catalog.files[chunks.file[row]], entry, record))
            chunks.file[row], chunks.start[row] = len(catalog.files) - 1, 0
            chunks.nbytes[row] = record.nbytes
    hint = "the checkpoint is damaged, or its files are from different saves: use another copy"
    if damaged:
        raise SourceError(f"{len(damaged)} records cannot be read", problems=damaged, hint=hint)
    if different:
        message = f"{len(different)} records are not what .metadata says"
        raise IntegrityError(message, problems=different, hint=hint)
    catalog.encoding = "raw"


def _refuse_transforms(catalog: Catalog, transforms: Mapping[int, tuple[str, ...]]) -> None:
    if not transforms:
        return
    tensor_of = _tensors_by_chunk(catalog)
    found: dict[str, str] = {}
    for row, names in transforms.items():
        found[tensor_of[row].fqn] = ", ".join(map(escape, names))
    raise SourceError(
        f"{len(found)} tensors were saved through extensions that cannot be undone yet",
        problems=[f"{escape(fqn)}: {names}" for fqn, names in found.items()],
        hint="load it with torch.distributed.checkpoint and save it without extensions",
    )


def _tensors_by_chunk(catalog: Catalog) -> list[TensorEntry]:
    return [entry for entry in catalog.tensors.values() for _ in entry.chunk_ids]


def _records(catalog: Catalog, damaged: list[str]) -> Iterator[tuple[int, TensorRecord]]:
    """Yield (chunk, record), file by file and front to back; one file is open at a time."""
    chunks, tensor_of = catalog.chunks, _tensors_by_chunk(catalog)
    order = sorted(range(len(chunks)), key=lambda row: (chunks.file[row], chunks.start[row]))
    for file, rows in groupby(order, key=chunks.file.__getitem__):
        source = catalog.files[file]
        with open_regular(source.path, source.name) as (fd, _):
            for row in rows:
                try:
                    record = read_record(fd, chunks.start[row], chunks.nbytes[row], where=escape(source.name))
                except SourceError as error:
                    damaged.append(f"{escape(tensor_of[row].fqn)}: {error.message}")
                    continue
                yield row, record


def _difference(entry: TensorEntry, sizes: Shape, record: TensorRecord) -> str | None:
    if record.dtype != entry.dtype:
        return f"stored as {record.dtype.name}, .metadata says {entry.dtype.name}"
    if record.shape != sizes:
        return f"stored with shape {list(record.shape)}, .metadata says {list(sizes)}"
    return None


def _strided_file(source: SourceFile, entry: TensorEntry, record: TensorRecord) -> SourceFile:
    """A file that is one chunk, put in row-major order when it is decoded."""

    def decode() -> memoryview:
        with open_regular(source.path, source.name) as (fd, _):
            data = read_exactly(fd, record.data_start, record.data_nbytes, source.name)
        return _gather(data, record)

    return SourceFile(name=f"{source.name}:{entry.fqn}", path="", size=record.nbytes, decode=decode)


def _gather(storage: bytes, record: TensorRecord) -> memoryview:
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
