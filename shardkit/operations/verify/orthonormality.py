"""Check the factors of OSFT: complete sets, fitting shapes, and orthonormal frozen directions.

OSFT splits a weight by its singular value decomposition into factors U, S and V. The columns of U and the rows of V are its
*directions*. Those of the largest singular values (`HIGH`) are frozen in training, the others are trained.

For k directions U'U - I is a k x k matrix, too large to compute. Instead it is applied to a few random vectors, while U
is read in bands. The length of row i of the results estimates the length of row i of U'U - I.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any

from shardkit.core.catalog import Catalog
from shardkit.core.factored import HIGH
from shardkit.core.regions import full_region
from shardkit.core.text import MIB, count
from shardkit.errors import LayoutError
from shardkit.formats.contract import Checkpoint
from shardkit.formats.folded import floating_targets
from shardkit.operations.verify.result import Report
from shardkit.transfer.sources import Reader, SourceFiles, bands

if TYPE_CHECKING:
    import numpy

_NUM_VECTORS = 16  # estimates lengths within about 20%
_BAND_BYTES = 4 * MIB
# Root mean square of a row of U'U - I. A decomposition in float32 gives 1e-7, one in float64 1e-9.
_MOST_HALF, _MOST_WIDE = 5e-2, 1e-5  # of factors that were rounded to half precision, and of others


def check_factors(checkpoint: Checkpoint, report: Report, *, full: bool) -> None:
    """Check a checkpoint's factors, if it has any.

    Args:
        checkpoint: the opened checkpoint.
        report: gets the problems; or, if there are none, a note on how close to orthonormal the directions are.
        full: read the frozen factors (V twice) and check that they are orthonormal; otherwise only shapes and dtypes.
    """
    catalog = checkpoint.catalog
    try:
        targets = floating_targets(catalog.tensors)
    except LayoutError as error:
        report.error(error)
        return
    names = [f"{path}.{name}" for path in targets for name in HIGH if not name.startswith("osft_S")]
    if not full or not names:
        return
    distances: dict[str, float] = {}
    with report.collect_errors(checkpoint.path):
        chosen = checkpoint.select(names)
        with SourceFiles(chosen.files) as files, files.reader() as reader:
            for name in names:
                with report.collect_errors(checkpoint.path):
                    distances[name] = distance(chosen, name, reader)
    wrong = [name for name in distances if not distances[name] <= _most(catalog, name)]  # NaN too
    for name in wrong:
        report.problem(
            f"frozen directions are not orthonormal: a row of their products is {distances[name]:.2g} off (root "
            f"mean square), and at most {_most(catalog, name):g} is expected",
            tensor=name,
        )
    if len(distances) == len(names) and not wrong:
        weights = count(len(targets), "weight")
        report.add_notes(
            [f"frozen directions of {weights} are orthonormal within {max(distances.values()):.1g}"]
        )


def _most(catalog: Catalog, name: str) -> float:
    return _MOST_HALF if catalog.tensors[name].dtype.itemsize == 2 else _MOST_WIDE


def distance(catalog: Catalog, name: str, reader: Reader) -> float:
    """Return how far the columns of U, or the rows of V, are from an orthonormal set.

    This is the largest root mean square of a row of U'U - I, or of VV' - I, estimated with random vectors.

    Args:
        catalog: a catalog of raw extents.
        name: name of the factor.
        reader: reads the catalog's files.
    """
    import numpy as np

    is_v = "_V_" in name
    size = catalog.tensors[name].shape[0 if is_v else 1]
    vectors = np.random.default_rng(0).standard_normal((size, _NUM_VECTORS))
    rows = partial(_rows, catalog, name, reader)
    if is_v:
        across, results = sum(band.T @ vectors[row : row + len(band)] for row, band in rows()), -vectors
        for row, band in rows():
            results[row : row + len(band)] += band @ across
    else:
        results = sum(band.T @ (band @ vectors) for _, band in rows()) - vectors
    return float(np.sqrt((results**2).mean(axis=1)).max()) / sqrt(size)


def _rows(catalog: Catalog, name: str, reader: Reader) -> Iterator[tuple[int, numpy.ndarray[Any, Any]]]:
    """Yield (first row, some rows in float64)."""
    from shardkit.operations.diff.values import float64s

    entry, row = catalog.tensors[name], 0
    num_rows = max(_BAND_BYTES // (entry.dtype.itemsize * entry.shape[1]), 1)
    nbytes = num_rows * entry.shape[1] * entry.dtype.itemsize
    for view in bands(catalog, name, full_region(entry.shape), reader, nbytes):
        band = float64s(view, entry.dtype).reshape(-1, entry.shape[1])
        yield row, band
        row += len(band)
