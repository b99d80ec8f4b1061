"""diff: compare two checkpoints of any formats, tensor by tensor, in bounded memory.

    two checkpoints -> `sides`: tensors paired by the Hub's names, both plain, in one form
                    -> bands of both sides, read in step -> `values`: count and measure the differences

A *side* is one of the two checkpoints, A or B. A *band* is a run of consecutive elements of a tensor, in row-major order,
that fits into memory; both sides are cut into the same bands. OSFT, a method of training, splits a weight into *factors*:
the frozen ones (`HIGH`, the largest singular directions) never change in a training, only the others are trained. A side
that stores a weight as factors is *folded*, that is, multiplied out, before it is compared with a plain one.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from shardkit.core.dtypes import BY_NAME, DType, short_dtype
from shardkit.core.factored import HIGH, factor_of
from shardkit.core.keywords import keywords_of
from shardkit.core.regions import Shape
from shardkit.core.result import DrawnResult
from shardkit.core.text import count, listed, parse_size
from shardkit.core.threads import progress_for
from shardkit.files import storage
from shardkit.files.links import reading_as
from shardkit.keys.names import natural
from shardkit.layout.traced import one_process
from shardkit.operations.diff.experts import num_fused
from shardkit.operations.diff.options import DiffOptions
from shardkit.operations.diff.sides import find_ties, open_sides
from shardkit.operations.resolve import ChosenCheckpoint, choose_checkpoint
from shardkit.transfer.codecs.convert import make_converter
from shardkit.transfer.plan import chunk_ranges
from shardkit.transfer.sources import Reader, SourceFiles

if TYPE_CHECKING:
    from shardkit.operations.diff.values import Measure, TensorStats

# Largest relative error at which factors, multiplied out, still count as the weight itself. Rounding in the decomposition
# alone gives 4e-8 if it is computed in float64, and 2e-6 in float32, as mini_trainer does.
_MAX_ROUNDING_ERROR = 1e-5

Status = Literal["equal", "close", "tied", "folded", "only_a", "only_b", "shape", "dtype", "values"]

SYMBOLS: dict[Status, str] = {
    "equal": "=",
    "close": "=",
    "tied": "=",
    "folded": "~",
    "only_a": "-",
    "only_b": "+",
    "shape": "*",
    "dtype": "*",
    "values": "*",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """The comparison of one tensor; `name` is its name in the model."""

    name: str
    status: Status
    """"equal": the same bytes; "close": within the tolerance; "tied": only on one side, where it equals a tensor that
    both have; "folded": stored as factors of OSFT on one side, and equal within the accuracy of factors, 1e-5 of the
    weight's norm; "only_a"; "only_b"; "shape", "dtype" or "values": these differ."""
    stored_a: str | None
    """Its name in A; None if A lacks it."""
    stored_b: str | None
    dtype_a: str | None
    dtype_b: str | None
    shape_a: Shape | None
    """In elements."""
    shape_b: Shape | None
    num_changed: int | None = None
    """Number of elements whose bits differ, or, with two dtypes, whose values differ. None if nothing was compared."""
    num_outside: int | None = None
    """Number of elements beyond the tolerance; None without a tolerance."""
    first_changed: Shape | None = None
    """Index of the first of the `num_changed` elements."""
    tied_to: str | None = None
    """For "tied": the name that both sides have."""
    relative_error: float | None = None
    """|a - b| / max(|a|, |b|) of the tensors as vectors (Euclidean norms). None if the tensors are equal, contain values
    that are not finite, or are all zero."""
    experts: tuple[float, ...] | None = None
    """For fused experts that differ: the `relative_error` of each expert, or else its share of elements that differ; 0 for
    an expert that does not differ."""
    stats: TensorStats | None = None
    """Statistics. None if they were not requested, if no elements differ, or if the dtypes do not encode numbers."""

    @property
    def symbol(self) -> str:
        """ "=", "~" (equal after folding), "-" (only in A), "+" (only in B) or "*"."""
        return SYMBOLS[self.status]

    @property
    def is_difference(self) -> bool:
        """True unless A and B are equal, at least after folding."""
        return self.symbol not in "=~"

    @property
    def num_elements(self) -> int:
        """Number of elements of A's tensor, or of B's if A lacks it."""
        return prod((self.shape_a if self.shape_a is not None else self.shape_b) or ())

    @property
    def rows(self) -> tuple[int, int] | None:
        """(rows of A, rows of B) if shapes differ only in the number of rows, as with another vocabulary; else None."""
        one, two = self.shape_a or (), self.shape_b or ()
        is_matrix = len(one) > 1 and one[1:] == two[1:] and one != two
        return (one[0], two[0]) if is_matrix else None

    @property
    def share_changed(self) -> float | None:
        """`num_changed` divided by `num_elements`."""
        if self.num_changed is None:
            return None
        return self.num_changed / self.num_elements if self.num_elements else 0.0

    @property
    def magnitude(self) -> tuple[float, float]:
        """Sort key for how much the tensor differs: infinite if it cannot be compared, else relative error and share."""
        if not self.is_difference:
            return (0.0, 0.0)
        if self.num_changed is None:
            return (float("inf"), 0.0)
        share = self.share_changed or 0.0
        if self.stats is None:
            return (self.relative_error or 0.0, share)
        if self.stats.num_nonfinite:
            return (2.0, share)  # more than any relative error of finite tensors
        return (self.stats.relative_error or 0.0, share)

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
        return {"symbol": self.symbol, **asdict(self), "share_changed": self.share_changed}


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffResult(DrawnResult):
    """How two checkpoints differ."""

    a: str
    """The argument `a`."""
    b: str
    resolved_a: str
    """The checkpoint that was used for A."""
    resolved_b: str
    format_a: str
    """As `shardkit.inspect` names it."""
    format_b: str
    is_equal: bool
    """True if no tensor differs, and none had to be folded to be equal."""
    as_dtype: str | None
    """"bf16", "fp16" or "fp32": A's tensors were rounded to it where B's have it. None if nothing was rounded."""
    rtol: float | None
    """The tolerance; None if bits were compared."""
    atol: float | None
    tensors: tuple[TensorDiff, ...]
    """All tensors that were compared, including equal ones."""
    read_bytes: int
    """Bytes that were read of both sides."""
    elapsed_s: float
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    """Newer, or possibly newer, checkpoints of a run directory that were skipped."""

    def count(self, *statuses: Status) -> int:
        """Return how many tensors have one of these statuses."""
        return sum(tensor.status in statuses for tensor in self.tensors)

    @property
    def differences(self) -> tuple[TensorDiff, ...]:
        """The tensors that differ."""
        return tuple(tensor for tensor in self.tensors if tensor.is_difference)

    def headline(self) -> str:
        """Return the verdict as one line: equal, or how many tensors differ."""
        if number := len(self.differences):
            return f"{number} of {count(len(self.tensors), 'tensor')} differ"
        ways = [] if self.rtol is None else ["within the tolerance"]
        ways += [] if self.is_equal else ["after folding"]
        ways += [] if self.as_dtype is None else [f"with A rounded to {self.as_dtype}"]
        return " ".join(["equal", *ways])

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "tensors"}
        counts = {f"num_{status}": self.count(status) for status in SYMBOLS}
        return {
            **plain,
            "num_tensors": len(self.tensors),
            **counts,
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "tensors": [tensor.to_json() for tensor in self.tensors],
        }


