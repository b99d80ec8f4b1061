"""Compare the copies of a tensor that several ranks saved, by the CRC-32s in their zips: no data is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardkit.core.text import count, listed
from shardkit.formats.contract import DifferentCopies
from shardkit.formats.torchsave.record import TensorRecord

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class StoredCopy(NamedTuple):
    """What a zip records of one copy: enough to compare it with another."""

    crc32: int | None
    """Of its storage; None if not recorded."""
    is_all: bool
    """True if the storage holds nothing but this tensor."""
    layout: tuple[object, ...]
    """Size of the storage, and the tensor's offset and strides in it."""

    @classmethod
    def of(cls, record: TensorRecord) -> StoredCopy:
        """Make one from a tensor's record."""
        layout = (record.data_nbytes, record.storage_offset, record.stride, record.flipped)
        return cls(record.crc32, record.nbytes == record.data_nbytes, layout)


class CopyComparison:
    """Compares copies one by one, and collects which differ and which cannot be compared."""

    def __init__(self) -> None:
        self._different: dict[str, tuple[str, dict[str, None]]] = {}
        self._uncompared: dict[str, None] = {}

    def compare(self, name: str, first: StoredCopy, first_file: str, copy: StoredCopy, file: str) -> None:
        """Compare a copy with the first.

        Args:
            name: of the tensor.
            first: the copy that is used.
            first_file: the file of `first`.
            copy: another rank's copy.
            file: the file of `copy`.
        """
        if None in (first.crc32, copy.crc32):
            self._uncompared[name] = None
        elif first != copy:
            if first.is_all and copy.is_all and first.layout == copy.layout:
                self._different.setdefault(name, (first_file, {}))[1][file] = None
            else:  # the storage has other bytes too, or another order
                self._uncompared[name] = None

    def differing(self) -> tuple[DifferentCopies, ...]:
        """Return the tensors whose copies differ, except statistics of a rank's own batches."""
        return tuple(
            DifferentCopies(name, first_file, next(iter(other_files)), len(other_files))
            for name, (first_file, other_files) in self._different.items()
            if not _is_of_rank(name)
        )

    def notes(self) -> Iterator[str]:
        """Yield notes about buffers that differ, and about copies that were not compared."""
        if buffers := [name for name in self._different if _is_of_rank(name)]:
            yield (
                f"{count(len(buffers), 'buffer differs', 'buffers differ')} between the files of ranks, and the first "
                f"file's are used: {listed(buffers)}"
            )
        if self._uncompared:
            yield (
                f"copies of {count(len(self._uncompared), 'tensor')} in the files of ranks were not compared, because no "
                f"CRC-32 of them alone is recorded: {listed(self._uncompared)}"
            )


def _is_of_rank(name: str) -> bool:
    """True for statistics of a rank's own batches and the state of its random numbers: they differ in a sound save."""
    last = name.rpartition(".")[2]
    return last in _BUFFERS or "rng" in last
