"""Digests of files, and of the tensors in them, from one pass over each file."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

from shardkit.core.catalog import Catalog
from shardkit.core.regions import is_contiguous
from shardkit.files import manifest
from shardkit.files.digest import FileBytes, Scan, combine, place_of
from shardkit.operations.verify.bytes import scan_whole
from shardkit.operations.verify.result import Report

_NOT_TAKEN = -1


class Digests:
    """Takes the digests of files, and of the chunks in them.

    Args:
        catalog: where the tensors' bytes lie; None where that is not known.
        sha256: take it of every file too.
    """

    def __init__(self, catalog: Catalog | None, *, sha256: bool) -> None:
        self._catalog = catalog = catalog if catalog is not None else Catalog(format="", directory="")
        self._sha256 = sha256
        self.entries: dict[str, dict[str, Any]] = {}
        """What the manifest says of each file."""
        self._crcs = array("q", [_NOT_TAKEN]) * len(catalog.chunks)
        self._rows: dict[str, list[int]] = {}
        places = [place_of(file.path) if file.decode is None else None for file in catalog.files]
        for row, number in enumerate(catalog.chunks.file):
            place = places[number]
            if place is not None:
                self._rows.setdefault(place, []).append(row)

    def take(self, name: str, file: FileBytes, report: Report) -> None:
        """Read a file; may be called from several threads, for different files.

        Args:
            name: what the manifest calls it.
            file: with the checksums that lie in it, which are compared.
            report: gets what is wrong.
        """
        table, rows = self._catalog.chunks, self._rows.get(place_of(file.path), [])
        marks = (at for row in rows for at in (table.start[row], table.start[row] + table.nbytes[row]))
        scan = scan_whole(file, marks, report, sha256=self._sha256)
        if scan is None:
            return
        for row in rows:
            self._crcs[row] = scan.crc(table.start[row], table.nbytes[row])
        entry = manifest.file_entry(name, file.size, scan.crc32, scan.sha256)
        extents = list(self._extents(file, scan))
        self.entries[name] = {**entry, "extents": extents} if extents else entry

    def _extents(self, file: FileBytes, scan: Scan) -> Iterator[list[int]]:
        """Yield [first byte, bytes, CRC-32] of each part of a tensor that has no checksum in the file."""
        for stretch in sorted(file.stretches, key=lambda stretch: stretch.start):
            entry = self._catalog.tensors.get(stretch.tensor) if stretch.tensor is not None else None
            is_whole = entry is not None and entry.nbytes == stretch.nbytes
            if stretch.crc32 is None and not is_whole:
                yield [stretch.start, stretch.nbytes, scan.crc(stretch.start, stretch.nbytes)]

    def tensors(self, stored: Catalog) -> dict[str, dict[str, Any]]:
        """Return what the manifest says of each tensor, in the order of the checkpoint.

        Args:
            stored: with the names, dtypes and shapes of all of them.
        """
        found = {}
        for fqn, tensor in stored.tensors.items():
            crc = self._tensor_crc(fqn)
            described: dict[str, Any] = {"dtype": tensor.dtype.name, "shape": list(tensor.shape)}
            found[fqn] = described if crc is None else {**described, "crc32": crc}
        return found

    def _tensor_crc(self, fqn: str) -> int | None:
        """Return the CRC-32 of a tensor whose chunks are runs of it; None for any other, which would be read again."""
        entry = self._catalog.tensors[fqn]
        regions = self._catalog.chunks.regions(entry.chunk_ids)
        pieces = []
        for region, row in sorted(zip(regions, entry.chunk_ids, strict=True)):
            if self._crcs[row] == _NOT_TAKEN or not is_contiguous(region, entry.shape):
                return None
            pieces.append((self._crcs[row], region.num_elements * entry.dtype.itemsize))
        return combine(pieces)
