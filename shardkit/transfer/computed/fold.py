"""Dense weights of the factors of orthogonal subspace fine-tuning, folded block by block in bounded memory.

Rows of a weight need the same rows of U and all of V. So a block of rows holds its rows of U and its sums, in float64,
and V passes by, a few directions at a time. The result is rounded once, to float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardkit.core.catalog import Catalog, SourceReader
from shardkit.core.dtypes import BY_NAME, DType
from shardkit.core.regions import Region, Shape, flat_range_boxes, full_region
from shardkit.core.text import MIB, escape
from shardkit.errors import LayoutError
from shardkit.keys.expressions import leaves
from shardkit.osft.plan import FACTORS, HIGH, LOW, Target, factor_of
from shardkit.transfer.bound import View, computed_file, read_box

if TYPE_CHECKING:
    import numpy
    import torch

FOLDED = BY_NAME["float32"]
"""The dtype of folded weights, before they are converted."""
_MIN_NBYTES = 8 * MIB  # a block takes as much at least: a few directions of V must fit
_MAX_DIRECTIONS = 128  # of V at a time; with more the product is no faster


def fold_catalog(catalog: Catalog, targets: Mapping[str, Target]) -> Catalog:
    """Return a catalog with dense weights in the place of their factors.

    Args:
        catalog: its extents are raw bytes, unless `encoding` says that records were not opened yet: then the weights
            have no chunks.
        targets: by the path of their modules; all factors of each are in the catalog.

    Raises:
        LayoutError: factors are no floating numbers; lists all.
    """
    refuse_other_dtypes(catalog, targets.values())
    folded = replace(catalog, files=list(catalog.files), tensors={}, chunks=type(catalog.chunks)())
    for name in catalog.tensors:
        path = factor_of(name)
        target = None if path is None else targets.get(path)
        if target is None:
            folded.copy_tensor(catalog, name, name)
        elif target.weight not in folded.tensors:
            _add(folded, catalog, target)
    folded.paths = folded_paths(catalog, targets)
    return folded


def _add(folded: Catalog, catalog: Catalog, target: Target) -> None:
    shape, chunks = (target.rows, target.columns), list[tuple[int, int, int, Region]]()
    if catalog.encoding == "raw":
        folded.files.append(
            computed_file(catalog, Fold(catalog, target), f"{target.path}.{FACTORS[0]}", target.weight)
        )
        chunks = [(len(folded.files) - 1, 0, folded.files[-1].size, full_region(shape))]
    folded.add_tensor(target.weight, FOLDED, shape, iter(chunks))


def refuse_other_dtypes(catalog: Catalog, targets: Collection[Target]) -> None:
    """Refuse factors that are no ordinary floating numbers.

    Raises:
        LayoutError: lists all.
    """
    dtypes = {name: catalog.tensors[name].dtype for target in targets for name in target.shapes}
    LayoutError.raise_for(
        [f"{escape(name)}: {dtype.name}" for name, dtype in dtypes.items() if not dtype.is_convertible],
        "factors of OSFT are no floating numbers",
        hint="something quantised them: take the checkpoint of the training itself",
    )


def folded_paths(catalog: Catalog, targets: Mapping[str, Target]) -> dict[str, tuple[str | int, ...]] | None:
    """Return the path of each tensor in the state dict that was saved, once they are folded; None if none is known."""
    if catalog.paths is None:
        return None
    paths = dict[str, tuple[str | int, ...]]()
    for name, path in catalog.paths.items():
        target = targets.get(factor_of(name) or "")
        if target is None:
            paths[name] = path
        elif name.endswith(f".{HIGH[0]}") and str(path[-1]).endswith(HIGH[0]):
            paths[target.weight] = (*path[:-1], str(path[-1]).removesuffix(HIGH[0]) + "weight")
    return paths


def folded_among(catalog: Catalog, names: Iterable[str]) -> set[str]:
    """Return those of some tensors that `is_folded` is true of."""
    if all(file.compute is None for file in catalog.files):  # a thousand ranks have half a million chunks
        return set()
    return {name for name in names if is_folded(catalog, name)}


def is_folded(catalog: Catalog, name: str) -> bool:
    """True if a tensor, or a part of it, is folded, be it reordered or cut."""
    rows = catalog.tensors[name].chunk_ids
    computes = [catalog.files[file].compute for file in set(catalog.chunks.file[rows.start : rows.stop])]
    return any(
        isinstance(each, Fold)
        or (isinstance(each, View) and any(is_folded(each.catalog, leaf.name) for leaf in leaves(each.made)))
        for each in computes
    )


@dataclass(frozen=True, slots=True)
class Fold:
    """The values of a weight in float32; a `Computation`."""

    catalog: Catalog
    """Of raw extents; its files have the numbers that the reader knows them by."""
    target: Target

    @property
    def shape(self) -> Shape:
        """Of the weight."""
        return self.target.rows, self.target.columns

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return FOLDED.itemsize

    @property
    def needs_torch(self) -> bool:
        """It computes with torch."""
        return True

    def fill(self, reader: SourceReader, start: int, buffer: memoryview, fqn: str) -> None:
        """Fill a buffer with the bytes from `start` on; both are multiples of the item size."""
        import numpy

        values, done = numpy.frombuffer(buffer, dtype="f4"), 0
        for box in flat_range_boxes(self.shape, start // 4, (start + len(buffer)) // 4):
            into = values[done : done + box.num_elements].reshape(box.sizes)
            self._fold(reader, box, into, fqn)
            done += box.num_elements

    def box(self, reader: SourceReader, region: Region, fqn: str) -> numpy.ndarray:
        """Return the values of a box, as unsigned integers of their size."""
        import numpy

        values = numpy.empty(region.sizes, "f4")
        self._fold(reader, region, values, fqn)
        return values.view("u4")

    def _fold(self, reader: SourceReader, region: Region, into: numpy.ndarray, fqn: str) -> None:
        """Fill an array with a box, a block of rows at a time: two blocks' bytes hold what a block takes."""
        num_rows, columns = region.sizes
        directions, step = steps(self.target, columns, max(2 * into.nbytes, _MIN_NBYTES))
        for first in range(0, num_rows, step):
            size = min(step, num_rows - first)
            rows = Region((region.offsets[0] + first, region.offsets[1]), (size, columns))
            into[first : first + size] = self._rows(reader, rows, directions, fqn).numpy()

    def _rows(self, reader: SourceReader, region: Region, directions: int, fqn: str) -> torch.Tensor:
        """Return a box of few rows in float64."""
        import torch

        whole = torch.zeros(region.sizes, dtype=torch.float64)
        for u_name, s_name, v_name in (HIGH, LOW):
            size = self.target.shapes[f"{self.target.path}.{s_name}"][0]
            left = self._read(reader, u_name, Region((region.offsets[0], 0), (region.sizes[0], size)), fqn)
            scales = self._read(reader, s_name, Region((0,), (size,)), fqn).double()
            for first in range(0, size, directions):
                some = slice(first, min(first + directions, size))
                part = Region((first, region.offsets[1]), (some.stop - first, region.sizes[1]))
                right = self._read(reader, v_name, part, fqn).double()
                whole.addmm_(left[:, some].double().mul_(scales[some]), right)
        return whole

    def _read(self, reader: SourceReader, factor: str, region: Region, fqn: str) -> torch.Tensor:
        """Return a box of a factor as it is stored."""
        import torch

        name = f"{self.target.path}.{factor}"
        raw = read_box(self.catalog, name, region, reader, fqn)
        dtype: DType = self.catalog.tensors[name].dtype
        return (
            torch.from_numpy(raw.view("u1").reshape(-1)).view(getattr(torch, dtype.name)).reshape(raw.shape)
        )


def steps(target: Target, columns: int, max_nbytes: int) -> tuple[int, int]:
    """Return how many directions and how many rows are taken at a time.

    The directions depend on the weight alone: stretches of V that are read again are the same each time, so that
    their checksums can be compared.

    Args:
        target: its weight is folded.
        columns: of the box.
        max_nbytes: for the sums, rows of U and directions of V.
    """
    directions = min(_MAX_DIRECTIONS, max(_MIN_NBYTES // (2 * 16 * columns), 1))
    row = 8 * columns + 8 * target.num_directions + 8 * directions
    return directions, max((max_nbytes - 16 * directions * columns) // row, 1)