@keywords_of(DiffOptions, reading_as)
@one_process()
def diff(options: DiffOptions) -> DiffResult:
    """Compare two checkpoints, bit by bit or within a tolerance.

    Tensors are paired by the names that their model has on the Hub, whatever names the trainers use and however the
    tensors are chunked. Tied weights may be stored once on one side and twice on the other.

    Args:
        a: a checkpoint of any format, or a run directory, whose newest complete checkpoint is used.
        b: another.
        rtol: elements are equal if |a - b| <= atol + rtol * |b|, or if both are NaN. Without `rtol` and `atol`, bits are
            compared.
        atol: see `rtol`. If only one of the two is given, the other is 0.
        as_dtype: "bf16", "fp16" or "fp32": before the comparison, A's tensors are rounded to it where B's have it.
        stats: compute statistics of how much tensors differ.
        include: globs over the names in the result; only these tensors are compared. Each glob must match.
        exclude: globs over the same names; these tensors are not compared. Each glob must match.
        all_tensors: also compare all other tensors, such as the optimizer's, under their stored names.
        strict: raise warnings as errors, e.g. that the newest checkpoint of a run directory was skipped.
        sort: "name", or "difference" for the largest differences first, which needs statistics.
        max_memory: bytes for all buffers, as a number or as "512MiB".
        follow_links: follow links that lead out of the checkpoint's directory, and read the files behind them.
            Weight files of a Hub model are read through links in any case.
        progress: called as bytes of A are compared. By default, terminals and notebooks show a bar; False shows none.

    Raises:
        UsageError: the value of an option is not allowed, or a glob matches nothing.
        SourceError: one of the checkpoints is damaged or incomplete.
        IntegrityError: a file changed while it was read.
        ResourceError: disk or permission.
    """
    options.check()
    sources = (
        choose_checkpoint(options.a, strict=options.strict),
        choose_checkpoint(options.b, strict=options.strict),
    )
    return Comparison(sources, options).compare()


