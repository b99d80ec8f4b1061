"""Merging LoRA adapters, W + scale * B A, a few rows at a time; and embeddings with trained rows.

Values are computed in float32 and rounded once, at the end.

Source: peft 0.21, tuners/lora/layer.py (Linear.merge, Embedding.merge, ParamWrapper.get_delta_weight), tuners/lora/dora.py,
tuners/trainable_tokens/layer.py (merge).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from shardkit.core.catalog import StoredParts
from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape, full_region, intersect, relative_to, window
from shardkit.transfer.codecs.boxes import as_box

if TYPE_CHECKING:
    import numpy
    import torch

_BLOCK_NUMBERS = 1 << 18  # float32 values at a time
# With a multiple of this number of rows, the product has the same bits as that of all rows: kernels process up to 64 rows
# at a time, and a few remaining rows go to other kernels, which round in another order.
_ROWS = 192


class _Values(Protocol):
    """The methods of `StoredParts` that `Lora` uses."""

    def values(self, name: str, region: Region, /) -> torch.Tensor:
        """Return a box of a tensor, in its own dtype."""

    def whole(self, name: str, /) -> torch.Tensor:
        """Return all of a tensor, in its own dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Computes a tensor with its adapter merged; a `Codec`. Names are those of the catalog."""

    base: str
    """The tensor to add to; the result has its name."""
    dtype: DType
    """Of the base."""
    shape: Shape
    """Of the base."""
    a: str | None
    """(r, in), or (r, num_embeddings); None for a bias."""
    b: str
    """(out, r), or (dim, r); for a bias, the vector to add to it."""
    magnitude: str | None
    """DoRA's vector, one value for each output."""
    scale: float
    kind: Literal["linear", "transposed", "bias"]
    """How the base is stored: "linear" is (out, in), "transposed" is (in, out) as Conv1D and embeddings are."""
    needs_torch: ClassVar[bool] = True

    @property
    def added(self) -> tuple[str, ...]:
        """The adapter's tensors."""
        return tuple(name for name in (self.a, self.b, self.magnitude) if name is not None)

    @property
    def of(self) -> tuple[str, ...]:
        """The base and the adapter's tensors."""
        return self.base, *self.added

    def fill(self, parts: _Values, region: Region, target: numpy.ndarray) -> None:
        """Compute a box of the merged tensor; peak memory is that of the factor that all rows need, and of a block of rows."""
        if self.a is None:
            added = parts.values(self.b, region).float() * self.scale
            target[...] = as_box(parts.values(self.base, region).float() + added, self.dtype)
            return
        factor = parts.whole(self.b if self.kind == "transposed" else self.a).float()
        for block in self._blocks():
            part = intersect(block, region)
            if part is None:
                continue
            value, inside = self._product(parts, factor, block), window(relative_to(part, block.offsets))
            if self.magnitude is None:
                value = value[inside].add_(parts.values(self.base, part))
            else:
                value = self._scaled(parts, value.add_(parts.values(self.base, block)), block)[inside]
            target[window(relative_to(part, region.offsets))] = as_box(value, self.dtype)

    @property
    def block_elements(self) -> int:
        """See `BlockCodec`."""
        if self.a is None:
            return 1
        rows, columns = self.shape
        return max(min(self._block_rows, rows) * columns, 1)

    @property
    def _block_rows(self) -> int:
        """Rows of a block; with DoRA on a transposed weight all: the norm is over the inputs, which are in different rows."""
        rows, columns = self.shape
        if self.magnitude is not None and self.kind == "transposed":
            return max(rows, 1)
        return max(_BLOCK_NUMBERS // max(columns, 1) // _ROWS, 1) * _ROWS

    def _blocks(self) -> Iterator[Region]:
        """Yield blocks of whole rows, the same for every box, so that the bits are the same too."""
        (rows, columns), step = self.shape, self._block_rows
        starts = range(0, max(rows - step + 1, 1), step)
        for first in starts:
            stop = rows if first == starts[-1] else first + step
            yield Region((first, 0), (stop - first, columns))

    def _product(self, parts: _Values, factor: torch.Tensor, block: Region) -> torch.Tensor:
        """Return scale * B A of a block."""
        assert self.a is not None
        first, num_rows = block.offsets[0], block.sizes[0]
        if self.kind == "transposed":
            a = parts.values(self.a, Region((0, first), (factor.shape[1], num_rows))).float()
            return (factor @ a).mul_(self.scale).T
        b = parts.values(self.b, Region((first, 0), (num_rows, factor.shape[0]))).float()
        return (b @ factor).mul_(self.scale)

    def _scaled(self, parts: _Values, value: torch.Tensor, block: Region) -> torch.Tensor:
        """Scale a block of rows to the norm that DoRA learned for each output."""
        assert self.magnitude is not None
        magnitude = parts.whole(self.magnitude).float().reshape(-1)
        if self.kind == "transposed":
            return value.mul_(magnitude / value.norm(dim=0))
        rows = slice(block.offsets[0], block.stops[0])
        return value.mul_((magnitude[rows] / value.norm(dim=1))[:, None])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOfExperts:
    """Computes a tensor of fused experts, (experts, ...), with the adapter of each merged; a `Codec`."""

    expert: Lora
    """Merges one expert. Names are those of the whole tensors: rows of `a` are grouped by expert, columns of `b`
    alternate between experts."""
    num_experts: int
    rank: int
    """Of one of them."""
    needs_torch: ClassVar[bool] = True

    @property
    def base(self) -> str:
        """The tensor to add to; the result has its name."""
        return self.expert.base

    @property
    def added(self) -> tuple[str, ...]:
        """The adapter's tensors."""
        return self.expert.added

    @property
    def of(self) -> tuple[str, ...]:
        """The base and the adapter's tensors."""
        return self.expert.of

    @property
    def dtype(self) -> DType:
        """Of the base."""
        return self.expert.dtype

    @property
    def shape(self) -> Shape:
        """Of the base."""
        return self.num_experts, *self.expert.shape

    @property
    def block_elements(self) -> int:
        """See `BlockCodec`."""
        return self.expert.block_elements

    def fill(self, parts: StoredParts, region: Region, target: numpy.ndarray) -> None:
        """Compute a box of the merged tensor."""
        inside = Region(region.offsets[1:], region.sizes[1:])
        for number, matrix in enumerate(target, region.offsets[0]):
            self.expert.fill(_PartsOfExpert(parts, self, number), inside, matrix)


@dataclass(frozen=True, slots=True)
class _PartsOfExpert:
    """An expert's part of each stored tensor; a `_Values`."""

    parts: StoredParts
    merge: LoraOfExperts
    number: int

    def values(self, name: str, region: Region, /) -> torch.Tensor:
        """Return a box of a tensor's part, in its own dtype."""
        merge, (first, column), (rows, columns) = self.merge, region.offsets, region.sizes
        if name == merge.base:
            return self.parts.values(name, Region((self.number, first, column), (1, rows, columns)))[0]
        if name == merge.expert.a:  # one expert after the other
            return self.parts.values(name, Region((self.number * merge.rank + first, column), region.sizes))
        whole = self.parts.values(name, Region((first, 0), (rows, merge.rank * merge.num_experts)))
        return whole[:, self.number :: merge.num_experts][:, column : column + columns]

    def whole(self, name: str, /) -> torch.Tensor:
        """Return all of the factor's part that all rows need, in its own dtype."""
        rank, size = self.merge.rank, self.merge.expert.shape[1]
        return self.values(name, full_region((rank, size) if name == self.merge.expert.a else (size, rank)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRows:
    """Computes an embedding with some trained rows; a `Codec`. Names are those of the catalog."""

    base: str
    """The embedding; the result has its name."""
    dtype: DType
    """Of the base."""
    shape: Shape
    """Of the base."""
    rows: str
    """The trained rows, (rows, dim)."""
    numbers: tuple[int, ...]
    """The row of the base that each trained row replaces."""
    needs_torch: ClassVar[bool] = True

    @property
    def added(self) -> tuple[str, ...]:
        """The adapter's tensors."""
        return (self.rows,)

    @property
    def of(self) -> tuple[str, ...]:
        """The base and the adapter's tensors."""
        return self.base, self.rows

    def fill(self, parts: StoredParts, region: Region, target: numpy.ndarray) -> None:
        """Compute a box of the merged tensor."""
        (first, column), (_, columns) = region
        target[...] = parts.box(self.base, region)
        for place, number in enumerate(self.numbers):
            if first <= number < region.stops[0]:
                row = parts.values(self.rows, Region((place, column), (1, columns)))
                target[number - first] = as_box(row, self.dtype)[0]
