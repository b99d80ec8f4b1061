"""A dense weight, folded from its factors block by block in bounded memory.

Rows of a weight need the same rows of U, and all of V. For a block of rows, its rows of U and its sums are in memory in
float64, while V is read a few directions at a time: few blocks of many rows read V seldom. The result is rounded once, to
float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shardkit.core.catalog import StoredParts
from shardkit.core.dtypes import DType
from shardkit.core.factored import FACTOR_DTYPE, HIGH, LOW, Target
from shardkit.core.regions import Region, Shape
from shardkit.core.text import MIB

if TYPE_CHECKING:
    import numpy
    import torch

_MIN_NBYTES = 16 * MIB  # lower bound for a block
_MAX_V_NBYTES = 4 * MIB  # of directions of V, as stored and in float64
_MAX_DIRECTIONS = 128  # of V at a time; more do not make the product faster


@dataclass(frozen=True, slots=True)
class Fold:
    """Folds the factors of a weight, in float32; a `Codec`."""

    target: Target
    dtype: ClassVar[DType] = FACTOR_DTYPE
    needs_torch: ClassVar[bool] = True

    @property
    def of(self) -> tuple[str, ...]:
        """Its six factors."""
        return tuple(self.target.shapes)

    @property
    def shape(self) -> Shape:
        """Of the weight."""
        return self.target.rows, self.target.columns

    def fill(self, parts: StoredParts, region: Region, target: numpy.ndarray) -> None:
        """Compute a box. Rows are folded in blocks; a block takes at most the memory of four such boxes, or 16 MiB."""
        values, (num_rows, columns) = target.view("f4"), region.sizes
        directions, step = steps(self.target, region.sizes, max(4 * values.nbytes, _MIN_NBYTES))
        for first in range(0, num_rows, step):
            size = min(step, num_rows - first)
            rows = Region((region.offsets[0] + first, region.offsets[1]), (size, columns))
            values[first : first + size] = self._rows(parts, rows, directions).numpy()

    def _rows(self, parts: StoredParts, region: Region, directions: int) -> torch.Tensor:
        """Return the values of a few rows, in float64."""
        import torch

        whole = torch.zeros(region.sizes, dtype=torch.float64)
        for u_name, s_name, v_name in (HIGH, LOW):
            size = self.target.shapes[f"{self.target.path}.{s_name}"][0]
            left_vectors = self._read(parts, u_name, Region((region.offsets[0], 0), (region.sizes[0], size)))
            scales = self._read(parts, s_name, Region((0,), (size,))).double()
            for first in range(0, size, directions):
                some = slice(first, min(first + directions, size))
                part = Region((first, region.offsets[1]), (some.stop - first, region.sizes[1]))
                right_vectors = self._read(parts, v_name, part).double()
                whole.addmm_(left_vectors[:, some].double().mul_(scales[some]), right_vectors)
        return whole

    def _read(self, parts: StoredParts, factor: str, region: Region) -> torch.Tensor:
        return parts.values(f"{self.target.path}.{factor}", region)


def steps(target: Target, sizes: Shape, max_nbytes: int) -> tuple[int, int]:
    """Return the number of directions and the number of rows to process at a time.

    The number of directions depends on the weight only, so that repeated reads of V cover the same stretches and their
    checksums can be compared. Blocks of rows are as few as possible, and of nearly the same size.

    Args:
        target: its weight is folded.
        sizes: rows and columns of the box.
        max_nbytes: limit for sums, rows of U and directions of V together.
    """
    num_rows, columns = max(sizes[0], 1), sizes[1]
    directions = min(_MAX_DIRECTIONS, max(_MAX_V_NBYTES // (16 * columns), 1))
    row = 8 * columns + 8 * target.num_directions + 8 * directions
    num_blocks = -(-num_rows // max((max_nbytes - 16 * directions * columns) // row, 1))
    return directions, -(-num_rows // num_blocks)
