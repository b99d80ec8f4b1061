"""Compare the copies of a tensor that ranks saved, by what their zips record of them: no data is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardkit.core.text import count, listed
from shardkit.formats.contract import DifferentCopies
from shardkit.formats.torchsave.record import TensorRecord

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class StoredCopy(NamedTuple):
    """What is recorded of a copy."""

    crc32: int | None
    """Of its storage; None if it is not recorded."""
    is_all: bool
    """The storage has nothing else in it."""
    layout: tuple[object, ...]
    """How the storage is viewed."""

    @classmethod
    def of(cls, record: TensorRecord) -> StoredCopy:
        """Return what is recorded of a tensor."""
        layout = (record.data_nbytes, record.storage_offset, record.stride, record.flipped)
        return cls(record.crc32, record.nbytes == record.data_nbytes, layout)


class Copies:
    """The copies that were compared."""

    def __init__(self) -> None:
        self._different: dict[str, tuple[str, dict[str, None]]] = {}
        self._uncompared: dict[str, None] = {}

    def compare(self, name: str, first: StoredCopy, first_file: str, copy: StoredCopy, file: str) -> None:
        """Compare a copy with the first.

        Args:
            name: of the tensor.
            first: the one that counts.
            first_file: its file.
            copy: another.
            file: its file.
        """
        if None in (first.crc32, copy.crc32):
            self._uncompared[name] = None
        elif first != copy:
            if first.is_all and copy.is_all and first.layout == copy.layout:
                self._different.setdefault(name, (first_file, {}))[1][file] = None
            else:  # the storage has more in it, or lies in another order
                self._uncompared[name] = None

    def differing(self) -> tuple[DifferentCopies, ...]:
        """Return those with other bytes, but for statistics of a rank's own batches."""
        return tuple(
            DifferentCopies(name, first_file, next(iter(other_files)), len(other_files))
            for name, (first_file, other_files) in self._different.items()
            if not _is_of_rank(name)
        )

    def notes(self) -> Iterator[str]:
        """Yield notes of buffers that differ, and of copies that were not compared."""
        if buffers := [name for name in self._different if _is_of_rank(name)]:
            yield (
                f"{count(len(buffers), 'buffer differs', 'buffers differ')} between the files of ranks, and the first "
                f"file's are taken: {listed(buffers)}"
            )
        if self._uncompared:
            yield (
                f"copies of {count(len(self._uncompared), 'tensor')} in the files of ranks were not compared, because no "
                f"CRC-32 of them alone is recorded: {listed(self._uncompared)}"
            )


def _is_of_rank(name: str) -> bool:
    """True for statistics of a rank's own batches, and its random numbers."""
    last = name.rpartition(".")[2]
    return last in _BUFFERS or "rng" in last