class Comparison:
    """Compares two checkpoints.

    Args:
        sources: the checkpoints; if one was opened already, it is not opened again.
        options: what to compare, and how.

    Raises:
        UsageError, SourceError, ResourceError: as `diff`.
    """

    def __init__(self, sources: tuple[ChosenCheckpoint, ChosenCheckpoint], options: DiffOptions) -> None:
        self._begun, self._options = time.monotonic(), options
        self._progress = progress_for(options.progress)
        self._a, self._b, self._notes = open_sides(sources, options)
        self._names = sorted({*self._a.names, *self._b.names}, key=natural)
        self._readers: list[Reader] = []
        self._read_bytes = 0  # of both sides

    def compare(self) -> DiffResult:
        """Compare all tensors that both sides have.

        Raises:
            IntegrityError, ResourceError: a file changed while it was read, or cannot be read.
        """
        one, two = sides = self._a, self._b
        names = [name for name in self._names if self._is_read(name)]
        with ExitStack() as stack:
            stack.enter_context(storage.limit_fetched(parse_size(self._options.max_memory) // 2))
            files = [stack.enter_context(SourceFiles(side.catalog.files)) for side in sides]
            self._readers = [stack.enter_context(source.reader()) for source in files]
            num_places = max(
                (sum(side.entry(name).num_chunks for side in sides) for name in names), default=1
            )
            for side, source in zip(sides, files, strict=True):
                source.expect(chunk_ranges(side.catalog, {side.names[name] for name in names}), num_places)
            sizes = (one.entry(name).num_elements * self._dtypes(name)[0].itemsize for name in names)
            self._progress.start(sum(sizes), "diff")
            try:
                is_one_alone = one.names.keys() != two.names.keys()
                ties = {**find_ties(one, two), **find_ties(two, one)} if is_one_alone else {}
                tensors = [
                    self._compare(name) if self._is_read(name) else self._describe_unread(name, ties)
                    for name in self._names
                ]
            finally:
                self._progress.finish()
            for source in files:
                source.check_unchanged()
        return self._result(tensors)

    def _is_read(self, name: str) -> bool:
        """True if both sides have a tensor of this name, in the same shape, so that its bytes are read."""
        is_in_both = name in self._a.names and name in self._b.names
        return is_in_both and self._a.entry(name).shape == self._b.entry(name).shape

    def _describe_unread(self, name: str, ties: Mapping[str, str]) -> TensorDiff:
        """Return the result for a tensor that `_compare` does not get: only one side has it, or the shapes differ.

        Args:
            name: its name in the model.
            ties: name that only one side has -> the name of an equal tensor that both sides have.
        """
        in_a, kept = name in self._a.names, ties.get(name)
        if in_a and name in self._b.names:
            return self._describe(name, "shape")
        alone: Status = "only_a" if in_a else "only_b"
        return self._describe(name, alone if kept is None else "tied", tied_to=kept)

    def _result(self, tensors: list[TensorDiff]) -> DiffResult:
        options, one, two = self._options, self._a, self._b
        if options.sort == "difference":
            tensors.sort(key=lambda tensor: tensor.magnitude, reverse=True)
        return DiffResult(
            a=one.given_path,
            b=two.given_path,
            resolved_a=one.resolved.path,
            resolved_b=two.resolved.path,
            format_a=one.checkpoint.format,
            format_b=two.checkpoint.format,
            is_equal=all(tensor.symbol == "=" for tensor in tensors),
            as_dtype=None if options.target is None else short_dtype(options.target.name),
            rtol=options.tolerance.rtol if options.tolerance else None,
            atol=options.tolerance.atol if options.tolerance else None,
            tensors=tuple(tensors),
            read_bytes=self._read_bytes,
            elapsed_s=round(time.monotonic() - self._begun, 3),
            notes=(*self._notes, *_dtype_notes(tensors), *_frozen_notes(tensors)),
            warnings=(*one.resolved.warnings, *two.resolved.warnings),
        )

    def _compare(self, name: str) -> TensorDiff:
        """Compare a tensor that both sides have in the same shape."""
        measure = self._measure(name)
        entry, status = self._a.entry(name), self._status(name, measure)
        relative_error = self._relative_error(name, measure)
        if status in ("dtype", "values") and self._is_factors(name) and _is_folded_well(measure):
            status = "folded"
        return self._describe(
            name,
            status,
            num_changed=measure.num_changed,
            num_outside=measure.num_outside if self._options.tolerance is not None else None,
            first_changed=_unravel(measure.first_changed, entry.shape),
            relative_error=relative_error,
            experts=measure.of_experts() if SYMBOLS[status] == "*" else None,
            stats=measure.stats() if measure.num_changed and self._options.takes_stats else None,
        )

    def _relative_error(self, name: str, measure: Measure) -> float | None:
        """Return how far two tensors are apart, as in `TensorDiff`.

        Norms are summed up only from the first difference on, as most tensors are equal. For a tensor that differs, the
        equal bands before that are read again, and added.
        """
        norms = measure.norms
        if not measure.num_changed or norms is None:
            return None
        if norms.num_missing:
            first = 0
            for left_bytes, right_bytes in self._bands(name, measured=self._is_measured(name)):
                if first >= norms.num_missing:
                    break
                norms.add(left_bytes, right_bytes, first)
                first += len(left_bytes) // self._dtypes(name)[0].itemsize
        return norms.relative_error()

    def _describe(self, name: str, status: Status, **fields: Any) -> TensorDiff:
        """Return the result for a tensor: the facts from the catalogs, and `fields`, which are those from its bytes."""
        one, two = (side.entry(name) if name in side.names else None for side in (self._a, self._b))
        return TensorDiff(
            name=name,
            status=status,
            stored_a=one.fqn if one else None,
            stored_b=two.fqn if two else None,
            dtype_a=one.dtype.name if one else None,
            dtype_b=two.dtype.name if two else None,
            shape_a=one.shape if one else None,
            shape_b=two.shape if two else None,
            **fields,
        )

    def _status(self, name: str, measure: Measure) -> Status:
        """Return the status of a tensor whose bytes were compared. Tensors of two dtypes count as different."""
        one, two = self._dtypes(name)
        if one is not two:
            return "dtype"
        if not measure.num_changed:
            return "equal"
        return "close" if self._options.tolerance is not None and not measure.num_outside else "values"

    def _measure(self, name: str) -> Measure:
        """Compare two tensors of the same shape.

        For statistics, bytes are compared first, and only tensors that differ are read a second time and measured.
        """
        from shardkit.operations.diff.values import ExpertSizes, Measure

        (one, two), options = self._dtypes(name), self._options
        is_measured = options.takes_stats or self._is_factors(name)
        if is_measured and one is two and not self._has_difference(name):
            return Measure(one, two, tolerance=None, stats=False)
        entry = self._a.entry(name)
        number = num_fused(name, entry.shape) or 1
        experts = ExpertSizes(number, entry.num_elements // number)
        measure = Measure(one, two, tolerance=options.tolerance, stats=is_measured, experts=experts)
        for left_bytes, right_bytes in self._bands(name, measured=self._is_measured(name)):
            measure.add(left_bytes, right_bytes)
            self._progress.advance(len(left_bytes))
        return measure

    def _is_measured(self, name: str) -> bool:
        """True if values are computed from the bytes, which needs shorter bands."""
        one, two = self._dtypes(name)
        is_measured = self._options.takes_stats or self._options.tolerance is not None
        return is_measured or one is not two or self._is_factors(name)

    def _is_factors(self, name: str) -> bool:
        """True if at least one side stores factors of this weight, which are folded for the comparison."""
        return self._a.is_folded(name) or self._b.is_folded(name)

    def _has_difference(self, name: str) -> bool:
        """True if the bytes differ. Stops at the first difference, and is faster than measuring, which computes values."""
        from shardkit.operations.diff.values import have_same_bytes

        done = 0
        for left_bytes, right_bytes in self._bands(name, measured=False):
            if not have_same_bytes(left_bytes, right_bytes):
                return True
            done += len(left_bytes)
        self._progress.advance(done)
        return False

    def _dtypes(self, name: str) -> tuple[DType, DType]:
        """Return the dtypes in which A and B are compared: the stored ones, except where A is rounded."""
        one, two = self._a.entry(name).dtype, self._b.entry(name).dtype
        return (two if one.is_convertible and two is self._options.target else one), two

    def _bands(self, name: str, *, measured: bool) -> Iterator[tuple[memoryview, memoryview]]:
        """Yield the bytes of both sides in bands of the same elements."""
        stored, (one, two) = self._a.entry(name).dtype, self._dtypes(name)
        limit = self._options.max_elements(max(stored.itemsize, two.itemsize), measured=measured)
        convert = None if one is stored else make_converter(stored, one)
        sides = zip((self._a, self._b), self._readers, strict=True)
        for left_bytes, right_bytes in zip(
            *(side.bands(name, reader, limit) for side, reader in sides), strict=True
        ):
            self._read_bytes += len(left_bytes) + len(right_bytes)
            if convert is None:
                yield left_bytes, right_bytes
            else:  # A is rounded to B's dtype
                narrow = memoryview(bytearray(len(left_bytes) // stored.itemsize * one.itemsize))
                convert(left_bytes, narrow)
                yield narrow, right_bytes


def _is_folded_well(measure: Measure) -> bool:
    """True if two weights differ by no more than the accuracy of factors."""
    stats = measure.stats()
    return (
        stats is not None
        and not stats.num_nonfinite
        and stats.relative_error is not None
        and stats.relative_error <= _MAX_ROUNDING_ERROR
    )


def _dtype_notes(tensors: Sequence[TensorDiff]) -> Iterator[str]:
    """Yield a hint at `--as` if one side may have the values of the other side, rounded to a narrower dtype."""
    dtypes = Counter((tensor.dtype_a, tensor.dtype_b) for tensor in tensors if tensor.status == "dtype")
    for (a, b), number in dtypes.items():
        one, two = BY_NAME.get(str(a)), BY_NAME.get(str(b))
        if one and two and one.is_convertible and two.is_convertible and one.itemsize != two.itemsize:
            order, narrow = ("A B", two) if two.itemsize < one.itemsize else ("B A", one)
            yield (
                f"{count(number, 'tensor')} {short_dtype(one.name)} in A and {short_dtype(two.name)} in B: "
                f"`diff {order} --as {short_dtype(narrow.name)}` rounds the wider side first"
            )


def _frozen_notes(tensors: Sequence[TensorDiff]) -> Iterator[str]:
    """Yield a note on whether the frozen factors of two OSFT checkpoints are the same.

    They never change in a training, so checkpoints of one training have the same.
    """
    differs: dict[str, bool] = {}
    for tensor in tensors:
        if tensor.name.endswith(HIGH) and (path := factor_of(tensor.name)) is not None:
            differs[path] = differs.get(path, False) or tensor.is_difference
    changed = [path for path, is_changed in differs.items() if is_changed]
    if changed:
        yield (
            f"frozen factors differ in {len(changed)} of {count(len(differs), 'weight')}, so these are two "
            f"trainings: {listed(changed)}"
        )
    elif differs:
        yield f"frozen factors are the same in all of {count(len(differs), 'weight')}"


def _unravel(flat: int | None, shape: Shape) -> Shape | None:
    """Return the index of an element from its row-major number: 5 in shape (2, 3) -> (1, 2)."""
    if flat is None:
        return None
    index: list[int] = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return tuple(reversed(index))
