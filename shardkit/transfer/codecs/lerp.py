"""Linear interpolation between two stored tensors, bit-identical to `torch.lerp`.

torch rounds once, by a fused multiply-add, and uses another formula for weights from 0.5 on, so torch computes it. The
bits of an element do not depend on the box.

Source: torch 2.13, aten/src/ATen/native/Lerp.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.core.catalog import StoredParts
from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape
from shardkit.transfer.codecs.boxes import as_box

if TYPE_CHECKING:
    import numpy


@dataclass(frozen=True, slots=True, kw_only=True)
class Lerp:
    """start + weight * (end - start), element by element; a `Codec`. Names are those of the catalog."""

    start: str
    end: str
    weight: float | None
    """None for a copy of `end`."""
    dtype: DType
    """Of all three."""
    shape: Shape

    @property
    def of(self) -> tuple[str, ...]:
        """Both ends."""
        return self.start, self.end

    @property
    def needs_torch(self) -> bool:
        """True unless it is a copy."""
        return self.weight is not None

    def fill(self, parts: StoredParts, region: Region, target: numpy.ndarray) -> None:
        """Compute a box of the result."""
        if self.weight is None:
            target[...] = parts.box(self.end, region)
            return
        start, end = parts.values(self.start, region), parts.values(self.end, region)
        target[...] = as_box(start.lerp(end, self.weight), self.dtype)
