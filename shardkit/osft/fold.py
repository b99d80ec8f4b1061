"""Folding the factors of a checkpoint into dense weights, block by block in bounded memory; or keeping the factors.

Rows of a weight need the same rows of U, and all of V. For a block of rows, its rows of U and its sums are in memory in
float64, while V is read a few directions at a time. The result is rounded once, to float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from shardkit.core.catalog import Catalog, StoredParts, carry
from shardkit.core.dtypes import DType, most_bytes
from shardkit.core.factored import FACTOR_DTYPE, HIGH, LOW, Target, factor_of, stored_targets
from shardkit.core.regions import Region, Shape
from shardkit.core.text import MIB, count, escape
from shardkit.errors import LayoutError, UsageError
from shardkit.formats.contract import Checkpoint, Folded
from shardkit.formats.derived import derive_base, derive_checkpoint
from shardkit.formats.hub.base import Base
from shardkit.formats.hub.safetensors import OutputTensor
from shardkit.keys.expressions import made_name
from shardkit.transfer.codecs.dequantize import Held
from shardkit.transfer.codecs.derive import made_among

if TYPE_CHECKING:
    import numpy
    import torch

_MIN_NBYTES = 8 * MIB  # lower bound for a block: a few directions of V must fit
_MAX_DIRECTIONS = 128  # of V at a time; more do not make the product faster
_UNLOADABLE = (
    "weights are written as factors of OSFT, which from_pretrained does not know; consolidate without --keep-factors "
    "folds them"
)


def floating_targets(tensors: Mapping[str, Held]) -> dict[str, Target]:
    """Return the targets whose factors are among tensors, by path, like `stored_targets`.

    Raises:
        LayoutError: factors are missing, do not match, or are not ordinary floating numbers; lists all.
    """
    targets = stored_targets({name: tensor.shape for name, tensor in tensors.items()})
    dtypes = {name: tensors[name].dtype for target in targets.values() for name in target.shapes}
    LayoutError.raise_for(
        [f"{escape(name)}: {dtype.name}" for name, dtype in dtypes.items() if not dtype.is_convertible],
        "factors of OSFT are not floating-point numbers",
        hint="something quantised them: take the checkpoint of the training itself",
    )
    return targets


def take_folded(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with factors folded to dense weights in float32; one without factors unchanged.

    Raises:
        LayoutError: factors are missing, do not match, or are not floating numbers; lists all.
    """
    targets = floating_targets(checkpoint.catalog.tensors)
    if not targets:
        return checkpoint
    by_weight = {target.weight: target for target in targets.values()}
    folded = derive_checkpoint(checkpoint, _folds(targets))
    return replace(folded, folded=Folded(by_weight, checkpoint.select))


def folded_base(base: Base) -> Base:
    """Return a base with its factors folded, in the dtype that accounts for most bytes of its other tensors.

    Raises:
        LayoutError: its factors are incomplete, or are not floating numbers.
    """
    tensors = base.tensors or {}
    targets = floating_targets(tensors)
    if not targets:
        return base
    dense_tensors = [tensor for name, tensor in tensors.items() if factor_of(name) not in targets]
    dtype = most_bytes((tensor.dtype, prod(tensor.shape) * tensor.dtype.itemsize) for tensor in dense_tensors)
    return derive_base(base, _folds(targets), dtype=dtype)


def _folds(targets: Mapping[str, Target]) -> dict[str, Fold]:
    return {target.weight: Fold(target) for target in targets.values()}


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

    def box(self, parts: StoredParts, region: Region) -> numpy.ndarray:
        """Return the values of a box, as unsigned integers of their size.

        Rows are folded in blocks; the memory of a block is that of two blocks of results.
        """
        import numpy

        values, (num_rows, columns) = numpy.empty(region.sizes, "f4"), region.sizes
        directions, step = steps(self.target, columns, max(2 * values.nbytes, _MIN_NBYTES))
        for first in range(0, num_rows, step):
            size = min(step, num_rows - first)
            rows = Region((region.offsets[0] + first, region.offsets[1]), (size, columns))
            values[first : first + size] = self._rows(parts, rows, directions).numpy()
        return values.view("u4")

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


def steps(target: Target, columns: int, max_nbytes: int) -> tuple[int, int]:
    """Return the number of directions and the number of rows to process at a time.

    The number of directions depends on the weight only, so that repeated reads of V cover the same stretches and their
    checksums can be compared.

    Args:
        target: its weight is folded.
        columns: of the box.
        max_nbytes: limit for sums, rows of U and directions of V together.
    """
    directions = min(_MAX_DIRECTIONS, max(_MIN_NBYTES // (2 * 16 * columns), 1))
    row = 8 * columns + 8 * target.num_directions + 8 * directions
    return directions, max((max_nbytes - 16 * directions * columns) // row, 1)


class Written(NamedTuple):
    """The tensors of a model to write, with or without factors."""

    tensors: tuple[OutputTensor, ...]
    """In the order of the output."""
    catalog: Catalog
    notes: tuple[str, ...] = ()
    unloadable: tuple[str, ...] = ()
    """The reason why `from_pretrained` cannot load it."""


def take_factors(
    tensors: Sequence[OutputTensor], catalog: Catalog, folded: Folded | None, *, keep: bool
) -> Written:
    """Return the tensors to write: dense weights, or factors in place of the folded ones.

    Args:
        tensors: with dense weights, in the order of the output.
        catalog: of these tensors.
        folded: the targets that are stored as factors.
        keep: write the factors.

    Raises:
        UsageError: there are no factors to keep.
        LayoutError: the Hub's form or kind of name differs for some of the weights; lists all.
    """
    folds = made_among(catalog, (tensor.source for tensor in tensors), Fold)
    among = [tensor for tensor in tensors if tensor.source in folds]
    if not keep:
        notes = (f"folded from factors of OSFT: {count(len(among), 'weight')}",) if among else ()
        return Written(tuple(tensors), catalog, notes)
    if folded is None or not among:
        raise UsageError("--keep-factors: the checkpoint holds no factors of OSFT, or none was chosen")
    LayoutError.raise_for(
        [
            escape(tensor.fqn)
            for tensor in among
            if tensor.source not in folded.targets or not tensor.fqn.endswith(".weight")
        ],
        "--keep-factors: the Hub has weights in another form than the model that was divided",
        hint="leave --keep-factors out: folded weights take that form",
    )
    chosen = {tensor.source: folded.targets[tensor.source] for tensor in among}
    factors = [name for target in chosen.values() for name in target.shapes]
    sources = {name: made_name(name, catalog.tensors) for name in factors}
    dense = [tensor.source for tensor in tensors if tensor.source not in chosen]
    joined = carry(
        catalog, dense, folded.factors(factors), {source: name for name, source in sources.items()}
    )
    written = list[OutputTensor]()
    for tensor in tensors:
        target = chosen.get(tensor.source)
        written += [tensor] if target is None else _factors(tensor, target, sources, joined)
    note = f"kept as factors of OSFT: {count(len(among), 'weight')}"
    return Written(tuple(written), joined, (note,), (_UNLOADABLE,))


def _factors(
    tensor: OutputTensor, target: Target, sources: dict[str, str], catalog: Catalog
) -> Iterator[OutputTensor]:
    """Yield the factors of a weight, below the path of its module in the output."""
    path = tensor.fqn.removesuffix(".weight")
    for name, shape in target.shapes.items():
        source = sources[name]
        yield OutputTensor(
            f"{path}{name.removeprefix(target.path)}", source, catalog.tensors[source].dtype, shape
        )
