"""diff: two checkpoints of any formats, compared tensor by tensor in bounded memory.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from shardkit.core.regions import Shape
from shardkit.core.text import KIB, MIB, escape, parse_size
from shardkit.core.threads import NoProgress, Progress
from shardkit.errors import UsageError
from shardkit.files.links import may_follow_links
from shardkit.operations.diff.result import DiffResult, Status, TensorDiff
from shardkit.operations.diff.sides import Pair, Side, find_ties, open_sides, pairs
from shardkit.operations.resolve import Taken, take
from shardkit.transfer.sources import Reader, SourceFiles

if TYPE_CHECKING:
    from shardkit.operations.diff.values import Measure, RoundedSide, Roundings, Tolerance

SORTS = ("name", "difference")
_MIN_MEMORY, _MEMORY = 2 * MIB, 256 * MIB
_BAND_BYTES = MIB  # of one side: the processor's cache keeps both while they are compared
_BUFFERS = 8  # of a band's size: two for each side while it is gathered, and the masks
# Values measured at once: their float64s stay in the processor's cache, and malloc keeps them.
_MAX_VALUES = 16 * KIB
_BYTES_PER_VALUE = 160  # that measuring takes at most: float64s of both sides, differences, masks


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """How to compare."""

    tolerance: Tolerance | None = None
    """None compares bits."""
    stats: bool = False
    """Take figures of how much tensors differ."""
    is_sorted: bool = False
    """What differs most comes first."""
    max_memory_bytes: int = _MEMORY

    def max_elements(self, itemsize: int, *, measured: bool) -> int:
        """Return how many elements a band has, for the longer itemsize of both sides; measuring takes more memory."""
        if measured:
            each = _BYTES_PER_VALUE + _BUFFERS * itemsize
            return max(min(_MAX_VALUES, self.max_memory_bytes // each), 1)
        return max(min(_BAND_BYTES, self.max_memory_bytes // _BUFFERS) // itemsize, 1)


@may_follow_links
def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    rtol: float | None = None,
    atol: float | None = None,
    stats: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    all_tensors: bool = False,
    strict: bool = False,
    sort: Literal["name", "difference"] = "name",
    max_memory: str | int = _MEMORY,
    follow_links: bool = False,
    progress: Progress | None = None,
) -> DiffResult:
    """Compare two checkpoints, bit by bit or within a tolerance.

    Tensors are paired by the names that their model has on the Hub, whatever the trainers called them and however they
    are chunked. Tied weights may be stored once on one side and twice on the other.

    Args:
        a: a checkpoint of any format, or a run directory, whose newest complete one is taken.
        b: another.
        rtol: elements are equal where |a - b| <= atol + rtol * |b|, or both are NaN. None compares bits, unless `atol`
            is given.
        atol: the same; where only one of the two is given, the other is 0.
        stats: take figures of how much tensors differ.
        include: globs; only these tensors.
        exclude: globs; not these tensors.
        all_tensors: compare the optimizer's and all other tensors too, under their stored names.
        strict: refuse a run directory in which a newer checkpoint was passed over.
        sort: "name", or "difference": what differs most comes first; this takes figures.
        max_memory: bytes for all buffers, as a number or as "512MiB".
        follow_links: links that lead out of a checkpoint's directory are read as the files that they lead to.
            Weight files of a Hub model are read in any case.
        progress: told of the bytes of A as they are compared.

    Raises:
        UsageError: options that cannot be carried out.
        SourceError: one of them is damaged or incomplete.
        IntegrityError: a file changed while it was read.
        ResourceError: disk or permission.
    """
    options = _options(rtol, atol, stats, sort, max_memory)
    given = (os.fspath(a), os.fspath(b))
    taken = (take(a, strict=strict), take(b, strict=strict))
    return compare(
        given,
        taken,
        options,
        all_tensors=all_tensors,
        include=include,
        exclude=exclude,
        progress=progress or NoProgress(),
    )


def compare(
    given: tuple[str, str],
    taken: tuple[Taken, Taken],
    options: DiffOptions,
    *,
    progress: Progress,
    all_tensors: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> DiffResult:
    """Compare two checkpoints that were chosen, as `diff` does.

    Args:
        given: their paths, as a person gave them.
        taken: the checkpoints; what is open of them is not opened again.
        options: how.
        progress: as for `diff`.
        all_tensors: as for `diff`.
        include: as for `diff`.
        exclude: as for `diff`.

    Raises:
        UsageError, SourceError, IntegrityError, ResourceError: as `diff`.
    """
    begun = time.monotonic()
    one, two, notes = open_sides(given, taken, all_tensors=all_tensors, include=include, exclude=exclude)
    found, rounded_side, read_bytes = _compare_all(one, two, options, progress)
    if options.is_sorted:
        found.sort(key=lambda tensor: tensor.magnitude, reverse=True)
    return DiffResult(
        a=one.given,
        b=two.given,
        resolved_a=one.resolved.path,
        resolved_b=two.resolved.path,
        format_a=one.checkpoint.format,
        format_b=two.checkpoint.format,
        is_equal=all(tensor.symbol == "=" for tensor in found),
        rounded_side=rounded_side,
        rtol=options.tolerance.rtol if options.tolerance else None,
        atol=options.tolerance.atol if options.tolerance else None,
        tensors=tuple(found),
        read_bytes=read_bytes,
        elapsed_s=round(time.monotonic() - begun, 3),
        notes=tuple(notes),
        warnings=(*one.resolved.warnings, *two.resolved.warnings),
    )


def _options(
    rtol: float | None, atol: float | None, stats: bool, sort: str, max_memory: str | int
) -> DiffOptions:
    from shardkit.operations.diff.values import Tolerance

    if sort not in SORTS:
        raise UsageError(f"--sort {escape(sort)!r} is not one of {', '.join(SORTS)}")
    for option, number in (("--rtol", rtol), ("--atol", atol)):
        if number is not None and not (math.isfinite(number) and number >= 0):
            raise UsageError(f"{option} must be a number of at least 0, not {number}")
    budget = parse_size(max_memory)
    if budget < _MIN_MEMORY:
        raise UsageError(f"--max-memory must be at least 2MiB, not {max_memory}")
    is_exact = rtol is None and atol is None
    tolerance = None if is_exact else Tolerance(rtol or 0.0, atol or 0.0)
    is_sorted = sort == "difference"
    return DiffOptions(
        tolerance=tolerance, stats=stats or is_sorted, is_sorted=is_sorted, max_memory_bytes=budget
    )


def _compare_all(
    a: Side, b: Side, options: DiffOptions, progress: Progress
) -> tuple[list[TensorDiff], RoundedSide | None, int]:
    """Return what was found of each name, the side that is rounded, and the number of bytes read."""
    every = pairs(a, b)
    total = sum(a.entry(pair.name).nbytes for pair in every if _is_read(a, b, pair))
    with ExitStack() as stack:
        files = [stack.enter_context(SourceFiles(side.catalog.files)) for side in (a, b)]
        readers = [stack.enter_context(each.reader()) for each in files]
        comparing = _Comparing(a, b, readers[0], readers[1], options, progress)
        progress.start(total, "diff")
        try:
            ties = ({**find_ties(a, b)}, {**find_ties(b, a)})
            found = [comparing.pair(pair, ties) for pair in every]
        finally:
            progress.finish()
        for each in files:
            each.check_unchanged()
    return *_rounded_one_way(found, comparing.roundings), comparing.read_bytes


def _rounded_one_way(
    found: list[TensorDiff], roundings: Mapping[str, Roundings]
) -> tuple[list[TensorDiff], RoundedSide | None]:
    """Mark tensors "rounded" in one direction: that of most of them, or else that of the stored dtypes.

    Args:
        found: of every name.
        roundings: by name, of those that are equal after rounding.

    Returns:
        The same tensors in the same order, and the side whose values are rounded; None where none are.
    """
    from shardkit.operations.diff.values import ROUNDED_TO

    if not roundings:
        return found, None
    tensors = {tensor.name: tensor for tensor in found}

    def stored(name: str, side: RoundedSide) -> str | None:
        return tensors[name].dtype_a if side == "a" else tensors[name].dtype_b

    def votes(side: RoundedSide) -> tuple[int, int]:
        holding = [(name, dtype) for name, each in roundings.items() for one, dtype in each if one == side]
        told = sum(stored(name, side) == dtype.name for name, dtype in holding)
        return len({name for name, _ in holding}), told

    sides: tuple[RoundedSide, ...] = ("b", "a")
    side = max(sides, key=votes)
    for name, each in roundings.items():
        holding = [dtype for dtype in ROUNDED_TO if (side, dtype) in each]
        if holding:
            dtype = max(holding, key=lambda dtype: dtype.name == stored(name, side))
            tensors[name] = replace(
                tensors[name], status="rounded", rounded_to=dtype.name, num_flushed=each[side, dtype]
            )
    return list(tensors.values()), side


def _is_read(a: Side, b: Side, pair: Pair) -> bool:
    return pair.in_a and pair.in_b and a.entry(pair.name).shape == b.entry(pair.name).shape


class _Comparing:
    """Compares pair after pair."""

    def __init__(
        self, a: Side, b: Side, left: Reader, right: Reader, options: DiffOptions, progress: Progress
    ) -> None:
        self._a, self._b, self._left, self._right = a, b, left, right
        self._options, self._progress = options, progress
        self.read_bytes = 0
        self.roundings: dict[str, Roundings] = {}
        """By name, of tensors that are equal after rounding in either direction, or both."""

    def pair(self, pair: Pair, ties: tuple[dict[str, str], dict[str, str]]) -> TensorDiff:
        """Compare what both sides have under a name."""
        name = pair.name
        if not (pair.in_a and pair.in_b):
            kept = ties[0 if pair.in_a else 1].get(name)
            alone: Status = "only_a" if pair.in_a else "only_b"
            return self._describe(pair, "tied" if kept is not None else alone, tied_to=kept)
        if not _is_read(self._a, self._b, pair):
            return self._describe(pair, "shape")
        measure = self._measure(name)
        entry, status = self._a.entry(name), self._status(name, measure)
        if status in ("dtype", "values") and self._is_rounded(name, measure):
            self.roundings[name] = measure.roundings
        return self._describe(
            pair,
            status,
            num_changed=measure.num_changed,
            num_outside=measure.num_outside if self._options.tolerance is not None else None,
            num_off_rounding=measure.num_off_rounding,
            first_changed=_unravel(measure.first_changed, entry.shape),
            stats=measure.stats() if measure.num_changed else None,
        )

    def _status(self, name: str, measure: Measure) -> Status:
        if self._a.entry(name).dtype is not self._b.entry(name).dtype:
            return "dtype"
        if not measure.num_changed:
            return "equal"
        return "close" if self._options.tolerance is not None and not measure.num_outside else "values"

    def _is_rounded(self, name: str, measure: Measure) -> bool:
        """True where one side is the other rounded; elements skipped so far, in equal bands, are read again now."""
        left_over = measure.num_unchecked or 0
        if left_over and measure.may_be_rounded:
            for left, right in self._bands(name, measured=self._is_measured(name)):
                measure.check_rounding(left, right)
                left_over -= len(left) // self._a.entry(name).dtype.itemsize
                if left_over <= 0 or not measure.may_be_rounded:
                    break
        return measure.may_be_rounded

    def _measure(self, name: str) -> Measure:
        """Compare two tensors of one shape; those that differ are read again where figures are wanted."""
        from shardkit.operations.diff.values import Measure

        one, two, options = self._a.entry(name).dtype, self._b.entry(name).dtype, self._options
        if options.stats and one is two and not self._has_difference(name):
            return Measure(one, two, tolerance=None, stats=False)
        measure = Measure(one, two, tolerance=options.tolerance, stats=options.stats)
        for left, right in self._bands(name, measured=self._is_measured(name)):
            measure.add(left, right)
            self._progress.advance(len(left))
        return measure

    def _is_measured(self, name: str) -> bool:
        """True where more than bytes are compared, in shorter bands."""
        is_same = self._a.entry(name).dtype is self._b.entry(name).dtype
        return self._options.stats or self._options.tolerance is not None or not is_same

    def _has_difference(self, name: str) -> bool:
        from shardkit.operations.diff.values import have_same_bytes

        done = 0
        for left, right in self._bands(name, measured=False):
            if not have_same_bytes(left, right):
                return True
            done += len(left)
        self._progress.advance(done)
        return False

    def _bands(self, name: str, *, measured: bool) -> Iterator[tuple[memoryview, memoryview]]:
        """Yield both sides' bytes in step."""
        one, two = self._a.entry(name), self._b.entry(name)
        limit = self._options.max_elements(max(one.dtype.itemsize, two.dtype.itemsize), measured=measured)
        lefts, rights = self._a.bands(name, self._left, limit), self._b.bands(name, self._right, limit)
        for left, right in zip(lefts, rights, strict=True):
            self.read_bytes += len(left) + len(right)
            yield left, right

    def _describe(self, pair: Pair, status: Status, **found: Any) -> TensorDiff:
        one = self._a.entry(pair.name) if pair.in_a else None
        two = self._b.entry(pair.name) if pair.in_b else None
        return TensorDiff(
            name=pair.name,
            status=status,
            stored_a=one.fqn if one else None,
            stored_b=two.fqn if two else None,
            dtype_a=one.dtype.name if one else None,
            dtype_b=two.dtype.name if two else None,
            shape_a=one.shape if one else None,
            shape_b=two.shape if two else None,
            **found,
        )


def _unravel(flat: int | None, shape: Shape) -> Shape | None:
    """Return the index of an element that is counted row-major."""
    if flat is None:
        return None
    index: list[int] = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return tuple(reversed(index))
