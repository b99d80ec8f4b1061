"""Factors of OSFT: whole sets, shapes that fit each other, and frozen directions that are orthonormal.

U'U - I is as large as k x k, so it is not made. It is applied to a few random vectors: the length of row i of the results
tells that of row i of U'U - I, and U is read a band at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any

from shardkit.core.catalog import Catalog
from shardkit.core.regions import full_region
from shardkit.core.text import MIB, count
from shardkit.errors import LayoutError
from shardkit.formats.contract import Checkpoint
from shardkit.operations.answers import Question, State
from shardkit.operations.verify.result import Report
from shardkit.osft.plan import HIGH, stored_targets
from shardkit.transfer.computed.fold import refuse_other_dtypes
from shardkit.transfer.sources import Reader, SourceFiles, bands

if TYPE_CHECKING:
    import numpy

_NUM_VECTORS = 16  # lengths are told to a fifth or so
_BAND_BYTES = 4 * MIB
# Root mean square of a row of U'U - I. A decomposition in float32 gives 1e-7, one in float64 1e-9.
_MOST_HALF, _MOST_WIDE = 5e-2, 1e-5  # of factors that were rounded to half precision, and of others


class FactorQuestions:
    """Questions about the frozen factors of a checkpoint, if it has any: are their directions orthonormal?

    Args:
        checkpoint: opened.
        full: ask them; otherwise only shapes and dtypes are looked at.
    """

    def __init__(self, checkpoint: Checkpoint, *, full: bool) -> None:
        self._failure: LayoutError | None = None
        self._names, self.questions = list[str](), list[Question]()
        self._checkpoint = checkpoint
        tensors = checkpoint.catalog.tensors
        try:
            targets = stored_targets({name: entry.shape for name, entry in tensors.items()})
            refuse_other_dtypes(checkpoint.catalog, targets.values())
        except LayoutError as error:
            self._failure = error
            return
        self._num_targets = len(targets)
        if full:
            self._names = [
                f"{path}.{name}" for path in targets for name in HIGH if not name.startswith("osft_S")
            ]
        self.questions += [
            Question(name=name, nbytes=tensors[name].nbytes * (2 if "_V_" in name else 1))
            for name in self._names
        ]

    def state(self) -> State:
        """Return which factors there are; their files are among those of the checkpoint."""
        return State(files=(), decided={"factors": self._names})

    def ask(self, numbers: Sequence[int]) -> dict[int, tuple[Report, float | None]]:
        """Read some factors, V twice: how far they are off, None where one cannot be read."""
        reports = {number: Report() for number in numbers}
        found: dict[int, float | None] = dict.fromkeys(numbers)
        path = self._checkpoint.path
        with reports[numbers[0]].failing(path):
            catalog = self._checkpoint.select([self._names[number] for number in numbers])
            with SourceFiles(catalog.files) as files, files.reader() as reader:
                for number in numbers:
                    with reports[number].failing(path):
                        found[number] = distance(catalog, self._names[number], reader)
        return {number: (reports[number], found[number]) for number in numbers}

    def dump(self, number: int, answer: tuple[Report, float | None]) -> object:
        """Return an answer as plain data."""
        report, found = answer
        return [report.dump(), None if found is None else found.hex()]  # JSON has no NaN

    def load(self, number: int, plain: Any) -> tuple[Report, float | None]:
        """Return the answer that `dump` wrote."""
        report, found = plain
        return Report.load(report), None if found is None else float.fromhex(found)

    def is_final(self, number: int, answer: tuple[Report, float | None]) -> bool:
        """False if the system could not read a factor."""
        return not answer[0].has_unreadable

    def sum_up(self, answers: Mapping[int, tuple[Report, float | None]], report: Report) -> None:
        """Report what is not orthonormal, and how far the rest is off."""
        if self._failure is not None:
            report.error(self._failure)
        most = 0.0
        for number, (failed, found) in sorted(answers.items()):
            report.add(failed)
            most = max(most, self._judge(self._names[number], found, report))
        if answers and most <= _MOST_HALF:
            weights = count(self._num_targets, "weight")
            report.add_notes([f"frozen directions of {weights} are orthonormal within {most:.1g}"])

    def _judge(self, name: str, found: float | None, report: Report) -> float:
        """Return how far a factor is off; infinity if that is too much, or not known."""
        if found is None:
            return float("inf")
        allowed = _MOST_HALF if self._checkpoint.catalog.tensors[name].dtype.itemsize == 2 else _MOST_WIDE
        if found <= allowed:  # not NaN either
            return found
        report.problem(
            f"frozen directions are not orthonormal: a row of their products is {found:.2g} off (root "
            f"mean square), and at most {allowed:g} is expected",
            tensor=name,
        )
        return float("inf")


def distance(catalog: Catalog, name: str, reader: Reader) -> float:
    """Return how far the columns of U, or the rows of V, are from an orthonormal set.

    That is the largest root mean square of a row of U'U - I, or of VV' - I, told from random vectors.

    Args:
        catalog: of raw extents.
        name: a factor.
        reader: of the catalog's files.
    """
    import numpy as np

    is_v = "_V_" in name
    size = catalog.tensors[name].shape[0 if is_v else 1]
    vectors = np.random.default_rng(0).standard_normal((size, _NUM_VECTORS))
    rows = partial(_rows, catalog, name, reader)
    if is_v:
        across, results = sum(band.T @ vectors[at : at + len(band)] for at, band in rows()), -vectors
        for at, band in rows():
            results[at : at + len(band)] += band @ across
    else:
        results = sum(band.T @ (band @ vectors) for _, band in rows()) - vectors
    return float(np.sqrt((results**2).mean(axis=1)).max()) / sqrt(size)


def _rows(catalog: Catalog, name: str, reader: Reader) -> Iterator[tuple[int, numpy.ndarray[Any, Any]]]:
    """Yield (first row, some rows in float64)."""
    from shardkit.operations.diff.values import float64s

    entry, at = catalog.tensors[name], 0
    num_rows = max(_BAND_BYTES // (entry.dtype.itemsize * entry.shape[1]), 1)
    nbytes = num_rows * entry.shape[1] * entry.dtype.itemsize
    for view in bands(catalog, name, full_region(entry.shape), reader, nbytes):
        band = float64s(view, entry.dtype).reshape(-1, entry.shape[1])
        yield at, band
        at += len(band)
